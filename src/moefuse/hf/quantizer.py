"""Weights in blocks as a quantisation method of transformers, and released ones that are kept as they are.

`MoefuseConfig` given to ``from_pretrained`` quantises experts as they arrive; found in a saved model, it loads what was
saved. FP8 and MXFP4 checkpoints are taken over from transformers where ``experts_implementation="moefuse"`` is asked
for, on any device.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils import logging
from transformers.utils.quantization_config import QuantizationConfigMixin

from moefuse.hf.experts import known_activation
from moefuse.hf.gguf_experts import BlockExperts, dequantize, in_blocks
from moefuse.hf.packing import (
    Recipe,
    encode,
    from_mxfp4,
    from_released_fp8,
    in_halves,
    in_our_layout,
    laid_out,
    names_of,
    shapes_of,
)
from moefuse.hf.register import NAME
from moefuse.hf.support import on_interface, supports
from moefuse.nn.quantized import QuantModule, specs_from_bytes, specs_in_bytes
from moefuse.quant.formats import format_of
from moefuse.quant.tensor import format_in, wrap
from moefuse.types import Weight

_log: Any = logging.get_logger(__name__)
# Bytes that arrive before the pages of their files are given back, and Linux's number for that.
_OFTEN, _PAGEOUT = 2**26, 21

#: what a module needs -> the parameters of a checkpoint that it is made of, by name, on the meta device
Groups = Mapping[str, Mapping[str, Tensor]]


class MoefuseConfig(QuantizationConfigMixin):
    """Experts in blocks, for ``from_pretrained(path, quantization_config=MoefuseConfig("Q4_K"))``.

    Each stack is quantised as it arrives, so that the model is never whole in memory as numbers.

    Args:
        format: of every stack that no rule names; see `moefuse.quantize`.
        rules: as `moefuse.hf.quantize_` takes them: ``{"down": "Q6_K"}``.
        exact: keep activations unrounded in products with blocks, see `moefuse.QuantTensor`.
        modules: written when a model is saved: path of a module -> its tensors in blocks and their formats.
    """

    def __init__(
        self,
        format: str = "Q4_K",
        rules: Mapping[str, str | None] | None = None,
        exact: bool = False,
        modules: Mapping[str, Mapping[str, str]] | None = None,
        quant_method: str = NAME,  # noqa: ARG002  # transformers gives what it found in a saved configuration
    ) -> None:
        self.quant_method: Any = NAME  # transformers has an enumeration of its own
        if not modules:
            Recipe(format, rules)  # what cannot be is refused before anything is read
        self.format, self.rules, self.exact = format, dict(rules or {}), exact
        self.modules = {path: dict(specs) for path, specs in (modules or {}).items()}


class _Files:
    """Checkpoints that are mapped while they are loaded; pages that have been read count as memory of the process."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]] | None) -> None:
        self.paths = {os.path.realpath(path) for path in paths or ()}
        self.bytes = 0

    def seen(self, count: int) -> None:
        """Bytes have become blocks: now and then their pages are given back, which loses nothing, whoever has them."""
        self.bytes += count
        maps = Path("/proc/self/maps")
        if self.bytes < _OFTEN or not self.paths or not maps.exists():
            return
        self.bytes = 0
        for line in maps.read_text().splitlines():
            span, *_, file = line.split(maxsplit=5)
            if file in self.paths:
                start, stop = (int(end, 16) for end in span.split("-"))
                ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _PAGEOUT)


