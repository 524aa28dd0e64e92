"""Blocks in planes to numbers in shared memory, on Hopper: 128 rows of 64 numbers at a time, a row a thread.

For a partition that decodes what others multiply. Codes come by the copy engine, a box at a time, scales by loads.
"""
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from moefuse.backends.triton.formats.blocks import (
    base_bits,
    four_parts,
    high_bits,
    plane_at,
    run_bytes,
    run_type,
    strip_bytes_of,
    strip_runs,
    sub_values,
    word_codes,
)
from moefuse.backends.triton.formats.numbers import box_bytes, chosen, code_pairs, eight_columns, factors
from moefuse.backends.triton.hopper import load_tile, reinterpret


@gluon.constexpr_function
def box_groups(decode):
    """Stages of 64 values that a box of blocks makes: 256 values, 128 where a code has 8 bits."""
    return 2 if base_bits(decode) == 8 else 4


@gluon.jit
def block_rows(w_ptr, u_ptr, places, GATED: gl.constexpr):
    """Of 128 rows in blocks, a row a thread: pointers to their matrices' first expert, and rows from column 0 on.

    8 gate and 8 up rows by turns if GATED. ``places``: first row and step of gate rows, then of up rows.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    r = gl.arange(0, 128, layout=gl.SliceLayout(1, layout))
    w_first, w_step, u_first, u_step = places
    if GATED:
        up = r // 8 % 2 == 1
        n = r // 16 * 8 + r % 8
        ptrs = gl.where(up, u_ptr, w_ptr)
        row = gl.where(up, u_first + n * u_step, w_first + n * w_step)
    else:
        ptrs = w_ptr + r.to(gl.int64) * 0
        row = w_first + r * w_step
    return ptrs, row


@gluon.jit
def bring_blocks(raw, slot, bar, w_desc, u_desc, expert, column, box, live, GATED: gl.constexpr, DECODE: gl.constexpr):
    """Ask for a box of the base plane of 128 rows from ``column`` on, gate rows first, if ``live``."""
    BOX: gl.constexpr = box_bytes(DECODE)
    mbarrier.expect(bar, 128 * BOX, pred=live)
    load_tile(w_desc, [expert, column, BOX * box], bar, raw.index(2 * slot), pred=live)
    second = column if GATED else column + 64
    load_tile(u_desc, [expert, second, BOX * box], bar, raw.index(2 * slot + 1), pred=live)


@gluon.jit
def block_words(raw, slot, GATED: gl.constexpr, DECODE: gl.constexpr):
    """What `bring_blocks` brought, in the order of `block_rows`: words [128, box]."""
    WORDS: gl.constexpr = box_bytes(DECODE) // 4
    layout: gl.constexpr = gl.NVMMASharedLayout(box_bytes(DECODE), 32, rank=2)
    words = reinterpret(raw, gl.uint32, [2, 128, WORDS], layout).index(slot)
    if GATED:
        turns: gl.constexpr = gl.BlockedLayout([1, 1, 1, WORDS], [2, 2, 8, 1], [4, 1, 1, 1], [3, 2, 1, 0])
        found = words.reshape([2, 8, 8, WORDS]).permute([1, 0, 2, 3]).load(turns).reshape([128, WORDS])
    else:
        found = words.load(gl.BlockedLayout([1, WORDS], [32, 1], [4, 1], [1, 0]))
    return found


@gluon.jit
def rows_of_plane(ptrs, at, dtype: gl.constexpr, COUNT: gl.constexpr):
    """COUNT elements from ``at`` [128] of a plane, a row a thread: [128, COUNT]."""
    layout: gl.constexpr = gl.BlockedLayout([1, COUNT], [32, 1], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    column = gl.arange(0, COUNT, layout=gl.SliceLayout(0, layout))[None, :]
    begin = gl.convert_layout(ptrs, rows).to(gl.pointer_type(dtype)) + gl.convert_layout(at, rows)
    return gl.load(begin[:, None] + column)


@gluon.jit
def bring_scales(ptrs, row, rows, box, K: gl.constexpr, DECODE: gl.constexpr):
    """High bits and scales of a box of blocks, a row a thread, as they lie in their planes: a tuple of [128, ..]."""
    R: gl.constexpr = K // 32
    RUNS: gl.constexpr = 2 * box_groups(DECODE)
    HIGH: gl.constexpr = high_bits(DECODE)
    row = row.to(gl.int64)
    found = ()
    if HIGH > 0:
        at = row * (R * HIGH) + box * (RUNS * HIGH)
        found = found + (rows_of_plane(ptrs + plane_at(rows, R, 1, DECODE), at, gl.uint32, RUNS * HIGH),)  # noqa: RUF005
    if run_bytes(DECODE) > 0:
        dtype: gl.constexpr = run_type(DECODE)
        found = found + (rows_of_plane(ptrs + plane_at(rows, R, 2, DECODE), row * R + box * RUNS, dtype, RUNS),)  # noqa: RUF005
    if strip_bytes_of(DECODE, 0) > 0:
        at = row * (R // strip_runs(DECODE)) + box
        found = found + rows_of_strips(ptrs + plane_at(rows, R, 3, DECODE), at, strip_bytes_of(DECODE, 0))
        if strip_bytes_of(DECODE, 1) > 0:
            found = found + rows_of_strips(ptrs + plane_at(rows, R, 4, DECODE), at, strip_bytes_of(DECODE, 1))
    return found


@gluon.jit
def rows_of_strips(ptrs, at, BYTES: gl.constexpr):
    """The BYTES of strips ``at`` [128] of a plane: a tuple of [128, words]."""
    if BYTES == 2:
        found = (rows_of_plane(ptrs, at, gl.uint16, 1),)
    elif BYTES == 12:
        a = rows_of_plane(ptrs, at * 3, gl.uint32, 1)
        b = rows_of_plane(ptrs, at * 3 + 1, gl.uint32, 1)
        found = (a, b, rows_of_plane(ptrs, at * 3 + 2, gl.uint32, 1))
    else:
        found = (rows_of_plane(ptrs, at * (BYTES // 4), gl.uint32, BYTES // 4),)
    return found


@gluon.jit
def _columns_of(x):
    """The columns of [128, 1, 2, 4, 8 or 16], each by row."""
    layout: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0]))
    COUNT: gl.constexpr = x.shape[1]
    if COUNT == 1:
        parts = (x.reshape([128]),)
    elif COUNT == 2:
        a, b = x.split()
        parts = (a, b)
    elif COUNT == 4:
        parts = four_parts(x.reshape([128, 2, 2]))
    elif COUNT == 8:
        parts = eight_columns(x)
    else:
        even, odd = x.reshape([128, 2, 8]).permute([0, 2, 1]).split()
        parts = eight_columns(even) + eight_columns(odd)
    found = ()
    for i in gl.static_range(COUNT):
        found = found + (gl.convert_layout(parts[i].to(gl.uint32), layout),)  # noqa: RUF005
    return found


@gluon.jit
def taken_apart(scales, DECODE: gl.constexpr):
    """What `bring_scales` brought, by columns: words of high bits, scales of runs, words of strips."""
    NEXT: gl.constexpr = 1 if high_bits(DECODE) > 0 else 0
    AFTER: gl.constexpr = NEXT + (1 if run_bytes(DECODE) > 0 else 0)
    high = ()
    if high_bits(DECODE) > 0:
        high = _columns_of(scales[0])
    runs = ()
    if run_bytes(DECODE) > 0:
        runs = _columns_of(scales[NEXT])
    strip = ()
    for i in gl.static_range(AFTER, len(scales)):
        strip = strip + _columns_of(scales[i])
    return high, runs, strip


@gluon.jit
def _spread(values, COLUMNS: gl.constexpr):
    """[128, COLUMNS], a row a thread: as many columns of each value."""
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    wide = ()
    for i in gl.static_range(len(values)):
        wide = wide + (gl.convert_layout(values[i], gl.SliceLayout(1, layout))[:, None],)  # noqa: RUF005
    return chosen(wide, column // (COLUMNS // len(values)))


@gluon.jit
def decode(q, known, i: gl.constexpr, run, w, DECODE: gl.constexpr):
    """The i-th 64 values of a box of blocks, from their words [128, 2 * base], into w [128, 64].

    ``run``: which of eight runs the first of them is.
    """
    high, runs, strip = known
    BASE: gl.constexpr = base_bits(DECODE)
    HIGH: gl.constexpr = high_bits(DECODE)
    SLOTS: gl.constexpr = 8 // BASE
    COLUMNS: gl.constexpr = 2 * BASE
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])
    word = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :] % BASE
    scales = ()
    offsets = ()
    for j in gl.static_range(2):
        of_run = 0
        if run_bytes(DECODE) > 0:
            of_run = runs[2 * i + j]
        scale_a, offset_a, scale_b, offset_b = DECODE(of_run, strip, run + j)
        scale_a, offset_a = factors(scale_a, offset_a, DECODE, True)
        scales = scales + (scale_a,)  # noqa: RUF005
        offsets = offsets + (offset_a,)  # noqa: RUF005
        if sub_values(DECODE) == 16:
            scale_b, offset_b = factors(scale_b, offset_b, DECODE, True)
            scales = scales + (scale_b,)  # noqa: RUF005
            offsets = offsets + (offset_b,)  # noqa: RUF005
    here = ()
    for h in gl.static_range(HIGH):
        pair = (high[HIGH * (2 * i) + h], high[HIGH * (2 * i + 1) + h])
        here = here + (_spread(pair, COLUMNS),)  # noqa: RUF005
    scale = _spread(scales, COLUMNS)
    offset = _spread(offsets, COLUMNS)
    codes = word_codes(gl.convert_layout(q, layout), here, word.to(gl.uint32), DECODE)
    a, b = code_pairs(codes[0], scale, offset, w.dtype, DECODE)
    found = gl.join(a, b)
    if SLOTS == 2:
        a, b = code_pairs(codes[1], scale, offset, w.dtype, DECODE)
        # [128, words, pairs, slots]
        found = gl.join(found, gl.join(a, b)).permute([0, 1, 3, 2])
    elif SLOTS == 4:
        a, b = code_pairs(codes[1], scale, offset, w.dtype, DECODE)
        second = gl.join(a, b)
        a, b = code_pairs(codes[2], scale, offset, w.dtype, DECODE)
        third = gl.join(a, b)
        a, b = code_pairs(codes[3], scale, offset, w.dtype, DECODE)
        # [128, words, pairs, odd or even slots, which two of them]
        found = gl.join(gl.join(found, second), gl.join(third, gl.join(a, b))).permute([0, 1, 4, 3, 2])
    pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    reinterpret(w, gl.uint32, [128, 32], pairs).store(found.reshape([128, 32]))


@gluon.jit
def pieces(q, DECODE: gl.constexpr):
    """The words of a box [128, box] by groups of 64 values."""
    first, second = q.reshape([128, 2, q.shape[1] // 2]).permute([0, 2, 1]).split()
    found = (first, second)
    if box_groups(DECODE) == 4:
        a, b = first.reshape([128, 2, q.shape[1] // 4]).permute([0, 2, 1]).split()
        c, d = second.reshape([128, 2, q.shape[1] // 4]).permute([0, 2, 1]).split()
        found = (a, b, c, d)
    return found
