"""Whole blocks: router, experts and shared expert in two calls, where the block is understood."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from moefuse import experts, gate
from moefuse.hf.block_experts import BlockExperts
from moefuse.hf.experts import known_activation, restore_order, stacks_of
from moefuse.hf.register import NAME
from moefuse.hf.support import interface_of, on_interface
from moefuse.nn.recognize import BlockRule, NotRecognized, block_of, layout_of, mlp_of, structure_of
from moefuse.types import Activation

# Older releases record through hooks of other names, which `_is_bare` sees.
_capturing = "transformers.utils.output_capturing"
_active_collector: Any = importlib.import_module(_capturing)._active_collector if find_spec(_capturing) else None

# What transformers records without looking at a router.
_UNROUTED = {"hidden_states", "attentions", "cross_attentions", "_hidden_states_layers"}

_PLAIN = (nn.Parameter, Tensor, type(None))


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did: paths of the blocks it took, and of those it left alone with the reason."""

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
    """A block's rule, the activations of its experts and of its shared expert (None: run that module itself), and
    every module that the whole call leaves out, as ``(parent, name, module)``."""

    rule: BlockRule
    activation: Activation
    shared: Activation | None
    parts: tuple[tuple[nn.Module, str, nn.Module], ...]


def patch(model: nn.Module) -> PatchReport:
    """Run every mixture-of-experts block of a transformers model that we understand as a whole, in place.

    Parameters, state dict and class stay; only ``forward`` of each block is bound anew. A block is understood when
    running a copy of it on random weights shows that a rule of ours gives what it gives (`moefuse.nn.recognize`);
    another is left alone, with the reason in the report, and still gets our experts. A patched block takes its old path
    when something must see its parts: recorded router logits, hooks, offloading, tensor or expert parallelism.

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
    for path, _ in list(on_interface(model)):
        block_path = path.partition(".base_layer")[0].rpartition(".")[0]  # PEFT keeps what it wraps as base_layer
        block: Any = model.get_submodule(block_path)
        if hasattr(block, "_moefuse"):
            patched.append(block_path)
            continue
        try:
            fused = _understand(block, seen)
        except NotRecognized as reason:
            left_alone[block_path] = f"{type(block).__name__}: {reason}"
            continue
        block._moefuse = fused
        block.forward = functools.partial(_forward, block)  # a bound method would not pickle
        patched.append(block_path)
    if patched or left_alone:
        _use_our_experts(model)
    return PatchReport(tuple(patched), left_alone)


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: blocks, the experts implementation and the memory order of the weights are as before."""
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


def _rules_of(block: nn.Module, seen: dict[Any, Any]) -> tuple[BlockRule, Activation | None]:
    """The rules of a block and of its shared expert; one of a structure that was ``seen`` is not run again."""
    structure = structure_of(block)
    if structure not in seen:
        known = [found[0] for found in seen.values() if not isinstance(found, NotRecognized)]
        try:
            rule = block_of(block, known)
            seen[structure] = rule, None if rule.shared is None else mlp_of(block.get_submodule(rule.shared))
        except NotRecognized as reason:
            seen[structure] = reason
    found = seen[structure]
    if isinstance(found, NotRecognized):
        raise found
    return found  # type: ignore[no-any-return]  # the other kind of value


def _understand(block: nn.Module, seen: dict[Any, Any]) -> _Fused:
    module = block.get_submodule("experts") if isinstance(getattr(block, "experts", None), nn.Module) else None
    if module is not None and interface_of(module) is None and not isinstance(module, BlockExperts):
        raise NotRecognized(f"its experts are wrapped in {type(module).__name__}")
    activation = None if module is None else known_activation(module)
    if module is not None and activation is None:
        raise NotRecognized("the gate of its experts is not one of ours")
    if getattr(module, "has_post_expert_norm", False):
        raise NotRecognized("its experts are normed before they are summed")
    rule, shared = _rules_of(block, seen)
    parts = []
    for path, part in block.named_modules():
        if path and not (shared is None and rule.shared is not None and path.startswith(rule.shared)):
            parent, _, name = path.rpartition(".")
            parts.append((block.get_submodule(parent), name, part))
    wrapped = [name for parent, name, part in parts if not _is_bare(parent, name, part)]
    if wrapped or "forward" in vars(block):
        raise NotRecognized(f"{', '.join(wrapped) or 'the block'} is wrapped: hooks, offloading or parallelism")
    assert activation is not None  # block_of refuses a block without experts
    return _Fused(rule, activation, shared, tuple(parts))


