"""Arrangements: the order in which a backend wants the bytes of a matrix in blocks.

"" is the file's own order, rows of blocks. "planes" has each field of all blocks together, so that codes can be read in
aligned words. "interleaved" has 16 rows in turns, so that a vector's lanes are rows. Each is made from the others
without loss, of the same size; what lies beside a matrix in its stack is not touched.

In planes a code's low bits come first, then its high bits, then scales as stored, each ``[N, blocks of a row, bytes]``.
Values four apart share a byte: the first four fill the lowest bits of a word's bytes, the next four the bits above.

Interleaved, blocks at the same place of 16 rows stand together, field after field as in one block: first words of all
rows, then their second ones, ``[N / 16, blocks of a row, words of a field, 16, 4]``. A field of one or two bytes is a
word of that size.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from moefuse.quant.formats import FORMATS

FILE, PLANES, INTERLEAVED = "", "planes", "interleaved"
ARRANGEMENTS = (FILE, PLANES, INTERLEAVED)
#: device type -> what its backend reads; any other reads the file's own order
WANTED = {"cuda": PLANES}
#: device type -> what its backend reads as well, and faster, where somebody has asked for it
_TAKEN = {"cpu": INTERLEAVED}

# Bytes rearranged at a time: what caches hold, or what fills a GPU. A dozen times as many are in use meanwhile.
_CHUNK, _GPU_CHUNK = 2**19, 2**23
# How far apart values lie that share a byte of a plane.
_APART = 4
# Rows that are interleaved; a stack of gate and up is cut in the middle, and so has a multiple of twice as many.
_STRIP = 16
_STRIPS = 2 * _STRIP
STRIPS_RULE = f"interleaved rows must be a multiple of {_STRIPS} and not in FP8"


class Field(NamedTuple):
    """Bytes ``start`` to ``stop`` of a block.

    Of codes with less than eight ``bits``, values ``apart`` from each other share a byte, the first in the lowest bits;
    ``8 / bits * apart`` values later the next bytes begin.
    """

    start: int
    stop: int
    bits: int = 8
    apart: int = 1


#: the fields of each format in the order of their planes
FIELDS: dict[str, tuple[Field, ...]] = {
    "Q4_K": (Field(16, 144, 4, 32), Field(0, 16)),
    "Q6_K": (Field(0, 128, 4, 64), Field(128, 192, 2, 32), Field(192, 208), Field(208, 210)),
    "Q8_0": (Field(2, 34), Field(0, 2)),
    "Q4_0": (Field(2, 18, 4, 16), Field(0, 2)),
    "Q5_K": (Field(48, 176, 4, 32), Field(16, 48, 1, 32), Field(0, 16)),
    "Q5_0": (Field(6, 22, 4, 16), Field(2, 6, 1, 1), Field(0, 2)),
    "Q5_1": (Field(8, 24, 4, 16), Field(4, 8, 1, 1), Field(0, 4)),
    "Q4_1": (Field(4, 20, 4, 16), Field(0, 4)),
    "IQ4_NL": (Field(2, 18, 4, 16), Field(0, 2)),
    "IQ4_XS": (Field(8, 136, 4, 16), Field(0, 8)),
    "MXFP4": (Field(1, 17, 4, 16), Field(0, 1)),
    "Q2_K": (Field(16, 80, 2, 32), Field(0, 16), Field(80, 84)),
    "Q3_K": (Field(32, 96, 2, 32), Field(0, 32, 1, 32), Field(96, 108), Field(108, 110)),
    "FP8": (Field(4, 132), Field(0, 4)),
}


def wanted(blocks: Tensor, now: str = FILE) -> str:
    """The arrangement that the backend of these bytes' device reads: the one they have ``now`` where it takes that."""
    device = blocks.device.type
    return now if _TAKEN.get(device) == now else WANTED.get(device, FILE)


def can_interleave(name: str, rows: int) -> bool:
    """Whether a matrix of so many rows can be interleaved. FP8 is read by rows, as its codes are no integers."""
    return rows % _STRIPS == 0 and name != "FP8"


def check_arrangement(name: object) -> None:
    if name not in ARRANGEMENTS:
        raise ValueError(f"QuantTensor: arrangement must be one of {', '.join(map(repr, ARRANGEMENTS))}, got {name!r}")


