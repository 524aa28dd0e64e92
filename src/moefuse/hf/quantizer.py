"""Weights in blocks as a quantisation method of transformers, and released ones that are kept as they are.

`MoefuseConfig` given to ``from_pretrained`` quantises experts as they arrive; found in a saved model, it loads what was
saved. FP8 and MXFP4 checkpoints are taken over from transformers where ``experts_implementation="moefuse"`` is asked
for, on any device.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.utils import logging
from transformers.utils import quantization_config as configs
from transformers.utils.import_utils import is_compressed_tensors_available
from transformers.utils.quantization_config import QuantizationConfigMixin, QuantizationMethod

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
from moefuse.types import Weight, check_flag

_log: Any = logging.get_logger(__name__)
# Bytes that arrive before the pages of their files are given back, and Linux's number for that.
_OFTEN, _PAGEOUT = 2**26, 21

#: what weights in FP8 are in safetensors, and FP4 with two numbers in a byte
_PACKED = {"F8_E4M3", "I8"}
#: how the scales of a weight are named beside it
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight", "_scale_inv", "_scale")
_SCALE = re.compile(r"(weight_scale|weight_scale_inv|\.scale|qscale_weight|proj_scale_inv|proj_scale)$")

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
        check_flag("MoefuseConfig", "exact", exact)
        if not modules:
            Recipe(format, rules)  # what cannot be is refused before anything is read
        self.format, self.rules, self.exact = format, dict(rules or {}), exact
        self.modules = {path: dict(specs) for path, specs in (modules or {}).items()}


class _Files:
    """Checkpoints that are mapped while they are loaded; pages that have been read count as memory of the process."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]] | None) -> None:
        self.paths = {os.path.realpath(path) for path in paths or ()}
        self.bytes = 0

    @functools.cached_property
    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """Name -> type, as safetensors names it, and shape, from the headers."""
        found: dict[str, tuple[str, list[int]]] = {}
        for path in sorted(self.paths):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  # it is no dictionary
                    part = file.get_slice(name)
                    found[name] = part.get_dtype(), part.get_shape()
        return found

    def by_matrix(self) -> bool:
        """Whether every scale of a weight is a single number."""
        return all(math.prod(shape) == 1 for name, (_, shape) in self.tensors.items() if _SCALE.search(name))

    def kinds(self, model: Any) -> dict[str, str]:
        """Name of a tensor in the model -> its type in the files; of FP8 it is seen to that there are scales."""
        conversions = get_model_conversion_mapping(model)
        renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        empty = model.state_dict()
        kinds: dict[str, str] = {}
        for name, (kind, _) in self.tensors.items():
            if _SCALE.search(name) or name.endswith("_scale"):
                continue
            if kind in _PACKED and not any(name.removesuffix(".weight") + end in self.tensors for end in _SCALES):
                raise ValueError(f"the checkpoint must have {name}_scale_inv, and it has not: it is damaged")
            renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, empty)
            renamed = name if renamed not in empty and name in empty else renamed
            if kinds.setdefault(renamed, kind) != kind and {kinds[renamed], kind} & _PACKED:
                raise ValueError(f"{renamed} must be of one type in the files, got {kinds[renamed]} and {kind}")
            if kind.startswith("F8_") and kind not in _PACKED:
                raise ValueError(f"{name} must be F8_E4M3 to be kept, got {kind}")
        return kinds

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
        recipe, found = Recipe(config.format, config.rules), experts_of(model)
        recipe.must_fit([f"{path}.{name}" for path, stock in found for name in shapes_of(stock) if "bias" not in name])
        for path, stock in found:
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
        config = self.quantization_config  # run_compressed: in older releases, of compressed-tensors alone
        return self.pre_quantized and not getattr(config, "dequantize", not getattr(config, "run_compressed", True))

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **options: Any) -> None:
        named = model.config.get_text_config()._experts_implementation == NAME
        if named and self._packed() and any(True for _ in on_interface(model)):  # a dense model ignores the name
            files = _Files(checkpoint_files)
            reason = self._other(files)
            if not reason:
                self.taken = True
                self._await(model, files)
                return
            self._leave(f"{type(model).__name__} is not kept packed: {reason}")
        if self._packed():
            self._validate()
        super()._process_model_before_weight_loading(model, checkpoint_files=checkpoint_files, **options)  # type: ignore[misc]

    def _other(self, files: _Files) -> str:  # noqa: ARG002  # most need not look
        """Why it is of a kind that we do not keep; empty where we do."""
        return ""

    def _leave(self, reason: str) -> None:
        """To transformers, which makes numbers of it."""
        if not hasattr(HfQuantizer, "serialized_names"):
            raise ValueError(
                f"{reason}; this release of transformers loses scales of experts: pip install -U transformers"
            )
        _log.warning(f"{reason}; transformers makes numbers of it")
        self.quantization_config.dequantize = True

    def _await(self, model: Any, files: _Files) -> None:
        raise NotImplementedError

    def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
        return mark(model) if self.taken else super()._process_model_after_weight_loading(model, **options)  # type: ignore[misc]

    def get_load_operations(self) -> Any:
        return {} if self.taken else super().get_load_operations()  # type: ignore[misc]

    def get_weight_conversions(self) -> Any:
        return [] if self.taken else super().get_weight_conversions()  # type: ignore[misc]


