"""The weight gradient of the grouped product on Apple GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.metal.launch import Shader, ceil_div
from moefuse.backends.metal.tiles import TILE_M, TILE_N
from moefuse.types import Plan


def grouped_outer(grad: Tensor, x: Tensor, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    E, N, K, S = plan.num_experts, grad.shape[1], x.shape[1], plan.assignments
    out = torch.empty((E, N, K), dtype=grad.dtype, device=grad.device)
    if S == 0:
        return out.zero_()
    sizes = [N, K, max(1, S // max(1, x.shape[0])), int(gather), int(scatter), grad.stride(0), x.stride(0)]
    shader = Shader(("weights", "tiles", "grouped_outer"), {"X_T": x.dtype, "WIDE": "false"})
    groups = ceil_div(K, TILE_N), ceil_div(N, TILE_M), E
    shader.launch("grouped_outer", groups, 128, grad, x, plan.offsets, plan.order, out, sizes)
    return out
