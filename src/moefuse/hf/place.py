"""The experts of a transformers model between RAM and a GPU."""

from __future__ import annotations

from typing import Any

from torch import nn

from moefuse.hf.experts import known_activation, stacks_of
from moefuse.hf.gguf_experts import TENSORS, BlockExperts
from moefuse.hf.support import on_interface
from moefuse.nn.placement import Placement, place

_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def place_model(model: Any, placement: Placement, *, pin: bool = True) -> None:
    """Put a model on the GPU, its experts where `moefuse.nn.Placement` says; ``pin``: they are in no mapped file."""
    if "_moefuse_placement" in vars(model):
        raise ValueError("the experts of this model are placed already: call moefuse.hf.unpatch first")
    found = {}
    for path, module in on_interface(model):
        _refuse(path, module)
        activation = known_activation(module)
        assert activation is not None  # or it was refused
        found[path] = stacks_of(module), activation, TENSORS if isinstance(module, BlockExperts) else _PARAMETERS
    if not found:
        raise ValueError(f"{type(model).__name__} has no experts to place: run it without experts= and gpu_memory=")
    if placement.load is not None and (lacking := found.keys() - set(placement.load)):
        raise ValueError(f"placement: load must have every layer of experts, got none for {min(lacking)}")
    place(model, found, placement, pin)
    model._moefuse_placement = placement


def _refuse(path: str, module: nn.Module) -> None:
    """Raise for experts that cannot be computed in two places."""
    reason = ""
    if known_activation(module) is None:
        reason = "their activation is not one of ours"
    elif getattr(module, "has_post_expert_norm", False):
        reason = "they are normed before they are summed"
    elif getattr(module, "lora", None) is not None:
        reason = "they have adapters"
    elif any(value.device.type != "cpu" for value in (*module.parameters(), *module.buffers())):
        reason = "they must lie on the CPU when they are placed"
    if reason:
        raise ValueError(f"the experts of {path} cannot be placed: {reason}")
