"""One table of cases for the tests, the benchmark and ``moefuse check``.

A case makes the arguments of a public op. `run` calls the op on a backend, with poisoned memory, and compares every
result with the float64 reference on the same inputs, and every gradient where the op has one. Each case also has
strange forms: one of its tensors lies in memory as a user's may, see `moefuse.testing.strange`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moefuse
from moefuse import backends
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor, format_in
from moefuse.testing.compare import EXACT, Difference, Tolerance, difference
from moefuse.testing.poison import poisoned
from moefuse.testing.random_blocks import random_blocks
from moefuse.testing.strange import FORMS
from moefuse.types import Activation, Routing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_TOLERANCE = {
    torch.float32: Tolerance(1e-6, 1e-6, "f32 accumulation over at most a few hundred terms"),
    torch.bfloat16: Tolerance(
        1.2e-2, 6.4e-3, "a rounding is off by up to 2**-8; hidden row, expert output and result round"
    ),
    torch.float16: Tolerance(
        1.5e-3, 8e-4, "a rounding is off by up to 2**-11; hidden row, expert output and result round"
    ),
}
_CHAINED = Tolerance(
    2e-6, 2e-6, "two f32 products in a row; a token's experts may cancel, once in 1,500 draws past 1e-6"
)
_BLOCKS = {
    torch.float32: Tolerance(1e-5, 1e-5, "a kernel may apply the scales of a block to its sum, in f32"),
    torch.bfloat16: Tolerance(1.6e-2, 1e-2, "as without blocks, and weights leave them rounded to 8 bits"),
    torch.float16: Tolerance(2e-3, 1.2e-3, "as without blocks, and weights leave them rounded to 11 bits"),
}
_GATE = Tolerance(
    3e-6, 3e-6, "the absolute error of a logit, an f32 sum of products, is the relative one of its weight"
)
# Each row of activations is rounded to 8 bits per block: at most 1/254 of the block's largest, 0.3% to 0.7% of a row.
_INT8 = {
    "grouped_linear": Tolerance(3e-2, 1e-2, "activations in 8 bits"),
    "experts": Tolerance(
        8e-2, 5e-2, "gate, up and the heavy-tailed hidden row round, 1.2% together; experts of a token may cancel"
    ),
}
_INT8_GRADIENT = Tolerance(1e-1, 5e-2, "the forward's activations in 8 bits, and products that may cancel")
# A gradient passes through two or three more products than its forward, each adding an error of its own.
_GRADIENT = Tolerance(1e-5, 1e-5, "f32 accumulation, chained products")


class Inputs:
    """Random tensors for one case: realistic sizes, one generator, one element type."""

    def __init__(self, rng: torch.Generator, dtype: torch.dtype) -> None:
        self.rng, self.dtype = rng, dtype

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.rng) * scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.5, high: float = 1.5, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.rand(shape, generator=self.rng) * (high - low) + low).to(dtype or self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """Scaled by its fan-in, as trained weights are: results keep the size of their inputs."""
        return self.normal(*shape, scale=shape[-1] ** -0.5)

    def stack(self, spec: str | None, *shape: int) -> Tensor | QuantTensor:
        """As `weight`; with a spec such as "Q4_K" or "Q4_K:exact", in blocks."""
        return self.weight(*shape) if spec is None else random_blocks(spec, shape, self.rng, shape[-1] ** -0.5)

    def ids(self, T: int, top_k: int, E: int) -> Tensor:
        """Distinct experts per token."""
        scores = torch.rand((T, E), generator=self.rng)
        return scores.argsort(-1)[:, :top_k].to(torch.int32)

    def shares(self, T: int, top_k: int) -> Tensor:
        return torch.softmax(torch.randn((T, top_k), generator=self.rng), -1)


@dataclass(frozen=True)
class Case:
    """Arguments of one public op, and why they are in the table."""

    op: str
    name: str
    why: str
    make: Callable[[Inputs], dict[str, Any]]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    gradients: bool = True
    specs: tuple[str, ...] = ()

    @property
    def formats(self) -> set[str]:
        """Of the quantised weights."""
        return {format_in(spec) for spec in self.specs}

    @property
    def rounds_activations(self) -> bool:
        """Whether a backend may round activations to 8 bits: a format that is not asked to be exact."""
        return any(spec in FORMATS for spec in self.specs)

    @property
    def id(self) -> str:
        return f"{self.op}/{self.name}"

    def inputs(self, seed: int, dtype: torch.dtype) -> dict[str, Any]:
        return self.make(Inputs(torch.Generator().manual_seed(seed), dtype))


@dataclass(frozen=True)
class Strange:
    """Which tensor of a case lies strangely: the ``index``-th of an argument (a tuple, a plan), or every gradient of a
    result where the argument is `GRADIENT`."""

    argument: str
    index: int
    form: str

    def __str__(self) -> str:
        return f"{self.argument}[{self.index}] {self.form}"

    def change(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with that tensor in its form."""
        if self.argument == GRADIENT:
            return inputs
        counter = itertools.count()
        changed = map_tensors(
            inputs[self.argument], lambda t: FORMS[self.form](t) if next(counter) == self.index else t
        )
        return {**inputs, self.argument: changed}