def rearranged(blocks: Tensor, name: str, before: str, after: str) -> Tensor:
    """``[.., N, row bytes]`` of a format in another arrangement: dense memory of its own."""
    made = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    _fill(made, blocks, name, before, after)
    return made


def rearrange_(blocks: Tensor, name: str, before: str, after: str) -> None:
    """The same in place, with memory for a few matrices beside it."""
    if before != after:
        _fill(blocks, blocks, name, before, after)


def rows_of(blocks: Tensor, name: str, arrangement: str, index: slice | Tensor) -> Tensor:
    """Rows of a matrix ``[N, row bytes]``, a slice of them or by their numbers ``[.., n]``: in planes where it lies in
    planes, else in the file's order."""

    def rows(matrix: Tensor) -> Tensor:
        return embedding(index, matrix) if isinstance(index, Tensor) else matrix[index]

    if arrangement == FILE:
        return rows(blocks)
    if arrangement == INTERLEAVED:
        return _rows_of_strips(blocks, name, index)
    parts = [rows(view.flatten(1)) for view in _views(blocks, name, arrangement)]
    if parts[0].dim() < 2:
        return torch.cat(parts)
    shape = (*parts[0].shape[:-1], blocks.shape[1])
    return torch.cat([part.flatten(-2) for part in parts], -1).view(shape)


def fields_of(rows: Tensor, name: str, arrangement: str) -> list[Tensor]:
    """The fields of ``[.., row bytes]``, of each block after the other: codes one to a byte, ``[B, values]``, and what
    else is stored, ``[B, bytes]``."""
    rows = rows[None] if rows.dim() < 2 else rows
    if arrangement == INTERLEAVED:
        rows, arrangement = rearranged(rows, name, INTERLEAVED, FILE), FILE
    views = zip(FIELDS[name], _views(rows, name, arrangement), strict=True)
    return [
        split(view.flatten(0, -2), field.bits, field.apart if arrangement == FILE else _APART) for field, view in views
    ]


def split(data: Tensor, bits: int, apart: int) -> Tensor:
    """Codes of so many bits from bytes ``[B, n]``, one to a byte, in the order of their values; see `Field`."""
    if bits == 8:
        return data
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    codes: Tensor = _cut(data, 1, apart) >> shifts[:, None] & (2**bits - 1)
    return codes.flatten(1)


