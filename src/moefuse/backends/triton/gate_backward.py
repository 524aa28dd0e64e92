"""The backward of route and gate on NVIDIA GPUs: through the selected scores, to the router, the norm and x."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.combine_backward import norm_row_backward, norm_weight_gradient
from moefuse.backends.triton.gate import raw_logits
from moefuse.backends.triton.mathfn import at_least, exp_parts, log1p_ratio, tanh_and_slope, times_power
from moefuse.backends.triton.route import rule_numbers, scores_of, selected_parts, shares_of
from moefuse.backends.triton.runtime.launch import block_of, ceil_div, launch
from moefuse.types import Routing

#: slots whose part of the per-expert scales one program sums
_SLOTS = 256


@triton.jit
def _row_backward(
    logits, row, grad_ptr, ids_ptr, scale_ptr, parts_ptr, E, stride_gt, stride_gk, stride_it, stride_ik, scale,
    softcap, floor,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, AFTER: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """d_logits [BLOCK_E] of one token; each slot's part of its expert's scale goes to parts [T, top_k]."""
    e = tl.arange(0, BLOCK_E)
    finite = (logits == logits) & (tl.abs(logits) < float("inf")) & (e < E)
    safe = tl.where(finite, logits, 0.0)
    capped, bend = safe, safe
    if HAS_SOFTCAP:
        bent, bend = tanh_and_slope(safe / softcap)
        capped = softcap * bent
    capped = tl.where(finite, capped, float("-inf"))
    slot = tl.arange(0, BLOCK_K)
    ids = tl.load(ids_ptr + row * stride_it + slot * stride_ik, mask=slot < TOP_K, other=E)
    live = ids < E
    grad = tl.load(grad_ptr + row * stride_gt + slot * stride_gk, mask=live, other=0.0).to(tl.float32)
    # [BLOCK_K, BLOCK_E]
    chosen = (ids[:, None] == e[None, :]) & live[:, None]
    x = tl.sum(tl.where(chosen & finite[None, :], capped[None, :], 0.0), 1)
    m, base, power = selected_parts(x, live, capped, SCORE)
    factor = tl.where(live, scale, 0.0)
    if HAS_SCALE:
        factor = factor * tl.load(scale_ptr + ids, mask=live, other=0.0).to(tl.float32)
    shares, divided = shares_of(m, base, power, floor, RENORMALIZE)
    # Each step's gradient times its value, which stays in range where the scores do not.
    by_share = grad * shares
    if AFTER:
        total = tl.sum(m * factor, 0)
        divisor = tl.where(total == 0.0, 1.0, total)
        along = tl.sum(grad * m * factor, 0) / divisor
        by_share = tl.where(total == 0.0, by_share, (grad - along) * (m / divisor))
    if HAS_SCALE:
        tl.store(parts_ptr + row * TOP_K + slot, tl.where(live, by_share * scale, 0.0), mask=slot < TOP_K)
    by_score = by_share * factor
    if RENORMALIZE:
        by_score -= divided * tl.sum(by_score, 0)
    if SCORE == "softmax":
        d_scores = tl.sum(tl.where(chosen, by_score[:, None], 0.0), 0)
        d_logits = d_scores - scores_of(capped, SCORE) * tl.sum(by_score, 0)
    else:
        # The slope of a score over the score.
        p, k = exp_parts(at_least(-tl.abs(x), -200.0), 0.0)
        t = times_power(p, k)
        if SCORE == "sigmoid":
            slope = tl.where(x < 0, 1.0, t) / (1.0 + t)
        else:
            tl.static_assert(SCORE == "sqrtsoftplus", "a score that Triton's kernels do not know")
            ratio = log1p_ratio(t)
            slope = 0.5 / ((1.0 + t) * tl.where(x < 0, ratio, at_least(x, 0.0) + t * ratio))
        d_logits = tl.sum(tl.where(chosen, (by_score * slope)[:, None], 0.0), 0)
    if HAS_SOFTCAP:
        d_logits = d_logits * bend
    return tl.where(finite, d_logits, 0.0)


@triton.jit
def _route_backward_kernel(
    grad_ptr, logits_ptr, ids_ptr, scale_ptr, d_logits_ptr, parts_ptr, E, stride_lt, stride_le, stride_gt, stride_gk,
    stride_it, stride_ik, scale, softcap, floor,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, AFTER: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SCALE: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: T."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + row * stride_lt + e * stride_le, mask=e < E, other=0.0).to(tl.float32)
    d = _row_backward(
        logits, row, grad_ptr, ids_ptr, scale_ptr, parts_ptr, E, stride_gt, stride_gk, stride_it, stride_ik, scale,
        softcap, floor, SCORE, RENORMALIZE, AFTER, HAS_SOFTCAP, HAS_SCALE, TOP_K, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    tl.store(d_logits_ptr + row * E + e, d.to(d_logits_ptr.dtype.element_ty), mask=e < E)


@triton.jit(do_not_specialize=["S"])
def _scale_kernel(
    parts_ptr, ids_ptr, sums_ptr, S, E, BLOCK: tl.constexpr, STEP: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """sums [blocks, E]: what the slots of a block give to each expert's scale. Grid: blocks."""
    e = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.float32)
    for start in range(0, BLOCK, STEP):
        s = tl.program_id(0) * BLOCK + start + tl.arange(0, STEP)
        part = tl.load(parts_ptr + s, mask=s < S, other=0.0)
        expert = tl.load(ids_ptr + s, mask=s < S, other=E)
        total += tl.sum(tl.where(expert[:, None] == e[None, :], part[:, None], 0.0), 0)
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * E + e, total, mask=e < E)


