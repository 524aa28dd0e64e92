"""Weights as kernels see them: numbers, or the bytes of blocks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefuse.backends.metal.codes import BLOCKS
from moefuse.quant.tensor import QuantTensor


class Rows(NamedTuple):
    """Rows ``[E, N, K]`` of numbers, or ``[E, N, row bytes]`` of blocks, and which of the two."""

    data: Tensor
    code: int = 0

    @classmethod
    def of(cls, weight: Tensor | QuantTensor) -> Rows:
        return cls(weight.blocks, BLOCKS[weight.format]) if isinstance(weight, QuantTensor) else cls(weight)

    @property
    def dense(self) -> bool:
        """Whether the elements of a row lie together."""
        return self.data.stride(2) == 1


def numbers(*rows: Rows) -> tuple[Tensor, ...]:
    """Those that are numbers, whose alignment a vector load asks for."""
    return tuple(row.data for row in rows if row.code == 0)
