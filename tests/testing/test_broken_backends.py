"""A wrong kernel is caught: five broken backends, each failed by the case table."""

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moefuse import backends
from moefuse.ops._core import select
from moefuse.quant.formats import FORMATS
from moefuse.testing.cases import CASES, run
from moefuse.testing.inputs import map_tensors, tensors_in
from moefuse.types import Outputs, Routing

_REFERENCES = select.REFERENCES


Values = dict[str, Any]
#: change(op, values by name) -> the values that a wrong kernel computes with
Change = Callable[[str, Values], Values]


def given(change: Change) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """The fault of a backend that computes rightly, with the wrong values."""

    def fault(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def broken(*values: Any) -> Any:
            named = inspect.signature(real).bind(*values).arguments
            return real(**named | change(op, named))

        return broken

    return fault


def zeros(_: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def broken(*values: Any) -> Any:
        result = real(*values)
        outputs = [value for value in values if isinstance(value, Outputs)]
        for t in tensors_in(tuple(outputs) if result is None else result):
            t.zero_()
        return result

    return broken


@given
def dropped_slot(op: str, values: Values) -> Values:
    """The last slot of each token is forgotten."""
    if op not in ("combine", "experts") or values["weights"].shape[1] < 2:
        return {}
    weights = values["weights"].clone()
    weights[:, -1] = 0
    return {"weights": weights}


@given
def swapped_gate_and_up(op: str, values: Values) -> Values:
    if op == "glu" and values["up"] is not None:
        return {"gate_up": values["up"], "up": values["gate_up"]}
    if op == "glu" and values["activation"].gated:
        both = values["gate_up"]
        if values["layout"] == "halves":
            return {"gate_up": torch.cat(both.chunk(2, -1)[::-1], -1)}
        return {"gate_up": torch.stack((both[..., 1::2], both[..., ::2]), -1).flatten(-2)}
    if op == "experts" and values["stacks"].up is not None:
        stacks = values["stacks"]
        return {"stacks": stacks._replace(gate_up=stacks.up, up=stacks.gate_up)}
    if op == "experts" and values["activation"].gated and values["stacks"].layout == "halves":
        stacks = values["stacks"]
        swapped = map_tensors(stacks.gate_up, lambda t: torch.cat(t.chunk(2, 1)[::-1], 1))
        return {"stacks": stacks._replace(gate_up=swapped)}
    return {}


def wrong_tie(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Ties go to the highest id."""

    def broken(logits: torch.Tensor, *rest: Any) -> Any:
        bias, scale, routing = rest
        flipped = (None if t is None else t.flip(0) for t in (bias, scale))
        weights, ids = real(logits.flip(1), *flipped, routing)
        E = logits.shape[1]
        return weights, torch.where(ids < E, E - 1 - ids, ids)

    return broken if op == "route" else real


@given
def next_expert(op: str, values: Values) -> Values:
    """Every product takes the weights of the expert after the right one."""

    def next_of(stack: Any) -> Any:
        return map_tensors(stack, lambda t: t.roll(-1, 0))

    if op == "grouped_linear":
        return {"weight": next_of(values["weight"])}
    if op == "experts":
        stacks = values["stacks"]
        return {"stacks": stacks._replace(gate_up=next_of(stacks.gate_up), down=next_of(stacks.down))}
    return {}


FAULTS = {
    "zeros": zeros,
    "dropped_slot": dropped_slot,
    "swapped_gate_and_up": swapped_gate_and_up,
    "wrong_tie": wrong_tie,
    "next_expert": next_expert,
}
#: the ops whose every fault of a kind must show
CAUGHT_IN = {
    "zeros": {case.op for case in CASES},
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
