"""Search the tiles of a layer's products, or of a linear, on a card: small steps from the built-in tile that pay."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import moefuse
from moefuse.bench import check, inputs, machine, timing
from moefuse.bench.contestants import EXPERTS, ours
from moefuse.bench.floor import BEYOND_CACHE
from moefuse.bench.shapes import Shape
from moefuse.ops._core import select
from moefuse.quant.formats import format_of
from moefuse.quant.tensor import QuantTensor, format_in
from moefuse.testing.cases import tolerance_of
from moefuse.testing.compare import Tolerance, difference
from moefuse.testing.random_blocks import random_blocks
from moefuse.types import Activation

#: a tile must be this much faster to take another's place: runs differ by 1 to 2 percent
_GAIN = 0.97
#: float32 sums that one thread may hold; past this they spill
_MOST_SUMS = 128
_ROUNDS = 9
#: of a linear in one graph
_MOST_WEIGHTS = 256
#: least and most of what a field may become; ``stages`` goes by one, the rest by doubling
_LIMITS = {"m": (16, 256), "n": (16, 256), "k": (16, 256), "warps": (1, 16), "stages": (1, 8)}
_DECODE_LIMITS = _LIMITS | {"m": (1, 1), "n": (1, 64), "k": (32, 1024)}
_LINEAR_LIMITS = _LIMITS | {"n": (1, 256), "k": (32, 2048)}
#: the values of the largest block
_STRIP = 256


class Trial(Protocol):
    """One token count on a device."""

    def results(self) -> Sequence[Tensor]:
        """What the experts give, on inputs that stay the same."""

    def seconds(self) -> float:
        """How long one layer's experts take."""

    @property
    def tolerance(self) -> Tolerance:
        """How far a right result may be from the exact one."""


@dataclass(frozen=True)
class Finding:
    """What became of one product at one token count."""

    tokens: int
    product: str
    old: dict[str, Any]
    old_seconds: float
    new: dict[str, Any]
    new_seconds: float
    tried: int
    wrong: int
    failed: int

    @property
    def gain(self) -> float:
        """How many times faster all of the experts are."""
        return self.old_seconds / self.new_seconds


def products(shape: Shape, tokens: int, dtype: torch.dtype) -> list[Any]:
    """The products of a layer whose tiles are looked for."""
    from moefuse.backends.triton.runtime.tiles import DECODE_TOKENS
    from moefuse.backends.triton.runtime.tuned import Product

    up, down = map(format_in, shape.weights) if shape.weights else ("", "")
    decode = "decode " if tokens <= DECODE_TOKENS else ""
    E, H, I = shape.experts, shape.hidden, shape.intermediate
    common = (shape.top_k, tokens, dtype.itemsize)
    gated = Activation(shape.activation).gated
    return [
        Product(f"{decode}up", E, I, H, *common, gated, up),
        Product(f"{decode}down", E, H, I, *common, False, down),
    ]


@dataclass(frozen=True)
class Linear:
    """A weight ``[columns, inputs]`` of `moefuse.linear`, or several of one format side by side; None: numbers."""

    columns: int
    inputs: int
    spec: str | None = None

    def describe(self) -> str:
        return f"linear: {self.columns} columns of {self.inputs}" + (f" in {self.spec}" if self.spec else "")

    def product(self, tokens: int, dtype: torch.dtype) -> Any:
        from moefuse.backends.triton.runtime.tuned import Product

        kind = format_in(self.spec) if self.spec else ""
        return Product("linear", 1, self.columns, self.inputs, 1, tokens, dtype.itemsize, False, kind)


def has_tile(product: Any, shape: Shape, device: torch.device) -> bool:
    """Whether there is one to look for: the product that Hopper takes for many rows has none."""
    from moefuse.backends.triton import grouped_linear

    hopper = grouped_linear.hopper
    if hopper is None or shape.bias:
        return True
    if product.gated and shape.layout != "halves" and not product.format:
        return True
    sizes = product.E, product.N, product.K, product.itemsize, product.gated, product.format != ""
    return not (hopper.is_hopper(device) and hopper.fits(product.load, *sizes))


