"""route on Apple GPUs: one simdgroup per token."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.codes import sums_two
from moefuse.backends.metal.codes import SCORE
from moefuse.backends.metal.launch import launch, or_stand_in
from moefuse.types import Routing


def rule_of(routing: Routing, E: int, bias: Tensor | None, per_expert_scale: Tensor | None) -> list[int]:
    """The fields of ``Rule`` in route.metal."""
    return [
        E, routing.top_k, SCORE[routing.score], int(routing.renormalize), int(routing.renormalize_after_scale),
        routing.groups, routing.top_groups, int(sums_two(routing.group_score)), int(routing.softcap is not None),
        int(bias is not None), int(per_expert_scale is not None),
    ]  # fmt: skip


def rule_numbers(routing: Routing) -> list[float]:
    """The fields of ``RuleNumbers`` in route.metal."""
    return [float(routing.scale), float(routing.softcap or 1.0), float(routing.floor)]


def experts_per_lane(E: int) -> int:
    """A power of two from 4 up, 32 times which covers E: few numbers, few libraries."""
    lanes = 4
    while 32 * lanes < E:
        lanes *= 2
    return lanes


def results(T: int, routing: Routing, device: torch.device) -> tuple[Tensor, Tensor]:
    """Empty weights and ids."""
    shape = (T, routing.top_k)
    return torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)


def route(
    logits: Tensor, bias: Tensor | None, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    weights, ids = results(T, routing, logits.device)
    added, factor = or_stand_in(bias, weights), or_stand_in(per_expert_scale, weights)
    macros = {"LOGITS_T": logits.dtype, "BIAS_T": added.dtype, "SCALE_T": factor.dtype,
              "EXPERTS_PER_LANE": experts_per_lane(E)}  # fmt: skip
    launch(
        "route", ("route",), macros, (T,), 32, logits, added, factor, weights, ids,
        rule_of(routing, E, bias, per_expert_scale), rule_numbers(routing), logits.stride(0),
    )  # fmt: skip
    return weights, ids
