"""gate_backward on the CPU, in one call."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import like, or_empty
from moefuse.types import Router, Routing


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
    gradients = SimpleNamespace(
        x=like(x, want_x),
        weight=like(router.weight, want_weight),
        norm_weight=like(router.norm_weight, want_x),
        logit_bias=like(router.logit_bias),
        per_expert_scale=like(router.per_expert_scale),
    )
    _native.core.gate_backward(d_weights, d_normed, x, router, ids, routing, gradients, _native.threads())
    return or_empty(vars(gradients).values())
