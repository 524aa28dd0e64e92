"""combine on NVIDIA GPUs: any subset of the tail in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait


@triton.jit
def finish(
    total, row, column, mask, H, shared_ptr, shared_gate_ptr, shared_logit_ptr, residual_ptr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LOGIT: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add shared expert and residual to the weighted sum of one token, float32 [BLOCK_H]."""
    at = row * H + column
    if HAS_SHARED:
        shared = tl.load(shared_ptr + at, mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            shared = shared * tl.load(shared_gate_ptr + row).to(tl.float32)
        if HAS_LOGIT:
            shared = shared / (1.0 + tl.exp(-tl.load(shared_logit_ptr + row).to(tl.float32)))
        total += shared
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _combine_kernel(
    y_ptr, weights_ptr, inverse_ptr, ids_ptr, offsets_ptr, shared_ptr, shared_gate_ptr, shared_logit_ptr,
    residual_ptr, norm_ptr, out_ptr, normed_ptr, H, E, eps,
    HAS_INVERSE: tl.constexpr, HAS_IDS: tl.constexpr, HAS_OFFSETS: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_LOGIT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    TOP_K: tl.constexpr, PDL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    wait(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    # With a norm one program has the whole row; without, the columns are spread over the second axis.
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = column < H
    total = tl.zeros([BLOCK_H], tl.float32)
    rows = tl.num_programs(0).to(tl.int64) * TOP_K
    if HAS_OFFSETS:
        rows = tl.load(offsets_ptr + E).to(tl.int64)
    for j in range(TOP_K):
        s = row * TOP_K + j
        weight = tl.load(weights_ptr + s).to(tl.float32)
        live = True
        if HAS_IDS:
            expert = tl.load(ids_ptr + s)
            live = (expert >= 0) & (expert < E)
        source = s
        if HAS_INVERSE:
            source = tl.load(inverse_ptr + s).to(tl.int64)
            live = live & (source >= 0) & (source < rows)
        weight = tl.where(live, weight, 0.0)
        total += weight * tl.load(y_ptr + source * H + column, mask & live, other=0.0).to(tl.float32)
    total = finish(
        total, row, column, mask, H, shared_ptr, shared_gate_ptr, shared_logit_ptr, residual_ptr,
        HAS_SHARED, HAS_GATE, HAS_LOGIT, HAS_RESIDUAL,
    )  # fmt: skip
    tl.store(out_ptr + row * H + column, total.to(out_ptr.dtype.element_ty), mask)
    if HAS_NORM:
        mean = tl.sum(total * total, 0) / H
        normed = total * (1.0 / tl.sqrt(mean + eps)) * tl.load(norm_ptr + column, mask, other=0.0).to(tl.float32)
        tl.store(normed_ptr + row * H + column, normed.to(normed_ptr.dtype.element_ty), mask)


def weighted_sum(
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    ids: Tensor | None,
    offsets: Tensor | None,
    num_experts: int,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    """combine, with the ids at hand: slots without an expert are not read, nor are those that `offsets` leave out.

    The two agree but for a plan that a caller brought with other ids.
    """
    T, H = out.shape
    BLOCK_H = block_of(H) if norm_weight is not None else min(block_of(H), 1024)
    launch(
        _combine_kernel, (T, ceil_div(H, BLOCK_H)), y, weights, inverse, ids, offsets, shared, shared_gate,
        shared_logit, residual, norm_weight, out, normed_out, H, num_experts, eps,
        HAS_INVERSE=inverse is not None, HAS_IDS=ids is not None, HAS_OFFSETS=offsets is not None,
        HAS_SHARED=shared is not None, HAS_GATE=shared_gate is not None, HAS_LOGIT=shared_logit is not None,
        HAS_RESIDUAL=residual is not None, HAS_NORM=norm_weight is not None, TOP_K=weights.shape[1], PDL=PDL,
        BLOCK_H=BLOCK_H, num_warps=4 if BLOCK_H <= 2048 else 8, launch_pdl=PDL,
    )  # fmt: skip


def combine(
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    weighted_sum(
        y,
        weights,
        inverse,
        None,
        None,
        0,
        shared,
        shared_gate,
        shared_logit,
        residual,
        norm_weight,
        eps,
        out,
        normed_out,
    )
