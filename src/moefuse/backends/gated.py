"""Where the gate and the up rows of a stack lie: views, for the backends whose kernels take the two apart."""

from __future__ import annotations

from torch import Tensor


def gate_and_up(stack: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Gate rows and up rows of ``[E, 2 * I, ...]``."""
    I = stack.shape[1] // 2
    return (stack[:, :I], stack[:, I:]) if layout == "halves" else (stack[:, ::2], stack[:, 1::2])


def up_biases(bias: Tensor | None, apart: bool, layout: str, gated: bool) -> tuple[Tensor | None, Tensor | None]:
    """The biases of gate rows and of up rows; of rows in stacks ``apart`` they lie in halves."""
    if bias is None or not gated:
        return bias, bias
    return gate_and_up(bias, "halves" if apart else layout)
