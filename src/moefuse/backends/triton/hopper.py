"""What the products on Hopper share: the schedule of tiles, the ring of stages, and how tokens come and results go.

They are written in Gluon, persistent and warp-specialised: warpgroups multiply, and other partitions bring operands
into a ring of stages and run ahead over the ends of tiles. But for the weight gradient's, A and B are swapped:
``out.T = w @ x.T``, with 128 weight rows and up to WIDTH + 32 tokens to a tile, so that an expert's rows are one tile,
or a few, and a weight leaves the second-level cache as often.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import INTERPRETED, capability, describe

# Triton 3.9 has these by other names than 3.6.
load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
#: what of K a stage holds: 128 bytes, the widest row that tensor cores read from shared memory
BLOCK_K = gl.constexpr(64)
#: rows that the last tile of an expert may have over WIDTH
TAIL_ROWS = gl.constexpr(TokenTiles.SPARE)


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the phase of its barriers."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    """The stage before this one.

    Not a variable that the loop sets to ``stage``: Triton carries what one visit of the body leaves changed, and a
    variable that was ``stage`` ahead of the loop is that same value after the visit, so it would never move.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def tile_of(visit, PROGRAMS: gl.constexpr):
    """This program's tile of a visit: to and fro over tiles from large to small, so that programs get as much work."""
    return visit * PROGRAMS + gl.where(visit % 2 == 0, gl.program_id(0), PROGRAMS - 1 - gl.program_id(0))


@gluon.jit
def visits_of(total, PROGRAMS: gl.constexpr):
    """How many tiles this program has."""
    whole = total // PROGRAMS
    return whole + (tile_of(whole, PROGRAMS) < total).to(gl.int32)


