"""grouped_linear: every assignment times its expert's weight; grouped_outer: that weight's gradient."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.checks import check_float64, check_instance, check_optional, check_tensor, check_weight, widen
from moefuse.ops.library import define, refuse_second_order
from moefuse.ops.select import inherit, select
from moefuse.quant.tensor import QuantTensor, unwrap, wrap
from moefuse.types import Plan, check_flag


def grouped_linear(
    x: Tensor,
    weight: Tensor | QuantTensor,
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
        backend: see `moefuse.ops.select`.

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
    stack, spec = unwrap(weight)
    y: Tensor = _grouped_linear(x, stack, bias, plan.offsets, plan.order, gather, scatter, spec, backend)
    return y


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
        backend: see `moefuse.ops.select`.

    Returns:
        ``[E, N, K]`` in the type of grad, float32 accumulation; zero for experts without rows.

    >>> from moefuse import plan
    >>> p = plan(torch.tensor([[0], [0]]), 2)
    >>> grouped_outer(torch.tensor([[1.0], [10.0]]), torch.tensor([[1.0], [2.0]]), p, gather=True, scatter=True)
    tensor([[[21.]],
    <BLANKLINE>
            [[ 0.]]])
    """
    _check_rows("grouped_outer", x, plan, gather, scatter)
    check_tensor("grouped_outer", "grad", grad, {"S": plan.assignments, "N": None})
    check_tensor("grouped_outer", "x", x, {"rows": None, "K": None}, dtypes=(grad.dtype,), like=grad)
    d_weight: Tensor = _grouped_outer(grad, x, plan.offsets, plan.order, gather, scatter, backend)
    return d_weight


