"""Whether a row's bits depend on that row and the weights alone: ``moefuse check --invariant``.

Every token of a case is run alone, in plain memory and on one thread. Then batches are drawn: which tokens, in what
order and how often, with rows of NaN and infinities between them, tensors that lie strangely in memory, another number
of threads, with gradients or without. Each row of each result, and each gradient of what belongs to a token, must have
the bits that it has alone. That covers every cut of tokens into batches: the pieces have the bits of the whole.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
                found["inverse"] = order.argsort().to(torch.int32).to(found["y"].device)
                found["y"] = found["y"][order.to(found["y"].device)]
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


def _draw(parted: Parted, differentiable: bool, most: int, rng: torch.Generator, threads: int) -> Draw:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    few, size = number(0, 2), 1
    size = number(1, min(5, most)) if few == 0 else number(1, min(24, most)) if few == 1 else number(1, most)
    tokens = tuple(torch.randint(parted.tokens, (size,), generator=rng).tolist())
    hostile: tuple[int, ...] = ()
    if number(0, 1):
        hostile = tuple(place for place in range(size) if number(0, 3) == 0)
    strange = None
    if number(0, 1):
        names = list(parted.own)
        name = names[number(0, len(names) - 1)]
        forms = ("columns", "offset") if name in _WRITTEN and parted.op == "rope" else _PLAIN_FORMS
        strange = name, forms[number(0, len(forms) - 1)]
    padding = (number(0, 40), number(0, 40)) if parted.op == "attend" and number(0, 1) else (0, 0)
    gradients = differentiable and number(0, 1) == 0
    return Draw(tokens, hostile, strange, number(1, threads), gradients, padding)


def _hostile(t: Tensor, places: tuple[int, ...], name: str, rng: torch.Generator) -> Tensor:
    """The batch with these rows replaced by what should never show elsewhere."""
    if not places:
        return t
    t = t.clone()
    for place in places:
        if t.is_floating_point():
            bad = (torch.nan, torch.inf, -torch.inf, 3e38 if t.dtype != torch.float16 else 6e4)
            t[place] = bad[int(torch.randint(4, (), generator=rng))]
        elif name == "ids":
            t[place] = torch.randint(-2, 1100, t[place].shape, generator=rng).to(t)
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
        self._alone: dict[tuple[int, bool], dict[str, Tensor]] = {}

    def run(self, draw: Draw, rng: torch.Generator) -> dict[str, Tensor]:
        """Results by token, and gradients of what is a token's own."""
        index = torch.tensor(draw.tokens, device=self.device)
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
        drawn = torch.Generator().manual_seed(self._seed + len(name))
        each = torch.randn((self.parted.tokens, *result.shape[1:]), generator=drawn)
        given = each[list(draw.tokens)]
        for place in draw.hostile:
            given[place] = torch.nan
        return given.to(result)

    def alone(self, token: int, gradients: bool) -> dict[str, Tensor]:
        key = token, gradients
        if key not in self._alone:
            self._alone[key] = self.run(Draw((token,), gradients=gradients), torch.Generator())
        return self._alone[key]

    def compare(self, draw: Draw, rng: torch.Generator) -> dict[str, int]:
        """Rows of each result that have other bits than alone; empty where all are the same."""
        got = self.run(draw, rng)
        sound = [place for place in range(len(draw.tokens)) if place not in draw.hostile]
        tokens = sorted({draw.tokens[place] for place in sound})
        numbers = {token: number for number, token in enumerate(tokens)}
        which = torch.tensor([numbers[draw.tokens[place]] for place in sound], device=self.device)
        differing: dict[str, int] = {}
        for name, result in got.items() if sound else ():
            # With gradients or without, the result is one.
            alone = [self.alone(token, name.startswith("gradient")).get(name) for token in tokens]
            known = [_bits(row) for row in alone if row is not None]
            rows = _bits(result[torch.tensor(sound, device=self.device)])
            wrong = len(sound) if len(known) < len(tokens) else int((rows != torch.cat(known)[which]).any(1).sum())
            if wrong:
                differing[name] = wrong
        return differing


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


def comparisons(
    targets: Iterable[tuple[str, str]],
    batches: int,
    seed: int,
    cases: Iterable[Case] = CASES,
    dtypes: Iterable[torch.dtype] = DTYPES,
    most: int | None = None,
) -> Iterator[Callable[[], Comparison]]:
    """So many batches on each target in each element type, each as a call to make. ``most``: rows of a batch."""
    cases = tuple(cases) if cases is not CASES else CASES
    threads = max(2, torch.get_num_threads() + 2)
    for backend, device in targets:
        row = backends.find(backend)
        slow = row is not None and device in row.emulated()
        rows = most or (20 if slow else 130 if device == "cpu" else 1500)
        for dtype in dtypes:
            here = [case for case in cases_for(backend, device, cases) if dtype in dtypes_of(case, backend)]
            if not here:
                continue
            order = torch.randperm(len(here), generator=torch.Generator().manual_seed(seed)).tolist()
            subject = functools.cache(lambda i, h=here, t=dtype, b=backend, d=device: Subject(h[i], t, b, d, seed))
            for number, which in zip(range(batches), itertools.cycle(order), strict=False):
                yield lambda n=number, i=which, s=subject, m=rows: _one(s(i), seed, n, m, threads)  # type: ignore[misc]


def _one(subject: Subject, seed: int, number: int, most: int, threads: int) -> Comparison:
    rng = torch.Generator().manual_seed(seed * 100_003 + number)
    draw = _draw(subject.parted, subject.differentiable, most, rng, threads if subject.device == "cpu" else 1)
    differing = subject.compare(draw, rng)
    return Comparison(subject.case, subject.dtype, subject.backend, subject.device, seed, draw, differing)
