"""linear on NVIDIA GPUs: one launch for few rows, whatever the number of weights; products of tiles for more."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse import backends
from moefuse.backends.gated import Rows, Weights
from moefuse.backends.plain import plain_product
from moefuse.backends.triton.grouped_linear import block_sums, decoder_of, may_round, product, row_sums, rows_of
from moefuse.backends.triton.runtime.launch import (
    HAS_PDL,
    PDL,
    block_of,
    ceil_div,
    launch,
    launch_dependents,
    prefetch_rows,
    wait,
)
from moefuse.backends.triton.runtime.tiles import Tile, is_one_launch, product_tile
from moefuse.backends.triton.runtime.tuned import linear_tile_for
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Plan, Projections, Weight

#: bytes of weights that a program fetches before the launch before it has ended; all programs' share the cache
_AHEAD = 32 << 10


class _Form(NamedTuple):
    """What a weight's product is compiled for.

    ``rounded``: blocks times x in 8 bits. ``ahead``: numbers or bytes of each row to fetch before x is there.
    ``whole``: K is a multiple of ``block_k``; ``chunks``: 1 where it is no more, else 0.
    """

    rounded: bool
    ahead: int
    block_t: int
    block_n: int
    block_k: int
    whole: bool
    chunks: int


@triton.jit
def _numbers(ptrs, at, K, WHOLE: tl.constexpr):
    """What lies at columns ``at``, zeros from K on; with WHOLE there are none such."""
    return tl.load(ptrs + at) if WHOLE else tl.load(ptrs + at, mask=at < K, other=0.0)


@triton.jit
def _number_sums(x_ptr, rows, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr):
    """One row of x times ``rows`` [BLOCK_N] of numbers: [BLOCK_N] float32. Each chunk is asked for one ahead."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    w = _numbers(rows[:, None], k[None, :], K, WHOLE)
    last = (tl.cdiv(K, BLOCK_K) - 1) * BLOCK_K
    for start in range(0, last, BLOCK_K):
        x = _numbers(x_ptr, start + k, K, WHOLE).to(tl.float32)
        ahead = _numbers(rows[:, None], (start + BLOCK_K + k)[None, :], K, WHOLE)
        acc += w.to(tl.float32) * x[None, :]
        w = ahead
    x = _numbers(x_ptr, last + k, K, WHOLE).to(tl.float32)
    return tl.sum(acc + w.to(tl.float32) * x[None, :], 1)


@triton.jit
def _columns(tensors, tile, N, stride_wn, column, sizes, FORM: tl.constexpr, DECODE: tl.constexpr):
    """Columns ``tile * block_n`` and on of one weight's product; ``column`` is where its first one stands in out."""
    x_ptr, w_ptr, bias_ptr, residual_ptr, out_ptr = tensors
    T, K, width = sizes
    BLOCK_T: tl.constexpr = FORM.block_t
    BLOCK_N: tl.constexpr = FORM.block_n
    BLOCK_K: tl.constexpr = FORM.block_k
    first = tile * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    # Rows past the end are the last row again, and not stored.
    last = tl.minimum(n, N - 1).to(tl.int64)
    rows = w_ptr + last * stride_wn
    t = tl.arange(0, BLOCK_T)
    live = t < T
    # Who wrote the weights is not known, so their numbers must wait; the cache is filled with them meanwhile.
    if HAS_PDL and BLOCK_T == 1:
        prefetch_rows(rows, stride_wn, FORM.ahead)
    wait()
    launch_dependents()
    if DECODE is not None:
        w = (w_ptr, N, tl.minimum(n, N - 1))
        x_rows = x_ptr + t.to(tl.int64) * K
        if BLOCK_T < 8:
            acc, _ = row_sums(x_rows, 1, w, w, K, BLOCK_K // 32, FORM.chunks, FORM.rounded, False, DECODE, DECODE)
        else:
            acc, _ = block_sums(x_rows, 1, live, w, w, K, False, DECODE, DECODE)
    elif BLOCK_T == 1:
        acc = _number_sums(x_ptr, rows, K, BLOCK_N, BLOCK_K, FORM.whole)[None, :]
    else:
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            at = (start + k)[None, :]
            x = tl.load(x_ptr + t[:, None] * K + at, mask=live[:, None] & (at < K), other=0.0)
            # [BLOCK_N, BLOCK_K]
            w = _numbers(rows[:, None], at, K, FORM.whole)
            acc = tl.dot(x, w.T, acc, input_precision="ieee")
    inside = n < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = t.to(tl.int64)[:, None] * width + (column + n)[None, :]
    mask = live[:, None] & inside[None, :]
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _part(tensors, place, N, stride_wn, sizes, FORM: tl.constexpr, DECODE: tl.constexpr):
    """The part of one weight, where this program's tile is of it: tile and first column of the next weight."""
    tile, column = place
    tiles = tl.cdiv(N, FORM.block_n)
    if (tile >= 0) & (tile < tiles):
        _columns(tensors, tile, N, stride_wn, column, sizes, FORM, DECODE)
    return tile - tiles, column + N


@triton.jit(do_not_specialize=["T"])
def _linear_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    a_bias_ptr,
    b_bias_ptr,
    c_bias_ptr,
    d_bias_ptr,
    T,
    K,
    width,
    columns,
    strides,
    A_FORM: tl.constexpr,
    B_FORM: tl.constexpr,
    C_FORM: tl.constexpr,
    D_FORM: tl.constexpr,
    A_DECODE: tl.constexpr,
    B_DECODE: tl.constexpr,
    C_DECODE: tl.constexpr,
    D_DECODE: tl.constexpr,
):
    """Up to block_t rows x ``[T, K]`` times up to four weights, side by side in out ``[T, width]``.

    ``columns`` and ``strides`` are of each weight, the latter in bytes for blocks. Grid: tiles of all weights.
    """
    a_columns, b_columns, c_columns, d_columns = columns
    a_stride, b_stride, c_stride, d_stride = strides
    sizes = (T, K, width)
    place = (tl.program_id(0), 0)
    place = _part(
        (x_ptr, a_ptr, a_bias_ptr, residual_ptr, out_ptr), place, a_columns, a_stride, sizes, A_FORM, A_DECODE
    )
    if B_FORM is not None:
        place = _part((x_ptr, b_ptr, b_bias_ptr, None, out_ptr), place, b_columns, b_stride, sizes, B_FORM, B_DECODE)
    if C_FORM is not None:
        place = _part((x_ptr, c_ptr, c_bias_ptr, None, out_ptr), place, c_columns, c_stride, sizes, C_FORM, C_DECODE)
    if D_FORM is not None:
        place = _part((x_ptr, d_ptr, d_bias_ptr, None, out_ptr), place, d_columns, d_stride, sizes, D_FORM, D_DECODE)


