"""The grouped product on NVIDIA GPUs: one kernel for both products of an expert, any activation in its epilogue."""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse import backends
from moefuse.backends.codes import interleaved
from moefuse.backends.gated import Rows, Weights
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.formats.blocks import DECODERS, STRIP, load_runs
from moefuse.backends.triton.formats.numbers import decode_rows
from moefuse.backends.triton.formats.rows import load_chunks, row_products, x_chunks
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import (
    PDL,
    begins_aligned,
    block_of,
    bytes_between,
    capability,
    ceil_div,
    describe,
    launch,
    launch_dependents,
    unrecordable,
    wait,
)
from moefuse.backends.triton.runtime.tiles import FEW_ROWS, MIXED, Tile, product_tile
from moefuse.quant.arrange import PLANES
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation, Plan, Stacks, Weight

_hopper_error: str | None = None
try:
    from moefuse.backends.triton import grouped_linear_hopper, grouped_linear_hopper_blocks, grouped_linear_hopper_fp8

    hopper: ModuleType | None = grouped_linear_hopper
except ImportError as error:  # Gluon is experimental: another Triton may not have what the kernel is written with
    hopper = None
    _hopper_error = f"this Triton lacks what it is written with ({error})"
    if PDL:
        logging.getLogger("moefuse").warning("moefuse: triton: Hopper's product is off: %s", _hopper_error)


def why_not_hopper(device: torch.device) -> str | None:
    """None where many rows go through the product written for Hopper, or why they do not."""
    if capability(device)[0] != 9:
        return "it needs compute capability 9.x"
    return _hopper_error


