"""grouped_outer on the CPU."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Plan


def grouped_outer(grad: Tensor, x: Tensor, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    out = _native.empty((plan.num_experts, grad.shape[1], x.shape[1]), dtype=grad.dtype)
    _native.core.grouped_outer(grad, x, plan, gather, scatter, out, _native.threads())
    return out
