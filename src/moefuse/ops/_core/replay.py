"""A call like one that passed its checks goes straight to what that one ran.

Checking a decode step's arguments, choosing its backend and sorting out its launches cost Python several times what
the kernels cost a GPU. All of it hangs on the options and on how the tensors are laid out, never on their numbers or
addresses: a record is kept per such key, and layers of equal shape share one. No tensor is kept.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from moefuse import backends, config
from moefuse.ops._core import select
from moefuse.ops._core.library import unwatched
from moefuse.ops._core.memory import is_settled
from moefuse.ops._core.schema import signature_of
from moefuse.quant.tensor import QuantTensor

P = ParamSpec("P")
R = TypeVar("R")

_DENSE = frozenset((Tensor, torch.nn.Parameter))
#: keys kept; the oldest goes first. A server of every batch size to 512 with three such calls a layer fits
MOST = 2048
#: What backends specialise addresses on; a tensor that begins elsewhere is rare and takes the long way.
_ALIGNMENT = 16


class Record:
    """One key that passed every check. ``again`` comes with its second call: most prefills come once."""

    __slots__ = ("again", "tried")

    def __init__(self) -> None:
        self.again: Callable[[list[Tensor], list[int]], Any] | None = None
        self.tried = False


class Key(NamedTuple):
    """All that checks and kernels look at. The type of an option stands beside it: True is not 1.0 to a check."""

    op: str
    backend: str | None
    device: torch.device
    #: a tensor's type, shape and strides, an option's type and value, or None
    values: tuple[Any, ...]


_RECORDS: dict[Key, Record] = {}
select.FORGET.append(_RECORDS.clear)


class Call(NamedTuple):
    """A call that may be repeated: its key, what is known of that, its tensors and where they begin."""

    key: Key
    record: Record | None
    tensors: list[Tensor]
    addresses: list[int]


def lookup(op: str, backend: str | None, values: Iterable[Any]) -> Call | None:
    """What is known of a call with these options and tensors; None where it must take the long way: traced,
    differentiated, or with tensors that are not plain or lie strangely."""
    if not unwatched():
        return None
    tensors: list[Tensor] = []
    layouts: list[Any] = []
    try:
        for value in values:
            if type(value) is QuantTensor:
                layouts.append(value.spec)
                value = value.blocks
            if type(value) in _DENSE:
                if not is_settled(value, True):
                    return None
                tensors.append(value)
                layouts.append((value.dtype, value.shape, value.stride()))
            elif isinstance(value, Tensor):
                return None
            else:
                layouts.append(None if value is None else (type(value), value))
        if not tensors or (torch.is_grad_enabled() and True in [t.requires_grad for t in tensors]):
            return None
        addresses = [t.data_ptr() for t in tensors]
        devices = [t.device for t in tensors]
        key = Key(op, backend, devices[0], tuple(layouts))
        record = _RECORDS.get(key)
    except (RuntimeError, TypeError):  # without strides or a hash: the checks have words for it
        return None
    if functools.reduce(operator.or_, addresses) % _ALIGNMENT or devices.count(devices[0]) < len(devices):
        return None
    return Call(key, record, tensors, addresses)


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
) -> Callable[[list[Tensor], list[int]], Any] | None:
    name, device = call.key.backend or config.backend(), call.key.device.type
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

    made: Callable[[list[Tensor], list[int]], Any] | None = recorder(on, call.tensors)
    return made
