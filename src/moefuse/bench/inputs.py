"""Weights and tokens to measure with: fan-in scaled, routed by a real router, rotated so that caches do not lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moefuse
from moefuse.bench import machine
from moefuse.bench.floor import BEYOND_CACHE
from moefuse.bench.shapes import Shape
from moefuse.ops._core.arrange import arranged
from moefuse.quant.arrange import INTERLEAVED, wanted
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor, arrange_, format_in, in_file_order, order_in, wrap
from moefuse.testing.random_blocks import random_blocks

GRAPH_LAYERS = 12
_MOST_LAYERS = 16
_MOST_SLOTS = 64
_FEWEST_SLOTS = 4
# Prime, so that copies of the pool never line up with experts: no two experts hold the same weights in the same place.
_POOL = 1_048_573
_POOL_BLOCKS = 16_381


@dataclass(frozen=True)
class Layer:
    """The parameters of one block. ``gate_up [E, 2I, H]``, ``down [E, H, I]``, plain or in blocks."""

    shape: Shape
    router: Tensor
    gate_up: Tensor | QuantTensor
    down: Tensor | QuantTensor
    norm: Tensor
    next_norm: Tensor
    logit_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    per_expert_scale: Tensor | None = None

    @property
    def expert_options(self) -> dict[str, Any]:
        """What `moefuse.experts` takes besides the two stacks."""
        return {
            "activation": self.shape.activation,
            "layout": self.shape.layout,
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
        }

    @property
    def gate_options(self) -> dict[str, Any]:
        """What `moefuse.gate` takes besides the router and the rule."""
        return {"norm_weight": self.norm, "logit_bias": self.logit_bias, "per_expert_scale": self.per_expert_scale}


@dataclass(frozen=True)
class Slot:
    """One call's worth of input: tokens, where the router sends them, and the layer they meet."""

    layer: Layer
    x: Tensor
    normed: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor
    #: for peers, as transformers' routers hand them over: int64, and the type of the model
    wide_ids: Tensor
    cast_weights: Tensor


