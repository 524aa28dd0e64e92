"""The grouped product on NVIDIA GPUs: one kernel for both products of an expert, any activation in its epilogue."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse.backends.codes import interleaved
from moefuse.backends.gated import gate_and_up
from moefuse.backends.triton.formats.blocks import RUNS, STRIP, decode_runs, q4_k_group, q4_k_scales, quarters
from moefuse.backends.triton.glu import activate, activation_numbers
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
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation

_hopper_error: str | None = None
try:
    from moefuse.backends.triton import grouped_linear_hopper as hopper
except ImportError as error:  # Gluon is experimental: another Triton may not have what the kernel is written with
    hopper, _hopper_error = None, f"this Triton lacks what it is written with ({error})"  # type: ignore[assignment]
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
def _block_sums(
    x_ptr, w_ptr, u_ptr, row, live, stack, n, K, stride_xm, stride_xk, stride_we, stride_wn, stride_ue, stride_un,
    W_FORMAT: tl.constexpr, U_FORMAT: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Products with weights in GGUF blocks, or with one of the two in numbers; strides in bytes, or numbers.

    The transpose is summed: decoded weights are the left side, which tensor cores take from registers.
    """
    l = tl.arange(0, 32)
    x_ptrs = x_ptr + row[None, :] * stride_xm + l[:, None] * stride_xk
    w_rows = w_ptr + stack * stride_we + n.to(tl.int64) * stride_wn
    u_rows = u_ptr + stack * stride_ue + n.to(tl.int64) * stride_un
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, STRIP):
        for i in tl.static_range(RUNS):
            run = tl.full([BLOCK_N], i, tl.int32)
            # [32, BLOCK_M]
            x = tl.load(x_ptrs, mask=live[None, :] & (start + 32 * i < K), other=0.0)
            x_ptrs += 32 * stride_xk
            # [BLOCK_N, 32]
            w = decode_runs(w_rows, start, run, K, W_FORMAT).to(x.dtype)
            acc = tl.dot(w, x, acc, input_precision="ieee")
            if GATED:
                u = decode_runs(u_rows, start, run, K, U_FORMAT).to(x.dtype)
                up = tl.dot(u, x, up, input_precision="ieee")
    return acc.T, up.T


@triton.jit
def _q4_k_bytes(ptrs, desc, at_row, block, TMA: tl.constexpr):
    """The 128 bytes of a block of each row, in four: through the copy engine, or 32 at a time from ``ptrs``."""
    if TMA:
        found = quarters(desc.load([at_row, 144 * block + 16]))
    else:
        ptrs += 144 * block + 16
        found = tl.load(ptrs), tl.load(ptrs + 32), tl.load(ptrs + 64), tl.load(ptrs + 96)
    return found


