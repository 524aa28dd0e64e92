"""attend on NVIDIA GPUs: one launch, in which the last program of a head of keys to arrive puts its parts together."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse import backends
from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, counters, launch, launch_dependents, wait
from moefuse.types import Cache

#: programs, about: one for each multiprocessor of an H200, but no more than this for a head of keys
_PROGRAMS, _SPLITS = 132, 16
#: numbers of partial sums that a program adds at once: 64 for each thread
_MERGED = 8192
#: tiles of a part in an invariant call
_TILES = 8
#: bytes of keys and values in a tile
_BYTES = 1 << 15
#: a window that leaves nothing out
_EVERYTHING = 1 << 62
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _or_zero(top):
    """A largest logit to subtract: none is -inf."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _finish(acc, top, total, g, pair, sinks_ptr, out_ptr, Hk, Dv, GROUP: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Write the heads ``g`` of a group: sums ``acc`` and ``total`` of powers of two over 2 ** ``top``."""
    inside = g < GROUP
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + pair % Hk * GROUP + g, mask=inside, other=0.0).to(tl.float32) * _LOG2_E
        above = _or_zero(tl.maximum(top, sink))
        total = total * tl.exp2(top - above) + tl.exp2(sink - above)
        acc *= tl.exp2(top - above)[:, None]
    dv = tl.arange(0, BLOCK_DV)
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_ptrs = out_ptr + (pair * GROUP + g)[:, None] * Dv + dv[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (dv < Dv)[None, :])


