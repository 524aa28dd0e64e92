"""Time against tokens, log-log, with the floor drawn."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from moefuse.bench.report import duration
from moefuse.bench.result import FLOOR, OURS, Result

# Okabe and Ito's palette: told apart by colour-blind readers too. Ours first.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINES = {"wall": "-", "graph": "-", "eager": ":", "": "--"}
_MARKERS = {"block": "o", "experts": "s"}


def write_plot(result: Result, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    series: dict[tuple[str, str, str], list[tuple[int, float]]] = defaultdict(list)
    for row in result.rows:
        if row.tokens is not None and row.seconds is not None and row.scope in _MARKERS:
            series[row.name, row.scope, row.mode].append((row.tokens, row.seconds))
    peers = [name for name in dict.fromkeys(name for name, _, _ in series) if name not in (OURS, FLOOR)]
    figure, axes = pyplot.subplots(figsize=(10, 5.5), layout="constrained")
    for (name, scope, mode), points in series.items():
        if name == FLOOR:
            colour, label = "black", "floor (reads or flops)"
        elif name == OURS:
            colour, label = _COLOURS[0 if scope == "block" else 5], f"moefuse, {_scope(scope)}"
        else:
            colour, label = _COLOURS[1 + peers.index(name) % 4], f"{name}, {_scope(scope)}"
        axes.plot(
            *zip(*sorted(points), strict=True),
            color=colour,
            linestyle=_LINES[mode],
            marker="" if name == FLOOR else _MARKERS[scope],
            markersize=5,
            linewidth=2.2 if name == OURS else 1.5,
            label=label + (f" ({mode})" if mode in ("graph", "eager") else ""),
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted({row.tokens for row in result.rows if row.tokens is not None})
    axes.set_xticks(tokens, [str(T) for T in tokens])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: duration(value).replace(".00", "").replace(".0", "")))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens per call")
    axes.set_ylabel("time per layer")
    axes.grid(which="major", alpha=0.35)
    axes.grid(which="minor", alpha=0.12)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    axes.set_title(f"{result.title}, {result.dtype}\n{_machine(result)}", fontsize=10, loc="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _scope(scope: str) -> str:
    return "whole block" if scope == "block" else "experts only"


def _machine(result: Result) -> str:
    facts = result.machine
    threads = "" if str(facts["device"]).startswith("cuda") else f", {facts['threads']} threads"
    versions = f"torch {facts['torch']}, moefuse {facts['moefuse']} ({result.backend})"
    return f"{facts['processor']}{threads}, {versions}"
