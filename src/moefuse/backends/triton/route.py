"""route on NVIDIA GPUs, and the device function that gate shares with it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.launch import block_of, launch
from moefuse.types import Routing


@triton.jit
def _any(flags, AXIS: tl.constexpr):
    return tl.max(flags.to(tl.int32), AXIS) > 0


@triton.jit
def _ordered(x):
    """Integers that sort as the numbers do, both zeros as one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _kept(key, scores, candidate, e, E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
          BLOCK_G: tl.constexpr):  # fmt: skip
    """Which experts lie in the kept groups. One row: key, scores, candidate are [BLOCK_E]."""
    size = E // GROUPS
    group = tl.arange(0, BLOCK_G)
    # [BLOCK_G, BLOCK_E]
    inside = ((e // size)[None, :] == group[:, None]) & candidate[None, :]
    if TOP2:
        masked = tl.where(inside, scores[None, :], float("-inf"))
        first = tl.max(masked, 1)
        at = tl.argmax(masked, 1, tie_break_left=True)
        second = tl.max(tl.where(e[None, :] == at[:, None], float("-inf"), masked), 1)
        value = tl.where(second > float("-inf"), first + second, first)
    else:
        value = tl.max(tl.where(inside, key[None, :], float("-inf")), 1)
    # A group is kept when fewer than TOP_GROUPS stand before it: larger, or equal with a lower id.
    other, mine = value[None, :], value[:, None]
    before = (other > mine) | ((other == mine) & (group[None, :] < group[:, None]))
    before = before & (group < GROUPS)[None, :]
    kept = (tl.sum(before.to(tl.int32), 1) < TOP_GROUPS) & (group < GROUPS)
    return tl.max((inside & kept[:, None]).to(tl.int32), 0) > 0


@triton.jit
def route_row(
    logits, row, bias_ptr, scale_ptr, weights_ptr, ids_ptr, E, scale, softcap, floor,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, AFTER: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Route one token. logits: float32 [BLOCK_E], lanes from E up hold -inf."""
    e = tl.arange(0, BLOCK_E)
    failed = _any((logits != logits) | (logits == float("inf")), 0)
    candidate = (logits > float("-inf")) & (e < E) & (failed == 0)
    capped = logits
    if HAS_SOFTCAP:
        small = tl.exp(-2.0 * tl.abs(logits / softcap))
        size = softcap * (1.0 - small) / (1.0 + small)
        capped = tl.where(logits < 0, -size, size)
    if SCORE == "softmax":
        capped = tl.where(logits > float("-inf"), capped, float("-inf"))
        top = tl.max(capped, 0)
        top = tl.where(top > float("-inf"), top, 0.0)
        scores = tl.exp(capped - top)
        scores = scores / tl.sum(scores, 0)
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-capped))
    else:
        # softplus(x) = max(x, 0) + log1p(exp(-|x|)); log(1+t)*t/((1+t)-1) keeps log1p's accuracy for small t.
        t = tl.exp(-tl.abs(capped))
        grown = 1.0 + t
        log1p = tl.where(grown == 1.0, t, tl.log(grown) * t / tl.where(grown == 1.0, 1.0, grown - 1.0))
        scores = tl.sqrt(tl.maximum(capped, 0.0) + log1p)
    key, biased = logits, scores
    if HAS_BIAS:
        bias = tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        spoiled = _any((bias != bias) | (bias == float("inf")), 0)
        candidate = candidate & (bias > float("-inf")) & (spoiled == 0)
        biased = scores + bias
        key = biased
    if GROUPS > 1:
        candidate = _kept(key, biased, candidate, e, E, GROUPS, TOP_GROUPS, TOP2, BLOCK_G)

    # All of it in 32-bit integers, of which a warp finds the largest in one instruction. No score is negative: its bits
    # are the largest of themselves and zeros.
    NONE: tl.constexpr = -0x80000000
    left = tl.where(candidate, _ordered(key), NONE)
    score_bits = scores.to(tl.int32, bitcast=True)
    slot = tl.arange(0, BLOCK_K)
    ids = tl.full([BLOCK_K], 0, tl.int32) + E
    selected_bits = tl.zeros([BLOCK_K], tl.int32)
    for j in range(TOP_K):
        best = tl.max(left, 0)
        chosen = tl.min(tl.where(left == best, e, BLOCK_E), 0)
        here = (slot == j) & (best != NONE)
        ids = tl.where(here, chosen, ids)
        selected_bits = tl.where(here, tl.max(tl.where(e == chosen, score_bits, 0), 0), selected_bits)
        left = tl.where(e == chosen, NONE, left)
    selected = selected_bits.to(tl.float32, bitcast=True)

    live = ids < E
    if RENORMALIZE:
        selected = selected / tl.maximum(tl.sum(selected, 0), floor)
    selected = selected * scale
    if HAS_SCALE:
        selected = selected * tl.load(scale_ptr + ids, mask=live, other=0.0).to(tl.float32)
    if AFTER:
        total = tl.sum(selected, 0)
        selected = selected / tl.where(total == 0.0, 1.0, total)
    selected = tl.where(live, selected, 0.0)
    place = row * TOP_K + slot
    tl.store(weights_ptr + place, selected, mask=slot < TOP_K)
    tl.store(ids_ptr + place, ids, mask=slot < TOP_K)


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, scale_ptr, weights_ptr, ids_ptr, stride_t, stride_e, E, scale, softcap, floor,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, AFTER: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_ptr + row * stride_t + e * stride_e, mask=e < E, other=float("-inf")).to(tl.float32)
    route_row(
        logits, row, bias_ptr, scale_ptr, weights_ptr, ids_ptr, E, scale, softcap, floor, SCORE, RENORMALIZE, AFTER,
        HAS_SOFTCAP, HAS_BIAS, HAS_SCALE, GROUPS, TOP_GROUPS, TOP2, TOP_K, BLOCK_E, BLOCK_G, BLOCK_K,
    )  # fmt: skip


def rule_numbers(routing: Routing) -> tuple[float, float, float]:
    """The run-time numbers of a rule, as `route_row` takes them."""
    return routing.scale, routing.softcap or 1.0, routing.floor


def rule_options(routing: Routing, E: int, bias: Tensor | None, per_expert_scale: Tensor | None) -> dict[str, Any]:
    """The compile-time facts of a rule, as `route_row` takes them."""
    return {
        "SCORE": routing.score,
        "RENORMALIZE": routing.renormalize,
        "AFTER": routing.renormalize_after_scale,
        "HAS_SOFTCAP": routing.softcap is not None,
        "HAS_BIAS": bias is not None,
        "HAS_SCALE": per_expert_scale is not None,
        "GROUPS": routing.groups,
        "TOP_GROUPS": routing.top_groups,
        "TOP2": routing.group_score == "top2_sum",
        "TOP_K": routing.top_k,
        "BLOCK_E": block_of(E),
        "BLOCK_G": block_of(routing.groups, 1),
        "BLOCK_K": block_of(routing.top_k, 1),
    }


def route(
    logits: Tensor, bias: Tensor | None, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    weights = torch.empty((T, routing.top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((T, routing.top_k), dtype=torch.int32, device=logits.device)
    launch(
        _route_kernel, (T,), logits, bias, per_expert_scale, weights, ids, *logits.stride(), E,
        *rule_numbers(routing), **rule_options(routing, E, bias, per_expert_scale), num_warps=1 if E <= 256 else 4,
    )  # fmt: skip
    return weights, ids
