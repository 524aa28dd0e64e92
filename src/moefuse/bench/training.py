"""Forward and backward of the experts: ours and the peers, all gradients, on one random gradient of the result.

Experts in blocks are frozen and have none: there it is the step of adapters on them, beside the same step on the same
weights in numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import moefuse
from moefuse.bench import check
from moefuse.bench.contestants import LORA, TRAINING, Contestant
from moefuse.bench.inputs import Layer, Slot
from moefuse.bench.peers import Peer
from moefuse.bench.result import OURS, PLAIN
from moefuse.bench.shapes import Shape
from moefuse.nn.lora import ExpertsLoRA, add_lora
from moefuse.nn.moe import MoE
from moefuse.ops.composed import composed
from moefuse.quant.tensor import QuantTensor
from moefuse.testing.compare import Difference, Tolerance, difference
from moefuse.types import Activation, Stacks, Tail

#: gradients of x, of the weights and of the two stacks
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
#: of every adapter
RANK = 16


def work(shape: Shape, slots: list[Slot], tokens: int, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes and flops of a step: each weight is read twice, each gradient written once, three products for one; two
    where the weights are frozen. Adapters are not counted."""
    read = sum(shape.active_bytes(slot.ids, dtype) for slot in slots) / len(slots)
    if shape.weights is not None:
        return 2 * read, 2 * shape.flops(tokens)
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


def adapted(layers: list[Layer], dtype: torch.dtype, backend: str | None) -> list[Contestant]:
    """The step of adapters on frozen experts, with the gradients of x and the weights: on blocks, then on numbers."""
    adapters = _adapters(layers[0], dtype)
    parameters = tuple(adapters.parameters())
    activation = Activation.of(layers[0].shape.activation)
    in_numbers = {id(layer): _numbers(layer, dtype) for layer in layers}

    def step(slot: Slot, own: Layer) -> tuple[Tensor, ...]:
        stacks = Stacks(own.gate_up, None, own.down, own.gate_up_bias, own.down_bias, own.shape.layout)
        with torch.enable_grad():
            x, weights = _leaves(slot.normed, slot.weights)
            plan = moefuse.plan(slot.ids, own.shape.experts, backend=backend)
            out = composed(x, slot.ids, weights, stacks, plan, activation, Tail(), backend, adapters=adapters)
            assert isinstance(out, Tensor)
            return torch.autograd.grad(out, (x, weights, *parameters), _seed(slot))

    def error(got: tuple[Tensor, ...], slot: Slot) -> Difference:
        return _adapted_error(got, slot, adapters)

    exact = all(spec.endswith(":exact") for spec in layers[0].shape.weights or ())
    plain = dataclasses.replace(layers[0], shape=dataclasses.replace(layers[0].shape, weights=None))
    bound = _tolerance(plain, dtype)
    return [
        Contestant(OURS, LORA, lambda slot: step(slot, slot.layer), error, bound if exact else check.IN_8_BITS),
        Contestant(PLAIN, LORA, lambda slot: step(slot, in_numbers[id(slot.layer)]), error, bound),
    ]


def _adapters(layer: Layer, dtype: torch.dtype) -> ExpertsLoRA:
    """Adapters of experts like these, none of them zero."""
    shape = layer.shape
    with torch.device("meta"):
        block = MoE(shape.hidden, shape.intermediate, shape.experts, shape.routing, activation=shape.activation)
        rank = min(RANK, shape.hidden, shape.intermediate)
        adapters = add_lora(block, rank).to(dtype)
    adapters.to_empty(device=layer.router.device)
    rng = torch.Generator().manual_seed(22)
    with torch.no_grad():
        for value in adapters.parameters():
            value.copy_(torch.randn(value.shape, generator=rng) * value.shape[-1] ** -0.5)
    return adapters


def _numbers(layer: Layer, dtype: torch.dtype) -> Layer:
    """The same layer with its stacks in numbers."""

    def of(stack: Tensor | QuantTensor) -> Tensor:
        return stack.dequantize(dtype) if isinstance(stack, QuantTensor) else stack

    return dataclasses.replace(layer, gate_up=of(layer.gate_up), down=of(layer.down))


def _adapted_expert(layer: Layer, expert: int, factors: dict[str, Tensor], scale: float) -> dict[str, Any]:
    """`check.one_expert` with the adapters' part formed; ``factors`` are that expert's, in float64."""
    stacks = check.one_expert(layer, expert)
    for name in ("gate_up", "down"):
        stacks[name] = stacks[name] + scale * factors[f"{name}_b"] @ factors[f"{name}_a"]
    return stacks


def _factors(adapters: ExpertsLoRA, expert: int) -> dict[str, Tensor]:
    one = slice(expert, expert + 1)
    return {name: value.detach()[one].cpu().double() for name, value in adapters.named_parameters()}


def _adapted_error(got: tuple[Tensor, ...], slot: Slot, adapters: ExpertsLoRA) -> Difference:
    """A few tokens' gradients, and those of one expert's adapters, against float64 with every delta formed."""
    if not all(bool(grad.isfinite().all()) for grad in got):
        return Difference(math.inf, math.inf, "a gradient has NaN or infinite elements")
    d_x, d_weights, *d_factors = got
    at = check.sample(slot.x.shape[0]).to(slot.x.device)
    x, weights = _leaves(slot.normed[at].cpu().double(), slot.weights[at].cpu().double())
    ids, seed = slot.ids[at].cpu(), _seed(slot)[at].cpu().double()
    with torch.enable_grad():
        out = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            chosen = ids == expert
            rows = chosen.any(-1)
            stacks = _adapted_expert(slot.layer, expert, _factors(adapters, expert), adapters.scale)
            share = (weights * chosen).sum(-1, keepdim=True)[rows]
            out = out.index_add(0, rows.nonzero().squeeze(1), check.exact_expert(x[rows], share, stacks))
        goals = torch.autograd.grad(out, (x, weights), seed)
    found = [difference(d_x[at], goals[0], whole=True), difference(d_weights[at], goals[1], whole=True)]
    expert = int(slot.ids[0, 0])
    found += _one_expert_errors(d_factors, slot, adapters, expert)
    return check.worst(found)


def _one_expert_errors(d_factors: list[Tensor], slot: Slot, adapters: ExpertsLoRA, expert: int) -> Iterator[Difference]:
    rows = (slot.ids == expert).any(-1).nonzero().squeeze(1)
    share = torch.where(slot.ids == expert, slot.weights, 0).sum(-1, keepdim=True)[rows].cpu().double()
    factors = {name: value.requires_grad_() for name, value in _factors(adapters, expert).items()}
    with torch.enable_grad():
        stacks = _adapted_expert(slot.layer, expert, factors, adapters.scale)
        out = check.exact_expert(slot.normed[rows].cpu().double(), share, stacks)
        goals = torch.autograd.grad(out, list(factors.values()), _seed(slot)[rows].cpu().double())
    for grad, goal in zip(d_factors, goals, strict=True):
        yield difference(grad[expert : expert + 1], goal, whole=True)


def _stacks(layer: Layer) -> tuple[Tensor, Tensor]:
    """Both stacks in numbers: blocks have no gradient."""
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
