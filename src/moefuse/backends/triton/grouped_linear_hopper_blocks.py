"""The grouped product on Hopper with weights in blocks: they become numbers in the registers that tensor cores read.

Tiles and their schedule are hopper.py's. A multiplying warpgroup has 64 of a tile's weight rows: it reads their codes
from shared memory, where the copy engine brings them 64 bytes of a row at a time, each thread those of the two rows
whose products it computes, and while one product of 64 values is under way it decodes the next. Numbers of weights
never lie in memory. One partition brings codes and another one tokens, each in a ring of its own and as far ahead as
that goes.

``full[stage]`` and ``empty[stage]`` are of tokens, 64 values to a stage; ``raw_full[slot]`` and ``raw_empty[slot]`` of
codes. A ring is emptied by both warpgroups.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefuse.backends.gated import Rows
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.formats.blocks import (
    DECODERS,
    base_bits,
    high_bits,
    plane_at,
    run_bytes,
    run_type,
    strip_bytes_of,
    strip_runs,
)
from moefuse.backends.triton.formats.numbers import factors, number_pairs, pair_codes
from moefuse.backends.triton.hopper import (
    BLOCK_K,
    TAIL_ROWS,
    Form,
    advance,
    before,
    bring_tokens,
    described,
    finish,
    load_tile,
    most,
    reinterpret,
    shape_of,
    shared_layout,
    span,
    tile_of,
    tile_slots,
    token_places,
    visits_of,
)
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import describe, launch
from moefuse.backends.triton.runtime.tiles import SWAP_AB_RINGS, swap_ab_blocks_width
from moefuse.types import Activation

#: bytes of a row that the copy engine brings at a time
BOX = gl.constexpr(64)
#: rows of a box: half of a warpgroup's
BOX_ROWS = gl.constexpr(32)


@gluon.constexpr_function
def _box_stages(decode):
    """How many 64 values a box holds."""
    return 8 // base_bits(decode)


@gluon.constexpr_function
def _high_box(decode):
    """Bytes of the high plane that go with a box of the base plane."""
    return BOX.value * high_bits(decode) // base_bits(decode)


@gluon.constexpr_function
def _ahead(width):
    """Products of a stage that may be under way while the next is decoded: more registers are in use then."""
    return 1 if width <= 32 else 0


@gluon.constexpr_function
def _rows_layout(count):
    """[4, 8, 2, count]: as tensor cores take 64 rows, each with ``count`` elements, which one thread has.

    Row 16 * a + 8 * b + g is [a, g, b]: a is the warp and g every fourth lane. The four lanes of a row have the same.
    """
    bits = [1 << i for i in range(count.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, 0, 0, bit] for bit in bits), [0, 0, 1, 0]],
        lane_bases=[[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, 8, 2, count],
    )


@gluon.constexpr_function
def _pairs_layout():
    """[4, 8, 2, 2, 2, 2]: of such rows, pairs of numbers. Lane 2 * h + p of a row has pair p of four h."""
    return gl.BlockedLayout([1, 1, 2, 1, 1, 2], [1, 8, 1, 2, 2, 1], [4, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0])


@gluon.jit
def _columns(x):
    """[4, 8, 2, count] by columns: a tuple of [4, 8, 2]."""
    layout: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, _pairs_layout())))
    COUNT: gl.constexpr = x.shape[3]
    if COUNT == 1:
        found = (gl.convert_layout(x.reshape([4, 8, 2]).to(gl.uint32), layout, assert_trivial=True),)
    else:
        even, odd = x.reshape([4, 8, 2, COUNT // 2, 2]).split()
        evens = _columns(even)
        odds = _columns(odd)
        found = ()
        for i in gl.static_range(COUNT // 2):
            found = found + (evens[i], odds[i])  # noqa: RUF005
    return found


@gluon.jit
def _own_rows(w_ptrs, expert, column, blocks_at, GATED: gl.constexpr):
    """This warpgroup's 64 rows from ``column`` on: their matrices, and which rows of these they are. [4, 8, 2]."""
    w_ptr, u_ptr = w_ptrs
    pitch, _, places = blocks_at
    w_first, w_step, u_first, u_step = places
    layout: gl.constexpr = gl.SliceLayout(3, _rows_layout(1))
    a = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    g = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    b = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    behind = expert.to(gl.int64) * pitch
    if GATED:
        n = column + 8 * a + g
        ptrs = gl.where(b + n * 0 == 1, u_ptr + behind, w_ptr + behind)
        row = gl.where(b == 1, u_first + n * u_step, w_first + n * w_step)
    else:
        row = w_first + (column + 16 * a + 8 * b + g) * w_step
        ptrs = w_ptr + (behind + row.to(gl.int64) * 0)
    return ptrs, row


