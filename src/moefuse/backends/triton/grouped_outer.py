"""The weight gradient on NVIDIA GPUs: per expert, the sum over its rows of an outer product."""

from __future__ import annotations

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.grouped_linear import described, hopper
from moefuse.backends.triton.runtime.launch import PDL, ceil_div, launch, launch_dependents, wait
from moefuse.backends.triton.runtime.tiles import outer_tile
from moefuse.types import Plan

outer_hopper: ModuleType | None = None
if hopper is not None:
    from moefuse.backends.triton import grouped_outer_hopper

    outer_hopper = grouped_outer_hopper


@triton.jit(do_not_specialize=["grad_divisor", "x_divisor"])
def _outer_kernel(
    grad_ptr,
    x_ptr,
    grad_desc,
    x_desc,
    offsets_ptr,
    order_ptr,
    out_ptr,
    grad_divisor,
    x_divisor,
    sizes,
    strides,
    GATHER_GRAD: tl.constexpr,
    GATHER_X: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A [BLOCK_N, BLOCK_K] tile of one expert's gradient, rows summed in order.

    A gathered operand's row is the assignment over its divisor: a token, or the slot itself.
    An operand with a descriptor lies in order and comes through the copy engine, where the expert has a whole tile of
    rows.
    Grid: experts, N tiles, K tiles, the last fastest: an expert's rows stay in the second-level cache.
    """
    wait()
    launch_dependents()
    N, K = sizes
    stride_gm, stride_gn, stride_xm, stride_xk, stride_oe, stride_on, _ = strides
    TMA: tl.constexpr = grad_desc is not None or x_desc is not None
    columns, lines = tl.cdiv(K, BLOCK_K), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    expert = (pid // (columns * lines)).to(tl.int64)
    first_n, first_k = pid // columns % lines * BLOCK_N, pid % columns * BLOCK_K
    n, k = first_n + tl.arange(0, BLOCK_N), first_k + tl.arange(0, BLOCK_K)
    begin, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    grad_ptrs = grad_ptr + n[None, :] * stride_gn
    x_ptrs = x_ptr + k[None, :] * stride_xk
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    if TMA and end - begin >= BLOCK_M:
        for start in range(begin, end, BLOCK_M):
            # The last tile ends with the expert and leaves out what was summed: 0 times a neighbour's NaN would show.
            first = tl.minimum(start, end - BLOCK_M)
            p = first + tl.arange(0, BLOCK_M)
            s = tl.load(order_ptr + p)
            fresh = (p >= start)[:, None]
            if GATHER_GRAD:
                row = (s // grad_divisor).to(tl.int64)[:, None]
                grad = tl.load(grad_ptrs + row * stride_gm, mask=fresh & (n < N)[None, :], other=0.0)
                x = x_desc.load([first, first_k])
            else:
                row = (s // x_divisor).to(tl.int64)[:, None]
                grad = grad_desc.load([first, first_n])
                x = tl.load(x_ptrs + row * stride_xm, mask=fresh & (k < K)[None, :], other=0.0)
            acc = tl.dot(tl.trans(grad), x, acc, input_precision="ieee")
    else:
        for start in range(begin, end, BLOCK_M):
            p = start + tl.arange(0, BLOCK_M)
            live = p < end
            s = tl.load(order_ptr + p, mask=live, other=0)
            grad_row = (s // grad_divisor if GATHER_GRAD else p).to(tl.int64)
            x_row = (s // x_divisor if GATHER_X else p).to(tl.int64)
            # [BLOCK_M, BLOCK_N] and [BLOCK_M, BLOCK_K]
            grad = tl.load(grad_ptrs + grad_row[:, None] * stride_gm, mask=live[:, None] & (n < N)[None, :], other=0.0)
            x = tl.load(x_ptrs + x_row[:, None] * stride_xm, mask=live[:, None] & (k < K)[None, :], other=0.0)
            acc = tl.dot(tl.trans(grad), x, acc, input_precision="ieee")
    out_ptrs = out_ptr + expert * stride_oe + n.to(tl.int64)[:, None] * stride_on + k[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(n < N)[:, None] & (k < K)[None, :])


def outer(
    grad: Tensor, x: Tensor, plan: Plan, dtype: torch.dtype, *, gather_grad: bool = False, gather_x: bool = False
) -> Tensor:
    """Launch the outer product into ``[E, N, K]``."""
    S, E, N, K = plan.assignments, plan.num_experts, grad.shape[1], x.shape[1]
    out = torch.empty((E, N, K), dtype=dtype, device=grad.device)
    if outer_hopper is not None and gather_grad != gather_x:
        left, right = (grad, x) if gather_grad else (x, grad)
        if outer_hopper.takes(left, right, plan):
            outer_hopper.hopper_outer(left, right, plan, out, turned=gather_x)
            return out
    tile = outer_tile(S / E, grad.element_size(), gather_x, grad.device)
    grad_desc = x_desc = None
    if tile.copy_engine and gather_grad != gather_x:
        grad_desc = None if gather_grad else described(grad, tile.k, tile.m)
        x_desc = None if gather_x else described(x, tile.k, tile.n)
    launch(
        _outer_kernel,
        (E * ceil_div(N, tile.m) * ceil_div(K, tile.n),),
        *(grad, x, grad_desc, x_desc, plan.offsets, plan.order, out),
        *(max(1, S // max(1, t.shape[0])) for t in (grad, x)),
        (N, K),
        (*grad.stride(), *x.stride(), *out.stride()),
        GATHER_GRAD=gather_grad,
        GATHER_X=gather_x,
        BLOCK_M=tile.k,
        BLOCK_N=tile.m,
        BLOCK_K=tile.n,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=PDL,
    )
    return out


def grouped_outer(grad: Tensor, x: Tensor, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    return outer(grad, x, plan, grad.dtype, gather_grad=scatter, gather_x=gather)
