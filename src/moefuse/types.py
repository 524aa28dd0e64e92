"""The values that ops exchange, and the letters their shapes are written in.

=====  =======================================================================
``T``  tokens (rows of the hidden state; batch and sequence flattened)
``E``  experts
``H``  hidden size
``I``  intermediate size of one expert
``S``  assignments, ``T * top_k``: one (token, slot) pair that goes to one expert
=====  =======================================================================

Around the layer, in `moefuse.rope` and `moefuse.attend`, tokens are apart: ``B`` sequences of ``S`` tokens, with ``Hq``
query heads and ``Hk`` key heads of ``D`` values each (``Dv`` of a value), and ``L`` places in a cache.

``M``, ``N`` and ``K`` are left to matrix products, where they mean what they always mean.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.quant.tensor import QuantTensor

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
GROUP_SCORES = ("max", "top2_sum")
LAYOUTS = ("halves", "interleaved")
ACTIVATION_KINDS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu_oai", "swiglu_clamp")
MAX_EXPERTS = 1024
MAX_TOP_K = 64
FLOAT32 = torch.finfo(torch.float32)

#: a stack of expert matrices ``[E, N, K]``, as numbers or in blocks
Weight = Tensor | QuantTensor

# The floor under a renormalising sum. No finite softmax row reaches 2**-14; the others follow DeepSeek-V3.
_NORM_FLOOR = {"softmax": 2.0**-14, "sigmoid": 1e-20, "sqrtsoftplus": 1e-20}


_DTYPES = {
    torch.float32: ("float32", "f32", "fp32", "float"),
    torch.bfloat16: ("bfloat16", "bf16"),
    torch.float16: ("float16", "f16", "fp16", "half"),
}


def dtype_named(name: str) -> torch.dtype | None:
    """The element type of a name, long or short, in either case; None where we compute in no such type.

    >>> dtype_named("bf16"), dtype_named("torch.float32"), dtype_named("int8")
    (torch.bfloat16, torch.float32, None)
    """
    plain = name.lower().removeprefix("torch.")
    return next((dtype for dtype, names in _DTYPES.items() if plain in names), None)


def name_of(dtype: torch.dtype) -> str:
    """``float32`` of ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _one_of(owner: str, name: str, value: object, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(valid)}, got {value!r}")


def check_int(owner: str, name: str, value: object) -> None:
    """A whole number: True is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{owner}: {name} must be an int, got {type(value).__name__}")


def check_flag(owner: str, name: str, value: object) -> None:
    """A yes or no: "no" is a string and would count as yes."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be a bool, got {type(value).__name__}")


