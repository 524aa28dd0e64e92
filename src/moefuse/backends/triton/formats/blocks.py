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

import triton
import triton.language as tl
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
def kind_of(decode):
    return KINDS[decode.__name__.upper()]


@triton.constexpr_function
def base_bits(decode):
    """Bits of a code in the base plane; numbers are read like codes of 8."""
    return 8 if decode is None else kind_of(decode).base


@triton.constexpr_function
def high_bits(decode):
    return kind_of(decode).high


@triton.constexpr_function
def code_bias(decode):
    return kind_of(decode).bias


@triton.constexpr_function
def has_minima(decode):
    return kind_of(decode).minima


@triton.constexpr_function
def is_signed(decode):
    return kind_of(decode).signed


@triton.constexpr_function
def in_e4m3(decode):
    return kind_of(decode).e4m3


@triton.constexpr_function
def rounds_x(decode, rounded):
    """Whether x is rounded to 8 bits for this format, if it may be: not where codes are no whole numbers."""
    return rounded and not kind_of(decode).e4m3


@triton.constexpr_function
def sub_values(decode):
    return kind_of(decode).sub


@triton.constexpr_function
def run_bytes(decode):
    return kind_of(decode).run_bytes


@triton.constexpr_function
def strip_runs(decode):
    return kind_of(decode).strip


@triton.constexpr_function
def strip_bytes_of(decode, i):
    """Bytes of the i-th plane of scales of strips; 0 where there is none."""
    return (*kind_of(decode).strip_bytes, 0, 0)[i]


@triton.constexpr_function
def byte_mask(bits):
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
    scale = _half(both) * small_number(scales & 63)
    offset = -_half(both >> 16) * small_number(mins & 63)
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
    first = d * small_number(run & 15), minus_d_min * small_number((run >> 4) & 15)
    return first[0], first[1], d * small_number((run >> 8) & 15), minus_d_min * small_number((run >> 12) & 15)


@triton.jit
def q3_k(run, strip, i):
    w0, w1, w2, both = strip
    # Of the 16 scales, 2 * i and 2 * i + 1: four low bits in the first eight bytes, two high ones in the last four.
    low = tl.where(i % 4 < 2, w0, w1) >> (16 * (i % 2) + 4 * (i // 4))
    high = w2 >> (16 * (i % 2) + 2 * (i // 2))
    d = _half(both)
    first = (low & 15) | ((high & 3) << 4)
    second = ((low >> 8) & 15) | (((high >> 8) & 3) << 4)
    return d * (small_number(first) - 32.0), 0, d * (small_number(second) - 32.0), 0


@triton.jit
def fp8(run, strip, i):
    scale = strip[0].to(tl.float32, bitcast=True)
    return scale, 0, scale, 0


_ALL = (q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, iq4_xs, mxfp4, q4_k, q5_k, q6_k, q2_k, q3_k, fp8)
#: format -> its function of scales, by which kernels know the format
DECODERS: Table[Any] = Table("triton", "format", {decode.__name__.upper(): decode for decode in _ALL}, FORMATS)


_FROM_BYTE = tl.constexpr("{ .reg .b32 t; prmt.b32 t, 0x4B000000, $1, 0x3004; add.f32 $0, t, 0fCB000000; }")


@triton.jit
def small_number(word):
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
    return small_number(word ^ 0x80) - 128.0


# ---- Codes in words ----

_FROM_E4M3 = tl.constexpr(
    "{ .reg .b16 l, h, a, b; .reg .b32 p; mov.b32 {l, h}, $4;"
    " cvt.rn.f16x2.e4m3x2 p, l; mov.b32 {a, b}, p; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;"
    " cvt.rn.f16x2.e4m3x2 p, h; mov.b32 {a, b}, p; cvt.f32.f16 $2, a; cvt.f32.f16 $3, b; }"
)


@triton.jit
def four_e4m3(codes):
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
def table_words(decode):
    """The 16 bytes of a format's codes, in words."""
    codes = [value & 0xFF for value in kind_of(decode).codes]
    return [sum(codes[4 * i + j] << (8 * j) for j in range(4)) for i in range(4)]


@triton.constexpr_function
def has_table(decode):
    return bool(kind_of(decode).codes)


@triton.constexpr_function
def lookup_lines(tables: list[int], given: str, found: tuple[str, ...]) -> list[str]:
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
    lines = [".reg .b32 s, c, l, h, a, b;", *lookup_lines(tables, "$2", ("a", "b"))]
    return "{" + " ".join([*lines, "prmt.b32 $0, a, b, 0x6420;", "prmt.b32 $1, a, b, 0x7531;"]) + "}"


@triton.jit
def _looked_up(q, DECODE: tl.constexpr):
    """What the low and the high halves of the four bytes of words stand for: two words of bytes."""
    TABLES: tl.constexpr = table_words(DECODE)
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
    return (bits & byte_mask(HIGH)) << BASE


@triton.jit
def word_codes(q, high, word, DECODE: tl.constexpr):
    """The codes of the slots of words q, which are words ``word`` of runs: a tuple of words of bytes, slot by slot."""
    BASE: tl.constexpr = base_bits(DECODE)
    if has_table(DECODE):
        found = _looked_up(q, DECODE)
    elif BASE == 8:
        found = (q,)
    elif BASE == 4:
        found = q & byte_mask(4), (q >> 4) & byte_mask(4)
    else:
        found = q & byte_mask(2), (q >> 2) & byte_mask(2), (q >> 4) & byte_mask(2), (q >> 6) & byte_mask(2)
    if high_bits(DECODE):
        with_high = (found[0] | _high_word(high, word, 0, DECODE),)
        for s in tl.static_range(1, 8 // BASE):
            with_high = with_high + (found[s] | _high_word(high, word, s, DECODE),)  # noqa: RUF005
        found = with_high
    return found


# ---- Where they lie in planes ----


@triton.jit
def four_parts(x):
    """The four parts of the last dimension [.., 2, 2]."""
    even, odd = tl.split(x)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


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
        found = four_parts(tl.reshape(four, [at.shape[0], at.shape[1], at.shape[2], 2, 2]))
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
def for_words(high, DECODE: tl.constexpr):
    """Words of the high plane [RUNS, A, B] beside words of the base plane."""
    found = ()
    if high_bits(DECODE) == 1:
        found = (high[0][:, :, :, None],)
    elif high_bits(DECODE) == 2:
        found = high[0][:, :, :, None], high[1][:, :, :, None]
    return found
