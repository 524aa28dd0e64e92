"""glu on NVIDIA GPUs."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.gated import up_of
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.runtime.launch import ceil_div, launch
from moefuse.types import Activation

#: numbers that one program activates
_BLOCK = tl.constexpr(1024)


@triton.jit
def _glu_kernel(gate_ptr, up_ptr, out_ptr, rows, width, strides, numbers, ACT: tl.constexpr, GATED: tl.constexpr):
    stride_row, stride_col = strides
    index = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    mask = index < rows * width
    row, column = index // width, index % width
    source = row * stride_row + column * stride_col
    g = tl.load(gate_ptr + source, mask, other=0.0).to(tl.float32)
    u = g
    if GATED:
        u = tl.load(up_ptr + source, mask, other=0.0).to(tl.float32)
    out, _, _ = ACT(g, u, numbers, GATED, gate_ptr.dtype.element_ty == tl.float32)
    tl.store(out_ptr + index, out.to(out_ptr.dtype.element_ty), mask)


def _options(activation: Activation) -> dict[str, Any]:
    return {"ACT": ACTIVATIONS[activation.kind], "GATED": activation.gated}


def glu(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> Tensor:
    second, width, step = up_of(gate_up, up, activation, layout)
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    sizes = out.numel() // max(width, 1), width, (gate_up.shape[-1], step), activation_numbers(activation)
    launch(_glu_kernel, (ceil_div(out.numel(), _BLOCK.value),), gate_up, second, out, *sizes, **_options(activation))
    return out


@triton.jit
def _glu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, sizes, strides, numbers, ACT: tl.constexpr, GATED: tl.constexpr
):
    rows, width = sizes
    stride_row, stride_col = strides
    index = tl.program_id(0).to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    mask = index < rows * width
    at = index // width * stride_row + index % width * stride_col
    d = tl.load(grad_ptr + index, mask, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + at, mask, other=0.0).to(tl.float32)
    u = g
    if GATED:
        u = tl.load(up_ptr + at, mask, other=0.0).to(tl.float32)
    _, by_gate, by_up = ACT(g, u, numbers, GATED, gate_ptr.dtype.element_ty == tl.float32)
    tl.store(d_gate_ptr + at, (d * by_gate).to(d_gate_ptr.dtype.element_ty), mask)
    if GATED:
        tl.store(d_up_ptr + at, (d * by_up).to(d_up_ptr.dtype.element_ty), mask)


def glu_backward(
    grad: Tensor, gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str
) -> tuple[Tensor, Tensor]:
    d_gate_up = torch.empty_like(gate_up)
    d_up = gate_up.new_empty(0) if up is None else torch.empty_like(up)
    second, width, step = up_of(gate_up, up, activation, layout)
    d_second, _, _ = up_of(d_gate_up, None if up is None else d_up, activation, layout)
    tensors, grid = (grad, gate_up, second, d_gate_up, d_second), (ceil_div(grad.numel(), _BLOCK.value),)
    sizes = (grad.numel() // max(width, 1), width), (gate_up.shape[-1], step), activation_numbers(activation)
    launch(_glu_backward_kernel, grid, *tensors, *sizes, **_options(activation))
    return d_gate_up, d_up
