"""The CPU backend: C++ kernels for the machine's instruction set, at memory speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moefuse import config
from moefuse.backends.cpu import _native
from moefuse.backends.cpu.combine import combine
from moefuse.backends.cpu.combine_backward import combine_backward, tail_backward
from moefuse.backends.cpu.experts import experts
from moefuse.backends.cpu.experts_backward import experts_backward
from moefuse.backends.cpu.gate import gate
from moefuse.backends.cpu.gate_backward import gate_backward
from moefuse.backends.cpu.glu import glu, glu_backward
from moefuse.backends.cpu.grouped_linear import grouped_linear
from moefuse.backends.cpu.grouped_outer import grouped_outer
from moefuse.backends.cpu.linear import linear
from moefuse.backends.cpu.plan import plan
from moefuse.backends.cpu.route import route
from moefuse.backends.cpu.route_backward import route_backward

OPS: dict[str, Callable[..., Any]] = {
    "route": route,
    "route_backward": route_backward,
    "gate": gate,
    "gate_backward": gate_backward,
    "plan": plan,
    "grouped_linear": grouped_linear,
    "grouped_outer": grouped_outer,
    "linear": linear,
    "glu": glu,
    "glu_backward": glu_backward,
    "combine": combine,
    "combine_backward": combine_backward,
    "tail_backward": tail_backward,
    "experts": experts,
    "experts_backward": experts_backward,
}
DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
FORMATS = frozenset(_native.FORMATS)


def unavailable() -> str | None:
    """None, or why this backend cannot run here. Puts the instruction set asked for in place.

    One that was asked for and is not there is an error: nothing may move on to another unnoticed.
    """
    if _native.core is None:
        return f"its C++ kernels were not built with this install ({_native.import_error}): {config.rebuild()}"
    _native.core.set_isa(config.cpu_isa(_native.core.isas()))
    return None


def describe() -> dict[str, Any]:
    """Facts for ``moefuse info``."""
    if _native.core is None:
        return {}
    return {
        "isa": _native.core.isa(),
        "isas": _native.core.isas(),
        "threads": _native.threads(),
        "torch's thread team": "on" if _native.core.shares_openmp() else "off: torch's OpenMP runtime was not found",
    }
