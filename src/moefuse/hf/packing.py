"""Experts of a family's own layout as stacks in blocks: rows along the input, gate before up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from moefuse.quant.encode import ENCODE, quantize
from moefuse.quant.formats import FORMATS, format_of, plain_name
from moefuse.quant.fp8 import from_fp8
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Weight

#: what is taken where rows are no multiple of a format's block, but of 32: as many bits, or else the most
_NARROWER = {"Q4_K": "Q4_0"}
_NARROWEST = "Q8_0"


class Recipe:
    """Which format a stack gets.

    Args:
        format: of every stack that no rule names.
        rules: a regular expression that is searched in a stack's path, such as
            ``model.layers.3.mlp.experts.down`` -> its format, or None to leave it in numbers; the last that fits wins.
    """

    def __init__(self, format: str, rules: Mapping[str, str | None] | None = None) -> None:
        if not isinstance(rules, Mapping | None):
            raise TypeError(f"quantize_: rules must be a mapping of patterns to formats, got {type(rules).__name__}")
        self.format = _encodable(format)
        self.rules = {pattern: None if name is None else _encodable(name) for pattern, name in (rules or {}).items()}
        for pattern in self.rules:
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ValueError(f"quantize_: rules must have regular expressions, got {pattern!r}: {error}") from None

    def must_fit(self, paths: list[str]) -> None:
        """A rule that fits none of the stacks is a mistake of spelling."""
        for pattern in self.rules:
            if not any(re.search(pattern, path) for path in paths):
                raise ValueError(f"quantize_: rules must each fit a stack such as {paths[-1]}, got {pattern!r}")

    def asked(self, path: str) -> str | None:
        """The format that the stack at a path is to have."""
        fitting = [name for pattern, name in self.rules.items() if re.search(pattern, path)]
        return fitting[-1] if fitting else self.format

    def choose(self, path: str, columns: int) -> str | None:
        """The format that it gets, with rows of ``columns`` numbers; None where it stays as it is."""
        wanted = self.asked(path)
        if wanted is None or columns % FORMATS[wanted].values == 0:
            return wanted
        narrower = _NARROWER.get(wanted, _NARROWEST)
        return narrower if columns % FORMATS[narrower].values == 0 else None


def _encodable(name: object) -> str:
    found = next((known for known in ENCODE if isinstance(name, str) and plain_name(known) == plain_name(name)), None)
    if found is None:
        raise ValueError(f"quantize_: a format must be one of {', '.join(ENCODE)}, got {name!r}")
    return found


def names_of(stock: Any) -> dict[str, str]:
    """Names of `moefuse.nn.MoE` -> those of a family's experts module."""
    first = "gate_up_proj" if stock.has_gate else "up_proj"
    names = {"gate_up": first, "down": "down_proj"}
    return names | {"gate_up_bias": f"{first}_bias", "down_bias": "down_proj_bias"} if stock.has_bias else names


def shapes_of(stock: Any) -> dict[str, torch.Size]:
    """Names of `moefuse.nn.MoE` -> sizes in its layout."""
    return {
        name: getattr(stock, own).transpose(1, 2).shape if _turned(stock, name) else getattr(stock, own).shape
        for name, own in names_of(stock).items()
    }


def laid_out(stock: Any, name: str, expert: Tensor) -> Tensor:
    """One expert's matrix or bias, from the family's layout to ours."""
    return in_halves(stock, name, expert.T if _turned(stock, name) else expert)


def in_halves(stock: Any, name: str, rows: Tensor) -> Tensor:
    """One expert's rows, gate before up."""
    interleaved = stock.has_gate and not stock.is_concatenated and name.startswith("gate_up")
    return torch.cat((rows[0::2], rows[1::2])) if interleaved else rows


def in_our_layout(stock: Any, name: str, stack: Tensor) -> Tensor:
    """All experts as numbers in our layout, in memory of their own where the family has another."""
    first = stack[0]
    if laid_out(stock, name, first).data_ptr() == first.data_ptr() and not _turned(stock, name):
        return stack.detach()
    return torch.stack([laid_out(stock, name, expert) for expert in stack.detach()])


def _turned(stock: Any, name: str) -> bool:
    return bool(stock.is_transposed) and not name.endswith("_bias")


