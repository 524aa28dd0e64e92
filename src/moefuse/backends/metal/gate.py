"""gate on Apple GPUs: one launch for few tokens and a router of usual size, else two."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse import backends
from moefuse.backends.metal import tiles
from moefuse.backends.metal.launch import Shader, ceil_div, given, or_stand_in, types_of, wide
from moefuse.backends.metal.route import experts_per_lane, results, rule_numbers, rule_of
from moefuse.types import Router, Routing


def gate(x: Tensor, router: Router, routing: Routing, return_normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    (T, H), weight, E = x.shape, router.weight, router.weight.shape[0]
    weights, ids = results(T, routing, x.device)
    normed = torch.empty(x.shape if return_normed else 0, dtype=x.dtype, device=x.device)
    norm, logit_bias = or_stand_in(router.norm_weight, x), or_stand_in(router.logit_bias, weights)
    bias, scale = or_stand_in(router.bias, weights), or_stand_in(router.per_expert_scale, weights)
    aligned = wide(x, weight, norm)
    macros = types_of(X=x, ROUTER=weight, NORM=norm, LOGIT_BIAS=logit_bias, BIAS=bias, SCALE=scale)
    macros |= {"LOGITS_T": torch.float32, "EXPERTS_PER_LANE": experts_per_lane(E), "WIDE": aligned}
    shader = Shader(("route", "gate"), macros)
    has_norm, has_logit_bias = given(router.norm_weight, router.logit_bias)
    sizes = [H, x.stride(0), weight.stride(0), has_norm, int(return_normed), has_logit_bias]
    rule = rule_of(routing, E, router.bias, router.per_expert_scale), rule_numbers(routing)
    buffers = norm, logit_bias, bias, scale, weights, ids, normed if return_normed else x
    few = T <= tiles.GATE_DECODE_TOKENS and not backends.invariant()
    if few and E * H <= tiles.WHOLE_ROUTER:
        group_size = 32 * min(32, E)
        shader.launch("gate_whole", (T,), group_size, x, weight, *buffers, *rule, sizes, float(router.eps))
        return weights, ids, normed
    logits = torch.empty((T, E), dtype=torch.float32, device=x.device)
    if few:
        shader.launch("gate_logits", (ceil_div(E, 8), T), 256, x, weight, norm, logits, sizes, E)
    else:
        tiled = Shader(("weights", "tiles", "gate_tiled"), {**types_of(X=x, W=weight, NORM=norm), "WIDE": aligned})
        groups = ceil_div(E, tiles.TILE_N), ceil_div(T, tiles.TILE_M)
        tiled_sizes = [T, E, H, x.stride(0), weight.stride(0), has_norm]
        tiled.launch("gate_logits_tiled", groups, 128, x, weight, norm, logits, tiled_sizes)
    shader.launch("gate_route", (T,), 32, x, logits, *buffers, *rule, sizes, float(router.eps))
    return weights, ids, normed
