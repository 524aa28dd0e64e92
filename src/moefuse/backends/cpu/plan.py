"""plan on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native


def plan(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S = ids.numel()
    counts = torch.empty(num_experts, dtype=torch.int32)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32)
    order = torch.empty(S, dtype=torch.int32)
    inverse = torch.empty_like(order)
    _native.core.plan(
        ids.data_ptr(), ids.dtype == torch.int64, S, num_experts, counts.data_ptr(), offsets.data_ptr(),
        order.data_ptr(), inverse.data_ptr(),
    )  # fmt: skip
    return counts, offsets, order, inverse
