"""The backward of combine and of its tail on NVIDIA GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.combine import combine
from moefuse.backends.triton.runtime.launch import block_of, ceil_div, launch

#: tokens whose part of a norm weight's gradient one program sums
_TOKENS = 64


@triton.jit
def norm_row_backward(d, x, weight, inverse_rms, H):
    """The gradient of one RMSNorm's input [BLOCK_H]; lanes past H hold zeros."""
    unit = x * inverse_rms
    d_unit = d * weight
    return inverse_rms * (d_unit - unit * (tl.sum(d_unit * unit, 0) / H))


@triton.jit
def _tail_backward_kernel(
    d_out_ptr, d_normed_ptr, total_ptr, shared_ptr, gate_ptr, logit_ptr, norm_ptr, d_sum_ptr, d_shared_ptr, d_gate_ptr,
    d_logit_ptr, rms_ptr, H, eps,
    HAS_NORM: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LOGIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One token: through the norm, then to the shared expert and its gate. Grid: T."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < H
    at = t * H + h
    d = tl.load(d_out_ptr + at, mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        total = tl.load(total_ptr + at, mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + h, mask, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + at, mask, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt(tl.sum(total * total, 0) / H + eps)
        d += norm_row_backward(d_normed, total, weight, inverse_rms, H)
        tl.store(rms_ptr + t, inverse_rms)
        tl.store(d_sum_ptr + at, d.to(d_sum_ptr.dtype.element_ty), mask)
    if HAS_SHARED:
        shared = tl.load(shared_ptr + at, mask, other=0.0).to(tl.float32)
        dot = tl.sum(d * shared, 0)
        if HAS_GATE:
            d = d * tl.load(gate_ptr + t).to(tl.float32)
            tl.store(d_gate_ptr + t, dot.to(d_gate_ptr.dtype.element_ty))
        if HAS_LOGIT:
            factor = 1.0 / (1.0 + tl.exp(-tl.load(logit_ptr + t).to(tl.float32)))
            d = d * factor
            tl.store(d_logit_ptr + t, (dot * factor * (1.0 - factor)).to(d_logit_ptr.dtype.element_ty))
        tl.store(d_shared_ptr + at, d.to(d_shared_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["T"])
def _norm_weight_kernel(
    d_ptr, x_ptr, rms_ptr, parts_ptr, T, H, stride_xt, stride_xh,
    TOKENS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """parts [blocks, H]: the sum over TOKENS tokens of d * x * rms^-1. Grid: token blocks, H blocks."""
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for start in range(0, TOKENS, BLOCK_T):
        t = (tl.program_id(0) * TOKENS + start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (t < T)[:, None] & (h < H)[None, :]
        d = tl.load(d_ptr + t[:, None] * H + h[None, :], mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + t[:, None] * stride_xt + h[None, :] * stride_xh, mask, other=0.0).to(tl.float32)
        total += d * x * tl.load(rms_ptr + t, mask=t < T, other=0.0)[:, None]
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * H + h, tl.sum(total, 0), mask=h < H)


def norm_weight_gradient(d: Tensor, x: Tensor, inverse_rms: Tensor, norm_weight: Tensor) -> Tensor:
    """Sum over tokens, block by block in order. d is dense."""
    T, H = d.shape
    blocks = ceil_div(T, _TOKENS)
    parts = torch.empty((blocks, H), dtype=torch.float32, device=d.device)
    launch(
        _norm_weight_kernel, (blocks, ceil_div(H, 64)), d, x, inverse_rms, parts, T, H, *x.stride(), TOKENS=_TOKENS,
        BLOCK_T=16, BLOCK_H=64, num_warps=4,
    )  # fmt: skip
    return parts.sum(0).to(norm_weight.dtype)


def tail_backward(
    d_out: Tensor,
    d_normed: Tensor | None,
    total: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    T, H = d_out.shape
    normed = d_normed is not None
    like = (d_out if normed else None, shared, shared_gate, shared_logit)
    found = tuple(d_out.new_empty(0) if t is None else torch.empty_like(t) for t in like)
    inverse_rms = torch.empty(T if normed else 0, dtype=torch.float32, device=d_out.device)
    BLOCK_H = block_of(H)
    launch(
        _tail_backward_kernel, (T,), d_out, d_normed, total, shared, shared_gate, shared_logit,
        norm_weight, *found, inverse_rms, H, eps, HAS_NORM=normed, HAS_SHARED=shared is not None,
        HAS_GATE=shared_gate is not None, HAS_LOGIT=shared_logit is not None, BLOCK_H=BLOCK_H,
        num_warps=4 if BLOCK_H <= 2048 else 8,
    )  # fmt: skip
    d_norm_weight = d_out.new_empty(0)
    if d_normed is not None and total is not None and norm_weight is not None:
        d_norm_weight = norm_weight_gradient(d_normed, total, inverse_rms, norm_weight)
    return *found, d_norm_weight


@triton.jit
def _rows_backward_kernel(
    d_ptr, y_ptr, weights_ptr, inverse_ptr, d_y_ptr, d_weights_ptr, H, top_k,
    HAS_INVERSE: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """d_y and d_weights of one slot. Grid: S."""
    s = tl.program_id(0).to(tl.int64)
    row = s
    if HAS_INVERSE:
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
    d_out: Tensor,
    d_normed: Tensor | None,
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    (T, top_k), H = weights.shape, y.shape[1]
    total = None
    if d_normed is not None:
        total = torch.empty((T, H), dtype=torch.float32, device=y.device)
        combine(y, weights, inverse, shared, shared_gate, shared_logit, residual, None, eps, total, None)
    d_sum, *of_tail = tail_backward(
        d_out if d_normed is None else d_out.float(), d_normed, total, shared, shared_gate, shared_logit, norm_weight,
        eps,
    )  # fmt: skip
    d = d_out if d_normed is None else d_sum
    # Rows of y that no slot points to, as a bad inverse leaves them, have no gradient.
    d_y = torch.empty_like(y) if inverse is None else torch.zeros_like(y)
    d_weights = torch.empty_like(weights)
    launch(
        _rows_backward_kernel, (T * top_k,), d, y, weights, inverse, d_y, d_weights, H, top_k,
        HAS_INVERSE=inverse is not None, BLOCK_H=min(block_of(H), 1024), num_warps=4,
    )  # fmt: skip
    # A custom op must not return its input, hence the copy.
    d_residual = y.new_empty(0) if residual is None else d.to(residual.dtype, copy=True)
    d_norm_weight = of_tail.pop()
    if d_normed is None and norm_weight is not None:
        d_norm_weight = torch.zeros_like(norm_weight)
    return d_y, d_weights, *of_tail, d_residual, d_norm_weight
