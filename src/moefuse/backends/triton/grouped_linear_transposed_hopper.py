"""Products with a transposed weight on Hopper for many rows per expert: persistent and warp-specialised, in Gluon.

``out = a @ w`` of each expert's rows, w ``[E, K, N]`` as it lies: 128 rows and 256 columns to a tile. Two warpgroups
multiply, 64 rows each, or 128 columns each of the up to 64 rows that an expert has left, and never wait for each
other; a third partition brings operands into a ring of stages and runs ahead over the ends of tiles.

The gradient of the hidden rows is not stored: the pre-activations z of its rows come through the same ring behind the
last of K, 64 columns at a time, and what is made of them leaves from where they lay.

``full[stage]`` and ``empty[stage]`` are as in grouped_linear_hopper.py.
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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.grouped_linear_hopper import (
    BLOCK_K,
    advance,
    before,
    is_hopper,
    load_rows,
    load_tile,
    slots_of,
    span,
    tile_of,
    token_ptrs,
    visits_of,
)
from moefuse.backends.triton.grouped_outer_hopper import store_tile
from moefuse.backends.triton.plan import RowTiles
from moefuse.backends.triton.runtime.launch import (
    PDL,
    begins_aligned,
    ceil_div,
    launch,
    launch_dependents,
    unrecordable,
)
from moefuse.backends.triton.runtime.launch import wait as wait_for_launches
from moefuse.backends.triton.runtime.tiles import TRANSPOSED_ROWS
from moefuse.types import Activation, Plan

ENGINE = True
#: columns of a tile
WIDTH = gl.constexpr(256)
#: rows of a tile
HEIGHT = gl.constexpr(RowTiles.HEIGHT)


class Form(NamedTuple):
    """What the product is compiled for, besides its activation.

    ``k``: rows of the first weight, ``second_k`` of the second, if any. ``pitch``: rows from expert to expert.
    ``d_z``, ``hidden``, ``shares``: which results the derivatives have.
    """

    n: int
    k: int
    second_k: int
    pitch: int
    stride: int
    gather: bool
    top_k: int
    programs: int
    stages: int
    d_z: bool = False
    hidden: bool = False
    shares: bool = False
    engine: bool = True


@gluon.jit
def _produce(rings, a_ptr, descs, tiles_ptr, order_ptr, FORM: gl.constexpr, ACT: gl.constexpr):
    """Fill the ring, tile after tile. Spans are read two tiles ahead and slots one, so that nothing waits for them."""
    GATHER: gl.constexpr = FORM.gather
    PROGRAMS: gl.constexpr = FORM.programs
    STAGES: gl.constexpr = FORM.stages
    COLUMNS: gl.constexpr = (FORM.n + WIDTH - 1) // WIDTH
    W_BYTES: gl.constexpr = BLOCK_K * WIDTH * 2
    HALF_BYTES: gl.constexpr = 64 * BLOCK_K * 2
    a_ring, w_ring, full, empty = rings
    a_desc, half_desc, w_desc, u_desc, z_desc, _, _ = descs
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    next_expert, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    if GATHER:
        slots0 = slots_of(order_ptr, next_first, next_stop, 64)
        slots64 = slots_of(order_ptr, next_first + 64, next_stop, 64)
    then_expert, then_first, then_stop = span(tiles_ptr, tile_of(1, PROGRAMS), total, COLUMNS)
    for visit in range(visits_of(total, PROGRAMS)):
        column = tile_of(visit, PROGRAMS) % COLUMNS * WIDTH
        expert = next_expert
        first = next_first
        high = next_stop - next_first > 64
        next_expert = then_expert
        next_first = then_first
        next_stop = then_stop
        then_expert, then_first, then_stop = span(tiles_ptr, tile_of(visit + 2, PROGRAMS), total, COLUMNS)
        if GATHER:
            ptrs0 = token_ptrs(a_ptr, slots0, FORM.stride, FORM.top_k)
            ptrs64 = token_ptrs(a_ptr, slots64, FORM.stride, FORM.top_k)
            slots0 = slots_of(order_ptr, next_first, next_stop, 64)
            slots64 = slots_of(order_ptr, next_first + 64, next_stop, 64)
        for start in range(0, FORM.k + FORM.second_k, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase)
            a, bar = a_ring.index(stage), full.index(stage)
            if GATHER:
                mbarrier.expect(bar, W_BYTES)
            else:
                mbarrier.expect(bar, W_BYTES + HALF_BYTES, pred=high ^ True)
                mbarrier.expect(bar, W_BYTES + 2 * HALF_BYTES, pred=high)
            if FORM.second_k == 0:
                load_tile(w_desc, [expert * FORM.pitch + start, column], bar, w_ring.index(stage))
            else:
                of_first = start < FORM.k
                row = expert * FORM.pitch + start
                load_tile(w_desc, [row, column], bar, w_ring.index(stage), pred=of_first)
                load_tile(u_desc, [row - FORM.k, column], bar, w_ring.index(stage), pred=of_first ^ True)
            if GATHER:
                load_rows(a.slice(0, 64, dim=0), ptrs0 + start)
                if high:
                    load_rows(a.slice(64, 64, dim=0), ptrs64 + start)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                load_tile(half_desc, [first, start], bar, a.slice(0, 64, dim=0), pred=high ^ True)
                load_tile(a_desc, [first, start], bar, a, pred=high)
            stage, phase = advance(stage, phase, STAGES)
        if ACT is not None:
            # What each warpgroup has of z: gate columns where rows of a lay, up columns where those of w lay.
            second_row = first + gl.where(high, 64, 0)
            second_column = column + gl.where(high, 0, 128)
            for begin in range(0, gl.where(high, 256, 128), 64):
                mbarrier.wait(empty.index(stage), phase)
                a, w, bar = a_ring.index(stage), w_ring.index(stage), full.index(stage)
                mbarrier.expect(bar, 4 * HALF_BYTES)
                load_tile(z_desc, [first, column + begin], bar, a.slice(0, 64, dim=0))
                load_tile(z_desc, [second_row, second_column + begin], bar, a.slice(64, 64, dim=0))
                load_tile(z_desc, [first, FORM.n + column + begin], bar, w.slice(0, 64, dim=1))
                load_tile(z_desc, [second_row, FORM.n + second_column + begin], bar, w.slice(64, 64, dim=1))
                if GATHER:
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _store_rows(piece, out_ptr, first, stop, column, stride: gl.constexpr, N: gl.constexpr):
    """The rows before ``stop`` of piece [64, 64]; the copy engine would store all."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    n = column + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    ptrs = out_ptr + (first + row).to(gl.int64)[:, None] * stride + n[None, :]
    gl.store(ptrs, piece.load(layout), mask=(first + row < stop)[:, None] & (n < N)[None, :])


