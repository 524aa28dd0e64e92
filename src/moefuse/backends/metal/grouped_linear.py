"""The grouped product on Apple GPUs, one kernel for both products of an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.gated import Weights
from moefuse.backends.metal.codes import format_code
from moefuse.backends.metal.glu import kind_of, numbers_of
from moefuse.backends.metal.launch import Shader, ceil_div, given, or_stand_in, types_of, wide
from moefuse.backends.metal.tiles import TILE_M, TILE_N
from moefuse.types import Activation, Plan, Weight


def _most_tiles(S: int, E: int) -> int:
    """No plan of S assignments to E experts has more row tiles, those without an expert counted."""
    return min(S, S // TILE_M + E + 1)


def project(
    x: Tensor,
    by: Weights,
    plan: Plan,
    activation: Activation | None,
    out: Tensor,
    *,
    gather: bool,
    scatter: bool,
    fill: bool,
) -> None:
    """Launch the grouped product into ``out`` ``[S, N]``; ``fill`` writes zeros for assignments without an expert."""
    (S, N), E, (rows, K) = out.shape, plan.num_experts, x.shape
    w, u, bias = by.w.data, by.u.data, or_stand_in(by.bias, x)
    up_bias = or_stand_in(by.up_bias, bias)
    macros = types_of(X=x, W=w, U=u, BIAS=bias, OUT=out)
    macros |= {"W_FORMAT": format_code(by.w), "U_FORMAT": format_code(by.u), "WIDE": wide(x, w, u)}
    macros["GATED"] = int(activation is not None and activation.gated)
    bias_strides = (0, 0) if by.bias is None else by.bias.stride()
    sizes = [S, E, N, K, max(1, S // max(1, rows)), int(gather), int(scatter), int(fill)]
    sizes += [x.stride(0), *w.stride(), *u.stride(), *given(by.bias), *bias_strides, kind_of(activation)]
    shader = Shader(("activation", "weights", "tiles", "grouped_linear"), macros)
    groups, buffers = (ceil_div(N, TILE_N), _most_tiles(S, E)), (x, w, u, bias, up_bias, plan.offsets, plan.order, out)
    shader.launch("grouped_product", groups, 128, *buffers, sizes, numbers_of(activation))


def grouped_linear(x: Tensor, weight: Weight, bias: Tensor | None, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    out = torch.empty((plan.assignments, weight.shape[1]), dtype=x.dtype, device=x.device)
    project(x, Weights.of(weight, bias), plan, None, out, gather=gather, scatter=scatter, fill=True)
    return out
