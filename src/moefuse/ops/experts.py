"""experts: the whole expert MLP of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moefuse.ops._core import replay
from moefuse.ops._core.arithmetic import masked_weights, widen
from moefuse.ops._core.checks import INTEGERS, check_float64, check_instance, check_optional, check_tensor, check_weight
from moefuse.ops._core.invariance import asked
from moefuse.ops._core.library import Gradients, Rule, define, define_kernel
from moefuse.ops._core.memory import check_outputs, has_values
from moefuse.ops._core.select import choose, inherit, select
from moefuse.ops.combine import check_out, check_tail, combine_reference, fresh_outputs, results_of
from moefuse.ops.combine_backward import tail_backward, tail_tensors
from moefuse.ops.experts_backward import experts_backward
from moefuse.ops.glu import check_activation, check_layout, glu_reference
from moefuse.ops.grouped_linear import grouped_linear_reference
from moefuse.ops.plan import plan as make_plan
from moefuse.ops.plan import plan_reference
from moefuse.quant.tensor import QuantTensor
from moefuse.types import MAX_EXPERTS, Activation, Outputs, Plan, Stacks, Tail, Wanted, Weight


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
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        ``[T, H]``, or ``(out, normed)`` when ``norm_weight`` is given.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> gate_up = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])  # one expert, I = 1
    >>> down = torch.tensor([[[1.0], [10.0]]])
    >>> experts(x, torch.tensor([[0]]), torch.tensor([[0.5]]), gate_up, down, activation="relu")
    tensor([[ 1., 10.]])
    """
    backend = asked(backend)
    call = None
    if plan is None:
        # The values of `run_experts` without their bundles, which a recorded call does not need.
        pair = gate_up if isinstance(gate_up, tuple) else (gate_up, None)
        stacked = (*pair, down, gate_up_bias, down_bias, layout)
        after = (shared, shared_gate, shared_logit, residual, norm_weight, eps)
        call = replay.lookup("experts", backend, (x, ids, weights, *stacked, activation, *after, out, normed_out))
        if call is not None and call.again is not None and out is None and normed_out is None:
            result: Tensor | tuple[Tensor, Tensor] = call.again(call.tensors)
            return result
    stacks = stacks_of("experts", gate_up, down, gate_up_bias, down_bias, layout)
    tail = Tail(shared, shared_gate, shared_logit, residual, norm_weight, eps)
    tensors = {"x": x, "ids": ids, "weights": weights, **stack_tensors(stacks), **tail_tensors(tail)}
    tensors |= {"out": out, "normed_out": normed_out}
    rule = check_activation("experts", activation)
    if call is None or call.record is None:
        check_stacks("experts", x, stacks, rule)
        check("experts", x, ids, weights, down.shape[0], plan)
        check_tail("experts", tail, x.shape[0], x)
        planned = {} if plan is None else {f"plan.{name}": t for name, t in plan.tensors.items()}
        check_out("experts", tail, x.shape[0], x, {**planned, **tensors})
    elif out is not None or normed_out is not None:
        check_outputs("experts", tensors)
    if call is not None:
        return replay.run(call, run_experts, backend, x, ids, weights, stacks, rule, tail, out, normed_out)
    if out is not None or normed_out is not None:
        outputs = fresh_outputs(tail, x, out, normed_out)
        _experts_out(backend, x, ids, weights, stacks, plan, rule, tail, outputs, None)
        return results_of(outputs)
    # Inside a compiled torch.func.grad no tensor says that it requires a gradient.
    hidden = torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    tracked = torch.is_grad_enabled() and (hidden or any(t is not None and t.requires_grad for t in tensors.values()))
    if tracked:
        if not torch.compiler.is_compiling():
            choose("experts", x, backend, stacks.specs)  # a choice that cannot run is refused in this op's name
        plan = plan or make_plan(ids, down.shape[0], backend=backend)
    summed, normed, _ = _experts(backend, x, ids, weights, stacks, plan, rule, tail, tracked)
    return summed if norm_weight is None else (summed, normed)


