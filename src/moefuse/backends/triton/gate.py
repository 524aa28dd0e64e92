"""gate on NVIDIA GPUs: one launch for few tokens, three for many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse import backends
from moefuse.backends.triton.route import Rule, route_row, rule_numbers
from moefuse.backends.triton.runtime.launch import (
    HAS_PDL,
    PDL,
    block_of,
    ceil_div,
    counters,
    launch,
    launch_dependents,
    prefetch_rows,
    wait,
)
from moefuse.types import Router, Routing

#: up to this many tokens the router is a matrix-vector product spread over experts
_GEMV_TOKENS = 32
#: parts of the sum over H in an invariant call, whatever the number of tokens
_CHUNKS = 8
#: programs of the router's product for more tokens, about: an H200 has as many multiprocessors
_PROGRAMS = 132


@triton.jit
def _gate_gemv_kernel(
    x_ptr,
    w_ptr,
    norm_ptr,
    bias_ptr,
    logit_bias_ptr,
    scale_ptr,
    eps,
    logits_ptr,
    counter_ptr,
    weights_ptr,
    ids_ptr,
    normed_ptr,
    H,
    E,
    x_strides,
    w_strides,
    numbers,
    RULE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Grid: tokens, parts of PART experts. The last part of a token to arrive routes it.

    Which part that is changes nothing in the result; the counter is left at zero for the next launch.
    """
    stride_xt, stride_xh = x_strides
    stride_we, stride_wh = w_strides
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * PART + tl.arange(0, PART)
    h = tl.arange(0, BLOCK_H)
    inside = h < H
    # [PART, BLOCK_H]
    w_ptrs = w_ptr + e.to(tl.int64)[:, None] * stride_we + h.to(tl.int64)[None, :] * stride_wh
    mask = (e < E)[:, None] & inside[None, :]
    if HAS_PDL:
        prefetch_rows(w_ptr + tl.minimum(e, E - 1).to(tl.int64) * stride_we, H * stride_wh, BLOCK_H)
    wait()
    launch_dependents()
    w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_xt + h.to(tl.int64) * stride_xh, mask=inside, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
        x *= inverse_rms * tl.load(norm_ptr + h, mask=inside, other=0.0).to(tl.float32)
        if normed_ptr is not None:
            first = tl.program_id(1) == 0
            tl.store(normed_ptr + row * H + h, x.to(normed_ptr.dtype.element_ty), mask=inside & first)
    logits = tl.sum(w * x[None, :], 1)
    if logit_bias_ptr is not None:
        logits += tl.load(logit_bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(logits_ptr + row * E + e, logits, mask=e < E)
    tl.debug_barrier()
    arrived = tl.atomic_add(counter_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(1) - 1:
        tl.store(counter_ptr + row, 0)
        every = tl.arange(0, RULE.block_e)
        whole = tl.load(logits_ptr + row * E + every, mask=every < E, other=float("-inf"), cache_modifier=".cg")
        route_row(whole, row, bias_ptr, scale_ptr, weights_ptr, ids_ptr, E, numbers, RULE)


@triton.jit
def _fold_kernel(w_ptr, norm_ptr, folded_ptr, H, w_strides, PARTS: tl.constexpr, BLOCK_H: tl.constexpr):
    """folded [PARTS, E, H]: router weight times norm weight, as a sum of bfloat16 parts that hold its bits.

    PARTS 1 may also be float32. Grid: E.
    """
    wait()
    launch_dependents()
    stride_we, stride_wh = w_strides
    e = tl.program_id(0).to(tl.int64)
    E = tl.num_programs(0).to(tl.int64)
    h = tl.arange(0, BLOCK_H)
    w = tl.load(w_ptr + e * stride_we + h.to(tl.int64) * stride_wh, mask=h < H, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        w *= tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        high = w.to(folded_ptr.dtype.element_ty)
        tl.store(folded_ptr + (part * E + e) * H + h, high, mask=h < H)
        w -= high.to(tl.float32)


@triton.jit(do_not_specialize=["T", "steps"])
def _logits_kernel(
    x_ptr,
    folded_ptr,
    w_ptr,
    norm_ptr,
    logits_ptr,
    T,
    H,
    E,
    steps,
    x_strides,
    w_strides,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Unrounded x @ folded.T: BLOCK_T tokens, PART experts, a chunk of ``steps`` tiles of H.

    Without ``folded_ptr`` the router weight is folded here, where one tile has all tokens. Grid: tokens, experts,
    chunks.
    """
    stride_xt, stride_xh = x_strides
    stride_we, stride_wh = w_strides
    kind: tl.constexpr = tl.bfloat16 if x_ptr.dtype.element_ty == tl.bfloat16 else tl.float32
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * PART + tl.arange(0, PART)
    h = tl.arange(0, BLOCK_H)
    rows = t.to(tl.int64)
    begin = tl.program_id(2) * steps * BLOCK_H  # the compiler must see that it is aligned
    end = tl.minimum(begin + steps * BLOCK_H, H)
    if HAS_PDL and folded_ptr is None:
        first = w_ptr + tl.minimum(e, E - 1).to(tl.int64) * stride_we + begin * stride_wh
        prefetch_rows(first, (end - begin) * stride_wh, 4 * BLOCK_H)
    wait()
    launch_dependents()
    x_ptrs = x_ptr + rows[:, None] * stride_xt + (begin + h).to(tl.int64)[None, :] * stride_xh
    acc = tl.zeros([BLOCK_T, PART], tl.float32)
    for start in range(begin, end, BLOCK_H):
        inside = h < end - start
        # [BLOCK_T, BLOCK_H]
        x = tl.load(x_ptrs, mask=(t < T)[:, None] & inside[None, :], other=0.0).to(kind)
        # [BLOCK_H, PART]
        mask = (e < E)[None, :] & inside[:, None]
        if folded_ptr is not None:
            w_ptrs = folded_ptr + e.to(tl.int64)[None, :] * H + (start + h)[:, None]
            for part in tl.static_range(PARTS):
                w = tl.load(w_ptrs + tl.cast(part, tl.int64) * E * H, mask=mask, other=0.0)
                acc = tl.dot(x, w, acc, input_precision="ieee")
        else:
            w_ptrs = w_ptr + e.to(tl.int64)[None, :] * stride_we + (start + h).to(tl.int64)[:, None] * stride_wh
            w = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)
            if norm_ptr is not None:
                w *= tl.load(norm_ptr + start + h, mask=inside, other=0.0).to(tl.float32)[:, None]
            for _ in tl.static_range(PARTS):
                high = w.to(kind)
                acc = tl.dot(x, high, acc, input_precision="ieee")
                w -= high.to(tl.float32)
        x_ptrs += BLOCK_H * stride_xh
    place = tl.program_id(2).to(tl.int64) * T + rows
    tl.store(logits_ptr + place[:, None] * E + e[None, :], acc, mask=(t < T)[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["chunks"])
def _gate_route_kernel(
    x_ptr,
    norm_ptr,
    bias_ptr,
    logit_bias_ptr,
    scale_ptr,
    eps,
    logits_ptr,
    weights_ptr,
    ids_ptr,
    normed_ptr,
    H,
    E,
    chunks,
    x_strides,
    numbers,
    RULE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add up a token's chunks in order, norm and route it and write its normed row. Grid: tokens."""
    stride_xt, stride_xh = x_strides
    row = tl.program_id(0).to(tl.int64)
    T = tl.num_programs(0)
    BLOCK_E: tl.constexpr = RULE.block_e
    e = tl.arange(0, BLOCK_E)
    logits = tl.zeros([BLOCK_E], tl.float32)
    if norm_ptr is not None:
        # Only logits are the launch's before this one: x was there before its programs let this one begin.
        h = tl.arange(0, BLOCK_H)
        x = tl.load(x_ptr + row * stride_xt + h.to(tl.int64) * stride_xh, mask=h < H, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
    wait()
    launch_dependents()
    for first in range(0, chunks, 8):  # eight loads under way, where each would wait for the sum of those before
        for i in tl.static_range(8):
            at = logits_ptr + (row + T * (first + i)) * E + e
            logits += tl.load(at, mask=(e < E) & (first + i < chunks), other=0.0)
    logits = tl.where(e < E, logits, float("-inf"))
    if norm_ptr is not None:
        logits *= inverse_rms
        if normed_ptr is not None:
            x *= inverse_rms * tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
            tl.store(normed_ptr + row * H + h, x.to(normed_ptr.dtype.element_ty), mask=h < H)
    if logit_bias_ptr is not None:
        logits += tl.load(logit_bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    route_row(logits, row, bias_ptr, scale_ptr, weights_ptr, ids_ptr, E, numbers, RULE)


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


def gate(x: Tensor, router: Router, routing: Routing, return_normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    T, H = x.shape
    E = router.weight.shape[0]
    weights = torch.empty((T, routing.top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((T, routing.top_k), dtype=torch.int32, device=x.device)
    normed = torch.empty(x.shape if return_normed else 0, dtype=x.dtype, device=x.device)
    results = weights, ids, normed if return_normed else None
    numbers, BLOCK_H = rule_numbers(routing), block_of(H)
    options = {"RULE": Rule.of(routing, E), "BLOCK_H": BLOCK_H, "num_warps": _row_warps(BLOCK_H, E), "launch_pdl": PDL}
    if T <= _GEMV_TOKENS and not backends.invariant():
        logits = torch.empty((T, E), dtype=torch.float32, device=x.device)
        tensors = x, *router, logits, counters(logits, T), *results
        PART = 1 if T == 1 else 2  # a token alone leaves multiprocessors free
        strides, grid = (x.stride(), router.weight.stride()), (T, ceil_div(E, PART))
        launch(_gate_gemv_kernel, grid, *tensors, H, E, *strides, numbers, PART=PART, **options)
    else:
        logits = raw_logits(x, router)
        _, *rest = router
        sizes = H, E, logits.shape[0], x.stride(), numbers
        launch(_gate_route_kernel, (T,), x, *rest, logits, *results, *sizes, **options)
    return weights, ids, normed


def raw_logits(x: Tensor, router: Router) -> Tensor:
    """``[chunks, T, E]`` float32: x times the router weight and the norm weight, to be summed over chunks of H.

    The norm's factor of each token is still to come, and so is the bias.
    """
    (T, H), E = x.shape, router.weight.shape[0]
    parts, dtype = _parts(x, router.weight, router.norm_weight)
    BLOCK_T, PART, BLOCK_H = (64, 128, 64) if dtype == torch.bfloat16 else (32, 32, 32)
    weight, norm_weight, w_strides = router.weight, router.norm_weight, router.weight.stride()
    folded = None
    if T > BLOCK_T:
        folded = torch.empty((parts, E, H), dtype=dtype, device=x.device)
        row_block = block_of(H)
        options = {"PARTS": parts, "BLOCK_H": row_block, "num_warps": 4 if row_block <= 4096 else 8, "launch_pdl": PDL}
        launch(_fold_kernel, (E,), weight, norm_weight, folded, H, w_strides, **options)
    # Enough programs to fill the card once: split the sum over H when tokens and experts alone do not.
    tiles = max(1, ceil_div(T, BLOCK_T) * ceil_div(E, PART))
    most = _CHUNKS if backends.invariant() else _PROGRAMS // tiles
    chunks = max(1, min(ceil_div(H, 2 * BLOCK_H), most))
    steps = ceil_div(ceil_div(H, chunks), BLOCK_H)
    chunks = ceil_div(H, steps * BLOCK_H)
    logits = torch.empty((chunks, T, E), dtype=torch.float32, device=x.device)
    grid = ceil_div(T, BLOCK_T), ceil_div(E, PART), chunks
    blocks = {"PARTS": parts, "BLOCK_T": BLOCK_T, "PART": PART, "BLOCK_H": BLOCK_H}
    options = {"num_warps": 4, "num_stages": 3, "launch_pdl": PDL}
    tensors = x, folded, weight, norm_weight, logits
    launch(_logits_kernel, grid, *tensors, T, H, E, steps, x.stride(), w_strides, **blocks, **options)
    return logits