def _fill(target: Tensor, source: Tensor, name: str, before: str, after: str) -> None:
    if INTERLEAVED in (before, after) and not can_interleave(name, source.shape[-2] if source.dim() > 1 else 1):
        raise ValueError(f"QuantTensor: {STRIPS_RULE}, got {name} and shape {list(source.shape)}")
    if source.numel() == 0 or source.is_meta:
        return
    if source.dim() > 3:
        for into, one in zip(target, source, strict=True):
            _fill(into, into if target is source else one, name, before, after)
        return
    if INTERLEAVED in (before, after):
        if before == PLANES:
            _fill(target, source, name, PLANES, FILE)
            source = target
        strips = max((_GPU_CHUNK if source.is_cuda else _CHUNK) // (_STRIP * source.shape[-1]), 1)
        for into, one in zip(_in_rows(target), _in_rows(source), strict=True):
            for new, old in zip(*(torch.split(t, strips * _STRIP) for t in (into, one)), strict=True):
                _fill_strips(new, old.clone() if target is source else old, name, inverse=before == INTERLEAVED)
        if after == PLANES:
            _fill(target, target, name, FILE, PLANES)
        return
    in_place = target is source
    while source.dim() < 3:
        target, source = target[None], source[None]
    chunk = _GPU_CHUNK if source.is_cuda else _CHUNK
    matrices, rows = (max(chunk // size, 1) for size in (source[0].numel(), source.shape[-1]))
    for into, part in zip(torch.split(target, matrices), torch.split(source, matrices), strict=True):
        old = _views(part.clone() if in_place else part, name, before)
        for field, there, here in zip(FIELDS[name], _views(into, name, after), old, strict=True):
            apart = [field.apart if order == FILE else _APART for order in (before, after)]
            for new, data in zip(torch.split(there, rows, 1), torch.split(here, rows, 1), strict=True):
                new.copy_(_repacked(data, field.bits, *apart))


def _in_rows(blocks: Tensor) -> tuple[Tensor, ...]:
    """Matrices as rows: all of a dense stack's together, for strips know no matrix."""
    return (blocks.view(-1, blocks.shape[-1]),) if blocks.is_contiguous() or blocks.dim() < 3 else blocks.unbind(0)


def _views(blocks: Tensor, name: str, arrangement: str) -> list[Tensor]:
    """Each field of ``[.., N, row bytes]`` where it lies: ``[.., N, blocks of a row, bytes of the field]``."""
    form, (*lead, N, row) = FORMATS[name], blocks.shape
    count, fields = row // form.nbytes, FIELDS[name]
    if arrangement == FILE:
        whole = _cut(blocks, form.nbytes)
        return [whole[..., field.start : field.stop] for field in fields]
    sizes = [N * count * (field.stop - field.start) for field in fields]
    planes = torch.split(blocks.flatten(-2), sizes, -1)
    return [plane.view(*lead, N, count, -1) for plane in planes]


def _strips(blocks: Tensor, name: str) -> list[tuple[Field, Tensor]]:
    """Each field of an interleaved matrix where it lies: ``[N / 16, blocks of a row, words, 16, bytes of a word]``."""
    form, (N, row) = FORMATS[name], blocks.shape
    count, made = row // form.nbytes, []
    for field in FIELDS[name]:
        size = min(4, field.stop - field.start)
        shape = (N // _STRIP, count, (field.stop - field.start) // size, _STRIP, size)
        strides = (_STRIP * row, _STRIP * form.nbytes, _STRIP * size, size, 1)
        view = blocks.as_strided(shape, strides, blocks.storage_offset() + _STRIP * field.start)
        made.append((field, view))
    return made


def _fill_strips(target: Tensor, source: Tensor, name: str, inverse: bool) -> None:
    """A matrix ``[N, row bytes]`` interleaved from the file's order, or the other way round."""
    form = FORMATS[name]
    for field, strips in _strips(source if inverse else target, name):
        N, count, words, rows, size = strips.shape
        there = _cut(target if inverse else source, form.nbytes)[..., field.start : field.stop]
        if inverse:
            there.copy_(strips.permute(0, 3, 1, 2, 4).reshape(there.shape))
        else:
            # Words are moved as such: a copy by bytes takes several times as long.
            word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
            data = there.contiguous().view(N, rows, count, words * size).view(word)
            strips.copy_(data.permute(0, 2, 3, 1).contiguous().unsqueeze(-1).view(torch.uint8))


def _rows_of_strips(blocks: Tensor, name: str, index: slice | Tensor) -> Tensor:
    """Rows of an interleaved matrix in the file's order."""
    form, (N, row) = FORMATS[name], blocks.shape
    numbers = torch.arange(N, device=blocks.device)
    numbers = numbers[index] if isinstance(index, slice) else embedding(index, numbers[:, None])[..., 0]
    made = blocks.new_empty((*numbers.shape, row))
    for field, strips in _strips(blocks, name):
        found = strips.permute(0, 3, 1, 2, 4)[numbers // _STRIP, numbers % _STRIP]
        _cut(made, form.nbytes)[..., field.start : field.stop] = found.flatten(-2)
    return made


def _cut(data: Tensor, *sizes: int) -> Tensor:
    """The last dimension in pieces of these sizes."""
    *lead, last = data.shape
    return data.view(*lead, last // math.prod(sizes), *sizes)


def _repacked(data: Tensor, bits: int, before: int, after: int) -> Tensor:
    """Bytes of codes ``[.., n]`` with other values together in a byte."""
    if bits == 8 or before == after:
        return data
    mask, shifts = 2**bits - 1, range(0, 8, bits)
    in_words = before % _APART == after % _APART == 0
    if in_words:  # four bytes at a time, which stay together; a copy, for a word wants an address of its own kind
        data = data.clone(memory_format=torch.contiguous_format).view(torch.int32)
        before, after, mask = before // _APART, after // _APART, mask * 0x01010101
    fields = _cut(data, before)
    codes = torch.stack([fields >> shift & mask for shift in shifts], -2)
    parts = _cut(codes.flatten(-3), len(shifts), after).unbind(-2)
    made: Tensor = functools.reduce(operator.or_, [part << shift for part, shift in zip(parts, shifts, strict=True)])
    return made.flatten(-2).view(torch.uint8) if in_words else made.flatten(-2)
