"""The weight gradient on Hopper for many rows per expert: persistent and warp-specialised, written in Gluon.

Per expert, ``left.T @ right`` summed over its rows: ``left`` are tokens, gathered by threads, ``right`` lies in the
plan's order and comes through the copy engine. Two warpgroups multiply, each half of left's columns; a third partition
brings operands into a ring of stages and runs ahead over the ends of tiles. Both operands lie across the sum, which
tensor cores take as they are. Rows are summed in order, so that results do not depend on who ran when.

``full[stage]`` completes with one arrival of each thread that gathers, and one more with the bytes of the copy engine.
The last stage of an expert is not its: threads bring what there is and zeros behind it, and no neighbour's row is read.
``empty[stage]`` completes with one arrival of each multiplying warpgroup.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

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

from moefuse.backends.triton.hopper import advance, before, is_hopper, load_rows, load_tile, shared_layout
from moefuse.backends.triton.runtime.launch import begins_aligned, ceil_div, describe, launch
from moefuse.backends.triton.runtime.tiles import OUTER_ROWS, OuterTile, hopper_outer_tile
from moefuse.types import Plan

store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


class Form(NamedTuple):
    """What the product is compiled for. ``turned``: the result is stored transposed, left's columns fastest."""

    left_columns: int
    right_columns: int
    left_stride: int
    right_stride: int
    experts: int
    top_k: int
    turned: bool
    programs: int
    left_width: int
    right_width: int
    rows: int
    stages: int


