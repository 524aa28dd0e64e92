"""A run: make inputs, check everybody, let them take turns, and work out the ratios."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moefuse.bench import inputs, machine, timing, training
from moefuse.bench.contestants import (
    BLOCK,
    EXPERTS,
    LORA,
    ROUTE_PLAN,
    TRAINING,
    Contestant,
    in_numbers,
    ours,
    refusal,
    theirs,
)
from moefuse.bench.floor import Floor, Probe
from moefuse.bench.peers import Peer
from moefuse.bench.result import FLOOR, OURS, PLAIN, Result, Row
from moefuse.bench.shapes import Shape
from moefuse.ops._core.select import choose
from moefuse.types import name_of

#: label and share of the run that is done
Tick = Callable[[str, float], None]
#: in place of a contestant's number
_PROBE = -1


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        repeat: rounds per token count; None: as many as ``budget`` allows.
        budget: seconds of turns per token count.
        training: time forward and backward of the experts, all gradients, instead of the forward; of experts in blocks
            the step of adapters on them, beside the same step on numbers.
    """

    dtype: torch.dtype
    device: torch.device
    backend: str | None = None
    repeat: int | None = None
    budget: float = 5.0
    command: str = ""
    training: bool = False


def modes(device: torch.device) -> tuple[str, ...]:
    return ("graph", "eager") if device.type == "cuda" else ("wall",)


def held(shape: Shape, options: Options) -> Shape:
    """The shape whose layers must find room: adapters on blocks are timed beside the same weights in numbers."""
    return dataclasses.replace(shape, weights=None) if options.training else shape


@torch.no_grad()
def bench_shape(shape: Shape, tokens: Sequence[int], peers: Sequence[Peer], options: Options, tick: Tick) -> Result:
    """Ours, the peers and the floor on one layer of this shape, for each token count."""
    tick("measuring the floor", 0.0)
    limits = Floor.measure(options.dtype, options.device)
    return _bench(shape, tokens, peers, limits, [], options, tick)


@torch.no_grad()
def bench_formats(
    shapes: Sequence[Shape], tokens: Sequence[int], peers: Sequence[Peer], options: Options, tick: Tick
) -> list[Result]:
    """The same of one layer in several block formats, each taking turns with the layer in plain numbers.

    In training those numbers are the blocks' own.
    """
    dtype, device = options.dtype, options.device
    tick("measuring the floor", 0.0)
    limits, plain = Floor.measure(dtype, device), shapes[0].plain
    layers: list[inputs.Layer] = []
    if not options.training and inputs.fits(plain, dtype, device) is None:
        layers = inputs.make_layers(plain, dtype, device, inputs.layer_count(plain, dtype, device))
    results = []
    for step, shape in enumerate(shapes):
        name = "/".join(dict.fromkeys(shape.weights or ()))

        def advance(label: str, share: float, name: str = name, step: int = step) -> None:
            tick(f"{name}: {label}", (step + share) / len(shapes))

        results.append(_bench(shape, tokens, peers, limits, layers, options, advance))
        if not layers and not options.training:
            results[-1].notes.append(f"no room for the layer in {name_of(dtype)} beside the one in {name}")
    return results


def _bench(
    shape: Shape,
    tokens: Sequence[int],
    peers: Sequence[Peer],
    limits: Floor,
    plain: Sequence[inputs.Layer],
    options: Options,
    tick: Tick,
) -> Result:
    """``plain``: layers in numbers to take turns with, where this one is in blocks."""
    dtype, device = options.dtype, options.device
    tick("making weights", 0.05)
    layers = inputs.make_layers(shape, dtype, device, inputs.layer_count(held(shape, options), dtype, device))
    result = Result(
        title=shape.describe(),
        dtype=name_of(dtype),
        backend=choose("experts", layers[0].router, options.backend, shape.weights or ()).backend,
        command=options.command,
        machine=machine.describe(device),
        shape=dataclasses.asdict(shape),
        bits=shape.bits(dtype),
    )
    for step, T in enumerate(tokens):
        start, span = 0.1 + 0.9 * step / len(tokens), 0.9 / len(tokens)

        def advance(label: str, share: float, T: int = T, start: float = start, span: float = span) -> None:
            tick(f"T={T}: {label}", start + span * share)

        _at_tokens(result, T, layers, plain, peers, limits, options, advance)
    return result


