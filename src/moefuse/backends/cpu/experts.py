"""experts on the CPU: the whole expert MLP, with combine and tail, in one call."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Activation, Outputs, Plan, Stacks, Tail


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan | None,
    activation: Activation,
    tail: Tail,
    outputs: Outputs,
    z: Tensor | None,
) -> None:
    stacks = _native.all_readable(stacks)
    _native.core.experts(x, ids, weights, stacks, plan, activation, tail, outputs, z, _native.threads())
