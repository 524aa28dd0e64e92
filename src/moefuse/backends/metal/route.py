"""route on Apple GPUs: one simdgroup per token."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from moefuse.backends.codes import sums_two
from moefuse.backends.metal import codes
from moefuse.backends.metal.launch import Shader, given, or_stand_in, types_of
from moefuse.types import Routing

#: the fields of `Routing` that enter `rule_of` and `rule_numbers`
_RULE = {"top_k", "score", "renormalize", "renormalize_after_scale", "groups", "top_groups", "group_score", "softcap"}
_NUMBERS = {"scale", "softcap", "norm_floor"}


def rule_of(routing: Routing, E: int, bias: Tensor | None, per_expert_scale: Tensor | None) -> list[int]:
    """The fields of ``Rule`` in route.metal."""
    for field in dataclasses.fields(routing):
        if field.name not in _RULE | _NUMBERS and getattr(routing, field.name) != field.default:
            raise NotImplementedError(f"metal: no kernels for the field {field.name!r} of Routing")
    score, renormalize = codes.SCORE[routing.score], (routing.renormalize, routing.renormalize_after_scale)
    groups = (routing.groups, routing.top_groups, sums_two(routing.group_score))
    rule = (E, routing.top_k, score, *renormalize, *groups, routing.softcap is not None)
    return [*map(int, rule), *given(bias, per_expert_scale)]


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
    types = types_of(LOGITS=logits, BIAS=added, SCALE=factor)
    shader = Shader(("route",), {**types, "EXPERTS_PER_LANE": experts_per_lane(E)})
    rule, numbers = rule_of(routing, E, bias, per_expert_scale), rule_numbers(routing)
    shader.launch("route", (T,), 32, logits, added, factor, weights, ids, rule, numbers, logits.stride(0))
    return weights, ids
