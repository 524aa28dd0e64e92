"""The grouped product on Hopper for many rows per expert: persistent and warp-specialised, written in Gluon.

A and B are swapped: ``out.T = w @ x.T``, with 128 weight rows and up to WIDTH + 32 tokens to a tile, so that an
expert's rows are one tile, or a few, and a weight leaves the second-level cache as often. Two warpgroups multiply, 64
weight rows each, and never wait for each other; a third partition brings operands into a ring of stages and runs ahead
over the ends of tiles. Narrow tiles leave room for more stages, and these for more weights under way. Weights in
blocks become numbers in that partition, where experts have many rows.

``full[stage]`` completes with the bytes of the copy engine and, where rows are gathered, one arrival of each thread
that copies them, and one more when weights were decoded; ``empty[stage]`` with one arrival of each multiplying
warpgroup.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefuse import backends
from moefuse.backends.gated import Rows
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.formats.blocks import (
    DECODERS,
    base_bits,
    four_parts,
    high_bits,
    plane_at,
    run_bytes,
    run_type,
    strip_bytes_of,
    strip_runs,
    sub_values,
    word_codes,
)
from moefuse.backends.triton.formats.numbers import box_bytes, chosen, code_pairs, eight_columns, factors
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import (
    INTERPRETED,
    begins_aligned,
    bytes_between,
    capability,
    describe,
    launch,
)
from moefuse.backends.triton.runtime.tiles import (
    INVARIANT_TILE_ROWS,
    SELF_DECODED_ROWS,
    SWAP_AB_ROWS,
    SWAP_AB_ROWS_IN_BLOCKS,
    SWAP_AB_STAGES,
    swap_ab_width,
)
from moefuse.types import Activation

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


@gluon.constexpr_function
def _groups(decode):
    """Stages of 64 values that a box of blocks makes: 256 values, 128 where a code has 8 bits."""
    return 2 if base_bits(decode) == 8 else 4


@gluon.jit
def _block_rows(w_ptr, u_ptr, places, GATED: gl.constexpr):
    """Of 128 rows in blocks, a row a thread: pointers to their matrices' first expert, and rows from column 0 on.

    8 gate and 8 up rows by turns if GATED. ``places``: first row and step of gate rows, then of up rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    w_first, w_step, u_first, u_step = places
    if GATED:
        up = r // 8 % 2 == 1
        n = r // 16 * 8 + r % 8
        ptrs = gl.where(up, u_ptr, w_ptr)
        row = gl.where(up, u_first + n * u_step, w_first + n * w_step)
    else:
        ptrs = w_ptr + r.to(gl.int64) * 0
        row = w_first + r * w_step
    return ptrs, row


@gluon.jit
def _bring_blocks(raw, slot, bar, w_desc, u_desc, expert, column, box, live, GATED: gl.constexpr, DECODE: gl.constexpr):
    """Ask for a box of the base plane of 128 rows from ``column`` on, gate rows first, if ``live``."""
    BOX: gl.constexpr = box_bytes(DECODE)
    mbarrier.expect(bar, 128 * BOX, pred=live)
    load_tile(w_desc, [expert, column, BOX * box], bar, raw.index(2 * slot), pred=live)
    second = column if GATED else column + 64
    load_tile(u_desc, [expert, second, BOX * box], bar, raw.index(2 * slot + 1), pred=live)


@gluon.jit
def _block_words(raw, slot, GATED: gl.constexpr, DECODE: gl.constexpr):
    """What `_bring_blocks` brought, in the order of `_block_rows`: words [128, box]."""
    WORDS: gl.constexpr = box_bytes(DECODE) // 4
    layout: gl.constexpr = gl.NVMMASharedLayout(box_bytes(DECODE), 32, rank=2)
    words = reinterpret(raw, gl.uint32, [2, 128, WORDS], layout).index(slot)
    if GATED:
        turns: gl.constexpr = gl.BlockedLayout([1, 1, 1, WORDS], [2, 2, 8, 1], [4, 1, 1, 1], [3, 2, 1, 0])
        found = words.reshape([2, 8, 8, WORDS]).permute([1, 0, 2, 3]).load(turns).reshape([128, WORDS])
    else:
        found = words.load(gl.BlockedLayout([1, WORDS], [32, 1], [4, 1], [1, 0]))
    return found


