"""Compile a shader, keep what was compiled, and call its kernels as torch calls them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefuse.testing.msl import build
from moefuse.testing.msl.language import lint
from moefuse.testing.msl.shader import CompileError, Shader
from moefuse.testing.msl.translate import translate
from moefuse.types import name_of

MAX_THREADGROUP_MEMORY = 32768
#: of a number or list among the arguments, which Metal takes along in the command
MAX_BYTES = 4096
#: of scalars, as torch casts them
CASTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


#: what C++ calls bool, torch may hold as bytes
BYTES = {"bool", "uint8"}


class Fault(Exception):
    """A shader did what no GPU promises to survive. ``kind`` is the detector's name; the message has the rest."""

    def __init__(self, message: str, kind: str, kernel: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.kernel = kernel
        self.line = line


_text, _pointer, _int = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int
_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64


def _fields(**types: Any) -> list[tuple[str, Any]]:
    """Of a struct of the C++ runtime, in its order."""
    return list(types.items())


class _Three(ctypes.Structure):
    _fields_ = _fields(x=_u32, y=_u32, z=_u32)

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class _Place(ctypes.Structure):
    _fields_ = [
        *((name, _Three) for name in ("position_in_grid", "position_in_group", "group")),
        *((name, _Three) for name in ("grid", "group_size", "groups", "dispatch_group_size")),
        *((name, _u32) for name in ("index", "lane", "simdgroup", "width", "simdgroups", "quad", "quads")),
    ]


class _Role(ctypes.Structure):
    _fields_ = _fields(name=_text, buffer=_int, offset=_u32, components=_u32, space=ctypes.c_char)


class _Parameter(ctypes.Structure):
    _fields_ = _fields(role=_Role, element=_text, bytes=_u32, pointer=ctypes.c_bool, writable=ctypes.c_bool)


class _Kernel(ctypes.Structure):
    _fields_ = _fields(name=_text, entry=_pointer, count=_u32, max_threads=_u32, parameters=ctypes.POINTER(_Parameter))


class _Declaration(ctypes.Structure):
    pass


_Declaration._fields_ = _fields(function=_text, name=_text, bytes=_u64, next=ctypes.POINTER(_Declaration))


class _Buffer(ctypes.Structure):
    _fields_ = _fields(host=_pointer, bytes=_u64, storage_offset=_u64, element=_u32, writable=_u32, name=_text)


class _Launch(ctypes.Structure):
    _fields_ = _fields(
        entry=_pointer, threads=_Three, group_size=_Three, seed=_u64, buffers=_u32, buffer=ctypes.POINTER(_Buffer)
    )


class _Report(ctypes.Structure):
    _fields_ = _fields(kind=ctypes.c_char * 32, text=ctypes.c_char * 1024, program_counter=_u64, line=_int)


@functools.cache
def _runtime() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build.runtime()))
    loaded.msl_report.restype = ctypes.POINTER(_Report)
    loaded.msl_image.restype = ctypes.c_uint64
    return loaded


#: the simulated GPU is one: autograd calls from a thread of its own
_GPU = threading.Lock()


@dataclass
class Dispatches:
    """The kernels that ran, in order."""

    names: list[str]

    def __len__(self) -> int:
        return len(self.names)


_COUNTING: list[Dispatches] = []
_SEED = [0]


@contextlib.contextmanager
def dispatches() -> Iterator[Dispatches]:
    """Count the dispatches of a block.

    >>> from moefuse.testing import msl
    >>> with msl.dispatches() as counted:
    ...     pass
    >>> len(counted)
    0
    """
    counted = Dispatches([])
    _COUNTING.append(counted)
    try:
        yield counted
    finally:
        _COUNTING.remove(counted)


