"""rope on the CPU."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Cache, Rotary


def rope(q: Tensor, k: Tensor, v: Tensor | None, rotary: Rotary, cache: Cache | None) -> tuple[Tensor, Tensor]:
    turned_q = _native.empty(q.shape, dtype=q.dtype)
    turned_k = _native.empty(k.shape if cache is None else 0, dtype=k.dtype)
    _native.core.rope(q, k, v, rotary, cache, turned_q, turned_k, _native.threads())
    return turned_q, turned_k
