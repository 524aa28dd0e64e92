"""experts on Apple GPUs: two launches for few tokens, four for more; a norm after few tokens is one of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.gated import up_biases
from moefuse.backends.metal import tiles
from moefuse.backends.metal.activation import kind_of, numbers_of
from moefuse.backends.metal.blocks import Rows, numbers
from moefuse.backends.metal.combine import Tail, weighted_sum
from moefuse.backends.metal.grouped_linear import product, up_rows
from moefuse.backends.metal.launch import ceil_div, launch, or_stand_in, wide
from moefuse.backends.metal.plan import plan
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
    tail = Tail(x, shared, shared_gate, shared_logit, residual, norm_weight)
    stacks = up_rows(gate_up, up, layout, activation.gated)
    down_rows = Rows.of(down)
    biases = up_biases(gate_up_bias, up is not None, layout, activation.gated)
    if x.shape[0] <= tiles.FEW_TOKENS and all(stack.dense for stack in (*stacks, down_rows)):
        _few(
            x, ids, weights, stacks, biases, down_rows, down.shape, down_bias, tail, eps, activation,
            out, normed_out,
        )  # fmt: skip
        return
    S, E, I = ids.numel(), down.shape[0], down.shape[2]
    # A plan that a caller brought with other ids may leave rows out that the ids have.
    make_rows = torch.empty if offsets is None else torch.zeros
    if offsets is None or order is None or inverse is None:
        _, offsets, order, inverse = plan(ids, E)
    # Float32 in between, as for few tokens: prefill and decode then differ by the rounding of the result alone.
    hidden = torch.empty((S, I), dtype=torch.float32, device=x.device)
    product(
        x, stacks, biases, offsets, order, gather=True, scatter=False, fill=False, activation=activation, out=hidden
    )
    y = make_rows((S, x.shape[1]), dtype=torch.float32, device=x.device)
    product(
        hidden, (down_rows, down_rows), (down_bias, down_bias), offsets, order, gather=False, scatter=False, fill=False,
        activation=None, out=y,
    )  # fmt: skip
    weighted_sum(y, weights, inverse, ids, E, tail, eps, out, normed_out)


def _few(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: tuple[Rows, Rows],
    biases: tuple[Tensor | None, Tensor | None],
    down: Rows,
    shape: torch.Size,
    down_bias: Tensor | None,
    tail: Tail,
    eps: float,
    activation: Activation,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    """Matrix-vector products, no plan; hidden values stay float32."""
    (T, H), top_k, (E, _, I) = x.shape, ids.shape[1], shape
    ((w, w_code), (u, u_code)), (bias, up_bias) = stacks, biases
    normed = out if normed_out is None else normed_out
    files = ("combine", "blocks", "few")
    last_bias = or_stand_in(down_bias, x)
    hidden = torch.empty((T * top_k, I), dtype=torch.float32, device=x.device)
    macros = {
        "X_T": x.dtype, "BIAS_T": x.dtype if bias is None else bias.dtype, "DOWN_BIAS_T": last_bias.dtype,
        "W_T": w.dtype, "U_T": u.dtype, "DOWN_T": down.data.dtype, "W_FORMAT": w_code, "U_FORMAT": u_code,
        "DOWN_FORMAT": down.code, "WIDE": wide(x, hidden, *numbers(*stacks, down)), "Y_T": x.dtype,
        "WEIGHT_T": weights.dtype, **tail.types, "OUT_T": out.dtype, "NORMED_T": normed.dtype, "ID_T": ids.dtype,
    }  # fmt: skip
    launch(
        "few_up", files, macros, (ceil_div(I, 8), T * top_k), 128, x, ids, w, u, x if bias is None else bias,
        x if up_bias is None else up_bias, hidden,
        [E, top_k, I, H, x.stride(0), *w.stride()[:2], *u.stride()[:2], int(bias is not None),
         *((0, 0) if bias is None else bias.stride()), kind_of(activation), int(activation.gated)],
        numbers_of(activation),
    )  # fmt: skip
    total = torch.empty((T, H) if tail.has_norm else 1, dtype=torch.float32, device=x.device)
    launch(
        "few_down", files, macros, (ceil_div(H, 8), T), 128, hidden, ids, weights, down.data, last_bias,
        tail.shared, tail.factor, tail.residual, total, out, [I, *down.data.stride()[:2], int(down_bias is not None)],
        tail.sizes(T, H, top_k, E, None, ids),
    )  # fmt: skip
    if tail.has_norm:
        launch("norm_rows", files, macros, (T,), 256, total, tail.norm, normed, H, float(eps))
