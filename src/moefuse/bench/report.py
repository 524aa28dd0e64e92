"""A result as a table for the terminal, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from moefuse import config
from moefuse.bench.contestants import EXPERTS, ROUTE_PLAN
from moefuse.bench.result import FLOOR, OURS, PLAIN, Result, Row

FORMAT = 1
#: columns that a narrow terminal does without, the first to go first
_DISPENSABLE = ("launches", "peak\nMB", "of\nread", "error", "GB/s", "x\nfloor", "mode")


def duration(seconds: float) -> str:
    """Three digits and a unit.

    >>> duration(0.00761), duration(2.98e-5), duration(12.0)
    ('7.61 ms', '29.8 us', '12.0 s')
    """
    unit, size = next((row for row in (("s", 1.0), ("ms", 1e-3)) if seconds >= row[1]), ("us", 1e-6))
    value = seconds / size
    return f"{value:.{max(0, 2 - int(math.log10(max(value, 1.0))))}f} {unit}"


def titled(title: str) -> Table:
    """A table without columns, as the commands print them."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )


def table(result: Result, leave_out: Collection[str] = ()) -> Table:
    """One section per token count. Columns that nothing fills are left out."""
    rows = result.rows
    columns = {heading: write for heading, write in _columns(result).items() if heading not in leave_out}
    shown = titled(f"{result.title}, {result.dtype}")
    for heading in columns:
        left = heading in ("who", "mode")
        shown.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        first = before is None or before.tokens != row.tokens
        if first and before is not None:
            shown.add_section()
        style = {OURS: "bold", FLOOR: "dim"}.get(row.name, "")
        cells = [write(row) for write in columns.values()]
        if "T" in columns and not first:
            cells[0] = ""
        shown.add_row(*cells, style="red" if row.wrong else style)
    return shown


def _columns(result: Result) -> dict[str, Callable[[Row], str]]:
    """Heading -> how a row fills it."""

    def gain(row: Row, scope: str) -> str:
        """Our gain over the peer in this row."""
        mine = (own for own in result.rows if own.name == OURS and own.tokens == row.tokens and own.mode == row.mode)
        return next((_number(own.faster_than.get(row.name), ".2f", "x") for own in mine if own.scope == scope), "")

    columns: dict[str, Callable[[Row], str]] = {
        "T": lambda row: str(row.tokens or ""),
        "who": lambda row: _who(row, result.dtype),
        "mode": lambda row: row.mode,
        "time": _time,
        "x\nfloor": lambda row: _number(row.times_floor, ".2f"),
        "GB/s": lambda row: _digits(None if row.bytes_per_second is None else row.bytes_per_second / 1e9),
        "of\nread": lambda row: _number(row.bandwidth_share, ".0%"),
    }
    scopes = {own.scope for own in result.rows if own.name == OURS and own.faster_than}
    for scope in sorted(scopes):
        columns[f"gain,\n{scope}" if result.rates else "gain"] = lambda row, scope=scope: gain(row, scope)  # type: ignore[misc]
    columns[f"over\n{result.dtype}"] = lambda row: _number(row.over_plain, ".2f")
    columns["launches"] = lambda row: _number(row.launches, "d")
    columns["peak\nMB"] = lambda row: _digits(None if row.peak_bytes is None else row.peak_bytes / 1e6)
    columns["error"] = lambda row: _number(row.error_rms, ".1e")
    if not any(row.mode in ("graph", "eager") for row in result.rows):
        del columns["mode"]
    return {heading: write for heading, write in columns.items() if any(write(row) for row in result.rows)}


def _who(row: Row, dtype: str) -> str:
    if row.name == PLAIN:
        return f"{OURS} {row.scope}, {dtype}"
    return f"{row.name} {row.scope}" if row.name == OURS else row.name


