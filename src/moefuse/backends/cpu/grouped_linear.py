"""grouped_linear on the CPU, and the gradient of its input through blocks."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Plan, Weight


def grouped_linear(x: Tensor, weight: Weight, bias: Tensor | None, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    y = _native.empty((plan.assignments, weight.shape[1]), dtype=x.dtype)
    weight = _native.readable(weight)
    _native.core.grouped_linear(x, weight, bias, plan, gather, scatter, y, _native.threads())
    return y


def grouped_linear_transposed(grad: Tensor, weight: Weight, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    d_x = _native.empty((plan.assignments, weight.shape[2]), dtype=grad.dtype)
    weight = _native.readable(weight)
    _native.core.grouped_linear_transposed(grad, weight, plan, gather, scatter, d_x, _native.threads())
    return d_x
