"""The backward of what follows the experts' sum on NVIDIA GPUs: shared expert and norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.runtime.launch import block_of, ceil_div, launch
from moefuse.types import Tail

#: tokens whose part of a norm weight's gradient one program sums
_TOKENS = tl.constexpr(64)


@triton.jit
def norm_row_backward(d, x, weight, inverse_rms, H):
    """The gradient of one RMSNorm's input [BLOCK_H]; lanes past H hold zeros."""
    unit = x * inverse_rms
    d_unit = d * weight
    return inverse_rms * (d_unit - unit * (tl.sum(d_unit * unit, 0) / H))


@triton.jit
def _tail_backward_kernel(
    d_out_ptr,
    d_normed_ptr,
    total_ptr,
    shared_ptr,
    gate_ptr,
    logit_ptr,
    norm_ptr,
    d_sum_ptr,
    d_shared_ptr,
    d_gate_ptr,
    d_logit_ptr,
    rms_ptr,
    H,
    eps,
    BLOCK_H: tl.constexpr,
):
    """One token: through the norm, then to the shared expert and its gate. Grid: T."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < H
    at = t * H + h
    d = tl.load(d_out_ptr + at, mask, other=0.0).to(tl.float32)
    if d_normed_ptr is not None:
        total = tl.load(total_ptr + at, mask, other=0.0).to(tl.float32)
        weight = tl.load(norm_ptr + h, mask, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + at, mask, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt(tl.sum(total * total, 0) / H + eps)
        d += norm_row_backward(d_normed, total, weight, inverse_rms, H)
        tl.store(rms_ptr + t, inverse_rms)
        tl.store(d_sum_ptr + at, d.to(d_sum_ptr.dtype.element_ty), mask)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + at, mask, other=0.0).to(tl.float32)
        dot = tl.sum(d * shared, 0)
        if gate_ptr is not None:
            d = d * tl.load(gate_ptr + t).to(tl.float32)
            tl.store(d_gate_ptr + t, dot.to(d_gate_ptr.dtype.element_ty))
        if logit_ptr is not None:
            factor = 1.0 / (1.0 + tl.exp(-tl.load(logit_ptr + t).to(tl.float32)))
            d = d * factor
            tl.store(d_logit_ptr + t, (dot * factor * (1.0 - factor)).to(d_logit_ptr.dtype.element_ty))
        tl.store(d_shared_ptr + at, d.to(d_shared_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["T"])
def _norm_weight_kernel(d_ptr, x_ptr, rms_ptr, parts_ptr, T, H, x_strides):
    """parts [chunks, H]: the sum over _TOKENS tokens of d * x * rms^-1. Grid: token chunks, H tiles."""
    BLOCK_T: tl.constexpr = 16
    BLOCK_H: tl.constexpr = 64
    stride_xt, stride_xh = x_strides
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for start in range(0, _TOKENS, BLOCK_T):
        t = (tl.program_id(0) * _TOKENS + start + tl.arange(0, BLOCK_T)).to(tl.int64)
        mask = (t < T)[:, None] & (h < H)[None, :]
        d = tl.load(d_ptr + t[:, None] * H + h[None, :], mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + t[:, None] * stride_xt + h[None, :] * stride_xh, mask, other=0.0).to(tl.float32)
        total += d * x * tl.load(rms_ptr + t, mask=t < T, other=0.0)[:, None]
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * H + h, tl.sum(total, 0), mask=h < H)


def norm_weight_gradient(d: Tensor, x: Tensor, inverse_rms: Tensor, norm_weight: Tensor) -> Tensor:
    """Sum over tokens, chunk by chunk in order. d is dense."""
    T, H = d.shape
    chunks = ceil_div(T, _TOKENS.value)
    parts = torch.empty((chunks, H), dtype=torch.float32, device=d.device)
    launch(_norm_weight_kernel, (chunks, ceil_div(H, 64)), d, x, inverse_rms, parts, T, H, x.stride(), num_warps=4)
    return parts.sum(0).to(norm_weight.dtype)


def tail_backward(d_out: Tensor, d_normed: Tensor | None, total: Tensor | None, tail: Tail) -> tuple[Tensor, ...]:
    T, H = d_out.shape
    shared, shared_gate, shared_logit, _, norm_weight, eps = tail
    like = (None if d_normed is None else d_out, shared, shared_gate, shared_logit)
    grads = tuple(d_out.new_empty(0) if t is None else torch.empty_like(t) for t in like)
    inverse_rms = torch.empty(0 if d_normed is None else T, dtype=torch.float32, device=d_out.device)
    BLOCK_H = block_of(H)
    tensors = d_normed, total, shared, shared_gate, shared_logit, norm_weight, *grads, inverse_rms
    warps = 4 if BLOCK_H <= 2048 else 8
    launch(_tail_backward_kernel, (T,), d_out, *tensors, H, eps, BLOCK_H=BLOCK_H, num_warps=warps)
    d_norm_weight = d_out.new_empty(0)
    if d_normed is not None and total is not None and norm_weight is not None:
        d_norm_weight = norm_weight_gradient(d_normed, total, inverse_rms, norm_weight)
    return *grads, d_norm_weight
