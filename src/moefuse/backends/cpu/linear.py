"""linear on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Projections


def linear(x: Tensor, projections: Projections, residual: Tensor | None) -> Tensor:
    out = torch.empty((x.shape[0], projections.stops[-1]), dtype=x.dtype)
    if out.numel():
        _native.core.linear(x, projections, residual, out, _native.threads())
    return out
