"""rope on NVIDIA GPUs: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.types import Cache, Rotary

#: heads of one program
_HEADS = 4


@triton.jit
def _turned(x_ptr, norm_ptr, cos, sin, eps, h, heads, stride_h, D, half, BLOCK_D: tl.constexpr):
    """Heads ``h`` of a token [HEADS, BLOCK_D], normed and rotated; sin has the sign of its half."""
    d = tl.arange(0, BLOCK_D)
    partner = tl.where(d < half, d + half, tl.where(d < 2 * half, d - half, d))
    mask = (h < heads)[:, None] & (d < D)[None, :]
    rows = x_ptr + h.to(tl.int64)[:, None] * stride_h
    x = tl.load(rows + d[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(rows + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        inverse_rms = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        x *= inverse_rms * tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        y *= inverse_rms * tl.load(norm_ptr + partner, mask=d < D, other=0.0).to(tl.float32)[None, :]
    return tl.where((d < 2 * half)[None, :], x * cos[None, :] + y * sin[None, :], x)


@triton.jit(do_not_specialize=["L"])
def _rope_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    keys_ptr,
    values_ptr,
    position_ptr,
    q_out_ptr,
    k_out_ptr,
    S,
    Hq,
    Hk,
    D,
    Dv,
    half,
    L,
    qkv_strides,
    angle_strides,
    cache_strides,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Grid: tokens, then blocks of HEADS heads: those of q, and behind them those of k with v's."""
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh = qkv_strides
    stride_cb, stride_cs, stride_sb, stride_ss = angle_strides
    wait()
    launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    b = row // S
    s = row % S
    d = tl.arange(0, BLOCK_D)
    turns = d < 2 * half
    angle = tl.where(d < half, d, d - half)
    cos = tl.load(cos_ptr + b * stride_cb + s * stride_cs + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + b * stride_sb + s * stride_ss + angle, mask=turns, other=0.0).to(tl.float32)
    sin = tl.where(d < half, -sin, sin)
    block = tl.program_id(1)
    q_blocks = (Hq + HEADS - 1) // HEADS
    if block < q_blocks:
        h = block * HEADS + tl.arange(0, HEADS)
        q_row = q_ptr + b * stride_qb + s * stride_qs
        turned = _turned(q_row, q_norm_ptr, cos, sin, eps, h, Hq, stride_qh, D, half, BLOCK_D)
        out_ptrs = q_out_ptr + (row * Hq + h)[:, None] * D + d[None, :]
        tl.store(out_ptrs, turned.to(q_out_ptr.dtype.element_ty), mask=(h < Hq)[:, None] & (d < D)[None, :])
    else:
        h = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        k_row = k_ptr + b * stride_kb + s * stride_ks
        turned = _turned(k_row, k_norm_ptr, cos, sin, eps, h, Hk, stride_kh, D, half, BLOCK_D)
        mask = (h < Hk)[:, None] & (d < D)[None, :]
        if keys_ptr is None:
            k_ptrs = k_out_ptr + (row * Hk + h)[:, None] * D + d[None, :]
            tl.store(k_ptrs, turned.to(k_out_ptr.dtype.element_ty), mask=mask)
        else:
            keys_b, keys_h, keys_l, values_b, values_h, values_l = cache_strides
            place = tl.load(position_ptr).to(tl.int64) + s
            inside = (place >= 0) & (place < L)
            heads = h.to(tl.int64)[:, None]
            k_ptrs = keys_ptr + b * keys_b + heads * keys_h + place * keys_l + d[None, :]
            tl.store(k_ptrs, turned.to(keys_ptr.dtype.element_ty), mask=mask & inside)
            dv = tl.arange(0, BLOCK_DV)
            mask_v = (h < Hk)[:, None] & (dv < Dv)[None, :] & inside
            v_ptrs = v_ptr + b * stride_vb + s * stride_vs + heads * stride_vh + dv[None, :]
            v = tl.load(v_ptrs, mask=mask_v, other=0.0)
            tl.store(values_ptr + b * values_b + heads * values_h + place * values_l + dv[None, :], v, mask=mask_v)


def rope(q: Tensor, k: Tensor, v: Tensor | None, rotary: Rotary, cache: Cache | None) -> tuple[Tensor, Tensor]:
    (B, S, Hq, D), Hk = q.shape, k.shape[2]
    turned_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    turned_k = torch.empty(k.shape if cache is None else 0, dtype=k.dtype, device=k.device)
    Dv, L = (D, 0) if v is None or cache is None else (v.shape[3], cache.keys.shape[2])
    places = (0,) * 6 if cache is None else (*cache.keys.stride()[:3], *cache.values.stride()[:3])
    angles = [(0 if t.shape[0] == 1 else t.stride(0), t.stride(1)) for t in (rotary.cos, rotary.sin)]
    launch(
        _rope_kernel,
        (B * S, ceil_div(Hq, _HEADS) + ceil_div(Hk, _HEADS)),
        *(q, k, v, *rotary),
        *((None, None, None) if cache is None else cache),
        *(turned_q, turned_k),
        *(S, Hq, Hk, D, Dv, rotary.cos.shape[2], L),
        (*q.stride()[:3], *k.stride()[:3], *(k if v is None else v).stride()[:3]),
        (*angles[0], *angles[1]),
        places,
        HEADS=_HEADS,
        BLOCK_D=block_of(D),
        BLOCK_DV=block_of(Dv),
        num_warps=max(1, block_of(D) // 128),
        launch_pdl=PDL,
    )
    return turned_q, turned_k
