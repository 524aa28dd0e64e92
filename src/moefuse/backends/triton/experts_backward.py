"""experts under gradients on NVIDIA GPUs: a forward that keeps z, and a backward of six launches.

Nothing of ``S * H`` is held: what is summed over slots is made and summed some columns at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse.backends.gated import up_biases
from moefuse.backends.triton.combine import weighted_sum
from moefuse.backends.triton.glu import activation_numbers, slopes
from moefuse.backends.triton.grouped_linear import (
    Rows,
    described,
    find_tile,
    most_tiles,
    product,
    up_rows,
    z_columns,
)
from moefuse.backends.triton.grouped_outer import outer
from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tiles import Tile, mirror_tile, product_tile, slot_columns
from moefuse.types import Activation


@triton.jit
def _mirrored(
    acc, a_ptr, a_desc, w_ptr, w_desc, row, live, inside, first, at_row, column, K, a_first,
    stride_am, stride_ak, stride_wk, stride_wn,
    A_TMA: tl.constexpr, W_TMA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + a[row, a_first : a_first + K] @ w[0 : K, columns]; w_ptr is at the expert's first row."""
    k = tl.arange(0, BLOCK_K)
    n = (column + tl.arange(0, BLOCK_N)).to(tl.int64)
    a_ptrs = a_ptr + row[:, None] * stride_am + (a_first + k)[None, :] * stride_ak
    w_ptrs = w_ptr + k.to(tl.int64)[:, None] * stride_wk + n[None, :] * stride_wn
    for start in range(0, K, BLOCK_K):
        left = K - start
        # [BLOCK_M, BLOCK_K]
        if A_TMA:
            a = a_desc.load([first, a_first + start])
        else:
            a = tl.load(a_ptrs, mask=live[:, None] & (k < left)[None, :], other=0.0)
            a_ptrs += BLOCK_K * stride_ak
        # [BLOCK_K, BLOCK_N]
        if W_TMA:
            w = w_desc.load([at_row + start, column])
        else:
            w = tl.load(w_ptrs, mask=(k < left)[:, None] & inside[None, :], other=0.0)
            w_ptrs += BLOCK_K * stride_wk
        acc = tl.dot(a, w, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["S", "divisor"])
