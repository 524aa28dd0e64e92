"""moe: the whole block, router included."""

from __future__ import annotations

from torch import Tensor

from moefuse.ops._core import replay
from moefuse.ops._core.invariance import asked
from moefuse.ops._core.memory import check_outputs
from moefuse.ops._core.select import select
from moefuse.ops.combine import check_out, check_tail
from moefuse.ops.combine_backward import tail_tensors
from moefuse.ops.experts import check_stacks, experts, run_experts, stack_tensors, stacks_of
from moefuse.ops.gate import check, gate, gate_reference
from moefuse.ops.glu import check_activation
from moefuse.types import Activation, Router, Routing, Stacks, Tail, Weight


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
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

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
    # The values of `_run` without their bundles, which a recorded call does not need: it is all Python that a GPU sees.
    stacked = (*(gate_up if isinstance(gate_up, tuple) else (gate_up, None)), down, gate_up_bias, down_bias, layout)
    routed = (router, norm_weight, bias, logit_bias, per_expert_scale, eps)
    after = (shared, shared_gate, shared_logit, residual, next_norm_weight, next_eps)
    backend = asked(backend)
    call = replay.lookup("moe", backend, (x, *routed, routing, *stacked, activation, *after, out, normed_out))
    if call is not None and call.again is not None and out is None and normed_out is None:
        result: Tensor | tuple[Tensor, Tensor] = call.again(call.tensors)
        return result
    stacks = stacks_of("moe", gate_up, down, gate_up_bias, down_bias, layout)
    routes, tail = Router(*routed), Tail(*after)
    rule = check_activation("moe", activation)
    if call is None or call.record is None:
        check_stacks("moe", x, stacks, rule)
        check("moe", x, routes, routing, "router")
        check_tail("moe", tail, x.shape[0], x)
        check_out("moe", tail, x.shape[0], x, _tensors(x, routes, stacks, tail, out, normed_out))
    elif out is not None or normed_out is not None:
        check_outputs("moe", _tensors(x, routes, stacks, tail, out, normed_out))
    if call is not None:
        return replay.run(call, _run, backend, x, routes, routing, stacks, rule, tail, out, normed_out)
    weights, ids, normed = gate(
        x,
        router,
        routing,
        norm_weight=norm_weight,
        eps=eps,
        bias=bias,
        logit_bias=logit_bias,
        per_expert_scale=per_expert_scale,
        return_normed=True,
        backend=backend,
    )
    return experts(
        normed,
        ids,
        weights,
        gate_up,
        down,
        activation=rule,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        layout=layout,
        **tail._asdict(),
        out=out,
        normed_out=normed_out,
        backend=backend,
    )


def _tensors(
    x: Tensor, router: Router, stacks: Stacks, tail: Tail, out: Tensor | None, normed_out: Tensor | None
) -> dict[str, Tensor | None]:
    """Every tensor of a call, by its argument."""
    after = {"next_norm_weight" if name == "norm_weight" else name: t for name, t in tail_tensors(tail).items()}
    before = {"router" if name == "weight" else name: t for name, t in router._asdict().items() if name != "eps"}
    return {"x": x, **before, **stack_tensors(stacks), **after, "out": out, "normed_out": normed_out}


def _run(
    backend: str | None,
    x: Tensor,
    router: Router,
    routing: Routing,
    stacks: Stacks,
    activation: Activation,
    tail: Tail,
    out: Tensor | None,
    normed_out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What a call that passed the checks does."""
    norms = router.norm_weight is not None
    weights, ids, normed = select(gate_reference, x, backend, settled=True)(x, router, routing, norms)
    rows = normed if norms else x
    return run_experts(backend, rows, ids, weights, stacks, activation, tail, out, normed_out)
