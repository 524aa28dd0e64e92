"""The grouped product on NVIDIA GPUs: one kernel for both products of an expert, any activation in its epilogue."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse.backends.codes import interleaved
from moefuse.backends.gated import Rows, Weights
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.formats.blocks import DECODERS, RUNS, STRIP, decode_runs, q4_k_group, q4_k_scales, quarters
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.runtime.launch import (
    INTERPRETED,
    PDL,
    begins_aligned,
    block_of,
    capability,
    ceil_div,
    launch,
    launch_dependents,
    unrecordable,
    wait,
)
from moefuse.backends.triton.runtime.tiles import IN_WORDS, Tile, product_tile
from moefuse.types import Activation, Plan, Stacks, Weight

_hopper_error: str | None = None
try:
    from moefuse.backends.triton import grouped_linear_hopper

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
def block_sums(
    x_ptrs, w_rows, u_rows, live, K, stride_xk, W_DECODE: tl.constexpr, U_DECODE: tl.constexpr, GATED: tl.constexpr
):
    """Products of x [32, BLOCK_M] and on with rows [BLOCK_N] of GGUF blocks, or with one of the two in numbers.

    The transpose is summed: decoded weights are the left side, which tensor cores take from registers.
    """
    BLOCK_M: tl.constexpr = live.shape[0]
    BLOCK_N: tl.constexpr = w_rows.shape[0]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, STRIP):
        for i in tl.static_range(RUNS):
            run = tl.full([BLOCK_N], i, tl.int32)
            # [32, BLOCK_M]
            x = tl.load(x_ptrs, mask=live[None, :] & (start + 32 * i < K), other=0.0)
            x_ptrs += 32 * stride_xk
            # [BLOCK_N, 32]
            w = decode_runs(w_rows, start, run, K, W_DECODE).to(x.dtype)
            acc = tl.dot(w, x, acc, input_precision="ieee")
            if GATED:
                u = decode_runs(u_rows, start, run, K, U_DECODE).to(x.dtype)
                up = tl.dot(u, x, up, input_precision="ieee")
    return acc.T, up.T


@triton.jit
def _q4_k_bytes(ptrs, desc, at_row, block):
    """The 128 bytes of a block of each row, in four: through the copy engine, or 32 at a time from ``ptrs``."""
    if desc is not None:
        found = quarters(desc.load([at_row, 144 * block + 16]))
    else:
        ptrs += 144 * block + 16
        found = tl.load(ptrs), tl.load(ptrs + 32), tl.load(ptrs + 64), tl.load(ptrs + 96)
    return found


@triton.jit
def q4_k_sums(x_ptrs, w, u, live, n, at_row, K, stride_xk, GATED: tl.constexpr, ASM_BYTES: tl.constexpr):
    """Like `block_sums`, for 16-byte aligned rows ``n`` of Q4_K: a block at a time, in loads of 16 bytes.

    w and u are each an expert's pointer, the stride of its rows, and a descriptor or None in which they begin at
    ``at_row``; those of u a number of rows further.
    """
    BLOCK_M: tl.constexpr = live.shape[0]
    BLOCK_N: tl.constexpr = n.shape[0]
    w_ptr, stride_wn, w_desc = w
    u_ptr, stride_un, u_desc, u_first = u
    l = tl.arange(0, 32)
    w_ptr = tl.multiple_of(w_ptr, 16)
    u_ptr = tl.multiple_of(u_ptr, 16)
    word = tl.arange(0, 4)[None, :]
    w_heads = w_ptr.to(tl.pointer_type(tl.uint32)) + (n * (stride_wn // 4))[:, None] + word
    u_heads = u_ptr.to(tl.pointer_type(tl.uint32)) + (n * (stride_un // 4))[:, None] + word
    w_ptrs = w_ptr + n[:, None] * stride_wn + l[None, :]
    u_ptrs = u_ptr + n[:, None] * stride_un + l[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(0, K // 256):
        w_head = q4_k_scales(tl.load(w_heads + 36 * block))
        w_bytes = _q4_k_bytes(w_ptrs, w_desc, at_row, block)
        if GATED:
            u_head = q4_k_scales(tl.load(u_heads + 36 * block))
            u_bytes = _q4_k_bytes(u_ptrs, u_desc, at_row + u_first, block)
        for i in tl.static_range(4):
            # [32, BLOCK_M]
            x = tl.load(x_ptrs, mask=live[None, :], other=0.0)
            y = tl.load(x_ptrs + 32 * stride_xk, mask=live[None, :], other=0.0)
            x_ptrs += 64 * stride_xk
            # [BLOCK_N, 32]
            a, b = q4_k_group(w_bytes[i], w_head, i, x.dtype, ASM_BYTES)
            acc = tl.dot(a, x, acc, input_precision="ieee")
            acc = tl.dot(b, y, acc, input_precision="ieee")
            if GATED:
                a, b = q4_k_group(u_bytes[i], u_head, i, x.dtype, ASM_BYTES)
                up = tl.dot(a, x, up, input_precision="ieee")
                up = tl.dot(b, y, up, input_precision="ieee")
    return acc.T, up.T


class Form(NamedTuple):
    """What a grouped product is compiled for, besides its activation and its decoders.

    ``fill``: rows without an expert are written too, as zeros. ``words``: Q4_K that `q4_k_sums` takes, ``asm_bytes``
    at a time by instructions of the card.
    """

    gather: bool
    scatter: bool
    fill: bool
    gated: bool
    words: bool
    asm_bytes: int
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
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_ue, stride_un, stride_uk = strides
    stride_be, stride_bn, stride_zn, z_second = epilogue_strides
    GATED: tl.constexpr = FORM.gated
    ASM_BYTES: tl.constexpr = FORM.asm_bytes
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
        # the transpose of x, and the last rows of w again instead of what lies past the end
        columns = x_ptr + row[None, :] * stride_xm + tl.arange(0, 32)[:, None] * stride_xk
        last = tl.minimum(n, N - 1)
        if FORM.words:
            w = (w_ptr + stack * stride_we, stride_wn, w_desc)
            u = (u_ptr + stack * stride_ue, stride_un, u_desc, u_first)
            acc, up = q4_k_sums(columns, w, u, live, last, at_row, K, stride_xk, GATED, ASM_BYTES)
        elif W_DECODE is not None or U_DECODE is not None:
            w_ptrs = w_ptr + stack * stride_we + last.to(tl.int64) * stride_wn
            u_ptrs = u_ptr + stack * stride_ue + last.to(tl.int64) * stride_un
            acc, up = block_sums(columns, w_ptrs, u_ptrs, live, K, stride_xk, W_DECODE, U_DECODE, GATED)
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
    ``strides``: of x, w and u. ``epilogue_strides``: of the biases, and of z from column to column and from gate
    columns to up columns.
    W_DECODE, U_DECODE: None for numbers, or the decoder of the blocks that w and u point to, with strides in bytes.

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
    """Decoders read up to sixteen bytes at a time; blocks that begin elsewhere, which no file has, are moved."""
    rows = Rows.of(weight)
    return Rows(rows.data.clone(), rows.format) if rows.format and not begins_aligned(rows.data) else rows


def decoder_of(rows: Rows) -> Any:
    """What kernels decode it with, None for numbers."""
    return DECODERS[rows.format] if rows.format else None


def up_weights(stacks: Stacks, gated: bool) -> Weights:
    """The weights of the up product: gate rows and up rows as views of equal shape, whatever the layout."""
    found = Weights.of_gate_up(stacks, gated, rows_of)
    if bool(found.w.format) == bool(found.u.format):
        return found
    w, u = (Rows(rows.data.contiguous(), rows.format) for rows in (found.w, found.u))
    return found._replace(w=w, u=u)  # beside blocks, numbers must lie together along K


def z_columns(I: int, gated: bool, layout: str) -> tuple[int, int]:
    """How far apart the gate columns of a pre-activation are, and how far its up columns are from them."""
    return (2, 1) if gated and interleaved(layout) else (1, I)


def in_words(rows: Rows) -> bool:
    """Whether the blocks are of the format with kernels of its own, and lie so that these can read 16 bytes at once."""
    return rows.format == IN_WORDS and begins_aligned(rows.data) and rows.data.stride(0) % 16 == 0


def asm_bytes(x: Tensor, tile: Tile) -> int:
    """How many bytes of blocks are taken apart at a time by instructions of the card; 0: without such.

    A thread has two bytes side by side where four warps join in one product, four otherwise.
    """
    if INTERPRETED or x.element_size() != 2 or capability(x.device) < (8, 0):
        return 0
    return 2 if tile.warps >= 4 and tile.n >= 64 else 4


def described(t: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """A descriptor for [rows, columns] tiles of a matrix, where the copy engine can read it."""
    unrecordable("a descriptor holds an address")
    if t.stride(1) != 1 or (t.stride(0) * t.element_size()) % 16 or t.data_ptr() % 16:
        return None
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])


def weight_descriptors(
    w: Tensor, u: Tensor, rows: int, columns: int
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, int]:
    """Descriptors of stacks ``[E, N, K]`` as matrices of rows, and how far up rows are from gate rows in theirs.

    One matrix serves both where an expert's up rows lie behind its gate rows; otherwise each has its own.
    """
    unrecordable("a descriptor holds an address")
    E, N, K = w.shape
    if w.stride(1) != K or u.stride() != w.stride() or w.stride(0) % K:
        return None, None, 0
    pitch = w.stride(0) // K
    distance, odd = divmod(u.data_ptr() - w.data_ptr(), K * w.element_size())
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
    (w, w_format), (u, u_format), bias, up_bias, layout = weights
    gated = activation is not None and activation.gated
    words = in_words(weights.w) and in_words(weights.u)
    plain = not (scatter or fill) and bias is None and z is None and (words or not (w_format or u_format))
    if plain and hopper is not None and hopper.takes(x, w, u, out, gated):
        tiles = tiles or TokenTiles(plan.offsets, S)
        hopper.swap_ab_product(x, w, u, tiles, plan.order, gather=gather, activation=activation, out=out)
        return
    x_desc = half_desc = w_desc = u_desc = None
    u_first = 0
    if tile.copy_engine and (words or (K % tile.k == 0 and not w_format and not u_format)):
        if not gather and not words:
            x_desc, half_desc = (described(x, rows, tile.k) for rows in (tile.m, tile.m // 2))
        w_desc, u_desc, u_first = weight_descriptors(w, u, tile.n, 128 if words else tile.k)
    tensors = x, w, u, w_desc, u_desc, bias, up_bias, plan.order, out, z, x_desc, half_desc, plan.offsets
    sizes = E, N, K, w.stride(0) // max(1, w.stride(1)), u_first
    bias_strides = (0, 0) if bias is None else bias.stride()
    packed, blocks = asm_bytes(x, tile) if words else 0, (tile.m, tile.n, tile.k, block_of(E + 2))
    launch(
        _grouped_kernel,
        (most_tiles(S, E, tile.m) * ceil_div(N, tile.n),),
        *tensors,
        S,
        max(1, S // max(1, x.shape[0])),
        sizes,
        (*x.stride(), *w.stride(), *u.stride()),
        (*bias_strides, *z_columns(N, gated, layout)),
        activation_numbers(activation),
        FORM=Form(gather, scatter, fill, gated, words, packed, *blocks),
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
