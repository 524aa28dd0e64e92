"""Stacks of experts as memory: what an expert takes, and stacks of some experts in other memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moefuse.quant.arrange import wanted
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Stacks, Weight


def tensors_of(stacks: Stacks) -> dict[str, Any]:
    """What every expert has a part of, by name."""
    return {name: value for name, value in stacks._asdict().items() if value is not None and name != "layout"}


def bytes_in(weight: Weight) -> Tensor:
    """The memory of numbers or blocks."""
    return weight.blocks if isinstance(weight, QuantTensor) else weight


def nbytes_of(weight: Weight) -> int:
    return bytes_in(weight).nbytes


def differ(one: Weight, other: Weight) -> bool:
    """Whether these are blocks in two arrangements."""
    return isinstance(one, QuantTensor) and isinstance(other, QuantTensor) and one.arrangement != other.arrangement


def bytes_within(stacks: Stacks, count: int) -> int:
    """What `stacks_within` takes for so many experts."""
    return sum(_aligned(count * bytes_in(weight)[0].nbytes) for weight in tensors_of(stacks).values())


def stacks_within(memory: Tensor, stacks: Stacks, count: int, arranged: bool = True) -> Stacks:
    """Stacks of so many experts in this memory of a device; see `stacks_like`."""
    left = memory

    def cut(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nonlocal left
        size = math.prod(shape) * dtype.itemsize
        part, left = left[:size], left[_aligned(size) :]
        return part.view(dtype).view(shape)

    return stacks_like(stacks, count, cut, arranged)


def stacks_like(
    stacks: Stacks, count: int, memory: Callable[[tuple[int, ...], torch.dtype], Tensor], arranged: bool = True
) -> Stacks:
    """Stacks of so many experts in new memory, arranged as its device reads them, or as the given ones are."""
    made: dict[str, Any] = {"up": None, "layout": stacks.layout}
    for name, weight in tensors_of(stacks).items():
        data = bytes_in(weight)
        made[name] = part = memory((count, *data.shape[1:]), data.dtype)
        if isinstance(weight, QuantTensor):
            order = wanted(part, weight.arrangement) if arranged else weight.arrangement
            made[name] = replace(weight, blocks=part, arrangement=order)
    return Stacks(**made)


def _aligned(nbytes: int) -> int:
    """A place for memory of any type behind so many bytes."""
    return -(-nbytes // 256) * 256
