"""Weights as kernels take them: gate rows and up rows as views, wherever they lie in their stacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from moefuse.backends.codes import interleaved
from moefuse.quant.arrange import FILE
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation, Stacks, Weight


def gate_and_up(stack: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Gate rows and up rows of ``[E, 2 * I, ...]``."""
    I = stack.shape[1] // 2
    return (stack[:, ::2], stack[:, 1::2]) if interleaved(layout) else (stack[:, :I], stack[:, I:])


def up_of(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> tuple[Tensor, int, int]:
    """Of dense pre-activations: where up begins, the width of a result, and how far a row's columns are apart."""
    width = gate_up.shape[-1]
    if up is not None or not activation.gated:
        return gate_up if up is None else up, width, 1
    half, flat = width // 2, gate_up.view(-1)
    return (flat[1:], half, 2) if interleaved(layout) else (flat[half:], half, 1)


class Rows(NamedTuple):
    """Numbers ``[E, N, K]`` and "", or bytes ``[E, N, row bytes]`` and their format.

    Bytes in planes have no rows to slice: a part of them is ``first`` and every ``step``-th row after it. ``exact``:
    activations are not to be rounded, see `QuantTensor`.
    """

    data: Tensor
    format: str = ""
    planes: bool = False
    first: int = 0
    step: int = 1
    exact: bool = False

    @classmethod
    def of(cls, weight: Weight) -> Rows:
        """As most kernels take them: blocks in the order of a file."""
        if isinstance(weight, QuantTensor):
            return cls(weight.arranged(FILE).blocks, weight.format)
        return cls(weight)

    def gate_and_up(self, layout: str) -> tuple[Rows, Rows]:
        """Gate rows and up rows."""
        if not self.planes:
            w, u = gate_and_up(self.data, layout)
            return self._replace(data=w), self._replace(data=u)
        step = 2 if interleaved(layout) else 1
        return self._replace(step=step), self._replace(first=1 if step == 2 else self.data.shape[1] // 2, step=step)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of numbers; of blocks in planes the bytes of a matrix, its rows, and which of them these are."""
        if self.planes:
            return self.data.stride(0), self.data.shape[1], self.first, self.step
        return (*self.data.stride(), 0)  # type: ignore[return-value]  # three of them


class Weights(NamedTuple):
    """What a grouped product multiplies by: gate (or only) rows and up rows, the same where nothing is gated.

    ``layout`` is that of the columns before the activation.
    """

    w: Rows
    u: Rows
    bias: Tensor | None = None
    up_bias: Tensor | None = None
    layout: str = "halves"

    @classmethod
    def of(cls, weight: Weight, bias: Tensor | None = None, rows_of: Callable[[Weight], Rows] = Rows.of) -> Weights:
        rows = rows_of(weight)
        return cls(rows, rows, bias)

    @classmethod
    def of_gate_up(cls, stacks: Stacks, gated: bool, rows_of: Callable[[Weight], Rows] = Rows.of) -> Weights:
        """Those of the up product. Where gate and up come apart, their biases lie in halves."""
        w = u = rows_of(stacks.gate_up)
        bias = up_bias = stacks.gate_up_bias
        if gated and stacks.up is not None:
            u = rows_of(stacks.up)
        elif gated:
            w, u = w.gate_and_up(stacks.layout)
        if gated and bias is not None:
            bias, up_bias = gate_and_up(bias, stacks.layout if stacks.up is None else "halves")
        return cls(w, u, bias, up_bias, stacks.layout)