@gluon.jit
def _of_plane(ptrs, at, dtype: gl.constexpr, COUNT: gl.constexpr, left):
    """COUNT elements from ``at`` on of a plane, for each row; zeros past the ``left`` ones that a row still has."""
    layout: gl.constexpr = _rows_layout(COUNT)
    rows: gl.constexpr = gl.SliceLayout(3, layout)
    column = gl.arange(0, COUNT, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    column = column[None, None, None, :]
    begin = gl.convert_layout(ptrs, rows).to(gl.pointer_type(dtype)) + gl.convert_layout(at, rows)
    found = ()
    if left is None:
        found = gl.load(begin[:, :, :, None] + column)
    else:
        found = gl.load(begin[:, :, :, None] + column, mask=column < left, other=0)
    return found


@gluon.jit
def _of_strips(ptrs, at, BYTES: gl.constexpr):
    """The BYTES of strips ``at`` of a plane: a tuple of [4, 8, 2, words]."""
    if BYTES == 2:
        found = (_of_plane(ptrs, at, gl.uint16, 1, None),)
    elif BYTES == 12:
        a = _of_plane(ptrs, at * 3, gl.uint32, 1, None)
        b = _of_plane(ptrs, at * 3 + 1, gl.uint32, 1, None)
        found = (a, b, _of_plane(ptrs, at * 3 + 2, gl.uint32, 1, None))
    else:
        found = (_of_plane(ptrs, at * (BYTES // 4), gl.uint32, BYTES // 4, None),)
    return found


@gluon.jit
def _bring_scales(ptrs, row, rows, strip, K: gl.constexpr, DECODE: gl.constexpr):
    """The scales of a strip of 256 values of each row, as they lie in their planes: a tuple of [4, 8, 2, ..]."""
    R: gl.constexpr = K // 32
    row = row.to(gl.int64)
    left = None
    if R % 8 != 0:
        left = R - 8 * strip
    found = ()
    if run_bytes(DECODE) > 0:
        at = row * R + 8 * strip
        found = found + (_of_plane(ptrs + plane_at(rows, R, 2, DECODE), at, run_type(DECODE), 8, left),)  # noqa: RUF005
    if strip_runs(DECODE) == 4:  # 128 values have a scale of four bytes
        if R % 8 != 0:
            left = R // 4 - 2 * strip
        at = row * (R // 4) + 2 * strip
        found = (_of_plane(ptrs + plane_at(rows, R, 3, DECODE), at, gl.uint32, 2, left),)
    elif strip_bytes_of(DECODE, 0) > 0:
        at = row * (R // 8) + strip
        found = found + _of_strips(ptrs + plane_at(rows, R, 3, DECODE), at, strip_bytes_of(DECODE, 0))
        if strip_bytes_of(DECODE, 1) > 0:
            found = found + _of_strips(ptrs + plane_at(rows, R, 4, DECODE), at, strip_bytes_of(DECODE, 1))
    return found


@gluon.jit
def _taken_apart(scales, DECODE: gl.constexpr):
    """What `_bring_scales` brought, by columns: scales of runs, words of strips."""
    NEXT: gl.constexpr = 1 if run_bytes(DECODE) > 0 else 0
    runs = ()
    if run_bytes(DECODE) > 0:
        runs = _columns(scales[0])
    strip = ()
    for i in gl.static_range(NEXT, len(scales)):
        strip = strip + _columns(scales[i])
    return runs, strip


@gluon.jit
def _words(ring, slot, WARPGROUP: gl.constexpr, GATED: gl.constexpr, COUNT: gl.constexpr):
    """A warpgroup's COUNT words of each of its rows in a slot of a ring, by columns."""
    layout: gl.constexpr = gl.NVMMASharedLayout(4 * COUNT if COUNT > 4 else 0, 32, rank=2)
    SLOTS: gl.constexpr = ring.shape[0] // 2
    words = reinterpret(ring, gl.uint32, [SLOTS, 64, COUNT], layout).index(2 * slot + WARPGROUP)
    if GATED:  # gate rows, then up rows
        rows = words.reshape([2, 4, 8, COUNT]).permute([1, 2, 0, 3])
    else:
        rows = words.reshape([4, 2, 8, COUNT]).permute([0, 2, 1, 3])
    return _columns(rows.load(_rows_layout(COUNT)))


@gluon.jit
def _eight(words, high, slot: gl.constexpr, lanes, scale, offset, dtype: gl.constexpr, DECODE: gl.constexpr):
    """Eight values of each row: ``slot`` and the next, for the lanes of a row by their fours and pairs."""
    BASE: gl.constexpr = base_bits(DECODE)
    HIGH: gl.constexpr = high_bits(DECODE)
    four, pair = lanes
    if BASE == 8:  # noqa: SIM108  kernels branch when they are compiled
        q = gl.where(four == 0, _wide(words[slot]), _wide(words[slot + 1]))
    else:
        q = _wide(words[slot * BASE // 8])
    more = q
    if HIGH > 0:
        more = _wide(high[slot * HIGH // 8])
    codes, first, second = pair_codes(q, more, slot + four, pair, DECODE)
    return number_pairs(codes, first, second, scale, offset, dtype, DECODE)


@gluon.jit
def _decode(words, high, known, i: gl.constexpr, begin: gl.constexpr, dtype: gl.constexpr, DECODE: gl.constexpr):
    """The i-th 64 values of a strip, from the words of a box whose values from ``begin`` on they are: [64, 64]."""
    runs, strip = known
    layout: gl.constexpr = _pairs_layout()
    ONE: gl.constexpr = gl.SliceLayout(4, gl.SliceLayout(5, layout))
    TWO: gl.constexpr = gl.SliceLayout(5, layout)
    four = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, ONE)))).to(gl.uint32)
    pair = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, TWO)))))
    lanes = (four[None, None, None, :][:, :, :, :, None], pair.to(gl.uint32)[None, None, None, None, :])
    scales = ()
    offsets = ()
    if strip_runs(DECODE) == 4:
        strip = (strip[i // 2],)
    for j in gl.static_range(2):
        of_run = 0
        if run_bytes(DECODE) > 0:
            of_run = runs[2 * i + j]
        scale_a, offset_a, scale_b, offset_b = DECODE(of_run, strip, 2 * i + j)
        scale_a, offset_a = factors(scale_a, offset_a, DECODE, True)
        scale_b, offset_b = factors(scale_b, offset_b, DECODE, True)
        scales = scales + (scale_a, scale_b)  # noqa: RUF005
        offsets = offsets + (offset_a, offset_b)  # noqa: RUF005
    found = ()
    for j in gl.static_range(8):
        scale, offset = _wide(scales[j // 2]), _wide(offsets[j // 2])
        found = found + (_eight(words, high, begin // 4 + 2 * j, lanes, scale, offset, dtype, DECODE),)  # noqa: RUF005
    a, b, c, d, e, f, g, h = found  # type: ignore[misc]
    even = gl.join(gl.join(a, e), gl.join(c, g))
    whole = gl.join(even, gl.join(gl.join(b, f), gl.join(d, h)))
    # [a, g, b, four, pair, one, bits of the eight from the highest on]
    return whole.permute([0, 2, 1, 6, 7, 8, 3, 4, 5]).reshape([64, 64])


@gluon.jit
def _wide(x):
    """[4, 8, 2] for the lanes of a row: [4, 8, 2, 1, 1]."""
    return x[:, :, :, None][:, :, :, :, None]


@gluon.jit
def _produce_tokens(rings, pointers, x_descs, FORM: gl.constexpr):
    """Fill the ring of tokens, tile after tile. Spans are read two tiles ahead and slots one, so nothing waits."""
    x_ring, tail_ring, full, empty = rings
    x_ptr, tiles_ptr, order_ptr = pointers
    PROGRAMS: gl.constexpr = FORM.programs
    COLUMNS: gl.constexpr = FORM.n // (64 if FORM.gated else 128)
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    _, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    next_slots = tile_slots(order_ptr, next_first, next_stop, FORM)
    _, then_first, then_stop = span(tiles_ptr, tile_of(1, PROGRAMS), total, COLUMNS)
    for visit in range(visits_of(total, PROGRAMS)):
        first = next_first
        rows = next_stop - next_first
        next_first = then_first
        next_stop = then_stop
        _, then_first, then_stop = span(tiles_ptr, tile_of(visit + 2, PROGRAMS), total, COLUMNS)
        given = (x_ptr, token_places(next_slots, FORM))
        next_slots = tile_slots(order_ptr, next_first, next_stop, FORM)
        for start in range(0, FORM.k, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            x, tail, bar = x_ring.index(stage), tail_ring.index(stage), full.index(stage)
            bring_tokens(x, tail, bar, first, rows, start, given, x_descs, 0, FORM)
            stage, phase = advance(stage, phase, FORM.stages)


@gluon.jit
def _bring_box(ring, slot, bar, descs, expert, column, begin, GATED: gl.constexpr):
    """Ask for a box of 128 rows of a plane: of each warpgroup 64, when GATED 32 gate rows and their up rows."""
    desc, up_desc = descs
    for warpgroup in gl.static_range(2):
        for b in gl.static_range(2):
            at = ring.index(4 * slot + 2 * warpgroup + b)
            if GATED:
                load_tile(up_desc if b else desc, [expert, column + 32 * warpgroup, begin], bar, at)
            else:
                load_tile(desc, [expert, column + 64 * warpgroup + 32 * b, begin], bar, at)


@gluon.jit
def _produce_codes(rings, tiles_ptr, descs, FORM: gl.constexpr, DECODE: gl.constexpr):
    """Fill the ring of codes, tile after tile."""
    raw, high, raw_full, raw_empty = rings
    planes, high_planes = descs
    PROGRAMS: gl.constexpr = FORM.programs
    BLOCK_N: gl.constexpr = 64 if FORM.gated else 128
    COLUMNS: gl.constexpr = FORM.n // BLOCK_N
    SLOTS: gl.constexpr = raw.shape[0] // 4
    VALUES: gl.constexpr = 64 * _box_stages(DECODE)
    BOXES: gl.constexpr = (FORM.k + VALUES - 1) // VALUES
    HIGH_BOX: gl.constexpr = _high_box(DECODE)
    total = gl.load(tiles_ptr) * COLUMNS
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    next_expert, _, _ = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    for visit in range(visits_of(total, PROGRAMS)):
        column = tile_of(visit, PROGRAMS) % COLUMNS * BLOCK_N
        expert = next_expert
        next_expert, _, _ = span(tiles_ptr, tile_of(visit + 1, PROGRAMS), total, COLUMNS)
        for box in range(BOXES):
            mbarrier.wait(raw_empty.index(slot), phase)
            bar = raw_full.index(slot)
            mbarrier.expect(bar, 128 * (BOX + HIGH_BOX))
            _bring_box(raw, slot, bar, planes, expert, column, BOX * box, FORM.gated)
            if HIGH_BOX > 0:
                _bring_box(high, slot, bar, high_planes, expert, column, HIGH_BOX * box, FORM.gated)
            slot, phase = advance(slot, phase, SLOTS)


@gluon.jit
def _strip(
    i,
    state,
    rings,
    known,
    source,
    PARTS: gl.constexpr,
    FORM: gl.constexpr,
    DECODE: gl.constexpr,
    WARPGROUP: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """PARTS times 64 values of the i-th strip of 256, multiplied; and the next strip's scales, the last one's again."""
    acc, tail_acc, stage, phase, slot, slot_phase = state
    tokens, codes = rings
    x_ring, tail_ring, full, empty = tokens
    raw, high, raw_full, raw_empty = codes
    STAGES: gl.constexpr = FORM.stages
    TOKENS: gl.constexpr = SHAPE[0]
    TAIL: gl.constexpr = SHAPE[1]
    AHEAD: gl.constexpr = _ahead(FORM.width)
    BOX_STAGES: gl.constexpr = _box_stages(DECODE)
    SLOTS: gl.constexpr = raw.shape[0] // 4
    words = ()
    more = ()
    for part in gl.static_range(PARTS):
        if part % BOX_STAGES == 0:
            mbarrier.wait(raw_full.index(slot), slot_phase)
            words = _words(raw, slot, WARPGROUP, FORM.gated, BOX // 4)
            if high_bits(DECODE) > 0:
                more = _words(high, slot, WARPGROUP, FORM.gated, _high_box(DECODE) // 4)
            gl.thread_barrier()
            mbarrier.arrive(raw_empty.index(slot))
            slot, slot_phase = advance(slot, slot_phase, SLOTS)
        numbers = _decode(words, more, known, part, 64 * (part % BOX_STAGES), x_ring.dtype, DECODE)
        w = gl.convert_layout(numbers, gl.DotOperandLayout(0, acc.type.layout, 2), assert_trivial=True)
        if part % 2 == 0:
            mbarrier.wait(full.index(stage), phase)
            if part + 1 < PARTS:
                second, second_phase = advance(stage, phase, STAGES)
                mbarrier.wait(full.index(second), second_phase)
            if FORM.gather:  # threads wrote the rows, tensor cores read them
                fence_async_shared()
        if part == 0:  # a fence waits for loads that are under way: these have two stages until the next
            ptrs, row, matrix_rows = source
            scales = _bring_scales(ptrs, row, matrix_rows, gl.minimum(i + 1, (FORM.k - 1) // 256), FORM.k, DECODE)
        x = x_ring.index(stage)
        going = (i > 0) if part == 0 else True
        if TAIL:
            tail = tail_ring.index(stage) if x.shape[0] == TOKENS else x.slice(TOKENS, TAIL, dim=0)
            w_tail = gl.convert_layout(numbers, gl.DotOperandLayout(0, tail_acc.type.layout, 2), assert_trivial=True)
            tail_acc = warpgroup_mma(w_tail, tail.permute([1, 0]), tail_acc, use_acc=going, is_async=True)
        if x.shape[0] > TOKENS:
            x = x.slice(0, TOKENS, dim=0)
        acc = warpgroup_mma(w, x.permute([1, 0]), acc, use_acc=going, is_async=True)
        # Where registers suffice, these products go on while the next numbers are decoded.
        if TAIL:
            acc, tail_acc = warpgroup_mma_wait(2 * AHEAD, deps=[acc, tail_acc])
        else:
            acc = warpgroup_mma_wait(AHEAD, deps=[acc])
        if AHEAD:
            mbarrier.arrive(empty.index(before(stage, STAGES)), pred=going)
        else:
            mbarrier.arrive(empty.index(stage))
        stage, phase = advance(stage, phase, STAGES)
    return (acc, tail_acc, stage, phase, slot, slot_phase), scales


@gluon.jit
def _multiply(
    rings,
    staging,
    pointers,
    place,
    turns,
    known,
    blocks_at,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
    DECODE: gl.constexpr,
    WARPGROUP: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """64 weight rows by the tokens of one tile."""
    w_ptrs, out_ptrs = pointers
    expert, first, stop, column = place
    scales, numbers = known
    stage, phase, slot, slot_phase = turns
    K: gl.constexpr = FORM.k
    TOKENS: gl.constexpr = SHAPE[0]
    TAIL: gl.constexpr = SHAPE[1]
    STRIPS: gl.constexpr = K // 256
    REST: gl.constexpr = K % 256 // 64
    _, matrix_rows, _ = blocks_at
    acc = gl.zeros([64, TOKENS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16]))
    tail_acc = acc
    if TAIL:
        tail_acc = gl.zeros([64, TAIL], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16]))
    ptrs, row = _own_rows(w_ptrs, expert, column, blocks_at, FORM.gated)
    source = (ptrs, row, matrix_rows)
    state = (acc, tail_acc, stage, phase, slot, slot_phase)
    for i in range(STRIPS):
        now = _taken_apart(scales, DECODE)
        state, scales = _strip(i, state, rings, now, source, 4, FORM, DECODE, WARPGROUP, SHAPE)
    if REST > 0:
        now = _taken_apart(scales, DECODE)
        last = gl.to_tensor(STRIPS)
        state, scales = _strip(last, state, rings, now, source, REST, FORM, DECODE, WARPGROUP, SHAPE)
    acc, tail_acc, stage, phase, slot, slot_phase = state
    tokens, _ = rings
    _, _, _, empty = tokens
    if _ahead(FORM.width):
        if TAIL:
            acc, tail_acc = warpgroup_mma_wait(0, deps=[acc, tail_acc])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(before(stage, FORM.stages)))
    if TAIL:
        finish(tail_acc, staging, out_ptrs, first + TOKENS, stop, column, numbers, FORM, ACT)
    finish(acc, staging, out_ptrs, first, stop, column, numbers, FORM, ACT)
    return stage, phase, slot, slot_phase


@gluon.jit
def _consume(
    rings,
    stagings,
    pointers,
    blocks_at,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
    DECODE: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """One warpgroup's half of every tile, each in the least shape that has room for its tokens."""
    w_ptrs, tiles_ptr, out_ptrs = pointers
    WIDTH: gl.constexpr = FORM.width
    PROGRAMS: gl.constexpr = FORM.programs
    BLOCK_N: gl.constexpr = 64 if FORM.gated else 128
    COLUMNS: gl.constexpr = FORM.n // BLOCK_N
    staging = stagings.index(WARPGROUP)
    total = gl.load(tiles_ptr) * COLUMNS
    turns = (gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    _, matrix_rows, _ = blocks_at
    next_expert, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    for visit in range(visits_of(total, PROGRAMS)):
        # The rows of weights are the columns of the result; when gated, as many of gate rows and of up rows.
        column = tile_of(visit, PROGRAMS) % COLUMNS * BLOCK_N + BLOCK_N // 2 * WARPGROUP
        expert = next_expert
        first = next_first
        stop = next_stop
        next_expert, next_first, next_stop = span(tiles_ptr, tile_of(visit + 1, PROGRAMS), total, COLUMNS)
        rows = stop - first
        place = (expert, first, stop, column)
        ptrs, row = _own_rows(w_ptrs, expert, column, blocks_at, FORM.gated)
        scales = _bring_scales(ptrs, row, matrix_rows, 0, FORM.k, DECODE)
        for i in gl.static_range(6):
            if most(i, WIDTH) > 0:  # noqa: SIM102
                if (rows > most(i + 1, WIDTH)) & (rows <= most(i, WIDTH)):
                    SHAPE: gl.constexpr = shape_of(i, WIDTH)
                    turns = _multiply(
                        rings,
                        staging,
                        (w_ptrs, out_ptrs),
                        place,
                        turns,
                        (scales, numbers),
                        blocks_at,
                        FORM,
                        ACT,
                        DECODE,
                        WARPGROUP,
                        SHAPE,
                    )


@gluon.jit
def _swap_ab_blocks_kernel(
    x_ptr,
    x_desc,
    half_desc,
    tail_desc,
    w_desc,
    u_desc,
    w_high_desc,
    u_high_desc,
    w_ptr,
    u_ptr,
    tiles_ptr,
    order_ptr,
    out_ptr,
    z_ptr,
    blocks_at,
    numbers,
    FORM: gl.constexpr,
    SLOTS: gl.constexpr,
    ACT: gl.constexpr,
    DECODE: gl.constexpr,
):
    """out [S, N] of all tiles, and z where given. Grid: programs; columns of a tile of tokens are next to each other.

    x: rows through descriptors of ``width`` rows, half and tail, where they are not gathered. The base and the high
    plane of weights come through descriptors of gate rows and of up rows, the planes of scales from w_ptr and
    u_ptr on. ``blocks_at``: the bytes and the rows of a matrix, and which of these are gate rows and up rows.
    """
    WIDTH: gl.constexpr = FORM.width
    STAGES: gl.constexpr = FORM.stages
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, WIDTH, BLOCK_K], wide)
    tail_ring = gl.allocate_shared_memory(dtype, [STAGES, TAIL_ROWS, BLOCK_K], wide)
    raw = gl.allocate_shared_memory(gl.uint8, [4 * SLOTS] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005
    high = raw  # not used, but a partition cannot be given nothing
    if high_bits(DECODE) > 0:
        boxes: gl.constexpr = [4 * SLOTS] + w_high_desc.block_type.shape  # noqa: RUF005
        high = gl.allocate_shared_memory(gl.uint8, boxes, w_high_desc.layout)
    OUT_COLUMNS: gl.constexpr = 32 if FORM.gated else 64
    narrow: gl.constexpr = gl.NVMMASharedLayout(OUT_COLUMNS * 2, 16, rank=2)
    stagings = gl.allocate_shared_memory(dtype, [2, 4096 // OUT_COLUMNS, OUT_COLUMNS], narrow)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    raw_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    raw_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    # Gathering takes two warps, a row of 16 bytes a thread; the copy engine needs one to ask for a box.
    TOKEN_WARPS: gl.constexpr = 2 if FORM.gather else 1
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * TOKEN_WARPS if FORM.gather else 1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(raw_full.index(i), count=1)
        mbarrier.init(raw_empty.index(i), count=2)
    fence_async_shared()
    tokens = (x_ring, tail_ring, full, empty)
    codes = (raw, high, raw_full, raw_empty)
    pointers = ((w_ptr, u_ptr), tiles_ptr, (out_ptr, order_ptr if FORM.scatter else z_ptr))
    planes = ((w_desc, u_desc), (w_high_desc, u_high_desc))
    x_descs = (x_desc, half_desc, tail_desc)
    rings = (tokens, codes)
    gl.warp_specialize(
        [
            (_consume, (rings, stagings, pointers, blocks_at, numbers, FORM, ACT, DECODE, gl.constexpr(0))),
            (_consume, (rings, stagings, pointers, blocks_at, numbers, FORM, ACT, DECODE, gl.constexpr(1))),
            (_produce_tokens, (tokens, (x_ptr, tiles_ptr, order_ptr), x_descs, FORM)),
            (_produce_codes, (codes, tiles_ptr, planes, FORM, DECODE)),
        ],
        [4, TOKEN_WARPS, 1],
        [208, 96, 96],
    )


def _plane(rows: Rows, N: int, K: int, high: bool) -> TensorDescriptor | None:
    """The base or the high plane of N rows of each matrix, in boxes of BOX_ROWS rows; None where there is no such."""
    decode = DECODERS[rows.format]
    bits, box = (high_bits(decode), _high_box(decode)) if high else (base_bits(decode), BOX.value)
    if not bits:
        return None
    data, (pitch, matrix_rows, first, step) = rows.data, rows.strides
    length, begin = K // 8 * bits, matrix_rows * (K // 8 * base_bits(decode)) if high else 0
    shape, strides = (data.shape[0], N, length), (pitch, step * length, 1)
    plane = data.as_strided(shape, strides, data.storage_offset() + begin + first * length)
    layout = shared_layout(box if box > 16 else 0, 8, 3)
    return describe(TensorDescriptor, plane, list(shape), list(strides), [1, BOX_ROWS.value, box], layout)


def swap_ab_blocks(
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
    """As `swap_ab_product` of grouped_linear_hopper.py."""
    (S, N), K = out.shape, x.shape[1]
    gated = activation is not None and activation.gated
    width = tile_width or swap_ab_blocks_width(tiles.load)
    stages, slots = SWAP_AB_RINGS[width]
    (pitch, rows, *w_place), (_, _, *u_place) = w.strides, u.strides
    blocks_at = (pitch, rows, (*w_place, *u_place))
    planes = [_plane(half, N, K, high) for high in (False, True) for half in (w, u)]
    heights = (width, width // 2, tiles.SPARE)
    x_descs = [None if gather else described(x, [S, K], [K, 1], [rows, BLOCK_K.value]) for rows in heights]
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    launch(
        _swap_ab_blocks_kernel,
        (programs,),
        x,
        *(*x_descs, *planes, w.data, u.data, tiles.of(width), order, out, z),
        blocks_at,
        activation_numbers(activation),
        FORM=Form(N, K, 0, gated, gather, max(1, S // x.shape[0]), programs, width, stages, scatter=scatter),
        SLOTS=slots,
        ACT=None if activation is None else ACTIVATIONS[activation.kind],
        DECODE=DECODERS[w.format],
        num_warps=4,
    )
