"""The experts of one layer, computed where they lie: in RAM by the CPU, in slots by the GPU, or as they stream by."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefuse.nn.residency import Residency
from moefuse.nn.shared import stack_arguments
from moefuse.nn.slots import Slots
from moefuse.nn.stack_memory import bytes_in, differ, nbytes_of, stacks_within, tensors_of
from moefuse.nn.staging import CallMemory, StreamBuffer
from moefuse.ops._core.arrange import arrange_into
from moefuse.ops._core.invariance import is_invariant
from moefuse.ops.combine import combine
from moefuse.ops.experts import experts
from moefuse.types import Activation, Stacks, Tail

if TYPE_CHECKING:
    from moefuse.nn.placement import Placement


class PlacedExperts:
    """The experts of one layer: all in RAM, some in slots as well. Call it as the op is called.

    Args:
        path: what the placement knows it by.
        group: about so many bytes of experts stream at a time.
    """

    def __init__(self, placement: Placement, path: str, stacks: Stacks, activation: Activation, group: int) -> None:
        self.path, self.stacks, self.activation = path, stacks, activation
        self.placement, self.accelerator = placement, placement.accelerator
        self.num_experts = stacks.down.shape[0]
        self.expert_bytes = sum(nbytes_of(w) for w in tensors_of(stacks).values()) // self.num_experts
        #: experts that stream at a time
        self.group = min(max(1, group // self.expert_bytes), self.num_experts)
        #: all of its memory is locked to the GPU
        self.pinned = False
        #: ids of a prompt on their way to the host
        self._asked: tuple[Tensor, Any] | None = None
        self.slots = Slots(placement, stacks, Residency(self.num_experts, 0))

    def __deepcopy__(self, _: Any) -> Any:
        raise TypeError("a model whose experts are placed cannot be copied or pickled: copy it before it is placed")

    __reduce_ex__ = __deepcopy__

    def set_slots(self, count: int, load: Sequence[float] | None = None) -> None:
        """As many slots, filled before this returns; ``load`` is as `Residency` takes it."""
        self.slots.fill(self.residency.again(count, load))

    @property
    def residency(self) -> Residency:
        return self.slots.residency

    def settle(self, wait: bool = False) -> None:
        """Look at the ids that have come, then at what moves; ``wait`` is as `Slots.settle` takes it."""
        if self._asked is not None:
            ids, event = self._asked
            if event.query():
                self.note(ids)
                self._asked = None
        self.slots.settle(wait)

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
                return run(x, ids, self.slots.find(ids), weights, after, backend)
            except torch.OutOfMemoryError as error:
                if self.accelerator.recorder is not None:  # nothing can be allocated anew here
                    raise
                kept = error.with_traceback(None)  # frames hold what they had allocated
            owner.shrink(kept)
            return run(x, ids, self.slots.find(ids), weights, after, backend)

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

    def _streams(self, T: int, top_k: int) -> bool:
        """Whether so many tokens are done earlier when the other experts stream through the GPU."""
        owner = self.placement
        if owner.experts != "auto" or T <= 1 or self.num_experts == owner.slots or owner.is_still:
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
        acc, in_slots, (T, H) = self.accelerator, self.slots.stacks, x.shape
        slot, _, other = found.unbind(0)
        staging = self.placement.staging.call(T, ids.shape[1], H, x.dtype)
        wide = weights.float()
        parts = (ids.to(torch.int32), other, wide, x)
        acc.copy(staging.sent, torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts]))
        sums = torch.empty(1 if in_slots is None else 2, T, H, device=x.device)
        if in_slots is not None:
            acc.do(functools.partial(acc.record, staging.event))
            self._experts(in_slots, x, slot, wide, out=sums[0], backend=backend)
        acc.do(functools.partial(self._on_cpu, staging, recorded=in_slots is not None))
        acc.copy(sums[-1], staging.back)
        if in_slots is None:
            return self._sum(sums[0], staging.ones[:, :1], tail, x, backend)
        return self._sum(sums.flatten(0, 1), staging.ones, tail, x, backend, staging.inverse)

    def _on_cpu(self, staging: CallMemory, recorded: bool) -> None:
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
            owner.later(self, staging.ids.clone())

    def note(self, ids: Tensor) -> None:
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
        acc, owner, in_slots = self.accelerator, self.placement, self.slots.stacks
        slot, rank, _ = found.unbind(0)
        wide = weights.float()
        self._ask(ids)
        total = torch.zeros(x.shape, device=x.device)
        if in_slots is not None:
            self._experts(in_slots, x, slot, wide, residual=total, out=total, backend=backend)
        for number, (buffer, members) in enumerate(self._groups()):
            raw = stacks_within(buffer.memory, self.stacks, self.group, arranged=False)
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
        made = raw._asdict()
        room = stacks_within(self.placement.staging.arranged(), self.stacks, self.group)
        for name, target in tensors_of(room).items():
            if differ(target, made[name]):
                arrange_into(target[:count], made[name][:count])
                made[name] = target
        return Stacks(**made)

    def _groups(self) -> Iterator[tuple[StreamBuffer, list[int]]]:
        """Experts without a slot, as many at a time as a buffer holds, and the buffers in turn."""
        others, buffers = self.residency.others(), self.placement.staging.buffers()
        for number, start in enumerate(range(0, len(others), self.group)):
            yield buffers[number % 2], others[start : start + self.group]

    def _sum(
        self, y: Tensor, weights: Tensor, tail: Tail, x: Tensor, backend: str | None, inverse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What the devices computed, and the tail, in the types that the op would give."""
        out = torch.empty_like(x) if tail.residual is None else torch.empty_like(tail.residual)
        normed = None if tail.norm_weight is None else torch.empty_like(x)
        return combine(y, weights, inverse=inverse, **tail._asdict(), out=out, normed_out=normed, backend=backend)


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
