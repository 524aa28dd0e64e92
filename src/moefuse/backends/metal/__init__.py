"""The Metal backend: kernels for Apple GPUs, which the simulator in `moefuse.testing.msl` can run on the processor."""

from __future__ import annotations

import torch

from moefuse.backends.metal import codes, launch
from moefuse.backends.metal.combine import combine
from moefuse.backends.metal.combine_backward import combine_backward
from moefuse.backends.metal.experts import experts
from moefuse.backends.metal.gate import gate
from moefuse.backends.metal.glu import glu, glu_backward
from moefuse.backends.metal.grouped_linear import grouped_linear
from moefuse.backends.metal.grouped_outer import grouped_outer
from moefuse.backends.metal.plan import plan
from moefuse.backends.metal.route import route

DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
FORMATS = frozenset(codes.BLOCKS)
#: its experts keeps no pre-activations for a backward pass
SAVES = False
OPS = {
    "route": route,
    "gate": gate,
    "plan": plan,
    "grouped_linear": grouped_linear,
    "grouped_outer": grouped_outer,
    "glu": glu,
    "glu_backward": glu_backward,
    "combine": combine,
    "combine_backward": combine_backward,
    "experts": experts,
}


def unavailable() -> str | None:
    return None if launch.EMULATED or torch.backends.mps.is_available() else "no Apple GPU is here"


def emulates() -> tuple[str, ...]:
    """Devices it can run on when asked by name: the processor, in the simulator."""
    return ("cpu",) if launch.EMULATED else ()


def describe() -> dict[str, str]:
    return {"device": "the shader simulator, on the processor" if launch.EMULATED else "Apple GPU, through torch.mps"}
