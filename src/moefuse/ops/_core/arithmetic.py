"""What several references compute."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(t: Tensor) -> Tensor:
    """To the type arithmetic is done in: float64 stays, everything narrower becomes float32."""
    return t if t.dtype == torch.float64 else t.float()


def masked_weights(weights: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """Weights with those of slots without an expert set to zero."""
    return weights.masked_fill((ids < 0) | (ids >= num_experts), 0)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def norm_backward(d_normed: Tensor, x: Tensor, norm_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of an RMSNorm: of its input ``[T, H]`` and its weight ``[H]``, unrounded."""
    x = widen(x)
    scale = inverse_rms(x, eps)
    unit = x * scale
    d_unit = d_normed * widen(norm_weight)
    d_x = scale * (d_unit - unit * (d_unit * unit).mean(-1, keepdim=True))
    return d_x, (d_normed * unit).sum(0)


def fresh_like(none: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """A tensor like each, not filled; like ``none`` and empty where there is None."""
    return tuple(none.new_empty(0) if t is None else t.new_empty(t.shape) for t in tensors)
