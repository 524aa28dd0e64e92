"""attend on the CPU."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Cache


def attend(
    q: Tensor, cache: Cache, mask: Tensor | None, sinks: Tensor | None, scale: float, window: int | None
) -> Tensor:
    out = _native.empty((*q.shape[:2], cache.values.shape[3]), dtype=q.dtype)
    _native.core.attend(q, cache, mask, sinks, scale, window or 0, out, _native.threads())
    return out
