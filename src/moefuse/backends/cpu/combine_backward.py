"""combine_backward and tail_backward on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import like, or_empty
from moefuse.backends.cpu.combine import combine
from moefuse.types import Outputs, Tail


def tail_backward(d_out: Tensor, d_normed: Tensor | None, total: Tensor | None, tail: Tail) -> tuple[Tensor, ...]:
    normed = d_normed is not None
    gradients = SimpleNamespace(
        sum=like(d_out, normed),
        shared=like(tail.shared),
        shared_gate=like(tail.shared_gate),
        shared_logit=like(tail.shared_logit),
        norm_weight=like(tail.norm_weight, normed),
    )
    _native.core.tail_backward(d_out, d_normed, total, tail, gradients, _native.threads())
    return or_empty(vars(gradients).values())


def combine_backward(
    d_out: Tensor, d_normed: Tensor | None, y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail
) -> tuple[Tensor, ...]:
    total = None
    if d_normed is not None:
        d_out = d_out.float()
        total = _native.empty((weights.shape[0], y.shape[1]), dtype=torch.float32)
        combine(y, weights, inverse, tail._replace(norm_weight=None), Outputs(total))
    d_sum, d_shared, d_shared_gate, d_shared_logit, d_norm_weight = tail_backward(d_out, d_normed, total, tail)
    d = d_out if d_normed is None else d_sum
    # An inverse that leaves rows of y out, which only a traced call can have, leaves them without a gradient.
    d_y = torch.empty_like(y) if inverse is None else torch.zeros_like(y)
    d_weights = torch.empty_like(weights)
    _native.core.combine_backward(d, y, weights, inverse, d_y, d_weights, _native.threads())
    # A custom op must not return its input, hence the copy.
    d_residual = y.new_empty(0) if tail.residual is None else d.to(tail.residual.dtype, copy=True)
    if d_normed is None and tail.norm_weight is not None:
        d_norm_weight = torch.zeros_like(tail.norm_weight)
    return d_y, d_weights, d_shared, d_shared_gate, d_shared_logit, d_residual, d_norm_weight