def _forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    fused: _Fused = block._moefuse
    if len(args) != 1 or kwargs or not _may_fuse(block, fused, args[0]):
        return type(block).forward(block, *args, **kwargs)
    rule, hidden_states = fused.rule, args[0]
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    router: Any = rule.tensor(block, rule.router)
    weights, ids = gate(
        rows, router, rule.routing, bias=rule.tensor(block, rule.selection_bias),
        logit_bias=rule.tensor(block, rule.logit_bias),
    )  # fmt: skip
    stacks = stacks_of(block.experts)
    shared, shared_logit = _shared(block, fused, rows)
    out = experts(
        rows, ids, weights, stacks.gate_up, stacks.down, activation=fused.activation, layout=layout_of(block.experts),
        gate_up_bias=stacks.gate_up_bias, down_bias=stacks.down_bias, shared=shared, shared_logit=shared_logit,
    )  # fmt: skip
    out = out.view(hidden_states.shape)  # type: ignore[union-attr]  # no norm_weight: one tensor
    return (out, weights.to(out.dtype)) if rule.returns_weights else out


def _shared(block: Any, fused: _Fused, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The shared expert, as one expert that every token goes to, and the logit of its gate."""
    rule = fused.rule
    if rule.shared is None:
        return None, None
    module = block.get_submodule(rule.shared)
    if fused.shared is not None:
        up, down = (getattr(module, name).weight.unsqueeze(0) for name in ("up_proj", "down_proj"))
        gate_up = (module.gate_proj.weight.unsqueeze(0), up) if fused.shared.gated else up
        to_it = torch.zeros((rows.shape[0], 1), dtype=torch.int32, device=rows.device)
        ones = torch.ones((rows.shape[0], 1), dtype=torch.float32, device=rows.device)
        out = experts(rows, to_it, ones, gate_up, down, activation=fused.shared)
    else:
        out = module(rows)
    if rule.shared_gate is None:
        return out, None  # type: ignore[return-value]  # no norm_weight: one tensor
    weigher = block.get_submodule(rule.shared_gate).weight[0]
    return out, rows.float() @ weigher.float()  # type: ignore[return-value]


def _may_fuse(block: Any, fused: _Fused, hidden_states: Tensor) -> bool:
    """Nothing looks at the block's parts, and they are still what was understood."""
    if block.training and not fused.rule.same_in_training:
        return False
    # Before anything is read off the experts: what stands in their place may be another kind of module.
    if _recording_routers() or not all(_is_bare(*part) for part in fused.parts):
        return False
    module, dtype = block.experts, hidden_states.dtype
    fits = module.takes(dtype) if isinstance(module, BlockExperts) else dtype == module.down_proj.dtype
    return fits and dtype != torch.float64


def _recording_routers() -> bool:
    """Whether the running forward collects what routers return (``output_router_logits``)."""
    if _active_collector is None:
        return False
    # torch.compile cannot trace a context variable; transformers then keeps the collector beside it.
    recorded = _active_collector.global_var if torch.compiler.is_compiling() else _active_collector.get()
    return bool(recorded) and not _UNROUTED.issuperset(recorded)


def _is_bare(parent: nn.Module, name: str, part: nn.Module) -> bool:
    """Whether a part is still in its place, and a plain module with plain tensors: leaving it out loses nothing."""
    own = part.__dict__
    if parent._modules.get(name) is not part or "forward" in own or "_hf_hook" in own or part._forward_pre_hooks:
        return False
    if part._forward_hooks and any(
        getattr(hook, "__name__", "") != "output_capturing_hook" for hook in part._forward_hooks.values()
    ):
        return False
    return all(type(value) in _PLAIN for value in part._parameters.values())
