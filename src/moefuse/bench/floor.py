"""The least time the machine allows: bytes over measured read bandwidth, or flops over measured matrix rate.

Both rates are taken in the same run as everything else, by the fastest of a few plain torch calls.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moefuse.bench import machine
from moefuse.bench.timing import Turn, event_turn, wall_turn
from moefuse.types import name_of

# "Far larger than the cache": this many times.
BEYOND_CACHE = 3
_SMALLEST_BUFFER = 256 << 20
_LARGEST_BUFFER = 4 << 30
_CHUNK = 1 << 19
# Below this a 2048-cubed product takes most of a second.
_LEAST_RATE = 20e9


@dataclass(frozen=True)
class Probe:
    """A call of a known amount of work: ``amount`` bytes or flops."""

    how: str
    amount: float
    run: Callable[[], Any]
    device: torch.device

    def turn(self) -> Turn:
        if self.device.type == "cuda":
            return event_turn(lambda _: self.run(), [None])
        return wall_turn(lambda _: self.run(), [None], itertools.repeat(0), 1, self.device)

    def rate(self, turns: int = 5) -> float:
        """Amount per second, median; the first turn only warms up."""
        turn = self.turn()
        turn()
        return self.amount / statistics.median(turn() for _ in range(turns))


@dataclass(frozen=True)
class Rates:
    """What the machine does per second, and how that was found."""

    bandwidth: float
    matrix: float
    bandwidth_how: str
    matrix_how: str

    def seconds(self, read: float, flops: float) -> float:
        """The floor of work that reads ``read`` bytes and takes ``flops`` operations.

        >>> Rates(1e9, 1e12, "", "").seconds(read=2e9, flops=1e12)
        2.0
        """
        return max(read / self.bandwidth, flops / self.matrix)

    def bound(self, read: float, flops: float) -> str:
        return "memory" if read / self.bandwidth >= flops / self.matrix else "compute"


@dataclass(frozen=True)
class Floor:
    """Ways to read and to multiply, and the rates of the fastest when the run began."""

    reads: tuple[Probe, ...]
    products: tuple[Probe, ...]
    start: Rates

    @staticmethod
    def measure(dtype: torch.dtype, device: torch.device) -> Floor:
        reads, products = read_probes(device), product_probes(dtype, device)
        bandwidth, bandwidth_how = max((probe.rate(), probe.how) for probe in reads)
        matrix, matrix_how = max((probe.rate(), probe.how) for probe in products)
        return Floor(reads, products, Rates(bandwidth, matrix, bandwidth_how, matrix_how))

    def taking_part(self, read: float, flops: float) -> tuple[Probe, ...]:
        """The probes that take turns with the contestants: a rate that is far from binding need not be fresh."""
        memory, compute = read / self.start.bandwidth, flops / self.start.matrix
        return self.reads + self.products if 4 * compute > memory else self.reads

    def rates(self, seconds: dict[str, float]) -> Rates:
        """The fastest of the probes that took part, given the seconds of each; the first rate where none did."""

        def best(probes: tuple[Probe, ...], first: tuple[float, str]) -> tuple[float, str]:
            return max(((p.amount / seconds[p.how], p.how) for p in probes if p.how in seconds), default=first)

        bandwidth, bandwidth_how = best(self.reads, (self.start.bandwidth, self.start.bandwidth_how))
        matrix, matrix_how = best(self.products, (self.start.matrix, self.start.matrix_how))
        return Rates(bandwidth, matrix, bandwidth_how, matrix_how)


def read_probes(device: torch.device) -> tuple[Probe, ...]:
    """Plain ways to read memory."""
    room = machine.available_bytes(device) // 8
    wanted = max(_SMALLEST_BUFFER, BEYOND_CACHE * machine.cache_bytes(device))
    if device.type == "cuda":
        wanted = _LARGEST_BUFFER
    columns = 1 << 16
    rows = max(1, min(wanted, _LARGEST_BUFFER, room) // (4 * columns))
    buffer = torch.rand(rows, columns, device=device)
    vector = torch.ones(columns, device=device)
    size = buffer.numel() * 4
    named = f"of {size / 2**20:.0f} MiB of float32"
    probes = [
        Probe(f"sum {named}", size, lambda: buffer.sum(), device),
        Probe(f"matrix-vector product {named}", size, lambda: torch.mv(buffer, vector), device),
    ]
    if device.type == "cuda":
        half = buffer[: rows // 2], buffer[rows // 2 : rows // 2 * 2]
        probes.append(Probe(f"copy {named}", half[0].numel() * 8, lambda: half[1].copy_(half[0]), device))
    if device.type == "cpu":
        workers = torch.get_num_threads()
        probes.append(Probe(f"{workers} threads over chunks {named}", size, _in_chunks(buffer, workers), device))
    return tuple(probes)


def _in_chunks(buffer: Tensor, workers: int) -> Callable[[], Any]:
    """Read by threads that never wait for each other: on a busy machine torch's own, which do, read far too slow."""
    values = buffer.view(-1).numpy().view(np.int64)
    chunks = [values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK)]
    pool = ThreadPoolExecutor(workers)
    return lambda: list(pool.map(np.bitwise_or.reduce, chunks))


def product_probes(dtype: torch.dtype, device: torch.device) -> tuple[Probe, ...]:
    """A large square product in ``dtype``; off CUDA in float32, and in ``dtype`` where that could be faster.

    torch's own bfloat16 products can be a hundred times slower than the processor is: a 2048-cubed one took a minute
    on an AMD EPYC without AVX-512. A small one tells.
    """
    if device.type == "cuda":
        return (_square(8192, dtype, device),)
    wide, own = (_square(256, kind, device).rate(3) for kind in (torch.float32, dtype))
    worth = dtype != torch.float32 and own > max(wide / 2, _LEAST_RATE)
    return tuple(_square(2048, kind, device) for kind in (torch.float32, *([dtype] if worth else [])))


def _square(n: int, dtype: torch.dtype, device: torch.device) -> Probe:
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return Probe(f"{n}-cubed {name_of(dtype)} product", 2.0 * n**3, lambda: left @ right, device)
