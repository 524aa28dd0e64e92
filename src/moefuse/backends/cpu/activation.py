"""glu on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.codes import interleaved
from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import activation_arg, tensor_arg
from moefuse.types import Activation


def glu(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> Tensor:
    together = up is None and activation.gated
    I = gate_up.shape[-1] // 2 if together else gate_up.shape[-1]
    out = torch.empty((*gate_up.shape[:-1], I), dtype=gate_up.dtype)
    _native.core.glu(
        tensor_arg(gate_up), tensor_arg(up), out.numel() // max(I, 1), I, activation_arg(activation),
        activation.gated, interleaved(layout), tensor_arg(out), _native.threads(),
    )  # fmt: skip
    return out


def glu_backward(
    grad: Tensor, gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str
) -> tuple[Tensor, Tensor]:
    I = grad.shape[-1]
    d_gate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype)
    d_up = torch.empty(0 if up is None else up.shape, dtype=gate_up.dtype)
    _native.core.glu_backward(
        tensor_arg(grad), tensor_arg(gate_up), tensor_arg(up), grad.numel() // max(I, 1), I,
        activation_arg(activation), activation.gated, interleaved(layout), tensor_arg(d_gate_up), tensor_arg(d_up),
        _native.threads(),
    )  # fmt: skip
    return d_gate_up, d_up
