"""The backward of experts on NVIDIA GPUs: six launches.

Nothing of ``S * H`` is held: what is summed over slots is made and summed some columns at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.combine import slot_sum
from moefuse.backends.triton.grouped_linear import described, find_tile, most_tiles, z_columns
from moefuse.backends.triton.grouped_outer import outer
from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tiles import Tile, slot_columns, transposed_tile
from moefuse.types import Activation, Plan, Stacks, Wanted


@triton.jit
def _plus_product(acc, a, a_strides, w, w_strides, rows, place, K, a_first, BLOCK_K: tl.constexpr):
    """acc + a[row, a_first : a_first + K] @ w[0 : K, columns].

    ``a`` and ``w`` are pointer and descriptor or None; that of w is at the expert's first row, ``at_row``.
    """
    a_ptr, a_desc = a
    w_ptr, w_desc = w
    stride_am, stride_ak = a_strides
    stride_wk, stride_wn = w_strides
    row, live, inside = rows
    first, at_row, column = place
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
        if w_desc is not None:
            right_tile = w_desc.load([at_row + start, column])
        else:
            right_tile = tl.load(w_ptrs, mask=(k < left)[:, None] & inside[None, :], other=0.0)
            w_ptrs += BLOCK_K * stride_wk
        acc = tl.dot(left_tile, right_tile, acc, input_precision="ieee")
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """A [BLOCK_M, BLOCK_N] tile of one expert's rows times a transposed weight, whose rows are summed; out [S, N].

    With a u, the sum goes on over K2 more columns of a, with the rows of u.
    Grid: an upper bound on M tiles, times N tiles, N fastest; programs past the last tile leave at once.
    """
    wait()
    launch_dependents()
    E, N, K, K2, w_rows = sizes
    stride_am, stride_ak, stride_we, stride_wk, stride_wn, stride_ue, stride_uk, stride_un = strides
    a_strides = (stride_am, stride_ak)
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
    a, rows, place = (a_ptr, a_desc), (row, live, inside), (first, expert * w_rows, column)
    w = (w_ptr + stack * stride_we, w_desc)
    acc = _plus_product(acc, a, a_strides, w, (stride_wk, stride_wn), rows, place, K, 0, BLOCK_K)
    if u_ptr is not None:
        u = (u_ptr + stack * stride_ue, u_desc)
        acc = _plus_product(acc, a, a_strides, u, (stride_uk, stride_un), rows, place, K2, K, BLOCK_K)
    out_ptrs = out_ptr + p.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & inside[None, :])


@triton.jit
def _derivatives_kernel(
    g_ptr,
    z_ptr,
    weights_ptr,
    d_ptr,
    bias_ptr,
    offsets_ptr,
    order_ptr,
    d_z_ptr,
    hidden_ptr,
    d_weights_ptr,
    sizes,
    strides,
    numbers,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One row of the hidden gradient g = d @ down, with h = act(z) and the weight s of its assignment.

    d_z = s * g * act'(z), hidden = s * h, and d_weights = <h, g> + <down_bias, d>, zero without an expert: each where
    there is a pointer for it. d_z may be z and hidden may be g: no other program reads what this one writes. Grid: S.
    """
    wait()
    launch_dependents()
    E, I, H, top_k = sizes
    stride_zn, z_second, stride_dt, stride_dh, stride_be, stride_bh = strides
    p = tl.program_id(0).to(tl.int64)
    s = tl.load(order_ptr + p)
    if p >= tl.load(offsets_ptr + E):
        if d_weights_ptr is not None:
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
        h, by_gate, by_up = ACT(gate, up, numbers, GATED, z_ptr.dtype.element_ty == tl.float32)
        if d_z_ptr is not None or d_weights_ptr is not None:
            g = tl.load(g_ptr + p * I + i, mask=inside, other=0.0).to(tl.float32)
            total += tl.where(inside, h * g, 0.0)
            if d_z_ptr is not None:
                g *= share
                tl.store(d_z_ptr + at, (g * by_gate).to(d_z_ptr.dtype.element_ty), mask=inside)
                if GATED:
                    tl.store(d_z_ptr + at + z_second, (g * by_up).to(d_z_ptr.dtype.element_ty), mask=inside)
        if hidden_ptr is not None:
            tl.store(hidden_ptr + p * I + i, (share * h).to(hidden_ptr.dtype.element_ty), mask=inside)
    if d_weights_ptr is not None:
        if bias_ptr is not None:
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


