"""route: logits to experts and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefuse import types
from moefuse.backends.codes import Table, sums_two
from moefuse.ops._core import replay
from moefuse.ops._core.arithmetic import fresh_like, widen
from moefuse.ops._core.checks import check_float64, check_instance, check_optional, check_tensor
from moefuse.ops._core.invariance import asked
from moefuse.ops._core.library import Gradients, Rule, define, refuse_second_order
from moefuse.ops._core.select import inherit, select
from moefuse.types import MAX_EXPERTS, Routing


def route(
    logits: Tensor,
    routing: Routing,
    *,
    bias: Tensor | None = None,
    per_expert_scale: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Select ``top_k`` experts per token and weigh them.

    Args:
        logits: router logits ``[T, E]``. -inf masks an expert. A row with NaN or +inf fails closed.
        routing: the rule.
        bias: ``[E]``, added to the score for selection only; -inf masks an expert.
        per_expert_scale: ``[E]``, multiplies the weight of the selected expert.
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        weights ``[T, top_k]`` float32 and ids ``[T, top_k]`` int32, largest score first, ties to the lowest id.
        A slot without a candidate has id ``E`` and weight 0; so has every slot of a row that failed closed.

    Gradients reach ``logits`` and ``per_expert_scale`` through the selected scores; ids and ``bias`` carry none.

    >>> logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    >>> weights, ids = route(logits, Routing(top_k=2))
    >>> ids
    tensor([[1, 3]], dtype=torch.int32)
    >>> weights
    tensor([[0.5000, 0.5000]])
    """
    backend = asked(backend)
    call = replay.lookup("route", backend, (logits, bias, per_expert_scale, routing))
    if call is None or call.record is None:
        check("route", logits, routing, bias, per_expert_scale)
    if call is not None:
        return replay.run(call, run_route, backend, logits, bias, per_expert_scale, routing)
    return _route(backend, logits, bias, per_expert_scale, routing)


def run_route(
    backend: str | None, logits: Tensor, bias: Tensor | None, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """What a call that passed the checks does."""
    return select(route_reference, logits, backend, settled=True)(logits, bias, per_expert_scale, routing)


def check_routing(op: str, routing: Routing, num_experts: int) -> None:
    """The rule fits this many experts."""
    check_instance(op, "routing", routing, Routing)
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"{op}: E must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    if routing.top_k > num_experts:
        raise ValueError(f"{op}: top_k must not exceed E={num_experts}, got {routing.top_k}")
    if num_experts % routing.groups != 0:
        raise ValueError(f"{op}: E={num_experts} must divide into equal groups, got groups={routing.groups}")


def check(op: str, logits: Any, routing: Any, bias: Any, per_expert_scale: Any) -> None:
    check_tensor(op, "logits", logits, {"T": None, "E": None})
    check_routing(op, routing, logits.shape[1])
    experts = {"E": logits.shape[1]}
    check_optional(op, "bias", bias, experts, logits)
    check_optional(op, "per_expert_scale", per_expert_scale, experts, logits)
    if bias is not None or per_expert_scale is not None:
        check_float64(op, {"logits": logits, "bias": bias, "per_expert_scale": per_expert_scale})


def _exactly(logits: Tensor) -> Tensor:
    """In the type that scores are made in, float64 where the device has it cheaply.

    There a score that float32 has no number for still has its share of a sum, and equal logits tie: torch rounds the
    last few of a tensor otherwise than the rest, which in float64 is far below what is kept.
    """
    return logits.double() if logits.device.type == "cpu" else logits


def _softmax_backward(grad: Tensor, _: Tensor, scores: Tensor) -> Tensor:
    return scores * (grad - (grad * scores).sum(-1, keepdim=True))


def _sigmoid_backward(grad: Tensor, _: Tensor, scores: Tensor) -> Tensor:
    return grad * scores * (1 - scores)


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    # softplus is e**x down there, and its root is taken before it underflows
    return torch.where(logits < -40, torch.exp(logits / 2), F.softplus(logits).sqrt())


def _sqrtsoftplus_backward(grad: Tensor, logits: Tensor, scores: Tensor) -> Tensor:
    # A score that underflowed to zero has no derivative left.
    return torch.where(scores > 0, grad * torch.sigmoid(logits) / (2 * scores), 0)


class Score(NamedTuple):
    """Logits to scores, row by row; and ``backward(grad, logits, scores)``."""

    value: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor], Tensor]