def encode(
    path: str, stack: Weight, format: str, lay_out: Callable[[Tensor], Tensor], each: Callable[[], None] = lambda: None
) -> tuple[QuantTensor, float]:
    """A stack in blocks, one expert at a time, and the error: its norm over that of the numbers.

    ``path`` is its name in messages, ``lay_out`` brings an expert's matrix into our layout, ``each`` is called after
    each.
    """
    blocks: Tensor | None = None
    sums = torch.zeros(2, dtype=torch.float64, device=stack.device)
    for e in range(stack.shape[0]):
        part = stack[e]
        numbers = part.dequantize() if isinstance(part, QuantTensor) else lay_out(part.detach())
        try:
            made = quantize(numbers, format)
        except ValueError as error:
            raise ValueError(f"{path}[{e}]: {error}") from error
        if blocks is None:
            blocks = made.blocks.new_empty((stack.shape[0], *made.blocks.shape))
        blocks[e] = made.blocks
        lost = made.dequantize().sub_(numbers)
        sums += torch.stack([(one.float().norm() ** 2).double() for one in (lost, numbers)])
        each()
    assert blocks is not None
    lost_norm, norm = sums.sqrt().tolist()
    return QuantTensor(blocks, made.format, arrangement=made.arrangement), lost_norm / norm if norm else 0.0


def from_mxfp4(blocks: Tensor, scales: Tensor, lay_out: Callable[[Tensor], Tensor] = lambda rows: rows) -> QuantTensor:
    """MXFP4 as gpt-oss stores it, in GGUF's blocks: the same numbers, their nibbles in another order.

    Args:
        blocks: uint8 ``[E, N, K / 32, 16]``, or int8 ``[E, N, K / 2]`` as DeepSeek-V4 has it; the low nibble of a byte
            is the even column.
        scales: ``[E, N, K / 32]``, the exponent with a bias of 127 as uint8 or e8m0, or a power of two in float32.
        lay_out: brings an expert's rows ``[N, ..]`` into our order.
    """
    codes = blocks.view(torch.uint8)
    if codes.dim() == 3:
        if codes.shape[2] % 16:
            raise ValueError(f"MXFP4: a row must be a multiple of 32 values, got {2 * codes.shape[2]}")
        codes = codes.reshape(*codes.shape[:2], -1, 16)
    if codes.dim() != 4 or codes.shape[3] != 16 or scales.shape != codes.shape[:3]:
        shapes = f"{list(blocks.shape)} and {list(scales.shape)}"
        raise ValueError(f"MXFP4: blocks must be [E, N, K / 32, 16] and scales [E, N, K / 32], got {shapes}")
    exponents = _exponents(scales)
    form = format_of("MXFP4")
    E, N, columns, _ = codes.shape
    made = torch.empty((E, N, columns, form.nbytes), dtype=torch.uint8, device=codes.device)
    for e in range(E):
        first, second = lay_out(codes[e]).chunk(2, -1)
        made[e, :, :, 0] = lay_out(exponents[e])
        made[e, :, :, 1::2] = first & 15 | second << 4  # even columns: j beside j + 16
        made[e, :, :, 2::2] = first >> 4 | second & 240
    return QuantTensor(made.flatten(2), form.name)


def _exponents(scales: Tensor) -> Tensor:
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        biased = scales.view(torch.uint8)
        if bool((biased == 255).any()):
            raise ValueError("MXFP4: scales must be finite, got the exponent 255, which is not a number")
        return biased
    mantissa, exponent = torch.frexp(scales.float())
    biased = exponent + 126
    if bool(((mantissa != 0.5) | (biased < 0) | (biased > 254)).any()):
        raise ValueError("MXFP4: scales must be powers of two, got others")
    return biased.to(torch.uint8)


def from_released_fp8(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype, halves: bool = False
) -> Weight:
    """FP8 ``[.., N, K]`` with its scales, in blocks, or as numbers where rows are no multiple of 128.

    ``block`` is what the checkpoint's configuration says of the scales: rows and columns, or None for those of whole
    rows ``[.., N, 1]`` or matrices ``[.., 1, 1]``, ``[.., 1]`` or ``[..]``. ``dtype`` is the type of numbers.
    ``halves``: gate and up rows, whose scales were put together from those of each.
    """
    *lead, N, K = weight.shape
    if scale.dim() < weight.dim():
        scale = scale.reshape(*scale.shape[: len(lead)], -1, 1)
    parts = 2 if halves else 1
    n = scale.shape[-2]
    if block is None and n not in (parts, N):
        raise ValueError(f"scales must be one for a row or a matrix of {[N, K]}, got {list(scale.shape)}")
    rows, columns = (N // n, K) if block is None else block
    if N // parts % rows and n == parts * -(-N // parts // rows):
        each = (part.repeat_interleave(rows, -2)[..., : N // parts, :] for part in scale.chunk(parts, -2))
        scale, rows = torch.cat(tuple(each), -2), 1
    if K % FORMATS["FP8"].values == 0:
        return from_fp8(weight, scale, (rows, columns))
    if tuple(scale.shape) != (*lead, -(-N // rows), -(-K // columns)):
        raise ValueError(f"scales must be one for {rows} x {columns} numbers of {[N, K]}, got {list(scale.shape)}")
    wide = scale.float().repeat_interleave(rows, -2)[..., :N, :].repeat_interleave(columns, -1)[..., :K]
    return (weight.float() * wide).to(dtype)