def transposed_product(
    a: Tensor, stacks: tuple[Tensor, ...], plan: Plan, out: Tensor, tile: Tile, *, gather: bool
) -> None:
    """Launch the product of rows of ``a`` with ``stacks`` into ``out`` ``[S, N]``.

    One stack ``[E, K, N]``, or two: the sum goes over the rows of the first, then of the second.
    """
    S, E, N = plan.assignments, plan.num_experts, out.shape[1]
    w, *others = stacks
    u = others[0] if others else None
    K, K2 = w.shape[1], 0 if u is None else u.shape[1]
    a_desc = w_desc = u_desc = None
    if tile.copy_engine and K % tile.k == 0 and K2 % tile.k == 0 and (u is None or w.stride() == u.stride()):
        w_desc = _weight_descriptor(w, tile.k, tile.n)
        u_desc = None if u is None else _weight_descriptor(u, tile.k, tile.n)
        a_desc = None if gather else described(a, tile.m, tile.k)
    if w_desc is None or (u is not None and u_desc is None):
        w_desc = u_desc = None
    tensors = a, w, u, a_desc, w_desc, u_desc, plan.offsets, plan.order, out
    sizes = E, N, K, K2, w.stride(0) // max(1, w.stride(1))
    launch(
        _transposed_kernel,
        (most_tiles(S, E, tile.m) * ceil_div(N, tile.n),),
        *tensors,
        S,
        max(1, S // max(1, a.shape[0])),
        sizes,
        (*a.stride(), *w.stride(), *(w if u is None else u).stride()),
        GATHER=gather,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        BLOCK_E=block_of(E + 2),
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=PDL,
    )


@triton.jit
def _row_sum_kernel(rows_ptr, weights_ptr, offsets_ptr, order_ptr, out_ptr, N, top_k, strides):
    """out [E, N]: the sum of an expert's rows, or of its tokens' rows times their weights. Grid: E, N tiles."""
    wait()
    launch_dependents()
    BLOCK_M: tl.constexpr = 32
    BLOCK_N: tl.constexpr = 64
    stride_m, stride_n = strides
    expert = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_M):
        p = start + tl.arange(0, BLOCK_M)
        live = p < end
        row = p.to(tl.int64)
        if weights_ptr is not None:
            s = tl.load(order_ptr + p, mask=live, other=0)
            row = (s // top_k).to(tl.int64)
        at = rows_ptr + row[:, None] * stride_m + n[None, :] * stride_n
        value = tl.load(at, mask=live[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        if weights_ptr is not None:
            value *= tl.load(weights_ptr + s, mask=live, other=0.0).to(tl.float32)[:, None]
        total += value
    tl.store(out_ptr + expert * N + n, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=n < N)


def _row_sum(rows: Tensor, weights: Tensor | None, plan: Plan, like: Tensor) -> Tensor:
    out = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    E, N = out.shape
    tensors, grid = (rows, weights, plan.offsets, plan.order, out), (E, ceil_div(N, 64))
    launch(_row_sum_kernel, grid, *tensors, N, plan.top_k, rows.stride(), num_warps=4, launch_pdl=PDL)
    return out


def experts_backward(
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan,
    activation: Activation,
    wanted: Wanted,
    reuse_z: bool,
) -> tuple[Tensor, ...]:
    gate_up, up, down = stacks.numbers
    (T, _), (_, H, I), S, size = weights.shape, down.shape, plan.assignments, x.element_size()
    like: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    grads = {name: torch.empty(0, **like) for name in Wanted._fields}

    needs_d_z = wanted.x or wanted.gate_up or wanted.up or wanted.gate_up_bias
    d_z = (z if reuse_z else torch.empty_like(z)) if needs_d_z else None
    tile = transposed_tile(S / plan.num_experts, size, x.device)
    hidden = torch.empty((S, I), **like) if needs_d_z or wanted.weights or wanted.down else None
    if hidden is not None:
        if needs_d_z or wanted.weights:
            transposed_product(d, (down,), plan, hidden, tile, gather=True)
        if wanted.weights:
            grads["weights"] = torch.empty_like(weights)
        results = d_z, hidden if wanted.down else None, grads["weights"] if wanted.weights else None
        bias_strides = (0, 0) if stacks.down_bias is None else stacks.down_bias.stride()
        launch(
            _derivatives_kernel,
            (S,),
            *(hidden, z, weights, d, stacks.down_bias, plan.offsets, plan.order),
            *results,
            (plan.num_experts, I, H, plan.top_k),
            (*z_columns(I, activation.gated, stacks.layout), *d.stride(), *bias_strides),
            activation_numbers(activation),
            ACT=ACTIVATIONS[activation.kind],
            GATED=activation.gated,
            BLOCK_I=min(block_of(I), 1024),
            BLOCK_E=block_of(plan.num_experts),
            num_warps=4,
            launch_pdl=PDL,
        )
    if wanted.down and hidden is not None:
        grads["down"] = outer(d, hidden, plan, down.dtype, gather_grad=True)
    hidden = None  # its memory is free for what follows
    if wanted.down_bias and stacks.down_bias is not None:
        grads["down_bias"] = _row_sum(d, weights, plan, stacks.down_bias)
    if d_z is not None:
        rows = gate_up.shape[1]
        if wanted.gate_up:
            grads["gate_up"] = outer(d_z[:, :rows], x, plan, gate_up.dtype, gather_x=True)
        if wanted.up and up is not None:
            grads["up"] = outer(d_z[:, rows:], x, plan, up.dtype, gather_x=True)
        if wanted.gate_up_bias and stacks.gate_up_bias is not None:
            grads["gate_up_bias"] = _row_sum(d_z, None, plan, stacks.gate_up_bias)
        if wanted.x:
            grads["x"] = d_x = torch.empty((T, H), **like)
            width = slot_columns(S, H, size)
            for first in range(0, H, width):
                part = tuple(stack[:, :, first : first + width] for stack in (gate_up, up) if stack is not None)
                y = torch.empty((S, min(width, H - first)), **like)
                transposed_product(d_z, part, plan, y, tile, gather=False)
                slot_sum(y, None, plan, d_x[:, first : first + width])
    return tuple(grads.values())
