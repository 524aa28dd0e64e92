"""The grouped product on Hopper for many rows per expert: persistent and warp-specialised, written in Gluon.

The product is turned: ``out.T = w @ x.T``, with 128 weight rows and up to 288 tokens to a tile, so that an expert's
rows are one tile, or a few, and a weight leaves the second-level cache as often. Two warpgroups multiply, 64 weight
rows each, and never wait for each other; a third partition brings operands into a ring of stages and runs ahead over
the ends of tiles.

``full[stage]`` completes with the bytes of the copy engine and, where rows are gathered, one arrival of each thread
that copies them; ``empty[stage]`` with one arrival of each multiplying warpgroup.
"""

from __future__ import annotations

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

from moefuse.backends.triton.activation import activate, activation_numbers
from moefuse.backends.triton.launch import INTERPRETED, begins_aligned, capability, launch, unrecordable
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.tiles import TURNED_ROWS
from moefuse.types import Activation

#: what of K a stage holds: 128 bytes, the widest row that tensor cores read from shared memory
BLOCK_K = gl.constexpr(64)
#: as many as 227 KiB of shared memory hold
STAGES = gl.constexpr(4)


@gluon.jit
def _advance(stage, phase):
    """The stage after this one, and the phase of its barriers."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _before(stage):
    """The stage before this one.

    Not a variable that the loop sets to ``stage``: Triton carries what one visit of the body leaves changed, and a
    variable that was ``stage`` ahead of the loop is that same value after the visit, so it would never move.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _span(tiles_ptr, tile, total, COLUMNS: gl.constexpr):
    """Expert, first and stop of a tile's tokens; of the last tile where there is none, for who reads ahead."""
    row_ptr = tiles_ptr + (1 + gl.minimum(tile, gl.maximum(total - 1, 0)) // COLUMNS) * 3
    return gl.load(row_ptr), gl.load(row_ptr + 1), gl.load(row_ptr + 2)


@gluon.jit
def _slots(order_ptr, first, stop, ROWS: gl.constexpr):
    """The slots of ROWS rows; from ``stop`` on, the last one again."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    return gl.load(order_ptr + gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), stop - 1))


@gluon.jit
def _token_ptrs(x_ptr, slots, K: gl.constexpr, TOP_K: gl.constexpr):
    """Pointers to the first numbers of each slot's token: [slots, BLOCK_K]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    return x_ptr + ((slots // TOP_K).to(gl.int64) * K)[:, None] + k[None, :]


@gluon.jit
def _produce(
    x_ring, tail_ring, w_ring, full, empty, tiles_ptr, order_ptr, x_ptr, x256_desc, x128_desc, x32_desc, w_desc,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, GATHER: gl.constexpr, TOP_K: gl.constexpr,
    PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Fill the ring, tile after tile. Spans are read two tiles ahead and slots one, so that nothing waits for them."""
    BLOCK_N: gl.constexpr = 64 if GATED else 128
    W_BYTES: gl.constexpr = 128 * BLOCK_K * 2
    COLUMNS: gl.constexpr = N // BLOCK_N
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    next_expert, next_first, next_stop = _span(tiles_ptr, gl.program_id(0), total, COLUMNS)
    if GATHER:
        slots0 = _slots(order_ptr, next_first, next_stop, 64)
        slots64 = _slots(order_ptr, next_first + 64, next_stop, 64)
        slots128 = _slots(order_ptr, next_first + 128, next_stop, 128)
        slots256 = _slots(order_ptr, next_first + 256, next_stop, 32)
    then_expert, then_first, then_stop = _span(tiles_ptr, gl.program_id(0) + PROGRAMS, total, COLUMNS)
    for tile in range(gl.program_id(0), total, PROGRAMS):
        column = tile % COLUMNS * BLOCK_N
        expert = next_expert
        first = next_first
        rows = next_stop - next_first
        next_expert = then_expert
        next_first = then_first
        next_stop = then_stop
        then_expert, then_first, then_stop = _span(tiles_ptr, tile + 2 * PROGRAMS, total, COLUMNS)
        if GATHER:
            ptrs0 = _token_ptrs(x_ptr, slots0, K, TOP_K)
            ptrs64 = _token_ptrs(x_ptr, slots64, K, TOP_K)
            ptrs128 = _token_ptrs(x_ptr, slots128, K, TOP_K)
            ptrs256 = _token_ptrs(x_ptr, slots256, K, TOP_K)
            slots0 = _slots(order_ptr, next_first, next_stop, 64)
            slots64 = _slots(order_ptr, next_first + 64, next_stop, 64)
            slots128 = _slots(order_ptr, next_first + 128, next_stop, 128)
            slots256 = _slots(order_ptr, next_first + 256, next_stop, 32)
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            x = x_ring.index(stage)
            if GATHER:
                mbarrier.expect(bar, W_BYTES)
            else:
                mbarrier.expect(bar, W_BYTES + 128 * BLOCK_K * 2, pred=rows <= 128)
                mbarrier.expect(bar, W_BYTES + 256 * BLOCK_K * 2, pred=(rows > 128) & (rows <= 256))
                mbarrier.expect(bar, W_BYTES + 288 * BLOCK_K * 2, pred=rows > 256)
            at = [expert, column // 8, 0, 0, start] if GATED else [expert * N + column, start]
            tma.async_copy_global_to_shared(w_desc, at, bar, w_ring.index(stage))
            if GATHER:
                async_copy.async_copy_global_to_shared(x.slice(0, 64, dim=0), ptrs0 + start)
                if rows > 64:
                    async_copy.async_copy_global_to_shared(x.slice(64, 64, dim=0), ptrs64 + start)
                if rows > 128:
                    async_copy.async_copy_global_to_shared(x.slice(128, 128, dim=0), ptrs128 + start)
                if rows > 256:
                    async_copy.async_copy_global_to_shared(tail_ring.index(stage), ptrs256 + start)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                tma.async_copy_global_to_shared(
                    x128_desc, [first, start], bar, x.slice(0, 128, dim=0), pred=rows <= 128
                )
                tma.async_copy_global_to_shared(x256_desc, [first, start], bar, x, pred=rows > 128)
                tma.async_copy_global_to_shared(
                    x32_desc, [first + 256, start], bar, tail_ring.index(stage), pred=rows > 256
                )
            stage, phase = _advance(stage, phase)


@gluon.jit
def _finish(
    acc, turning, out_ptr, first, stop, column, alpha, limit, N: gl.constexpr, KIND: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """The activation of acc [64, tokens] into rows of out, as many tokens at a time as ``turning`` holds."""
    TOKENS: gl.constexpr = acc.shape[1]
    if turning.shape[0] < TOKENS:
        a, b = acc.reshape([64, 2, TOKENS // 2]).permute([0, 2, 1]).split()
        _finish(a, turning, out_ptr, first, stop, column, alpha, limit, N, KIND, GATED)
        _finish(b, turning, out_ptr, first + TOKENS // 2, stop, column, alpha, limit, N, KIND, GATED)
    else:
        COLUMNS: gl.constexpr = turning.shape[1]
        if GATED:
            # Eight gate rows, then the up rows of the same columns, so that one thread has both.
            g, u = acc.reshape([4, 2, 8, TOKENS]).permute([0, 2, 3, 1]).split()
            acc = activate(g, u, KIND, True, alpha, limit).reshape([COLUMNS, TOKENS])
        elif KIND != "":
            acc = activate(acc, acc, KIND, False, alpha, limit)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (COLUMNS // 8), COLUMNS // 8], [4, 1], [1, 0])
        piece = turning.slice(0, TOKENS, dim=0)
        piece.store(acc.to(out_ptr.dtype.element_ty).permute([1, 0]))
        row = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
        n = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        out_ptrs = out_ptr + first.to(gl.int64) * N + column + row[:, None] * N + n[None, :]
        gl.store(out_ptrs, piece.load(layout), mask=(first + row < stop)[:, None])


@gluon.jit
def _multiply(
    x_ring, tail_ring, w_ring, turning, full, empty, out_ptr, first, stop, column, stage, phase, alpha, limit,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GATED: gl.constexpr, GATHER: gl.constexpr,
    WARPGROUP: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """64 weight rows by TOKENS + TAIL tokens: two products, because one has 256 columns at most, or a power of two."""
    acc = gl.zeros([64, TOKENS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16]))
    if TAIL:
        tail_acc = gl.zeros([64, TAIL], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16]))
    for start in range(0, K, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        if GATHER:  # threads wrote the rows, tensor cores read them
            fence_async_shared()
        w = w_ring.index(stage).reshape([128, BLOCK_K]).slice(64 * WARPGROUP, 64, dim=0)
        x = x_ring.index(stage)
        if TAIL:
            tail = tail_ring.index(stage) if TOKENS == 256 else x.slice(TOKENS, TAIL, dim=0)
            tail_acc = warpgroup_mma(w, tail.permute([1, 0]), tail_acc, use_acc=start > 0, is_async=True)
        if TOKENS < 256:
            x = x.slice(0, TOKENS, dim=0)
        acc = warpgroup_mma(w, x.permute([1, 0]), acc, use_acc=start > 0, is_async=True)
        # The products of the stage before are done when only this stage's are under way.
        if TAIL:
            acc, tail_acc = warpgroup_mma_wait(2, deps=[acc, tail_acc])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(_before(stage)), pred=start > 0)
        stage, phase = _advance(stage, phase)
    if TAIL:
        acc, tail_acc = warpgroup_mma_wait(0, deps=[acc, tail_acc])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(_before(stage)))
    if TAIL:
        _finish(tail_acc, turning, out_ptr, first + TOKENS, stop, column, alpha, limit, N, KIND, GATED)
    _finish(acc, turning, out_ptr, first, stop, column, alpha, limit, N, KIND, GATED)
    return stage, phase


@gluon.jit
def _consume(
    x_ring, tail_ring, w_ring, turnings, full, empty, tiles_ptr, out_ptr, alpha, limit,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GATED: gl.constexpr, GATHER: gl.constexpr,
    PROGRAMS: gl.constexpr, WARPGROUP: gl.constexpr,
):  # fmt: skip
    """One warpgroup's half of every tile, in the least of five widths that the tile's tokens need."""
    BLOCK_N: gl.constexpr = 64 if GATED else 128
    COLUMNS: gl.constexpr = N // BLOCK_N
    turning = turnings.index(WARPGROUP)
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    _, next_first, next_stop = _span(tiles_ptr, gl.program_id(0), total, COLUMNS)
    for tile in range(gl.program_id(0), total, PROGRAMS):
        column = tile % COLUMNS * BLOCK_N + BLOCK_N // 2 * WARPGROUP
        first = next_first
        stop = next_stop
        _, next_first, next_stop = _span(tiles_ptr, tile + PROGRAMS, total, COLUMNS)
        rows = stop - first
        if rows > 256:
            stage, phase = _multiply(
                x_ring, tail_ring, w_ring, turning, full, empty, out_ptr, first, stop, column, stage, phase, alpha,
                limit, N, K, KIND, GATED, GATHER, WARPGROUP, TOKENS=256, TAIL=32,
            )  # fmt: skip
        elif rows > 192:
            stage, phase = _multiply(
                x_ring, tail_ring, w_ring, turning, full, empty, out_ptr, first, stop, column, stage, phase, alpha,
                limit, N, K, KIND, GATED, GATHER, WARPGROUP, TOKENS=256, TAIL=0,
            )  # fmt: skip
        elif rows > 128:
            stage, phase = _multiply(
                x_ring, tail_ring, w_ring, turning, full, empty, out_ptr, first, stop, column, stage, phase, alpha,
                limit, N, K, KIND, GATED, GATHER, WARPGROUP, TOKENS=128, TAIL=64,
            )  # fmt: skip
        elif rows > 64:
            stage, phase = _multiply(
                x_ring, tail_ring, w_ring, turning, full, empty, out_ptr, first, stop, column, stage, phase, alpha,
                limit, N, K, KIND, GATED, GATHER, WARPGROUP, TOKENS=128, TAIL=0,
            )  # fmt: skip
        else:
            stage, phase = _multiply(
                x_ring, tail_ring, w_ring, turning, full, empty, out_ptr, first, stop, column, stage, phase, alpha,
                limit, N, K, KIND, GATED, GATHER, WARPGROUP, TOKENS=64, TAIL=0,
            )  # fmt: skip


@gluon.jit
def _turned_kernel(
    x_ptr, x256_desc, x128_desc, x32_desc, w_desc, tiles_ptr, order_ptr, out_ptr, alpha, limit,
    N: gl.constexpr, K: gl.constexpr, KIND: gl.constexpr, GATED: gl.constexpr, GATHER: gl.constexpr,
    TOP_K: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """out [S, N] of all tiles. Grid: PROGRAMS, each on every PROGRAMS-th tile, columns fastest.

    x: tokens [T, K] by order // TOP_K when GATHER, else rows [S, K] through descriptors of 256, 128 and 32 rows.
    w: boxes of 128 weight rows; when GATED, 8 gate rows and their 8 up rows by turns.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_ring = gl.allocate_shared_memory(dtype, [STAGES, 256, BLOCK_K], wide)
    boxes: gl.constexpr = [STAGES] + w_desc.block_type.shape  # noqa: RUF005  Triton has no starred expression
    w_ring = gl.allocate_shared_memory(dtype, boxes, w_desc.layout)
    tail_ring = gl.allocate_shared_memory(dtype, [STAGES, 32, BLOCK_K], wide)
    OUT_COLUMNS: gl.constexpr = 32 if GATED else 64
    narrow: gl.constexpr = gl.NVMMASharedLayout(OUT_COLUMNS * 2, 16, rank=2)
    turnings = gl.allocate_shared_memory(dtype, [2, 4096 // OUT_COLUMNS, OUT_COLUMNS], narrow)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Gathering takes a warpgroup, which copies row by row; the copy engine needs one warp to ask for a box.
    PRODUCER_WARPS: gl.constexpr = 4 if GATHER else 1
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + (32 * PRODUCER_WARPS if GATHER else 0))
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (x_ring, tail_ring, w_ring, turnings, full, empty, tiles_ptr, out_ptr, alpha, limit,
                        N, K, KIND, GATED, GATHER, PROGRAMS, gl.constexpr(0))),
            (_consume, (x_ring, tail_ring, w_ring, turnings, full, empty, tiles_ptr, out_ptr, alpha, limit,
                        N, K, KIND, GATED, GATHER, PROGRAMS, gl.constexpr(1))),
            (_produce, (x_ring, tail_ring, w_ring, full, empty, tiles_ptr, order_ptr, x_ptr, x256_desc, x128_desc,
                        x32_desc, w_desc, N, K, GATED, GATHER, TOP_K, PROGRAMS)),
        ],
        [4, PRODUCER_WARPS], [200, 104] if GATHER else [240, 24],
    )  # fmt: skip


