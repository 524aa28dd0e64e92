"""combine on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import address, tensor_arg, wanted_like


def combine(
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    tail = (
        tensor_arg(shared), tensor_arg(shared_gate), tensor_arg(shared_logit), tensor_arg(residual),
        tensor_arg(norm_weight), eps, tensor_arg(out), tensor_arg(normed_out),
    )  # fmt: skip
    T, top_k = weights.shape
    _native.core.combine(
        tensor_arg(y), tensor_arg(weights), address(inverse), T, top_k, y.shape[1], tail, _native.threads()
    )


def tail_backward(
    d_out: Tensor,
    d_normed: Tensor | None,
    total: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    normed = d_normed is not None
    found, out = wanted_like(
        (d_out if normed else None, shared, shared_gate, shared_logit, norm_weight if normed else None)
    )
    _native.core.tail_backward(
        tensor_arg(d_out), tensor_arg(d_normed), tensor_arg(total), tensor_arg(shared), tensor_arg(shared_gate),
        tensor_arg(shared_logit), tensor_arg(norm_weight), eps, *d_out.shape, out, _native.threads(),
    )  # fmt: skip
    return found


def combine_backward(
    d_out: Tensor,
    d_normed: Tensor | None,
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    (T, top_k), H = weights.shape, y.shape[1]
    total = None
    if d_normed is not None:
        total = torch.empty((T, H), dtype=torch.float32)
        combine(y, weights, inverse, shared, shared_gate, shared_logit, residual, None, eps, total, None)
    d_sum, *of_tail = tail_backward(
        d_out.float() if d_normed is not None else d_out, d_normed, total, shared, shared_gate, shared_logit,
        norm_weight, eps,
    )  # fmt: skip
    d = d_out if d_normed is None else d_sum
    # An inverse that leaves rows of y out, which only a traced call can have, leaves them without a gradient.
    d_y = torch.empty_like(y) if inverse is None else torch.zeros_like(y)
    d_weights = torch.empty_like(weights)
    _native.core.combine_backward(
        tensor_arg(d), tensor_arg(y), tensor_arg(weights), address(inverse), T, top_k, H, tensor_arg(d_y),
        tensor_arg(d_weights), _native.threads(),
    )  # fmt: skip
    # A custom op must not return its input, hence the copy.
    d_residual = y.new_empty(0) if residual is None else d.to(residual.dtype, copy=True)
    d_norm_weight = of_tail.pop() if d_normed is not None or norm_weight is None else torch.zeros_like(norm_weight)
    return d_y, d_weights, *of_tail[:3], d_residual, d_norm_weight
