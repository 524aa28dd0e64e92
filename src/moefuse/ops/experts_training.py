"""experts under gradients: a forward that keeps the pre-activation, and the backward that needs nothing more.

Saved are x, the pre-activation ``z [S, 2I]`` and the routing, never a tensor of ``S * H``: the gradient of a weight is
``<act(z), d_out @ down>``, so the experts' outputs are not needed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops.activation import ACTIVATION_SCHEMA, activation_of, glu_backward_reference, glu_reference
from moefuse.ops.checks import widen
from moefuse.ops.combine import TAIL_SCHEMA, Tail, combine_reference, out_dtype
from moefuse.ops.grouped_linear import grouped_linear_reference, grouped_outer_reference
from moefuse.ops.library import define, prove, refuse_second_order, untraced
from moefuse.ops.select import inherit, select
from moefuse.ops.tail_backward import tail_backward
from moefuse.types import Activation

EXPERTS_SCHEMA = (
    "Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor? up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias, Tensor? offsets, Tensor? order, Tensor? inverse, "
    f"{TAIL_SCHEMA}, {ACTIVATION_SCHEMA}, str layout"
)
#: what `experts_backward` may be asked for, in the order of its results
WANTED = ("x", "weights", "gate_up", "up", "down", "gate_up_bias", "down_bias")


def mask(weights: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """Weights with those of sentinel ids set to zero."""
    return weights.masked_fill((ids < 0) | (ids >= num_experts), 0)


def experts_saving_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    inverse: Tensor,  # rows stay in slot order here
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
    z: Tensor,
) -> None:
    """`experts`, and z: expert-major pre-activations in ``layout``, gate beside up where the two come apart.

    Rows of z without an expert are zero.
    """
    wide = widen(x)
    stack = gate_up if up is None else torch.cat((gate_up, up), 1)
    pre = grouped_linear_reference(wide, stack, gate_up_bias, offsets, order, True, False)
    z.copy_(pre)
    h = glu_reference(pre, None, activation, layout)
    y = grouped_linear_reference(h, down, down_bias, offsets, order, False, True)
    masked = mask(weights, ids, down.shape[0])
    combine_reference(y, masked, None, shared, shared_gate, shared_logit, residual, norm_weight, eps, out, normed_out)


def experts_backward_reference(
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    up: Tensor | None,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    inverse: Tensor,
    activation: Activation,
    layout: str,
    wanted: list[bool],
    reuse_z: bool,  # memory is no concern here
) -> tuple[Tensor, ...]:
    """Gradients of the inputs in `WANTED`, empty where not wanted, for the gradient ``d`` of the weighted sum.

    ``reuse_z``: z is not needed after this, so its memory may serve as scratch.
    """
    want = dict(zip(WANTED, wanted, strict=True))
    found = dict.fromkeys(WANTED, torch.empty(0))
    (T, top_k), E = weights.shape, down.shape[0]
    positions = torch.arange(order.shape[0], device=d.device, dtype=offsets.dtype)
    live = (positions < offsets[-1]).unsqueeze(1)
    share = widen(weights).reshape(-1, 1)[order.long()].where(live, 0)
    wide_z = widen(z)
    rows = widen(d)[order.long() // top_k]

    needs_d_z = want["x"] or want["gate_up"] or want["up"] or want["gate_up_bias"]
    h = glu_reference(wide_z, None, activation, layout)
    g = torch.zeros_like(h)
    if want["weights"] or needs_d_z:
        g = grouped_linear_reference(rows, down.transpose(1, 2), None, offsets, order, False, False)
    if want["weights"]:
        along = (h * g).sum(-1, keepdim=True)
        if down_bias is not None:
            expert = torch.searchsorted(offsets[1:], positions, right=True).clamp(max=E - 1)
            along += (rows * widen(down_bias)[expert]).sum(-1, keepdim=True)
        found["weights"] = along.where(live, 0)[inverse.long()].view(T, top_k).to(weights.dtype)
    if needs_d_z:
        d_z = glu_backward_reference(share * g, wide_z, None, activation, layout)[0]
        stack = gate_up if up is None else torch.cat((gate_up, up), 1)
        if want["x"]:
            d_slots = grouped_linear_reference(d_z, stack.transpose(1, 2), None, offsets, order, False, True)
            found["x"] = d_slots.view(T, top_k, -1).sum(1).to(x.dtype) if T else torch.empty_like(x)
        if want["gate_up"] or want["up"]:
            d_stack = grouped_outer_reference(d_z, widen(x), offsets, order, True, False).to(gate_up.dtype)
            found["gate_up"], found["up"] = (d_stack, d_stack) if up is None else d_stack.chunk(2, 1)
        if gate_up_bias is not None and want["gate_up_bias"]:
            found["gate_up_bias"] = _bias_gradient(d_z, offsets, order).to(gate_up_bias.dtype)
    if want["down"]:
        found["down"] = grouped_outer_reference(share * rows, h, offsets, order, False, False).to(down.dtype)
    if down_bias is not None and want["down_bias"]:
        found["down_bias"] = _bias_gradient(share * rows, offsets, order).to(down_bias.dtype)
    # A custom op's results must not share memory.
    return tuple(found[name].clone() if want[name] else d.new_empty(0) for name in WANTED)


def _bias_gradient(grad: Tensor, offsets: Tensor, order: Tensor) -> Tensor:
    return grouped_outer_reference(grad, grad.new_ones(order.shape[0], 1), offsets, order, False, False).squeeze(-1)


def _saving_kernel(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, kind, gated, alpha, limit, layout, backend = rest
    out, normed, z = _saving_fake(x, *rest)
    run = select("experts_saving", x, inherit("experts_saving", backend)).run
    given = None if tensors[14] is None else normed
    run(x, *tensors, activation_of(kind, gated, alpha, limit), layout, out, given, z)
    return out, normed, z


def _saving_fake(x: Tensor, ids: Tensor, weights: Any, gate_up: Tensor, up: Any, *rest: Any) -> tuple[Tensor, ...]:
    tail = Tail(*rest[6:12])
    normed = x.new_empty(0) if tail.norm_weight is None else x.new_empty(x.shape)
    rows = gate_up.shape[1] * (1 if up is None else 2)
    z = x.new_empty(ids.shape[0] * ids.shape[1], rows)
    return x.new_empty(x.shape, dtype=out_dtype(tail, x)), normed, z


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.eps, kind, gated, alpha, limit, layout, ctx.backend = inputs
    ctx.rule = (kind, gated, alpha, limit, layout)
    out, _, z = output
    x, _, *others, _, norm_weight = tensors  # neither ids nor residual are needed again
    ctx.save_for_backward(x, z, *others, norm_weight, None if norm_weight is None else out)
    ctx.mark_non_differentiable(z)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, d_normed: Tensor | None, _: Any) -> tuple[Any, ...]:
    x, z, weights, gate_up, up, down, gate_up_bias, down_bias, offsets, order, inverse, *tail, out = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if d_out is None:
        d_out = torch.zeros_like(x if out is None else out)
    d = d_out.contiguous()
    d_normed = None if out is None else d_normed
    d_tail: list[Tensor | None] = [None] * 4
    if tail[0] is not None or d_normed is not None:
        backend = inherit("tail_backward", ctx.backend)
        d_sum, *found = tail_backward(d, d_normed, out, *tail, ctx.eps, backend)
        d_tail = [grad if need else None for grad, need in zip(found, (*needs[11:14], needs[15]), strict=True)]
        if d_normed is None:
            d_tail[3] = None
        else:
            d = d_sum
    wanted = [needs[0], *needs[2:8]]
    grads: list[Tensor | None] = [None] * len(wanted)
    if any(wanted):
        arguments = (
            d.to(x.dtype), x, z, weights, gate_up, up, down, gate_up_bias, down_bias, offsets, order, inverse,
            *ctx.rule, wanted, inherit("experts_backward", ctx.backend),
        )  # fmt: skip
        run = _experts_backward_reusing if _is_last_use(z) else _experts_backward
        grads = [grad if want else None for grad, want in zip(run(*arguments), wanted, strict=True)]
    d_residual = d if needs[14] else None
    return (
        grads[0], None, *grads[1:], None, None, None, *d_tail[:3], d_residual, d_tail[3], None,
        *(None for _ in ctx.rule), None,
    )  # fmt: skip


def _keeping_shows() -> bool:
    """Whether a backward pass can tell that what was saved is kept."""
    seen: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, grad: Any) -> Any:
            seen.append(torch._C._autograd._get_current_graph_task_keep_graph())
            return grad

    with torch.inference_mode(False), torch.enable_grad():
        y = Look.apply(torch.ones(1, requires_grad=True))  # type: ignore[no-untyped-call]
        y.backward(retain_graph=True)
        y.backward()
    return seen == [True, False]


_REUSES = prove("gradients in saved memory", _keeping_shows)


def _is_last_use(z: Tensor) -> bool:
    """Whether this backward pass frees what was saved: then the memory of z may be written."""
    if not _REUSES:
        return False
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return untraced((z,)) and not torch.is_grad_enabled() and not keeps


def _backward_kernel(d: Tensor, *rest: Any, reuse_z: bool = False) -> Any:
    *tensors, kind, gated, alpha, limit, layout, wanted, backend = rest
    run = select("experts_backward", d, backend).run
    return run(d, *tensors, activation_of(kind, gated, alpha, limit), layout, wanted, reuse_z)


def _reusing_kernel(*args: Any) -> Any:
    return _backward_kernel(*args, reuse_z=True)


def _backward_fake(
    d: Tensor, x: Tensor, z: Any, weights: Any, gate_up: Any, up: Any, down: Any, gate_up_bias: Any, *rest: Any
) -> tuple[Tensor, ...]:
    wanted = rest[-2]
    inputs = (x, weights, gate_up, up, down, gate_up_bias, rest[0])
    return tuple(
        t.new_empty(t.shape) if want and t is not None else d.new_empty(0)
        for t, want in zip(inputs, wanted, strict=True)
    )


_experts_saving = define(
    f"experts_saving({EXPERTS_SCHEMA}, str? backend) -> (Tensor, Tensor, Tensor)",
    _saving_kernel,
    reference=experts_saving_reference,
    fake=_saving_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_BACKWARD_SCHEMA = (
    "Tensor weights, Tensor gate_up, Tensor? up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, "
    f"Tensor offsets, Tensor order, Tensor inverse, {ACTIVATION_SCHEMA}, str layout, bool[] wanted, str? backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_experts_backward = define(
    f"experts_backward(Tensor d, Tensor x, Tensor z, {_BACKWARD_SCHEMA}",
    _backward_kernel,
    reference=experts_backward_reference,
    fake=_backward_fake,
    backward=refuse_second_order("experts"),
)
_experts_backward_reusing = define(
    f"experts_backward_reusing(Tensor d, Tensor x, Tensor(a!) z, {_BACKWARD_SCHEMA}",
    _reusing_kernel,
    reference=None,
    fake=_backward_fake,
)


def experts_saving(*args: Any) -> tuple[Tensor, Tensor]:
    """The differentiable form of `experts`: its arguments and the plan's parts, checked; out, and normed or empty."""
    out, normed, _ = _experts_saving(*args)
    return out, normed
