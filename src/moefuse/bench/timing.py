"""How long a call takes: turns that interleave, medians, CUDA events and CUDA graphs.

A turn runs a contestant once or more and returns seconds per call. Contestants take turns round by round, so that
whatever else the machine is doing hits all of them alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

Call = Callable[[Any], Any]
Turn = Callable[[], float]
Key = TypeVar("Key", bound=Hashable)
_cuda: Any = torch.cuda  # its constructors are untyped

#: a turn shorter than this repeats the call: the clock and a cold interpreter would be a visible part of it
SHORTEST_TURN = 5e-3
MIN_ROUNDS = 5
MAX_ROUNDS = 500


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def once(call: Call, slot: Any, device: torch.device) -> tuple[Any, float]:
    """The result of a single call and its seconds, whatever the device."""
    synchronize(device)
    start = time.perf_counter()
    result = call(slot)
    synchronize(device)
    return result, time.perf_counter() - start


def drift(slots: int) -> Iterator[int]:
    """Every slot in turn, each cycle starting one later: no contestant is tied to one slot, and none repeats soon.

    >>> list(itertools.islice(drift(3), 7))
    [0, 1, 2, 1, 2, 0, 2]
    """
    for start in itertools.count():
        yield from ((start + step) % slots for step in range(slots))


def wall_turn(call: Call, slots: Sequence[Any], rotation: Iterator[int], repeats: int, device: torch.device) -> Turn:
    """Wall clock of ``repeats`` calls. Contestants share ``rotation``: none finds in cache what another just read."""

    def turn() -> float:
        mine = [slots[next(rotation)] for _ in range(repeats)]
        start = time.perf_counter()
        for slot in mine:
            call(slot)
        synchronize(device)
        return (time.perf_counter() - start) / repeats

    return turn


def _between_events(run: Callable[[], Any], calls: int) -> float:
    start, end = (_cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def event_turn(call: Call, slots: Sequence[Any]) -> Turn:
    """One call per slot, launched one after another, between two CUDA events."""

    def run() -> None:
        for slot in slots:
            call(slot)

    return lambda: _between_events(run, len(slots))


def graph_turn(call: Call, slots: Sequence[Any]) -> tuple[Turn, Callable[[], Any]]:
    """One call per slot, all captured in one CUDA graph, as a model's decode step is.

    A graph of one layer would carry the graph's own launch (4 us on an H200) and read a third too slow at T=1.
    Also returns a function that replays the graph and gives the first slot's result, to be checked.
    """
    side = _cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for slot in slots:
            call(slot)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = call(slots[0])
        for slot in slots[1:]:
            call(slot)

    def replay() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return first

    return lambda: _between_events(graph.replay, len(slots)), replay


def interleave(
    turns: Mapping[Key, Turn], repeat: int | None, budget: float, tick: Callable[[float], None]
) -> dict[Key, list[float]]:
    """Rounds of turns until ``repeat`` rounds are done, or ``budget`` seconds are spent; samples per contestant."""
    samples: dict[Key, list[float]] = {key: [] for key in turns}
    start = time.perf_counter()
    for done in itertools.count(1):
        for key, turn in turns.items():
            samples[key].append(turn())
        spent = time.perf_counter() - start
        if repeat is not None:
            tick(done / repeat)
            if done >= repeat:
                return samples
        else:
            tick(min(1.0, max(spent / budget, done / MAX_ROUNDS) if done >= MIN_ROUNDS else done / MIN_ROUNDS / 2))
            if done >= MAX_ROUNDS or (done >= MIN_ROUNDS and spent >= budget):
                return samples
    raise AssertionError("unreachable")


def peak_bytes(call: Call, slot: Any) -> int:
    """The most memory one call holds on the GPU at a time beyond what was there, its results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call(slot)
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def launches(call: Call, slot: Any) -> int:
    """Kernels, copies and fills that one call puts on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call(slot)
        torch.cuda.synchronize()
    events: Any = profile.events()
    return sum(event.device_type.name == "CUDA" and not event.is_user_annotation for event in events)
