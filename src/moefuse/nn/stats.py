"""Which experts a router uses: a recorder cheap enough to leave on."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RoutingStats:
    """Sums over every batch recorded since the last `reset`, kept where the ids are: no copy to the host.

    Two small additions per batch, each into memory that stays, so that recording works inside a CUDA graph. Reading a
    property brings the sums to the host.

    >>> stats = RoutingStats(3)
    >>> stats.record(torch.tensor([[0, 1], [0, 3]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    >>> stats.load.tolist(), stats.tokens, stats.dropped
    ([2, 1, 0], 2, 1)
    >>> round(stats.entropy, 4)  # of the shares of a token's experts: log(2) and 0
    0.3466
    """

    def __init__(self, num_experts: int) -> None:
        if num_experts < 1:
            raise ValueError(f"RoutingStats: num_experts must be at least 1, got {num_experts}")
        self.num_experts = num_experts
        self._counts = torch.zeros(num_experts + 2, dtype=torch.int64)  # experts, slots without one, tokens
        self._entropy = torch.zeros((), dtype=torch.float64)

    @classmethod
    def attach(cls, model: nn.Module) -> dict[str, RoutingStats]:
        """Give every `moefuse.nn.MoE` of ``model`` a recorder: its name in the model, and the recorder."""
        from moefuse.nn.moe import MoE

        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MoE)}
        if not layers:
            raise ValueError("RoutingStats.attach: the model has no moefuse.nn.MoE")
        for layer in layers.values():
            layer.stats = cls(layer.router.shape[0])
        return {name: layer.stats for name, layer in layers.items() if layer.stats is not None}

    @torch.no_grad()
    def record(self, ids: Tensor, weights: Tensor) -> None:
        """Add a batch: ``[T, top_k]`` ids and weights of `moefuse.route`."""
        if self._counts.device != ids.device:
            self._counts, self._entropy = self._counts.to(ids.device), self._entropy.to(ids.device)
        E = self.num_experts
        known = torch.where((ids >= 0) & (ids < E), ids, E).long().flatten()
        self._counts.scatter_add_(0, known, torch.ones_like(known))
        self._counts[E + 1] += ids.shape[0]
        shares = weights.double()
        shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-30)
        self._entropy += torch.special.entr(shares).sum()

    def reset(self) -> None:
        self._counts.zero_()
        self._entropy.zero_()

    @property
    def load(self) -> Tensor:
        """``[E]`` int64: assignments per expert."""
        return self._counts[: self.num_experts]

    @property
    def tokens(self) -> int:
        return int(self._counts[-1])

    @property
    def dropped(self) -> int:
        """Slots without an expert: masked, dropped, or of a row that failed closed."""
        return int(self._counts[self.num_experts])

    @property
    def entropy(self) -> float:
        """Mean over tokens of the entropy of the shares a token gives its experts, in nats: 0 to ``log(top_k)``."""
        return float(self._entropy) / max(self.tokens, 1)

    @property
    def imbalance(self) -> float:
        """The busiest expert's load over the mean: 1 is balanced, ``E`` is collapse; 0 before any assignment."""
        load = self.load.double()
        return float(load.max() / load.mean()) if int(load.sum()) else 0.0

    def __repr__(self) -> str:
        return (
            f"RoutingStats({self.tokens} token{'s' * (self.tokens != 1)}, {self.num_experts} experts, "
            f"imbalance {self.imbalance:.2f}, entropy {self.entropy:.2f}, {self.dropped} slots without an expert)"
        )
