"""A new activation or format is its row in the front and one function of Triton's; with one alone it is refused."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse import Activation, backends, types
from moefuse.ops._core import select
from moefuse.quant import formats
from moefuse.quant.tensor import QuantTensor
from moefuse.testing import cases
from moefuse.testing.compare import difference

pytest.importorskip("triton")
import triton
import triton.language as tl

from moefuse.backends.triton.activations import ACTIVATIONS
from moefuse.backends.triton.formats.blocks import DECODERS

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]
if not TARGETS:
    pytest.skip("Triton runs neither here nor in its interpreter", allow_module_level=True)
BACKEND, DEVICE = TARGETS[0]


@triton.jit
def toy_half(g, u, numbers, GATED: tl.constexpr, FINE: tl.constexpr):  # noqa: ARG001
    _, limit = numbers
    value = 0.5 * g + limit
    if GATED:
        return value * u, 0.5 * u, value
    else:  # noqa: RET505  to Triton's compiler only an else is dead code
        return value, 0.5 + 0.0 * g, value


@triton.jit
def toy(block_ptr, run):  # noqa: ARG001
    byte = tl.load(block_ptr[:, None] + tl.arange(0, 32)[None, :]).to(tl.int32)
    return 0.25 * tl.where(byte < 128, byte, byte - 256).to(tl.float32)


@pytest.fixture
def _listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The front knows them; 32 values of the format lie in 32 bytes, quarters each."""
    monkeypatch.setattr(types, "ACTIVATION_KINDS", (*types.ACTIVATION_KINDS, "toy_half"))
    row = dataclasses.replace(formats.FORMATS["Q8_0"], name="TOY", ggml=99, nbytes=32, scales=())
    monkeypatch.setitem(formats.FORMATS, "TOY", row)
    select.forget()
    yield
    select.forget()


def rand(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng).to(DEVICE)


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("gated", [True, False])
def test_a_toy_activation(gated: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradient."""
    monkeypatch.setitem(ACTIVATIONS, "toy_half", toy_half)
    leaf = rand(rng, 3, 10).requires_grad_()
    out = moefuse.glu(leaf, Activation("toy_half", gated=gated, limit=3.0), backend=BACKEND)
    wide = leaf.detach().cpu().double().requires_grad_()
    want = (0.5 * wide[:, :5] + 3.0) * wide[:, 5:] if gated else 0.5 * wide + 3.0
    assert difference(out.cpu(), want).worst < 1e-6
    d = torch.randn(out.shape, generator=rng)
    (got,), (goal,) = torch.autograd.grad(out, leaf, d.to(DEVICE)), torch.autograd.grad(want, wide, d.double())
    assert difference(got.cpu(), goal).worst < 1e-6


@pytest.mark.usefixtures("_listed")
@pytest.mark.parametrize("T", [1, 6], ids=["decode", "tiles"])
def test_both_in_experts(T: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "toy_half", toy_half)
    module = next(row for row in backends.BACKENDS if row.name == BACKEND).load()
    monkeypatch.setattr(module, "FORMATS", module.FORMATS | {"TOY"})
    monkeypatch.setitem(DECODERS, "TOY", toy)

    def blocks(*shape: int) -> QuantTensor:
        return QuantTensor(torch.randint(256, shape, generator=rng, dtype=torch.uint8).to(DEVICE), "TOY", exact=True)

    x, gate_up, down = rand(rng, T, 64), blocks(1, 64, 64), blocks(1, 64, 32)
    ids, weights = torch.zeros(T, 1, dtype=torch.int32, device=DEVICE), torch.ones(T, 1, device=DEVICE)
    got = moefuse.experts(x, ids, weights, gate_up, down, activation="toy_half", backend=BACKEND)
    up_rows, down_rows = (0.25 * t.blocks[0].cpu().view(torch.int8).double() for t in (gate_up, down))
    gate_proj, up = (x.cpu().double() @ up_rows.T).chunk(2, -1)
    assert difference(got.cpu(), (0.5 * gate_proj + 7.0) * up @ down_rows.T).worst < 2e-6


@pytest.mark.usefixtures("_listed")
def test_a_row_without_its_function_is_refused_by_name() -> None:
    x = torch.ones(2, 32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="triton: no kernels for the activation 'toy_half', only for silu"):
        moefuse.glu(x, "toy_half", backend=BACKEND)
    with pytest.raises(NotImplementedError, match="triton: no kernels for the format 'TOY', only for Q8_0"):
        DECODERS["TOY"]
    weight = QuantTensor(torch.zeros(1, 8, 32, dtype=torch.uint8, device=DEVICE), "TOY")
    plan = moefuse.plan(torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), 1, backend=BACKEND)
    with pytest.raises(ValueError, match="it has no kernel for TOY"):
        moefuse.grouped_linear(x, weight, plan, gather=True, scatter=True, backend=BACKEND)
