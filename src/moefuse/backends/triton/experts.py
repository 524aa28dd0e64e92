"""experts on NVIDIA GPUs: two launches for few tokens (three if invariant), four and up for more."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.gated import Weights
from moefuse.backends.triton import experts_few
from moefuse.backends.triton.combine import slot_sum, weighted_sum
from moefuse.backends.triton.experts_decode import experts_decode
from moefuse.backends.triton.grouped_linear import product, rows_of, up_weights
from moefuse.backends.triton.plan import TokenTiles
from moefuse.backends.triton.plan import plan as make_plan
from moefuse.backends.triton.runtime.tiles import decodes, product_tile, slot_columns
from moefuse.backends.triton.runtime.tuned import Product, tile_for
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
    if plan is None and decodes(x.shape[0]):
        experts_decode(x, ids, weights, stacks, activation, tail, outputs)
        return
    if plan is None and z is None and experts_few.takes(x, stacks):
        experts_few.experts_few(x, ids, weights, stacks, activation, tail, outputs)
        return
    (T, top_k), (E, H, I) = ids.shape, stacks.down.shape
    given = None if plan is None else plan.offsets
    if plan is None:
        plan = Plan(*make_plan(ids, E), top_k, trusted=True)
    size, gated = x.element_size(), activation.gated
    gate_up = up_weights(stacks, gated)
    hidden = torch.empty((T * top_k, I), dtype=x.dtype, device=x.device)
    tiles = TokenTiles(plan.offsets, T * top_k)
    if z is not None:
        tile = product_tile(T * top_k / E, size, gated, x.device, gate_up.w.format or gate_up.u.format)
        product(x, gate_up, plan, activation, hidden, tile, gather=True, fill=True, z=z, tiles=tiles)
        _down_by_columns(hidden, weights, stacks, plan, ids, tail, outputs, tiles)
        return
    format = gate_up.w.format or gate_up.u.format
    tile = tile_for(Product("up", E, I, H, top_k, T, size, gated, format), x.device)
    product(x, gate_up, plan, activation, hidden, tile, gather=True, tiles=tiles)
    y = torch.empty((T * top_k, H), dtype=x.dtype, device=x.device)
    down = Weights.of(stacks.down, stacks.down_bias, rows_of)
    tile = tile_for(Product("down", E, H, I, top_k, T, size, False, down.w.format), x.device)
    product(hidden, down, plan, None, y, tile, tiles=tiles)
    weighted_sum(y, weights, plan.inverse, tail, outputs, num_experts=E, ids=ids, offsets=given)


def _down_by_columns(
    hidden: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan,
    ids: Tensor,
    tail: Tail,
    outputs: Outputs,
    tiles: TokenTiles,
) -> None:
    """The down product and its sum, some columns at a time where all of them would be much memory."""
    weight = rows_of(stacks.down)
    T, H = outputs.out.shape
    S, E, size = plan.assignments, plan.num_experts, hidden.element_size()
    tile = product_tile(S / E, size, False, hidden.device, weight.format)
    width = slot_columns(S, H, size, weight.data.nbytes)
    plain = tail.shared is None and tail.residual is None and tail.norm_weight is None
    summed = outputs.out if plain else None
    if width < H and summed is None:
        summed = torch.empty((T, H), dtype=torch.float32, device=hidden.device)
    for first in range(0, H, width):
        some = slice(first, first + width)
        rows = weight._replace(first=first) if weight.planes else weight._replace(data=weight.data[:, some])
        down = Weights(rows, rows, None if stacks.down_bias is None else stacks.down_bias[:, some])
        y = torch.empty((S, min(width, H - first)), dtype=hidden.dtype, device=hidden.device)
        product(hidden, down, plan, None, y, tile, tiles=tiles)
        if summed is None:
            weighted_sum(y, weights, plan.inverse, tail, outputs, num_experts=E, ids=ids, offsets=plan.offsets)
        else:
            slot_sum(y, weights, plan, summed[:, some])
    if summed is not None and not plain:
        ones = torch.ones((T, 1), dtype=torch.float32, device=hidden.device)
        weighted_sum(summed, ones, None, tail, outputs, num_experts=E)
