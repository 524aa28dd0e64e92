"""The backward of gate on NVIDIA GPUs: through the selected scores, to the router, the norm and x."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse import backends
from moefuse.backends.triton.gate import raw_logits
from moefuse.backends.triton.route import Rule, rule_numbers
from moefuse.backends.triton.route_backward import row_backward, row_warps, scale_gradient
from moefuse.backends.triton.runtime.launch import begins_aligned, block_of, ceil_div, launch
from moefuse.backends.triton.tail_backward import norm_row_backward, norm_weight_gradient
from moefuse.types import Router, Routing


class Blocks(NamedTuple):
    """Tokens, experts and columns of a tile of a product."""

    t: int
    e: int
    h: int


class Parts(NamedTuple):
    """How the gradient of the logits is held, so that tensor cores multiply it with a model's numbers.

    Beside bfloat16: parts of eight bits each, three for all bits of float32, two where every result is rounded to 16
    bits. Else float32, by tf32x3 with float16, which is whole in tf32: two parts of the gradient hold all but two bits.
    """

    number: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, results: tuple[Tensor | None, ...]) -> Parts:
        if x.dtype != torch.bfloat16:
            return cls(1, torch.float32)
        return cls(2 if all(t is None or t.element_size() == 2 for t in results) else 3, torch.bfloat16)

    def beside(self, t: Tensor) -> int:
        """How many are multiplied with the numbers of t one by one; beside other types they are added up first."""
        return self.number if self.dtype == t.dtype else 1


#: from this many tokens on tiles are large
_MANY_TOKENS = 2048


@triton.jit
def _store_parts(ptrs, d, mask, step, PARTS: tl.constexpr):
    """d as a sum of PARTS numbers of the pointer's type, ``step`` apart."""
    for part in tl.static_range(PARTS):
        high = d.to(ptrs.dtype.element_ty)
        tl.store(ptrs + part * step, high, mask=mask)
        d = tl.where(tl.abs(d) == float("inf"), 0.0, d - high.to(tl.float32))


@triton.jit
def _add_product(ptrs, mask, step, other, acc, TURNED: tl.constexpr, PARTS: tl.constexpr):
    """acc + d @ other, or d.T @ other, where ``ptrs`` points to the first part of a tile of d."""
    if ptrs.dtype.element_ty == other.dtype:
        for part in tl.static_range(PARTS):
            d = tl.load(ptrs + part * step, mask=mask, other=0.0)
            acc = tl.dot(tl.trans(d) if TURNED else d, other, acc, input_precision="ieee")
    else:
        d = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            d += tl.load(ptrs + part * step, mask=mask, other=0.0).to(tl.float32)
        precision: tl.constexpr = "tf32x3" if other.dtype == tl.float16 else "ieee"
        acc = tl.dot(tl.trans(d) if TURNED else d, other.to(tl.float32), acc, input_precision=precision)
    return acc


