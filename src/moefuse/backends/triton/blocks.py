"""GGUF blocks to numbers, in registers: one branch per format, runs of 32 values.

Every format stores runs of 32 values whose bytes lie together, so a run is what a decoder makes of a block: its loads
are contiguous, and a tile may hold any mixture of rows and runs. Layouts: quant/blocks.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moefuse.quant.formats import FORMATS

#: values that a step of a product takes: whole blocks of every format
STRIP = tl.constexpr(256)
RUNS = tl.constexpr(8)


@triton.constexpr_function
def _values(name):
    return FORMATS[name].values


@triton.constexpr_function
def _nbytes(name):
    return FORMATS[name].nbytes


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
def _decode(block_ptr, run, FORMAT: tl.constexpr):
    """Values 32 * run to 32 * run + 31 of each block; ``block_ptr`` and ``run`` are [R]: [R, 32] float32."""
    l = tl.arange(0, 32)[None, :]
    at = run[:, None]
    half, part = at // 4, at % 4
    sub = 8 * half + 2 * part + l // 16  # the 16-value sub-block of Q6_K, Q3_K and Q2_K
    if FORMAT == "Q8_0":
        q = _bytes(block_ptr, 2 + l)
        return _half(block_ptr, 0) * tl.where(q < 128, q, q - 256)
    elif FORMAT == "Q4_0":
        return _half(block_ptr, 0) * (_nibbles(block_ptr, 2) - 8)
    elif FORMAT == "Q4_1":
        return _half(block_ptr, 0) * _nibbles(block_ptr, 4) + _half(block_ptr, 2)
    elif FORMAT == "Q5_0":
        return _half(block_ptr, 0) * ((_nibbles(block_ptr, 6) | _fifth_bits(block_ptr, 2)) - 16)
    elif FORMAT == "Q5_1":
        return _half(block_ptr, 0) * (_nibbles(block_ptr, 8) | _fifth_bits(block_ptr, 4)) + _half(block_ptr, 2)
    elif FORMAT == "IQ4_NL":
        return _half(block_ptr, 0) * _codebook(_nibbles(block_ptr, 2))
    elif FORMAT == "IQ4_XS":
        high = _byte(block_ptr, 2 + run // 4) >> (2 * part)
        low = _byte(block_ptr, 4 + run // 2) >> (4 * (at % 2))
        scale = ((low & 15) | ((high & 3) << 4)) - 32
        return _half(block_ptr, 0) * scale * _codebook(_nibbles(block_ptr, 8 + 16 * at))
    elif FORMAT == "MXFP4":
        code = _nibbles(block_ptr, 1)
        size = code & 7
        size = tl.where(size < 5, size, tl.where(size == 5, 6, tl.where(size == 6, 8, 12)))
        exponent = _byte(block_ptr, 0)
        bits = tl.where(exponent < 2, 0x00200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
        return bits.to(tl.float32, bitcast=True) * tl.where(code < 8, size, -size)
    elif FORMAT == "Q4_K":
        scale, least = _scale_and_min(block_ptr, run)
        q = (_bytes(block_ptr, 16 + 32 * (at // 2) + l) >> (4 * (at % 2))) & 15
        return _half(block_ptr, 0) * scale * q - _half(block_ptr, 2) * least
    elif FORMAT == "Q5_K":
        scale, least = _scale_and_min(block_ptr, run)
        q = (_bytes(block_ptr, 48 + 32 * (at // 2) + l) >> (4 * (at % 2))) & 15
        q = q | (((_bytes(block_ptr, 16 + l) >> at) & 1) << 4)
        return _half(block_ptr, 0) * scale * q - _half(block_ptr, 2) * least
    elif FORMAT == "Q6_K":
        low = (_bytes(block_ptr, 64 * half + 32 * (part % 2) + l) >> (4 * (part // 2))) & 15
        high = (_bytes(block_ptr, 128 + 32 * half + l) >> (2 * part)) & 3
        scale = _bytes(block_ptr, 192 + sub)
        return _half(block_ptr, 208) * tl.where(scale < 128, scale, scale - 256) * ((low | (high << 4)) - 32)
    elif FORMAT == "Q2_K":
        q = (_bytes(block_ptr, 16 + 32 * half + l) >> (2 * part)) & 3
        both = _bytes(block_ptr, sub)
        return _half(block_ptr, 80) * (both & 15) * q - _half(block_ptr, 82) * (both >> 4)
    else:
        tl.static_assert(FORMAT == "Q3_K")
        q = (_bytes(block_ptr, 32 + 32 * half + l) >> (2 * part)) & 3
        q = q - 4 + (((_bytes(block_ptr, l) >> at) & 1) << 2)
        low = _bytes(block_ptr, 96 + sub % 8) >> (4 * half)
        high = _bytes(block_ptr, 104 + sub % 4) >> (2 * (sub // 4))
        return _half(block_ptr, 108) * (((low & 15) | ((high & 3) << 4)) - 32) * q


@triton.jit
def decode_runs(row_ptr, start, run, K, FORMAT: tl.constexpr):
    """Values ``start + 32 * run`` and the 31 after it of each row; zero from K on. ``start`` is a multiple of STRIP.

    ``row_ptr`` [R] points at rows of whole blocks, or of numbers with FORMAT ""; ``run`` [R] is from 0 to RUNS - 1:
    [R, 32] float32.
    """
    inside = start + 32 * run < K
    if FORMAT == "":
        at = start + 32 * run[:, None] + tl.arange(0, 32)[None, :]
        return tl.load(row_ptr[:, None] + at, mask=at < K, other=0.0).to(tl.float32)
    elif _values(FORMAT) == 256:
        return _decode(row_ptr + (start + 32 * run) // 256 * _nbytes(FORMAT), run, FORMAT)
    else:
        block = (start + 32 * run) // 32
        found = _decode(row_ptr + tl.where(inside, block, 0) * _nbytes(FORMAT), tl.zeros_like(run), FORMAT)
        return tl.where(inside[:, None], found, 0.0)


@triton.jit
def _x_words(x_ptr, start, K, stride, A: tl.constexpr, GROUPS: tl.constexpr):
    """GROUPS * 64 values of A rows from ``start`` on, as `q4_k_products` multiplies them: eight [A, GROUPS, 1, 8].

    The first four are bytes 0 to 3 of words of low halves, values 64 * group + 4 * word + byte; the others 32 further.
    """
    at = start + tl.arange(0, GROUPS * 64)
    x = tl.load(x_ptr[:, None] + at[None, :] * stride, mask=at[None, :] < K, other=0.0).to(tl.float32)
    x = tl.permute(tl.reshape(x, [A, GROUPS, 2, 8, 2, 2]), [0, 1, 3, 2, 4, 5])
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    a0, b0 = tl.split(first)
    a1, b1 = tl.split(second)
    a2, b2 = tl.split(third)
    a3, b3 = tl.split(fourth)
    return (
        a0[:, :, None, :], a1[:, :, None, :], a2[:, :, None, :], a3[:, :, None, :],
        b0[:, :, None, :], b1[:, :, None, :], b2[:, :, None, :], b3[:, :, None, :],
    )  # fmt: skip


@triton.jit
def q4_k_products(row_ptr, x_ptr, K, stride, A: tl.constexpr, B: tl.constexpr, GROUPS: tl.constexpr):
    """``row_ptr`` [A, B] rows of Q4_K blocks, 16-byte aligned, each times the row at ``x_ptr`` [A]: [A, B] float32.

    A block is read a word at a time, and a weight costs a mask, a conversion and a product: it stays at its place in
    the word, and x is divided by that place instead. Groups of 64 stand before rows, so that a thread has one group of
    many rows and works on its x once.
    """
    g = tl.arange(0, GROUPS)
    i = g % 4
    shift = (16 * (i % 2)).to(tl.uint32)[None, :, None]
    early = (i < 2)[None, :, None]
    base = tl.multiple_of(row_ptr, [16, 16]).to(tl.pointer_type(tl.uint32))[:, None, :]
    word = (4 + 8 * i)[:, None, None] + tl.arange(0, 8)[None, None, :]
    total = tl.zeros([A, GROUPS, B, 8], tl.float32)
    for start in range(0, K, 64 * GROUPS):
        a0, a1, a2, a3, b0, b1, b2, b3 = _x_words(x_ptr, start, K, stride, A, GROUPS)
        # Past the end the last block is read again, and multiplied by zeros.
        block = 36 * tl.minimum(start // 256 + g // 4, K // 256 - 1)
        q = tl.load(base[:, :, :, None] + (block[:, None, None] + word)[None, :, :, :])
        head = base + block[None, :, None]
        both = tl.load(head)
        s0, s1, s2 = tl.load(head + 1) >> shift, tl.load(head + 2) >> shift, tl.load(head + 3) >> shift
        d = both.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        d_min = (both >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        scale_a = d * tl.where(early, s0 & 63, (s2 & 15) | ((s0 >> 2) & 48)).to(tl.float32)
        least_a = d_min * tl.where(early, s1 & 63, ((s2 >> 4) & 15) | ((s1 >> 2) & 48)).to(tl.float32)
        scale_b = d * tl.where(early, (s0 >> 8) & 63, ((s2 >> 8) & 15) | ((s0 >> 10) & 48)).to(tl.float32)
        least_b = d_min * tl.where(early, (s1 >> 8) & 63, ((s2 >> 12) & 15) | ((s1 >> 10) & 48)).to(tl.float32)
        # [A, GROUPS, B, 8]
        a = (q & 0xF).to(tl.float32) * a0 + (q & 0xF00).to(tl.float32) * (a1 / 256)
        a += (q & 0xF0000).to(tl.float32) * (a2 / 65536)
        a += (q & 0xF000000).to(tl.float32) * (a3 / 16777216)
        b = (q & 0xF0).to(tl.float32) * (b0 / 16) + (q & 0xF000).to(tl.float32) * (b1 / 4096)
        b += (q & 0xF00000).to(tl.float32) * (b2 / 1048576)
        b += (q & 0xF0000000).to(tl.float32) * (b3 / 268435456)
        total += scale_a[:, :, :, None] * a
        total += scale_b[:, :, :, None] * b
        total -= least_a[:, :, :, None] * (a0 + a1 + a2 + a3)
        total -= least_b[:, :, :, None] * (b0 + b1 + b2 + b3)
    return tl.sum(tl.sum(total, 3), 1)
