"""experts for the few tokens of a decode step: matrix-vector products, no plan, two launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.combine import finish
from moefuse.backends.triton.formats.blocks import KINDS
from moefuse.backends.triton.formats.rows import (
    ROUNDED_TOGETHER,
    hidden_rows,
    load_chunks,
    row_products,
    store_rounded,
    x_chunks,
)
from moefuse.backends.triton.grouped_linear import decoder_of, may_round, row_sums, rows_of, up_weights
from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tiles import Tile
from moefuse.backends.triton.runtime.tuned import Product, tile_for
from moefuse.types import Activation, Outputs, Stacks, Tail


class _UpForm(NamedTuple):
    """What the up product is compiled for.

    ``k``: K, where weights are in blocks; ``chunks``: see `row_products`. ``rounded``: blocks times x in 8 bits.
    ``whole``: block_n divides N.
    """

    gated: bool
    top_k: int
    k: int
    chunks: int
    rounded: bool
    whole: bool
    block_n: int
    block_k: int
    stages: int


class _DownForm(NamedTuple):
    """Likewise the down product, which holds as many ``slots`` as the power of two that covers ``top_k``."""

    k: int
    chunks: int
    rounded: bool
    whole: bool
    top_k: int
    slots: int
    block_n: int
    block_k: int
    block_h: int
    stages: int


@triton.jit
def _number_row(x_row, stride_xk, ptrs, n, N, K, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr):
    """One row of x times rows ``n`` of numbers, and of second ones if GATED: [BLOCK_N] float32 each."""
    w_ptr, stride_wn, stride_wk, u_ptr, stride_un, stride_uk = ptrs
    BLOCK_N: tl.constexpr = n.shape[0]
    inside = n < N
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_row + k * stride_xk
    w_ptrs = w_ptr + n.to(tl.int64)[:, None] * stride_wn + k[None, :] * stride_wk
    u_ptrs = u_ptr + n.to(tl.int64)[:, None] * stride_un + k[None, :] * stride_uk
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        left = k < K - start
        x = tl.load(x_ptrs, mask=left, other=0.0).to(tl.float32)
        # [BLOCK_N, BLOCK_K]
        w = tl.load(w_ptrs, mask=inside[:, None] & left[None, :], other=0.0)
        if GATED:
            v = tl.load(u_ptrs, mask=inside[:, None] & left[None, :], other=0.0)
            up += v.to(tl.float32) * x[None, :]
            u_ptrs += BLOCK_K * stride_uk
        gate += w.to(tl.float32) * x[None, :]
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    return tl.sum(gate, 1), tl.sum(up, 1)


@triton.jit
def _up_decode_kernel(
    x_ptr,
    ids_ptr,
    w_ptr,
    u_ptr,
    w_bias_ptr,
    u_bias_ptr,
    hidden_ptr,
    counter_ptr,
    E,
    N,
    K,
    strides,
    bias_strides,
    numbers,
    FORM: tl.constexpr,
    ACT: tl.constexpr,
    W_DECODE: tl.constexpr,
    U_DECODE: tl.constexpr,
    NEXT: tl.constexpr,
):
    """block_n hidden values of one assignment: float32, or in 8 bits for a down product of format NEXT.

    Counters of the down product, where it has any, are as many as assignments, and are set to zero here.
    Grid: S, N tiles.
    """
    GATED: tl.constexpr = FORM.gated
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    ROUNDED: tl.constexpr = FORM.rounded
    stride_xt, stride_xk, stride_we, stride_wn, stride_wk, w_step, stride_ue, stride_un, stride_uk, u_step = strides
    wait()
    launch_dependents()
    s = tl.program_id(0)
    if counter_ptr is not None:
        tl.store(counter_ptr + s, 0)
    expert = tl.load(ids_ptr + s).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    x_row = x_ptr + (s // FORM.top_k).to(tl.int64) * stride_xt
    w_ptr += expert * stride_we
    u_ptr += expert * stride_ue
    # Rows of blocks past the end are the last row again, and not stored.
    row = n if FORM.whole else tl.minimum(n, N - 1)
    w = (w_ptr, stride_wn, stride_wk + row * w_step)
    u = (u_ptr, stride_un, stride_uk + row * u_step)
    numbers_at = (w_ptr, stride_wn, stride_wk, u_ptr, stride_un, stride_uk)
    RUNS: tl.constexpr = BLOCK_K // 32
    CHUNKS: tl.constexpr = FORM.chunks
    L: tl.constexpr = FORM.k
    x_rows = x_row + tl.zeros([1], tl.int32)
    if W_DECODE is None and U_DECODE is None:
        g, v = _number_row(x_row, stride_xk, numbers_at, n, N, K, BLOCK_K, FORM.stages, GATED)
    elif W_DECODE is None:
        g, _ = _number_row(x_row, stride_xk, numbers_at, n, N, K, 128, FORM.stages, False)
        v, _ = row_sums(x_rows, stride_xk, u, u, L, RUNS, CHUNKS, ROUNDED, False, U_DECODE, U_DECODE)
    elif U_DECODE is None:
        numbers_at = (u_ptr, stride_un, stride_uk, u_ptr, stride_un, stride_uk)
        g, _ = row_sums(x_rows, stride_xk, w, w, L, RUNS, CHUNKS, ROUNDED, False, W_DECODE, W_DECODE)
        v, _ = _number_row(x_row, stride_xk, numbers_at, n, N, K, 128, FORM.stages, False)
    else:
        g, v = row_sums(x_rows, stride_xk, w, u, L, RUNS, CHUNKS, ROUNDED, GATED, W_DECODE, U_DECODE)
    g, v = tl.reshape(g, [BLOCK_N]), tl.reshape(v, [BLOCK_N])
    if w_bias_ptr is not None:
        stride_be, stride_bn = bias_strides
        at = expert * stride_be + n * stride_bn
        g += tl.load(w_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            v += tl.load(u_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    h, _, _ = ACT(g, v, numbers, GATED, x_ptr.dtype.element_ty == tl.float32)
    if NEXT is not None:
        store_rounded(hidden_ptr, tl.num_programs(0), N, s, tl.program_id(1) * BLOCK_N, h, NEXT)
    else:
        tl.store(hidden_ptr + s.to(tl.int64) * N + n, h, mask=inside)


@triton.jit
def _down_decode_kernel(
    hidden_ptr,
    ids_ptr,
    weights_ptr,
    w_ptr,
    bias_ptr,
    shared_ptr,
    shared_gate_ptr,
    shared_logit_ptr,
    residual_ptr,
    norm_ptr,
    eps,
    total_ptr,
    counter_ptr,
    out_ptr,
    normed_ptr,
    E,
    H,
    K,
    w_strides,
    FORM: tl.constexpr,
    DECODE: tl.constexpr,
):
    """block_n results of one token, all its experts summed. Grid: T, H tiles.

    With a norm, the last tile of a token to arrive takes it; which one that is changes nothing in the result.
    """
    TOP_K: tl.constexpr = FORM.top_k
    SLOTS: tl.constexpr = FORM.slots
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    STAGES: tl.constexpr = FORM.stages
    stride_we, stride_wn, stride_wk, _ = w_strides
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    slot = tl.arange(0, SLOTS)
    inside = n < H
    s = row * TOP_K + slot
    # Only the hidden rows are the up product's: all else was there before its programs let this one begin.
    expert = tl.load(ids_ptr + s, mask=slot < TOP_K, other=-1).to(tl.int64)
    live = (expert >= 0) & (expert < E)
    weight = tl.load(weights_ptr + s, mask=live, other=0.0).to(tl.float32)
    tail = (shared_ptr, shared_gate_ptr, shared_logit_ptr, residual_ptr)
    rest = finish(tl.zeros([BLOCK_N], tl.float32), row, n, inside, H, tail)
    if DECODE is None:
        # [SLOTS, BLOCK_N, BLOCK_K]: every expert of the token at once, so that all their loads are in flight together
        rows = expert[:, None] * stride_we + n.to(tl.int64)[None, :] * stride_wn
        w_ptrs = w_ptr + rows[:, :, None] + k[None, None, :] * stride_wk
        filled = live[:, None, None] & inside[None, :, None]
        w = tl.load(w_ptrs, mask=filled & (k < K)[None, None, :], other=0.0)
    else:
        RUNS: tl.constexpr = BLOCK_K // 32
        L: tl.constexpr = FORM.k
        CHUNKS: tl.constexpr = FORM.chunks
        # planes of whole matrices; the last tile's rows past the end are the last row again
        matrix = (w_ptr + tl.where(live, expert, 0) * stride_we, stride_wn)
        n_row = (n if FORM.whole else tl.minimum(n, H - 1))[None, :] + tl.zeros([SLOTS, 1], tl.int32)
        matrices, rows = (matrix, None), (n_row, None)
        loaded = load_chunks(matrices, rows, L, RUNS, CHUNKS, DECODE, None)
    later = wait()
    launch_dependents()
    if DECODE is not None:
        h_row = tl.where(live, s, row * TOP_K)
        x = (h_row, tl.num_programs(0) * TOP_K, hidden_ptr + later) if FORM.rounded else (hidden_ptr + h_row * L, 1)
        numbers = x_chunks(x, L, RUNS, CHUNKS, DECODE)
        y, _ = row_products(loaded, numbers, matrices, rows, x, L, RUNS, CHUNKS, FORM.rounded, DECODE, None)
    else:
        h_ptrs = hidden_ptr + s[:, None] * K + k[None, :]
        acc = tl.zeros([SLOTS, BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            v = tl.load(h_ptrs + start, mask=live[:, None] & (k < K - start)[None, :], other=0.0)
            w_ptrs += BLOCK_K * stride_wk
            ahead = tl.load(w_ptrs, mask=filled & (k < K - start - BLOCK_K)[None, None, :], other=0.0)
            acc += w.to(tl.float32) * v[:, None, :]
            w = ahead
        y = tl.sum(acc, 2)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert[:, None] * H + n[None, :]
        y += tl.load(bias_ptrs, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
    # The choice keeps product and sum two roundings. Fused, the two lanes that add up a pair would round one product
    # each, and not the same one: their sums would differ in the last bit, and either be the one that is stored.
    total = tl.sum(tl.where(live[:, None], y * weight[:, None], 0.0), 0) + rest
    tl.store(out_ptr + row * H + n, total.to(out_ptr.dtype.element_ty), mask=inside)
    if norm_ptr is not None:
        tl.store(total_ptr + row * H + n, total, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(1) - 1:
            h = tl.arange(0, FORM.block_h)
            value = tl.load(total_ptr + row * H + h, mask=h < H, other=0.0, cache_modifier=".cg")
            factor = tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            value *= (1.0 / tl.sqrt(tl.sum(value * value, 0) / H + eps)) * factor
            tl.store(normed_ptr + row * H + h, value.to(normed_ptr.dtype.element_ty), mask=h < H)


def experts_decode(
    x: Tensor, ids: Tensor, weights: Tensor, stacks: Stacks, activation: Activation, tail: Tail, outputs: Outputs
) -> None:
    (T, top_k), (E, H, I) = ids.shape, stacks.down.shape
    gate_up = up_weights(stacks, activation.gated)
    w, u, bias, up_bias, _ = gate_up
    down = rows_of(stacks.down)
    rounds = may_round(down) and not KINDS[down.format].e4m3
    hidden = hidden_rows(T * top_k, I, rounds, x.device)
    normed = tail.norm_weight is not None
    arrived = torch.empty(T * top_k, dtype=torch.int32, device=x.device) if normed else None
    size, gated = x.element_size(), activation.gated
    format = w.format or u.format
    tile = tile_for(Product("decode up", E, I, H, top_k, T, size, gated, format), x.device)
    n = max(tile.n, ROUNDED_TOGETHER) if rounds else tile.n
    sums_over = _sums_over(H, tile, format, may_round(w, u))
    launch(
        _up_decode_kernel,
        (T * top_k, max(1, ceil_div(I, n))),
        *(x, ids, w.data, u.data, bias, up_bias, hidden, arrived),
        *(E, I, H),
        (*x.stride(), *w.strides, *u.strides),
        (0, 0) if bias is None else bias.stride(),
        activation_numbers(activation),
        FORM=_UpForm(gated, top_k, *sums_over, may_round(w, u), I % n == 0, n, tile.k, tile.stages),
        ACT=ACTIVATIONS[activation.kind],
        W_DECODE=decoder_of(w),
        U_DECODE=decoder_of(u),
        NEXT=decoder_of(down) if rounds else None,
        num_warps=tile.warps,
        launch_pdl=PDL,
    )
    tile = tile_for(Product("decode down", E, H, I, top_k, T, size, False, down.format), x.device)
    blocks = (top_k, block_of(top_k, 1), tile.n, tile.k, block_of(H), tile.stages)
    total = torch.empty((T, H), dtype=torch.float32, device=x.device) if normed else hidden
    launch(
        _down_decode_kernel,
        (T, ceil_div(H, tile.n)),
        *(hidden, ids, weights, down.data, stacks.down_bias),
        *tail,
        *(total, arrived),
        *outputs,
        *(E, H, I),
        down.strides,
        FORM=_DownForm(*_sums_over(I, tile, down.format, rounds), rounds, H % tile.n == 0, *blocks),
        DECODE=decoder_of(down),
        num_warps=tile.warps,
        launch_pdl=PDL,
    )


def _sums_over(K: int, tile: Tile, format: str, rounded: bool) -> tuple[int, int]:
    """K, and its chunks where all are loaded at once, for weights in blocks; numbers are compiled for any K."""
    chunks = ceil_div(K, tile.k)
    at_once = chunks == 1 or (rounded and chunks <= tile.stages)
    return (K, chunks if at_once else 0) if format else (0, 0)
