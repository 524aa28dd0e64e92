"""combine on the CPU."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Outputs, Tail


def combine(y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail, outputs: Outputs) -> None:
    _native.core.combine(y, weights, inverse, tail, outputs, _native.threads())
