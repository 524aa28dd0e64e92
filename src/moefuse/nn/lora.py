"""LoRA on experts: a low-rank pair beside each product, the base frozen, float or quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moefuse.ops._core.checks import check_count
from moefuse.ops.grouped_linear import grouped_linear
from moefuse.types import Activation, Plan, check_number


class Adaptable(Protocol):
    """A module of experts that takes adapters: `moefuse.nn.MoE`, `moefuse.hf.BlockExperts`."""

    activation: Activation
    specs: dict[str, str]
    lora: ExpertsLoRA | None

    def stack(self, name: str) -> Any:
        """A weight, in its blocks where it has them."""

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Of all its parameters."""


class ExpertsLoRA(nn.Module):
    """Rank-r adapters per expert on ``gate_up`` and ``down``.

    A product becomes ``x @ W.T + scale * (x @ A.T) @ B.T``, each factor a grouped product over the same plan: no
    expert's delta is ever formed. B starts at zero, so that training starts from the base model.

    Attach with `add_lora`.
    """

    def __init__(self, block: Adaptable, rank: int, alpha: float) -> None:
        super().__init__()
        E, H, I = block.stack("down").shape
        rows = block.activation.width(I)
        self.rank, self.scale = rank, alpha / rank
        router = getattr(block, "router", None)  # experts alone have none, and adapters in float32

        def zeros(*shape: int) -> nn.Parameter:
            dtype = torch.float32 if router is None else router.dtype
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=block.stack("down").device))

        self.gate_up_a, self.gate_up_b = zeros(E, rank, H), zeros(E, rows, rank)
        self.down_a, self.down_b = zeros(E, rank, I), zeros(E, H, rank)
        for a in (self.gate_up_a, self.down_a):
            nn.init.normal_(a, std=a.shape[-1] ** -0.5)

    def up(self, x: Tensor, plan: Plan, backend: str | None) -> Tensor:
        """What the adapter adds to the pre-activation, ``[S, 2I]`` expert-major, for tokens ``[T, H]``."""
        inner = grouped_linear(x, self.gate_up_a.to(x.dtype), plan, gather=True, scatter=False, backend=backend)
        added = grouped_linear(inner, self.gate_up_b.to(x.dtype), plan, gather=False, scatter=False, backend=backend)
        return self.scale * added

    def down(self, hidden: Tensor, plan: Plan, backend: str | None) -> Tensor:
        """What it adds to the experts' outputs, ``[S, H]`` in slot order, for expert-major rows ``[S, I]``."""
        inner = grouped_linear(hidden, self.down_a.to(hidden.dtype), plan, gather=False, scatter=False, backend=backend)
        added = grouped_linear(inner, self.down_b.to(hidden.dtype), plan, gather=False, scatter=True, backend=backend)
        return self.scale * added

    @torch.no_grad()
    def fold_into(self, gate_up: Sequence[Tensor], down: Tensor) -> None:
        """Add the adapters to stacks of numbers, one expert's delta at a time; gate and up may come apart."""
        rows = self.gate_up_b.chunk(len(gate_up), 1)
        pairs = [(weight, self.gate_up_a, b) for weight, b in zip(gate_up, rows, strict=True)]
        for weight, a, b in (*pairs, (down, self.down_a, self.down_b)):
            for e in range(weight.shape[0]):
                weight[e].copy_(weight[e].float() + self.scale * (b[e].float() @ a[e].float()))

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}"


def add_lora(block: Adaptable, rank: int, *, alpha: float | None = None) -> ExpertsLoRA:
    """Freeze ``block`` and give its experts adapters of ``rank``; only they have gradients then.

    Args:
        block: a `moefuse.nn.MoE`, or the experts of a transformers model in blocks, `moefuse.hf.BlockExperts`.
        rank: of every adapter.
        alpha: the adapters' sum is scaled by ``alpha / rank``; by default ``2 * rank``.

    Returns:
        The adapters, ``block.lora``: its ``state_dict()`` is what to save, `merge_lora` folds it in.

    >>> from moefuse import Routing
    >>> from moefuse.nn import MoE
    >>> layer = MoE(16, 8, 4, Routing(top_k=2))
    >>> adapters = add_lora(layer, rank=2)
    >>> sorted(name for name, p in layer.named_parameters() if p.requires_grad)
    ['lora.down_a', 'lora.down_b', 'lora.gate_up_a', 'lora.gate_up_b']
    """
    _check_kind("add_lora", block)
    _, H, I = block.stack("down").shape
    if block.lora is not None:
        raise ValueError(
            f"add_lora: the layer has adapters of rank {block.lora.rank} already; merge_lora folds them in"
        )
    check_count("add_lora", "rank", rank, 1)
    if alpha is not None:
        check_number("add_lora", "alpha", alpha)
    if rank > min(H, I):
        raise ValueError(f"add_lora: rank must not exceed min(H, I) = {min(H, I)}, got {rank}")
    block.requires_grad_(False)
    block.lora = ExpertsLoRA(block, rank, 2.0 * rank if alpha is None else alpha)
    return block.lora


def merge_lora(block: Adaptable) -> None:
    """Fold the adapters into the experts' float weights and remove them; one expert's delta at a time.

    Experts in blocks are refused: rounding to their format would lose most of a delta, and nobody would see it.

    >>> from moefuse import Routing
    >>> from moefuse.nn import MoE
    >>> layer = MoE(16, 8, 4, Routing(top_k=2))
    >>> _ = add_lora(layer, rank=2)
    >>> merge_lora(layer)
    >>> layer.lora is None
    True
    """
    _check_kind("merge_lora", block)
    lora = block.lora
    if lora is None:
        raise ValueError("merge_lora: the layer has no adapters; add_lora gives it some")
    if block.specs:
        raise ValueError(
            "merge_lora: experts in blocks cannot take a delta; keep the adapters beside them, or turn a transformers "
            "model into numbers with moefuse.hf.dequantize, which folds them in"
        )
    gate_up, up = block.stack("gate_up"), block.stack("up")
    lora.fold_into((gate_up,) if up is None else (gate_up, up), block.stack("down"))
    block.lora = None


def _check_kind(op: str, block: Any) -> None:
    if not all(hasattr(block, name) for name in ("activation", "specs", "lora", "stack")):
        kinds = "a moefuse.nn.MoE, or a moefuse.hf.BlockExperts of a model in blocks"
        raise TypeError(f"{op}: block must be {kinds}, got {type(block).__name__}")