def is_hopper(device: torch.device) -> bool:
    """Whether kernels for Hopper run there: its tensor cores are called by instructions that no other card has."""
    return not INTERPRETED and capability(device) == (9, 0)


def fits(load: float, E: int, N: int, K: int, itemsize: int, gated: bool) -> bool:
    """Whether a product of ``load`` rows per expert, N columns and sums over K goes into whole tiles, and gains."""
    whole = N % (64 if gated else 128) == 0 and K % BLOCK_K.value == 0
    return load > TURNED_ROWS and itemsize == 2 and whole and 0 < E * N < 2**31


def takes(x: Tensor, w: Tensor, u: Tensor, out: Tensor, gated: bool) -> bool:
    """Whether `turned_product` can multiply x with these weights ``[E, N, K]``.

    They lie as the copy engine reads them: experts one behind the other, in each gate rows and then its up rows.
    """
    E, N, K = w.shape
    if not fits(out.shape[0] / max(1, E), E, N, K, x.element_size(), gated) or not is_hopper(x.device):
        return False
    unrecordable("a descriptor holds an address")
    if w.dtype != x.dtype or not (x.is_contiguous() and begins_aligned(x) and begins_aligned(w)):
        return False
    if not gated:
        return w.is_contiguous()
    behind = u.data_ptr() - w.data_ptr() == N * K * w.element_size()
    return behind and w.stride() == u.stride() == (2 * N * K, K, 1)


