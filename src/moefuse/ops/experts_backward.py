"""experts_backward: the gradients of experts, from its inputs and the pre-activations that its forward kept.

Kept are x, the pre-activation ``z [S, 2I]`` and the routing, never a tensor of ``S * H``: the gradient of a weight is
``<act(z), d_out @ down>``, so the experts' outputs are not needed again. Stacks in blocks are frozen: gradients pass
through them, from the blocks as they are, to the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import widen
from moefuse.ops._core.library import define, prove, refuse_second_order, untraced
from moefuse.ops.glu import glu_backward_reference, glu_reference
from moefuse.ops.grouped_linear import grouped_linear_transposed_reference
from moefuse.ops.grouped_outer import grouped_outer_reference
from moefuse.types import Activation, Plan, Stacks, Wanted, Weight

_Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def experts_backward(
    backend: str | None,
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan,
    activation: Activation,
    wanted: Wanted,
) -> _Seven:
    """Gradients in the order of `Wanted`, empty where not wanted; z is overwritten where nobody reads it again."""
    reuse_z = _is_last_use(z)
    run = _reusing if reuse_z else _keeping
    return run(backend, d, x, z, weights, stacks, plan, activation, wanted, reuse_z)


def experts_backward_reference(
    d: Tensor,
    x: Tensor,
    z: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan,
    activation: Activation,
    wanted: Wanted,
    reuse_z: bool,  # memory is no concern here
) -> _Seven:
    """For the gradient ``d`` of the weighted sum. ``reuse_z``: z is not needed after this, so its memory may serve as
    scratch."""
    found = dict.fromkeys(Wanted._fields, d.new_empty(0))
    (T, top_k), E = weights.shape, plan.num_experts
    order, layout = plan.order.long(), stacks.layout
    positions = torch.arange(plan.assignments, device=d.device, dtype=plan.offsets.dtype)
    live = (positions < plan.offsets[-1]).unsqueeze(1)
    share = widen(weights).reshape(-1, 1)[order].where(live, 0)
    wide_z = widen(z)
    rows = widen(d)[order // top_k]

    needs_d_z = wanted.x or wanted.gate_up or wanted.up or wanted.gate_up_bias
    h = glu_reference(wide_z, None, activation, layout)
    g = torch.zeros_like(h)
    if wanted.weights or needs_d_z:
        g = grouped_linear_transposed_reference(rows, stacks.down, plan, False, False)
    if wanted.weights:
        along = (h * g).sum(-1, keepdim=True)
        if stacks.down_bias is not None:
            expert = torch.searchsorted(plan.offsets[1:], positions, right=True).clamp(max=E - 1)
            along += (rows * widen(stacks.down_bias)[expert]).sum(-1, keepdim=True)
        found["weights"] = along.where(live, 0)[plan.inverse.long()].view(T, top_k).to(weights.dtype)
    if needs_d_z:
        d_z = glu_backward_reference(share * g, wide_z, None, activation, layout)[0]
        if wanted.x:
            d_slots = _into_slots(d_z, stacks, plan)
            found["x"] = d_slots.view(T, top_k, -1).sum(1).to(x.dtype) if T else torch.empty_like(x)
        if wanted.gate_up or wanted.up:
            d_stack = grouped_outer_reference(d_z, widen(x), plan, True, False).to(x.dtype)
            found["gate_up"], found["up"] = (d_stack, d_stack) if stacks.up is None else d_stack.chunk(2, 1)
        if stacks.gate_up_bias is not None and wanted.gate_up_bias:
            found["gate_up_bias"] = _bias_gradient(d_z, plan).to(stacks.gate_up_bias.dtype)
    if wanted.down:
        found["down"] = grouped_outer_reference(share * rows, h, plan, False, False).to(x.dtype)
    if stacks.down_bias is not None and wanted.down_bias:
        found["down_bias"] = _bias_gradient(share * rows, plan).to(stacks.down_bias.dtype)
    # A custom op's results must not share memory.
    return _seven(
        found[name].clone() if want else d.new_empty(0) for name, want in zip(Wanted._fields, wanted, strict=True)
    )


def _into_slots(d_z: Tensor, stacks: Stacks, plan: Plan) -> Tensor:
    """``d_z @ gate_up``, and ``@ up`` where it comes apart: rows in slot order."""
    if stacks.up is None:
        return grouped_linear_transposed_reference(d_z, stacks.gate_up, plan, False, True)
    pairs = zip(d_z.chunk(2, 1), (stacks.gate_up, stacks.up), strict=True)
    gate, up = (grouped_linear_transposed_reference(part, stack, plan, False, True) for part, stack in pairs)
    return gate + up


def _seven(tensors: Iterable[Tensor]) -> _Seven:
    x, weights, gate_up, up, down, gate_up_bias, down_bias = tensors
    return x, weights, gate_up, up, down, gate_up_bias, down_bias


def _bias_gradient(grad: Tensor, plan: Plan) -> Tensor:
    return grouped_outer_reference(grad, grad.new_ones(plan.assignments, 1), plan, False, False).squeeze(-1)


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


def _fake(
    d: Tensor,
    x: Tensor,
    _z: Tensor,
    weights: Tensor,
    stacks: Stacks,
    _plan: Plan,
    _activation: Activation,
    wanted: Wanted,
    _reuse_z: bool,
) -> _Seven:
    inputs: tuple[Weight | None, ...] = (x, weights, stacks.gate_up, stacks.up, stacks.down)
    inputs += (stacks.gate_up_bias, stacks.down_bias)
    return _seven(
        t.new_empty(t.shape) if want and isinstance(t, Tensor) else d.new_empty(0)
        for t, want in zip(inputs, wanted, strict=True)
    )


_keeping = define(experts_backward_reference, "d", fake=_fake, rule=refuse_second_order("experts"))
_reusing = define(experts_backward_reference, "d", form="_reusing", fake=_fake, mutated=("z",))
