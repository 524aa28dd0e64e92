"""The transposed product on Hopper with weights in blocks: columns of a decoded matrix times rows that are summed.

As grouped_linear_hopper.py's, whose multiplying warpgroups it has: the left side are 128 columns of weights, and their
rows are summed, 64 to a stage. The third partition decodes them where they are needed, so that no numbers of weights
lie in memory. A thread has 64 values of one row; the next stage's codes, scales and high bits are on their way.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefuse import backends
from moefuse.backends.gated import Rows
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
from moefuse.backends.triton.formats.boxes import decode, rows_of_plane, rows_of_strips, taken_apart
from moefuse.backends.triton.grouped_linear_hopper import consume
from moefuse.backends.triton.hopper import (
    BLOCK_K,
    TAIL_ROWS,
    Form,
    advance,
    bring_tokens,
    described,
    is_hopper,
    keep_places,
    load_tile,
    reinterpret,
    shared_layout,
    span,
    tile_of,
    visits_of,
)
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import begins_aligned, describe, launch
from moefuse.backends.triton.runtime.tiles import SWAP_AB_ROWS, SWAP_AB_STAGES, swap_ab_width


@gluon.jit
def _bring_scales(ptrs, row, run, places, DECODE: gl.constexpr):
    """High bits and scales of two runs from ``run`` on of each row, as they lie in their planes: see `taken_apart`."""
    rows, R = places
    HIGH: gl.constexpr = high_bits(DECODE)
    at = row.to(gl.int64) * R + run
    found = ()
    if HIGH > 0:
        found = found + (rows_of_plane(ptrs + plane_at(rows, R, 1, DECODE), at * HIGH, gl.uint32, 2 * HIGH),)  # noqa: RUF005
    if run_bytes(DECODE) > 0:
        found = found + (rows_of_plane(ptrs + plane_at(rows, R, 2, DECODE), at, run_type(DECODE), 2),)  # noqa: RUF005
    if strip_bytes_of(DECODE, 0) > 0:
        strip = row.to(gl.int64) * (R // strip_runs(DECODE)) + run // strip_runs(DECODE)
        found = found + rows_of_strips(ptrs + plane_at(rows, R, 3, DECODE), strip, strip_bytes_of(DECODE, 0))
        if strip_bytes_of(DECODE, 1) > 0:
            found = found + rows_of_strips(ptrs + plane_at(rows, R, 4, DECODE), strip, strip_bytes_of(DECODE, 1))
    return found


@gluon.jit
def _bring_codes(raw, slot, bar, w_desc, expert, row, column, live, DECODE: gl.constexpr):
    """Ask for the base plane of 64 rows and 128 columns, in two boxes of 64, if ``live``."""
    BOX: gl.constexpr = 8 * base_bits(DECODE)
    mbarrier.expect(bar, 128 * BOX, pred=live)
    for half in gl.static_range(2):
        begin = column // 64 * BOX + half * BOX
        load_tile(w_desc, [expert, row, begin], bar, raw.index(2 * slot + half), pred=live)


@gluon.jit
def _words(raw, slot, DECODE: gl.constexpr):
    """What `_bring_codes` brought: a row of 64 columns a thread, those of the second half behind those of the first."""
    WORDS: gl.constexpr = 2 * base_bits(DECODE)
    layout: gl.constexpr = gl.NVMMASharedLayout(4 * WORDS if WORDS > 4 else 0, 32, rank=2)
    words = reinterpret(raw, gl.uint32, [2, 128, WORDS], layout).index(slot)
    return words.load(gl.BlockedLayout([1, WORDS], [32, 1], [4, 1], [1, 0]))


@gluon.jit
def _produce(rings, pointers, x_descs, w_desc, blocks_at, FORM: gl.constexpr, DECODE: gl.constexpr):
    """Fill the ring, tile after tile, in the order of `_decode_ahead` of grouped_linear_hopper.py."""
    x_ring, tail_ring, w_ring, full, empty, raw, raw_full, token_memory = rings
    x_ptr, w_ptr, tiles_ptr, order_ptr = pointers
    pitch, matrix_rows, runs, first_column = blocks_at
    K: gl.constexpr = FORM.k
    PROGRAMS: gl.constexpr = FORM.programs
    COLUMNS: gl.constexpr = FORM.n // 128
    STEPS: gl.constexpr = K // BLOCK_K
    places = (matrix_rows, runs)
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0]))
    thread = gl.arange(0, 128, layout=layout)
    mine = thread % 64
    half = thread // 64
    w_ptrs = w_ptr + thread.to(gl.int64) * 0
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    boxes = gl.to_tensor(0)
    next_expert, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    visits = visits_of(total, PROGRAMS)
    begin = first_column + tile_of(0, PROGRAMS) % COLUMNS * 128
    _bring_codes(raw, 0, raw_full.index(0), w_desc, next_expert, 0, begin, visits > 0, DECODE)
    run_next = begin // 32 + 2 * half
    scales_next = _bring_scales(w_ptrs + next_expert.to(gl.int64) * pitch, mine, run_next, places, DECODE)
    for visit in range(visits):
        column = first_column + tile_of(visit, PROGRAMS) % COLUMNS * 128
        expert = next_expert
        first = next_first
        stop = next_stop
        next_expert, next_first, next_stop = span(tiles_ptr, tile_of(visit + 1, PROGRAMS), total, COLUMNS)
        next_column = first_column + tile_of(visit + 1, PROGRAMS) % COLUMNS * 128
        keep_places(token_memory, order_ptr, first, stop, FORM)
        for step in range(STEPS):
            # What comes after: the rows behind these, or the first of the next tile.
            ends = step == STEPS - 1
            after = gl.where(ends, 0, step + 1) * BLOCK_K
            after_expert = gl.where(ends, next_expert, expert)
            after_column = gl.where(ends, next_column, column)
            live = (visit + 1 < visits) | (step + 1 < STEPS)
            known = taken_apart(scales_next, DECODE)
            slot = boxes % 2
            mbarrier.wait(raw_full.index(slot), boxes // 2 % 2)
            q = _words(raw, slot, DECODE)
            boxes += 1
            mbarrier.wait(empty.index(stage), phase)
            bar = raw_full.index(1 - slot)
            _bring_codes(raw, 1 - slot, bar, w_desc, after_expert, after, after_column, live, DECODE)
            at = w_ptrs + after_expert.to(gl.int64) * pitch
            scales_next = _bring_scales(at, after + mine, after_column // 32 + 2 * half, places, DECODE)
            x, tail, bar = x_ring.index(stage), tail_ring.index(stage), full.index(stage)
            begins = step * BLOCK_K
            bring_tokens(x, tail, bar, first, stop - first, begins, (x_ptr, token_memory), x_descs, 0, FORM)
            decode(q, known, 0, (column // 32 + 2 * half) % 8, w_ring.index(stage), DECODE)
            gl.thread_barrier()
            mbarrier.arrive(bar)
            stage, phase = advance(stage, phase, FORM.stages)


@gluon.jit
def _turned_kernel(
    x_ptr,
    x_desc,
    half_desc,
    tail_desc,
    w_desc,
    w_ptr,
    tiles_ptr,
    order_ptr,
    out_ptr,
    blocks_at,
    FORM: gl.constexpr,
    DECODE: gl.constexpr,
):
    """out [S, N] of all tiles. Grid: programs; columns of a tile of rows are next to each other.

    x: rows through descriptors of ``width`` rows, half and tail, where they are not gathered. The base plane of weights
    comes in boxes of 64 rows, the others from w_ptr on. ``blocks_at``: the bytes and the rows of a matrix, the runs of
    a row, and the column that is the first of out.
    """
    STAGES: gl.constexpr = FORM.stages
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, FORM.width, BLOCK_K], wide)
    tail_ring = gl.allocate_shared_memory(dtype, [STAGES, TAIL_ROWS, BLOCK_K], wide)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, 128, BLOCK_K], wide)
    raw = gl.allocate_shared_memory(gl.uint8, [4] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005
    raw_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    token_memory = gl.allocate_shared_memory(gl.int32, [2 * FORM.width], plain)  # a power of two
    narrow: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    stagings = gl.allocate_shared_memory(dtype, [2, 64, 64], narrow)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(raw_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=(128 if FORM.gather else 1) + 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (x_ring, tail_ring, w_ring, full, empty)
    filled = (x_ring, tail_ring, w_ring, full, empty, raw, raw_full, token_memory)
    pointers = (x_ptr, w_ptr, tiles_ptr, order_ptr)
    x_descs = (x_desc, half_desc, tail_desc)
    out_ptrs = (out_ptr, order_ptr)
    gl.warp_specialize(
        [
            (consume, (rings, stagings, tiles_ptr, out_ptrs, (0.0, 0.0), FORM, None, gl.constexpr(0))),
            (consume, (rings, stagings, tiles_ptr, out_ptrs, (0.0, 0.0), FORM, None, gl.constexpr(1))),
            (_produce, (filled, pointers, x_descs, w_desc, blocks_at, FORM, DECODE)),
        ],
        [4, 4],
        [184, 136],
    )


def takes(a: Tensor, w: Rows, out: Tensor, first: int) -> bool:
    """Whether `turned_product` can multiply ``a`` with columns ``first`` and on of these blocks, and gains."""
    (S, N), (E, K) = out.shape, w.data.shape[:2]
    whole = N % 128 == 0 and K % BLOCK_K.value == 0 and first % 128 == 0
    if not whole or S <= SWAP_AB_ROWS * E or a.element_size() != 2 or not is_hopper(a.device) or backends.invariant():
        return False
    return a.is_contiguous() and begins_aligned(a)


def turned_product(
    a: Tensor,
    w: Rows,
    width: int,
    tiles: TokenTiles,
    order: Tensor,
    *,
    gather: bool,
    scatter: bool,
    out: Tensor,
    first: int,
) -> None:
    """Launch rows of ``a`` times columns ``first`` and on of the matrices, ``width`` wide, into ``out`` ``[S, N]``.

    Rows without an expert are left as they are.
    """
    (S, N), (E, K) = out.shape, w.data.shape[:2]
    decoder = DECODERS[w.format]
    bits, rows = base_bits(decoder), swap_ab_width(tiles.load)
    pitch, box = w.data.stride(0), 8 * base_bits(decoder)
    shape, strides = (E, K, width // 8 * bits), (pitch, width // 8 * bits, 1)
    plane = w.data.as_strided(shape, strides, w.data.storage_offset())
    layout = shared_layout(box if box > 16 else 0, 8, 3)
    w_desc = describe(TensorDescriptor, plane, list(shape), list(strides), [1, 64, box], layout)
    heights = (rows, rows // 2, tiles.SPARE)
    x_descs = [None if gather else described(a, [S, K], [K, 1], [height, BLOCK_K.value]) for height in heights]
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    divisor, stages = max(1, S // a.shape[0]), SWAP_AB_STAGES[rows] - 1  # two boxes of codes have one's place
    launch(
        _turned_kernel,
        (programs,),
        *(a, *x_descs, w_desc, w.data, tiles.of(rows), order, out),
        (pitch, K, width // 32, first),
        FORM=Form(N, K, 0, False, gather, divisor, programs, rows, stages, turned=True, scatter=scatter, decoded=True),
        DECODE=decoder,
        num_warps=4,
    )
