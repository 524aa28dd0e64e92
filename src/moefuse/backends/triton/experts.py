"""experts on NVIDIA GPUs: two launches for few tokens, four and up for more."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.gated import up_biases
from moefuse.backends.triton.combine import weighted_sum
from moefuse.backends.triton.experts_decode import experts_few
from moefuse.backends.triton.grouped_linear import Rows, product, up_rows
from moefuse.backends.triton.plan import TokenTiles, plan
from moefuse.backends.triton.runtime.tiles import FEW_TOKENS
from moefuse.backends.triton.runtime.tuned import Product, tile_for
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor | QuantTensor,
    up: Tensor | QuantTensor | None,
    down: Tensor | QuantTensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor | None,
    order: Tensor | None,
    inverse: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: Activation,
    layout: str,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    if offsets is None and x.shape[0] <= FEW_TOKENS:
        experts_few(
            x, ids, weights, gate_up, up, down, gate_up_bias, down_bias, shared, shared_gate, shared_logit, residual,
            norm_weight, eps, activation, layout, out, normed_out,
        )  # fmt: skip
        return
    (T, top_k), (E, H, _) = ids.shape, down.shape
    S = T * top_k
    given = offsets
    if offsets is None or order is None or inverse is None:
        _, offsets, order, inverse = plan(ids, E)
    tiles = TokenTiles(offsets, S)
    gate_rows, rows_of_up, I = up_rows(gate_up, up, layout, activation.gated)
    biases = up_biases(gate_up_bias, up is not None, layout, activation.gated)
    hidden = torch.empty((S, I), dtype=x.dtype, device=x.device)
    format, gated = gate_rows.format or rows_of_up.format, activation.gated
    tile = tile_for(Product("up", E, I, H, top_k, T, x.element_size(), gated, format), x.device)
    product(
        x, (gate_rows, rows_of_up), biases, offsets, order, gather=True, scatter=False, fill=False,
        activation=activation, out=hidden, tile=tile, tiles=tiles,
    )  # fmt: skip
    y = torch.empty((S, H), dtype=x.dtype, device=x.device)
    down_rows = Rows.of(down)
    tile = tile_for(Product("down", E, H, I, top_k, T, x.element_size(), False, down_rows.format), x.device)
    product(
        hidden, (down_rows, down_rows), (down_bias, None), offsets, order, gather=False, scatter=False, fill=False,
        activation=None, out=y, tile=tile, tiles=tiles,
    )  # fmt: skip
    weighted_sum(
        y, weights, inverse, ids, given, E, shared, shared_gate, shared_logit, residual, norm_weight, eps, out,
        normed_out,
    )  # fmt: skip
