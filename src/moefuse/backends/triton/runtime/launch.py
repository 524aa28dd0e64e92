"""Launch a kernel; the one place that knows about empty grids, devices and the interpreter."""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRETED: bool = triton.knobs.runtime.interpret
_COMPILER_OPTIONS = ("num_warps", "num_stages", "launch_pdl")
#: programmatic dependent launch: a kernel may begin while the one before it ends
PDL: bool = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


#: the same, for kernels
HAS_PDL = tl.constexpr(PDL)


@triton.jit
def wait():
    """Everything the launches before wrote is visible after this.

    Gives 0, for addresses that loads written as instructions are not to have before.
    """
    zero = 0
    if HAS_PDL:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    return zero


@triton.jit
def launch_dependents():
    """The launch that follows may begin."""
    if HAS_PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch_rows(row_ptr, length, BLOCK: tl.constexpr):
    """Bring ``length`` numbers, BLOCK of them at most, from each of ``row_ptr`` [R] on into the second-level cache.

    One request for each line of 128 bytes: more would be in each other's way.
    """
    LINE: tl.constexpr = 128 // (row_ptr.dtype.element_ty.primitive_bitwidth // 8)
    at = LINE * tl.arange(0, (BLOCK + LINE - 1) // LINE)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [(row_ptr[:, None] + tl.minimum(at, length - 1)[None, :]).to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


class Recorder(Protocol):
    """Who takes launches down instead of making them, see `moefuse.backends.triton.runtime.replay`."""

    def take(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None: ...

    def counters(self, count: int) -> Tensor: ...

    def refuse(self, why: str) -> None: ...


class _Recording(threading.local):
    recorder: Recorder | None = None


#: set while this thread's launches are taken down
recording = _Recording()


def unrecordable(why: str) -> None:
    """Tell a recorder, where there is one, that what follows is more than launches on its arguments."""
    if recording.recorder is not None:
        recording.recorder.refuse(why)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """The card's compute capability; (0, 0) where there is no card."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def begins_aligned(t: Tensor) -> bool:
    """Whether a tensor begins at a multiple of 16 bytes."""
    if recording.recorder is not None:  # a stand-in: tensors with memory behind them begin at such
        return t.storage_offset() * t.element_size() % 16 == 0
    return t.data_ptr() % 16 == 0


def bytes_between(a: Tensor, b: Tensor) -> int:
    """How far ``b`` begins behind ``a``."""
    if recording.recorder is None:
        return b.data_ptr() - a.data_ptr()
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        recording.recorder.refuse("two tensors that may lie anywhere")
    return int(b.storage_offset() * b.element_size() - a.storage_offset() * a.element_size())


def describe(kind: Any, t: Tensor, shape: list[int], strides: list[int], block: list[int], layout: Any = None) -> Any:
    """A descriptor of ``kind``, Triton's or with a layout Gluon's, whose boxes of ``block`` the copy engine brings.

    A stand-in has no address, which they would look at; it begins where its like does when the launch is made again.
    """
    known = {} if layout is None else {"layout": layout}
    if recording.recorder is None:
        return kind(t, shape, strides, block, **known)
    made = kind.__new__(kind)
    made.__dict__.update(known, base=t, shape=shape, strides=strides, block_shape=block)
    return made


def is_descriptor(value: Any) -> bool:
    """Whether a kernel's argument is a descriptor, Triton's or Gluon's."""
    return hasattr(value, "block_shape")


def _kind(value: Any) -> Any:
    """What Triton specialises a run-time argument on."""
    if isinstance(value, Tensor):
        return value.dtype, begins_aligned(value)
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, int):
        return 16 if value % 16 == 0 else 1 if value == 1 else 0, -(2**31) <= value < 2**31
    if is_descriptor(value):
        return value.base.dtype, *value.block_shape
    return value if value is None else float


#: (kernel, kinds of arguments, options) -> compiled kernel and its compile-time arguments; the oldest goes first
_COMPILED: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
_MOST_COMPILED = 4096


#: what a kernel takes when it runs: tensors, their descriptors, and numbers, alone or in tuples
Argument: TypeAlias = Tensor | TensorDescriptor | tuple[float, ...] | float | None


class _Thread(threading.local):
    """Of this thread: whether the card's context is known to be its own."""

    has_context = False


_thread = _Thread()


def _take_context(device: torch.device) -> None:
    """Make the card's context this thread's own.

    A descriptor is made by the driver, which looks for one; autograd's threads have none before their first launch.
    """
    torch.empty(1, dtype=torch.int32, device=device).zero_()
    _thread.has_context = True


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, /, *others: Argument, **options: Any) -> None:
    """Run ``kernel`` on the device of its first argument. An empty grid is no launch.

    Strides and other numbers may come in tuples; tensors stand for themselves, so that a replay finds them.
    Triton's own launch inspects its arguments anew each time, 40 us for kernels of this many; a call whose kinds of
    arguments were seen before goes straight to the compiled kernel.
    """
    if 0 in grid:
        return
    args = (first, *others)
    if recording.recorder is not None:
        recording.recorder.take(kernel, grid, args, options)
        return
    if INTERPRETED:
        kernel[grid](*args, **{name: value for name, value in options.items() if name not in _COMPILER_OPTIONS})
        return
    device = first.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, first, *others, **options)
        return
    if not _thread.has_context:
        _take_context(device)
    found = compiled_for(kernel, device, args, options)
    if found is None:
        compiled = kernel[grid](*args, **options)
        constants = tuple(options[p.name] for p in kernel.params if p.is_constexpr)
        while len(_COMPILED) >= _MOST_COMPILED:
            _COMPILED.pop(next(iter(_COMPILED)), None)
        _COMPILED[_key(kernel, device, args, options)] = compiled, constants
        return
    compiled, constants = found
    compiled[(*grid, 1, 1)[:3]](*args, *constants)


