"""experts for few tokens on Apple GPUs: matrix-vector products, no plan; hidden values stay float32."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.gated import Weights
from moefuse.backends.metal.codes import format_code
from moefuse.backends.metal.combine import TailBuffers
from moefuse.backends.metal.glu import kind_of, numbers_of
from moefuse.backends.metal.launch import Shader, ceil_div, given, or_stand_in, types_of, wide
from moefuse.types import Activation, Outputs, Tail


def experts_decode(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    up: Weights,
    down: Weights,
    activation: Activation,
    tail: Tail,
    outputs: Outputs,
) -> None:
    (T, H), top_k, (E, I, *_) = x.shape, ids.shape[1], up.w.data.shape
    parts, out, w, u, d = TailBuffers(tail, x), outputs.out, up.w.data, up.u.data, down.w.data
    bias, up_bias, down_bias = (or_stand_in(t, x) for t in (up.bias, up.up_bias, down.bias))
    hidden = torch.empty((T * top_k, I), dtype=torch.float32, device=x.device)
    macros = parts.macros(x, weights, outputs, ids)
    macros |= types_of(X=x, W=w, U=u, BIAS=bias, DOWN=d, DOWN_BIAS=down_bias)
    macros |= {"W_FORMAT": format_code(up.w), "U_FORMAT": format_code(up.u), "DOWN_FORMAT": format_code(down.w)}
    macros["WIDE"] = wide(x, hidden, w, u, d)
    shader = Shader(("combine", "activation", "weights", "experts_decode"), macros)
    bias_strides = (0, 0) if up.bias is None else up.bias.stride()
    sizes = [E, top_k, I, H, x.stride(0), *w.stride()[:2], *u.stride()[:2], *given(up.bias), *bias_strides]
    sizes += [kind_of(activation), int(activation.gated)]
    buffers = x, ids, w, u, bias, up_bias, hidden
    shader.launch("decode_up", (ceil_div(I, 8), T * top_k), 128, *buffers, sizes, numbers_of(activation))
    total, down_sizes = parts.total(out), [I, *d.stride()[:2], *given(down.bias)]
    buffers = hidden, ids, weights, d, down_bias, parts.shared, parts.factor
    tail_sizes = parts.sizes(out, top_k, E, None, ids)
    shader.launch("decode_down", (ceil_div(H, 8), T), 128, *buffers, parts.residual, total, out, down_sizes, tail_sizes)
    if parts.has_norm:
        normed = or_stand_in(outputs.normed, out)
        shader.launch("norm_rows", (T,), 256, total, parts.norm, normed, H, parts.eps)
