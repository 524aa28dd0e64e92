"""Experts of a loaded transformers model into blocks, in place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import Tensor, nn

from moefuse.hf.experts import known_activation
from moefuse.hf.gguf_experts import BlockExperts, block_experts
from moefuse.hf.packing import Recipe, encode, in_our_layout, laid_out, names_of
from moefuse.hf.patch import patch, unpatch
from moefuse.hf.quantizer import experts_of, mark
from moefuse.quant.tensor import QuantTensor
from moefuse.types import check_flag, name_of


@dataclass(frozen=True)
class Quantized:
    """What became of one stack.

    Attributes:
        module: path of the experts module.
        stack: "gate_up", "up" or "down".
        before: its type or format, and ``after``.
        bytes_before: its size in memory, and ``bytes_after``.
        error: norm of what was lost over the norm of the numbers.
        note: why it is not in the format that was asked for.
    """

    module: str
    stack: str
    before: str
    after: str
    bytes_before: int
    bytes_after: int
    error: float
    note: str = ""


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_` did, stack by stack."""

    stacks: tuple[Quantized, ...]

    def __str__(self) -> str:
        before, after = (sum(getattr(one, f"bytes_{side}") for one in self.stacks) for side in ("before", "after"))
        lines = [f"{len(self.stacks)} stacks: {before / 2**20:,.1f} MiB became {after / 2**20:,.1f} MiB"]
        kinds: dict[tuple[str, str, str, str], list[Quantized]] = {}
        for one in self.stacks:
            kinds.setdefault((one.stack, one.before, one.after, one.note), []).append(one)
        for (stack, kind, now, note), same in kinds.items():
            worst = max(one.error for one in same)
            where = same[0].module + (f" and {len(same) - 1} more" if len(same) > 1 else "")
            lines.append(
                f"  {stack}: {kind} to {now}, error {worst:.2%} at most, {where}{f' ({note})' if note else ''}"
            )
        return "\n".join(lines)


@torch.no_grad()
def quantize_(
    model: Any,
    format: str = "Q4_K",
    rules: Mapping[str, str | None] | None = None,
    *,
    exact: bool = False,
    progress: bool = True,
) -> QuantizeReport:
    """Turn the experts of a transformers model into blocks, in place and one expert at a time.

    Beyond the model it takes the blocks of one layer and a few copies of one expert in float32. Everything else stays
    as it is. ``save_pretrained`` then writes the blocks, and ``from_pretrained`` loads them; `moefuse.hf.dequantize`
    is the way back to numbers. Experts that are in blocks already (FP8 or MXFP4 as released, a GGUF file) are
    taken expert by expert through float32.

    Where rows are no multiple of the format's block (256 in the K formats) they take Q4_0 for Q4_K and Q8_0 for any
    other, and stay in numbers where they are no multiple of 32; the report says where.

    Args:
        model: any family on transformers' experts interface; another is refused by name, with the reason.
        format: as in `moefuse.quantize`.
        rules: exceptions: a regular expression that is searched in a stack's path, as in
            ``model.layers.3.mlp.experts.down`` -> its format, or None to leave it alone. The last that fits wins;
            one that fits no stack is an error.
        exact: keep activations unrounded in products with blocks, see `moefuse.QuantTensor`.
        progress: show a bar on the terminal.

    >>> from transformers import MixtralConfig, MixtralForCausalLM
    >>> sizes = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1, vocab_size=50, num_attention_heads=4)
    >>> model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4))
    >>> report = quantize_(model, "Q4_K", {"down": "Q6_K"}, progress=False)
    >>> [(one.stack, one.before, one.after) for one in report.stacks]
    [('gate_up', 'float32', 'Q4_K'), ('down', 'float32', 'Q6_K')]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_: model must be a torch module, got {type(model).__name__}")
    if hasattr(model, "_moefuse_steps"):
        raise ValueError("quantize_: a captured model keeps the weights it was captured with: uncapture it first")
    check_flag("quantize_", "exact", exact)
    check_flag("quantize_", "progress", progress)
    recipe, found = Recipe(format, rules), experts_of(model)
    recipe.must_fit([f"{path}.{name}" for path, module in found for name in _stacks(module)])
    for path, module in found:
        _check(path, module, recipe)
    patched = any("_moefuse" in vars(module) for module in model.modules())
    if patched:
        unpatch(model)
    rows: list[Quantized] = []
    columns = (TextColumn("quantising experts"), BarColumn(), MofNCompleteColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
            task = bar.add_task(
                "quantising", total=sum(len(one) for _, module in found for one in _stacks(module).values())
            )
            for path, module in found:
                activation, dtype = known_activation(module), _type_of(model, module)
                tensors = _in_blocks(path, module, recipe, rows, functools.partial(bar.advance, task))
                stock = module.stock if isinstance(module, BlockExperts) else module
                assert activation is not None  # `experts_of` refuses others
                model.set_submodule(path, BlockExperts(stock, activation, tensors, dtype, exact).train(module.training))
                _give_up(module)
    finally:  # interrupted, it is a model in which some modules are in blocks and the others as they were
        if block_experts(model):
            mark(model)
        if patched:
            patch(model)
    return QuantizeReport(tuple(rows))


def _stacks(module: Any) -> dict[str, Any]:
    """The stacks that a module has, in its own layout."""
    if isinstance(module, BlockExperts):
        found = {name: module.stack(name) for name in ("gate_up", "up", "down")}
        return {name: stack for name, stack in found.items() if stack is not None}
    return {name: getattr(module, own) for name, own in names_of(module).items() if not name.endswith("_bias")}


def _type_of(model: Any, module: Any) -> torch.dtype:
    """Of a module's numbers."""
    kinds = [stack.dtype for stack in _stacks(module).values() if isinstance(stack, Tensor)]
    return kinds[0] if kinds else model.get_input_embeddings().weight.dtype


