"""An activation, a score, a format or a field of a rule is one row in the front and one function in the reference."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import moefuse
from moefuse import Activation, QuantTensor, Routing, types
from moefuse.ops import glu, route
from moefuse.ops._core import schema
from moefuse.ops._core.schema import Signature
from moefuse.quant import arrange, blocks, formats
from moefuse.testing.cases import runnable
from moefuse.testing.compare import difference

NATIVE = [target for target in runnable() if target[0] == "cpu"]


@pytest.fixture
def _toy_activation(monkeypatch):
    monkeypatch.setattr(types, "ACTIVATION_KINDS", (*types.ACTIVATION_KINDS, "toy"))


@pytest.mark.usefixtures("_toy_activation")
@pytest.mark.parametrize("gated", [True, False])
def test_a_toy_activation(gated, monkeypatch):
    row = glu.Kind(
        lambda g, u, activation: activation.alpha * g * (1 if u is None else u),
        lambda g, u, activation: (
            torch.full_like(g, activation.alpha) * (1 if u is None else u),
            None if u is None else activation.alpha * g,
        ),
    )
    monkeypatch.setitem(glu.KINDS, "toy", row)
    x = torch.randn(3, 8, requires_grad=True)
    out = moefuse.glu(x, Activation("toy", gated=gated, alpha=3.0), backend="reference")
    want = 3 * x[:, :4] * x[:, 4:] if gated else 3 * x
    assert_close(out, want)
    d = torch.randn(out.shape)
    assert_close(*(torch.autograd.grad(y, x, d)[0] for y in (out, want)))


@pytest.mark.skipif(not NATIVE, reason="the native library was not built")
@pytest.mark.usefixtures("_toy_activation")
def test_an_activation_that_is_not_in_the_library_is_named():
    with pytest.raises(NotImplementedError, match="cpu: no kernels for the activation 'toy', only for silu"):
        moefuse.glu(torch.ones(2, 4), "toy", backend="cpu")


def test_a_toy_score(monkeypatch):
    """Scores that are the cubes of logits; like every score they rise with them."""
    monkeypatch.setattr(types, "SCORES", (*types.SCORES, "toy"))
    monkeypatch.setitem(types._NORM_FLOOR, "toy", 0.0)
    row = route.Score(lambda logits: logits**3, lambda grad, logits, _: 3 * logits**2 * grad)
    monkeypatch.setitem(route.SCORES, "toy", row)
    logits = torch.tensor([[1.0, 3.0, 2.0]], requires_grad=True)
    weights, ids = moefuse.route(logits, Routing(top_k=2, score="toy", renormalize=False), backend="reference")
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[27.0, 8.0]]
    assert torch.autograd.grad(weights.sum(), logits)[0].tolist() == [[0.0, 27.0, 12.0]]
    if NATIVE:
        with pytest.raises(NotImplementedError, match="cpu: no kernels for the score 'toy', only for softmax"):
            moefuse.route(logits.detach(), Routing(top_k=2, score="toy"), backend="cpu")


def test_a_toy_format(monkeypatch):
    """32 values in 32 bytes, quarters each."""
    row = dataclasses.replace(formats.FORMATS["Q8_0"], name="TOY", ggml=99, nbytes=32, scales=())
    monkeypatch.setitem(formats.FORMATS, "TOY", row)
    monkeypatch.setitem(arrange.FIELDS, "TOY", (arrange.Field(0, 32),))
    monkeypatch.setitem(blocks.UNPACK, "TOY", lambda q: 0.25 * q.view(torch.int8).float())
    stack = QuantTensor(torch.randint(256, (2, 5, 64), dtype=torch.uint8), "TOY")
    numbers = 0.25 * stack.blocks.view(torch.int8).float()
    assert torch.equal(stack.dequantize(), numbers)
    assert torch.equal(stack.arranged("planes").dequantize(), numbers)
    x, plan = torch.randn(3, 64), moefuse.plan(torch.tensor([[0], [1], [0]]), 2)
    got = moefuse.grouped_linear(x, stack, plan, gather=True, scatter=True, backend="reference")
    want = torch.stack([numbers[e].double() @ x[t].double() for t, e in enumerate((0, 1, 0))])
    assert difference(got, want).worst < 1e-6
    if NATIVE:
        with pytest.raises(ValueError, match=r"backend 'cpu' .* cannot run this call: it has no kernel for TOY"):
            moefuse.grouped_linear(x, stack, plan, gather=True, scatter=True, backend="cpu")


@dataclasses.dataclass(frozen=True)
class WarmRouting(Routing):
    """A rule with one more field."""

    temperature: float | None = None


def warm(x: Tensor, routing: WarmRouting) -> Tensor:
    return x / (routing.temperature or 1.0)


def test_a_toy_field_of_a_rule_travels_by_itself():
    """In the schema, flat, and back in the rule."""
    signature = Signature(warm, with_backend=True)
    assert signature.schema("warm").endswith("bool renormalize_after_scale, float? temperature) -> Tensor")
    rule = WarmRouting(top_k=2, scale=2.5, temperature=0.5)
    flat = signature.flatten((None, torch.ones(1), rule))
    assert flat[-1] == 0.5
    _, x, again = signature.rebuild(flat)
    assert again == rule
    assert warm(x, again) == 2
    assert WarmRouting not in schema._MAKERS  # nothing but the type itself was needed