def _mirror_kernel(
    a_ptr, w_ptr, u_ptr, a_desc, w_desc, u_desc, offsets_ptr, order_ptr, out_ptr, S, E, N, K, K2, divisor, w_rows,
    stride_am, stride_ak, stride_we, stride_wk, stride_wn, stride_ue, stride_uk, stride_un,
    GATHER: tl.constexpr, A_TMA: tl.constexpr, W_TMA: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A [BLOCK_M, BLOCK_N] tile of one expert's rows times a weight whose rows lie across the sum; out [S, N].

    APART: the sum goes on over K2 more columns of a, with the rows of u.
    Grid: an upper bound on M tiles, times N tiles, N fastest; programs past the last tile leave at once.
    """
    wait(PDL)
    launch_dependents(PDL)
    columns = tl.cdiv(N, BLOCK_N)
    expert, first, stop = find_tile(tl.program_id(0) // columns, offsets_ptr, S, E, BLOCK_M, BLOCK_E)
    if expert >= E:
        return
    column = tl.program_id(0) % columns * BLOCK_N
    p = first + tl.arange(0, BLOCK_M)
    live = p < stop
    n = column + tl.arange(0, BLOCK_N)
    inside = n < N
    row = p
    if GATHER:
        row = tl.load(order_ptr + p, mask=live, other=0) // divisor
    row = row.to(tl.int64)
    stack = expert.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = _mirrored(
        acc, a_ptr, a_desc, w_ptr + stack * stride_we, w_desc, row, live, inside, first, expert * w_rows, column, K, 0,
        stride_am, stride_ak, stride_wk, stride_wn, A_TMA, W_TMA, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if APART:
        acc = _mirrored(
            acc, a_ptr, a_desc, u_ptr + stack * stride_ue, u_desc, row, live, inside, first, expert * w_rows, column,
            K2, K, stride_am, stride_ak, stride_uk, stride_un, A_TMA, W_TMA, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    out_ptrs = out_ptr + p.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _slopes_kernel(
    g_ptr, z_ptr, weights_ptr, d_ptr, bias_ptr, offsets_ptr, order_ptr, d_z_ptr, hidden_ptr, d_weights_ptr, E, I, H,
    top_k, stride_zn, z_second, stride_dt, stride_dh, stride_be, stride_bh, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, WANT_D_Z: tl.constexpr,
    WANT_HIDDEN: tl.constexpr, WANT_WEIGHTS: tl.constexpr, PDL: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One row of the hidden gradient g = d @ down, with h = act(z) and the weight s of its assignment.

    d_z = s * g * act'(z), hidden = s * h, and d_weights = <h, g> + <down_bias, d>, zero without an expert.
    d_z may be z and hidden may be g: no other program reads what this one writes. Grid: S.
    """
    wait(PDL)
    launch_dependents(PDL)
    p = tl.program_id(0).to(tl.int64)
    s = tl.load(order_ptr + p)
    if p >= tl.load(offsets_ptr + E):
        if WANT_WEIGHTS:
            tl.store(d_weights_ptr + s, 0.0)
        return
    share = tl.load(weights_ptr + s).to(tl.float32)
    total = tl.zeros([BLOCK_I], tl.float32)
    for start in range(0, I, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        inside = i < I
        at = p * (I * (1 + GATED)) + i * stride_zn
        gate = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(z_ptr + at + z_second, mask=inside, other=0.0).to(tl.float32)
        h, by_gate, by_up = slopes(gate, up, KIND, GATED, alpha, limit, z_ptr.dtype.element_ty == tl.float32)
        if WANT_D_Z or WANT_WEIGHTS:
            g = tl.load(g_ptr + p * I + i, mask=inside, other=0.0).to(tl.float32)
            total += tl.where(inside, h * g, 0.0)
            if WANT_D_Z:
                g *= share
                tl.store(d_z_ptr + at, (g * by_gate).to(d_z_ptr.dtype.element_ty), mask=inside)
                if GATED:
                    tl.store(d_z_ptr + at + z_second, (g * by_up).to(d_z_ptr.dtype.element_ty), mask=inside)
        if WANT_HIDDEN:
            tl.store(hidden_ptr + p * I + i, (share * h).to(hidden_ptr.dtype.element_ty), mask=inside)
    if WANT_WEIGHTS:
        if HAS_BIAS:
            e = tl.arange(0, BLOCK_E)
            after = tl.load(offsets_ptr + e + 1, mask=e < E, other=2147483647)
            expert = tl.sum((after <= p).to(tl.int32), 0).to(tl.int64)
            token = (s // top_k).to(tl.int64)
            for start in range(0, H, BLOCK_I):
                column = start + tl.arange(0, BLOCK_I)
                inside = column < H
                d = tl.load(d_ptr + token * stride_dt + column * stride_dh, mask=inside, other=0.0).to(tl.float32)
                bias = tl.load(bias_ptr + expert * stride_be + column * stride_bh, mask=inside, other=0.0)
                total += d * bias.to(tl.float32)
        tl.store(d_weights_ptr + s, tl.sum(total, 0).to(d_weights_ptr.dtype.element_ty))


def _weight_descriptor(w: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """A descriptor of a stack ``[E, K, N]`` as one matrix of rows, where its experts lie whole rows apart."""
    E, K, N = w.shape
    if w.stride(0) % max(1, w.stride(1)):
        return None
    pitch = w.stride(0) // w.stride(1)
    matrix = w.as_strided(((E - 1) * pitch + K, N), w.stride()[1:], w.storage_offset())
    return described(matrix, rows, columns)


def mirror(
    a: Tensor, stacks: tuple[Tensor, ...], offsets: Tensor, order: Tensor, out: Tensor, tile: Tile, *, gather: bool
) -> None:
    """Launch the product of rows of ``a`` with ``stacks`` into ``out`` ``[S, N]``.

    One stack ``[E, K, N]``, or two: the sum goes over the rows of the first, then of the second.
    """
    S, E, N = order.shape[0], offsets.shape[0] - 1, stacks[0].shape[2]
    w, u = stacks[0], stacks[-1]
    K, K2 = w.shape[1], u.shape[1]
    a_desc = w_desc = u_desc = None
    if tile.copy_engine and K % tile.k == 0 and K2 % tile.k == 0 and w.stride() == u.stride():
        w_desc, u_desc = (_weight_descriptor(t, tile.k, tile.n) for t in (w, u))
        a_desc = None if gather else described(a, tile.m, tile.k)
    if w_desc is None or u_desc is None:
        w_desc = u_desc = None
    launch(
        _mirror_kernel, (most_tiles(S, E, tile.m) * ceil_div(N, tile.n),), a, w, u, a_desc, w_desc, u_desc, offsets,
        order, out, S, E, N, K, K2, max(1, S // max(1, a.shape[0])), w.stride(0) // max(1, w.stride(1)), *a.stride(),
        *w.stride(), *u.stride(), GATHER=gather, A_TMA=a_desc is not None, W_TMA=w_desc is not None,
        APART=len(stacks) == 2, PDL=PDL, BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, BLOCK_E=block_of(E + 2),
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=PDL,
    )  # fmt: skip


@triton.jit
def _slot_sum_kernel(
    y_ptr, weights_ptr, inverse_ptr, offsets_ptr, out_ptr, E, N, stride_o,
    WEIGHTED: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, N] = the sum of each token's live slots in order; y [S, N] is expert-major. Grid: T, N blocks."""
    wait(PDL)
    launch_dependents(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(offsets_ptr + E)
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        p = tl.load(inverse_ptr + t * TOP_K + j).to(tl.int64)
        live = p < count
        value = tl.load(y_ptr + p * N + n, mask=(n < N) & live, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.where(live, tl.load(weights_ptr + t * TOP_K + j).to(tl.float32), 0.0)
        total += value
    tl.store(out_ptr + t * stride_o + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def _slot_sum(y: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor, top_k: int, out: Tensor) -> None:
    """Sum slot rows into ``out`` ``[T, N]``, whose rows may be apart."""
    T, N = out.shape
    BLOCK = min(block_of(N), 1024)
    launch(
        _slot_sum_kernel, (T, ceil_div(N, BLOCK)), y, weights, inverse, offsets, out, offsets.shape[0] - 1, N,
        out.stride(0), WEIGHTED=weights is not None, TOP_K=top_k, PDL=PDL, BLOCK=BLOCK, num_warps=4, launch_pdl=PDL,
    )  # fmt: skip


@triton.jit
def _row_sum_kernel(
    rows_ptr, weights_ptr, offsets_ptr, order_ptr, out_ptr, N, top_k, stride_m, stride_n,
    WEIGHTED: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [E, N]: the sum of an expert's rows; WEIGHTED: of its tokens' rows times their weights. Grid: E, N blocks."""
    wait(PDL)
    launch_dependents(PDL)
    expert = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_M):
        p = start + tl.arange(0, BLOCK_M)
        live = p < end
        row = p.to(tl.int64)
        if WEIGHTED:
            s = tl.load(order_ptr + p, mask=live, other=0)
            row = (s // top_k).to(tl.int64)
        at = rows_ptr + row[:, None] * stride_m + n[None, :] * stride_n
        value = tl.load(at, mask=live[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + s, mask=live, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(out_ptr + expert * N + n, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=n < N)


def _row_sum(rows: Tensor, weights: Tensor | None, offsets: Tensor, order: Tensor, top_k: int, like: Tensor) -> Tensor:
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    E, N = out.shape
    launch(
        _row_sum_kernel, (E, ceil_div(N, 64)), rows, weights, offsets, order, out, N, top_k, *rows.stride(),
        WEIGHTED=weights is not None, PDL=PDL, BLOCK_M=32, BLOCK_N=64, num_warps=4, launch_pdl=PDL,
    )  # fmt: skip
    return out


def experts_saving(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    inverse: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: Activation,
    layout: str,
    out: Tensor,
    normed_out: Tensor | None,
    z: Tensor,
) -> None:
    S, E, H = ids.numel(), down.shape[0], down.shape[1]
    gate_rows, rows_of_up, I = up_rows(gate_up, up, layout, activation.gated)
    biases = up_biases(gate_up_bias, up is not None, layout, activation.gated)
    hidden = torch.empty((S, I), dtype=x.dtype, device=x.device)
    product(
        x, (gate_rows, rows_of_up), biases, offsets, order, gather=True, scatter=False, fill=True,
        activation=activation, out=hidden, tile=product_tile(S / E, x.element_size(), activation.gated, x.device),
        z=z, layout=layout,
    )  # fmt: skip
    tail = (shared, shared_gate, shared_logit, residual, norm_weight, eps, out, normed_out)
    tile = product_tile(S / E, x.element_size(), False, x.device)
    width = slot_columns(S, H, x.element_size())
    plain = shared is None and residual is None and norm_weight is None
    summed = out if plain else None
    if width < H and summed is None:
        summed = torch.empty((x.shape[0], H), dtype=torch.float32, device=x.device)
    for first in range(0, H, width):
        part = Rows(down[:, first : first + width])
        bias = None if down_bias is None else down_bias[:, first : first + width]
        y = torch.empty((S, part.data.shape[1]), dtype=x.dtype, device=x.device)
        product(
            hidden, (part, part), (bias, None), offsets, order, gather=False, scatter=False, fill=False,
            activation=None, out=y, tile=tile,
        )  # fmt: skip
        if summed is None:
            weighted_sum(y, weights, inverse, ids, offsets, E, *tail)
        else:
            _slot_sum(y, weights, inverse, offsets, ids.shape[1], summed[:, first : first + width])
    if summed is not None and not plain:
        ones = torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
        weighted_sum(summed, ones, None, None, None, E, *tail)


def experts_backward(
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    inverse: Tensor,
    activation: Activation,
    layout: str,
    wanted: list[bool],
    reuse_z: bool,
) -> tuple[Tensor, ...]:
    want_x, want_weights, want_gate_up, want_up, want_down, want_gate_up_bias, want_down_bias = wanted
    (T, top_k), (E, H, I), S = weights.shape, down.shape, order.shape[0]
    like: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    none = (torch.empty(0, **like) for _ in wanted)

    needs_d_z = want_x or want_gate_up or want_up or want_gate_up_bias
    d_weights = d_gate_up = d_up = d_down = d_x = d_gate_up_bias = d_down_bias = None
    d_z = (z if reuse_z else torch.empty_like(z)) if needs_d_z else None
    tile = mirror_tile(S / E, x.element_size(), x.device)
    hidden = torch.empty((S, I), **like) if needs_d_z or want_weights or want_down else None
    if hidden is not None:
        if needs_d_z or want_weights:
            mirror(d, (down,), offsets, order, hidden, tile, gather=True)
        d_weights = torch.empty_like(weights) if want_weights else None
        strides = (0, 0) if down_bias is None else down_bias.stride()
        launch(
            _slopes_kernel, (S,), hidden, z, weights, d, down_bias, offsets, order, d_z, hidden, d_weights, E, I, H,
            top_k, *z_columns(I, activation.gated, layout), *d.stride(), *strides, *activation_numbers(activation),
            KIND=activation.kind, GATED=activation.gated, HAS_BIAS=down_bias is not None, WANT_D_Z=needs_d_z,
            WANT_HIDDEN=want_down, WANT_WEIGHTS=want_weights, PDL=PDL, BLOCK_I=min(block_of(I), 1024),
            BLOCK_E=block_of(E), num_warps=4, launch_pdl=PDL,
        )  # fmt: skip
    if want_down and hidden is not None:
        d_down = torch.empty(down.shape, dtype=down.dtype, device=x.device)
        outer(d, hidden, offsets, order, d_down, gather_grad=True, gather_x=False)
    hidden = None  # its memory is free for what follows
    if want_down_bias and down_bias is not None:
        d_down_bias = _row_sum(d, weights, offsets, order, top_k, down_bias)
    if d_z is not None:
        rows = gate_up.shape[1]
        if want_gate_up:
            d_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=x.device)
            outer(d_z[:, :rows], x, offsets, order, d_gate_up, gather_grad=False, gather_x=True)
        if want_up and up is not None:
            d_up = torch.empty(up.shape, dtype=up.dtype, device=x.device)
            outer(d_z[:, rows:], x, offsets, order, d_up, gather_grad=False, gather_x=True)
        if want_gate_up_bias and gate_up_bias is not None:
            d_gate_up_bias = _row_sum(d_z, None, offsets, order, top_k, gate_up_bias)
        if want_x:
            d_x = torch.empty((T, H), **like)
            stacks = (gate_up,) if up is None else (gate_up, up)
            width = slot_columns(S, H, x.element_size())
            for first in range(0, H, width):
                part = tuple(stack[:, :, first : first + width] for stack in stacks)
                y = torch.empty((S, part[0].shape[2]), **like)
                mirror(d_z, part, offsets, order, y, tile, gather=False)
                _slot_sum(y, None, inverse, offsets, top_k, d_x[:, first : first + width])
    found = (d_x, d_weights, d_gate_up, d_up, d_down, d_gate_up_bias, d_down_bias)
    return tuple(empty if t is None else t for t, empty in zip(found, none, strict=True))
