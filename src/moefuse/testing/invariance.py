"""Whether a row's bits depend on that row and the weights alone: ``moefuse check --invariant``.

Every token of a case is run alone, in plain memory and on one thread. Then batches are drawn: which tokens, in what
order and how often, with rows of NaN and infinities between them, tensors that lie strangely in memory, another number
of threads, with gradients or without. Each row of each result, and each gradient of what belongs to a token, must have
the bits that it has alone. That covers every cut of tokens into batches: the pieces have the bits of the whole.

The batches of a case belong together: they share its kernels, whose compilation is most of the time on a GPU, and its
tokens' bits alone. Cases may be spread over processes.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

import moefuse
from moefuse import backends
from moefuse.testing import inputs as make
from moefuse.testing.cases import CASES, DTYPES, Case, call_op, dtypes_of
from moefuse.testing.poison import poisoned
from moefuse.testing.strange import FORMS
from moefuse.types import Activation, Routing, name_of

_TAIL = ("shared", "shared_gate", "shared_logit", "residual")
#: op -> its arguments whose first dimension is the token, or the sequence
_OWN = {
    "route": ("logits",),
    "gate": ("x",),
    "glu": ("gate_up", "up"),
    "grouped_linear": ("x",),
    "combine": ("y", "weights", *_TAIL),
    "experts": ("x", "ids", "weights", *_TAIL),
    "moe": ("x", *_TAIL),
    "linear": ("x", "residual"),
    "rope": ("q", "k", "v", "cos", "sin", "keys", "values"),
    "attend": ("q", "keys", "values", "mask"),
}
#: op -> what its gradients run
_BACKWARD = {
    "route": ("route_backward",),
    "gate": ("gate_backward",),
    "glu": ("glu_backward",),
    "grouped_linear": ("grouped_outer",),
    "combine": ("combine_backward",),
    "experts": ("experts_backward", "tail_backward"),
    "moe": ("gate_backward", "experts_backward", "tail_backward"),
    "linear": ("grouped_linear_transposed",),
}
#: what an op writes to is neither strided nor negated
_WRITTEN = ("keys", "values")
_PLAIN_FORMS = tuple(form for form in FORMS if form != "expanded")  # which changes values

#: sums longer than a kernel takes at once, and more columns than one task has
LARGE: tuple[Case, ...] = (
    Case("experts", "long", "sums over several depths", make.experts(9, 6, 2336, 1184, 3, tail=True)),
    Case("experts", "long_apart", "gate and up apart, biases",
         make.experts(7, 4, 1100, 1500, 2, apart=True, bias=True, activation="gelu_tanh")),
    Case("experts", "long_plain", "ungated", make.experts(5, 4, 1536, 2100, 2, activation=Activation("relu2", False))),
    Case("experts", "long_blocks", "Q4_K and Q6_K",
         make.experts(6, 4, 2304, 1280, 2, blocks=("Q4_K", "Q4_K", "Q6_K")), specs=("Q4_K", "Q6_K")),
    Case("experts", "whole", "whole tiles of every path on a GPU", make.experts(9, 8, 1024, 512, 2)),
    Case("experts", "whole_blocks", "likewise in Q4_K",
         make.experts(9, 8, 1024, 512, 2, blocks=("Q4_K", "Q4_K")), specs=("Q4_K",)),
    Case("moe", "long", "a router of several tasks", make.moe(6, 160, 1280, 64, Routing(top_k=8))),
    Case("linear", "long", "sums over several depths", make.linear(9, 2500, (700, None), bias=True, residual=True)),
    Case("linear", "long_blocks", "likewise in Q8_0", make.linear(5, 2304, (333, "Q8_0")), specs=("Q8_0",)),
    Case("grouped_linear", "long", "the up product", make.grouped_linear(8, 4, 900, 2100, 2, True, False)),
    Case("attend", "long_mask", "parts of places, and places left out",
         make.attend(3, 8, 2, 64, 900, 880, mask=True, sinks=True), gradients=False),
    Case("combine", "long", "wide rows",
         make.combine(7, 4, 3001, "inverse", "shared", "shared_logit", "residual", "norm_weight")),
)  # fmt: skip


class Parted:
    """A case taken apart: what belongs to a token, and what all of them share."""

    def __init__(self, case: Case, inputs: dict[str, Any]) -> None:
        self.op, given = case.op, {name: value for name, value in inputs.items() if value is not None}
        if self.op == "glu":
            given |= {name: given[name].reshape(-1, given[name].shape[-1]) for name in _OWN["glu"] if name in given}
        self.own: dict[str, Tensor] = {name: given.pop(name) for name in _OWN[self.op] if name in given}
        if self.op == "grouped_linear":
            self._part_rows(given.pop("plan"), given["gather"])
        if self.op == "combine":
            T, top_k = self.own["weights"].shape
            self.expert_major = given.pop("inverse", None) is not None
            self.own["y"] = self.own["y"].reshape(T, top_k, -1)
        if self.op == "rope":
            for name in ("cos", "sin"):
                self.own[name] = self.own[name].expand(self.own["q"].shape[0], *self.own[name].shape[1:])
        self.shared = given
        self.tokens = next(iter(self.own.values())).shape[0]

    def _part_rows(self, plan: moefuse.Plan, gather: bool) -> None:
        """Ids and rows of a grouped product, by token: a plan says nothing of a token alone."""
        T, E = plan.assignments // plan.top_k, plan.num_experts
        ids = torch.searchsorted(plan.offsets[1:].contiguous(), plan.inverse, right=True)
        self.own["ids"], self.num_experts = ids.to(torch.int32).clamp(max=E).view(T, plan.top_k), E
        x = self.own["x"]
        if x.shape[0] != T or not gather:
            x = x if gather else x[plan.inverse.long()]
            self.own["x"] = x.view(T, plan.top_k, x.shape[-1])

    def arguments(self, own: dict[str, Tensor], rng: torch.Generator) -> dict[str, Any]:
        """Arguments of the op for a batch, in any order that the op leaves to its caller."""
        found = {**self.shared, **own}
        if self.op == "grouped_linear":
            ids = found.pop("ids")
            plan = found["plan"] = moefuse.plan(ids, self.num_experts, backend=backends.REFERENCE)
            x = own["x"].flatten(0, -2)
            found["x"] = x if self.shared["gather"] else x[plan.order.long()]
        if self.op == "combine":
            found["y"] = own["y"].flatten(0, 1)
            if self.expert_major:
                order = torch.randperm(found["y"].shape[0], generator=rng)
                found["inverse"] = _sent(order.argsort().to(torch.int32), found["y"].device)
                found["y"] = found["y"][_sent(order, found["y"].device)]
        return found

    def rows(self, results: dict[str, Tensor], arguments: dict[str, Any]) -> dict[str, Tensor]:
        """Results by token."""
        if self.op != "grouped_linear":
            return results
        plan, out = arguments["plan"], results["out"]
        out = out if arguments["scatter"] else out[plan.inverse.long()]
        return {"out": out.view(-1, plan.top_k, out.shape[-1])}


@dataclass(frozen=True)
class Draw:
    """How one batch was drawn."""

    tokens: tuple[int, ...]
    #: places of the batch that hold rows of NaN and infinities
    hostile: tuple[int, ...] = ()
    strange: tuple[str, str] | None = None
    threads: int = 1
    gradients: bool = False
    #: places in front of a cache and behind it, which are not seen
    padding: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        strange = "" if self.strange is None else f", {self.strange[0]} {self.strange[1]}"
        padded = f", caches padded by {self.padding[0]} and {self.padding[1]}" if any(self.padding) else ""
        how = "with gradients" if self.gradients else "forward"
        rows = f"{len(self.tokens)} rows, {len(self.hostile)} of them hostile"
        return f"{rows}{strange}{padded}, {self.threads} threads, {how}"


def _ways(parted: Parted) -> list[tuple[str, str]]:
    """What may lie strangely in memory, and how."""
    written = _WRITTEN if parted.op == "rope" else ()
    return [
        (name, form) for name in parted.own for form in (("columns", "offset") if name in written else _PLAIN_FORMS)
    ]


def _draw(subject: Subject, most: int, rng: torch.Generator, threads: int) -> Draw:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    few, size = number(0, 2), 1
    size = number(1, min(5, most)) if few == 0 else number(1, min(24, most)) if few == 1 else number(1, most)
    tokens = tuple(torch.randint(subject.parted.tokens, (size,), generator=rng).tolist())
    hostile: tuple[int, ...] = ()
    if number(0, 1):
        hostile = tuple((torch.randint(4, (size,), generator=rng) == 0).nonzero()[:, 0].tolist())
    strange = subject.strange[number(0, len(subject.strange) - 1)] if number(0, 1) else None
    padded = subject.parted.op == "attend" and number(0, 1)
    padding = (number(0, 40), number(0, 40)) if padded else (0, 0)
    gradients = subject.differentiable and number(0, 1) == 0
    return Draw(tokens, hostile, strange, number(1, threads), gradients, padding)


def _hostile(t: Tensor, places: tuple[int, ...], name: str, rng: torch.Generator) -> Tensor:
    """The batch with these rows replaced by what should never show elsewhere."""
    if not places:
        return t
    t, where = t.clone(), _sent(torch.tensor(places), t.device)
    shape = (len(places), *t.shape[1:])
    if t.is_floating_point():
        bad = torch.tensor((torch.nan, torch.inf, -torch.inf, 3e38 if t.dtype != torch.float16 else 6e4))
        drawn = bad[torch.randint(4, (len(places),), generator=rng)].view(-1, *(1,) * (t.dim() - 1)).expand(shape)
    elif name == "ids":
        drawn = torch.randint(-2, 1100, shape, generator=rng)
    else:
        return t
    t[where] = _sent(drawn.to(t.dtype), t.device)
    return t


def _padded(own: dict[str, Tensor], shared: dict[str, Any], padding: tuple[int, int]) -> dict[str, Any]:
    """A cache with more places, which the mask and the position leave out; of `moefuse.attend`."""
    before, behind = padding
    keys = own["keys"]
    B, _, L, _ = keys.shape
    mask = own.get("mask", torch.ones((B, L), dtype=torch.bool, device=keys.device))

    def wider(t: Tensor) -> Tensor:
        junk = [t.new_full((*t.shape[:2], more, t.shape[3]), torch.nan) for more in padding]
        return torch.cat((junk[0], t, junk[1]), 2)

    found: dict[str, Any] = {"keys": wider(keys), "values": wider(own["values"])}
    found["position"] = shared["position"] + before
    if before or "mask" in own:
        found["mask"] = torch.cat((mask.new_zeros(B, before), mask, mask.new_ones(B, behind)), 1)
    return found


def _strange(value: Any, form: str) -> Any:
    if not isinstance(value, Tensor) or (form == "negated" and value.dtype == torch.bool):
        return value
    return FORMS[form](value)


class Subject:
    """One case on one backend, in one element type."""

    def __init__(self, case: Case, dtype: torch.dtype, backend: str, device: str, seed: int) -> None:
        self.case, self.dtype, self.backend, self.device = case, dtype, backend, device
        self.parted = Parted(case, make.moved(case.inputs(seed, dtype), device))
        row = backends.find(backend)
        assert row is not None, "plain torch is not invariant"
        needs = (*_BACKWARD.get(case.op, ("none",)), *(["grouped_linear_transposed"] if case.specs else []))
        keeps = row.saves() or case.op not in ("experts", "moe")
        self.differentiable = case.gradients and keeps and set(needs) <= set(row.load().OPS)
        self._machine = _rows_apart if backend == "triton" and device in row.emulated() else nullcontext
        self._seed = seed
        #: kernels are compiled anew for each: of who compiles, one for each case, by the seed
        self.strange = _ways(self.parted)
        if backend != "cpu":
            drawn = torch.Generator().manual_seed(seed + sum(case.id.encode()))
            self.strange = [self.strange[int(torch.randint(len(self.strange), (), generator=drawn))]]
        self._given: dict[str, Tensor] = {}
        #: name of a result -> its bits of each token alone; and which tokens were run, without gradients and with
        self._bits: dict[str, Tensor] = {}
        self._run: tuple[set[int], set[int]] = (set(), set())

    def run(self, draw: Draw, rng: torch.Generator) -> dict[str, Tensor]:
        """Results by token, and gradients of what is a token's own."""
        index = _sent(torch.tensor(draw.tokens), self.device)
        own = {name: t.index_select(0, index) for name, t in self.parted.own.items()}
        own = {name: _hostile(t, draw.hostile, name, rng) for name, t in own.items()}
        leaves = {}
        if draw.gradients:
            leaves = {name: t.requires_grad_() for name, t in own.items() if t.is_floating_point()}
        with torch.set_grad_enabled(draw.gradients):
            arguments = self.parted.arguments(own, rng)
            if any(draw.padding):
                arguments |= _padded(own, arguments, draw.padding)
            if draw.strange is not None:
                name, form = draw.strange
                arguments = {n: _strange(value, form) if n == name else value for n, value in arguments.items()}
            before = torch.get_num_threads()
            torch.set_num_threads(draw.threads)
            try:
                with moefuse.invariant(), poisoned(), self._machine():
                    results = call_op(self.case.op, arguments, self.backend)
                results = self.parted.rows(results, arguments)
                if not draw.gradients:
                    return results
                given = {name: self._gradient(name, t, draw) for name, t in results.items() if t.requires_grad}
                with poisoned(), self._machine():
                    grads = torch.autograd.grad(
                        [results[name] for name in given], list(leaves.values()), list(given.values()),
                        allow_unused=True,
                    )  # fmt: skip
            finally:
                torch.set_num_threads(before)
        found = {f"gradient of {name}": t for name, t in zip(leaves, grads, strict=True) if t is not None}
        return {name: t.detach() for name, t in results.items()} | found

    def _gradient(self, name: str, result: Tensor, draw: Draw) -> Tensor:
        """What comes back to each row of a result: the same wherever the token stands."""
        if name not in self._given:
            drawn = torch.Generator().manual_seed(self._seed + len(name))
            self._given[name] = torch.randn((self.parted.tokens, *result.shape[1:]), generator=drawn).to(result)
        given = self._given[name][_sent(torch.tensor(draw.tokens), self.device)]
        given[_sent(torch.tensor(draw.hostile, dtype=torch.int64), self.device)] = torch.nan
        return given

    def _learn(self, tokens: Iterable[int], gradients: bool) -> None:
        """Run tokens alone that were not yet, and keep their bits."""
        for token in sorted(set(tokens) - self._run[gradients]):
            found = self.run(Draw((token,), gradients=gradients), torch.Generator())
            for name, row in found.items():
                # With gradients or without, the result is one.
                if name.startswith("gradient") == gradients:
                    bits = _bits(row)
                    known = self._bits.get(name)
                    if known is None:
                        known = self._bits[name] = bits.new_zeros((self.parted.tokens, bits.shape[1]))
                    known[token] = bits[0]
            self._run[gradients].add(token)

    def compare(self, draw: Draw, rng: torch.Generator) -> tuple[dict[str, int], int]:
        """Rows of each result that have other bits than alone, where there are any; and how many were compared."""
        got = self.run(draw, rng)
        sound = torch.ones(len(draw.tokens), dtype=torch.bool)
        sound[list(draw.hostile)] = False
        if not sound.any():
            return {}, 0
        places = sound.nonzero()[:, 0]
        tokens = torch.tensor(draw.tokens)[places]
        for gradients in (False, True)[: 1 + draw.gradients]:
            self._learn(tokens.tolist(), gradients)
        places, tokens = _sent(places, self.device), _sent(tokens, self.device)
        wrong = {}
        for name, result in got.items():
            rows = _bits(result)[places]
            known = self._bits.get(name, rows[:0, :0])
            fits = known.shape[1] == rows.shape[1]
            wrong[name] = (rows != known[tokens]).any(1).sum() if fits else places.new_tensor(len(places))
        counted = torch.stack(list(wrong.values())).tolist()  # the one wait for the device
        return {n: c for n, c in zip(wrong, counted, strict=True) if c}, len(places) * len(wrong)


