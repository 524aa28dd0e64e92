"""Experts larger than the card: all of them in RAM, as many as fit in slots on the GPU, and both compute."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from moefuse.nn.accelerator import Accelerator, accelerator_of
from moefuse.nn.placed_experts import PlacedExperts
from moefuse.nn.rates import Rates, rates_of
from moefuse.nn.sizes import bytes_of, gib
from moefuse.nn.stack_memory import bytes_in, bytes_within, nbytes_of, tensors_of
from moefuse.nn.staging import Staging
from moefuse.types import Activation, Stacks

_log = logging.getLogger("moefuse")

WORDS = ("cpu", "auto")
#: what is left of a budget for a cache and activations: a part of it, within bounds
_ROOM, LEAST_ROOM, _MOST_ROOM = 8, 512 << 20, 4 << 30
#: bytes that stream at a time, and how many such pieces are on the GPU: two that come in turns, one that is arranged
GROUP, STREAMS = 64 << 20, 3


def budget_for(taken: int) -> int:
    """The least budget that leaves room beside so many bytes."""
    return max(taken + LEAST_ROOM, min(-(-taken * _ROOM // (_ROOM - 1)), taken + _MOST_ROOM))


class Placement:
    """Where the experts of a model lie, and who computes them.

    All experts stay in RAM, where the CPU computes them. With "auto", as many as fit have a slot on the GPU as well,
    which computes those while the CPU computes the others; what is used most moves into slots while the model runs,
    and long prompts stream through the GPU where that is faster. Where all fit, the GPU has them all, as ever.

    Args:
        experts: "auto", or "cpu": no slots, nothing streams.
        gpu_memory: what this process may take of the GPU, in bytes or as "12GiB", by torch's own accounts; without it
            what is free. Torch is held to it.
        device: the GPU.
        load: how often each expert of a layer is used, by the path of the experts' module, as
            `moefuse.hf.text.expert_load` counts it: then the most used have the slots for good, and nothing moves.
    """

    def __init__(
        self,
        experts: str = "auto",
        gpu_memory: str | int | None = None,
        *,
        device: torch.device | str = "cuda",
        load: Mapping[str, Any] | None = None,
    ) -> None:
        if experts not in WORDS:
            raise ValueError(f"placement: experts must be one of {', '.join(WORDS)}, got {experts!r}")
        self.experts, self.load = experts, load
        self.gpu_memory = None if gpu_memory is None else bytes_of(gpu_memory)
        self.accelerator: Accelerator = accelerator_of(device)
        #: bytes, once a model has been admitted
        self.budget = 0
        #: path of an experts' module -> its experts
        self.layers: weakref.WeakValueDictionary[str, PlacedExperts] = weakref.WeakValueDictionary()
        #: all experts fit, and lie on the GPU like anything else
        self.whole = False
        #: slots of each layer; it changes once where memory runs out
        self.slots, self.shrunk = 0, False
        self.lock = threading.RLock()
        #: seconds in which the host waited for the GPU, and computed
        self.waited = self.computed = 0.0
        self.calls = self.streamed_bytes = 0
        self.staging = Staging(self.accelerator)
        #: the stream of all copies that no step waits for
        self.side = self.accelerator.stream()
        self._mover: ThreadPoolExecutor | None = None
        #: whose call was the last, and what it asked for where that was not looked at
        self._later: tuple[PlacedExperts, Tensor | None] | None = None
        self._still = 0

    @classmethod
    def of(
        cls, experts: str | Placement | None, gpu_memory: str | int | None, device: torch.device | str
    ) -> Placement | None:
        """What a user's words ask for; None where there are none."""
        if isinstance(experts, Placement):
            if gpu_memory is not None:
                raise ValueError("placement: gpu_memory belongs to the Placement that is given, got both")
            if experts.budget:
                raise ValueError("placement: a Placement must be new, got one that a model has or had")
            return experts
        if experts is None and gpu_memory is None:
            return None
        return cls("auto" if experts is None else experts, gpu_memory, device=device)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def __deepcopy__(self, _: Any) -> Any:
        raise TypeError("a model whose experts are placed cannot be copied or pickled: copy it before it is placed")

    __reduce_ex__ = __deepcopy__

    # What goes where

    def admit(self, shared: int, stacks: Mapping[str, Stacks]) -> bool:
        """Hold torch to the budget; whether all experts fit beside the shared parts of a model, in bytes.

        Raises ValueError where not even those fit.
        """
        free = self.accelerator.free()
        if self.gpu_memory is not None and self.gpu_memory > free:
            _log.info("moefuse: gpu_memory is %s, and %s are free", gib(self.gpu_memory), gib(free))
        budget = free if self.gpu_memory is None else min(self.gpu_memory, free)
        self.room = min(max(budget // _ROOM, LEAST_ROOM), _MOST_ROOM)
        self.taken = taken = self.accelerator.used() + shared
        if taken + self.room > budget:
            raise ValueError(
                f"gpu_memory must hold what is not experts, {gib(taken)}, and room to work in, {gib(self.room)}: give "
                f"{-(-budget_for(taken) // 2**20)}MiB or more, got {gib(budget)}"
            )
        self.budget = budget
        self.accelerator.limit(budget)
        whole = sum(nbytes_of(tensor) for one in stacks.values() for tensor in tensors_of(one).values())
        self.whole = self.experts == "auto" and taken + whole + self.room <= self.budget
        return self.whole

    def take(self, path: str, stacks: Stacks, activation: Activation, pin: bool = True) -> PlacedExperts:
        """Compute with these stacks, which stay where they are; ``pin``: they may be locked into memory."""
        layer = self.layers[path] = PlacedExperts(self, path, stacks, activation, GROUP)
        self.staging.fit(bytes_within(stacks, layer.group), bytes_within(stacks, 1))
        tensors = [bytes_in(tensor) for tensor in tensors_of(stacks).values()] if pin else []
        locked = [tensor for tensor in tensors if self.accelerator.pin(tensor)]
        layer.pinned = bool(tensors) and len(locked) == len(tensors)
        addresses = [tensor.data_ptr() for tensor in locked]
        weakref.finalize(layer, _unpin, self.accelerator, addresses, locked).atexit = False
        return layer

    def fill(self) -> None:
        """Give slots to as many experts as the budget holds, when all else is where it belongs."""
        if self.experts == "auto":
            taken = max(self.accelerator.used(), self.taken)
            left = self.budget - self.room - taken - STREAMS * self.staging.group_bytes
            each = sum(layer.expert_bytes for layer in self.layers.values())
            self._set_slots(max(0, left // each))

    def _set_slots(self, count: int) -> None:
        self.slots = min([count, *(layer.num_experts for layer in self.layers.values())])
        for path, layer in self.layers.items():
            layer.set_slots(self.slots, None if self.load is None else _load_of(self.load, path, layer.num_experts))

    def shrink(self, error: BaseException) -> None:
        """Memory ran out: half of the slots, once; the error again where there is nothing left to give."""
        if self.shrunk or not self.slots:
            raise error
        self.shrunk, before = True, self.slots
        with self.still():
            for layer in list(self.layers.values()):
                layer.set_slots(0)
            self.accelerator.free()
            self._set_slots(before // 2)
        _log.warning(
            "moefuse: the GPU's memory ran out: from now on %d experts of each layer have a slot, no longer %d",
            self.slots,
            before,
        )

    def close(self) -> None:
        """Nothing of it is left on the GPU."""
        with self.still():
            for layer in list(self.layers.values()):
                layer.set_slots(0)
            self.staging.clear()
            self._still += 1  # for good
        if self._mover is not None:
            self._mover.shutdown(wait=True)
        self._mover = None
        self.accelerator.unlimit()

    # What layers share

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Within it nothing moves or streams, what was under way has come, and other threads' calls wait."""
        with self.lock:
            self._still += 1
            try:
                self.catch_up()
                for layer in list(self.layers.values()):
                    layer.settle(wait=True)
                self.accelerator.finish(self.side)  # of what failed, too: its memory may be given back
                yield
            finally:
                self._still -= 1

    @property
    def is_still(self) -> bool:
        return self._still > 0

    def later(self, layer: PlacedExperts, ids: Tensor) -> None:
        """Look at what a call asked for when the GPU has been given its next work: no step waits for it then."""
        self.catch_up()
        self._later = layer, ids

    def catch_up(self, settle: bool = True) -> None:
        """Do what was left for later; ``settle``: on the stream of the calls, where what is due may move."""
        if self._later is not None:
            (layer, ids), self._later = self._later, None
            if ids is not None:
                layer.note(ids)
            if settle:
                layer.settle()
            else:
                self._later = layer, None

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Let the one thread that moves experts do this; not where all is still."""
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, "moefuse-mover")
        return self._mover.submit(work)

    @functools.cached_property
    def rates(self) -> Rates:
        return rates_of(self.accelerator)

    # What it says

    def facts(self) -> dict[str, Any]:
        """What lies where, and what happened, as plain data."""
        with self.lock:
            self.catch_up(settle=False)
        layers = list(self.layers.values())
        hits, misses = (sum(getattr(layer.residency, name) for layer in layers) for name in ("hits", "misses"))
        return {
            "experts": self.experts,
            "all_on_gpu": self.whole,
            "layers": len(self.layers),
            "experts_of_a_layer": max((layer.num_experts for layer in layers), default=0),
            "slots_of_a_layer": self.slots,
            "bytes_in_ram": sum(layer.expert_bytes * layer.num_experts for layer in layers),
            "bytes_in_slots": sum(layer.expert_bytes * self.slots for layer in layers),
            "pinned": all(layer.pinned for layer in layers),
            "hits": hits,
            "misses": misses,
            "moves": sum(layer.residency.moves for layer in layers),
            "moved_bytes": sum(layer.residency.moves * layer.expert_bytes for layer in layers),
            "streamed_bytes": self.streamed_bytes,
            "seconds_waiting_for_gpu": self.waited,
            "seconds_on_cpu": self.computed,
            "budget": self.budget,
        }

    def __str__(self) -> str:
        known = self.facts()
        if self.whole:
            return f"experts: all on the GPU, which holds them within {gib(self.budget)}"
        E, S, count = known["experts_of_a_layer"], known["slots_of_a_layer"], known["layers"]
        how = "" if known["pinned"] else ", in memory that the system may page"
        text = f"experts: {count} layers of {E} in RAM ({gib(known['bytes_in_ram'])}{how}), {S} of each in slots"
        lines = [f"{text} ({gib(known['bytes_in_slots'])} of {gib(self.budget)})"]
        asked = known["hits"] + known["misses"]
        if asked:
            moved = f"{known['moves']} moves of {gib(known['moved_bytes'])}, {gib(known['streamed_bytes'])} streamed"
            lines.append(f"slots: {known['hits'] / asked:.0%} of {asked} assignments; {moved}")
            each = 1e6 / max(self.calls, 1)
            spent = f"{self.computed * each:.0f} us of experts on the CPU, {self.waited * each:.0f} us until they begin"
            lines.append(f"a layer of a step, on average: {spent}")
        return "\n".join(lines)


def _unpin(accelerator: Accelerator, addresses: list[int], _: list[Tensor]) -> None:
    """The tensors are held until this has run."""
    if addresses:
        accelerator.finish()  # copies may still read them
    for address in addresses:
        accelerator.unpin(address)


def _load_of(load: Mapping[str, Any], path: str, count: int) -> list[float]:
    if path not in load or len(load[path]) != count:
        got = "none" if path not in load else f"{len(load[path])} of them"
        raise ValueError(f"placement: load must have the {count} experts of {path}, got {got}")
    return [float(n) for n in load[path]]