def fits(shape: Shape, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why one layer of this shape cannot be held here, or None."""
    need, have = shape.layer_bytes(dtype), machine.available_bytes(device)
    if need <= 0.8 * have:
        return None
    sizes = f"{shape.experts} experts x {shape.expert_bytes(dtype) / 2**20:.1f} MiB"
    return (
        f"one layer of {shape.name} takes {need / 2**30:.1f} GiB ({sizes}), "
        f"and {have / 2**30:.1f} GiB are free on {device}"
    )


def layer_count(shape: Shape, dtype: torch.dtype, device: torch.device) -> int:
    """Layers to rotate through: past the cache, as many as a graph captures on CUDA, and within half the memory."""
    size = shape.layer_bytes(dtype)
    wanted = -(-BEYOND_CACHE * machine.cache_bytes(device) // size)
    if device.type == "cuda":
        wanted = max(wanted, GRAPH_LAYERS)
    return max(1, min(wanted, _MOST_LAYERS, machine.available_bytes(device) // 2 // size))


def make_layers(shape: Shape, dtype: torch.dtype, device: torch.device, count: int) -> list[Layer]:
    rng = torch.Generator().manual_seed(20)
    pool = torch.randn(_POOL, generator=rng).to(device)
    E, H, I = shape.experts, shape.hidden, shape.intermediate

    def stack(*sizes: int, scale: float) -> Tensor:
        start = int(torch.randint(_POOL, (), generator=rng))
        values = torch.empty(sizes, dtype=dtype, device=device)
        source, flat = (pool.roll(start) * scale).to(dtype), values.view(-1)
        for part in torch.split(flat, _POOL):
            part.copy_(source[: part.numel()])
        return values

    def in_blocks(spec: str, *sizes: int) -> QuantTensor:
        values, name = sizes[-1], format_in(spec)
        made = random_blocks(name, (_POOL_BLOCKS, FORMATS[name].values), rng, values**-0.5).blocks.view(-1).to(device)
        blocks = torch.empty((*sizes[:-1], FORMATS[name].row_bytes(values)), dtype=torch.uint8, device=device)
        for part in torch.split(blocks.view(-1), made.numel()):
            part.copy_(made[: part.numel()])
        stacked = wrap(blocks, in_file_order(spec))
        assert isinstance(stacked, QuantTensor)
        order = wanted(blocks, order_in(spec))
        return arranged(stacked, order) if order == INTERLEAVED else arrange_(stacked, order)

    def experts(which: int, *sizes: int) -> Tensor | QuantTensor:
        if shape.weights is None:
            return stack(*sizes, scale=sizes[-1] ** -0.5)
        return in_blocks(shape.weights[which], *sizes)

    def around_one(size: int) -> Tensor:
        return (torch.rand(size, generator=rng) + 0.5).to(device, dtype)

    def layer() -> Layer:
        return Layer(
            shape=shape,
            router=stack(E, H, scale=H**-0.5),
            gate_up=experts(0, E, shape.rows, H),
            down=experts(1, E, H, I),
            norm=around_one(H),
            next_norm=around_one(H),
            logit_bias=stack(E, scale=0.5) if shape.bias else None,
            gate_up_bias=stack(E, shape.rows, scale=0.5) if shape.bias else None,
            down_bias=stack(E, H, scale=0.5) if shape.bias else None,
            per_expert_scale=around_one(E) if shape.per_expert_scale else None,
        )

    return [layer() for _ in range(count)]


def make_slots(layers: list[Layer], tokens: int, dtype: torch.dtype, device: torch.device) -> list[Slot]:
    """Enough inputs that a round over all of them reads far more expert weights than the cache holds."""
    rng = torch.Generator().manual_seed(21)
    slots: list[Slot] = []
    read = 0
    while True:
        layer = layers[len(slots) % len(layers)]
        before = slots[-len(layers)].ids if len(slots) >= len(layers) else None
        slots.append(_slot(layer, tokens, dtype, device, rng, before))
        read += layer.shape.active_bytes(slots[-1].ids, dtype)
        enough = read >= BEYOND_CACHE * machine.cache_bytes(device) and len(slots) >= _FEWEST_SLOTS
        if len(slots) % len(layers) == 0 and (device.type == "cuda" or enough or len(slots) >= _MOST_SLOTS):
            return slots


@moefuse.invariant(False)  # its router is plain torch
def _slot(
    layer: Layer, tokens: int, dtype: torch.dtype, device: torch.device, rng: torch.Generator, before: Tensor | None
) -> Slot:
    # Few tokens: draw some more and keep those that share the fewest experts with the layer's last call.
    shape = layer.shape
    draws = 16 if before is not None and 2 * tokens * shape.top_k <= shape.experts else 1
    drawn = torch.randn(draws * tokens, shape.hidden, generator=rng).to(device, dtype)
    weights, ids, normed = moefuse.gate(
        drawn, layer.router, shape.routing, return_normed=True, backend="reference", **layer.gate_options
    )
    best = 0
    if before is not None and draws > 1:
        best = int(torch.isin(ids, before).view(draws, -1).sum(-1).argmin())
    mine = slice(best * tokens, (best + 1) * tokens)
    x, normed, ids, weights = (t[mine].clone() for t in (drawn, normed, ids, weights))
    logits = normed.float() @ layer.router.float().T
    if layer.logit_bias is not None:
        logits += layer.logit_bias.float()
    return Slot(layer, x, normed, logits, ids, weights, ids.long(), weights.to(dtype))


def rotation(layers: list[Layer], slots: list[Slot], dtype: torch.dtype, device: torch.device) -> str:
    """What was done about caches, in a sentence."""
    read = sum(slot.layer.shape.active_bytes(slot.ids, dtype) for slot in slots)
    cache = machine.cache_bytes(device)
    plural = "layer" if len(layers) == 1 else "layers"
    done = (
        f"{len(slots)} inputs in turn over {len(layers)} {plural} of weights: "
        f"{read / 2**20:.0f} MiB of experts between reuses, cache {cache / 2**20:.0f} MiB"
    )
    return done if read >= 2 * cache else f"{done}: TOO SMALL TO LEAVE THE CACHE, bandwidth shares mean little"
