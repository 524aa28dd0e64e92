"""The backward of combine on NVIDIA GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.combine import combine
from moefuse.backends.triton.runtime.launch import block_of, launch
from moefuse.backends.triton.tail_backward import tail_backward
from moefuse.types import Outputs, Tail


@triton.jit
def _rows_backward_kernel(
    d_ptr, y_ptr, weights_ptr, inverse_ptr, d_y_ptr, d_weights_ptr, H, top_k, BLOCK_H: tl.constexpr
):
    """d_y and d_weights of one slot. Grid: S."""
    s = tl.program_id(0).to(tl.int64)
    row = s
    if inverse_ptr is not None:
        row = tl.load(inverse_ptr + s).to(tl.int64)
    inside = (row >= 0) & (row < tl.num_programs(0))
    weight = tl.load(weights_ptr + s).to(tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    for start in range(0, H, BLOCK_H):
        h = start + tl.arange(0, BLOCK_H)
        mask = (h < H) & inside
        d = tl.load(d_ptr + (s // top_k) * H + h, mask=h < H, other=0.0).to(tl.float32)
        total += d * tl.load(y_ptr + row * H + h, mask, other=0.0).to(tl.float32)
        tl.store(d_y_ptr + row * H + h, (weight * d).to(d_y_ptr.dtype.element_ty), mask)
    tl.store(d_weights_ptr + s, tl.sum(total, 0).to(d_weights_ptr.dtype.element_ty))


def combine_backward(
    d_out: Tensor, d_normed: Tensor | None, y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail
) -> tuple[Tensor, ...]:
    (T, top_k), H = weights.shape, y.shape[1]
    total, d = None, d_out
    if d_normed is not None:
        total, d = torch.empty((T, H), dtype=torch.float32, device=y.device), d_out.float()
        combine(y, weights, inverse, tail._replace(norm_weight=None), Outputs(total))
    d_sum, *of_shared, d_norm_weight = tail_backward(d, d_normed, total, tail)
    if d_normed is not None:
        d = d_sum
    elif tail.norm_weight is not None:
        d_norm_weight = torch.zeros_like(tail.norm_weight)
    # Rows of y that no slot points to, as a bad inverse leaves them, have no gradient.
    d_y = torch.empty_like(y) if inverse is None else torch.zeros_like(y)
    d_weights = torch.empty_like(weights)
    tensors, BLOCK_H = (d, y, weights, inverse, d_y, d_weights), min(block_of(H), 1024)
    launch(_rows_backward_kernel, (T * top_k,), *tensors, H, top_k, BLOCK_H=BLOCK_H, num_warps=4)
    # A custom op must not return its input, hence the copy.
    d_residual = y.new_empty(0) if tail.residual is None else d.to(tail.residual.dtype, copy=True)
    return d_y, d_weights, *of_shared, d_residual, d_norm_weight
