"""grouped_linear on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.quant.arrange import FILE
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Plan, Weight


def grouped_linear(x: Tensor, weight: Weight, bias: Tensor | None, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    y = torch.empty((plan.assignments, weight.shape[1]), dtype=x.dtype)
    if isinstance(weight, QuantTensor):
        weight = weight.arranged(FILE)
    _native.core.grouped_linear(x, weight, bias, plan, gather, scatter, y, _native.threads())
    return y