def matrix(results: Sequence[Result]) -> Table:
    """Block formats under each other, one section per token count: what each takes, its floor, and numbers' time."""
    dtype, (scope, *others) = results[0].dtype, _scopes(results)
    shown = titled(f"{results[0].title.split(' in ')[0]}, formats beside {dtype}")
    peers = list(dict.fromkeys(name for result in results for row in result.rows for name in row.faster_than))
    headings = ["T", "weights", "bits", scope, "floor", "x\nfloor", dtype, f"over\n{dtype}"]
    headings += [heading for other in others for heading in (other, f"over\n{dtype}")]
    for heading in (*headings, "error", *(f"gain,\n{name}" for name in peers)):
        shown.add_column(heading, justify="left" if heading == "weights" else "right", no_wrap=True)
    for T in dict.fromkeys(row.tokens for result in results for row in result.rows):
        for first, result in zip((True, *[False] * len(results)), results, strict=False):
            mine, plain, floor = (_first(result, T, name, scope) for name in (OURS, PLAIN, FLOOR))
            cells = [str(T) if first else "", result.weights, _number(result.bits, ".4g"), _time(mine), _time(floor)]
            cells += [_number(mine.times_floor, ".2f"), _time(plain), _number(mine.over_plain, ".2f")]
            more = [_first(result, T, OURS, other) for other in others]
            cells += [cell for row in more for cell in (_time(row), _number(row.over_plain, ".2f"))]
            cells += [_number(mine.error_rms, ".1e")]
            cells += [_number(mine.faster_than.get(name), ".2f", "x") for name in peers]
            shown.add_row(*cells, style="red" if any(row.wrong for row in (mine, plain, *more)) else "")
        shown.add_section()
    return shown


def page(results: Sequence[Result]) -> str:
    """The same for a document, in Markdown: a table of each, the experts and the whole block, formats by tokens."""
    dtype, counts = results[0].dtype, list(dict.fromkeys(row.tokens for result in results for row in result.rows))
    found = []
    for scope in _scopes(results):
        lines = [f"| {scope}: time, over {dtype}, over its floor | bits | {' | '.join(f'T={T}' for T in counts)} |"]
        lines.append("|---" * (len(counts) + 2) + "|")
        plain = [_cell(_median(_first(result, T, PLAIN, scope) for result in results)) for T in counts]
        lines.append(f"| {dtype} | {_PLAIN_BITS[dtype]} | {' | '.join(plain)} |")
        for result in results:
            cells = [_cell(_first(result, T, OURS, scope)) for T in counts]
            lines.append(f"| {result.weights} | {result.bits:.4g} | {' | '.join(cells)} |")
        found.append("\n".join(lines) + "\n")
    return "\n".join(found)


_PLAIN_BITS = {"bfloat16": 16, "float16": 16, "float32": 32}