def neighbours(product: Any, tile: Any, device: torch.device) -> Iterator[Any]:
    """Tiles one step away that the card can hold: a size doubled or halved, a stage more or less, a switch turned."""
    linear = product.role == "linear"
    limits = _LINEAR_LIMITS if linear else _DECODE_LIMITS if product.decodes else _LIMITS
    for field in dataclasses.fields(tile):
        value = getattr(tile, field.name)
        if product.format and field.name == "k" and not product.decodes and not (linear and product.T == 1):
            continue  # a strip of blocks
        if linear and field.name in ("m", "copy_engine"):
            continue  # all rows, by plain loads
        if isinstance(value, bool):
            steps: list[Any] = [not value]
        elif field.name == "stages":
            steps = [value + 1, value - 1]
        else:
            steps = [value * 2, value // 2]
        least, most = limits.get(field.name, (0, 256))
        if product.format and field.name == "k":
            least = _STRIP
        for step in steps:
            made = dataclasses.replace(tile, **{field.name: step})
            if least <= step <= most and _sums(product, made) <= _MOST_SUMS and product.fits(made, device):
                yield made


def _sums(product: Any, tile: Any) -> float:
    """Float32 sums per thread."""
    each: int = tile.m * tile.n
    if product.decodes or (product.role == "linear" and product.T == 1):
        each = tile.n * (_STRIP if product.format else tile.k) * (product.top_k if product.role == "decode down" else 1)
    threads: int = 32 * tile.warps
    return each * (2 if product.gated else 1) / threads


def search(
    product: Any,
    trial: Trial,
    device: torch.device,
    seconds: float,
    clock: Callable[[], float],
    tick: Callable[[], Any],
) -> tuple[Any, Finding]:
    """Climb from the built-in tile until no neighbour is faster, or the time is over.

    Every result is held against the built-in tile's, twice: a tile that is wrong, or not always the same, is dropped.
    """
    from moefuse.backends.triton.runtime.tuned import trying

    def using(tile: Any, measure: Callable[[], Any]) -> Any:
        with trying(product, tile):
            select.forget()  # recorded launches have a tile in them
            return measure()

    end = clock() + seconds
    built_in = best = product.built_in(device)
    want = using(built_in, trial.results)
    old = fastest = using(built_in, trial.seconds)
    seen, wrong, failed, climbing = {built_in}, 0, 0, True
    while climbing:
        climbing = False
        for tile in neighbours(product, best, device):
            if tile in seen or clock() >= end:
                continue
            seen.add(tile)
            tick()
            try:
                got = using(tile, trial.results)
                if not _agree(got, want, trial.tolerance) or not _same(got, using(tile, trial.results)):
                    wrong += 1
                    continue
                taken = using(tile, trial.seconds)
            except Exception:  # more registers or memory than the card has: no such tile
                failed += 1
                continue
            if taken < _GAIN * fastest:
                best, fastest, climbing = tile, taken, True
                break
    if best != built_in:
        # Once more, one right after the other: the card may have warmed up since.
        old, fastest = using(built_in, trial.seconds), using(best, trial.seconds)
        if fastest >= _GAIN * old:
            best, fastest = built_in, old
    select.forget()
    before, after = dataclasses.asdict(built_in), dataclasses.asdict(best)
    finding = Finding(product.T, product.name, before, old, after, fastest, len(seen) - 1, wrong, failed)
    return best, finding


def _agree(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: Tolerance) -> bool:
    """Both may be off by the tolerance, in opposite directions."""
    both = Tolerance(2 * tolerance.worst, 2 * tolerance.rms, tolerance.reason)
    return all(difference(have, goal).within(both) for have, goal in zip(got, want, strict=True))


def _same(got: Sequence[Tensor], again: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, got, again))