def _rule(routing: Routing, E: int, per_expert_scale: Tensor | None) -> dict[str, Any]:
    return {
        "SCORE": routing.score,
        "RENORMALIZE": routing.renormalize,
        "AFTER": routing.renormalize_after_scale,
        "HAS_SOFTCAP": routing.softcap is not None,
        "HAS_SCALE": per_expert_scale is not None,
        "TOP_K": routing.top_k,
        "BLOCK_E": block_of(E),
        "BLOCK_K": block_of(routing.top_k, 1),
    }


def _row_warps(routing: Routing, E: int) -> int:
    """Slots times experts are held in registers: 64 of 1,024 would spill with fewer."""
    return 4 if block_of(E) * block_of(routing.top_k, 1) <= 8192 else 16


def _scale_gradient(parts: Tensor, ids: Tensor, per_expert_scale: Tensor) -> Tensor:
    S, E = parts.numel(), per_expert_scale.shape[0]
    blocks = ceil_div(S, _SLOTS)
    sums = torch.empty((blocks, E), dtype=torch.float32, device=parts.device)
    launch(
        _scale_kernel, (blocks,), parts, ids, sums, S, E, BLOCK=_SLOTS, STEP=16, BLOCK_E=block_of(E),
        num_warps=4,
    )  # fmt: skip
    return sums.sum(0).to(per_expert_scale.dtype)


