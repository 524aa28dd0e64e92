"""The CPU backend: C++ kernels for the machine's instruction set, at memory speed."""

from __future__ import annotations

from typing import Any

import torch

from moefuse import backends, config
from moefuse.backends.cpu import _native
from moefuse.backends.cpu.interleave import arrange as arrange
from moefuse.backends.cpu.replay import record as record

OPS = backends.functions_in(__name__)
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
