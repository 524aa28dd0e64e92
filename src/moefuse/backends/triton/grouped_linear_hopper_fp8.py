"""The grouped product on Hopper with weights in FP8: tensor cores multiply codes by codes, and scales come afterwards.

Tiles and their schedule are hopper.py's. Activations are rounded to e4m3 in a launch of their own, with a scale for
each token and 128 columns, in the order of the plan, so that the copy engine brings all operands. A stage holds 128
values of K, for which a weight row has one scale too: their products are summed by themselves, and that sum times both
scales is added to the result, in float32.

``full[stage]`` completes with the bytes of the copy engine and an arrival of each thread that copies scales,
``empty[stage]`` with one of each multiplying warpgroup.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefuse import backends
from moefuse.backends.gated import Rows
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.hopper import (
    TAIL_ROWS,
    advance,
    described,
    finish,
    is_hopper,
    load_rows,
    load_tile,
    most,
    shape_of,
    span,
    tile_of,
    visits_of,
)
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import PDL, bytes_between, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tiles import SWAP_AB_STAGES_FP8, swap_ab_fp8_width
from moefuse.types import Activation

#: values that share a scale, and what of K a stage holds: 128 bytes, as tensor cores read them
SHARED = gl.constexpr(128)
#: the largest number in e4m3
LARGEST = tl.constexpr(448.0)
#: rows of x that a program rounds, and runs of 128 of each
_ROUND_ROWS, _ROUND_RUNS = 8, 4
#: rows of the largest tile
_TILE_ROWS = max(SWAP_AB_STAGES_FP8) + TokenTiles.SPARE


@triton.jit(do_not_specialize=["S", "divisor"])
def _round_kernel(
    x_ptr, order_ptr, codes_ptr, scales_ptr, S, K, divisor, pitch, strides, ROWS: tl.constexpr, RUNS: tl.constexpr
):
    """Rows of x in the plan's order, or as they lie, as codes [S, K] and scales [K / 128, pitch]. Grid: rows, runs.

    Rows with an infinity or not-a-number among 128 values have not-a-number, or an infinity, in their scale.
    """
    wait()
    launch_dependents()
    stride_xm, stride_xk = strides
    p = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = p < S
    row = p
    if order_ptr is not None:
        row = tl.load(order_ptr + p, mask=live, other=0) // divisor
    k = tl.program_id(1) * (RUNS * 128) + tl.arange(0, RUNS * 128)
    inside = live[:, None] & (k < K)[None, :]
    x_ptrs = x_ptr + row.to(tl.int64)[:, None] * stride_xm + k[None, :] * stride_xk
    x = tl.load(x_ptrs, mask=inside, other=0.0).to(tl.float32)
    x = tl.reshape(x, [ROWS, RUNS, 128])
    # As whole numbers the bits of numbers without sign have their order, with not-a-number above all of them.
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2).to(tl.float32, bitcast=True)
    # Runs too small to divide by are zeros.
    factor = tl.where(top < 1e-35, 0.0, tl.div_rn(tl.full(top.shape, LARGEST, tl.float32), top))
    codes = (x * factor[:, :, None]).to(codes_ptr.dtype.element_ty)
    at = p.to(tl.int64)[:, None] * K + k[None, :]
    tl.store(codes_ptr + at, tl.reshape(codes, [ROWS, RUNS * 128]), mask=inside)
    run = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    scale_ptrs = scales_ptr + run.to(tl.int64)[None, :] * pitch + p[:, None]
    tl.store(scale_ptrs, top * (1.0 / LARGEST), mask=live[:, None] & (run < K // 128)[None, :])


class Form(NamedTuple):
    """What the product is compiled for, besides its activation. ``turned``: up rows lie before gate rows.

    ``scatter``: never; `finish` asks for it.
    """

    n: int
    k: int
    gated: bool
    turned: bool
    programs: int
    width: int
    stages: int
    scatter: bool = False


@gluon.constexpr_function
def _parts(shape):
    """The columns of the products of a stage, of a shape as `shape_of` gives it: 128 at most each."""
    found = []
    for columns in shape:
        found += [128, columns - 128] if columns > 128 else [columns] if columns else []
    return found


@gluon.constexpr_function
def _count(shape):
    return len(_parts(shape))


@gluon.constexpr_function
def _columns(shape, i):
    """The columns of the i-th product."""
    return _parts(shape)[i]


@gluon.constexpr_function
def _begin(shape, i):
    """The first of them."""
    return sum(_parts(shape)[:i])


@gluon.constexpr_function
def _ahead(k):
    """How many stages ahead scales of weights are read."""
    return min(4, k // 128)


@gluon.jit
def _produce(rings, pointers, descs, pitch, FORM: gl.constexpr):
    """Fill the ring, tile after tile. Scales of tokens are copied by threads: they begin at any word."""
    x_ring, tail_ring, w_ring, s_ring, s_tail_ring, full, empty = rings
    x_desc, half_desc, tail_desc, w_desc = descs
    PROGRAMS: gl.constexpr = FORM.programs
    WIDTH: gl.constexpr = FORM.width
    HALF: gl.constexpr = WIDTH // 2
    BLOCK_N: gl.constexpr = 64 if FORM.gated else 128
    COLUMNS: gl.constexpr = (FORM.n + BLOCK_N - 1) // BLOCK_N
    WEIGHTS: gl.constexpr = 128 * SHARED
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    scales_ptr, tiles_ptr = pointers
    scale_ptrs = scales_ptr + gl.arange(0, WIDTH, layout=layout)
    tail_ptrs = scales_ptr + WIDTH + gl.arange(0, TAIL_ROWS, layout=layout)
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    next_expert, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    for visit in range(visits_of(total, PROGRAMS)):
        column = tile_of(visit, PROGRAMS) % COLUMNS * BLOCK_N
        expert = next_expert
        first = next_first
        rows = next_stop - next_first
        next_expert, next_first, next_stop = span(tiles_ptr, tile_of(visit + 1, PROGRAMS), total, COLUMNS)
        for run in range(FORM.k // SHARED):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, WEIGHTS + HALF * SHARED, pred=rows <= HALF)
            mbarrier.expect(bar, WEIGHTS + WIDTH * SHARED, pred=(rows > HALF) & (rows <= WIDTH))
            mbarrier.expect(bar, WEIGHTS + (WIDTH + TAIL_ROWS) * SHARED, pred=rows > WIDTH)
            start = SHARED * run
            at = [expert, column // 8, 0, 0, start] if FORM.gated else [expert, column, start]
            load_tile(w_desc, at, bar, w_ring.index(stage))
            x = x_ring.index(stage)
            load_tile(half_desc, [first, start], bar, x.slice(0, HALF, dim=0), pred=rows <= HALF)
            load_tile(x_desc, [first, start], bar, x, pred=rows > HALF)
            load_tile(tail_desc, [first + WIDTH, start], bar, tail_ring.index(stage), pred=rows > WIDTH)
            scale_at = pitch.to(gl.int64) * run + first
            load_rows(s_ring.index(stage), scale_ptrs + scale_at)
            if rows > WIDTH:
                load_rows(s_tail_ring.index(stage), tail_ptrs + scale_at)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = advance(stage, phase, FORM.stages)


@gluon.jit
def _scale_ptrs(w_ptrs, expert, column, blocks_at, FORM: gl.constexpr):
    """Pointers to the first scales of a warpgroup's 64 rows from ``column`` on."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32]))
    w_ptr, u_ptr = w_ptrs
    matrix, matrix_rows, places = blocks_at
    w_first, w_step, u_first, u_step = places
    r = gl.arange(0, 64, layout=layout)
    behind = expert.to(gl.int64) * matrix + matrix_rows.to(gl.int64) * FORM.k
    if FORM.gated:
        # Eight gate rows, then the up rows of the same columns.
        up = r // 8 % 2 == 1
        n = gl.minimum(column + r // 16 * 8 + r % 8, FORM.n - 1)
        row = gl.where(up, u_first + n * u_step, w_first + n * w_step)
        ptrs = gl.where(up, u_ptr + behind, w_ptr + behind)
    else:
        row = w_first + gl.minimum(column + r, FORM.n - 1) * w_step
        ptrs = w_ptr + behind
    return (ptrs + row.to(gl.int64) * (FORM.k // 32)).to(gl.pointer_type(gl.float32))


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros([64, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32]))


@gluon.jit
def _tokens(rings, stage, BEGIN: gl.constexpr, COUNT: gl.constexpr, FORM: gl.constexpr):
    """COUNT of a stage's tokens, and their scales."""
    x_ring, tail_ring, _, s_ring, s_tail_ring, _, _ = rings
    if FORM.width == BEGIN:
        found = tail_ring.index(stage), s_tail_ring.index(stage)
    else:
        rows = x_ring.index(stage).slice(BEGIN, COUNT, dim=0)
        found = rows, s_ring.index(stage).slice(BEGIN, COUNT, dim=0)
    return found


@gluon.jit
def _multiply(
    rings,
    staging,
    out_ptrs,
    place,
    stage,
    phase,
    scales,
    scale_ptrs,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
    WARPGROUP: gl.constexpr,
    SHAPE: gl.constexpr,
):
    """64 weight rows by the tokens of one tile. ``scales``: of the stages that come next, for the rows."""
    _, _, w_ring, _, _, full, empty = rings
    first, stop, column = place
    ptrs, next_ptrs = scale_ptrs
    RUNS: gl.constexpr = FORM.k // SHARED
    AHEAD: gl.constexpr = _ahead(FORM.k)
    PARTS: gl.constexpr = _count(SHAPE)
    sums = ()
    for i in gl.static_range(PARTS):
        sums = sums + (_zeros(_columns(SHAPE, i)),)  # noqa: RUF005
    for run in range(RUNS):
        scale = scales[0]
        then = run + AHEAD
        later = gl.load(gl.where(then < RUNS, ptrs + then, next_ptrs + (then - RUNS)))
        if AHEAD == 1:
            scales = (later,)
        elif AHEAD == 2:
            scales = (scales[1], later)
        elif AHEAD == 3:
            scales = (scales[1], scales[2], later)
        else:
            scales = (scales[1], scales[2], scales[3], later)
        mbarrier.wait(full.index(stage), phase)
        w = w_ring.index(stage).reshape([128, SHARED]).slice(64 * WARPGROUP, 64, dim=0)
        added = ()
        for i in gl.static_range(PARTS):
            rows, row_scales = _tokens(rings, stage, _begin(SHAPE, i), sums[i].shape[1], FORM)
            part = warpgroup_mma(w, rows.permute([1, 0]), gl.zeros_like(sums[i]), use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=[part])
            token_scale = row_scales.load(gl.SliceLayout(0, part.type.layout))
            if i == PARTS - 1:
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage))
            row_scale = gl.convert_layout(scale, gl.SliceLayout(1, part.type.layout), assert_trivial=True)
            added = added + (sums[i] + part * token_scale[None, :] * row_scale[:, None],)  # noqa: RUF005
        sums = added
        stage, phase = advance(stage, phase, FORM.stages)
    for i in gl.static_range(PARTS):
        at = first + _begin(SHAPE, i)
        finish(sums[i], staging, out_ptrs, at, stop, column, numbers, FORM, ACT)
    return stage, phase, scales