class ReleasedMXFP4(_Released, Mxfp4HfQuantizer):  # type: ignore[misc]  # transformers is untyped
    """gpt-oss as it is released."""

    def _await(self, model: Any, files: _Files) -> None:
        for path, stock in experts_of(model):
            _await_mxfp4(model, path, stock, files)


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


class _ReleasedFP8(_Released):
    """Files of FP8 of any kind: they say themselves what is FP8, however the configuration names the rest."""

    def _block(self) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None: a whole row or matrix."""
        raise NotImplementedError

    def _other(self, files: _Files) -> str:  # noqa: ARG002
        block = self._block()
        ours = format_of("FP8").values
        return f"its scales are for {block[1]} columns, ours for {ours}" if block and block[1] % ours else ""

    def _await(self, model: Any, files: _Files) -> None:
        self.files = files
        _await_fp8(model, files, None if files.by_matrix() else self._block())
        # Activations and caches are not rounded to 8 bits, so that their scales are not needed.
        known = model._keys_to_ignore_on_load_unexpected  # a set; in older releases a list or None
        ignored = (*(known or ()), r"\.(input|output|activation|q|k|v)_scale$")
        model._keys_to_ignore_on_load_unexpected = set(ignored) if isinstance(known, set) else list(ignored)

    def get_weight_conversions(self) -> Any:
        if not self.taken:
            return super().get_weight_conversions()
        return [WeightRenaming(r"weight_scale$", "weight_scale_inv")]  # as compressed-tensors and AutoFP8 have it

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        updated = super().update_weight_conversions(weight_conversions, model)  # type: ignore[misc]
        for one in updated if self.taken else ():
            if isinstance(one, WeightConverter):
                one.operations.insert(0, _ScalesAsMatrices())
                one.operations.insert(2, _PagesBack(self.files))  # experts have been stacked, and are put together next
        return updated


class _AsItIs(ConversionOps):
    """Leaves what is loaded as it is, and what is saved after that."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return input_dict

    @property
    def reverse_op(self) -> ConversionOps:
        return _AsItIs()

    def __deepcopy__(self, memo: Any) -> ConversionOps:
        return self  # there is a converter for each stack, and one list of files


class _ScalesAsMatrices(_AsItIs):
    """Scales of one expert as ``[n, k]``, so that those of gate and up can be put together as their rows are."""

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return {
            name: [part if part.dim() > 1 else part.reshape(-1, 1) for part in parts]
            for name, parts in input_dict.items()
        }


