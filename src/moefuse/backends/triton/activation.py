"""glu on NVIDIA GPUs, and the device function that every epilogue calls."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.launch import ceil_div, launch
from moefuse.types import Activation


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(g, u, KIND: tl.constexpr, GATED: tl.constexpr, alpha, limit):
    """``act(g) * u`` in float32; u is ignored when not GATED. The clamps keep -inf * 0 from becoming NaN."""
    if KIND == "relu2":
        r = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        out = r * r
        if GATED:
            out = r * (r * u)
    elif KIND == "swiglu_oai" or KIND == "swiglu_clamp":
        g = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        a = alpha if KIND == "swiglu_oai" else 1.0
        g = tl.maximum(g, -1000.0 / a, propagate_nan=tl.PropagateNan.ALL)
        out = g * _sigmoid(a * g)
        if GATED:
            u = tl.minimum(tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL), limit,
                           propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
            out = out * (u + 1.0) if KIND == "swiglu_oai" else out * u
    else:
        if KIND == "relu":
            out = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        else:
            g = tl.maximum(g, -1000.0, propagate_nan=tl.PropagateNan.ALL)
            if KIND == "silu":
                out = g * _sigmoid(g)
            elif KIND == "gelu_tanh":
                out = g * _sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
            else:
                out = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
        if GATED:
            out = out * u
    return out


@triton.jit
def slopes(g, u, KIND: tl.constexpr, GATED: tl.constexpr, alpha, limit):
    """``act(g) * u`` and its derivatives by g and by u, in float32; u is ignored when not GATED."""
    if KIND == "relu2":
        r = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        value = r * r
        slope = 2.0 * r
    elif KIND == "relu":
        value = tl.maximum(g, 0.0, propagate_nan=tl.PropagateNan.ALL)
        slope = tl.where(g > 0, 1.0, 0.0)
    elif KIND == "gelu_tanh" or KIND == "gelu":
        c = tl.minimum(tl.maximum(g, -1000.0, propagate_nan=tl.PropagateNan.ALL), 1000.0,
                       propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
        if KIND == "gelu_tanh":
            s = _sigmoid(1.5957691216057308 * (c + 0.044715 * c * c * c))
            slope = s + c * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * c * c)
        else:
            s = 0.5 * (1.0 + tl.erf(c * 0.7071067811865476))
            slope = s + c * 0.3989422804014327 * tl.exp(-0.5 * c * c)
        value = c * s
    else:
        a = alpha if KIND == "swiglu_oai" else 1.0
        c = g
        if KIND != "silu":
            c = tl.minimum(g, limit, propagate_nan=tl.PropagateNan.ALL)
        c = tl.maximum(c, -1000.0 / a, propagate_nan=tl.PropagateNan.ALL)
        s = _sigmoid(a * c)
        value = c * s
        slope = s * (1.0 + a * c * (1.0 - s))
        if KIND != "silu":
            slope = tl.where(g > limit, 0.0, slope)
    hidden, by_gate, by_up = value, slope, value
    if GATED:
        factor = u
        if KIND == "swiglu_oai" or KIND == "swiglu_clamp":
            factor = tl.minimum(tl.maximum(u, -limit, propagate_nan=tl.PropagateNan.ALL), limit,
                                propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
            by_up = tl.where(tl.abs(u) > limit, 0.0, value)
            if KIND == "swiglu_oai":
                factor += 1.0
        by_gate = slope * factor
        hidden = value * factor
        if KIND == "relu2":
            # As in the forward: a large gate and a zero up give 0, not inf * 0.
            hidden = r * (r * factor)
    return hidden, by_gate, by_up


def activation_numbers(activation: Activation | None) -> tuple[float, float]:
    """alpha and limit, as `activate` and `slopes` take them."""
    return (1.0, 1.0) if activation is None else (activation.alpha, activation.limit)


@triton.jit
def _glu_kernel(
    gate_ptr, up_ptr, out_ptr, rows, width, stride_row, stride_col, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < rows * width
    row, column = index // width, index % width
    source = row * stride_row + column * stride_col
    g = tl.load(gate_ptr + source, mask, other=0.0).to(tl.float32)
    u = g
    if GATED:
        u = tl.load(up_ptr + source, mask, other=0.0).to(tl.float32)
    out = activate(g, u, KIND, GATED, alpha, limit)
    tl.store(out_ptr + index, out.to(out_ptr.dtype.element_ty), mask)


def _parts(gate_up: Tensor, up: Tensor | None, gated: bool, layout: str) -> tuple[Tensor, int, int, int]:
    """Where up begins (beside the dense gate), the width of a result, and the strides of rows and columns."""
    if up is not None:
        return up, gate_up.shape[-1], gate_up.shape[-1], 1
    if not gated:
        return gate_up, gate_up.shape[-1], gate_up.shape[-1], 1
    width, flat = gate_up.shape[-1] // 2, gate_up.view(-1)
    return (flat[width:], width, 2 * width, 1) if layout == "halves" else (flat[1:], width, 2 * width, 2)


def glu(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> Tensor:
    gate_up, up = gate_up.contiguous(), None if up is None else up.contiguous()
    second, width, *strides = _parts(gate_up, up, activation.gated, layout)
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    BLOCK = 1024
    launch(
        _glu_kernel, (ceil_div(out.numel(), BLOCK),), gate_up, second, out, out.numel() // max(width, 1), width,
        *strides, *activation_numbers(activation), KIND=activation.kind, GATED=activation.gated, BLOCK=BLOCK,
    )  # fmt: skip
    return out


@triton.jit
def _glu_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, rows, width, stride_row, stride_col, alpha, limit,
    KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < rows * width
    at = index // width * stride_row + index % width * stride_col
    d = tl.load(grad_ptr + index, mask, other=0.0).to(tl.float32)
    g = tl.load(gate_ptr + at, mask, other=0.0).to(tl.float32)
    u = g
    if GATED:
        u = tl.load(up_ptr + at, mask, other=0.0).to(tl.float32)
    _, by_gate, by_up = slopes(g, u, KIND, GATED, alpha, limit)
    tl.store(d_gate_ptr + at, (d * by_gate).to(d_gate_ptr.dtype.element_ty), mask)
    if GATED:
        tl.store(d_up_ptr + at, (d * by_up).to(d_up_ptr.dtype.element_ty), mask)


def glu_backward(
    grad: Tensor, gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str
) -> tuple[Tensor, Tensor]:
    grad, gate_up, up = grad.contiguous(), gate_up.contiguous(), None if up is None else up.contiguous()
    d_gate_up = torch.empty_like(gate_up)
    d_up = gate_up.new_empty(0) if up is None else torch.empty_like(up)
    second, width, *strides = _parts(gate_up, up, activation.gated, layout)
    d_second = _parts(d_gate_up, None if up is None else d_up, activation.gated, layout)[0]
    BLOCK = 1024
    launch(
        _glu_backward_kernel, (ceil_div(grad.numel(), BLOCK),), grad, gate_up, second, d_gate_up, d_second,
        grad.numel() // max(width, 1), width, *strides, *activation_numbers(activation), KIND=activation.kind,
        GATED=activation.gated, BLOCK=BLOCK,
    )  # fmt: skip
    return d_gate_up, d_up