def _check(path: str, module: Any, recipe: Recipe) -> None:
    """Refuse what cannot be in blocks, before anything is touched."""
    if getattr(module, "lora", None) is not None:
        raise ValueError(f"quantize_: {path} has adapters: moefuse.hf.dequantize folds them in")
    for name, stack in _stacks(module).items():
        if isinstance(stack, Tensor) and (type(stack) not in (Tensor, nn.Parameter) or stack.is_meta):
            kind = "has no memory" if stack.is_meta else f"is a {type(stack).__name__}"
            raise ValueError(
                f"quantize_: {path}.{name} must be a plain tensor, got one that {kind}: load the whole model on one "
                "device, without adapters"
            )
        asked = isinstance(stack, Tensor) and recipe.asked(f"{path}.{name}") is not None
        if asked and not all(bool(expert.isfinite().all()) for expert in stack):
            raise ValueError(f"quantize_: {path}.{name} must be finite, got NaN or infinity")


def _in_blocks(
    path: str, module: Any, recipe: Recipe, rows: list[Quantized], each: Callable[[], None]
) -> dict[str, Any]:
    """The tensors of a module in our layout, stacks in blocks."""
    ours = isinstance(module, BlockExperts)
    tensors: dict[str, Any] = {}
    for name, stack in _stacks(module).items():
        columns = stack.shape[-2] if module.is_transposed else stack.shape[-1]
        asked, wanted = recipe.asked(f"{path}.{name}"), recipe.choose(f"{path}.{name}", columns)
        before, error = stack.format if isinstance(stack, QuantTensor) else name_of(stack.dtype), 0.0
        if wanted in (None, before):
            tensors[name] = stack if ours else in_our_layout(module, name, stack)
        else:
            lay_out = functools.partial(laid_out, module, name)
            tensors[name], error = encode(f"quantize_: {path}.{name}", stack, wanted, lay_out, each)
        note = "" if wanted == asked else f"{asked} does not fit rows of {columns}"
        made = tensors[name]
        after = made.format if isinstance(made, QuantTensor) else name_of(made.dtype)
        rows.append(Quantized(path, name, before, after, stack.nbytes, made.nbytes, error, note))
    if module.has_bias:
        for name in ("gate_up_bias", "down_bias"):
            bias = module._buffers[name] if ours else getattr(module, names_of(module)[name])
            tensors[name] = bias if ours else in_our_layout(module, name, bias)
    return tensors


def _give_up(module: Any) -> None:
    """Its stacks are in another module now, and have no memory here."""
    for name, stack in _stacks(module).items():
        if isinstance(module, BlockExperts):
            module._kept.pop(name, None)
            module._buffers[name] = None
        else:
            empty = torch.empty_like(stack, device="meta")
            setattr(module, names_of(module)[name], nn.Parameter(empty, requires_grad=False))
