"""Random quantised weights: every bit random, but for scales that give the numbers a chosen size."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.quant.blocks import unpack
from moefuse.quant.formats import FORMATS, Format
from moefuse.quant.tensor import QuantTensor, format_in, wrap

#: the second factor over the first that centres the numbers: half the range of the integers, or its negative
_SECOND = {"Q4_K": 7.5, "Q5_K": 15.5, "Q2_K": 1.5, "Q4_1": -7.5, "Q5_1": -15.5}


def random_blocks(spec: str, shape: tuple[int, ...], rng: torch.Generator, rms: float) -> QuantTensor:
    """Weights of about this root mean square, each block's own within a factor of two."""
    name = format_in(spec)
    form = FORMATS[name]
    rows = (*shape[:-1], form.row_bytes(shape[-1]))
    blocks = torch.randint(256, rows, generator=rng, dtype=torch.uint8).view(-1, form.nbytes)
    if name == "FP8":  # no code of not-a-number, which would be all that a product is
        blocks[blocks & 0x7F == 0x7F] ^= 1
    spread = torch.rand((len(blocks), 1), generator=rng) * 1.5 + 0.5
    _set_scale(blocks, form, torch.ones_like(spread))
    unit = float(unpack(blocks, name).double().square().mean().sqrt()) if len(blocks) else 1.0
    _set_scale(blocks, form, spread * (rms / unit))
    made = wrap(blocks.view(rows), spec)
    assert isinstance(made, QuantTensor)
    return made


def _set_scale(blocks: Tensor, form: Format, scale: Tensor) -> None:
    if form.name == "FP8":
        blocks[:, :4] = scale.view(torch.uint8).view(-1, 4)
    if form.name == "MXFP4":
        blocks[:, :1] = (scale.log2().round() + 128).to(torch.uint8)
    for place, factor in zip(form.scales, (1.0, _SECOND.get(form.name, 0.0)), strict=False):
        blocks[:, place : place + 2] = (scale * factor).half().view(torch.uint8).view(-1, 2)
