"""tail_backward: the gradient of what combine adds to the weighted sum, and of the norm that follows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops.checks import widen
from moefuse.ops.gate import norm_backward
from moefuse.ops.library import define, refuse_second_order
from moefuse.ops.select import select


def tail_backward_reference(
    d_out: Tensor,
    d_normed: Tensor | None,
    total: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the sum, of shared, shared_gate, shared_logit and norm_weight; empty where there is none.

    ``total [T, H]`` is what was normed. Without ``d_normed`` the gradient of the sum is ``d_out`` itself, and the first
    result is empty.
    """
    d_sum, d_shared, d_gate, d_logit, d_norm_weight = (d_out.new_empty(0) for _ in range(5))
    d = widen(d_out)
    if d_normed is not None and total is not None and norm_weight is not None:
        through, along = norm_backward(widen(d_normed), total, norm_weight, eps)
        d = d + through
        d_sum, d_norm_weight = d.to(d_out.dtype), along.to(norm_weight.dtype)
    if shared is not None:
        dot = (d * widen(shared)).sum(-1)
        factor: Tensor | None = None
        if shared_gate is not None:
            factor, d_gate = widen(shared_gate), dot.to(shared_gate.dtype)
        if shared_logit is not None:
            factor = torch.sigmoid(widen(shared_logit))
            d_logit = (dot * factor * (1 - factor)).to(shared_logit.dtype)
        d_shared = (d if factor is None else d * factor.unsqueeze(1)).to(shared.dtype, copy=True)
    return d_sum, d_shared, d_gate, d_logit, d_norm_weight


def _kernel(d_out: Tensor, *rest: Any) -> Any:
    *args, backend = rest
    return select("tail_backward", d_out, backend).run(d_out, *args)


def _fake(d_out: Tensor, d_normed: Any, total: Any, *rest: Any) -> tuple[Tensor, ...]:
    *tail, norm_weight = rest[:4]
    normed = d_normed is not None
    like = (d_out if normed else None, *tail, norm_weight if normed else None)
    return tuple(d_out.new_empty(0) if t is None else t.new_empty(t.shape) for t in like)


tail_backward = define(
    "tail_backward(Tensor d_out, Tensor? d_normed, Tensor? total, Tensor? shared, Tensor? shared_gate, "
    "Tensor? shared_logit, Tensor? norm_weight, float eps, str? backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kernel,
    reference=tail_backward_reference,
    fake=_fake,
    backward=refuse_second_order("combine"),
)
