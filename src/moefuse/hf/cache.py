"""Keys and values in memory that never moves: what a decode step that is captured once reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer


class StepLayer(StaticLayer):  # type: ignore[no-untyped-call]  # transformers leaves what makes a subclass untyped
    """Keys and values of one layer, ``[B, heads, max_length, D]``; where to write is the cache's to say."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: StepCache) -> None:
        super().__init__(max_cache_len=cache.max_length)
        self.cache = cache

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]  # a prompt's masks are made as for a cache that grows
        return self.stepping

    @property
    def stepping(self) -> bool:
        """One token for each sequence follows, and only the device knows at which place."""
        return self.cache.stepping

    @property
    def position(self) -> Tensor:
        """That place, ``[1]``."""
        return self.cache.position

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate, when the first keys show their shape."""
        B, heads, _, D = key_states.shape
        self.keys = key_states.new_zeros(B, heads, self.max_cache_len, D)
        self.values = value_states.new_zeros(B, heads, self.max_cache_len, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write at the place; returns all that a query may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.stepping:
            self.keys.index_copy_(2, self.position, key_states)
            self.values.index_copy_(2, self.position, value_states)
            return self.keys, self.values
        start, stop = self.cache.length, self.cache.length + key_states.shape[2]
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        return (self.keys[:, :, :stop], self.values[:, :, :stop]) if start else (key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many places a mask covers, and the first of them."""
        return (self.max_cache_len if self.stepping else self.cache.length + query_length), 0

    def get_seq_length(self) -> Any:
        """How many places are filled; in a step, a tensor."""
        return self.position if self.stepping else self.cache.length


class StepCache(Cache):
    """A cache of ``max_length`` places for each sequence.

    ``length`` places are filled. A prompt is written behind them; a step, while ``stepping``, writes where ``position``
    says, which lies on the device, so that the same launches serve for every place.
    """

    def __init__(self, layers: int, max_length: int, device: torch.device) -> None:
        self.max_length, self.length, self.stepping = max_length, 0, False
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        super().__init__(layers=[StepLayer(self) for _ in range(layers)])

    def clear(self) -> None:
        """Forget everything: what masks hide must still be finite."""
        self.length = 0
        layer: Any
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()