@gluon.jit
def _consume(
    rings, stagings, pointers, blocks_at, numbers, FORM: gl.constexpr, ACT: gl.constexpr, WARPGROUP: gl.constexpr
):
    """One warpgroup's half of every tile, each in the least shape that has room for its tokens."""
    w_ptrs, tiles_ptr, out_ptrs = pointers
    WIDTH: gl.constexpr = FORM.width
    PROGRAMS: gl.constexpr = FORM.programs
    BLOCK_N: gl.constexpr = 64 if FORM.gated else 128
    COLUMNS: gl.constexpr = (FORM.n + BLOCK_N - 1) // BLOCK_N
    HALF: gl.constexpr = BLOCK_N // 2 * WARPGROUP
    staging = stagings.index(WARPGROUP)
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    next_expert, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    next_column = tile_of(0, PROGRAMS) % COLUMNS * BLOCK_N + HALF
    next_ptrs = _scale_ptrs(w_ptrs, next_expert, next_column, blocks_at, FORM)
    scales = ()
    for i in gl.static_range(_ahead(FORM.k)):
        scales = scales + (gl.load(next_ptrs + i),)  # noqa: RUF005
    for visit in range(visits_of(total, PROGRAMS)):
        column = next_column
        first = next_first
        stop = next_stop
        ptrs = next_ptrs
        next_expert, next_first, next_stop = span(tiles_ptr, tile_of(visit + 1, PROGRAMS), total, COLUMNS)
        next_column = tile_of(visit + 1, PROGRAMS) % COLUMNS * BLOCK_N + HALF
        next_ptrs = _scale_ptrs(w_ptrs, next_expert, next_column, blocks_at, FORM)
        rows = stop - first
        for i in gl.static_range(6):
            if most(i, WIDTH) > 0:  # noqa: SIM102
                if (rows > most(i + 1, WIDTH)) & (rows <= most(i, WIDTH)):
                    SHAPE: gl.constexpr = shape_of(i, WIDTH)
                    stage, phase, scales = _multiply(
                        rings,
                        staging,
                        out_ptrs,
                        (first, stop, column),
                        stage,
                        phase,
                        scales,
                        (ptrs, next_ptrs),
                        numbers,
                        FORM,
                        ACT,
                        WARPGROUP,
                        SHAPE,
                    )


