"""A new activation or format is its row in the front and one function in a shader; what has not both is refused."""

import dataclasses
import importlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from metal_target import TARGET, simulated
from torch import Tensor

import moefuse
from moefuse import Activation, Routing, types
from moefuse.backends import metal
from moefuse.backends.metal import codes, launch, shaders
from moefuse.quant import formats
from moefuse.quant.tensor import QuantTensor
from moefuse.testing.compare import Tolerance, difference
from moefuse.types import Router

BACKEND, DEVICE = TARGET
Add = Callable[[str, str, str], None]
F32 = Tolerance(1e-6, 1e-6, "f32 inside")
TOY_ACTIVATION = """
inline Glu glu_toy(GluInputs in) {
    return times_up(ValueAndDerivative{0.5f * in.gate_proj + in.limit, 0.5f}, in.up);
}
"""
TOY_FORMAT = """
inline float4 decode_TOY(device const uchar* block, int at) {
    float4 found = float4(0.0f);
    for (int i = 0; i < 4; ++i) found[i] = 0.25f * float(signed_byte(block[at + i]));
    return found;
}
"""


def read_again() -> None:
    """What the backend has read from its shaders when it was loaded, and what it has compiled of them."""
    importlib.reload(codes)
    launch.source.cache_clear()
    launch._kernel.cache_clear()


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Put a function into a shader, before another one."""
    monkeypatch.setattr(shaders, "HOME", shutil.copytree(shaders.HOME, tmp_path / "shaders"))

    def add(shader: str, function: str, before: str) -> None:
        path = shaders.HOME / f"{shader}.metal"
        path.write_text(path.read_text().replace(before, function + before, 1))
        read_again()
        monkeypatch.setattr(metal, "FORMATS", frozenset(codes.BLOCKS))

    with simulated():
        yield add
        monkeypatch.undo()
        read_again()


def close(got: Tensor, want: Tensor) -> None:
    gap = difference(got, want)
    assert gap.within(F32), f"worst {gap.worst:.3g}, rms {gap.rms:.3g}; {gap.where}"


def rand(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng).to(DEVICE)


@pytest.fixture
def _toy_activation(add: Add, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "ACTIVATION_KINDS", (*types.ACTIVATION_KINDS, "toy"))
    add("activation", TOY_ACTIVATION, "inline float clamped_up(")


@pytest.mark.usefixtures("_toy_activation")
@pytest.mark.parametrize("gated", [True, False])
def test_a_toy_activation(gated: bool, rng: torch.Generator) -> None:
    """Value and gradient, gated and not."""
    leaf = rand(rng, 3, 10).requires_grad_()
    out = moefuse.glu(leaf, Activation("toy", gated=gated, limit=3.0), backend=BACKEND)
    wide = leaf.detach().cpu().double().requires_grad_()
    want = 0.5 * wide[:, :5] * wide[:, 5:] + 3.0 * wide[:, 5:] if gated else 0.5 * wide + 3.0
    close(out, want)
    d = torch.randn(out.shape, generator=rng)
    close(torch.autograd.grad(out, leaf, d.to(DEVICE))[0], torch.autograd.grad(want, wide, d.double())[0])


@pytest.mark.usefixtures("_toy_activation")
@pytest.mark.parametrize("T", [1, 20], ids=["decode", "tiles"])
def test_a_toy_activation_in_experts(T: int, rng: torch.Generator) -> None:
    x, gate_up, down = rand(rng, T, 8), rand(rng, 1, 12, 8), rand(rng, 1, 8, 6)
    ids, weights = torch.zeros(T, 1, dtype=torch.int32, device=DEVICE), torch.ones(T, 1, device=DEVICE)
    got = moefuse.experts(x, ids, weights, gate_up, down, activation="toy", backend=BACKEND)
    x, gate_up, down = (t.cpu().double() for t in (x, gate_up[0], down[0]))
    gate_proj, up = (x @ gate_up.T).chunk(2, -1)
    close(got, (0.5 * gate_proj + 7.0) * up @ down.T)


def test_an_activation_without_its_function_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "ACTIVATION_KINDS", (*types.ACTIVATION_KINDS, "toy"))
    with simulated(), pytest.raises(NotImplementedError, match="metal: no kernels for the activation 'toy', only for"):
        moefuse.glu(torch.ones(2, 4, device=DEVICE), "toy", backend=BACKEND)


def test_a_function_without_its_activation_is_named_when_the_backend_loads(add: Add) -> None:
    with pytest.raises(ImportError, match="its kernels name toy, which is no activation of this version"):
        add("activation", TOY_ACTIVATION, "inline float clamped_up(")


@dataclasses.dataclass(frozen=True)
class ToyRouting(Routing):
    toy: float = 0.0


def test_a_routing_field_that_the_kernels_do_not_take_is_refused_by_name(rng: torch.Generator) -> None:
    logits = rand(rng, 3, 8)
    with simulated():
        _, ids = metal.OPS["route"](logits, None, None, ToyRouting(2))
        assert torch.equal(ids, metal.OPS["route"](logits, None, None, Routing(2))[1])
        for op, values in (("route", (logits, None, None)), ("gate", (logits, Router(rand(rng, 4, 8))))):
            more = (False,) if op == "gate" else ()
            with pytest.raises(NotImplementedError, match="metal: no kernels for the field 'toy' of Routing"):
                metal.OPS[op](*values, ToyRouting(2, toy=1.0), *more)


def toy_blocks(rng: torch.Generator, *shape: int) -> QuantTensor:
    return QuantTensor(torch.randint(256, shape, generator=rng, dtype=torch.uint8).to(DEVICE), "TOY", exact=True)


@pytest.fixture
def _toy_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 values in 32 bytes, quarters each."""
    row = dataclasses.replace(formats.FORMATS["Q8_0"], name="TOY", ggml=99, nbytes=32, scales=())
    monkeypatch.setitem(formats.FORMATS, "TOY", row)


@pytest.mark.usefixtures("_toy_row")
@pytest.mark.parametrize("T", [1, 20], ids=["decode", "tiles"])
def test_a_toy_format(T: int, add: Add, rng: torch.Generator) -> None:
    add("weights", TOY_FORMAT, "// Columns k to k + 3")
    x, gate_up, down = rand(rng, T, 64), toy_blocks(rng, 1, 64, 64), toy_blocks(rng, 1, 64, 32)
    ids, weights = torch.zeros(T, 1, dtype=torch.int32, device=DEVICE), torch.ones(T, 1, device=DEVICE)
    got = moefuse.experts(x, ids, weights, gate_up, down, activation="relu", backend=BACKEND)
    up_rows, down_rows = (0.25 * t.blocks[0].cpu().view(torch.int8).double() for t in (gate_up, down))
    gate_proj, up = (x.cpu().double() @ up_rows.T).chunk(2, -1)
    close(got, gate_proj.relu() * up @ down_rows.T)


@pytest.mark.usefixtures("_toy_row")
def test_a_format_without_its_decoder_is_refused_by_name(rng: torch.Generator) -> None:
    with simulated():
        plan = moefuse.plan(torch.zeros(2, 1, dtype=torch.int32, device=DEVICE), 1, backend=BACKEND)
        x, weight = rand(rng, 2, 32), toy_blocks(rng, 1, 8, 32)
        with pytest.raises(ValueError, match="it has no kernel for TOY"):
            moefuse.grouped_linear(x, weight, plan, gather=True, scatter=True, backend=BACKEND)
