"""experts of a few tokens in an invariant call on Hopper: no plan, and tensor cores that sum in the order of tiles.

Its tensor cores give a number the same bits whichever side its row is on, and however many columns the other has. So
64 rows of a weight take the place of 64 tokens of which one would be there: a program reads no more than it needs, and
there are enough of them for the whole card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse import backends
from moefuse.backends.gated import Weights
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.combine import weighted_sum
from moefuse.backends.triton.grouped_linear import rows_of, up_weights
from moefuse.backends.triton.runtime.launch import (
    HAS_PDL,
    INTERPRETED,
    PDL,
    block_of,
    capability,
    ceil_div,
    launch,
    launch_dependents,
    prefetch_rows,
    wait,
)
from moefuse.backends.triton.runtime.tiles import DECODE_TOKENS, FEW_TILE
from moefuse.types import Activation, Outputs, Stacks, Tail


@triton.jit
def _few_kernel(
    x_ptr,
    ids_ptr,
    w_ptr,
    u_ptr,
    w_bias_ptr,
    u_bias_ptr,
    out_ptr,
    sizes,
    strides,
    bias_strides,
    numbers,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    ACT: tl.constexpr,
):
    """out [S, N] in slot order: row s // TOP_K of x times BLOCK_N rows of the expert of s, and the activation if any.

    GATED: gate rows and up rows by turns, half as many columns of out. Column 0 of BLOCK_M is the row of x.
    AHEAD: ids were there before the last launch let this one begin, and so many numbers of each row are asked for.
    Grid: column tiles, S.
    """
    E, N, K = sizes
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_ue, stride_un, stride_uk = strides
    s = tl.program_id(1)
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    row = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * COLUMNS + (row // 2 if GATED else row)
    k = tl.arange(0, BLOCK_K)
    if HAS_PDL and AHEAD > 0:
        known = tl.minimum(tl.maximum(tl.load(ids_ptr + s), 0), E - 1).to(tl.int64)
        asked = w_ptr + known * stride_we + tl.minimum(n, N - 1).to(tl.int64) * stride_wn
        prefetch_rows(asked, K * stride_wk, AHEAD)
    wait()
    launch_dependents()
    expert = tl.load(ids_ptr + s).to(tl.int64)
    if (expert < 0) | (expert >= E):
        return
    w_rows = w_ptr + expert * stride_we + n.to(tl.int64)[:, None] * stride_wn
    w_ptrs = w_rows + k[None, :] * stride_wk
    if GATED:
        u_rows = u_ptr + expert * stride_ue + n.to(tl.int64)[:, None] * stride_un
        w_ptrs = tl.where((row % 2 == 0)[:, None], w_ptrs, u_rows + k[None, :] * stride_uk)
    first = tl.arange(0, BLOCK_M) == 0
    x_ptrs = x_ptr + (s // TOP_K).to(tl.int64) * stride_xm + k[:, None] * stride_xk + tl.zeros([1, BLOCK_M], tl.int32)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, K, BLOCK_K):
        left = k < K - start
        # [BLOCK_K, BLOCK_M]
        x = tl.load(x_ptrs, mask=left[:, None] & first[None, :], other=0.0)
        # [BLOCK_N, BLOCK_K]
        w = tl.load(w_ptrs, mask=(n < N)[:, None] & left[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    sums = tl.sum(tl.where(first[None, :], acc, 0.0), 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    up = sums
    if GATED:
        sums, up = tl.split(tl.reshape(sums, [COLUMNS, 2]))
    if w_bias_ptr is not None:
        stride_be, stride_bn = bias_strides
        at = expert * stride_be + column * stride_bn
        sums += tl.load(w_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(u_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ACT is not None:
        sums, _, _ = ACT(sums, up, numbers, GATED, out_ptr.dtype.element_ty == tl.float32)
    tl.store(out_ptr + s.to(tl.int64) * N + column, sums.to(out_ptr.dtype.element_ty), mask=inside)


def takes(x: Tensor, stacks: Stacks) -> bool:
    """Whether these experts of so few tokens are multiplied here, with the bits that tiles give them."""
    here = (stacks.gate_up, stacks.down) if stacks.up is None else (stacks.gate_up, stacks.up, stacks.down)
    few = backends.invariant() and x.shape[0] <= DECODE_TOKENS and x.element_size() == 2
    ours = not INTERPRETED and capability(x.device) == (9, 0)
    return few and ours and all(isinstance(w, Tensor) and w.dtype == x.dtype for w in here)


def experts_few(
    x: Tensor, ids: Tensor, weights: Tensor, stacks: Stacks, activation: Activation, tail: Tail, outputs: Outputs
) -> None:
    (T, top_k), (E, H, I) = ids.shape, stacks.down.shape
    hidden, y = (torch.empty((T * top_k, n), dtype=x.dtype, device=x.device) for n in (I, H))
    _product(x, ids, up_weights(stacks, activation.gated), activation, top_k, hidden, 0)
    down, ahead = Weights.of(stacks.down, stacks.down_bias, rows_of), min(block_of(I), 1024)
    _product(hidden, ids, down, None, 1, y, ahead)
    weighted_sum(y, weights, None, tail, outputs, num_experts=E, ids=ids)


def _product(
    x: Tensor, ids: Tensor, weights: Weights, activation: Activation | None, top_k: int, out: Tensor, ahead: int
) -> None:
    (w, *_), (u, *_), bias, up_bias, _ = weights
    (S, N), gated, tile = out.shape, activation is not None and activation.gated, FEW_TILE
    columns = tile.n // 2 if gated else tile.n
    launch(
        _few_kernel,
        (ceil_div(N, columns), S),
        *(x, ids, w, u, bias, up_bias, out),
        (w.shape[0], N, x.shape[1]),
        (*x.stride(), *w.stride(), *u.stride()),
        (0, 0) if bias is None else bias.stride(),
        activation_numbers(activation),
        TOP_K=top_k,
        GATED=gated,
        BLOCK_N=tile.n,
        BLOCK_M=tile.m,
        BLOCK_K=tile.k,
        AHEAD=ahead,
        ACT=None if activation is None else ACTIVATIONS[activation.kind],
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=PDL,
    )
