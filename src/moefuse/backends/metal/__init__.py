"""The Metal backend: kernels for Apple GPUs, which the simulator in `moefuse.testing.msl` can run on the processor."""

from __future__ import annotations

import torch

from moefuse import backends
from moefuse.backends.metal import codes, launch

OPS = backends.functions_in(__name__)
DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
FORMATS = frozenset(codes.BLOCKS)
#: its experts keeps no pre-activations for a backward pass
SAVES = False


def unavailable() -> str | None:
    return None if launch.EMULATED or torch.backends.mps.is_available() else "no Apple GPU is here"


def emulates() -> tuple[str, ...]:
    """Devices it can run on when asked by name: the processor, in the simulator."""
    return ("cpu",) if launch.EMULATED else ()


def describe() -> dict[str, str]:
    return {"device": "the shader simulator, on the processor" if launch.EMULATED else "Apple GPU, through torch.mps"}