def run_experts(
    backend: str | None,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: Stacks,
    activation: Activation,
    tail: Tail,
    out: Tensor | None,
    normed_out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What a call without a plan that passed the checks does."""
    outputs = fresh_outputs(tail, x, out, normed_out)
    run = select(experts_reference, x, backend, stacks.specs, settled=True)
    run(x, ids, weights, stacks, None, activation, tail, outputs, None)
    return results_of(outputs)


def stacks_of(op: str, gate_up: Any, down: Any, gate_up_bias: Any, down_bias: Any, layout: str) -> Stacks:
    """The bundle of what a user gives, unchecked: ``gate_up`` is one stack, or gate and up."""
    if not isinstance(gate_up, tuple):
        return Stacks(gate_up, None, down, gate_up_bias, down_bias, layout)
    if len(gate_up) != 2:
        raise ValueError(f"{op}: gate_up must be one tensor or (gate, up), got a tuple of {len(gate_up)}")
    gate_proj, up = gate_up
    return Stacks(gate_proj, up, down, gate_up_bias, down_bias, layout)


def stack_tensors(stacks: Stacks) -> dict[str, Tensor | None]:
    """Every tensor of the stacks, by name; of one in blocks its bytes."""
    return {
        name: value.blocks if isinstance(value, QuantTensor) else value
        for name, value in stacks._asdict().items()
        if name != "layout"
    }


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


def check_stacks(op: str, x: Any, stacks: Stacks, activation: Activation) -> None:
    """The experts' weights, against x and each other."""
    check_tensor(op, "x", x, {"T": None, "H": None})
    H = x.shape[1]
    check_weight(op, "down", stacks.down, {"E": None, "H": H, "I": None}, x)
    E, _, I = stacks.down.shape
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(f"{op}: E must be from 1 to {MAX_EXPERTS}, got {E}")
    check_layout(op, stacks.layout)
    rows = activation.width(I)
    if stacks.up is None:
        check_weight(op, "gate_up", stacks.gate_up, {"E": E, "2I" if activation.gated else "I": rows, "H": H}, x)
    else:
        if not activation.gated:
            raise ValueError(f"{op}: gate_up must be one tensor for an ungated activation, got gate and up")
        if stacks.layout != "halves":
            raise ValueError(f"{op}: layout must be halves when gate and up come apart, got {stacks.layout!r}")
        check_weight(op, "gate", stacks.gate_up, {"E": E, "I": I, "H": H}, x)
        check_weight(op, "up", stacks.up, {"E": E, "I": I, "H": H}, x)
    check_optional(op, "gate_up_bias", stacks.gate_up_bias, {"E": E, "rows": rows}, x)
    check_optional(op, "down_bias", stacks.down_bias, {"E": E, "H": H}, x)
    check_float64(op, {"x": x, "gate_up_bias": stacks.gate_up_bias, "down_bias": stacks.down_bias})


def experts_reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan | None,
    activation: Activation,
    tail: Tail,
    outputs: Outputs,
    z: Tensor | None,
) -> None:
    """``z``: where to keep the expert-major pre-activations in the stacks' layout, gate beside up where the two come
    apart, for `experts_backward`. Rows without an expert are zero."""
    E, top_k = stacks.down.shape[0], ids.shape[1]
    x = widen(x)  # hidden rows and expert outputs then stay unrounded
    plan = plan or Plan(*plan_reference(ids, E), top_k, trusted=True)
    bias = stacks.gate_up_bias
    if stacks.up is None:
        pre = grouped_linear_reference(x, stacks.gate_up, bias, plan, True, False)
    else:
        biases = (None, None) if bias is None else bias.chunk(2, -1)
        pairs = zip((stacks.gate_up, stacks.up), biases, strict=True)
        pre = torch.cat([grouped_linear_reference(x, w, b, plan, True, False) for w, b in pairs], 1)
    if z is not None:
        z.copy_(pre)
    h = glu_reference(pre, None, activation, stacks.layout)
    y = grouped_linear_reference(h, stacks.down, stacks.down_bias, plan, False, True)
    combine_reference(y, masked_weights(weights, ids, E), None, tail, outputs)


def _fresh(x: Tensor, ids: Tensor, stacks: Stacks, tail: Tail, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    outputs = fresh_outputs(tail, x)
    rows = stacks.gate_up.shape[1] * (1 if stacks.up is None else 2)
    z = x.new_empty(ids.shape[0] * ids.shape[1], rows) if save else x.new_empty(0)
    return outputs.out, x.new_empty(0) if outputs.normed is None else outputs.normed, z


def _kernel(
    backend: str | None,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan | None,
    activation: Activation,
    tail: Tail,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, its norm and the pre-activations; empty where there is none."""
    out, normed, z = _fresh(x, ids, stacks, tail, save)
    run = select(experts_reference, x, inherit("experts", backend, saves=save), stacks.specs, saves=save)
    outputs = Outputs(out, None if tail.norm_weight is None else normed)
    run(x, ids, weights, stacks, plan, activation, tail, outputs, z if save else None)
    return out, normed, z


def _keep(known: dict[str, Any]) -> dict[str, Any]:
    """The residual is not needed again, and the sum only where it was normed."""
    tail: Tail = known["tail"]
    return {"tail": tail._replace(residual=None), "summed": None if tail.norm_weight is None else known["out"]}


def _backward(
    needs: Mapping[str, bool],
    grads: tuple[Tensor | None, ...],
    backend: str | None,
    x: Tensor,
    z: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan,
    activation: Activation,
    tail: Tail,
    summed: Tensor | None,
) -> Gradients:
    d_out, d_normed, _ = grads
    if d_out is None:
        d_out = torch.zeros_like(x if summed is None else summed)
    d = d_out.contiguous()
    d_normed = None if summed is None else d_normed
    found: dict[str, Tensor | None] = {}
    if tail.shared is not None or d_normed is not None:
        by = inherit("tail_backward", backend)
        d_sum, found["shared"], found["shared_gate"], found["shared_logit"], d_norm = tail_backward(
            by, d, d_normed, summed, tail
        )
        if d_normed is not None:
            d, found["norm_weight"] = d_sum, d_norm
    wanted = Wanted(*(needs[name] for name in Wanted._fields))
    if any(wanted):
        by = inherit("experts_backward", backend)
        grads_of = experts_backward(by, d.to(x.dtype), x, z, weights, stacks, plan, activation, wanted)
        found |= zip(Wanted._fields, grads_of, strict=True)
    return found | {"residual": d}


_experts = define_kernel(
    experts_reference,
    _kernel,
    fake=lambda x, ids, _weights, stacks, _plan, _activation, tail, save: _fresh(x, ids, stacks, tail, save),
    rule=Rule(_backward, results=("out", "normed", "z"), keep=_keep, constant=1, sparse=True),
)
_experts_out = define(experts_reference, "x", form="_out", fake=lambda *_: None, mutated=("out", "normed", "z"))
