"""gate: RMSNorm, router product and route in one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops import replay
from moefuse.ops.checks import check_eps, check_float64, check_optional, check_tensor, widen
from moefuse.ops.library import define, refuse_second_order
from moefuse.ops.route import (
    ROUTING_SCHEMA,
    check_routing,
    flatten,
    route_backward_reference,
    route_reference,
    routing_of,
)
from moefuse.ops.select import inherit, select
from moefuse.types import Routing, check_flag


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
        backend: see `moefuse.ops.select`.

    Returns:
        weights ``[T, top_k]`` float32, ids ``[T, top_k]`` int32, and the normed x when asked for.

    Norm, product and scores are float32 whatever the inputs are: logits are never rounded to bfloat16.

    >>> x = torch.tensor([[3.0, 4.0]])
    >>> router = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    >>> weights, ids = gate(x, router, Routing(top_k=1), norm_weight=torch.ones(2))
    >>> ids.tolist(), weights.tolist()
    ([[1]], [[1.0]])
    """
    check_flag("gate", "return_normed", return_normed)
    wanted = return_normed and norm_weight is not None
    tensors = (x, weight, norm_weight, bias, logit_bias, per_expert_scale)
    call = replay.sight(("gate", (), backend, routing, eps, type(eps), wanted), tensors)
    if call is not None and call.known is not None:
        weights, ids, normed = replay.repeat(_run, call, tensors)
    else:
        check(x, weight, routing, norm_weight, eps, bias, logit_bias, per_expert_scale)
        weights, ids, normed = _gate(*tensors, eps, wanted, *flatten(routing), backend)
        replay.admit(call)
    if not return_normed:
        return weights, ids
    return weights, ids, normed if wanted else x


