"""experts on the CPU: the whole expert MLP, with combine and tail, in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import activation_arg, address, dense, rows_dense, tensor_arg, weight_arg
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
    inverse: Tensor | None,  # noqa: ARG001  # the C++ side keeps rows in slot order and needs none
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
    x, ids, weights, offsets, order = dense(x), dense(ids), dense(weights), dense(offsets), dense(order)
    gate_up, up, down = rows_dense(gate_up), rows_dense(up), rows_dense(down)
    gate_up_bias, down_bias, shared, residual = dense(gate_up_bias), dense(down_bias), dense(shared), dense(residual)
    shared_gate, shared_logit, norm_weight = dense(shared_gate), dense(shared_logit), dense(norm_weight)
    tail = (
        tensor_arg(shared), tensor_arg(shared_gate), tensor_arg(shared_logit), tensor_arg(residual),
        tensor_arg(norm_weight), eps, tensor_arg(out), tensor_arg(normed_out),
    )  # fmt: skip
    T, top_k = ids.shape
    E, H, I = down.shape
    _native.core.experts(
        tensor_arg(x), ids.data_ptr(), ids.dtype == torch.int64, tensor_arg(weights), weight_arg(gate_up),
        weight_arg(up), weight_arg(down), tensor_arg(gate_up_bias), tensor_arg(down_bias), address(offsets),
        address(order), T, top_k, E, H, I, activation_arg(activation), activation.gated, layout == "interleaved",
        tail, _native.threads(),
    )  # fmt: skip