@gluon.jit
def rows_of_plane(ptrs, at, dtype: gl.constexpr, COUNT: gl.constexpr):
    """COUNT elements from ``at`` [128] of a plane, a row a thread: [128, COUNT]."""
    layout: gl.constexpr = gl.BlockedLayout([1, COUNT], [32, 1], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))[None, :]
    begin = gl.convert_layout(ptrs, rows).to(gl.pointer_type(dtype)) + gl.convert_layout(at, rows)
    return gl.load(begin[:, None] + column)


@gluon.jit
def _bring_scales(ptrs, row, rows, box, K: gl.constexpr, DECODE: gl.constexpr):
    """High bits and scales of a box of blocks, a row a thread, as they lie in their planes: a tuple of [128, ..]."""
    R: gl.constexpr = K // 32
    RUNS: gl.constexpr = 2 * _groups(DECODE)
    HIGH: gl.constexpr = high_bits(DECODE)
    row = row.to(gl.int64)
    found = ()
    if HIGH > 0:
        at = row * (R * HIGH) + box * (RUNS * HIGH)
        found = found + (rows_of_plane(ptrs + plane_at(rows, R, 1, DECODE), at, gl.uint32, RUNS * HIGH),)  # noqa: RUF005
    if run_bytes(DECODE) > 0:
        dtype: gl.constexpr = run_type(DECODE)
        found = found + (rows_of_plane(ptrs + plane_at(rows, R, 2, DECODE), row * R + box * RUNS, dtype, RUNS),)  # noqa: RUF005
    if strip_bytes_of(DECODE, 0) > 0:
        at = row * (R // strip_runs(DECODE)) + box
        found = found + rows_of_strips(ptrs + plane_at(rows, R, 3, DECODE), at, strip_bytes_of(DECODE, 0))
        if strip_bytes_of(DECODE, 1) > 0:
            found = found + rows_of_strips(ptrs + plane_at(rows, R, 4, DECODE), at, strip_bytes_of(DECODE, 1))
    return found


@gluon.jit
def rows_of_strips(ptrs, at, BYTES: gl.constexpr):
    """The BYTES of strips ``at`` [128] of a plane: a tuple of [128, words]."""
    if BYTES == 2:
        found = (rows_of_plane(ptrs, at, gl.uint16, 1),)
    elif BYTES == 12:
        a = rows_of_plane(ptrs, at * 3, gl.uint32, 1)
        b = rows_of_plane(ptrs, at * 3 + 1, gl.uint32, 1)
        found = (a, b, rows_of_plane(ptrs, at * 3 + 2, gl.uint32, 1))
    else:
        found = (rows_of_plane(ptrs, at * (BYTES // 4), gl.uint32, BYTES // 4),)
    return found


@gluon.jit
def _columns_of(x):
    """The columns of [128, 1, 2, 4, 8 or 16], each by row."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0]))
    COUNT: gl.constexpr = x.shape[1]
    if COUNT == 1:
        parts = (x.reshape([128]),)
    elif COUNT == 2:
        a, b = x.split()
        parts = (a, b)
    elif COUNT == 4:
        parts = four_parts(x.reshape([128, 2, 2]))
    elif COUNT == 8:
        parts = eight_columns(x)
    else:
        even, odd = x.reshape([128, 2, 8]).permute([0, 2, 1]).split()
        parts = eight_columns(even) + eight_columns(odd)
    found = ()
    for i in gl.static_range(COUNT):
        found = found + (gl.convert_layout(parts[i].to(gl.uint32), layout),)  # noqa: RUF005
    return found


@gluon.jit
def taken_apart(scales, DECODE: gl.constexpr):
    """What `_bring_scales` brought, by columns: words of high bits, scales of runs, words of strips."""
    NEXT: gl.constexpr = 1 if high_bits(DECODE) > 0 else 0
    AFTER: gl.constexpr = NEXT + (1 if run_bytes(DECODE) > 0 else 0)
    high = ()
    if high_bits(DECODE) > 0:
        high = _columns_of(scales[0])
    runs = ()
    if run_bytes(DECODE) > 0:
        runs = _columns_of(scales[NEXT])
    strip = ()
    for i in gl.static_range(AFTER, len(scales)):
        strip = strip + _columns_of(scales[i])
    return high, runs, strip


@gluon.jit
def _spread(values, COLUMNS: gl.constexpr):
    """[128, COLUMNS], a row a thread: as many columns of each value."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    wide = ()
    for i in gl.static_range(len(values)):
        wide = wide + (gl.convert_layout(values[i], gl.SliceLayout(1, layout))[:, None],)  # noqa: RUF005
    return chosen(wide, column // (COLUMNS // len(values)))


@gluon.jit
def decode(q, known, i: gl.constexpr, run, w, DECODE: gl.constexpr):
    """The i-th 64 values of a box of blocks, from their words [128, 2 * base], into w [128, 64].

    ``run``: which of eight runs the first of them is.
    """
    high, runs, strip = known
    BASE: gl.constexpr = base_bits(DECODE)
    HIGH: gl.constexpr = high_bits(DECODE)
    SLOTS: gl.constexpr = 8 // BASE
    COLUMNS: gl.constexpr = 2 * BASE
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    word = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :] % BASE
    scales = ()
    offsets = ()
    for j in gl.static_range(2):
        of_run = 0
        if run_bytes(DECODE) > 0:
            of_run = runs[2 * i + j]
        scale_a, offset_a, scale_b, offset_b = DECODE(of_run, strip, run + j)
        scale_a, offset_a = factors(scale_a, offset_a, DECODE, True)
        scales = scales + (scale_a,)  # noqa: RUF005
        offsets = offsets + (offset_a,)  # noqa: RUF005
        if sub_values(DECODE) == 16:
            scale_b, offset_b = factors(scale_b, offset_b, DECODE, True)
            scales = scales + (scale_b,)  # noqa: RUF005
            offsets = offsets + (offset_b,)  # noqa: RUF005
    here = ()
    for h in gl.static_range(HIGH):
        pair = (high[HIGH * (2 * i) + h], high[HIGH * (2 * i + 1) + h])
        here = here + (_spread(pair, COLUMNS),)  # noqa: RUF005
    scale = _spread(scales, COLUMNS)
    offset = _spread(offsets, COLUMNS)
    codes = word_codes(gl.convert_layout(q, layout), here, word.to(gl.uint32), DECODE)
    a, b = code_pairs(codes[0], scale, offset, w.dtype, DECODE)
    found = gl.join(a, b)
    if SLOTS == 2:
        a, b = code_pairs(codes[1], scale, offset, w.dtype, DECODE)
        # [128, words, pairs, slots]
        found = gl.join(found, gl.join(a, b)).permute([0, 1, 3, 2])
    elif SLOTS == 4:
        a, b = code_pairs(codes[1], scale, offset, w.dtype, DECODE)
        second = gl.join(a, b)
        a, b = code_pairs(codes[2], scale, offset, w.dtype, DECODE)
        third = gl.join(a, b)
        a, b = code_pairs(codes[3], scale, offset, w.dtype, DECODE)
        # [128, words, pairs, odd or even slots, which two of them]
        found = gl.join(gl.join(found, second), gl.join(third, gl.join(a, b))).permute([0, 1, 4, 3, 2])
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    reinterpret(w, gl.uint32, [128, 32], pairs).store(found.reshape([128, 32]))


@gluon.jit
def _pieces(q, DECODE: gl.constexpr):
    """The words of a box [128, box] by groups of 64 values."""
    first, second = q.reshape([128, 2, q.shape[1] // 2]).permute([0, 2, 1]).split()
    found = (first, second)
    if _groups(DECODE) == 4:
        a, b = first.reshape([128, 2, q.shape[1] // 4]).permute([0, 2, 1]).split()
        c, d = second.reshape([128, 2, q.shape[1] // 4]).permute([0, 2, 1]).split()
        found = (a, b, c, d)
    return found


@gluon.jit
def _produce(rings, pointers, x_descs, w_desc, FORM: gl.constexpr):
    """Fill the ring, tile after tile. Spans are read two tiles ahead and slots one, so that nothing waits for them."""
    x_ring, tail_ring, w_ring, full, empty = rings
    x_ptr, tiles_ptr, order_ptr = pointers
    PROGRAMS: gl.constexpr = FORM.programs
    BLOCK_N: gl.constexpr = 64 if FORM.gated else 128
    COLUMNS: gl.constexpr = FORM.n // BLOCK_N
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    next_expert, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    next_slots = tile_slots(order_ptr, next_first, next_stop, FORM)
    then_expert, then_first, then_stop = span(tiles_ptr, tile_of(1, PROGRAMS), total, COLUMNS)
    for visit in range(visits_of(total, PROGRAMS)):
        column = tile_of(visit, PROGRAMS) % COLUMNS * BLOCK_N
        expert = next_expert
        first = next_first
        rows = next_stop - next_first
        next_expert = then_expert
        next_first = then_first
        next_stop = then_stop
        then_expert, then_first, then_stop = span(tiles_ptr, tile_of(visit + 2, PROGRAMS), total, COLUMNS)
        given = (x_ptr, token_places(next_slots, FORM))
        next_slots = tile_slots(order_ptr, next_first, next_stop, FORM)
        for start in range(0, FORM.k, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            x, tail, bar = x_ring.index(stage), tail_ring.index(stage), full.index(stage)
            bring_tokens(x, tail, bar, first, rows, start, given, x_descs, 128 * BLOCK_K * 2, FORM)
            at = [expert, column // 8, 0, 0, start] if FORM.gated else [expert * FORM.pitch + column, start]
            load_tile(w_desc, at, full.index(stage), w_ring.index(stage))
            stage, phase = advance(stage, phase, FORM.stages)


@gluon.jit
def _decode_ahead(rings, pointers, x_descs, w_descs, blocks_at, FORM: gl.constexpr, DECODE: gl.constexpr):
    """Likewise with weights in blocks, one box of which is under way while another becomes numbers.

    Nothing here waits for memory that it asked for in the same stage: there is no fence in a stage, since one waits for
    all copies and loads (who reads the ring has one), and no more is kept than registers hold.
    """
    x_ring, tail_ring, w_ring, full, empty, raw, raw_full, token_memory = rings
    x_ptr, w_ptr, u_ptr, tiles_ptr, order_ptr = pointers
    w_desc, u_desc = w_descs
    K: gl.constexpr = FORM.k
    GATED: gl.constexpr = FORM.gated
    PROGRAMS: gl.constexpr = FORM.programs
    BLOCK_N: gl.constexpr = 64 if GATED else 128
    COLUMNS: gl.constexpr = FORM.n // BLOCK_N
    GROUPS: gl.constexpr = _groups(DECODE)
    BOXES: gl.constexpr = K // (64 * GROUPS)
    pitch, matrix_rows, places = blocks_at
    _, w_step, _, _ = places
    total = gl.load(tiles_ptr) * COLUMNS
    visits = visits_of(total, PROGRAMS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    boxes = gl.to_tensor(0)
    next_expert, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    begin = tile_of(0, PROGRAMS) % COLUMNS * BLOCK_N
    _bring_blocks(raw, 0, raw_full.index(0), w_desc, u_desc, next_expert, begin, 0, visits > 0, GATED, DECODE)
    ptrs_of_rows, block_row = _block_rows(w_ptr, u_ptr, places, GATED)
    at = ptrs_of_rows + next_expert.to(gl.int64) * pitch
    scales_next = _bring_scales(at, block_row + begin * w_step, matrix_rows, 0, K, DECODE)
    for visit in range(visits):
        column = tile_of(visit, PROGRAMS) % COLUMNS * BLOCK_N
        next_column = tile_of(visit + 1, PROGRAMS) % COLUMNS * BLOCK_N
        expert = next_expert
        first = next_first
        stop = next_stop
        next_expert, next_first, next_stop = span(tiles_ptr, tile_of(visit + 1, PROGRAMS), total, COLUMNS)
        keep_places(token_memory, order_ptr, first, stop, FORM)
        for box in range(BOXES):
            known = taken_apart(scales_next, DECODE)
            slot = boxes % 2
            mbarrier.wait(raw_full.index(slot), boxes // 2 % 2)
            q = _pieces(_block_words(raw, slot, GATED, DECODE), DECODE)
            boxes += 1
            # The box after this one: of these rows, or the first of the next tile's.
            ends = box == BOXES - 1
            after = gl.where(ends, 0, box + 1)
            after_expert = gl.where(ends, next_expert, expert)
            after_column = gl.where(ends, next_column, column)
            live = (visit + 1 < visits) | (box + 1 < BOXES)
            for i in gl.static_range(GROUPS):
                mbarrier.wait(empty.index(stage), phase)
                if i == 0:  # the compiler's fence before it then waits for copies of a whole stage ago
                    bar = raw_full.index(1 - slot)
                    _bring_blocks(
                        raw, 1 - slot, bar, w_desc, u_desc, after_expert, after_column, after, live, GATED, DECODE
                    )
                    at = ptrs_of_rows + after_expert.to(gl.int64) * pitch
                    scales_next = _bring_scales(at, block_row + after_column * w_step, matrix_rows, after, K, DECODE)
                x, tail, bar = x_ring.index(stage), tail_ring.index(stage), full.index(stage)
                begins = 64 * (GROUPS * box + i)
                bring_tokens(x, tail, bar, first, stop - first, begins, (x_ptr, token_memory), x_descs, 0, FORM)
                decode(q[i], known, i, 2 * i, w_ring.index(stage), DECODE)
                gl.thread_barrier()
                mbarrier.arrive(bar)
                stage, phase = advance(stage, phase, FORM.stages)


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


@gluon.jit
def _multiply(
    rings,
    staging,
    out_ptrs,
    place,
    stage,
    phase,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
    WARPGROUP: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """64 weight rows by the tokens of one tile."""
    x_ring, tail_ring, w_ring, full, empty = rings
    first, stop, column = place
    K: gl.constexpr = FORM.k
    STAGES: gl.constexpr = FORM.stages
    TOKENS: gl.constexpr = SHAPE[0]
    TAIL: gl.constexpr = SHAPE[1]
    acc = gl.zeros([64, TOKENS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16]))
    if TAIL:
        tail_acc = gl.zeros([64, TAIL], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16]))
    for start in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        if FORM.gather or FORM.decoded:  # threads wrote the rows, tensor cores read them
            fence_async_shared()
        w = w_ring.index(stage).reshape([128, BLOCK_K]).slice(64 * WARPGROUP, 64, dim=0)
        if FORM.turned:  # each half of the rows has 64 columns of weights
            w = w.permute([1, 0])
        x = x_ring.index(stage)
        if TAIL:
            tail = tail_ring.index(stage) if x.shape[0] == TOKENS else x.slice(TOKENS, TAIL, dim=0)
            tail_acc = warpgroup_mma(w, tail.permute([1, 0]), tail_acc, use_acc=start > 0, is_async=True)
        if x.shape[0] > TOKENS:
            x = x.slice(0, TOKENS, dim=0)
        acc = warpgroup_mma(w, x.permute([1, 0]), acc, use_acc=start > 0, is_async=True)
        # The products of the stage before are done when only this stage's are under way.
        if TAIL:
            acc, tail_acc = warpgroup_mma_wait(2, deps=[acc, tail_acc])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(before(stage, STAGES)), pred=start > 0)
        stage, phase = advance(stage, phase, STAGES)
    if TAIL:
        acc, tail_acc = warpgroup_mma_wait(0, deps=[acc, tail_acc])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(before(stage, STAGES)))
    if TAIL:
        finish(tail_acc, staging, out_ptrs, first + TOKENS, stop, column, numbers, FORM, ACT)
    finish(acc, staging, out_ptrs, first, stop, column, numbers, FORM, ACT)
    return stage, phase


@gluon.jit
def consume(
    rings, stagings, tiles_ptr, out_ptrs, numbers, FORM: gl.constexpr, ACT: gl.constexpr, WARPGROUP: gl.constexpr
):
    """One warpgroup's half of every tile, each in the least shape that has room for its tokens."""
    WIDTH: gl.constexpr = FORM.width
    PROGRAMS: gl.constexpr = FORM.programs
    BLOCK_N: gl.constexpr = 64 if FORM.gated else 128
    COLUMNS: gl.constexpr = FORM.n // BLOCK_N
    staging = stagings.index(WARPGROUP)
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    _, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    for visit in range(visits_of(total, PROGRAMS)):
        column = tile_of(visit, PROGRAMS) % COLUMNS * BLOCK_N + BLOCK_N // 2 * WARPGROUP
        first = next_first
        stop = next_stop
        _, next_first, next_stop = span(tiles_ptr, tile_of(visit + 1, PROGRAMS), total, COLUMNS)
        rows = stop - first
        place = (first, stop, column)
        for i in gl.static_range(6):
            if most(i, WIDTH) > 0:  # noqa: SIM102
                if (rows > most(i + 1, WIDTH)) & (rows <= most(i, WIDTH)):
                    SHAPE: gl.constexpr = shape_of(i, WIDTH)
                    stage, phase = _multiply(
                        rings, staging, out_ptrs, place, stage, phase, numbers, FORM, ACT, WARPGROUP, SHAPE
                    )


@gluon.jit
def _swap_ab_kernel(
    x_ptr,
    x_desc,
    half_desc,
    tail_desc,
    w_desc,
    u_desc,
    w_ptr,
    u_ptr,
    tiles_ptr,
    order_ptr,
    out_ptr,
    z_ptr,
    blocks_at,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
    DECODE: gl.constexpr,
):
    """out [S, N] of all tiles, and z where given. Grid: programs; columns of a tile of tokens are next to each other.

    x: rows through descriptors of ``width`` rows, half and tail, where they are not gathered.
    w: boxes of 128 weight rows; when gated, 8 gate rows and their 8 up rows by turns. Of blocks the base plane comes in
    boxes of rows of w_desc and u_desc, the other planes from w_ptr and u_ptr on. ``blocks_at``: the bytes and the rows
    of a matrix, and which of these are gate rows and up rows.
    """
    GATHER: gl.constexpr = FORM.gather
    WIDTH: gl.constexpr = FORM.width
    STAGES: gl.constexpr = FORM.stages
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, WIDTH, BLOCK_K], wide)
    if DECODE is not None:
        w_ring = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_K], wide)
        raw = gl.allocate_shared_memory(gl.uint8, [4] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005
        raw_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(raw_full.index(i), count=1)
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        token_memory = gl.allocate_shared_memory(gl.int32, [2 * WIDTH], plain)  # a power of two
    else:
        boxes: gl.constexpr = [STAGES] + w_desc.block_type.shape  # noqa: RUF005  Triton has no starred expression
        w_ring = gl.allocate_shared_memory(dtype, boxes, w_desc.layout)
    tail_ring = gl.allocate_shared_memory(dtype, [STAGES, TAIL_ROWS, BLOCK_K], wide)
    OUT_COLUMNS: gl.constexpr = 32 if FORM.gated else 64
    narrow: gl.constexpr = gl.NVMMASharedLayout(OUT_COLUMNS * 2, 16, rank=2)
    stagings = gl.allocate_shared_memory(dtype, [2, 4096 // OUT_COLUMNS, OUT_COLUMNS], narrow)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Gathering and decoding take a warpgroup, which works row by row; the copy engine needs one warp to ask for a box.
    PRODUCER_WARPS: gl.constexpr = 4 if GATHER or DECODE is not None else 1
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=(128 if GATHER else 1) + (1 if GATHER or DECODE is not None else 0))
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (x_ring, tail_ring, w_ring, full, empty)
    x_descs = (x_desc, half_desc, tail_desc)
    out_ptrs = (out_ptr, order_ptr if FORM.scatter else z_ptr)
    if DECODE is None:
        gl.warp_specialize(
            [
                (consume, (rings, stagings, tiles_ptr, out_ptrs, numbers, FORM, ACT, gl.constexpr(0))),
                (consume, (rings, stagings, tiles_ptr, out_ptrs, numbers, FORM, ACT, gl.constexpr(1))),
                (_produce, (rings, (x_ptr, tiles_ptr, order_ptr), x_descs, w_desc, FORM)),
            ],
            [4, PRODUCER_WARPS],
            [200, 104] if GATHER else [240, 24],
        )
    else:
        filled = (x_ring, tail_ring, w_ring, full, empty, raw, raw_full, token_memory)
        pointers = (x_ptr, w_ptr, u_ptr, tiles_ptr, order_ptr)
        gl.warp_specialize(
            [
                (consume, (rings, stagings, tiles_ptr, out_ptrs, numbers, FORM, ACT, gl.constexpr(0))),
                (consume, (rings, stagings, tiles_ptr, out_ptrs, numbers, FORM, ACT, gl.constexpr(1))),
                (_decode_ahead, (filled, pointers, x_descs, (w_desc, u_desc), blocks_at, FORM, DECODE)),
            ],
            [4, PRODUCER_WARPS],
            [184, 136],
        )


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for Hopper run there: its tensor cores are called by instructions that no other card has."""
    return not INTERPRETED and capability(device) == (9, 0)


def fits(load: float, E: int, N: int, K: int, itemsize: int, gated: bool, blocks: bool) -> bool:
    """Whether a product of ``load`` rows per expert, N columns and sums over K goes into whole tiles, and gains."""
    whole = N % (64 if gated else 128) == 0 and K % BLOCK_K.value == 0
    enough = load > (SWAP_AB_ROWS_IN_BLOCKS if blocks else SWAP_AB_ROWS)
    return enough and itemsize == 2 and whole and 0 < E * N < 2**31


def decodes_ahead(load: float, K: int, format: str) -> bool:
    """Whether `swap_ab_product` takes weights in blocks: many rows, and sums that fill its boxes.

    The others are for grouped_linear_hopper_blocks.py.
    """
    return load > SELF_DECODED_ROWS and not backends.invariant() and K % (64 * _groups(DECODERS[format])) == 0


def takes(x: Tensor, w: Rows, u: Rows, out: Tensor, gated: bool) -> bool:
    """Whether `swap_ab_product` can multiply x with these weights.

    Numbers lie as the copy engine reads them: experts one behind the other, in each gate rows and then its up rows.
    """
    E, N, K, blocks = w.data.shape[0], out.shape[1], x.shape[1], bool(w.format)
    load = out.shape[0] / max(1, E)
    if blocks and w.exact:  # the other way for few rows gains by rounding
        load += SWAP_AB_ROWS_IN_BLOCKS
    if backends.invariant() and out.shape[0]:
        # It serves every number of rows, or none; tiles of numbers sum as it does, bit for bit, and serve a few.
        load = math.inf if blocks or load > INVARIANT_TILE_ROWS else 0
    if not fits(load, E, N, K, x.element_size(), gated, blocks) or not is_hopper(x.device):
        return False
    if w.format != u.format or not (x.is_contiguous() and begins_aligned(x)):
        return False
    if blocks:
        if K // 8 * high_bits(DECODERS[w.format]) % 16:  # the copy engine's rows are such
            return False
        return w.data.stride() == u.data.stride() and w.data.shape == u.data.shape and w.step == u.step
    w_data, u_data = w.data, u.data
    if w_data.dtype != x.dtype or not begins_aligned(w_data):
        return False
    if not gated:
        return w_data.stride()[1:] == (K, 1) and w_data.stride(0) % K == 0 and E * w_data.stride(0) < 2**31 * K
    if not w_data.stride() == u_data.stride() == (2 * N * K, K, 1):
        return False
    return bytes_between(w_data, u_data) == N * K * w_data.element_size()


@functools.cache
def shared_layout(swizzle: int, bits: int, rank: int) -> Any:
    """A layout in shared memory; to check and make one anew takes 10 us."""
    return gl.NVMMASharedLayout(swizzle, bits, rank=rank)


def _plane(rows: Rows, N: int, K: int) -> TensorDescriptor:
    """The base plane of N rows of each matrix, in boxes of 64 rows."""
    decode = DECODERS[rows.format]
    length, box = K // 8 * base_bits(decode), box_bytes(decode)
    data, (pitch, _, first, step) = rows.data, rows.strides
    shape, strides = (data.shape[0], N, length), (pitch, step * length, 1)
    plane = data.as_strided(shape, strides, data.storage_offset() + first * length)
    layout = shared_layout(box, 8, 3)
    return describe(TensorDescriptor, plane, list(shape), list(strides), [1, 64, box], layout)


def described(t: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    layout = shared_layout(128, 8 * t.element_size(), len(block))
    return describe(TensorDescriptor, t, shape, strides, block, layout)


def swap_ab_product(
    x: Tensor,
    w: Rows,
    u: Rows,
    tiles: TokenTiles,
    order: Tensor,
    *,
    gather: bool,
    activation: Activation | None,
    out: Tensor,
    scatter: bool = False,
    z: Tensor | None = None,
    tile_width: int | None = None,
) -> None:
    """Launch the product into ``out`` ``[S, N]``, and what comes before a gated activation into ``z`` ``[S, 2N]``.

    ``scatter``: rows go to their slots; there is no z then.

    Rows without an expert are left as they are.
    """
    (S, N), E, K = out.shape, w.data.shape[0], x.shape[1]
    gated = activation is not None and activation.gated
    width = tile_width or swap_ab_width(tiles.load)
    stages = SWAP_AB_STAGES[width]
    w_pitch = 0 if w.format else w.data.stride(0) // K
    u_desc = None
    blocks_at = (0, 0, (0, 0, 0, 0))
    if w.format:
        w_desc, u_desc = _plane(w, N, K), _plane(u, N, K)
        (pitch, rows, *w_place), (_, _, *u_place) = w.strides, u.strides
        blocks_at = (pitch, rows, (*w_place, *u_place))
        stages -= 1  # two boxes of every row have its place
    elif gated:
        w_desc = described(w.data, [E, N // 8, 2, 8, K], [2 * N * K, 8 * K, N * K, K, 1], [1, 8, 2, 8, BLOCK_K.value])
    else:
        w_desc = described(w.data, [(E - 1) * w_pitch + N, K], [K, 1], [128, BLOCK_K.value])
    heights = (width, width // 2, tiles.SPARE)
    x_descs = [None if gather else described(x, [S, K], [K, 1], [rows, BLOCK_K.value]) for rows in heights]
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    # No programmatic dependent launch: a program takes a whole multiprocessor, and waiting there made it slower.
    top_k = max(1, S // x.shape[0])
    launch(
        _swap_ab_kernel,
        (programs,),
        *(x, *x_descs, w_desc, u_desc, *((w.data, u.data) if w.format else (None, None))),
        *(tiles.of(width), order, out, z),
        blocks_at,
        activation_numbers(activation),
        FORM=Form(
            N, K, w_pitch, gated, gather, top_k, programs, width, stages, scatter=scatter, decoded=bool(w.format)
        ),
        ACT=None if activation is None else ACTIVATIONS[activation.kind],
        DECODE=DECODERS[w.format] if w.format else None,
        num_warps=4,
    )
