"""A transformers model from a GGUF file, its weights still in their blocks."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moefuse.hf.experts import known_activation
from moefuse.hf.gguf_experts import BlockExperts, in_blocks, refuse_to_save, tie_words
from moefuse.hf.gguf_models import ARCHITECTURES, Architecture, Keys, Made
from moefuse.hf.gguf_tokenizer import read_tokenizer
from moefuse.hf.place import place_model
from moefuse.hf.register import NAME
from moefuse.hf.support import on_interface
from moefuse.nn.from_gguf import expert_layers, read_experts
from moefuse.nn.placement import Placement
from moefuse.nn.quantized import QuantModule, interleave_
from moefuse.quant.formats import FORMATS
from moefuse.quant.gguf import GGUFFile, Malformed, brief, read
from moefuse.quant.tensor import QuantTensor
from moefuse.types import dtype_named

_LARGE = 2**20  # elements
_INITIALISERS = ("torch.nn.init", "transformers.initialization")


def from_gguf(
    path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    exact: bool = False,
    dequantize: str | None = None,
    arrange: bool = False,
    experts: str | Placement | None = None,
    gpu_memory: str | int | None = None,
    progress: bool = True,
) -> tuple[Any, Any]:
    """The transformers model of a GGUF file, in eval mode, and its tokenizer.

    Experts, linear layers and embeddings stay in the file's blocks: views of its map, which the system reads in as they
    are used. Where llama.cpp has the rows of a matrix in another order or in two tensors of one format (queries and
    keys of Mixtral and Granite, Granite's shared expert, linear attention of Qwen 3.5), its blocks are copied into the
    model's order, a tensor at a time. Numbers are what the file has as numbers, routers, and what is laid across
    blocks: Granite's shared expert in two formats, ``out_proj`` of linear attention in blocks wider than a head,
    ``kv_b_proj`` of DeepSeek where the file has keys and values apart. Parameters come frozen. `moefuse.hf.dequantize`
    turns all blocks into numbers.

    Args:
        path: a file; of a model in several files the first.
        dtype: of activations and of what is not in blocks, or its name; "auto" is bfloat16.
        device: where it runs; on a GPU the blocks are copied there.
        exact: keep activations unrounded in products with blocks, see `moefuse.QuantTensor`.
        dequantize: "dense" gives all but the experts as numbers, which takes several times their memory.
        arrange: on a CPU, copy blocks out of the file into the order that is read fastest there: faster by a quarter to
            a third, for memory of the file's size and the time to read it whole.
        experts: "auto" or "cpu" leaves experts in RAM, but for those that fit on the GPU; or a `moefuse.nn.Placement`.
            With ``arrange`` their blocks are copied out of the file and locked, which the GPU reads several times
            faster than a mapped file.
        gpu_memory: what the model may take of the GPU, such as "12GiB"; the rest of its experts stays in RAM.
        progress: show a bar on the terminal while loading.

    Raises:
        ValueError: the file is missing, damaged, of a dense model, or of an architecture that is not known; the
            message says what to do.
    """
    placement = Placement.of(experts, gpu_memory, device)
    file = _open(Path(path))
    architecture = ARCHITECTURES[file.architecture]
    target = torch.bfloat16 if dtype == "auto" else dtype_named(dtype) if isinstance(dtype, str) else dtype
    if target not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"from_gguf: dtype must be auto, float32, bfloat16 or float16, got {dtype}")
    if dequantize not in (None, "dense"):
        raise ValueError(f"from_gguf: dequantize must be None or 'dense', got {dequantize!r}")
    try:
        keys, tokenizer = Keys(file), read_tokenizer(file)
        fields = architecture.config(keys)
    except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # a value of another kind than its key's
        raise ValueError(
            f"from_gguf: the metadata of {file.path} must be as llama.cpp writes it: {brief(error)}"
        ) from error
    model = _empty(fields, target, file)
    with _bar(file, progress) as bar:
        _fill(model, _Source(file, architecture, keys, bar), target, exact, dense=dequantize == "dense")
    model.save_pretrained = refuse_to_save
    if placement is not None:
        place_model(model, placement, mapped=True, arrange=arrange)
        return model.eval(), tokenizer
    if arrange and torch.device(device).type == "cpu":
        interleave_(model)
    return model.to(device).eval(), tokenizer


def _open(path: Path) -> GGUFFile:
    """The mapped file, known to hold experts of a kind that can be loaded."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        file = read(path)
        name = file.architecture
    except FileNotFoundError as error:
        raise ValueError(f"{path} is a part of a model, and there is no {error.filename}: fetch it, too") from error
    except (Malformed, OSError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}. The file is damaged, cut short or no GGUF: fetch it again"
        ) from error
    if not expert_layers(file):
        if any(re.search(r"ffn_(gate|up|down)\.\d+\.weight", tensor) for tensor in file):
            raise ValueError(f"{path} keeps each expert in a tensor of its own, as before 2024-04: fetch a newer one")
        raise ValueError(f"{path} is a dense {name} model, without experts: run it with transformers or llama.cpp")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ValueError(
            f"{path} has the architecture {name}, and from_gguf knows {known}. moefuse.nn.MoE.from_gguf may take its "
            "layers; moefuse.hf runs the model from its transformers directory"
        )
    return file