#: stands for what `Strange` calls an argument: the gradients that a backward pass begins with
GRADIENT = "gradient"
# Where equal values make ties that float32 may decide otherwise than float64, no permutation, or sums that cancel.
_NEVER_EXPANDED = {
    "route": ("bias",),
    "gate": ("weight", "norm_weight", "logit_bias"),
    "moe": ("router", "norm_weight"),
    "combine": ("inverse",),
    "grouped_linear": ("plan",),
    "grouped_outer": ("plan", "x"),
}


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument: itself, a tuple's, a plan's, a stack of blocks'."""
    found: list[Tensor] = []
    map_tensors(value, lambda t: found.append(t) or t)  # type: ignore[func-returns-value]
    return found


def strange_forms(case: Case) -> Iterator[Strange]:
    """Every tensor of a case in every form it can have."""
    for argument, value in case.inputs(0, torch.float32).items():
        for index, t in enumerate(tensors_in(value)):
            for form in FORMS:
                # Blocks follow each other without gaps, and bytes have no sign.
                blocks = t.dtype == torch.uint8 and form not in ("expanded", "offset")
                ties = form == "expanded" and argument in _NEVER_EXPANDED.get(case.op, ())
                if not blocks and not ties and not (form == "transposed" and t.dim() < 2):
                    yield Strange(argument, index, form)
    if case.gradients:
        yield from (Strange(GRADIENT, 0, form) for form in FORMS)


def strange_cases(cases: Iterable[Case], *, one: bool = False) -> Iterator[tuple[Case, Strange]]:
    """Every form of every tensor that the ops of these cases take, each on the first case that has it.

    ``one``: of each tensor one form, by turns, for who has little time.
    """
    seen: set[tuple[Any, ...]] = set()
    for case in cases:
        for strange in strange_forms(case):
            tensor = (case.op, bool(case.specs), strange.argument, strange.index)
            if one and strange.form != tuple(FORMS)[len(seen) % len(FORMS)]:
                continue
            key = tensor if one else (*tensor, strange.form)
            if key not in seen and (not case.specs or strange.argument in ("weight", "gate_up", "down")):
                seen.add(key)
                yield case, strange


@dataclass(frozen=True)
class Outcome:
    """What became of a case: errors per result, and whether all are within bounds."""

    case: Case
    dtype: torch.dtype
    backend: str
    device: str
    seed: int
    errors: dict[str, Difference]
    failures: dict[str, str]
    strange: Strange | None = None

    @property
    def passed(self) -> bool:
        return not self.failures

    def describe(self) -> str:
        """The failing inputs and results, for a person."""
        made = self.case.inputs(self.seed, self.dtype)
        lines = [f"{self.case.id} on {self.backend} ({self.device}), {_short(self.dtype)}, seed {self.seed}"]
        lines += [f"  covers: {self.case.why}"]
        lines += [f"  strange: {self.strange}"] if self.strange else []
        lines += [f"  input {name}: {_describe(value)}" for name, value in made.items() if value is not None]
        lines += [f"  {name}: {failure}" for name, failure in self.failures.items()]
        return "\n".join(lines)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{_short(value.dtype)} {list(value.shape)}{strides}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_describe, value))})"
    if isinstance(value, QuantTensor):
        return f"{value.spec} {list(value.shape)}"
    if isinstance(value, moefuse.Plan):
        return f"Plan of {value.assignments} assignments, {value.num_experts} experts, top_k={value.top_k}"
    return repr(value)


