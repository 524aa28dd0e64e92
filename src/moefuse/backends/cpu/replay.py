"""Calls of the kernels taken down once and made again on other tensors, in one step from Python into C++.

A run on stand-ins, which share the memory of its arguments, shows what each kernel is given: which of its tensors is
which argument or buffer. Nothing is computed meanwhile. Replayed, the kernels get the addresses of other tensors; what
is not returned lies in one allocation that no tensor stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moefuse.backends.cpu import _native

_ALLOCATES = frozenset(("empty", "empty_like", "empty_strided", "new_empty"))
_ASKS = frozenset(("__get__", "_is_zerotensor", "dim", "is_contiguous", "is_neg", "numel", "size", "stride"))


class _Unrecordable(Exception):
    """A run does more than call kernels on its arguments and on buffers."""


class _NothingElse(TorchFunctionMode):
    """Refuses whatever of torch a replay would leave out: a copy, a fill, a view, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name not in _ALLOCATES | _ASKS:
            raise _Unrecordable(name)
        result = function(*args, **(kwargs or {}))
        if name in _ALLOCATES:
            self.made.append(result)
        elif isinstance(result, Tensor):
            raise _Unrecordable("a view")
        return result


def record(run: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[[tuple[Tensor, ...]], Any] | None:
    """A function that does what ``run(*tensors)`` does, on tensors laid out like these; None where that is more than
    to call kernels. ``run`` returns tensors, in a tuple or alone, or None among them."""
    with torch.inference_mode(False), torch.no_grad():
        stand_ins = tuple(t.detach() for t in tensors)
        recording = _native.core.Recording(stand_ins)
        try:
            with _NothingElse() as mode:
                recording.open()
                try:
                    results = run(*stand_ins)
                finally:
                    recording.close()
        except _Unrecordable:
            return None
        alone = not isinstance(results, tuple)
        returned = [results] if alone else list(results)
        fresh = [t for t in returned if t is not None and not _is_in(t, stand_ins)]
        known = all(_is_in(t, mode.made) and t.is_contiguous() for t in recording.allocated() + fresh)
        if not known or len(set(map(id, fresh))) < len(fresh):
            return None
        recording.finish([(t, _like(t, stand_ins)) for t in returned], alone)
    replay: Callable[[tuple[Tensor, ...]], Any] = recording
    return replay


def _is_in(t: Tensor, others: Iterable[Tensor]) -> bool:
    return any(t is other for other in others)


def _like(t: Tensor | None, stand_ins: Sequence[Tensor]) -> int | Tensor | None:
    """What ``torch.empty_like`` makes a result of: the number of an argument, or a tensor with next to no memory."""
    if t is None:
        return None
    layout = t.shape, t.stride(), t.dtype
    found = (i for i, a in enumerate(stand_ins) if (a.shape, a.stride(), a.dtype) == layout)
    # A single element would pass the strides of an expanded one on.
    return next(found, t.new_empty(t.shape) if t.numel() <= 1 else t.new_empty(()).expand(t.shape))
