"""GGUF blocks to numbers, in registers: a decoder and a row per format, runs of 32 values.

Every format stores runs of 32 values whose bytes lie together, so a run is what a decoder makes of a block: its loads
are contiguous, and a tile may hold any mixture of rows and runs. Layouts: quant/blocks.py.
"""
# ruff: noqa: ARG001  a format of one run takes its number like any other

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moefuse.backends.codes import Table
from moefuse.backends.triton.runtime.launch import INTERPRETED
from moefuse.quant.formats import FORMATS

#: values that a step of a product takes: whole blocks of every format
STRIP = tl.constexpr(256)
RUNS = tl.constexpr(8)
#: whether the card's own instructions can be used
HAS_ASM = tl.constexpr(not INTERPRETED)


@triton.jit
def _half(block_ptr, at: tl.constexpr):
    """The float16 at a byte offset of each block: [R, 1] float32."""
    return tl.load((block_ptr + at).to(tl.pointer_type(tl.float16))).to(tl.float32)[:, None]


@triton.jit
def _byte(block_ptr, at):
    """The byte at an offset of each block: [R, 1] int32."""
    return tl.load(block_ptr + at).to(tl.int32)[:, None]


@triton.jit
def _bytes(block_ptr, at):
    """The bytes at offsets [1 or R, 32] of each block: [R, 32] int32."""
    return tl.load(block_ptr[:, None] + at).to(tl.int32)


