"""Compile a shader, keep what was compiled, and call its kernels as torch calls them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefuse import config
from moefuse.testing.msl.language import lint
from moefuse.testing.msl.shader import CompileError, Shader
from moefuse.testing.msl.translate import translate

CPP = Path(__file__).parent / "cpp"
MAX_THREADGROUP_MEMORY = 32768
#: of a number or list among the arguments, which Metal takes along in the command
MAX_BYTES = 4096
#: shaders may rely on what torch asks of every Mac it runs on: Metal 3.1, which has bfloat
MACROS = ("-D__METAL__=1", "-D__METAL_VERSION__=310", "-D__METAL_MACOS__=1", "-D__HAVE_BFLOAT__=1")
_HEADERS = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>[ \t]*$", re.MULTILINE)
_BASE = ("-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-strict-aliasing")
#: Metal 3 is C++14, which our own headers, included as the system's, need not be;
#: the sanitizers' calls are answered by our runtime; variables without a value get a conspicuous one
_INSTRUMENTED = (
    *_BASE,
    "-std=c++14",
    "-pedantic-errors",
    "-O1",
    "-g1",
    "-fsanitize=thread,bounds,alignment,null,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
    "-ftrivial-auto-var-init=pattern",
)
#: of scalars, as torch casts them
CASTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class Fault(Exception):
    """A shader did what no GPU promises to survive. ``kind`` is the detector's name; the message has the rest."""

    def __init__(self, message: str, kind: str, kernel: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.kernel = kernel
        self.line = line


class _Three(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint32) for axis in "xyz"]

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class _Place(ctypes.Structure):
    _fields_ = [
        *((name, _Three) for name in ("position_in_grid", "position_in_group", "group")),
        *((name, _Three) for name in ("grid", "group_size", "groups", "dispatch_group_size")),
        *((name, ctypes.c_uint32) for name in ("index", "lane", "simdgroup", "width", "simdgroups", "quad", "quads")),
    ]


class _Role(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("buffer", ctypes.c_int),
        ("offset", ctypes.c_uint32),
        ("components", ctypes.c_uint32),
        ("space", ctypes.c_char),
    ]


class _Parameter(ctypes.Structure):
    _fields_ = [
        ("role", _Role),
        ("element", ctypes.c_char_p),
        ("bytes", ctypes.c_uint32),
        ("pointer", ctypes.c_bool),
        ("writable", ctypes.c_bool),
    ]


class _Kernel(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("count", ctypes.c_uint32),
        ("max_threads", ctypes.c_uint32),
        ("parameters", ctypes.POINTER(_Parameter)),
    ]


class _Declaration(ctypes.Structure):
    pass


_Declaration._fields_ = [
    ("function", ctypes.c_char_p),
    ("name", ctypes.c_char_p),
    ("bytes", ctypes.c_uint64),
    ("next", ctypes.POINTER(_Declaration)),
]


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("host", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("storage_offset", ctypes.c_uint64),
        ("element", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("threads", _Three),
        ("group_size", _Three),
        ("seed", ctypes.c_uint64),
        ("buffers", ctypes.c_uint32),
        ("buffer", ctypes.POINTER(_Buffer)),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("text", ctypes.c_char * 1024),
        ("program_counter", ctypes.c_uint64),
        ("line", ctypes.c_int),
    ]


def _run(command: Sequence[str], source: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise CompileError(f"the simulator needs a C++ compiler, and {command[0]} is not there (set CXX)")
    # Messages are read, so they come in plain English.
    return subprocess.run(["env", "LC_ALL=C", *command], input=source, capture_output=True, text=True, check=False)


@functools.cache
def _toolchain() -> str:
    """Compiler and headers: what was compiled with others is compiled again."""
    state = hashlib.sha256(_run([config.cxx(), "--version"]).stdout.encode())
    for path in sorted(CPP.iterdir()):
        state.update(path.read_bytes())
    return state.hexdigest()


@functools.cache
def _cache() -> Path:
    """Where libraries are kept: the user's cache, or for this process alone where that cannot be written."""
    home = config.cache() / "msl"
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="moefuse-msl-"))
    return home


def _built(name: str, key: str, build: Any) -> Path:
    """The library ``key`` stands for, from the cache or made by ``build(target)``."""
    target = _cache() / f"{name}-{hashlib.sha256(f'{_toolchain()}{key}'.encode()).hexdigest()[:24]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            build(made)
            os.replace(made, target)
    return target


def _checked(command: Sequence[str], shader: str | None = None) -> None:
    done = _run(command)
    if done.returncode:
        raise CompileError(_readable(done.stderr, shader) if shader else done.stderr)


def _readable(errors: str, shader: str) -> str:
    """The compiler's first errors, each with its line of Metal; an error in our headers has the line that led there."""
    lines = shader.split("\n")
    found, led = [], 0
    for row in errors.split("\n"):
        if at := re.match(r"shader\.metal:(\d+):\d+:", row):
            led = int(at.group(1))
        if led and (message := re.search(r"error: (.*)", row)):
            found.append(f"line {led}: {message.group(1)}\n    {lines[led - 1].strip() if led <= len(lines) else ''}")
    return "\n".join(found[:8]) or errors