class Arriving(nn.Module):
    """Stands where a module in blocks will be while its tensors are loaded.

    It has parameters without memory under the names that a checkpoint has. transformers sets them one by one; those
    that make up a tensor of the module become it at once, and when all are there the module takes its place.

    Args:
        model: where it stands, and ``path`` in it.
        groups: what is waited for.
        make: a tensor of the module from the name of its group and the parameters, by name.
        finish: the module from its tensors.
        files: what is mapped in memory while loading.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        groups: Groups,
        make: Callable[[str, dict[str, Tensor]], Any],
        finish: Callable[[dict[str, Any]], nn.Module],
        files: _Files,
    ) -> None:
        super().__init__()
        self.groups, self.make, self.finish, self.files = groups, make, finish, files
        self.set_place = functools.partial(model.set_submodule, path)
        self.arrived: dict[str, Tensor] = {}
        self.made: dict[str, Any] = {}
        for name, part in model.get_submodule(path).named_children():  # loaded as they are
            self.add_module(name, part)
        for group in groups.values():
            for name, value in group.items():
                self.register_parameter(name, nn.Parameter(value.detach().to("meta"), requires_grad=False))
        self.set_place(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_parameters", ()) and isinstance(value, Tensor) and not value.is_meta:
            # What a checkpoint lacks is made up without this mark; `missing` tells of it.
            if getattr(value, "_is_hf_initialized", False):
                self._take(name, value.detach())
        else:
            super().__setattr__(name, value)

    def _take(self, name: str, value: Tensor) -> None:
        self.arrived[name] = value
        group = next(group for group, names in self.groups.items() if name in names)
        if not self.arrived.keys() >= self.groups[group].keys():
            return
        parts = {name: self.arrived.pop(name) for name in self.groups[group]}
        self.made[group] = self.make(group, parts)
        self.files.seen(sum(part.nbytes for part in parts.values()))
        if len(self.made) == len(self.groups):
            module: Any = self.finish(self.made)
            for tensor in (module, *module.parameters(), *module.buffers()):
                tensor._is_hf_initialized = True  # or transformers would fill it with random numbers
            self.set_place(module)

    def missing(self) -> list[str]:
        """The parameters that never came."""
        waiting = [name for group, names in self.groups.items() if group not in self.made for name in names]
        return [name for name in waiting if name not in self.arrived]


class MoefuseQuantizer(HfQuantizer):
    """What transformers asks when a model is loaded or saved."""

    quantization_config: MoefuseConfig

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **_: Any) -> None:
        config, files = self.quantization_config, _Files(checkpoint_files)
        if self.pre_quantized:
            for path, specs in config.modules.items():
                _await_saved(model, path, specs, files)
            return
        recipe = Recipe(config.format, config.rules)
        for path, stock in experts_of(model):
            _await_numbers(model, path, stock, recipe, config.exact, files)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes of an element on the device where it will be, by which memory is planned."""
        path, _, _ = param_name.rpartition(".")
        arriving = isinstance(model.get_submodule(path), Arriving) and param.dim() > 2
        if arriving and not self.pre_quantized:
            return format_of(self.quantization_config.format).bits / 8
        return super().param_element_size(model, param_name, param)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        return mark(model)

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:  # noqa: ARG002  # it has the type it was loaded with
        dequantize(model)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters beside the blocks

    @property
    def is_qat_trainable(self) -> bool:
        return True  # or a Trainer would take no adapters but PEFT's

    @property
    def is_compileable(self) -> bool:
        return True