@triton.jit
def find_tile(tile, offsets_ptr, S, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """Expert, first and last row of an M tile. Rows without an expert count as expert E; past the end: BLOCK_E."""
    e = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + e, mask=e <= E, other=0)
    stop = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    stop = tl.where(e == E, S, stop)
    tiles = tl.where(e <= E, (stop - start + BLOCK_M - 1) // BLOCK_M, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = e == expert
    first = tl.sum(tl.where(mine, start + (tile - (upto - tiles)) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(mine, stop, 0), 0)


@triton.jit
def _strip(source, strip, K, dtype: tl.constexpr, DECODE: tl.constexpr):
    """The strip of 256 values of a weight's rows, [BLOCK_N, 256]: decoded, or numbers as they are."""
    ptr, rows, row = source
    if DECODE is None:
        at = STRIP * strip + tl.arange(0, STRIP)
        found = tl.load(ptr + (row.to(tl.int64) * rows)[:, None] + at[None, :], mask=at[None, :] < K, other=0.0)
    else:
        matrix = (ptr + tl.zeros([1], tl.int32), rows)
        start = STRIP * strip
        found = decode_rows(load_runs(matrix, row[None, :], start, K, 8, DECODE), start, dtype, DECODE)
    return found


@triton.jit
def block_sums(x_ptrs, stride_xk, live, w, u, K, GATED: tl.constexpr, W_DECODE: tl.constexpr, U_DECODE: tl.constexpr):
    """Products of rows of x, which begin at x_ptrs [BLOCK_M], with rows of blocks in planes, or one of two in numbers.

    w and u: pointer to the expert's matrix, its rows (the stride of rows of numbers), and which of them [BLOCK_N]. The
    transpose is summed: decoded weights are the left side.
    """
    BLOCK_M: tl.constexpr = live.shape[0]
    _, _, row = w
    BLOCK_N: tl.constexpr = row.shape[0]
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for strip in range(0, tl.cdiv(K, STRIP)):
        k = STRIP * strip + tl.arange(0, STRIP)
        # [STRIP, BLOCK_M]
        x = tl.load(x_ptrs[None, :] + k[:, None] * stride_xk, mask=live[None, :] & (k < K)[:, None], other=0.0)
        acc = tl.dot(_strip(w, strip, K, dtype, W_DECODE), x, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(_strip(u, strip, K, dtype, U_DECODE), x, up, input_precision="ieee")
    return acc.T, up.T


@triton.jit
def row_sums(
    x_ptrs,
    stride_xk,
    w,
    u,
    K,
    RUNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROUNDED: tl.constexpr,
    GATED: tl.constexpr,
    W_DECODE: tl.constexpr,
    U_DECODE: tl.constexpr,
):
    """Like `block_sums` for few rows of x, each of which costs as much, without tensor cores. ROUNDED: x in 8 bits.

    CHUNKS: of RUNS runs that K is, which are loaded at once; 0 for as many as there are, one ahead.
    """
    SECOND: tl.constexpr = U_DECODE if GATED else None
    one = tl.zeros([1], tl.int32)
    w_ptr, w_rows, w_row = w
    u_ptr, u_rows, u_row = u
    matrices = ((w_ptr + one, w_rows), (u_ptr + one, u_rows))
    rows = (w_row[None, :], u_row[None, :])
    x = (x_ptrs, stride_xk)
    # The compiler gives what comes later its layout: numbers go to where the weights are, and not the other way round.
    numbers = x_chunks(x, K, RUNS, CHUNKS, W_DECODE)
    loaded = load_chunks(matrices, rows, K, RUNS, CHUNKS, W_DECODE, SECOND)
    return row_products(loaded, numbers, matrices, rows, x, K, RUNS, CHUNKS, ROUNDED, W_DECODE, SECOND)


class Form(NamedTuple):
    """What a grouped product is compiled for, besides its activation and its decoders.

    ``fill``: rows without an expert are written too, as zeros. ``few``: blocks are multiplied row by row of x, which
    is ``rounded`` to 8 bits or not; ``chunks``: 1 where block_k covers K, else 0.
    """

    gather: bool
    scatter: bool
    fill: bool
    gated: bool
    few: bool
    chunks: int
    rounded: bool
    block_m: int
    block_n: int
    block_k: int
    block_e: int


@triton.jit
def _product_tile(
    tensors,
    x_desc,
    place,
    divisor,
    sizes,
    strides,
    epilogue_strides,
    numbers,
    FORM: tl.constexpr,
    ACT: tl.constexpr,
    W_DECODE: tl.constexpr,
    U_DECODE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Rows first to first + BLOCK_M of one expert, columns from ``column``. Rows from stop on are not stored."""
    x_ptr, w_ptr, u_ptr, w_desc, u_desc, w_bias_ptr, u_bias_ptr, order_ptr, out_ptr, z_ptr = tensors
    expert, first, stop, column = place
    E, N, K, w_rows, u_first = sizes
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, w_step, stride_ue, stride_un, stride_uk, u_step = strides
    stride_be, stride_bn, stride_zn, z_second = epilogue_strides
    GATED: tl.constexpr = FORM.gated
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    p = first + tl.arange(0, BLOCK_M)
    live = p < stop
    s = tl.load(order_ptr + p, mask=live, other=0)
    n = column + tl.arange(0, BLOCK_N)
    inside = n < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if expert < E:
        stack = expert.to(tl.int64)
        row = (s // divisor if FORM.gather else p).to(tl.int64)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        at_row = expert * w_rows + column
        if W_DECODE is not None or U_DECODE is not None:
            # the last rows of w again instead of what lies past the end
            last = tl.minimum(n, N - 1)
            w = (w_ptr + stack * stride_we, stride_wn, last if W_DECODE is None else stride_wk + last * w_step)
            u = (u_ptr + stack * stride_ue, stride_un, last if U_DECODE is None else stride_uk + last * u_step)
            x_rows = x_ptr + row * stride_xm
            if FORM.few:
                RUNS: tl.constexpr = BLOCK_K // 32
                acc, up = row_sums(
                    x_rows, stride_xk, w, u, K, RUNS, FORM.chunks, FORM.rounded, GATED, W_DECODE, U_DECODE
                )
            else:
                acc, up = block_sums(x_rows, stride_xk, live, w, u, K, GATED, W_DECODE, U_DECODE)
        else:
            k = tl.arange(0, BLOCK_K)
            x_ptrs = x_ptr + row[:, None] * stride_xm + k[None, :] * stride_xk
            w_ptrs = w_ptr + stack * stride_we + n.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
            u_ptrs = u_ptr + stack * stride_ue + n.to(tl.int64)[None, :] * stride_un + k[:, None] * stride_uk
            for start in range(0, K, BLOCK_K):
                left = K - start
                # [BLOCK_M, BLOCK_K]
                if x_desc is not None:
                    x = x_desc.load([first, start])
                else:
                    x = tl.load(x_ptrs, mask=live[:, None] & (k < left)[None, :], other=0.0)
                    x_ptrs += BLOCK_K * stride_xk
                # [BLOCK_K, BLOCK_N]
                if w_desc is not None:
                    w = w_desc.load([at_row, start]).T
                else:
                    w = tl.load(w_ptrs, mask=(k < left)[:, None] & inside[None, :], other=0.0)
                    w_ptrs += BLOCK_K * stride_wk
                acc = tl.dot(x, w, acc, input_precision="ieee")
                if GATED:
                    if w_desc is not None:
                        u = u_desc.load([at_row + u_first, start]).T
                    else:
                        u = tl.load(u_ptrs, mask=(k < left)[:, None] & inside[None, :], other=0.0)
                        u_ptrs += BLOCK_K * stride_uk
                    up = tl.dot(x, u, up, input_precision="ieee")
        if w_bias_ptr is not None:
            at = stack * stride_be + n * stride_bn
            acc += tl.load(w_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(u_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if z_ptr is not None:
        z_ptrs = z_ptr + p.to(tl.int64)[:, None] * (N * (1 + GATED)) + n[None, :] * stride_zn
        tl.store(z_ptrs, acc.to(z_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])
        if GATED:
            tl.store(z_ptrs + z_second, up.to(z_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])
    if ACT is not None:
        acc, _, _ = ACT(acc, up, numbers, GATED, out_ptr.dtype.element_ty == tl.float32)
    to = (s if FORM.scatter else p).to(tl.int64)
    out_ptrs = out_ptr + to[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["S", "divisor"])
def _grouped_kernel(
    x_ptr,
    w_ptr,
    u_ptr,
    w_desc,
    u_desc,
    w_bias_ptr,
    u_bias_ptr,
    order_ptr,
    out_ptr,
    z_ptr,
    x_desc,
    half_desc,
    offsets_ptr,
    S,
    divisor,
    sizes,
    strides,
    epilogue_strides,
    numbers,
    FORM: tl.constexpr,
    ACT: tl.constexpr,
    W_DECODE: tl.constexpr,
    U_DECODE: tl.constexpr,
):
    """A [block_m, block_n] tile of one expert's product. w holds gate (or only) rows, u up rows when gated.

    ``sizes``: E, N, K, the rows of w from expert to expert, and from gate rows to up rows in their descriptor.
    ``strides``: of x, then four of w and of u, see `Rows.strides`. ``epilogue_strides``: of the biases, and of z from
    column to column and from gate columns to up columns.
    W_DECODE, U_DECODE: None for numbers, or the decoder of the blocks that w and u point to.

    From 128 rows on an expert's last tile is half as high where that is enough. Pre-activations go to z where it is
    given. Descriptors bring whole tiles through the copy engine: rows past an expert's end are then its neighbour's,
    and never stored.
    Grid: an upper bound on M tiles, times N tiles, N fastest; programs past the last tile leave at once.
    """
    wait()
    launch_dependents()
    E, N, _, _, _ = sizes
    BLOCK_M: tl.constexpr = FORM.block_m
    BLOCK_N: tl.constexpr = FORM.block_n
    columns = tl.cdiv(N, BLOCK_N)
    expert, first, stop = find_tile(tl.program_id(0) // columns, offsets_ptr, S, E, BLOCK_M, FORM.block_e)
    if expert > E - 1 + FORM.fill:
        return
    tensors = (x_ptr, w_ptr, u_ptr, w_desc, u_desc, w_bias_ptr, u_bias_ptr, order_ptr, out_ptr, z_ptr)
    place = (expert, first, stop, (tl.program_id(0) % columns) * BLOCK_N)
    known = (divisor, sizes, strides, epilogue_strides, numbers)
    if BLOCK_M >= 128 and stop - first <= BLOCK_M // 2:
        _product_tile(tensors, half_desc, place, *known, FORM, ACT, W_DECODE, U_DECODE, BLOCK_M // 2)
    else:
        _product_tile(tensors, x_desc, place, *known, FORM, ACT, W_DECODE, U_DECODE, BLOCK_M)


def most_tiles(S: int, E: int, BLOCK_M: int) -> int:
    """No plan of S assignments to E experts has more M tiles, those without an expert counted."""
    return min(S, S // BLOCK_M + E + 1)


def rows_of(weight: Weight) -> Rows:
    """Blocks in planes, every matrix where words of 16 bytes begin; what lies otherwise is moved at every call."""
    if not isinstance(weight, QuantTensor):
        return Rows(weight)
    if weight.arrangement != PLANES:
        unrecordable("blocks are rearranged")
        _say_rearranged(weight.format)
        weight = weight.arranged(PLANES)
    data = weight.blocks
    if not begins_aligned(data) or data.stride(0) % 16:
        unrecordable("blocks are moved")
        E, N, length = data.shape
        pitch = ceil_div(N * length, 16) * 16
        moved = torch.empty(E * pitch, dtype=torch.uint8, device=data.device)
        data = moved.as_strided(data.shape, (pitch, length, 1)).copy_(data)
    return Rows(data, weight.format, planes=True, exact=weight.exact)


@functools.cache
def _say_rearranged(format: str) -> None:
    logging.getLogger("moefuse").warning(
        "moefuse: triton: %s blocks in the order of a file are rearranged at every call; QuantTensor.to(device) does "
        "it once",
        format,
    )


def decoder_of(rows: Rows) -> Any:
    """What kernels decode it with, None for numbers."""
    return DECODERS[rows.format] if rows.format else None


def may_round(*weights: Rows) -> bool:
    """Whether activations are rounded to 8 bits: some of these are blocks, and none of them is to be exact."""
    return any(rows.format for rows in weights) and not any(rows.exact for rows in weights)


def up_weights(stacks: Stacks, gated: bool) -> Weights:
    """The weights of the up product: gate rows and up rows of equal number, whatever the layout."""
    found = Weights.of_gate_up(stacks, gated, rows_of)
    if bool(found.w.format) == bool(found.u.format):
        return found
    w, u = (rows if rows.format else Rows(rows.data.contiguous()) for rows in (found.w, found.u))
    return found._replace(w=w, u=u)  # beside blocks, numbers must lie together along K


def z_columns(I: int, gated: bool, layout: str) -> tuple[int, int]:
    """How far apart the gate columns of a pre-activation are, and how far its up columns are from them."""
    return (2, 1) if gated and interleaved(layout) else (1, I)


def described(t: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """A descriptor for [rows, columns] tiles of a matrix, where the copy engine can read it."""
    if t.stride(1) != 1 or (t.stride(0) * t.element_size()) % 16 or not begins_aligned(t):
        return None
    return describe(TensorDescriptor, t, list(t.shape), list(t.stride()), [rows, columns])


def weight_descriptors(
    w: Tensor, u: Tensor, rows: int, columns: int
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, int]:
    """Descriptors of stacks ``[E, N, K]`` as matrices of rows, and how far up rows are from gate rows in theirs.

    One matrix serves both where an expert's up rows lie behind its gate rows; otherwise each has its own.
    """
    E, N, K = w.shape
    if w.stride(1) != K or u.stride() != w.stride() or w.stride(0) % K:
        return None, None, 0
    pitch = w.stride(0) // K
    distance, odd = divmod(bytes_between(w, u), K * w.element_size())
    shared = odd == 0 and 0 <= distance <= pitch - N
    behind = distance if shared else 0
    matrices = (
        t.as_strided(((E - 1) * pitch + behind + N, K), (K, 1), t.storage_offset()) for t in (w, u)[: 2 - shared]
    )
    found = [described(matrix, rows, columns) for matrix in matrices]
    if None in found:
        return None, None, 0
    return found[0], found[-1], behind


def product(
    x: Tensor,
    weights: Weights,
    plan: Plan,
    activation: Activation | None,
    out: Tensor,
    tile: Tile,
    *,
    gather: bool = False,
    scatter: bool = False,
    fill: bool = False,
    z: Tensor | None = None,
    tiles: TokenTiles | None = None,
) -> None:
    """Launch the grouped product into ``out`` ``[S, N]``, and what comes before the activation into ``z``.

    ``tiles`` are those of the plan, for products that share them.
    """
    S, N = out.shape
    E, K = plan.num_experts, x.shape[1]
    w_rows, u_rows, bias, up_bias, layout = weights
    w, u, in_blocks = w_rows.data, u_rows.data, bool(w_rows.format or u_rows.format)
    gated = activation is not None and activation.gated
    # Of a z that is kept, and of what was made of it, nobody reads rows without an expert.
    keeps = z is not None or (backends.invariant() and activation is not None)  # one path, whether z is kept or not
    plain = bias is None and (gated or not keeps) and (z is None or not scatter)
    if backends.invariant() and not (x.is_contiguous() and begins_aligned(x)):
        unrecordable("rows are moved")
        x = x.clone(memory_format=torch.contiguous_format)  # where rows lie must not choose the path
    if plain and hopper is not None:
        in_fp8 = not scatter and grouped_linear_hopper_fp8.takes(x, w_rows, u_rows, out, gated)
        if in_fp8 or hopper.takes(x, w_rows, u_rows, out, gated):
            if fill and z is None:
                out.zero_()
            tiles = tiles or TokenTiles(plan.offsets, S)
            given = x, w_rows, u_rows, tiles, plan.order
            if in_fp8:
                grouped_linear_hopper_fp8.swap_ab_fp8(*given, gather=gather, activation=activation, out=out, z=z)
                return
            run = hopper.swap_ab_product
            if w_rows.format and not hopper.decodes_ahead(tiles.load, K, w_rows.format):
                run = grouped_linear_hopper_blocks.swap_ab_blocks
            run(*given, gather=gather, activation=activation, out=out, scatter=scatter, z=z)
            return
    x_desc = half_desc = w_desc = u_desc = None
    u_first = 0
    if tile.copy_engine and not in_blocks and K % tile.k == 0:
        if not gather:
            x_desc, half_desc = (described(x, rows, tile.k) for rows in (tile.m, tile.m // 2))
        w_desc, u_desc, u_first = weight_descriptors(w, u, tile.n, tile.k)
    tensors = x, w, u, w_desc, u_desc, bias, up_bias, plan.order, out, z, x_desc, half_desc, plan.offsets
    sizes = E, N, K, w.stride(0) // max(1, w.stride(1)), u_first
    bias_strides = (0, 0) if bias is None else bias.stride()
    if in_blocks and not (w_rows.format and u_rows.format):
        tile = MIXED
    blocks = (tile.m, tile.n, tile.k, block_of(E + 2))
    few = bool(w_rows.format and u_rows.format) and tile.m <= FEW_ROWS
    rounded = few and may_round(w_rows, u_rows)
    launch(
        _grouped_kernel,
        (most_tiles(S, E, tile.m) * ceil_div(N, tile.n),),
        *tensors,
        S,
        max(1, S // max(1, x.shape[0])),
        sizes,
        (*x.stride(), *w_rows.strides, *u_rows.strides),
        (*bias_strides, *z_columns(N, gated, layout)),
        activation_numbers(activation),
        FORM=Form(gather, scatter, fill, gated, few, int(tile.k >= K), rounded, *blocks),
        ACT=None if activation is None else ACTIVATIONS[activation.kind],
        W_DECODE=decoder_of(weights.w),
        U_DECODE=decoder_of(weights.u),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=PDL,
    )


def grouped_linear(x: Tensor, weight: Weight, bias: Tensor | None, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    S, weights = plan.assignments, Weights.of(weight, bias, rows_of)
    out = torch.empty((S, weight.shape[1]), dtype=x.dtype, device=x.device)
    tile = product_tile(S / weight.shape[0], x.element_size(), False, x.device, weights.w.format)
    product(x, weights, plan, None, out, tile, gather=gather, scatter=scatter, fill=True)
    return out