@triton.jit
def _nibbles(block_ptr, at):
    """16 bytes: low halves are values 0 to 15, high halves 16 to 31."""
    l = tl.arange(0, 32)[None, :]
    return (_bytes(block_ptr, at + l % 16) >> (l // 16 * 4)) & 15


@triton.jit
def _fifth_bits(block_ptr, at: tl.constexpr):
    """Bit l of the 4 bytes at an offset, as 16: the fifth bit of value l."""
    l = tl.arange(0, 32)[None, :]
    return ((_bytes(block_ptr, at + l // 8) >> (l % 8)) & 1) << 4


@triton.jit
def _scale_and_min(block_ptr, run):
    """The 6-bit scale and minimum of a run of a Q4_K or Q5_K block, from its 12 packed bytes."""
    here, later = _byte(block_ptr, 4 + run), _byte(block_ptr, 8 + run)
    earlier = _byte(block_ptr, 4 + tl.maximum(run - 4, 0))
    first = (run < 4)[:, None]
    scale = tl.where(first, here & 63, (later & 15) | ((earlier >> 6) << 4))
    return scale, tl.where(first, later & 63, (later >> 4) | ((here >> 6) << 4))


@triton.jit
def _codebook(q):
    """The 16 values of IQ4_NL and IQ4_XS."""
    low = tl.where(q < 2, tl.where(q == 0, -127, -104), tl.where(q == 2, -83, -65))
    low = tl.where(q < 4, low, tl.where(q < 6, tl.where(q == 4, -49, -35), tl.where(q == 6, -22, -10)))
    high = tl.where(q < 10, tl.where(q == 8, 1, 13), tl.where(q == 10, 25, 38))
    high = tl.where(q < 12, high, tl.where(q < 14, tl.where(q == 12, 53, 69), tl.where(q == 14, 89, 113)))
    return tl.where(q < 8, low, high)


@triton.jit
def _lanes():
    """The places of a run's values: [1, 32]."""
    return tl.arange(0, 32)[None, :]


@triton.jit
def _halves(run):
    """Of a run of Q6_K, Q3_K or Q2_K: its half of the block and its part of that, and the sub-blocks of its values."""
    at = run[:, None]
    half, part = at // 4, at % 4
    return half, part, 8 * half + 2 * part + _lanes() // 16


# A decoder has its format's name and gives values 32 * run to 32 * run + 31 of each block: [R, 32] float32, where
# ``block_ptr`` and ``run`` are [R].


@triton.jit
def q8_0(block_ptr, run):
    q = _bytes(block_ptr, 2 + _lanes())
    return _half(block_ptr, 0) * tl.where(q < 128, q, q - 256)


@triton.jit
def q4_0(block_ptr, run):
    return _half(block_ptr, 0) * (_nibbles(block_ptr, 2) - 8)


@triton.jit
def q4_1(block_ptr, run):
    return _half(block_ptr, 0) * _nibbles(block_ptr, 4) + _half(block_ptr, 2)


@triton.jit
def q5_0(block_ptr, run):
    return _half(block_ptr, 0) * ((_nibbles(block_ptr, 6) | _fifth_bits(block_ptr, 2)) - 16)


@triton.jit
def q5_1(block_ptr, run):
    return _half(block_ptr, 0) * (_nibbles(block_ptr, 8) | _fifth_bits(block_ptr, 4)) + _half(block_ptr, 2)


@triton.jit
def iq4_nl(block_ptr, run):
    return _half(block_ptr, 0) * _codebook(_nibbles(block_ptr, 2))


@triton.jit
def iq4_xs(block_ptr, run):
    at = run[:, None]
    high = _byte(block_ptr, 2 + run // 4) >> (2 * (at % 4))
    low = _byte(block_ptr, 4 + run // 2) >> (4 * (at % 2))
    scale = ((low & 15) | ((high & 3) << 4)) - 32
    return _half(block_ptr, 0) * scale * _codebook(_nibbles(block_ptr, 8 + 16 * at))


@triton.jit
def mxfp4(block_ptr, run):
    code = _nibbles(block_ptr, 1)
    size = code & 7
    size = tl.where(size < 5, size, tl.where(size == 5, 6, tl.where(size == 6, 8, 12)))
    exponent = _byte(block_ptr, 0)
    bits = tl.where(exponent < 2, 0x00200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
    return bits.to(tl.float32, bitcast=True) * tl.where(code < 8, size, -size)


@triton.jit
def q4_k(block_ptr, run):
    at = run[:, None]
    scale, least = _scale_and_min(block_ptr, run)
    q = (_bytes(block_ptr, 16 + 32 * (at // 2) + _lanes()) >> (4 * (at % 2))) & 15
    return _half(block_ptr, 0) * scale * q - _half(block_ptr, 2) * least


@triton.jit
def q5_k(block_ptr, run):
    at = run[:, None]
    scale, least = _scale_and_min(block_ptr, run)
    q = (_bytes(block_ptr, 48 + 32 * (at // 2) + _lanes()) >> (4 * (at % 2))) & 15
    q = q | (((_bytes(block_ptr, 16 + _lanes()) >> at) & 1) << 4)
    return _half(block_ptr, 0) * scale * q - _half(block_ptr, 2) * least


@triton.jit
def q6_k(block_ptr, run):
    half, part, sub = _halves(run)
    low = (_bytes(block_ptr, 64 * half + 32 * (part % 2) + _lanes()) >> (4 * (part // 2))) & 15
    high = (_bytes(block_ptr, 128 + 32 * half + _lanes()) >> (2 * part)) & 3
    scale = _bytes(block_ptr, 192 + sub)
    return _half(block_ptr, 208) * tl.where(scale < 128, scale, scale - 256) * ((low | (high << 4)) - 32)


@triton.jit
def q2_k(block_ptr, run):
    half, part, sub = _halves(run)
    q = (_bytes(block_ptr, 16 + 32 * half + _lanes()) >> (2 * part)) & 3
    both = _bytes(block_ptr, sub)
    return _half(block_ptr, 80) * (both & 15) * q - _half(block_ptr, 82) * (both >> 4)


@triton.jit
def q3_k(block_ptr, run):
    half, part, sub = _halves(run)
    q = (_bytes(block_ptr, 32 + 32 * half + _lanes()) >> (2 * part)) & 3
    q = q - 4 + (((_bytes(block_ptr, _lanes()) >> run[:, None]) & 1) << 2)
    low = _bytes(block_ptr, 96 + sub % 8) >> (4 * half)
    high = _bytes(block_ptr, 104 + sub % 4) >> (2 * (sub // 4))
    return _half(block_ptr, 108) * (((low & 15) | ((high & 3) << 4)) - 32) * q


_ALL = (q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, iq4_xs, mxfp4, q4_k, q5_k, q6_k, q2_k, q3_k)
#: format -> its decoder
DECODERS: Table[Any] = Table("triton", "format", {decode.__name__.upper(): decode for decode in _ALL}, FORMATS)


@triton.constexpr_function
def _values(decode):
    return FORMATS[decode.__name__.upper()].values


@triton.constexpr_function
def _nbytes(decode):
    return FORMATS[decode.__name__.upper()].nbytes


@triton.jit
def decode_runs(row_ptr, start, run, K, DECODE: tl.constexpr):
    """Values ``start + 32 * run`` and the 31 after it of each row; zero from K on. ``start`` is a multiple of STRIP.

    ``row_ptr`` [R] points at rows of whole blocks, or of numbers where DECODE is None; ``run`` [R] is from 0 to
    RUNS - 1: [R, 32] float32.
    """
    inside = start + 32 * run < K
    if DECODE is None:
        at = start + 32 * run[:, None] + tl.arange(0, 32)[None, :]
        return tl.load(row_ptr[:, None] + at, mask=at < K, other=0.0).to(tl.float32)
    elif _values(DECODE) == 256:
        return DECODE(row_ptr + (start + 32 * run) // 256 * _nbytes(DECODE), run)
    else:
        tl.static_assert(_values(DECODE) == 32, "blocks must hold 32 values or 256")
        block = (start + 32 * run) // 32
        found = DECODE(row_ptr + tl.where(inside, block, 0) * _nbytes(DECODE), tl.zeros_like(run))
        return tl.where(inside[:, None], found, 0.0)


@triton.constexpr_function
def _scaled_byte_asm(at):
    return f"{{ .reg .b32 t; prmt.b32 t, 0x4B000000, $1, 0x300{4 + at}; fma.rn.f32 $0, t, $2, $3; }}"


@triton.jit
def _scaled_byte(words, at: tl.constexpr, factor, ASM: tl.constexpr):
    """A byte of each word times ``factor``.

    The conversion unit is a fraction of the others' width: 2**23 + b is the float32 of first byte b and fourth 0x4B.
    """
    if ASM:
        given = [words, factor, -8388608.0 * factor]
        asm: tl.constexpr = _scaled_byte_asm(at)
        found = tl.inline_asm_elementwise(asm, "=r,r,r,r", given, dtype=tl.float32, is_pure=True, pack=1)
    else:
        found = ((words >> (8 * at)) & 0xFF).to(tl.float32) * factor
    return found


@triton.constexpr_function
def _nibbles_asm(dtype, pack, own):
    """``pack`` bytes to twice as many numbers: registers of low and of high halves, the bytes, scales and offsets.

    128 + n is the float32 whose third byte is n and whose fourth is 0x43, 32768 + n that of second byte n and fourth
    0x47: one byte permutation makes it, and 32768 + 16 times the high half. `_factors` allows for that.
    own: every byte has its scales and offsets; otherwise all have the same.
    """
    pair = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
    lines = [f".reg .b32 a, b, f<{2 * pack}>;", f"and.b32 a, ${pack}, 0x0F0F0F0F;", f"and.b32 b, ${pack}, 0xF0F0F0F0;"]
    for i in range(pack):
        at, step = (pack + 1 + i, pack) if own else (pack + 1, 1)
        lines.append(f"prmt.b32 f{i}, a, 0x43000000, 0x7{i}44;")
        lines.append(f"prmt.b32 f{i + pack}, b, 0x47000000, 0x74{i}4;")
        lines.append(f"fma.rn.f32 f{i}, f{i}, ${at}, ${at + step};")
        lines.append(f"fma.rn.f32 f{i + pack}, f{i + pack}, ${at + 2 * step}, ${at + 3 * step};")
    lines += [f"cvt.rn.{pair}.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in range(pack)]
    return "{" + " ".join(lines) + "}"


@triton.constexpr_function
def _nibbles_registers(pack):
    return ",".join(pack * ["=r"] + (1 + 4 * pack) * ["r"])


@triton.jit
def _unpacked(both, s0, s1, s2):
    """From the four words of a Q4_K block's head: d, -d_min, and scales and then minima, of four runs in a word."""
    d = both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    d_min = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    late_scales = (s2 & 0x0F0F0F0F) | ((s0 >> 2) & 0x30303030)
    late_mins = ((s2 >> 4) & 0x0F0F0F0F) | ((s1 >> 2) & 0x30303030)
    return d, -d_min, s0 & 0x3F3F3F3F, late_scales, s1 & 0x3F3F3F3F, late_mins


@triton.jit
def q4_k_scales(head):
    """`_unpacked` of heads [N, 4]."""
    even, odd = tl.split(tl.reshape(head, [head.shape[0], 2, 2]))
    both, s1 = tl.split(even)
    s0, s2 = tl.split(odd)
    return _unpacked(both, s0, s1, s2)


@triton.jit
def quarters(q):
    """[N, L] as four [N, L // 4]."""
    first, second = tl.split(tl.permute(tl.reshape(q, [q.shape[0], 2, 2, q.shape[1] // 4]), [0, 3, 2, 1]))
    a, b = tl.split(first)
    c, d = tl.split(second)
    return a, b, c, d


@triton.jit
def _factors(head, i: tl.constexpr, ASM: tl.constexpr):
    """Scale and offset of run 2 * i, then of run 2 * i + 1, from what `q4_k_scales` found: four [N, 1].

    ASM: for numbers as `_nibbles_asm` has them.
    """
    d, minus_d_min, scales, mins = head[0], head[1], head[2 + i // 2], head[4 + i // 2]
    at: tl.constexpr = 2 * i % 4
    scale, second = _scaled_byte(scales, at, d, ASM), _scaled_byte(scales, at + 1, d, ASM)
    offset, second_offset = _scaled_byte(mins, at, minus_d_min, ASM), _scaled_byte(mins, at + 1, minus_d_min, ASM)
    if ASM:
        second *= 0.0625
        offset -= 128.0 * scale
        second_offset -= 32768.0 * second
    return scale[:, None], offset[:, None], second[:, None], second_offset[:, None]


@triton.jit
def q4_k_group(q, head, i: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """Runs 2 * i and 2 * i + 1 of Q4_K blocks from their bytes [N, 32] and what `q4_k_scales` found: two [N, 32].

    Only views and elementwise operations, so that the compiler can have all of it in the layout that a product takes.
    ASM: how many bytes at a time, 0 for plain operations.
    """
    scale, offset, second, second_offset = _factors(head, i, ASM)
    if ASM:
        given = [q, scale, offset, second, second_offset]
        asm: tl.constexpr = _nibbles_asm(dtype, ASM, True)
        registers: tl.constexpr = _nibbles_registers(ASM)
        low, high = tl.inline_asm_elementwise(
            asm, registers, given, dtype=(dtype.value, dtype.value), is_pure=True, pack=ASM
        )
    else:
        low = ((q & 15).to(tl.float32) * scale + offset).to(dtype)
        high = ((q >> 4).to(tl.float32) * second + second_offset).to(dtype)
    return low, high


@triton.jit
def q4_k_words(q, head, i: tl.constexpr, dtype: tl.constexpr):
    """Like `q4_k_group`, from words [N, 8], by instructions of the card alone.

    Four [N, 8]: pairs of numbers of ``dtype`` in a word, two of the first run's and two of the second's.
    """
    scale, offset, second, second_offset = _factors(head, i, True)
    return tl.inline_asm_elementwise(
        _nibbles_asm(dtype, 4, False),
        "=r,=r,=r,=r,r,r,r,r,r",
        [q, scale, offset, second, second_offset],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _x_rows(x_ptr, start, K, stride, GROUPS: tl.constexpr):
    """GROUPS * 64 values from ``start`` on of the rows at ``x_ptr`` [A], zeros from K on: float32."""
    at = start + tl.arange(0, GROUPS * 64)
    return tl.load(x_ptr[:, None] + at[None, :] * stride, mask=at[None, :] < K, other=0.0).to(tl.float32)


@triton.jit
def _x_words(x_ptr, start, K, stride, A: tl.constexpr, GROUPS: tl.constexpr):
    """GROUPS * 64 values of A rows from ``start`` on, as `q4_k_products` multiplies them: eight [A, GROUPS, 1, 8].

    The first four are bytes 0 to 3 of words of low halves, values 64 * group + 4 * word + byte; the others 32 further.
    """
    x = _x_rows(x_ptr, start, K, stride, GROUPS)
    x = tl.permute(tl.reshape(x, [A, GROUPS, 2, 8, 2, 2]), [0, 1, 3, 2, 4, 5])
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    a0, b0 = tl.split(first)
    a1, b1 = tl.split(second)
    a2, b2 = tl.split(third)
    a3, b3 = tl.split(fourth)
    low = a0[:, :, None, :], a1[:, :, None, :], a2[:, :, None, :], a3[:, :, None, :]
    return low + (b0[:, :, None, :], b1[:, :, None, :], b2[:, :, None, :], b3[:, :, None, :])  # noqa: RUF005


_DOTS = tl.constexpr(
    "{ .reg .b32 w, f; and.b32 w, $1, 0x0F0F0F0F;"
    + " ".join(
        f"prmt.b32 f, w, 0x43000000, 0x7{i}44; fma.rn.f32 $0, f, ${2 + i}, {'$0' if i else '$6'};" for i in range(4)
    )
    + "}"
)


@triton.jit
def _dots(q, x0, x1, x2, x3, total):
    """The low halves of the four bytes of words times four numbers; ``total`` is the numbers' sum."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            _DOTS, "=&r,r,r,r,r,r,r", [q, x0, x1, x2, x3, -128.0 * total], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        found = (q & 15).to(tl.float32) * x0 + ((q >> 8) & 15).to(tl.float32) * x1
        found += ((q >> 16) & 15).to(tl.float32) * x2 + ((q >> 24) & 15).to(tl.float32) * x3
    return found


@triton.jit
def _x_bytes(x_ptr, start, K, stride, A: tl.constexpr, GROUPS: tl.constexpr):
    """Like `_x_words`, rounded to 8 bits by runs of 32, four in a word: two [A, GROUPS, 1, 8] of the two runs.

    And two [A, GROUPS, 1] each of what the bytes are to be multiplied by, and of the runs' sums.
    """
    x = tl.reshape(_x_rows(x_ptr, start, K, stride, GROUPS), [A, GROUPS, 2, 32])
    factor = tl.max(tl.abs(x), 3) * (1.0 / 127.0)
    # The nearest whole number is in the last bits of its sum with 1.5 * 2**23. Runs too small to divide by are zeros.
    rounded = x * tl.where(factor < 1e-37, 0.0, 1.0 / factor)[:, :, :, None] + 12582912.0
    sum_a, sum_b = tl.split(tl.sum(rounded - 12582912.0, 3) * factor)
    factor_a, factor_b = tl.split(factor)
    byte = tl.reshape(rounded.to(tl.int32, bitcast=True) & 0xFF, [A, GROUPS, 2, 8, 2, 2])
    even, odd = tl.split(byte)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = first | (second << 8) | (third << 16) | (fourth << 24)
    words_a, words_b = tl.split(tl.permute(words, [0, 1, 3, 2]))
    factors = factor_a[:, :, None], factor_b[:, :, None], sum_a[:, :, None], sum_b[:, :, None]
    return (words_a[:, :, None, :], words_b[:, :, None, :]) + factors  # noqa: RUF005


_BYTE_DOTS = tl.constexpr(
    "{ .reg .b32 t; and.b32 t, $2, 0x0F0F0F0F; dp4a.u32.s32 $0, t, $3, 0; "
    "and.b32 t, $2, 0xF0F0F0F0; dp4a.u32.s32 $1, t, $4, 0; }"
)


@triton.jit
def _byte_dots(q, words_a, words_b):
    """The low halves of the four bytes of words times four bytes, and 16 times the high halves times four others."""
    if HAS_ASM:
        low, high = tl.inline_asm_elementwise(
            _BYTE_DOTS, "=&r,=&r,r,r,r", [q, words_a, words_b], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        low, high = tl.zeros(q.shape, tl.int32), tl.zeros(q.shape, tl.int32)
        for i in tl.static_range(4):
            # bytes of words_a and words_b are signed
            low += ((q >> (8 * i)) & 15).to(tl.int32) * ((words_a << (24 - 8 * i)) >> 24)
            high += ((q >> (8 * i)) & 0xF0).to(tl.int32) * ((words_b << (24 - 8 * i)) >> 24)
    return low, high


@triton.jit
def q4_k_load(row_ptr, start, K, GROUPS: tl.constexpr):
    """GROUPS groups of 64 from value ``start`` on of rows [A, B] of Q4_K blocks, 16-byte aligned; nothing from K on.

    Their words [A, GROUPS, B, 8], and the four words of their blocks' heads [A, GROUPS, B], the last three moved so
    that a group's scales are at the front.
    """
    g = tl.arange(0, GROUPS)
    i = g % 4
    base = tl.multiple_of(row_ptr, [16, 16]).to(tl.pointer_type(tl.uint32))[:, None, :]
    # Past the end the last block is read again, and multiplied by zeros.
    block = 36 * tl.minimum(start // 256 + g // 4, K // 256 - 1)
    word = (4 + 8 * i)[:, None, None] + tl.arange(0, 8)[None, None, :]
    inside = (start + 0 * g < K)[None, :, None]
    q = tl.load(base[:, :, :, None] + (block[:, None, None] + word)[None, :, :, :], mask=inside[:, :, :, None], other=0)
    head = base + block[None, :, None]
    shift = (16 * (i % 2)).to(tl.uint32)[None, :, None]
    both = tl.load(head, mask=inside, other=0)
    s0 = tl.load(head + 1, mask=inside, other=0) >> shift
    s1 = tl.load(head + 2, mask=inside, other=0) >> shift
    s2 = tl.load(head + 3, mask=inside, other=0) >> shift
    return q, both, s0, s1, s2


@triton.jit
def _q4_k_step(loaded, x, total, least, GROUPS: tl.constexpr, ROUNDED: tl.constexpr):
    """Sums ``total`` [A, GROUPS, B, words or their halves] and of minima ``least`` [A, GROUPS, B], with more to them.

    What `q4_k_load` loaded, times x as `_x_bytes` or `_x_words` gives it.
    """
    q, both, s0, s1, s2 = loaded
    d, minus_d_min, early_scales, late_scales, early_mins, late_mins = _unpacked(both, s0, s1, s2)
    # a group's two are the first bytes
    early = (tl.arange(0, GROUPS) % 4 < 2)[None, :, None]
    scales, mins = tl.where(early, early_scales, late_scales), tl.where(early, early_mins, late_mins)
    scale_a, scale_b = _scaled_byte(scales, 0, d, HAS_ASM), _scaled_byte(scales, 1, d, HAS_ASM)
    if ROUNDED:
        words_a, words_b, factor_a, factor_b, sum_a, sum_b = x
        low, high = _byte_dots(q, words_a, words_b)
        halves: tl.constexpr = [q.shape[0], GROUPS, q.shape[2], 2, 4]
        low = tl.sum(tl.reshape(low, halves), 4).to(tl.float32)
        high = tl.sum(tl.reshape(high, halves), 4).to(tl.float32)
        scale_a *= factor_a
        scale_b *= factor_b * 0.0625
    else:
        a0, a1, a2, a3, b0, b1, b2, b3 = x
        words_a, words_b = a0 + a1 + a2 + a3, b0 + b1 + b2 + b3
        low, high = _dots(q, a0, a1, a2, a3, words_a), _dots(q >> 4, b0, b1, b2, b3, words_b)
        sum_a, sum_b = tl.sum(words_a, 3), tl.sum(words_b, 3)
    total += scale_a[:, :, :, None] * low + scale_b[:, :, :, None] * high
    least += _scaled_byte(mins, 0, minus_d_min, HAS_ASM) * sum_a + _scaled_byte(mins, 1, minus_d_min, HAS_ASM) * sum_b
    return total, least


@triton.jit
def q4_k_products(loaded, ptrs, x_ptr, K, stride, GROUPS: tl.constexpr, ROUNDED: tl.constexpr):
    """Rows ``ptrs`` [A, B] of Q4_K blocks, each times the row at ``x_ptr`` [A]: [A, B] float32.

    ``ptrs`` and what `q4_k_load` gave for their beginning, ``loaded``, are two each: the second None, or rows that
    share the work on x. Groups of 64 stand before rows, so that a thread has one group of many rows. ROUNDED: x in 8
    bits.
    """
    loaded, second_loaded = loaded
    row_ptr, second_ptr = ptrs
    A: tl.constexpr = row_ptr.shape[0]
    B: tl.constexpr = row_ptr.shape[1]
    total = tl.zeros([A, GROUPS, B, 2 if ROUNDED else 8], tl.float32)
    least = tl.zeros([A, GROUPS, B], tl.float32)
    second = tl.zeros([A, GROUPS, B, 2 if ROUNDED else 8], tl.float32)
    second_least = tl.zeros([A, GROUPS, B], tl.float32)
    for start in range(0, K, 64 * GROUPS):
        x = (_x_bytes if ROUNDED else _x_words)(x_ptr, start, K, stride, A, GROUPS)
        total, least = _q4_k_step(loaded, x, total, least, GROUPS, ROUNDED)
        loaded = q4_k_load(row_ptr, start + 64 * GROUPS, K, GROUPS)
        if second_ptr is not None:
            second, second_least = _q4_k_step(second_loaded, x, second, second_least, GROUPS, ROUNDED)
            second_loaded = q4_k_load(second_ptr, start + 64 * GROUPS, K, GROUPS)
    return tl.sum(tl.sum(total, 3) + least, 1), tl.sum(tl.sum(second, 3) + second_least, 1)
