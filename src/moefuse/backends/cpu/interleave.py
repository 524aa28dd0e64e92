"""Blocks in the order that the CPU's kernels read best, made by a kernel."""

from __future__ import annotations

import torch

from moefuse.backends.cpu import _native
from moefuse.quant.arrange import FIELDS, FILE, INTERLEAVED, can_interleave
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor


def arrange(target: QuantTensor, source: QuantTensor) -> bool:
    """Interleave what is in the file's order; nothing else has a kernel here."""
    orders = source.arrangement, target.arrangement
    if orders != (FILE, INTERLEAVED) or not can_interleave(source.format, source.shape[-2]):
        return False
    starts = sorted(field.start for field in FIELDS[source.format])
    fields = torch.tensor([*starts, FORMATS[source.format].nbytes], dtype=torch.int32)
    _native.core.interleave(source, target, fields, _native.threads())
    return True
