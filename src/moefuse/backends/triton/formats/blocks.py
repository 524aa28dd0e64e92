"""Blocks in planes to numbers, in registers: a row of `KINDS` and a function of scales per format.

In planes (quant/arrange.py) a format is told by a few facts: how many bits of a code lie in its base plane and in its
high plane, what the codes stand for, and where scales are. The rest is the same for all. A run of 32 values is 8 slots
of four; slot w has values 4 * w and on, one in each byte of a word, and a plane of b bits keeps it in word w * b // 8
of the run. A value is ``scale * (code - bias)``, or ``scale * code + offset`` in formats with minima. Codes are whole
numbers, but for FP8's, which are numbers in e4m3.
"""
# ruff: noqa: ARG001, SIM108  a function of scales takes what any of them needs; kernels branch when they are compiled
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from moefuse.backends.codes import Table
from moefuse.backends.triton.runtime.launch import INTERPRETED
from moefuse.quant.blocks import IQ4_CODES, MXFP4_CODES
from moefuse.quant.formats import FORMATS

#: values that a step of a product takes: whole blocks of every format
STRIP = tl.constexpr(256)
#: whether the card's own instructions can be used
HAS_ASM = tl.constexpr(not INTERPRETED)


class Kind(NamedTuple):
    """A format's planes: ``base`` and ``high`` bits of codes, then scales.

    ``bias``: the code of zero, without ``minima``. ``codes``: what the codes stand for, where that is not themselves.
    ``sub``: values that share a scale, or 32 where more do. ``run_bytes``: bytes of scales of a run of 32;
    ``strip_bytes``: of a strip of so many runs, in one plane or more. ``e4m3``: whether codes are such numbers.
    """

    base: int
    high: int = 0
    bias: int = 0
    codes: tuple[int, ...] = ()
    sub: int = 32
    minima: bool = False
    run_bytes: int = 0
    strip_bytes: tuple[int, ...] = ()
    strip: int = 8
    e4m3: bool = False

    @property
    def signed(self) -> bool:
        """Whether codes are bytes with a sign."""
        return bool(self.codes) or (self.base == 8 and not self.e4m3)


KINDS = {
    "Q8_0": Kind(8, run_bytes=2),
    "Q4_0": Kind(4, bias=8, run_bytes=2),
    "Q4_1": Kind(4, minima=True, run_bytes=4),
    "Q5_0": Kind(4, 1, bias=16, run_bytes=2),
    "Q5_1": Kind(4, 1, minima=True, run_bytes=4),
    "IQ4_NL": Kind(4, codes=IQ4_CODES, run_bytes=2),
    "IQ4_XS": Kind(4, codes=IQ4_CODES, strip_bytes=(8,)),
    "MXFP4": Kind(4, codes=MXFP4_CODES, run_bytes=1),
    "Q4_K": Kind(4, minima=True, strip_bytes=(16,)),
    "Q5_K": Kind(4, 1, minima=True, strip_bytes=(16,)),
    "Q6_K": Kind(4, 2, bias=32, sub=16, run_bytes=2, strip_bytes=(2,)),
    "Q2_K": Kind(2, sub=16, minima=True, run_bytes=2, strip_bytes=(4,)),
    "Q3_K": Kind(2, 1, bias=4, sub=16, strip_bytes=(12, 2)),
    "FP8": Kind(8, strip_bytes=(4,), strip=4, e4m3=True),
}


@triton.constexpr_function
def _kind(decode):
    return KINDS[decode.__name__.upper()]


@triton.constexpr_function
def base_bits(decode):
    """Bits of a code in the base plane; numbers are read like codes of 8."""
    return 8 if decode is None else _kind(decode).base


@triton.constexpr_function
def high_bits(decode):
    return _kind(decode).high


@triton.constexpr_function
def _bias(decode):
    return _kind(decode).bias


@triton.constexpr_function
def _has_minima(decode):
    return _kind(decode).minima


@triton.constexpr_function
def _signed(decode):
    return _kind(decode).signed


@triton.constexpr_function
def _in_e4m3(decode):
    return _kind(decode).e4m3


@triton.constexpr_function
def _rounds(decode, rounded):
    """Whether x is rounded to 8 bits for this format, if it may be: not where codes are no whole numbers."""
    return rounded and not _kind(decode).e4m3


@triton.constexpr_function
def sub_values(decode):
    return _kind(decode).sub


@triton.constexpr_function
def run_bytes(decode):
    return _kind(decode).run_bytes


@triton.constexpr_function
def strip_runs(decode):
    return _kind(decode).strip


@triton.constexpr_function
def strip_bytes_of(decode, i):
    """Bytes of the i-th plane of scales of strips; 0 where there is none."""
    return (*_kind(decode).strip_bytes, 0, 0)[i]


