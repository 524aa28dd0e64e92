"""combine_backward: the gradient of combine; tail_backward: of what it adds to the weighted sum, and of its norm."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import fresh_like, norm_backward, widen
from moefuse.ops._core.library import define, refuse_second_order
from moefuse.types import Tail


def tail_tensors(tail: Tail) -> dict[str, Tensor | None]:
    """Every tensor of a tail, by name."""
    return {name: value for name, value in tail._asdict().items() if name != "eps"}


def _shared_factor(tail: Tail) -> Tensor | None:
    """What the shared expert is weighted by, ``[T, 1]``, or None for 1."""
    if tail.shared_logit is not None:
        return torch.sigmoid(widen(tail.shared_logit)).unsqueeze(1)
    return None if tail.shared_gate is None else widen(tail.shared_gate).unsqueeze(1)


def _slot_rows(y: Tensor, inverse: Tensor | None, T: int) -> Tensor:
    """``[T, top_k, H]`` in the arithmetic type."""
    ordered = y if inverse is None else y[inverse.long()]
    return widen(ordered).view(T, -1, y.shape[1]) if T else widen(y).view(0, 1, y.shape[1])


def weighted_sum(y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail) -> Tensor:
    """What is written before the norm, unrounded."""
    T, top_k = weights.shape
    rows, scale = _slot_rows(y, inverse, T), widen(weights)
    total = torch.zeros_like(rows[:, 0])
    for j in range(top_k if T else 0):
        total = total + scale[:, j, None] * rows[:, j]
    if tail.shared is not None:
        factor = _shared_factor(tail)
        total = total + (widen(tail.shared) if factor is None else factor * widen(tail.shared))
    return total if tail.residual is None else total + widen(tail.residual)


def tail_backward_reference(
    d_out: Tensor, d_normed: Tensor | None, total: Tensor | None, tail: Tail
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the sum, of shared, shared_gate, shared_logit and norm_weight; empty where there is none.

    ``total [T, H]`` is what was normed. Without ``d_normed`` the gradient of the sum is ``d_out`` itself, and the first
    result is empty.
    """
    d_sum, d_shared, d_gate, d_logit, d_norm_weight = (d_out.new_empty(0) for _ in range(5))
    d = widen(d_out)
    if d_normed is not None and total is not None and tail.norm_weight is not None:
        through, along = norm_backward(widen(d_normed), total, tail.norm_weight, tail.eps)
        d = d + through
        d_sum, d_norm_weight = d.to(d_out.dtype), along.to(tail.norm_weight.dtype)
    if tail.shared is not None:
        factor = _shared_factor(tail)
        dot = (d * widen(tail.shared)).sum(-1)
        if tail.shared_gate is not None:
            d_gate = dot.to(tail.shared_gate.dtype)
        if tail.shared_logit is not None and factor is not None:
            share = factor.squeeze(1)
            d_logit = (dot * share * (1 - share)).to(tail.shared_logit.dtype)
        d_shared = (d if factor is None else d * factor).to(tail.shared.dtype, copy=True)
    return d_sum, d_shared, d_gate, d_logit, d_norm_weight


def combine_backward_reference(
    d_out: Tensor, d_normed: Tensor | None, y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of y, weights, shared, shared_gate, shared_logit, residual and norm_weight; empty where None."""
    T = weights.shape[0]
    d = widen(d_out).contiguous()
    total = None if d_normed is None else weighted_sum(y, weights, inverse, tail)
    d_sum, d_shared, d_gate, d_logit, d_norm_weight = tail_backward_reference(d, d_normed, total, tail)
    d = d if d_normed is None else d_sum
    factor = _shared_factor(tail)
    if tail.shared is not None and tail.shared_logit is not None and factor is not None:
        along = (d * widen(tail.shared)).sum(-1)  # in another order than a tail's product, for its bits
        d_logit = (along * (factor * (1 - factor)).squeeze(1)).to(tail.shared_logit.dtype)
    rows = _slot_rows(y, inverse, T)
    d_weights = torch.einsum("tjh,th->tj", rows, d).to(weights.dtype) if T else torch.empty_like(weights)
    d_y = (widen(weights).unsqueeze(-1) * d.unsqueeze(1)).reshape(y.shape).to(y.dtype)
    if inverse is not None:
        d_y = torch.empty_like(d_y).index_copy_(0, inverse.long(), d_y)
    # A custom op must not return its input, hence the copy.
    d_residual = y.new_empty(0) if tail.residual is None else d.to(tail.residual.dtype, copy=True)
    return d_y, d_weights, d_shared, d_gate, d_logit, d_residual, d_norm_weight


def _tail_fake(d_out: Tensor, d_normed: Tensor | None, total: Tensor | None, tail: Tail) -> tuple[Tensor, ...]:
    d_sum, norm_weight = (None, None) if d_normed is None else (d_out, tail.norm_weight)
    return fresh_like(d_out, d_sum, tail.shared, tail.shared_gate, tail.shared_logit, norm_weight)


tail_backward = define(tail_backward_reference, "d_out", fake=_tail_fake, rule=refuse_second_order("combine"))
combine_backward = define(
    combine_backward_reference,
    "y",
    fake=lambda _out, _normed, y, weights, _inverse, tail: fresh_like(y, y, weights, *tail_tensors(tail).values()),
    rule=refuse_second_order("combine"),
)
