"""What placed experts need of a GPU beside the ops: streams, events, copies that nobody waits for, and its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Whether that work is done."""

    def synchronize(self) -> None:
        """Let the host wait for it."""


class Accelerator(Protocol):
    """A device that works on its own; ``stream`` is one of `stream`, or None for the one that ops run on."""

    device: torch.device
    #: takes down what the host does in a step that is being captured
    recorder: Callable[[Callable[[], None]], None] | None

    def stream(self) -> Any:
        """A stream beside the one that ops run on."""

    def run(self, work: Callable[[], None], stream: Any = None) -> None:
        """Let ops run on this stream."""

    def event(self) -> Event:
        """An event to be recorded, as often as one likes."""

    def record(self, event: Any, stream: Any = None) -> None:
        """The event is all that this stream was given so far."""

    def wait(self, event: Any, stream: Any = None) -> None:
        """What this stream is given from now on waits for the event; the host does not."""

    def finish(self, stream: Any = None) -> None:
        """Let the host wait for all that this stream was given, or without one the whole device."""

    def copy(self, target: Tensor, source: Tensor, stream: Any = None) -> None:
        """Copy between the host and the device in the order of a stream; the host goes on at once."""

    def host(self, nbytes: int) -> Tensor:
        """Memory of the host that copies reach without its help, uint8."""

    def pin(self, tensor: Tensor) -> bool:
        """Make memory that the host has already such memory, where it lies; whether that was possible."""

    def unpin(self, address: int) -> None:
        """Undo `pin`, before the memory that begins there is given back."""

    def do(self, work: Callable[[], None]) -> None:
        """Something that the host does at this point of a step: at once, or at each run of a step that is captured."""

    def free(self) -> int:
        """Bytes that this process may still take, or has taken from the device and does not use."""

    def used(self) -> int:
        """Bytes that tensors take."""

    def limit(self, nbytes: int) -> None:
        """Refuse this process more than so many bytes."""

    def unlimit(self) -> None:
        """Undo `limit`, unless another accelerator has set one since."""


class Cuda:
    """An NVIDIA GPU."""

    #: by number of the GPU: who set its limit
    _limits: ClassVar[dict[int, Cuda]] = {}

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.recorder: Callable[[Callable[[], None]], None] | None = None

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None], stream: Any = None) -> None:
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            work()

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _stream(self, stream: Any) -> Any:
        return torch.cuda.current_stream(self.device) if stream is None else stream

    def record(self, event: Any, stream: Any = None) -> None:
        event.record(self._stream(stream))

    def wait(self, event: Any, stream: Any = None) -> None:
        self._stream(stream).wait_event(event)

    def finish(self, stream: Any = None) -> None:
        if stream is None:
            torch.cuda.synchronize(self.device)
        else:
            stream.synchronize()

    def copy(self, target: Tensor, source: Tensor, stream: Any = None) -> None:
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def host(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pin(self, tensor: Tensor) -> bool:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0) == runtime.cudaError.success:
            return True
        with contextlib.suppress(RuntimeError):  # the next launch would report the refusal as its own
            torch.zeros(1, device=self.device)
        return False

    def unpin(self, address: int) -> None:
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def do(self, work: Callable[[], None]) -> None:
        if self.recorder is None:
            work()
        else:
            self.recorder(work)

    def free(self) -> int:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free) + torch.cuda.memory_reserved(self.device)

    def used(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def limit(self, nbytes: int) -> None:
        whole = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(nbytes / whole, 1.0), self.device)
        self._limits[self.device.index] = self

    def unlimit(self) -> None:
        if self._limits.get(self.device.index) is self:
            del self._limits[self.device.index]
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)


class Captured:
    """A function of the GPU with work of the host in its middle: CUDA graphs, and what the host does between them.

    The function is run once, and nothing of it happens then; `run` runs it as often as one likes, in the same memory.
    """

    def __init__(self, accelerator: Accelerator, function: Callable[[], Any]) -> None:
        self.parts: list[Callable[[], Any]] = []
        self._pool: Any = torch.cuda.graph_pool_handle()
        stream = accelerator.stream()
        stream.wait_stream(torch.cuda.current_stream(accelerator.device))
        with torch.cuda.stream(stream):
            self._begin()
            accelerator.recorder = self._cut
            try:
                self.result = function()
            finally:
                accelerator.recorder = None
                self._end()
        torch.cuda.current_stream(accelerator.device).wait_stream(stream)

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self.parts.append(self._graph.replay)

    def _cut(self, work: Callable[[], None]) -> None:
        self._end()
        self.parts.append(work)
        self._begin()

    def run(self) -> Any:
        for part in self.parts:
            part()
        return self.result


def accelerator_of(device: torch.device | str) -> Accelerator:
    """The accelerator of a device; a ValueError where it is none that experts can be placed on."""
    found = torch.device(device)
    if found.type != "cuda" or not torch.cuda.is_available():
        here = "there is no GPU here" if found.type == "cuda" else f"got {device}"
        raise ValueError(f"placement: experts are placed between RAM and a GPU: device must be cuda, {here}")
    return Cuda(found)