def _key(kernel: Any, device: torch.device, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    return kernel, device.index, *map(_kind, args), *options.values()


def compiled_for(
    kernel: Any, device: torch.device, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, tuple[Any, ...]] | None:
    """The compiled kernel for arguments like these and its compile-time arguments, once it has been launched."""
    return _COMPILED.get(_key(kernel, device, args, options))


def ceil_div(a: int, b: int) -> int:
    """Triton's own is a kernel's helper too, and 2 us a call from Python."""
    return -(-a // b)


def block_of(size: int, least: int = 16) -> int:
    """The power of two that covers ``size``."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def capturing(device: torch.device) -> bool:
    """Whether what is launched on a device now becomes part of a graph."""
    if INTERPRETED:
        return False
    if device.index == torch._C._cuda_getDevice():
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


#: counters kept for a device: 1 MiB of zeros, cut into pieces that are never taken back
_KEPT = 1 << 18


class _Counters:
    """The counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self.zeros = self._made(device)
        self.used = 0
        self.pieces: dict[tuple[str, int, int], Tensor] = {}
        self.lock = threading.Lock()

    @staticmethod
    def _made(device: torch.device) -> Tensor:
        if device.type != "cuda":
            return torch.zeros(_KEPT, dtype=torch.int32, device=device)
        made: list[Tensor] = []

        def make() -> None:
            with torch.inference_mode(False):
                made.append(torch.zeros(_KEPT, dtype=torch.int32, device=device))
            torch.cuda.current_stream(device).synchronize()

        # What warms up a graph has this thread's allocations go to the graph's pool, where nothing may stay behind.
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def piece(self, key: tuple[str, int, int]) -> Tensor | None:
        """The piece that goes by a key, of as many counters as its last part says; None when all are given away."""
        with self.lock:
            if key not in self.pieces and self.used + key[-1] <= _KEPT:
                self.pieces[key] = self.zeros[self.used : self.used + key[-1]]
                self.used += key[-1]
            return self.pieces.get(key)


_COUNTERS: dict[torch.device, _Counters] = {}
_COUNTERS_LOCK = threading.Lock()


def counters(scratch: Tensor, count: int) -> Tensor:
    """Zeros for a kernel whose last program to arrive does the rest, and which leaves them at zero.

    ``scratch`` is memory of this call alone. See `counters_at`.
    """
    if recording.recorder is not None:
        return recording.recorder.counters(count)
    device = scratch.device
    stream = 0 if INTERPRETED else torch.cuda.current_stream(device).cuda_stream
    return counters_at(device, stream, scratch.data_ptr(), count)


def counters_at(device: torch.device, stream: int, scratch: int, count: int) -> Tensor:
    """Counters that no launch which may run at the same time has.

    Outside a graph they go with the stream, whose launches follow each other. Inside one they go with the address of
    the call's scratch memory: graphs that may be replayed at once do not share that.
    """
    captured = capturing(device)
    kept = _COUNTERS.get(device)
    if kept is None and not captured:
        with _COUNTERS_LOCK:
            kept = _COUNTERS.get(device) or _COUNTERS.setdefault(device, _Counters(device))
    if kept is not None:
        width = block_of(count)
        key = ("scratch", scratch, width) if captured else ("stream", stream, width)
        found = kept.pieces.get(key)
        if found is None:
            found = kept.piece(key)
        if found is not None:
            return found
    return torch.zeros(count, dtype=torch.int32, device=device)