def runnable(emulated: bool = False) -> list[tuple[str, str]]:
    """Every backend that can run here, with a device for it, the reference first; on request the emulated ones too."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    if torch.backends.mps.is_available():
        devices.append("mps")
    found = [(backends.REFERENCE, "cpu")]
    for row in backends.BACKENDS:
        reach = (*row.devices, *row.emulated()) if emulated else row.devices
        here = [device for device in reach if device in devices]
        if here and row.missing() is None:
            found.append((row.name, here[0]))
    return found


def formats_of(backend: str) -> Collection[str]:
    """The block formats that a backend takes."""
    row = next((row for row in backends.BACKENDS if row.name == backend), None)
    found: Collection[str] = FORMATS if row is None else row.load().FORMATS if row.exists() else ()
    return found


def dtypes_of(case: Case, backend: str) -> tuple[torch.dtype, ...]:
    """The element types of a case that a backend has kernels for; none where it lacks a format."""
    row = next((row for row in backends.BACKENDS if row.name == backend), None)
    if not case.formats.issubset(formats_of(backend)):
        return ()
    return case.dtypes if row is None else tuple(dtype for dtype in case.dtypes if dtype in row.load().DTYPES)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """An argument of an op with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(item, change) for item in value)
    if isinstance(value, QuantTensor):
        return QuantTensor(change(value.blocks), value.format, value.exact)
    if isinstance(value, moefuse.Plan):
        counts, offsets, order, inverse = map(change, (value.counts, value.offsets, value.order, value.inverse))
        return moefuse.Plan(counts, offsets, order, inverse, value.top_k, trusted=True)
    return value


def _leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The floating tensors of the arguments, by name."""
    found = {}
    for name, value in inputs.items():
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, Tensor) and item.is_floating_point():
                found[f"{name}[{i}]" if isinstance(value, tuple) else name] = item
    return found


def _call(op: str, inputs: dict[str, Any], backend: str) -> dict[str, Tensor]:
    result = getattr(moefuse, op)(**inputs, backend=backend)
    if isinstance(result, moefuse.Plan):
        return {name: getattr(result, name) for name in ("counts", "offsets", "order", "inverse")}
    results = result if isinstance(result, tuple) else (result,)
    names = {"route": ("weights", "ids"), "gate": ("weights", "ids", "normed")}.get(op, ("out", "normed"))
    return dict(zip(names, results, strict=False))


def _differentiable(results: dict[str, Tensor]) -> list[Tensor]:
    return [t for t in results.values() if t.requires_grad]


def _with_gradients(
    op: str, inputs: dict[str, Any], backend: str, seeds: list[Tensor] | None, form: str | None = None
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of every floating input for a random (or the given) gradient of every result, in a strange form."""
    inputs = {name: map_tensors(value, _leaf) for name, value in inputs.items()}
    outputs = _differentiable(_call(op, inputs, backend))
    if seeds is None:
        rng = torch.Generator().manual_seed(1)
        seeds = [torch.randn(t.shape, generator=rng).to(t) for t in outputs]
    leaves = _leaves(inputs)
    given = [s.to(t) for s, t in zip(seeds, outputs, strict=True)]
    if form is not None:
        given = [FORMS[form](t) for t in given]
    grads = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
    named = zip(leaves, grads, strict=True)
    return {f"gradient of {name}": grad for name, grad in named if grad is not None}, seeds


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def _wide(t: Tensor) -> Tensor:
    return t.cpu().double() if t.is_floating_point() else t.cpu()


def tolerance_of(
    op: str, result: str, value: Tensor, dtype: torch.dtype, *, blocks: bool = False, int8: bool = False
) -> Tolerance:
    """The bound for one result: integers are exact, routing weights are float32 whatever the model is.

    ``blocks``: weights are quantised. ``int8``: so that a backend may round activations to 8 bits.
    """
    if not value.is_floating_point():
        return EXACT
    if result.startswith("gradient"):
        return _INT8_GRADIENT if int8 else _GRADIENT
    if int8:
        return _INT8["experts" if op == "moe" else op]
    if result == "weights":
        return _TOLERANCE[torch.float32] if op == "route" else _GATE
    if blocks:
        return _BLOCKS[dtype]
    return _CHAINED if dtype == torch.float32 and op in ("experts", "moe") else _TOLERANCE[dtype]


def run(
    case: Case,
    dtype: torch.dtype,
    backend: str,
    device: str,
    seed: int,
    *,
    gradients: bool = True,
    strange: Strange | None = None,
) -> Outcome:
    """Run one case on one backend and compare it with float64; without ``gradients``, the forward alone."""
    made = case.inputs(seed, dtype)
    here = {name: map_tensors(value, lambda t: t.to(device)) for name, value in made.items()}
    if strange is not None:
        made, here = strange.change(made), strange.change(here)
    wide = {name: map_tensors(value, _wide) for name, value in made.items()}
    want = _call(case.op, wide, backends.REFERENCE)
    with poisoned():
        got = _call(case.op, here, backend)
    if gradients and case.gradients and dtype == torch.float32:
        form = strange.form if strange is not None and strange.argument == GRADIENT else None
        goal, seeds = _with_gradients(case.op, wide, backends.REFERENCE, None, form)
        want |= goal
        with poisoned():
            got |= _with_gradients(case.op, here, backend, [s.to(device) for s in seeds], form)[0]
    errors, failures = {}, {}
    for name, value in want.items():
        if name not in got:
            failures[name] = "missing from the result"
            continue
        errors[name] = difference(got[name], value, whole=name.startswith("gradient"))
        bound = tolerance_of(case.op, name, value, dtype, blocks=bool(case.specs), int8=case.rounds_activations)
        if not errors[name].within(bound):
            failures[name] = (
                f"worst {errors[name].worst:.3g} (at most {bound.worst:g}), rms {errors[name].rms:.3g} "
                f"(at most {bound.rms:g}); {errors[name].where}"
            )
    return Outcome(case, dtype, backend, device, seed, errors, failures, strange)


