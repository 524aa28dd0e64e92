"""Choose the backend for a call, and be able to say why.

The tensor's device decides; ``backend=`` beats ``MOEFUSE_BACKEND``, which beats the default. An explicit choice
that cannot run raises with the reason; an automatic one moves on to the next row and says so once. The reference is
the last row, so every op runs everywhere.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moefuse import backends, config
from moefuse.backends import REFERENCE
from moefuse.ops.memory import settled
from moefuse.quant.tensor import format_in

_log = logging.getLogger("moefuse")

#: remembered choices; the oldest goes first
_MOST = 1024
#: op name -> reference, filled by the op pages
REFERENCES: dict[str, Callable[..., Any]] = {}
#: what else rests on a choice and goes when choices are forgotten
FORGET: list[Callable[[], Any]] = []


@dataclass(frozen=True)
class Decision:
    backend: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class Selection:
    """The backend that runs an op, and what was said of the others."""

    op: str
    device: str
    backend: str
    run: Callable[..., Any]
    decisions: tuple[Decision, ...]


def _rejection(
    row: backends.Backend, op: str, device: str, dtype: torch.dtype, specs: tuple[str | None, ...], by_name: bool
) -> str | None:
    if device not in row.devices and not (by_name and device in row.emulated()):
        return f"it runs on {', '.join(row.devices)} tensors, not {device}"
    missing = row.missing()
    if missing is not None:
        return missing
    module = row.load()
    if op not in module.OPS:
        return f"it has no kernel for {op}"
    if dtype.is_floating_point and dtype not in module.DTYPES:
        return f"it has no {str(dtype).removeprefix('torch.')} kernels"
    lacking = {format_in(spec): None for spec in specs if spec is not None and format_in(spec) not in module.FORMATS}
    return f"it has no kernel for {', '.join(lacking)}" if lacking else None


@functools.lru_cache(_MOST)
def _resolve(
    op: str, device: str, dtype: torch.dtype, specs: tuple[str | None, ...], explicit: str | None, source: str
) -> Selection:
    if explicit is not None and explicit not in backends.names():
        raise ValueError(f"{op}: {source} must be one of {', '.join(backends.names())}, got {explicit!r}")
    decisions: list[Decision] = []
    for row in backends.BACKENDS:
        if explicit not in (None, row.name):
            decisions.append(Decision(row.name, False, f"{source} asks for {explicit}"))
            continue
        reason = _rejection(row, op, device, dtype, specs, explicit is not None)
        if reason is None:
            decisions.append(Decision(row.name, True, f"takes {device} tensors" if explicit is None else source))
            return Selection(op, device, row.name, settled(op, row.load().OPS[op]), tuple(decisions))
        if explicit is not None:
            raise ValueError(f"{op}: backend {explicit!r} ({source}) cannot run this call: {reason}")
        decisions.append(Decision(row.name, False, reason))
    decisions.append(Decision(REFERENCE, True, source if explicit else "runs everywhere"))
    return Selection(op, device, REFERENCE, REFERENCES[op], tuple(decisions))


@functools.lru_cache(_MOST)
def _chosen(
    op: str, device: str, dtype: torch.dtype, specs: tuple[str | None, ...], backend: str | None, forced: str | None
) -> Selection:
    """As `resolve`, and say once when the backend made for this device does not serve."""
    explicit, source = (forced, "MOEFUSE_BACKEND") if backend is None else (backend, "backend=")
    selection = _resolve(op, device, dtype, specs, explicit, source)
    if explicit is None and selection.backend == REFERENCE:
        for row, decision in zip(backends.BACKENDS, selection.decisions, strict=False):
            if device in row.devices:
                _log.warning("moefuse: %s runs on plain torch: backend %s: %s", op, row.name, decision.reason)
    return selection


def select(op: str, like: torch.Tensor, backend: str | None, specs: tuple[str | None, ...] = ()) -> Selection:
    """The backend that runs ``op`` on tensors like ``like``, with weights in the formats of ``specs`` (None: plain)."""
    return _chosen(op, like.device.type, like.dtype, specs, backend, config.backend())


def resolve(op: str, device: str, dtype: torch.dtype) -> Selection:
    """The default choice for a device that need not be there."""
    return _resolve(op, device, dtype, (), config.backend(), "MOEFUSE_BACKEND")


def inherit(op: str, backend: str | None) -> str | None:
    """The choice to hand to a backward piece: the forward's, or the environment's, where that backend has the piece."""
    row = next((row for row in backends.BACKENDS if row.name == (backend or config.backend())), None)
    return backend if row is None or op in row.load().OPS else REFERENCE


def forget() -> None:
    """Drop remembered choices and read the environment anew, for tests that swap backends."""
    config.backend.cache_clear()
    _resolve.cache_clear()
    _chosen.cache_clear()
    for drop in FORGET:
        drop()
