"""Blocks into planes by a kernel, from the file's order or interleaved, for experts that keep coming to the GPU."""

from __future__ import annotations

import triton
import triton.language as tl

from moefuse.backends.triton.runtime.launch import ceil_div, launch
from moefuse.quant.arrange import FIELDS, INTERLEAVED, PLANES
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor

_BLOCK = 1024
# Rows that are interleaved, and values of a plane that share a byte, as `moefuse.quant.arrange` has them.
_STRIP, _APART = tl.constexpr(16), tl.constexpr(4)


@triton.jit
def _planes_kernel(
    source_ptr,
    target_ptr,
    count,
    before,
    total,
    stride,
    NBYTES: tl.constexpr,
    START: tl.constexpr,
    LENGTH: tl.constexpr,
    BITS: tl.constexpr,
    APART: tl.constexpr,
    INTERLEAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """source [E, N, count blocks], target likewise in planes: the bytes of one field; grid: tiles of them, matrices.

    Of a matrix of ``stride`` bytes the field has ``total``, and the planes before it take ``before``.
    """
    matrix = tl.program_id(1).to(tl.int64) * stride
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < total
    byte, block = at % LENGTH, at // LENGTH
    column, row = block % count, block // count
    PER: tl.constexpr = 8 // BITS
    WORD: tl.constexpr = LENGTH if LENGTH < 4 else 4
    made = tl.zeros([BLOCK], tl.int32)
    for j in tl.static_range(PER):
        value = (byte // _APART * PER + j) * _APART + byte % _APART
        group, rest = value // (APART * PER), value % (APART * PER)
        if BITS == 8:
            found, shift = byte, byte * 0
        else:
            found, shift = group * APART + rest % APART, rest // APART * BITS
        if INTERLEAVES:
            strip = (row // _STRIP * count + column) * _STRIP * NBYTES + _STRIP * START
            place = strip + found // WORD * (_STRIP * WORD) + row % _STRIP * WORD + found % WORD
        else:
            place = (row * count + column) * NBYTES + START + found
        code = tl.load(source_ptr + matrix + place, mask, other=0).to(tl.int32)
        made |= ((code >> shift) & ((1 << BITS) - 1)) << (j * BITS)
    tl.store(target_ptr + matrix + before + at, made.to(tl.uint8), mask)


def arrange(target: QuantTensor, source: QuantTensor) -> bool:
    """Dense stacks into planes, from any other order; no other arrangement has a kernel here."""
    blocks = source.blocks
    if target.arrangement != PLANES or blocks.dim() != 3 or blocks[0].numel() >= 2**31:
        return False
    nbytes = FORMATS[source.format].nbytes
    E, N, row = blocks.shape
    count, before = row // nbytes, 0
    for field in FIELDS[source.format]:
        length = field.stop - field.start
        total = N * count * length
        launch(
            _planes_kernel, (ceil_div(total, _BLOCK), E), blocks, target.blocks, count, N * count * before, total,
            N * row, NBYTES=nbytes, START=field.start, LENGTH=length, BITS=field.bits, APART=field.apart,
            INTERLEAVES=source.arrangement == INTERLEAVED, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        before += length
    return True