class _LargeOnMeta(TorchFunctionMode):
    """What is made large and empty is never given memory; some systems refuse to promise a stack of experts.

    Nor is a parameter without memory filled, which torch takes a millisecond to find out.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if getattr(function, "__module__", None) in _INITIALISERS:
            target = next(iter(args), options.get("tensor"))
            if isinstance(target, Tensor) and target.is_meta:
                return target
        if function is torch.empty and args and options.get("device") is None:
            first, *_ = args
            if math.prod(first if isinstance(first, (tuple, list)) else args) > _LARGE:
                options["device"] = "meta"
        return function(*args, **options)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made here get parameters without memory, and buffers with their values."""
    register = nn.Module.register_parameter

    def empty(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        register(module, name, value if value is None else nn.Parameter(value.to("meta"), requires_grad=False))

    nn.Module.register_parameter = empty  # type: ignore[method-assign, assignment]  # for a while
    try:
        with _LargeOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as it was


def _empty(fields: dict[str, Any], dtype: torch.dtype, file: GGUFFile) -> Any:
    """The model without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(**fields)
        with _parameters_on_meta():
            auto: Any = AutoModelForCausalLM  # untyped
            model = auto.from_config(config, dtype=dtype, experts_implementation=NAME)
    except Exception as error:  # each configuration refuses in its own way
        raise ValueError(f"transformers takes no model with the metadata of {file.path}: {str(error)[:300]}") from error
    return model


def _bar(file: GGUFFile, shown: bool) -> Progress:
    columns = (TextColumn(f"loading {file.path.name}"), BarColumn(), DownloadColumn(binary_units=True))
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)


class _Source:
    """A file on its way into a model."""

    def __init__(self, file: GGUFFile, architecture: Architecture, keys: Keys, bar: Progress) -> None:
        self.file, self.architecture, self.keys, self.bar = file, architecture, keys, bar
        self.task = bar.add_task("loading", total=sum(info.nbytes for info in file.infos.values()))
        #: tensors in the file -> the module that they have become part of
        self.used: dict[str, str] = {}

    def note(self, path: str, *names: str) -> None:
        """These tensors have found their place in a module."""
        self.used |= dict.fromkeys(names, path)
        self.bar.advance(self.task, sum(self.file.infos[name].nbytes for name in names))

    def way(self, name: str) -> Made | None:
        """How a parameter is made from what the file has."""
        ways = self.architecture.source(name)
        return next((way for way in ways if all(stored in self.file for stored in way.names)), None)

    def blocks(self, name: str, shape: torch.Size) -> QuantTensor | None:
        """A matrix in blocks; None where it must be numbers."""
        way = self.way(name)
        if way is None or any(".ffn_gate_inp." in stored for stored in way.names):
            return None
        tensors = [self.file[stored] for stored in way.names]
        matrices = [one for one in tensors if isinstance(one, QuantTensor) and one.dim() == 2]
        if len(matrices) < len(tensors) or len({one.format for one in matrices}) > 1:
            return None
        first, *_ = matrices
        if not way.takes_blocks(self.keys, FORMATS[first.format].values):
            return None
        made = QuantTensor(self._made(way, [one.blocks for one in matrices]), first.format)
        _check_shape(name, made.shape, shape, way)
        self.note(name.rpartition(".")[0], *way.names)
        if made.blocks.data_ptr() != first.blocks.data_ptr():
            self._release(way)
        return made

    def numbers(self, name: str, target: Tensor) -> Tensor | None:
        """A parameter in numbers; None where a buffer keeps what it has."""
        way = self.way(name)
        if way is None:
            if not target.is_meta:
                return None
            ways = self.architecture.source(name)
            wanted = " or ".join(" and ".join(way.names) for way in ways) or "a tensor"
            raise ValueError(f"from_gguf: the file must have {wanted} for {name}, got none")
        # What is made anew may be sums and logarithms of small vectors; matrices are only moved around.
        dtype = target.dtype if target.dim() > 1 else torch.float32
        tensors = [self.file[stored] for stored in way.names]
        made = self._made(
            way, [one.dequantize(dtype) if isinstance(one, QuantTensor) else one.to(dtype) for one in tensors]
        )
        _check_shape(name, made.shape, target.shape, way)
        self.note(name.rpartition(".")[0], *way.names)
        # A plain tensor of the model's own type is a view of the map.
        if any(isinstance(one, QuantTensor) or one.dtype != target.dtype for one in tensors):
            self._release(way)
        return made

    def _made(self, way: Made, tensors: list[Tensor]) -> Tensor:
        try:
            return way.function(self.keys, *tensors)
        except (RuntimeError, IndexError, TypeError) as error:  # sizes that do not divide, or too few of them
            rule = "must have the sizes that the metadata gives"
            raise ValueError(f"from_gguf: {', '.join(way.names)} {rule}") from error

    def _release(self, way: Made) -> None:
        for stored in way.names:
            self.file.release(stored)


def _check_shape(name: str, got: torch.Size, want: torch.Size, way: Made) -> None:
    if got != want:
        raise ValueError(f"from_gguf: {name} must have shape {list(want)}, got {list(got)} from {', '.join(way.names)}")


def _fill(model: Any, source: _Source, dtype: torch.dtype, exact: bool, dense: bool) -> None:
    """Give the model its tensors; ``dense``: all but experts as numbers."""
    found = list(on_interface(model))
    if not found:
        raise ValueError(
            f"from_gguf: the experts of {type(model).__name__} must be on transformers' experts interface, and in the "
            "release that is installed they are not: pip install -U transformers"
        )
    for path, stock in found:
        layer = int(re.findall(r"\.layers\.(\d+)\.", path)[0])
        model.set_submodule(path, _experts_of(source.file, layer, stock, dtype, exact))
        experts = re.compile(rf"blk\.{layer}\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)")
        source.note(path, *filter(experts.fullmatch, source.file))
    tied = _tied(model)
    if not dense:
        for path, stock in list(model.named_modules()):
            if isinstance(stock, (nn.Linear, nn.Embedding)) and f"{path}.weight" not in tied:
                blocks = source.blocks(f"{path}.weight", stock.weight.shape)
                if blocks is not None:
                    model.set_submodule(path, in_blocks(stock, blocks.exactly(exact), dtype))
    for name, target in model.state_dict(keep_vars=True).items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        filled = isinstance(owner, BlockExperts) or (isinstance(owner, QuantModule) and leaf != "bias")
        if filled or name in tied:
            continue
        value = source.numbers(name, target)
        if value is not None:
            kept = _kept_wide(model, name, target.dtype)
            _assign(model, name, value.to(torch.float32 if kept else target.dtype))
    tie_words(model)
    _check_all_used(model, source)
    model._gguf_tensors = source.used


def stored_in(model: Any) -> dict[str, tuple[str, ...]]:
    """Path of a module -> the names that its tensors have in the GGUF file of a model, if it is from one."""
    found: dict[str, tuple[str, ...]] = {}
    for name, path in getattr(model, "_gguf_tensors", {}).items():
        found[path] = (*found.get(path, ()), name)
    return found


def _tied(model: Any) -> set[str]:
    """Parameters that are others by another name."""
    if not model.config.get_text_config().tie_word_embeddings:
        return set()
    return set(model._tied_weights_keys or ())


def _experts_of(file: GGUFFile, layer: int, stock: Any, dtype: torch.dtype, exact: bool) -> BlockExperts:
    activation = known_activation(stock)
    if activation is None:
        raise ValueError(f"from_gguf: the activation of {type(stock).__name__} must be one of ours, got another")
    tensors = read_experts(file, layer)
    E, H, I = tensors["down"].shape
    want = tuple(stock.down_proj.transpose(1, 2).shape if stock.is_transposed else stock.down_proj.shape)
    if want != (E, H, I):
        raise ValueError(f"from_gguf: experts of layer {layer} must be {list(want)}, got {[E, H, I]}")
    return BlockExperts(stock, activation, tensors, dtype, exact)


def _kept_wide(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers keeps a parameter in float32 in a model of this type."""
    wide = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        wide |= set(model._keep_in_fp32_modules or ())
    return any(part in wide for part in name.split("."))


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    else:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _check_all_used(model: nn.Module, source: _Source) -> None:
    """Nothing of the model is empty, nothing of the file was left out."""
    empty = [name for name, value in model.named_parameters() if value.is_meta]
    if empty:
        raise ValueError(f"from_gguf: every parameter must have its tensor, got none for {', '.join(empty[:3])}")
    left = [
        name
        for name in source.file
        if name not in source.used
        and not re.fullmatch(source.architecture.unused, name)
        and not ((layer := re.match(r"blk\.(\d+)\.", name)) and int(layer[1]) >= source.keys.layers)
    ]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise ValueError(
            f"from_gguf: the model of {source.file.architecture} in transformers must have a place for every tensor, "
            f"got {', '.join(left[:3])}{more}"
        )
