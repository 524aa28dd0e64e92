"""grouped_linear: every assignment times its expert's weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import widen
from moefuse.ops._core.checks import check_float64, check_optional, check_weight
from moefuse.ops._core.library import Gradients, Rule, define
from moefuse.ops._core.select import inherit
from moefuse.ops.grouped_outer import check_rows, expert_rows, expert_runs, grouped_outer_op
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Plan, Weight


def grouped_linear(
    x: Tensor,
    weight: Weight,
    plan: Plan,
    *,
    gather: bool,
    scatter: bool,
    bias: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Multiply each assignment's row by the weight of its expert.

    Args:
        x: with ``gather``, token rows ``[T, K]`` (each read top_k times, without a copy) or slot rows ``[S, K]`` in
            ``token * top_k + slot`` order; without, ``[S, K]`` in the plan's expert-major order.
        weight: ``[E, N, K]``, the type of x and any strides, or a `moefuse.QuantTensor`.
        plan: from `plan`.
        gather: how rows of x are found.
        scatter: result rows in slot order; otherwise expert-major.
        bias: ``[E, N]``.
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        ``[S, N]`` in the type of x, float32 accumulation. Rows of assignments without an expert are zero.

    The up product is ``gather=True, scatter=False``, the down product the reverse.

    >>> from moefuse import plan
    >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> weight = torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    >>> grouped_linear(x, weight, plan(torch.tensor([[1], [0]]), 2), gather=True, scatter=True)
    tensor([[20.],
            [ 3.]])
    """
    check(x, weight, plan, gather, scatter, bias)
    return _grouped_linear(backend, x, weight, bias, plan, gather, scatter)


def check(x: Any, weight: Any, plan: Any, gather: Any, scatter: Any, bias: Any) -> None:
    check_rows("grouped_linear", x, plan, gather, scatter)
    stack = {"E": plan.num_experts, "N": None, "K": x.shape[1]}
    check_weight("grouped_linear", "weight", weight, stack, x)
    check_optional("grouped_linear", "bias", bias, {"E": plan.num_experts, "N": weight.shape[1]}, x)
    check_float64("grouped_linear", {"x": x, "bias": bias})


def _expert(weight: Weight, e: int, dtype: torch.dtype) -> Tensor:
    """The matrix of one expert in the type of arithmetic; blocks are opened one expert at a time."""
    return weight[e].dequantize(dtype) if isinstance(weight, QuantTensor) else widen(weight[e])


def grouped_linear_reference(
    x: Tensor, weight: Weight, bias: Tensor | None, plan: Plan, gather: bool, scatter: bool
) -> Tensor:
    rows = widen(expert_rows(x, plan.order, gather))
    y = rows.new_zeros(plan.assignments, weight.shape[1])
    for e, run in expert_runs(plan):
        y[run] = rows[run] @ _expert(weight, e, rows.dtype).T
        if bias is not None:
            y[run] += widen(bias[e])
    return _placed(y.to(x.dtype), plan, scatter)


def grouped_linear_transposed_reference(
    grad: Tensor, weight: Weight, plan: Plan, gather: bool, scatter: bool
) -> Tensor:
    """The input gradient ``[S, K]``; an op of its own for weights in blocks, which have no transposed view."""
    grads = widen(grad[plan.order.long()] if gather else grad)
    d_x = grads.new_zeros(plan.assignments, weight.shape[2])
    for e, run in expert_runs(plan):
        d_x[run] = grads[run] @ _expert(weight, e, grads.dtype)
    return _placed(d_x.to(grad.dtype), plan, scatter)


def _placed(rows: Tensor, plan: Plan, scatter: bool) -> Tensor:
    return torch.empty_like(rows).index_copy_(0, plan.order.long(), rows) if scatter else rows


def _backward(
    needs: Mapping[str, bool],
    grads: tuple[Tensor],
    backend: str | None,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    plan: Plan,
    gather: bool,
    scatter: bool,
) -> Gradients:
    outer = inherit("grouped_outer", backend)
    (grad,) = grads
    grad = grad.contiguous()
    found: dict[str, Tensor | None] = {}
    if needs["x"]:
        # Read rows where the forward wrote them, write rows where it read them.
        if isinstance(weight, QuantTensor):
            by = inherit("grouped_linear_transposed", backend)
            d_x = grouped_linear_transposed_op(by, grad, weight, plan, scatter, gather)
        else:
            d_x = _grouped_linear(backend, grad, weight.transpose(1, 2), None, plan, scatter, gather)
        if d_x.shape[0] != x.shape[0]:
            d_x = widen(d_x).view(x.shape[0], -1, x.shape[1]).sum(1).to(x.dtype)
        found["x"] = d_x
    if needs["weight"]:
        found["weight"] = grouped_outer_op(outer, grad, x, plan, gather, scatter)
    if bias is not None and needs["bias"]:
        ones = grad.new_ones(plan.assignments, 1)
        found["bias"] = grouped_outer_op(outer, grad, ones, plan, False, scatter)[..., 0].to(bias.dtype)
    return found


def _transposed_backward(
    needs: Mapping[str, bool],
    grads: tuple[Tensor],
    backend: str | None,
    weight: Weight,
    plan: Plan,
    gather: bool,
    scatter: bool,
) -> Gradients:
    """The transpose of the transpose is the product itself."""
    (grad,) = grads
    return {"grad": _grouped_linear(backend, grad, weight, None, plan, scatter, gather) if needs["grad"] else None}


_grouped_linear = define(
    grouped_linear_reference,
    "x",
    fake=lambda x, weight, _bias, plan, *_: x.new_empty(plan.assignments, weight.shape[1]),
    rule=Rule(_backward),
)
grouped_linear_transposed_op = define(
    grouped_linear_transposed_reference,
    "grad",
    fake=lambda grad, weight, plan, *_: grad.new_empty(plan.assignments, weight.shape[2]),
    rule=Rule(_transposed_backward),
)
