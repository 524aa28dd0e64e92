"""Where the gate and the up rows of a stack lie: views, for the backends whose kernels take the two apart."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.codes import interleaved


def gate_and_up(stack: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Gate rows and up rows of ``[E, 2 * I, ...]``."""
    I = stack.shape[1] // 2
    return (stack[:, ::2], stack[:, 1::2]) if interleaved(layout) else (stack[:, :I], stack[:, I:])


def up_biases(bias: Tensor | None, apart: bool, layout: str, gated: bool) -> tuple[Tensor | None, Tensor | None]:
    """The biases of gate rows and of up rows; of rows in stacks ``apart`` they lie in halves."""
    if bias is None or not gated:
        return bias, bias
    return gate_and_up(bias, "halves" if apart else layout)
