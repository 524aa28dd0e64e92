"""Blocks to numbers, in plain torch on any device: the reference that every kernel is held to.

Every function takes ``[B, bytes of a block]`` and returns ``[B, values of a block]`` in float32, rounded as ggml
rounds: scale times sub-scale, times the integer, then the offset.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moefuse.quant.formats import format_of

IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: E2M1 doubled; the shared exponent is halved to match
MXFP4_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def unpack(rows: Tensor, name: str) -> Tensor:
    """``[.., row bytes]`` to ``[.., K]`` in float32.

    >>> unpack(torch.tensor([0, 60] + [1, 255] * 16, dtype=torch.uint8), "Q8_0")[:3]  # scale 1
    tensor([ 1., -1.,  1.])
    """
    form = format_of(name)
    columns = rows.shape[-1] // form.nbytes * form.values
    if rows.numel() == 0:
        return torch.empty((*rows.shape[:-1], columns), device=rows.device)
    blocks = rows.reshape(-1, form.nbytes)
    return UNPACK[form.name](blocks).reshape(*rows.shape[:-1], columns)


def _half(field: Tensor) -> Tensor:
    """``[B, 2]`` bytes to ``[B, 1]``."""
    # A copy, because a view as float16 wants an even address.
    return field.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _split(field: Tensor, bits: int) -> Tensor:
    """``[.., n]`` bytes to ``[.., 8 / bits, n]``: the fields of each byte, lowest first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device)
    fields: Tensor = (field.unsqueeze(-2) >> shifts[:, None]) & (2**bits - 1)
    return fields


def _bits_in_order(field: Tensor, bits: int) -> Tensor:
    """``[B, n]`` bytes to ``[B, n * 8 / bits]``, read as one little-endian number."""
    return _split(field, bits).transpose(-1, -2).flatten(-2)


def _lookup(codes: tuple[int, ...], q: Tensor) -> Tensor:
    """Codes of a byte by their numbers. The table is made where q is: no CUDA graph takes a copy from the host."""
    low, high = (
        int.from_bytes(np.array(half, np.int8).tobytes(), "little", signed=True) for half in (codes[:8], codes[8:])
    )
    i = torch.arange(16, device=q.device)
    table = (torch.where(i < 8, low, high) >> i % 8 * 8 & 255).to(torch.uint8).view(torch.int8).float()
    return table[q.int()]


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_split(b[:, 2:], 4).flatten(1).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _split(b[:, 4:], 4).flatten(1).float() + _half(b[:, 2:4])


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    return (_split(low, 4).flatten(1) | _bits_in_order(high, 1) << 4).float()


def _q5_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_five_bits(b[:, 2:6], b[:, 6:]) - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _five_bits(b[:, 4:8], b[:, 8:]) + _half(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * b[:, 2:].view(torch.int8).float()


def _q2_k(b: Tensor) -> Tensor:
    scale = (_half(b[:, 80:82]) * (b[:, :16] & 15).float()).unsqueeze(-1)
    floor = (_half(b[:, 82:84]) * (b[:, :16] >> 4).float()).unsqueeze(-1)
    q = _split(b[:, 16:80].view(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    return (scale * q - floor).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    six = _split(b[:, 96:104], 4).flatten(1) | _split(b[:, 104:108], 2).flatten(1) << 4
    scale = (_half(b[:, 108:110]) * (six.float() - 32)).unsqueeze(-1)
    low = _split(b[:, 32:96].view(-1, 2, 32), 2).reshape(-1, 8, 32)
    # A set high bit means "nothing to subtract".
    q = low.float() - 4 * (1 - _split(b[:, :32], 1).float())
    return (scale * q.view(-1, 16, 16)).flatten(1)


def _scales_and_floors(b: Tensor) -> tuple[Tensor, Tensor]:
    """The sub-scales and sub-minima that Q4_K and Q5_K keep in 6 bits each, times their factors: ``[B, 8, 1]``."""
    low_scale, low_floor, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = torch.cat((low_scale & 63, (rest & 15) | (low_scale >> 6) << 4), 1)
    floor = torch.cat((low_floor & 63, (rest >> 4) | (low_floor >> 6) << 4), 1)
    return (_half(b[:, :2]) * scale.float()).unsqueeze(-1), (_half(b[:, 2:4]) * floor.float()).unsqueeze(-1)


def _q4_k(b: Tensor) -> Tensor:
    scale, floor = _scales_and_floors(b)
    q = _split(b[:, 16:].view(-1, 4, 32), 4).reshape(-1, 8, 32)
    return (scale * q.float() - floor).flatten(1)


def _q5_k(b: Tensor) -> Tensor:
    scale, floor = _scales_and_floors(b)
    q = _split(b[:, 48:].view(-1, 4, 32), 4).reshape(-1, 8, 32) | _split(b[:, 16:48], 1) << 4
    return (scale * q.float() - floor).flatten(1)


def _q6_k(b: Tensor) -> Tensor:
    low = _split(b[:, :128].view(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = _split(b[:, 128:192].view(-1, 2, 32), 2).reshape(-1, 16, 16)
    scale = (_half(b[:, 208:210]) * b[:, 192:208].view(torch.int8).float()).unsqueeze(-1)
    return (scale * ((low | high << 4).float() - 32)).flatten(1)


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _lookup(IQ4_CODES, _split(b[:, 2:], 4).flatten(1))


def _iq4_xs(b: Tensor) -> Tensor:
    six = _bits_in_order(b[:, 4:8], 4) | _bits_in_order(b[:, 2:4], 2) << 4
    scale = (_half(b[:, :2]) * (six.float() - 32)).unsqueeze(-1)
    q = _split(b[:, 8:].view(-1, 8, 16), 4).reshape(-1, 8, 32)
    return (scale * _lookup(IQ4_CODES, q)).flatten(1)


def _mxfp4(b: Tensor) -> Tensor:
    e = b[:, :1].int()
    # 2**(e - 128), written as bits: the two smallest are denormal.
    scale = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1).clamp(min=0) << 23).view(torch.float32)
    return scale * _lookup(MXFP4_CODES, _split(b[:, 1:], 4).flatten(1))


UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_K": _q5_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_1": _q4_1,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
}