def _at_tokens(
    result: Result,
    T: int,
    layers: list[inputs.Layer],
    plain: Sequence[inputs.Layer],
    peers: Sequence[Peer],
    limits: Floor,
    options: Options,
    tick: Tick,
) -> None:
    shape, dtype, device = layers[0].shape, options.dtype, options.device
    tick("making inputs", 0.0)
    slots = inputs.make_slots(layers, T, dtype, device)
    field = ours(layers[0], dtype, options.backend)
    scope = EXPERTS
    read, read_plain = (
        statistics.mean(s.active_bytes(slot.ids, dtype) for slot in slots) for s in (shape, shape.plain)
    )
    flops = float(shape.flops(T))
    if options.training:
        field, scope = [training.ours(layers[0], dtype, options.backend)], TRAINING
        if shape.weights is not None:
            field, scope = training.adapted(layers, dtype, options.backend), LORA
            read_plain *= 2
        read, flops = training.work(shape, slots, T, dtype)
    if plain:
        field += in_numbers(slots, plain, dtype, options.backend)
    rows: list[Row] = []
    for peer in peers:
        reason = refusal(peer, layers[0], T, dtype, device)
        if reason is None:
            field.append((training.theirs if options.training else theirs)(peer, layers, dtype))
        else:
            rows += [Row(T, peer.name, scope, "", note=reason)]
    measured, probed = measure(field, slots, T, options, limits.taking_part(read, flops), tick)
    rates = limits.rates(probed)
    least = rates.seconds(read, flops)
    order = {OURS: 0, PLAIN: 1}
    rows = sorted([*measured, *rows], key=lambda row: (order.get(row.name, 2), ("", *modes(device)).index(row.mode)))
    for row in rows:
        if row.scope in (BLOCK, EXPERTS, TRAINING, LORA) and row.seconds:
            mine = read_plain if row.name == PLAIN else read
            row.times_floor, row.read_bytes = row.seconds / rates.seconds(mine, flops), mine
            row.bytes_per_second = mine / row.seconds
            row.bandwidth_share = row.bytes_per_second / rates.bandwidth
    compare(rows)
    bound = f"{rates.bound(read, flops)}-bound"
    result.rows += [*rows, Row(T, FLOOR, scope, "", least, note=bound, times_floor=1.0, read_bytes=read)]
    result.rotation[T] = inputs.rotation(layers, slots, dtype, device)
    result.rates[T] = dataclasses.asdict(rates)