@gluon.jit
def _finish(acc, stagings, out_ptr, out_desc, place, FORM: gl.constexpr, WARPGROUP: gl.constexpr):
    """acc [64, columns] into rows of out, 64 columns at a time."""
    first, stop, column = place
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS > 64:
        x, y = acc.reshape([64, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
        _finish(x, stagings, out_ptr, out_desc, place, FORM, WARPGROUP)
        _finish(y, stagings, out_ptr, out_desc, (first, stop, column + COLUMNS // 2), FORM, WARPGROUP)
    else:
        tma.store_wait(1)
        piece = stagings.index(2 * WARPGROUP + column // 64 % 2)
        piece.store(acc.to(piece.dtype))
        fence_async_shared()
        if stop - first >= 64:
            store_tile(out_desc, [first, column], piece)
        else:
            _store_rows(piece, out_ptr, first, stop, column, FORM.n, FORM.n)


@gluon.jit
def _derive(
    acc,
    total,
    share,
    rings,
    pointers,
    descs,
    place,
    stage,
    phase,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
    WARPGROUP: gl.constexpr,
    FIRST: gl.constexpr,
):
    """From acc [64, columns] = d @ down and z: d_z, the weighted hidden rows, and <act(z), acc> added to ``total``.

    A stage is given back when the copy engine has read what leaves from the one behind it.
    """
    a_ring, w_ring, full, empty = rings
    first, stop, column = place
    COLUMNS: gl.constexpr = acc.shape[1]
    if COLUMNS > 64:
        x, y = acc.reshape([64, 2, COLUMNS // 2]).permute([0, 2, 1]).split()
        total, stage, phase = _derive(
            x, total, share, rings, pointers, descs, place, stage, phase, numbers, FORM, ACT, WARPGROUP, FIRST
        )
        place = (first, stop, column + COLUMNS // 2)
        NEXT: gl.constexpr = False
        total, stage, phase = _derive(
            y, total, share, rings, pointers, descs, place, stage, phase, numbers, FORM, ACT, WARPGROUP, NEXT
        )
    else:
        d_z_ptr, hidden_ptr, _ = pointers
        _, _, _, _, _, d_z_desc, hidden_desc = descs
        layout: gl.constexpr = acc.type.layout
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        mbarrier.wait(full.index(stage), phase)
        if column < FORM.n:
            of_gate = a_ring.index(stage).slice(64 * WARPGROUP, 64, dim=0)
            of_up = w_ring.index(stage).slice(64 * WARPGROUP, 64, dim=1)
            of_hidden = w_ring.index(stage).slice(128 + 64 * WARPGROUP, 64, dim=1)
            gate = of_gate.load(layout).to(gl.float32)
            up = of_up.load(layout).to(gl.float32)
            h, by_gate, by_up = ACT(gate, up, numbers, True, False)
            if FORM.shares:
                total += gl.convert_layout(gl.sum(h * acc, 1), total.type.layout)
            weight = gl.convert_layout(share, rows)[:, None]
            if FORM.d_z:
                g = acc * weight
                of_gate.store((g * by_gate).to(of_gate.dtype))
                of_up.store((g * by_up).to(of_up.dtype))
            if FORM.hidden:
                of_hidden.store((h * weight).to(of_hidden.dtype))
            fence_async_shared()
            if (stop - first >= 64) & FORM.engine:
                if FORM.d_z:
                    store_tile(d_z_desc, [first, column], of_gate)
                    store_tile(d_z_desc, [first, FORM.n + column], of_up)
                if FORM.hidden:
                    store_tile(hidden_desc, [first, column], of_hidden)
            else:
                if FORM.d_z:
                    _store_rows(of_gate, d_z_ptr, first, stop, column, 2 * FORM.n, FORM.n)
                    _store_rows(of_up, d_z_ptr + FORM.n, first, stop, column, 2 * FORM.n, FORM.n)
                if FORM.hidden:
                    _store_rows(of_hidden, hidden_ptr, first, stop, column, FORM.n, FORM.n)
            # Nothing but what leaves from this stage is under way then.
            tma.store_wait((2 if FORM.d_z else 0) + (1 if FORM.hidden else 0))
        else:
            tma.store_wait(0)
        if not FIRST:
            mbarrier.arrive(empty.index(before(stage, FORM.stages)))
        stage, phase = advance(stage, phase, FORM.stages)
    return total, stage, phase


@gluon.jit
def _multiply(
    rings,
    stagings,
    pointers,
    descs,
    tensors,
    place,
    stage,
    phase,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
    WARPGROUP: gl.constexpr,
    HIGH: gl.constexpr,
):
    """A warpgroup's part of one tile: 64 rows and all columns, or up to 64 rows and half of the columns."""
    a_ring, w_ring, full, empty = rings
    order_ptr, weights_ptr, out_ptr, out_desc, S = tensors
    first, stop, column = place
    STAGES: gl.constexpr = FORM.stages
    COLUMNS: gl.constexpr = WIDTH if HIGH else WIDTH // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    tile = column // WIDTH
    if HIGH:
        first += 64 * WARPGROUP
    else:
        column += COLUMNS * WARPGROUP
    if ACT is not None:
        row = first + gl.arange(0, 64, layout=rows)
        share = gl.load(weights_ptr + gl.load(order_ptr + gl.minimum(row, stop - 1))).to(gl.float32)
    acc = gl.zeros([64, COLUMNS], gl.float32, layout)
    for start in range(0, FORM.k + FORM.second_k, BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        if FORM.gather:  # threads wrote the rows, tensor cores read them
            fence_async_shared()
        if HIGH:
            a = a_ring.index(stage).slice(64 * WARPGROUP, 64, dim=0)
            w = w_ring.index(stage)
        else:
            a = a_ring.index(stage).slice(0, 64, dim=0)
            w = w_ring.index(stage).slice(COLUMNS * WARPGROUP, COLUMNS, dim=1)
        acc = warpgroup_mma(a, w, acc, use_acc=start > 0, is_async=True)
        # The product of the stage before is done when only this stage's is under way.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index(before(stage, STAGES)), pred=start > 0)
        stage, phase = advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(before(stage, STAGES)))
    place = (first, stop, column)
    if ACT is not None:
        total = gl.zeros([64], gl.float32, rows)
        FIRST: gl.constexpr = True
        total, stage, phase = _derive(
            acc, total, share, rings, pointers, descs, place, stage, phase, numbers, FORM, ACT, WARPGROUP, FIRST
        )
        if FORM.shares:
            _, _, parts_ptr = pointers
            live = row < stop
            if HIGH:
                at = parts_ptr + 2 * tile * S + row
                gl.store(at, total, mask=live)
                gl.store(at + S, total * 0.0, mask=live)
            else:
                gl.store(parts_ptr + (2 * tile + WARPGROUP) * S + row, total, mask=live)
        tma.store_wait(0)
        mbarrier.arrive(empty.index(before(stage, STAGES)))
    else:
        _finish(acc, stagings, out_ptr, out_desc, place, FORM, WARPGROUP)
    return stage, phase


@gluon.jit
def _consume(
    rings,
    stagings,
    pointers,
    descs,
    tensors,
    tiles_ptr,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
    WARPGROUP: gl.constexpr,
):
    """One warpgroup's part of every tile."""
    PROGRAMS: gl.constexpr = FORM.programs
    COLUMNS: gl.constexpr = (FORM.n + WIDTH - 1) // WIDTH
    HIGH: gl.constexpr = True
    LOW: gl.constexpr = False
    total = gl.load(tiles_ptr) * COLUMNS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    _, next_first, next_stop = span(tiles_ptr, tile_of(0, PROGRAMS), total, COLUMNS)
    for visit in range(visits_of(total, PROGRAMS)):
        place = (next_first, next_stop, tile_of(visit, PROGRAMS) % COLUMNS * WIDTH)
        high = next_stop - next_first > 64
        _, next_first, next_stop = span(tiles_ptr, tile_of(visit + 1, PROGRAMS), total, COLUMNS)
        if high:
            stage, phase = _multiply(
                rings, stagings, pointers, descs, tensors, place, stage, phase, numbers, FORM, ACT, WARPGROUP, HIGH
            )
        else:
            stage, phase = _multiply(
                rings, stagings, pointers, descs, tensors, place, stage, phase, numbers, FORM, ACT, WARPGROUP, LOW
            )
    tma.store_wait(0)


@gluon.jit
def _transposed_kernel(
    a_ptr,
    a_desc,
    half_desc,
    w_desc,
    u_desc,
    z_desc,
    d_z_desc,
    hidden_desc,
    out_desc,
    tiles_ptr,
    order_ptr,
    weights_ptr,
    out_ptr,
    d_z_ptr,
    hidden_ptr,
    parts_ptr,
    S,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
):
    """out [S, N] of all tiles, or with ACT what `_derive` makes. Grid: programs; columns of a tile of rows are next to
    each other."""
    STAGES: gl.constexpr = FORM.stages
    dtype: gl.constexpr = a_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    a_ring = gl.allocate_shared_memory(dtype, [STAGES, HEIGHT, BLOCK_K], wide)
    w_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, WIDTH], wide)
    # Derivatives leave from the ring.
    stagings = gl.allocate_shared_memory(dtype, [4, 64, 64], wide) if ACT is None else a_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    PRODUCER_WARPS: gl.constexpr = 4 if FORM.gather else 1
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if FORM.gather else 1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    rings = (a_ring, w_ring, full, empty)
    descs = (a_desc, half_desc, w_desc, u_desc, z_desc, d_z_desc, hidden_desc)
    pointers = (d_z_ptr, hidden_ptr, parts_ptr)
    tensors = (order_ptr, weights_ptr, out_ptr, out_desc, S)
    gl.warp_specialize(
        [
            (_consume, (rings, stagings, pointers, descs, tensors, tiles_ptr, numbers, FORM, ACT, gl.constexpr(0))),
            (_consume, (rings, stagings, pointers, descs, tensors, tiles_ptr, numbers, FORM, ACT, gl.constexpr(1))),
            (_produce, (rings, a_ptr, descs, tiles_ptr, order_ptr, FORM, ACT)),
        ],
        [4, PRODUCER_WARPS],
        [208, 88] if FORM.gather else [240, 24],
    )


@triton.jit
def _share_sums_kernel(parts_ptr, offsets_ptr, order_ptr, out_ptr, S, E, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out [S] by slot: the sum of each row's parts [PARTS, S] in order, zero without an expert. Grid: row blocks."""
    wait_for_launches()
    launch_dependents()
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = p < tl.load(offsets_ptr + E)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(PARTS):
        total += tl.load(parts_ptr + i * S + p, mask=live, other=0.0)
    slot = tl.load(order_ptr + p, mask=p < S, other=0)
    tl.store(out_ptr + slot, total.to(out_ptr.dtype.element_ty), mask=p < S)


def _matrix(w: Tensor) -> Tensor:
    """A stack ``[E, K, N]`` as one matrix of rows, `_pitch` of them from expert to expert."""
    E, K, N = w.shape
    return w.as_strided(((E - 1) * _pitch(w) + K, N), w.stride()[1:], w.storage_offset())


def _pitch(w: Tensor) -> int:
    return w.stride(0) // w.stride(1)


def _is_matrix(t: Tensor) -> bool:
    """Whether the copy engine can read it."""
    return t.stride(-1) == 1 and t.stride(-2) % 8 == 0 and begins_aligned(t)


def takes(a: Tensor, stacks: tuple[Tensor, ...], plan: Plan, N: int) -> bool:
    """Whether `hopper_transposed` can multiply rows of a with these stacks, N of their columns."""
    if plan.assignments <= TRANSPOSED_ROWS * plan.num_experts or not is_hopper(a.device):
        return False
    unrecordable("a descriptor holds an address")
    w = stacks[0]
    if a.element_size() != 2 or N % 8 or not _is_matrix(a) or any(t.stride() != w.stride() for t in stacks):
        return False
    if w.stride(0) % w.stride(1) or w.shape[0] * _pitch(w) >= 2**31:
        return False
    return all(t.dtype == a.dtype and t.shape[1] % BLOCK_K.value == 0 and _is_matrix(t) for t in stacks)


def takes_derivatives(z: Tensor, activation: Activation, layout: str, bias: Tensor | None) -> bool:
    """Whether `hopper_derivatives` can be what follows such a product: it finds gate and up columns in halves."""
    I = z.shape[1] // 2
    return activation.gated and layout == "halves" and bias is None and I % 64 == 0 and _is_matrix(z)


def described(t: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block), gl.NVMMASharedLayout(128, 16, rank=2))


def _launch(
    a: Tensor,
    stacks: tuple[Tensor, ...],
    plan: Plan,
    results: tuple[Tensor | None, ...],
    weights: Tensor | None,
    z: Tensor | None,
    activation: Activation | None,
    tiles: RowTiles,
    gather: bool,
) -> None:
    out, d_z, hidden, parts = results
    (_, K, N), S = stacks[0].shape, plan.assignments
    second_k = stacks[1].shape[1] if len(stacks) > 1 else 0
    heights = (HEIGHT.value, 64)
    a_descs = [None if gather else described(a, rows, BLOCK_K.value) for rows in heights]
    w_descs = [described(_matrix(t), BLOCK_K.value, WIDTH.value) for t in stacks]
    others = [None if t is None else described(t, 64, 64) for t in (z, d_z, hidden, out)]
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    stages = 4
    top_k = max(1, S // max(1, a.shape[0]))
    form = Form(N, K, second_k, _pitch(stacks[0]), a.stride(0), gather, top_k, programs, stages)
    form = form._replace(d_z=d_z is not None, hidden=hidden is not None, shares=parts is not None, engine=ENGINE)
    launch(
        _transposed_kernel,
        (programs,),
        *(a, *a_descs, w_descs[0], w_descs[1] if second_k else None, *others),
        *(tiles.table, plan.order, weights, out, d_z, hidden, parts),
        S,
        activation_numbers(activation),
        FORM=form,
        ACT=None if activation is None else ACTIVATIONS[activation.kind],
        num_warps=4,
    )


def hopper_transposed(
    a: Tensor, stacks: tuple[Tensor, ...], plan: Plan, out: Tensor, tiles: RowTiles, *, gather: bool
) -> None:
    """Launch the product of rows of ``a`` with ``stacks`` into ``out`` ``[S, N]``, see `transposed_product`.

    Rows without an expert are left as they are.
    """
    _launch(a, stacks, plan, (out, None, None, None), None, None, None, tiles, gather)


def hopper_derivatives(
    d: Tensor,
    down: Tensor,
    z: Tensor,
    weights: Tensor,
    plan: Plan,
    activation: Activation,
    results: tuple[Tensor | None, Tensor | None, Tensor | None],
    tiles: RowTiles,
) -> None:
    """Launch d @ down of each slot and what is made of it: d_z, the weighted hidden rows and d_weights, where given.

    d_z may be z. Rows without an expert are left as they are, but d_weights is zero there.
    """
    d_z, hidden, d_weights = results
    S, E, I = plan.assignments, plan.num_experts, down.shape[2]
    count = 2 * ceil_div(I, WIDTH.value)
    parts = None if d_weights is None else torch.empty((count, S), dtype=torch.float32, device=d.device)
    _launch(d, (down,), plan, (None, d_z, hidden, parts), weights, z, activation, tiles, True)
    if parts is not None:
        tensors, options = (parts, plan.offsets, plan.order, d_weights), {"PARTS": count, "BLOCK": 256}
        launch(_share_sums_kernel, (ceil_div(S, 256),), *tensors, S, E, **options, num_warps=4, launch_pdl=PDL)
