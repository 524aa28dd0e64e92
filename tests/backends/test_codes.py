"""A kind, score, layout or format that a backend does not know is refused by name, never computed as a neighbour."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from metal_target import simulated

from moefuse import Activation, Routing, backends, types
from moefuse.backends.codes import Codes
from moefuse.ops._core import select
from moefuse.quant import formats
from moefuse.testing import cases
from moefuse.types import Outputs, Stacks, Tail

RUNNABLE = sorted({name for name, _ in cases.runnable(emulated=True)} | {"metal"})


@pytest.fixture(params=RUNNABLE)
def ops(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The functions of a backend, or of the reference."""
    with simulated():
        row = next((row for row in backends.BACKENDS if row.name == request.param), None)
        yield select.REFERENCES if row is None else row.load().OPS


def device_of(ops: dict[str, Any]) -> str:
    on_cuda = torch.cuda.is_available() and ops is backends.BACKENDS[1].load().OPS
    return "cuda" if on_cuda else "mps" if torch.backends.mps.is_available() else "cpu"


def test_an_eighth_activation(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "ACTIVATION_KINDS", (*types.ACTIVATION_KINDS, "toy"))
    x = torch.ones(2, 4, device=device_of(ops))
    for gated in (True, False):
        with pytest.raises(NotImplementedError, match="no kernels for the activation 'toy'"):
            ops["glu"](x, None, Activation("toy", gated=gated), "halves")
        grad = torch.ones(2, 2 if gated else 4, device=x.device)
        with pytest.raises(NotImplementedError, match="no kernels for the activation 'toy'"):
            ops["glu_backward"](grad, x, None, Activation("toy", gated=gated), "halves")


@pytest.mark.parametrize("T", [1, 40])
def test_an_eighth_activation_of_experts(T: int, ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "ACTIVATION_KINDS", (*types.ACTIVATION_KINDS, "toy"))
    x = torch.ones(T, 8, device=device_of(ops))
    ids = torch.zeros(T, 1, dtype=torch.int32, device=x.device)
    gate_up, down = torch.ones(2, 8, 8, device=x.device), torch.ones(2, 8, 4, device=x.device)
    weights, stacks, outputs = (
        torch.ones(T, 1, device=x.device),
        Stacks(gate_up, None, down),
        Outputs(torch.empty_like(x)),
    )
    with pytest.raises(NotImplementedError, match="no kernels for the activation 'toy'"):
        ops["experts"](x, ids, weights, stacks, None, Activation("toy"), Tail(), outputs, None)


def test_a_fourth_score(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "SCORES", (*types.SCORES, "toy"))
    monkeypatch.setitem(types._NORM_FLOOR, "toy", 1e-20)
    logits = torch.zeros(2, 4, device=device_of(ops))
    with pytest.raises(NotImplementedError, match="no kernels for the score 'toy'"):
        ops["route"](logits, None, None, Routing(top_k=2, score="toy"))


def test_a_third_group_score(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(types, "GROUP_SCORES", (*types.GROUP_SCORES, "toy"))
    logits = torch.zeros(2, 4, device=device_of(ops))
    with pytest.raises(NotImplementedError, match="no kernels for the kind 'toy'"):
        ops["route"](logits, None, None, Routing(top_k=2, groups=2, group_score="toy"))


def test_a_third_layout(ops: dict[str, Any]) -> None:
    x = torch.ones(2, 4, device=device_of(ops))
    with pytest.raises(NotImplementedError, match="layout: no kernels for the kind 'toy'"):
        ops["glu"](x, None, Activation("silu"), "toy")


@pytest.mark.parametrize("name", [row.name for row in backends.BACKENDS])
def test_a_new_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in RUNNABLE:
        pytest.skip(f"{name} does not run here")
    toy = dataclasses.replace(formats.FORMATS["Q8_0"], name="TOY")
    monkeypatch.setitem(formats.FORMATS, "TOY", toy)
    module = next(row for row in backends.BACKENDS if row.name == name).load()
    assert "TOY" not in module.FORMATS
    assert frozenset(formats.FORMATS) >= module.FORMATS


def test_every_backend_but_metal_knows_every_name() -> None:
    from moefuse.backends.metal import codes

    assert tuple(codes.KINDS) == types.ACTIVATION_KINDS
    assert tuple(codes.SCORE) == types.SCORES
    for row in backends.BACKENDS[:2]:
        if row.name in RUNNABLE:
            assert frozenset(formats.FORMATS) == row.load().FORMATS


def test_a_name_that_is_in_no_list_fails_when_the_backend_loads() -> None:
    with pytest.raises(ImportError, match="its kernels name toy, which is no activation"):
        Codes("metal", "activation", ("silu", "toy"), types.ACTIVATION_KINDS)


def test_triton_fails_to_compile_a_score_it_does_not_know() -> None:
    """Even a call that went past the check: the last branch asserts its name."""
    if ("triton", "cpu") not in cases.runnable(emulated=True):
        pytest.skip("needs Triton's interpreter")
    from moefuse.backends.triton import route

    logits, weights, ids = torch.ones(1, 4), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.int32)
    rule, numbers = route.Rule.of(Routing(top_k=2), 4)._replace(score="toy"), (1.0, 1.0, 0.0)
    with pytest.raises(Exception, match="do not know"):
        route.launch(route._route_kernel, (1,), logits, None, None, weights, ids, (4, 1), 4, numbers, RULE=rule)


@pytest.mark.skipif("cpu" not in RUNNABLE, reason="the native library was not built")
def test_the_native_library_refuses_what_it_cannot_read() -> None:
    from moefuse.backends.cpu import _native

    x, relu = torch.ones(1, 4), Activation("relu", gated=False)
    with pytest.raises(NotImplementedError, match="no kernels for the dtype"):
        _native.core.glu(x.double(), None, relu, "halves", x, 1)
    with pytest.raises(AttributeError, match="no attribute 'kind'"):
        _native.core.glu(x, None, "relu", "halves", x, 1)
    with pytest.raises(TypeError, match="integer"):
        _native.core.glu(x, None, relu, "halves", x, "two")
