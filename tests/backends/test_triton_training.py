"""The Triton backward kernels without a GPU: in the interpreter, against float64, the whole and each piece."""

import pytest
import torch
from ops import oracle
from ops.test_training import F16, agree, gradients, make

from moefuse import Activation
from moefuse.testing import cases
from moefuse.types import ACTIVATION_KINDS

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]
pytestmark = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])


def compare(given, rule, target, tolerance=oracle.GRADIENT):
    want = gradients(given, rule, "reference", dtype=torch.float64)
    agree(gradients(given, rule, *target), want, tolerance)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("form", ["halves", "interleaved", "apart", "ungated"])
def test_every_activation_and_layout(target, rng, kind, form):
    activation = Activation(kind, gated=form != "ungated", limit=30.0)
    layout = "interleaved" if form == "interleaved" else "halves"
    compare(*make(rng, 5, 3, activation=activation, layout=layout, apart=form == "apart"), target)


@pytest.mark.parametrize(("T", "E", "H", "I", "top_k"), [(1, 4, 32, 16, 2), (40, 3, 33, 65, 3), (4, 9, 70, 9, 3)])
def test_sizes(target, rng, T, E, H, I, top_k):
    compare(*make(rng, T, E, H, I, top_k), target)


def test_float16(target, rng):
    compare(*make(rng, 20, 4, 64, 48, 3, torch.float16), target, F16)
