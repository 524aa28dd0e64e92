"""combine on Apple GPUs: any subset of the tail in one launch, its gradient in one or two."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.backends.metal.launch import ceil_div, launch, or_stand_in


class Tail:
    """What may follow the weighted sum, as the kernels take it: tensors without gaps, their types, which are there."""

    def __init__(
        self,
        like: Tensor,
        shared: Tensor | None,
        shared_gate: Tensor | None,
        shared_logit: Tensor | None,
        residual: Tensor | None,
        norm_weight: Tensor | None,
    ) -> None:
        given = shared_logit if shared_gate is None else shared_gate
        self.shared, self.residual = or_stand_in(shared, like), or_stand_in(residual, like)
        self.factor, self.norm = or_stand_in(given, like), or_stand_in(norm_weight, like)
        self.has_norm = norm_weight is not None
        self.flags = [
            int(shared is not None), int(given is not None), int(shared_logit is not None), int(residual is not None),
            int(self.has_norm),
        ]  # fmt: skip
        self.types: dict[str, Any] = {
            "SHARED_T": self.shared.dtype, "FACTOR_T": self.factor.dtype, "RESIDUAL_T": self.residual.dtype,
            "NORM_T": self.norm.dtype,
        }  # fmt: skip

    def sizes(self, T: int, H: int, top_k: int, E: int, inverse: Tensor | None, ids: Tensor | None) -> list[int]:
        """The fields of ``CombineSizes`` in combine.metal."""
        return [H, top_k, E, int(inverse is not None), int(ids is not None), *self.flags, T * top_k]


def weighted_sum(
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    ids: Tensor | None,
    num_experts: int,
    tail: Tail,
    eps: float,
    out: Tensor,
    normed_out: Tensor | None,
) -> None:
    """combine, with the ids at hand: slots without an expert are not read."""
    T, H = out.shape
    normed = out if normed_out is None else normed_out
    places = torch.empty(1, dtype=torch.int32, device=y.device) if inverse is None else inverse
    slots = or_stand_in(ids, places)
    macros = {
        "Y_T": y.dtype, "WEIGHT_T": weights.dtype, **tail.types, "OUT_T": out.dtype, "NORMED_T": normed.dtype,
        "ID_T": slots.dtype,
    }  # fmt: skip
    total = torch.empty((T, H) if tail.has_norm else 1, dtype=torch.float32, device=y.device)
    launch(
        "combine", ("combine",), macros, (1 if tail.has_norm else ceil_div(H, 256), T), 256, y,
        weights, places, slots, tail.shared, tail.factor, tail.residual, tail.norm, total, out, normed,
        tail.sizes(T, H, weights.shape[1], num_experts, inverse, ids), float(eps),
    )  # fmt: skip


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
    tail = Tail(y, shared, shared_gate, shared_logit, residual, norm_weight)
    weighted_sum(y, weights, inverse, None, 0, tail, eps, out, normed_out)


def combine_backward(
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
    T, H = d_out.shape
    tail = Tail(y, shared, shared_gate, shared_logit, residual, norm_weight)
    inputs = (y, weights, shared, shared_gate, shared_logit, residual, norm_weight)
    grads = tuple(y.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs)
    if T == 0:
        return (*grads[:6], grads[6].zero_())
    d_y, d_weights, d_shared, d_gate, d_logit, d_residual, d_norm = grads
    if inverse is not None:
        d_y.zero_()  # rows that no slot points to, as a bad inverse leaves them, have no gradient
    d_last = or_stand_in(d_normed, y)
    places = torch.empty(1, dtype=torch.int32, device=y.device) if inverse is None else inverse
    total, d = torch.empty((2, T, H), dtype=torch.float32, device=y.device).unbind()
    inverse_rms = torch.empty(T, dtype=torch.float32, device=y.device)
    macros = {
        "Y_T": y.dtype, "WEIGHT_T": weights.dtype, **tail.types, "OUT_T": d_out.dtype, "NORMED_T": d_last.dtype,
        "ID_T": torch.int32,
    }  # fmt: skip
    files = ("combine", "combine_backward")
    launch(
        "combine_backward", files, macros, (T,), 256, d_out, d_last, y, weights, places,
        tail.shared, tail.factor, tail.residual, tail.norm, total, d, inverse_rms, d_y, d_weights,
        d_y if shared is None else d_shared,
        d_gate if shared_gate is not None else d_logit if shared_logit is not None else d_y,
        d_y if residual is None else d_residual, places, tail.sizes(T, H, weights.shape[1], 0, inverse, None),
        float(eps),
    )  # fmt: skip
    if norm_weight is not None:
        launch("norm_weight_backward", files, macros, (ceil_div(H, 32),), 256, d_last, total, inverse_rms, d_norm, T, H)
    return grads
