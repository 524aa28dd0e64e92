"""A call like one that passed its checks goes straight to what that one ran.

Checking a decode step's arguments, choosing its backend and sorting out its launches cost Python several times what
the kernels cost a GPU. All of it hangs on the options and on how the tensors are laid out, never on their numbers or
addresses: a record is kept per such key, and layers of equal shape share one. No tensor is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from moefuse import backends, config
from moefuse.backends.cpu import _native
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
        self.again: Callable[[tuple[Tensor, ...]], Any] | None = None
        self.tried = False


#: all that checks and kernels look at: op, backend, the layouts of tensors and types of all values, and the options
Key = tuple[str, str | None, object, tuple[Any, ...]]
_RECORDS: dict[Key, Record] = {}
select.FORGET.append(_RECORDS.clear)


class Call(NamedTuple):
    """A call that may be repeated: its key, what is known of that, and its tensors."""

    key: Key
    record: Record | None
    tensors: tuple[Tensor, ...]

    @property
    def again(self) -> Callable[[tuple[Tensor, ...]], Any] | None:
        """The recording, where there is one."""
        return None if self.record is None else self.record.again


def _look(
    op: str, backend: str | None, values: tuple[Any, ...], gradients: bool
) -> tuple[Key, tuple[Tensor, ...]] | None:
    """Key and tensors of a call. None where a value is not plain, or a tensor lies strangely or, with ``gradients``,
    requires one. For installs without the C++ kernels, whose ``look`` takes a tenth of the time.
    """
    layouts: list[Any] = []
    options: list[Any] = []
    tensors: list[Tensor] = []
    for given in values:
        value = given
        layouts.append(type(value))  # True is not 1.0 to a check
        if type(value) is QuantTensor:
            options.append(value.spec)
            value = value.blocks
        if type(value) not in DENSE:
            options.append(value)
            continue
        try:
            begin = value.data_ptr()
            odd = begin % _ALIGNMENT or (begin == 0 and value.nbytes)
            layouts.append((value.dtype, value.device, value.shape, value.stride()))
        except RuntimeError:  # without memory or strides: the checks have words for it
            return None
        if odd or value.is_neg() or (gradients and value.requires_grad):  # a view's sign is no part of its layout
            return None
        tensors.append(value)
    if not tensors or not _PLAIN.issuperset(map(type, options)):
        return None
    return (op, backend, tuple(layouts), tuple(options)), tuple(tensors)


_CORE = _native.core
look: Callable[..., Any] = getattr(_CORE, "look", _look)


def lookup(op: str, backend: str | None, values: tuple[Any, ...]) -> Call | None:
    """What is known of a call with these options and tensors; None where it must take the long way: traced,
    differentiated, or with tensors that are not plain or lie strangely."""
    if _native.core is not _CORE or not unwatched():  # a tape stands for the kernels, and takes each call down itself
        return None
    looked = look(op, backend, values, torch.is_grad_enabled())
    if looked is None:
        return None
    key, tensors = looked
    try:
        record = _RECORDS.get(key)
    except TypeError:  # a backend without a hash: the checks have words for it
        return None
    if record is None and (len({t.device for t in tensors}) > 1 or not all(is_settled(t, True) for t in tensors)):
        return None
    return Call(key, record, tensors)


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
    again: R = record.again(call.tensors)
    return again


def _recorded(
    call: Call, function: Callable[..., Any], values: tuple[Any, ...]
) -> Callable[[tuple[Tensor, ...]], Any] | None:
    _, backend, *_ = call.key
    name = apart(backend)[0] or config.backend()
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

    made: Callable[[tuple[Tensor, ...]], Any] | None = recorder(on, call.tensors)
    return made