def _form(x: Tensor, rows: Rows, tile: Tile) -> _Form:
    length = rows.data.shape[-1]
    return _Form(
        may_round(rows),
        min(block_of(length, 1), _AHEAD // block_of(tile.n * rows.data.element_size(), 1)),
        1 if x.shape[0] == 1 else tile.m,
        tile.n,
        tile.k,
        x.shape[1] % tile.k == 0,
        int(tile.k >= x.shape[1]),
    )


def _rows_of(weight: Weight) -> Rows:
    """A matrix as a stack of one."""
    if isinstance(weight, QuantTensor):
        return rows_of(dataclasses.replace(weight, blocks=weight.blocks[None]))
    return Rows(weight[None])


def _few(x: Tensor, projections: Projections, residual: Tensor | None, out: Tensor) -> None:
    """One launch for all weights."""
    (T, K), pairs = x.shape, projections.pairs
    rows = [_rows_of(weight) for weight, _ in pairs]
    columns = [weight.data.shape[1] for weight in rows]
    size, N = x.element_size(), sum(columns)
    tiles = [linear_tile_for(T, N, K, size, x.device, weight.format) for weight in rows]
    forms = [_form(x, mine, tile) for mine, tile in zip(rows, tiles, strict=True)]
    none, zeros = (None,) * (4 - len(pairs)), (0,) * (4 - len(pairs))
    compiled: dict[str, Any] = {}
    for name, form, mine in zip("ABCD", (*forms, *none), (*rows, *none), strict=True):
        compiled[f"{name}_FORM"], compiled[f"{name}_DECODE"] = form, mine and decoder_of(mine)
    launch(
        _linear_kernel,
        (sum(ceil_div(N, tile.n) for N, tile in zip(columns, tiles, strict=True)),),
        *(x, residual, out),
        *(*(weight.data for weight in rows), *none),
        *(*(bias for _, bias in pairs), *none),
        *(T, K, out.shape[1]),
        (*columns, *zeros),
        (*(weight.data.stride(1) for weight in rows), *zeros),
        **compiled,
        num_warps=max(tile.warps for tile in tiles),
        num_stages=max(tile.stages for tile in tiles),
        launch_pdl=PDL,
    )


def _plan_of_one(T: int, device: torch.device) -> Plan:
    """All rows go to one expert; made on the device, with nothing copied to it."""
    order = torch.arange(T, dtype=torch.int32, device=device)
    offsets = torch.arange(0, T + 1, T, dtype=torch.int32, device=device)
    return Plan(offsets[1:], offsets, order, order, 1, trusted=True)


def _many(x: Tensor, projections: Projections, residual: Tensor | None, out: Tensor) -> None:
    """Numbers by torch, whose product of large matrices is the vendor's; blocks by the grouped product.

    The vendor's kernels go by the number of rows, so an invariant call takes the grouped product for numbers, too.
    """
    T, pairs = x.shape[0], projections.pairs
    for (weight, bias), stop in zip(pairs, projections.stops, strict=True):
        here = out[:, stop - weight.shape[0] : stop]
        if not isinstance(weight, QuantTensor) and not backends.invariant():
            plain_product(x, weight, bias, residual, here)
            continue
        weights = Weights.of(weight, None if bias is None else bias[None], _rows_of)
        tile = product_tile(T, x.element_size(), False, x.device, weights.w.format)
        dense = here if len(pairs) == 1 else torch.empty(here.shape, dtype=x.dtype, device=x.device)
        product(x, weights, _plan_of_one(T, x.device), None, dense, tile)
        if residual is not None:
            here.add_(residual)
        elif dense is not here:
            here.copy_(dense)


def linear(x: Tensor, projections: Projections, residual: Tensor | None) -> Tensor:
    (T, K), width = x.shape, projections.stops[-1]
    out = torch.empty((T, width), dtype=x.dtype, device=x.device)
    if T and width:
        run = _few if is_one_launch(T, K) else _many
        run(x, projections, residual, out)
    return out
