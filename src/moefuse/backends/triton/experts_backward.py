"""experts under gradients on NVIDIA GPUs: a forward that keeps z, and a backward of five or six launches.

Nothing of ``S * H`` is held: what is summed over slots is made and summed some columns at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse.backends.triton.activation import activation_numbers, slopes
from moefuse.backends.triton.combine import weighted_sum
from moefuse.backends.triton.grouped_linear import (
    described,
    find_tile,
    most_tiles,
    product,
    up_biases,
    up_rows,
    z_columns,
)
from moefuse.backends.triton.launch import PDL, block_of, launch, launch_dependents, wait
from moefuse.backends.triton.outer import outer
from moefuse.backends.triton.tiles import Tile, mirror_tile, product_tile, slot_columns
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
    a_ptr, w_ptr, u_ptr, a_desc, w_desc, u_desc, offsets_ptr, order_ptr, z_ptr, weights_ptr, out_ptr, hidden_ptr,
    parts_ptr, S, E, N, K, K2, divisor, w_rows, stride_am, stride_ak, stride_we, stride_wk, stride_wn,
    stride_ue, stride_uk, stride_un, stride_zn, z_second, alpha, limit,
    GATHER: tl.constexpr, A_TMA: tl.constexpr, W_TMA: tl.constexpr, APART: tl.constexpr, KIND: tl.constexpr,
    GATED: tl.constexpr, WANT_D_Z: tl.constexpr, WANT_HIDDEN: tl.constexpr, WANT_PARTS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A [BLOCK_M, BLOCK_N] tile of one expert's rows times a weight whose rows lie across the sum.

    APART: the sum goes on over K2 more columns of a, with the rows of u.
    KIND "": the product is the result. Otherwise it is the gradient g of a hidden row h = act(z), and with the weight s
    of the assignment d_z = s * g * act'(z) goes to out, s * h to hidden, and <h, g> of this tile to parts [tiles, S].
    out may be z: no other program reads what this one writes.
    Grid: an upper bound on M tiles, times N tiles, N fastest; programs past the last tile leave at once.
    """
    wait(PDL)
    launch_dependents(PDL)
    columns = tl.cdiv(N, BLOCK_N)
    expert, first, stop = find_tile(tl.program_id(0) // columns, offsets_ptr, S, E, BLOCK_M, BLOCK_E)
    if expert >= E:
        return
    tile = tl.program_id(0) % columns
    column = tile * BLOCK_N
    p = first + tl.arange(0, BLOCK_M)
    live = p < stop
    n = column + tl.arange(0, BLOCK_N)
    inside = n < N
    s = tl.load(order_ptr + p, mask=live, other=0)
    row = (s // divisor if GATHER else p).to(tl.int64)
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
    mask = live[:, None] & inside[None, :]
    at = p.to(tl.int64)[:, None]
    if KIND == "":
        tl.store(out_ptr + at * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        z_at = at * (N * (1 + GATED)) + n[None, :] * stride_zn
        g = tl.load(z_ptr + z_at, mask=mask, other=0.0).to(tl.float32)
        u = g
        if GATED:
            u = tl.load(z_ptr + z_at + z_second, mask=mask, other=0.0).to(tl.float32)
        h, by_gate, by_up = slopes(g, u, KIND, GATED, alpha, limit)
        if WANT_PARTS:
            part = tl.sum(tl.where(mask, h * acc, 0.0), 1)
            tl.store(parts_ptr + tile.to(tl.int64) * S + p, part, mask=live)
        share = tl.load(weights_ptr + s, mask=live, other=0.0).to(tl.float32)[:, None]
        if WANT_HIDDEN:
            tl.store(hidden_ptr + at * N + n[None, :], (share * h).to(hidden_ptr.dtype.element_ty), mask=mask)
        if WANT_D_Z:
            acc *= share
            tl.store(out_ptr + z_at, (acc * by_gate).to(out_ptr.dtype.element_ty), mask=mask)
            if GATED:
                tl.store(out_ptr + z_at + z_second, (acc * by_up).to(out_ptr.dtype.element_ty), mask=mask)


def _weight_descriptor(w: Tensor, rows: int, columns: int) -> TensorDescriptor | None:
    """A descriptor of a stack ``[E, K, N]`` as one matrix of rows, where its experts lie whole rows apart."""
    E, K, N = w.shape
    if w.stride(0) % max(1, w.stride(1)):
        return None
    pitch = w.stride(0) // w.stride(1)
    matrix = w.as_strided(((E - 1) * pitch + K, N), w.stride()[1:], w.storage_offset())
    return described(matrix, rows, columns)


def _mirror(
    a: Tensor,
    stacks: tuple[Tensor, ...],
    offsets: Tensor,
    order: Tensor,
    out: Tensor | None,
    tile: Tile,
    *,
    gather: bool,
    slots: int,
    depth: int | None = None,
    z: Tensor | None = None,
    weights: Tensor | None = None,
    hidden: Tensor | None = None,
    parts: Tensor | None = None,
    activation: Activation | None = None,
    layout: str = "halves",
) -> None:
    """Launch `_mirror_kernel`. ``stacks``: one ``[E, K, N]``, or two whose sums follow each other."""
    S, E, N = order.shape[0], offsets.shape[0] - 1, stacks[0].shape[2]
    w, u = stacks[0], stacks[-1]
    K, K2 = w.shape[1] if depth is None else depth, u.shape[1]
    a_desc = w_desc = u_desc = None
    if tile.copy_engine and K % tile.k == 0 and (len(stacks) == 1 or K2 % tile.k == 0):
        w_desc, u_desc = (_weight_descriptor(t, tile.k, tile.n) for t in (w, u))
        if not gather:
            a_desc = described(a, tile.m, tile.k)
    w_tma = w_desc is not None and u_desc is not None and w.stride() == u.stride()
    gated = activation is not None and activation.gated
    launch(
        _mirror_kernel, (most_tiles(S, E, tile.m) * triton.cdiv(N, tile.n),), a, w, u, a_desc,
        w_desc if w_tma else None, u_desc if w_tma else None, offsets, order, z, weights, out, hidden, parts,
        S, E, N, K, K2, slots, w.stride(0) // max(1, w.stride(1)), *a.stride(), *w.stride(), *u.stride(),
        *z_columns(N, gated, layout), *activation_numbers(activation), GATHER=gather, A_TMA=a_desc is not None,
        W_TMA=w_tma, APART=len(stacks) == 2, KIND="" if activation is None else activation.kind, GATED=gated,
        WANT_D_Z=out is not None, WANT_HIDDEN=hidden is not None, WANT_PARTS=parts is not None, PDL=PDL,
        BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k, BLOCK_E=block_of(E + 2), num_warps=tile.warps,
        num_stages=tile.stages, launch_pdl=PDL,
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
        _slot_sum_kernel, (T, triton.cdiv(N, BLOCK)), y, weights, inverse, offsets, out, offsets.shape[0] - 1, N,
        out.stride(0), WEIGHTED=weights is not None, TOP_K=top_k, PDL=PDL, BLOCK=BLOCK, num_warps=4, launch_pdl=PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["S", "tiles"])
def _weights_kernel(
    parts_ptr, d_ptr, bias_ptr, inverse_ptr, offsets_ptr, out_ptr, S, E, H, tiles, top_k, stride_dt, stride_dh,
    stride_be, stride_bh,
    HAS_BIAS: tl.constexpr, PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """d_weights of BLOCK_S slots: their parts in order, and <down_bias, d>. Zero without an expert. Grid: slots."""
    wait(PDL)
    launch_dependents(PDL)
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    inside = s < S
    p = tl.load(inverse_ptr + s, mask=inside, other=0)
    live = inside & (p < tl.load(offsets_ptr + E))
    total = tl.zeros([BLOCK_S], tl.float32)
    for tile in range(tiles):
        total += tl.load(parts_ptr + tl.cast(tile, tl.int64) * S + p, mask=live, other=0.0)
    if HAS_BIAS:
        e = tl.arange(0, BLOCK_E)
        after = tl.load(offsets_ptr + e + 1, mask=e < E, other=2147483647)
        # [BLOCK_S, BLOCK_E]: experts that end at or before the position
        expert = tl.sum((after[None, :] <= p[:, None]).to(tl.int32), 1).to(tl.int64)
        token = (s // top_k).to(tl.int64)
        h = tl.arange(0, BLOCK_H)
        for start in range(0, H, BLOCK_H):
            mask = live[:, None] & (h < H - start)[None, :]
            column = (start + h)[None, :]
            d = tl.load(d_ptr + token[:, None] * stride_dt + column * stride_dh, mask=mask, other=0.0).to(tl.float32)
            bias = tl.load(bias_ptr + expert[:, None] * stride_be + column * stride_bh, mask=mask, other=0.0)
            total += tl.sum(d * bias.to(tl.float32), 1)
    tl.store(out_ptr + s, tl.where(live, total, 0.0).to(out_ptr.dtype.element_ty), mask=inside)


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
        _row_sum_kernel, (E, triton.cdiv(N, 64)), rows, weights, offsets, order, out, N, top_k, *rows.stride(),
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
    weights = weights.contiguous()
    for first in range(0, H, width):
        part = down[:, first : first + width]
        bias = None if down_bias is None else down_bias[:, first : first + width]
        y = torch.empty((S, part.shape[1]), dtype=x.dtype, device=x.device)
        product(
            hidden, (part, part), (bias, None), offsets, order, gather=False, scatter=False, fill=False,
            activation=None, out=y, tile=tile,
        )  # fmt: skip
        if summed is None:
            weighted_sum(y, weights, inverse, ids.contiguous(), E, *tail)
        else:
            _slot_sum(y, weights, inverse, offsets, ids.shape[1], summed[:, first : first + width])
    if summed is not None and not plain:
        ones = torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
        weighted_sum(summed, ones, None, None, E, *tail)


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
    weights = weights.contiguous()

    needs_d_z = want_x or want_gate_up or want_up or want_gate_up_bias
    d_z = (z if reuse_z else torch.empty_like(z)) if needs_d_z else None
    hidden = torch.empty((S, I), **like) if want_down else None
    tile = mirror_tile(S / E, x.element_size(), True, x.device)
    parts = None
    if want_weights:
        parts = torch.empty((triton.cdiv(I, tile.n), S), dtype=torch.float32, device=x.device)
    if needs_d_z or want_weights or want_down:
        # Where only the weight of the down product is trained, its hidden rows need no product.
        depth = None if needs_d_z or want_weights else 0
        _mirror(
            d, (down,), offsets, order, d_z, tile, gather=True, slots=top_k, depth=depth, z=z, weights=weights,
            hidden=hidden, parts=parts, activation=activation, layout=layout,
        )  # fmt: skip
    d_weights = d_gate_up = d_up = d_down = d_x = d_gate_up_bias = d_down_bias = None
    if parts is not None:
        d_weights = torch.empty_like(weights)
        strides = (0, 0) if down_bias is None else down_bias.stride()
        launch(
            _weights_kernel, (triton.cdiv(S, 32),), parts, d, down_bias, inverse, offsets, d_weights, S, E, H,
            parts.shape[0], top_k, *d.stride(), *strides, HAS_BIAS=down_bias is not None, PDL=PDL, BLOCK_S=32,
            BLOCK_E=block_of(E), BLOCK_H=128, num_warps=4, launch_pdl=PDL,
        )  # fmt: skip
    if hidden is not None:
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
            wide = mirror_tile(S / E, x.element_size(), False, x.device)
            for first in range(0, H, width):
                part = tuple(stack[:, :, first : first + width] for stack in stacks)
                y = torch.empty((S, part[0].shape[2]), **like)
                _mirror(d_z, part, offsets, order, y, wide, gather=False, slots=1)
                _slot_sum(y, None, inverse, offsets, top_k, d_x[:, first : first + width])
    found = (d_x, d_weights, d_gate_up, d_up, d_down, d_gate_up_bias, d_down_bias)
    return tuple(empty if t is None else t for t, empty in zip(found, none, strict=True))
