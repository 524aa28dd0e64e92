"""route on NVIDIA GPUs, and the device function that gate shares with it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.codes import Codes, sums_two
from moefuse.backends.triton.mathfn import (
    at_least,
    difference_parts,
    exp_parts,
    log1p_ratio,
    tanh_and_derivative,
    times_power,
)
from moefuse.backends.triton.runtime.launch import block_of, launch
from moefuse.types import SCORES, Routing

#: the scores that `selected_parts` has a branch for
SCORE_NAMES = Codes("triton", "score", ("softmax", "sigmoid", "sqrtsoftplus"), SCORES)


@triton.jit
def _any(flags, AXIS: tl.constexpr):
    return tl.max(flags.to(tl.int32), AXIS) > 0


@triton.jit
def _ordered(x):
    """Integers that sort as the numbers do, both zeros as one."""
    return _flipped(tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True))


@triton.jit
def _flipped(bits):
    """A number's bits as an integer of its order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def scores_of(x, SCORE: tl.constexpr):
    """The scores of logits [BLOCK_E], -inf for none, as float32."""
    if SCORE == "softmax":
        top = tl.max(x, 0)
        scores = tl.exp(x - tl.where(top > float("-inf"), top, 0.0))
        total = tl.sum(scores, 0)
        return scores / tl.where(total > 0, total, 1.0)
    else:
        m, p, k = _tail_parts(x, 0.0, SCORE)
        return tl.where(x > float("-inf"), times_power(m * p, k), 0.0)


@triton.jit
def _tail_parts(x, top, SCORE: tl.constexpr):
    """Sigmoid or sqrtsoftplus scores as ``m * p * 2**k``, where top <= 0 stands for ``p * 2**k`` in all of m."""
    below = x < 0
    t_part, t_power = exp_parts(at_least(-tl.abs(x), -200.0), 0.0)
    t = times_power(t_part, t_power)
    away, low = difference_parts(tl.where(below, at_least(x, -3e38), 0.0), top)
    if SCORE == "sigmoid":
        p, k = exp_parts(at_least(away, -1000.0), low)
        base, power = exp_parts(at_least(top, -1000.0), 0.0)
        return times_power(p, k) / (1.0 + t), base, power
    else:
        tl.static_assert(SCORE == "sqrtsoftplus", "a score that Triton's kernels do not know")
        ratio = log1p_ratio(t)
        p, k = exp_parts(at_least(0.5 * away, -1000.0), 0.5 * low)
        base, power = exp_parts(at_least(0.5 * top, -1000.0), 0.0)
        return tl.where(below, times_power(p, k) * tl.sqrt(ratio), tl.sqrt(at_least(x, 0.0) + t * ratio)), base, power


@triton.jit
def selected_parts(x, live, whole, SCORE: tl.constexpr):
    """Scores of the selected logits [BLOCK_K] as ``m * base * 2**power``; whole: all logits, for the softmax.

    The largest m is near 1, so that weights can be renormalised where float32 has no such score.
    """
    top = tl.max(tl.where(live, x, float("-inf")), 0)
    top = tl.where(top > float("-inf"), top, 0.0)
    x = tl.where(live, x, top)
    if SCORE == "softmax":
        highest = tl.max(whole, 0)
        highest = tl.where(highest > float("-inf"), highest, 0.0)
        total = tl.sum(tl.exp(whole - highest), 0)
        away, low = difference_parts(x, top)
        p, k = exp_parts(at_least(away, -1000.0), low)
        base, power = exp_parts(at_least(top - highest, -1000.0), 0.0)
        m = times_power(p, k)
        base = base / tl.where(total > 0, total, 1.0)
    else:
        m, base, power = _tail_parts(x, tl.minimum(top, 0.0), SCORE)
    return tl.where(live, m, 0.0), base, power


@triton.jit
def shares_of(m, base, power, floor, RENORMALIZE: tl.constexpr):
    """Selected scores, or their shares in max(sum, floor); and the m that the sum divides, 0 where it does not."""
    if RENORMALIZE:
        total = tl.sum(m, 0)
        # 2**64 lifts both sides out of the numbers that lose digits.
        lifted = floor * 1.8446744073709552e19
        held = (times_power(total * base, power + 64) <= lifted) & (floor > 0)
        divided = m / tl.where(total > 0, total, 1.0)
        return tl.where(held, times_power(m * base, power + 64) / lifted, divided), tl.where(held, 0.0, divided)
    else:
        return times_power(m * base, power), m * 0.0


class Rule(NamedTuple):
    """What of a `Routing` kernels are compiled for."""

    score: str
    renormalize: bool
    renormalize_after_scale: bool
    softcap: bool
    groups: int
    top_groups: int
    sums_two: bool
    top_k: int
    block_e: int
    block_g: int
    block_k: int

    @classmethod
    def of(cls, routing: Routing, E: int) -> Rule:
        SCORE_NAMES[routing.score]  # refuses one that kernels do not know
        return cls(
            routing.score,
            routing.renormalize,
            routing.renormalize_after_scale,
            routing.softcap is not None,
            routing.groups,
            routing.top_groups,
            sums_two(routing.group_score),
            routing.top_k,
            block_of(E),
            block_of(routing.groups, 1),
            block_of(routing.top_k, 1),
        )


def rule_numbers(routing: Routing) -> tuple[float, float, float]:
    """The run-time numbers of a rule: scale, softcap and floor."""
    return routing.scale, routing.softcap or 1.0, routing.floor


