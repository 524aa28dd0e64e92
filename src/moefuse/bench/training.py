"""Forward and backward of the experts: ours and the peers, all gradients, on one random gradient of the result."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import moefuse
from moefuse.bench import check
from moefuse.bench.contestants import TRAINING, Contestant
from moefuse.bench.inputs import Layer, Slot
from moefuse.bench.peers import Peer
from moefuse.bench.result import OURS
from moefuse.bench.shapes import Shape
from moefuse.testing.compare import Difference, Tolerance, difference

#: gradients of x, of the weights and of the two stacks
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]


def work(shape: Shape, slots: list[Slot], tokens: int, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes and flops of a step: each weight is read twice, each gradient written once, three products for one."""
    read = sum(shape.active_bytes(slot.ids, dtype) for slot in slots) / len(slots)
    return 2 * read + shape.experts * shape.expert_bytes(dtype), 3 * shape.flops(tokens)


def ours(layer: Layer, dtype: torch.dtype, backend: str | None) -> Contestant:
    def step(slot: Slot) -> Gradients:
        own = slot.layer
        with torch.enable_grad():
            leaves = _leaves(slot.normed, slot.weights, *_stacks(own))
            x, weights, gate_up, down = leaves
            out = moefuse.experts(x, slot.ids, weights, gate_up, down, backend=backend, **own.expert_options)
            return torch.autograd.grad(out, leaves, _seed(slot))  # type: ignore[return-value]  # one per leaf

    return Contestant(OURS, TRAINING, step, _error, _tolerance(layer, dtype))


def theirs(peer: Peer, layers: list[Layer], dtype: torch.dtype) -> Contestant:
    built: dict[int, Any] = {id(layer): peer.build(layer) for layer in layers}

    def step(slot: Slot) -> Gradients:
        module = built[id(slot.layer)]
        stacks = [module.gate_up_proj, module.down_proj]
        with torch.enable_grad():
            for stack in stacks:
                stack.requires_grad_()
            x, weights = _leaves(slot.normed, slot.cast_weights)
            out = module(x, slot.wide_ids, weights)
            d_x, d_weights, *grads = torch.autograd.grad(out, (x, weights, *stacks), _seed(slot))
        turn = module.is_transposed
        first, second = (grad.transpose(1, 2) if turn else grad for grad in grads)
        return d_x, d_weights, first, second

    return Contestant(peer.name, TRAINING, step, _error, check.peer_tolerance(layers[0], dtype), peer.graph_refusal)


def _stacks(layer: Layer) -> tuple[Tensor, Tensor]:
    """Both stacks in numbers: blocks have no gradient, and the command line refuses them here."""
    assert isinstance(layer.gate_up, Tensor)
    assert isinstance(layer.down, Tensor)
    return layer.gate_up, layer.down


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_() for t in tensors)


def _seed(slot: Slot) -> Tensor:
    """The gradient of the result: the tokens themselves, which are random, unrelated to it, and already there."""
    return slot.x


def _tolerance(layer: Layer, dtype: torch.dtype) -> Tolerance:
    if dtype != torch.float32:
        return check.peer_tolerance(layer, dtype)
    return check.grown(Tolerance(1e-5, 1e-5, "f32 accumulation, chained products"), layer)


def _error(got: Gradients, slot: Slot) -> Difference:
    """A few tokens' gradients, and one expert's, against float64."""
    for grad in got:
        if not bool(grad.isfinite().all()):
            return Difference(math.inf, math.inf, "a gradient has NaN or infinite elements")
    tokens = check.sample(slot.x.shape[0])
    at = tokens.to(slot.x.device)
    x, weights = _leaves(slot.normed[at].cpu().double(), slot.weights[at].cpu().double())
    with torch.enable_grad():
        out = check.exact_experts(x, slot.ids[at], weights, slot.layer)
        d_x, d_weights = torch.autograd.grad(out, (x, weights), _seed(slot)[at].cpu().double())
    found = [difference(got[0][at], d_x, whole=True), difference(got[1][at], d_weights, whole=True)]
    expert = int(slot.ids[0, 0])
    rows = (slot.ids == expert).any(-1).nonzero().squeeze(1)
    share = torch.where(slot.ids == expert, slot.weights, 0).sum(-1, keepdim=True)[rows]
    stacks = check.one_expert(slot.layer, expert)
    gate_up, down = _leaves(stacks["gate_up"], stacks["down"])
    with torch.enable_grad():
        stacks |= {"gate_up": gate_up, "down": down}
        alone = check.exact_expert(slot.normed[rows].cpu().double(), share.cpu().double(), stacks)
        grads = torch.autograd.grad(alone, (gate_up, down), _seed(slot)[rows].cpu().double())
    pairs = zip(got[2:], grads, strict=True)
    found += [difference(stack[expert : expert + 1], goal, whole=True) for stack, goal in pairs]
    return check.worst(found)
