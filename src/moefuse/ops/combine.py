"""combine: the weighted sum of a token's experts, and what follows it in a layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.ops.checks import check_eps, check_float64, check_optional, check_tensor, widen
from moefuse.ops.gate import norm_backward
from moefuse.ops.library import define, refuse_second_order
from moefuse.ops.memory import check_outputs, has_values
from moefuse.ops.select import inherit, select

TAIL_SCHEMA = (
    "Tensor? shared, Tensor? shared_gate, Tensor? shared_logit, Tensor? residual, Tensor? norm_weight, float eps"
)


class Tail(NamedTuple):
    """What may be added to the weighted sum, in the order of the ops' arguments."""

    shared: Tensor | None
    shared_gate: Tensor | None
    shared_logit: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None
    eps: float

    def tensors(self) -> dict[str, Tensor | None]:
        return {name: value for name, value in self._asdict().items() if name != "eps"}


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
        backend: see `moefuse.ops.select`.

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
        summed, normed = _combine(y, weights, inverse, *tail, backend)
        return summed if norm_weight is None else (summed, normed)
    tensors = {"y": y, "weights": weights, "inverse": inverse, **tail.tensors(), "out": out, "normed_out": normed_out}
    out, normed_out = prepare_out("combine", tail, weights.shape[0], y, tensors)
    _combine_out(y, weights, inverse, *tail, out, normed_out, backend)
    return out if normed_out is None else (out, normed_out)


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
    seen = torch.zeros(S, dtype=torch.bool)
    if S and (int(inverse.min()) < 0 or int(inverse.max()) >= S or not seen.index_fill_(0, inverse.long(), True).all()):
        raise ValueError(f"combine: inverse must hold each of 0 to {S - 1} once, got others")


def check_tail(op: str, tail: Tail, T: int, like: Tensor) -> None:
    """Everything that may follow the weighted sum of T tokens; ``like`` is ``[.., H]``."""
    rows, H = {"T": T}, like.shape[-1]
    check_optional(op, "shared", tail.shared, {"T": T, "H": H}, like)
    for name in ("shared_gate", "shared_logit"):
        value = getattr(tail, name)
        check_optional(op, name, value, rows, like)
        if value is not None and tail.shared is None:
            raise ValueError(f"{op}: {name} must come with shared, got no shared")
    if tail.shared_gate is not None and tail.shared_logit is not None:
        raise ValueError(f"{op}: shared_gate and shared_logit exclude each other, got both")
    check_optional(op, "residual", tail.residual, {"T": T, "H": H}, like)
    check_optional(op, "norm_weight", tail.norm_weight, {"H": H}, like)
    check_eps(op, "eps", tail.eps)
    check_float64(op, {"y": like, **tail.tensors()})


def out_dtype(tail: Tail, like: Tensor) -> torch.dtype:
    return like.dtype if tail.residual is None else tail.residual.dtype


