"""``moefuse tune``: search tile sizes on this card and keep what is faster."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from moefuse import backends
from moefuse.bench import inputs, report
from moefuse.bench import tune as bench_tune
from moefuse.bench.shapes import Shape
from moefuse.cli import options
from moefuse.types import name_of


def tune(
    model: options.Model = None,
    experts: options.Experts = None,
    hidden: options.Hidden = None,
    intermediate: options.Intermediate = None,
    top_k: options.TopK = None,
    tokens: options.Tokens = "1,16,256,4096",
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = None,
    linear: Annotated[
        str | None,
        typer.Option(help="Instead of experts, a weight of moefuse.linear: columns x inputs, such as 5120x2048."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="About how long to search, in all.")] = 4.0,
    device: Annotated[str | None, typer.Option(help="cuda, or one of several such as cuda:1.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Search, but keep nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")] = False,
) -> None:
    """Search tile sizes for a layer or a linear on this GPU, and keep those that are faster than the built-in ones.

    A tile's results are held against the built-in tile's before it is timed. What is kept serves every later call of
    this shape on this card and version of Triton.
    """
    card = _card(device)
    numbers = options.dtype(dtype)
    counts, sizes = options.tokens(tokens), (experts, hidden, intermediate, top_k)
    from moefuse.backends.triton.runtime import tuned

    if linear is not None:
        if model is not None or any(size is not None for size in sizes):
            options.stop("--linear", "give a linear or a layer, not both")
        linears, counts = _linears(linear, weights), _few(counts)
        title = linears[0].describe().split(" in ")[0]
    else:
        shape = options.shape(model, sizes)
        shapes = [shape] if weights is None else options.in_blocks(shape, weights)
        refusal = next(filter(None, (inputs.fits(each, numbers, card) for each in shapes)), None)
        if refusal is not None:
            options.stop("MODEL", refusal)
        title = (shapes[0] if len(shapes) == 1 else shape).describe()
    if not dry_run:
        _refuse_cache(tuned.path().parent)
    with options.progress() as tick:
        if linear is not None:
            findings, tiles = bench_tune.tune_linear(linears, counts, numbers, card, 60 * minutes, tick)
        else:
            findings, tiles = bench_tune.tune_all(shapes, counts, numbers, card, 60 * minutes, tick)
    if not dry_run:
        tuned.keep(card, tiles)
    if as_json:
        plain = [dataclasses.asdict(finding) | {"gain": finding.gain} for finding in findings]
        kept = None if dry_run else str(tuned.path())
        typer.echo(json.dumps({"card": tuned.card(card), "shape": title, "found": plain, "kept": kept}))
        return
    console = Console()
    # A pipe or a file has no width of its own, and a cut figure is worth nothing.
    console = console if console.is_terminal else Console(width=160)
    _print(f"{title}, {name_of(numbers)}, {tuned.card(card)}", findings, console)
    better = sum(tile is not None for tile in tiles.values())
    console.print(
        f"{better} of {len(tiles)} products have a faster tile; "
        + ("nothing was kept (--dry-run)" if dry_run else f"kept in {tuned.path()}")
    )


def _linears(text: str, weights: str | None) -> list[bench_tune.Linear]:
    """The weight that ``--linear`` describes, in numbers or in each format."""
    columns, _, width = text.partition("x")
    if not (columns.isdecimal() and width.isdecimal() and int(columns) and int(width)):
        options.stop("--linear", f"columns x inputs, such as 5120x2048, got {text!r}")
    if weights is None:
        return [bench_tune.Linear(int(columns), int(width))]
    found = options.in_blocks(Shape("linear", 1, int(width), int(width), 1), weights)
    specs = [set(shape.weights or ()) for shape in found]
    if any(len(both) > 1 for both in specs):
        options.stop("--weights", f"a linear has one format, got {weights!r}")
    return [bench_tune.Linear(int(columns), int(width), spec) for both in specs for spec in both]


def _few(counts: list[int]) -> list[int]:
    from moefuse.backends.triton.runtime.tiles import LINEAR_ROWS

    few = [count for count in counts if count <= LINEAR_ROWS]
    if not few:
        options.stop("--tokens", f"linear has tiles of its own up to {LINEAR_ROWS} tokens")
    return few


def _refuse_cache(folder: Path) -> None:
    """Say that nothing can be kept before minutes are spent searching it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        options.stop("MOEFUSE_CACHE", f"{folder} cannot be made a folder: {error.strerror}")
    if not os.access(folder, os.W_OK):
        options.stop("MOEFUSE_CACHE", f"{folder} cannot be written to")


def _card(name: str | None) -> torch.device:
    """The GPU to search on, or a usage error."""
    row = next(row for row in backends.BACKENDS if row.name == "triton")
    reason = row.missing() or (None if torch.cuda.is_available() else "no NVIDIA GPU is here")
    if reason is not None:
        options.stop("--device", f"tiles are searched on an NVIDIA GPU: {reason}")
    found = options.device(name or "cuda")
    if found.type != "cuda":
        options.stop("--device", f"tiles are searched on an NVIDIA GPU, got {found}")
    return torch.device("cuda", torch.cuda.current_device()) if found.index is None else found


def _print(title: str, findings: list[bench_tune.Finding], console: Console) -> None:
    """A table, or where it has no room a paragraph for each product."""
    table = _table(title, findings)
    if report.fits(table, console):
        console.print(table)
        return
    console.print(title, markup=False, highlight=False)
    for found in findings:
        old, new = (report.duration(seconds) for seconds in (found.old_seconds, found.new_seconds))
        best = f"best {_brief(found.new)} {new}, {found.gain:.2f}x" if found.new != found.old else "best is the same"
        line = f"T={found.tokens} {_role(found)}: built-in {_brief(found.old)} {old}; {best}"
        console.print(f"{line}; {found.tried} tried", markup=False, highlight=False)


def _table(title: str, findings: list[bench_tune.Finding]) -> Table:
    table = report.titled(title)
    table.caption = "times are of one layer's experts, both products"
    if findings and findings[0].product.startswith("linear"):
        table.caption = "times are of one product"
    for column in ("T", "product", "built-in tile", "time", "best tile", "time", "gain", "tried", "wrong", "failed"):
        table.add_column(column, justify="left" if column.endswith(("product", "tile")) else "right")
    for found in findings:
        changed = found.new != found.old
        table.add_row(
            str(found.tokens),
            _role(found),
            _brief(found.old),
            report.duration(found.old_seconds),
            _brief(found.new) if changed else "the same",
            report.duration(found.new_seconds),
            f"{found.gain:.2f}x",
            str(found.tried),
            str(found.wrong),
            str(found.failed),
            style="bold" if changed else "",
        )
    return table


def _role(found: bench_tune.Finding) -> str:
    """Which product it is, and the format of its weights where they are in blocks."""
    role, _, rest = found.product.partition(" E=")
    kind = rest.split(", ")[1]
    return role if kind.endswith("bytes") else f"{role} {kind}"


def _brief(tile: dict[str, Any]) -> str:
    """Sizes, and the switches that are on."""
    sizes = " ".join(f"{name}={value}" for name, value in tile.items() if not isinstance(value, bool))
    return " ".join((sizes, *(name for name, value in tile.items() if value is True)))
