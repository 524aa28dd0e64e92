"""The arguments of ops, at random: the tensors a case is made of, and one function per op that makes its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import moefuse
from moefuse import backends
from moefuse.quant.arrange import INTERLEAVED, can_interleave
from moefuse.quant.tensor import QuantTensor
from moefuse.testing.random_blocks import random_blocks
from moefuse.types import Activation, Routing


class Inputs:
    """Random tensors for one case: realistic sizes, one generator, one element type."""

    def __init__(self, rng: torch.Generator, dtype: torch.dtype) -> None:
        self.rng, self.dtype = rng, dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.rng) * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.5, high: float = 1.5, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.rand(shape, generator=self.rng) * (high - low) + low).to(dtype or self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """Scaled by its fan-in, as trained weights are: results keep the size of their inputs."""
        return self.normal(*shape, scale=shape[-1] ** -0.5)

    def stack(self, spec: str | None, *shape: int) -> Tensor | QuantTensor:
        """As `weight`; with a spec such as "Q4_K" or "Q4_K:exact", in blocks."""
        return self.weight(*shape) if spec is None else random_blocks(spec, shape, self.rng, shape[-1] ** -0.5)

    def ids(self, T: int, top_k: int, E: int) -> Tensor:
        """Distinct experts per token."""
        scores = torch.rand((T, E), generator=self.rng)
        return scores.argsort(-1)[:, :top_k].to(torch.int32)

    def shares(self, T: int, top_k: int) -> Tensor:
        return torch.softmax(torch.randn((T, top_k), generator=self.rng), -1)


#: makes the arguments of one op
Maker = Callable[[Inputs], dict[str, Any]]


def map_tensors(
    value: Any, change: Callable[[Tensor], Tensor], blocks: Callable[[QuantTensor], QuantTensor] | None = None
) -> Any:
    """An argument of an op with every tensor in it changed; those in blocks by ``blocks`` where that is given."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change, blocks) for item in value)
    if isinstance(value, QuantTensor):
        return replace(value, blocks=change(value.blocks)) if blocks is None else blocks(value)
    if isinstance(value, moefuse.Plan):
        tensors = {name: change(t) for name, t in value.tensors.items()}
        return moefuse.Plan(**tensors, top_k=value.top_k, trusted=True)
    return value