def mark(model: Any) -> Any:
    """Name the blocks of a model in its configuration, so that ``save_pretrained`` writes what loads again."""
    modules: dict[str, dict[str, str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Arriving):
            names = ", ".join(f"{path}.{name}" for name in module.missing()[:3])
            rule = "it is damaged or of another kind, or a device_map leaves them on the disk, where blocks cannot be"
            raise ValueError(f"the checkpoint must have {names}, and it has not: {rule}")
        if isinstance(module, (BlockExperts, QuantModule)):
            modules[path] = module.file_specs()
    formats = [format_in(spec) for specs in modules.values() for spec in specs.values()]
    config = MoefuseConfig(max(set(formats), key=formats.count, default="Q4_K"), modules=modules)
    model.config.quantization_config, model.config._is_quantized = config, True
    model.hf_quantizer = MoefuseQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, NAME
    return model


def experts_of(model: Any) -> list[tuple[str, Any]]:
    """Paths and experts modules that can be turned into blocks; a ValueError says which cannot, and why."""
    verdict = supports(model)
    if not verdict:
        raise ValueError(f"{type(model).__name__} cannot have its experts in blocks: {verdict.reason}")
    found = list(on_interface(model))
    for path, module in found:
        if known_activation(module) is None:
            reason = f"the activation of {type(module).__name__} is not one of ours"
            raise ValueError(f"{path} cannot be in blocks: {reason}")
    return found


def _finish_experts(stock: Any, exact: bool | None = None) -> Callable[[dict[str, Any]], nn.Module]:
    def finish(tensors: dict[str, Any]) -> nn.Module:
        activation = known_activation(stock)
        assert activation is not None  # `experts_of` refuses others
        return BlockExperts(stock, activation, tensors, stock.down_proj.dtype, exact)

    return finish


def _await_numbers(model: Any, path: str, stock: Any, recipe: Recipe, exact: bool, files: _Files) -> None:
    """Quantise experts when they come."""
    names, shapes = names_of(stock), shapes_of(stock)

    def make(name: str, parts: dict[str, Tensor]) -> Any:
        (value,) = parts.values()
        format = None if name.endswith("_bias") else recipe.choose(f"{path}.{name}", shapes[name][-1])
        if format is None:
            return in_our_layout(stock, name, value)
        return encode(f"{path}.{names[name]}", value, format, functools.partial(laid_out, stock, name))[0]

    groups = {name: {own: getattr(stock, own)} for name, own in names.items()}
    Arriving(model, path, groups, make, _finish_experts(stock, exact), files)


def _await_saved(model: Any, path: str, specs: Mapping[str, str], files: _Files) -> None:
    """Take a module's blocks as `mark` named them."""
    path, stock = _found(model, path)
    if stock is None:
        return
    matrix = isinstance(stock, (nn.Linear, nn.Embedding))
    shapes = {"blocks": stock.weight.shape} if matrix else shapes_of(stock)
    dtype = stock.weight.dtype if matrix else stock.down_proj.dtype
    groups: dict[str, dict[str, Tensor]] = {}
    for name, (*rows, columns) in shapes.items():
        spec = specs.get(name)
        last = columns if spec is None else format_of(format_in(spec)).row_bytes(columns)
        empty = torch.empty((*rows, last), dtype=dtype if spec is None else torch.uint8, device="meta")
        groups[name] = {name: empty}
    if specs:
        groups["specs"] = {"specs": specs_in_bytes(specs)}
    if matrix and getattr(stock, "bias", None) is not None:
        groups["bias"] = {"bias": stock.bias}

    def make(name: str, parts: dict[str, Tensor]) -> Any:
        value, empty = parts[name], groups[name][name]
        if name == "specs":
            given = specs_from_bytes(value)
            if given != specs:
                raise ValueError(f"{path} must be in the formats {specs} that quantization_config names, got {given}")
            return None
        if value.shape != empty.shape or value.is_floating_point() != empty.is_floating_point():
            want = f"{list(empty.shape)} in {specs.get(name, 'numbers')}"
            raise ValueError(f"{path}.{name} must be {want}, got {list(value.shape)} in {value.dtype}")
        return wrap(value, specs.get(name))

    def finish_matrix(tensors: dict[str, Any]) -> nn.Module:
        if "bias" in tensors:
            stock.bias = nn.Parameter(tensors["bias"], requires_grad=False)
        return in_blocks(stock, tensors["blocks"], dtype)

    Arriving(model, path, groups, make, finish_matrix if matrix else _finish_experts(stock), files)


def _found(model: Any, path: str) -> tuple[str, Any]:
    """A module by the path that it was saved with, by a model with a head or without; None for a head of another."""
    base = f"{model.base_model_prefix}."
    modules = dict(model.named_modules())
    for place in (path, base + path, path.removeprefix(base)):
        if place in modules:
            return place, modules[place]
    if path.startswith(base):
        raise ValueError(f"quantization_config names {path}, and {type(model).__name__} has no such module")
    return path, None


class _Released:
    """Takes a released checkpoint over from transformers' own quantizer where our experts are asked for."""

    taken = False
    pre_quantized: bool
    quantization_config: Any

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        # The model is not known yet, and transformers would choose numbers where there is no GPU or no kernel.
        self._validate = functools.partial(super().validate_environment, *args, **kwargs)  # type: ignore[misc]
        if not self._packed():
            self._validate()

    def _packed(self) -> bool:
        return self.pre_quantized and not self.quantization_config.dequantize

    def _takes(self, model: Any) -> bool:
        named = model.config.get_text_config()._experts_implementation == NAME
        return named and any(True for _ in on_interface(model))  # a dense model ignores the name

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **options: Any) -> None:
        self.taken = self._packed() and self._takes(model)
        if self.taken:
            self._await(model, _Files(checkpoint_files))
            return
        if self._packed():
            self._validate()
        self._before(model, checkpoint_files=checkpoint_files, **options)

    def _before(self, model: Any, **options: Any) -> None:
        super()._process_model_before_weight_loading(model, **options)  # type: ignore[misc]

    def _await(self, model: Any, files: _Files) -> None:
        raise NotImplementedError

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        return mark(model) if self.taken else super()._process_model_after_weight_loading(model, **options)  # type: ignore[misc]


class ReleasedMXFP4(_Released, Mxfp4HfQuantizer):  # type: ignore[misc]  # transformers is untyped
    """gpt-oss as it is released."""

    def _await(self, model: Any, files: _Files) -> None:
        for path, stock in experts_of(model):
            _await_mxfp4(model, path, stock, files)

    def get_load_operations(self) -> Any:
        return {} if self.taken else super().get_load_operations()  # type: ignore[no-untyped-call]

    def get_weight_conversions(self) -> Any:
        return [] if self.taken else super().get_weight_conversions()  # type: ignore[no-untyped-call]


