"""The up product of a decode step with weights in FP8: every code is asked for at once.

A warp takes whole rows, 512 codes of each at a time, 16 bytes a lane. Codes wait in shared memory, where they take no
registers until they are multiplied, so that a program has all of its rows under way; a thread reads what it copied.
Activations stay as they are.
"""
# mypy: disable-error-code="assignment, unreachable, var-annotated"

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from moefuse.backends.gated import Rows
from moefuse.backends.triton.activations import ACTIVATIONS, activation_numbers
from moefuse.backends.triton.combine import finish, norm_by_the_last
from moefuse.backends.triton.formats.blocks import four_e4m3
from moefuse.backends.triton.runtime.launch import (
    INTERPRETED,
    PDL,
    begins_aligned,
    block_of,
    capability,
    ceil_div,
    launch,
    launch_dependents,
    wait,
)
from moefuse.types import Activation, Outputs, Tail

# Triton 3.9 has it by another name than 3.6.
load_rows = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: codes of a row that a warp takes at a time
CHUNK = gl.constexpr(512)
#: rows of gate and of up that a program has, one to a warp
_ROWS, _WARPS = 4, 4


class Form(NamedTuple):
    """What the product is compiled for, besides its activation."""

    k: int
    rows: int


@gluon.jit
def _four_x(words, dtype: gl.constexpr):
    """The four numbers of ``dtype`` in words of 64 bits: float32."""
    low, high = words.to(gl.uint32), (words >> 32).to(gl.uint32)
    if dtype == gl.bfloat16:
        a, b = (low << 16).to(gl.float32, bitcast=True), (low & 0xFFFF0000).to(gl.float32, bitcast=True)
        c, d = (high << 16).to(gl.float32, bitcast=True), (high & 0xFFFF0000).to(gl.float32, bitcast=True)
    else:
        a, b = _half(low), _half(low >> 16)
        c, d = _half(high), _half(high >> 16)
    return a, b, c, d