@functools.cache
def _runtime_path() -> Path:
    def build(target: Path) -> None:
        _checked(
            [config.cxx(), *_BASE, "-std=c++17", "-O2", "-shared", str(CPP / "runtime.cpp"), "-o", str(target), "-ldl"]
        )

    return _built("runtime", "", build)


@functools.cache
def _runtime() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(_runtime_path()))
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
    """Run threadgroups, simdgroups and lanes in the order of a seed, which no result may show."""
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
        got = str(tensor.dtype).removeprefix("torch.")
        # A cast to int32 is how torch passes a uint; bytes may hold any struct.
        same = element in (got, "void", "struct") or {element, got} <= {"int32", "uint32"}
        same = same or {element, got} <= {"int64", "uint64"} or {element, got} <= {"int16", "uint16"}
        same = same or {element, got} <= {"bool", "uint8"}
        if not same:
            raise self._fault("arguments", f"{name.decode()} has elements of {element}, got a tensor of {got}")
        if tensor.device.type != "cpu":
            raise TypeError(f"{self.name}: the simulator takes processor tensors, got one on {tensor.device}")
        size = tensor.element_size()
        count = _span(tensor)
        if not parameter.pointer and count * size < parameter.bytes:
            raise self._fault("arguments", f"{name.decode()} needs {parameter.bytes} bytes, got {count * size}")
        return _Buffer(
            tensor.data_ptr(),
            count * size,
            tensor.storage_offset() * size,
            size,
            parameter.writable,
            name,
        )

    def _fault(self, kind: str, text: str) -> Fault:
        return Fault(f"kernel {self.name}: {kind}: {text}", kind, self.name)

    def _found(self) -> Fault:
        runtime = _runtime()
        report = runtime.msl_report().contents
        place = _Place.in_dll(runtime, "msl_place")
        line = report.line or self._library.line_at(report.program_counter - runtime.msl_image())
        where = f"\n    line {line}: {self._library.text(line)}" if line else ""
        kind, text = report.kind.decode(), report.text.decode()
        who = f"thread {place.index} at {place.position_in_group} of threadgroup {place.group}"
        return Fault(f"kernel {self.name}: {kind}: {who} {text}{where}", kind, self.name, line)


class Library:
    """A compiled shader; its kernels are attributes."""

    def __init__(self, source: str, path: Path) -> None:
        self._lines = source.split("\n")
        self._path = path
        _runtime()
        self._loaded = ctypes.CDLL(str(path))
        self._kernels: dict[str, Kernel] = {}
        rows = (_Kernel * 4096).in_dll(self._loaded, "msl_kernels")
        for row in rows:
            if not row.name:
                break
            self._kernels[row.name.decode()] = Kernel(self, row)

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
            function = re.sub(r"::\w+_site::function\(\)$|^static const char\* ", "", one.function.decode())
            function = re.sub(r"::\w+_site::function\(\)", "", function)
            total[function] = total.get(function, 0) + (one.bytes + 15) // 16 * 16
            found = one.next
        return total

    def text(self, line: int) -> str:
        return self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""

    def line_at(self, offset: int) -> int | None:
        """The line of Metal at an address in the library, as the debug information has it."""
        tool = shutil.which("addr2line")
        if tool is None:
            return None
        done = _run([tool, "-i", "-e", str(self._path), hex(offset)])
        # Inlined calls come innermost first: the first one in the shader is the access.
        found = re.search(r"shader\.metal:(\d+)", done.stdout)
        return int(found.group(1)) if found else None


def preprocess(source: str) -> str:
    """The shader with its macros expanded and Metal's own headers left out."""
    done = _run([config.cxx(), "-E", "-undef", "-x", "c++", *MACROS, "-"], _HEADERS.sub("", source))
    if done.returncode:
        raise CompileError(_readable(done.stderr.replace("<stdin>", "shader.metal"), source))
    # Markers as the standard has them; those of line 0 name no place.
    markers = re.compile(r'^# (\d+) "([^"]*)".*$', re.MULTILINE)
    return markers.sub(
        lambda found: f'#line {found[1]} "{found[2].replace("<stdin>", "shader.metal")}"' if found[1] != "0" else "",
        done.stdout,
    )


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
        shader = Shader(preprocess(source))
        if problems := lint(shader):
            raise CompileError("\n".join(problems))
        cpp = translate(shader)

        def build(target: Path) -> None:
            unit, made = target.with_suffix(".cpp"), target.with_suffix(".o")
            unit.write_text(cpp)
            _checked([config.cxx(), *_INSTRUMENTED, "-isystem", str(CPP), "-c", str(unit), "-o", str(made)], source)
            _checked(
                [config.cxx(), "-shared", "-Wl,-Bsymbolic", str(made), str(_runtime_path()), "-o", str(target), "-lm"]
            )

        library = Library(source, _built("shader", cpp + " ".join(_INSTRUMENTED), build))
        for function, size in library.threadgroup_memory().items():
            if size > MAX_THREADGROUP_MEMORY:
                raise CompileError(f"{function} has {size} bytes of threadgroup memory, Metal {MAX_THREADGROUP_MEMORY}")
        _LOADED[source] = library
    return _LOADED[source]