class _PagesBack(_AsItIs):
    """Copies have been made: the pages of the files that they were made of are not needed any more."""

    def __init__(self, files: _Files) -> None:
        self.files = files

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        self.files.seen(sum(part.nbytes for part in input_dict.values() if isinstance(part, Tensor)))
        return input_dict


class ReleasedFP8(_ReleasedFP8, FineGrainedFP8HfQuantizer):
    """DeepSeek-V3, Qwen3 and others as they are released in FP8; linear layers stay in it, too."""

    def _block(self) -> tuple[int, int] | None:
        block = self.quantization_config.weight_block_size
        return None if block is None else (block[0], block[1])


class CompressedTensorsConfig(configs.CompressedTensorsConfig):
    """transformers' own, by whose name it is known, without the package that only its quantizer needs."""

    def __init__(self, **told: Any) -> None:
        self.told = told
        if is_compressed_tensors_available():
            super().__init__(**told)
            return
        self.quantization_config, self.quant_method = None, QuantizationMethod.COMPRESSED_TENSORS
        self.dequantize = told.get("dequantize", not told.get("run_compressed", True))

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() if is_compressed_tensors_available() else dict(self.told)

    def schemes(self) -> list[dict[str, Any]]:
        """Of weights, one for each group of layers."""
        groups = (self.told.get("config_groups") or {}).values()
        return [dict(group.get("weights") or {}) if isinstance(group, dict) else {} for group in groups]


class ReleasedCompressed(_ReleasedFP8, CompressedTensorsHfQuantizer):
    """FP8 as compressed-tensors has it: a scale for a row, a matrix or a block, without its package."""

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        start = super().__init__ if is_compressed_tensors_available() else functools.partial(HfQuantizer.__init__, self)
        start(quantization_config, **options)

    @property
    def serialized_names(self) -> Any:  # type: ignore[override]  # a property of its parent, too
        return {"weight": ["weight", "weight_scale_inv"]} if self.taken else super().serialized_names

    def _block(self) -> tuple[int, int] | None:
        first = self.quantization_config.schemes()[0]
        if first["strategy"] == "block":
            rows, columns = first["block_structure"]
            return rows, columns
        return (1, first["group_size"]) if first["strategy"] == "group" else None

    def _other(self, files: _Files) -> str:
        told, schemes = self.quantization_config.told, self.quantization_config.schemes()
        kinds = {f"{one.get('type')}{one.get('num_bits')} by {one.get('strategy')}" for one in schemes}
        format = told.get("format")
        strategies = ("tensor", "channel", "block", "group")
        if format not in ("float-quantized", "naive-quantized") or kinds - {f"float8 by {one}" for one in strategies}:
            return f"compressed-tensors with {', '.join(sorted(kinds))} in {format} is not FP8"
        if len(kinds) > 1:
            return f"compressed-tensors with several kinds of scales: {', '.join(sorted(kinds))}"
        if (told.get("sparsity_config") or {}).get("format", "dense") != "dense":
            return f"compressed-tensors with sparse weights in {told['sparsity_config']['format']}"
        return super()._other(files)

    def _leave(self, reason: str) -> None:
        if not is_compressed_tensors_available():
            raise ValueError(f"{reason}; transformers makes numbers of it with pip install compressed-tensors")
        _log.warning(f"{reason}; transformers makes numbers of it")


def _await_fp8(model: Any, files: _Files, block: tuple[int, int] | None) -> None:
    """Experts, linear layers and embeddings whose weights the files have in FP8, or in FP4 as DeepSeek-V4 has it."""
    kinds = files.kinds(model)
    packed = {name for name, kind in kinds.items() if kind in _PACKED}
    experts = dict(experts_of(model))
    for path, module in list(model.named_modules()):
        own = {f"{path}.{name}" for name in names_of(module).values()} if path in experts else {f"{path}.weight"}
        if not own & packed:
            continue
        if path in experts:
            _await_fp8_experts(model, path, module, packed, block, files)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            _await_fp8_matrix(model, path, module, block, files)
        else:
            continue
        packed -= own
    for name in sorted(packed & model.state_dict().keys()):
        kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
        raise ValueError(f"{name} is in FP8, and a {kind} has no place for that: only experts and linear layers have")


