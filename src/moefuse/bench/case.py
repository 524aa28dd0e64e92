"""Time a case of the case table, against the reference where that is another backend."""

from __future__ import annotations

from typing import Any

import torch

import moefuse
from moefuse.backends import REFERENCE
from moefuse.bench import machine
from moefuse.bench.contestants import Contestant
from moefuse.bench.result import OURS, Result
from moefuse.bench.run import Options, Tick, compare, measure
from moefuse.ops._core.select import choose
from moefuse.testing import cases
from moefuse.testing.compare import Difference, Tolerance
from moefuse.testing.inputs import moved
from moefuse.types import name_of

_SEED = 0


def find(case_id: str) -> cases.Case:
    for case in cases.CASES:
        if case.id == case_id:
            return case
    raise KeyError(case_id)


def bench_case(case: cases.Case, options: Options, tick: Tick) -> Result:
    """The op's time on the case's inputs: small ones, so they come from cache and there is no floor to speak of."""
    dtype, device = options.dtype, options.device
    like = torch.empty(0, dtype=dtype, device=device)
    # moe is gate and experts, not an op of its own.
    chosen = choose("experts" if case.op == "moe" else case.op, like, options.backend).backend
    made = moved(case.inputs(_SEED, dtype), device)
    field = [_contestant(case, backend, options) for backend in dict.fromkeys((chosen, REFERENCE))]
    with torch.no_grad():
        rows, _ = measure(field, [made], None, options, [], tick)
    compare(rows)
    return Result(
        title=f"{case.id}: {case.why}",
        dtype=name_of(dtype),
        backend=chosen,
        command=options.command,
        machine=machine.describe(device),
        rows=rows,
        notes=["the same small inputs every time: weights come from cache"],
    )


def _contestant(case: cases.Case, backend: str, options: Options) -> Contestant:
    def call(inputs: dict[str, Any]) -> Any:
        return getattr(moefuse, case.op)(**inputs, backend=backend)

    if backend == REFERENCE:
        call = moefuse.invariant(False)(call)

    def error(_got: Any, _inputs: Any) -> Difference:
        with torch.enable_grad():
            outcome = cases.run(case, options.dtype, backend, str(options.device), _SEED)
        if outcome.failures:
            name, failure = next(iter(outcome.failures.items()))
            return Difference(float("inf"), float("inf"), f"{name}: {failure}")
        forward = [e for name, e in outcome.errors.items() if not name.startswith("gradient")]
        return max(forward, key=lambda e: e.worst)

    # The case table has already judged, result by result: here only its infinite error fails.
    anything = Tolerance(1e30, 1e30, "judged by the case table")
    name = OURS if backend != REFERENCE or options.backend == REFERENCE else REFERENCE
    return Contestant(name, case.id, call, error, anything)
