"""moefuse gguf: what experts a file holds, and how their router chooses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from moefuse.bench.report import fits, titled
from moefuse.nn.from_gguf import FAMILIES, expert_layers, read_rule
from moefuse.quant.gguf import GGUFFile, read

_PARTS = ("gate", "up", "gate_up", "down")


def _layer(file: GGUFFile, layer: int) -> dict[str, Any]:
    """Types and sizes of one layer's experts; the rule, or why there is none."""
    found: dict[str, Any] = {"layer": layer, "types": {}, "bytes": 0, "weights": 0}
    for kind, suffix in (("types", "exps"), ("shared_types", "shexp")):
        for part in _PARTS:
            info = file.infos.get(f"blk.{layer}.ffn_{part}_{suffix}.weight")
            if info is not None:
                found.setdefault(kind, {})[part] = info.type
                found["bytes"] += info.nbytes
                count = 1
                for size in info.shape:
                    count *= size
                found["weights"] += count
    down = file.infos.get(f"blk.{layer}.ffn_down_exps.weight")
    if down is not None and len(down.shape) == 3:
        found |= dict(zip(("experts", "hidden", "intermediate"), down.shape, strict=True))
    try:
        found["routing"] = dataclasses.asdict(read_rule(file, layer))
    except (ValueError, TypeError) as error:
        found["routing"], found["refused"] = None, str(error)
    return found


def facts(file: GGUFFile) -> dict[str, Any]:
    """Everything the command shows, as plain data."""
    layers = [_layer(file, layer) for layer in expert_layers(file)]
    family = FAMILIES.get(file.architecture)
    name = file.metadata.get("general.name")
    return {
        "path": str(file.path),
        "name": name[:200] if isinstance(name, str) else None,
        "architecture": file.architecture,
        "known": family is not None,
        "activation": None if family is None else dataclasses.asdict(family.activation),
        "bytes": file.nbytes,
        "expert_bytes": sum(layer["bytes"] for layer in layers),
        "layers": layers,
    }


def _groups(layers: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Layers that follow each other and differ in nothing, as one row."""
    rows: list[tuple[int, int, dict[str, Any]]] = []
    for layer in layers:
        same = {key: value for key, value in layer.items() if key != "layer"}
        if rows and rows[-1][2] == same and rows[-1][1] == layer["layer"] - 1:
            rows[-1] = (rows[-1][0], layer["layer"], same)
        else:
            rows.append((layer["layer"], layer["layer"], same))
    return [(str(first) if first == last else f"{first}-{last}", same) for first, last, same in rows]


def _rule(routing: dict[str, Any] | None) -> str:
    if routing is None:
        return ""
    parts = [f"top {routing['top_k']}", routing["score"]]
    if routing["groups"] > 1:
        parts.append(f"{routing['top_groups']} of {routing['groups']} groups ({routing['group_score']})")
    parts += ["renormalised"] if routing["renormalize"] else []
    parts += [f"times {routing['scale']:g}"] if routing["scale"] != 1 else []
    return ", ".join(parts)


def _show(known: dict[str, Any], console: Console) -> None:
    gib = 2**30
    share = f"{known['bytes'] / gib:.2f} GiB, {known['expert_bytes'] / gib:.2f} of them experts"
    console.print(f"[bold]{escape(known['architecture'])}[/] {escape(known['name'] or '')}  {share}")
    groups = _groups(known["layers"])
    for reason in dict.fromkeys(row["refused"] for _, row in groups if "refused" in row):
        console.print(f"[yellow]MoE.from_gguf does not take this file:[/] {escape(reason)}")
    rows = [_row(layers, row) for layers, row in groups]
    filled = [name for name in rows[0] if any(row[name] for row in rows)]
    table = titled("Experts")
    for name in filled:
        table.add_column(name, no_wrap=True, justify="right" if name in ("MiB each", "bits") else "left")
    for cells in rows:
        table.add_row(*(escape(cells[name]) for name in filled))
    if fits(table, console):
        console.print(table)
    else:
        for cells in rows:
            line = "; ".join(f"{name} {cells[name]}" for name in filled if cells[name])
            console.print(line, markup=False, highlight=False)
    rules: dict[str, list[str]] = {}
    for layers, row in groups:
        if row["routing"] is not None:
            rules.setdefault(_rule(row["routing"]), []).append(layers)
    for rule, these in rules.items():
        where = "" if len(rules) == 1 else f" of layers {', '.join(these)}"
        console.print(f"router{where}: {rule}", markup=False, highlight=False)


def _row(layers: str, row: dict[str, Any]) -> dict[str, str]:
    """Heading to cell."""
    return {
        "layers": layers,
        "experts": str(row.get("experts", "?")),
        "H": str(row.get("hidden", "?")),
        "I": str(row.get("intermediate", "?")),
        **{part: row["types"].get(part, "") for part in _PARTS},
        "shared": ", ".join(dict.fromkeys(row.get("shared_types", {}).values())),
        "MiB each": f"{row['bytes'] / 2**20:.1f}",
        "bits": f"{8 * row['bytes'] / row['weights']:.2f}" if row["weights"] else "",
    }


def gguf(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of a table.")] = False,
) -> None:
    """Say which experts a GGUF file holds: types and sizes layer by layer, and how the router chooses."""
    try:
        known = facts(read(path))
    except (OSError, ValueError) as error:
        reason = f"{path}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
        raise typer.BadParameter(reason, param_hint="FILE") from None
    if not known["layers"]:
        reason = f"{path} is a dense {known['architecture']} model: no layer has a router"
        raise typer.BadParameter(reason, param_hint="FILE")
    if as_json:
        typer.echo(json.dumps(known, indent=2))
    else:
        _show(known, Console())
