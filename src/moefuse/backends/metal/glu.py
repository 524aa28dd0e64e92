"""glu and its gradient on Apple GPUs, and how kernels are told of an activation."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.gated import up_of
from moefuse.backends.metal import codes
from moefuse.backends.metal.launch import Shader, ceil_div
from moefuse.types import Activation


def kind_of(activation: Activation | None) -> int:
    """The kind's number in the shaders."""
    return -1 if activation is None else codes.KINDS[activation.kind]


def numbers_of(activation: Activation | None) -> list[float]:
    """The fields of ``ActivationNumbers`` in activation.metal."""
    return [1.0, 1.0] if activation is None else [float(activation.alpha), float(activation.limit)]


def _sizes(gate_up: Tensor, width: int, step: int, activation: Activation) -> list[int]:
    """The fields of ``GluSizes`` in glu.metal."""
    return [width, gate_up.shape[-1], step, kind_of(activation), int(activation.gated)]


def glu(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> Tensor:
    up_view, width, step = up_of(gate_up, up, activation, layout)
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    sizes, numbers = _sizes(gate_up, width, step, activation), numbers_of(activation)
    shader = Shader(("activation", "glu"), {"X_T": gate_up.dtype})
    shader.launch("glu", (ceil_div(width, 256), out.numel() // width), 256, gate_up, up_view, out, sizes, numbers)
    return out


def glu_backward(
    grad: Tensor, gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str
) -> tuple[Tensor, Tensor]:
    d_gate_up = torch.empty_like(gate_up)
    d_up = grad.new_empty(0) if up is None else torch.empty_like(up)
    if grad.numel() == 0:
        return d_gate_up, d_up
    up_view, width, step = up_of(gate_up, up, activation, layout)
    d_up_view, _, _ = up_of(d_gate_up, None if up is None else d_up, activation, layout)
    buffers = grad.to(gate_up.dtype), gate_up, up_view, d_gate_up, d_up_view
    sizes, numbers = _sizes(gate_up, width, step, activation), numbers_of(activation)
    shader = Shader(("activation", "glu"), {"X_T": gate_up.dtype})
    shader.launch("glu_backward", (ceil_div(width, 256), grad.numel() // width), 256, *buffers, sizes, numbers)
    return d_gate_up, d_up
