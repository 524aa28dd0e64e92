"""glu on the CPU."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Activation


def glu(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> Tensor:
    together = up is None and activation.gated
    I = gate_up.shape[-1] // 2 if together else gate_up.shape[-1]
    out = _native.empty((*gate_up.shape[:-1], I), dtype=gate_up.dtype)
    _native.core.glu(gate_up, up, activation, layout, out, _native.threads())
    return out


def glu_backward(
    grad: Tensor, gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str
) -> tuple[Tensor, Tensor]:
    d_gate_up = _native.empty(gate_up.shape, dtype=gate_up.dtype)
    d_up = _native.empty(0 if up is None else up.shape, dtype=gate_up.dtype)
    _native.core.glu_backward(grad, gate_up, up, activation, layout, d_gate_up, d_up, _native.threads())
    return d_gate_up, d_up
