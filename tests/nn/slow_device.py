"""A GPU for tests: memory of its own on the CPU, copies that come as late as they may, and what is read too early is
garbage.

Ops run at once, so the stream that they run on is always done but for its copies to the host. What a GPU leaves open
is decided for the worst: a copy to the host arrives when its event is waited for, one on another stream when a stream
or the host waits for it or has asked ``late`` times, and memory is garbage from the call on. What a copy reads from the
host must not change until it is known to be done.
"""

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

GARBAGE = 0xFF  # a NaN in every floating type, and no number of an expert


class Line:
    """A stream: what it was given, in order."""

    def __init__(self) -> None:
        self.given: list[Callable[[], None]] = []
        self.done = 0

    def run(self, upto: int) -> None:
        while self.done < upto:
            work, self.given[self.done] = self.given[self.done], lambda: None
            self.done += 1
            work()


class SlowEvent:
    def __init__(self, device: "SlowDevice") -> None:
        self.device, self.asked, self.line, self.upto = device, 0, device.main, 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked > self.device.late:
            self.synchronize()
        return self.line.done >= self.upto

    def synchronize(self) -> None:
        with self.device.lock:
            self.line.run(self.upto)


class SlowDevice:
    """What `moefuse.nn.accelerator.Accelerator` asks for."""

    device = torch.device("cpu")
    recorder = None

    def __init__(self, memory: int = 2**40, late: int = 3) -> None:
        self.memory, self.late, self.lock = memory, late, threading.RLock()
        self.main = Line()
        self.lines: weakref.WeakSet[Line] = weakref.WeakSet((self.main,))
        self.memories: dict[int, Tensor] = {}
        self.pinned: list[int] = []
        self.limits: list[int | None] = []
        self.taken = 0
        #: memory was given back that a copy might still read
        self.early = False

    def stream(self) -> Line:
        made = Line()
        self.lines.add(made)
        return made

    def run(self, work: Callable[[], None], stream: Line | None = None) -> None:
        with self.lock:
            if stream is None:
                work()
            else:
                stream.given.append(work)

    def event(self) -> SlowEvent:
        return SlowEvent(self)

    def record(self, event: SlowEvent, stream: Line | None = None) -> None:
        with self.lock:
            event.line = self.main if stream is None else stream
            event.upto, event.asked = len(event.line.given), 0

    def wait(self, event: SlowEvent, stream: Line | None = None) -> None:
        with self.lock:
            line, upto = event.line, event.upto
            if stream is None:  # ops run at once
                line.run(upto)
            else:
                stream.given.append(lambda: line.run(upto))

    def finish(self, stream: Line | None = None) -> None:
        with self.lock, torch._C.DisableTorchFunction():  # the collector may call it while ops are taken down
            for line in list(self.lines) if stream is None else [stream]:
                line.run(len(line.given))

    def copy(self, target: Tensor, source: Tensor, stream: Line | None = None) -> None:
        with self.lock:
            before = source.clone()

            def unchanged() -> None:
                same = before.contiguous().view(torch.uint8).equal(source.contiguous().view(torch.uint8))
                assert same, "what a copy reads has changed before it was done"

            if stream is None and not self.is_host(target):
                target.copy_(source)
                self.main.given.append(unchanged)
                return
            spoil(target)

            def arrive() -> None:
                if stream is not None:
                    unchanged()
                target.copy_(before)

            (self.main if stream is None else stream).given.append(arrive)

    def is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.memories

    def host(self, nbytes: int) -> Tensor:
        memory = torch.full((nbytes,), GARBAGE, dtype=torch.uint8, device="cpu")
        self.memories[memory.data_ptr()] = memory
        return memory

    def pin(self, tensor: Tensor) -> bool:
        self.pinned.append(tensor.data_ptr())
        return True

    def unpin(self, address: int) -> None:
        self.early |= self.busy()
        self.pinned.remove(address)

    def busy(self, *streams: Line) -> bool:
        """Whether these streams, or any, have work to do."""
        return any(line.done < len(line.given) for line in streams or list(self.lines))

    def do(self, work: Callable[[], None]) -> None:
        work()

    def free(self) -> int:
        return self.memory

    def used(self) -> int:
        return self.taken

    def limit(self, nbytes: int) -> None:
        self.limits.append(nbytes)

    def unlimit(self) -> None:
        if self.limits and self.limits[-1] is not None:
            self.limits.append(None)


def spoil(tensor: Tensor) -> None:
    garbage = torch.full((tensor.nbytes,), GARBAGE, dtype=torch.uint8, device="cpu")
    tensor.copy_(garbage.view(tensor.dtype).view(tensor.shape))
