"""glu on NVIDIA GPUs, and the device function that every epilogue calls."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.launch import launch
from moefuse.types import Activation


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _tanh(x):
    # Through exp(-2|x|), which neither overflows nor cancels for large |x|.
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


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
                out = 0.5 * g * (1.0 + _tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)))
            else:
                out = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
        if GATED:
            out = out * u
    return out


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


def glu(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> Tensor:
    gate_up = gate_up.contiguous()
    halved = activation.gated and up is None
    width = gate_up.shape[-1] // 2 if halved else gate_up.shape[-1]
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    rows = out.numel() // max(width, 1)
    stride_row, stride_col, second = gate_up.shape[-1], 1, gate_up
    if up is not None:
        second = up.contiguous()
    elif halved:
        stride_col = 1 if layout == "halves" else 2
        flat = gate_up.view(-1)
        second = flat[width:] if layout == "halves" else flat[1:]
    BLOCK = 1024
    launch(
        _glu_kernel, (triton.cdiv(out.numel(), BLOCK),), gate_up, second, out, rows, width, stride_row, stride_col,
        activation.alpha, activation.limit, KIND=activation.kind, GATED=activation.gated, BLOCK=BLOCK,
    )  # fmt: skip
    return out
