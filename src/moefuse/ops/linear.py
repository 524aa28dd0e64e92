"""linear: rows times one weight, or up to four at once."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import widen
from moefuse.ops._core.checks import check_float64, check_optional, check_tensor, check_weight
from moefuse.ops._core.invariance import apart
from moefuse.ops._core.library import Gradients, Rule, define
from moefuse.ops._core.select import inherit
from moefuse.ops.grouped_linear import grouped_linear_transposed_op
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Plan, Projections, Weight

#: weights of one call, and the names of their fields
_WEIGHTS = ("weight", "second", "third", "fourth")
_BIASES = ("bias", "second_bias", "third_bias", "fourth_bias")


@overload
def linear(
    x: Tensor, weight: Weight, *, bias: Tensor | None = None, residual: Tensor | None = None, backend: str | None = None
) -> Tensor: ...


@overload
def linear(
    x: Tensor,
    weight: tuple[Weight, ...],
    *,
    bias: tuple[Tensor | None, ...] | None = None,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ...]: ...


def linear(
    x: Tensor,
    weight: Weight | tuple[Weight, ...],
    *,
    bias: Tensor | tuple[Tensor | None, ...] | None = None,
    residual: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Multiply rows by a weight, or by several that take the same rows, such as query, key and value.

    Args:
        x: ``[T, K]``.
        weight: ``[N, K]`` in the type of x, or a `moefuse.QuantTensor` of any format; or a tuple of one to four such,
            each with an N and a format of its own.
        bias: ``[N]``; for a tuple of weights a tuple, whose entries may be None.
        residual: ``[T, N]``, added before the result is rounded; with one weight only.
        backend: who runs it: cpu, triton or reference; None for the one that the device has.

    Returns:
        ``[T, N]`` in the type of x, float32 accumulation. For a tuple of weights a tuple of them, which are views of
        one tensor, side by side.

    >>> x = torch.tensor([[1.0, 2.0]])
    >>> query, key = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([[0.0, 10.0]])
    >>> linear(x, query, residual=torch.tensor([[0.5, 0.5]]))
    tensor([[ 3.5000, -0.5000]])
    >>> linear(x, (query, key))
    (tensor([[ 3., -1.]]), tensor([[20.]]))
    """
    weights, biases = _tuples(weight, bias)
    check(x, weights, biases, residual)
    projections = Projections.of(weights, biases)
    out = _linear(backend, x, projections, residual)
    if not isinstance(weight, tuple):
        return out
    # One at a time: of views that one operation gives together, autograd lets none be written to.
    parts, start = [], 0
    for each in weights:
        parts.append(out.narrow(1, start, each.shape[0]))
        start += each.shape[0]
    return tuple(parts)


def _tuples(weight: Any, bias: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Weights and as many biases."""
    if not isinstance(weight, tuple):
        if isinstance(bias, tuple):
            raise TypeError("linear: bias must be a tensor where weight is one, got a tuple")
        return (weight,), (bias,)
    if not 1 <= len(weight) <= len(_WEIGHTS):
        raise ValueError(f"linear: weight must be one weight or a tuple of one to {len(_WEIGHTS)}, got {len(weight)}")
    if bias is None:
        return weight, (None,) * len(weight)
    if not isinstance(bias, tuple):
        raise TypeError(f"linear: bias must be a tuple where weight is one, got {type(bias).__name__}")
    if len(bias) != len(weight):
        raise ValueError(f"linear: bias must have an entry for each of {len(weight)} weights, got {len(bias)}")
    return weight, bias


def check(x: Any, weights: tuple[Any, ...], biases: tuple[Any, ...], residual: Any) -> None:
    check_tensor("linear", "x", x, {"T": None, "K": None})
    T, K = x.shape
    tensors: dict[str, Tensor | None] = {"x": x}
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        of = f"[{i}]" if len(weights) > 1 else ""
        check_weight("linear", f"weight{of}", weight, {"N": None, "K": K}, x)
        check_optional("linear", f"bias{of}", bias, {"N": weight.shape[0]}, x)
        tensors[f"bias{of}"] = bias
    if residual is not None:
        if len(weights) > 1:
            raise ValueError(f"linear: residual must come with one weight, got {len(weights)}")
        check_tensor("linear", "residual", residual, {"T": T, "N": weights[0].shape[0]}, like=x)
    check_float64("linear", tensors | {"residual": residual})


def linear_reference(x: Tensor, projections: Projections, residual: Tensor | None) -> Tensor:
    """The results side by side: ``[T, N of all]``."""
    rows = widen(x)
    parts = []
    for weight, bias in projections.pairs:
        numbers = weight.dequantize(rows.dtype) if isinstance(weight, QuantTensor) else widen(weight)
        part = rows @ numbers.T
        parts.append(part if bias is None else part + widen(bias))
    y = torch.cat(parts, 1)
    return (y if residual is None else y + widen(residual)).to(x.dtype)


def _backward(
    needs: Mapping[str, bool], grads: tuple[Tensor], backend: str | None, x: Tensor, projections: Projections
) -> Gradients:
    (grad,) = grads
    found: dict[str, Tensor | None] = {"residual": grad}
    d_x = []
    stops = projections.stops
    pairs = zip(projections.pairs, stops, _WEIGHTS, _BIASES, strict=False)
    for (weight, bias), stop, name, bias_name in pairs:
        part = grad[:, stop - weight.shape[0] : stop]
        if needs["x"]:
            d_x.append(_transposed(backend, part, weight))
        if needs[name]:
            found[name] = _product(part.T, x)
        if bias is not None and needs[bias_name]:
            found[bias_name] = widen(part).sum(0).to(bias.dtype)
    if len(d_x) == 1:
        (found["x"],) = d_x
    elif d_x:
        found["x"] = functools.reduce(operator.add, map(widen, d_x)).to(x.dtype)
    return found


def _product(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def _transposed(backend: str | None, grad: Tensor, weight: Weight) -> Tensor:
    """The gradient of rows from that of their products ``[T, N]``."""
    if not isinstance(weight, QuantTensor) and not apart(backend)[1]:
        return _product(grad, weight)
    T = grad.shape[0]
    order = torch.arange(T, dtype=torch.int32, device=grad.device)
    counts = torch.full((1,), T, dtype=torch.int32, device=grad.device)
    plan = Plan(counts, torch.cat((counts - T, counts)), order, order, 1, trusted=True)
    stack = replace(weight, blocks=weight.blocks[None]) if isinstance(weight, QuantTensor) else weight[None]
    by = inherit("grouped_linear_transposed", backend)
    return grouped_linear_transposed_op(by, grad.contiguous(), stack, plan, False, False)


_linear = define(
    linear_reference,
    "x",
    fake=lambda x, projections, _residual: x.new_empty(x.shape[0], projections.stops[-1]),
    rule=Rule(_backward),
)
