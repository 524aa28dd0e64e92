"""What `moefuse.nn.MoE` and patched transformers modules share: stacks as the ops take them, and the shared expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moefuse.ops._core.arithmetic import widen
from moefuse.ops.experts import experts
from moefuse.types import Activation, Stacks, Weight


def stack_arguments(stacks: Stacks) -> dict[str, Any]:
    """Stacks as keyword arguments of `moefuse.experts` and `moefuse.moe`."""
    given = stacks._asdict()
    up = given.pop("up")
    if up is not None:
        given["gate_up"] = stacks.gate_up, up
    return given


def shared_expert(x: Tensor, stacks: Stacks, activation: Activation, backend: str | None = None) -> Tensor:
    """The output ``[T, H]`` of a shared expert: an expert alone in its stacks, to which every token goes."""
    ids, weights = x.new_zeros((x.shape[0], 1), dtype=torch.int32), x.new_ones((x.shape[0], 1))
    out: Any = experts(x, ids, weights, **stack_arguments(stacks), activation=activation, backend=backend)
    return out  # type: ignore[no-any-return]  # no norm_weight: one tensor


def shared_logit(x: Tensor, shared_gate: Tensor | None) -> Tensor | None:
    """``[T]``, whose sigmoid weights the shared expert; None where it has no gate ``[H]``."""
    return None if shared_gate is None else widen(x) @ widen(shared_gate)


def weight_of(module: nn.Module) -> Weight | None:
    """The weight ``[N, K]`` of a linear layer; None where it is another kind of module."""
    return module.weight if type(module) is nn.Linear else None
