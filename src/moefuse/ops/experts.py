"""experts: the whole expert MLP of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops import replay
from moefuse.ops.activation import activation_of, check_activation, check_layout, flatten, glu, glu_reference
from moefuse.ops.checks import (
    INTEGERS,
    check_float64,
    check_instance,
    check_optional,
    check_tensor,
    check_weight,
    widen,
)
from moefuse.ops.combine import Tail, check_tail, combine, combine_reference, fresh_out, out_dtype, prepare_out
from moefuse.ops.experts_training import EXPERTS_SCHEMA, experts_saving, mask
from moefuse.ops.grouped_linear import grouped_linear, grouped_linear_reference
from moefuse.ops.library import define
from moefuse.ops.memory import check_outputs, has_values
from moefuse.ops.plan import plan as make_plan
from moefuse.ops.plan import plan_reference
from moefuse.ops.select import select
from moefuse.quant.tensor import QuantTensor, unwrap, wrap
from moefuse.types import MAX_EXPERTS, Activation, Plan

Weight = Tensor | QuantTensor
_TENSORS = (
    "x", "ids", "weights", "gate_up", "up", "down", "gate_up_bias", "down_bias", "shared", "shared_gate",
    "shared_logit", "residual", "norm_weight", "out", "normed_out",
)  # fmt: skip


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight | tuple[Weight, Weight],
    down: Weight,
    *,
    activation: str | Activation = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    layout: str = "halves",
    plan: Plan | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    shared_logit: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    normed_out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run each token through its experts and combine.

    Args:
        x: ``[T, H]``.
        ids: ``[T, top_k]`` int32 or int64; an id outside ``[0, E)`` is "no expert" and contributes nothing.
        weights: ``[T, top_k]``.
        gate_up: ``[E, 2I, H]`` in the type of x, or ``(gate, up)``, each ``[E, I, H]``; ``[E, I, H]`` when the
            activation is ungated. Each stack may instead be a `moefuse.QuantTensor`, of any format.
        down: ``[E, H, I]``, or a `moefuse.QuantTensor`.
        activation: a name or an `Activation`.
        gate_up_bias: ``[E, 2I]`` in ``layout`` (halves when gate and up come apart), or ``[E, I]`` when ungated.
        down_bias: ``[E, H]``.
        layout: how gate and up rows stand in ``gate_up``: "halves" or "interleaved".
        plan: that of these ids, where it is at hand already. On the CPU another is refused; on a GPU, where looking
            would stall it, a slot counts where both ids and plan have an expert for it, which is the plan's.
        shared, shared_gate, shared_logit, residual, norm_weight, eps: the tail, as in `combine`.
        out, normed_out: where to write, as in `combine`; may be x itself too.
        backend: see `moefuse.ops.select`.

    Returns:
        ``[T, H]``, or ``(out, normed)`` when ``norm_weight`` is given.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> gate_up = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # one expert, I = 1
    >>> down = torch.tensor([[[1.0], [10.0]]])
    >>> experts(x, torch.tensor([[0]]), torch.tensor([[0.5]]), gate_up, down, activation="relu")
    tensor([[ 1., 10.]])
    """
    first, up = apart(gate_up)
    stacks, specs = unwrap_all(first, up, down)
    tensors = (
        x, ids, weights, *stacks, gate_up_bias, down_bias, shared, shared_gate, shared_logit, residual, norm_weight,
        out, normed_out,
    )  # fmt: skip
    facts = ("experts", specs, backend, activation, layout, eps, type(eps))
    call = replay.sight(facts, tensors) if plan is None else None
    if call is not None and call.known is not None:
        if out is not None or normed_out is not None:
            check_outputs("experts", dict(zip(_TENSORS, tensors, strict=True)))
        again: Tensor | tuple[Tensor, Tensor] = replay.repeat(run, call, tensors)
        return again
    tail = Tail(shared, shared_gate, shared_logit, residual, norm_weight, eps)
    activation = check_activation("experts", activation)
    check_stacks("experts", x, first, up, down, activation, gate_up_bias, down_bias, layout)
    check("experts", x, ids, weights, down.shape[0], plan)
    check_tail("experts", tail, x.shape[0], x)
    tracked = False
    if out is None and normed_out is None:
        # Inside a compiled torch.func.grad no tensor says that it requires a gradient.
        hidden = torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
        tracked = torch.is_grad_enabled() and (hidden or any(t is not None and t.requires_grad for t in tensors))
    else:
        named = dict(zip(_TENSORS, tensors, strict=True))
        if plan is not None:
            named |= {"plan.offsets": plan.offsets, "plan.order": plan.order, "plan.inverse": plan.inverse}
        out, normed_out = prepare_out("experts", tail, x.shape[0], x, named)
    if tracked:
        if not torch.compiler.is_compiling():
            select("experts", x, backend, specs)  # an explicit choice that cannot run is refused in this op's name
        plan = plan or make_plan(ids, down.shape[0], backend=backend)
        if specs != (None, None, None):
            return _through_blocks(
                x, ids, weights, first, up, down, activation, gate_up_bias, down_bias, layout, plan, tail, backend
            )
    parts = (None, None, None) if plan is None else (plan.offsets, plan.order, plan.inverse)
    args = (
        x, ids, weights, *stacks, gate_up_bias, down_bias, *parts, *tail, *flatten(activation), layout,
    )  # fmt: skip
    if out is not None:
        _experts_out(*args, out, normed_out, *specs, backend)
        replay.admit(call)
        return out if normed_out is None else (out, normed_out)
    summed, normed = experts_saving(*args, backend) if tracked else _experts(*args, *specs, backend)
    replay.admit(call)
    return summed if norm_weight is None else (summed, normed)


