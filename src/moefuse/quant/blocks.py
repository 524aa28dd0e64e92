"""Blocks to numbers, in plain torch on any device: the reference that every kernel is held to.

Every function takes the fields of its format, in the order of `moefuse.quant.arrange.FIELDS`: codes one to a byte,
``[B, values of a block]``, and what else is stored, ``[B, bytes]``. It returns ``[B, values of a block]`` in float32,
rounded as ggml rounds: scale times sub-scale, times the integer, then the offset.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moefuse.quant.arrange import FILE, fields_of, split
from moefuse.quant.formats import format_of

IQ4_CODES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: E2M1 doubled; the shared exponent is halved to match
MXFP4_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def unpack(rows: Tensor, name: str, arrangement: str = FILE) -> Tensor:
    """``[.., row bytes]`` to ``[.., K]`` in float32.

    >>> unpack(torch.tensor([0, 60] + [1, 255] * 16, dtype=torch.uint8), "Q8_0")[:3]  # scale 1
    tensor([ 1., -1.,  1.])
    """
    form = format_of(name)
    columns = rows.shape[-1] // form.nbytes * form.values
    if rows.numel() == 0:
        return torch.empty((*rows.shape[:-1], columns), device=rows.device)
    return UNPACK[form.name](*fields_of(rows, form.name, arrangement)).reshape(*rows.shape[:-1], columns)


def _half(field: Tensor) -> Tensor:
    """``[B, 2]`` bytes to ``[B, 1]``."""
    # A copy, because a view as float16 wants an even address.
    return field.clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _lookup(codes: tuple[int, ...], q: Tensor) -> Tensor:
    """Codes of a byte by their numbers. The table is made where q is: no CUDA graph takes a copy from the host."""
    low, high = (
        int.from_bytes(np.array(half, np.int8).tobytes(), "little", signed=True) for half in (codes[:8], codes[8:])
    )
    i = torch.arange(16, device=q.device)
    table = (torch.where(i < 8, low, high) >> i % 8 * 8 & 255).to(torch.uint8).view(torch.int8).float()
    return table[q.int()]


def e4m3(q: Tensor) -> Tensor:
    """Bytes of float8_e4m3fn as float32. Written out, because not every device of torch has the type."""
    bits = q.to(torch.int16)
    # As a float16 the seven lower bits are 2**-8 of what they stand for, denormal numbers included.
    numbers = ((bits & 0x7F) << 7 | (bits & 0x80) << 8).view(torch.float16).float() * 256
    return torch.where(bits & 0x7F == 0x7F, torch.nan, numbers)


def _q4_0(q: Tensor, d: Tensor) -> Tensor:
    return _half(d) * (q.float() - 8)


def _q4_1(q: Tensor, head: Tensor) -> Tensor:
    return _half(head[:, :2]) * q.float() + _half(head[:, 2:])


def _q5_0(low: Tensor, high: Tensor, d: Tensor) -> Tensor:
    return _half(d) * ((low | high << 4).float() - 16)


def _q5_1(low: Tensor, high: Tensor, head: Tensor) -> Tensor:
    return _half(head[:, :2]) * (low | high << 4).float() + _half(head[:, 2:])


def _q8_0(q: Tensor, d: Tensor) -> Tensor:
    return _half(d) * q.view(torch.int8).float()


def _q2_k(q: Tensor, scales: Tensor, head: Tensor) -> Tensor:
    scale = (_half(head[:, :2]) * (scales & 15).float()).unsqueeze(-1)
    floor = (_half(head[:, 2:]) * (scales >> 4).float()).unsqueeze(-1)
    return (scale * q.view(-1, 16, 16).float() - floor).flatten(1)


def _q3_k(low: Tensor, high: Tensor, scales: Tensor, d: Tensor) -> Tensor:
    six = split(scales[:, :8], 4, 8) | split(scales[:, 8:], 2, 4) << 4
    scale = (_half(d) * (six.float() - 32)).unsqueeze(-1)
    # A set high bit means "nothing to subtract".
    q = low.float() - 4 * (1 - high.float())
    return (scale * q.view(-1, 16, 16)).flatten(1)


def _scales_and_floors(head: Tensor) -> tuple[Tensor, Tensor]:
    """The sub-scales and sub-minima that Q4_K and Q5_K keep in 6 bits each, times their factors: ``[B, 8, 1]``."""
    low_scale, low_floor, rest = head[:, 4:8], head[:, 8:12], head[:, 12:]
    scale = torch.cat((low_scale & 63, (rest & 15) | (low_scale >> 6) << 4), 1)
    floor = torch.cat((low_floor & 63, (rest >> 4) | (low_floor >> 6) << 4), 1)
    return (_half(head[:, :2]) * scale.float()).unsqueeze(-1), (_half(head[:, 2:4]) * floor.float()).unsqueeze(-1)


def _q4_k(q: Tensor, head: Tensor) -> Tensor:
    scale, floor = _scales_and_floors(head)
    return (scale * q.view(-1, 8, 32).float() - floor).flatten(1)


def _q5_k(low: Tensor, high: Tensor, head: Tensor) -> Tensor:
    return _q4_k(low | high << 4, head)


def _q6_k(low: Tensor, high: Tensor, scales: Tensor, d: Tensor) -> Tensor:
    scale = (_half(d) * scales.view(torch.int8).float()).unsqueeze(-1)
    return (scale * ((low | high << 4).view(-1, 16, 16).float() - 32)).flatten(1)


def _iq4_nl(q: Tensor, d: Tensor) -> Tensor:
    return _half(d) * _lookup(IQ4_CODES, q)


def _iq4_xs(q: Tensor, head: Tensor) -> Tensor:
    six = split(head[:, 4:], 4, 1) | split(head[:, 2:4], 2, 1) << 4
    scale = (_half(head[:, :2]) * (six.float() - 32)).unsqueeze(-1)
    return (scale * _lookup(IQ4_CODES, q.view(-1, 8, 32))).flatten(1)


def _mxfp4(q: Tensor, exponent: Tensor) -> Tensor:
    e = exponent.int()
    # 2**(e - 128), written as bits: the two smallest are denormal.
    scale = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1).clamp(min=0) << 23).view(torch.float32)
    return scale * _lookup(MXFP4_CODES, q)


def _fp8(q: Tensor, d: Tensor) -> Tensor:
    return d.clone(memory_format=torch.contiguous_format).view(torch.float32) * e4m3(q)


UNPACK: dict[str, Callable[..., Tensor]] = {
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
    "FP8": _fp8,
}
