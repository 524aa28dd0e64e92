"""What we are measured against. A peer is a module in this folder that offers ``PEER``; its file name is its name.

``hf_grouped.py`` is the peer ``hf-grouped``. A module whose name begins with an underscore is no peer.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moefuse.bench.inputs import Layer
from moefuse.bench.shapes import Shape


class Peer(Protocol):
    """Another implementation of the experts of a layer, on the same weight tensors."""

    @property
    def name(self) -> str: ...

    @property
    def graph_refusal(self) -> str | None:
        """Why it cannot be captured in a CUDA graph, or None."""

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, or None."""

    def unsuitable(self, shape: Shape, device: torch.device) -> str | None:
        """Why it cannot run this shape there, or None."""

    def scratch_bytes(self, shape: Shape, tokens: int, dtype: torch.dtype) -> int:
        """Memory one call takes beyond inputs and outputs, where that may be too much."""

    def build(self, layer: Layer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """A call ``(x [T, H], ids [T, top_k] int64, weights [T, top_k] in the type of x) -> [T, H]``."""


def names() -> tuple[str, ...]:
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return tuple(name.replace("_", "-") for name in found if not name.startswith("_"))


def load(name: str) -> Peer:
    if name not in names():
        raise KeyError(name)
    peer: Peer = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").PEER
    return peer