@gluon.jit
def span(tiles_ptr, tile, total, COLUMNS: gl.constexpr):
    """Expert, first and stop of a tile's tokens; of the last tile where there is none, for who reads ahead."""
    row_ptr = tiles_ptr + (1 + gl.minimum(tile, gl.maximum(total - 1, 0)) // COLUMNS) * 3
    return gl.load(row_ptr), gl.load(row_ptr + 1), gl.load(row_ptr + 2)


class Form(NamedTuple):
    """What the product is compiled for, besides its activation.

    ``gather``: x is tokens [T, K] by order // top_k, else rows [S, K] through descriptors. ``pitch``: rows of numbers
    from expert to expert. ``turned``: weights lie across the sum. ``scatter``: rows of the result go to their slots.
    ``decoded``: threads write the weights, not the copy engine.
    """

    n: int
    k: int
    pitch: int
    gated: bool
    gather: bool
    top_k: int
    programs: int
    width: int
    stages: int
    turned: bool = False
    scatter: bool = False
    decoded: bool = False


@gluon.jit
def _slots_of(order_ptr, first, stop, ROWS: gl.constexpr):
    """The slots of ROWS rows; from ``stop`` on, the last one again."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    return gl.load(order_ptr + gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), stop - 1))


@gluon.jit
def tile_slots(order_ptr, first, stop, FORM: gl.constexpr):
    """The slots of a tile's rows, in the parts that `bring_tokens` copies, the tail first; none without ``gather``."""
    WIDTH: gl.constexpr = FORM.width
    found = ()
    if FORM.gather:
        LEAST: gl.constexpr = 64 if WIDTH > 64 else WIDTH
        found = (_slots_of(order_ptr, first + WIDTH, stop, TAIL_ROWS), _slots_of(order_ptr, first, stop, LEAST))
        if WIDTH >= 128:
            found = found + (_slots_of(order_ptr, first + 64, stop, 64),)  # noqa: RUF005
        if WIDTH == 256:
            found = found + (_slots_of(order_ptr, first + 128, stop, 128),)  # noqa: RUF005
    return found


@gluon.jit
def token_places(slots, FORM: gl.constexpr):
    """Where the tokens of slots begin in x, counted in BLOCK_K numbers."""
    found = ()
    for i in gl.static_range(len(slots)):
        found = found + (slots[i] // FORM.top_k * (FORM.k // BLOCK_K),)  # noqa: RUF005
    return found


@gluon.jit
def keep_places(memory, order_ptr, first, stop, FORM: gl.constexpr):
    """`token_places` of a tile in shared memory, for who has no registers for them."""
    places = token_places(tile_slots(order_ptr, first, stop, FORM), FORM)
    for i in gl.static_range(len(places)):
        _part_of(memory, i, places[i].shape[0], FORM).store(places[i])


@gluon.jit
def _kept_places(memory, FORM: gl.constexpr):
    """What `keep_places` kept."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0]))
    found = (_part_of(memory, 0, TAIL_ROWS, FORM).load(layout),)
    PARTS: gl.constexpr = 4 if FORM.width == 256 else 3 if FORM.width == 128 else 2
    for i in gl.static_range(1, PARTS):
        found = found + (_part_of(memory, i, 128 if i == 3 else 64, FORM).load(layout),)  # noqa: RUF005
    return found


@gluon.jit
def _part_of(memory, i: gl.constexpr, ROWS: gl.constexpr, FORM: gl.constexpr):
    """The i-th part of `tile_slots` in such memory."""
    BEGIN: gl.constexpr = (FORM.width, 0, 64, 128)[i]
    return memory.slice(BEGIN, ROWS, dim=0)


@gluon.jit
def _copy_rows(to, x_ptr, places, start):
    """Copy BLOCK_K numbers from ``start`` on of rows of x."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    load_rows(to, x_ptr + ((places + start // BLOCK_K).to(gl.int64) * BLOCK_K)[:, None] + k[None, :])


@gluon.jit
def bring_tokens(x, tail, bar, first, rows, start, given, descs, BYTES: gl.constexpr, FORM: gl.constexpr):
    """Ask for a stage's tokens; ``bar`` also expects BYTES from the copy engine.

    ``given``: x and the `token_places` of a tile where rows are gathered; those in shared memory if FORM.decoded.
    """
    GATHER: gl.constexpr = FORM.gather
    WIDTH: gl.constexpr = FORM.width
    if GATHER:
        if BYTES:
            mbarrier.expect(bar, BYTES)
        x_ptr, places = given
        if FORM.decoded:
            places = _kept_places(places, FORM)
        _copy_rows(x.slice(0, places[1].shape[0], dim=0), x_ptr, places[1], start)
        if WIDTH >= 128:  # noqa: SIM102  known when it compiles
            if rows > 64:
                _copy_rows(x.slice(64, 64, dim=0), x_ptr, places[2], start)
        if WIDTH == 256:  # noqa: SIM102
            if rows > 128:
                _copy_rows(x.slice(128, 128, dim=0), x_ptr, places[3], start)
        if rows > WIDTH:
            _copy_rows(tail, x_ptr, places[0], start)
        async_copy.mbarrier_arrive(bar, increment_count=False)
    else:
        x_desc, half_desc, tail_desc = descs
        HALF: gl.constexpr = WIDTH // 2
        mbarrier.expect(bar, BYTES + HALF * BLOCK_K * 2, pred=rows <= HALF)
        mbarrier.expect(bar, BYTES + WIDTH * BLOCK_K * 2, pred=(rows > HALF) & (rows <= WIDTH))
        mbarrier.expect(bar, BYTES + (WIDTH + TAIL_ROWS) * BLOCK_K * 2, pred=rows > WIDTH)
        load_tile(half_desc, [first, start], bar, x.slice(0, HALF, dim=0), pred=rows <= HALF)
        load_tile(x_desc, [first, start], bar, x, pred=rows > HALF)
        load_tile(tail_desc, [first + WIDTH, start], bar, tail, pred=rows > WIDTH)


@gluon.jit
def store_tokens(value, staging, out_ptr, order_ptr, first, stop, stride: gl.constexpr):
    """value [columns, tokens] into rows of out, from out_ptr on ``stride`` apart, or those that order_ptr names."""
    COLUMNS: gl.constexpr = value.shape[0]
    TOKENS: gl.constexpr = value.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [4, 1], [1, 0])
    piece = staging.slice(0, TOKENS, dim=0)
    piece.store(value.to(out_ptr.dtype.element_ty).permute([1, 0]))
    row = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
    n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    if order_ptr is None:
        out_ptrs = out_ptr + first.to(gl.int64) * stride + row[:, None] * stride + n[None, :]
    else:
        slot = gl.load(order_ptr + gl.minimum(first + row, stop - 1))
        out_ptrs = out_ptr + (slot.to(gl.int64) * stride)[:, None] + n[None, :]
    gl.store(out_ptrs, piece.load(layout), mask=(first + row < stop)[:, None])


@gluon.jit
def finish(acc, staging, out_ptrs, first, stop, column, numbers, FORM: gl.constexpr, ACT: gl.constexpr):
    """The activation of acc [64, tokens] into rows of out, as many tokens at a time as ``staging`` holds.

    ``out_ptrs``: out and, or None, z [S, 2N], which gets gate columns and then up columns as they are; or the order,
    where rows are scattered.
    """
    N: gl.constexpr = FORM.n
    TOKENS: gl.constexpr = acc.shape[1]
    if staging.shape[0] < TOKENS:
        a, b = acc.reshape([64, 2, TOKENS // 2]).permute([0, 2, 1]).split()
        finish(a, staging, out_ptrs, first, stop, column, numbers, FORM, ACT)
        finish(b, staging, out_ptrs, first + TOKENS // 2, stop, column, numbers, FORM, ACT)
    else:
        out_ptr, z_ptr = out_ptrs
        COLUMNS: gl.constexpr = staging.shape[1]
        if FORM.gated:
            # Eight gate rows, then the up rows of the same columns, so that one thread has both.
            g, u = acc.reshape([4, 2, 8, TOKENS]).permute([0, 2, 3, 1]).split()
            if FORM.turned:
                g, u = u, g
            acc, _, _ = ACT(g, u, numbers, True, False)
            acc = acc.reshape([COLUMNS, TOKENS])
            if z_ptr is not None:
                store_tokens(g.reshape([COLUMNS, TOKENS]), staging, z_ptr + column, None, first, stop, 2 * N)
                store_tokens(u.reshape([COLUMNS, TOKENS]), staging, z_ptr + N + column, None, first, stop, 2 * N)
        elif ACT is not None:
            acc, _, _ = ACT(acc, acc, numbers, False, False)
        store_tokens(acc, staging, out_ptr + column, z_ptr if FORM.scatter else None, first, stop, N)


@gluon.constexpr_function
def shape_of(i, width):
    """The i-th shape of a tile from the largest on: tokens of its one product and of its second, which may have none.

    A product has 256 columns at most, and a power of two.
    """
    tokens = width >> i // 2
    return tokens, 0 if i % 2 else tokens // 2 if i else TAIL_ROWS.value


@gluon.constexpr_function
def most(i, width):
    """The tokens that the i-th shape has room for, 0 past the last, which has 64, or the width where that is less."""
    return sum(shape_of(i, width)) if width >> i // 2 >= min(width, 64) else 0


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for Hopper run there: its tensor cores are called by instructions that no other card has."""
    return not INTERPRETED and capability(device) == (9, 0)


@functools.cache
def shared_layout(swizzle: int, bits: int, rank: int) -> Any:
    """A layout in shared memory; to check and make one anew takes 10 us."""
    return gl.NVMMASharedLayout(swizzle, bits, rank=rank)


def described(t: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    layout = shared_layout(128, 8 * t.element_size(), len(block))
    return describe(TensorDescriptor, t, shape, strides, block, layout)