def _described(t: Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, shape, strides, block, gl.NVMMASharedLayout(128, 16, rank=len(block)))


def turned_product(
    x: Tensor, w: Tensor, tiles: TokenTiles, order: Tensor, *, gather: bool, activation: Activation | None, out: Tensor
) -> None:
    """Launch the product into ``out`` ``[S, N]``. Rows without an expert are left as they are."""
    (S, N), (E, _, K) = out.shape, w.shape
    gated = activation is not None and activation.gated
    if gated:
        w_desc = _described(w, [E, N // 8, 2, 8, K], [2 * N * K, 8 * K, N * K, K, 1], [1, 8, 2, 8, BLOCK_K.value])
    else:
        w_desc = _described(w, [E * N, K], [K, 1], [128, BLOCK_K.value])
    x_descs = [None if gather else _described(x, [S, K], [K, 1], [rows, BLOCK_K.value]) for rows in (256, 128, 32)]
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    # No programmatic dependent launch: a program takes a whole multiprocessor, and waiting there made it slower.
    launch(
        _turned_kernel, (programs,), x, *x_descs, w_desc, tiles.table, order, out, *activation_numbers(activation),
        N=N, K=K, KIND="" if activation is None else activation.kind, GATED=gated, GATHER=gather,
        TOP_K=max(1, S // x.shape[0]), PROGRAMS=programs, num_warps=4,
    )  # fmt: skip