def _check_rows(op: str, x: Any, plan: Any, gather: Any, scatter: Any) -> None:
    check_instance(op, "plan", plan, Plan)
    check_flag(op, "gather", gather)
    check_flag(op, "scatter", scatter)
    check_tensor(op, "x", x, {"rows": None, "K": None}, like=plan.order)
    S = plan.assignments
    valid = (S // plan.top_k, S) if gather else (S,)
    if x.shape[0] not in valid:
        raise ValueError(f"{op}: x must have {' or '.join(map(str, valid))} rows for this plan, got {x.shape[0]}")


def check(x: Any, weight: Any, plan: Any, gather: Any, scatter: Any, bias: Any) -> None:
    _check_rows("grouped_linear", x, plan, gather, scatter)
    stack = {"E": plan.num_experts, "N": None, "K": x.shape[1]}
    check_weight("grouped_linear", "weight", weight, stack, x)
    check_optional("grouped_linear", "bias", bias, {"E": plan.num_experts, "N": weight.shape[1]}, x)
    check_float64("grouped_linear", {"x": x, "bias": bias})


def _x_rows(x: Tensor, order: Tensor, gather: bool) -> Tensor:
    """Rows of x in expert-major order."""
    if not gather:
        return x
    return x[order.long() // (order.shape[0] // max(x.shape[0], 1) or 1)]


def _expert(weight: Tensor | QuantTensor, e: int, dtype: torch.dtype) -> Tensor:
    """The matrix of one expert in the type of arithmetic; blocks are opened one expert at a time."""
    return weight[e].dequantize(dtype) if isinstance(weight, QuantTensor) else widen(weight[e])


def grouped_linear_reference(
    x: Tensor,
    weight: Tensor | QuantTensor,
    bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    gather: bool,
    scatter: bool,
) -> Tensor:
    rows = widen(_x_rows(x, order, gather))
    y = rows.new_zeros(order.shape[0], weight.shape[1])
    bounds = offsets.tolist()
    for e, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            y[start:stop] = rows[start:stop] @ _expert(weight, e, rows.dtype).T
            if bias is not None:
                y[start:stop] += widen(bias[e])
    y = y.to(x.dtype)
    return torch.empty_like(y).index_copy_(0, order.long(), y) if scatter else y


def grouped_linear_transposed_reference(
    grad: Tensor, weight: QuantTensor, offsets: Tensor, order: Tensor, gather: bool, scatter: bool
) -> Tensor:
    """The input gradient where the weight is in blocks, which have no transposed view."""
    grads = widen(grad[order.long()] if gather else grad)
    d_x = grads.new_zeros(order.shape[0], weight.shape[2])
    for e, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        if start < stop:
            d_x[start:stop] = grads[start:stop] @ _expert(weight, e, grads.dtype)
    d_x = d_x.to(grad.dtype)
    return torch.empty_like(d_x).index_copy_(0, order.long(), d_x) if scatter else d_x


def grouped_outer_reference(
    grad: Tensor, x: Tensor, offsets: Tensor, order: Tensor, gather: bool, scatter: bool
) -> Tensor:
    rows = widen(_x_rows(x, order, gather))
    grads = widen(grad[order.long()] if scatter else grad)
    d_weight = grad.new_zeros(offsets.shape[0] - 1, grad.shape[1], x.shape[1])
    bounds = offsets.tolist()
    for e, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start < stop:
            d_weight[e] = (grads[start:stop].T @ rows[start:stop]).to(grad.dtype)
    return d_weight


def _grouped_linear_kernel(x: Tensor, weight: Tensor, *rest: Any) -> Any:
    *tensors, spec, backend = rest
    run = select("grouped_linear", x, backend, (spec,)).run
    return run(x, wrap(weight, spec), *tensors)


def _grouped_linear_fake(x: Tensor, weight: Tensor, bias: Any, offsets: Any, order: Tensor, *_: Any) -> Tensor:
    return x.new_empty(order.shape[0], weight.shape[1])


def _grouped_linear_transposed_kernel(grad: Tensor, weight: Tensor, *rest: Any) -> Any:
    *tensors, spec, backend = rest
    run = select("grouped_linear_transposed", grad, backend, (spec,)).run
    return run(grad, wrap(weight, spec), *tensors)


def _grouped_linear_transposed_fake(grad: Tensor, weight: Tensor, offsets: Any, order: Tensor, *rest: Any) -> Tensor:
    columns = wrap(weight, rest[2]).shape[2]
    return grad.new_empty(order.shape[0], columns)


def _grouped_outer_kernel(
    grad: Tensor, x: Tensor, offsets: Tensor, order: Tensor, gather: bool, scatter: bool, backend: Any
) -> Any:
    return select("grouped_outer", grad, backend).run(grad, x, offsets, order, gather, scatter)


def _grouped_outer_fake(grad: Tensor, x: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(offsets.shape[0] - 1, grad.shape[1], x.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, offsets, order, ctx.gather, ctx.scatter, ctx.spec, ctx.backend = inputs
    ctx.save_for_backward(x, weight, bias, offsets, order)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight, bias, offsets, order = ctx.saved_tensors
    outer = inherit("grouped_outer", ctx.backend)
    grad = grad.contiguous()
    d_x = d_weight = d_bias = None
    if ctx.needs_input_grad[0]:
        # The mirror product: read rows where the forward wrote them, write rows where it read them.
        if ctx.spec is None:
            mirrored = weight.transpose(1, 2)
            d_x = _grouped_linear(grad, mirrored, None, offsets, order, ctx.scatter, ctx.gather, None, ctx.backend)
        else:
            by = inherit("grouped_linear_transposed", ctx.backend)
            d_x = _grouped_linear_transposed(grad, weight, offsets, order, ctx.scatter, ctx.gather, ctx.spec, by)
        if d_x.shape[0] != x.shape[0]:
            d_x = widen(d_x).view(x.shape[0], -1, x.shape[1]).sum(1).to(x.dtype)
    if ctx.needs_input_grad[1]:
        d_weight = _grouped_outer(grad, x, offsets, order, ctx.gather, ctx.scatter, outer)
    if bias is not None and ctx.needs_input_grad[2]:
        ones = grad.new_ones(order.shape[0], 1)
        d_bias = _grouped_outer(grad, ones, offsets, order, False, ctx.scatter, outer)[..., 0].to(bias.dtype)
    return d_x, d_weight, d_bias, None, None, None, None, None, None


_grouped_linear = define(
    "grouped_linear(Tensor x, Tensor weight, Tensor? bias, Tensor offsets, Tensor order, bool gather, bool scatter, "
    "str? weight_format, str? backend) -> Tensor",
    _grouped_linear_kernel,
    reference=grouped_linear_reference,
    fake=_grouped_linear_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_grouped_linear_transposed = define(
    "grouped_linear_transposed(Tensor grad, Tensor weight, Tensor offsets, Tensor order, bool gather, bool scatter, "
    "str weight_format, str? backend) -> Tensor",
    _grouped_linear_transposed_kernel,
    reference=grouped_linear_transposed_reference,
    fake=_grouped_linear_transposed_fake,
)
_grouped_outer = define(
    "grouped_outer(Tensor grad, Tensor x, Tensor offsets, Tensor order, bool gather, bool scatter, str? backend) "
    "-> Tensor",
    _grouped_outer_kernel,
    reference=grouped_outer_reference,
    fake=_grouped_outer_fake,
    backward=refuse_second_order("grouped_outer"),
)
