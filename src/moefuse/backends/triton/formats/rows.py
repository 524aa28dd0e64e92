"""Rows of blocks in planes times rows of x: matrix-vector products, exact or of x in 8 bits."""
# ruff: noqa: ARG001  either kind of step takes what the other needs; kernels branch when they are compiled
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.formats.blocks import (
    HAS_ASM,
    base_bits,
    code_bias,
    for_words,
    four_e4m3,
    four_parts,
    has_minima,
    in_e4m3,
    is_signed,
    load_runs,
    rounds_x,
    small_number,
    sub_values,
    word_codes,
)


@triton.jit
def _by_slot(x, RUNS: tl.constexpr, A: tl.constexpr, BASE: tl.constexpr):
    """[RUNS, A, 8] by words of the base plane: as many [RUNS, A, 1, base] as these have slots."""
    if BASE == 8:
        found = (tl.reshape(x, [RUNS, A, 1, 8]),)
    elif BASE == 4:
        a, b = tl.split(tl.reshape(x, [RUNS, A, 1, 4, 2]))
        found = (a, b)
    else:
        found = four_parts(tl.reshape(x, [RUNS, A, 1, 2, 2, 2]))
    return found


@triton.jit
def _sub_sums(x, RUNS: tl.constexpr, A: tl.constexpr, SUB: tl.constexpr):
    """Sums of values 0 to 15 and 16 to 31 of runs [RUNS, A, 32] where SUB is 16, else of all: a tuple [RUNS, A, 1]."""
    if SUB == 16:
        first, second = tl.split(tl.sum(tl.reshape(x, [RUNS, A, 2, 16]), 3))
        found = (first[:, :, None], second[:, :, None])
    else:
        found = (tl.sum(x, 2)[:, :, None],)
    return found


@triton.jit
def in_8_bits(x):
    """x [.., values] as whole numbers of 8 bits, and the factor of each row: what they are multiplied by."""
    # As whole numbers the bits of numbers without sign have their order, with not-a-number above all of them.
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, len(x.shape) - 1)
    factor = most.to(tl.float32, bitcast=True) * (1.0 / 127.0)
    # The nearest whole number is in the last bits of its sum with 1.5 * 2**23. Rows too small to divide by are zeros.
    inverse = tl.where(factor < 1e-37, 0.0, 1.0 / factor)
    rounded = x * tl.expand_dims(inverse, len(x.shape) - 1) + 12582912.0
    return rounded.to(tl.int32, bitcast=True) - 0x4B400000, factor


@triton.jit
def _x_rounded(x, RUNS: tl.constexpr, A: tl.constexpr, BASE: tl.constexpr, SUB: tl.constexpr):
    """x [RUNS, A, 32] in 8 bits by runs: words by slot; factors [RUNS, A, 1]; sums of codes, see `_sub_sums`."""
    whole, factor = in_8_bits(x)
    b0, b1, b2, b3 = four_parts(tl.reshape(whole & 0xFF, [RUNS, A, 8, 2, 2]))
    words = b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)
    return _by_slot(words, RUNS, A, BASE), (factor[:, :, None],), _sub_sums(whole, RUNS, A, SUB)


@triton.jit
def _x_exact(x, RUNS: tl.constexpr, A: tl.constexpr, BASE: tl.constexpr, SUB: tl.constexpr):
    """Likewise x unrounded: four numbers of each slot, 1.0, and their sums."""
    b0, b1, b2, b3 = four_parts(tl.reshape(x, [RUNS, A, 8, 2, 2]))
    slots = (
        _by_slot(b0, RUNS, A, BASE),
        _by_slot(b1, RUNS, A, BASE),
        _by_slot(b2, RUNS, A, BASE),
        _by_slot(b3, RUNS, A, BASE),
    )
    return slots, (1.0,), _sub_sums(x, RUNS, A, SUB)


#: values of rows in 8 bits that share a factor, where a launch writes them for the next
ROUNDED_TOGETHER = 16


