"""Whole MoE modules, and whole decoder layers around them, in the place of transformers' own."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from moefuse.hf import layers, moe_module
from moefuse.hf.experts import restore_order
from moefuse.hf.place import place_model, unplace_model
from moefuse.hf.register import NAME
from moefuse.hf.support import on_interface
from moefuse.nn.placement import Placement
from moefuse.nn.recognize import NotRecognized


@dataclass(frozen=True)
class PatchReport:
    """What `patch` did.

    Attributes:
        patched: paths of the MoE modules that it took.
        left_alone: paths of those that it did not take, with the reason.
        layers: paths of the decoder layers that run as wholes.
        parts: paths of decoder layers around a patched module that do not, and of attention that runs itself inside
            one that does, with the reason.
    """

    patched: tuple[str, ...]
    left_alone: dict[str, str]
    layers: tuple[str, ...] = ()
    parts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.patched and not self.left_alone:
            return "no block patched: the model has no experts that transformers' experts interface reaches"
        paths: dict[str, list[str]] = {}
        for path, reason in (self.left_alone | self.parts).items():
            paths.setdefault(reason, []).append(path)
        count = f"{len(self.patched)} of {len(self.patched) + len(self.left_alone)} blocks patched"
        lines = [f"{count}, {len(self.layers)} with the layer around them" if self.layers else count]
        for reason, same in paths.items():
            lines.append(f"  {same[0]}{f' and {len(same) - 1} more' if len(same) > 1 else ''}: {reason}")
        return "\n".join(lines)


def patch(
    model: nn.Module, *, experts: str | Placement | None = None, gpu_memory: str | int | None = None
) -> PatchReport:
    """Run every mixture-of-experts module of a transformers model that we understand as a whole, in place, and the
    decoder layer around it with it.

    Parameters, state dict and class stay; only ``forward`` of each such module is bound anew. A module is understood
    when running a copy of it on random weights shows that a rule of ours gives what it gives (`moefuse.nn.recognize`);
    another is left alone, with the reason in the report, and still gets our experts. A whole layer computes norms and
    residuals, its own and the next layer's first norm, inside the launches of its MoE module, and attention with our
    ops where that is understood, too. What is patched takes its old path when something must see its parts: recorded
    router logits or attentions, hooks, offloading, tensor or expert parallelism; attention also for gradients.

    With ``experts`` or ``gpu_memory`` the model, which lies on the CPU, goes to the GPU, and its experts stay in RAM,
    but for those that fit: see `moefuse.nn.Placement`.

    On a CPU the first call gives parameters that are kept as ``[E, in, out]`` (gpt-oss) other strides, as the experts
    implementation does; `unpatch` undoes that, too.

    Args:
        experts: "auto" or "cpu", or a `moefuse.nn.Placement`.
        gpu_memory: what the model may take of the GPU, such as "12GiB".

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=50, num_attention_heads=4)
    >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    >>> print(patch(model))
    2 of 2 blocks patched, 2 with the layer around them
    >>> unpatch(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch module, got {type(model).__name__}")
    placement = Placement.of(experts, gpu_memory, "cuda")
    patched: list[str] = []
    left_alone: dict[str, str] = {}
    seen: dict[Any, Any] = {}
    for experts_path, _ in list(on_interface(model)):
        path = experts_path.partition(".base_layer")[0].rpartition(".")[0]  # PEFT keeps what it wraps as base_layer
        layer: Any = model.get_submodule(path)
        if not hasattr(layer, "_moefuse"):
            try:
                layer._moefuse = moe_module.understand(layer, seen)
            except NotRecognized as reason:
                left_alone[path] = f"{type(layer).__name__}: {reason}"
                continue
            layer.forward = functools.partial(moe_module.forward, layer)  # a bound method would not pickle
        patched.append(path)
    if patched or left_alone:
        _use_our_experts(model)
    if placement is not None:
        place_model(model, placement)
    whole, parts = layers.take(model, patched)
    return PatchReport(tuple(patched), left_alone, whole, parts)


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: layers, the experts implementation, the memory order of the weights and, where experts were
    placed, the CPU are as before."""
    unplace_model(model)
    for module in model.modules():
        if "_moefuse" in vars(module):
            del module._moefuse, module.forward
        layers.release(module)
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