def check_number(owner: str, name: str, value: object, low: float = -FLOAT32.max, what: str = "finite") -> None:
    """A number from ``low`` on that float32, in which kernels take it, can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: {name} must be a number, got {type(value).__name__}")
    if not low <= value <= FLOAT32.max:
        raise ValueError(f"{owner}: {name} must be {what} in float32, got {value}")


def _positive(owner: str, name: str, value: object) -> None:
    check_number(owner, name, value, FLOAT32.tiny, "positive")


@dataclass(frozen=True)
class Routing:
    """How scores become experts and weights.

    Attributes:
        top_k: experts per token.
        score: how a logit becomes a score: softmax over all experts, sigmoid, or sqrt(softplus).
        renormalize: divide the selected scores by their sum.
        scale: the routed scaling factor, applied after renormalising.
        groups: number of equal, contiguous expert groups; 1 means no groups.
        top_groups: groups kept when ``groups > 1``.
        group_score: a group's value: its largest score, or the sum of its two largest.
        softcap: logits become ``softcap * tanh(logits / softcap)`` before scoring.
        norm_floor: smallest divisor when renormalising; by default what suits ``score``. ``floor`` is the one in use.
        renormalize_after_scale: divide by the sum once more after every scale.

    Example: Qwen3-MoE, DeepSeek-V3 and Mixtral.

    >>> Routing(top_k=8).score
    'softmax'
    >>> Routing(top_k=8, score="sigmoid", scale=2.5, groups=8, top_groups=4, group_score="top2_sum").floor
    1e-20
    >>> Routing(top_k=2, renormalize=True).floor == 2.0**-14
    True
    """

    top_k: int
    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    softcap: float | None = None
    norm_floor: float | None = None
    renormalize_after_scale: bool = False

    def __post_init__(self) -> None:
        _one_of("Routing", "score", self.score, SCORES)
        _one_of("Routing", "group_score", self.group_score, GROUP_SCORES)
        for name in ("top_k", "groups", "top_groups"):
            check_int("Routing", name, getattr(self, name))
        for name in ("renormalize", "renormalize_after_scale"):
            check_flag("Routing", name, getattr(self, name))
        check_number("Routing", "scale", self.scale)
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"Routing: top_k must be from 1 to {MAX_TOP_K}, got {self.top_k}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"Routing: top_groups must be from 1 to groups={self.groups}, got {self.top_groups}")
        if self.softcap is not None:
            _positive("Routing", "softcap", self.softcap)
        if self.norm_floor is not None:
            check_number("Routing", "norm_floor", self.norm_floor, 0.0, "finite and not negative")

    @property
    def floor(self) -> float:
        """The smallest divisor when renormalising."""
        return _NORM_FLOOR[self.score] if self.norm_floor is None else self.norm_floor


@dataclass(frozen=True)
class Activation:
    """What stands between the up and the down product.

    ``act(gate) * up`` when gated, ``act(x)`` when not. ``alpha`` and ``limit`` belong to the clamped kinds:

    * ``swiglu_oai`` (gpt-oss): ``g * sigmoid(alpha * g) * (u + 1)`` with ``g = min(gate, limit)`` and ``u`` in +-limit.
    * ``swiglu_clamp`` (DeepSeek-V4): ``silu(g) * u`` with the same clamps.

    >>> Activation.of("silu")
    Activation(kind='silu', gated=True, alpha=1.702, limit=7.0)
    >>> Activation("relu2", gated=False).width(768)
    768
    """

    kind: str
    gated: bool = True
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        _one_of("Activation", "kind", self.kind, ACTIVATION_KINDS)
        check_flag("Activation", "gated", self.gated)
        _positive("Activation", "alpha", self.alpha)
        _positive("Activation", "limit", self.limit)

    @staticmethod
    def of(activation: str | Activation) -> Activation:
        """An activation from its name, or itself."""
        if isinstance(activation, Activation):
            return activation
        return _BY_NAME.get(activation) or Activation(activation)

    def width(self, intermediate: int) -> int:
        """Rows of the up product that feed ``intermediate`` activations."""
        return 2 * intermediate if self.gated else intermediate


_BY_NAME = {kind: Activation(kind) for kind in ACTIVATION_KINDS}


@dataclass(frozen=True)
class Plan:
    """Which assignments go to which expert, as a CSR table (all int32).

    Three tokens, ``top_k=2``, three experts, ``ids = [[2, 0], [0, 3], [2, 2]]`` (3 is "no expert"):

    * ``counts  = [2, 0, 3]``: assignments per expert;
    * ``offsets = [0, 2, 2, 5]``: where each expert's run begins in ``order``; the last is the number of live ones;
    * ``order   = [1, 2, 0, 4, 5, 3]``: assignments (``token * top_k + slot``) expert by expert, increasing inside
      one; those without an expert last;
    * ``inverse = [2, 0, 1, 5, 3, 4]``: where assignment ``s`` stands in ``order``.

    One made by hand, or by `dataclasses.replace`, is checked whole, which on a GPU waits for it; what `moefuse.plan`
    makes is right by construction (``trusted``).
    """

    counts: Tensor
    offsets: Tensor
    order: Tensor
    inverse: Tensor
    top_k: int
    trusted: InitVar[bool] = False

    def __post_init__(self, trusted: bool) -> None:
        if not trusted:
            self._check()

    def _check(self) -> None:
        check_int("Plan", "top_k", self.top_k)
        for name in ("counts", "offsets", "order", "inverse"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) or value.dtype != torch.int32:
                got = value.dtype if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(f"Plan: {name} must be an int32 tensor, got {got}")
            if value.dim() != 1:
                raise ValueError(f"Plan: {name} must have one dimension, got shape {list(value.shape)}")
            if value.device != self.order.device:
                raise ValueError(f"Plan: {name} must be on {self.order.device} like order, got {value.device}")
        E, S = self.counts.shape[0], self.order.shape[0]
        if not 1 <= E <= MAX_EXPERTS:
            raise ValueError(f"Plan: counts must have from 1 to {MAX_EXPERTS} experts, got {E}")
        if self.offsets.shape[0] != E + 1 or self.inverse.shape[0] != S:
            got = f"{self.offsets.shape[0]} and {self.inverse.shape[0]}"
            raise ValueError(f"Plan: offsets and inverse must have E + 1 = {E + 1} and S = {S} entries, got {got}")
        if self.top_k < 1 or S % self.top_k:
            raise ValueError(f"Plan: top_k must be at least 1 and divide the {S} assignments, got {self.top_k}")
        if not torch.compiler.is_compiling() and type(self.order) is Tensor and self.order.device.type != "meta":
            self._check_values(S)

    def _check_values(self, S: int) -> None:
        counts, offsets, order, inverse = (t.long() for t in (self.counts, self.offsets, self.order, self.inverse))
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
        if bool((counts < 0).any()) or not torch.equal(starts, offsets) or int(offsets[-1]) > S:
            raise ValueError(f"Plan: offsets must be the running sum of counts, from 0 to at most S={S}, got others")
        inside = bool(((order >= 0) & (order < S)).all())
        if not inside or not torch.equal(inverse[order], torch.arange(S, device=order.device)):
            raise ValueError(f"Plan: order must hold 0 to {S - 1} once each and inverse undo it, got others")

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {"counts": self.counts, "offsets": self.offsets, "order": self.order, "inverse": self.inverse}

    @property
    def num_experts(self) -> int:
        return self.counts.shape[0]

    @property
    def assignments(self) -> int:
        return self.order.shape[0]


class Router(NamedTuple):
    """What `moefuse.gate` routes with: the router's weight, the norm before it, and what is added to its product."""

    weight: Tensor
    norm_weight: Tensor | None = None
    bias: Tensor | None = None
    logit_bias: Tensor | None = None
    per_expert_scale: Tensor | None = None
    eps: float = 1e-6


