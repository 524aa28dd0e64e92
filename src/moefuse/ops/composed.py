"""The experts as a chain of ops, for callers that must come in between: product, activation, product, weighted sum.

Modules take it for adapters and for activations and norms of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import masked_weights
from moefuse.ops.combine import combine
from moefuse.ops.glu import glu
from moefuse.ops.grouped_linear import grouped_linear
from moefuse.types import Activation, Plan, Stacks, Tail, Weight


class Adapters(Protocol):
    """What is added to the two products."""

    def up(self, x: Tensor, plan: Plan, backend: str | None) -> Tensor:
        """``[S, 2I]``, expert-major, for tokens ``[T, H]``."""

    def down(self, hidden: Tensor, plan: Plan, backend: str | None) -> Tensor:
        """``[S, H]``, in slot order, for expert-major rows ``[S, I]``."""


def composed(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan,
    activation: Activation | Callable[[Tensor], Tensor],
    tail: Tail,
    backend: str | None = None,
    *,
    adapters: Adapters | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `moefuse.experts` computes, one differentiable op at a time; arguments were checked by the caller.

    Args:
        x, ids, weights, stacks, tail, backend: as in `moefuse.experts`.
        plan: that of the ids.
        activation: one of ours, or a function from pre-activations ``[S, 2I]``, laid out as the stack, to ``[S, I]``.
        adapters: what is added to both products.
        after: a function of the experts' outputs ``[S, H]``, row by row, before they are weighted.
    """

    def product(stack: Weight, bias: Tensor | None) -> Tensor:
        return grouped_linear(x, stack, plan, gather=True, scatter=False, bias=bias, backend=backend)

    up: Tensor | None = None
    if stacks.up is None:
        z = product(stacks.gate_up, stacks.gate_up_bias)
    else:
        biases = (None, None) if stacks.gate_up_bias is None else stacks.gate_up_bias.chunk(2, -1)
        z, up = map(product, (stacks.gate_up, stacks.up), biases)
    if adapters is not None:
        z, up = _joined(z, up) + adapters.up(x, plan, backend), None
    if not isinstance(activation, Activation):
        hidden = activation(_joined(z, up)).to(x.dtype)
    elif up is None:
        hidden = glu(z, activation, layout=stacks.layout, backend=backend)
    else:
        hidden = glu(z, up, activation, backend=backend)
    y = grouped_linear(hidden, stacks.down, plan, gather=False, scatter=True, bias=stacks.down_bias, backend=backend)
    if adapters is not None:
        y = y + adapters.down(hidden, plan, backend)
    if after is not None:
        y = after(y).to(x.dtype)
    return combine(y, masked_weights(weights, ids, plan.num_experts), **tail._asdict(), backend=backend)


def _joined(z: Tensor, up: Tensor | None) -> Tensor:
    return z if up is None else torch.cat((z, up), -1)