def measure(
    field: Sequence[Contestant],
    slots: Sequence[Any],
    T: int | None,
    options: Options,
    probes: Sequence[Probe],
    tick: Tick,
) -> tuple[list[Row], dict[str, float]]:
    """Check each contestant, then let those that are right take turns with the probes.

    Returns a row per contestant and mode, and the median seconds of each probe.
    """
    device, rotation = options.device, timing.drift(len(slots))
    turns: dict[tuple[int, str], timing.Turn] = {}
    rows: dict[tuple[int, str], Row] = {}
    for index, contestant in enumerate(field):
        tick(f"checking {contestant.name}, {contestant.scope}", 0.3 * index / len(field))
        verdict = _checked(contestant, slots[0], T, options)
        if verdict.note:
            rows[index, verdict.mode] = verdict
            continue
        _, seconds = timing.once(contestant.call, slots[-1], device)
        launches = peak = None
        if device.type == "cuda":
            launches, peak = timing.launches(contestant.call, slots[0]), timing.peak_bytes(contestant.call, slots[0])
        for mode in modes(device):
            row = rows[index, mode] = dataclasses.replace(verdict, mode=mode, launches=launches, peak_bytes=peak)
            if mode == "graph":
                _capture(contestant, slots, row, turns, index)
            elif mode == "eager":
                turns[index, mode] = timing.event_turn(contestant.call, slots)
            else:
                repeats = max(1, min(32, round(timing.SHORTEST_TURN / seconds)))
                # What reads no weights must not move the others on to weights that were just read.
                mine = timing.drift(len(slots)) if contestant.scope == ROUTE_PLAN else rotation
                turns[index, mode] = timing.wall_turn(contestant.call, slots, mine, repeats, device)
    for key in list(turns):
        try:
            turns[key]()
        except Exception as failure:  # memory, most likely: a whole turn is more than one call
            rows[key].note, rows[key].wrong = f"failed: {type(failure).__name__}: {_brief(failure)}", True
            del turns[key]
    turns |= {(_PROBE, probe.how): probe.turn() for probe in probes}
    samples = timing.interleave(turns, options.repeat, options.budget, lambda share: tick("timing", 0.3 + 0.7 * share))
    for key, values in samples.items():
        if key in rows:
            rows[key].seconds, rows[key].samples = statistics.median(values), len(values)
    probed = {how: statistics.median(values) for (index, how), values in samples.items() if index == _PROBE}
    return list(rows.values()), probed


def _checked(contestant: Contestant, slot: Any, T: int | None, options: Options) -> Row:
    """A row with the error; with a note where the contestant is wrong, or too slow to take turns."""
    row = Row(T, contestant.name, contestant.scope, "")
    try:
        got, seconds = timing.once(contestant.call, slot, options.device)
        error = contestant.error(got, slot)
    except Exception as failure:  # whatever a peer or a backend raises is a finding, not the end of the run
        row.note, row.wrong = f"failed: {type(failure).__name__}: {_brief(failure)}", True
        return row
    row.error_worst, row.error_rms = error.worst, error.rms
    if not error.within(contestant.tolerance):
        bound = contestant.tolerance
        row.wrong = True
        row.note = (
            f"wrong, so not timed: error {error.worst:.2g} (at most {bound.worst:.2g}), "
            f"rms {error.rms:.2g} (at most {bound.rms:.2g}); {error.where}"
        )
    elif modes(options.device) == ("wall",) and options.repeat is None and seconds > max(options.budget, 1.0):
        row.mode, row.seconds, row.samples = "wall", seconds, 1
        row.note = "one call: it takes longer than the whole budget"
    return row


def _capture(
    contestant: Contestant, slots: Sequence[Any], row: Row, turns: dict[tuple[int, str], timing.Turn], index: int
) -> None:
    if contestant.graph_refusal is not None:
        row.note = f"no graph: {contestant.graph_refusal}"
        return
    try:
        turn, replay = timing.graph_turn(contestant.call, slots)
        error = contestant.error(replay(), slots[0])
    except Exception as failure:
        row.note = f"no graph: {_brief(failure)}"
        return
    if error.within(contestant.tolerance):
        turns[index, "graph"] = turn
    else:
        row.note, row.wrong = f"wrong when replayed, so not timed: error {error.worst:.2g}", True


def compare(rows: list[Row]) -> None:
    """Give each of our rows that others have the like of their times over its own, in the same mode."""
    for row in rows:
        if row.name == OURS and row.seconds and row.scope != ROUTE_PLAN:
            others = [other for other in rows if other.name != OURS and other.mode == row.mode and other.seconds]
            row.faster_than = {
                other.name: other.seconds / row.seconds for other in others if other.seconds and other.name != PLAIN
            }
            plain = (other.seconds for other in others if other.name == PLAIN and other.scope == row.scope)
            row.over_plain = next((row.seconds / seconds for seconds in plain if seconds), None)


def _brief(failure: Exception) -> str:
    """First and last line: libraries put what matters at one end or the other."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()] or [type(failure).__name__]
    return " ... ".join(line[:160] for line in dict.fromkeys((lines[0], lines[-1])))
