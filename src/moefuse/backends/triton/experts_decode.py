"""experts for very few tokens: matrix-vector products, no plan, two launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.gated import up_biases
from moefuse.backends.triton.combine import finish
from moefuse.backends.triton.formats.blocks import RUNS, STRIP, decode_runs, q4_k_load, q4_k_products
from moefuse.backends.triton.glu import activate, activation_numbers
from moefuse.backends.triton.grouped_linear import Rows, alike, in_words, up_rows
from moefuse.backends.triton.runtime.launch import (
    INTERPRETED,
    PDL,
    block_of,
    ceil_div,
    launch,
    launch_dependents,
    wait,
)
from moefuse.backends.triton.runtime.tuned import Product, tile_for
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation


@triton.jit
def _up_few_kernel(
    x_ptr, ids_ptr, w_ptr, u_ptr, w_bias_ptr, u_bias_ptr, hidden_ptr, counter_ptr, E, N, K, top_k, stride_xt, stride_xk,
    stride_we, stride_wn, stride_wk, stride_ue, stride_un, stride_uk, stride_be, stride_bn, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, W_FORMAT: tl.constexpr, U_FORMAT: tl.constexpr, WORDS: tl.constexpr,
    ROUNDED: tl.constexpr, ASM: tl.constexpr, HAS_BIAS: tl.constexpr, COUNTS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N hidden values of one assignment, float32. Grid: S, N tiles.

    COUNTS: the counters of the down product, as many as assignments, are set to zero here.
    """
    wait(PDL)
    launch_dependents(PDL)
    s = tl.program_id(0)
    if COUNTS:
        tl.store(counter_ptr + s, 0)
    expert = tl.load(ids_ptr + s).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    x_row = x_ptr + (s // top_k).to(tl.int64) * stride_xt
    if WORDS:
        # The last tile's rows past the end are the last row again, and not stored.
        row = tl.minimum(n, N - 1).to(tl.int64)
        x_rows = x_row + tl.zeros([1], tl.int32)
        w_rows = w_ptr + expert * stride_we + row * stride_wn
        u_rows = u_ptr + expert * stride_ue + row * stride_un
        GROUPS: tl.constexpr = BLOCK_K // 64
        w = q4_k_load(w_rows[None, :], 0, K, GROUPS)
        v = q4_k_load(u_rows[None, :], 0, K, GROUPS) if GATED else w
        g, u = q4_k_products(
            w, v, w_rows[None, :], u_rows[None, :], x_rows, K, stride_xk, 1, BLOCK_N, GROUPS, GATED, ROUNDED, ASM
        )  # fmt: skip
        g, u = tl.reshape(g, [BLOCK_N]), tl.reshape(u, [BLOCK_N])
    elif (W_FORMAT != "") | (U_FORMAT != ""):
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
            gate += decode_runs(w_rows, start, r % RUNS, K, W_FORMAT) * x
            if GATED:
                up += decode_runs(u_rows, start, r % RUNS, K, U_FORMAT) * x
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
    if HAS_BIAS:
        at = expert * stride_be + n * stride_bn
        g += tl.load(w_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(u_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    h = activate(g, u, KIND, GATED, alpha, limit, x_ptr.dtype.element_ty == tl.float32)
    tl.store(hidden_ptr + s.to(tl.int64) * N + n, h, mask=inside)


@triton.jit
def _down_few_kernel(
    hidden_ptr, ids_ptr, weights_ptr, w_ptr, bias_ptr, shared_ptr, shared_gate_ptr, shared_logit_ptr, residual_ptr,
    norm_ptr, total_ptr, counter_ptr, out_ptr, normed_ptr, E, H, K, stride_we, stride_wn, stride_wk, eps,
    W_FORMAT: tl.constexpr, WORDS: tl.constexpr, ROUNDED: tl.constexpr, ASM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_LOGIT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORM: tl.constexpr,
    TOP_K: tl.constexpr, PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
    SLOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N results of one token, all its experts summed. Grid: T, H tiles.

    With a norm, the last tile of a token to arrive takes it; which one that is changes nothing in the result.
    """
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
    rest = finish(
        tl.zeros([BLOCK_N], tl.float32), row, n, inside, H, shared_ptr, shared_gate_ptr, shared_logit_ptr,
        residual_ptr, HAS_SHARED, HAS_GATE, HAS_LOGIT, HAS_RESIDUAL,
    )  # fmt: skip
    if W_FORMAT == "":
        # [SLOTS, BLOCK_N, BLOCK_K]: every expert of the token at once, so that all their loads are in flight together
        rows = expert[:, None] * stride_we + n.to(tl.int64)[None, :] * stride_wn
        w_ptrs = w_ptr + rows[:, :, None] + k[None, None, :] * stride_wk
        filled = live[:, None, None] & inside[None, :, None]
        w = tl.load(w_ptrs, mask=filled & (k < K)[None, None, :], other=0.0)
    if WORDS:
        stack = tl.where(live, expert, 0)[:, None]
        rows = w_ptr + stack * stride_we + tl.minimum(n, H - 1).to(tl.int64)[None, :] * stride_wn
        loaded = q4_k_load(rows, 0, K, BLOCK_K // 64)
    wait(PDL)
    launch_dependents(PDL)
    if WORDS:
        h_rows = hidden_ptr + tl.where(live, s, row * TOP_K) * K
        y, _ = q4_k_products(
            loaded, loaded, rows, rows, h_rows, K, 1, SLOTS, BLOCK_N, BLOCK_K // 64, False, ROUNDED, ASM
        )  # fmt: skip
    elif W_FORMAT != "":
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
            sums += decode_runs(w_rows, start, r % RUNS, K, W_FORMAT) * hidden
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
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert[:, None] * H + n[None, :]
        y += tl.load(bias_ptrs, mask=live[:, None] & inside[None, :], other=0.0).to(tl.float32)
    # The choice keeps product and sum two roundings. Fused, the two lanes that add up a pair would round one product
    # each, and not the same one: their sums would differ in the last bit, and either be the one that is stored.
    total = tl.sum(tl.where(live[:, None], y * weight[:, None], 0.0), 0) + rest
    tl.store(out_ptr + row * H + n, total.to(out_ptr.dtype.element_ty), mask=inside)
    if HAS_NORM:
        tl.store(total_ptr + row * H + n, total, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.num_programs(1) - 1:
            h = tl.arange(0, BLOCK_H)
            value = tl.load(total_ptr + row * H + h, mask=h < H, other=0.0, cache_modifier=".cg")
            factor = tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            value *= (1.0 / tl.sqrt(tl.sum(value * value, 0) / H + eps)) * factor
            tl.store(normed_ptr + row * H + h, value.to(normed_ptr.dtype.element_ty), mask=h < H)


def _may_round(*weights: Tensor | QuantTensor | None) -> bool:
    """Whether activations may be rounded to 8 bits for these: none of them is to be exact."""
    return not any(isinstance(weight, QuantTensor) and weight.exact for weight in weights)


def experts_few(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | QuantTensor,
    up: Tensor | QuantTensor | None,
    down: Tensor | QuantTensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: Activation,
    layout: str,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    (T, top_k), H = ids.shape, x.shape[1]
    E = down.shape[0]
    *rows, I = up_rows(gate_up, up, layout, activation.gated)
    (w, w_format), (u, u_format) = alike(*rows)
    down_rows, down_format = Rows.of(down)
    bias, up_bias = up_biases(gate_up_bias, up is not None, layout, activation.gated)
    hidden = torch.empty((T * top_k, I), dtype=torch.float32, device=x.device)
    arrived = None if norm_weight is None else torch.empty(T * top_k, dtype=torch.int32, device=x.device)
    up_words, down_words = in_words(w, w_format) and in_words(u, u_format), in_words(down_rows, down_format)
    size = x.element_size()
    first = tile_for(Product("few up", E, I, H, top_k, T, size, activation.gated, w_format or u_format), x.device)
    second = tile_for(Product("few down", E, H, I, top_k, T, size, False, down_format), x.device)
    launch(
        _up_few_kernel, (T * top_k, max(1, ceil_div(I, first.n))), x, ids, w, u, bias, up_bias, hidden, arrived, E, I,
        H, top_k, *x.stride(), *w.stride(), *u.stride(), *((0, 0) if bias is None else bias.stride()),
        *activation_numbers(activation), KIND=activation.kind, GATED=activation.gated, W_FORMAT=w_format,
        U_FORMAT=u_format, WORDS=up_words, ROUNDED=up_words and _may_round(gate_up, up),
        ASM=up_words and not INTERPRETED, HAS_BIAS=bias is not None, COUNTS=arrived is not None, PDL=PDL,
        BLOCK_N=first.n, BLOCK_K=first.k, STAGES=first.stages, num_warps=first.warps, launch_pdl=PDL,
    )  # fmt: skip
    total = hidden if norm_weight is None else torch.empty((T, H), dtype=torch.float32, device=x.device)
    launch(
        _down_few_kernel, (T, ceil_div(H, second.n)), hidden, ids, weights, down_rows,
        down_bias, shared, shared_gate, shared_logit,
        residual, norm_weight, total, arrived, out, normed_out, E, H, I,
        *down_rows.stride(), eps, W_FORMAT=down_format, WORDS=down_words,
        ROUNDED=down_words and _may_round(down), ASM=down_words and not INTERPRETED,
        HAS_BIAS=down_bias is not None, HAS_SHARED=shared is not None, HAS_GATE=shared_gate is not None,
        HAS_LOGIT=shared_logit is not None, HAS_RESIDUAL=residual is not None, HAS_NORM=norm_weight is not None,
        TOP_K=top_k, PDL=PDL, BLOCK_N=second.n, BLOCK_K=second.k, BLOCK_H=block_of(H), SLOTS=block_of(top_k, 1),
        STAGES=second.stages, num_warps=second.warps, launch_pdl=PDL,
    )  # fmt: skip