def hidden_rows(S: int, K: int, rounded: bool, device: torch.device) -> Tensor:
    """Memory for rows between two products: float32, or what `store_rounded` writes."""
    if not rounded:
        return torch.empty((S, K), dtype=torch.float32, device=device)
    return torch.empty(S * (K + K // 2), dtype=torch.uint8, device=device)


# Rows that a launch before has rounded, in one buffer: for each run its 32 codes, as words by slot of the format that
# they are multiplied with, and behind all codes 16 bytes, the factors of its two halves and the sums of their codes.


@triton.jit
def store_rounded(ptr, S, K, row, first, x, DECODE: tl.constexpr):
    """Write values ``first`` and on of a row of S: x [a multiple of 16], for `_x_rounded_before` to read."""
    COUNT: tl.constexpr = x.shape[0]
    BASE: tl.constexpr = base_bits(DECODE)
    whole, factor = in_8_bits(tl.reshape(x, [COUNT // 16, 16]))
    n = first + tl.arange(0, COUNT)
    slot = n % 32 // 4
    place = slot % (8 // BASE) * BASE + slot // (8 // BASE)
    codes = row.to(tl.int64) * K + n // 32 * 32 + place * 4 + n % 4
    tl.store(ptr.to(tl.pointer_type(tl.int8)) + codes, tl.reshape(whole, [COUNT]).to(tl.int8), mask=n < K)
    half = first // 16 + tl.arange(0, COUNT // 16)
    at = (row.to(tl.int64) * (K // 32) + half // 2) * 4 + half % 2
    records = (ptr + S.to(tl.int64) * K).to(tl.pointer_type(tl.int32))
    tl.store(records + at, factor.to(tl.int32, bitcast=True), mask=half < K // 16)
    tl.store(records + at + 2, tl.sum(whole, 1), mask=half < K // 16)


@triton.jit
def _four_words(ptrs):
    """The four words from each pointer on, in whatever layout they are wanted: a load would choose its own."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [ptrs.to(tl.uint64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        found = (tl.load(ptrs), tl.load(ptrs + 1), tl.load(ptrs + 2), tl.load(ptrs + 3))
    return found


@triton.jit
def _joined(words):
    """Two or four tensors as the last dimension of one."""
    if len(words) == 2:
        found = tl.join(words[0], words[1])
    else:
        found = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
        found = tl.reshape(found, words[0].shape + [4])  # noqa: RUF005
    return found


@triton.jit
def _x_rounded_before(x, start, K, RUNS: tl.constexpr, BASE: tl.constexpr):
    """Rows [A] of what `store_rounded` wrote, like `_x_rounded`, with two factors and two sums of each run."""
    rows, S, ptr = x
    run = (start // 32 + tl.arange(0, RUNS))[:, None, None]
    at = rows.to(tl.int64)[None, :, None] * (K // 32) + tl.minimum(run, K // 32 - 1)
    words = ptr.to(tl.pointer_type(tl.int32)) + at * 8
    slots = ()
    if BASE == 8:
        halves = words[:, :, :, None] + 4 * tl.arange(0, 2)[None, None, None, :]
        slots = (tl.reshape(_joined(_four_words(halves)), [RUNS, rows.shape[0], 1, 8]),)
    else:
        four = _four_words(words) + _four_words(words + 4)
        for s in tl.static_range(8 // BASE):
            slots = slots + (_joined(four[BASE * s : BASE * s + BASE]),)  # noqa: RUF005
    factor_a, factor_b, sum_a, sum_b = _four_words((ptr + S.to(tl.int64) * K).to(tl.pointer_type(tl.int32)) + at * 4)
    inside = run < K // 32
    factor_a = tl.where(inside, factor_a, 0).to(tl.float32, bitcast=True)
    factor_b = tl.where(inside, factor_b, 0).to(tl.float32, bitcast=True)
    return slots, (factor_a, factor_b), (tl.where(inside, sum_a, 0), tl.where(inside, sum_b, 0))


@triton.jit
def _dot4(codes, x, total, SIGNED: tl.constexpr):
    """``total`` and four bytes of codes times four bytes of x, in whole numbers."""
    if HAS_ASM:
        KIND: tl.constexpr = "dp4a.s32.s32 $0, $1, $2, $3;" if SIGNED else "dp4a.u32.s32 $0, $1, $2, $3;"
        total = tl.inline_asm_elementwise(KIND, "=r,r,r,r", [codes, x, total], dtype=tl.int32, is_pure=True, pack=1)
    else:
        for i in tl.static_range(4):
            code = ((codes >> (8 * i)) & 0xFF).to(tl.int32)
            if SIGNED:
                code = tl.where(code < 128, code, code - 256)
            total += code * ((x << (24 - 8 * i)) >> 24)
    return total


@triton.jit
def _sums(codes, x, shape: tl.constexpr, ROUNDED: tl.constexpr, DECODE: tl.constexpr):
    """Codes times x by words: whole numbers, or float32."""
    SLOTS: tl.constexpr = 8 // base_bits(DECODE)
    SIGNED: tl.constexpr = is_signed(DECODE)
    if ROUNDED:
        found = tl.zeros(shape, tl.int32)
        for s in tl.static_range(SLOTS):
            found = _dot4(codes[s], x[s], found, SIGNED)
    else:
        found = tl.zeros(shape, tl.float32)
        for s in tl.static_range(SLOTS):
            code = codes[s] ^ 0x80808080 if SIGNED else codes[s]
            for i in tl.static_range(4):
                number = small_number(code >> (8 * i))
                if SIGNED:
                    number -= 128.0
                found += number * x[i][s]
    return found


@triton.jit
def _by_fours(x):
    """Words [RUNS, A, B, 8] by fours, which a thread has together: four of [RUNS, A, B, 2]."""
    return four_parts(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], 2, 2, 2]))


@triton.jit
def _e4m3_sums(codes, x):
    """Codes in words [RUNS, A, B, 8] times x, as `_x_exact` gives it: [RUNS, A, B, 2] float32."""
    words = _by_fours(codes)
    x0, x1, x2, x3 = _by_fours(x[0][0]), _by_fours(x[1][0]), _by_fours(x[2][0]), _by_fours(x[3][0])
    found = tl.zeros(words[0].shape, tl.float32)
    for i in tl.static_range(4):
        a, b, c, d = four_e4m3(words[i])
        found += a * x0[i]
        found += b * x1[i]
        found += c * x2[i]
        found += d * x3[i]
    return found


@triton.jit
def _step(loaded, x, start, total, ROUNDED: tl.constexpr, DECODE: tl.constexpr):
    """``total`` [RUNS, A, B] with what `load_runs` loaded times x, as `_x_rounded` or `_x_exact` gives it."""
    q, high, of_run, strip = loaded
    slots, factors, x_sums = x
    RUNS: tl.constexpr = total.shape[0]
    BASE: tl.constexpr = base_bits(DECODE)
    word = tl.arange(0, BASE).to(tl.uint32)[None, None, None, :]
    codes = word_codes(q, for_words(high, DECODE), word, DECODE)
    shape: tl.constexpr = [RUNS, total.shape[1], q.shape[2], BASE]
    sums = _sums(codes, slots, shape, rounds_x(DECODE, ROUNDED), DECODE)
    i = ((start // 32 + tl.arange(0, RUNS)) % 8).to(tl.uint32)[:, None, None]
    scale_a, offset_a, scale_b, offset_b = DECODE(of_run, strip, i)
    if sub_values(DECODE) == 16 or len(factors) == 2:
        factor_a, factor_b = factors[0], factors[len(factors) - 1]
        sum_a, sum_b = x_sums
        halves: tl.constexpr = [RUNS, total.shape[1], q.shape[2], 2, BASE // 2]
        a, b = tl.split(tl.sum(tl.reshape(sums, halves), 4))
        if code_bias(DECODE) != 0:
            a -= code_bias(DECODE) * sum_a
            b -= code_bias(DECODE) * sum_b
        total += (scale_a * factor_a) * a.to(tl.float32) + (scale_b * factor_b) * b.to(tl.float32)
        if has_minima(DECODE):
            total += (offset_a * factor_a) * sum_a.to(tl.float32) + (offset_b * factor_b) * sum_b.to(tl.float32)
    else:
        factor, x_sum = factors[0], x_sums[0]
        a = tl.sum(sums, 3)
        if code_bias(DECODE) != 0:
            a -= code_bias(DECODE) * x_sum
        total += (scale_a * factor) * a.to(tl.float32)
        if has_minima(DECODE):
            total += (offset_a * factor) * x_sum.to(tl.float32)
    return total


@triton.jit
def _e4m3_step(loaded, x, start, total, ROUNDED: tl.constexpr, DECODE: tl.constexpr):
    """Likewise of codes in e4m3; ``total`` [RUNS, A, B, 2] is of what one thread loads."""
    q, _, of_run, strip = loaded
    slots, factors, _ = x
    scale, _, _, _ = DECODE(of_run, strip, 0)
    return total + (scale * factors[0])[:, :, :, None] * _e4m3_sums(q, slots)


@triton.jit
def _x_loaded(x, start, K, RUNS: tl.constexpr, DECODE: tl.constexpr):
    """x of RUNS runs from ``start`` on, for `_x_made`.

    ``x``: pointers to rows [A] and a stride, or rows [A] of the S that `store_rounded` wrote, S, and where that is.
    """
    if len(x) == 3:
        found = _x_rounded_before(x, start, K, RUNS, base_bits(DECODE))
    else:
        ptrs, stride = x
        at = start + 32 * tl.arange(0, RUNS)[:, None, None] + tl.arange(0, 32)[None, None, :]
        found = tl.load(ptrs[None, :, None] + at * stride, mask=at < K, other=0.0)
    return found


@triton.jit
def _x_made(loaded, x, RUNS: tl.constexpr, ROUNDED: tl.constexpr, DECODE: tl.constexpr, SECOND: tl.constexpr):
    """What `_x_loaded` gave, as `_step` takes it for format DECODE, and for SECOND where that is not None."""
    if len(x) == 3:
        found = (loaded, ())
    else:
        A: tl.constexpr = loaded.shape[1]
        numbers = loaded.to(tl.float32)
        made = _x_for(numbers, RUNS, A, ROUNDED, DECODE)
        found = (made, made)
        if SECOND is not None and SECOND is not DECODE:
            found = (made, _x_for(numbers, RUNS, A, ROUNDED, SECOND))
    return found


@triton.jit
def _x_for(x, RUNS: tl.constexpr, A: tl.constexpr, ROUNDED: tl.constexpr, DECODE: tl.constexpr):
    return (_x_rounded if rounds_x(DECODE, ROUNDED) else _x_exact)(x, RUNS, A, base_bits(DECODE), sub_values(DECODE))


@triton.jit
def load_both(matrices, rows, start, K, RUNS: tl.constexpr, DECODE: tl.constexpr, SECOND: tl.constexpr):
    """`load_runs` of two matrices, the second of format SECOND where that is not None."""
    first = load_runs(matrices[0], rows[0], start, K, RUNS, DECODE)
    second = ()
    if SECOND is not None:
        second = load_runs(matrices[1], rows[1], start, K, RUNS, SECOND)
    return first, second


@triton.jit
def load_chunks(
    matrices, rows, K, RUNS: tl.constexpr, CHUNKS: tl.constexpr, DECODE: tl.constexpr, SECOND: tl.constexpr
):
    """What `row_products` is given of the weights: the first RUNS runs, or all CHUNKS of so many."""
    found = (load_both(matrices, rows, 0, K, RUNS, DECODE, SECOND),)
    for c in tl.static_range(1, CHUNKS):
        found = found + (load_both(matrices, rows, 32 * RUNS * c, K, RUNS, DECODE, SECOND),)  # noqa: RUF005
    return found


@triton.jit
def x_chunks(x, K, RUNS: tl.constexpr, CHUNKS: tl.constexpr, DECODE: tl.constexpr):
    """Likewise of x, see `_x_loaded`: nothing where CHUNKS is 0."""
    found = ()
    for c in tl.static_range(CHUNKS):
        found = found + (_x_loaded(x, 32 * RUNS * c, K, RUNS, DECODE),)  # noqa: RUF005
    return found


@triton.jit
def _next(loaded, x, start, total, ROUNDED: tl.constexpr, DECODE: tl.constexpr):
    return (_e4m3_step if in_e4m3(DECODE) else _step)(loaded, x, start, total, ROUNDED, DECODE)


@triton.jit
def _no_sums(RUNS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, DECODE: tl.constexpr):
    if DECODE is not None and in_e4m3(DECODE):
        found = tl.zeros([RUNS, A, B, 2], tl.float32)
    else:
        found = tl.zeros([RUNS, A, B], tl.float32)
    return found


@triton.jit
def row_products(
    loaded,
    numbers,
    matrices,
    rows,
    x,
    K,
    RUNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROUNDED: tl.constexpr,
    DECODE: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Rows [A, B] of matrices in planes, each times a row of x [A]: [A, B] float32. One matrix may serve all.

    ``matrices`` and ``rows``, as `load_both` takes them, are two each: the second of format SECOND, where that is not
    None. CHUNKS: of RUNS runs that K is, all of which are in ``loaded`` and ``numbers``, see `load_chunks` and
    `x_chunks`; 0 where there are more, or nobody knows how many. ROUNDED: x in 8 bits.
    """
    A: tl.constexpr = x[0].shape[0]
    B: tl.constexpr = rows[0].shape[1]
    total = _no_sums(RUNS, A, B, DECODE)
    second = _no_sums(RUNS, A, B, SECOND)
    if CHUNKS > 0:
        made = ()
        for c in tl.static_range(CHUNKS):
            made = made + (_x_made(numbers[c], x, RUNS, ROUNDED, DECODE, SECOND),)  # noqa: RUF005
        for c in tl.static_range(CHUNKS):
            total = _next(loaded[c][0], made[c][0], 32 * RUNS * c, total, ROUNDED, DECODE)
            if SECOND is not None:
                second = _next(loaded[c][1], made[c][1], 32 * RUNS * c, second, ROUNDED, SECOND)
    else:
        now = loaded[0]
        # One step ahead where x is few words, or codes are in e4m3: other numbers leave no registers for it.
        AHEAD: tl.constexpr = in_e4m3(DECODE) or (rounds_x(DECODE, ROUNDED) and A <= 2)
        for start in range(0, K, 32 * RUNS):
            here = _x_made(_x_loaded(x, start, K, RUNS, DECODE), x, RUNS, ROUNDED, DECODE, SECOND)
            then = now
            if AHEAD:
                then = load_both(matrices, rows, start + 32 * RUNS, K, RUNS, DECODE, SECOND)
            total = _next(now[0], here[0], start, total, ROUNDED, DECODE)
            if SECOND is not None:
                second = _next(now[1], here[1], start, second, ROUNDED, SECOND)
            if not AHEAD:
                then = load_both(matrices, rows, start + 32 * RUNS, K, RUNS, DECODE, SECOND)
            now = then
    if len(total.shape) == 4:
        total = tl.sum(total, 3)
    if len(second.shape) == 4:
        second = tl.sum(second, 3)
    return tl.sum(total, 0), tl.sum(second, 0)
