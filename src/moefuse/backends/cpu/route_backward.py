"""route_backward on the CPU."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import like, or_empty
from moefuse.types import Routing


def route_backward(
    grad: Tensor, logits: Tensor, ids: Tensor, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, ...]:
    gradients = like(logits), like(per_expert_scale)
    _native.core.route_backward(grad, logits, ids, per_expert_scale, routing, *gradients, _native.threads())
    return or_empty(gradients)
