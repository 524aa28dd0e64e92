"""combine on Apple GPUs: any subset of the tail in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.metal.launch import Macro, Shader, ceil_div, given, or_stand_in, types_of
from moefuse.types import Outputs, Tail


class TailBuffers:
    """A tail as the kernels take it: a tensor in every place, their types, and which of them are there."""

    def __init__(self, tail: Tail, like: Tensor) -> None:
        factor = tail.shared_logit if tail.shared_gate is None else tail.shared_gate
        self.shared, self.residual = or_stand_in(tail.shared, like), or_stand_in(tail.residual, like)
        self.factor, self.norm = or_stand_in(factor, like), or_stand_in(tail.norm_weight, like)
        self.has_norm, self.eps = tail.norm_weight is not None, float(tail.eps)
        self._flags = given(tail.shared, factor, tail.shared_logit, tail.residual, tail.norm_weight)

    def macros(self, y: Tensor, weights: Tensor, outputs: Outputs, ids: Tensor) -> dict[str, Macro]:
        """The macros of combine.metal."""
        out, normed = outputs.out, or_stand_in(outputs.normed, outputs.out)
        tail = types_of(SHARED=self.shared, FACTOR=self.factor, RESIDUAL=self.residual, NORM=self.norm)
        return types_of(Y=y, WEIGHT=weights, OUT=out, NORMED=normed, ID=ids) | tail

    def sizes(self, out: Tensor, top_k: int, E: int, inverse: Tensor | None, ids: Tensor | None) -> list[int]:
        """The fields of ``CombineSizes`` in combine.metal."""
        T, H = out.shape
        return [H, top_k, E, *given(inverse, ids), *self._flags, T * top_k]

    def total(self, out: Tensor) -> Tensor:
        """Scratch for the sum before it is rounded, which the norm is taken of."""
        return torch.empty(out.shape if self.has_norm else 1, dtype=torch.float32, device=out.device)


def weighted_sum(
    y: Tensor,
    weights: Tensor,
    inverse: Tensor | None,
    tail: Tail,
    outputs: Outputs,
    ids: Tensor | None = None,
    num_experts: int = 0,
) -> None:
    """combine; with the ids at hand, slots without an expert are not read."""
    (T, H), out, parts = outputs.out.shape, outputs.out, TailBuffers(tail, y)
    places = torch.empty(1, dtype=torch.int32, device=y.device) if inverse is None else inverse
    slots, normed = or_stand_in(ids, places), or_stand_in(outputs.normed, out)
    shader = Shader(("combine",), parts.macros(y, weights, outputs, slots))
    buffers = y, weights, places, slots, parts.shared, parts.factor, parts.residual, parts.norm
    sizes = parts.sizes(out, weights.shape[1], num_experts, inverse, ids)
    groups = (1 if parts.has_norm else ceil_div(H, 256)), T
    shader.launch("combine", groups, 256, *buffers, parts.total(out), out, normed, sizes, parts.eps)


def combine(y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail, outputs: Outputs) -> None:
    weighted_sum(y, weights, inverse, tail, outputs)
