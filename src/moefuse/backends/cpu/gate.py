"""gate on the CPU: norm, router product and routing in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import routing_arg, tensor_arg, wanted_like, weight_arg
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
    T, H = x.shape
    weights = torch.empty((T, routing.top_k), dtype=torch.float32)
    ids = torch.empty((T, routing.top_k), dtype=torch.int32)
    normed = torch.empty((T, H) if return_normed else 0, dtype=x.dtype)
    _native.core.gate(
        tensor_arg(x), weight_arg(weight), tensor_arg(norm_weight), tensor_arg(bias), tensor_arg(logit_bias),
        tensor_arg(per_expert_scale), eps, T, H, weight.shape[0], routing_arg(routing), weights.data_ptr(),
        ids.data_ptr(), tensor_arg(normed if return_normed else None), _native.threads(),
    )  # fmt: skip
    return weights, ids, normed


def gate_backward(
    d_weights: Tensor,
    d_normed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    logit_bias: Tensor | None,
    per_expert_scale: Tensor | None,
    ids: Tensor,
    eps: float,
    want_x: bool,
    want_weight: bool,
    routing: Routing,
) -> tuple[Tensor, ...]:
    found, out = wanted_like(
        (
            x if want_x else None, weight if want_weight else None, norm_weight if want_x else None, logit_bias,
            per_expert_scale,
        )
    )  # fmt: skip
    _native.core.gate_backward(
        tensor_arg(d_weights), tensor_arg(d_normed), tensor_arg(x), weight_arg(weight), tensor_arg(norm_weight),
        tensor_arg(logit_bias), tensor_arg(per_expert_scale), ids.data_ptr(), eps, *x.shape, weight.shape[0],
        routing_arg(routing), out, _native.threads(),
    )  # fmt: skip
    return found
