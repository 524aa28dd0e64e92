"""moefuse check: run the case table on this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moefuse import backends, config
from moefuse.bench.report import titled
from moefuse.cli import options
from moefuse.cli.info import versions
from moefuse.testing import invariance
from moefuse.testing.cases import CASES, Outcome, runnable, sweep
from moefuse.types import name_of

#: failures that are described, of what may be thousands
_SHOWN = 20


def _targets(backend: str | None) -> list[tuple[str, str]]:
    """The backends to check, or a usage error that says what there is."""
    hint, backend = ("--backend", backend) if backend is not None else ("MOEFUSE_BACKEND", config.backend())
    here = runnable(emulated=backend is not None)
    if backend is None:
        return here
    options.known(hint, backend, backends.names())
    found = [target for target in here if target[0] == backend]
    if not found:
        row = next(row for row in backends.BACKENDS if row.name == backend)
        reason = row.missing() or f"it runs on {', '.join(row.devices)} tensors, and this machine has no such device"
        options.stop(hint, f"{backend} cannot run here: {reason}")
    return found


def _simulate(backend: str | None) -> str:
    """Put the simulator under the Metal backend, or stop with what it lacks."""
    if backend not in (None, "metal"):
        options.stop("--simulate", f"there is a simulator for metal alone, got --backend {backend}")
    from moefuse.testing import msl
    from moefuse.testing.msl import build

    try:
        build.runtime()
    except (msl.CompileError, OSError) as error:
        options.stop("--simulate", str(error))
    msl.install()
    return "metal"


def _summary(outcomes: list[Outcome]) -> Table:
    table = titled("Cases passed, and the largest error relative to its row")
    for column in ("backend", "op", "float32", "bfloat16", "float16"):
        table.add_column(column, no_wrap=column in ("backend", "op"), min_width=len(column))
    rows: dict[tuple[str, str], dict[torch.dtype, list[Outcome]]] = {}
    for outcome in outcomes:
        rows.setdefault((outcome.backend, outcome.case.op), {}).setdefault(outcome.dtype, []).append(outcome)
    for (backend, op), by_dtype in rows.items():
        cells = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = by_dtype.get(dtype, [])
            passed = sum(outcome.passed for outcome in found)
            worst = max((error.worst for outcome in found for error in outcome.errors.values()), default=0.0)
            colour = "green" if passed == len(found) else "red"
            cells.append(f"[{colour}]{passed}/{len(found)}[/] {worst:.1e}" if found else "")
        table.add_row(backend, op, *cells)
    return table


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "case": outcome.case.id,
        "backend": outcome.backend,
        "device": outcome.device,
        "dtype": name_of(outcome.dtype),
        "passed": outcome.passed,
        "errors": {name: {"worst": error.worst, "rms": error.rms} for name, error in outcome.errors.items()},
        "failures": outcome.failures,
    }


def _invariant(targets: list[tuple[str, str]], batches: int, seed: int, processes: int, as_json: bool) -> None:
    """Compare the bits of rows in drawn batches with those of the same tokens alone."""
    targets = [target for target in targets if target[0] != backends.REFERENCE]
    if not targets:
        options.stop("--invariant", "plain torch gives a row other bits in another batch: choose another backend")
    work = invariance.shares(targets, batches, seed, CASES)
    found: list[invariance.Tally] = []
    with options.progress() as shown:
        for tally in invariance.tallies(work, processes):
            found.append(tally)
            shown(tally.case.ljust(24), len(found) / len(work))
    differing = [words for tally in found for words in tally.differing]
    names = ("backend", "dtype", "op", "batches", "rows compared", "batches that differ")
    rows = [*_counts(found, False), *_counts(found, True)]
    if as_json:
        keys = [name.replace(" ", "_") for name in names]
        plain = [dict(zip(keys, row, strict=True)) for row in rows if row[2] != _ALL]
        report = {"seed": seed, "versions": versions(), "batches": plain, "failures": differing}
        typer.echo(json.dumps(report, indent=2))
    else:
        console = Console()
        table = titled("Rows of drawn batches, beside the same tokens alone")
        for column in names:
            table.add_column(column, no_wrap=True)
        for *row, wrong in rows:
            table.add_row(*map(str, row), f"[{'red' if wrong else 'green'}]{wrong}[/]")
        console.print(table)
        for words in differing[:_SHOWN]:
            console.print(words, markup=False, style="red")
        every = sum(tally.batches for tally in found)
        console.print(f"{every} batches compared, {len(differing)} differ (seed {seed})")
    if differing:
        raise typer.Exit(1)


#: stands in the table where an op's name does, for all of them
_ALL = "all"


def _counts(found: list[invariance.Tally], together: bool) -> list[tuple[Any, ...]]:
    """Batches, rows and batches that differ, by backend, element type and op, or of all ops together."""
    counted: dict[tuple[str, str, str], list[int]] = {}
    for tally in found:
        sums = counted.setdefault((tally.backend, tally.dtype, _ALL if together else tally.op), [0, 0, 0])
        for i, more in enumerate((tally.batches, tally.rows, len(tally.differing))):
            sums[i] += more
    return [(*key, *sums) for key, sums in sorted(counted.items())]


def check(
    backend: Annotated[str | None, typer.Option(help="Check one backend; default: all that run here.")] = None,
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Run the Metal kernels in the simulator: no Mac is needed, a C++ compiler is."),
    ] = False,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Draw batches and compare each row's bits with the token alone.")
    ] = False,
    batches: Annotated[
        int, typer.Option(min=1, help="With --invariant: batches for each backend and element type.")
    ] = 1000,
    processes: Annotated[
        int, typer.Option(min=1, help="With --invariant: so many at once; for a GPU, whose kernels are compiled first.")
    ] = 1,
    seed: Annotated[int | None, typer.Option(min=0, max=2**31 - 1, help="Repeat a run; default: a fresh one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")] = False,
) -> None:
    """Run every case on this machine and compare it with float64; exit 1 when one fails.

    With --invariant, compare what moefuse.invariant() promises instead: the same bits of a row in every batch.
    """
    config.cap_onednn()
    targets = _targets(_simulate(backend) if simulate else backend)
    seed = torch.seed() % 2**31 if seed is None else seed
    if processes > 1 and (simulate or not invariant):
        options.stop("--processes", "the simulator is one process" if simulate else "it is for --invariant alone")
    if invariant:
        _invariant(targets, batches, seed, processes, as_json)
        return
    calls = list(sweep(CASES, targets, seed))
    outcomes: list[Outcome] = []
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("checking", total=len(calls))
        for call in calls:
            outcomes.append(call())
            progress.update(task, advance=1, description=outcomes[-1].case.id.ljust(24))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if as_json:
        report = {"seed": seed, "versions": versions(), "outcomes": [_plain(outcome) for outcome in outcomes]}
        typer.echo(json.dumps(report, indent=2))
    else:
        console.print(_summary(outcomes))
        for outcome in failed:
            console.print(outcome.describe(), markup=False, style="red")
        console.print(f"{len(outcomes) - len(failed)} passed, {len(failed)} failed (seed {seed})")
    if failed:
        raise typer.Exit(1)
