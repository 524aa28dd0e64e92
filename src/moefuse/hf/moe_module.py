"""A MoE module of a transformers model as one call: router, experts and shared expert, where it is understood."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from moefuse import experts, gate, moe
from moefuse.hf.experts import known_activation, stacks_of
from moefuse.hf.gguf_experts import BlockExperts
from moefuse.hf.support import interface_of
from moefuse.nn.place import placed
from moefuse.nn.recognize import LayerRule, NotRecognized, mlp_of, once, place_of, rule_of, structure_of, tensor_at
from moefuse.nn.routing_tape import routed
from moefuse.nn.shared import one_expert, shared_expert, shared_logit, stack_arguments
from moefuse.types import Activation, Router, Stacks

# Older releases record through hooks of other names, which `are_bare` sees.
_capturing = "transformers.utils.output_capturing"
_active_collector: Any = importlib.import_module(_capturing)._active_collector if find_spec(_capturing) else None

# What transformers records without looking at a router.
_UNROUTED = {"hidden_states", "attentions", "cross_attentions", "_hidden_states_layers"}

_PLAIN = frozenset((nn.Parameter, Tensor, type(None)))
Part = tuple[nn.Module, str, nn.Module]


@dataclass(frozen=True)
class Fused:
    """What a patched layer needs to run as a whole.

    Attributes:
        rule: what the layer computes.
        activation: of its experts.
        shared: the activation of its shared expert; None: there is none, or that module runs itself.
        router: the module that holds the router's weight, and its name there.
        biases: of the router, likewise, by their names in `moefuse.gate`.
        parts: every module that the whole call leaves out: its parent, its name there, and itself.
    """

    rule: LayerRule
    activation: Activation
    shared: Activation | None
    router: tuple[nn.Module, str]
    biases: dict[str, tuple[nn.Module, str]]
    parts: tuple[Part, ...]


def _rules_of(layer: nn.Module, seen: dict[Any, Any]) -> tuple[LayerRule, Activation | None]:
    """The rules of a layer and of its shared expert."""
    known = [rule for rule, _ in (found for found in seen.values() if not isinstance(found, NotRecognized))]
    rule = rule_of(layer, known)
    return rule, None if rule.shared is None else mlp_of(layer.get_submodule(rule.shared))


def understand(layer: nn.Module, seen: dict[Any, Any]) -> Fused:
    module = layer.get_submodule("experts") if isinstance(getattr(layer, "experts", None), nn.Module) else None
    if module is not None and interface_of(module) is None and not isinstance(module, BlockExperts):
        raise NotRecognized(f"its experts are wrapped in {type(module).__name__}")
    activation = None if module is None else known_activation(module)
    if module is not None and activation is None:
        raise NotRecognized("the activation of its experts is not one of ours")
    if getattr(module, "has_post_expert_norm", False):
        raise NotRecognized("its experts are normed before they are summed")
    rule, shared = once(seen, structure_of(layer), lambda: _rules_of(layer, seen))
    parts = []
    for path, part in layer.named_modules():
        if path and not (shared is None and rule.shared is not None and path.startswith(rule.shared)):
            parent, _, name = path.rpartition(".")
            parts.append((layer.get_submodule(parent), name, part))
    wrapped = [name for parent, name, part in parts if not are_bare(((parent, name, part),))]
    if wrapped or "forward" in vars(layer):
        raise NotRecognized(f"{', '.join(wrapped) or 'the layer'} is wrapped: hooks, offloading or parallelism")
    assert activation is not None  # rule_of refuses a layer without experts
    named = {"bias": rule.selection_bias, "logit_bias": rule.logit_bias}
    biases = {name: place_of(layer, path) for name, path in named.items() if path is not None}
    return Fused(rule, activation, shared, place_of(layer, rule.router), biases, tuple(parts))


def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """What a patched module's ``forward`` is, once it is bound to the module."""
    fused: Fused = layer._moefuse
    if len(args) != 1 or kwargs or not may_fuse(layer, fused, *args):
        return type(layer).forward(layer, *args, **kwargs)
    (hidden_states,) = args
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    if not fused.rule.returns_weights:
        return run(layer, fused, rows).view(hidden_states.shape)
    weights, ids, _ = _routes(layer, fused, rows, None)
    out: Any = _experts(layer, fused, rows, ids, weights, **_shared(layer, fused, rows))
    return out.view(hidden_states.shape), weights.to(out.dtype)


