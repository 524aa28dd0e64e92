"""The experts of a transformers model between RAM and a GPU."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moefuse.hf.cache import StepCache
from moefuse.hf.capture import uncapture
from moefuse.hf.experts import known_activation, stacks_of
from moefuse.hf.gguf_experts import TENSORS, BlockExperts
from moefuse.hf.support import on_interface
from moefuse.nn.place import place, unplace
from moefuse.nn.placement import Placement
from moefuse.nn.quantized import interleave_
from moefuse.types import Stacks

_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def place_model(model: Any, placement: Placement, *, mapped: bool = False, arrange: bool = False) -> None:
    """Put a model on the GPU, its experts where `moefuse.nn.Placement` says.

    ``mapped``: their blocks are those of a mapped file; ``arrange`` copies those that stay in RAM out of it, into the
    order that the CPU reads fastest.
    """
    if "_moefuse_placement" in vars(model):
        raise ValueError("the experts of this model are placed already: call moefuse.hf.unpatch first")
    modules = dict(on_interface(model))
    for path, module in modules.items():
        _refuse(path, module)
    if not modules:
        raise ValueError(f"{type(model).__name__} has no experts to place: run it without experts= and gpu_memory=")
    if placement.load is not None and (lacking := modules.keys() - set(placement.load)):
        raise ValueError(f"placement: load must have every layer of experts, got none for {min(lacking)}")

    def found() -> dict[str, tuple[Stacks, Any, Sequence[str]]]:
        return {
            path: (
                stacks_of(module),
                known_activation(module),
                TENSORS if isinstance(module, BlockExperts) else _PARAMETERS,
            )
            for path, module in modules.items()
        }

    def interleave() -> None:
        for module in modules.values():
            interleave_(module)

    place(model, found, placement, pin=arrange or not mapped, prepare=interleave if arrange else None)
    model._moefuse_placement = placement
    if not placement.whole:
        run: Any = functools.partial(_forward, model)
        run.__signature__ = inspect.signature(model.forward)  # generate() looks at it
        model.forward = run


def unplace_model(model: Any) -> None:
    """Undo `place_model`: the model is on the CPU again, and no step that was captured with its slots is left."""
    placement = vars(model).pop("_moefuse_placement", None)
    if placement is not None:
        vars(model).pop("forward", None)
        uncapture(model)
        placement.close()
        unplace(model)
        model.to("cpu")


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``forward`` is: where memory runs out it is run again with fewer slots, from the cache it began with."""
    cache, run = kwargs.get("past_key_values"), type(model).forward
    # A captured step's cache is told where to write, and so may be written twice.
    layers = [] if cache is None or isinstance(cache, StepCache) else cache.layers
    rewinds = all(hasattr(layer, "get_seq_length") for layer in layers)  # linear attention keeps a state
    before = [layer.get_seq_length() for layer in layers] if rewinds else []
    try:
        return run(model, *args, **kwargs)
    except torch.OutOfMemoryError as error:
        if model._moefuse_placement.accelerator.recorder is not None:
            raise
        kept = error.with_traceback(None)  # frames hold what they had allocated
    model._moefuse_placement.shrink(kept)
    if not rewinds:
        raise kept
    for number, layer in enumerate(layers):
        grown = layer.get_seq_length() - (before[number] if number < len(before) else 0)
        if grown:
            layer.crop(-grown)
    return run(model, *args, **kwargs)


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
