"""The grouped product on Apple GPUs, one kernel for both products of an expert, and its weight gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.gated import gate_and_up
from moefuse.backends.metal.activation import kind_of, numbers_of
from moefuse.backends.metal.blocks import Rows, numbers
from moefuse.backends.metal.launch import ceil_div, launch, wide
from moefuse.backends.metal.tiles import BLOCK_M, BLOCK_N
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation


def up_rows(
    gate_up: Tensor | QuantTensor, up: Tensor | QuantTensor | None, layout: str, gated: bool
) -> tuple[Rows, Rows]:
    """Gate rows and up rows as views, whatever the layout."""
    both = Rows.of(gate_up)
    if not gated:
        return both, both
    if up is not None:
        return both, Rows.of(up)
    first, second = gate_and_up(both.data, layout)
    return both._replace(data=first), both._replace(data=second)


def _most_tiles(S: int, E: int) -> int:
    """No plan of S assignments to E experts has more row tiles, those without an expert counted."""
    return min(S, S // BLOCK_M + E + 1)


def product(
    x: Tensor,
    stacks: tuple[Rows, Rows],
    biases: tuple[Tensor | None, Tensor | None],
    offsets: Tensor,
    order: Tensor,
    *,
    gather: bool,
    scatter: bool,
    fill: bool,
    activation: Activation | None,
    out: Tensor,
) -> None:
    """Launch the grouped product into ``out`` ``[S, N]``; ``fill`` writes zeros for assignments without an expert."""
    (S, N), E, K = out.shape, offsets.shape[0] - 1, x.shape[1]
    x, ((w, w_code), (u, u_code)), (bias, up_bias) = x, stacks, biases
    gated = activation is not None and activation.gated
    bias_type = x.dtype if bias is None else bias.dtype
    macros = {"X_T": x.dtype, "W_T": w.dtype, "U_T": u.dtype, "W_FORMAT": w_code, "U_FORMAT": u_code,
              "BIAS_T": bias_type, "OUT_T": out.dtype, "GATED": int(gated),
              "WIDE": wide(x, *numbers(*stacks))}  # fmt: skip
    sizes = [
        S, E, N, K, max(1, S // max(1, x.shape[0])), int(gather), int(scatter), int(fill), x.stride(0), *w.stride(),
        *u.stride(), int(bias is not None), *((0, 0) if bias is None else bias.stride()), kind_of(activation),
    ]  # fmt: skip
    launch(
        "grouped_product", ("blocks", "tiles", "grouped_linear"), macros,
        (ceil_div(N, BLOCK_N), _most_tiles(S, E)), 128, x, w, u, x if bias is None else bias,
        x if up_bias is None else up_bias, offsets, order, out, sizes, numbers_of(activation),
    )  # fmt: skip


def grouped_linear(
    x: Tensor,
    weight: Tensor | QuantTensor,
    bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    gather: bool,
    scatter: bool,
) -> Tensor:
    stack = Rows.of(weight)
    out = torch.empty((order.shape[0], weight.shape[1]), dtype=x.dtype, device=x.device)
    product(
        x, (stack, stack), (bias, bias), offsets, order, gather=gather, scatter=scatter, fill=True, activation=None,
        out=out,
    )  # fmt: skip
    return out


def grouped_outer(grad: Tensor, x: Tensor, offsets: Tensor, order: Tensor, gather: bool, scatter: bool) -> Tensor:
    E, N, K, S = offsets.shape[0] - 1, grad.shape[1], x.shape[1], order.shape[0]
    out = torch.empty((E, N, K), dtype=grad.dtype, device=grad.device)
    if S == 0:
        return out.zero_()
    launch(
        "grouped_outer", ("blocks", "tiles", "grouped_outer"), {"X_T": x.dtype, "WIDE": "false"},
        (ceil_div(K, BLOCK_N), ceil_div(N, BLOCK_M), E), 128, grad, x, offsets, order, out,
        [N, K, max(1, S // max(1, x.shape[0])), int(gather), int(scatter), grad.stride(0), x.stride(0)],
    )  # fmt: skip
    return out
