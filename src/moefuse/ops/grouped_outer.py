"""grouped_outer: the weight gradient of grouped_linear."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from moefuse.ops._core.arithmetic import widen
from moefuse.ops._core.checks import check_instance, check_tensor
from moefuse.ops._core.library import define, refuse_second_order
from moefuse.types import Plan, check_flag


def grouped_outer(
    grad: Tensor, x: Tensor, plan: Plan, *, gather: bool, scatter: bool, backend: str | None = None
) -> Tensor:
    """The weight gradient of `grouped_linear`: per expert, the sum of ``outer(grad row, x row)``.

    Args:
        grad: ``[S, N]``, laid out as the forward's result: slot order when ``scatter``, else expert-major.
        x: the forward's input, read as the forward read it.
        plan: the forward's plan.
        gather: as in the forward.
        scatter: as in the forward.
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        ``[E, N, K]`` in the type of grad, float32 accumulation; zero for experts without rows.

    >>> import torch
    >>> from moefuse import plan
    >>> p = plan(torch.tensor([[0], [0]]), 2)
    >>> grouped_outer(torch.tensor([[1.0], [10.0]]), torch.tensor([[1.0], [2.0]]), p, gather=True, scatter=True)
    tensor([[[21.]],
    <BLANKLINE>
            [[ 0.]]])
    """
    check_rows("grouped_outer", x, plan, gather, scatter)
    check_tensor("grouped_outer", "grad", grad, {"S": plan.assignments, "N": None})
    check_tensor("grouped_outer", "x", x, {"rows": None, "K": None}, dtypes=(grad.dtype,), like=grad)
    return grouped_outer_op(backend, grad, x, plan, gather, scatter)


def check_rows(op: str, x: Any, plan: Any, gather: Any, scatter: Any) -> None:
    """The plan, and rows that fit it."""
    check_instance(op, "plan", plan, Plan)
    check_flag(op, "gather", gather)
    check_flag(op, "scatter", scatter)
    check_tensor(op, "x", x, {"rows": None, "K": None}, like=plan.order)
    S = plan.assignments
    valid = (S // plan.top_k, S) if gather else (S,)
    if x.shape[0] not in valid:
        raise ValueError(f"{op}: x must have {' or '.join(map(str, valid))} rows for this plan, got {x.shape[0]}")


def expert_rows(x: Tensor, order: Tensor, gather: bool) -> Tensor:
    """Rows of x in expert-major order."""
    if not gather:
        return x
    return x[order.long() // (order.shape[0] // max(x.shape[0], 1) or 1)]


def expert_runs(plan: Plan) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and where those are in expert-major order."""
    for e, (start, stop) in enumerate(itertools.pairwise(plan.offsets.tolist())):
        if start < stop:
            yield e, slice(start, stop)


def grouped_outer_reference(grad: Tensor, x: Tensor, plan: Plan, gather: bool, scatter: bool) -> Tensor:
    rows = widen(expert_rows(x, plan.order, gather))
    grads = widen(grad[plan.order.long()] if scatter else grad)
    d_weight = grad.new_zeros(plan.num_experts, grad.shape[1], x.shape[1])
    for e, run in expert_runs(plan):
        d_weight[e] = (grads[run].T @ rows[run]).to(grad.dtype)
    return d_weight


grouped_outer_op = define(
    grouped_outer_reference,
    "grad",
    fake=lambda grad, x, plan, *_: grad.new_empty(plan.num_experts, grad.shape[1], x.shape[1]),
    rule=refuse_second_order("grouped_outer"),
)