_SCORES = {
    "softmax": Score(lambda logits: torch.softmax(logits, dim=-1), _softmax_backward),
    "sigmoid": Score(torch.sigmoid, _sigmoid_backward),
    "sqrtsoftplus": Score(_sqrtsoftplus, _sqrtsoftplus_backward),
}
#: one row for each of `moefuse.types.SCORES`
SCORES = Table("reference", "score", _SCORES, types.SCORES)


def _capped(logits: Tensor, routing: Routing) -> Tensor:
    return logits if routing.softcap is None else routing.softcap * torch.tanh(logits / routing.softcap)


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    # A masked expert stays masked: it has no part in the softmax either.
    capped = (
        logits if routing.softcap is None else _capped(logits, routing).masked_fill(logits == -torch.inf, -torch.inf)
    )
    return SCORES[routing.score].value(capped)


def _kept_groups(key: Tensor, scores: Tensor, candidate: Tensor, routing: Routing) -> Tensor:
    """Which experts ``[T, E]`` lie in the kept groups."""
    T, E = key.shape
    grouped = (T, routing.groups, E // routing.groups)
    if not sums_two(routing.group_score):
        value = key.masked_fill(~candidate, -torch.inf).view(grouped).amax(-1)
    else:
        masked = scores.masked_fill(~candidate, -torch.inf).view(grouped)
        best = masked.topk(min(2, grouped[2]), dim=-1).values
        value = best.masked_fill(best == -torch.inf, 0).sum(-1).masked_fill(best[..., 0] == -torch.inf, -torch.inf)
    ranked = torch.sort(value, dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, ranked, True)
    return kept.unsqueeze(-1).expand(grouped).reshape(T, E)


def route_reference(
    logits: Tensor, bias: Tensor | None, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    E = logits.shape[1]
    logits = widen(logits)
    failed = (logits.isnan() | (logits == torch.inf)).any(-1, keepdim=True)
    candidate = (logits > -torch.inf) & ~failed
    exact = _scores(_exactly(logits), routing)
    scores = exact.to(logits.dtype)
    # Every score rises with its logit, so without a bias the logit decides: ids do not hang on how exp rounds.
    key, biased = logits, scores
    if bias is not None:
        bias = widen(bias)
        candidate &= (bias > -torch.inf) & ~(bias.isnan() | (bias == torch.inf)).any()
        key = biased = scores + bias
    if routing.groups > 1:
        candidate &= _kept_groups(key, biased, candidate, routing)
    ranked = torch.sort(key.masked_fill(~candidate, -torch.inf), dim=-1, descending=True, stable=True).indices
    ids = ranked[:, : routing.top_k]
    live = candidate.gather(1, ids)
    selected = exact.gather(1, ids).masked_fill(~live, 0)
    weights = _weigh(selected, _scale_of(ids, per_expert_scale, routing), routing)[-1]
    weights = weights.masked_fill(~live, 0).to(logits.dtype)
    return weights, ids.masked_fill(~live, E).to(torch.int32)


def _scale_of(ids: Tensor, per_expert_scale: Tensor | None, routing: Routing) -> Tensor | float:
    if per_expert_scale is None:
        return routing.scale
    return routing.scale * widen(per_expert_scale)[ids.clamp(max=per_expert_scale.shape[0] - 1)]


def _divisor(values: Tensor, floor: float | None) -> tuple[Tensor, Tensor]:
    """The sum to divide by, and where it is the true one: held up by ``floor``, and 1 in place of 0."""
    total = values.sum(-1, keepdim=True)
    true = total != 0 if floor is None else total > floor
    return torch.where(true, total, floor or 1.0), true


def _weigh(selected: Tensor, scale: Tensor | float, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Selected scores to (shares, scaled shares, weights)."""
    shares = selected / _divisor(selected, routing.floor)[0] if routing.renormalize else selected
    scaled = shares * scale
    return shares, scaled, scaled / _divisor(scaled, None)[0] if routing.renormalize_after_scale else scaled


def weights_at(logits: Tensor, ids: Tensor, routing: Routing, per_expert_scale: Tensor | None = None) -> Tensor:
    """The weights ``[T, top_k]`` of given experts, whoever chose them, in plain torch, which differentiates it.

    An id outside ``[0, E)`` has weight 0.
    """
    live = (ids >= 0) & (ids < logits.shape[1])
    slots = torch.where(live, ids, 0).long()
    selected = _scores(_exactly(widen(logits)), routing).gather(1, slots).masked_fill(~live, 0)
    weights = _weigh(selected, _scale_of(slots, per_expert_scale, routing), routing)[-1]
    return weights.masked_fill(~live, 0).to(widen(logits).dtype)


def _through_divisor(grad: Tensor, values: Tensor, floor: float | None) -> Tensor:
    """Gradient of ``values`` divided by `_divisor`."""
    total, true = _divisor(values, floor)
    return (grad - ((grad * values).sum(-1, keepdim=True) / total).where(true, 0)) / total


def route_backward_reference(
    grad: Tensor, logits: Tensor, ids: Tensor, per_expert_scale: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """Gradients of logits ``[T, E]`` and of per_expert_scale ``[E]`` (empty when there is none)."""
    E = logits.shape[1]
    live = ids < E
    slots = ids.long().clamp(max=E - 1)
    raw = _exactly(widen(logits))
    finite = raw.masked_fill(~raw.isfinite(), -torch.inf)
    scores = _scores(finite, routing)
    selected = scores.gather(1, slots).masked_fill(~live, 0)
    scale = _scale_of(slots, per_expert_scale, routing)
    shares, scaled, _ = _weigh(selected, scale, routing)

    grad = grad.to(scores.dtype).masked_fill(~live, 0)
    if routing.renormalize_after_scale:
        grad = _through_divisor(grad, scaled, None)
    d_scale = logits.new_zeros(0)
    if per_expert_scale is not None:
        per_slot = (grad * shares * routing.scale).masked_fill(~live, 0)
        d_scale = per_slot.new_zeros(E).index_add_(0, slots.flatten(), per_slot.flatten()).to(per_expert_scale.dtype)
    grad = grad * scale
    if routing.renormalize:
        grad = _through_divisor(grad, selected, routing.floor)
    d_scores = torch.zeros_like(scores).scatter_add_(1, slots, grad.masked_fill(~live, 0))
    return _through_score(d_scores, finite, scores, routing).to(logits.dtype).contiguous(), d_scale


def _through_score(d_scores: Tensor, logits: Tensor, scores: Tensor, routing: Routing) -> Tensor:
    d_logits = SCORES[routing.score].backward(d_scores, _capped(logits, routing), scores)
    if routing.softcap is not None:
        d_logits = d_logits * (1 - torch.tanh(logits / routing.softcap) ** 2)
    return d_logits.masked_fill(logits == -torch.inf, 0)


def fresh_routes(like: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Weights and ids for as many tokens as ``like`` has, not filled."""
    shape = (like.shape[0], routing.top_k)
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return like.new_empty(shape, dtype=wide), like.new_empty(shape, dtype=torch.int32)


def _backward(
    needs: Mapping[str, bool],
    grads: tuple[Tensor, Tensor],
    backend: str | None,
    logits: Tensor,
    ids: Tensor,
    per_expert_scale: Tensor | None,
    routing: Routing,
) -> Gradients:
    d_weights, _ = grads
    by = inherit("route_backward", backend)
    d_logits, d_scale = _route_backward(by, d_weights, logits, ids, per_expert_scale, routing)
    return {"logits": d_logits, "per_expert_scale": d_scale}


_route = define(
    route_reference,
    "logits",
    fake=lambda logits, _bias, _scale, routing: fresh_routes(logits, routing),
    rule=Rule(_backward, results=("weights", "ids")),
)
_route_backward = define(
    route_backward_reference,
    "logits",
    fake=lambda _grad, logits, _ids, scale, _routing: fresh_like(logits, logits, scale),
    rule=refuse_second_order("route"),
)