def prepare_out(
    op: str, tail: Tail, T: int, like: Tensor, tensors: dict[str, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Check the given outputs among a call's tensors and allocate the one that was not given."""
    out, normed_out = tensors["out"], tensors["normed_out"]
    rows: dict[str, int | None] = {"T": T, "H": like.shape[-1]}
    if normed_out is not None and tail.norm_weight is None:
        raise ValueError(f"{op}: normed_out must come with norm_weight, got no norm_weight")
    for name, value in (("out", out), ("normed_out", normed_out)):
        if value is None:
            continue
        check_tensor(op, name, value, rows, like=like)
        if not value.is_contiguous():
            raise ValueError(f"{op}: {name} must be contiguous, got strides {list(value.stride())}")
        if (value.dtype == torch.float64) != (like.dtype == torch.float64):
            raise TypeError(f"{op}: float64 must not be mixed with narrower types, got {name} {value.dtype}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors.values()):
        raise ValueError(f"{op}: out= has no gradients; call under torch.no_grad() or without out")
    check_outputs(op, tensors)
    return fresh_out(tail, T, like, out, normed_out)


def fresh_out(
    tail: Tail, T: int, like: Tensor, out: Tensor | None, normed_out: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Both outputs, the one that was not given allocated."""
    if out is None:
        out = like.new_empty((T, like.shape[-1]), dtype=out_dtype(tail, like))
    if tail.norm_weight is not None and normed_out is None:
        normed_out = like.new_empty((T, like.shape[-1]))
    return out, normed_out


def _shared_factor(tail: Tail) -> Tensor | None:
    """``[T, 1]``, or None for 1."""
    if tail.shared_logit is not None:
        return torch.sigmoid(widen(tail.shared_logit)).unsqueeze(1)
    return None if tail.shared_gate is None else widen(tail.shared_gate).unsqueeze(1)


def _slot_rows(y: Tensor, inverse: Tensor | None, T: int) -> Tensor:
    """``[T, top_k, H]`` in the arithmetic type."""
    ordered = y if inverse is None else y[inverse.long()]
    return widen(ordered).view(T, -1, y.shape[1]) if T else widen(y).view(0, 1, y.shape[1])


def _summed(y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail) -> Tensor:
    T, top_k = weights.shape
    rows, scale = _slot_rows(y, inverse, T), widen(weights)
    total = torch.zeros_like(rows[:, 0])
    for j in range(top_k if T else 0):
        total = total + scale[:, j, None] * rows[:, j]
    if tail.shared is not None:
        factor = _shared_factor(tail)
        total = total + (widen(tail.shared) if factor is None else factor * widen(tail.shared))
    return total if tail.residual is None else total + widen(tail.residual)


def combine_reference(
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
    total = _summed(y, weights, inverse, Tail(shared, shared_gate, shared_logit, residual, norm_weight, eps))
    out.copy_(total)
    if norm_weight is not None and normed_out is not None:
        inverse_rms = torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
        normed_out.copy_(total * inverse_rms * widen(norm_weight))


def combine_backward_reference(
    d_out: Tensor,
    d_normed: Tensor | None,
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    shared_logit: Tensor | None,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Gradients of y, weights, shared, shared_gate, shared_logit, residual and norm_weight; empty where None."""
    tail = Tail(shared, shared_gate, shared_logit, residual, norm_weight, eps)
    T = weights.shape[0]
    d, d_norm_weight = widen(d_out).contiguous(), y.new_empty(0)
    if d_normed is not None and norm_weight is not None:
        total = _summed(y, weights, inverse, tail)
        d_total, d_norm = norm_backward(widen(d_normed), total, norm_weight, eps)
        d, d_norm_weight = d + d_total, d_norm.to(norm_weight.dtype)
    rows = _slot_rows(y, inverse, T)
    d_weights = torch.einsum("tjh,th->tj", rows, d).to(weights.dtype) if T else torch.empty_like(weights)
    d_y = (widen(weights).unsqueeze(-1) * d.unsqueeze(1)).reshape(y.shape).to(y.dtype)
    if inverse is not None:
        d_y = torch.empty_like(d_y).index_copy_(0, inverse.long(), d_y)
    d_shared, d_gate, d_logit = (y.new_empty(0) for _ in range(3))
    if shared is not None:
        factor = _shared_factor(tail)
        d_shared = (d if factor is None else factor * d).to(shared.dtype)
        along = (d * widen(shared)).sum(-1)
        if shared_gate is not None:
            d_gate = along.to(shared_gate.dtype)
        if shared_logit is not None and factor is not None:
            d_logit = (along * (factor * (1 - factor)).squeeze(1)).to(shared_logit.dtype)
    # A custom op must not return its input, hence the copy.
    d_residual = y.new_empty(0) if residual is None else d.to(residual.dtype, copy=True)
    return d_y, d_weights, d_shared, d_gate, d_logit, d_residual, d_norm_weight


def _combine_kernel(y: Tensor, weights: Tensor, inverse: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    *tail, backend = rest
    out, normed = _combine_fake(y, weights, inverse, *rest)
    given = None if tail[4] is None else normed
    select("combine", y, backend).run(y, weights, inverse, *tail, out, given)
    return out, normed


def _combine_fake(y: Tensor, weights: Tensor, inverse: Any, *rest: Any) -> tuple[Tensor, Tensor]:
    tail = Tail(*rest[:6])
    shape = (weights.shape[0], y.shape[1])
    normed = y.new_empty(0) if tail.norm_weight is None else y.new_empty(shape)
    return y.new_empty(shape, dtype=out_dtype(tail, y)), normed


def _combine_out_kernel(y: Tensor, *rest: Any) -> None:
    *args, backend = rest
    select("combine", y, backend).run(y, *args)


def _combine_backward_kernel(d_out: Tensor, d_normed: Any, y: Tensor, *rest: Any) -> Any:
    *args, backend = rest
    return select("combine_backward", y, backend).run(d_out, d_normed, y, *args)


def _combine_backward_fake(
    d_out: Any, d_normed: Any, y: Tensor, weights: Tensor, inverse: Any, *rest: Any
) -> tuple[Tensor, ...]:
    return tuple(y.new_empty(0) if t is None else t.new_empty(t.shape) for t in (y, weights, *rest[:5]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, d_out: Tensor, d_normed: Tensor) -> tuple[Any, ...]:
    y, weights, inverse, *tail = ctx.saved_tensors
    d_norm = None if tail[4] is None else d_normed
    backend = inherit("combine_backward", ctx.backend)
    grads = _combine_backward(d_out, d_norm, y, weights, inverse, *tail, ctx.eps, backend)
    of_tail = (None if t is None else grad for t, grad in zip(tail, grads[2:], strict=True))
    return grads[0], grads[1], None, *of_tail, None, None


_combine = define(
    f"combine(Tensor y, Tensor weights, Tensor? inverse, {TAIL_SCHEMA}, str? backend) -> (Tensor, Tensor)",
    _combine_kernel,
    reference=combine_reference,
    fake=_combine_fake,
    backward=_backward,
    setup_context=_setup_context,
)
_combine_out = define(
    f"combine_out(Tensor y, Tensor weights, Tensor? inverse, {TAIL_SCHEMA}, Tensor(a!) out, Tensor(b!)? normed_out, "
    "str? backend) -> ()",
    _combine_out_kernel,
    reference=None,
    fake=lambda *_: None,
)
_combine_backward = define(
    "combine_backward(Tensor d_out, Tensor? d_normed, Tensor y, Tensor weights, Tensor? inverse, "
    f"{TAIL_SCHEMA}, str? backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _combine_backward_kernel,
    reference=combine_backward_reference,
    fake=_combine_backward_fake,
    backward=refuse_second_order("combine"),
)
