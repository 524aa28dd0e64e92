"""The grouped product on Hopper for many rows per expert, of numbers and of blocks that are decoded ahead.

Tiles and their schedule are hopper.py's. Two warpgroups multiply, 64 weight rows each, and never wait for each other; a
third partition fills the ring. Narrow tiles leave room for more stages, and these for more weights under way. Weights
in blocks become numbers in that partition, where experts have many rows.

``full[stage]`` completes with the bytes of the copy engine and, where rows are gathered, one arrival of each thread
that copies them, and one more when weights were decoded; ``empty[stage]`` with one arrival of each multiplying
warpgroup.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math

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

from moefuse import backends
from moefuse.backends.gated import Rows
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.formats.blocks import DECODERS, base_bits, has_table, high_bits
from moefuse.backends.triton.formats.boxes import (
    block_rows,
    block_words,
    box_groups,
    bring_blocks,
    bring_scales,
    decode,
    pieces,
    taken_apart,
)
from moefuse.backends.triton.formats.numbers import box_bytes
from moefuse.backends.triton.hopper import (
    BLOCK_K,
    TAIL_ROWS,
    Form,
    advance,
    before,
    bring_tokens,
    described,
    finish,
    is_hopper,
    keep_places,
    load_tile,
    most,
    shape_of,
    shared_layout,
    span,
    tile_of,
    tile_slots,
    token_places,
    visits_of,
)
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import begins_aligned, bytes_between, describe, launch
from moefuse.backends.triton.runtime.tiles import (
    INVARIANT_TILE_ROWS,
    SELF_DECODED_ROWS,
    SWAP_AB_ROWS,
    SWAP_AB_ROWS_IN_BLOCKS,
    SWAP_AB_STAGES,
    swap_ab_width,
)
from moefuse.types import Activation


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
    GROUPS: gl.constexpr = box_groups(DECODE)
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
    bring_blocks(raw, 0, raw_full.index(0), w_desc, u_desc, next_expert, begin, 0, visits > 0, GATED, DECODE)
    ptrs_of_rows, block_row = block_rows(w_ptr, u_ptr, places, GATED)
    at = ptrs_of_rows + next_expert.to(gl.int64) * pitch
    scales_next = bring_scales(at, block_row + begin * w_step, matrix_rows, 0, K, DECODE)
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
            q = pieces(block_words(raw, slot, GATED, DECODE), DECODE)
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
                    bring_blocks(
                        raw, 1 - slot, bar, w_desc, u_desc, after_expert, after_column, after, live, GATED, DECODE
                    )
                    at = ptrs_of_rows + after_expert.to(gl.int64) * pitch
                    scales_next = bring_scales(at, block_row + after_column * w_step, matrix_rows, after, K, DECODE)
                x, tail, bar = x_ring.index(stage), tail_ring.index(stage), full.index(stage)
                begins = 64 * (GROUPS * box + i)
                bring_tokens(x, tail, bar, first, stop - first, begins, (x_ptr, token_memory), x_descs, 0, FORM)
                decode(q[i], known, i, 2 * i, w_ring.index(stage), DECODE)
                gl.thread_barrier()
                mbarrier.arrive(bar)
                stage, phase = advance(stage, phase, FORM.stages)


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


def fits(load: float, E: int, N: int, K: int, itemsize: int, gated: bool, blocks: bool) -> bool:
    """Whether a product of ``load`` rows per expert, N columns and sums over K goes into whole tiles, and gains."""
    whole = N % (64 if gated else 128) == 0 and K % BLOCK_K.value == 0
    enough = load > (SWAP_AB_ROWS_IN_BLOCKS if blocks else SWAP_AB_ROWS)
    return enough and itemsize == 2 and whole and 0 < E * N < 2**31


def decodes_ahead(load: float, K: int, format: str) -> bool:
    """Whether `swap_ab_product` takes weights in blocks: many rows, or codes to look up, and sums that fill its boxes.

    The others are for grouped_linear_hopper_blocks.py.
    """
    decoder = DECODERS[format]
    pays = load > SELF_DECODED_ROWS or has_table(decoder)
    return pays and not backends.invariant() and K % (64 * box_groups(decoder)) == 0


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


def _plane(rows: Rows, N: int, K: int) -> TensorDescriptor:
    """The base plane of N rows of each matrix, in boxes of 64 rows."""
    decode = DECODERS[rows.format]
    length, box = K // 8 * base_bits(decode), box_bytes(decode)
    data, (pitch, _, first, step) = rows.data, rows.strides
    shape, strides = (data.shape[0], N, length), (pitch, step * length, 1)
    plane = data.as_strided(shape, strides, data.storage_offset() + first * length)
    layout = shared_layout(box, 8, 3)
    return describe(TensorDescriptor, plane, list(shape), list(strides), [1, 64, box], layout)


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
