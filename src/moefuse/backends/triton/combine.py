"""combine on NVIDIA GPUs: any subset of the tail in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.types import Outputs, Plan, Tail


@triton.jit
def finish(total, row, column, mask, H, tail):
    """Add shared expert and residual to the weighted sum of one token, float32 [BLOCK_H]; ``tail`` is pointers."""
    shared_ptr, shared_gate_ptr, shared_logit_ptr, residual_ptr = tail
    at = row * H + column
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + at, mask, other=0.0).to(tl.float32)
        if shared_gate_ptr is not None:
            shared = shared * tl.load(shared_gate_ptr + row).to(tl.float32)
        if shared_logit_ptr is not None:
            shared = shared / (1.0 + tl.exp(-tl.load(shared_logit_ptr + row).to(tl.float32)))
        total += shared
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _combine_kernel(
    y_ptr,
    weights_ptr,
    inverse_ptr,
    ids_ptr,
    offsets_ptr,
    shared_ptr,
    shared_gate_ptr,
    shared_logit_ptr,
    residual_ptr,
    norm_ptr,
    eps,
    out_ptr,
    normed_ptr,
    H,
    E,
    TOP_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid: tokens, column tiles."""
    wait()
    launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    # With a norm one program has the whole row; without, the columns are spread over the second axis.
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < H
    total = tl.zeros([BLOCK_H], tl.float32)
    rows = tl.num_programs(0).to(tl.int64) * TOP_K
    if offsets_ptr is not None:
        rows = tl.load(offsets_ptr + E).to(tl.int64)
    for j in tl.range(0, TOP_K, loop_unroll_factor=8):  # eight loads under way at once
        s = row * TOP_K + j
        weight = tl.load(weights_ptr + s).to(tl.float32)
        live = True
        if ids_ptr is not None:
            expert = tl.load(ids_ptr + s)
            live = (expert >= 0) & (expert < E)
        source = s
        if inverse_ptr is not None:
            source = tl.load(inverse_ptr + s).to(tl.int64)
            live = live & (source >= 0) & (source < rows)
        weight = tl.where(live, weight, 0.0)
        total += weight * tl.load(y_ptr + source * H + column, mask & live, other=0.0).to(tl.float32)
    tail = (shared_ptr, shared_gate_ptr, shared_logit_ptr, residual_ptr)
    total = finish(total, row, column, mask, H, tail)
    tl.store(out_ptr + row * H + column, total.to(out_ptr.dtype.element_ty), mask)
    if norm_ptr is not None:
        mean = tl.sum(total * total, 0) / H
        normed = total * (1.0 / tl.sqrt(mean + eps)) * tl.load(norm_ptr + column, mask, other=0.0).to(tl.float32)
        tl.store(normed_ptr + row * H + column, normed.to(normed_ptr.dtype.element_ty), mask)


def weighted_sum(
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    tail: Tail,
    outputs: Outputs,
    *,
    num_experts: int = 0,
    ids: Tensor | None = None,
    offsets: Tensor | None = None,
) -> None:
    """combine, with the ids at hand: slots without an expert are not read, nor are those that `offsets` leave out.

    The two agree but for a plan that a caller brought with other ids.
    """
    T, H = outputs.out.shape
    BLOCK_H = block_of(H) if tail.norm_weight is not None else min(block_of(H), 1024)
    tensors, grid = (y, weights, inverse, ids, offsets, *tail, *outputs), (T, ceil_div(H, BLOCK_H))
    options = {"TOP_K": weights.shape[1], "BLOCK_H": BLOCK_H, "num_warps": 4 if BLOCK_H <= 2048 else 8}
    launch(_combine_kernel, grid, *tensors, H, num_experts, **options, launch_pdl=PDL)


def combine(y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail, outputs: Outputs) -> None:
    weighted_sum(y, weights, inverse, tail, outputs)


@triton.jit
def _slot_sum_kernel(
    y_ptr, weights_ptr, inverse_ptr, offsets_ptr, out_ptr, E, N, stride_o, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """out [T, N] = the sum of each token's live slots in order; y [S, N] is expert-major. Grid: T, N tiles."""
    wait()
    launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(offsets_ptr + E)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.range(0, TOP_K, loop_unroll_factor=8):  # as above
        p = tl.load(inverse_ptr + t * TOP_K + j).to(tl.int64)
        live = p < count
        value = tl.load(y_ptr + p * N + n, mask=(n < N) & live, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            value *= tl.where(live, tl.load(weights_ptr + t * TOP_K + j).to(tl.float32), 0.0)
        total += value
    tl.store(out_ptr + t * stride_o + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def slot_sum(y: Tensor, weights: Tensor | None, plan: Plan, out: Tensor) -> None:
    """Sum slot rows into ``out`` ``[T, N]``, whose rows may be apart."""
    T, N = out.shape
    BLOCK = min(block_of(N), 1024)
    tensors, sizes = (y, weights, plan.inverse, plan.offsets, out), (plan.num_experts, N, out.stride(0))
    options = {"TOP_K": plan.top_k, "BLOCK": BLOCK, "num_warps": 4, "launch_pdl": PDL}
    launch(_slot_sum_kernel, (T, ceil_div(N, BLOCK)), *tensors, *sizes, **options)
