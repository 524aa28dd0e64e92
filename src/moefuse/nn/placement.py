"""Experts larger than the card: all of them in RAM, as many as fit in slots on the GPU, and both compute."""

from __future__ import annotations

import functools
import logging
import math
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.nn.accelerator import Accelerator, accelerator_of
from moefuse.nn.rates import Rates, rates_of
from moefuse.nn.residency import Residency
from moefuse.nn.shared import stack_arguments
from moefuse.ops._core.invariance import is_invariant
from moefuse.ops._core.memory import arrange_into
from moefuse.ops.combine import combine
from moefuse.ops.experts import experts
from moefuse.quant.arrange import wanted
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation, Stacks, Tail, Weight

_log = logging.getLogger("moefuse")

WORDS = ("cpu", "auto")
#: what is left of a budget for a cache and activations: a part of it, within bounds
_ROOM, LEAST_ROOM, _MOST_ROOM = 8, 512 << 20, 4 << 30
#: bytes that stream at a time, and how many such pieces are on the GPU: two that come in turns, one that is arranged
GROUP, STREAMS = 64 << 20, 3
#: tokens of a call whose staging is kept
_FEW = 64
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(text: str | int) -> int:
    """A size as people write it.

    >>> bytes_of("12GiB"), bytes_of("1.5 GB"), bytes_of(2**20)
    (12884901888, 1500000000, 1048576)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if isinstance(text, bool) or not isinstance(text, (str, int)) or not found or found[2].upper() not in _UNITS:
        raise ValueError(f"gpu_memory must be bytes or a size such as 12GiB or 500MB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def budget_for(taken: int) -> int:
    """The least budget that leaves room beside so many bytes."""
    return max(taken + LEAST_ROOM, min(-(-taken * _ROOM // (_ROOM - 1)), taken + _MOST_ROOM))


def gib(nbytes: float) -> str:
    """Bytes as messages have them."""
    return f"{nbytes / 2**30:.2f} GiB"


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
        #: path of an experts' module -> its experts
        self.layers: weakref.WeakValueDictionary[str, PlacedExperts] = weakref.WeakValueDictionary()
        #: all experts fit, and lie on the GPU like anything else
        self.whole = False
        #: slots of each layer; it changes once where memory runs out
        self.slots, self.shrunk = 0, False
        self.lock = threading.RLock()
        #: seconds in which the host waited for the GPU, and computed
        self.waited = self.computed = 0.0
        self.calls = self.streamed_bytes = self.moved_bytes = 0
        self._staging = threading.local()
        self._buffers: list[_Buffer] = []
        self._memories: dict[str, Tensor] = {}
        #: the stream of all copies that no step waits for
        self.side = self.accelerator.stream()
        self._mover: ThreadPoolExecutor | None = None
        self._later: Callable[[], None] | None = None
        self._still = 0

    @classmethod
    def of(
        cls, experts: str | Placement | None, gpu_memory: str | int | None, device: torch.device | str
    ) -> Placement | None:
        """What a user's words ask for; None where there are none."""
        if isinstance(experts, Placement):
            if gpu_memory is not None:
                raise ValueError("placement: gpu_memory belongs to the Placement that is given, got both")
            if experts.layers or experts.whole:
                raise ValueError("placement: a Placement must be new, got one that a model has")
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
        budget = self.accelerator.free()
        if self.gpu_memory is not None and self.gpu_memory > budget:
            _log.info("moefuse: gpu_memory is %s, and %s are free", gib(self.gpu_memory), gib(budget))
        self.budget = budget if self.gpu_memory is None else min(self.gpu_memory, budget)
        self.room = min(max(self.budget // _ROOM, LEAST_ROOM), _MOST_ROOM)
        self.taken = taken = self.accelerator.used() + shared
        if taken + self.room > self.budget:
            raise ValueError(
                f"gpu_memory must hold what is not experts, {gib(taken)}, and room to work in, {gib(self.room)}: give "
                f"{gib(budget_for(taken))} or more, got {gib(self.budget)}"
            )
        self.accelerator.limit(self.budget)
        whole = sum(nbytes_of(tensor) for one in stacks.values() for tensor in tensors_of(one).values())
        self.whole = self.experts == "auto" and taken + whole + self.room <= self.budget
        return self.whole

    def take(self, path: str, stacks: Stacks, activation: Activation, pin: bool = True) -> PlacedExperts:
        """Compute with these stacks, which stay where they are; ``pin``: they may be locked into memory."""
        layer = self.layers[path] = PlacedExperts(self, path, stacks, activation)
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
            left = self.budget - self.room - taken - STREAMS * self._group_bytes()
            each = sum(layer.expert_bytes for layer in self.layers.values())
            self._set_slots(max(0, left // each))

    def _set_slots(self, count: int) -> None:
        self.slots = min([count, *(layer.num_experts for layer in self.layers.values())])
        for path, layer in self.layers.items():
            layer.set_slots(self.slots, None if self.load is None else _load_of(self.load, path, layer.num_experts))

    def _group_bytes(self) -> int:
        return max((layer.group_bytes for layer in self.layers.values()), default=0)

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
        self._still, self._later = 1, None
        if self._mover is not None:
            self._mover.shutdown(wait=True)
        for layer in list(self.layers.values()):
            layer.set_slots(0)
        self._buffers, self._memories, self._mover = [], {}, None
        self.accelerator.limit(None)

    # What layers share

    def still(self) -> _Still:
        """Within it nothing moves or streams; what was under way has come."""
        return _Still(self)

    def later(self, work: Callable[[], None]) -> None:
        """Do this when the GPU has been given its next work: no step waits for it then."""
        self.catch_up()
        self._later = work

    def catch_up(self) -> None:
        """Do what was left for later."""
        work, self._later = self._later, None
        if work is not None:
            work()

    def submit(self, work: Callable[[], Any]) -> Future[Any] | None:
        """Let the one thread that moves experts do this; None where nothing may move."""
        if self._still:
            return None
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, "moefuse-mover")
        return self._mover.submit(work)

    def staging(self, T: int, top_k: int, H: int, dtype: torch.dtype) -> _Staging:
        """Memory for a call of this size, by thread."""
        kept: dict[Any, _Staging] = self._staging.__dict__.setdefault("kept", {})
        key = T, top_k, H, dtype
        if key in kept:
            return kept[key]
        with torch.inference_mode(False):
            made = _Staging(self.accelerator, T, top_k, H, dtype)
        if T <= _FEW:
            kept[key] = made
        return made

    def buffers(self) -> list[_Buffer]:
        """The two through which experts stream."""
        if not self._buffers:
            with torch.inference_mode(False):
                self._buffers = [_Buffer(self.accelerator, self._group_bytes()) for _ in range(2)]
        return self._buffers

    def arranged(self) -> Tensor:
        """Memory for those that have come, in another order."""
        return self._memory("arranged", self._group_bytes())

    def raw(self) -> Tensor:
        """Memory for one expert on its way into a slot, which streams use one after the other."""
        return self._memory("raw", max(layer.one_bytes for layer in self.layers.values()))

    def _memory(self, name: str, nbytes: int) -> Tensor:
        if name not in self._memories:
            with torch.inference_mode(False):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.accelerator.device)
            self._memories[name] = memory
        return self._memories[name]

    @functools.cached_property
    def rates(self) -> Rates:
        return rates_of(self.accelerator)

    # What it says

    def facts(self) -> dict[str, Any]:
        """What lies where, and what happened, as plain data."""
        with self.lock:
            self.catch_up()
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
            "moved_bytes": self.moved_bytes,
            "streamed_bytes": self.streamed_bytes,
            "seconds_waiting_for_gpu": self.waited,
            "seconds_on_cpu": self.computed,
            "budget": getattr(self, "budget", None),
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


class _Still:
    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def __enter__(self) -> None:
        placement = self.placement
        placement._still += 1
        placement.catch_up()
        for layer in list(placement.layers.values()):
            layer.settle(wait=True)

    def __exit__(self, *_: object) -> None:
        self.placement._still -= 1


def _unpin(accelerator: Accelerator, addresses: list[int], _: list[Tensor]) -> None:
    """The tensors are held until this has run."""
    for address in addresses:
        accelerator.unpin(address)


def _load_of(load: Mapping[str, Any], path: str, count: int) -> list[float]:
    if path not in load or len(load[path]) != count:
        got = "none" if path not in load else f"{len(load[path])} of them"
        raise ValueError(f"placement: load must have the {count} experts of {path}, got {got}")
    return [float(n) for n in load[path]]


def tensors_of(stacks: Stacks) -> dict[str, Any]:
    """What every expert has a part of, by name."""
    return {name: value for name, value in stacks._asdict().items() if value is not None and name != "layout"}


def bytes_in(weight: Weight) -> Tensor:
    """The memory of numbers or blocks."""
    return weight.blocks if isinstance(weight, QuantTensor) else weight


def nbytes_of(weight: Weight) -> int:
    return bytes_in(weight).nbytes


def _differ(one: Weight, other: Weight) -> bool:
    """Whether these are blocks in two arrangements."""
    return isinstance(one, QuantTensor) and isinstance(other, QuantTensor) and one.arrangement != other.arrangement


class _Staging:
    """How the rows of a call come to the host, and what it computes goes back."""

    def __init__(self, accelerator: Accelerator, T: int, top_k: int, H: int, dtype: torch.dtype) -> None:
        n = T * top_k * 4
        self.sent = accelerator.host(3 * n + T * H * dtype.itemsize)
        ids, others, weights, rows = torch.split(self.sent, [n, n, n, T * H * dtype.itemsize])
        #: ids as the router has them, and those without a slot
        self.ids, self.others = (part.view(torch.int32).view(T, top_k) for part in (ids, others))
        self.weights, self.rows = weights.view(torch.float32).view(T, top_k), rows.view(dtype).view(T, H)
        self.back = accelerator.host(T * H * 4).view(torch.float32).view(T, H)
        self.zeros = torch.zeros(T, H)  # the sum of the CPU's experts is float32 like it
        self.event = accelerator.event()
        # The GPU's sum and the CPU's as two experts of each token.
        two = torch.arange(2 * T, dtype=torch.int32).view(T, 2)
        self.inverse = (two % 2 * T + two // 2).flatten().to(accelerator.device)
        self.ones = torch.ones(T, 2, device=accelerator.device)


class _Buffer:
    """Memory that experts stream through."""

    def __init__(self, accelerator: Accelerator, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=accelerator.device)
        self.loaded, self.read = accelerator.event(), accelerator.event()
        accelerator.record(self.read)  # whoever had this memory before may still be at it


@dataclass
class _Move:
    slot: int
    #: gives the event behind its copies
    future: Future[Any]


class PlacedExperts:
    """The experts of one layer: all in RAM, some in slots as well. Call it as the op is called.

    Which expert is computed where, only the GPU knows at the time of a call: by its table. That table and the slots are
    written in the order of its stream, and a slot that is being filled is in no table.
    """

    def __init__(self, placement: Placement, path: str, stacks: Stacks, activation: Activation) -> None:
        self.path, self.stacks, self.activation = path, stacks, activation
        self.placement, self.accelerator = placement, placement.accelerator
        self.num_experts = stacks.down.shape[0]
        self.expert_bytes = sum(nbytes_of(w) for w in tensors_of(stacks).values()) // self.num_experts
        #: experts that stream at a time, and what they take
        self.group = min(max(1, GROUP // self.expert_bytes), self.num_experts)
        sizes = [bytes_in(w)[0].nbytes for w in tensors_of(stacks).values()]
        self.group_bytes = sum(_aligned(self.group * size) for size in sizes)
        self.one_bytes = sum(map(_aligned, sizes))
        self.pinned = False
        self.slots: Stacks | None = None
        self._moves: list[_Move] = []
        #: ids of a prompt on their way to the host
        self._asked: tuple[Tensor, Any] | None = None
        self.set_slots(0)

    def __deepcopy__(self, _: Any) -> Any:
        raise TypeError("a model whose experts are placed cannot be copied or pickled: copy it before it is placed")

    __reduce_ex__ = __deepcopy__

    def set_slots(self, count: int, load: Sequence[float] | None = None) -> None:
        """As many slots, filled before this returns."""
        known = getattr(self, "residency", None)
        self.slots = None
        self.residency = Residency(self.num_experts, count, load)
        if known is not None:
            self.residency.hits, self.residency.misses, self.residency.moves = known.hits, known.misses, known.moves
        device = self.accelerator.device
        with torch.inference_mode(False):
            if count:
                self.slots = self._stacks(count, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device))
            self._table = torch.empty(3, self.num_experts + 2, dtype=torch.int32, device=device)
        for slot, expert in enumerate(self.residency.slots):
            self._bring(self.slots, slot, expert)
        self._publish()

    # Moving

    def _publish(self) -> None:
        """Let the calls from now on see what lies where."""
        rows = torch.tensor(self.residency.table(), dtype=torch.int32)
        memory = self.accelerator.host(rows.nbytes).view(torch.int32).view(rows.shape)
        memory.copy_(rows)
        self.accelerator.copy(self._table, memory)

    def _bring(self, slots: Stacks | None, slot: int, expert: int, stream: Any = None) -> None:
        """Fill a slot, in the order of a stream."""
        acc, into = self.accelerator, {} if slots is None else tensors_of(slots)
        raw = tensors_of(self._within(self.placement.raw(), 1, arranged=False))
        for name, source in tensors_of(self.stacks).items():
            target, here = into[name][slot : slot + 1], raw[name]
            if not _differ(target, here):
                acc.copy(bytes_in(target), bytes_in(source)[expert : expert + 1], stream)
            else:
                acc.copy(bytes_in(here), bytes_in(source)[expert : expert + 1], stream)
                acc.run(functools.partial(arrange_into, target, here), stream)

    def _upload(self, slots: Stacks | None, slot: int, expert: int, after: Any) -> Any:
        """Fill a slot behind all that may still read it; what the moving thread does."""
        acc, side = self.accelerator, self.placement.side
        event = acc.event()
        with torch.no_grad():
            acc.wait(after, side)
            self._bring(slots, slot, expert, side)
            acc.record(event, side)
        return event

    def settle(self, wait: bool = False) -> None:
        """Take in the moves that have come, and begin those that are due."""
        owner, residency = self.placement, self.residency
        if self._asked is not None:
            ids, event = self._asked
            if event.query():
                self._note(ids)
                self._asked = None
        changed = False
        for move in list(self._moves):
            if not (wait or move.future.done()):
                continue
            error = move.future.exception()
            if isinstance(error, torch.OutOfMemoryError):  # the slot stays empty until it is chosen again
                self._moves.remove(move)
                residency.moving.pop(move.slot)
                continue
            event = move.future.result()
            if wait:
                event.synchronize()
            if event.query():
                self.accelerator.wait(event)
                self._moves.remove(move)
                residency.finish(move.slot)
                owner.moved_bytes += self.expert_bytes
                changed = True
        due = [] if wait or owner._still else residency.look()
        for expert, slot in due:
            residency.begin(expert, slot)
        if changed or due:
            self._publish()
        if due:
            after = self.accelerator.event()
            self.accelerator.record(after)
            for expert, slot in due:
                future = owner.submit(functools.partial(self._upload, self.slots, slot, expert, after))
                assert future is not None
                self._moves.append(_Move(slot, future))

    # Computing

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, *, backend: str | None = None, **tail: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What `moefuse.experts` gives, of tensors on the GPU, with ``tail`` as it takes it."""
        self._refuse(x, weights)
        after, owner = Tail(**tail), self.placement
        with owner.lock:
            streams = self._streams(x.shape[0], ids.shape[1])
            if streams:
                owner.catch_up()
                self.settle()
            run = self._streamed if streams else self._together
            try:
                return run(x, ids, self._found(ids), weights, after, backend)
            except torch.OutOfMemoryError as error:
                if self.accelerator.recorder is not None:  # nothing can be allocated anew here
                    raise
                kept = error.with_traceback(None)  # frames hold what they had allocated
            owner.shrink(kept)
            return run(x, ids, self._found(ids), weights, after, backend)

    def _refuse(self, x: Tensor, weights: Tensor) -> None:
        if x.dtype == torch.float64:
            raise TypeError("placed experts must be given float32, bfloat16 or float16, got float64")
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            raise ValueError(
                "placed experts have no gradients: run under torch.no_grad(), or train without experts= and gpu_memory="
            )
        if torch.compiler.is_compiling():
            raise ValueError("placed experts cannot be compiled: the CPU computes in the middle of a step")
        if is_invariant():
            raise ValueError("placed experts are not invariant: CPU and GPU sum in different orders")

    def _found(self, ids: Tensor) -> Tensor:
        """For each assignment its slot, its place among the others, and itself among those ``[3, T, top_k]``."""
        at = ids.flatten().clamp(-1, self.num_experts).add_(1)
        return self._table.index_select(1, at).view(3, *ids.shape)

    def _streams(self, T: int, top_k: int) -> bool:
        """Whether so many tokens are done earlier when the other experts stream through the GPU."""
        owner = self.placement
        if owner.experts != "auto" or T <= 1 or self.num_experts == owner.slots or owner._still:
            return False
        return owner.rates.streams(
            T * top_k, self.num_experts, owner.slots, self.expert_bytes, self._flops, pinned=self.pinned
        )

    @functools.cached_property
    def _flops(self) -> int:
        """Of a row in an expert."""
        stacks = (self.stacks.gate_up, self.stacks.up, self.stacks.down)
        return 2 * sum(w.shape.numel() for w in stacks if w is not None) // self.num_experts

    def _experts(self, stacks: Stacks, x: Tensor, ids: Tensor, weights: Tensor, **options: Any) -> Any:
        return experts(x, ids, weights, activation=self.activation, **stack_arguments(stacks), **options)

    def _together(
        self, x: Tensor, ids: Tensor, found: Tensor, weights: Tensor, tail: Tail, backend: str | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The CPU computes what has no slot while the GPU computes what has one."""
        acc, (T, H) = self.accelerator, x.shape
        slot, _, other = found.unbind(0)
        staging = self.placement.staging(T, ids.shape[1], H, x.dtype)
        wide = weights.float()
        parts = (ids.to(torch.int32), other, wide, x)
        acc.copy(staging.sent, torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts]))
        sums = torch.empty(1 if self.slots is None else 2, T, H, device=x.device)
        if self.slots is not None:
            acc.do(functools.partial(acc.record, staging.event))
            self._experts(self.slots, x, slot, wide, out=sums[0], backend=backend)
        acc.do(functools.partial(self._on_cpu, staging, recorded=self.slots is not None))
        acc.copy(sums[-1], staging.back)
        if self.slots is None:
            return self._sum(sums[0], staging.ones[:, :1], tail, x, backend)
        return self._sum(sums.flatten(0, 1), staging.ones, tail, x, backend, staging.inverse)

    def _on_cpu(self, staging: _Staging, recorded: bool) -> None:
        owner = self.placement
        with owner.lock, torch.no_grad():
            if not recorded:
                self.accelerator.record(staging.event)
            owner.catch_up()
            started = time.perf_counter()
            staging.event.synchronize()
            arrived = time.perf_counter()
            if bool((staging.others >= 0).any()):
                given = staging.rows, staging.others, staging.weights
                staging.back.copy_(self._experts(self.stacks, *given, residual=staging.zeros))
            else:
                staging.back.zero_()
            owner.waited += arrived - started
            owner.computed += time.perf_counter() - arrived
            owner.calls += 1
            owner.later(functools.partial(self._note_and_settle, staging.ids.clone()))

    def _note_and_settle(self, ids: Tensor) -> None:
        self._note(ids)
        self.settle()

    def _note(self, ids: Tensor) -> None:
        """Experts that a call asked for, on the host."""
        if ids.numel() > 64:
            counts = torch.bincount(ids.flatten().clamp(-1, self.num_experts) + 1, minlength=self.num_experts + 2)
            self.residency.note({e - 1: n for e, n in enumerate(counts.tolist()) if n})
        else:
            self.residency.note(Counter(ids.flatten().tolist()))

    def _ask(self, ids: Tensor) -> None:
        """Send ids to the host, which looks at them when they have come and it has time."""
        memory = self.accelerator.host(4 * ids.numel()).view(torch.int32).view(ids.shape)
        self.accelerator.copy(memory, ids.to(torch.int32))
        event = self.accelerator.event()
        self.accelerator.record(event)
        self._asked = memory, event

    def _streamed(
        self, x: Tensor, ids: Tensor, found: Tensor, weights: Tensor, tail: Tail, backend: str | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The GPU computes all: what has a slot, and the others as they stream by."""
        acc, owner = self.accelerator, self.placement
        slot, rank, _ = found.unbind(0)
        wide = weights.float()
        self._ask(ids)
        total = torch.zeros(x.shape, device=x.device)
        if self.slots is not None:
            self._experts(self.slots, x, slot, wide, residual=total, out=total, backend=backend)
        for number, (buffer, members) in enumerate(self._groups()):
            raw = self._within(buffer.memory, self.group, arranged=False)
            acc.wait(buffer.read, owner.side)
            for at, first, count in _runs(members):
                self._put(raw, at, first, count, owner.side)
            acc.record(buffer.loaded, owner.side)
            acc.wait(buffer.loaded)
            into = self._arranged(raw, len(members))
            self._experts(into, x, rank - number * self.group, wide, residual=total, out=total, backend=backend)
            acc.record(buffer.read)
            owner.streamed_bytes += len(members) * self.expert_bytes
        return self._sum(total, total.new_ones(len(x), 1), tail, x, backend)

    def _put(self, into: Stacks, at: int, first: int, count: int, stream: Any) -> None:
        """Copy experts that stand together, as they lie in RAM."""
        targets = tensors_of(into)
        for name, source in tensors_of(self.stacks).items():
            target = bytes_in(targets[name])[at : at + count]
            self.accelerator.copy(target, bytes_in(source)[first : first + count], stream)

    def _arranged(self, raw: Stacks, count: int) -> Stacks:
        """What has come, in the order that the GPU reads: where blocks differ in that, in memory for it."""
        made, room = raw._asdict(), self._within(self.placement.arranged(), self.group)
        for name, target in tensors_of(room).items():
            if _differ(target, made[name]):
                arrange_into(target[:count], made[name][:count])
                made[name] = target
        return Stacks(**made)

    def _groups(self) -> Iterator[tuple[_Buffer, list[int]]]:
        """Experts without a slot, as many at a time as a buffer holds, and the buffers in turn."""
        others, buffers = self.residency.others(), self.placement.buffers()
        for number, start in enumerate(range(0, len(others), self.group)):
            yield buffers[number % 2], others[start : start + self.group]

    def _within(self, memory: Tensor, count: int, arranged: bool = True) -> Stacks:
        """Stacks of so many experts in this memory of the GPU."""
        left = memory

        def cut(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            nonlocal left
            size = math.prod(shape) * dtype.itemsize
            part, left = left[:size], left[_aligned(size) :]
            return part.view(dtype).view(shape)

        return self._stacks(count, cut, arranged)

    def _stacks(
        self, count: int, memory: Callable[[tuple[int, ...], torch.dtype], Tensor], arranged: bool = True
    ) -> Stacks:
        """Stacks of so many experts on the GPU: as that reads them, or as they lie in RAM."""
        made: dict[str, Any] = {"up": None, "layout": self.stacks.layout}
        for name, weight in tensors_of(self.stacks).items():
            data = bytes_in(weight)
            made[name] = part = memory((count, *data.shape[1:]), data.dtype)
            if isinstance(weight, QuantTensor):
                order = wanted(part, weight.arrangement) if arranged else weight.arrangement
                made[name] = replace(weight, blocks=part, arrangement=order)
        return Stacks(**made)

    def _sum(
        self, y: Tensor, weights: Tensor, tail: Tail, x: Tensor, backend: str | None, inverse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the devices computed, and the tail, in the types that the op would give."""
        out = torch.empty_like(x) if tail.residual is None else torch.empty_like(tail.residual)
        normed = None if tail.norm_weight is None else torch.empty_like(x)
        return combine(y, weights, inverse=inverse, **tail._asdict(), out=out, normed_out=normed, backend=backend)


def _aligned(nbytes: int) -> int:
    """A place for memory of any type behind so many bytes."""
    return -(-nbytes // 256) * 256


def _runs(members: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbours among sorted numbers: the place of the first, itself, and how many they are.

    >>> list(_runs([0, 1, 2, 7, 9, 10]))
    [(0, 0, 3), (3, 7, 1), (4, 9, 2)]
    """
    start = 0
    for at in range(1, len(members) + 1):
        if at == len(members) or members[at] != members[at - 1] + 1:
            yield start, members[start], at - start
            start = at


def place(
    model: nn.Module, experts: Mapping[str, tuple[Stacks, Activation, Sequence[str]]], placement: Placement, pin: bool
) -> None:
    """Put a model on the GPU, all but its experts, which are placed; where all fit, these too.

    Args:
        experts: path of an experts' module -> what it computes with, and the names of its tensors.
        pin: stacks may be locked into memory; those of a mapped file may not.
    """
    apart: dict[int, int] = {}
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        _, _, names = experts.get(path, (None, None, ()))
        apart |= {t.data_ptr(): t.nbytes for name, t in own.items() if t is not None and name not in names}
    if placement.admit(sum(apart.values()), {path: stacks for path, (stacks, _, _) in experts.items()}):
        model.to(placement.device)
        return
    for path, (stacks, activation, names) in experts.items():
        owner: Any = model.get_submodule(path)
        owner._placed = placement.take(path, stacks, activation, pin)
        owner._apply = functools.partial(_apply_around, owner, tuple(names))
        owner._load_from_state_dict = _refuse_state
    model.to(placement.device)
    placement.fill()


def unplace(model: nn.Module) -> None:
    """Let the experts of a model be like its other parts again; nothing moves."""
    placement = placement_of(model)
    if placement is not None:
        placement.close()
    for module in model.modules():
        if vars(module).pop("_placed", None) is not None:
            del module._apply, module._load_from_state_dict


def placed(module: nn.Module) -> PlacedExperts | None:
    """The placed experts of a module, where it has them."""
    return vars(module).get("_placed")


def placement_of(model: nn.Module) -> Placement | None:
    """The placement of a model's experts."""
    found = (placed(module) for module in model.modules())
    return next((layer.placement for layer in found if layer is not None), None)


def _refuse_state(*_: Any, **__: Any) -> None:
    raise ValueError("load_state_dict: the experts are placed, and their slots would not follow: load, then place")


def _apply_around(module: Any, names: tuple[str, ...], fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    """What ``_apply`` is for a module whose experts stay where they are, while its other tensors move."""
    probe = torch.empty(0, device=module._placed.accelerator.device)
    moved = fn(probe)
    if (moved.device, moved.dtype) != (probe.device, probe.dtype):
        raise ValueError(
            f"to: the experts are placed between RAM and {probe.device}, and stay so: call moefuse.hf.unpatch or "
            f"MoE.unplace first; got a move to {moved.device} in {str(moved.dtype).removeprefix('torch.')}"
        )
    held = {name: (own, own[name]) for own in (module._parameters, module._buffers) for name in names if name in own}
    specs = dict(getattr(module, "specs", {}))
    for name, (own, _) in held.items():
        own[name] = None
        getattr(module, "specs", {}).pop(name, None)
    try:
        type(module)._apply(module, fn, recurse)
    finally:
        for name, (own, value) in held.items():
            own[name] = value
            if name in specs:
                module.specs[name] = specs[name]
    return module