def check(
    x: Any, weight: Any, routing: Any, norm_weight: Any, eps: Any, bias: Any, logit_bias: Any, per_expert_scale: Any
) -> None:
    check_tensor("gate", "x", x, {"T": None, "H": None})
    check_tensor("gate", "weight", weight, {"E": None, "H": x.shape[1]}, like=x)
    check_routing("gate", routing, weight.shape[0])
    check_eps("gate", "eps", eps)
    check_optional("gate", "norm_weight", norm_weight, {"H": x.shape[1]}, x)
    per_expert = {"bias": bias, "logit_bias": logit_bias, "per_expert_scale": per_expert_scale}
    for name, value in per_expert.items():
        check_optional("gate", name, value, {"E": weight.shape[0]}, x)
    check_float64("gate", {"x": x, "weight": weight, "norm_weight": norm_weight, **per_expert})


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _norm(x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    x = widen(x)
    return x if norm_weight is None else x * _inverse_rms(x, eps) * widen(norm_weight)


def _logits(normed: Tensor, weight: Tensor, logit_bias: Tensor | None) -> Tensor:
    logits = normed @ widen(weight).T
    return logits if logit_bias is None else logits + widen(logit_bias)


def gate_reference(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    bias: Tensor | None,
    logit_bias: Tensor | None,
    per_expert_scale: Tensor | None,
    eps: float,
    routing: Routing,
    return_normed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    normed = _norm(x, norm_weight, eps)
    weights, ids = route_reference(_logits(normed, weight, logit_bias), bias, per_expert_scale, routing)
    return weights, ids, normed.to(x.dtype).contiguous() if return_normed else x.new_empty(0)


def gate_backward_reference(
    d_weights: Tensor,
    d_normed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor | None,
    logit_bias: Tensor | None,
    per_expert_scale: Tensor | None,
    ids: Tensor,
    eps: float,
    want_x: bool,
    want_weight: bool,
    routing: Routing,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weight, norm_weight, logit_bias and per_expert_scale; empty where the input was None.

    ``want_x`` is for x and norm_weight, which share their work; a frozen router has no ``want_weight``.
    """
    normed = _norm(x, norm_weight, eps)
    logits = _logits(normed, weight, logit_bias)
    d_logits, d_scale = route_backward_reference(d_weights, logits, ids, per_expert_scale, routing)
    d_logit_bias = x.new_empty(0) if logit_bias is None else d_logits.sum(0).to(logit_bias.dtype)
    none = x.new_empty(0)
    d_router = (d_logits.T @ normed).to(weight.dtype) if want_weight else none
    if not want_x:
        return none, d_router, none.clone(), d_logit_bias, d_scale
    d = d_logits @ widen(weight)
    if d_normed is not None:
        d = d + widen(d_normed)
    if norm_weight is None:
        return d.to(x.dtype), d_router, x.new_empty(0), d_logit_bias, d_scale
    d_x, d_norm_weight = norm_backward(d, x, norm_weight, eps)
    return d_x.to(x.dtype), d_router, d_norm_weight.to(norm_weight.dtype), d_logit_bias, d_scale


def norm_backward(d_normed: Tensor, x: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of an RMSNorm: of its input ``[T, H]`` and its weight ``[H]``, unrounded."""
    x = widen(x)
    inverse_rms = _inverse_rms(x, eps)
    unit = x * inverse_rms
    d_unit = d_normed * widen(norm_weight)
    d_x = inverse_rms * (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True))
    return d_x, (d_normed * unit).sum(0)


def _run(facts: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """What a call that passed `check` does; the normed x where it is wanted."""
    _, _, backend, routing, eps, _, wanted = facts
    weights, ids, normed = select("gate", x, backend).run(x, *rest, eps, routing, wanted)
    return weights, ids, normed if wanted else None


def _gate_kernel(
    x: Tensor, weight: Tensor, norm: Any, bias: Any, logit_bias: Any, scale: Any, eps: float, wanted: bool, *rest: Any
) -> Any:
    *rule, backend = rest
    run = select("gate", x, backend).run
    return run(x, weight, norm, bias, logit_bias, scale, eps, routing_of(*rule), wanted)


def _gate_fake(
    x: Tensor, weight: Tensor, norm: Any, bias: Any, logit_bias: Any, scale: Any, eps: Any, wanted: bool, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (x.shape[0], rest[0])
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    normed = x.new_empty(x.shape) if wanted else x.new_empty(0)
    return x.new_empty(shape, dtype=wide), x.new_empty(shape, dtype=torch.int32), normed


def _gate_backward_kernel(d_weights: Tensor, d_normed: Any, x: Tensor, *rest: Any) -> Any:
    inputs, (*rule, backend) = rest[:8], rest[8:]
    run = select("gate_backward", x, backend).run
    return run(d_weights, d_normed, x, *inputs, routing_of(*rule))


def _gate_backward_fake(
    d_weights: Any, d_normed: Any, x: Tensor, weight: Tensor, norm: Any, logit_bias: Any, scale: Any, *rest: Any
) -> tuple[Tensor, ...]:
    want_x, want_weight = rest[2:4]
    like = (x if want_x else None, weight if want_weight else None, norm if want_x else None, logit_bias, scale)
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, norm_weight, _, logit_bias, scale, ctx.eps, ctx.wanted, *ctx.rule, ctx.backend = inputs
    ctx.save_for_backward(x, weight, norm_weight, logit_bias, scale, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_weights: Tensor, _: Any, d_normed: Tensor) -> tuple[Any, ...]:
    x, weight, norm_weight, logit_bias, scale, ids = ctx.saved_tensors
    backend = inherit("gate_backward", ctx.backend)
    needs = ctx.needs_input_grad
    want_x, want_weight = needs[0] or needs[2], needs[1]
    grads = _gate_backward(
        d_weights, d_normed if ctx.wanted else None, x, weight, norm_weight, logit_bias, scale, ids, ctx.eps, want_x,
        want_weight, *ctx.rule, backend,
    )  # fmt: skip
    asked = (needs[0], want_weight, needs[2], needs[4], needs[5])
    d_x, d_weight, d_norm, d_logit_bias, d_scale = (
        grad if wanted else None for wanted, grad in zip(asked, grads, strict=True)
    )
    return d_x, d_weight, d_norm, None, d_logit_bias, d_scale, None, None, *(None for _ in ctx.rule), None


_gate = define(
    "gate(Tensor x, Tensor weight, Tensor? norm_weight, Tensor? bias, Tensor? logit_bias, Tensor? per_expert_scale, "
    f"float eps, bool return_normed, {ROUTING_SCHEMA}, str? backend) -> (Tensor, Tensor, Tensor)",
    _gate_kernel,
    reference=gate_reference,
    fake=_gate_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_gate_backward = define(
    "gate_backward(Tensor d_weights, Tensor? d_normed, Tensor x, Tensor weight, Tensor? norm_weight, "
    f"Tensor? logit_bias, Tensor? per_expert_scale, Tensor ids, float eps, bool want_x, bool want_weight, "
    f"{ROUTING_SCHEMA}, str? backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _gate_backward_kernel,
    reference=gate_backward_reference,
    fake=_gate_backward_fake,
    backward=refuse_second_order("gate"),
)