@triton.jit
def _q4_k_sums(
    x_ptr, w_ptr, u_ptr, w_desc, u_desc, row, live, stack, n, at_row, u_first, K, stride_xm, stride_xk, stride_we,
    stride_wn, stride_ue, stride_un,
    GATED: tl.constexpr, W_TMA: tl.constexpr, ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Like `_block_sums`, for 16-byte aligned rows of Q4_K: a block at a time, in loads of 16 bytes."""
    l = tl.arange(0, 32)
    x_ptrs = x_ptr + row[None, :] * stride_xm + l[:, None] * stride_xk
    w_ptr = tl.multiple_of(w_ptr + stack * stride_we, 16)
    u_ptr = tl.multiple_of(u_ptr + stack * stride_ue, 16)
    word = tl.arange(0, 4)[None, :]
    w_heads = w_ptr.to(tl.pointer_type(tl.uint32)) + (n * (stride_wn // 4))[:, None] + word
    u_heads = u_ptr.to(tl.pointer_type(tl.uint32)) + (n * (stride_un // 4))[:, None] + word
    w_ptrs = w_ptr + n[:, None] * stride_wn + l[None, :]
    u_ptrs = u_ptr + n[:, None] * stride_un + l[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block in range(0, K // 256):
        w_head = q4_k_scales(tl.load(w_heads + 36 * block))
        w = _q4_k_bytes(w_ptrs, w_desc, at_row, block, W_TMA)
        if GATED:
            u_head = q4_k_scales(tl.load(u_heads + 36 * block))
            u = _q4_k_bytes(u_ptrs, u_desc, at_row + u_first, block, W_TMA)
        for i in tl.static_range(4):
            # [32, BLOCK_M]
            x = tl.load(x_ptrs, mask=live[None, :], other=0.0)
            y = tl.load(x_ptrs + 32 * stride_xk, mask=live[None, :], other=0.0)
            x_ptrs += 64 * stride_xk
            # [BLOCK_N, 32]
            a, b = q4_k_group(w[i], w_head, i, x.dtype, ASM)
            acc = tl.dot(a, x, acc, input_precision="ieee")
            acc = tl.dot(b, y, acc, input_precision="ieee")
            if GATED:
                a, b = q4_k_group(u[i], u_head, i, x.dtype, ASM)
                up = tl.dot(a, x, up, input_precision="ieee")
                up = tl.dot(b, y, up, input_precision="ieee")
    return acc.T, up.T


@triton.jit
def _product_tile(
    x_ptr, w_ptr, u_ptr, x_desc, w_desc, u_desc, w_bias_ptr, u_bias_ptr, order_ptr, out_ptr, z_ptr,
    expert, first, stop, column, E, N, K, divisor, w_rows, u_first,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_ue, stride_un, stride_uk, stride_be, stride_bn,
    stride_zn, z_second, alpha, limit,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, X_TMA: tl.constexpr,
    W_TMA: tl.constexpr, W_FORMAT: tl.constexpr, U_FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE: tl.constexpr,
    WORDS: tl.constexpr, ASM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows first to first + BLOCK_M of one expert, columns from ``column``. Rows from stop on are not stored."""
    p = first + tl.arange(0, BLOCK_M)
    live = p < stop
    s = tl.load(order_ptr + p, mask=live, other=0)
    n = column + tl.arange(0, BLOCK_N)
    inside = n < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if expert < E:
        stack = expert.to(tl.int64)
        row = (s // divisor if GATHER else p).to(tl.int64)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if WORDS:
            acc, up = _q4_k_sums(
                x_ptr, w_ptr, u_ptr, w_desc, u_desc, row, live, stack, tl.minimum(n, N - 1), expert * w_rows + column,
                u_first, K, stride_xm, stride_xk, stride_we, stride_wn, stride_ue, stride_un, GATED, W_TMA, ASM,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
        elif (W_FORMAT != "") | (U_FORMAT != ""):
            acc, up = _block_sums(
                x_ptr, w_ptr, u_ptr, row, live, stack, tl.minimum(n, N - 1), K, stride_xm, stride_xk, stride_we,
                stride_wn, stride_ue, stride_un, W_FORMAT, U_FORMAT, GATED, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        else:
            k = tl.arange(0, BLOCK_K)
            x_ptrs = x_ptr + row[:, None] * stride_xm + k[None, :] * stride_xk
            w_ptrs = w_ptr + stack * stride_we + n.to(tl.int64)[None, :] * stride_wn + k[:, None] * stride_wk
            u_ptrs = u_ptr + stack * stride_ue + n.to(tl.int64)[None, :] * stride_un + k[:, None] * stride_uk
            at_row = expert * w_rows + column
            for start in range(0, K, BLOCK_K):
                left = K - start
                # [BLOCK_M, BLOCK_K]
                if X_TMA:
                    x = x_desc.load([first, start])
                else:
                    x = tl.load(x_ptrs, mask=live[:, None] & (k < left)[None, :], other=0.0)
                    x_ptrs += BLOCK_K * stride_xk
                # [BLOCK_K, BLOCK_N]
                if W_TMA:
                    w = w_desc.load([at_row, start]).T
                else:
                    w = tl.load(w_ptrs, mask=(k < left)[:, None] & inside[None, :], other=0.0)
                    w_ptrs += BLOCK_K * stride_wk
                acc = tl.dot(x, w, acc, input_precision="ieee")
                if GATED:
                    if W_TMA:
                        u = u_desc.load([at_row + u_first, start]).T
                    else:
                        u = tl.load(u_ptrs, mask=(k < left)[:, None] & inside[None, :], other=0.0)
                        u_ptrs += BLOCK_K * stride_uk
                    up = tl.dot(x, u, up, input_precision="ieee")
        if HAS_BIAS:
            at = stack * stride_be + n * stride_bn
            acc += tl.load(w_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(u_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SAVE:
        z_ptrs = z_ptr + p.to(tl.int64)[:, None] * (N * (1 + GATED)) + n[None, :] * stride_zn
        tl.store(z_ptrs, acc.to(z_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])
        if GATED:
            tl.store(z_ptrs + z_second, up.to(z_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])
    if KIND != "":
        acc = activate(acc, up, KIND, GATED, alpha, limit, out_ptr.dtype.element_ty == tl.float32)
    to = (s if SCATTER else p).to(tl.int64)
    out_ptrs = out_ptr + to[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["S", "divisor"])
def _grouped_kernel(
    x_ptr, w_ptr, u_ptr, x_desc, half_desc, w_desc, u_desc, w_bias_ptr, u_bias_ptr, offsets_ptr, order_ptr, out_ptr,
    z_ptr, S, E, N, K, divisor, w_rows, u_first,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_ue, stride_un, stride_uk, stride_be, stride_bn,
    stride_zn, z_second, alpha, limit,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, FILL: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    X_TMA: tl.constexpr, W_TMA: tl.constexpr, W_FORMAT: tl.constexpr, U_FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HALVES: tl.constexpr, SAVE: tl.constexpr, WORDS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A [BLOCK_M, BLOCK_N] tile of one expert's product. w holds gate (or only) rows, u up rows when GATED.

    W_FORMAT, U_FORMAT: "" for numbers, or the format of the blocks that w and u point to, with strides in bytes.

    HALVES: an expert's last tile is half as high where that is enough.
    SAVE: pre-activations go to z, gate columns and z_second further up columns, stride_zn apart.
    X_TMA, W_TMA: whole tiles come through the copy engine. Rows past an expert's end are then its neighbour's, and
    never stored.
    Grid: an upper bound on M tiles, times N tiles, N fastest; programs past the last tile leave at once.
    """
    wait(PDL)
    launch_dependents(PDL)
    columns = tl.cdiv(N, BLOCK_N)
    expert, first, stop = find_tile(tl.program_id(0) // columns, offsets_ptr, S, E, BLOCK_M, BLOCK_E)
    if expert > E - 1 + FILL:
        return
    column = (tl.program_id(0) % columns) * BLOCK_N
    if HALVES and stop - first <= BLOCK_M // 2:
        _product_tile(
            x_ptr, w_ptr, u_ptr, half_desc, w_desc, u_desc, w_bias_ptr, u_bias_ptr, order_ptr, out_ptr, z_ptr, expert,
            first, stop, column, E, N, K, divisor, w_rows, u_first, stride_xm, stride_xk, stride_we, stride_wn,
            stride_wk, stride_ue, stride_un, stride_uk, stride_be, stride_bn, stride_zn, z_second, alpha, limit,
            GATHER, SCATTER, KIND, GATED, X_TMA, W_TMA, W_FORMAT, U_FORMAT, HAS_BIAS, SAVE, WORDS, ASM, BLOCK_M // 2,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        _product_tile(
            x_ptr, w_ptr, u_ptr, x_desc, w_desc, u_desc, w_bias_ptr, u_bias_ptr, order_ptr, out_ptr, z_ptr, expert,
            first, stop, column, E, N, K, divisor, w_rows, u_first, stride_xm, stride_xk, stride_we, stride_wn,
            stride_wk, stride_ue, stride_un, stride_uk, stride_be, stride_bn, stride_zn, z_second, alpha, limit,
            GATHER, SCATTER, KIND, GATED, X_TMA, W_TMA, W_FORMAT, U_FORMAT, HAS_BIAS, SAVE, WORDS, ASM, BLOCK_M,
            BLOCK_N, BLOCK_K,
        )  # fmt: skip


def most_tiles(S: int, E: int, BLOCK_M: int) -> int:
    """No plan of S assignments to E experts has more M tiles, those without an expert counted."""
    return min(S, S // BLOCK_M + E + 1)


class Rows(NamedTuple):
    """Weights as a kernel sees them: numbers ``[E, N, K]`` and "", or bytes ``[E, N, row bytes]`` and their format."""

    data: Tensor
    format: str = ""

    @classmethod
    def of(cls, weight: Tensor | QuantTensor) -> Rows:
        if not isinstance(weight, QuantTensor):
            return cls(weight)
        # Decoders read up to sixteen bytes at a time; blocks that begin elsewhere, which no file has, are moved.
        blocks = weight.blocks if begins_aligned(weight.blocks) else weight.blocks.clone()
        return cls(blocks, weight.format)


def up_rows(
    gate_up: Tensor | QuantTensor, up: Tensor | QuantTensor | None, layout: str, gated: bool
) -> tuple[Rows, Rows, int]:
    """Gate rows and up rows as views of equal shape, whatever the layout, and I."""
    both = Rows.of(gate_up)
    if not gated:
        return both, both, gate_up.shape[1]
    if up is not None:
        return both, Rows.of(up), gate_up.shape[1]
    first, second = gate_and_up(both.data, layout)
    return both._replace(data=first), both._replace(data=second), first.shape[1]


def alike(w: Rows, u: Rows) -> tuple[Rows, Rows]:
    """Beside blocks, numbers must lie together along K."""
    if bool(w.format) == bool(u.format):
        return w, u
    return Rows(w.data.contiguous(), w.format), Rows(u.data.contiguous(), u.format)


def z_columns(I: int, gated: bool, layout: str) -> tuple[int, int]:
    """How far apart the gate columns of a pre-activation are, and how far its up columns are from them."""
    return (2, 1) if gated and interleaved(layout) else (1, I)


def in_words(rows: Tensor, format: str) -> bool:
    """Whether the blocks are of the format with kernels of its own, and lie so that these can read 16 bytes at once."""
    return format == IN_WORDS and begins_aligned(rows) and rows.stride(0) % 16 == 0


def packed(x: Tensor, tile: Tile) -> int:
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
    rows: tuple[Rows, Rows],
    biases: tuple[Tensor | None, Tensor | None],
    offsets: Tensor,
    order: Tensor,
    *,
    gather: bool,
    scatter: bool,
    fill: bool,
    activation: Activation | None,
    out: Tensor,
    tile: Tile,
    z: Tensor | None = None,
    layout: str = "halves",
    tiles: TokenTiles | None = None,
) -> None:
    """Launch the grouped product into ``out`` ``[S, N]``, and what comes before the activation into ``z``.

    ``tiles`` are those of ``offsets``, for products that share them.
    """
    S, N = out.shape
    E, K = offsets.shape[0] - 1, x.shape[1]
    (w, w_format), (u, u_format) = alike(*rows)
    bias, up_bias = biases
    gated = activation is not None and activation.gated
    words = in_words(w, w_format) and in_words(u, u_format)
    plain = not (scatter or fill) and bias is None and z is None and (words or not (w_format or u_format))
    if plain and hopper is not None and hopper.takes(x, w, u, out, gated):
        tiles = tiles or TokenTiles(offsets, S)
        hopper.turned_product(x, w, u, tiles, order, gather=gather, activation=activation, out=out)
        return
    x_desc = half_desc = w_desc = u_desc = None
    u_first = 0
    halves = tile.m >= 128
    if tile.copy_engine and (words or (K % tile.k == 0 and not w_format and not u_format)):
        if not gather and not words:
            x_desc, half_desc = (described(x, rows, tile.k) for rows in (tile.m, tile.m // 2))
        w_desc, u_desc, u_first = weight_descriptors(w, u, tile.n, 128 if words else tile.k)
    strides = (0, 0) if bias is None else bias.stride()
    launch(
        _grouped_kernel, (most_tiles(S, E, tile.m) * ceil_div(N, tile.n),), x, w, u, x_desc, half_desc, w_desc,
        u_desc, bias, up_bias, offsets, order, out, z, S, E, N, K, max(1, S // max(1, x.shape[0])),
        w.stride(0) // max(1, w.stride(1)), u_first, *x.stride(), *w.stride(), *u.stride(), *strides,
        *z_columns(N, gated, layout), *activation_numbers(activation),
        GATHER=gather, SCATTER=scatter, FILL=fill, KIND="" if activation is None else activation.kind, GATED=gated,
        X_TMA=x_desc is not None, W_TMA=w_desc is not None, W_FORMAT=w_format, U_FORMAT=u_format,
        HAS_BIAS=bias is not None, HALVES=halves, SAVE=z is not None, WORDS=words, ASM=packed(x, tile) if words else 0,
        PDL=PDL, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, BLOCK_E=block_of(E + 2), num_warps=tile.warps,
        num_stages=tile.stages, launch_pdl=PDL,
    )  # fmt: skip


def grouped_linear(
    x: Tensor,
    weight: Tensor | QuantTensor,
    bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    gather: bool,
    scatter: bool,
) -> Tensor:
    S, rows = order.shape[0], Rows.of(weight)
    out = torch.empty((S, weight.shape[1]), dtype=x.dtype, device=x.device)
    tile = product_tile(S / weight.shape[0], x.element_size(), False, x.device, rows.format)
    product(
        x, (rows, rows), (bias, None), offsets, order, gather=gather, scatter=scatter, fill=True, activation=None,
        out=out, tile=tile,
    )  # fmt: skip
    return out
