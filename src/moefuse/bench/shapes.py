"""The sizes of published mixture-of-experts layers, and what one layer costs to run.

Only the routed experts count: a shared expert or a dense MLP beside them is work of its own in every implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moefuse.quant.formats import format_of, plain_name
from moefuse.quant.arrange import INTERLEAVED, STRIPS_RULE, can_interleave
from moefuse.quant.tensor import format_in, order_in, spec_of
from moefuse.types import MAX_EXPERTS, MAX_TOP_K, Activation, Routing


@dataclass(frozen=True)
class Shape:
    """One layer's sizes and rules.

    ``weights``: the specs of gate_up and of down where they are in blocks, such as ``("Q4_K", "Q6_K:exact")``. Those
    ``:interleaved`` are so where their device reads that, and otherwise in the order that it asks for, as all others.

    >>> shape = find("qwen3-30b-a3b")
    >>> shape.expert_bytes(torch.bfloat16), shape.flops(tokens=1)
    (9437184, 75497472)
    >>> shape.in_blocks("Q4_K", "Q4_K").expert_bytes(torch.bfloat16)
    2654208
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    activation: str = "silu"
    layout: str = "halves"
    bias: bool = False
    renormalize: bool = True
    per_expert_scale: bool = False
    weights: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("experts", "hidden", "intermediate", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.experts > MAX_EXPERTS:
            raise ValueError(f"experts must be at most {MAX_EXPERTS}, got {self.experts}")
        if self.top_k > min(self.experts, MAX_TOP_K):
            raise ValueError(f"top_k must be at most {min(self.experts, MAX_TOP_K)}, got {self.top_k}")
        Activation(self.activation)
        sizes = ((self.rows, self.hidden), (self.hidden, self.intermediate))
        for spec, (rows, columns) in zip(self.weights or (), sizes, strict=False):
            format_of(format_in(spec)).row_bytes(columns)
            if order_in(spec) == INTERLEAVED and not can_interleave(format_in(spec), rows):
                raise ValueError(f"{STRIPS_RULE}, got {spec} and {rows} rows")

    def in_blocks(self, gate_up: str, down: str) -> Shape:
        """The same layer with its experts in these block formats."""
        return replace(self, weights=(spec_of(gate_up), spec_of(down)))

    @property
    def routing(self) -> Routing:
        return Routing(top_k=self.top_k, renormalize=self.renormalize)

    @property
    def rows(self) -> int:
        """Rows of one expert's up product."""
        return Activation(self.activation).width(self.intermediate)

    def expert_bytes(self, dtype: torch.dtype) -> int:
        """What one expert's weights (and biases) take."""
        biases = (self.rows + self.hidden) * dtype.itemsize if self.bias else 0
        if self.weights is None:
            return (self.rows + self.intermediate) * self.hidden * dtype.itemsize + biases
        up, down = (format_of(format_in(spec)) for spec in self.weights)
        return self.rows * up.row_bytes(self.hidden) + self.hidden * down.row_bytes(self.intermediate) + biases

    def bits(self, dtype: torch.dtype) -> float:
        """Of one of the experts' weights, scales included.

        >>> find("qwen3-30b-a3b").in_blocks("Q4_K", "Q6_K").bits(torch.bfloat16)
        5.1875
        """
        values = (self.rows + self.intermediate) * self.hidden
        return 8 * replace(self, bias=False).expert_bytes(dtype) / values

    @property
    def plain(self) -> Shape:
        """The same layer with its experts as numbers."""
        return replace(self, weights=None)

    def layer_bytes(self, dtype: torch.dtype) -> int:
        """All experts and the router."""
        return self.experts * (self.expert_bytes(dtype) + self.hidden * dtype.itemsize)

    def active_bytes(self, ids: Tensor, dtype: torch.dtype) -> int:
        """Expert bytes that a call with these ids must read: each expert that has a token, once."""
        live = ids[(ids >= 0) & (ids < self.experts)]
        return len(torch.unique(live)) * self.expert_bytes(dtype)

    def flops(self, tokens: int) -> int:
        """Multiplications and additions of the up and down products."""
        return 2 * tokens * self.top_k * (self.rows + self.intermediate) * self.hidden

    def describe(self) -> str:
        extras = [self.activation]
        extras += [self.layout] if self.layout != "halves" else []
        extras += ["biases"] if self.bias else []
        extras += [f"in {'/'.join(dict.fromkeys(self.weights))}"] if self.weights else []
        sizes = f"E={self.experts} H={self.hidden} I={self.intermediate} top_k={self.top_k}"
        return f"{self.name}: {sizes} {' '.join(extras)}"


SHAPES: tuple[Shape, ...] = (
    Shape("qwen3-30b-a3b", 128, 2048, 768, 8),
    Shape("qwen3.5-35b-a3b", 256, 2048, 512, 8),
    Shape("gemma4-26b-a4b", 128, 2816, 704, 8, "gelu_tanh", per_expert_scale=True),
    Shape("mixtral-8x7b", 8, 4096, 14336, 2),
    Shape("gpt-oss-20b", 32, 2880, 2880, 4, "swiglu_oai", "interleaved", bias=True),
    Shape("olmoe", 64, 2048, 1024, 8, renormalize=False),
    Shape("deepseek-v2-lite", 64, 2048, 1408, 6, renormalize=False),
)


def names() -> tuple[str, ...]:
    return tuple(shape.name for shape in SHAPES)


def find(name: str) -> Shape:
    """The shape of a model, however its name is spelled: case, dots, dashes and underscores do not matter."""

    for shape in SHAPES:
        if plain_name(shape.name) == plain_name(name):
            return shape
    raise KeyError(name)