@contextmanager
def _rows_apart() -> Iterator[None]:
    """Triton's interpreter multiplies tiles by numpy, whose sums differ with a row's place in a tile on some
    processors. Inside, each row is a product of its own, as on tensor cores."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    whole = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        if a.data.ndim != 2:
            return whole(self, a, b, d, *how)

        def row(t: Any, i: int) -> Any:
            return handle(t.data[i : i + 1], t.dtype)

        rows = [whole(self, row(a, i), b, row(d, i), *how) for i in range(a.data.shape[0])]
        return handle(numpy.concatenate([each.data for each in rows]), d.dtype.scalar)

    builder.create_dot = create_dot
    try:
        yield
    finally:
        builder.create_dot = whole


def _sent(t: Tensor, device: torch.device | str) -> Tensor:
    """A copy on the device, without a wait for what runs there."""
    return t.to(device, non_blocking=True)


def _bits(t: Tensor) -> Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.detach().contiguous().view(whole).reshape(t.shape[0], -1)


@dataclass(frozen=True)
class Comparison:
    """One batch against its tokens alone."""

    case: Case
    dtype: torch.dtype
    backend: str
    device: str
    seed: int
    draw: Draw
    differing: dict[str, int]
    #: rows of results that were compared
    rows: int

    @property
    def passed(self) -> bool:
        return not self.differing

    def describe(self) -> str:
        """The batch that differs, for a person."""
        names = ", ".join(f"{name} in {rows}" for name, rows in self.differing.items())
        where = f"{self.case.id} on {self.backend} ({self.device}), {name_of(self.dtype)}, seed {self.seed}"
        return f"{where}: {self.draw}: rows that differ from the token alone: {names}"


def cases_for(backend: str, device: str, cases: Iterable[Case] = CASES) -> list[Case]:
    """Those with tokens that a backend runs; large ones where kernels are compiled, not interpreted."""
    row = backends.find(backend)
    emulated = row is not None and device in row.emulated()
    given = [*cases, *(() if emulated or cases is not CASES else LARGE)]
    return [case for case in given if case.op in _OWN and "no_token" not in case.name and case.name != "empty"]


@dataclass(frozen=True)
class Share:
    """The batches of one case on one backend in one element type; ``most``: rows of a batch."""

    case: Case
    dtype: torch.dtype
    backend: str
    device: str
    seed: int
    batches: int
    most: int
    threads: int

    def compare(self) -> Iterator[Comparison]:
        subject = Subject(self.case, self.dtype, self.backend, self.device, self.seed)
        first = self.seed * 100_003 + 997 * sum(self.case.id.encode())
        for number in range(first, first + self.batches):
            rng = torch.Generator().manual_seed(number)
            draw = _draw(subject, self.most, rng, self.threads if self.device == "cpu" else 1)
            known = self.case, self.dtype, self.backend, self.device, self.seed, draw
            yield Comparison(*known, *subject.compare(draw, rng))

    def tally(self, until: float | None = None) -> Tally:
        """What becomes of them, up to a time of `time.monotonic`; a call that fails is a batch that differs."""
        found = Tally(self.backend, name_of(self.dtype), self.case.op, self.case.id)
        try:
            for one in self.compare():
                found.batches, found.rows = found.batches + 1, found.rows + one.rows
                if not one.passed:
                    found.differing.append(one.describe())
                if until is not None and time.monotonic() > until:
                    break
        except Exception as error:
            found.batches += 1
            found.differing.append(f"{self.case.id}, {found.dtype}: {type(error).__name__}: {error}")
        return found


@dataclass
class Tally:
    """What became of a share."""

    backend: str
    dtype: str
    op: str
    case: str
    batches: int = 0
    rows: int = 0
    differing: list[str] = field(default_factory=list)


def shares(
    targets: Iterable[tuple[str, str]],
    batches: int,
    seed: int,
    cases: Iterable[Case] = CASES,
    dtypes: Iterable[torch.dtype] = DTYPES,
    most: int | None = None,
) -> list[Share]:
    """So many batches on each target in each element type, as many of each case or one more."""
    cases = tuple(cases) if cases is not CASES else CASES
    threads, found = max(2, torch.get_num_threads() + 2), list[Share]()
    for backend, device in targets:
        row = backends.find(backend)
        slow = row is not None and device in row.emulated()
        rows = most or (20 if slow else 130 if device == "cpu" else 1500)
        for dtype in dtypes:
            here = [case for case in cases_for(backend, device, cases) if dtype in dtypes_of(case, backend)]
            order = torch.randperm(len(here), generator=torch.Generator().manual_seed(seed)).tolist()
            for place, which in enumerate(order):
                some = batches // len(here) + (place < batches % len(here))
                if some:
                    found.append(Share(here[which], dtype, backend, device, seed, some, rows, threads))
    return found


def comparisons(
    targets: Iterable[tuple[str, str]],
    batches: int,
    seed: int,
    cases: Iterable[Case] = CASES,
    dtypes: Iterable[torch.dtype] = DTYPES,
    most: int | None = None,
) -> Iterator[Comparison]:
    """The batches of all shares, one after the other."""
    for share in shares(targets, batches, seed, cases, dtypes, most):
        yield from share.compare()


def tallies(work: Sequence[Share], processes: int = 1, until: float | None = None) -> Iterator[Tally]:
    """Each share's, as they end; of those that are not done ``until`` then, what is."""
    if processes == 1:
        yield from (share.tally(until) for share in work)
        return
    # What compiles longest begins first.
    ordered = sorted(work, key=lambda share: -len(share.case.specs) * share.dtype.itemsize)
    # What forks must not have asked a GPU for anything, and importing this package runs a backward pass.
    forks = sys.platform == "linux" and not torch.cuda.is_available()
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        fields = ("dtype", "backend", "device", "seed", "batches", "most", "threads")
        sent = [(share.case.id, *(getattr(share, name) for name in fields), until) for share in ordered]
        for future in as_completed([pool.submit(_tally, *each) for each in sent]):
            yield future.result()


def _tally(case: str, *share: Any) -> Tally:
    """In a process of its own, where a case comes by its name."""
    *known, until = share
    found = next(each for each in (*CASES, *LARGE) if each.id == case)
    if until is not None and time.monotonic() > until:
        return Tally(known[1], name_of(known[0]), found.op, case)
    return Share(found, *known).tally(until)