@triton.jit
def _merge(
    sums_ptr,
    stats_ptr,
    pair,
    parts,
    sinks_ptr,
    out_ptr,
    Hk,
    Dv,
    GROUP: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Put the parts of a head of keys together in their order, MERGED at once: parts, and heads to cover the group."""
    AT_ONCE: tl.constexpr = MERGED[0]
    HEADS: tl.constexpr = MERGED[1]
    g = tl.arange(0, HEADS)
    dv = tl.arange(0, BLOCK_DV)
    base = pair * tl.num_programs(1)
    part = tl.arange(0, SPLITS)
    inside = (part < parts)[:, None] & (g < GROUP)[None, :]
    stats_ptrs = stats_ptr + 2 * ((base + part)[:, None] * GROUP + g[None, :])
    top = tl.max(tl.load(stats_ptrs, mask=inside, other=float("-inf"), cache_modifier=".cg"), 0)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_DV], tl.float32)
    for start in range(0, parts, AT_ONCE):
        some = start + tl.arange(0, AT_ONCE)
        here = (some < parts)[:, None] & (g < GROUP)[None, :]
        rows = (base + some)[:, None] * GROUP + g[None, :]
        theirs = tl.load(stats_ptr + 2 * rows, mask=here, other=float("-inf"), cache_modifier=".cg")
        sums_ptrs = sums_ptr + rows[:, :, None] * Dv + dv[None, None, :]
        sums = tl.load(sums_ptrs, mask=here[:, :, None] & (dv < Dv)[None, None, :], other=0.0, cache_modifier=".cg")
        totals = tl.load(stats_ptr + 2 * rows + 1, mask=here, other=0.0, cache_modifier=".cg")
        share = tl.exp2(theirs - _or_zero(top)[None, :])
        total += tl.sum(totals * share, 0)
        acc += tl.sum(sums * share[:, :, None], 0)
    _finish(acc, top, total, g, pair, sinks_ptr, out_ptr, Hk, Dv, GROUP, BLOCK_DV)


@triton.jit(do_not_specialize=["L", "window"])
def _attend_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    position_ptr,
    mask_ptr,
    starts_ptr,
    sinks_ptr,
    scale,
    window,
    sums_ptr,
    stats_ptr,
    counter_ptr,
    out_ptr,
    Hk,
    L,
    D,
    Dv,
    q_strides,
    cache_strides,
    mask_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    STAGES: tl.constexpr,
    TILES: tl.constexpr,
):
    """Grid: sequences and heads of keys, then parts of the places that are seen.

    The parts are cut by the position, into whole tiles of BLOCK_L places; programs without one have nothing to do.
    With ``starts_ptr`` a sequence begins at its own place, and with TILES a part has as many tiles, so that the cut
    depends on the sequence alone.
    Which part arrives last changes nothing in the result; the counter is left at zero for the next launch.
    """
    stride_qb, stride_qh = q_strides
    keys_b, keys_h, keys_l, values_b, values_h, values_l = cache_strides
    wait()
    launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    b = pair // Hk
    head = pair % Hk
    behind = tl.load(position_ptr).to(tl.int64) + 1
    end = tl.maximum(tl.minimum(behind, L), 0).to(tl.int32)
    begin = tl.maximum(behind - window, 0)
    if starts_ptr is not None:
        begin = tl.maximum(begin, tl.load(starts_ptr + b))
    begin = tl.minimum(begin, end).to(tl.int32)
    seen = end - begin
    part = tl.program_id(1)
    tiles = (seen + tl.num_programs(1) * BLOCK_L - 1) // (tl.num_programs(1) * BLOCK_L)
    size = tl.maximum(tiles, 2 if seen <= 2 * BLOCK_L else 1) * BLOCK_L  # a second tile takes less than a second part
    if TILES > 0:
        size = TILES * BLOCK_L
    parts = (seen + size - 1) // size
    if part < tl.maximum(parts, 1):
        first = begin + part * size
        last = tl.minimum(first + size, end)
        g = tl.arange(0, ROWS)
        d = tl.arange(0, BLOCK_D)
        dv = tl.arange(0, BLOCK_DV)
        j = tl.arange(0, BLOCK_L)
        q_ptrs = q_ptr + b * stride_qb + (head * GROUP + g)[:, None] * stride_qh + d[None, :]
        q = tl.load(q_ptrs, mask=(g < GROUP)[:, None] & (d < D)[None, :], other=0.0)
        k_ptrs = keys_ptr + b * keys_b + head * keys_h + d[None, :]
        v_ptrs = values_ptr + b * values_b + head * values_h + dv[None, :]
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
        for start in tl.range(first, last, BLOCK_L, num_stages=STAGES):
            live = j < last - start
            place = (start + j).to(tl.int64)
            # [BLOCK_L, BLOCK_D] and [BLOCK_L, BLOCK_DV]
            k = tl.load(k_ptrs + place[:, None] * keys_l, mask=live[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_ptrs + place[:, None] * values_l, mask=live[:, None] & (dv < Dv)[None, :], other=0.0)
            if mask_ptr is not None:  # asked for together with keys and values; what is hidden may be no number
                live = live & (tl.load(mask_ptr + b * mask_stride + place, mask=live, other=0) != 0)
                v = tl.where(live[:, None], v, 0.0)
            logits = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * _LOG2_E)
            logits = tl.where(live[None, :], logits, float("-inf"))
            above = tl.maximum(top, tl.max(logits, 1))
            shrink = tl.exp2(top - _or_zero(above))
            p = tl.exp2(logits - _or_zero(above)[:, None])
            total = total * shrink + tl.sum(p, 1)
            acc *= shrink[:, None]
            high = p.to(v.dtype)
            acc = tl.dot(high, v, acc, input_precision="ieee")
            if v.dtype != tl.float32:
                # What rounding left over: weights have twice the bits of a value.
                acc = tl.dot((p - high.to(tl.float32)).to(v.dtype), v, acc)
            top = above
        if parts <= 1:
            _finish(acc, top, total, g, pair, sinks_ptr, out_ptr, Hk, Dv, GROUP, BLOCK_DV)
        else:
            inside = g < GROUP
            mine = (pair * tl.num_programs(1) + part) * GROUP + g
            tl.store(stats_ptr + 2 * mine, top, mask=inside)
            tl.store(stats_ptr + 2 * mine + 1, total, mask=inside)
            tl.store(sums_ptr + mine[:, None] * Dv + dv[None, :], acc, mask=inside[:, None] & (dv < Dv)[None, :])
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                tl.store(counter_ptr + pair, 0)
                _merge(sums_ptr, stats_ptr, pair, parts, sinks_ptr, out_ptr, Hk, Dv, GROUP, BLOCK_DV, SPLITS, MERGED)


def places_of(D: int, Dv: int, size: int) -> int:
    """Places of a tile of numbers of ``size`` bytes."""
    return max(16, min(64, _BYTES // ((block_of(D) + block_of(Dv)) * size)))


def tile_of(group: int, D: int, Dv: int, size: int, splits: int) -> dict[str, Any]:
    """What a kernel for numbers of ``size`` bytes is compiled for."""
    BLOCK_D, BLOCK_DV, heads = block_of(D), block_of(Dv), block_of(group, 1)
    return {
        "GROUP": group,
        "ROWS": block_of(group),
        "BLOCK_L": places_of(D, Dv, size),
        "BLOCK_D": BLOCK_D,
        "BLOCK_DV": BLOCK_DV,
        "SPLITS": block_of(splits, 1),
        "MERGED": (max(1, _MERGED // (heads * BLOCK_DV)), heads),
        "STAGES": 2,
        "TILES": _TILES if backends.invariant() else 0,
    }


def attend(
    q: Tensor, cache: Cache, mask: Tensor | None, sinks: Tensor | None, scale: float, window: int | None
) -> Tensor:
    (B, Hq, D), (_, Hk, L, Dv) = q.shape, cache.values.shape
    out = torch.empty((B, Hq, Dv), dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    group = Hq // Hk
    splits = max(1, min(_PROGRAMS // (B * Hk), _SPLITS, ceil_div(L, 16)))
    starts, mask = None, None if mask is None else mask.view(torch.uint8)
    if backends.invariant():
        splits = max(1, ceil_div(L, _TILES * places_of(D, Dv, q.element_size())))
        if mask is not None:
            mask = mask.to(torch.int32)  # beside narrower ones the compiler sums values in another order than alone
            starts = mask.argmax(1)  # behind what pads a sequence on the left
    sums = torch.empty((B * Hk, splits, group, Dv), dtype=torch.float32, device=q.device)
    stats = torch.empty((B * Hk, splits, group, 2), dtype=torch.float32, device=q.device)
    launch(
        _attend_kernel,
        (B * Hk, splits),
        *(q, *cache, mask, starts, sinks),
        *(scale, _EVERYTHING if window is None else window),
        *(sums, stats, counters(sums, B * Hk), out),
        *(Hk, L, D, Dv),
        q.stride()[:2],
        (*cache.keys.stride()[:3], *cache.values.stride()[:3]),
        0 if mask is None else mask.stride(0),
        **tile_of(group, D, Dv, q.element_size(), splits),
        num_warps=4,
        launch_pdl=PDL,
    )
    return out
