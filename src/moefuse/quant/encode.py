"""Numbers to blocks: `quantize`.

FP8 has the scale that makes the largest number of a block 448, as checkpoints have it. Q8_0 and Q4_0 have one answer,
that of the gguf package. The K formats are searched: candidates for the step of each sub-block, each with the scale
(and offset) of least squared error for the integers it gives; the best is kept, then scales are rounded to their 6 or 8
bits and the integers taken anew.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moefuse.quant.arrange import wanted
from moefuse.quant.formats import FORMATS, plain_name
from moefuse.quant.tensor import QuantTensor, arrange_

# Values worked on at a time: the search holds about ten float32 copies of them.
_CHUNK = 2**20
# Candidates for the step, as the range of integers it is to fill, around the whole range.
_OFFSETS = tuple(i / 10 for i in range(-10, 11))


def quantize(weight: Tensor, format: str) -> QuantTensor:
    """Encode weights in blocks along their last dimension.

    Args:
        weight: ``[.., K]`` floating, finite, ``K`` a multiple of the format's block; usually ``[E, N, K]``. Numbers
            whose scale is beyond float16 are refused; those far below it become zero. (FP8's scales are float32.)
        format: Q4_K, Q6_K, Q5_K, Q8_0, Q4_0 or FP8, in any spelling.

    Returns:
        A `QuantTensor` of the same shape on the same device, arranged for it. Memory beyond it stays within a few
        dozen MB.

    >>> stack = quantize(torch.linspace(-1, 1, 2 * 3 * 256).view(2, 3, 256), "Q4_K")
    >>> stack
    QuantTensor(Q4_K, shape=[2, 3, 256], device=cpu, 864 bytes)
    >>> stack.dequantize()[0, 0, 0].round(decimals=2)
    tensor(-1.)
    """
    form = next((form for name, form in FORMATS.items() if name in ENCODE and _same(name, format)), None)
    if form is None:
        raise ValueError(f"quantize: format must be one of {', '.join(ENCODE)}, got {format!r}")
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"quantize: weight must be a floating-point tensor, got {got}")
    if weight.dim() < 1 or weight.shape[-1] % form.values:
        rule = f"a last dimension that is a multiple of {form.values} for {form.name}"
        raise ValueError(f"quantize: weight must have {rule}, got shape {list(weight.shape)}")
    weight = weight.detach()
    row = form.row_bytes(weight.shape[-1])
    blocks = torch.empty((*weight.shape[:-1], row), dtype=torch.uint8, device=weight.device)
    if blocks.numel() == 0:
        return QuantTensor(blocks, form.name)
    experts = zip(weight, blocks, strict=True) if weight.dim() > 2 else ((weight, blocks),)
    for numbers, place in experts:
        for chunk, into in zip(
            numbers.reshape(-1, form.values).split(max(_CHUNK // form.values, 1)),
            place.view(-1, form.nbytes).split(max(_CHUNK // form.values, 1)),
            strict=True,
        ):
            in_float32 = chunk.float()
            if not in_float32.isfinite().all():
                raise ValueError("quantize: weight must be finite in float32, got NaN, infinity or beyond 3.4e38")
            into.copy_(ENCODE[form.name](in_float32))
    return arrange_(QuantTensor(blocks, form.name), wanted(blocks))


def _same(name: str, given: object) -> bool:
    return isinstance(given, str) and plain_name(name) == plain_name(given)


def _join(fields: Tensor, bits: int) -> Tensor:
    """``[.., 8 / bits, n]`` integers to ``[.., n]`` bytes, the first in the lowest bits."""
    shifts = torch.arange(0, 8, bits, device=fields.device)
    return (fields.long() << shifts[:, None]).sum(-2).to(torch.uint8)


def _half(scale: Tensor) -> Tensor:
    """``[B, 1]`` to the two bytes of its float16."""
    rounded = scale.half()
    if not rounded.isfinite().all():
        raise ValueError(f"quantize: weight must leave scales below 65504, got {float(scale.abs().max()):g}")
    return rounded.view(torch.uint8).view(-1, 2)


def _upward(factor: Tensor) -> Tensor:
    """A factor of sub-scales, away from zero where float16 has few digits left: integers can be smaller, not larger."""
    step = 2.0**-24
    return torch.where(factor.abs() < 2.0**-14, (factor.abs() / step).ceil().mul(step).copysign(factor), factor)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _first_extreme(x: Tensor) -> Tensor:
    """The element of largest magnitude, the first of several: ``[.., 1]``."""
    size = x.abs()
    places = torch.arange(x.shape[-1], device=x.device)
    first = torch.where(size == size.amax(-1, keepdim=True), places, x.shape[-1]).amin(-1, keepdim=True)
    return x.gather(-1, first)


def _q8_0(x: Tensor) -> Tensor:
    d = x.abs().amax(-1, keepdim=True) / 127
    size = (x * _inverse(d)).abs()
    whole = size.floor()
    # Halves away from zero, as C's roundf.
    q = (whole + (2 * (size - whole)).floor()).nan_to_num().clamp(max=127).copysign(x)
    return torch.cat((_half(d), q.to(torch.int8).view(torch.uint8)), 1)


def _q4_0(x: Tensor) -> Tensor:
    d = _first_extreme(x) / -8
    q = (x * _inverse(d) + 8.5).nan_to_num(nan=8).trunc().clamp(0, 15)
    return torch.cat((_half(d), _join(q.view(-1, 2, 16), 4)), 1)


def _fp8(x: Tensor) -> Tensor:
    d = x.abs().amax(-1, keepdim=True) / 448
    # A scale that is denormal may have been rounded down; one that is zero makes zeros of everything.
    q = (x / d).nan_to_num(nan=0.0).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.cat((d.view(torch.uint8).view(-1, 4), q.view(torch.uint8)), 1)


def _unit(x: Tensor) -> Tensor:
    """The power of two next to the largest magnitude of ``[.., n]``, over which no square over- or underflows."""
    exponent = torch.frexp(x.abs().amax(-1))[1]
    return torch.ldexp(torch.ones_like(x[..., 0]), exponent.clamp(-100, 100))


def _affine(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Scale and floor, both at least zero, that make ``scale * q - floor`` nearest to ``[.., n]``, q in 0..top."""
    n, unit = x.shape[-1], _unit(x)
    x = x / unit[..., None]
    low = x.amin(-1).clamp(max=0)
    span = x.amax(-1) - low
    above, total = x - low[..., None], x.sum(-1)
    best, scale, floor = torch.full_like(low, torch.inf), torch.zeros_like(low), -low
    for offset in _OFFSETS:
        q = (above * _inverse(span / (top + offset))[..., None]).round_().clamp_(0, top)
        q1, q2, qx = q.sum(-1), (q * q).sum(-1), (q * x).sum(-1)
        step = (n * qx - q1 * total) * _inverse(n * q2 - q1 * q1)
        base = (total - step * q1) / n
        # Where the best offset is of the wrong sign it is zero, and the scale is fitted alone.
        step = torch.where(base > 0, qx * _inverse(q2), step)
        base = base.clamp(max=0)
        error = q.mul_(step[..., None]).add_(base[..., None]).sub_(x).square_().sum(-1)
        better = (error < best) & (step >= 0)
        best = torch.where(better, error, best)
        scale, floor = torch.where(better, step, scale), torch.where(better, -base, floor)
    return scale * unit, floor * unit


def _k_affine(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """What Q4_K and Q5_K share: the first 16 bytes, and the integers ``[B, 8, 32]``."""
    x = x.view(-1, 8, 32)
    scale, floor = _affine(x, top)
    d, dmin = (_upward(part.amax(-1, keepdim=True) / 63) for part in (scale, floor))
    factors = torch.cat((_half(d), _half(dmin)), 1)
    d, dmin = d.half().float(), dmin.half().float()
    s = (scale * _inverse(d)).round().clamp(0, 63).to(torch.uint8)
    # Where nothing is left of the scale, the mean is nearer than the smallest.
    floor = torch.where(d * s == 0, (-x.mean(-1)).clamp(min=0), floor)
    m = (floor * _inverse(dmin)).round().clamp(0, 63).to(torch.uint8)
    six = torch.cat((s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4), 1)
    step, base = (d * s)[..., None], (dmin * m)[..., None]
    q = ((x + base) * _inverse(step)).round().clamp(0, top).to(torch.uint8)
    return torch.cat((factors, six), 1), q


def _q4_k(x: Tensor) -> Tensor:
    head, q = _k_affine(x, 15)
    return torch.cat((head, _join(q.view(-1, 4, 2, 32), 4).flatten(1)), 1)


def _q5_k(x: Tensor) -> Tensor:
    head, q = _k_affine(x, 31)
    return torch.cat((head, _join(q >> 4, 1), _join((q & 15).view(-1, 4, 2, 32), 4).flatten(1)), 1)


def _symmetric(x: Tensor, top: int) -> Tensor:
    """The scale, of either sign, that makes ``scale * q`` nearest to ``[.., n]``, q in -top..top-1."""
    unit = _unit(x)
    x = x / unit[..., None]
    extreme = _first_extreme(x)[..., 0]
    best, scale = torch.full_like(extreme, torch.inf), torch.zeros_like(extreme)
    for offset in _OFFSETS:
        # The extreme takes the integer that only one sign has.
        q = (x * _inverse(extreme / -(top + offset))[..., None]).round_().clamp_(-top, top - 1)
        step = (q * x).sum(-1) * _inverse((q * q).sum(-1))
        error = q.mul_(step[..., None]).sub_(x).square_().sum(-1)
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, step, scale)
    return scale * unit


def _q6_k(x: Tensor) -> Tensor:
    x = x.view(-1, 16, 16)
    scale = _symmetric(x, 32)
    d = _upward(_first_extreme(scale) / -128)
    factor = _half(d)
    d = d.half().float()
    s = (scale * _inverse(d)).round().clamp(-128, 127)
    q = (x * _inverse(d * s)[..., None]).round().clamp(-32, 31).add(32).to(torch.uint8).flatten(1)
    low, high = _join((q & 15).view(-1, 2, 2, 64), 4), _join((q >> 4).view(-1, 2, 4, 32), 2)
    return torch.cat((low.flatten(1), high.flatten(1), s.to(torch.int8).view(torch.uint8), factor), 1)


ENCODE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "FP8": _fp8,
}
