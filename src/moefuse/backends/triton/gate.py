"""gate on NVIDIA GPUs: one launch for few tokens, three for many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.route import route_row, rule_numbers, rule_options
from moefuse.backends.triton.runtime.launch import (
    PDL,
    block_of,
    ceil_div,
    counters,
    launch,
    launch_dependents,
    prefetch_rows,
    wait,
)
from moefuse.types import Routing

#: at or under this many tokens the router is a matrix-vector product spread over experts
_FEW = 32
#: programs of the router's product for more tokens, about: an H200 has as many multiprocessors
_PROGRAMS = 132


@triton.jit
def _gate_few_kernel(
    x_ptr, w_ptr, norm_ptr, logit_bias_ptr, bias_ptr, scale_ptr, logits_ptr, counter_ptr, weights_ptr, ids_ptr,
    normed_ptr, H, E, stride_xt, stride_xh, stride_we, stride_wh, eps, scale, softcap, floor,
    HAS_NORM: tl.constexpr, WANT_NORMED: tl.constexpr, HAS_LOGIT_BIAS: tl.constexpr,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, AFTER: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, PART: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid: tokens, parts of PART experts. The last part of a token to arrive routes it.

    Which part that is changes nothing in the result; the counter is left at zero for the next launch.
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * PART + tl.arange(0, PART)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    # [PART, BLOCK_H]
    w_ptrs = w_ptr + e.to(tl.int64)[:, None] * stride_we + h.to(tl.int64)[None, :] * stride_wh
    mask = (e < E)[:, None] & inside[None, :]
    if PDL:
        prefetch_rows(w_ptr + tl.minimum(e, E - 1).to(tl.int64) * stride_we, H * stride_wh, BLOCK_H)
    wait(PDL)
    launch_dependents(PDL)
    w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_xt + h.to(tl.int64) * stride_xh, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
        x *= inverse_rms * tl.load(norm_ptr + h, mask=inside, other=0.0).to(tl.float32)
        if WANT_NORMED:
            first = tl.program_id(1) == 0
            tl.store(normed_ptr + row * H + h, x.to(normed_ptr.dtype.element_ty), mask=inside & first)
    logits = tl.sum(w * x[None, :], 1)
    if HAS_LOGIT_BIAS:
        logits += tl.load(logit_bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(logits_ptr + row * E + e, logits, mask=e < E)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(1) - 1:
        tl.store(counter_ptr + row, 0)
        every = tl.arange(0, BLOCK_E)
        whole = tl.load(logits_ptr + row * E + every, mask=every < E, other=float("-inf"), cache_modifier=".cg")
        route_row(
            whole, row, bias_ptr, scale_ptr, weights_ptr, ids_ptr, E, scale, softcap, floor, SCORE, RENORMALIZE,
            AFTER, HAS_SOFTCAP, HAS_BIAS, HAS_SCALE, GROUPS, TOP_GROUPS, TOP2, TOP_K, BLOCK_E, BLOCK_G, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _fold_kernel(
    w_ptr, norm_ptr, folded_ptr, H, stride_we, stride_wh, HAS_NORM: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """folded [PARTS, E, H]: router weight times norm weight, as a sum of bfloat16 parts that hold its bits.

    PARTS 1 may also be float32. Grid: E.
    """
    wait(PDL)
    launch_dependents(PDL)
    e = tl.program_id(0).to(tl.int64)
    E = tl.num_programs(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    w = tl.load(w_ptr + e * stride_we + h.to(tl.int64) * stride_wh, mask=h < H, other=0.0).to(tl.float32)
    if HAS_NORM:
        w *= tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        high = w.to(folded_ptr.dtype.element_ty)
        tl.store(folded_ptr + (part * E + e) * H + h, high, mask=h < H)
        w -= high.to(tl.float32)


@triton.jit(do_not_specialize=["T", "steps"])
def _logits_kernel(
    x_ptr, folded_ptr, logits_ptr, T, H, E, steps, stride_xt, stride_xh, PARTS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_T: tl.constexpr, PART: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Unrounded x @ folded.T: BLOCK_T tokens, PART experts, a stretch of ``steps`` tiles of H.

    Grid: tokens, experts, stretches.
    """
    wait(PDL)
    launch_dependents(PDL)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * PART + tl.arange(0, PART)
    h = tl.arange(0, BLOCK_H)
    rows = t.to(tl.int64)
    begin = tl.program_id(2) * steps * BLOCK_H  # the compiler must see that it is aligned
    end = tl.minimum(begin + steps * BLOCK_H, H)
    x_ptrs = x_ptr + rows[:, None] * stride_xt + (begin + h).to(tl.int64)[None, :] * stride_xh
    w_ptrs = folded_ptr + e.to(tl.int64)[None, :] * H + (begin + h)[:, None]
    acc = tl.zeros([BLOCK_T, PART], tl.float32)
    for start in range(begin, end, BLOCK_H):
        inside = h < end - start
        # [BLOCK_T, BLOCK_H]
        x = tl.load(x_ptrs, mask=(t < T)[:, None] & inside[None, :], other=0.0).to(folded_ptr.dtype.element_ty)
        for part in tl.static_range(PARTS):
            # [BLOCK_H, PART]
            mask = (e < E)[None, :] & inside[:, None]
            w = tl.load(w_ptrs + tl.cast(part, tl.int64) * E * H, mask=mask, other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        x_ptrs += BLOCK_H * stride_xh
        w_ptrs += BLOCK_H
    place = tl.program_id(2).to(tl.int64) * T + rows
    tl.store(logits_ptr + place[:, None] * E + e[None, :], acc, mask=(t < T)[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["stretches"])
def _gate_route_kernel(
    x_ptr, norm_ptr, logit_bias_ptr, bias_ptr, scale_ptr, logits_ptr, weights_ptr, ids_ptr, normed_ptr,
    H, E, stretches, stride_xt, stride_xh, eps, scale, softcap, floor,
    HAS_NORM: tl.constexpr, WANT_NORMED: tl.constexpr, HAS_LOGIT_BIAS: tl.constexpr,
    SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, AFTER: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr, TOP_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Add a token's stretches up in order, norm and route it and write its normed row. Grid: tokens."""
    wait(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    T = tl.num_programs(0)
    e = tl.arange(0, BLOCK_E)
    logits = tl.zeros([BLOCK_E], tl.float32)
    for stretch in range(stretches):
        logits += tl.load(logits_ptr + (row + T * stretch) * E + e, mask=e < E, other=float("-inf"))
    if HAS_NORM:
        h = tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + row * stride_xt + h.to(tl.int64) * stride_xh, mask=h < H, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
        logits *= inverse_rms
        if WANT_NORMED:
            x *= inverse_rms * tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            tl.store(normed_ptr + row * H + h, x.to(normed_ptr.dtype.element_ty), mask=h < H)
    if HAS_LOGIT_BIAS:
        logits += tl.load(logit_bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    route_row(
        logits, row, bias_ptr, scale_ptr, weights_ptr, ids_ptr, E, scale, softcap, floor, SCORE, RENORMALIZE, AFTER,
        HAS_SOFTCAP, HAS_BIAS, HAS_SCALE, GROUPS, TOP_GROUPS, TOP2, TOP_K, BLOCK_E, BLOCK_G, BLOCK_K,
    )  # fmt: skip


def _row_warps(BLOCK_H: int, E: int) -> int:
    """One warp routes without waiting for others, where it can hold the row and the scores."""
    return 1 if BLOCK_H <= 2048 and E <= 256 else 4 if BLOCK_H <= 4096 else 8


def _parts(x: Tensor, weight: Tensor, norm_weight: Tensor | None) -> tuple[int, torch.dtype]:
    """How the folded router weight is held: bfloat16 parts of eight bits each for bfloat16 x, else float32."""
    if x.dtype != torch.bfloat16:
        return 1, torch.float32
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
    needed = bits[weight.dtype] + (0 if norm_weight is None else bits[norm_weight.dtype])
    return min(3, ceil_div(needed, 8)), torch.bfloat16


def gate(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    logit_bias: Tensor | None,
    per_expert_scale: Tensor | None,
    eps: float,
    routing: Routing,
    return_normed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    T, H = x.shape
    E = weight.shape[0]
    weights = torch.empty((T, routing.top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((T, routing.top_k), dtype=torch.int32, device=x.device)
    normed = torch.empty(x.shape if return_normed else 0, dtype=x.dtype, device=x.device)
    flags = {
        "HAS_NORM": norm_weight is not None,
        "WANT_NORMED": return_normed,
        "HAS_LOGIT_BIAS": logit_bias is not None,
    }
    rule = rule_options(routing, E, bias, per_expert_scale)
    if T <= _FEW:
        logits = torch.empty((T, E), dtype=torch.float32, device=x.device)
        BLOCK_H = block_of(H)
        PART = 1 if T == 1 else 2  # a token alone leaves multiprocessors free
        launch(
            _gate_few_kernel, (T, ceil_div(E, PART)), x, weight, norm_weight, logit_bias, bias, per_expert_scale,
            logits, counters(logits, T), weights, ids, normed, H, E, *x.stride(), *weight.stride(), eps,
            *rule_numbers(routing), **flags, **rule, PDL=PDL, PART=PART, BLOCK_H=BLOCK_H,
            num_warps=_row_warps(BLOCK_H, E), launch_pdl=PDL,
        )  # fmt: skip
        return weights, ids, normed
    row_block = block_of(H)
    logits = raw_logits(x, weight, norm_weight)
    launch(
        _gate_route_kernel, (T,), x, norm_weight, logit_bias, bias, per_expert_scale, logits, weights, ids, normed, H,
        E, logits.shape[0], *x.stride(), eps, *rule_numbers(routing), **flags, **rule, PDL=PDL, BLOCK_H=row_block,
        num_warps=_row_warps(row_block, E), launch_pdl=PDL,
    )  # fmt: skip
    return weights, ids, normed


def raw_logits(x: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
    """``[stretches, T, E]`` float32: x times the router weight and the norm weight, to be summed over stretches of H.

    The norm's factor of each token is still to come, and so is the bias.
    """
    (T, H), E = x.shape, weight.shape[0]
    parts, dtype = _parts(x, weight, norm)
    folded = torch.empty((parts, E, H), dtype=dtype, device=x.device)
    row_block = block_of(H)
    row_warps = 4 if row_block <= 4096 else 8
    launch(
        _fold_kernel, (E,), weight, norm, folded, H, *weight.stride(), HAS_NORM=norm is not None, PARTS=parts, PDL=PDL,
        BLOCK_H=row_block, num_warps=row_warps, launch_pdl=PDL,
    )  # fmt: skip
    BLOCK_T, PART, BLOCK_H = (64, 128, 64) if dtype == torch.bfloat16 else (32, 32, 32)
    # Enough programs to fill the card once: split the sum over H when tokens and experts alone do not.
    tiles = max(1, ceil_div(T, BLOCK_T) * ceil_div(E, PART))
    stretches = max(1, min(ceil_div(H, 2 * BLOCK_H), _PROGRAMS // tiles))
    steps = ceil_div(ceil_div(H, stretches), BLOCK_H)
    stretches = ceil_div(H, steps * BLOCK_H)
    logits = torch.empty((stretches, T, E), dtype=torch.float32, device=x.device)
    launch(
        _logits_kernel, (ceil_div(T, BLOCK_T), ceil_div(E, PART), stretches), x, folded, logits, T, H, E, steps,
        *x.stride(), PARTS=parts, PDL=PDL, BLOCK_T=BLOCK_T, PART=PART, BLOCK_H=BLOCK_H, num_warps=4, num_stages=3,
        launch_pdl=PDL,
    )  # fmt: skip
    return logits