def sweep(cases: Iterable[Case], targets: Iterable[tuple[str, str]], seed: int) -> Iterator[Callable[[], Outcome]]:
    """Every case on every target and element type, each as a call to make."""
    for backend, device in targets:
        for case in cases:
            for dtype in dtypes_of(case, backend):
                yield lambda c=case, t=dtype, b=backend, d=device: run(c, t, b, d, seed)  # type: ignore[misc]


def _logits(T: int, E: int, routing: Routing, bias: bool = False, scale: bool = False) -> Any:
    def make(inputs: Inputs) -> dict[str, Any]:
        logits = inputs.normal(T, E, scale=2.0)
        if bias:
            # Scores on a grid of 1/64 and biases between its lines: no two keys are within rounding of each other.
            logits = torch.logit((torch.rand((T, E), generator=inputs.rng).argsort(-1) + 0.5) / E).to(inputs.dtype)
        return {
            "logits": logits,
            "routing": routing,
            "bias": inputs.normal(E, scale=0.3, dtype=torch.float32) if bias else None,
            "per_expert_scale": inputs.uniform(E, dtype=torch.float32) if scale else None,
        }

    return make


def _edge_logits(inputs: Inputs) -> dict[str, Any]:
    logits = inputs.normal(8, 12)
    logits[0] = 1.0
    logits[1, ::2] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 5] = torch.nan
    logits[4, 7] = torch.inf
    logits[5, 2:] = -torch.inf
    logits[6, [3, 9]] = 50.0
    return {"logits": logits, "routing": Routing(top_k=4)}


def _masked_softcap(inputs: Inputs) -> dict[str, Any]:
    logits = inputs.normal(5, 12)
    logits[:, ::3] = -torch.inf
    return {"logits": logits, "routing": Routing(top_k=3, softcap=2.0, renormalize=False)}