@contextlib.contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Run threadgroups, simdgroups and lanes in the order of a seed, which no result may show; 0 is one by one."""
    before = _SEED[0]
    _SEED[0] = seed
    try:
        yield
    finally:
        _SEED[0] = before


def _sizes(value: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    if not 0 < len(sizes) < 4:
        raise ValueError(f"threads and group_size have one to three dimensions, got {value}")
    return sizes


def _span(tensor: Tensor) -> int:
    """Elements from the first to the last one that a view can reach."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Kernel:
    """One kernel of a library, called as ``torch.mps`` calls its own."""

    thread_execution_width = 32

    def __init__(self, library: Library, described: _Kernel) -> None:
        self._library = library
        self._described = described
        self.name: str = described.name.decode()
        self.max_threads_per_threadgroup: int = described.max_threads
        self.parameters = [described.parameters[i] for i in range(described.count)]

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: str | Mapping[int, str] | None = None,
    ) -> None:
        bound = {p.role.buffer: p for p in self.parameters if p.role.buffer >= 0}
        if set(bound) != set(range(len(args))):
            raise self._fault("arguments", f"takes buffers {sorted(bound)}, got {len(args)} arguments")
        keep: list[Any] = []
        buffers = (_Buffer * max(1, len(args)))()
        for i, value in enumerate(args):
            if isinstance(value, Tensor):
                buffers[i] = self._tensor(bound[i], value)
                threads = value.numel() if threads is None else threads
            else:
                cast = arg_casts if isinstance(arg_casts, str) else (arg_casts or {}).get(i)
                held = self._scalar(bound[i], value, cast)
                keep.append(held)
                buffers[i] = self._tensor(bound[i], held)
        if threads is None:
            raise ValueError(f"{self.name}: the number of threads is undefined")
        grid, group = self._shape(_sizes(threads), None if group_size is None else _sizes(group_size))
        for counted in _COUNTING:
            counted.names.append(self.name)
        launch = _Launch(self._described.entry, _Three(*grid), _Three(*group), _SEED[0], len(args), buffers)
        with _GPU:
            if _runtime().msl_run(ctypes.byref(launch)):
                raise self._found()

    def _shape(
        self, threads: tuple[int, ...], group: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if group is None:
            most = self.max_threads_per_threadgroup
            group = (min(max(threads[0], 1), most) if len(threads) == 1 else most, 1, 1)[: len(threads)]
        if len(group) != len(threads):
            raise ValueError(f"{self.name}: threads {threads} and group_size {group} have different dimensions")
        grid, size = (*threads, 1, 1)[:3], (*group, 1, 1)[:3]
        if not 0 < size[0] * size[1] * size[2] <= self.max_threads_per_threadgroup:
            raise ValueError(
                f"{self.name}: a threadgroup has 1 to {self.max_threads_per_threadgroup} threads, got {group}"
            )
        if not 0 < min(grid) <= max(grid) < 2**32:
            raise ValueError(f"{self.name}: {threads} threads are no grid")
        return grid, size

    def _scalar(self, parameter: _Parameter, value: Any, cast: str | None) -> Tensor:
        """The bytes torch would set for a number or a list of numbers."""
        values = list(value) if isinstance(value, (tuple, list)) else [value]
        if not values or not isinstance(values[0], (int, float)):
            raise TypeError(f"{self.name}: {parameter.role.name.decode()} cannot be {value!r}")
        if cast is not None and cast not in CASTS:
            raise ValueError(f"{self.name}: torch has no cast {cast!r}, it has {', '.join(CASTS)}")
        sent = torch.tensor(values, dtype=torch.float32 if isinstance(values[0], float) else torch.int64)
        held = sent.to(CASTS[cast]) if cast else sent
        name = parameter.role.name.decode()
        if not held.is_floating_point() and not torch.equal(held.to(sent.dtype), sent):
            raise self._fault("arguments", f"{name} is cast to {cast}, which does not hold {value!r}")
        if parameter.role.space != b"c":
            raise self._fault("arguments", f"{name} is device memory, got the number {value!r}")
        bytes_held = held.numel() * held.element_size()
        if bytes_held > MAX_BYTES:
            raise self._fault("arguments", f"{name} gets {bytes_held} bytes, a call has {MAX_BYTES} for each argument")
        if not parameter.pointer and bytes_held != parameter.bytes:
            raise self._fault("arguments", f"{name} takes {parameter.bytes} bytes, got {bytes_held} from {value!r}")
        return held

    def _tensor(self, parameter: _Parameter, tensor: Tensor) -> _Buffer:
        name = parameter.role.name
        element = parameter.element.decode()
        got = name_of(tensor.dtype)
        # torch has few unsigned types, so a sign is no difference; bytes may hold any struct.
        same = element in (got, "void", "struct") or element.lstrip("u") == got.lstrip("u") or {element, got} == BYTES
        if not same:
            raise self._fault("arguments", f"{name.decode()} has elements of {element}, got a tensor of {got}")
        if tensor.device.type != "cpu":
            raise TypeError(f"{self.name}: the simulator takes processor tensors, got one on {tensor.device}")
        size = tensor.element_size()
        count = _span(tensor)
        if not parameter.pointer and count * size < parameter.bytes:
            raise self._fault("arguments", f"{name.decode()} needs {parameter.bytes} bytes, got {count * size}")
        return _Buffer(tensor.data_ptr(), count * size, tensor.storage_offset() * size, size, parameter.writable, name)

    def _fault(self, kind: str, text: str) -> Fault:
        return Fault(f"kernel {self.name}: {kind}: {text}", kind, self.name)

    def _found(self) -> Fault:
        runtime = _runtime()
        report = runtime.msl_report().contents
        place = _Place.in_dll(runtime, "msl_place")
        line = report.line or build.line_at(self._library.path, report.program_counter - runtime.msl_image())
        where = f"\n    line {line}: {self._library.text(line)}" if line else ""
        kind, text = report.kind.decode(), report.text.decode()
        who = f"thread {place.index} at {place.position_in_group} of threadgroup {place.group}"
        return Fault(f"kernel {self.name}: {kind}: {who} {text}{where}", kind, self.name, line)


class Library:
    """A compiled shader; its kernels are attributes."""

    def __init__(self, source: str, path: Path) -> None:
        self._lines = source.split("\n")
        self.path = path
        _runtime()
        self._loaded = ctypes.CDLL(str(path))
        self._kernels: dict[str, Kernel] = {}
        row = ctypes.pointer(_Kernel.in_dll(self._loaded, "msl_kernels"))
        for number in itertools.takewhile(lambda n: row[n].name, itertools.count()):
            self._kernels[row[number].name.decode()] = Kernel(self, row[number])

    def __dir__(self) -> list[str]:
        return list(self._kernels)

    def __getattr__(self, name: str) -> Kernel:
        try:
            return self._kernels[name]
        except KeyError:
            raise AttributeError(f"the shader has no kernel {name}, it has {', '.join(self._kernels)}") from None

    def threadgroup_memory(self) -> dict[str, int]:
        """Bytes of threadgroup memory by function, template arguments applied."""
        self._loaded.msl_declarations.restype = ctypes.POINTER(_Declaration)
        total: dict[str, int] = {}
        found = self._loaded.msl_declarations()
        while found:
            one = found.contents
            function = re.sub(r"::\w+_site::function\(\)|^static const char\* ", "", one.function.decode())
            total[function] = total.get(function, 0) + (one.bytes + 15) // 16 * 16
            found = one.next
        return total

    def text(self, line: int) -> str:
        return self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""


_LOADED: dict[str, Library] = {}


def compile_shader(source: str) -> Library:
    """Compile Metal source for the simulator; in place of ``torch.mps.compile_shader``.

    >>> shader = compile_shader("kernel void twice(device float* x, uint i [[thread_position_in_grid]]) { x[i] *= 2; }")
    >>> x = torch.ones(3)
    >>> shader.twice(x)
    >>> x
    tensor([2., 2., 2.])
    """
    if source not in _LOADED:
        if not source.isascii():
            raise CompileError("torch hands shaders on as ASCII, and this one has other characters")
        shader = Shader(build.preprocess(source))
        if problems := lint(shader):
            raise CompileError("\n".join(problems))
        library = Library(source, build.shader(translate(shader), source))
        for function, size in library.threadgroup_memory().items():
            if size > MAX_THREADGROUP_MEMORY:
                raise CompileError(f"{function} has {size} bytes of threadgroup memory, Metal {MAX_THREADGROUP_MEMORY}")
        _LOADED[source] = library
    return _LOADED[source]
