"""A model and its tokenizer from a path, ready to run on moefuse."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import Any

import torch

from moefuse.hf.gguf import from_gguf
from moefuse.hf.place import place_model
from moefuse.hf.quantize import quantize_
from moefuse.hf.quantizer import MoefuseConfig
from moefuse.hf.register import NAME
from moefuse.nn.placement import Placement
from moefuse.nn.quantized import BlockModule
from moefuse.types import dtype_named


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    parallel: str | None = None,
    exact: bool = False,
    weights: str | None = None,
    experts: str | Placement | None = None,
    gpu_memory: str | int | None = None,
) -> tuple[Any, Any]:
    """A causal language model on our experts, in eval mode, and its tokenizer.

    FP8 and MXFP4 checkpoints stay as they are released, and models that were saved in blocks in their blocks. Those of
    a GGUF file are arranged for the CPU where that leaves memory, see `from_gguf`.

    Args:
        path: a directory as ``save_pretrained`` writes it and ``hf download`` fetches it, or a GGUF file.
        dtype: of the weights; "auto" is the checkpoint's own, and bfloat16 for a GGUF file's activations.
        device: where it runs.
        parallel: "tensor" or "experts": split over the ranks that ``torchrun`` started.
        exact: of blocks, see `from_gguf`.
        experts, gpu_memory: leave experts in RAM, but for those that fit on the GPU, see `from_gguf`.
        weights: the format that experts are to have, see `quantize_`; without it, that of the checkpoint.
    """
    folder = Path(path)
    if isinstance(dtype, str) and dtype != "auto":
        named = dtype_named(dtype)
        if named is None:
            raise ValueError(f"load: dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
        dtype = named
    if folder.suffix == ".gguf" or folder.is_file():
        _refuse_other_files(folder)
        if parallel is not None:
            raise ValueError("a GGUF file is not split over ranks: give the directory of a transformers model")
        if weights is not None:
            raise ValueError("a GGUF file has its formats already: leave the weights to it")
        where: dict[str, Any] = {"device": device, "experts": experts, "gpu_memory": gpu_memory}
        return from_gguf(folder, dtype=dtype, exact=exact, arrange=_fits_twice(folder), **where)
    placement = Placement.of(experts, gpu_memory, device)
    _check(folder)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.quantizers.auto import AutoHfQuantizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # each tokenizer fails in its own way
        raise ValueError(f"transformers cannot read the tokenizer of {folder}: {_first_line(error)}") from error
    options: dict[str, Any] = {}
    told = json.loads((folder / "config.json").read_text()).get("quantization_config")
    packed = told is not None
    # transformers only warns of a method that it does not know, and then loads packed bytes as numbers.
    if packed and not AutoHfQuantizer.supports_quant_method(told):  # type: ignore[no-untyped-call]
        raise ValueError(f"{folder} is quantised by {told.get('quant_method')!r}, which transformers cannot load")
    if parallel is not None:
        if placement is not None:
            raise ValueError("experts are placed on one GPU or split over ranks, not both")
        if packed or weights is not None:
            raise ValueError("weights in blocks are not split over ranks: give a model in numbers")
        options = {"distributed_config": _split(parallel, torch.device(device))}
    elif weights is not None and not packed:
        options = {"quantization_config": MoefuseConfig(weights, exact=exact)}
    model: Any
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=NAME, dtype=dtype, **options)
    except (OSError, ValueError) as error:
        raise ValueError(f"transformers cannot load {folder}: {_first_line(error)}") from error
    if weights is not None and packed:
        quantize_(model, weights, exact=exact)
    for module in model.modules() if exact else ():
        if isinstance(module, BlockModule):
            module.exactly_()
    if placement is not None:
        place_model(model, placement)
        return model.eval(), tokenizer
    return (model.to(device) if parallel is None else model).eval(), tokenizer


def _refuse_other_files(path: Path) -> None:
    """A file of a model's directory was named instead of the directory."""
    if path.suffix == ".gguf" or not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return
    if (path.parent / "config.json").is_file():
        raise ValueError(f"{path} is one file of a model: give its directory, {path.parent}")
    raise ValueError(f"{path} is no model: give the directory of a transformers model or a GGUF file")


def _fits_twice(path: Path) -> bool:
    """Whether a model's files and a copy in memory leave room; where the system does not say, they do not."""
    names = glob.escape(path.name).replace("-00001-of-", "-?????-of-")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024
        return 2 * sum(part.stat().st_size for part in path.parent.glob(names)) < free
    except (OSError, StopIteration, ValueError):
        return False


def _check(folder: Path) -> None:
    if not folder.exists():
        fetch = f"; a model of the hub is fetched with: hf download {folder} --local-dir DIRECTORY"
        raise ValueError(f"there is no {folder}{fetch if len(folder.parts) == 2 and not folder.is_absolute() else ''}")
    if not (folder / "config.json").is_file():
        inside = sorted(folder.glob("*.gguf"))
        if inside:
            raise ValueError(f"{folder} holds GGUF files: give one of them, such as {inside[0]}")
        raise ValueError(f"{folder} holds no config.json: give the directory of a transformers model")
    # Without files transformers makes up an empty tokenizer.
    if not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model", "*.tiktoken")):
        raise ValueError(f"{folder} holds no tokenizer: copy tokenizer.json and tokenizer_config.json into it")


def _split(parallel: str, device: torch.device) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    if parallel not in ("tensor", "experts"):
        raise ValueError(f"parallel must be tensor or experts, got {parallel!r}")
    if not torch.distributed.is_torchelastic_launched():
        raise ValueError("parallel needs ranks: start with torchrun --nproc-per-node RANKS -m moefuse run ...")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ranks = torch.distributed.get_world_size()
    if parallel == "tensor":
        return DistributedConfig(tp_size=ranks)
    if "ep_size" not in DistributedConfig.__dataclass_fields__:
        raise ValueError("parallel experts need transformers 5.18 or newer: pip install -U transformers")
    return DistributedConfig(tp_size=ranks, ep_size=ranks)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
