"""The backward of route on NVIDIA GPUs, through the selected scores; gate_backward shares it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.mathfn import at_least, exp_parts, log1p_ratio, tanh_and_derivative, times_power
from moefuse.backends.triton.route import Rule, rule_numbers, scores_of, selected_parts, shares_of
from moefuse.backends.triton.runtime.launch import block_of, ceil_div, launch
from moefuse.types import Routing

#: slots whose part of the per-expert scales one program sums
_SLOTS = 256


@triton.jit
def row_backward(logits, row, grad_ptr, ids_ptr, scale_ptr, parts_ptr, E, strides, numbers, RULE: tl.constexpr):
    """d_logits [RULE.block_e] of one token; each slot's part of its expert's scale goes to parts [T, top_k].

    ``strides`` are those of grad, then of ids.
    """
    SCORE: tl.constexpr = RULE.score
    TOP_K: tl.constexpr = RULE.top_k
    BLOCK_E: tl.constexpr = RULE.block_e
    BLOCK_K: tl.constexpr = RULE.block_k
    stride_gt, stride_gk, stride_it, stride_ik = strides
    scale, softcap, floor = numbers
    e = tl.arange(0, BLOCK_E)
    finite = (logits == logits) & (tl.abs(logits) < float("inf")) & (e < E)
    safe = tl.where(finite, logits, 0.0)
    capped, bend = safe, safe
    if RULE.softcap:
        bent, bend = tanh_and_derivative(safe / softcap)
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
    if scale_ptr is not None:
        factor = factor * tl.load(scale_ptr + ids, mask=live, other=0.0).to(tl.float32)
    shares, divided = shares_of(m, base, power, floor, RULE.renormalize)
    # Each step's gradient times its value, which stays in range where the scores do not.
    by_share = grad * shares
    if RULE.renormalize_after_scale:
        total = tl.sum(m * factor, 0)
        divisor = tl.where(total == 0.0, 1.0, total)
        along = tl.sum(grad * m * factor, 0) / divisor
        by_share = tl.where(total == 0.0, by_share, (grad - along) * (m / divisor))
    if scale_ptr is not None:
        tl.store(parts_ptr + row * TOP_K + slot, tl.where(live, by_share * scale, 0.0), mask=slot < TOP_K)
    by_score = by_share * factor
    if RULE.renormalize:
        by_score -= divided * tl.sum(by_score, 0)
    if SCORE == "softmax":
        d_scores = tl.sum(tl.where(chosen, by_score[:, None], 0.0), 0)
        d_logits = d_scores - scores_of(capped, SCORE) * tl.sum(by_score, 0)
    else:
        # The derivative of a score over the score.
        p, k = exp_parts(at_least(-tl.abs(x), -200.0), 0.0)
        t = times_power(p, k)
        if SCORE == "sigmoid":
            relative = tl.where(x < 0, 1.0, t) / (1.0 + t)
        else:
            tl.static_assert(SCORE == "sqrtsoftplus", "a score that Triton's kernels do not know")
            ratio = log1p_ratio(t)
            relative = 0.5 / ((1.0 + t) * tl.where(x < 0, ratio, at_least(x, 0.0) + t * ratio))
        d_logits = tl.sum(tl.where(chosen, (by_score * relative)[:, None], 0.0), 0)
    if RULE.softcap:
        d_logits = d_logits * bend
    return tl.where(finite, d_logits, 0.0)


@triton.jit
def _route_backward_kernel(
    grad_ptr, logits_ptr, ids_ptr, scale_ptr, d_logits_ptr, parts_ptr, E, lines, strides, numbers, RULE: tl.constexpr
):
    """``lines`` are the strides of the logits. Grid: T."""
    stride_lt, stride_le = lines
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, RULE.block_e)
    logits = tl.load(logits_ptr + row * stride_lt + e * stride_le, mask=e < E, other=0.0).to(tl.float32)
    d = row_backward(logits, row, grad_ptr, ids_ptr, scale_ptr, parts_ptr, E, strides, numbers, RULE)
    tl.store(d_logits_ptr + row * E + e, d.to(d_logits_ptr.dtype.element_ty), mask=e < E)


@triton.jit(do_not_specialize=["S"])
def _scale_kernel(parts_ptr, ids_ptr, sums_ptr, S, E, BLOCK: tl.constexpr, STEP: tl.constexpr, BLOCK_E: tl.constexpr):
    """sums [blocks, E]: what the slots of a block give to each expert's scale. Grid: blocks."""
    e = tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_E], tl.float32)
    for start in range(0, BLOCK, STEP):
        s = tl.program_id(0) * BLOCK + start + tl.arange(0, STEP)
        part = tl.load(parts_ptr + s, mask=s < S, other=0.0)
        expert = tl.load(ids_ptr + s, mask=s < S, other=E)
        total += tl.sum(tl.where(expert[:, None] == e[None, :], part[:, None], 0.0), 0)
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * E + e, total, mask=e < E)


def row_warps(rule: Rule) -> int:
    """Slots times experts are held in registers: 64 of 1,024 would spill with fewer. One warp waits for no other."""
    held = rule.block_e * rule.block_k
    return 1 if held <= 2048 else 4 if held <= 8192 else 16


def scale_gradient(parts: Tensor, ids: Tensor, per_expert_scale: Tensor) -> Tensor:
    S, E = parts.numel(), per_expert_scale.shape[0]
    blocks = ceil_div(S, _SLOTS)
    sums = torch.empty((blocks, E), dtype=torch.float32, device=parts.device)
    blocked = {"BLOCK": _SLOTS, "STEP": 16, "BLOCK_E": block_of(E)}
    launch(_scale_kernel, (blocks,), parts, ids, sums, S, E, **blocked, num_warps=4)
    return sums.sum(0).to(per_expert_scale.dtype)


def route_backward(
    grad: Tensor, logits: Tensor, ids: Tensor, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    d_logits = torch.empty((T, E), dtype=logits.dtype, device=logits.device)
    parts = torch.empty((T, routing.top_k), dtype=torch.float32, device=logits.device)
    tensors = grad, logits, ids, per_expert_scale, d_logits, parts
    numbers = logits.stride(), (*grad.stride(), *ids.stride()), rule_numbers(routing)
    rule = Rule.of(routing, E)
    launch(_route_backward_kernel, (T,), *tensors, E, *numbers, RULE=rule, num_warps=row_warps(rule))
    if per_expert_scale is None:
        return d_logits, logits.new_empty(0)
    return d_logits, scale_gradient(parts, ids, per_expert_scale)
