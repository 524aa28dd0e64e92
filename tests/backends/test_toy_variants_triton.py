"""A new activation or format is its row in the front and one function of Triton's; with one alone it is refused."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse import Activation, backends, types
from moefuse.ops._core import select
from moefuse.quant import arrange, formats
from moefuse.quant.tensor import QuantTensor
from moefuse.testing import cases
from moefuse.testing.compare import difference

pytest.importorskip("triton")
import triton
import triton.language as tl

from moefuse.backends.triton.activations import ACTIVATIONS
from moefuse.backends.triton.formats.blocks import DECODERS, KINDS, Kind

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
def toy(run, strip, i):  # noqa: ARG001
    scale = 0.25 * run.to(tl.float32)
    return scale, 0, scale, 0


@pytest.fixture
def _listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The front knows them; 32 values of the format lie in 33 bytes, the first how many quarters the others are."""
    monkeypatch.setattr(types, "ACTIVATION_KINDS", (*types.ACTIVATION_KINDS, "toy_half"))
    row = dataclasses.replace(formats.FORMATS["Q8_0"], name="TOY", ggml=99, nbytes=33, scales=())
    monkeypatch.setitem(formats.FORMATS, "TOY", row)
    monkeypatch.setitem(arrange.FIELDS, "TOY", (arrange.Field(1, 33), arrange.Field(0, 1)))
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
    monkeypatch.setitem(KINDS, "TOY", Kind(8, run_bytes=1))
    monkeypatch.setitem(DECODERS, "TOY", toy)

    def blocks(*shape: int) -> QuantTensor:
        made = torch.randint(256, shape, generator=rng, dtype=torch.uint8)
        made[..., ::33] %= 8
        return QuantTensor(made, "TOY", exact=True).to(DEVICE)

    def numbers(stack: QuantTensor) -> Tensor:
        cut = stack.to("cpu").blocks[0].view(64, -1, 33)
        return (0.25 * cut[..., :1].double() * cut[..., 1:].view(torch.int8).double()).flatten(1)

    x, gate_up, down = rand(rng, T, 64), blocks(1, 64, 66), blocks(1, 64, 33)
    ids, weights = torch.zeros(T, 1, dtype=torch.int32, device=DEVICE), torch.ones(T, 1, device=DEVICE)
    got = moefuse.experts(x, ids, weights, gate_up, down, activation="toy_half", backend=BACKEND)
    up_rows, down_rows = numbers(gate_up), numbers(down)
    gate_proj, up = (x.cpu().double() @ up_rows.T).chunk(2, -1)
    assert difference(got.cpu(), (0.5 * gate_proj + 7.0) * up @ down_rows.T).worst < 2e-6


@pytest.mark.usefixtures("_listed")
def test_a_row_without_its_function_is_refused_by_name() -> None:
    x = torch.ones(2, 32, device=DEVICE)
    with pytest.raises(NotImplementedError, match="triton: no kernels for the activation 'toy_half', only for silu"):
        moefuse.glu(x, "toy_half", backend=BACKEND)
    with pytest.raises(NotImplementedError, match="triton: no kernels for the format 'TOY', only for Q8_0"):
        DECODERS["TOY"]
    weight = QuantTensor(torch.zeros(1, 8, 33, dtype=torch.uint8, device=DEVICE), "TOY")
    plan = moefuse.plan(torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), 1, backend=BACKEND)
    with pytest.raises(ValueError, match="it has no kernel for TOY"):
        moefuse.grouped_linear(x, weight, plan, gather=True, scatter=True, backend=BACKEND)
