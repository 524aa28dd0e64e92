"""Is a result right? Answered in float64 before anything is timed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import moefuse
from moefuse.bench.inputs import Layer, Slot
from moefuse.quant.tensor import QuantTensor
from moefuse.testing.cases import tolerance_of
from moefuse.testing.compare import EXACT, Difference, Tolerance, difference

_SAMPLED_TOKENS = 8
#: a peer's, and ours of a gradient
IN_8_BITS = Tolerance(1.5e-1, 8e-2, "activations in 8 bits, with a scale for 256 of them")
_PEER_TOLERANCE = {
    torch.float32: Tolerance(2e-5, 2e-5, "library products, and sums in an order of their own"),
    torch.bfloat16: Tolerance(4e-2, 2e-2, "every step rounds to bf16, and so does each addition of an eager loop"),
    torch.float16: Tolerance(5e-3, 3e-3, "every step rounds to f16, and so does each addition of an eager loop"),
}


def our_tolerance(layer: Layer, dtype: torch.dtype) -> Tolerance:
    """That of the case table; in float32 grown with the length of the sums, which the table keeps short."""
    if _rounds(layer):
        e4m3 = layer.router.is_cuda and "FP8" in (layer.shape.weights or ())
        return tolerance_of("experts", "out", torch.empty(0), dtype, blocks=True, int8=True, e4m3=e4m3)
    return plain_tolerance(layer, dtype)


def plain_tolerance(layer: Layer, dtype: torch.dtype) -> Tolerance:
    base = tolerance_of("experts", "out", torch.empty(0), dtype, blocks=layer.shape.weights is not None)
    return grown(base, layer) if dtype == torch.float32 else base


def tile_tolerance(layer: Layer, dtype: torch.dtype) -> Tolerance:
    """How far results of two tiles may be apart: they round activations alike, but for sums in another order."""
    plain, flips = (
        plain_tolerance(layer, dtype),
        Tolerance(2e-3, 1e-3, "a hidden value may round to the next of 8 bits"),
    )
    return flips if _rounds(layer) and plain.worst < flips.worst else plain


def _rounds(layer: Layer) -> bool:
    """Whether activations may be rounded to 8 bits."""
    return any(not spec.endswith(":exact") for spec in layer.shape.weights or ())


def grown(base: Tolerance, layer: Layer) -> Tolerance:
    """A bound for the short sums of the case table, for those of a layer."""
    growth = max(1.0, math.sqrt(max(layer.shape.hidden, layer.shape.intermediate) / 256))
    return Tolerance(base.worst * growth, base.rms * growth, f"{base.reason}, grown with the sums")


def peer_tolerance(layer: Layer, dtype: torch.dtype) -> Tolerance:
    return _PEER_TOLERANCE[dtype] if layer.shape.weights is None else IN_8_BITS


def sample(tokens: int) -> Tensor:
    """A few tokens, spread from the first to the last: float64 over all of a large batch would take minutes."""
    count = min(tokens, _SAMPLED_TOKENS)
    return torch.tensor([i * (tokens - 1) // max(1, count - 1) for i in range(count)])


def one_expert(layer: Layer, expert: int) -> dict[str, Any]:
    """An expert alone in its stacks, in float64 on the CPU: what `moefuse.experts` takes besides tokens and routing."""

    def of(value: Any) -> Any:
        if not isinstance(value, (Tensor, QuantTensor)):
            return value
        one = value[expert : expert + 1]
        return one.to("cpu").dequantize(torch.float64) if isinstance(one, QuantTensor) else one.cpu().double()

    given = {"gate_up": layer.gate_up, "down": layer.down, **layer.expert_options}
    return {name: of(value) for name, value in given.items()}


def exact_experts(x: Tensor, ids: Tensor, weights: Tensor, layer: Layer) -> Tensor:
    """The experts' result for a few tokens, in float64 on the CPU, one expert at a time to bound memory."""
    x, ids, weights = x.cpu().double(), ids.cpu(), weights.cpu().double()
    out = torch.zeros_like(x)
    for expert in torch.unique(ids).tolist():
        chosen = ids == expert
        rows = chosen.any(-1)
        share = (weights * chosen).sum(-1, keepdim=True)[rows]
        out[rows] += exact_expert(x[rows], share, one_expert(layer, expert))
    return out


@moefuse.invariant(False)  # what all else is held to is plain torch
def exact_expert(x: Tensor, share: Tensor, stacks: dict[str, Any]) -> Tensor:
    """The result of `one_expert`, times each token's share of it."""
    only = torch.zeros(len(x), 1, dtype=torch.int32)
    out = moefuse.experts(x, only, share, backend="reference", **stacks)
    assert isinstance(out, Tensor)
    return out


@moefuse.invariant(False)
def exact_block(slot: Slot, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The whole block for some tokens: the sum with the residual, and its norm."""
    layer = slot.layer
    x = slot.x[tokens.to(slot.x.device)].cpu().double()
    options: dict[str, Any] = {name: None if t is None else t.cpu().double() for name, t in layer.gate_options.items()}
    weights, ids, normed = moefuse.gate(
        x, layer.router.cpu().double(), layer.shape.routing, return_normed=True, backend="reference", **options
    )
    out = x + exact_experts(normed, ids, weights, layer)
    scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + 1e-6)
    return out, out * scale * layer.next_norm.cpu().double()


def block_error(got: Any, slot: Slot) -> Difference:
    tokens = sample(slot.x.shape[0])
    want = exact_block(slot, tokens)
    return worst([_at(part, tokens, goal) for part, goal in zip(got, want, strict=True)])


def experts_error(got: Any, slot: Slot) -> Difference:
    tokens = sample(slot.x.shape[0])
    at = tokens.to(slot.x.device)
    want = exact_experts(slot.normed[at], slot.ids[at], slot.weights[at], slot.layer)
    return _at(got, tokens, want)


def _at(got: Tensor, tokens: Tensor, want: Tensor) -> Difference:
    """Compare the sampled rows; a NaN or infinity in any other row counts as well."""
    if not bool(got.isfinite().all()):
        return Difference(math.inf, math.inf, "the result has NaN or infinite elements")
    return difference(got[tokens.to(got.device)], want)


@moefuse.invariant(False)
def route_plan_error(got: Any, slot: Slot) -> Difference:
    """Weights against float64; ids and plan exactly."""
    weights, ids, plan = got
    goal, goal_ids = moefuse.route(slot.logits.cpu().double(), slot.layer.shape.routing, backend="reference")
    found = [difference(ids, goal_ids), difference(weights, goal)]
    wanted = moefuse.plan(goal_ids, slot.layer.shape.experts, backend="reference")
    found += [difference(getattr(plan, part), getattr(wanted, part)) for part in ("counts", "offsets", "order")]
    exact = [error for index, error in enumerate(found) if index != 1 and not error.within(EXACT)]
    return Difference(math.inf, math.inf, f"ids or plan differ: {exact[0].where}") if exact else found[1]


def worst(errors: list[Difference]) -> Difference:
    return max(errors, key=lambda error: (error.worst, error.rms))
