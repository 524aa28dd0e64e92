"""gate on Apple GPUs: one launch for few tokens and a router of usual size, else two."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.metal import tiles
from moefuse.backends.metal.launch import ceil_div, launch, or_stand_in, wide
from moefuse.backends.metal.route import experts_per_lane, results, rule_numbers, rule_of
from moefuse.types import Routing


def gate(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    logit_bias: Tensor | None,
    per_expert_scale: Tensor | None,
    eps: float,
    routing: Routing,
    return_normed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    (T, H), E = x.shape, weight.shape[0]
    weights, ids = results(T, routing, x.device)
    normed = torch.empty(x.shape if return_normed else 0, dtype=x.dtype, device=x.device)
    norm = or_stand_in(norm_weight, x)
    added, logit_added = or_stand_in(bias, weights), or_stand_in(logit_bias, weights)
    factor = or_stand_in(per_expert_scale, weights)
    aligned = wide(x, weight, norm)
    macros = {
        "X_T": x.dtype, "ROUTER_T": weight.dtype, "NORM_T": norm.dtype, "LOGIT_BIAS_T": logit_added.dtype,
        "BIAS_T": added.dtype, "SCALE_T": factor.dtype, "LOGITS_T": torch.float32,
        "EXPERTS_PER_LANE": experts_per_lane(E), "WIDE": aligned,
    }  # fmt: skip
    files = ("route", "gate")
    sizes = [H, x.stride(0), weight.stride(0), int(norm_weight is not None), int(return_normed),
             int(logit_bias is not None)]  # fmt: skip
    after = (
        norm, logit_added, added, factor, weights, ids, normed if return_normed else x,
        rule_of(routing, E, bias, per_expert_scale), rule_numbers(routing), sizes, float(eps),
    )  # fmt: skip
    if T <= tiles.GATE_FEW_TOKENS and E * H <= tiles.WHOLE_ROUTER:
        launch("gate_whole", files, macros, (T,), 32 * min(32, E), x, weight, *after)
        return weights, ids, normed
    logits = torch.empty((T, E), dtype=torch.float32, device=x.device)
    if T <= tiles.GATE_FEW_TOKENS:
        launch("gate_logits", files, macros, (ceil_div(E, 8), T), 256, x, weight, norm, logits, sizes, E)
    else:
        launch(
            "gate_logits_tiled", ("blocks", "tiles", "gate_tiled"),
            {"X_T": x.dtype, "W_T": weight.dtype, "NORM_T": norm.dtype, "WIDE": aligned},
            (ceil_div(E, tiles.BLOCK_N), ceil_div(T, tiles.BLOCK_M)), 128, x, weight, norm, logits,
            [T, E, H, x.stride(0), weight.stride(0), int(norm_weight is not None)],
        )  # fmt: skip
    launch("gate_route", files, macros, (T,), 32, x, logits, *after)
    return weights, ids, normed