@gluon.constexpr_function
def _tiles(form):
    """Tiles of an expert: of left, and of right."""
    return -(-form.left_columns // form.left_width), -(-form.right_columns // form.right_width)


@gluon.jit
def _place(tile, FORM: gl.constexpr):
    """Expert, first column of left and first column of right of a tile; tiles of right are next to each other."""
    LEFT: gl.constexpr = _tiles(FORM)[0]
    RIGHT: gl.constexpr = _tiles(FORM)[1]
    expert = tile // (LEFT * RIGHT)
    return expert, tile // RIGHT % LEFT * FORM.left_width, tile % RIGHT * FORM.right_width


@gluon.jit
def _rows_of(offsets_ptr, tile, FORM: gl.constexpr):
    """First row and stop of a tile's expert; of the last one past the end, for who reads ahead."""
    expert, _, _ = _place(tile, FORM)
    expert = gl.minimum(expert, FORM.experts - 1)
    return gl.load(offsets_ptr + expert), gl.load(offsets_ptr + expert + 1)


@gluon.jit
def slots_of(order_ptr, first, stop, ROWS: gl.constexpr):
    """The slots of ROWS rows; from ``stop`` on, the last one again."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    return gl.load(order_ptr + gl.maximum(gl.minimum(row, stop - 1), 0))


@gluon.jit
def _gather(buffer, ptrs, live, left, COLUMNS: gl.constexpr):
    """Rows from ``ptrs`` on into all of ``buffer``, 64 columns at a time.

    ``live``: which rows, zeros elsewhere, or None for all. ``left``: how many columns there are, where COLUMNS.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(buffer.shape[1] // 64):
        piece = buffer.slice(64 * i, 64, dim=1)
        if COLUMNS:
            inside = 64 * i + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :] < left
            if live is not None:
                inside = inside & live[:, None]
            load_rows(piece, ptrs + 64 * i, mask=inside)
        elif live is not None:
            load_rows(piece, ptrs + 64 * i, mask=live[:, None])
        else:
            load_rows(piece, ptrs + 64 * i)


@gluon.jit
def _produce(rings, left_ptr, right_ptr, right_desc, offsets_ptr, order_ptr, total, FORM: gl.constexpr):
    """Fill the ring, tile after tile. Slots are read a stage ahead and an expert's rows a tile ahead."""
    ROWS: gl.constexpr = FORM.rows
    STAGES: gl.constexpr = FORM.stages
    CUT: gl.constexpr = FORM.left_columns % FORM.left_width != 0
    CUT_RIGHT: gl.constexpr = FORM.right_columns % FORM.right_width != 0
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    left_ring, right_ring, full, empty = rings
    within = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    tile = gl.program_id(0)
    next_begin, next_stop = _rows_of(offsets_ptr, tile, FORM)
    for tile in range(gl.program_id(0), total, FORM.programs):
        _, left_first, right_first = _place(tile, FORM)
        begin = next_begin
        stop = next_stop
        next_begin, next_stop = _rows_of(offsets_ptr, tile + FORM.programs, FORM)
        slots = slots_of(order_ptr, begin, stop, ROWS)
        left_ptrs = left_ptr + left_first + within
        left = FORM.left_columns - left_first
        whole = (stop - begin) // ROWS
        for step in range(whole):
            start = begin + step * ROWS
            ptrs = left_ptrs + ((slots // FORM.top_k).to(gl.int64) * FORM.left_stride)[:, None]
            slots = slots_of(order_ptr, start + ROWS, stop, ROWS)
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, ROWS * FORM.right_width * 2)
            load_tile(right_desc, [start, right_first], bar, right_ring.index(stage))
            _gather(left_ring.index(stage), ptrs, None, left, CUT)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = advance(stage, phase, STAGES)
        start = begin + whole * ROWS
        if start < stop:
            live = start + row < stop
            ptrs = left_ptrs + ((slots // FORM.top_k).to(gl.int64) * FORM.left_stride)[:, None]
            at = gl.minimum(start + row, stop - 1).to(gl.int64) * FORM.right_stride
            right_ptrs = right_ptr + right_first + within + at[:, None]
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            _gather(left_ring.index(stage), ptrs, live, left, CUT)
            _gather(right_ring.index(stage), right_ptrs, live, FORM.right_columns - right_first, CUT_RIGHT)
            mbarrier.arrive(bar)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _store(acc, stagings, out_desc, place, TURNED: gl.constexpr, WARPGROUP: gl.constexpr):
    """acc [64, columns] into the result, 64 columns at a time, while the copy engine takes those before away."""
    expert, left_first, right_first = place
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS > 64:
        a, b = acc.reshape([64, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
        _store(a, stagings, out_desc, place, TURNED, WARPGROUP)
        _store(b, stagings, out_desc, (expert, left_first, right_first + COLUMNS // 2), TURNED, WARPGROUP)
    else:
        tma.store_wait(1)
        piece = stagings.index(2 * WARPGROUP + right_first // 64 % 2)
        value = acc.to(piece.dtype)
        if TURNED:
            value = value.permute([1, 0])
        piece.reshape([64, 64]).store(value)
        fence_async_shared()
        at = [expert, right_first, left_first] if TURNED else [expert, left_first, right_first]
        store_tile(out_desc, at, piece)


@gluon.jit
def _add(acc, left, right, first: gl.constexpr, ROWS: gl.constexpr, use_acc):
    """The product of ROWS rows of a stage added to acc: 64 columns of left from ``first`` on, all of right."""
    a = left.slice(first, 64, dim=1)
    if left.shape[0] > ROWS:
        a = a.slice(0, ROWS, dim=0)
        right = right.slice(0, ROWS, dim=0)
    return warpgroup_mma(a.permute([1, 0]), right, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _add_last(acc, second, left, right, use_acc, FORM: gl.constexpr, ROWS: gl.constexpr, WARPGROUP: gl.constexpr):
    """Likewise for all of the warpgroup's columns, and waited for."""
    FIRST: gl.constexpr = FORM.left_width // 2 * WARPGROUP
    acc = _add(acc, left, right, FIRST, ROWS, use_acc)
    if FORM.left_width == 256:
        second = _add(second, left, right, FIRST + 64, ROWS, use_acc)
        acc, second = warpgroup_mma_wait(0, deps=[acc, second])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, second


@gluon.jit
def _consume(rings, stagings, out_desc, offsets_ptr, total, FORM: gl.constexpr, WARPGROUP: gl.constexpr):
    """One warpgroup's half of every tile."""
    left_ring, right_ring, full, empty = rings
    ROWS: gl.constexpr = FORM.rows
    STAGES: gl.constexpr = FORM.stages
    WIDTH: gl.constexpr = FORM.right_width
    FIRST: gl.constexpr = FORM.left_width // 2 * WARPGROUP
    TWO: gl.constexpr = FORM.left_width == 256
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile = gl.program_id(0)
    next_begin, next_stop = _rows_of(offsets_ptr, tile, FORM)
    for tile in range(gl.program_id(0), total, FORM.programs):
        expert, left_first, right_first = _place(tile, FORM)
        left_first += FIRST
        rows = next_stop - next_begin
        next_begin, next_stop = _rows_of(offsets_ptr, tile + FORM.programs, FORM)
        acc = gl.zeros([64, WIDTH], gl.float32, layout)
        second = gl.zeros([64, WIDTH], gl.float32, layout) if TWO else acc
        for step in range(rows // ROWS):
            mbarrier.wait(full.index(stage), phase)
            fence_async_shared()  # threads wrote the rows, tensor cores read them
            acc = _add(acc, left_ring.index(stage), right_ring.index(stage), FIRST, ROWS, step > 0)
            # The products of the stage before are done when only this stage's are under way.
            if TWO:
                second = _add(second, left_ring.index(stage), right_ring.index(stage), FIRST + 64, ROWS, step > 0)
                acc, second = warpgroup_mma_wait(2, deps=[acc, second])
            else:
                acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(before(stage, STAGES)), pred=step > 0)
            stage, phase = advance(stage, phase, STAGES)
        if TWO:
            acc, second = warpgroup_mma_wait(0, deps=[acc, second])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(before(stage, STAGES)), pred=rows >= ROWS)
        if rows % ROWS > 0:
            mbarrier.wait(full.index(stage), phase)
            fence_async_shared()
            left = left_ring.index(stage)
            right = right_ring.index(stage)
            if rows % ROWS > ROWS // 2:
                acc, second = _add_last(acc, second, left, right, rows >= ROWS, FORM, ROWS, WARPGROUP)
            else:
                acc, second = _add_last(acc, second, left, right, rows >= ROWS, FORM, ROWS // 2, WARPGROUP)
            mbarrier.arrive(empty.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        _store(acc, stagings, out_desc, (expert, left_first, right_first), FORM.turned, WARPGROUP)
        if TWO:
            _store(second, stagings, out_desc, (expert, left_first + 64, right_first), FORM.turned, WARPGROUP)
    tma.store_wait(0)


@gluon.jit
def _outer_kernel(left_ptr, right_ptr, right_desc, out_desc, offsets_ptr, order_ptr, total, FORM: gl.constexpr):
    """All tiles of out [E, left, right], or [E, right, left] if turned. Grid: programs."""
    STAGES: gl.constexpr = FORM.stages
    ROWS: gl.constexpr = FORM.rows
    dtype: gl.constexpr = left_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    left_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, FORM.left_width], wide)
    right_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, FORM.right_width], wide)
    stagings = gl.allocate_shared_memory(dtype, [4, 1, 64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=128 + 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (left_ring, right_ring, full, empty)
    gl.warp_specialize(
        [
            (_consume, (rings, stagings, out_desc, offsets_ptr, total, FORM, gl.constexpr(0))),
            (_consume, (rings, stagings, out_desc, offsets_ptr, total, FORM, gl.constexpr(1))),
            (_produce, (rings, left_ptr, right_ptr, right_desc, offsets_ptr, order_ptr, total, FORM)),
        ],
        [4, 4],
        [216, 72],
    )


def takes(left: Tensor, right: Tensor, plan: Plan) -> bool:
    """Whether `hopper_outer` can multiply these: rows of 16-bit numbers that begin where words of 16 bytes do."""
    if plan.assignments <= OUTER_ROWS * plan.num_experts or not is_hopper(left.device):
        return False
    return left.element_size() == 2 and left.dtype == right.dtype and all(map(_is_whole, (left, right)))


def _is_whole(t: Tensor) -> bool:
    return t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.shape[1] % 8 == 0 and begins_aligned(t)


def hopper_outer(
    left: Tensor, right: Tensor, plan: Plan, out: Tensor, *, turned: bool, tile: OuterTile | None = None
) -> None:
    """Launch ``left.T @ right`` of each expert into ``out``, ``turned``: its transpose.

    ``left`` are tokens, or the rows of slots; ``right`` are rows in the plan's order.
    """
    S, E, (N, K) = plan.assignments, plan.num_experts, (left.shape[1], right.shape[1])
    tile = tile or hopper_outer_tile()
    wide = shared_layout(128, 16, 2)
    right_desc = describe(
        TensorDescriptor, right, list(right.shape), list(right.stride()), [tile.rows, tile.right], wide
    )
    cube = shared_layout(128, 16, 3)
    out_desc = describe(TensorDescriptor, out, list(out.shape), list(out.stride()), [1, 64, 64], cube)
    programs = torch.cuda.get_device_properties(left.device).multi_processor_count
    total = E * ceil_div(N, tile.left) * ceil_div(K, tile.right)
    top_k = max(1, S // max(1, left.shape[0]))
    sizes = N, K, left.stride(0), right.stride(0), E, top_k, turned
    launch(
        _outer_kernel,
        (min(programs, total),),
        *(left, right, right_desc, out_desc, plan.offsets, plan.order),
        total,
        FORM=Form(*sizes, min(programs, total), *tile),
        num_warps=4,
    )
