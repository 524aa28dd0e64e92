"""How fast this machine's bus and CPU are: what tells whether experts stream to the GPU or are computed in RAM."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moefuse import config
from moefuse.nn.accelerator import Accelerator
from moefuse.ops.experts import experts
from moefuse.quant.tensor import QuantTensor

_log = logging.getLogger("moefuse")
#: what is copied and what the CPU computes with: experts of Qwen3-30B-A3B in Q4_K, more than caches hold
_COPIED, _E, _H, _I = 64 << 20, 64, 2048, 768
_ROWS = 64


@dataclass(frozen=True)
class Rates:
    """Bytes and operations a second.

    Attributes:
        pinned: from memory that is locked to the GPU.
        paged: from other memory, such as a mapped file, that lies in RAM.
        read: blocks that the CPU computes with, for one row each.
        compute: operations of the CPU, for many rows.

    >>> Rates(50e9, 8e9, 100e9, 1e12).streams(8, 128, 32, 2_600_000, 9_400_000, pinned=True)
    False
    >>> Rates(50e9, 8e9, 100e9, 1e12).streams(8 * 2048, 128, 32, 2_600_000, 9_400_000, pinned=True)
    True
    """

    pinned: float
    paged: float
    read: float
    compute: float

    def streams(
        self, assignments: int, experts: int, slots: int, expert_bytes: int, flops: int, *, pinned: bool
    ) -> bool:
        """Whether experts without a slot are done earlier by the GPU, which has to be sent all of them, than by the
        CPU, which reads those that are chosen; if all are chosen alike.

        Args:
            assignments: tokens times experts of each.
            flops: of an assignment.
        """
        others = experts - slots
        chosen = others * (1 - (1 - 1 / experts) ** assignments)
        cpu = chosen * expert_bytes / self.read + assignments * others / experts * flops / self.compute
        return others * expert_bytes / (self.pinned if pinned else self.paged) < cpu

    def __str__(self) -> str:
        bus = f"{self.pinned / 1e9:.1f} GB/s to the GPU ({self.paged / 1e9:.1f} from a mapped file)"
        return f"{bus}, CPU {self.read / 1e9:.0f} GB/s of blocks and {self.compute / 1e9:.0f} GFLOP/s"


def _file() -> Path:
    return config.cache() / "rates.json"


def _machine(accelerator: Accelerator) -> str:
    kind = accelerator.device.type
    name = torch.cuda.get_device_name(accelerator.device) if kind == "cuda" else kind
    return f"{name}, {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def known() -> dict[str, Rates]:
    """What was measured, by machine."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
        return {name: Rates(**{key: float(n) for key, n in rates.items()}) for name, rates in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("moefuse: %s is not ours, and is left alone: %s", _file(), error)
        return {}


def rates_of(accelerator: Accelerator) -> Rates:
    """The rates of this machine: those in the cache folder, else measured now, which takes half a second."""
    kept, name = known(), _machine(accelerator)
    if name not in kept:
        kept[name] = measure(accelerator)
        _log.info("moefuse: measured %s", kept[name])
        _keep(kept)
    return kept[name]


def _keep(kept: dict[str, Rates]) -> None:
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # an interrupt leaves nothing of it
            draft = Path(folder) / path.name
            plain = {machine: dataclasses.asdict(rates) for machine, rates in kept.items()}
            draft.write_text(json.dumps(plain, indent=1), encoding="utf-8")
            draft.replace(path)
    except OSError as error:
        _log.info("moefuse: the rates of this machine are not kept: %s", error)


def measure(accelerator: Accelerator) -> Rates:
    """The rates by a clock: each the best of three."""
    ones, arange = (functools.partial(make, device="cpu") for make in (torch.ones, torch.arange))
    there = torch.empty(_COPIED, dtype=torch.uint8, device=accelerator.device)
    locked, paged = accelerator.host(_COPIED).fill_(1), ones(_COPIED, dtype=torch.uint8)

    def copies(source: torch.Tensor) -> None:
        event = accelerator.event()
        accelerator.copy(there, source)
        accelerator.record(event)
        event.synchronize()

    bus = [_COPIED / _best(lambda source=source: copies(source)) for source in (locked, paged)]  # type: ignore[misc]
    up, down = (QuantTensor(ones(_E, *shape, dtype=torch.uint8), "Q4_K") for shape in _shapes())
    stacks: Any = {"gate_up": (up, up), "down": down}
    turn = iter(range(10**6))

    def reads() -> None:
        first = next(turn) * 8 % _E
        experts(ones(1, _H), arange(first, first + 8)[None], ones(1, 8), **stacks)

    def computes() -> None:
        experts(ones(_ROWS, _H), arange(_ROWS)[:, None] % 4, ones(_ROWS, 1), **stacks)

    with torch.no_grad(), torch.inference_mode(False):
        read = 8 * sum(a * b for a, b in (*_shapes(), _shapes()[0])) / _best(reads)
        compute = _ROWS * 2 * 3 * _H * _I / _best(computes)
    pinned, from_paged = bus
    return Rates(pinned, from_paged, read, compute)


def _shapes() -> list[tuple[int, int]]:
    """Rows and bytes of a row of one expert's matrices, up and down."""
    return [(_I, _H // 256 * 144), (_H, _I // 256 * 144)]


def _best(work: Callable[[], None]) -> float:
    """Seconds; the first two runs, which also prepare, do not count."""
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds[2:])
