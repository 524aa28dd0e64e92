"""Compile shaders, once per set of macros, and launch their kernels; the one place that knows torch.mps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.backends.metal import codes
from moefuse.backends.metal.shaders import text_of

#: what compiles a shader's source; the simulator puts itself here
compile_shader: Callable[[str], Any] = torch.mps.compile_shader
#: whether it takes processor tensors, as the simulator does
EMULATED = False

#: an element type, a number or text
Macro = torch.dtype | int | str
#: ints arrive as int64, floats as float32, a list of either as the fields of a struct
Argument = Tensor | int | float | list[int] | list[float]

_TYPES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.int32: "int",
    torch.int64: "long",
    torch.uint8: "uchar",
}


@functools.lru_cache(512)
def source(files: tuple[str, ...], macros: tuple[tuple[str, Macro], ...]) -> str:
    """The text of a library: macros, what all kernels share, then ``files`` in their order."""
    lines = (f"#define {name} {_TYPES[value] if isinstance(value, torch.dtype) else value}\n" for name, value in macros)
    return "".join((*lines, codes.MACROS, *(text_of(name) for name in ("common", *files))))


@functools.lru_cache(512)
def _kernel(
    compiler: Callable[[str], Any], name: str, files: tuple[str, ...], macros: tuple[tuple[str, Macro], ...]
) -> Any:
    return getattr(_library(compiler, source(files, macros)), name)


@functools.lru_cache(512)
def _library(compiler: Callable[[str], Any], text: str) -> Any:
    return compiler(text)


class Shader(NamedTuple):
    """Files that are compiled together, each needing those before it, and their macros."""

    files: tuple[str, ...]
    macros: dict[str, Macro]

    def launch(self, name: str, groups: tuple[int, ...], group_size: int, *args: Argument) -> None:
        """Run a kernel on ``groups`` threadgroups of ``group_size`` threads in a row. An empty grid is no launch."""
        if 0 in groups:
            return
        kernel = _kernel(compile_shader, name, self.files, tuple(self.macros.items()))
        flat = (1,) * (len(groups) - 1)
        kernel(*args, threads=(groups[0] * group_size, *groups[1:]), group_size=(group_size, *flat))


def types_of(**tensors: Tensor) -> dict[str, Macro]:
    """The element types of tensors as macros: X_T for X."""
    return {f"{name}_T": t.dtype for name, t in tensors.items()}


def or_stand_in(t: Tensor | None, stand_in: Tensor) -> Tensor:
    """``t``, or where there is none ``stand_in``, which the kernel is told not to read."""
    return stand_in if t is None else t


def given(*tensors: Tensor | None) -> list[int]:
    """Which of them are there, as kernels are told: 1 or 0 each."""
    return [int(t is not None) for t in tensors]


def wide(*tensors: Tensor) -> str:
    """Whether four neighbours, from any column that is a multiple of four, may be read as one vector: true or false.
    It is asked of numbers alone, not of the bytes of blocks."""
    numbers = [t for t in tensors if t.dtype != torch.uint8]
    aligned = all(t.storage_offset() % 4 == 0 and all(s % 4 == 0 for s in t.stride()[:-1]) for t in numbers)
    return str(aligned).lower()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