@triton.constexpr_function
def _mask(bits):
    return ((1 << bits) - 1) * 0x01010101


# ---- Scales: a function of each format, by its name ----
# ``run``: what lies in the plane of runs for each run; ``strip``: the words of the planes of strips; ``i``: which of
# eight runs it is. Each gives scale and offset of values 0 to 15, and the same of 16 to 31: float32, the
# offset 0 in formats without minima.


@triton.jit
def _half(bits):
    """The float16 in the lower half of each word."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def q8_0(run, strip, i):
    scale = _half(run)
    return scale, 0, scale, 0


@triton.jit
def q4_0(run, strip, i):
    return q8_0(run, strip, i)


@triton.jit
def q5_0(run, strip, i):
    return q8_0(run, strip, i)


@triton.jit
def iq4_nl(run, strip, i):
    return q8_0(run, strip, i)


@triton.jit
def q4_1(run, strip, i):
    scale, least = _half(run), _half(run >> 16)
    return scale, least, scale, least


@triton.jit
def q5_1(run, strip, i):
    return q4_1(run, strip, i)


@triton.jit
def mxfp4(run, strip, i):
    exponent = run.to(tl.int32)
    # 2**(e - 128); the two smallest are denormal
    bits = tl.where(exponent < 2, 0x00200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
    scale = bits.to(tl.float32, bitcast=True)
    return scale, 0, scale, 0


@triton.jit
def iq4_xs(run, strip, i):
    first, low = strip
    six = ((low >> (4 * i)) & 15) | (((first >> (16 + 2 * i)) & 3) << 4)
    scale = _half(first) * (six.to(tl.int32) - 32).to(tl.float32)
    return scale, 0, scale, 0


@triton.jit
def q4_k(run, strip, i):
    both, s0, s1, s2 = strip
    at = 8 * (i % 4)
    scales = tl.where(i < 4, s0 >> at, ((s2 >> at) & 15) | (((s0 >> at) >> 2) & 0x30))
    mins = tl.where(i < 4, s1 >> at, (((s2 >> at) >> 4) & 15) | (((s1 >> at) >> 2) & 0x30))
    scale = _half(both) * _small(scales & 63)
    offset = -_half(both >> 16) * _small(mins & 63)
    return scale, offset, scale, offset


@triton.jit
def q5_k(run, strip, i):
    return q4_k(run, strip, i)


@triton.jit
def q6_k(run, strip, i):
    d = _half(strip[0])
    return d * _small_signed(run), 0, d * _small_signed(run >> 8), 0


@triton.jit
def q2_k(run, strip, i):
    d, minus_d_min = _half(strip[0]), -_half(strip[0] >> 16)
    first = d * _small(run & 15), minus_d_min * _small((run >> 4) & 15)
    return first[0], first[1], d * _small((run >> 8) & 15), minus_d_min * _small((run >> 12) & 15)


@triton.jit
def q3_k(run, strip, i):
    w0, w1, w2, both = strip
    # Of the 16 scales, 2 * i and 2 * i + 1: four low bits in the first eight bytes, two high ones in the last four.
    low = tl.where(i % 4 < 2, w0, w1) >> (16 * (i % 2) + 4 * (i // 4))
    high = w2 >> (16 * (i % 2) + 2 * (i // 2))
    d = _half(both)
    first = (low & 15) | ((high & 3) << 4)
    second = ((low >> 8) & 15) | (((high >> 8) & 3) << 4)
    return d * (_small(first) - 32.0), 0, d * (_small(second) - 32.0), 0


@triton.jit
def fp8(run, strip, i):
    scale = strip[0].to(tl.float32, bitcast=True)
    return scale, 0, scale, 0


_ALL = (q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, iq4_xs, mxfp4, q4_k, q5_k, q6_k, q2_k, q3_k, fp8)
#: format -> its function of scales, by which kernels know the format
DECODERS: Table[Any] = Table("triton", "format", {decode.__name__.upper(): decode for decode in _ALL}, FORMATS)


_FROM_BYTE = tl.constexpr("{ .reg .b32 t; prmt.b32 t, 0x4B000000, $1, 0x3004; add.f32 $0, t, 0fCB000000; }")


@triton.jit
def _small(word):
    """A whole number below 256 in the lowest byte, as float32.

    The conversion unit is a fraction of the others' width: 2**23 + b is the float32 of first byte b and fourth 0x4B.
    """
    if HAS_ASM:
        return tl.inline_asm_elementwise(
            _FROM_BYTE, "=r,r", [word.to(tl.uint32)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return (word & 0xFF).to(tl.float32)


@triton.jit
def _small_signed(word):
    """The lowest byte with its sign, as float32."""
    return _small(word ^ 0x80) - 128.0


# ---- Codes in words ----

_FROM_E4M3 = tl.constexpr(
    "{ .reg .b16 l, h, a, b; .reg .b32 p; mov.b32 {l, h}, $4;"
    " cvt.rn.f16x2.e4m3x2 p, l; mov.b32 {a, b}, p; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;"
    " cvt.rn.f16x2.e4m3x2 p, h; mov.b32 {a, b}, p; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }"
)


@triton.jit
def _four_e4m3(codes):
    """The four bytes of words as numbers, without their scale: four of float32."""
    if HAS_ASM and cuda_capability_geq(8, 9):
        return tl.inline_asm_elementwise(
            _FROM_E4M3,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        return _one_e4m3(codes), _one_e4m3(codes >> 8), _one_e4m3(codes >> 16), _one_e4m3(codes >> 24)


@triton.jit
def _one_e4m3(codes):
    """The lowest byte: exponent and mantissa go where float32 has them. Denormal numbers are whole ones over 512."""
    size = codes & 0x7F
    number = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 8, size.to(tl.float32) * 0.001953125, number)
    number = tl.where(size == 0x7F, float("nan"), number)
    return tl.where((codes & 0x80) != 0, -number, number)


@triton.constexpr_function
def _table_words(decode):
    """The 16 bytes of a format's codes, in words."""
    codes = [value & 0xFF for value in _kind(decode).codes]
    return [sum(codes[4 * i + j] << (8 * j) for j in range(4)) for i in range(4)]


