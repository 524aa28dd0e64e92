"""gate: RMSNorm, router product and route in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from moefuse.ops._core import replay
from moefuse.ops._core.arithmetic import fresh_like, inverse_rms, norm_backward, widen
from moefuse.ops._core.checks import check_eps, check_float64, check_optional, check_tensor
from moefuse.ops._core.invariance import asked
from moefuse.ops._core.library import Gradients, Rule, define, refuse_second_order
from moefuse.ops._core.select import inherit, select
from moefuse.ops.route import check_routing, fresh_routes, route_backward_reference, route_reference
from moefuse.types import Router, Routing, check_flag


def gate(
    x: Tensor,
    weight: Tensor,
    routing: Routing,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    bias: Tensor | None = None,
    logit_bias: Tensor | None = None,
    per_expert_scale: Tensor | None = None,
    return_normed: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ...]:
    """Route tokens from their hidden state.

    Args:
        x: hidden states ``[T, H]``.
        weight: router weight ``[E, H]``.
        routing: the rule.
        norm_weight: ``[H]``; RMSNorm of x before the product. None: x is taken as it is.
        eps: added to the mean square.
        bias: ``[E]``, selects only, as in `route`.
        logit_bias: ``[E]``, added to the logits (gpt-oss).
        per_expert_scale: ``[E]``, as in `route`.
        return_normed: also return the normed x ``[T, H]``, for the experts.
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        weights ``[T, top_k]`` float32, ids ``[T, top_k]`` int32, and the normed x when asked for.

    Norm, product and scores are float32 whatever the inputs are: logits are never rounded to bfloat16.

    >>> import torch
    >>> x = torch.tensor([[3.0, 4.0]])
    >>> router = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    >>> weights, ids = gate(x, router, Routing(top_k=1), norm_weight=torch.ones(2))
    >>> ids.tolist(), weights.tolist()
    ([[1]], [[1.0]])
    """
    check_flag("gate", "return_normed", return_normed)
    wanted = return_normed and norm_weight is not None
    router = Router(weight, norm_weight, bias, logit_bias, per_expert_scale, eps)
    backend = asked(backend)
    call = replay.lookup("gate", backend, (x, *router, routing, wanted))
    if call is None or call.record is None:
        check("gate", x, router, routing)
    if call is not None:
        weights, ids, normed = replay.run(call, run_gate, backend, x, router, routing, wanted)
    else:
        weights, ids, normed = _gate(backend, x, router, routing, wanted)
    if not return_normed:
        return weights, ids
    return weights, ids, normed if wanted else x


def check(op: str, x: Any, router: Router, routing: Any, weight: str = "weight") -> None:
    """Tokens, and what routes them; ``weight`` is what the op calls the router's."""
    check_tensor(op, "x", x, {"T": None, "H": None})
    check_tensor(op, weight, router.weight, {"E": None, "H": x.shape[1]}, like=x)
    E = router.weight.shape[0]
    check_routing(op, routing, E)
    check_eps(op, "eps", router.eps)
    check_optional(op, "norm_weight", router.norm_weight, {"H": x.shape[1]}, x)
    per_expert = {"bias": router.bias, "logit_bias": router.logit_bias, "per_expert_scale": router.per_expert_scale}
    for name, value in per_expert.items():
        check_optional(op, name, value, {"E": E}, x)
    check_float64(op, {"x": x, weight: router.weight, "norm_weight": router.norm_weight, **per_expert})


def _norm(x: Tensor, router: Router) -> Tensor:
    x = widen(x)
    return x if router.norm_weight is None else x * inverse_rms(x, router.eps) * widen(router.norm_weight)


def _logits(normed: Tensor, router: Router) -> Tensor:
    logits = normed @ widen(router.weight).T
    return logits if router.logit_bias is None else logits + widen(router.logit_bias)


def gate_reference(x: Tensor, router: Router, routing: Routing, return_normed: bool) -> tuple[Tensor, Tensor, Tensor]:
    normed = _norm(x, router)
    weights, ids = route_reference(_logits(normed, router), router.bias, router.per_expert_scale, routing)
    return weights, ids, normed.to(x.dtype).contiguous() if return_normed else x.new_empty(0)


def gate_backward_reference(
    d_weights: Tensor,
    d_normed: Tensor | None,
    x: Tensor,
    router: Router,
    ids: Tensor,
    routing: Routing,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, norm_weight, logit_bias and per_expert_scale; empty where the input was None.

    ``want_x`` is for x and norm_weight, which share their work; a frozen router has no ``want_weight``.
    """
    normed = _norm(x, router)
    logits = _logits(normed, router)
    d_logits, d_scale = route_backward_reference(d_weights, logits, ids, router.per_expert_scale, routing)
    d_logit_bias = x.new_empty(0) if router.logit_bias is None else d_logits.sum(0).to(router.logit_bias.dtype)
    none = x.new_empty(0)
    d_weight = (d_logits.T @ normed).to(router.weight.dtype) if want_weight else none
    if not want_x:
        return none, d_weight, none.clone(), d_logit_bias, d_scale
    d = d_logits @ widen(router.weight)
    if d_normed is not None:
        d = d + widen(d_normed)
    if router.norm_weight is None:
        return d.to(x.dtype), d_weight, x.new_empty(0), d_logit_bias, d_scale
    d_x, d_norm_weight = norm_backward(d, x, router.norm_weight, router.eps)
    return d_x.to(x.dtype), d_weight, d_norm_weight.to(router.norm_weight.dtype), d_logit_bias, d_scale


def run_gate(
    backend: str | None, x: Tensor, router: Router, routing: Routing, return_normed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What a call that passed `check` does."""
    return select(gate_reference, x, backend, settled=True)(x, router, routing, return_normed)


def _fresh_gradients(x: Tensor, router: Router, want_x: bool, want_weight: bool) -> tuple[Tensor, ...]:
    by_x, by_norm = (x, router.norm_weight) if want_x else (None, None)
    by_weight = router.weight if want_weight else None
    return fresh_like(x, by_x, by_weight, by_norm, router.logit_bias, router.per_expert_scale)


def _backward(
    needs: Mapping[str, bool],
    grads: tuple[Tensor, ...],
    backend: str | None,
    x: Tensor,
    router: Router,
    ids: Tensor,
    routing: Routing,
    return_normed: bool,
) -> Gradients:
    d_weights, _, d_normed = grads
    found = _gate_backward(
        inherit("gate_backward", backend),
        d_weights,
        d_normed if return_normed else None,
        x,
        router,
        ids,
        routing,
        needs["x"] or needs["norm_weight"],
        needs["weight"],
    )
    return dict(zip(("x", "weight", "norm_weight", "logit_bias", "per_expert_scale"), found, strict=True))


_gate = define(
    gate_reference,
    "x",
    fake=lambda x, _, routing, normed: (*fresh_routes(x, routing), x.new_empty(x.shape if normed else 0)),
    # The bias has no gradient, and training may change it in place.
    rule=Rule(
        _backward,
        results=("weights", "ids", "normed"),
        keep=lambda known: {"router": known["router"]._replace(bias=None)},
    ),
)
_gate_backward = define(
    gate_backward_reference,
    "x",
    fake=lambda _weights, _normed, x, router, _ids, _routing, *wanted: _fresh_gradients(x, router, *wanted),
    rule=refuse_second_order("gate"),
)
