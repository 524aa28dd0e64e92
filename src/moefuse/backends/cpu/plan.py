"""plan on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native


def plan(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counts = _native.empty(num_experts, dtype=torch.int32)
    offsets = _native.empty(num_experts + 1, dtype=torch.int32)
    order = _native.empty(ids.numel(), dtype=torch.int32)
    inverse = torch.empty_like(order)
    _native.core.plan(ids, counts, offsets, order, inverse)
    return counts, offsets, order, inverse