def _median(rows: Iterable[Row]) -> Row:
    """The row in the middle of those that have a time."""
    timed = sorted((row for row in rows if row.seconds is not None), key=lambda row: row.seconds or 0.0)
    return timed[len(timed) // 2] if timed else Row(None, PLAIN, "", "")


def _cell(row: Row) -> str:
    parts = (_time(row), _number(row.over_plain, ".2f"), _number(row.times_floor, ".2f"))
    return ", ".join(part for part in parts if part)


def _scopes(results: Sequence[Result]) -> list[str]:
    """What ran in blocks and in numbers: the experts before the whole block."""
    found = {row.scope for result in results for row in result.rows if row.name == OURS} - {ROUTE_PLAN}
    return sorted(found, key=lambda scope: (scope != EXPERTS, scope))


def _first(result: Result, tokens: int | None, name: str, scope: str) -> Row:
    """The row of the first mode, in which the device is at its best; an empty one where there is none."""
    found = (row for row in result.rows if (row.tokens, row.name, row.scope) == (tokens, name, scope))
    return next(found, Row(tokens, name, scope, ""))


def _time(row: Row) -> str:
    return duration(row.seconds) if row.seconds is not None else _missing(row)


def _missing(row: Row) -> str:
    if not row.wrong:
        return "-"
    return "FAILED" if row.note.startswith("failed") else "WRONG"


def _digits(value: float | None) -> str:
    """Three digits, and never an exponent."""
    return "" if value is None else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _number(value: float | None, form: str, suffix: str = "") -> str:
    return "" if value is None else f"{value:{form}}{suffix}"


def fits(shown: Table, console: Console) -> bool:
    """Whether a table has room with no word broken and none cut."""
    free = console.options.update(width=1000, max_width=1000)
    return Measurement.get(console, free, shown).maximum <= console.width


def print_result(result: Result, console: Console) -> None:
    """The table, and under it what a reader must know to believe it; a narrow terminal gets fewer columns."""
    counts = range(len(_DISPENSABLE) + 1)
    left_out = next((n for n in counts if fits(table(result, _DISPENSABLE[:n]), console)), counts[-1])
    console.print(table(result, _DISPENSABLE[:left_out]))
    missing = [heading.replace("\n", " ") for heading in _DISPENSABLE[:left_out] if heading in _columns(result)]
    if missing:
        console.print(f"no room for: {', '.join(missing)}", highlight=False)
    for line in _lines(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_matrix(results: Sequence[Result], console: Console) -> None:
    """The formats of several results in one table, and what of theirs must stand beside it."""
    console.print(matrix(results))
    lines = [_machine(results[0])]
    lines += [f"over {results[0].dtype}: the time over that of the layer in {results[0].dtype}, in the same turns"]
    for T in results[0].rates:
        read, products = ([result.rates[T][rate] / 1e9 for result in results] for rate in ("bandwidth", "matrix"))
        rates = f"read {_digits(min(read))} to {_digits(max(read))} GB/s"
        lines.append(f"T={T}: {rates}, products {_digits(min(products))} to {_digits(max(products))} GFLOP/s")
    for result in results:
        lines += [f"{result.weights}: {line}" for line in _row_notes(result)]
    lines += dict.fromkeys(note for result in results for note in result.notes)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _machine(result: Result) -> str:
    facts = result.machine
    threads = "" if facts["device"].startswith("cuda") else f", {facts['threads']} threads on {facts['cores']} cores"
    return f"{facts['device']}: {facts['processor']}{threads}; our backend: {result.backend}"


def _lines(result: Result) -> list[str]:
    lines = [_machine(result)]
    if result.weights:
        lines.append(f"weights: {result.weights}, {result.bits:.4g} bits each")
    if any(row.faster_than for row in result.rows):
        lines.append("gain: the time of that row over ours; above 1 we are faster")
    if any(row.error_rms for row in result.rows):
        lines.append("error: root mean square against float64, relative to the token's row, the worst token")
    for T, rates in result.rates.items():
        bound = next((row.note for row in result.rows if row.tokens == T and row.name == FLOOR), "")
        lines.append(
            f"T={T}: {bound}; read {_digits(rates['bandwidth'] / 1e9)} GB/s ({rates['bandwidth_how']}), "
            f"products {_digits(rates['matrix'] / 1e9)} GFLOP/s ({rates['matrix_how']})"
        )
        lines.append(f"T={T}: {result.rotation[T]}")
    return lines + _row_notes(result) + result.notes


def _row_notes(result: Result) -> list[str]:
    lines = []
    for row in result.rows:
        if row.note and row.name != FLOOR:
            at = "" if row.tokens is None else f"T={row.tokens}: "
            lines.append(f"{at}{row.name} {row.scope}{f', {row.mode}' if row.mode == 'graph' else ''}: {row.note}")
    return lines


def as_json(result: Result) -> dict[str, Any]:
    """Everything, in plain values: rates in bytes and flops per second, times in seconds."""
    found: dict[str, Any] = _finite({"format": FORMAT, **dataclasses.asdict(result)})
    return found


def _finite(value: Any) -> Any:
    """JSON has no infinity: an infinite error becomes a string."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def as_text(results: Sequence[Result]) -> str:
    """One result, or a list of several."""
    found = [as_json(result) for result in results]
    return json.dumps(found[0] if len(found) == 1 else found, indent=2)


def plot_unavailable() -> str | None:
    if importlib.util.find_spec("matplotlib") is None:
        return f"--plot needs matplotlib: {config.install('matplotlib')}"
    return None