@triton.constexpr_function
def _has_table(decode):
    return bool(_kind(decode).codes)


@triton.constexpr_function
def _lookup_lines(tables: list[int], given: str, found: tuple[str, ...]) -> list[str]:
    """Instructions that look four nibbles of a register up in a table of 16 bytes, for each register of ``found``.

    A byte permutation finds one of eight by the three lower bits of a nibble; another chooses by the fourth between
    what was found in the two halves of the table.
    """
    lines = [f"and.b32 s, {given}, 0x77777777;", f"and.b32 c, {given}, 0x88888888;", "shr.b32 c, c, 1;"]
    lines.append("or.b32 c, c, 0x32103210;")
    for i, out in enumerate(found):
        if i:
            lines += ["shr.b32 s, s, 16;", "shr.b32 c, c, 16;"]
        lines.append(f"prmt.b32 l, {tables[0]}, {tables[1]}, s;")
        lines.append(f"prmt.b32 h, {tables[2]}, {tables[3]}, s;")
        lines.append(f"prmt.b32 {out}, l, h, c;")
    return lines


@triton.constexpr_function
def _lookup_asm(tables):
    lines = [".reg .b32 s, c, l, h, a, b;", *_lookup_lines(tables, "$2", ("a", "b"))]
    return "{" + " ".join([*lines, "prmt.b32 $0, a, b, 0x6420;", "prmt.b32 $1, a, b, 0x7531;"]) + "}"


@triton.jit
def _looked_up(q, DECODE: tl.constexpr):
    """What the low and the high halves of the four bytes of words stand for: two words of bytes."""
    TABLES: tl.constexpr = _table_words(DECODE)
    if HAS_ASM:
        low, high = tl.inline_asm_elementwise(
            _lookup_asm(TABLES), "=&r,=&r,r", [q], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1
        )
    else:
        low, high = tl.zeros(q.shape, tl.uint32), tl.zeros(q.shape, tl.uint32)
        for i in tl.static_range(4):
            low |= _code_byte((q >> (8 * i)) & 15, TABLES) << (8 * i)
            high |= _code_byte((q >> (8 * i + 4)) & 15, TABLES) << (8 * i)
    return low, high


@triton.jit
def _code_byte(q, TABLES: tl.constexpr):
    """A byte of a table of 16."""
    a, b = tl.full(q.shape, TABLES[0], tl.uint32), tl.full(q.shape, TABLES[1], tl.uint32)
    c, d = tl.full(q.shape, TABLES[2], tl.uint32), tl.full(q.shape, TABLES[3], tl.uint32)
    word = tl.where(q < 4, a, tl.where(q < 8, b, tl.where(q < 12, c, d)))
    return (word >> (8 * (q % 4))) & 0xFF


