"""experts on the CPU: the whole expert MLP, with combine and tail, in one call; its backward in another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.backends.codes import interleaved
from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import (
    activation_arg,
    address,
    rows_dense,
    tensor_arg,
    wanted_like,
    weight_arg,
)
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation


def experts_saving(
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
    z: Tensor | None,
) -> None:
    gate_up, up, down = rows_dense(gate_up), rows_dense(up), rows_dense(down)
    tail = (
        tensor_arg(shared), tensor_arg(shared_gate), tensor_arg(shared_logit), tensor_arg(residual),
        tensor_arg(norm_weight), eps, tensor_arg(out), tensor_arg(normed_out),
    )  # fmt: skip
    T, top_k = ids.shape
    E, H, I = down.shape
    _native.core.experts(
        tensor_arg(x), ids.data_ptr(), ids.dtype == torch.int64, tensor_arg(weights), weight_arg(gate_up),
        weight_arg(up), weight_arg(down), tensor_arg(gate_up_bias), tensor_arg(down_bias), address(offsets),
        address(order), T, top_k, E, H, I, activation_arg(activation), activation.gated, interleaved(layout),
        tail, tensor_arg(z), _native.threads(),
    )  # fmt: skip


def experts(*args: Any) -> None:
    """As `experts_saving`, and nothing is saved."""
    arguments = (*args, None)
    experts_saving(*arguments)


def experts_backward(
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    inverse: Tensor,
    activation: Activation,
    layout: str,
    wanted: list[bool],
    reuse_z: bool,  # noqa: ARG001  # gradients of z are float32 here, and z may not be
) -> tuple[Tensor, ...]:
    gate_up, up, down = rows_dense(gate_up), rows_dense(up), rows_dense(down)
    inputs = (x, weights, gate_up, up, down, gate_up_bias, down_bias)
    found, out = wanted_like(tuple(t if want else None for t, want in zip(inputs, wanted, strict=True)))
    T, top_k = weights.shape
    E, H, I = down.shape
    _native.core.experts_backward(
        tensor_arg(d), tensor_arg(x), tensor_arg(z), tensor_arg(weights), weight_arg(gate_up), weight_arg(up),
        weight_arg(down), tensor_arg(down_bias), offsets.data_ptr(), order.data_ptr(), inverse.data_ptr(), T, top_k,
        E, H, I, activation_arg(activation), activation.gated, interleaved(layout), out, _native.threads(),
    )  # fmt: skip
    return found