def _ranked(
    inputs: Inputs, T: int, E: int, H: int, top_k: int, norm: bool, logit_bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """x, router, norm weight and logit bias, drawn until float32 must choose as float64 does.

    No two logits that decide about a token's experts are within 1e-5.
    """
    while True:
        x, router = inputs.normal(T, H), inputs.weight(E, H)
        norm_weight = inputs.uniform(H) if norm else None
        added = inputs.normal(E, dtype=torch.float32) if logit_bias else None
        wide = x.double()
        if norm_weight is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * norm_weight.double()
        logits = wide @ router.double().T
        if added is not None:
            logits = logits + added.double()
        foremost = logits.topk(min(top_k + 1, E), -1).values
        if bool((foremost.diff(dim=-1) < -1e-5).all()):
            return x, router, norm_weight, added


def _gate(T: int, E: int, H: int, routing: Routing, **on: bool) -> Any:
    def make(inputs: Inputs) -> dict[str, Any]:
        drawn = _ranked(inputs, T, E, H, routing.top_k, on.get("norm", False), on.get("logit_bias", False))
        x, router, norm_weight, logit_bias = drawn
        return {
            "x": x,
            "weight": router,
            "routing": routing,
            "norm_weight": norm_weight,
            "logit_bias": logit_bias,
            "per_expert_scale": inputs.uniform(E, dtype=torch.float32) if on.get("scale") else None,
            "return_normed": on.get("norm", False),
        }

    return make


def _plan(T: int, E: int, top_k: int, ids: Callable[[Inputs], Tensor] | None = None) -> Any:
    return lambda inputs: {"ids": ids(inputs) if ids else inputs.ids(T, top_k, E), "num_experts": E}


def _messy_ids(T: int, top_k: int, E: int) -> Callable[[Inputs], Tensor]:
    """Duplicates and sentinels among the ids."""

    def make(inputs: Inputs) -> Tensor:
        return torch.randint(-2, E + 3, (T, top_k), generator=inputs.rng)

    return make


def _linear(T: int, E: int, N: int, K: int, top_k: int, gather: bool, scatter: bool, **on: Any) -> Any:
    def make(inputs: Inputs) -> dict[str, Any]:
        ids = _messy_ids(T, top_k, E)(inputs) if on.get("messy") else inputs.ids(T, top_k, E)
        if on.get("one_expert"):
            ids = torch.full_like(ids, E - 1)
        plan = moefuse.plan(ids, E, backend=backends.REFERENCE)
        rows = T if gather and not on.get("slots") else T * top_k
        x, weight = inputs.normal(rows, K), inputs.stack(on.get("blocks"), E, N, K)
        if on.get("transposed"):
            weight = inputs.weight(E, K, N).transpose(1, 2)
        if on.get("blocks"):
            # Bounded, so that the step of 8-bit activations, which follows the largest, is the same in every row.
            x = inputs.uniform(rows, K, low=-1.7, high=1.7)
        bias = inputs.normal(E, N) if on.get("bias") else None
        return {"x": x, "weight": weight, "plan": plan, "gather": gather, "scatter": scatter,
                "bias": bias}  # fmt: skip

    return make


def _outer(T: int, E: int, N: int, K: int, top_k: int, gather: bool, scatter: bool) -> Any:
    def make(inputs: Inputs) -> dict[str, Any]:
        plan = moefuse.plan(_messy_ids(T, top_k, E)(inputs), E, backend=backends.REFERENCE)
        grad = inputs.normal(T * top_k, N)
        x = inputs.normal(T if gather else T * top_k, K)
        return {"grad": grad, "x": x, "plan": plan, "gather": gather, "scatter": scatter}

    return make


def _glu(shape: tuple[int, ...], activation: str | Activation, layout: str = "halves", apart: bool = False) -> Any:
    def make(inputs: Inputs) -> dict[str, Any]:
        if apart:
            return {"gate_up": inputs.normal(*shape), "up": inputs.normal(*shape), "activation": activation}
        # Some values far out, where a careless exp, tanh or square leaves the range.
        gate_up = inputs.normal(*shape, scale=3.0)
        if gate_up.numel():
            gate_up.view(-1)[0], gate_up.view(-1)[-1] = -300.0, 40.0
        return {"gate_up": gate_up, "activation": activation, "layout": layout}

    return make


def _combine(T: int, top_k: int, H: int, *parts: str) -> Any:
    def make(inputs: Inputs) -> dict[str, Any]:
        made: dict[str, Any] = {"y": inputs.normal(T * top_k, H), "weights": inputs.shares(T, top_k)}
        if "inverse" in parts:
            made["inverse"] = torch.randperm(T * top_k, generator=inputs.rng).to(torch.int32)
        if "shared" in parts:
            made["shared"] = inputs.normal(T, H)
        if "shared_gate" in parts:
            made["shared_gate"] = inputs.uniform(T)
        if "shared_logit" in parts:
            made["shared_logit"] = inputs.normal(T)
        if "residual" in parts:
            made["residual"] = inputs.normal(T, H)
        if "norm" in parts:
            made["norm_weight"], made["eps"] = inputs.uniform(H), 1e-5
        return made

    return make


def _experts(T: int, E: int, H: int, I: int, top_k: int, **on: Any) -> Any:
    def make(inputs: Inputs) -> dict[str, Any]:
        activation = Activation.of(on.get("activation", "silu"))
        rows = activation.width(I)
        ids = _messy_ids(T, top_k, E)(inputs) if on.get("messy") else inputs.ids(T, top_k, E)
        if on.get("one_expert"):
            ids = torch.zeros_like(ids)
        *first, last = on.get("blocks", (None,) * (3 if on.get("apart") else 2))
        stacks = tuple(inputs.stack(spec, E, rows // len(first), H) for spec in first)
        made = {"x": inputs.normal(T, H), "ids": ids, "weights": inputs.shares(T, top_k),
                "gate_up": stacks if len(stacks) == 2 else stacks[0], "down": inputs.stack(last, E, H, I),
                "activation": activation, "layout": on.get("layout", "halves")}  # fmt: skip
        if on.get("bias"):
            made |= {"gate_up_bias": inputs.normal(E, rows), "down_bias": inputs.normal(E, H)}
        if on.get("tail"):
            made |= {"shared": inputs.normal(T, H), "shared_logit": inputs.normal(T), "residual": inputs.normal(T, H)}
            made |= {"norm_weight": inputs.uniform(H), "eps": 1e-5}
        if on.get("strided"):
            made["x"] = inputs.normal(T, 2 * H)[:, ::2]
            made["gate_up"] = inputs.weight(E, H, rows).transpose(1, 2)
            made["weights"] = inputs.shares(top_k, T).T
        return made

    return make


def _moe(T: int, E: int, H: int, I: int, routing: Routing) -> Any:
    def make(inputs: Inputs) -> dict[str, Any]:
        x, router, norm_weight, _ = _ranked(inputs, T, E, H, routing.top_k, norm=True)
        return {"x": x, "router": router, "gate_up": inputs.weight(E, 2 * I, H),
                "down": inputs.weight(E, H, I), "routing": routing, "norm_weight": norm_weight, "residual": x,
                "next_norm_weight": inputs.uniform(H)}  # fmt: skip

    return make


def _linear_in_blocks(spec: str, name: str, why: str) -> Case:
    K = 512 if FORMATS[format_in(spec)].values == 256 else 416
    return Case(
        "grouped_linear", name, why, _linear(5, 3, 52, K, 2, True, False, blocks=spec, bias=True), specs=(spec,)
    )


def _experts_in_blocks(name: str, why: str, specs: tuple[str | None, ...], T: int = 7, **on: Any) -> Case:
    make = _experts(T, 6, 256, 256, 2, blocks=specs, **on)
    return Case("experts", name, why, make, gradients=T > 1, specs=tuple(spec for spec in specs if spec))


_DEEPSEEK = Routing(top_k=4, score="sigmoid", scale=2.5, groups=4, top_groups=2, group_score="top2_sum")
_F32 = (torch.float32,)

CASES: tuple[Case, ...] = (
    Case("route", "qwen3", "128 experts, 8 of them, renormalised", _logits(9, 128, Routing(top_k=8))),
    Case("route", "one_token", "T=1", _logits(1, 64, Routing(top_k=6, renormalize=False))),
    Case("route", "no_token", "T=0", _logits(0, 8, Routing(top_k=2), scale=True)),
    Case("route", "one_expert", "E=1", _logits(5, 1, Routing(top_k=1))),
    Case("route", "all_experts", "top_k=E", _logits(5, 7, Routing(top_k=7))),
    Case("route", "e60", "E not a power of two, below a warp pair", _logits(6, 60, Routing(top_k=4))),
    Case("route", "e100", "E not a power of two", _logits(6, 100, Routing(top_k=10))),
    Case("route", "e1000", "many experts, many slots", _logits(3, 1000, Routing(top_k=64))),
    Case("route", "edges", "ties, -inf, NaN, +inf and too few candidates", _edge_logits, gradients=False),
    Case("route", "softcap", "soft-capped logits", _logits(6, 16, Routing(top_k=3, softcap=5.0))),
    Case("route", "softcap_masked", "a masked expert has no part in a soft-capped softmax", _masked_softcap),
    Case("route", "sigmoid", "sigmoid scores, scaled", _logits(6, 32, Routing(top_k=4, score="sigmoid", scale=2.5))),
    Case("route", "sqrtsoftplus", "DeepSeek-V4 scores",
         _logits(6, 32, Routing(top_k=6, score="sqrtsoftplus", scale=1.5))),
    Case("route", "deepseek_v3", "bias selects, groups by their two best", _logits(7, 32, _DEEPSEEK, bias=True), _F32),
    Case("route", "groups_max", "groups by their best", _logits(7, 24, Routing(top_k=3, groups=6, top_groups=2))),
    Case("route", "scaled_after", "per-expert scale, then renormalised once more",
         _logits(7, 24, Routing(top_k=3, renormalize_after_scale=True), scale=True)),
    Case("gate", "plain", "no norm", _gate(5, 16, 64, Routing(top_k=4))),
    Case("gate", "norm", "RMSNorm and the normed x", _gate(9, 60, 96, Routing(top_k=4), norm=True)),
    Case("gate", "one_token", "T=1, odd H", _gate(1, 128, 67, Routing(top_k=8), norm=True)),
    Case("gate", "many", "more tokens than one launch takes on a GPU", _gate(40, 24, 96, Routing(top_k=4), norm=True)),
    Case("gate", "no_token", "T=0", _gate(0, 8, 16, Routing(top_k=2), norm=True, logit_bias=True, scale=True)),
    Case("gate", "gpt_oss", "bias on the logits", _gate(4, 32, 64, Routing(top_k=4), logit_bias=True)),
    Case("gate", "gemma4", "norm and per-expert scale", _gate(4, 32, 64, Routing(top_k=8), norm=True, scale=True)),
    Case("plan", "usual", "every token to distinct experts", _plan(33, 16, 4), _F32, False),
    Case("plan", "messy", "sentinels on both sides, duplicates", _plan(50, 7, 3, _messy_ids(50, 3, 7)), _F32, False),
    Case("plan", "no_token", "T=0", _plan(0, 8, 2), _F32, False),
    Case("plan", "one_expert", "E=1", _plan(9, 1, 1), _F32, False),
    Case("plan", "e1000", "many experts, most of them empty", _plan(20, 1000, 8), _F32, False),
    Case("plan", "many", "more assignments than an int16 holds", _plan(9000, 64, 4), _F32, False),
    Case("grouped_linear", "up", "the up product", _linear(17, 8, 48, 64, 3, True, False)),
    Case("grouped_linear", "down", "the down product", _linear(17, 8, 64, 48, 3, False, True)),
    Case("grouped_linear", "odd", "no size a multiple of anything", _linear(13, 5, 37, 51, 2, True, True, bias=True)),
    Case("grouped_linear", "slots", "gather from slot order", _linear(11, 4, 32, 40, 2, True, False, slots=True)),
    Case("grouped_linear", "expert_major", "rows in and out expert-major", _linear(11, 4, 32, 40, 2, False, False)),
    Case("grouped_linear", "messy", "sentinel rows are zero, duplicates count",
         _linear(19, 6, 33, 32, 3, True, True, messy=True, bias=True)),
    Case("grouped_linear", "one_expert", "every row to the last expert",
         _linear(70, 6, 40, 64, 2, True, False, one_expert=True)),
    Case("grouped_linear", "transposed", "weights strided, as the input gradient has them",
         _linear(9, 4, 24, 40, 2, False, False, transposed=True)),
    Case("grouped_linear", "one_token", "T=1", _linear(1, 16, 96, 128, 8, True, False)),
    Case("grouped_linear", "no_token", "T=0", _linear(0, 4, 8, 16, 2, True, True, bias=True)),
    *(_linear_in_blocks(name, name.lower(), f"{name} blocks") for name in FORMATS),
    *(_linear_in_blocks(f"{name}:exact", f"{name.lower()}_exact", f"{name}, activations in f32") for name in FORMATS),
    Case("grouped_outer", "up", "gradient of the up product", _outer(21, 5, 24, 40, 3, True, False), DTYPES, False),
    Case("grouped_outer", "down", "of the down product", _outer(21, 5, 33, 29, 3, False, True), DTYPES, False),
    Case("grouped_outer", "no_token", "T=0: all zero", _outer(0, 3, 8, 8, 2, True, False), DTYPES, False),
    *(
        Case("glu", kind, f"{kind}, gated", _glu((6, 3, 40), kind))
        for kind in ("silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu_oai", "swiglu_clamp")
    ),
    *(
        Case("glu", f"{kind}_plain", f"{kind}, ungated", _glu((7, 23), Activation(kind, gated=False)))
        for kind in ("silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai")
    ),
    Case("glu", "interleaved", "even gate, odd up", _glu((5, 46), "silu", "interleaved")),
    Case("glu", "apart", "gate and up as two tensors", _glu((5, 31), "silu", apart=True)),
    Case("glu", "vector", "one dimension", _glu((34,), "gelu_tanh")),
    Case("glu", "empty", "no row", _glu((0, 16), "silu")),
    Case("combine", "sum", "the weighted sum alone", _combine(7, 4, 40)),
    Case("combine", "expert_major", "rows found through inverse", _combine(7, 4, 33, "inverse")),
    Case("combine", "shared", "shared expert added plainly", _combine(5, 2, 64, "shared")),
    Case("combine", "shared_gate", "shared expert with a gate", _combine(5, 2, 64, "shared", "shared_gate")),
    Case("combine", "qwen3_5", "shared expert with a logit, residual",
         _combine(5, 8, 64, "shared", "shared_logit", "residual")),
    Case("combine", "residual_norm", "residual and the next norm", _combine(9, 8, 96, "residual", "norm")),
    Case("combine", "everything", "every part at once",
         _combine(6, 3, 51, "inverse", "shared", "shared_logit", "residual", "norm")),
    Case("combine", "one_token", "T=1", _combine(1, 8, 128, "residual", "norm")),
    Case("combine", "no_token", "T=0", _combine(0, 4, 16, "shared", "shared_logit", "residual", "norm")),
    # No gradients: at T=1 that of the shared expert's gate is one sum, which may cancel to nothing.
    Case("experts", "decode", "T=1", _experts(1, 16, 96, 64, 4, tail=True), gradients=False),
    Case("experts", "few", "few tokens, each expert a row or two", _experts(6, 16, 64, 48, 4)),
    Case("experts", "prefill", "many rows per expert", _experts(90, 4, 64, 80, 2, tail=True)),
    Case("experts", "odd", "no size a multiple of anything", _experts(13, 5, 51, 37, 3, bias=True)),
    Case("experts", "messy", "sentinels and duplicates", _experts(15, 6, 48, 32, 3, messy=True, tail=True, bias=True)),
    Case("experts", "one_expert", "every token to expert 0, twice", _experts(40, 5, 48, 32, 2, one_expert=True)),
    Case("experts", "all_experts", "top_k=E", _experts(9, 6, 48, 32, 6)),
    Case("experts", "single", "E=1", _experts(9, 1, 48, 32, 1)),
    Case("experts", "gpt_oss", "interleaved, biases, clamped",
         _experts(9, 8, 64, 48, 4, activation="swiglu_oai", layout="interleaved", bias=True)),
    Case("experts", "gemma4", "gelu_tanh", _experts(9, 8, 44, 36, 4, activation="gelu_tanh")),
    Case("experts", "nemotron", "ungated relu2",
         _experts(9, 8, 48, 36, 2, activation=Activation("relu2", gated=False), bias=True)),
    Case("experts", "apart", "gate and up as two stacks", _experts(9, 8, 48, 36, 2, apart=True, bias=True)),
    Case("experts", "strided", "non-contiguous x, weights and stack", _experts(9, 4, 32, 24, 2, strided=True)),
    Case("experts", "no_token", "T=0", _experts(0, 4, 16, 8, 2, tail=True, bias=True)),
    *(_experts_in_blocks(f"{name.lower()}_both", f"{name} throughout", (name, name)) for name in FORMATS),
    _experts_in_blocks("q4_k_m", "as Q4_K_M files have it: gate and up in Q4_K, down in Q6_K", ("Q4_K", "Q4_K", "Q6_K"),
                       tail=True),
    _experts_in_blocks("q4_k_m_decode", "the same at T=1", ("Q4_K", "Q4_K", "Q6_K"), T=1, tail=True),
    _experts_in_blocks("q4_k_decode", "few tokens, down in Q4_K too", ("Q4_K", "Q4_K"), T=3, tail=True),
    _experts_in_blocks("q4_k_decode_exact", "the same, activations in f32", ("Q4_K:exact",) * 2, T=3, tail=True),
    _experts_in_blocks("q4_k_m_exact", "q4_k_m with activations in f32", ("Q4_K:exact", "Q4_K:exact", "Q6_K:exact"),
                       tail=True, messy=True, bias=True),
    _experts_in_blocks("q4_k_m_prefill", "many rows per expert", ("Q4_K:exact", "Q4_K:exact", "Q6_K:exact"), T=90),
    _experts_in_blocks("mixed", "gate, up and down of three types", ("Q5_K:exact", "Q8_0:exact", "Q4_0:exact")),
    _experts_in_blocks("mixed_plain", "blocks beside a plain stack", ("Q6_K:exact", None)),
    _experts_in_blocks("plain_mixed", "a plain stack beside blocks", (None, "IQ4_XS:exact")),
    _experts_in_blocks("mxfp4_gpt_oss", "interleaved, biases, clamped", ("MXFP4:exact", "MXFP4:exact"),
                       activation="swiglu_oai", layout="interleaved", bias=True),
    _experts_in_blocks("q8_0_ungated", "ungated relu2", ("Q8_0:exact", "Q8_0:exact"),
                       activation=Activation("relu2", gated=False)),
    _experts_in_blocks("q4_k_no_token", "T=0", ("Q4_K", "Q4_K"), T=0),
    Case("moe", "qwen3", "the whole block", _moe(7, 16, 64, 48, Routing(top_k=4))),
    Case("moe", "decode", "the whole block, T=1", _moe(1, 32, 96, 32, Routing(top_k=8))),
    Case("moe", "no_token", "T=0", _moe(0, 8, 16, 8, Routing(top_k=2))),
)  # fmt: skip


def support_table() -> str:
    """Which backend has a kernel for which op, and what the cases cover, as Markdown."""
    names = [row.name for row in backends.BACKENDS]
    has = {row.name: row.load().OPS if row.exists() else {} for row in backends.BACKENDS}
    lines = [f"| op | {' | '.join(names)} | cases |", "|---" * (len(names) + 2) + "|"]
    for op in dict.fromkeys(case.op for case in CASES):
        # moe is gate followed by experts, on whatever runs those
        parts = ("gate", "experts") if op == "moe" else (op,)
        cells = ["kernel" if all(part in has[name] for part in parts) else "reference" for name in names]
        covered = ", ".join(case.name for case in CASES if case.op == op)
        lines.append(f"| {op} | {' | '.join(cells)} | {covered} |")
    lines += ["", f"| format | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for name in FORMATS:
        cells = ["kernel" if name in formats_of(backend) else "reference" for backend in names]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
