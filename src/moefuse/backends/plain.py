"""The product of numbers by torch, for backends that have nothing faster for many rows."""

from __future__ import annotations

import torch
from torch import Tensor


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> None:
    """``x @ weight.T`` into ``out``, of any row stride, with what is to be added.

    Where residual or bias has the type of x, one of them is added before the sum is rounded.
    """
    added = [t for t in (residual, bias) if t is not None]
    first = next((t for t in added if t.dtype == x.dtype), None)
    if first is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(first, x, weight.T, out=out)
    for t in added:
        if t is not first:
            out.add_(t)
