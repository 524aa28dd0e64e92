"""experts_backward on the CPU, in one call."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import like, or_empty
from moefuse.types import Activation, Plan, Stacks, Wanted


def experts_backward(
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan,
    activation: Activation,
    wanted: Wanted,
    reuse_z: bool,  # noqa: ARG001  # gradients of z are float32 here, and z may not be
) -> tuple[Tensor, ...]:
    gradients = SimpleNamespace(
        x=like(x, wanted.x),
        weights=like(weights, wanted.weights),
        gate_up=like(stacks.gate_up, wanted.gate_up),
        up=like(stacks.up, wanted.up),
        down=like(stacks.down, wanted.down),
        gate_up_bias=like(stacks.gate_up_bias, wanted.gate_up_bias),
        down_bias=like(stacks.down_bias, wanted.down_bias),
    )
    stacks = _native.all_readable(stacks)
    _native.core.experts_backward(d, x, z, weights, stacks, plan, activation, gradients, _native.threads())
    return or_empty(vars(gradients).values())
