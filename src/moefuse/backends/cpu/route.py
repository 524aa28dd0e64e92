"""route on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import routing_arg, tensor_arg, wanted_like
from moefuse.types import Routing


def route(
    logits: Tensor, bias: Tensor | None, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    T, E = logits.shape
    weights = torch.empty(T, routing.top_k, dtype=torch.float32)
    ids = torch.empty(T, routing.top_k, dtype=torch.int32)
    _native.core.route(
        tensor_arg(logits), tensor_arg(bias), tensor_arg(per_expert_scale), T, E, routing_arg(routing),
        weights.data_ptr(), ids.data_ptr(), _native.threads(),
    )  # fmt: skip
    return weights, ids


def route_backward(
    grad: Tensor, logits: Tensor, ids: Tensor, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, ...]:
    found, out = wanted_like((logits, per_expert_scale))
    _native.core.route_backward(
        tensor_arg(grad), tensor_arg(logits), ids.data_ptr(), tensor_arg(per_expert_scale), *logits.shape,
        routing_arg(routing), *out, _native.threads(),
    )  # fmt: skip
    return found
