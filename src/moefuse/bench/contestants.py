"""Who takes part: our block, our experts, route + plan, and the peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import moefuse
from moefuse.bench import check, machine
from moefuse.bench.inputs import Layer, Slot
from moefuse.bench.peers import Peer
from moefuse.bench.result import OURS, PLAIN
from moefuse.testing.compare import Difference, Tolerance

BLOCK, EXPERTS, ROUTE_PLAN, TRAINING, LORA = "block", "experts", "route+plan", "training", "lora"


@dataclass(frozen=True)
class Contestant:
    """A call on a slot, and how to tell whether its result is right."""

    name: str
    scope: str
    call: Callable[[Any], Any]
    error: Callable[[Any, Any], Difference]
    tolerance: Tolerance
    graph_refusal: str | None = None


def ours(layer: Layer, dtype: torch.dtype, backend: str | None) -> list[Contestant]:
    routing = layer.shape.routing

    def block(slot: Slot) -> Any:
        own = slot.layer
        return moefuse.moe(
            slot.x,
            own.router,
            own.gate_up,
            own.down,
            routing,
            residual=slot.x,
            next_norm_weight=own.next_norm,
            backend=backend,
            **own.gate_options,
            **own.expert_options,
        )

    def experts(slot: Slot) -> Any:
        own = slot.layer
        return moefuse.experts(
            slot.normed, slot.ids, slot.weights, own.gate_up, own.down, backend=backend, **own.expert_options
        )

    def route_plan(slot: Slot) -> Any:
        weights, ids = moefuse.route(slot.logits, routing, backend=backend)
        return weights, ids, moefuse.plan(ids, layer.shape.experts, backend=backend)

    tolerance = check.our_tolerance(layer, dtype)
    return [
        Contestant(OURS, BLOCK, block, check.block_error, tolerance),
        Contestant(OURS, EXPERTS, experts, check.experts_error, tolerance),
        Contestant(OURS, ROUTE_PLAN, route_plan, check.route_plan_error, check.plain_tolerance(layer, torch.float32)),
    ]


def in_numbers(
    slots: Sequence[Slot], plain: Sequence[Layer], dtype: torch.dtype, backend: str | None
) -> list[Contestant]:
    """Our block and our experts on the tokens and routing of these slots, with the stacks of plain layers."""
    layers = list({id(slot.layer): slot.layer for slot in slots}.values())
    stacks = {id(layer): plain[i % len(plain)] for i, layer in enumerate(layers)}

    def twin(slot: Slot) -> Slot:
        own = stacks[id(slot.layer)]
        return replace(slot, layer=replace(slot.layer, shape=own.shape, gate_up=own.gate_up, down=own.down))

    # Made before, for what is timed.
    twins = {id(slot): twin(slot) for slot in slots}

    def made(contestant: Contestant) -> Contestant:
        return replace(
            contestant,
            name=PLAIN,
            call=lambda slot: contestant.call(twins[id(slot)]),
            error=lambda got, slot: contestant.error(got, twins[id(slot)]),
        )

    return [made(c) for c in ours(twins[id(slots[0])].layer, dtype, backend) if c.scope in (BLOCK, EXPERTS)]


def refusal(peer: Peer, layer: Layer, tokens: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why this peer does not run here at this size, or None."""
    reason = peer.unavailable() or peer.unsuitable(layer.shape, device)
    if reason is not None:
        return reason
    need, have = peer.scratch_bytes(layer.shape, tokens, dtype), machine.available_bytes(device)
    # On CUDA a graph keeps scratch of its own beside the eager call's.
    if need > have * (0.25 if device.type == "cuda" else 0.6):
        return f"skipped: it would take {need / 2**30:.1f} GiB beside the weights, {have / 2**30:.1f} GiB are free"
    return None


def theirs(peer: Peer, layers: list[Layer], dtype: torch.dtype) -> Contestant:
    modules = {id(layer): peer.build(layer) for layer in layers}

    def experts(slot: Slot) -> Any:
        return modules[id(slot.layer)](slot.normed, slot.wide_ids, slot.cast_weights)

    tolerance = check.peer_tolerance(layers[0], dtype)
    return Contestant(peer.name, EXPERTS, experts, check.experts_error, tolerance, peer.graph_refusal)
