"""The Triton backend: kernels for NVIDIA GPUs, which the interpreter can run on the processor for tests."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from moefuse import backends, config

# The interpreter multiplies bfloat16 tiles wrongly and truncates where hardware rounds (Triton 3.6).
_INTERPRETED = config.triton_interpreted() and not torch.cuda.is_available()
DTYPES = frozenset((torch.float32, torch.float16) if _INTERPRETED else (torch.float32, torch.float16, torch.bfloat16))


def unavailable() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed: {config.install('triton')}"
    if torch.version.hip is not None:
        return "its kernels are for NVIDIA GPUs, and this torch is built for AMD's (ROCm)"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return None if major >= 8 else f"it needs compute capability 8.0, this GPU has {major}.{minor}"
    return None if config.triton_interpreted() else "no NVIDIA GPU is here"


def emulates() -> tuple[str, ...]:
    """Devices it can run on when asked by name: the processor, in Triton's interpreter."""
    return ("cpu",) if _INTERPRETED else ()


def describe() -> dict[str, Any]:
    """Facts for ``moefuse info``; of each fast path whether it is on, and if not, why."""
    if not torch.cuda.is_available():
        return {"device": "Triton's interpreter, on the processor"}
    launch, grouped_linear, replay = (
        importlib.import_module(f"{__name__}.{name}") for name in ("runtime.launch", "grouped_linear", "runtime.replay")
    )
    device = torch.device("cuda", torch.cuda.current_device())
    paths = {
        "Hopper's product": grouped_linear.why_not_hopper(device),
        "replay": replay.why_not(device),
        "programmatic dependent launch": None if launch.PDL else "it needs compute capability 9.0",
    }
    return {
        "device": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        **{name: "on" if reason is None else f"off: {reason}" for name, reason in paths.items()},
    }


def __getattr__(name: str) -> Any:
    """``OPS``, ``FORMATS``, ``arrange`` and ``record`` import triton, so they are made when first asked for."""
    if name == "OPS":
        found: Any = backends.functions_in(__name__)
    elif name == "FORMATS":
        found = frozenset(importlib.import_module(f"{__name__}.formats.blocks").DECODERS)
    elif name == "arrange":
        found = importlib.import_module(f"{__name__}.planes").arrange
    elif name == "record":
        found = importlib.import_module(f"{__name__}.runtime.replay").record
    else:
        raise AttributeError(name)
    globals()[name] = found
    return found