def _await_fp8_experts(
    model: Any, path: str, stock: Any, packed: set[str], block: tuple[int, int] | None, files: _Files
) -> None:
    names, shapes = names_of(stock), shapes_of(stock)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, own in names.items():
        groups[name] = {own: getattr(stock, own)}
        if f"{path}.{own}" in packed:
            groups[name] = _with_scale(own, shapes[name])

    def make(name: str, parts: dict[str, Tensor]) -> Any:
        if len(parts) == 1:
            return in_our_layout(stock, name, parts[names[name]])
        weight, scale = parts.values()
        with _about(f"{path}.{names[name]}"):
            if weight.dtype == torch.int8:  # FP4, two numbers in a byte
                made: Any = from_mxfp4(weight, scale, functools.partial(in_halves, stock, name))
            else:
                gated = stock.has_gate and name == "gate_up"
                made = from_released_fp8(weight, scale, block, stock.down_proj.dtype, halves=gated)
            if made.shape != shapes[name]:
                raise ValueError(f"the model has {list(shapes[name])}, got {list(made.shape)}")
            _tell_of_numbers(made)
        return made

    Arriving(model, path, groups, make, _finish_experts(stock), files)


def _await_fp8_matrix(model: Any, path: str, stock: Any, block: tuple[int, int] | None, files: _Files) -> None:
    groups = {"weight": _with_scale("weight", stock.weight.shape)}
    if getattr(stock, "bias", None) is not None:
        groups["bias"] = {"bias": stock.bias}
    dtype = stock.weight.dtype
    # What computes in its own way, or shares its weight with the output layer, has numbers.
    plain = type(stock) in (nn.Linear, nn.Embedding) and stock is not model.get_input_embeddings()

    def make(name: str, parts: dict[str, Tensor]) -> Any:
        if name == "bias":
            return nn.Parameter(parts[name].to(dtype), requires_grad=False)
        weight, scale = parts.values()
        with _about(f"{path}.weight"):
            if weight.shape != stock.weight.shape:
                raise ValueError(f"the model has {list(stock.weight.shape)}, got {list(weight.shape)}")
            made = from_released_fp8(weight, scale, block, dtype)
            _tell_of_numbers(made)
        return made if isinstance(made, Tensor) or plain else made.dequantize(dtype)

    def finish(tensors: dict[str, Any]) -> nn.Module:
        if "bias" in tensors:
            stock.bias = tensors["bias"]
        if not isinstance(tensors["weight"], Tensor):
            return in_blocks(stock, tensors["weight"], dtype)
        stock.weight = nn.Parameter(tensors["weight"], requires_grad=False)
        return stock  # type: ignore[no-any-return]

    Arriving(model, path, groups, make, finish, files)


def _with_scale(name: str, shape: Iterable[int]) -> dict[str, Tensor]:
    """A weight in FP8 and its scales, whose shape and type are the file's."""
    weight = torch.empty(tuple(shape), dtype=torch.float8_e4m3fn, device="meta")
    return {name: weight, f"{name}_scale_inv": torch.empty((), device="meta")}


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
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.update({NAME: MoefuseConfig, "compressed-tensors": CompressedTensorsConfig})
    ours = {NAME: MoefuseQuantizer, "mxfp4": ReleasedMXFP4, "compressed-tensors": ReleasedCompressed}
    auto.AUTO_QUANTIZER_MAPPING.update(ours | {"fp8": ReleasedFP8, "mxfp8": ReleasedFP8})