def run(layer: Any, fused: Fused, rows: Tensor, norm: tuple[Any, float] | None = None, **tail: Any) -> Any:
    """The result for rows ``[T, H]``, normed before by a weight and an eps; ``tail`` as `moefuse.experts` takes it."""
    router, routing = tensor_at(*fused.router), fused.rule.routing
    before: dict[str, Any] = {} if norm is None else dict(zip(("norm_weight", "eps"), norm, strict=True))
    parts = "_routing_tape" in vars(layer) or placed(layer.experts) is not None
    if (fused.rule.shared is None or norm is None) and not parts:
        following = {f"next_{name}" if name in ("norm_weight", "eps") else name: value for name, value in tail.items()}
        stacks = _stacks(layer, fused) | _shared(layer, fused, rows)
        return moe(rows, router, routing=routing, **before, **_biases(fused), **stacks, **following)
    weights, ids, normed = _routes(layer, fused, rows, norm)
    return _experts(layer, fused, normed, ids, weights, **_shared(layer, fused, normed), **tail)


def _experts(layer: Any, fused: Fused, rows: Tensor, ids: Tensor, weights: Tensor, **tail: Any) -> Any:
    """The experts of rows that are routed, wherever they lie."""
    apart = placed(layer.experts)
    if apart is not None:
        return apart(rows, ids, weights, **tail)
    return experts(rows, ids, weights, **_stacks(layer, fused), **tail)


def _routes(layer: Any, fused: Fused, rows: Tensor, norm: tuple[Any, float] | None) -> tuple[Tensor, ...]:
    """Weights, ids and normed rows; by a tape where one is at work."""
    before: dict[str, Any] = {} if norm is None else dict(zip(("norm_weight", "eps"), norm, strict=True))
    router, tape = Router(tensor_at(*fused.router), **before, **_biases(fused)), vars(layer).get("_routing_tape")
    if tape is not None:
        return routed(tape, rows, router, fused.rule.routing)
    weight, *_ = router
    return gate(rows, weight, fused.rule.routing, **before, **_biases(fused), return_normed=True)


def _biases(fused: Fused) -> dict[str, Any]:
    return {name: tensor_at(*place) for name, place in fused.biases.items()}


def _stacks(layer: Any, fused: Fused) -> dict[str, Any]:
    return stack_arguments(stacks_of(layer.experts)) | {"activation": fused.activation}


def _shared(layer: Any, fused: Fused, rows: Tensor) -> dict[str, Any]:
    """The shared expert's output and the logit of its gate, as the ops take them."""
    rule = fused.rule
    if rule.shared is None:
        return {}
    module = getattr(layer, rule.shared)
    if fused.shared is None:
        out = module(rows)
    else:
        up, down = one_expert(module.up_proj.weight), one_expert(module.down_proj.weight)
        gated = fused.shared.gated
        stacks = Stacks(one_expert(module.gate_proj.weight), up, down) if gated else Stacks(up, None, down)
        out = shared_expert(rows, stacks, fused.shared)
    shared_gate = None if rule.shared_gate is None else tensor_at(getattr(layer, rule.shared_gate), "weight")
    return {"shared": out, "shared_logit": shared_logit(rows, shared_gate)}


def may_fuse(layer: Any, fused: Fused, hidden_states: Tensor) -> bool:
    """Nothing looks at the layer's parts, and they are still what was understood."""
    if (layer.training and not fused.rule.same_in_training) or not recorded() <= _UNROUTED:
        return False
    # Before anything is read off the experts: what stands in their place may be another kind of module.
    if not are_bare(fused.parts):
        return False
    module, dtype = layer.experts, hidden_states.dtype
    if isinstance(module, BlockExperts):
        fits = module.takes(dtype) and module.lora is None
    else:
        fits = dtype == module.down_proj.dtype
    return fits and dtype != torch.float64


def recorded() -> set[str]:
    """What the running forward collects of its modules' results (``output_router_logits`` and its kin)."""
    if _active_collector is None:
        return set()
    # torch.compile cannot trace a context variable; transformers then keeps the collector beside it.
    found = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return set(found or ())


def watched(module: nn.Module) -> bool:
    """Whether hooks wait for a module to be called, or to be given its weights."""
    own = module.__dict__
    if "_hf_hook" in own or own["_forward_pre_hooks"]:
        return True
    # transformers' own recorder stays on a module when it is done
    return any(getattr(hook, "__name__", "") != "output_capturing_hook" for hook in own["_forward_hooks"].values())


def are_bare(parts: tuple[Part, ...]) -> bool:
    """Whether parts are still in their places, plain modules with plain tensors: leaving them out loses nothing.

    Asked at each call: one loop, which only looks into dictionaries.
    """
    for parent, name, part in parts:
        own = part.__dict__
        if parent._modules.get(name) is not part or "forward" in own or watched(part):
            return False
        for value in own["_parameters"].values():
            if type(value) not in _PLAIN:
                return False
    return True