@triton.jit(do_not_specialize=["chunks"])
def _gate_rows_kernel(
    grad_ptr,
    x_ptr,
    raw_ptr,
    logit_bias_ptr,
    ids_ptr,
    scale_ptr,
    d_logits_ptr,
    d_scaled_ptr,
    scale_parts_ptr,
    rms_ptr,
    H,
    E,
    chunks,
    x_strides,
    strides,
    eps,
    numbers,
    RULE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The logits of one token as the forward had them, and their gradient in parts [PARTS, T, E]; with a norm also
    times the token's rms^-1, which no ``rms_ptr`` says there is none of. Grid: T."""
    row = tl.program_id(0).to(tl.int64)
    T = tl.num_programs(0)
    EXPERTS: tl.constexpr = RULE.block_e
    e = tl.arange(0, EXPERTS)
    logits = tl.zeros([EXPERTS], tl.float32)
    for chunk in range(chunks):
        logits += tl.load(raw_ptr + (row + T * chunk) * E + e, mask=e < E, other=0.0)
    if rms_ptr is not None:
        stride_xt, stride_xh = x_strides
        h = tl.arange(0, COLUMNS)
        x = tl.load(x_ptr + row * stride_xt + h.to(tl.int64) * stride_xh, mask=h < H, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt(tl.sum(x * x, 0) / H + eps)
        logits *= inverse_rms
        tl.store(rms_ptr + row, inverse_rms)
    if logit_bias_ptr is not None:
        logits += tl.load(logit_bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
    d = row_backward(logits, row, grad_ptr, ids_ptr, scale_ptr, scale_parts_ptr, E, strides, numbers, RULE)
    step = T.to(tl.int64) * E
    _store_parts(d_logits_ptr + row * E + e, d, e < E, step, PARTS)
    if rms_ptr is not None:
        _store_parts(d_scaled_ptr + row * E + e, d * inverse_rms, e < E, step, PARTS)


@triton.jit(do_not_specialize=["T", "length"])
def _router_kernel(
    d_ptr, x_ptr, norm_ptr, sums_ptr, T, H, E, length, x_strides, BLOCKS: tl.constexpr, PARTS: tl.constexpr
):
    """sums [chunks, E, H]: d.T @ x times the norm weight over a chunk of tokens. Grid: E tiles, H tiles, chunks."""
    BLOCK_T: tl.constexpr = BLOCKS.t
    BLOCK_E: tl.constexpr = BLOCKS.e
    BLOCK_H: tl.constexpr = BLOCKS.h
    stride_xt, stride_xh = x_strides
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    begin = tl.program_id(2) * length
    end = tl.minimum(begin + length, T)
    step = tl.cast(T, tl.int64) * E
    acc = tl.zeros([BLOCK_E, BLOCK_H], tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        live = t < end
        x_ptrs = x_ptr + t[:, None] * stride_xt + h[None, :] * stride_xh
        x = tl.load(x_ptrs, mask=live[:, None] & (h < H)[None, :], other=0.0)
        mask = live[:, None] & (e < E)[None, :]
        acc = _add_product(d_ptr + t[:, None] * E + e[None, :], mask, step, x, acc, True, PARTS)
    if norm_ptr is not None:
        acc *= tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    place = tl.program_id(2).to(tl.int64) * E + e
    tl.store(sums_ptr + place[:, None] * H + h[None, :], acc, mask=(e < E)[:, None] & (h < H)[None, :])


@triton.jit(do_not_specialize=["T"])
def _input_kernel(
    d_ptr, w_ptr, d_normed_ptr, out_ptr, T, H, E, w_strides, normed_strides, BLOCKS: tl.constexpr, PARTS: tl.constexpr
):
    """out [T, H] = d_logits @ weight + d_normed, unrounded. Grid: T tiles, H tiles."""
    BLOCK_T: tl.constexpr = BLOCKS.t
    BLOCK_E: tl.constexpr = BLOCKS.e
    BLOCK_H: tl.constexpr = BLOCKS.h
    stride_we, stride_wh = w_strides
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    step = tl.cast(T, tl.int64) * E
    acc = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for start in range(0, E, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        w_ptrs = w_ptr + e[:, None] * stride_we + h[None, :] * stride_wh
        w = tl.load(w_ptrs, mask=(e < E)[:, None] & (h < H)[None, :], other=0.0)
        mask = (t < T)[:, None] & (e < E)[None, :]
        acc = _add_product(d_ptr + t[:, None] * E + e[None, :], mask, step, w, acc, False, PARTS)
    mask = (t < T)[:, None] & (h < H)[None, :]
    if d_normed_ptr is not None:
        stride_nt, stride_nh = normed_strides
        at = d_normed_ptr + t[:, None] * stride_nt + h[None, :] * stride_nh
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + t[:, None] * H + h[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_backward_kernel(d_ptr, x_ptr, norm_ptr, rms_ptr, out_ptr, H, x_strides, COLUMNS: tl.constexpr):
    """Grid: T."""
    stride_xt, stride_xh = x_strides
    t = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, COLUMNS)
    mask = h < H
    d = tl.load(d_ptr + t * H + h, mask, other=0.0)
    x = tl.load(x_ptr + t * stride_xt + h.to(tl.int64) * stride_xh, mask, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + h, mask, other=0.0).to(tl.float32)
    d_x = norm_row_backward(d, x, weight, tl.load(rms_ptr + t), H)
    tl.store(out_ptr + t * H + h, d_x.to(out_ptr.dtype.element_ty), mask)


def _router_tile(many: bool, E: int, parts: int) -> tuple[Blocks, dict[str, int]]:
    """The tile of the router's gradient; float32 on tensor cores takes more room."""
    if not many:
        return Blocks(32, 32, 64), {"num_warps": 4}
    e = 128 if E > 64 else 64
    if parts > 1:
        return Blocks(64, e, 256), {"num_warps": 8, "num_stages": 3 if parts == 2 else 2}
    return Blocks(32, e, 64), {"num_warps": 4}


def _input_tile(many: bool, parts: int) -> tuple[Blocks, dict[str, int]]:
    """Likewise of the gradient of x."""
    if not many:
        return Blocks(32, 32, 64), {"num_warps": 4}
    if parts > 1:
        return Blocks(128, 64, 128), {"num_warps": 8, "num_stages": 2}
    return Blocks(64, 32, 128), {"num_warps": 4}


def gate_backward(
    d_weights: Tensor,
    d_normed: Tensor | None,
    x: Tensor,
    router: Router,
    ids: Tensor,
    routing: Routing,
    want_x: bool,
    want_weight: bool,
) -> tuple[Tensor, ...]:
    weight, norm_weight, _, logit_bias, per_expert_scale, eps = router
    (T, H), E = x.shape, weight.shape[0]
    many = T >= _MANY_TOKENS and not backends.invariant()
    if backends.invariant() and not begins_aligned(x):
        x = x.clone()  # narrower loads would add its squares up in another order
    f32: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    raw = raw_logits(x, router)
    parts = Parts.of(x, (weight, norm_weight, logit_bias))
    d_logits = torch.empty((parts.number, T, E), dtype=parts.dtype, device=x.device)
    d_scaled, inverse_rms = d_logits, None
    if norm_weight is not None:
        d_scaled, inverse_rms = torch.empty_like(d_logits), torch.empty(T, **f32)
    of_scale = torch.empty((T, routing.top_k), **f32)
    row_block, rule = block_of(H), Rule.of(routing, E)
    warps = 4 if row_block <= 4096 else 8
    launch(
        _gate_rows_kernel,
        (T,),
        *(d_weights, x, raw, logit_bias, ids, per_expert_scale, d_logits, d_scaled, of_scale, inverse_rms),
        *(H, E, raw.shape[0]),
        x.stride(),
        (*d_weights.stride(), *ids.stride()),
        eps,
        rule_numbers(routing),
        RULE=rule,
        COLUMNS=row_block,
        PARTS=parts.number,
        num_warps=max(1 if norm_weight is None or row_block <= 2048 else warps, row_warps(rule)),
    )
    d_x, d_weight, d_norm = (x.new_empty(0) for _ in range(3))
    if want_weight:
        chunks = max(1, min(16, ceil_div(T, 256 if many else 512)))
        length = ceil_div(ceil_div(T, chunks), 64) * 64
        sums = torch.empty((chunks, E, H), **f32)
        blocks, options = _router_tile(many, E, parts.beside(x))
        grid = ceil_div(E, blocks.e), ceil_div(H, blocks.h), chunks
        given = d_scaled, x, norm_weight, sums
        launch(_router_kernel, grid, *given, T, H, E, length, x.stride(), BLOCKS=blocks, PARTS=parts.number, **options)
        d_weight = sums.sum(0).to(weight.dtype)
    if want_x:
        d = torch.empty((T, H), dtype=x.dtype if norm_weight is None else torch.float32, device=x.device)
        strides = weight.stride(), (0, 0) if d_normed is None else d_normed.stride()
        blocks, options = _input_tile(many, parts.beside(weight))
        tensors, tiles = (d_logits, weight, d_normed, d), (ceil_div(T, blocks.t), ceil_div(H, blocks.h))
        launch(_input_kernel, tiles, *tensors, T, H, E, *strides, BLOCKS=blocks, PARTS=parts.number, **options)
        d_x = d
        if norm_weight is not None and inverse_rms is not None:
            d_x = torch.empty((T, H), dtype=x.dtype, device=x.device)
            options = {"COLUMNS": row_block, "num_warps": warps}
            launch(_norm_backward_kernel, (T,), d, x, norm_weight, inverse_rms, d_x, H, x.stride(), **options)
            d_norm = norm_weight_gradient(d, x, inverse_rms, norm_weight)
    d_logit_bias = x.new_empty(0)
    if logit_bias is not None:
        d_logit_bias = d_logits.sum((0, 1), dtype=torch.float32).to(logit_bias.dtype)
    d_scale = x.new_empty(0) if per_expert_scale is None else scale_gradient(of_scale, ids, per_expert_scale)
    return d_x, d_weight, d_norm, d_logit_bias, d_scale
