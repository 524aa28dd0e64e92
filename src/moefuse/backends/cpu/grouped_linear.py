"""grouped_linear and grouped_outer on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import rows_dense, tensor_arg, weight_arg
from moefuse.quant.tensor import QuantTensor


def grouped_linear(
    x: Tensor,
    weight: Tensor | QuantTensor,
    bias: Tensor | None,
    offsets: Tensor,
    order: Tensor,
    gather: bool,
    scatter: bool,
) -> Tensor:
    # The mirror image of a dense stack, as a backward pass asks for it, is read as it lies.
    mirrored = False
    if isinstance(weight, Tensor) and weight.stride(-1) != 1 and weight.stride(-2) == 1:
        mirrored, weight = True, weight.transpose(1, 2)
    weight = rows_dense(weight)
    (E, N), K = weight.shape[:2], x.shape[1]
    N = weight.shape[2] if mirrored else N
    S = order.shape[0]
    y = torch.empty((S, N), dtype=x.dtype)
    run = _native.core.grouped_linear_mirrored if mirrored else _native.core.grouped_linear
    run(
        tensor_arg(x), x.shape[0], weight_arg(weight), tensor_arg(bias), offsets.data_ptr(), order.data_ptr(),
        S, E, N, K, gather, scatter, tensor_arg(y), _native.threads(),
    )  # fmt: skip
    return y


def grouped_outer(grad: Tensor, x: Tensor, offsets: Tensor, order: Tensor, gather: bool, scatter: bool) -> Tensor:
    E, S, N, K = offsets.shape[0] - 1, order.shape[0], grad.shape[1], x.shape[1]
    out = torch.empty((E, N, K), dtype=grad.dtype)
    _native.core.grouped_outer(
        tensor_arg(grad), tensor_arg(x), x.shape[0], offsets.data_ptr(), order.data_ptr(), S, E, N, K, gather, scatter,
        tensor_arg(out), _native.threads(),
    )  # fmt: skip
    return out
