"""Which experts of a layer lie in slots, and which are to: plain numbers, so that a trace can be replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

#: calls between two looks at what is used
WINDOW = 16
#: moves that one look begins
MOST = 4
# What a look leaves of older uses: half of them are forgotten after about 100 calls.
_FADE = 0.9
# An expert comes in that was used so much more than the one that goes. Replayed on draws by Zipf's law, these reach
# 0.98 of the best fixed choice in 2,000 calls, with 35 moves a layer; even draws cause 100.
_FACTOR, _MARGIN = 1.3, 4.0


def choose(
    uses: Sequence[float], slots: Sequence[int], moving: Iterable[int] = (), most: int = MOST
) -> list[tuple[int, int]]:
    """The next moves, ``(expert, slot)``: the most used experts that have no slot, into the slots least used.

    Args:
        uses: of each expert; older ones count less.
        slots: the expert in each slot, -1 where a slot is empty.
        moving: slots that are being filled, and are left alone.
        most: so many moves.

    >>> choose([9.0, 0.0, 50.0, 20.0], [0, 1])
    [(2, 1), (3, 0)]
    >>> choose([9.0, 8.0, 10.0, 7.0], [0, 1])  # nothing is worth a move
    []
    """
    taken = set(slots)
    busy = set(moving)
    waiting = sorted((e for e in range(len(uses)) if e not in taken), key=lambda e: -uses[e])
    leaving = sorted(
        (s for s in range(len(slots)) if s not in busy), key=lambda s: uses[slots[s]] if slots[s] >= 0 else -1.0
    )
    found: list[tuple[int, int]] = []
    for expert, slot in zip(waiting, leaving, strict=False):
        worth = slots[slot] < 0 or uses[expert] > _FACTOR * uses[slots[slot]] + _MARGIN
        if not worth or len(found) == most:
            break
        found.append((expert, slot))
    return found


class Residency:
    """The slots of one layer.

    Args:
        experts: how many there are.
        slots: how many of them have a slot.
        load: how much each expert is used, known before; then they stay where they are.
    """

    def __init__(self, experts: int, slots: int, load: Sequence[float] | None = None) -> None:
        self.experts, self.fixed = experts, load is not None
        self.uses = [0.0] * experts if load is None else [float(n) for n in load]
        order = sorted(range(experts), key=lambda e: -self.uses[e])
        #: the expert in each slot, -1 while it is being filled
        self.slots = order[:slots]
        #: slot -> the expert that is on its way there
        self.moving: dict[int, int] = {}
        self.hits = self.misses = self.moves = 0
        self._calls = 0

    def again(self, slots: int, load: Sequence[float] | None = None) -> Residency:
        """As many slots for the same experts; what was counted so far goes on."""
        made = Residency(self.experts, slots, load)
        made.hits, made.misses, made.moves = self.hits, self.misses, self.moves
        return made

    def note(self, used: Mapping[int, int]) -> None:
        """Experts were used so often in a call; a number that is none is left out."""
        inside, uses, hits, asked = set(self.slots), self.uses, 0, 0
        for e, count in used.items():
            if 0 <= e < self.experts:
                asked += count
                hits += count if e in inside else 0
                if not self.fixed:
                    uses[e] += count
        self.hits += hits
        self.misses += asked - hits
        self._calls += 1

    def look(self) -> list[tuple[int, int]]:
        """The moves to begin now; none but every `WINDOW` calls."""
        if self.fixed or not self.slots or self._calls < WINDOW:
            return []
        self._calls = 0
        on_their_way = set(self.moving.values())
        uses = [0.0 if e in on_their_way else n for e, n in enumerate(self.uses)]
        found = choose(uses, self.slots, self.moving)
        self.uses = [_FADE * n for n in self.uses]
        return found

    def begin(self, expert: int, slot: int) -> None:
        """The slot's expert is gone, and this one is on its way."""
        self.slots[slot], self.moving[slot] = -1, expert

    def finish(self, slot: int) -> None:
        """It has come."""
        self.slots[slot] = self.moving.pop(slot)
        self.moves += 1

    def others(self) -> list[int]:
        """Experts without a slot."""
        inside = set(self.slots)
        return [e for e in range(self.experts) if e not in inside]

    def table(self) -> list[list[int]]:
        """For an id plus one, cut to ``[0, E + 1]``: its slot; its place among those without; itself if it has none.

        -1 stands for none, and at both ends, which are no experts.
        """
        slot_of, others = {e: s for s, e in enumerate(self.slots) if e >= 0}, self.others()
        rank_of = {e: n for n, e in enumerate(others)}
        rows = [[maps.get(e, -1) for e in range(self.experts)] for maps in (slot_of, rank_of)]
        rows.append([e if e in rank_of else -1 for e in range(self.experts)])
        return [[-1, *row, -1] for row in rows]


@dataclass(frozen=True)
class Replayed:
    """What a trace would have cost.

    Attributes:
        hits, misses: assignments whose expert had a slot, and others.
        moves: experts that came into a slot.
        bytes: that the moves took.
    """

    hits: int
    misses: int
    moves: int
    bytes: int

    @property
    def rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)


def replay(
    trace: Iterable[Iterable[int]],
    experts: int,
    slots: int,
    expert_bytes: int = 0,
    load: Sequence[float] | None = None,
    delay: int = 1,
) -> Replayed:
    """Run the policy over the ids of each call; a move takes ``delay`` calls.

    >>> steps = [[0, 1], [0, 1]] * 40 + [[2, 3]] * 200
    >>> replay(steps, experts=4, slots=2, expert_bytes=10)
    Replayed(hits=400, misses=160, moves=2, bytes=20)
    >>> round(replay(steps, experts=4, slots=2, load=[0, 0, 9, 9]).rate, 3)
    0.714
    """
    layer = Residency(experts, slots, load)
    due: dict[int, int] = {}
    for ids in trace:
        for slot in [slot for slot, left in due.items() if left == 0]:
            del due[slot]
            layer.finish(slot)
        due = {slot: left - 1 for slot, left in due.items()}
        layer.note(Counter(ids))
        for expert, slot in layer.look():
            layer.begin(expert, slot)
            due[slot] = delay - 1
    return Replayed(layer.hits, layer.misses, layer.moves, layer.moves * expert_bytes)
