"""gate on the CPU: norm, router product and routing in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Router, Routing


def gate(x: Tensor, router: Router, routing: Routing, return_normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    T, H = x.shape
    weights = _native.empty((T, routing.top_k), dtype=torch.float32)
    ids = _native.empty((T, routing.top_k), dtype=torch.int32)
    normed = _native.empty((T, H) if return_normed else 0, dtype=x.dtype)
    _native.core.gate(x, router, routing, weights, ids, normed if return_normed else None, _native.threads())
    return weights, ids, normed
