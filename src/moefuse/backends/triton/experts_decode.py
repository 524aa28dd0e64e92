"""experts for the few tokens of a decode step: matrix-vector products, no plan, two launches."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.combine import finish
from moefuse.backends.triton.formats.blocks import RUNS, STRIP, decode_runs, q4_k_load, q4_k_products
from moefuse.backends.triton.grouped_linear import decoder_of, in_words, rows_of, up_weights
from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tuned import Product, tile_for
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation, Outputs, Stacks, Tail, Weight


class _UpForm(NamedTuple):
    """What the up product is compiled for. ``words``: in Q4_K, 16 bytes at once; ``rounded``: times x in 8 bits."""

    gated: bool
    words: bool
    rounded: bool
    block_n: int
    block_k: int
    stages: int


class _DownForm(NamedTuple):
    """Likewise the down product, which holds as many ``slots`` as the power of two that covers ``top_k``."""

    words: bool
    rounded: bool
    top_k: int
    slots: int
    block_n: int
    block_k: int
    block_h: int
    stages: int


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
    top_k,
    strides,
    bias_strides,
    numbers,
    FORM: tl.constexpr,
    ACT: tl.constexpr,
    W_DECODE: tl.constexpr,
    U_DECODE: tl.constexpr,
):
    """block_n hidden values of one assignment, float32. Grid: S, N tiles.

    Counters of the down product, where it has any, are as many as assignments, and are set to zero here.
    """
    GATED: tl.constexpr = FORM.gated
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    STAGES: tl.constexpr = FORM.stages
    stride_xt, stride_xk, stride_we, stride_wn, stride_wk, stride_ue, stride_un, stride_uk = strides
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
    x_row = x_ptr + (s // top_k).to(tl.int64) * stride_xt
    if FORM.words:
        # The last tile's rows past the end are the last row again, and not stored.
        row = tl.minimum(n, N - 1).to(tl.int64)
        x_rows = x_row + tl.zeros([1], tl.int32)
        w_rows = w_ptr + expert * stride_we + row * stride_wn
        u_rows = u_ptr + expert * stride_ue + row * stride_un
        GROUPS: tl.constexpr = BLOCK_K // 64
        ptrs = (w_rows[None, :], u_rows[None, :] if GATED else None)
        first = q4_k_load(w_rows[None, :], 0, K, GROUPS)
        loaded = (first, q4_k_load(u_rows[None, :], 0, K, GROUPS) if GATED else None)
        g, u = q4_k_products(loaded, ptrs, x_rows, K, stride_xk, GROUPS, FORM.rounded)
        g, u = tl.reshape(g, [BLOCK_N]), tl.reshape(u, [BLOCK_N])
    elif W_DECODE is not None or U_DECODE is not None:
        r = tl.arange(0, BLOCK_N * RUNS)
        row = tl.minimum(tl.program_id(1) * BLOCK_N + r // RUNS, N - 1).to(tl.int64)
        w_rows = w_ptr + expert * stride_we + row * stride_wn
        u_rows = u_ptr + expert * stride_ue + row * stride_un
        at = 32 * (r % RUNS)[:, None] + tl.arange(0, 32)[None, :]
        gate = tl.zeros([BLOCK_N * RUNS, 32], tl.float32)
        up = tl.zeros([BLOCK_N * RUNS, 32], tl.float32)
        for start in tl.range(0, K, STRIP, num_stages=STAGES):
            x = tl.load(x_row + (start + at) * stride_xk, mask=start + at < K, other=0.0).to(tl.float32)
            # [BLOCK_N * RUNS, 32]
            gate += decode_runs(w_rows, start, r % RUNS, K, W_DECODE) * x
            if GATED:
                up += decode_runs(u_rows, start, r % RUNS, K, U_DECODE) * x
        g = tl.sum(tl.reshape(tl.sum(gate, 1), [BLOCK_N, RUNS]), 1)
        u = tl.sum(tl.reshape(tl.sum(up, 1), [BLOCK_N, RUNS]), 1)
    else:
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_row + k * stride_xk
        w_ptrs = w_ptr + expert * stride_we + n.to(tl.int64)[:, None] * stride_wn + k[None, :] * stride_wk
        u_ptrs = u_ptr + expert * stride_ue + n.to(tl.int64)[:, None] * stride_un + k[None, :] * stride_uk
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
        g, u = tl.sum(gate, 1), tl.sum(up, 1)
    if w_bias_ptr is not None:
        stride_be, stride_bn = bias_strides
        at = expert * stride_be + n * stride_bn
        g += tl.load(w_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(u_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    h, _, _ = ACT(g, u, numbers, GATED, x_ptr.dtype.element_ty == tl.float32)
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
    stride_we, stride_wn, stride_wk = w_strides
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
    if FORM.words:
        stack = tl.where(live, expert, 0)[:, None]
        rows = w_ptr + stack * stride_we + tl.minimum(n, H - 1).to(tl.int64)[None, :] * stride_wn
        loaded = q4_k_load(rows, 0, K, BLOCK_K // 64)
    wait()
    launch_dependents()
    if FORM.words:
        h_rows = hidden_ptr + tl.where(live, s, row * TOP_K) * K
        y, _ = q4_k_products((loaded, None), (rows, None), h_rows, K, 1, BLOCK_K // 64, FORM.rounded)
    elif DECODE is not None:
        r = tl.arange(0, SLOTS * BLOCK_N * RUNS)
        mine = row * TOP_K + tl.minimum(r // (BLOCK_N * RUNS), TOP_K - 1)
        stack = tl.load(ids_ptr + mine).to(tl.int64)
        known = (stack >= 0) & (stack < E)
        column = tl.minimum(tl.program_id(1) * BLOCK_N + r // RUNS % BLOCK_N, H - 1).to(tl.int64)
        w_rows = w_ptr + tl.where(known, stack, 0) * stride_we + column * stride_wn
        at = 32 * (r % RUNS)[:, None] + tl.arange(0, 32)[None, :]
        sums = tl.zeros([SLOTS * BLOCK_N * RUNS, 32], tl.float32)
        for start in tl.range(0, K, STRIP, num_stages=STAGES):
            mask = known[:, None] & (start + at < K)
            hidden = tl.load(hidden_ptr + mine[:, None] * K + start + at, mask=mask, other=0.0)
            sums += decode_runs(w_rows, start, r % RUNS, K, DECODE) * hidden
        y = tl.sum(tl.reshape(tl.sum(sums, 1), [SLOTS, BLOCK_N, RUNS]), 2)
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


def _may_round(*weights: Weight | None) -> bool:
    """Whether activations may be rounded to 8 bits for these: none of them is to be exact."""
    return not any(isinstance(weight, QuantTensor) and weight.exact for weight in weights)


def experts_decode(
    x: Tensor, ids: Tensor, weights: Tensor, stacks: Stacks, activation: Activation, tail: Tail, outputs: Outputs
) -> None:
    (T, top_k), (E, H, I) = ids.shape, stacks.down.shape
    gate_up = up_weights(stacks, activation.gated)
    (w, w_format), (u, u_format), bias, up_bias, _ = gate_up
    down = rows_of(stacks.down)
    hidden = torch.empty((T * top_k, I), dtype=torch.float32, device=x.device)
    normed = tail.norm_weight is not None
    arrived = torch.empty(T * top_k, dtype=torch.int32, device=x.device) if normed else None
    words, size, gated = in_words(gate_up.w) and in_words(gate_up.u), x.element_size(), activation.gated
    tile = tile_for(Product("decode up", E, I, H, top_k, T, size, gated, w_format or u_format), x.device)
    rounded = words and _may_round(stacks.gate_up, stacks.up)
    launch(
        _up_decode_kernel,
        (T * top_k, max(1, ceil_div(I, tile.n))),
        *(x, ids, w, u, bias, up_bias, hidden, arrived),
        *(E, I, H, top_k),
        (*x.stride(), *w.stride(), *u.stride()),
        (0, 0) if bias is None else bias.stride(),
        activation_numbers(activation),
        FORM=_UpForm(gated, words, rounded, tile.n, tile.k, tile.stages),
        ACT=ACTIVATIONS[activation.kind],
        W_DECODE=decoder_of(gate_up.w),
        U_DECODE=decoder_of(gate_up.u),
        num_warps=tile.warps,
        launch_pdl=PDL,
    )
    words = in_words(down)
    tile = tile_for(Product("decode down", E, H, I, top_k, T, size, False, down.format), x.device)
    rounded, blocks = words and _may_round(stacks.down), (tile.n, tile.k, block_of(H), tile.stages)
    total = torch.empty((T, H), dtype=torch.float32, device=x.device) if normed else hidden
    launch(
        _down_decode_kernel,
        (T, ceil_div(H, tile.n)),
        *(hidden, ids, weights, down.data, stacks.down_bias),
        *tail,
        *(total, arrived),
        *outputs,
        *(E, H, I),
        down.data.stride(),
        FORM=_DownForm(words, rounded, top_k, block_of(top_k, 1), *blocks),
        DECODE=decoder_of(down),
        num_warps=tile.warps,
        launch_pdl=PDL,
    )
