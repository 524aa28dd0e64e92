"""route on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.types import Routing


def route(
    logits: Tensor, bias: Tensor | None, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    T = logits.shape[0]
    weights = _native.empty((T, routing.top_k), dtype=torch.float32)
    ids = _native.empty((T, routing.top_k), dtype=torch.int32)
    _native.core.route(logits, bias, per_expert_scale, routing, weights, ids, _native.threads())
    return weights, ids