def _await_mxfp4(model: Any, path: str, stock: Any, files: _Files) -> None:
    names, shapes = names_of(stock), shapes_of(stock)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, own in names.items():
        if name.endswith("_bias"):
            groups[name] = {own: getattr(stock, own)}
        else:
            E, N, K = shapes[name]
            scales = torch.empty((E, N, K // 32), dtype=torch.uint8, device="meta")
            groups[name] = {f"{own}_blocks": scales.unsqueeze(-1).expand(-1, -1, -1, 16), f"{own}_scales": scales}

    def make(name: str, parts: dict[str, Tensor]) -> Any:
        if name.endswith("_bias"):
            (bias,) = parts.values()
            return in_our_layout(stock, name, bias)
        with _about(f"{path}.{names[name]}"):
            blocks, scales = parts.values()
            made = from_mxfp4(blocks, scales, functools.partial(in_halves, stock, name))
            if made.shape != shapes[name]:
                raise ValueError(f"the model has {list(shapes[name])}, got {list(made.shape)}")
        return made

    Arriving(model, path, groups, make, _finish_experts(stock), files)


class ReleasedFP8(_Released, FineGrainedFP8HfQuantizer):
    """DeepSeek-V3, Qwen3 and others as they are released in FP8; linear layers stay in it, too."""

    def _takes(self, model: Any) -> bool:
        block = self.quantization_config.weight_block_size
        return super()._takes(model) and (block is None or list(block)[1] % format_of("FP8").values == 0)

    def _await(self, model: Any, files: _Files) -> None:
        stocks, found = dict(model.named_modules()), dict(experts_of(model))
        self._before(model)  # FP8 modules of transformers, which have the parameters that checkpoints have
        for path, module in list(model.named_modules()):
            if isinstance(module, FP8Experts):
                _await_fp8_experts(model, path, found[path], module, files)
            elif isinstance(module, FP8Linear):
                _await_fp8_linear(model, path, stocks[path], module, files)


def _await_fp8_experts(model: Any, path: str, stock: Any, empty: Any, files: _Files) -> None:
    names, shapes = names_of(stock), shapes_of(stock)
    parameters = dict(empty.named_parameters(recurse=False))
    groups = {
        name: {key: value for key, value in parameters.items() if key == own or key.startswith(f"{own}_")}
        for name, own in names.items()
    }

    def make(name: str, parts: dict[str, Tensor]) -> Any:
        weight, scale = parts[names[name]], parts[f"{names[name]}_scale_inv"]
        E, N, K = shapes[name]
        with _about(f"{path}.{names[name]}"):
            if weight.dtype == torch.int8:  # FP4, two numbers in a byte
                made: Any = from_mxfp4(weight, scale, functools.partial(in_halves, stock, name))
            else:
                gated = stock.has_gate and name == "gate_up"
                made = from_released_fp8(weight, scale, empty.block_size, stock.down_proj.dtype, halves=gated)
            if made.shape != (E, N, K):
                raise ValueError(f"the model has {[E, N, K]}, got {list(made.shape)}")
            _tell_of_numbers(made)
        return made

    Arriving(model, path, groups, make, _finish_experts(stock), files)


def _await_fp8_linear(model: Any, path: str, stock: Any, empty: Any, files: _Files) -> None:
    groups = {"weight": {name: value for name, value in empty.named_parameters(recurse=False) if name != "bias"}}
    if empty.bias is not None:
        groups["bias"] = {"bias": empty.bias}
    dtype = stock.weight.dtype

    def make(name: str, parts: dict[str, Tensor]) -> Any:
        if name == "bias":
            return nn.Parameter(parts[name].to(dtype), requires_grad=False)
        weight, scale = parts["weight"], parts["weight_scale_inv"]
        with _about(f"{path}.weight"):
            if weight.shape != stock.weight.shape:
                raise ValueError(f"the model has {list(stock.weight.shape)}, got {list(weight.shape)}")
            made = from_released_fp8(weight, scale, empty.block_size, dtype)
            _tell_of_numbers(made)
        return made if isinstance(made, Tensor) or type(stock) is nn.Linear else made.dequantize(dtype)

    def finish(tensors: dict[str, Any]) -> nn.Module:
        if "bias" in tensors:
            stock.bias = tensors["bias"]
        if not isinstance(tensors["weight"], Tensor):
            return in_blocks(stock, tensors["weight"], dtype)
        stock.weight = nn.Parameter(tensors["weight"], requires_grad=False)
        return stock  # type: ignore[no-any-return]

    Arriving(model, path, groups, make, finish, files)


def _tell_of_numbers(made: Weight) -> None:
    """Say once that rows did not fit blocks."""
    if isinstance(made, Tensor):
        _log.warning_once(f"FP8 rows of {made.shape[-1]} numbers are no multiple of 128: they become {made.dtype}")


class _about:
    """A ValueError or TypeError in here tells which tensor it is about."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, (ValueError, TypeError)):
            raise ValueError(f"{self.name}: {error}") from error


def register() -> None:
    """Make our configuration known to transformers, and take over what it would unpack."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[NAME] = MoefuseConfig
    auto.AUTO_QUANTIZER_MAPPING.update({NAME: MoefuseQuantizer, "mxfp4": ReleasedMXFP4, "fp8": ReleasedFP8})
