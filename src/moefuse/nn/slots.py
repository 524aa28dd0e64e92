"""The slots of a layer on the GPU: their memory, the table that calls look into, and what is on its way."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefuse.nn.residency import Residency
from moefuse.nn.stack_memory import bytes_in, differ, stacks_like, stacks_within, tensors_of
from moefuse.ops._core.arrange import arrange_into
from moefuse.types import Stacks

if TYPE_CHECKING:
    from moefuse.nn.placement import Placement

_log = logging.getLogger("moefuse")


@dataclass
class _Move:
    slot: int
    #: gives the event behind its copies
    future: Future[Any]


class Slots:
    """Copies of some experts of ``stacks`` on the GPU.

    Which expert is computed where, only the GPU knows at the time of a call: by its table. That table and the slots are
    written in the order of its stream, and a slot that is being filled is in no table.
    """

    def __init__(self, placement: Placement, stacks: Stacks, residency: Residency) -> None:
        self.placement, self.accelerator, self.source = placement, placement.accelerator, stacks
        self._moves: list[_Move] = []
        #: what the table says
        self._published: list[int] = []
        with torch.inference_mode(False):
            columns, device = residency.experts + 2, self.accelerator.device
            self._table = torch.empty(3, columns, dtype=torch.int32, device=device)
        self.fill(residency)

    def fill(self, residency: Residency) -> None:
        """Be these slots, filled before this returns; nothing may be on its way."""
        count, device = len(residency.slots), self.accelerator.device
        # Where memory runs out below there are none, and calls know it. Those there were are freed first.
        self.residency = residency.again(0)
        self._publish()
        #: None where there is no slot
        self.stacks: Stacks | None = None
        if not count:
            return
        with torch.inference_mode(False):
            self.stacks = stacks_like(
                self.source, count, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)
            )
        for slot, expert in enumerate(residency.slots):
            self._bring(slot, expert)
        self.residency = residency
        self._publish()

    def find(self, ids: Tensor) -> Tensor:
        """For each assignment its slot, its place among the others, and itself among those ``[3, T, top_k]``."""
        at = ids.flatten().clamp(-1, self.residency.experts).add_(1)
        return self._table.index_select(1, at).view(3, *ids.shape)

    def settle(self, wait: bool) -> None:
        """Take in the moves that have come, and begin those that are due; ``wait``: let all come, and begin none."""
        begins = not (wait or self.placement.is_still)
        for move in list(self._moves):
            self._take_in(move, wait)
        for expert, slot in self.residency.look() if begins else ():
            self.residency.begin(expert, slot)
        # Told by what is, not by what was done here: an interrupt may have come between.
        if self._published != self.residency.slots:
            self._publish()
        if begins and (due := self.residency.moving.keys() - {move.slot for move in self._moves}):
            after = self.accelerator.event()
            self.accelerator.record(after)
            for slot in due:
                work = functools.partial(self._upload, slot, self.residency.moving[slot], after)
                self._moves.append(_Move(slot, self.placement.submit(work)))

    def _take_in(self, move: _Move, wait: bool) -> None:
        """If the expert of a move has come, the slot is its own from then on."""
        if not (wait or move.future.done()):
            return
        if (error := move.future.exception()) is not None:  # empty until it is chosen again
            self._moves.remove(move)
            self.residency.moving.pop(move.slot)
            if isinstance(error, torch.OutOfMemoryError):
                return
            if not self.placement.is_still:
                raise error
            _log.warning("moefuse: an expert did not come into its slot: %s", error)
            return
        event = move.future.result()
        if wait:
            event.synchronize()
        if event.query():
            self.accelerator.wait(event)
            self._moves.remove(move)
            self.residency.finish(move.slot)

    def _publish(self) -> None:
        """Let the calls from now on see what lies where."""
        rows = torch.tensor(self.residency.table(), dtype=torch.int32, device="cpu")
        memory = self.accelerator.host(rows.nbytes).view(torch.int32).view(rows.shape)
        memory.copy_(rows)
        self.accelerator.copy(self._table, memory)
        self._published = list(self.residency.slots)

    def _bring(self, slot: int, expert: int, stream: Any = None) -> None:
        """Fill a slot, in the order of a stream."""
        assert self.stacks is not None
        acc, slots = self.accelerator, tensors_of(self.stacks)
        raw = tensors_of(stacks_within(self.placement.staging.raw(), self.source, 1, arranged=False))
        for name, source in tensors_of(self.source).items():
            target, here = slots[name][slot : slot + 1], raw[name]
            if not differ(target, here):
                acc.copy(bytes_in(target), bytes_in(source)[expert : expert + 1], stream)
            else:
                acc.copy(bytes_in(here), bytes_in(source)[expert : expert + 1], stream)
                acc.run(functools.partial(arrange_into, target, here), stream)

    def _upload(self, slot: int, expert: int, after: Any) -> Any:
        """Fill a slot behind all that may still read it; what the moving thread does."""
        acc, side = self.accelerator, self.placement.side
        event = acc.event()
        with torch.no_grad():
            acc.wait(after, side)
            self._bring(slot, expert, side)
            acc.record(event, side)
        return event
