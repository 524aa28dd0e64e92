"""Compile shaders, once per set of macros, and launch their kernels; the one place that knows torch.mps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefuse.backends.metal.codes import ENUMS

#: what compiles a shader's source; the simulator puts itself here
compile_shader: Callable[[str], Any] = torch.mps.compile_shader
#: whether it takes processor tensors, as the simulator does
EMULATED = False

_HOME = Path(__file__).parent
_TYPES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.int32: "int",
    torch.int64: "long",
    torch.uint8: "uchar",
}


@functools.lru_cache(512)
def source(files: tuple[str, ...], macros: tuple[tuple[str, Any], ...]) -> str:
    """The text of a library: macros, enums, what all kernels share, then ``files`` in their order."""
    lines = [f"#define {name} {_TYPES.get(value, value)}\n" for name, value in macros]
    texts = ((_HOME / f"{name}.metal").read_text(encoding="ascii") for name in ("common", *files))
    return "".join((*lines, ENUMS, *texts))


@functools.lru_cache(512)
def _kernel(
    compiler: Callable[[str], Any], name: str, files: tuple[str, ...], macros: tuple[tuple[str, Any], ...]
) -> Any:
    return getattr(_library(compiler, source(files, macros)), name)


@functools.lru_cache(512)
def _library(compiler: Callable[[str], Any], text: str) -> Any:
    return compiler(text)


def launch(
    name: str, files: tuple[str, ...], macros: dict[str, Any], groups: tuple[int, ...], group_size: int, *args: Any
) -> None:
    """Run a kernel on ``groups`` threadgroups of ``group_size`` threads in a row. An empty grid is no launch.

    ``macros`` values are element types, or text. Arguments are tensors, ints (int64 there), floats (float32) and lists
    of either, which the kernel takes as a struct.
    """
    if 0 in groups:
        return
    kernel = _kernel(compile_shader, name, files, tuple(macros.items()))
    flat = (1,) * (len(groups) - 1)
    kernel(*args, threads=(groups[0] * group_size, *groups[1:]), group_size=(group_size, *flat))


def or_stand_in(t: Tensor | None, stand_in: Tensor) -> Tensor:
    """``t``, or where there is none ``stand_in``, which the kernel is told not to read."""
    return stand_in if t is None else t


def wide(*tensors: Tensor) -> str:
    """Whether four neighbours, from any column that is a multiple of four, may be read as one vector: true or false."""
    aligned = all(t.storage_offset() % 4 == 0 and all(s % 4 == 0 for s in t.stride()[:-1]) for t in tensors)
    return str(aligned).lower()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
