"""Products with a transposed weight on NVIDIA GPUs: the gradient of a grouped product's input, numbers or blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse.backends.gated import Rows
from moefuse.backends.triton.formats.blocks import load_runs
from moefuse.backends.triton.formats.numbers import decode_rows
from moefuse.backends.triton.grouped_linear import decoder_of, described, find_tile, hopper, most_tiles, rows_of
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tiles import DECODED_BYTES, Tile, decodes_first, transposed_tile
from moefuse.types import Plan, Weight

if hopper is not None:
    from moefuse.backends.triton import grouped_linear_hopper_transposed


@triton.jit
def _decoded(w_ptr, rows, row, column, width, dtype: tl.constexpr, DECODE: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns ``column`` and on of rows ``row`` of blocks in planes, a strip or half of one: [.., COLUMNS].

    The matrix has ``rows`` rows of ``width`` values; what lies past the last of them means nothing.
    """
    matrix = (w_ptr + tl.zeros([1], tl.int32), rows)
    loaded = load_runs(matrix, row[None, :], column, width, COLUMNS // 32, DECODE)
    return decode_rows(loaded, column, dtype, DECODE)


@triton.jit
def _plus_product(acc, a, a_strides, w, w_strides, rows, place, K, a_first, DECODE: tl.constexpr, FORM: tl.constexpr):
    """acc + a[row, a_first : a_first + K] @ w[0 : K, columns].

    ``a`` and ``w`` are pointer and descriptor or None; that of w is at the expert's first row, ``at_row``. With DECODE
    w points to a matrix of blocks in planes, whose rows have ``width`` values; the first column is its ``w_first``.
    """
    a_ptr, a_desc = a
    w_ptr, w_desc = w
    stride_am, stride_ak = a_strides
    stride_wk, stride_wn = w_strides
    row, live, inside = rows
    first, at_row, column, w_first, width = place
    BLOCK_N: tl.constexpr = acc.shape[1]
    BLOCK_K: tl.constexpr = FORM.block_k
    k = tl.arange(0, BLOCK_K)
    n = (column + tl.arange(0, BLOCK_N)).to(tl.int64)
    a_ptrs = a_ptr + row[:, None] * stride_am + (a_first + k)[None, :] * stride_ak
    w_ptrs = w_ptr + k.to(tl.int64)[:, None] * stride_wk + n[None, :] * stride_wn
    for start in range(0, K, BLOCK_K):
        left = K - start
        # [BLOCK_M, BLOCK_K]
        if a_desc is not None:
            left_tile = a_desc.load([first, a_first + start])
        else:
            left_tile = tl.load(a_ptrs, mask=live[:, None] & (k < left)[None, :], other=0.0)
            a_ptrs += BLOCK_K * stride_ak
        # [BLOCK_K, BLOCK_N]
        if DECODE is not None:
            k_row = tl.minimum(start + k, K - 1)
            right_tile = _decoded(w_ptr, K, k_row, w_first + column, width, left_tile.dtype, DECODE, BLOCK_N)
            if not FORM.whole:
                right_tile = tl.where((k < left)[:, None], right_tile, 0.0)
        elif w_desc is not None:
            right_tile = w_desc.load([at_row + start, column])
        else:
            right_tile = tl.load(w_ptrs, mask=(k < left)[:, None] & inside[None, :], other=0.0)
            w_ptrs += BLOCK_K * stride_wk
        acc = tl.dot(left_tile, right_tile.to(left_tile.dtype), acc, input_precision="ieee")
    return acc


class Form(NamedTuple):
    """What a transposed product is compiled for, besides its decoders.

    ``fill``: rows without an expert are written too, as zeros. ``whole``: the rows of each weight are a multiple of
    block_k.
    """

    gather: bool
    scatter: bool
    fill: bool
    whole: bool
    block_m: int
    block_n: int
    block_k: int
    block_e: int


@triton.jit(do_not_specialize=["S", "divisor"])
def _transposed_kernel(
    a_ptr,
    w_ptr,
    u_ptr,
    a_desc,
    w_desc,
    u_desc,
    offsets_ptr,
    order_ptr,
    out_ptr,
    S,
    divisor,
    sizes,
    strides,
    FORM: tl.constexpr,
    W_DECODE: tl.constexpr,
    U_DECODE: tl.constexpr,
):
    """A [block_m, block_n] tile of one expert's rows times a transposed weight, whose rows are summed; out [S, N].

    With a u, the sum goes on over K2 more columns of a, with the rows of u. W_DECODE, U_DECODE: None for numbers, or
    the decoder of blocks in planes, of which the first stride alone counts.
    Grid: an upper bound on M tiles, times N tiles, N fastest; programs past the last tile leave at once.
    """
    wait()
    launch_dependents()
    E, N, K, K2, w_rows, w_first, width = sizes
    stride_am, stride_ak, stride_we, stride_wk, stride_wn, stride_ue, stride_uk, stride_un = strides
    a_strides = (stride_am, stride_ak)
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    columns = tl.cdiv(N, BLOCK_N)
    expert, first, stop = find_tile(tl.program_id(0) // columns, offsets_ptr, S, E, BLOCK_M, FORM.block_e)
    if expert > E - 1 + FORM.fill:
        return
    column = tl.program_id(0) % columns * BLOCK_N
    p = first + tl.arange(0, BLOCK_M)
    live = p < stop
    n = column + tl.arange(0, BLOCK_N)
    inside = n < N
    slot = p
    if FORM.gather or FORM.scatter:
        slot = tl.load(order_ptr + p, mask=live, other=0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if expert < E:
        row = (slot // divisor if FORM.gather else p).to(tl.int64)
        stack = expert.to(tl.int64)
        a, rows, place = (a_ptr, a_desc), (row, live, inside), (first, expert * w_rows, column, w_first, width)
        w, w_strides = (w_ptr + stack * stride_we, w_desc), (stride_wk, stride_wn)
        acc = _plus_product(acc, a, a_strides, w, w_strides, rows, place, K, 0, W_DECODE, FORM)
        if u_ptr is not None:
            u, u_strides = (u_ptr + stack * stride_ue, u_desc), (stride_uk, stride_un)
            acc = _plus_product(acc, a, a_strides, u, u_strides, rows, place, K2, K, U_DECODE, FORM)
    to = (slot if FORM.scatter else p).to(tl.int64)
    out_ptrs = out_ptr + to[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _numbers_kernel(
    w_ptr, out_ptr, matrix_bytes, rows, first, columns, width, DECODE: tl.constexpr, ROWS: tl.constexpr
):
    """out [E, rows, columns]: columns ``first`` and on of matrices in planes. Grid: tiles of rows, experts, strips."""
    wait()
    launch_dependents()
    expert = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * 256
    given = tl.minimum(row, rows - 1)
    found = _decoded(
        w_ptr + expert * matrix_bytes, rows, given, first + column, width, out_ptr.dtype.element_ty, DECODE, 256
    )
    n = column + tl.arange(0, 256)
    out_ptrs = out_ptr + (expert * rows + row)[:, None] * columns + n[None, :]
    tl.store(out_ptrs, found, mask=(row < rows)[:, None] & (n < columns)[None, :])


def _numbers(rows: Rows, first: int, columns: int, width: int, dtype: torch.dtype) -> Tensor:
    """Columns ``first`` and on of matrices, decoded: ``[E, K, columns]``. Numbers are given back as they are."""
    if not rows.format:
        return rows.data
    E, K = rows.data.shape[:2]
    made = torch.empty((E, K, columns), dtype=dtype, device=rows.data.device)
    grid = (ceil_div(K, 16), E, ceil_div(columns, 256))
    numbers = rows.data.stride(0), K, first, columns, width
    options = {"DECODE": decoder_of(rows), "ROWS": 16, "num_warps": 4, "launch_pdl": PDL}
    launch(_numbers_kernel, grid, rows.data, made, *numbers, **options)
    return made


def _experts_of(plan: Plan, experts: slice) -> Plan:
    """The same plan for some experts alone: their rows stay where they are."""
    offsets = plan.offsets[experts.start : experts.stop + 1]
    return Plan(plan.counts[experts], offsets, plan.order, plan.inverse, plan.top_k, trusted=True)


def _weight_descriptor(w: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """A descriptor of a stack ``[E, K, N]`` as one matrix of rows, where its experts lie whole rows apart."""
    E, K, N = w.shape
    if w.stride(0) % max(1, w.stride(1)):
        return None
    pitch = w.stride(0) // w.stride(1)
    matrix = w.as_strided(((E - 1) * pitch + K, N), w.stride()[1:], w.storage_offset())
    return described(matrix, rows, columns)


def transposed_product(
    a: Tensor,
    stacks: tuple[Weight, ...],
    plan: Plan,
    out: Tensor,
    tile: Tile | None = None,
    *,
    gather: bool = False,
    scatter: bool = False,
    fill: bool = False,
    first: int = 0,
    tiles: TokenTiles | None = None,
) -> None:
    """Launch the product of rows of ``a`` with columns ``first`` and on of ``stacks`` into ``out`` ``[S, N]``.

    One stack ``[E, K, N]``, or two: the sum goes over the rows of the first, then of the second. ``first`` is a
    multiple of a strip. ``tiles`` are those of the plan, for products that share them.
    """
    S, E, N = plan.assignments, plan.num_experts, out.shape[1]
    width = stacks[0].shape[2]
    given = [rows_of(stack) for stack in stacks]
    given = [rows if rows.format else Rows(rows.data[:, :, first : first + N]) for rows in given]
    in_blocks = any(rows.format for rows in given)
    if in_blocks and len(given) == 1 and hopper is not None:
        turned = grouped_linear_hopper_transposed
        if turned.takes(a, given[0], out, first):
            if fill:
                out.zero_()
            tiles = tiles or TokenTiles(plan.offsets, S)
            turned.turned_product(
                a, given[0], width, tiles, plan.order, gather=gather, scatter=scatter, out=out, first=first
            )
            return
    if in_blocks and decodes_first(S / E, a.element_size()):
        # Every weight is decoded once, some experts at a time, not once for each tile of rows.
        if fill:
            out.zero_()
        most = max(1, DECODED_BYTES // (sum(rows.data.shape[1] for rows in given) * N * a.element_size()))
        for begin in range(0, E, most):
            experts = slice(begin, min(E, begin + most))
            some = [rows._replace(data=rows.data[experts]) for rows in given]
            numbers = tuple(_numbers(rows, first, N, width, a.dtype) for rows in some)
            transposed_product(a, numbers, _experts_of(plan, experts), out, gather=gather, scatter=scatter)
        return
    tile = tile or transposed_tile(S / E, a.element_size(), a.device, in_blocks)
    w, u = given[0].data, given[-1].data
    K, K2 = w.shape[1], u.shape[1] if len(given) > 1 else 0
    a_desc = w_desc = u_desc = None
    whole = K % tile.k == 0 and K2 % tile.k == 0
    if tile.copy_engine and whole:
        a_desc = None if gather else described(a, tile.m, tile.k)
        if not in_blocks and w.stride() == u.stride():
            w_desc, u_desc = (_weight_descriptor(t, tile.k, tile.n) for t in (w, u))
    if w_desc is None or u_desc is None:
        w_desc = u_desc = None
    blocks = tile.m, tile.n, tile.k, block_of(E + 2)
    launch(
        _transposed_kernel,
        (most_tiles(S, E, tile.m) * ceil_div(N, tile.n),),
        *(a, w, u if K2 else None, a_desc, w_desc, u_desc if K2 else None, plan.offsets, plan.order, out),
        S,
        max(1, S // max(1, a.shape[0])),
        (E, N, K, K2, w.stride(0) // max(1, w.stride(1)), first, width),
        (*a.stride(), *w.stride(), *u.stride()),
        FORM=Form(gather, scatter, fill, whole, *blocks),
        W_DECODE=decoder_of(given[0]),
        U_DECODE=decoder_of(given[-1]),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=PDL,
    )


def grouped_linear_transposed(grad: Tensor, weight: Weight, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    d_x = torch.empty((plan.assignments, weight.shape[2]), dtype=grad.dtype, device=grad.device)
    transposed_product(grad, (weight,), plan, d_x, gather=gather, scatter=scatter, fill=True)
    return d_x
