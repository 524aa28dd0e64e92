"""Calls of the kernels taken down once and made again on other tensors, in one step from Python into C++.

A run on stand-ins, which share the memory of its arguments, shows what each kernel is given: which of its tensors is
which argument or buffer. Nothing is computed meanwhile. Replayed, the kernels get the addresses of other tensors; what
is not returned lies in one allocation that no tensor stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.recording import NothingElse, Unrecordable


def record(run: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[[Sequence[Tensor]], Any] | None:
    """A function that does what ``run(*tensors)`` does, on tensors laid out like these; None where that is more than
    to call kernels. ``run`` returns tensors, in a tuple or alone, or None among them."""
    with torch.inference_mode(False), torch.no_grad():
        stand_ins = tuple(t.detach() for t in tensors)
        recording = _native.core.Recording(stand_ins)
        try:
            with NothingElse(views=False) as mode:
                recording.open()
                try:
                    results = run(*stand_ins)
                finally:
                    recording.close()
        except Unrecordable:
            return None
        alone = not isinstance(results, tuple)
        returned = [results] if alone else list(results)
        fresh = [t for t in returned if t is not None and not _is_in(t, stand_ins)]
        buffers = recording.allocated() + fresh
        if not all(map(mode.allocated, buffers)) or len(set(map(id, fresh))) < len(fresh):
            return None
        recording.finish([(t, _like(t, stand_ins)) for t in returned], alone)
    replay: Callable[[Sequence[Tensor]], Any] = recording
    return replay


def _is_in(t: Tensor, others: Sequence[Tensor]) -> bool:
    return any(t is other for other in others)


def _like(t: Tensor | None, stand_ins: Sequence[Tensor]) -> int | Tensor | None:
    """What ``torch.empty_like`` makes a result of: the number of an argument, or a tensor that needs no memory."""
    if t is None:
        return None
    layout = t.shape, t.stride(), t.dtype
    found = (i for i, a in enumerate(stand_ins) if (a.shape, a.stride(), a.dtype) == layout)
    return next(found, t.new_empty(()).expand(t.shape))
