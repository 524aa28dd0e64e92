"""Blocks in planes to tiles of numbers, in registers, for products on tensor cores."""
# ruff: noqa: SIM108  kernels branch when they are compiled
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from moefuse.backends.triton.formats.blocks import (
    HAS_ASM,
    base_bits,
    byte_mask,
    for_words,
    four_e4m3,
    four_parts,
    has_minima,
    has_table,
    high_bits,
    in_e4m3,
    is_signed,
    kind_of,
    lookup_lines,
    sub_values,
    table_words,
    word_codes,
)


@triton.constexpr_function
def _zero(decode, asm):
    """How far above what it stands for a code is, as decoders have it: a byte without sign, above 128 or 32768."""
    kind = kind_of(decode)
    if kind.e4m3:
        return 0
    if kind.signed:
        return 128 + (32768 if asm else 0)
    return kind.bias + (128 if asm else 0)


@triton.jit
def factors(scale, offset, DECODE: tl.constexpr, ASM: tl.constexpr):
    """Scale, and offset for codes as decoders have them."""
    ZERO: tl.constexpr = _zero(DECODE, ASM)
    if has_minima(DECODE):
        found = offset - ZERO * scale
    else:
        found = -ZERO * scale
    return scale, found


@triton.constexpr_function
def _number_asm(decode, i):
    select = f"0x47000000, 0x74{i}4" if kind_of(decode).signed else f"0x43000000, 0x7{i}44"
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
    if in_e4m3(DECODE):
        a, b, c, d = four_e4m3(codes)
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
    codes = word_codes(q, for_words(high, DECODE), word, DECODE)
    if is_signed(DECODE):
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
    a, c, e, g = four_parts(even)
    b, d, f, h = four_parts(odd)
    return a, b, c, d, e, f, g, h


@triton.constexpr_function
def box_bytes(decode):
    """Bytes of a row that the copy engine brings at a time."""
    return 64 if base_bits(decode) == 2 else 128


@triton.constexpr_function
def _pairs_asm(decode, dtype):
    signed = kind_of(decode).signed
    pair = "bf16x2" if dtype == tl.bfloat16 else "f16x2"
    if kind_of(decode).e4m3:
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
    """Of four nibbles in a row what they stand for, 128 higher: see `lookup_lines`."""
    tables = [word ^ 0x80808080 for word in table_words(decode)]
    lines = [".reg .b32 s, c, l, h;", *lookup_lines(tables, "$1", ("$0",))]
    return "{" + " ".join(lines) + "}"


@triton.jit
def _slot_bits(words, slot, BITS: tl.constexpr):
    """The BITS of slots of a plane, from the words that have them: one in each byte."""
    return (words >> (BITS * (slot % (8 // BITS)))) & byte_mask(BITS)


@triton.jit
def pair_codes(q, high, slot, pair, DECODE: tl.constexpr):
    """Words of bytes in which two are the codes of the first or the second ``pair`` of slots, and which two.

    ``q`` and ``high`` are the words of the planes that have a slot. Codes with a sign are 128 higher.
    """
    BASE: tl.constexpr = base_bits(DECODE)
    if has_table(DECODE):
        # Half a word has the nibbles of a pair of two slots by turns.
        half = q >> (16 * pair)
        codes = tl.inline_asm_elementwise(
            _pair_lookup_asm(DECODE), "=&r,r", [half], dtype=tl.uint32, is_pure=True, pack=1
        )
        first = slot % 2 + 0 * pair
        second = first + 2
    else:
        if in_e4m3(DECODE):
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
    if kind_of(decode).e4m3:
        lines = [".reg .b16 a, b; .reg .b32 p, f<2>; shr.b32 p, $1, $3; mov.b32 {a, b}, p;"]
        lines.append("cvt.rn.f16x2.e4m3x2 p, a; mov.b32 {a, b}, p; cvt.f32.f16 f0, a; cvt.f32.f16 f1, b;")
        lines += [f"mul.f32 f{i}, f{i}, $7;" for i in range(2)]
        return "{" + " ".join([*lines, f"cvt.rn.{_PAIRS[dtype]}.f32 $0, f1, f0;"]) + "}"
    most = "0x47000000" if kind_of(decode).signed else "0x43000000"
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
    if in_e4m3(DECODE):
        first = first * 8
    elif is_signed(DECODE):
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
