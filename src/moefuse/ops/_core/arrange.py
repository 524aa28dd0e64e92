"""Blocks in another arrangement, by the kernel of a backend where it has one, else by torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from moefuse.backends import BACKENDS
from moefuse.quant.tensor import QuantTensor


def arranged(weight: QuantTensor, arrangement: str) -> QuantTensor:
    """As ``weight.arranged``, several times as fast where its device's backend has a kernel for it."""
    if weight.arrangement == arrangement:
        return weight
    blocks = torch.empty_like(weight.blocks, memory_format=torch.contiguous_format)
    made = replace(weight, blocks=blocks, arrangement=arrangement)
    arrange_into(made, weight)
    return made


def arrange_into(target: QuantTensor, source: QuantTensor) -> None:
    """The same weights in the target's arrangement and memory, where the source does not lie."""
    arrange = _kernel_for(source.blocks.device.type)
    if arrange is None or not arrange(target, source):
        target.blocks.copy_(source.arranged(target.arrangement).blocks)


@functools.cache
def _kernel_for(device: str) -> Callable[[QuantTensor, QuantTensor], bool] | None:
    """The function of the backend that serves such devices, if that runs here."""
    rows = (row for row in BACKENDS if device in row.devices)
    return next((row.arrange() for row in rows if row.missing() is None), None)
