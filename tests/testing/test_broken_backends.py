"""A wrong kernel is caught: five broken backends, each failed by the case table."""

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moefuse import backends
from moefuse.ops import select
from moefuse.quant.formats import FORMATS
from moefuse.testing.cases import CASES, run
from moefuse.testing.inputs import map_tensors
from moefuse.types import Activation, Outputs, Routing, Stacks

_REFERENCES = select.REFERENCES


def zeros(_: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*args: Any) -> Any:
        result = real(*args)
        written = next(a for a in args if isinstance(a, Outputs)) if result is None else _tensors(result)
        for t in written:
            if t is not None:
                t.zero_()
        return result

    return broken


def dropped_slot(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """The last slot of each token is forgotten."""

    def broken(*args: Any) -> Any:
        if op in ("combine", "experts"):
            position = 1 if op == "combine" else 2
            weights = args[position].clone()
            if weights.shape[1] > 1:
                weights[:, -1] = 0
            args = (*args[:position], weights, *args[position + 1 :])
        return real(*args)

    return broken


def with_stacks(args: tuple[Any, ...], change: Callable[[Stacks], Stacks]) -> tuple[Any, ...]:
    return tuple(change(a) if isinstance(a, Stacks) else a for a in args)


def swapped_stacks(stacks: Stacks) -> Stacks:
    if stacks.up is not None:
        return stacks._replace(gate_up=stacks.up, up=stacks.gate_up)
    if stacks.layout != "halves":
        return stacks
    return stacks._replace(gate_up=map_tensors(stacks.gate_up, lambda t: torch.cat(t.chunk(2, 1)[::-1], 1)))


def next_stacks(stacks: Stacks) -> Stacks:
    gate_up, down = (map_tensors(t, lambda t: t.roll(-1, 0)) for t in (stacks.gate_up, stacks.down))
    return stacks._replace(gate_up=gate_up, down=down)


def swapped_gate_and_up(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*args: Any) -> Any:
        if op == "glu" and args[1] is not None:
            args = (args[1], args[0], *args[2:])
        elif op == "glu" and args[2].gated:
            halves = args[0].chunk(2, -1) if args[3] == "halves" else (args[0][..., ::2], args[0][..., 1::2])
            swapped = torch.cat(halves[::-1], -1) if args[3] == "halves" else torch.stack(halves[::-1], -1).flatten(-2)
            args = (swapped, *args[1:])
        elif op == "experts" and next(a for a in args if isinstance(a, Activation)).gated:
            args = with_stacks(args, swapped_stacks)
        return real(*args)

    return broken


def wrong_tie(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Ties go to the highest id."""

    def broken(*args: Any) -> Any:
        if op != "route":
            return real(*args)
        logits, bias, scale, routing = args
        flipped = (None if t is None else t.flip(0) for t in (bias, scale))
        weights, ids = real(logits.flip(1), *flipped, routing)
        E = logits.shape[1]
        return weights, torch.where(ids < E, E - 1 - ids, ids)

    return broken


def next_expert(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Every product takes the weights of the expert after the right one."""

    def broken(*args: Any) -> Any:
        if op == "grouped_linear":
            x, weight, *rest = args
            args = (x, map_tensors(weight, lambda t: t.roll(-1, 0)), *rest)
        return real(*with_stacks(args, next_stacks))

    return broken


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


FAULTS = {fault.__name__: fault for fault in (zeros, dropped_slot, swapped_gate_and_up, wrong_tie, next_expert)}
#: the ops whose every fault of a kind must show
CAUGHT_IN = {
    "zeros": {"route", "gate", "plan", "grouped_linear", "grouped_outer", "glu", "combine", "experts", "moe"},
    "dropped_slot": {"combine", "experts", "moe"},
    "swapped_gate_and_up": {"glu", "experts", "moe"},
    "wrong_tie": {"route"},
    "next_expert": {"grouped_linear", "experts", "moe"},
}


@contextmanager
def installed(name: str, ops: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """A backend for processor tensors that is there while this lasts."""
    module: Any = types.ModuleType(f"moefuse.backends.{name}")
    module.__spec__ = types.SimpleNamespace(name=module.__name__)
    module.OPS, module.unavailable = ops, lambda: None
    module.DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
    module.FORMATS = frozenset(FORMATS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(backends, "BACKENDS", (*backends.BACKENDS, backends.Backend(name, ("cpu",))))
        select.forget()
        yield
    select.forget()


def broken(fault: str) -> dict[str, Callable[..., Any]]:
    return {op: FAULTS[fault](op, real) for op, real in _REFERENCES.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_case_table_fails_it(fault: str) -> None:
    cases = [case for case in CASES if not case.name.endswith(("no_token", "empty"))]
    with installed("broken", broken(fault)):
        failed = {case.op for case in cases if not run(case, torch.float32, "broken", "cpu", seed=3).passed}
    assert failed >= CAUGHT_IN[fault], f"{fault} went unseen in {CAUGHT_IN[fault] - failed}"


def test_an_unbroken_backend_passes() -> None:
    """The same harness without a fault: what fails above fails for the fault alone."""
    with installed("sound", dict(_REFERENCES)):
        for case in CASES:
            outcome = run(case, torch.float32, "sound", "cpu", seed=3)
            assert outcome.passed, outcome.describe()


def test_a_failure_describes_its_inputs() -> None:
    case = next(case for case in CASES if case.id == "route/qwen3")
    with installed("broken", broken("zeros")):
        text = run(case, torch.float32, "broken", "cpu", seed=3).describe()
    assert "route/qwen3 on broken (cpu), float32, seed 3" in text
    assert "input logits: float32 [9, 128]" in text
    assert repr(Routing(top_k=8)) in text
    assert "expected" in text