def moved(inputs: dict[str, Any], device: torch.device | str, arrangement: str | None = None) -> dict[str, Any]:
    """The arguments of an op on a device; blocks as its backend reads them, or arranged as asked for."""

    def blocks(value: QuantTensor) -> QuantTensor:
        there = value.to(device)
        impossible = arrangement == INTERLEAVED and not can_interleave(there.format, there.shape[-2])
        return there if arrangement is None or impossible else there.arranged(arrangement)

    return {name: map_tensors(value, lambda t: t.to(device), blocks) for name, value in inputs.items()}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument: itself, a tuple's, a plan's, a stack of blocks'."""
    found: list[Tensor] = []
    map_tensors(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def logits(T: int, E: int, routing: Routing, bias: bool = False, scale: bool = False) -> Maker:
    def make(inputs: Inputs) -> dict[str, Any]:
        logits = inputs.normal(T, E, scale=2.0)
        if bias:
            # Scores on a grid of 1/64 and biases between its lines: no two keys are within rounding of each other.
            logits = torch.logit((torch.rand((T, E), generator=inputs.rng).argsort(-1) + 0.5) / E).to(inputs.dtype)
        return {
            "logits": logits,
            "routing": routing,
            "bias": inputs.normal(E, scale=0.3, dtype=torch.float32) if bias else None,
            "per_expert_scale": inputs.uniform(E, dtype=torch.float32) if scale else None,
        }

    return make


def edge_logits(inputs: Inputs) -> dict[str, Any]:
    logits = inputs.normal(8, 12)
    logits[0] = 1.0
    logits[1, ::2] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = torch.nan
    logits[4, 7] = torch.inf
    logits[5, 2:] = -torch.inf
    logits[6, [3, 9]] = 50.0
    return {"logits": logits, "routing": Routing(top_k=4)}


def masked_softcap(inputs: Inputs) -> dict[str, Any]:
    logits = inputs.normal(5, 12)
    logits[:, ::3] = -torch.inf
    return {"logits": logits, "routing": Routing(top_k=3, softcap=2.0, renormalize=False)}


def ranked(
    inputs: Inputs, T: int, E: int, H: int, top_k: int, norm: bool, logit_bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x, router, norm weight and logit bias, drawn until float32 must choose as float64 does.

    No two logits that decide about a token's experts are within 1e-5.
    """
    while True:
        x, router = inputs.normal(T, H), inputs.weight(E, H)
        norm_weight = inputs.uniform(H) if norm else None
        added = inputs.normal(E, dtype=torch.float32) if logit_bias else None
        wide = x.double()
        if norm_weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm_weight.double()
        logits = wide @ router.double().T
        if added is not None:
            logits = logits + added.double()
        foremost = logits.topk(min(top_k + 1, E), -1).values
        if bool((foremost.diff(dim=-1) < -1e-5).all()):
            return x, router, norm_weight, added


def gate(T: int, E: int, H: int, routing: Routing, **on: bool) -> Maker:
    def make(inputs: Inputs) -> dict[str, Any]:
        drawn = ranked(inputs, T, E, H, routing.top_k, on.get("norm", False), on.get("logit_bias", False))
        x, router, norm_weight, logit_bias = drawn
        return {
            "x": x,
            "weight": router,
            "routing": routing,
            "norm_weight": norm_weight,
            "logit_bias": logit_bias,
            "per_expert_scale": inputs.uniform(E, dtype=torch.float32) if on.get("scale") else None,
            "return_normed": on.get("norm", False),
        }

    return make


def plan(T: int, E: int, top_k: int, ids: Callable[[Inputs], Tensor] | None = None) -> Maker:
    return lambda inputs: {"ids": ids(inputs) if ids else inputs.ids(T, top_k, E), "num_experts": E}


def messy_ids(T: int, top_k: int, E: int) -> Callable[[Inputs], Tensor]:
    """Duplicates and sentinels among the ids."""

    def make(inputs: Inputs) -> Tensor:
        return torch.randint(-2, E + 3, (T, top_k), generator=inputs.rng)

    return make


def grouped_linear(T: int, E: int, N: int, K: int, top_k: int, gather: bool, scatter: bool, **on: Any) -> Maker:
    def make(inputs: Inputs) -> dict[str, Any]:
        ids = messy_ids(T, top_k, E)(inputs) if on.get("messy") else inputs.ids(T, top_k, E)
        if on.get("one_expert"):
            ids = torch.full_like(ids, E - 1)
        plan = moefuse.plan(ids, E, backend=backends.REFERENCE)
        rows = T if gather and not on.get("slots") else T * top_k
        x, weight = inputs.normal(rows, K), inputs.stack(on.get("blocks"), E, N, K)
        if on.get("transposed"):
            weight = inputs.weight(E, K, N).transpose(1, 2)
        if on.get("blocks"):
            # Bounded, so that the step of 8-bit activations, which follows the largest, is the same in every row.
            x = inputs.uniform(rows, K, low=-1.7, high=1.7)
        bias = inputs.normal(E, N) if on.get("bias") else None
        return {"x": x, "weight": weight, "plan": plan, "gather": gather, "scatter": scatter, "bias": bias}

    return make


def linear(T: int, K: int, *weights: tuple[int, str | None], bias: bool = False, residual: bool = False) -> Maker:
    """``weights``: of each its N and its spec. Of several the second has no bias."""

    def make(inputs: Inputs) -> dict[str, Any]:
        made = tuple(inputs.stack(spec, N, K) for N, spec in weights)
        biases = tuple(inputs.normal(N) if bias and i != 1 else None for i, (N, _) in enumerate(weights))
        # Bounded, so that the step of 8-bit activations, which follows the largest, is the same in every row.
        x = inputs.uniform(T, K, low=-1.7, high=1.7)
        if len(made) > 1:
            return {"x": x, "weight": made, "bias": biases if bias else None}
        added = inputs.normal(T, made[0].shape[0]) if residual else None
        return {"x": x, "weight": made[0], "bias": biases[0], "residual": added}

    return make


def outer(T: int, E: int, N: int, K: int, top_k: int, gather: bool, scatter: bool) -> Maker:
    def make(inputs: Inputs) -> dict[str, Any]:
        plan = moefuse.plan(messy_ids(T, top_k, E)(inputs), E, backend=backends.REFERENCE)
        grad = inputs.normal(T * top_k, N)
        x = inputs.normal(T if gather else T * top_k, K)
        return {"grad": grad, "x": x, "plan": plan, "gather": gather, "scatter": scatter}

    return make


def glu(shape: tuple[int, ...], activation: str | Activation, layout: str = "halves", apart: bool = False) -> Maker:
    def make(inputs: Inputs) -> dict[str, Any]:
        if apart:
            return {"gate_up": inputs.normal(*shape), "up": inputs.normal(*shape), "activation": activation}
        # Some values far out, where a careless exp, tanh or square leaves the range.
        gate_up = inputs.normal(*shape, scale=3.0)
        if gate_up.numel():
            gate_up.view(-1)[0], gate_up.view(-1)[-1] = -300.0, 40.0
        return {"gate_up": gate_up, "activation": activation, "layout": layout}

    return make


def combine(T: int, top_k: int, H: int, *parts: str) -> Maker:
    def make(inputs: Inputs) -> dict[str, Any]:
        made: dict[str, Any] = {"y": inputs.normal(T * top_k, H), "weights": inputs.shares(T, top_k)}
        makers: dict[str, Callable[[], Tensor]] = {
            "inverse": lambda: torch.randperm(T * top_k, generator=inputs.rng).to(torch.int32),
            "shared": lambda: inputs.normal(T, H),
            "shared_gate": lambda: inputs.uniform(T),
            "shared_logit": lambda: inputs.normal(T),
            "residual": lambda: inputs.normal(T, H),
            "norm_weight": lambda: inputs.uniform(H),
        }
        made |= {name: maker() for name, maker in makers.items() if name in parts}
        return made | {"eps": 1e-5} if "norm_weight" in parts else made

    return make


def experts(T: int, E: int, H: int, I: int, top_k: int, **on: Any) -> Maker:
    def make(inputs: Inputs) -> dict[str, Any]:
        activation = Activation.of(on.get("activation", "silu"))
        rows = activation.width(I)
        ids = messy_ids(T, top_k, E)(inputs) if on.get("messy") else inputs.ids(T, top_k, E)
        if on.get("one_expert"):
            ids = torch.zeros_like(ids)
        *first, last = on.get("blocks", (None,) * (3 if on.get("apart") else 2))
        stacks = tuple(inputs.stack(spec, E, rows // len(first), H) for spec in first)
        made = {
            "x": inputs.normal(T, H),
            "ids": ids,
            "weights": inputs.shares(T, top_k),
            "gate_up": stacks if len(stacks) == 2 else stacks[0],
            "down": inputs.stack(last, E, H, I),
            "activation": activation,
            "layout": on.get("layout", "halves"),
        }
        if on.get("bias"):
            made |= {"gate_up_bias": inputs.normal(E, rows), "down_bias": inputs.normal(E, H)}
        if on.get("tail"):
            made |= {"shared": inputs.normal(T, H), "shared_logit": inputs.normal(T), "residual": inputs.normal(T, H)}
            made |= {"norm_weight": inputs.uniform(H), "eps": 1e-5}
        if on.get("strided"):
            made["x"] = inputs.normal(T, 2 * H)[:, ::2]
            made["gate_up"] = inputs.weight(E, H, rows).transpose(1, 2)
            made["weights"] = inputs.shares(top_k, T).T
        return made

    return make


def moe(T: int, E: int, H: int, I: int, routing: Routing) -> Maker:
    def make(inputs: Inputs) -> dict[str, Any]:
        x, router, norm_weight, _ = ranked(inputs, T, E, H, routing.top_k, norm=True)
        return {
            "x": x,
            "router": router,
            "gate_up": inputs.weight(E, 2 * I, H),
            "down": inputs.weight(E, H, I),
            "routing": routing,
            "norm_weight": norm_weight,
            "residual": x,
            "next_norm_weight": inputs.uniform(H),
        }

    return make


def rope(B: int, S: int, Hq: int, Hk: int, D: int, R: int, **on: Any) -> Maker:
    """Heads that are views of one product's result; ``places`` and ``position`` of a cache."""

    def make(inputs: Inputs) -> dict[str, Any]:
        heads = inputs.normal(B, S, Hq + 2 * Hk, D)
        angles = torch.rand((B if on.get("apart") else 1, S, R // 2), generator=inputs.rng) * 6.3
        dtype = inputs.dtype if on.get("rounded") else torch.float32
        made: dict[str, Any] = {"q": heads[:, :, :Hq], "k": heads[:, :, Hq : Hq + Hk]}
        made |= {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
        if on.get("norm"):
            made |= {"q_norm": inputs.uniform(D), "k_norm": inputs.uniform(D), "eps": 1e-5}
        if "places" in on:
            cache = inputs.normal(2, B, Hk, on["places"], D)
            made |= {"v": heads[:, :, Hq + Hk :], "keys": cache[0], "values": cache[1]}
            made["position"] = torch.tensor([on["position"]])
        return made

    return make


def attend(B: int, Hq: int, Hk: int, D: int, L: int, position: int, **on: Any) -> Maker:
    """Places that are not seen hold no number."""

    def make(inputs: Inputs) -> dict[str, Any]:
        made: dict[str, Any] = {"q": inputs.normal(B, Hq, D), "keys": inputs.normal(B, Hk, L, D)}
        made |= {"values": inputs.normal(B, Hk, L, on.get("Dv", D)), "position": torch.tensor([position])}
        seen = (torch.arange(L) <= position).expand(B, L)
        if on.get("mask"):
            made["mask"] = torch.rand((B, L), generator=inputs.rng) < 0.6
            made["mask"][: int(on.get("blind", False))] = False
            seen = seen & made["mask"]
        if on.get("window"):
            made["window"] = on["window"]
        if on.get("sinks"):
            made |= {"sinks": inputs.normal(Hq), "scale": 0.3}
        for cache in (made["keys"], made["values"]):
            cache.masked_fill_(~seen[:, None, :, None], torch.nan)
        return made

    return make