@triton.jit
def _high_word(high, word, s: tl.constexpr, DECODE: tl.constexpr):
    """The high bits of slot s of words ``word`` of runs, where the codes have them: they stand above the base's.

    ``high``: the run's one or two words of the plane.
    """
    BASE: tl.constexpr = base_bits(DECODE)
    HIGH: tl.constexpr = high_bits(DECODE)
    slot = word * (8 // BASE) + s
    if HIGH == 1:
        bits = high[0] >> slot
    else:
        bits = tl.where(slot < 4, high[0], high[1]) >> (2 * (slot % 4))
    return (bits & _mask(HIGH)) << BASE


@triton.jit
def word_codes(q, high, word, DECODE: tl.constexpr):
    """The codes of the slots of words q, which are words ``word`` of runs: a tuple of words of bytes, slot by slot."""
    BASE: tl.constexpr = base_bits(DECODE)
    if _has_table(DECODE):
        found = _looked_up(q, DECODE)
    elif BASE == 8:
        found = (q,)
    elif BASE == 4:
        found = q & _mask(4), (q >> 4) & _mask(4)
    else:
        found = q & _mask(2), (q >> 2) & _mask(2), (q >> 4) & _mask(2), (q >> 6) & _mask(2)
    if high_bits(DECODE):
        with_high = (found[0] | _high_word(high, word, 0, DECODE),)
        for s in tl.static_range(1, 8 // BASE):
            with_high = with_high + (found[s] | _high_word(high, word, s, DECODE),)  # noqa: RUF005
        found = with_high
    return found


# ---- One row times rows in planes ----


@triton.jit
def _strip_words(ptr, at, BYTES: tl.constexpr):
    """The words of units ``at`` [R, A, B] of a plane of BYTES a unit, in as few loads as there can be."""
    words = ptr.to(tl.pointer_type(tl.uint32))
    if BYTES == 2:
        found = (tl.load(ptr.to(tl.pointer_type(tl.uint16)) + at).to(tl.uint32),)
    elif BYTES == 4:
        found = (tl.load(words + at),)
    elif BYTES == 8:
        both = tl.load(ptr.to(tl.pointer_type(tl.uint64)) + at)
        found = both.to(tl.uint32), (both >> 32).to(tl.uint32)
    elif BYTES == 12:
        found = tl.load(words + 3 * at), tl.load(words + 3 * at + 1), tl.load(words + 3 * at + 2)
    else:
        four = tl.load(words[:, :, :, None] + (4 * at)[:, :, :, None] + tl.arange(0, 4)[None, None, None, :])
        found = _four(tl.reshape(four, [at.shape[0], at.shape[1], at.shape[2], 2, 2]))
    return found


@triton.constexpr_function
def run_type(decode):
    return {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}[run_bytes(decode)]


@triton.jit
def plane_at(rows, R, i: tl.constexpr, DECODE: tl.constexpr):
    """The first byte of the i-th plane of a matrix of ``rows`` rows of R runs: base, high, runs, and two of strips.

    64 bits wide: the output layer of a model may have more than 2 GiB. Words are counted in 32.
    """
    runs = (rows * R).to(tl.int64)
    found = runs * 0
    if i > 0:
        found = runs * (4 * base_bits(DECODE))
    if i > 1:
        found += runs * (4 * high_bits(DECODE))
    if i > 2:
        found += runs * run_bytes(DECODE)
    if i > 3:
        found += runs // strip_runs(DECODE) * strip_bytes_of(DECODE, 0)
    return found


@triton.jit
def _strips(ptr, rows, R, at_strip, DECODE: tl.constexpr):
    """The words of the planes of strips, of those at ``at_strip`` (row times strips of a row, and the strip)."""
    found = ()
    if strip_bytes_of(DECODE, 0) > 0:
        found = _strip_words(ptr + plane_at(rows, R, 3, DECODE), at_strip, strip_bytes_of(DECODE, 0))
        if strip_bytes_of(DECODE, 1) > 0:
            begin = ptr + plane_at(rows, R, 4, DECODE)
            found = found + _strip_words(begin, at_strip, strip_bytes_of(DECODE, 1))
    return found


@triton.jit
def load_runs(matrix, row, start, K, RUNS: tl.constexpr, DECODE: tl.constexpr):
    """RUNS runs from value ``start`` on of rows [A, B] of matrices in planes; nothing from K on.

    ``matrix``: pointers to matrices [A], and the rows that each has; none has 8 GiB. Words [RUNS, A, B, base],
    those of the high plane and scales [RUNS, A, B]. Runs stand first, so that lanes have those of one row, which lie
    together, and a thread has a run of many rows.
    """
    ptr, rows = matrix
    R = K // 32
    first = start // 32 + tl.arange(0, RUNS)
    # Past the end the last run's scales are read again, and multiplied by zeros.
    run = tl.minimum(first, R - 1)[:, None, None]
    inside = (first < R)[:, None, None]
    ptr = ptr[None, :, None]
    at = (row * R)[None, :, :] + run
    BASE: tl.constexpr = base_bits(DECODE)
    words = ptr.to(tl.pointer_type(tl.uint32))
    word = tl.arange(0, BASE)[None, None, None, :]
    q = tl.load(words[:, :, :, None] + (at * BASE)[:, :, :, None] + word, mask=inside[:, :, :, None], other=0)
    high = ()
    above = (ptr + plane_at(rows, R, 1, DECODE)).to(tl.pointer_type(tl.uint32))
    if high_bits(DECODE) == 1:
        high = (tl.load(above + at, mask=inside, other=0),)
    elif high_bits(DECODE) == 2:
        both = tl.load(above.to(tl.pointer_type(tl.uint64)) + at, mask=inside, other=0)
        high = both.to(tl.uint32), (both >> 32).to(tl.uint32)
    of_run = 0
    if run_bytes(DECODE) > 0:
        scales = (ptr + plane_at(rows, R, 2, DECODE)).to(tl.pointer_type(run_type(DECODE)))
        of_run = tl.load(scales + at).to(tl.uint32)
    STRIP_RUNS: tl.constexpr = strip_runs(DECODE)
    at_strip = (row * (R // STRIP_RUNS))[None, :, :] + run // STRIP_RUNS
    return q, high, of_run, _strips(ptr, rows, R, at_strip, DECODE)


@triton.jit
def _four(x):
    """The four parts of the last dimension [.., 2, 2]."""
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _by_slot(x, RUNS: tl.constexpr, A: tl.constexpr, BASE: tl.constexpr):
    """[RUNS, A, 8] by words of the base plane: as many [RUNS, A, 1, base] as these have slots."""
    if BASE == 8:
        found = (tl.reshape(x, [RUNS, A, 1, 8]),)
    elif BASE == 4:
        a, b = tl.split(tl.reshape(x, [RUNS, A, 1, 4, 2]))
        found = (a, b)
    else:
        found = _four(tl.reshape(x, [RUNS, A, 1, 2, 2, 2]))
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
    b0, b1, b2, b3 = _four(tl.reshape(whole & 0xFF, [RUNS, A, 8, 2, 2]))
    words = b0 | (b1 << 8) | (b2 << 16) | (b3 << 24)
    return _by_slot(words, RUNS, A, BASE), (factor[:, :, None],), _sub_sums(whole, RUNS, A, SUB)


@triton.jit
def _x_exact(x, RUNS: tl.constexpr, A: tl.constexpr, BASE: tl.constexpr, SUB: tl.constexpr):
    """Likewise x unrounded: four numbers of each slot, 1.0, and their sums."""
    b0, b1, b2, b3 = _four(tl.reshape(x, [RUNS, A, 8, 2, 2]))
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
    SIGNED: tl.constexpr = _signed(DECODE)
    if ROUNDED:
        found = tl.zeros(shape, tl.int32)
        for s in tl.static_range(SLOTS):
            found = _dot4(codes[s], x[s], found, SIGNED)
    else:
        found = tl.zeros(shape, tl.float32)
        for s in tl.static_range(SLOTS):
            code = codes[s] ^ 0x80808080 if SIGNED else codes[s]
            for i in tl.static_range(4):
                number = _small(code >> (8 * i))
                if SIGNED:
                    number -= 128.0
                found += number * x[i][s]
    return found


@triton.jit
def _by_fours(x):
    """Words [RUNS, A, B, 8] by fours, which a thread has together: four of [RUNS, A, B, 2]."""
    return _four(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2], 2, 2, 2]))


@triton.jit
def _e4m3_sums(codes, x):
    """Codes in words [RUNS, A, B, 8] times x, as `_x_exact` gives it: [RUNS, A, B, 2] float32."""
    words = _by_fours(codes)
    x0, x1, x2, x3 = _by_fours(x[0][0]), _by_fours(x[1][0]), _by_fours(x[2][0]), _by_fours(x[3][0])
    found = tl.zeros(words[0].shape, tl.float32)
    for i in tl.static_range(4):
        a, b, c, d = _four_e4m3(words[i])
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
    codes = word_codes(q, _for_words(high, DECODE), word, DECODE)
    shape: tl.constexpr = [RUNS, total.shape[1], q.shape[2], BASE]
    sums = _sums(codes, slots, shape, _rounds(DECODE, ROUNDED), DECODE)
    i = ((start // 32 + tl.arange(0, RUNS)) % 8).to(tl.uint32)[:, None, None]
    scale_a, offset_a, scale_b, offset_b = DECODE(of_run, strip, i)
    if sub_values(DECODE) == 16 or len(factors) == 2:
        factor_a, factor_b = factors[0], factors[len(factors) - 1]
        sum_a, sum_b = x_sums
        halves: tl.constexpr = [RUNS, total.shape[1], q.shape[2], 2, BASE // 2]
        a, b = tl.split(tl.sum(tl.reshape(sums, halves), 4))
        if _bias(DECODE) != 0:
            a -= _bias(DECODE) * sum_a
            b -= _bias(DECODE) * sum_b
        total += (scale_a * factor_a) * a.to(tl.float32) + (scale_b * factor_b) * b.to(tl.float32)
        if _has_minima(DECODE):
            total += (offset_a * factor_a) * sum_a.to(tl.float32) + (offset_b * factor_b) * sum_b.to(tl.float32)
    else:
        factor, x_sum = factors[0], x_sums[0]
        a = tl.sum(sums, 3)
        if _bias(DECODE) != 0:
            a -= _bias(DECODE) * x_sum
        total += (scale_a * factor) * a.to(tl.float32)
        if _has_minima(DECODE):
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
    return (_x_rounded if _rounds(DECODE, ROUNDED) else _x_exact)(x, RUNS, A, base_bits(DECODE), sub_values(DECODE))


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
    return (_e4m3_step if _in_e4m3(DECODE) else _step)(loaded, x, start, total, ROUNDED, DECODE)


@triton.jit
def _no_sums(RUNS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, DECODE: tl.constexpr):
    if DECODE is not None and _in_e4m3(DECODE):
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
        AHEAD: tl.constexpr = _in_e4m3(DECODE) or (_rounds(DECODE, ROUNDED) and A <= 2)
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


# ---- Tiles of numbers for products ----


@triton.constexpr_function
def _zero(decode, asm):
    """How far above what it stands for a code is, as decoders have it: a byte without sign, above 128 or 32768."""
    kind = _kind(decode)
    if kind.e4m3:
        return 0
    if kind.signed:
        return 128 + (32768 if asm else 0)
    return kind.bias + (128 if asm else 0)


@triton.jit
def factors(scale, offset, DECODE: tl.constexpr, ASM: tl.constexpr):
    """Scale, and offset for codes as decoders have them."""
    ZERO: tl.constexpr = _zero(DECODE, ASM)
    if _has_minima(DECODE):
        found = offset - ZERO * scale
    else:
        found = -ZERO * scale
    return scale, found


@triton.constexpr_function
def _number_asm(decode, i):
    select = f"0x47000000, 0x74{i}4" if _kind(decode).signed else f"0x43000000, 0x7{i}44"
    return f"{{ .reg .b32 f; prmt.b32 f, $1, {select}; fma.rn.f32 $0, f, $2, $3; }}"


@triton.jit
def _number(codes, i: tl.constexpr, scale, offset, DECODE: tl.constexpr):
    """The i-th of the four codes of words as numbers, with what `factors` made of scale and offset.

    128 + n is the float32 whose third byte is n and whose fourth is 0x43, for codes below 128; 32768 + n that of second
    byte n and fourth 0x47, for those of 8 bits: one byte permutation makes it.
    """
    if HAS_ASM:
        asm: tl.constexpr = _number_asm(DECODE, i)
        return tl.inline_asm_elementwise(
            asm, "=r,r,r,r", [codes, scale, offset], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return ((codes >> (8 * i)) & 0xFF).to(tl.float32) * scale + offset


@triton.jit
def _four_numbers(codes, scale, offset, DECODE: tl.constexpr):
    """The four codes of words as numbers: two more dimensions."""
    if _in_e4m3(DECODE):
        a, b, c, d = _four_e4m3(codes)
        a, b, c, d = a * scale, b * scale, c * scale, d * scale
    else:
        a, b = _number(codes, 0, scale, offset, DECODE), _number(codes, 1, scale, offset, DECODE)
        c, d = _number(codes, 2, scale, offset, DECODE), _number(codes, 3, scale, offset, DECODE)
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def decode_rows(loaded, start, dtype: tl.constexpr, DECODE: tl.constexpr):
    """What `load_runs` loaded from ``start`` on of one matrix's rows, as numbers: [rows, 32 * runs] of ``dtype``."""
    q, high, of_run, strip = loaded
    RUNS: tl.constexpr = q.shape[0]
    N: tl.constexpr = q.shape[2]
    BASE: tl.constexpr = base_bits(DECODE)
    SLOTS: tl.constexpr = 8 // BASE
    i = ((start // 32 + tl.arange(0, RUNS)) % 8).to(tl.uint32)[:, None, None]
    scale_a, offset_a, scale_b, offset_b = DECODE(of_run, strip, i)
    scale, offset = factors(scale_a, offset_a, DECODE, HAS_ASM)
    scale, offset = scale[:, :, :, None], offset[:, :, :, None]
    word = tl.arange(0, BASE).to(tl.uint32)[None, None, None, :]
    if sub_values(DECODE) == 16:
        scale_b, offset_b = factors(scale_b, offset_b, DECODE, HAS_ASM)
        first = word < BASE // 2
        scale = tl.where(first, scale, scale_b[:, :, :, None])
        offset = tl.where(first, offset, offset_b[:, :, :, None])
    codes = word_codes(q, _for_words(high, DECODE), word, DECODE)
    if _signed(DECODE):
        codes = _without_signs(codes)
    # [RUNS, 1, N, base, 2, 2] of each slot
    found = _four_numbers(codes[0], scale, offset, DECODE).to(dtype)
    if SLOTS == 1:
        found = tl.permute(found, [1, 2, 0, 3, 4, 5])
    elif SLOTS == 2:
        found = tl.join(found, _four_numbers(codes[1], scale, offset, DECODE).to(dtype))
        found = tl.permute(found, [1, 2, 0, 3, 6, 4, 5])
    else:
        second = _four_numbers(codes[1], scale, offset, DECODE).to(dtype)
        third = _four_numbers(codes[2], scale, offset, DECODE).to(dtype)
        fourth = _four_numbers(codes[3], scale, offset, DECODE).to(dtype)
        found = tl.join(tl.join(found, second), tl.join(third, fourth))
        found = tl.permute(found, [1, 2, 0, 3, 7, 6, 4, 5])
    return tl.reshape(found, [N, 32 * RUNS])


@triton.jit
def _without_signs(codes):
    """Bytes with a sign, 128 higher."""
    found = (codes[0] ^ 0x80808080,)
    if len(codes) == 2:
        found = found + (codes[1] ^ 0x80808080,)  # noqa: RUF005
    return found


@triton.jit
def _for_words(high, DECODE: tl.constexpr):
    """Words of the high plane [RUNS, A, B] beside words of the base plane."""
    found = ()
    if high_bits(DECODE) == 1:
        found = (high[0][:, :, :, None],)
    elif high_bits(DECODE) == 2:
        found = high[0][:, :, :, None], high[1][:, :, :, None]
    return found


@triton.jit
def chosen(choices, at):
    """By ``at`` one of one, two or four."""
    if len(choices) == 1:
        (found,) = choices
    elif len(choices) == 2:
        a, b = choices
        found = tl.where(at == 0, a, b)
    else:
        a, b, c, d = choices
        found = tl.where(at < 2, tl.where(at == 0, a, b), tl.where(at == 2, c, d))
    return found


@triton.jit
def eight_columns(x):
    """The eight columns of [N, 8]."""
    x = tl.reshape(x, [x.shape[0], 2, 2, 2])
    even, odd = tl.split(x)
    a, c, e, g = four_columns(even)
    b, d, f, h = four_columns(odd)
    return a, b, c, d, e, f, g, h


@triton.jit
def four_columns(x):
    """The four columns of [N, 2, 2]."""
    even, odd = tl.split(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.constexpr_function
def box_bytes(decode):
    """Bytes of a row that the copy engine brings at a time."""
    return 64 if base_bits(decode) == 2 else 128


@triton.constexpr_function
def _pairs_asm(decode, dtype):
    signed = _kind(decode).signed
    pair = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
    if _kind(decode).e4m3:
        lines = [".reg .b16 l, h, a, b; .reg .b32 p, f<4>; mov.b32 {l, h}, $2;"]
        for i, half in enumerate("lh"):
            lines.append(f"cvt.rn.f16x2.e4m3x2 p, {half}; mov.b32 {{a, b}}, p;")
            for j, one in enumerate("ab"):
                lines.append(f"cvt.f32.f16 f{2 * i + j}, {one}; mul.f32 f{2 * i + j}, f{2 * i + j}, $3;")
        lines += [f"cvt.rn.{pair}.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in range(2)]
        return "{" + " ".join(lines) + "}"
    lines = [".reg .b32 w, f<4>;", "xor.b32 w, $2, 0x80808080;" if signed else "mov.b32 w, $2;"]
    for i in range(4):
        lines.append(f"prmt.b32 f{i}, w, " + (f"0x47000000, 0x74{i}4;" if signed else f"0x43000000, 0x7{i}44;"))
        lines.append(f"fma.rn.f32 f{i}, f{i}, $3, $4;")
    lines += [f"cvt.rn.{pair}.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in range(2)]
    return "{" + " ".join(lines) + "}"


@triton.jit
def code_pairs(codes, scale, offset, dtype: tl.constexpr, DECODE: tl.constexpr):
    """Four codes in a word to two pairs of numbers of ``dtype`` in a word each, by instructions of the card.

    ``scale`` and ``offset`` are as `factors` makes them.
    """
    return tl.inline_asm_elementwise(
        _pairs_asm(DECODE, dtype),
        "=&r,=&r,r,r,r",
        [codes, scale, offset],
        dtype=(tl.uint32, tl.uint32),
        is_pure=True,
        pack=1,
    )


@triton.constexpr_function
def _pair_lookup_asm(decode):
    """Of four nibbles in a row what they stand for, 128 higher: see `_lookup_lines`."""
    tables = [word ^ 0x80808080 for word in _table_words(decode)]
    lines = [".reg .b32 s, c, l, h;", *_lookup_lines(tables, "$1", ("$0",))]
    return "{" + " ".join(lines) + "}"


@triton.jit
def _slot_bits(words, slot, BITS: tl.constexpr):
    """The BITS of slots of a plane, from the words that have them: one in each byte."""
    return (words >> (BITS * (slot % (8 // BITS)))) & _mask(BITS)


@triton.jit
def pair_codes(q, high, slot, pair, DECODE: tl.constexpr):
    """Words of bytes in which two are the codes of the first or the second ``pair`` of slots, and which two.

    ``q`` and ``high`` are the words of the planes that have a slot. Codes with a sign are 128 higher.
    """
    BASE: tl.constexpr = base_bits(DECODE)
    if _has_table(DECODE):
        # Half a word has the nibbles of a pair of two slots by turns.
        half = q >> (16 * pair)
        codes = tl.inline_asm_elementwise(
            _pair_lookup_asm(DECODE), "=&r,r", [half], dtype=tl.uint32, is_pure=True, pack=1
        )
        first = slot % 2 + 0 * pair
        second = first + 2
    else:
        if _in_e4m3(DECODE):
            codes = q
        elif BASE == 8:
            codes = q ^ 0x80808080
        else:
            codes = _slot_bits(q, slot, BASE)
        if high_bits(DECODE) > 0:
            codes |= _slot_bits(high, slot, high_bits(DECODE)) << BASE
        first = 2 * pair
        second = first + 1
    return codes, first, second


_PAIRS = {tl.bfloat16: "bf16x2", tl.float16: "f16x2"}


@triton.constexpr_function
def _number_pair_asm(decode, dtype):
    if _kind(decode).e4m3:
        lines = [".reg .b16 a, b; .reg .b32 p, f<2>; shr.b32 p, $1, $3; mov.b32 {a, b}, p;"]
        lines.append("cvt.rn.f16x2.e4m3x2 p, a; mov.b32 {a, b}, p; cvt.f32.f16 f0, a; cvt.f32.f16 f1, b;")
        lines += [f"mul.f32 f{i}, f{i}, $7;" for i in range(2)]
        return "{" + " ".join([*lines, f"cvt.rn.{_PAIRS[dtype]}.f32 $0, f1, f0;"]) + "}"
    most = "0x47000000" if _kind(decode).signed else "0x43000000"
    # Each operand comes twice, once for each number.
    lines = [".reg .b32 f<2>;"]
    for i in range(2):
        lines.append(f"prmt.b32 f{i}, $1, {most}, ${3 + 2 * i};")
        lines.append(f"fma.rn.f32 f{i}, f{i}, $7, $9;")
    return "{" + " ".join([*lines, f"cvt.rn.{_PAIRS[dtype]}.f32 $0, f1, f0;"]) + "}"


_TWICE_FIVE = tl.constexpr("=r" + ",r" * 10)


@triton.jit
def _twice(x, SHAPE: tl.constexpr):
    """[..] to [.., 2] of that shape."""
    return tl.broadcast_to(x[:, :, :, :, :, None], SHAPE)


@triton.jit
def number_pairs(codes, first, second, scale, offset, dtype: tl.constexpr, DECODE: tl.constexpr):
    """What `pair_codes` found as numbers: [.., 2] of ``dtype``. ``scale`` and ``offset`` are those of `factors`."""
    # By a byte permutation the float32 of a number and 128, or 32768 where codes have a sign: see `_number`.
    if _in_e4m3(DECODE):
        first = first * 8
    elif _signed(DECODE):
        first, second = first * 16 + 0x7404, second * 16 + 0x7404
    else:
        first, second = first * 256 + 0x7044, second * 256 + 0x7044
    SHAPE: tl.constexpr = [4, 8, 2, 2, 2, 2]
    operands = (_twice(codes, SHAPE), _twice(first, SHAPE), _twice(second, SHAPE))
    operands = operands + (_twice(scale, SHAPE), _twice(offset, SHAPE))  # noqa: RUF005
    ASM: tl.constexpr = _number_pair_asm(DECODE, dtype)
    if dtype == tl.bfloat16:
        found = tl.inline_asm_elementwise(ASM, _TWICE_FIVE, operands, dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        found = tl.inline_asm_elementwise(ASM, _TWICE_FIVE, operands, dtype=tl.float16, is_pure=True, pack=2)
    return found
