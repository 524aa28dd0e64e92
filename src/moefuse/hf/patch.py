"""Whole MoE layers: router, experts and shared expert in one call, where the layer is understood."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from moefuse import experts, gate, moe
from moefuse.hf.experts import known_activation, restore_order, stacks_of
from moefuse.hf.gguf_experts import BlockExperts
from moefuse.hf.register import NAME
from moefuse.hf.support import interface_of, on_interface
from moefuse.nn.recognize import LayerRule, NotRecognized, mlp_of, place_of, rule_of, structure_of, tensor_at
from moefuse.nn.shared import one_expert, shared_expert, shared_logit, stack_arguments
from moefuse.types import Activation, Stacks

# Older releases record through hooks of other names, which `_are_bare` sees.
_capturing = "transformers.utils.output_capturing"
_active_collector: Any = importlib.import_module(_capturing)._active_collector if find_spec(_capturing) else None

# What transformers records without looking at a router.
_UNROUTED = {"hidden_states", "attentions", "cross_attentions", "_hidden_states_layers"}

_PLAIN = frozenset((nn.Parameter, Tensor, type(None)))
_Part = tuple[nn.Module, str, nn.Module]


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did: paths of the MoE layers it took, and of those it left alone with the reason."""

    patched: tuple[str, ...]
    left_alone: dict[str, str]

    def __str__(self) -> str:
        if not self.patched and not self.left_alone:
            return "no block patched: the model has no experts that transformers' experts interface reaches"
        paths: dict[str, list[str]] = {}
        for path, reason in self.left_alone.items():
            paths.setdefault(reason, []).append(path)
        lines = [f"{len(self.patched)} of {len(self.patched) + len(self.left_alone)} blocks patched"]
        for reason, same in paths.items():
            lines.append(f"  {same[0]}{f' and {len(same) - 1} more' if len(same) > 1 else ''}: {reason}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Fused:
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
    parts: tuple[_Part, ...]


def patch(model: nn.Module) -> PatchReport:
    """Run every mixture-of-experts layer of a transformers model that we understand as a whole, in place.

    Parameters, state dict and class stay; only ``forward`` of each such module is bound anew. A layer is understood
    when running a copy of it on random weights shows that a rule of ours gives what it gives (`moefuse.nn.recognize`);
    another is left alone, with the reason in the report, and still gets our experts. A patched layer takes its old path
    when something must see its parts: recorded router logits, hooks, offloading, tensor or expert parallelism.

    On a CPU the first call gives parameters that are kept as ``[E, in, out]`` (gpt-oss) other strides, as the experts
    implementation does; `unpatch` undoes that, too.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=50, num_attention_heads=4)
    >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    >>> print(patch(model))
    2 of 2 blocks patched
    >>> unpatch(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch module, got {type(model).__name__}")
    patched: list[str] = []
    left_alone: dict[str, str] = {}
    seen: dict[Any, Any] = {}
    for experts_path, _ in list(on_interface(model)):
        path = experts_path.partition(".base_layer")[0].rpartition(".")[0]  # PEFT keeps what it wraps as base_layer
        layer: Any = model.get_submodule(path)
        if not hasattr(layer, "_moefuse"):
            try:
                layer._moefuse = _understand(layer, seen)
            except NotRecognized as reason:
                left_alone[path] = f"{type(layer).__name__}: {reason}"
                continue
            layer.forward = functools.partial(_forward, layer)  # a bound method would not pickle
        patched.append(path)
    if patched or left_alone:
        _use_our_experts(model)
    return PatchReport(tuple(patched), left_alone)


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: layers, the experts implementation and the memory order of the weights are as before."""
    for module in model.modules():
        if "_moefuse" in vars(module):
            del module._moefuse, module.forward
    for _, module in on_interface(model):
        restore_order(module)
    for config, previous in vars(model).pop("_moefuse_previous", ()):
        config._experts_implementation = previous


def _use_our_experts(model: Any) -> None:
    """Name us in the configuration of every experts module, and remember what stood there."""
    if hasattr(model, "_moefuse_previous"):
        return
    configs = {id(module.config): module.config for _, module in on_interface(model)}
    model._moefuse_previous = [(config, config._experts_implementation) for config in configs.values()]
    for config in configs.values():
        config._experts_implementation = NAME


def _rules_of(layer: nn.Module, seen: dict[Any, Any]) -> tuple[LayerRule, Activation | None]:
    """The rules of a layer and of its shared expert; one of a structure that was ``seen`` is not run again."""
    structure = structure_of(layer)
    if structure not in seen:
        known = [rule for rule, _ in (found for found in seen.values() if not isinstance(found, NotRecognized))]
        try:
            rule = rule_of(layer, known)
            seen[structure] = rule, None if rule.shared is None else mlp_of(layer.get_submodule(rule.shared))
        except NotRecognized as reason:
            seen[structure] = reason
    found = seen[structure]
    if isinstance(found, NotRecognized):
        raise found
    return found  # type: ignore[no-any-return]  # the other kind of value


def _understand(layer: nn.Module, seen: dict[Any, Any]) -> _Fused:
    module = layer.get_submodule("experts") if isinstance(getattr(layer, "experts", None), nn.Module) else None
    if module is not None and interface_of(module) is None and not isinstance(module, BlockExperts):
        raise NotRecognized(f"its experts are wrapped in {type(module).__name__}")
    activation = None if module is None else known_activation(module)
    if module is not None and activation is None:
        raise NotRecognized("the activation of its experts is not one of ours")
    if getattr(module, "has_post_expert_norm", False):
        raise NotRecognized("its experts are normed before they are summed")
    rule, shared = _rules_of(layer, seen)
    parts = []
    for path, part in layer.named_modules():
        if path and not (shared is None and rule.shared is not None and path.startswith(rule.shared)):
            parent, _, name = path.rpartition(".")
            parts.append((layer.get_submodule(parent), name, part))
    wrapped = [name for parent, name, part in parts if not _are_bare(((parent, name, part),))]
    if wrapped or "forward" in vars(layer):
        raise NotRecognized(f"{', '.join(wrapped) or 'the layer'} is wrapped: hooks, offloading or parallelism")
    assert activation is not None  # rule_of refuses a layer without experts
    named = {"bias": rule.selection_bias, "logit_bias": rule.logit_bias}
    biases = {name: place_of(layer, path) for name, path in named.items() if path is not None}
    return _Fused(rule, activation, shared, place_of(layer, rule.router), biases, tuple(parts))


def _forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    fused: _Fused = layer._moefuse
    if len(args) != 1 or kwargs or not _may_fuse(layer, fused, *args):
        return type(layer).forward(layer, *args, **kwargs)
    (hidden_states,) = args
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    router, routing = tensor_at(*fused.router), fused.rule.routing
    biases: dict[str, Any] = {name: tensor_at(*place) for name, place in fused.biases.items()}
    options = stack_arguments(stacks_of(layer.experts)) | _shared(layer, fused, rows) | {"activation": fused.activation}
    out: Any  # no norm_weight is given, so each op returns one tensor
    if not fused.rule.returns_weights:
        out = moe(rows, router, routing=routing, **biases, **options)
        return out.view(hidden_states.shape)
    weights, ids = gate(rows, router, routing, **biases)
    out = experts(rows, ids, weights, **options)
    return out.view(hidden_states.shape), weights.to(out.dtype)


def _shared(layer: Any, fused: _Fused, rows: Tensor) -> dict[str, Any]:
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


def _may_fuse(layer: Any, fused: _Fused, hidden_states: Tensor) -> bool:
    """Nothing looks at the layer's parts, and they are still what was understood."""
    if (layer.training and not fused.rule.same_in_training) or _recording_routers():
        return False
    # Before anything is read off the experts: what stands in their place may be another kind of module.
    if not _are_bare(fused.parts):
        return False
    module, dtype = layer.experts, hidden_states.dtype
    fits = module.takes(dtype) if isinstance(module, BlockExperts) else dtype == module.down_proj.dtype
    return fits and dtype != torch.float64


def _recording_routers() -> bool:
    """Whether the running forward collects what routers return (``output_router_logits``)."""
    if _active_collector is None:
        return False
    # torch.compile cannot trace a context variable; transformers then keeps the collector beside it.
    recorded = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return bool(recorded) and not _UNROUTED.issuperset(recorded)


def _are_bare(parts: tuple[_Part, ...]) -> bool:
    """Whether parts are still in their places, plain modules with plain tensors: leaving them out loses nothing.

    Asked at each call: one loop, which only looks into dictionaries.
    """
    for parent, name, part in parts:
        own = part.__dict__
        if parent._modules.get(name) is not part or "forward" in own or "_hf_hook" in own or own["_forward_pre_hooks"]:
            return False
        for hook in own["_forward_hooks"].values():
            if getattr(hook, "__name__", "") != "output_capturing_hook":
                return False
        for value in own["_parameters"].values():
            if type(value) not in _PLAIN:
                return False
    return True
