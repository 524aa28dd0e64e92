"""What `moefuse.nn.MoE` and patched transformers modules share: stacks as the ops take them, and the shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import widen
from moefuse.ops._core.invariance import is_invariant
from moefuse.ops.experts import experts
from moefuse.ops.linear import linear
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation, Stacks, Weight


def stack_arguments(stacks: Stacks) -> dict[str, Any]:
    """Stacks as keyword arguments of `moefuse.experts` and `moefuse.moe`."""
    given = stacks._asdict()
    up = given.pop("up")
    if up is not None:
        given["gate_up"] = stacks.gate_up, up
    return given


def one_expert(weight: Weight) -> Weight:
    """A matrix ``[N, K]`` as a stack of one."""
    return replace(weight, blocks=weight.blocks[None]) if isinstance(weight, QuantTensor) else weight.unsqueeze(0)


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type of products of x under ``torch.autocast``; None where it is off."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.float64 if x.dtype == torch.float64 else torch.get_autocast_dtype(kind)


def shared_expert(x: Tensor, stacks: Stacks, activation: Activation, backend: str | None = None) -> Tensor:
    """The output ``[T, H]`` of a shared expert: an expert alone in its stacks, to which every token goes."""
    ids, weights = x.new_zeros((x.shape[0], 1), dtype=torch.int32), x.new_ones((x.shape[0], 1))
    out: Any = experts(x, ids, weights, **stack_arguments(stacks), activation=activation, backend=backend)
    return out  # type: ignore[no-any-return]  # no norm_weight: one tensor


def shared_logit(x: Tensor, shared_gate: Tensor | None) -> Tensor | None:
    """``[T]``, whose sigmoid weights the shared expert; None where it has no gate ``[H]``."""
    if shared_gate is None:
        return None
    if is_invariant():
        return linear(widen(x), widen(shared_gate)[None])[:, 0]
    return widen(x) @ widen(shared_gate)
