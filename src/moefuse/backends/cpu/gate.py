"""gate on the CPU: norm, router product and routing in one call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import like, or_empty
from moefuse.types import Router, Routing


class GateGradients(NamedTuple):
    """Where gate_backward writes; None where nothing is wanted."""

    x: Tensor | None
    weight: Tensor | None
    norm_weight: Tensor | None
    logit_bias: Tensor | None
    per_expert_scale: Tensor | None


def gate(x: Tensor, router: Router, routing: Routing, return_normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    T, H = x.shape
    weights = torch.empty((T, routing.top_k), dtype=torch.float32)
    ids = torch.empty((T, routing.top_k), dtype=torch.int32)
    normed = torch.empty((T, H) if return_normed else 0, dtype=x.dtype)
    _native.core.gate(x, router, routing, weights, ids, normed if return_normed else None, _native.threads())
    return weights, ids, normed


def gate_backward(
    d_weights: Tensor,
    d_normed: Tensor | None,
    x: Tensor,
    router: Router,
    ids: Tensor,
    routing: Routing,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, ...]:
    gradients = GateGradients(
        x=like(x, want_x),
        weight=like(router.weight, want_weight),
        norm_weight=like(router.norm_weight, want_x),
        logit_bias=like(router.logit_bias),
        per_expert_scale=like(router.per_expert_scale),
    )
    _native.core.gate_backward(d_weights, d_normed, x, router, ids, routing, gradients, _native.threads())
    return or_empty(gradients)
