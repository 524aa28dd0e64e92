"""combine: the weighted sum of a token's experts, and what follows it in a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import inverse_rms, widen
from moefuse.ops._core.checks import check_eps, check_float64, check_optional, check_tensor
from moefuse.ops._core.library import Gradients, Rule, define, define_kernel
from moefuse.ops._core.memory import check_outputs, has_values
from moefuse.ops._core.select import inherit, select
from moefuse.ops.combine_backward import combine_backward, tail_tensors, weighted_sum
from moefuse.types import Outputs, Tail


def combine(
    y: Tensor,
    weights: Tensor,
    *,
    inverse: Tensor | None = None,
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
    """Sum each token's expert outputs, add the shared expert and the residual, and take the next norm.

    ::

        out[t]    = sum_j weights[t, j] * y[t, j] + g[t] * shared[t] + residual[t]
        normed[t] = out[t] * rsqrt(mean(out[t]^2) + eps) * norm_weight

    Args:
        y: expert outputs ``[S, H]`` in slot order, or expert-major with ``inverse``.
        weights: ``[T, top_k]``.
        inverse: the plan's, ``[S]`` int32: each row of y once. On the CPU another is refused; on a GPU, where looking
            would stall it, a slot that points outside y adds nothing.
        shared: shared-expert output ``[T, H]``, weighted by ``shared_gate`` ``[T]``, by ``sigmoid(shared_logit)``
            with ``shared_logit`` ``[T]``, or by 1.
        residual: ``[T, H]``.
        norm_weight: ``[H]``; adds the normed result.
        eps: added to the mean square.
        out: where to write; may be ``residual`` or ``shared`` itself. Any floating type. No gradients then.
        normed_out: where to write the normed result; likewise.
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        ``out``, or ``(out, normed)`` when ``norm_weight`` is given: out has the type of ``residual``, or of y without
        one, and normed that of y. Slots are summed in order, in float32.

    >>> y = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> combine(y, torch.tensor([[0.5, 2.0]]), residual=torch.tensor([[100.0, 100.0]]))
    tensor([[106.5000, 109.0000]])
    """
    check(y, weights, inverse)
    check_inverse(inverse)
    tail = Tail(shared, shared_gate, shared_logit, residual, norm_weight, eps)
    check_tail("combine", tail, weights.shape[0], y)
    if out is None and normed_out is None:
        summed, normed = _combine(backend, y, weights, inverse, tail)
        return summed if norm_weight is None else (summed, normed)
    tensors = {"y": y, "weights": weights, "inverse": inverse, **tail_tensors(tail)}
    check_out("combine", tail, weights.shape[0], y, {**tensors, "out": out, "normed_out": normed_out})
    outputs = fresh_outputs(tail, y, out, normed_out, weights.shape[0])
    _combine_out(backend, y, weights, inverse, tail, outputs)
    return results_of(outputs)


def check(y: Any, weights: Any, inverse: Any) -> None:
    check_tensor("combine", "weights", weights, {"T": None, "top_k": None})
    if weights.shape[1] < 1:
        raise ValueError(f"combine: weights must have at least one slot per token, got shape {list(weights.shape)}")
    S = weights.shape[0] * weights.shape[1]
    check_tensor("combine", "y", y, {"S": S, "H": None}, like=weights)
    if y.shape[1] < 1:
        raise ValueError(f"combine: y must have H of at least 1, got shape {list(y.shape)}")
    if inverse is not None:
        check_tensor("combine", "inverse", inverse, {"S": S}, dtypes=(torch.int32,), like=y)
    check_float64("combine", {"y": y, "weights": weights})


def check_inverse(inverse: Tensor | None) -> None:
    """Each row once, where that can be seen without waiting for a device."""
    if inverse is None or inverse.device.type != "cpu" or not has_values(inverse):
        return
    S = inverse.shape[0]
    seen = inverse.new_zeros(S, dtype=torch.bool)
    if S and (int(inverse.min()) < 0 or int(inverse.max()) >= S or not seen.index_fill_(0, inverse.long(), True).all()):
        raise ValueError(f"combine: inverse must hold each of 0 to {S - 1} once, got others")


def check_tail(op: str, tail: Tail, T: int, like: Tensor) -> None:
    """Everything that may follow the weighted sum of T tokens; ``like`` is ``[.., H]``."""
    rows, H = {"T": T}, like.shape[-1]
    check_optional(op, "shared", tail.shared, {"T": T, "H": H}, like)
    for name, value in (("shared_gate", tail.shared_gate), ("shared_logit", tail.shared_logit)):
        check_optional(op, name, value, rows, like)
        if value is not None and tail.shared is None:
            raise ValueError(f"{op}: {name} must come with shared, got no shared")
    if tail.shared_gate is not None and tail.shared_logit is not None:
        raise ValueError(f"{op}: shared_gate and shared_logit exclude each other, got both")
    check_optional(op, "residual", tail.residual, {"T": T, "H": H}, like)
    check_optional(op, "norm_weight", tail.norm_weight, {"H": H}, like)
    check_eps(op, "eps", tail.eps)
    check_float64(op, {"y": like, **tail_tensors(tail)})


def check_out(op: str, tail: Tail, T: int, like: Tensor, tensors: Mapping[str, Tensor | None]) -> None:
    """The outputs that a user gave, ``out`` and ``normed_out``, among all the tensors of a call."""
    given = {name: tensors[name] for name in ("out", "normed_out") if tensors[name] is not None}
    if not given:
        return
    if "normed_out" in given and tail.norm_weight is None:
        raise ValueError(f"{op}: normed_out must come with norm_weight, got no norm_weight")
    for name, value in given.items():
        check_tensor(op, name, value, {"T": T, "H": like.shape[-1]}, like=like)
        assert value is not None
        if not value.is_contiguous():
            raise ValueError(f"{op}: {name} must be contiguous, got strides {list(value.stride())}")
        if (value.dtype == torch.float64) != (like.dtype == torch.float64):
            raise TypeError(f"{op}: float64 must not be mixed with narrower types, got {name} {value.dtype}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors.values()):
        raise ValueError(f"{op}: out= has no gradients; call under torch.no_grad() or without out")
    check_outputs(op, tensors)


def fresh_outputs(
    tail: Tail, like: Tensor, out: Tensor | None = None, normed: Tensor | None = None, T: int | None = None
) -> Outputs:
    """Both outputs for T tokens, by default as many as ``like`` has rows; what was not given is allocated."""
    shape = (like.shape[0] if T is None else T, like.shape[-1])
    if out is None:
        out = like.new_empty(shape, dtype=like.dtype if tail.residual is None else tail.residual.dtype)
    if tail.norm_weight is not None and normed is None:
        normed = like.new_empty(shape)
    return Outputs(out, normed)


def results_of(outputs: Outputs) -> Tensor | tuple[Tensor, Tensor]:
    """What an op returns: the normed result only where there is one."""
    return outputs.out if outputs.normed is None else (outputs.out, outputs.normed)


def combine_reference(y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail, outputs: Outputs) -> None:
    total = weighted_sum(y, weights, inverse, tail)
    outputs.out.copy_(total)
    if tail.norm_weight is not None and outputs.normed is not None:
        outputs.normed.copy_(total * inverse_rms(total, tail.eps) * widen(tail.norm_weight))


def _fresh(y: Tensor, weights: Tensor, tail: Tail) -> tuple[Tensor, Tensor]:
    outputs = fresh_outputs(tail, y, T=weights.shape[0])
    return outputs.out, y.new_empty(0) if outputs.normed is None else outputs.normed


def _kernel(
    backend: str | None, y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail
) -> tuple[Tensor, Tensor]:
    out, normed = _fresh(y, weights, tail)
    outputs = Outputs(out, None if tail.norm_weight is None else normed)
    select(combine_reference, y, backend)(y, weights, inverse, tail, outputs)
    return out, normed


def _backward(
    needs: Mapping[str, bool],
    grads: tuple[Tensor, Tensor],
    backend: str | None,
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    tail: Tail,
) -> Gradients:
    d_out, d_normed = grads
    by = inherit("combine_backward", backend)
    found = combine_backward(by, d_out, None if tail.norm_weight is None else d_normed, y, weights, inverse, tail)
    names = ("y", "weights", "shared", "shared_gate", "shared_logit", "residual", "norm_weight")
    return dict(zip(names, found, strict=True))


_combine = define_kernel(
    combine_reference, _kernel, fake=lambda y, weights, _inverse, tail: _fresh(y, weights, tail), rule=Rule(_backward)
)
_combine_out = define(combine_reference, "y", form="_out", fake=lambda *_: None, mutated=("out", "normed"))
