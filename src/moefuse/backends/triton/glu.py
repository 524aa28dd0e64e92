"""glu on NVIDIA GPUs, and the device function that every epilogue calls."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.codes import Codes, interleaved
from moefuse.backends.triton.mathfn import (
    at_least,
    at_most,
    normal_tail_parts,
    product_parts,
    sigmoid_parts,
    times_power,
)
from moefuse.backends.triton.runtime.launch import ceil_div, launch
from moefuse.types import ACTIVATION_KINDS, Activation

#: the kinds that `_value_and_slope` has a branch for
KINDS = Codes(
    "triton", "activation", ("silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu_oai", "swiglu_clamp"),
    ACTIVATION_KINDS,
)  # fmt: skip


@triton.jit
def _unit(g, y, low, bend, FINE: tl.constexpr):
    """``g * sigmoid(y + low)`` and its slope by g; ``bend`` is g times the slope of y."""
    if FINE:
        s, k, other, j = sigmoid_parts(y, low)
        return times_power(g * s, k), times_power(s * (1.0 + times_power(other, j) * bend), k)
    else:
        s = 1.0 / (1.0 + tl.exp(-y))
        return g * s, s * (1.0 + (1.0 - s) * bend)


@triton.jit
def _gelu_tanh(g, FINE: tl.constexpr):
    """0.5 (1 + tanh(u)) is sigmoid(2u), which loses nothing in the negative tail; FINE: with 2u in two parts."""
    c = at_most(g, 1000.0)
    square = c * c
    bend = 1.5957691216057308 * c * (1.0 + 0.134145 * square)
    if FINE:
        # 2 sqrt(2 / pi) is the float32 number next to it less 4.5e-8.
        head, rest = product_parts(c, c)
        scaled, lacking = product_parts(head * 0.0 + 0.07135481387376785, head)
        total = 1.5957691669464111 + scaled
        back = total - 1.5957691669464111
        lacking += (1.5957691669464111 - (total - back)) + (scaled - back)
        lacking += 0.07135481387376785 * rest + 2.39883e-09 * square - 4.53406803e-08
        y, low = product_parts(c, total)
        return _unit(g, y, low + c * lacking, bend, FINE)
    else:
        return _unit(g, 1.5957691216057308 * (c + 0.044715 * c * square), 0.0, bend, FINE)


@triton.jit
def _gelu(g):
    q, p, k = normal_tail_parts(tl.abs(g))
    below = g < 0
    near = 1.0 - times_power(q * p, k)
    value = tl.where(below, times_power(at_least(g, -1000.0) * (q * p), k), g * near)
    bent = times_power(p * (q - 0.3989422804014327 * at_most(tl.abs(g), 20.0)), k)
    return value, tl.where(below, bent, 1.0 - bent)


@triton.jit
def _value_and_slope(g, KIND: tl.constexpr, alpha, limit, FINE: tl.constexpr):
    """act(g) and its derivative. The clamps keep -inf * 0 from becoming NaN; FINE keeps tiny results to float32."""
    if KIND == "silu":
        c = at_least(g, -1000.0)
        return _unit(c, c, 0.0, c, FINE)
    elif KIND == "gelu_tanh":
        return _gelu_tanh(at_least(g, -1000.0), FINE)
    elif KIND == "gelu":
        return _gelu(g)
    elif KIND == "relu":
        return at_least(g, 0.0), tl.where(g > 0, 1.0, 0.0)
    elif KIND == "relu2":
        r = at_least(g, 0.0)
        return r * r, 2.0 * r
    elif KIND == "swiglu_oai":
        c = at_least(at_most(g, limit), -1000.0 / alpha)
        y, low = product_parts(c * 0.0 + alpha, c) if FINE else (alpha * c, 0.0)
        value, slope = _unit(c, y, low, alpha * c, FINE)
        return value, tl.where(g > limit, 0.0, slope)
    else:
        tl.static_assert(KIND == "swiglu_clamp", "an activation that Triton's kernels do not know")
        c = at_least(at_most(g, limit), -1000.0)
        value, slope = _unit(c, c, 0.0, c, FINE)
        return value, tl.where(g > limit, 0.0, slope)


@triton.jit
def _factor(u, KIND: tl.constexpr, limit):
    """What the activated gate is multiplied by."""
    if KIND == "swiglu_oai":
        return at_most(at_least(u, -limit), limit) + 1.0
    elif KIND == "swiglu_clamp":
        return at_most(at_least(u, -limit), limit)
    else:
        return u


@triton.jit
def activate(g, u, KIND: tl.constexpr, GATED: tl.constexpr, alpha, limit, FINE: tl.constexpr):
    """``act(g) * u`` in float32; u is ignored when not GATED. FINE: the result is not rounded to 16 bits."""
    out, _ = _value_and_slope(g, KIND, alpha, limit, FINE)
    if GATED:
        if KIND == "relu2":
            # A large gate and a zero up give 0, not inf * 0.
            r = at_least(g, 0.0)
            out = r * (r * u)
        else:
            out = out * _factor(u, KIND, limit)
    return out


@triton.jit
def slopes(g, u, KIND: tl.constexpr, GATED: tl.constexpr, alpha, limit, FINE: tl.constexpr):
    """``act(g) * u`` and its derivatives by g and by u, in float32; u is ignored when not GATED."""
    value, slope = _value_and_slope(g, KIND, alpha, limit, FINE)
    hidden, by_gate, by_up = value, slope, value
    if GATED:
        factor = _factor(u, KIND, limit)
        if KIND == "swiglu_oai" or KIND == "swiglu_clamp":
            by_up = tl.where(tl.abs(u) > limit, 0.0, value)
        by_gate = slope * factor
        hidden = activate(g, u, KIND, True, alpha, limit, FINE)
    return hidden, by_gate, by_up


def activation_numbers(activation: Activation | None) -> tuple[float, float]:
    """alpha and limit, as `activate` and `slopes` take them; refuses a kind that they do not know."""
    if activation is None:
        return 1.0, 1.0
    KINDS[activation.kind]
    return activation.alpha, activation.limit


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
    out = activate(g, u, KIND, GATED, alpha, limit, gate_ptr.dtype.element_ty == tl.float32)
    tl.store(out_ptr + index, out.to(out_ptr.dtype.element_ty), mask)


def _parts(gate_up: Tensor, up: Tensor | None, gated: bool, layout: str) -> tuple[Tensor, int, int, int]:
    """Where up begins (beside the dense gate), the width of a result, and the strides of rows and columns."""
    if up is not None:
        return up, gate_up.shape[-1], gate_up.shape[-1], 1
    if not gated:
        return gate_up, gate_up.shape[-1], gate_up.shape[-1], 1
    width, flat = gate_up.shape[-1] // 2, gate_up.view(-1)
    return (flat[1:], width, 2 * width, 2) if interleaved(layout) else (flat[width:], width, 2 * width, 1)


def glu(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> Tensor:
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
    _, by_gate, by_up = slopes(g, u, KIND, GATED, alpha, limit, gate_ptr.dtype.element_ty == tl.float32)
    tl.store(d_gate_ptr + at, (d * by_gate).to(d_gate_ptr.dtype.element_ty), mask)
    if GATED:
        tl.store(d_up_ptr + at, (d * by_up).to(d_up_ptr.dtype.element_ty), mask)


def glu_backward(
    grad: Tensor, gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str
) -> tuple[Tensor, Tensor]:
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
