"""Hang placed experts into a model: all else moves to the GPU as usual, they stay where they are."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.nn.placed_experts import PlacedExperts
from moefuse.nn.placement import Placement
from moefuse.types import Activation, Stacks


def place(
    model: nn.Module,
    find: Callable[[], Mapping[str, tuple[Stacks, Activation, Sequence[str]]]],
    placement: Placement,
    pin: bool,
    prepare: Callable[[], object] | None = None,
) -> None:
    """Put a model on the GPU, all but its experts, which are placed; where all fit, these too.

    Args:
        find: gives, by the path of an experts' module, what it computes with, and the names of its tensors.
        pin: stacks may be locked into memory; those of a mapped file may not.
        prepare: what experts need that stay in RAM; it may give them other memory.
    """
    experts, apart = find(), dict[int, int]()
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        _, _, names = experts.get(path, (None, None, ()))
        apart |= {t.data_ptr(): t.nbytes for name, t in own.items() if t is not None and name not in names}
    whole = placement.admit(sum(apart.values()), {path: stacks for path, (stacks, _, _) in experts.items()})
    weakref.finalize(model, placement.accelerator.unlimit).atexit = False
    try:
        if whole:
            model.to(placement.device)
            return
        if prepare is not None:
            prepare()
            experts = find()
        for path, (stacks, activation, names) in experts.items():
            owner: Any = model.get_submodule(path)
            owner._placed = placement.take(path, stacks, activation, pin)
            owner._apply = functools.partial(_apply_around, owner, tuple(names))
            owner._load_from_state_dict = _refuse_state
        model.to(placement.device)
        placement.fill()
    except BaseException:  # an interrupt, too: a model is placed as a whole or not at all
        placement.close()
        unplace(model)
        model.to("cpu")
        raise


def unplace(model: nn.Module) -> None:
    """Let the experts of a model be like its other parts again; nothing moves."""
    if (placement := placement_of(model)) is not None:
        placement.close()
    for module in model.modules():
        if vars(module).pop("_placed", None) is not None:
            del module._apply, module._load_from_state_dict


def placed(module: nn.Module) -> PlacedExperts | None:
    """The placed experts of a module, where it has them."""
    return vars(module).get("_placed")


def placement_of(model: nn.Module) -> Placement | None:
    """The placement of a model's experts."""
    found = (placed(module) for module in model.modules())
    return next((layer.placement for layer in found if layer is not None), None)


def _refuse_state(*_: Any, **__: Any) -> None:
    raise ValueError("load_state_dict: the experts are placed, and their slots would not follow: load, then place")


def _apply_around(module: Any, names: tuple[str, ...], fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """What ``_apply`` is for a module whose experts stay where they are, while its other tensors move."""
    probe = torch.empty(0, device=module._placed.accelerator.device)
    moved = fn(probe)
    if (moved.device, moved.dtype) != (probe.device, probe.dtype):
        raise ValueError(
            f"to: the experts are placed between RAM and {probe.device}, and stay so: call moefuse.hf.unpatch or "
            f"MoE.unplace first; got a move to {moved.device} in {str(moved.dtype).removeprefix('torch.')}"
        )
    held = {name: (own, own[name]) for own in (module._parameters, module._buffers) for name in names if name in own}
    specs = dict(getattr(module, "specs", {}))
    for name, (own, _) in held.items():
        own[name] = None
        getattr(module, "specs", {}).pop(name, None)
    try:
        type(module)._apply(module, fn, recurse)
    finally:
        for name, (own, value) in held.items():
            own[name] = value
            if name in specs:
                module.specs[name] = specs[name]
    return module
