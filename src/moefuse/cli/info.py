"""moefuse info: what can run here, what was chosen, and why each other was not."""

from __future__ import annotations

import dataclasses
import json
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import moefuse
from moefuse import backends, config
from moefuse.nn import rates
from moefuse.ops._core.library import FAST_PATHS
from moefuse.ops._core.select import REFERENCES, resolve

_OTHERS = ("torch", "triton", "transformers", "gguf", "numpy")


def versions() -> dict[str, str | None]:
    """Versions of this package, Python and the packages that matter; None where one is not installed."""
    found: dict[str, str | None] = {"moefuse": moefuse.__version__, "python": platform.python_version()}
    return found | {name: config.version_of(name) for name in _OTHERS}


def _backends() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in backends.BACKENDS:
        reason = row.missing()
        details = row.load().describe() if reason is None else {}
        rows.append(
            {"name": row.name, "devices": row.devices, "runs": reason is None, "reason": reason, "details": details}
        )
    rows.append({"name": backends.REFERENCE, "devices": ["any"], "runs": True, "reason": None, "details": {}})
    return rows


def _choices(device: str) -> dict[str, Any]:
    """For each op on bfloat16 tensors of a device: the backend, and what was said of the others."""
    found: dict[str, Any] = {}
    for op in sorted(REFERENCES):
        try:
            selection = resolve(op, device, torch.bfloat16)
        except ValueError as error:  # MOEFUSE_BACKEND asks for what cannot run there
            found[op] = {"backend": None, "decisions": [], "refused": str(error)}
            continue
        decisions = [dataclasses.asdict(decision) for decision in selection.decisions]
        found[op] = {"backend": selection.backend, "decisions": decisions}
    return found


def facts() -> dict[str, Any]:
    """Everything the command shows, as plain data."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return {
        "versions": versions(),
        "machine": {"system": platform.platform(), "threads": torch.get_num_threads()},
        "forced_backend": config.backend(),
        "invariant": config.invariant(),
        "devices": present,
        "fast_paths": dict(FAST_PATHS),
        "rates": {machine: dataclasses.asdict(found) for machine, found in rates.known().items()},
        "backends": _backends(),
        "chosen": {device: _choices(device) for device, there in present.items() if there},
    }


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _show(known: dict[str, Any], console: Console) -> None:
    console.print(
        "  ".join(f"[bold]{name}[/] {version or 'not installed'}" for name, version in known["versions"].items())
    )
    console.print(f"{known['machine']['system']}, {known['machine']['threads']} threads")
    if known["forced_backend"]:
        console.print(f"MOEFUSE_BACKEND={known['forced_backend']}")
    if known["invariant"]:
        console.print("MOEFUSE_INVARIANT=1")
    paths = (f"{name} {'on' if reason is None else f'off ({reason})'}" for name, reason in known["fast_paths"].items())
    console.print(f"torch: {', '.join(paths)}")

    for machine, found in known["rates"].items():
        console.print(f"rates of {machine}: {rates.Rates(**found)}", highlight=False)
    if known["devices"]["cuda"] and not known["rates"]:
        console.print("rates of bus and CPU: not measured yet; placed experts do that when they first need them")

    table = Table(title="Backends", title_justify="left")
    for column in ("backend", "devices", "runs", "details"):
        table.add_column(column, overflow="fold", no_wrap=column != "details")
    for row in known["backends"]:
        details = "; ".join(f"{name}: {_plain(value)}" for name, value in row["details"].items())
        mark = "[green]yes[/]" if row["runs"] else "[yellow]no[/]"
        table.add_row(row["name"], ", ".join(row["devices"]), mark, row["reason"] or details)
    console.print(table)

    for device, ops in known["chosen"].items():
        table = Table(title=f"Chosen for bfloat16 tensors on {device}", title_justify="left")
        for column in ("backend", "ops", "why not the others"):
            longest = 1 + max(map(len, ops)) if column == "ops" else None
            table.add_column(column, overflow="fold", no_wrap=column == "backend", min_width=longest)
        groups: dict[tuple[str, str], list[str]] = {}
        for op, choice in ops.items():
            rejected = "; ".join(f"{d['backend']}: {d['reason']}" for d in choice["decisions"] if not d["accepted"])
            rejected = choice.get("refused", rejected).removeprefix(f"{op}: ")
            groups.setdefault((choice["backend"] or "none", rejected.replace(f" for {op}", "")), []).append(op)
        for (backend, rejected), names in groups.items():
            table.add_row(backend, ", ".join(names), rejected or "it is the first that fits")
        console.print(table)


def info(as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of tables.")] = False) -> None:
    """Say which backends can run here, which one serves which device, and why each other does not."""
    known = facts()
    if as_json:
        typer.echo(json.dumps(known, indent=2))
    else:
        _show(known, Console())
