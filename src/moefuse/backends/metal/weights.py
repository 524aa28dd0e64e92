"""Weights as kernels see them: numbers, or the bytes of blocks."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefuse.backends.gated import gate_and_up, up_biases
from moefuse.backends.metal import codes
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Stacks, Weight


class Rows(NamedTuple):
    """Rows ``[E, N, K]`` of numbers, or ``[E, N, row bytes]`` of blocks, and which of the two."""

    data: Tensor
    code: int = 0

    @classmethod
    def of(cls, weight: Weight) -> Rows:
        return cls(weight.blocks, codes.BLOCKS[weight.format]) if isinstance(weight, QuantTensor) else cls(weight)

    @property
    def dense(self) -> bool:
        """Whether the elements of a row lie together."""
        return self.data.stride(2) == 1


class Projection(NamedTuple):
    """Gate rows and up rows with their biases, as views; of a product that is not gated, the same rows twice."""

    rows: Rows
    up_rows: Rows
    bias: Tensor | None
    up_bias: Tensor | None

    @classmethod
    def of(cls, weight: Weight, bias: Tensor | None) -> Projection:
        rows = Rows.of(weight)
        return cls(rows, rows, bias, bias)

    @classmethod
    def of_gate_up(cls, stacks: Stacks, gated: bool) -> Projection:
        biases = up_biases(stacks.gate_up_bias, stacks.up is not None, stacks.layout, gated)
        both = Rows.of(stacks.gate_up)
        if not gated:
            return cls(both, both, *biases)
        if stacks.up is not None:
            return cls(both, Rows.of(stacks.up), *biases)
        gate_proj, up = gate_and_up(both.data, stacks.layout)
        return cls(both._replace(data=gate_proj), both._replace(data=up), *biases)


def numbers(*rows: Rows) -> tuple[Tensor, ...]:
    """Those that are numbers, whose alignment a vector load asks for."""
    return tuple(row.data for row in rows if row.code == 0)