@gluon.jit
def _swap_ab_fp8_kernel(
    w_ptr,
    u_ptr,
    x_desc,
    half_desc,
    tail_desc,
    w_desc,
    scales_ptr,
    tiles_ptr,
    out_ptr,
    z_ptr,
    pitch,
    blocks_at,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
):
    """out [S, N] of all tiles, and z where given. Grid: programs; columns of a tile of tokens are next to each other.

    x: rows in FP8 through descriptors of ``width`` rows, half and tail; their scales, ``pitch`` apart for the next 128
    columns. w: boxes of 128 weight rows; when gated, 8 gate rows and their 8 up rows by turns; scales lie behind the
    codes of w_ptr's and u_ptr's matrices. ``blocks_at``: the bytes and the rows of a matrix, and which of these are
    gate rows and up rows.
    """
    WIDTH: gl.constexpr = FORM.width
    STAGES: gl.constexpr = FORM.stages
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, WIDTH, SHARED], wide)
    tail_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, TAIL_ROWS, SHARED], wide)
    boxes: gl.constexpr = [STAGES] + w_desc.block_type.shape  # noqa: RUF005  Triton has no starred expression
    w_ring = gl.allocate_shared_memory(gl.float8e4nv, boxes, w_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_ring = gl.allocate_shared_memory(gl.float32, [STAGES, WIDTH], plain)
    s_tail_ring = gl.allocate_shared_memory(gl.float32, [STAGES, TAIL_ROWS], plain)
    OUT_COLUMNS: gl.constexpr = 32 if FORM.gated else 64
    narrow: gl.constexpr = gl.NVMMASharedLayout(OUT_COLUMNS * 2, 16, rank=2)
    stagings = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [2, 2048 // OUT_COLUMNS, OUT_COLUMNS], narrow)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (x_ring, tail_ring, w_ring, s_ring, s_tail_ring, full, empty)
    descs = (x_desc, half_desc, tail_desc, w_desc)
    pointers = ((w_ptr, u_ptr), tiles_ptr, (out_ptr, z_ptr))
    gl.warp_specialize(
        [
            (_consume, (rings, stagings, pointers, blocks_at, numbers, FORM, ACT, gl.constexpr(0))),
            (_consume, (rings, stagings, pointers, blocks_at, numbers, FORM, ACT, gl.constexpr(1))),
            (_produce, (rings, (scales_ptr, tiles_ptr), descs, pitch, FORM)),
        ],
        [4, 1],
        [240, 24],
    )


def takes(x: Tensor, w: Rows, u: Rows, out: Tensor, gated: bool) -> bool:
    """Whether `swap_ab_fp8` can multiply x, once rounded, with these weights."""
    if not (w.format == u.format == "FP8") or w.exact or u.exact or backends.invariant() or x.element_size() != 2:
        return False
    E, N = w.data.shape[0], out.shape[1]
    whole = N % 8 == 0 if gated else N > 1
    if not whole or not 0 < E * N < 2**31 or not out.shape[0] or not is_hopper(x.device):
        return False
    return w.data.stride() == u.data.stride() and w.data.shape == u.data.shape and w.step == u.step


def rounded(x: Tensor, order: Tensor | None, S: int) -> tuple[Tensor, Tensor]:
    """x as codes ``[S, K]`` in the plan's ``order``, if that is given, and their scales ``[K / 128, S and a few]``.

    Behind the last scales there is memory for a tile that begins with them.
    """
    K = x.shape[1]
    codes = torch.empty((S, K), dtype=torch.float8_e4m3fn, device=x.device)
    pitch = ceil_div(S, 16) * 16  # kernels are compiled for such numbers, or for any
    memory = torch.empty(K // 128 * pitch + _TILE_ROWS, dtype=torch.float32, device=x.device)
    scales = memory[: K // 128 * pitch].view(K // 128, pitch)
    grid = ceil_div(S, _ROUND_ROWS), ceil_div(K, 128 * _ROUND_RUNS)
    launch(
        _round_kernel,
        grid,
        *(x, order, codes, scales, S, K, max(1, S // max(1, x.shape[0])), pitch, x.stride()),
        ROWS=_ROUND_ROWS,
        RUNS=_ROUND_RUNS,
        num_warps=4,
        launch_pdl=PDL,
    )
    return codes, scales


def _weights_desc(w: Rows, u: Rows, N: int, K: int, gated: bool) -> tuple[TensorDescriptor, bool]:
    """Boxes of 128 rows of codes; gated, 8 rows of each by turns. Also whether up rows come first in memory."""
    E = w.data.shape[0]
    pitch, _, first, step = w.strides
    behind = bytes_between(w.data, u.data) + (u.first - first) * K
    turned = gated and behind < 0
    rows = u if turned else w
    codes = rows.data.as_strided((E, 1), (pitch, 1), rows.data.storage_offset() + rows.first * K)
    codes = codes.view(torch.float8_e4m3fn)
    if gated:
        shape, strides = [E, N // 8, 2, 8, K], [pitch, 8 * step * K, abs(behind), step * K, 1]
        return described(codes, shape, strides, [1, 8, 2, 8, SHARED.value]), turned
    return described(codes, [E, N, K], [pitch, step * K, 1], [1, 128, SHARED.value]), False


def swap_ab_fp8(
    x: Tensor,
    w: Rows,
    u: Rows,
    tiles: TokenTiles,
    order: Tensor,
    *,
    gather: bool,
    activation: Activation | None,
    out: Tensor,
    z: Tensor | None = None,
    width: int | None = None,
) -> None:
    """As `swap_ab_product` of grouped_linear_hopper.py; x is rounded first."""
    (S, N), K = out.shape, x.shape[1]
    gated = activation is not None and activation.gated
    width = width or swap_ab_fp8_width(tiles.load)
    codes, scales = rounded(x, order if gather else None, S)
    w_desc, turned = _weights_desc(w, u, N, K, gated)
    (matrix, rows, *w_place), (_, _, *u_place) = w.strides, u.strides
    halves, place = ((u.data, w.data), (*u_place, *w_place)) if turned else ((w.data, u.data), (*w_place, *u_place))
    heights = (width, width // 2, tiles.SPARE)
    x_descs = [described(codes, [S, K], [K, 1], [height, SHARED.value]) for height in heights]
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count
    launch(
        _swap_ab_fp8_kernel,
        (programs,),
        *halves,
        *(*x_descs, w_desc, scales, tiles.of(width), out, z),
        scales.stride(0),
        (matrix, rows, place),
        activation_numbers(activation),
        FORM=Form(N, K, gated, turned, programs, width, SWAP_AB_STAGES_FP8[width]),
        ACT=None if activation is None else ACTIVATIONS[activation.kind],
        num_warps=4,
    )