@gluon.jit
def _half(word):
    return word.to(gl.uint16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _sums(codes, x, layout: gl.constexpr):
    """Words of codes [rows, 128] times x: [rows, 32] float32, in ``layout``, of a thread's sixteen each."""
    a, b, c, d = four_e4m3(codes)
    x0, x1, x2, x3 = x
    found = a * x0[None, :] + (b * x1[None, :] + (c * x2[None, :] + d * x3[None, :]))
    found = gl.sum(found.reshape([found.shape[0], 32, 4]), 2)
    return gl.convert_layout(found, layout, assert_trivial=True)


@gluon.jit
def _beside(x_ptrs, w_scales, u_scales, i: gl.constexpr):
    """What is multiplied with the i-th codes: numbers of x, and scales."""
    at: gl.constexpr = i * (CHUNK // 128)
    return gl.load(x_ptrs + i * 128), gl.load(w_scales + at), gl.load(u_scales + at)


@gluon.jit
def _up_fp8_kernel(
    x_ptr,
    ids_ptr,
    w_ptr,
    u_ptr,
    hidden_ptr,
    counter_ptr,
    E,
    N,
    top_k,
    stride_xt,
    pitch,
    matrix_rows,
    places,
    numbers,
    FORM: gl.constexpr,
    ACT: gl.constexpr,
):
    """As `_up_decode_kernel` of experts_decode.py. ``places``: first row and step of gate rows, then of up rows."""
    K: gl.constexpr = FORM.k
    ROWS: gl.constexpr = FORM.rows
    CHUNKS: gl.constexpr = K // CHUNK
    AHEAD: gl.constexpr = CHUNKS if CHUNKS < 4 else 4
    WARPS: gl.constexpr = gl.num_warps()
    words: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    lanes: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    w_first, w_step, u_first, u_step = places
    wait()
    launch_dependents()
    s = gl.program_id(0)
    if counter_ptr is not None:
        gl.store(counter_ptr + s, 0)
    expert = gl.load(ids_ptr + s).to(gl.int64)
    if (expert < 0) | (expert >= E):
        return
    w_ptr += expert * pitch
    u_ptr += expert * pitch
    # Rows past the end are the last row again, and not stored.
    n = gl.minimum(gl.program_id(1) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, words)), N - 1)
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, words))
    w_codes = (
        w_ptr.to(gl.pointer_type(gl.uint32)) + ((w_first + n * w_step).to(gl.int64) * (K // 4))[:, None] + k[None, :]
    )
    u_codes = (
        u_ptr.to(gl.pointer_type(gl.uint32)) + ((u_first + n * u_step).to(gl.int64) * (K // 4))[:, None] + k[None, :]
    )
    w_waiting = ()
    u_waiting = ()
    for i in gl.static_range(CHUNKS):
        w_waiting = w_waiting + (gl.allocate_shared_memory(gl.uint32, [ROWS, 128], plain),)  # noqa: RUF005
        u_waiting = u_waiting + (gl.allocate_shared_memory(gl.uint32, [ROWS, 128], plain),)  # noqa: RUF005
        load_rows(w_waiting[i], w_codes + i * 128)
        load_rows(u_waiting[i], u_codes + i * 128)
        async_copy.commit_group()
    n = gl.minimum(gl.program_id(1) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, lanes)), N - 1)
    run = gl.arange(0, 32, layout=gl.SliceLayout(0, lanes)) // 8
    behind = matrix_rows.to(gl.int64) * K
    scale = (w_ptr + behind).to(gl.pointer_type(gl.float32))
    w_scales = scale + ((w_first + n * w_step) * (K // 128))[:, None] + run[None, :]
    scale = (u_ptr + behind).to(gl.pointer_type(gl.float32))
    u_scales = scale + ((u_first + n * u_step) * (K // 128))[:, None] + run[None, :]
    x_ptrs = (x_ptr + (s // top_k).to(gl.int64) * stride_xt).to(gl.pointer_type(gl.uint64)) + k
    gate = gl.zeros([ROWS, 32], gl.float32, lanes)
    up = gl.zeros([ROWS, 32], gl.float32, lanes)
    ahead = ()
    for i in gl.static_range(AHEAD):
        ahead = ahead + (_beside(x_ptrs, w_scales, u_scales, i),)  # noqa: RUF005
    for i in gl.static_range(CHUNKS):
        if i + AHEAD < CHUNKS:
            ahead = ahead + (_beside(x_ptrs, w_scales, u_scales, i + AHEAD),)  # noqa: RUF005
        async_copy.wait_group(CHUNKS - 1 - i)
        x, w_scale, u_scale = ahead[i]
        x = _four_x(x, x_ptr.dtype.element_ty)
        gate += _sums(w_waiting[i].load(words), x, lanes) * w_scale
        up += _sums(u_waiting[i].load(words), x, lanes) * u_scale
    h, _, _ = ACT(gl.sum(gate, 1), gl.sum(up, 1), numbers, True, False)
    n = gl.program_id(1) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, lanes))
    gl.store(hidden_ptr + s.to(gl.int64) * N + n, h, mask=n < N)


def takes(x: Tensor, w: Rows, u: Rows, bias: Tensor | None, gated: bool) -> bool:
    """Whether `up_fp8` can multiply these: rows of 512 codes and 16 bits, gated, without a bias."""
    if INTERPRETED or not (w.format == u.format == "FP8") or not gated or bias is not None:
        return False
    if x.element_size() != 2 or x.shape[1] % CHUNK.value or not x.shape[1] or capability(x.device) < (8, 9):
        return False
    if w.data.stride() != u.data.stride() or w.data.shape != u.data.shape:
        return False
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and begins_aligned(x)


def up_fp8(
    x: Tensor, ids: Tensor, w: Rows, u: Rows, activation: Activation, hidden: Tensor, arrived: Tensor | None
) -> None:
    """Launch the up product of x ``[T, K]`` into ``hidden`` ``[S, N]`` float32; ``arrived`` is set to zero."""
    (T, top_k), N = ids.shape, hidden.shape[1]
    (pitch, rows, *w_place), (_, _, *u_place) = w.strides, u.strides
    launch(
        _up_fp8_kernel,
        (T * top_k, ceil_div(N, _ROWS)),
        *(x, ids, w.data, u.data, hidden, arrived),
        *(w.data.shape[0], N, top_k, x.stride(0), pitch, rows),
        (*w_place, *u_place),
        activation_numbers(activation),
        FORM=Form(x.shape[1], _ROWS),
        ACT=ACTIVATIONS[activation.kind],
        num_warps=_WARPS,
        launch_pdl=PDL,
    )


class DownForm(NamedTuple):
    """Likewise the down product, which holds as many ``slots`` as the power of two that covers ``top_k``."""

    k: int
    rows: int
    top_k: int
    slots: int
    block_h: int


@gluon.constexpr_function
def _down_layout(slots, warps):
    """[slots, rows, 32 words, 4 numbers]: eight lanes to a row of 128 codes; warps along slots, then along rows."""
    along = min(slots, warps)
    return gl.BlockedLayout([1, 1, 4, 4], [1, 4, 8, 1], [along, warps // along, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _lanes_layout(slots, warps):
    """[slots, rows, 8] of what its threads have."""
    along = min(slots, warps)
    return gl.BlockedLayout([1, 1, 1], [1, 4, 8], [along, warps // along, 1], [2, 1, 0])


@gluon.jit
def _four_parts(x):
    """The four numbers of each word, from [slots, words, 4]."""
    even, odd = x.reshape([x.shape[0], x.shape[1], 2, 2]).split()
    a, c = even.split()
    b, d = odd.split()
    return a, b, c, d


@gluon.jit
def _down_fp8_kernel(
    hidden_ptr,
    ids_ptr,
    weights_ptr,
    w_ptr,
    shared_ptr,
    shared_gate_ptr,
    shared_logit_ptr,
    residual_ptr,
    norm_ptr,
    eps,
    total_ptr,
    counter_ptr,
    out_ptr,
    normed_ptr,
    E,
    H,
    pitch,
    matrix_rows,
    FORM: gl.constexpr,
):
    """As `_down_decode_kernel` of experts_decode.py. Grid: T, H tiles."""
    K: gl.constexpr = FORM.k
    ROWS: gl.constexpr = FORM.rows
    SLOTS: gl.constexpr = FORM.slots
    RUNS: gl.constexpr = K // 128
    AHEAD: gl.constexpr = RUNS if RUNS < 2 else 2
    numbers: gl.constexpr = _down_layout(SLOTS, gl.num_warps())
    words: gl.constexpr = gl.SliceLayout(3, numbers)
    lanes: gl.constexpr = _lanes_layout(SLOTS, gl.num_warps())
    each: gl.constexpr = gl.SliceLayout(2, lanes)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    row = gl.program_id(0).to(gl.int64)
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, each))
    n = gl.program_id(1) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, each))
    k = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, words)))
    s = row * FORM.top_k + slot
    # Only the hidden rows are the up product's: all else was there before its programs let this one begin.
    expert = gl.load(ids_ptr + s, mask=slot < FORM.top_k, other=-1).to(gl.int64)
    live = (expert >= 0) & (expert < E)
    weight = gl.load(weights_ptr + s, mask=live, other=0.0).to(gl.float32)
    matrix = w_ptr + gl.where(live, expert, 0) * pitch
    at = gl.minimum(n, H - 1).to(gl.int64)
    spread: gl.constexpr = gl.SliceLayout(2, words)
    code_rows = matrix.to(gl.pointer_type(gl.uint32))[:, None] + (at * (K // 4))[None, :]
    codes = gl.convert_layout(code_rows, spread, assert_trivial=True)[:, :, None] + k[None, None, :]
    waiting = ()
    for i in gl.static_range(RUNS):
        waiting = waiting + (gl.allocate_shared_memory(gl.uint32, [SLOTS, ROWS, 32], plain),)  # noqa: RUF005
        load_rows(waiting[i], codes + i * 32)
        async_copy.commit_group()
    behind = matrix_rows.to(gl.int64) * K
    scale_ptrs = (matrix + behind).to(gl.pointer_type(gl.float32))[:, None] + (at * RUNS)[None, :]
    scales = ()
    for i in gl.static_range(RUNS):
        scales = scales + (gl.load(scale_ptrs + i),)  # noqa: RUF005
    wait()
    launch_dependents()
    x_layout: gl.constexpr = gl.SliceLayout(1, numbers)
    x_slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, gl.SliceLayout(2, x_layout)))
    x_word = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, x_layout)))
    x_one = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, x_layout)))
    x_row = hidden_ptr + (row * FORM.top_k + gl.minimum(x_slot, FORM.top_k - 1)) * K
    x_ptrs = (x_row[:, None] + 4 * x_word[None, :])[:, :, None] + x_one[None, None, :]
    x_words: gl.constexpr = gl.SliceLayout(1, words)
    ahead = ()
    for i in gl.static_range(AHEAD):
        ahead = ahead + (gl.load(x_ptrs + i * 128),)  # noqa: RUF005
    total = gl.zeros([SLOTS, ROWS, 8], gl.float32, lanes)
    for i in gl.static_range(RUNS):
        if i + AHEAD < RUNS:
            ahead = ahead + (gl.load(x_ptrs + (i + AHEAD) * 128),)  # noqa: RUF005
        async_copy.wait_group(RUNS - 1 - i)
        a, b, c, d = four_e4m3(waiting[i].load(words))
        x0, x1, x2, x3 = _four_parts(ahead[i])
        x0 = gl.convert_layout(x0, x_words, assert_trivial=True)[:, None, :]
        x1 = gl.convert_layout(x1, x_words, assert_trivial=True)[:, None, :]
        x2 = gl.convert_layout(x2, x_words, assert_trivial=True)[:, None, :]
        x3 = gl.convert_layout(x3, x_words, assert_trivial=True)[:, None, :]
        found = a * x0 + (b * x1 + (c * x2 + d * x3))
        found = gl.sum(found.reshape([SLOTS, ROWS, 8, 4]), 3)
        total += gl.convert_layout(found, lanes, assert_trivial=True) * scales[i][:, :, None]
    y = gl.sum(total, 2)
    y = gl.sum(gl.where(live[:, None], y * weight[:, None], 0.0), 0)
    inside = n < H
    tail = (shared_ptr, shared_gate_ptr, shared_logit_ptr, residual_ptr)
    y = finish(y, row, n, inside, H, tail)
    gl.store(out_ptr + row * H + n, y.to(out_ptr.dtype.element_ty), mask=inside)
    if norm_ptr is not None:
        h = gl.arange(0, FORM.block_h, layout=gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
        norm_by_the_last(y, row, n, inside, h, H, eps, (norm_ptr, total_ptr, counter_ptr, normed_ptr))


#: rows of each expert that a program of the down product has, and its warps
_DOWN_ROWS, _DOWN_WARPS = 8, 8


def takes_down(hidden: Tensor, w: Rows, bias: Tensor | None, top_k: int) -> bool:
    """Whether `down_fp8` can multiply these: without a bias, and where all codes have room."""
    if INTERPRETED or w.format != "FP8" or bias is not None:
        return False
    K = hidden.shape[1]
    fits = 0 < block_of(top_k, 1) * _DOWN_ROWS * K <= 96 << 10
    return fits and capability(hidden.device) >= (8, 9)


def down_fp8(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Rows,
    tail: Tail,
    total: Tensor,
    arrived: Tensor | None,
    outputs: Outputs,
) -> None:
    """Launch the down product of ``hidden`` ``[S, K]``, summed over the experts of each token, with its tail.

    ``total`` ``[T, H]`` is float32 and written where there is a norm; ``arrived`` is zero then.
    """
    (T, top_k), H = ids.shape, outputs.out.shape[1]
    pitch, rows, _, _ = w.strides
    slots = block_of(top_k, 1)
    launch(
        _down_fp8_kernel,
        (T, ceil_div(H, _DOWN_ROWS)),
        *(hidden, ids, weights, w.data),
        *tail,
        *(total, arrived),
        *outputs,
        *(w.data.shape[0], H, pitch, rows),
        FORM=DownForm(hidden.shape[1], _DOWN_ROWS, top_k, slots, block_of(H)),
        num_warps=min(_DOWN_WARPS, slots * _DOWN_ROWS // 4),
        launch_pdl=PDL,
    )
