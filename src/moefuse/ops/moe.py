"""moe: the whole block, router included."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moefuse.ops import experts as experts_page
from moefuse.ops import replay
from moefuse.ops.activation import check_activation
from moefuse.ops.combine import Tail, check_tail, prepare_out
from moefuse.ops.experts import Weight, apart, check_stacks, experts, unwrap_all
from moefuse.ops.gate import gate
from moefuse.ops.memory import check_outputs
from moefuse.ops.select import select
from moefuse.types import Activation, Routing

_TENSORS = (
    "x", "router", "norm_weight", "bias", "logit_bias", "per_expert_scale", "gate_up", "up", "down", "gate_up_bias",
    "down_bias", "shared", "shared_gate", "shared_logit", "residual", "next_norm_weight", "out", "normed_out",
)  # fmt: skip


def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Weight | tuple[Weight, Weight],
    down: Weight,
    routing: Routing,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    logit_bias: Tensor | None = None,
    per_expert_scale: Tensor | None = None,
    activation: str | Activation = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    layout: str = "halves",
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    shared_logit: Tensor | None = None,
    residual: Tensor | None = None,
    next_norm_weight: Tensor | None = None,
    next_eps: float = 1e-6,
    out: Tensor | None = None,
    normed_out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The whole block: norm, router, experts, combine and tail; `gate` followed by `experts`.

    Args:
        x: ``[T, H]``.
        router: ``[E, H]``.
        gate_up, down, activation, gate_up_bias, down_bias, layout: the experts, as in `experts`.
        routing, norm_weight, eps, bias, logit_bias, per_expert_scale: the router, as in `gate`. With ``norm_weight``
            the experts, too, see the normed x.
        shared, shared_gate, shared_logit, residual, out, normed_out: the tail, as in `experts`.
        next_norm_weight, next_eps: the tail's norm.
        backend: see `moefuse.ops.select`.

    Returns:
        ``[T, H]``, or ``(out, normed)`` when ``next_norm_weight`` is given.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> gate_up = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]).repeat(2, 1, 1)
    >>> down = torch.tensor([[[1.0], [10.0]], [[2.0], [20.0]]])
    >>> router = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    >>> moe(x, router, gate_up, down, Routing(top_k=1), activation="relu", residual=x)
    tensor([[ 5., 42.]])
    """
    first, up = apart(gate_up)
    stacks, specs = unwrap_all(first, up, down)
    tensors = (
        x, router, norm_weight, bias, logit_bias, per_expert_scale, *stacks, gate_up_bias, down_bias, shared,
        shared_gate, shared_logit, residual, next_norm_weight, out, normed_out,
    )  # fmt: skip
    facts = ("experts", specs, backend, activation, layout, next_eps, type(next_eps), routing, eps, type(eps))
    call = replay.sight(facts, tensors)
    if call is not None and call.known is not None:
        if out is not None or normed_out is not None:
            check_outputs("moe", dict(zip(_TENSORS, tensors, strict=True)))
        again: Tensor | tuple[Tensor, Tensor] = replay.repeat(_run, call, tensors)
        return again
    tail = Tail(shared, shared_gate, shared_logit, residual, next_norm_weight, next_eps)
    # What gate does not look at is checked before gate runs.
    check_stacks("moe", x, first, up, down, check_activation("moe", activation), gate_up_bias, down_bias, layout)
    check_tail("moe", tail, x.shape[0], x)
    if out is not None or normed_out is not None:
        named = dict(zip(_TENSORS, tensors, strict=True))
        out, normed_out = prepare_out("moe", tail, x.shape[0], x, named)
    weights, ids, normed = gate(
        x, router, routing, norm_weight=norm_weight, eps=eps, bias=bias, logit_bias=logit_bias,
        per_expert_scale=per_expert_scale, return_normed=True, backend=backend,
    )  # fmt: skip
    result = experts(
        normed, ids, weights, gate_up, down, activation=activation, gate_up_bias=gate_up_bias, down_bias=down_bias,
        layout=layout, shared=shared, shared_gate=shared_gate, shared_logit=shared_logit, residual=residual,
        norm_weight=next_norm_weight, eps=next_eps, out=out, normed_out=normed_out, backend=backend,
    )  # fmt: skip
    replay.admit(call)
    return result


def _run(
    facts: tuple[Any, ...], x: Tensor, router: Tensor, norm_weight: Tensor | None, bias: Any, logit_bias: Any,
    per_expert_scale: Any, *rest: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """What a call that passed the checks does."""
    backend, (routing, eps, _) = facts[2], facts[7:]
    weights, ids, normed = select("gate", x, backend).run(
        x, router, norm_weight, bias, logit_bias, per_expert_scale, eps, routing, norm_weight is not None
    )
    return experts_page.run(facts[:7], x if norm_weight is None else normed, ids, weights, *rest)
