"""QuantTensor: weights that stay in their blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moefuse.quant.arrange import (
    FILE,
    INTERLEAVED,
    STRIPS_RULE,
    can_interleave,
    check_arrangement,
    rearrange_,
    rearranged,
    rows_of,
    wanted,
)
from moefuse.quant.blocks import unpack
from moefuse.quant.formats import format_of

_EXACT = ":exact"
_INTERLEAVED = f":{INTERLEAVED}"
# Values unpacked at a time: the float32 steps in between stay within a dozen MB, which caches can hold.
_CHUNK = 2**20
# Bytes that a GPU rearranges at a time for another device.
_MOVED = 2**26


@dataclass(frozen=True, eq=False, repr=False)
class QuantTensor:
    """A frozen tensor in GGUF blocks, byte for byte, usually a stack of experts ``[E, N, K]``.

    It takes the place of a weight in `moefuse.grouped_linear`, `moefuse.experts`, `moefuse.moe` and, as a matrix
    ``[N, K]``, in `moefuse.linear`. It is no parameter: gradients pass through it to the other inputs, never to it.

    Attributes:
        blocks: uint8 ``[E, N, bytes of a row]``; rows follow each other without gaps, experts at any stride.
        format: a name in `moefuse.quant.formats.FORMATS`; "q4_k" becomes "Q4_K".
        exact: keep activations in float32. Otherwise a backend may round them to 8 bits per block, for speed.
        arrangement: the order of bytes within each matrix, see `moefuse.quant.arrange`. "" is the file's own; `to`
            gives the one that the backend of a device reads.

    >>> blocks = torch.tensor([0, 60] + [1, 255] * 16, dtype=torch.uint8)  # scale 1, then 1, -1, 1, -1, ..
    >>> stack = QuantTensor(blocks.repeat(4, 2, 3), "Q8_0")
    >>> stack
    QuantTensor(Q8_0, shape=[4, 2, 96], device=cpu, 816 bytes)
    >>> stack[1].dequantize()[0, :4]
    tensor([ 1., -1.,  1., -1.])
    """

    blocks: Tensor
    format: str
    exact: bool = False
    arrangement: str = FILE

    def __post_init__(self) -> None:
        form = format_of(self.format)
        if form.name != self.format:
            object.__setattr__(self, "format", form.name)
        blocks = self.blocks
        check_arrangement(self.arrangement)
        if not isinstance(blocks, Tensor) or blocks.dtype != torch.uint8:
            got = blocks.dtype if isinstance(blocks, Tensor) else type(blocks).__name__
            raise TypeError(f"QuantTensor: blocks must be a uint8 tensor, got {got}")
        shape = blocks.shape
        if len(shape) < 1 or shape[-1] % form.nbytes:
            rule = f"rows of whole {self.format} blocks, a multiple of {form.nbytes} bytes"
            raise ValueError(f"QuantTensor: blocks must have {rule}, got shape {list(shape)}")
        if self.arrangement == INTERLEAVED and not (len(shape) > 1 and can_interleave(self.format, shape[-2])):
            raise ValueError(f"QuantTensor: {STRIPS_RULE}, got {self.format} and shape {list(shape)}")
        if blocks.is_contiguous():  # what all but slices are
            return
        gap = len(shape) > 1 and shape[-2] > 1 and blocks.stride(-2) != shape[-1]
        if blocks.stride(-1) != 1 or gap:
            raise ValueError(
                f"QuantTensor: rows of blocks must follow each other without gaps, got strides {blocks.stride()}"
            )

    @property
    def shape(self) -> torch.Size:
        """The logical shape, in weights."""
        form = format_of(self.format)
        return torch.Size((*self.blocks.shape[:-1], self.blocks.shape[-1] // form.nbytes * form.values))

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        return self.blocks.numel()

    @property
    def spec(self) -> str:
        """Format, arrangement and mode in one string, as an op's schema carries them; `wrap` is the way back."""
        order = f":{self.arrangement}" if self.arrangement else ""
        return self.format + order + _EXACT if self.exact else self.format + order

    def dim(self) -> int:
        return self.blocks.dim()

    def __len__(self) -> int:
        return self.blocks.shape[0]

    def __getitem__(self, index: int | slice) -> QuantTensor:
        """Experts by number or slice: a view. So are rows of a matrix, which are copied out of another arrangement."""
        if self.blocks.dim() < 2 or not isinstance(index, (int, slice)):
            raise TypeError(f"QuantTensor: experts are taken by number or slice, got {index!r} of {self}")
        if self.arrangement == FILE or self.blocks.dim() > 2:
            return replace(self, blocks=self.blocks[index])
        if isinstance(index, slice):
            return self._rows(index)
        row = range(len(self))[index]
        rows = self._rows(slice(row, row + 1))
        return replace(rows, blocks=rows.blocks[0])

    def _rows(self, index: slice | Tensor) -> QuantTensor:
        """Rows of a matrix, which are few and so no longer interleaved."""
        order = FILE if self.arrangement == INTERLEAVED else self.arrangement
        return replace(self, blocks=rows_of(self.blocks, self.format, self.arrangement, index), arrangement=order)

    def rows(self, ids: Tensor) -> QuantTensor:
        """Rows of a matrix ``[N, K]`` by their numbers, ``[.., K]``: a copy."""
        if self.blocks.dim() != 2:
            raise ValueError(f"QuantTensor: rows are taken of a matrix [N, K], got shape {list(self.shape)}")
        return self._rows(ids)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> QuantTensor:
        """On another device, arranged as its backend reads blocks.

        There is no other type to move to: see `dequantize`.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"QuantTensor: to() takes a device, got {device}; dequantize() gives numbers")
        if self.blocks.is_cuda and self.arrangement != FILE and torch.device(device).type != "cuda":
            return self._from_gpu(torch.device(device))
        # Only a GPU waits for a copy by itself before it rearranges.
        moved = self.blocks.to(device, non_blocking=non_blocking and self.arrangement == FILE)
        order = wanted(moved, self.arrangement)
        if order == self.arrangement:
            return replace(self, blocks=moved)
        if moved.device == self.device:
            return self.arranged(order)
        return arrange_(replace(self, blocks=moved), order)

    def _from_gpu(self, device: torch.device) -> QuantTensor:
        """In the file's order on another device: rearranged by the GPU, which is faster, some matrices at a time."""
        made = torch.empty(self.blocks.shape, dtype=torch.uint8, device=device)
        most = max(1, _MOVED * len(self) // max(1, self.nbytes)) if self.dim() > 2 else max(1, len(self))
        for into, part in zip(torch.split(made, most), torch.split(self.blocks, most), strict=True):
            into.copy_(rearranged(part, self.format, self.arrangement, FILE))
        return replace(self, blocks=made, arrangement=FILE)

    def arranged(self, arrangement: str) -> QuantTensor:
        """The same weights in another arrangement, in memory of their own; itself where it has it already."""
        if arrangement == self.arrangement:
            return self
        check_arrangement(arrangement)
        blocks = rearranged(self.blocks, self.format, self.arrangement, arrangement)
        return replace(self, blocks=blocks, arrangement=arrangement)

    def exactly(self, exact: bool = True) -> QuantTensor:
        """The same blocks with activations kept in float32."""
        return replace(self, exact=exact)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, in a tensor of their own: several times the memory of the blocks."""
        if self.blocks.dim() < 2 or self.shape.numel() <= _CHUNK:
            return unpack(self.blocks, self.format, self.arrangement).to(dtype)
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        if self.blocks.dim() > 2:
            for e in range(len(self)):
                out[e] = self[e].dequantize(dtype)
            return out
        rows = max(_CHUNK // max(out.shape[1], 1), 1)
        for start in range(0, out.shape[0], rows):
            part = self[start : start + rows]
            out[start : start + rows] = unpack(part.blocks, part.format, part.arrangement)
        return out

    def __repr__(self) -> str:
        order = f", {self.arrangement}" if self.arrangement else ""
        mode = ", exact" if self.exact else ""
        sizes = f"shape={list(self.shape)}, device={self.device}, {self.nbytes:,} bytes"
        return f"QuantTensor({self.format}, {sizes}{order}{mode})"


def arrange_(weight: QuantTensor, arrangement: str) -> QuantTensor:
    """As `QuantTensor.arranged`, in the bytes themselves, which nobody else may be reading."""
    rearrange_(weight.blocks, weight.format, weight.arrangement, arrangement)
    return replace(weight, arrangement=arrangement)


def wrap(weight: Tensor, spec: str | None) -> Tensor | QuantTensor:
    """A weight from what an op's schema carries: the tensor itself, or blocks and their `QuantTensor.spec`."""
    if spec is None:
        return weight
    return QuantTensor(weight, format_in(spec), spec.endswith(_EXACT), order_in(spec))


def unwrap(weight: Any) -> tuple[Any, str | None]:
    """A weight as an op's schema carries it."""
    return (weight.blocks, weight.spec) if isinstance(weight, QuantTensor) else (weight, None)


def spec_of(text: str) -> str:
    """A `QuantTensor.spec` as a user writes it.

    >>> spec_of("q4_k:exact")
    'Q4_K:exact'
    """
    name, colon, mode = text.partition(":")
    if colon + mode.lower() not in ("", _EXACT, _INTERLEAVED, _INTERLEAVED + _EXACT):
        raise ValueError(f"weights: a format may end in :interleaved, :exact or :interleaved:exact, got {text!r}")
    return format_of(name).name + colon + mode.lower()


def order_in(spec: str) -> str:
    """The arrangement in a `QuantTensor.spec`.

    >>> order_in("Q4_K:interleaved:exact"), order_in("Q4_K:exact")
    ('interleaved', '')
    """
    return spec.removesuffix(_EXACT).partition(":")[2]


def format_in(spec: str) -> str:
    """The format's name in a `QuantTensor.spec`."""
    return spec.partition(":")[0]


def in_file_order(spec: str) -> str:
    """A `QuantTensor.spec` without its arrangement.

    >>> in_file_order("Q4_K:planes:exact")
    'Q4_K:exact'
    """
    return format_in(spec) + (_EXACT if spec.endswith(_EXACT) else "")
