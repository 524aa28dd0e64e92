"""A call like one that passed its checks goes straight to what that one ran.

Checking a decode step's arguments, choosing its backend and sorting out its launches cost Python several times what
the kernels cost a GPU. All of it hangs on the options and on how the tensors are laid out, never on their numbers or
addresses: a record is kept per such signature, and layers of equal shape share one. No tensor is kept.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse import backends
from moefuse.ops import select
from moefuse.ops.library import unwatched

#: run(facts, *tensors): the op's kernels, unchecked. Facts begin with the op whose backend runs all of it, the formats
#: of its weights and the asked-for backend; tensors begin with the one that decides.
Run = Callable[..., Any]
_DENSE = frozenset((Tensor, torch.nn.Parameter))
#: signatures kept; the oldest goes first. A server of every batch size to 512 with three such calls a layer fits
MOST = 2048
#: What backends specialise addresses on; a tensor that begins elsewhere is rare and takes the long way.
_ALIGNMENT = 16


class Record:
    """One signature that passed every check. ``again`` comes with its second call: most prefills come once."""

    __slots__ = ("again", "tried")

    def __init__(self) -> None:
        self.again: Callable[..., Any] | None = None
        self.tried = False


_RECORDS: dict[tuple[Any, ...], Record] = {}
select.FORGET.append(_RECORDS.clear)


class Sight(NamedTuple):
    """A call that may be repeated: its signature, what is known of that, its tensors and where they begin."""

    key: tuple[Any, ...]
    known: Record | None
    given: list[Tensor]
    addresses: list[int]


def sight(facts: tuple[Any, ...], tensors: tuple[Any, ...]) -> Sight | None:
    """What is known of a call; None where it must take the long way: traced, differentiated, or not plain tensors.

    Two calls of equal ``facts`` whose ``tensors`` have equal shapes, strides, types and device are equal to the
    checks and to the kernels. The type of each number in ``facts`` must stand beside it: True is not 1.0 to a check.
    """
    given = [t for t in tensors if t is not None]
    if not unwatched() or not _DENSE.issuperset(map(type, given)):
        return None
    if not given or (torch.is_grad_enabled() and True in [t.requires_grad for t in given]):
        return None
    if True in [t.is_neg() for t in given]:  # a view's sign is no part of its layout
        return None
    try:
        addresses = [t.data_ptr() for t in given]
        device = given[0].device
        key = (facts, device, *[t if t is None else (t.dtype, t.shape, t.stride()) for t in tensors])
        known = _RECORDS.get(key)
    except (RuntimeError, TypeError):  # without strides or a hash: the checks have words for it
        return None
    if functools.reduce(operator.or_, addresses) % _ALIGNMENT or [t.device for t in given].count(device) < len(given):
        return None
    return Sight(key, known, given, addresses)


def admit(call: Sight | None) -> None:
    """The call has passed every check of its op: others like it need none."""
    if call is not None and call.key not in _RECORDS:
        while len(_RECORDS) >= MOST:
            _RECORDS.pop(next(iter(_RECORDS)), None)
        _RECORDS[call.key] = Record()


def repeat(run: Run, call: Sight, tensors: tuple[Any, ...]) -> Any:
    """Run an admitted call: by its backend's recording where it makes one, else by ``run`` itself."""
    record = call.known
    assert record is not None
    if not record.tried:
        record.tried = True
        record.again = _recorded(run, call.key[0], tensors)
    if record.again is None:
        return run(call.key[0], *tensors)
    return record.again(call.given, call.addresses)


def _recorded(run: Run, facts: tuple[Any, ...], tensors: tuple[Any, ...]) -> Callable[..., Any] | None:
    op, specs, backend = facts[:3]
    chosen = select.select(op, tensors[0], backend, specs).backend
    row = next((row for row in backends.BACKENDS if row.name == chosen), None)
    recorder = None if row is None else getattr(row.load(), "record", None)
    if recorder is None:
        return None
    made: Callable[..., Any] | None = recorder(lambda *given: run(facts, *given), tensors)
    return made
