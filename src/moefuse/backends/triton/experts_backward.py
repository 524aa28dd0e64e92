"""The backward of experts on NVIDIA GPUs: six launches.

Nothing of ``S * H`` is held: what is summed over slots is made and summed some columns at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.combine import slot_sum
from moefuse.backends.triton.grouped_linear import z_columns
from moefuse.backends.triton.grouped_linear_transposed import transposed_product
from moefuse.backends.triton.grouped_outer import outer
from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tiles import derivatives_tile, slot_columns
from moefuse.types import Activation, Plan, Stacks, Wanted


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
    S,
    sizes,
    strides,
    numbers,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """ROWS rows of the hidden gradient g = d @ down, with h = act(z) and the weights s of their assignments.

    d_z = s * g * act'(z), hidden = s * h, and d_weights = <h, g> + <down_bias, d>, zero without an expert: each where
    there is a pointer for it. d_z may be z and hidden may be g: no other program reads what this one writes.
    Grid: tiles of rows.
    """
    wait()
    launch_dependents()
    E, I, H, top_k = sizes
    stride_zn, z_second, stride_dt, stride_dh, stride_be, stride_bh = strides
    p = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    count = tl.load(offsets_ptr + E)
    s = tl.load(order_ptr + p, mask=p < S, other=0)
    if tl.program_id(0) * ROWS >= count:
        if d_weights_ptr is not None:
            tl.store(d_weights_ptr + s, tl.zeros([ROWS], tl.float32), mask=p < S)
        return
    live = p < count
    share = tl.load(weights_ptr + s, mask=live, other=0.0).to(tl.float32)[:, None]
    total = tl.zeros([ROWS, BLOCK_I], tl.float32)
    for start in range(0, I, BLOCK_I):
        i = start + tl.arange(0, BLOCK_I)
        inside = live[:, None] & (i < I)[None, :]
        at = (p * (I * (1 + GATED)))[:, None] + (i * stride_zn)[None, :]
        gate = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(z_ptr + at + z_second, mask=inside, other=0.0).to(tl.float32)
        to = (p * I)[:, None] + i[None, :]
        h, by_gate, by_up = ACT(gate, up, numbers, GATED, z_ptr.dtype.element_ty == tl.float32)
        if d_z_ptr is not None or d_weights_ptr is not None:
            g = tl.load(g_ptr + to, mask=inside, other=0.0).to(tl.float32)
            total += tl.where(inside, h * g, 0.0)
            if d_z_ptr is not None:
                g *= share
                tl.store(d_z_ptr + at, (g * by_gate).to(d_z_ptr.dtype.element_ty), mask=inside)
                if GATED:
                    tl.store(d_z_ptr + at + z_second, (g * by_up).to(d_z_ptr.dtype.element_ty), mask=inside)
        if hidden_ptr is not None:
            tl.store(hidden_ptr + to, (share * h).to(hidden_ptr.dtype.element_ty), mask=inside)
    if d_weights_ptr is not None:
        if bias_ptr is not None:
            e = tl.arange(0, BLOCK_E)
            after = tl.load(offsets_ptr + e + 1, mask=e < E, other=2147483647)
            expert = tl.sum((after[None, :] <= p[:, None]).to(tl.int32), 1).to(tl.int64)
            token = (s // top_k).to(tl.int64)
            for start in range(0, H, BLOCK_I):
                column = start + tl.arange(0, BLOCK_I)
                inside = live[:, None] & (column < H)[None, :]
                d_ptrs = d_ptr + (token * stride_dt)[:, None] + (column * stride_dh)[None, :]
                bias_ptrs = bias_ptr + (expert * stride_be)[:, None] + (column * stride_bh)[None, :]
                d = tl.load(d_ptrs, mask=inside, other=0.0).to(tl.float32)
                total += d * tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_weights_ptr + s, tl.sum(total, 1).to(d_weights_ptr.dtype.element_ty), mask=p < S)


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


def _derivatives(
    d: Tensor,
    z: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan,
    activation: Activation,
    results: tuple[Tensor | None, Tensor | None],
    keep_hidden: bool,
) -> Tensor | None:
    """d_z and d_weights where given, and the weighted hidden rows where kept."""
    (E, H, I), S = stacks.down.shape, plan.assignments
    d_z, d_weights = results
    multiplies = d_z is not None or d_weights is not None
    if not multiplies and not keep_hidden:
        return None
    hidden = torch.empty((S, I), dtype=d.dtype, device=d.device)
    if multiplies:
        transposed_product(d, (stacks.down,), plan, hidden, gather=True)
    tile = derivatives_tile(I)
    bias_strides = (0, 0) if stacks.down_bias is None else stacks.down_bias.stride()
    launch(
        _derivatives_kernel,
        (ceil_div(S, tile.rows),),
        *(hidden, z, weights, d, stacks.down_bias, plan.offsets, plan.order),
        *(d_z, hidden if keep_hidden else None, d_weights),
        S,
        (E, I, H, plan.top_k),
        (*z_columns(I, activation.gated, stacks.layout), *d.stride(), *bias_strides),
        activation_numbers(activation),
        ACT=ACTIVATIONS[activation.kind],
        GATED=activation.gated,
        ROWS=tile.rows,
        BLOCK_I=tile.columns,
        BLOCK_E=block_of(E),
        num_warps=tile.warps,
        launch_pdl=PDL,
    )
    return hidden if keep_hidden else None


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
    (T, _), (E, H, I), S, size = weights.shape, stacks.down.shape, plan.assignments, x.element_size()
    like: dict[str, Any] = {"dtype": x.dtype, "device": x.device}
    grads = {name: torch.empty(0, **like) for name in Wanted._fields}

    needs_d_z = wanted.x or wanted.gate_up or wanted.up or wanted.gate_up_bias
    d_z = (z if reuse_z else torch.empty_like(z)) if needs_d_z else None
    if wanted.weights:
        grads["weights"] = torch.empty_like(weights)
    results = d_z, grads["weights"] if wanted.weights else None
    hidden = _derivatives(d, z, weights, stacks, plan, activation, results, wanted.down)
    if hidden is not None:
        grads["down"] = outer(d, hidden, plan, x.dtype, gather_grad=True)
    hidden = None  # its memory is free for what follows
    if wanted.down_bias and stacks.down_bias is not None:
        grads["down_bias"] = _row_sum(d, weights, plan, stacks.down_bias)
    if d_z is not None:
        rows = stacks.gate_up.shape[1]
        if wanted.x:
            grads["x"] = d_x = torch.empty((T, H), **like)
            # Slot rows have the room of the hidden rows, and that of the stacks' gradients, which are made after them.
            room = S * I + E * rows * H * (wanted.gate_up + wanted.up) - T * H
            width = slot_columns(S, H, size, room * size)
            both = (stacks.gate_up,) if stacks.up is None else (stacks.gate_up, stacks.up)
            for first in range(0, H, width):
                y = torch.empty((S, min(width, H - first)), **like)
                transposed_product(d_z, both, plan, y, first=first)
                slot_sum(y, None, plan, d_x[:, first : first + width])
            del y
        if wanted.gate_up:
            grads["gate_up"] = outer(d_z[:, :rows], x, plan, x.dtype, gather_x=True)
        if wanted.up:
            grads["up"] = outer(d_z[:, rows:], x, plan, x.dtype, gather_x=True)
        if wanted.gate_up_bias and stacks.gate_up_bias is not None:
            grads["gate_up_bias"] = _row_sum(d_z, None, plan, stacks.gate_up_bias)
    return tuple(grads.values())
