"""Whether a model would use us: transformers takes any registered name, and a model without the hook ignores it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface

from moefuse.hf.experts import known_activation
from moefuse.hf.gguf_experts import BlockExperts
from moefuse.nn.lora import ExpertsLoRA


@dataclass(frozen=True)
class ModuleSupport:
    """One experts module: its path in the model, its class, and whether we compute it."""

    path: str
    kind: str
    supported: bool
    reason: str


@dataclass(frozen=True)
class Support:
    """The answer of `supports`; true when every experts module of the model runs on moefuse."""

    supported: bool
    reason: str
    modules: tuple[ModuleSupport, ...]

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        return f"{'supported' if self.supported else 'not supported'}: {self.reason}"


def interface_of(module: nn.Module) -> ExpertsInterface | None:
    """The registry through which a module's forward is dispatched, if it is."""
    for cell in getattr(type(module).forward, "__closure__", None) or ():
        if isinstance(cell.cell_contents, ExpertsInterface):
            return cell.cell_contents
    return None


def on_interface(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Paths and experts modules that ``experts_implementation="moefuse"`` reaches, and those that have no other."""
    for path, module in model.named_modules():
        interface = interface_of(module)
        reached = interface is not None and not isinstance(interface, FP8ExpertsInterface)
        if reached or isinstance(module, BlockExperts):
            yield path, module


def supports(model: nn.Module) -> Support:
    """Whether ``experts_implementation="moefuse"`` does anything for this model, and for which of its modules.

    A dense model, or one whose experts are not on transformers' experts interface, takes the name and ignores it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
    >>> print(supports(LlamaForCausalLM(LlamaConfig(**sizes))))
    not supported: LlamaForCausalLM has no experts: it is a dense model, and the name would be ignored
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"supports: model must be a torch module, got {type(model).__name__}")
    modules = tuple(_judge(model))
    name = type(model).__name__
    refused = [module for module in modules if not module.supported]
    if not modules:
        return Support(False, f"{name} has no experts: it is a dense model, and the name would be ignored", modules)
    if refused:
        kinds = ", ".join(dict.fromkeys(f"{module.kind}: {module.reason}" for module in refused))
        return Support(False, f"{name}: {len(refused)} of {len(modules)} experts modules cannot run: {kinds}", modules)
    kinds = ", ".join(dict.fromkeys(module.kind for module in modules))
    return Support(True, f"{name} has {len(modules)} experts modules ({kinds}), and moefuse computes them all", modules)


def _judge(model: nn.Module) -> Iterator[ModuleSupport]:
    for path, module in model.named_modules():
        kind, interface = type(module).__name__, interface_of(module)
        if isinstance(module, BlockExperts):
            yield ModuleSupport(path, kind, True, "in blocks")
        elif isinstance(interface, FP8ExpertsInterface):
            yield ModuleSupport(path, kind, False, "its weights are FP8, for others: load it with our name")
        elif interface is not None:
            how = "fused" if known_activation(module) is not None else "our products around the module's own activation"
            yield ModuleSupport(path, kind, True, how)
        elif _looks_like_experts(module):
            yield ModuleSupport(path, kind, False, "it is not on transformers' experts interface and ignores the name")


def _looks_like_experts(module: nn.Module) -> bool:
    """Experts outside the interface: stacked weights, flat ones, or a collection of small networks."""
    kind = type(module).__name__.lower()
    if isinstance(module, ExpertsLoRA):
        return False  # a part of ours
    if "shared" in kind or ("expert" not in kind and "moe" not in kind):
        return False
    if any(value.dim() == 3 for value in module.parameters(recurse=False)):
        return True
    return "experts" in kind and any(value.dim() == 2 for value in module.parameters())