class Stacks(NamedTuple):
    """The experts' weights and biases. ``gate_up`` is the gate alone where ``up`` comes apart from it, or where nothing
    is gated; each stack has a format of its own."""

    gate_up: Weight
    up: Weight | None
    down: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    layout: str = "halves"

    @property
    def specs(self) -> tuple[str | None, str | None, str | None]:
        """The `QuantTensor.spec` of each stack, None for numbers."""
        return spec_of_weight(self.gate_up), spec_of_weight(self.up), spec_of_weight(self.down)


class Projections(NamedTuple):
    """The weights ``[N, K]`` of `moefuse.linear`, one to four that take the same rows, and the bias of each."""

    weight: Weight
    second: Weight | None = None
    third: Weight | None = None
    fourth: Weight | None = None
    bias: Tensor | None = None
    second_bias: Tensor | None = None
    third_bias: Tensor | None = None
    fourth_bias: Tensor | None = None

    @classmethod
    def of(cls, weights: tuple[Weight, ...], biases: tuple[Tensor | None, ...]) -> Projections:
        weight, *others = weights
        second, third, fourth = (*others, None, None, None)[:3]
        return cls(weight, second, third, fourth, *biases)

    @property
    def pairs(self) -> list[tuple[Weight, Tensor | None]]:
        """Each weight with its bias."""
        biases = self.bias, self.second_bias, self.third_bias, self.fourth_bias
        pairs = zip((self.weight, self.second, self.third, self.fourth), biases, strict=True)
        return [(weight, bias) for weight, bias in pairs if weight is not None]

    @property
    def stops(self) -> list[int]:
        """Where the columns of each end, side by side."""
        stops, stop = [], 0
        for weight, _ in self.pairs:
            stop += weight.shape[0]
            stops.append(stop)
        return stops

    @property
    def specs(self) -> tuple[str | None, ...]:
        """The `QuantTensor.spec` of each weight, None for numbers."""
        weights = self.weight, self.second, self.third, self.fourth
        return tuple(map(spec_of_weight, weights))


class Tail(NamedTuple):
    """What follows the weighted sum of the experts: shared expert, residual, and the norm of the result."""

    shared: Tensor | None = None
    shared_gate: Tensor | None = None
    shared_logit: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    eps: float = 1e-6


class Outputs(NamedTuple):
    """Where an op writes: the sum, and its norm where the tail has one."""

    out: Tensor
    normed: Tensor | None = None


class Wanted(NamedTuple):
    """Of which inputs of `moefuse.experts` a backward pass needs gradients."""

    x: bool
    weights: bool
    gate_up: bool
    up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


class Rotary(NamedTuple):
    """What `moefuse.rope` does to each head: the norms before it, and the angles, ``[B or 1, S, R/2]`` each."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6


class Cache(NamedTuple):
    """Keys ``[B, Hk, L, D]`` and values ``[B, Hk, L, Dv]`` of L places, and the place of the first query: one integer,
    which only the device reads."""

    keys: Tensor
    values: Tensor
    position: Tensor


def spec_of_weight(weight: object) -> str | None:
    """The `QuantTensor.spec` of a weight in blocks, or None."""
    return weight.spec if isinstance(weight, QuantTensor) else None