def run(
    facts: tuple[Any, ...], x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, up: Any, down: Tensor, *rest: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """What a call without a plan that passed the checks does."""
    _, specs, backend, activation, layout, eps, _ = facts
    *biases, shared, shared_gate, shared_logit, residual, norm_weight, out, normed_out = rest
    tail = Tail(shared, shared_gate, shared_logit, residual, norm_weight, eps)
    out, normed_out = fresh_out(tail, x.shape[0], x, out, normed_out)
    stacks = map(wrap, (gate_up, up, down), specs)
    select("experts", x, backend, specs).run(
        x, ids, weights, *stacks, *biases, None, None, None, *tail, Activation.of(activation), layout, out, normed_out
    )
    return out if normed_out is None else (out, normed_out)


def apart(gate_up: Any) -> tuple[Any, Any]:
    if not isinstance(gate_up, tuple):
        return gate_up, None
    if len(gate_up) != 2:
        raise ValueError(f"experts: gate_up must be one tensor or (gate, up), got a tuple of {len(gate_up)}")
    return gate_up


def unwrap_all(gate_up: Any, up: Any, down: Any) -> tuple[tuple[Any, Any, Any], tuple[str | None, ...]]:
    """The three stacks as an op's schema carries them, and their formats."""
    (gate_up, first), (up, second), (down, third) = unwrap(gate_up), unwrap(up), unwrap(down)
    return (gate_up, up, down), (first, second, third)


def check(op: str, x: Any, ids: Any, weights: Any, num_experts: int, plan: Any) -> None:
    """Which expert each token goes to; x and the number of experts are checked already."""
    T = x.shape[0]
    check_tensor(op, "ids", ids, {"T": T, "top_k": None}, dtypes=INTEGERS, like=x)
    if ids.shape[1] < 1:
        raise ValueError(f"{op}: ids must have at least one slot per token, got shape {list(ids.shape)}")
    check_tensor(op, "weights", weights, {"T": T, "top_k": ids.shape[1]}, like=x)
    check_float64(op, {"x": x, "weights": weights})
    if plan is not None:
        check_instance(op, "plan", plan, Plan)
        if plan.num_experts != num_experts or plan.assignments != ids.numel() or plan.top_k != ids.shape[1]:
            got = f"one for {plan.assignments} in top-{plan.top_k} of {plan.num_experts} experts"
            raise ValueError(f"{op}: plan must fit {ids.numel()} assignments of {num_experts} experts, got {got}")
        if plan.order.device != x.device:
            raise ValueError(f"{op}: plan must be on {x.device} like the rest, got {plan.order.device}")
        if x.device.type == "cpu" and has_values(ids, plan.offsets, plan.inverse):
            wanted = ids.flatten().masked_fill(((ids < 0) | (ids >= num_experts)).flatten(), num_experts)
            planned = torch.searchsorted(plan.offsets[1:].contiguous(), plan.inverse, right=True)
            if not torch.equal(planned, wanted.long()):
                raise ValueError(f"{op}: plan must be that of ids, got one that sends a token to another expert")


def check_stacks(
    op: str,
    x: Any,
    gate_up: Any,
    up: Any,
    down: Any,
    activation: Activation,
    gate_up_bias: Any,
    down_bias: Any,
    layout: str,
) -> None:
    """The experts' weights, against x and each other."""
    check_tensor(op, "x", x, {"T": None, "H": None})
    H = x.shape[1]
    check_weight(op, "down", down, {"E": None, "H": H, "I": None}, x)
    E, _, I = down.shape
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(f"{op}: E must be from 1 to {MAX_EXPERTS}, got {E}")
    check_layout(op, layout)
    rows = activation.width(I)
    if up is None:
        check_weight(op, "gate_up", gate_up, {"E": E, "2I" if activation.gated else "I": rows, "H": H}, x)
    else:
        if not activation.gated:
            raise ValueError(f"{op}: gate_up must be one tensor for an ungated activation, got gate and up")
        if layout != "halves":
            raise ValueError(f"{op}: layout must be halves when gate and up come apart, got {layout!r}")
        check_weight(op, "gate", gate_up, {"E": E, "I": I, "H": H}, x)
        check_weight(op, "up", up, {"E": E, "I": I, "H": H}, x)
    check_optional(op, "gate_up_bias", gate_up_bias, {"E": E, "rows": rows}, x)
    check_optional(op, "down_bias", down_bias, {"E": E, "H": H}, x)
    check_float64(op, {"x": x, "gate_up_bias": gate_up_bias, "down_bias": down_bias})


def _through_blocks(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    up: Weight | None,
    down: Weight,
    activation: Activation,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    layout: str,
    plan: Plan,
    tail: Tail,
    backend: str | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The differentiable composition of the parts, for weights in blocks: gradients pass through them."""
    if up is None:
        z = grouped_linear(x, gate_up, plan, gather=True, scatter=False, bias=gate_up_bias, backend=backend)
        h = glu(z, activation, layout=layout, backend=backend)
    else:
        biases = (None, None) if gate_up_bias is None else gate_up_bias.chunk(2, -1)
        g, u = (
            grouped_linear(x, w, plan, gather=True, scatter=False, bias=b, backend=backend)
            for w, b in zip((gate_up, up), biases, strict=True)
        )
        h = glu(g, u, activation, backend=backend)
    y = grouped_linear(h, down, plan, gather=False, scatter=True, bias=down_bias, backend=backend)
    return combine(y, mask(weights, ids, down.shape[0]), **tail._asdict(), backend=backend)


def experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    up: Weight | None,
    down: Weight,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor | None,
    order: Tensor | None,
    inverse: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    activation: Activation,
    layout: str,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    E = down.shape[0]
    x = widen(x)  # hidden rows and expert outputs then stay unrounded
    if offsets is None or order is None:
        _, offsets, order, _ = plan_reference(ids, E)
    if up is None:
        z = grouped_linear_reference(x, gate_up, gate_up_bias, offsets, order, True, False)
        h = glu_reference(z, None, activation, layout)
    else:
        biases = (None, None) if gate_up_bias is None else gate_up_bias.chunk(2, -1)
        g = grouped_linear_reference(x, gate_up, biases[0], offsets, order, True, False)
        u = grouped_linear_reference(x, up, biases[1], offsets, order, True, False)
        h = glu_reference(g, u, activation, layout)
    y = grouped_linear_reference(h, down, down_bias, offsets, order, False, True)
    masked = mask(weights, ids, E)
    combine_reference(y, masked, None, shared, shared_gate, shared_logit, residual, norm_weight, eps, out, normed_out)


def _experts_kernel(*args: Any) -> tuple[Tensor, Tensor]:
    out, normed = _experts_fake(*args)
    _experts_out_kernel(*args[:-4], out, None if args[15] is None else normed, *args[-4:])
    return out, normed


def _experts_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tail = Tail(*rest[10:16])
    normed = x.new_empty(0) if tail.norm_weight is None else x.new_empty(x.shape)
    return x.new_empty(x.shape, dtype=out_dtype(tail, x)), normed


def _experts_out_kernel(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, up: Any, down: Any, *rest: Any
) -> None:
    *tensors, kind, gated, alpha, limit, layout, out, normed_out, gate_up_spec, up_spec, down_spec, backend = rest
    run = select("experts", x, backend, (gate_up_spec, up_spec, down_spec)).run
    stacks = wrap(gate_up, gate_up_spec), wrap(up, up_spec), wrap(down, down_spec)
    run(x, ids, weights, *stacks, *tensors, activation_of(kind, gated, alpha, limit), layout, out, normed_out)


_FORMATS = "str? gate_up_format, str? up_format, str? down_format"
_experts = define(
    f"experts({EXPERTS_SCHEMA}, {_FORMATS}, str? backend) -> (Tensor, Tensor)",
    _experts_kernel,
    reference=experts_reference,
    fake=_experts_fake,
)
_experts_out = define(
    f"experts_out({EXPERTS_SCHEMA}, Tensor(a!) out, Tensor(b!)? normed_out, {_FORMATS}, str? backend) -> ()",
    _experts_out_kernel,
    reference=None,
    fake=lambda *_: None,
)
