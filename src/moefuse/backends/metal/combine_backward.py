"""The gradient of combine on Apple GPUs, in one launch or two."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.metal.combine import TailBuffers
from moefuse.backends.metal.launch import Shader, ceil_div, or_stand_in
from moefuse.types import Outputs, Tail


def combine_backward(
    d_out: Tensor, d_normed: Tensor | None, y: Tensor, weights: Tensor, inverse: Tensor | None, tail: Tail
) -> tuple[Tensor, ...]:
    """Gradients of y, weights, shared, shared_gate, shared_logit, residual and norm_weight; empty where None."""
    (T, H), parts = d_out.shape, TailBuffers(tail, y)
    inputs = y, weights, tail.shared, tail.shared_gate, tail.shared_logit, tail.residual, tail.norm_weight
    grads = tuple(y.new_empty(0) if t is None else t.new_empty(t.shape) for t in inputs)
    d_y, d_weights, d_shared, d_shared_gate, d_shared_logit, d_residual, d_norm = grads
    if T == 0:
        d_norm.zero_()
        return grads
    if inverse is not None:
        d_y.zero_()  # rows that no slot points to, as a bad inverse leaves them, have no gradient
    d_last = or_stand_in(d_normed, y)
    places = torch.empty(1, dtype=torch.int32, device=y.device) if inverse is None else inverse
    total, d = torch.empty((2, T, H), dtype=torch.float32, device=y.device).unbind()
    inverse_rms = torch.empty(T, dtype=torch.float32, device=y.device)
    macros = parts.macros(y, weights, Outputs(d_out, d_last), places)
    shader = Shader(("combine", "combine_backward"), macros)
    d_factor = d_shared_gate if tail.shared_gate is not None else d_shared_logit
    # What is empty is not written, but bound.
    written = [t if t.numel() else d_y for t in (d_shared, d_factor, d_residual)]
    buffers = d_out, d_last, y, weights, places, parts.shared, parts.factor, parts.residual, parts.norm
    sizes = parts.sizes(d_out, weights.shape[1], 0, inverse, None)
    scratch = total, d, inverse_rms
    shader.launch("combine_backward", (T,), 256, *buffers, *scratch, d_y, d_weights, *written, places, sizes, parts.eps)
    if parts.has_norm:
        shader.launch("norm_weight_backward", (ceil_div(H, 32),), 256, d_last, total, inverse_rms, d_norm, T, H)
    return grads
