"""Memory that the calls of all placed experts share: rows on their way to the host and back, experts on theirs."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from moefuse.nn.accelerator import Accelerator

#: tokens of a call whose memory is kept
_FEW = 64


class CallMemory:
    """How the rows of a call come to the host, and what it computes goes back."""

    def __init__(self, accelerator: Accelerator, T: int, top_k: int, H: int, dtype: torch.dtype) -> None:
        n = T * top_k * 4
        self.sent = accelerator.host(3 * n + T * H * dtype.itemsize)
        ids, others, weights, rows = torch.split(self.sent, [n, n, n, T * H * dtype.itemsize])
        #: ids as the router has them, and those without a slot
        self.ids, self.others = (part.view(torch.int32).view(T, top_k) for part in (ids, others))
        self.weights, self.rows = weights.view(torch.float32).view(T, top_k), rows.view(dtype).view(T, H)
        self.back = accelerator.host(T * H * 4).view(torch.float32).view(T, H)
        self.zeros = torch.zeros(T, H, device="cpu")  # the sum of the CPU's experts is float32 like it
        self.event = accelerator.event()
        # The GPU's sum and the CPU's as two experts of each token.
        two = torch.arange(2 * T, dtype=torch.int32, device="cpu").view(T, 2)
        self.inverse = (two % 2 * T + two // 2).flatten().to(accelerator.device)
        self.ones = torch.ones(T, 2, device=accelerator.device)


class StreamBuffer:
    """Memory that experts stream through."""

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device)
        self.loaded, self.read = accelerator.event(), accelerator.event()
        accelerator.record(self.read)  # whoever had this memory before may still be at it


class Staging:
    """All such memory of one placement; each part is made when it is first asked for."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        #: of experts that stream together
        self.group_bytes = 0
        self._one_bytes = 0
        self._calls = threading.local()
        self._buffers: list[StreamBuffer] = []
        self._memories: dict[str, Tensor] = {}

    def fit(self, group_bytes: int, one_bytes: int) -> None:
        """Be large enough for experts of a layer that stream together, and for one alone."""
        self.group_bytes, self._one_bytes = max(self.group_bytes, group_bytes), max(self._one_bytes, one_bytes)

    def call(self, T: int, top_k: int, H: int, dtype: torch.dtype) -> CallMemory:
        """For a call of this size, by thread."""
        kept: dict[Any, CallMemory] = self._calls.__dict__.setdefault("kept", {})
        key = T, top_k, H, dtype
        if key in kept:
            return kept[key]
        with torch.inference_mode(False):
            made = CallMemory(self.accelerator, T, top_k, H, dtype)
        if T <= _FEW:
            kept[key] = made
        return made

    def buffers(self) -> list[StreamBuffer]:
        """The two through which experts stream."""
        if not self._buffers:
            with torch.inference_mode(False):
                self._buffers = [StreamBuffer(self.accelerator, self.group_bytes) for _ in range(2)]
        return self._buffers

    def arranged(self) -> Tensor:
        """For those that have come, in another order."""
        return self._memory("arranged", self.group_bytes)

    def raw(self) -> Tensor:
        """For one expert on its way into a slot; streams use it one after the other."""
        return self._memory("raw", self._one_bytes)

    def clear(self) -> None:
        """Nothing of it is left on the device."""
        self._buffers, self._memories = [], {}

    def _memory(self, name: str, nbytes: int) -> Tensor:
        if name not in self._memories:
            with torch.inference_mode(False):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.accelerator.device)
            self._memories[name] = memory
        return self._memories[name]
