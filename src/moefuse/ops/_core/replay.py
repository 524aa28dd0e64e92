"""A call like one that passed its checks goes straight to what that one ran.

Checking a decode step's arguments, choosing its backend and sorting out its launches cost Python several times what
the kernels cost a GPU. All of it hangs on the options and on how the tensors are laid out, never on their numbers or
addresses: a record is kept per such key, and layers of equal shape share one. No tensor is kept.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from moefuse import backends, config
from moefuse.ops._core import select
from moefuse.ops._core.invariance import apart
from moefuse.ops._core.library import PLAIN, unwatched
from moefuse.ops._core.memory import DENSE, is_settled
from moefuse.ops._core.schema import signature_of
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation, Routing

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN = PLAIN | {Routing, Activation}
#: keys kept; the oldest goes first. A server of every batch size to 512 with three such calls a layer fits
MOST = 2048
#: What backends specialise addresses on; a tensor that begins elsewhere is rare and takes the long way.
_ALIGNMENT = 16


class Record:
    """One key that passed every check. ``again`` comes with its second call: most prefills come once."""

    __slots__ = ("again", "tried")

    def __init__(self) -> None:
        self.again: Callable[[Sequence[Tensor], Sequence[int]], Any] | None = None
        self.tried = False


class Sort:
    """Where among the values of a call its tensors stand and where its options, by the types of all. An option's type
    counts: True is not 1.0 to a check."""

    def __init__(self, kinds: tuple[type, ...]) -> None:
        dense = [kind in DENSE for kind in kinds]
        self.tensors: Callable[[Sequence[Any]], tuple[Tensor, ...]] = _picker(dense, True)
        self.options: Callable[[Sequence[Any]], tuple[Any, ...]] = _picker(dense, False)


def _picker(dense: list[bool], wanted: bool) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    places = [place for place, is_dense in enumerate(dense) if is_dense == wanted]
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)


_SORTS: dict[tuple[type, ...], Sort] = {}


def _sort(kinds: tuple[type, ...]) -> Sort | None:
    """None where there is no tensor, or something that a key cannot hold."""
    if not _PLAIN.issuperset(kinds) or DENSE.isdisjoint(kinds):
        return None
    return _SORTS.setdefault(kinds, Sort(kinds))


class Key(NamedTuple):
    """All that checks and kernels look at."""

    op: str
    backend: str | None
    sort: Sort
    options: tuple[Any, ...]
    #: element type, device, shape and strides of each tensor
    layouts: tuple[tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]], ...]


_RECORDS: dict[Key, Record] = {}
select.FORGET.append(_RECORDS.clear)


class Call(NamedTuple):
    """A call that may be repeated: its key, what is known of that, its tensors and where they begin."""

    key: Key
    record: Record | None
    tensors: tuple[Tensor, ...]
    addresses: list[int]

    @property
    def again(self) -> Callable[[Sequence[Tensor], Sequence[int]], Any] | None:
        """The recording, where there is one."""
        return None if self.record is None else self.record.again


def lookup(op: str, backend: str | None, values: Sequence[Any]) -> Call | None:
    """What is known of a call with these options and tensors; None where it must take the long way: traced,
    differentiated, or with tensors that are not plain or lie strangely."""
    if not unwatched():
        return None
    kinds = tuple(map(type, values))
    if QuantTensor in kinds:
        values = _apart(values, kinds)
        kinds = tuple(map(type, values))
    sort = _SORTS.get(kinds) or _sort(kinds)
    if sort is None:
        return None
    tensors = sort.tensors(values)
    if torch.is_grad_enabled() and True in [t.requires_grad for t in tensors]:
        return None
    if True in [t.is_neg() for t in tensors]:  # a view's sign is no part of its layout
        return None
    try:
        addresses = [t.data_ptr() for t in tensors]
        layouts = tuple([(t.dtype, t.device, t.shape, t.stride()) for t in tensors])
        key = Key(op, backend, sort, sort.options(values), layouts)
        record = _RECORDS.get(key)
    except (RuntimeError, TypeError):  # without strides or a hash: the checks have words for it
        return None
    if functools.reduce(operator.or_, addresses) % _ALIGNMENT:
        return None
    if record is None and (len({t.device for t in tensors}) > 1 or not all(is_settled(t, True) for t in tensors)):
        return None
    return Call(key, record, tensors, addresses)


def _apart(values: Sequence[Any], kinds: tuple[type, ...]) -> list[Any]:
    """The values, with the spec and the bytes of blocks in their place. A loop over all values costs 3 us."""
    apart = list(values)
    place = -1
    for moved in range(kinds.count(QuantTensor)):
        place = kinds.index(QuantTensor, place + 1)
        weight = values[place]
        apart[place + moved : place + moved + 1] = (weight.spec, weight.blocks)
    return apart


def run(call: Call, function: Callable[P, R], *values: P.args, **named: P.kwargs) -> R:
    """Run a call that passed every check: by its backend's recording where it makes one, else by ``function`` itself.

    The first of its kind is run by ``function`` and remembered, the second is recorded.
    """
    record = call.record
    if record is None:
        result = function(*values, **named)
        while len(_RECORDS) >= MOST:
            _RECORDS.pop(next(iter(_RECORDS)), None)
        _RECORDS[call.key] = Record()
        return result
    if not record.tried:
        record.tried = True
        record.again = _recorded(call, function, values)
    if record.again is None:
        return function(*values, **named)
    again: R = record.again(call.tensors, call.addresses)
    return again


def _recorded(
    call: Call, function: Callable[..., Any], values: tuple[Any, ...]
) -> Callable[[Sequence[Tensor], Sequence[int]], Any] | None:
    name = apart(call.key.backend)[0] or config.backend()
    device = next(iter(call.tensors)).device.type
    row = next((row for row in backends.BACKENDS if row.name == name or (name is None and device in row.devices)), None)
    recorder = None if row is None or row.missing() is not None else getattr(row.load(), "record", None)
    if recorder is None:
        return None
    signature = signature_of(function)
    flat = signature.flatten(values)
    taken = [value for value in flat if isinstance(value, Tensor)]
    assert list(map(id, taken)) == list(map(id, call.tensors)), "a key's values stand in the order of its function's"

    def on(*tensors: Tensor) -> Any:
        others = iter(tensors)
        return function(*signature.rebuild([next(others) if isinstance(value, Tensor) else value for value in flat]))

    made: Callable[[Sequence[Tensor], Sequence[int]], Any] | None = recorder(on, call.tensors)
    return made
