"""combine on the CPU."""

from __future__ import annotations

from torch import Tensor

from moefuse.backends.cpu import _native
from moefuse.backends.cpu._native import address, dense, tensor_arg


def combine(
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    y, weights, inverse, shared, residual = dense(y), dense(weights), dense(inverse), dense(shared), dense(residual)
    shared_gate, shared_logit, norm_weight = dense(shared_gate), dense(shared_logit), dense(norm_weight)
    tail = (
        tensor_arg(shared), tensor_arg(shared_gate), tensor_arg(shared_logit), tensor_arg(residual),
        tensor_arg(norm_weight), eps, tensor_arg(out), tensor_arg(normed_out),
    )  # fmt: skip
    T, top_k = weights.shape
    _native.core.combine(
        tensor_arg(y), tensor_arg(weights), address(inverse), T, top_k, y.shape[1], tail, _native.threads()
    )