@triton.jit
def _kept(key, scores, candidate, e, E, RULE: tl.constexpr):
    """Which experts lie in the kept groups. One row: key, scores, candidate are [BLOCK_E]."""
    GROUPS: tl.constexpr = RULE.groups
    size = E // GROUPS
    group = tl.arange(0, RULE.block_g)
    # [BLOCK_G, BLOCK_E]
    inside = ((e // size)[None, :] == group[:, None]) & candidate[None, :]
    if RULE.sums_two:
        masked = tl.where(inside, scores[None, :], float("-inf"))
        first = tl.max(masked, 1)
        at = tl.argmax(masked, 1, tie_break_left=True)
        second = tl.max(tl.where(e[None, :] == at[:, None], float("-inf"), masked), 1)
        value = tl.where(second > float("-inf"), first + second, first)
    else:
        value = tl.max(tl.where(inside, key[None, :], float("-inf")), 1)
    # A group is kept when fewer than top_groups stand before it: larger, or equal with a lower id.
    other, mine = value[None, :], value[:, None]
    before = (other > mine) | ((other == mine) & (group[None, :] < group[:, None]))
    before = before & (group < GROUPS)[None, :]
    kept = (tl.sum(before.to(tl.int32), 1) < RULE.top_groups) & (group < GROUPS)
    return tl.max((inside & kept[:, None]).to(tl.int32), 0) > 0


@triton.jit
def route_row(logits, row, bias_ptr, scale_ptr, weights_ptr, ids_ptr, E, numbers, RULE: tl.constexpr):
    """Route one token. logits: float32 [RULE.block_e], lanes from E up hold -inf."""
    SCORE: tl.constexpr = RULE.score
    TOP_K: tl.constexpr = RULE.top_k
    BLOCK_E: tl.constexpr = RULE.block_e
    BLOCK_K: tl.constexpr = RULE.block_k
    HAS_BIAS: tl.constexpr = bias_ptr is not None
    scale, softcap, floor = numbers
    e = tl.arange(0, BLOCK_E)
    failed = _any((logits != logits) | (logits == float("inf")), 0)
    candidate = (logits > float("-inf")) & (e < E) & (failed == 0)
    capped = logits
    if RULE.softcap:
        bent, _ = tanh_and_derivative(logits / softcap)
        capped = tl.where(logits > float("-inf"), softcap * bent, float("-inf"))
    SCORED: tl.constexpr = HAS_BIAS or (RULE.groups > 1 and RULE.sums_two)
    scores = logits
    if SCORED:
        scores = scores_of(capped, SCORE)
    key, biased = logits, scores
    if HAS_BIAS:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        spoiled = _any((bias != bias) | (bias == float("inf")), 0)
        candidate = candidate & (bias > float("-inf")) & (spoiled == 0)
        biased = scores + bias
        key = biased
    if RULE.groups > 1:
        candidate = _kept(key, biased, candidate, e, E, RULE)

    # All of it in 32-bit integers, of which a warp finds the largest in one instruction.
    NONE: tl.constexpr = -0x80000000
    ordered = _ordered(logits)
    left = tl.where(candidate, _ordered(key), NONE)
    slot = tl.arange(0, BLOCK_K)
    ids = tl.full([BLOCK_K], 0, tl.int32) + E
    chosen_logits = tl.zeros([BLOCK_K], tl.int32)
    for j in range(TOP_K):
        best = tl.max(left, 0)
        chosen = tl.min(tl.where(left == best, e, BLOCK_E), 0)
        here = (slot == j) & (best != NONE)
        ids = tl.where(here, chosen, ids)
        if HAS_BIAS:
            best = tl.max(tl.where(e == chosen, ordered, NONE), 0)
        chosen_logits = tl.where(here, best, chosen_logits)
        left = tl.where(e == chosen, NONE, left)
    x = _flipped(chosen_logits).to(tl.float32, bitcast=True)
    if RULE.softcap:
        bent, _ = tanh_and_derivative(x / softcap)
        x = softcap * bent

    live = ids < E
    m, base, power = selected_parts(x, live, capped, SCORE)
    factor = tl.where(live, scale, 0.0)
    if scale_ptr is not None:
        factor = factor * tl.load(scale_ptr + ids, mask=live, other=0.0).to(tl.float32)
    selected, _ = shares_of(m, base, power, floor, RULE.renormalize)
    selected *= factor
    if RULE.renormalize_after_scale:
        # What was divided before cancels: the shares of the sum need no score that float32 holds.
        total = tl.sum(m * factor, 0)
        selected = tl.where(total == 0.0, selected, m * factor / tl.where(total == 0.0, 1.0, total))
    selected = tl.where(live, selected, 0.0)
    place = row * TOP_K + slot
    tl.store(weights_ptr + place, selected, mask=slot < TOP_K)
    tl.store(ids_ptr + place, ids, mask=slot < TOP_K)


@triton.jit
def _route_kernel(logits_ptr, bias_ptr, scale_ptr, weights_ptr, ids_ptr, strides, E, numbers, RULE: tl.constexpr):
    """Grid: tokens."""
    stride_t, stride_e = strides
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, RULE.block_e)
    logits = tl.load(logits_ptr + row * stride_t + e * stride_e, mask=e < E, other=float("-inf")).to(tl.float32)
    route_row(logits, row, bias_ptr, scale_ptr, weights_ptr, ids_ptr, E, numbers, RULE)


def route(
    logits: Tensor, bias: Tensor | None, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    weights = torch.empty((T, routing.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((T, routing.top_k), dtype=torch.int32, device=logits.device)
    tensors = logits, bias, per_expert_scale, weights, ids
    rule, warps = Rule.of(routing, E), 1 if E <= 256 else 4
    launch(_route_kernel, (T,), *tensors, logits.stride(), E, rule_numbers(routing), RULE=rule, num_warps=warps)
    return weights, ids
