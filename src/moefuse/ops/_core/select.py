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
from typing import Any, ParamSpec, TypeVar

import torch

from moefuse import backends, config
from moefuse.backends import REFERENCE
from moefuse.ops._core import memory
from moefuse.ops._core.invariance import apart
from moefuse.ops._core.invariance import like as in_mode_of
from moefuse.quant.tensor import format_in
from moefuse.types import name_of

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("moefuse")

#: remembered choices; the oldest goes first
_MOST = 1024
#: op name -> reference, filled by the op pages
REFERENCES: dict[str, Callable[..., Any]] = {}
#: what else rests on a choice and goes when choices are forgotten
FORGET: list[Callable[[], Any]] = []


#: ops without arithmetic: their reference is the same in every batch
_WHOLE_NUMBERS = frozenset(("plan",))


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
    #: takes any tensors
    run: Callable[..., Any]
    #: takes settled ones, see `moefuse.ops._core.memory`
    kernel: Callable[..., Any]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class _Question:
    """What decides which backend runs an op."""

    op: str
    device: str
    dtype: torch.dtype
    specs: tuple[str | None, ...] = ()
    saves: bool = False
    backend: str | None = None
    forced: str | None = None
    invariant: bool = False


def _rejection(row: backends.Backend, asked: _Question, by_name: bool) -> str | None:
    if asked.device not in row.devices and not (by_name and asked.device in row.emulated()):
        return f"it runs on {', '.join(row.devices)} tensors, not {asked.device}"
    missing = row.missing()
    if missing is not None:
        return missing
    module, lacking_op = row.load(), _lacking(row, asked.op, asked.saves)
    if lacking_op is not None:
        return lacking_op
    if asked.dtype.is_floating_point and asked.dtype not in module.DTYPES:
        return f"it has no {name_of(asked.dtype)} kernels"
    formats = [format_in(spec) for spec in asked.specs if spec is not None]
    lacking = dict.fromkeys(format for format in formats if format not in module.FORMATS)
    return f"it has no kernel for {', '.join(lacking)}" if lacking else None


def _lacking(row: backends.Backend, op: str, saves: bool) -> str | None:
    """Why a backend that runs here cannot run an op, whatever the tensors."""
    if op not in row.load().OPS:
        return f"it has no kernel for {op}"
    return f"its {op} keeps nothing for gradients" if saves and not row.saves() else None


def _answer(asked: _Question) -> Selection:
    explicit, source = (asked.forced, "MOEFUSE_BACKEND") if asked.backend is None else (asked.backend, "backend=")
    op = asked.op
    if explicit is not None and explicit not in backends.names():
        raise ValueError(f"{op}: {source} must be one of {', '.join(backends.names())}, got {explicit!r}")
    decisions: list[Decision] = []
    for row in backends.BACKENDS:
        if explicit not in (None, row.name):
            decisions.append(Decision(row.name, False, f"{source} asks for {explicit}"))
            continue
        reason = _rejection(row, asked, explicit is not None)
        if reason is None:
            why = f"takes {asked.device} tensors" if explicit is None else source
            decisions.append(Decision(row.name, True, why))
            kernel = row.load().OPS[op]
            if asked.invariant:
                kernel = backends.invariantly(kernel)
            return Selection(op, asked.device, row.name, memory.settled(op, kernel), kernel, tuple(decisions))
        if explicit is not None:
            raise ValueError(f"{op}: backend {explicit!r} ({source}) cannot run this call: {reason}")
        decisions.append(Decision(row.name, False, reason))
    if asked.invariant and op not in _WHOLE_NUMBERS:
        tried = "; ".join(f"{d.backend}: {d.reason}" for d in decisions if explicit is None)
        raise ValueError(
            f"{op}: plain torch gives a row other bits in another batch, so it does not run inside invariant()"
            + (f"; and no backend can run this call: {tried}" if tried else "")
        )
    decisions.append(Decision(REFERENCE, True, source if explicit else "runs everywhere"))
    return Selection(op, asked.device, REFERENCE, REFERENCES[op], REFERENCES[op], tuple(decisions))


@functools.lru_cache(_MOST)
def _chosen(
    op: str,
    device: str,
    dtype: torch.dtype,
    specs: tuple[str | None, ...],
    saves: bool,
    backend: str | None,
    forced: str | None,
) -> Selection:
    """The answer; said once when the backend made for this device does not serve."""
    name, invariant = apart(backend)
    selection = _answer(_Question(op, device, dtype, specs, saves, name, forced, invariant))
    if name is None and forced is None and selection.backend == REFERENCE:
        for row, decision in zip(backends.BACKENDS, selection.decisions, strict=False):
            if device in row.devices:
                _say(op, row.name, decision.reason)
    return selection


@functools.lru_cache(_MOST)
def _say(op: str, backend: str, reason: str) -> None:
    """Once for each op and reason: a call that is slow for no fault of its own must not be so in silence."""
    _log.warning("moefuse: %s runs on plain torch: backend %s: %s", op, backend, reason)


def choose(
    op: str, like: torch.Tensor, backend: str | None, specs: tuple[str | None, ...] = (), saves: bool = False
) -> Selection:
    """The backend that runs ``op`` on tensors like ``like``.

    ``specs``: of the weights' formats, None for numbers. ``saves``: for a backward pass that follows.
    """
    return _chosen(op, like.device.type, like.dtype, specs, saves, backend, config.backend())


def select(
    reference: Callable[P, R],
    like: torch.Tensor,
    backend: str | None,
    specs: tuple[str | None, ...] = (),
    *,
    saves: bool = False,
    settled: bool = False,
) -> Callable[P, R]:
    """What runs in the place of an op's reference; see `choose`. ``settled``: every tensor is so already."""
    chosen = choose(reference.__name__.removesuffix("_reference"), like, backend, specs, saves)
    return chosen.kernel if settled else chosen.run


def resolve(op: str, device: str, dtype: torch.dtype) -> Selection:
    """The default choice for a device that need not be there."""
    return _answer(_Question(op, device, dtype, forced=config.backend()))


def inherit(op: str, backend: str | None, saves: bool = False) -> str | None:
    """The choice to hand to a part of an op: the op's, or the environment's, where that backend has the part.

    Where it has not, the reference, and that is said once.
    """
    row = backends.find(apart(backend)[0] or config.backend())
    reason = None if row is None else _lacking(row, op, saves)
    if row is None or reason is None:
        return backend
    _say(op, row.name, reason)
    return in_mode_of(backend, REFERENCE)


def forget() -> None:
    """Drop remembered choices and read the environment anew, for tests that swap backends."""
    config.backend.cache_clear()
    _chosen.cache_clear()
    _say.cache_clear()
    for drop in FORGET:
        drop()
