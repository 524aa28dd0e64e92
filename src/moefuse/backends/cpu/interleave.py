"""Blocks in the order that the CPU's kernels read best, made by a kernel."""

from __future__ import annotations

from dataclasses import replace

import torch

from moefuse.backends.cpu import _native
from moefuse.quant.arrange import FIELDS, INTERLEAVED
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor


def interleaved(weight: QuantTensor) -> QuantTensor:
    """As ``weight.arranged("interleaved")``, several times as fast, from the file's order."""
    if _native.core is None:
        return weight.arranged(INTERLEAVED)
    blocks = torch.empty_like(weight.blocks, memory_format=torch.contiguous_format)
    made = replace(weight, blocks=blocks, arrangement=INTERLEAVED)
    starts = sorted(field.start for field in FIELDS[weight.format])
    fields = torch.tensor([*starts, FORMATS[weight.format].nbytes], dtype=torch.int32)
    _native.core.interleave(weight, made, fields, _native.threads())
    return made