class OnCard:
    """The experts of some layers on a CUDA device, in one graph, as a decode step has them."""

    def __init__(self, layers: list[inputs.Layer], tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = inputs.make_slots(layers, tokens, dtype, device)
        self.experts = next(c for c in ours(layers[0], dtype, "triton") if c.scope == EXPERTS)
        self.tolerance = check.tile_tolerance(layers[0], dtype)
        error = self.experts.error(self.experts.call(self.slots[0]), self.slots[0])
        if not error.within(self.experts.tolerance):
            raise ValueError(f"the built-in tiles give a wrong result, so none are searched: {error.where}")

    def results(self) -> list[Tensor]:
        return [self.experts.call(slot) for slot in self.slots[:2]]

    def seconds(self) -> float:
        turn, _ = timing.graph_turn(self.experts.call, self.slots)
        return statistics.median(turn() for _ in range(_ROUNDS))


def tune_all(
    shapes: Sequence[Shape],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    tick: Callable[[str, float], None],
) -> tuple[list[Finding], dict[str, Any]]:
    """`tune` on a layer in several formats, one after the other, each with its share of the time that is left."""
    start, findings = time.perf_counter(), []
    found: dict[str, Any] = {}
    for step, shape in enumerate(shapes):

        def advance(label: str, share: float, step: int = step, shape: Shape = shape) -> None:
            name = f"{'/'.join(dict.fromkeys(shape.weights))}: " if shape.weights else ""
            tick(f"{name}{label}", (step + share) / len(shapes))

        left = max(0.0, start + seconds - time.perf_counter()) / (len(shapes) - step)
        mine, tiles = tune(shape, tokens, dtype, device, left, advance)
        findings += mine
        found |= tiles
    return findings, found


class LinearOnCard:
    """`moefuse.linear` on a CUDA device, as many weights in one graph as the cache cannot hold."""

    def __init__(self, linear: Linear, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        rng = torch.Generator().manual_seed(23)
        N, K, spec = linear.columns, linear.inputs, linear.spec
        size = N * K * dtype.itemsize if spec is None else N * format_of(format_in(spec)).row_bytes(K)
        count = max(inputs.GRAPH_LAYERS, min(_MOST_WEIGHTS, -(-BEYOND_CACHE * machine.cache_bytes(device) // size)))
        one: Tensor | QuantTensor = torch.randn((N, K), generator=rng).mul_(K**-0.5).to(dtype)
        if spec is not None:
            one = random_blocks(spec, (N, K), rng, K**-0.5)
        x = torch.randn((tokens, K), generator=rng).to(device, dtype)
        # Made here, so that each is a copy of its own there.
        self.slots = [(x, one.to(device)) for _ in range(count)]
        self.tolerance = tolerance_of("linear", "out", torch.empty(0), dtype, blocks=spec is not None)

    def results(self) -> list[Tensor]:
        return [moefuse.linear(*slot, backend="triton") for slot in self.slots[:2]]

    def seconds(self) -> float:
        turn, _ = timing.graph_turn(lambda slot: moefuse.linear(*slot, backend="triton"), self.slots)
        return statistics.median(turn() for _ in range(_ROUNDS))


@torch.no_grad()
def tune_linear(
    linears: Sequence[Linear],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    tick: Callable[[str, float], None],
) -> tuple[list[Finding], dict[str, Any]]:
    """`tune` of `moefuse.linear` on weights like these, for few tokens."""
    due = [(linear, count) for linear in linears for count in tokens]
    start, findings = time.perf_counter(), []
    found: dict[str, Any] = {}
    for done, (linear, count) in enumerate(due):
        product, label = linear.product(count, dtype), f"{linear.describe()}, T={count}"
        tick(label, done / len(due))
        left = max(0.0, start + seconds - time.perf_counter()) / (len(due) - done)
        mine, step = LinearOnCard(linear, count, dtype, device), functools.partial(tick, label, done / len(due))
        tile, finding = search(product, mine, device, left, time.perf_counter, step)
        findings.append(finding)
        found[product.name] = None if tile == product.built_in(device) else tile
    return findings, found


@torch.no_grad()
def tune(
    shape: Shape,
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    tick: Callable[[str, float], None],
    *,
    trial: Callable[[int], Trial] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Finding], dict[str, Any]]:
    """Look for faster tiles of a layer's two products at each token count, for about ``seconds`` in all.

    Returns what became of each product, and by its name the tile to keep, None for the built-in one.
    """
    from moefuse.backends.triton.runtime.tuned import trying

    if trial is None:
        layers = inputs.make_layers(shape, dtype, device, inputs.layer_count(shape, dtype, device))

        def trial(count: int) -> Trial:
            return OnCard(layers, count, dtype, device)

    start, findings = clock(), []
    found: dict[str, Any] = {}
    searched = {c: [p for p in products(shape, c, dtype) if has_tile(p, shape, device)] for c in tokens}
    names = dict.fromkeys(product.name for some in searched.values() for product in some)
    for count in tokens:
        due = [product for product in searched[count] if product.name not in found]
        if not due:
            continue
        tick(f"T={count}: making inputs", len(found) / len(names))
        mine = trial(count)
        with ExitStack() as kept:
            for product in due:
                share, label = len(found) / len(names), f"T={count}: {product.role}"
                left = max(0.0, start + seconds - clock()) / (len(names) - len(found))
                tile, finding = search(product, mine, device, left, clock, functools.partial(tick, label, share))
                findings.append(finding)
                found[product.name] = None if tile == product.built_in(device) else tile
                kept.enter_context(trying(product, tile))
    return findings, found
