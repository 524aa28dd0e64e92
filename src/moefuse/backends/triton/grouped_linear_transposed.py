"""Products with a transposed weight on NVIDIA GPUs: the gradient of a grouped product's input, numbers or blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse.backends.gated import Rows
from moefuse.backends.triton.formats.blocks import STRIP, decode_runs
from moefuse.backends.triton.grouped_linear import decoder_of, described, find_tile, most_tiles, rows_of
from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tiles import Tile, transposed_tile
from moefuse.types import Plan, Weight


@triton.jit
def _decoded(w_ptr, stride_wk, start, K, column, width, DECODE: tl.constexpr, WHOLE: tl.constexpr, shape: tl.constexpr):
    """Rows ``start`` and on of blocks, ``width`` values each, from ``column`` on: [rows, columns] float32, zeros past
    the last row. WHOLE: there is none such."""
    ROWS: tl.constexpr = shape[0]
    COLUMNS: tl.constexpr = shape[1]
    PARTS: tl.constexpr = COLUMNS // 32
    r = tl.arange(0, ROWS * PARTS)
    row = start + r // PARTS
    strip = column // STRIP * STRIP
    row_ptrs = w_ptr + tl.minimum(row, K - 1).to(tl.int64) * stride_wk
    found = decode_runs(row_ptrs, strip, (column - strip) // 32 + r % PARTS, width, DECODE)
    if not WHOLE:
        found = tl.where((row < K)[:, None], found, 0.0)
    return tl.reshape(found, [ROWS, COLUMNS])


@triton.jit
def _plus_product(
    acc,
    a,
    a_strides,
    w,
    w_strides,
    rows,
    place,
    K,
    a_first,
    DECODE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc + a[row, a_first : a_first + K] @ w[0 : K, columns].

    ``a`` and ``w`` are pointer and descriptor or None; that of w is at the expert's first row, ``at_row``. With DECODE
    w points to blocks, whose rows have ``width`` values and in which the first column is ``w_first``.
    """
    a_ptr, a_desc = a
    w_ptr, w_desc = w
    stride_am, stride_ak = a_strides
    stride_wk, stride_wn = w_strides
    row, live, inside = rows
    first, at_row, column, w_first, width = place
    BLOCK_N: tl.constexpr = acc.shape[1]
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
            shape: tl.constexpr = (BLOCK_K, BLOCK_N)
            right_tile = _decoded(w_ptr, stride_wk, start, K, w_first + column, width, DECODE, WHOLE, shape)
        elif w_desc is not None:
            right_tile = w_desc.load([at_row + start, column])
        else:
            right_tile = tl.load(w_ptrs, mask=(k < left)[:, None] & inside[None, :], other=0.0)
            w_ptrs += BLOCK_K * stride_wk
        acc = tl.dot(left_tile, right_tile.to(left_tile.dtype), acc, input_precision="ieee")
    return acc


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
    GATHER: tl.constexpr,
    SCATTER: tl.constexpr,
    FILL: tl.constexpr,
    W_DECODE: tl.constexpr,
    U_DECODE: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A [BLOCK_M, BLOCK_N] tile of one expert's rows times a transposed weight, whose rows are summed; out [S, N].

    With a u, the sum goes on over K2 more columns of a, with the rows of u. W_DECODE, U_DECODE: None for numbers, or
    the decoder of blocks, whose strides are in bytes. FILL: rows without an expert are written too, as zeros.
    Grid: an upper bound on M tiles, times N tiles, N fastest; programs past the last tile leave at once.
    """
    wait()
    launch_dependents()
    E, N, K, K2, w_rows, w_first, width = sizes
    stride_am, stride_ak, stride_we, stride_wk, stride_wn, stride_ue, stride_uk, stride_un = strides
    a_strides = (stride_am, stride_ak)
    columns = tl.cdiv(N, BLOCK_N)
    expert, first, stop = find_tile(tl.program_id(0) // columns, offsets_ptr, S, E, BLOCK_M, BLOCK_E)
    if expert > E - 1 + FILL:
        return
    column = tl.program_id(0) % columns * BLOCK_N
    p = first + tl.arange(0, BLOCK_M)
    live = p < stop
    n = column + tl.arange(0, BLOCK_N)
    inside = n < N
    slot = p
    if GATHER or SCATTER:
        slot = tl.load(order_ptr + p, mask=live, other=0)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if expert < E:
        row = (slot // divisor if GATHER else p).to(tl.int64)
        stack = expert.to(tl.int64)
        a, rows, place = (a_ptr, a_desc), (row, live, inside), (first, expert * w_rows, column, w_first, width)
        w, w_strides = (w_ptr + stack * stride_we, w_desc), (stride_wk, stride_wn)
        acc = _plus_product(acc, a, a_strides, w, w_strides, rows, place, K, 0, W_DECODE, WHOLE, BLOCK_K)
        if u_ptr is not None:
            u, u_strides = (u_ptr + stack * stride_ue, u_desc), (stride_uk, stride_un)
            acc = _plus_product(acc, a, a_strides, u, u_strides, rows, place, K2, K, U_DECODE, WHOLE, BLOCK_K)
    to = (slot if SCATTER else p).to(tl.int64)
    out_ptrs = out_ptr + to[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


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
) -> None:
    """Launch the product of rows of ``a`` with columns ``first`` and on of ``stacks`` into ``out`` ``[S, N]``.

    One stack ``[E, K, N]``, or two: the sum goes over the rows of the first, then of the second. ``first`` is a
    multiple of 256, which is whole blocks of every format.
    """
    S, E, N = plan.assignments, plan.num_experts, out.shape[1]
    width = stacks[0].shape[2]
    given = [rows_of(stack) for stack in stacks]
    given = [rows if rows.format else Rows(rows.data[:, :, first : first + N]) for rows in given]
    in_blocks = any(rows.format for rows in given)
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
    launch(
        _transposed_kernel,
        (most_tiles(S, E, tile.m) * ceil_div(N, tile.n),),
        *(a, w, u if K2 else None, a_desc, w_desc, u_desc if K2 else None, plan.offsets, plan.order, out),
        S,
        max(1, S // max(1, a.shape[0])),
        (E, N, K, K2, w.stride(0) // max(1, w.stride(1)), first, width),
        (*a.stride(), *w.stride(), *u.stride()),
        GATHER=gather,
        SCATTER=scatter,
        FILL=fill,
        W_DECODE=decoder_of(given[0]),
        U_DECODE=decoder_of(given[-1]),
        WHOLE=whole,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        BLOCK_E=block_of(E + 2),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=PDL,
    )


def grouped_linear_transposed(grad: Tensor, weight: Weight, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    d_x = torch.empty((plan.assignments, weight.shape[2]), dtype=grad.dtype, device=grad.device)
    transposed_product(grad, (weight,), plan, d_x, gather=gather, scatter=scatter, fill=True)
    return d_x