def route_backward(
    grad: Tensor, logits: Tensor, ids: Tensor, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    d_logits = torch.empty((T, E), dtype=logits.dtype, device=logits.device)
    parts = torch.empty((T, routing.top_k), dtype=torch.float32, device=logits.device)
    launch(
        _route_backward_kernel, (T,), grad, logits, ids, per_expert_scale, d_logits, parts, E,
        *logits.stride(), *grad.stride(), *ids.stride(), *rule_numbers(routing),
        **_rule(routing, E, per_expert_scale), num_warps=_row_warps(routing, E),
    )  # fmt: skip
    if per_expert_scale is None:
        return d_logits, logits.new_empty(0)
    return d_logits, _scale_gradient(parts, ids, per_expert_scale)


@triton.jit(do_not_specialize=["stretches"])
def _gate_rows_kernel(
    grad_ptr, x_ptr, raw_ptr, logit_bias_ptr, ids_ptr, scale_ptr, d_logits_ptr, parts_ptr, rms_ptr, H, E, stretches,
    stride_xt, stride_xh, stride_gt, stride_gk, stride_it, stride_ik, eps, scale, softcap, floor,
    HAS_NORM: tl.constexpr, HAS_LOGIT_BIAS: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr,
    AFTER: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SCALE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The logits of one token as the forward had them, and their gradient. Grid: T."""
    row = tl.program_id(0).to(tl.int64)
    T = tl.num_programs(0)
    e = tl.arange(0, BLOCK_E)
    logits = tl.zeros([BLOCK_E], tl.float32)
    for stretch in range(stretches):
        logits += tl.load(raw_ptr + (row + T * stretch) * E + e, mask=e < E, other=0.0)
    if HAS_NORM:
        h = tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + row * stride_xt + h.to(tl.int64) * stride_xh, mask=h < H, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
        logits *= inverse_rms
        tl.store(rms_ptr + row, inverse_rms)
    if HAS_LOGIT_BIAS:
        logits += tl.load(logit_bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    d = _row_backward(
        logits, row, grad_ptr, ids_ptr, scale_ptr, parts_ptr, E, stride_gt, stride_gk, stride_it, stride_ik, scale,
        softcap, floor, SCORE, RENORMALIZE, AFTER, HAS_SOFTCAP, HAS_SCALE, TOP_K, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    tl.store(d_logits_ptr + row * E + e, d, mask=e < E)


@triton.jit(do_not_specialize=["T", "length"])
def _router_kernel(
    d_ptr, x_ptr, rms_ptr, norm_ptr, parts_ptr, T, H, E, length, stride_xt, stride_xh,
    HAS_NORM: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """parts [stretches, E, H]: d_logits.T @ normed over a stretch of tokens. Grid: E blocks, H blocks, stretches."""
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    begin = tl.program_id(2) * length
    end = tl.minimum(begin + length, T)
    acc = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        live = t < end
        d = tl.load(d_ptr + t[:, None] * E + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
        x = tl.load(x_ptr + t[:, None] * stride_xt + h[None, :] * stride_xh,
                    mask=live[:, None] & (h < H)[None, :], other=0.0).to(tl.float32)  # fmt: skip
        if HAS_NORM:
            x *= tl.load(rms_ptr + t, mask=live, other=0.0)[:, None]
        acc = tl.dot(tl.trans(d), x, acc, input_precision="ieee")
    if HAS_NORM:
        acc *= tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    place = tl.program_id(2).to(tl.int64) * E + e
    tl.store(parts_ptr + place[:, None] * H + h[None, :], acc, mask=(e < E)[:, None] & (h < H)[None, :])


@triton.jit(do_not_specialize=["T"])
def _input_kernel(
    d_ptr, w_ptr, d_normed_ptr, out_ptr, T, H, E, stride_we, stride_wh, stride_nt, stride_nh,
    HAS_NORMED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out [T, H] = d_logits @ weight + d_normed, unrounded. Grid: T blocks, H blocks."""
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    acc = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for start in range(0, E, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        d = tl.load(d_ptr + t[:, None] * E + e[None, :], mask=(t < T)[:, None] & (e < E)[None, :], other=0.0)
        w = tl.load(w_ptr + e[:, None] * stride_we + h[None, :] * stride_wh,
                    mask=(e < E)[:, None] & (h < H)[None, :], other=0.0).to(tl.float32)  # fmt: skip
        acc = tl.dot(d, w, acc, input_precision="ieee")
    mask = (t < T)[:, None] & (h < H)[None, :]
    if HAS_NORMED:
        at = d_normed_ptr + t[:, None] * stride_nt + h[None, :] * stride_nh
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + t[:, None] * H + h[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward_kernel(
    d_ptr, x_ptr, norm_ptr, rms_ptr, out_ptr, H, stride_xt, stride_xh, BLOCK_H: tl.constexpr
):  # fmt: skip
    """Grid: T."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    mask = h < H
    d = tl.load(d_ptr + t * H + h, mask, other=0.0)
    x = tl.load(x_ptr + t * stride_xt + h.to(tl.int64) * stride_xh, mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + h, mask, other=0.0).to(tl.float32)
    d_x = norm_row_backward(d, x, weight, tl.load(rms_ptr + t), H)
    tl.store(out_ptr + t * H + h, d_x.to(out_ptr.dtype.element_ty), mask)


def gate_backward(
    d_weights: Tensor,
    d_normed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    logit_bias: Tensor | None,
    per_expert_scale: Tensor | None,
    ids: Tensor,
    eps: float,
    want_x: bool,
    want_weight: bool,
    routing: Routing,
) -> tuple[Tensor, ...]:
    (T, H), E = x.shape, weight.shape[0]
    f32: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    raw = raw_logits(x, weight, norm_weight)
    d_logits, parts = torch.empty((T, E), **f32), torch.empty((T, routing.top_k), **f32)
    inverse_rms = torch.empty(T, **f32)
    row_block = block_of(H)
    row_warps = 4 if row_block <= 4096 else 8
    launch(
        _gate_rows_kernel, (T,), d_weights, x, raw, logit_bias, ids, per_expert_scale, d_logits,
        parts, inverse_rms, H, E, raw.shape[0], *x.stride(), *d_weights.stride(), *ids.stride(), eps,
        *rule_numbers(routing), HAS_NORM=norm_weight is not None, HAS_LOGIT_BIAS=logit_bias is not None,
        **_rule(routing, E, per_expert_scale), BLOCK_H=row_block,
        num_warps=max(row_warps, _row_warps(routing, E)),
    )  # fmt: skip
    d_x, d_weight, d_norm = (x.new_empty(0) for _ in range(3))
    if want_weight:
        stretches = max(1, min(16, ceil_div(T, 512)))
        length = ceil_div(ceil_div(T, stretches), 32) * 32
        sums = torch.empty((stretches, E, H), **f32)
        launch(
            _router_kernel, (ceil_div(E, 32), ceil_div(H, 64), stretches), d_logits, x, inverse_rms, norm_weight, sums,
            T, H, E, length, *x.stride(), HAS_NORM=norm_weight is not None, BLOCK_T=32, BLOCK_E=32, BLOCK_H=64,
            num_warps=4,
        )  # fmt: skip
        d_weight = sums.sum(0).to(weight.dtype)
    if want_x:
        d = torch.empty((T, H), dtype=x.dtype if norm_weight is None else torch.float32, device=x.device)
        strides = (0, 0) if d_normed is None else d_normed.stride()
        launch(
            _input_kernel, (ceil_div(T, 32), ceil_div(H, 64)), d_logits, weight, d_normed, d, T, H, E,
            *weight.stride(), *strides, HAS_NORMED=d_normed is not None, BLOCK_T=32, BLOCK_E=32, BLOCK_H=64,
            num_warps=4,
        )  # fmt: skip
        d_x = d
        if norm_weight is not None:
            d_x = torch.empty((T, H), dtype=x.dtype, device=x.device)
            launch(
                _norm_backward_kernel, (T,), d, x, norm_weight, inverse_rms, d_x, H, *x.stride(), BLOCK_H=row_block,
                num_warps=row_warps,
            )  # fmt: skip
            d_norm = norm_weight_gradient(d, x, inverse_rms, norm_weight)
    d_logit_bias = x.new_empty(0) if logit_bias is None else d_logits.sum(0).to(logit_bias.dtype)
    d_scale = x.new_empty(0) if per_expert_scale is None else _scale_gradient(parts, ids, per_expert_scale)
    return d_x, d_weight, d_norm, d_logit_bias, d_scale
