"""One table of cases for the tests, the benchmark and ``moefuse check``.

A case makes the arguments of a public op. `run` calls the op on a backend, with poisoned memory, and compares every
result with the float64 reference on the same inputs, and every gradient where the op has one. Each case also has
strange forms: one of its tensors lies in memory as a user's may, see `moefuse.testing.strange`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

import moefuse
from moefuse import backends
from moefuse.ops._core.select import REFERENCES
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor, format_in
from moefuse.testing import inputs as make
from moefuse.testing.compare import EXACT, Difference, Tolerance, difference
from moefuse.testing.inputs import Inputs, Maker
from moefuse.testing.inputs import map_tensors as map_tensors  # for those who run a case themselves
from moefuse.testing.poison import poisoned
from moefuse.testing.strange import FORMS, GRADIENT, Strange
from moefuse.types import ACTIVATION_KINDS, Activation, Routing, name_of

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
    "linear": Tolerance(3e-2, 1e-2, "activations in 8 bits"),
    "experts": Tolerance(
        8e-2, 5e-2, "gate, up and the heavy-tailed hidden row round, 1.2% together; experts of a token may cancel"
    ),
}
# Hopper rounds them to e4m3 for its tensor cores: at most 1/16 of each number, 2.6% of a row.
_E4M3 = {
    "grouped_linear": Tolerance(1e-1, 4e-2, "activations in e4m3"),
    "linear": Tolerance(1e-1, 4e-2, "activations in e4m3"),
    "experts": Tolerance(2e-1, 1e-1, "gate, up and hidden row round, 5% together; experts of a token may cancel"),
}
_INT8_GRADIENT = Tolerance(1e-1, 5e-2, "the forward's activations in 8 bits, and products that may cancel")
# A gradient passes through two or three more products than its forward, each adding an error of its own.
_GRADIENT = Tolerance(1e-5, 1e-5, "f32 accumulation, chained products")


@dataclass(frozen=True)
class Case:
    """Arguments of one public op, and why they are in the table."""

    op: str
    name: str
    why: str
    make: Maker
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
        lines = [f"{self.case.id} on {self.backend} ({self.device}), {name_of(self.dtype)}, seed {self.seed}"]
        lines += [f"  covers: {self.case.why}"]
        lines += [f"  strange: {self.strange}"] if self.strange else []
        lines += [f"  input {name}: {_describe(value)}" for name, value in made.items() if value is not None]
        lines += [f"  {name}: {failure}" for name, failure in self.failures.items()]
        return "\n".join(lines)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{name_of(value.dtype)} {list(value.shape)}{strides}"
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
    row = backends.find(backend)
    found: Collection[str] = FORMATS if row is None else row.load().FORMATS if row.exists() else ()
    return found


def dtypes_of(case: Case, backend: str) -> tuple[torch.dtype, ...]:
    """The element types of a case that a backend has kernels for; none where it lacks a format or the op."""
    row = backends.find(backend)
    if not case.formats.issubset(formats_of(backend)):
        return ()
    if row is None:
        return case.dtypes
    has = all(part in row.load().OPS for part in _parts_of(case.op))
    return tuple(dtype for dtype in case.dtypes if has and dtype in row.load().DTYPES)


def _parts_of(op: str) -> tuple[str, ...]:
    """moe is gate followed by experts, on whatever runs those."""
    return ("gate", "experts") if op == "moe" else (op,)


def _leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The floating tensors of the arguments, by name."""
    found = {}
    for name, value in inputs.items():
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(item, Tensor) and item.is_floating_point():
                found[f"{name}[{i}]" if isinstance(value, tuple) else name] = item
    return found


def _mode(backend: str) -> AbstractContextManager[None]:
    """Plain torch, which all else is held to, runs outside `moefuse.invariant` alone."""
    return moefuse.invariant(False) if backend == backends.REFERENCE else nullcontext()


def call_op(op: str, inputs: dict[str, Any], backend: str) -> dict[str, Tensor]:
    with _mode(backend):
        result = getattr(moefuse, op)(**inputs, backend=backend)
    if isinstance(result, moefuse.Plan):
        return result.tensors
    results = result if isinstance(result, tuple) else (result,)
    names = {
        "route": ("weights", "ids"),
        "gate": ("weights", "ids", "normed"),
        "linear": ("out", "second", "third", "fourth"),
        "rope": ("q", "k"),
    }.get(op, ("out", "normed"))
    written = {name: inputs[name] for name in ("keys", "values") if op == "rope" and name in inputs}
    return dict(zip(names, results, strict=False)) | written


def _differentiable(results: dict[str, Tensor]) -> list[Tensor]:
    return [t for t in results.values() if t.requires_grad]


def _with_gradients(
    op: str, inputs: dict[str, Any], backend: str, grad_outputs: list[Tensor] | None, form: str | None = None
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients of every floating input for a random (or the given) gradient of every result, in a strange form."""
    inputs = {name: map_tensors(value, _leaf) for name, value in inputs.items()}
    outputs = _differentiable(call_op(op, inputs, backend))
    if grad_outputs is None:
        rng = torch.Generator().manual_seed(1)
        grad_outputs = [torch.randn(t.shape, generator=rng).to(t) for t in outputs]
    leaves = _leaves(inputs)
    given = [s.to(t) for s, t in zip(grad_outputs, outputs, strict=True)]
    if form is not None:
        given = [FORMS[form](t) for t in given]
    with _mode(backend):
        grads = torch.autograd.grad(outputs, list(leaves.values()), given, allow_unused=True)
    named = zip(leaves, grads, strict=True)
    return {f"gradient of {name}": grad for name, grad in named if grad is not None}, grad_outputs


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def _wide(t: Tensor) -> Tensor:
    return t.cpu().double() if t.is_floating_point() else t.cpu()


def tolerance_of(
    op: str,
    result: str,
    value: Tensor,
    dtype: torch.dtype,
    *,
    blocks: bool = False,
    int8: bool = False,
    e4m3: bool = False,
) -> Tolerance:
    """The bound for one result: integers are exact, routing weights are float32 whatever the model is.

    ``blocks``: weights are quantised. ``int8``: so that a backend may round activations to 8 bits. ``e4m3``: to these.
    """
    if not value.is_floating_point():
        return EXACT
    if result.startswith("gradient"):
        return _INT8_GRADIENT if int8 else _GRADIENT
    if e4m3 and dtype != torch.float32:
        return _E4M3["experts" if op == "moe" else op]
    if int8:
        return _INT8["experts" if op == "moe" else op]
    if result == "weights":
        return _TOLERANCE[torch.float32] if op == "route" else _GATE
    if op == "attend" and dtype == torch.float32:
        return _GATE
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
    arrangement: str | None = None,
) -> Outcome:
    """Run one case on one backend and compare it with float64; without ``gradients``, the forward alone.

    ``arrangement``: of the blocks, instead of the one that the device's backend reads.
    """
    made = case.inputs(seed, dtype)
    here = make.moved(made, device, arrangement)
    if strange is not None:
        made, here = strange.change(made), strange.change(here)
    wide = {name: map_tensors(value, _wide) for name, value in made.items()}
    want = call_op(case.op, wide, backends.REFERENCE)
    with poisoned():
        got = call_op(case.op, here, backend)
    if gradients and case.gradients and dtype == torch.float32:
        form = strange.form if strange is not None and strange.argument == GRADIENT else None
        goal, grad_outputs = _with_gradients(case.op, wide, backends.REFERENCE, None, form)
        want |= goal
        with poisoned():
            got |= _with_gradients(case.op, here, backend, [s.to(device) for s in grad_outputs], form)[0]
    errors, failures = {}, {}
    for name, value in want.items():
        if name not in got:
            failures[name] = "missing from the result"
            continue
        errors[name] = difference(got[name], value, whole=name.startswith("gradient"))
        rounds = {"int8": case.rounds_activations, "e4m3": device == "cuda" and "FP8" in case.specs}
        bound = tolerance_of(case.op, name, value, dtype, blocks=bool(case.specs), **rounds)
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


def _grouped_in_blocks(spec: str, name: str, why: str) -> Case:
    K = {32: 416, 128: 384, 256: 512}[FORMATS[format_in(spec)].values]
    grouped = make.grouped_linear(5, 3, 52, K, 2, True, False, blocks=spec, bias=True)
    return Case("grouped_linear", name, why, grouped, specs=(spec,))


def _linear_in_blocks(spec: str, T: int) -> Case:
    K = {32: 416, 128: 384, 256: 512}[FORMATS[format_in(spec)].values]
    name = f"{spec.lower().replace(':', '_')}_{'one' if T == 1 else 'few'}"
    linear = make.linear(T, K, (52, spec), bias=T > 1, residual=T == 1)
    return Case("linear", name, f"{spec}, T={T}", linear, gradients=T > 1, specs=(spec,))


def _experts_in_blocks(name: str, why: str, specs: tuple[str | None, ...], T: int = 7, **on: Any) -> Case:
    experts = make.experts(T, 6, 256, 256, 2, blocks=specs, **on)
    return Case("experts", name, why, experts, gradients=T > 1, specs=tuple(spec for spec in specs if spec))


_DEEPSEEK = Routing(top_k=4, score="sigmoid", scale=2.5, groups=4, top_groups=2, group_score="top2_sum")
_F32 = (torch.float32,)

CASES: tuple[Case, ...] = (
    Case("route", "qwen3", "128 experts, 8 of them, renormalised", make.logits(9, 128, Routing(top_k=8))),
    Case("route", "one_token", "T=1", make.logits(1, 64, Routing(top_k=6, renormalize=False))),
    Case("route", "no_token", "T=0", make.logits(0, 8, Routing(top_k=2), scale=True)),
    Case("route", "one_expert", "E=1", make.logits(5, 1, Routing(top_k=1))),
    Case("route", "all_experts", "top_k=E", make.logits(5, 7, Routing(top_k=7))),
    Case("route", "e60", "E not a power of two, below a warp pair", make.logits(6, 60, Routing(top_k=4))),
    Case("route", "e100", "E not a power of two", make.logits(6, 100, Routing(top_k=10))),
    Case("route", "e1000", "many experts, many slots", make.logits(3, 1000, Routing(top_k=64))),
    Case("route", "edges", "ties, -inf, NaN, +inf and too few candidates", make.edge_logits, gradients=False),
    Case("route", "softcap", "soft-capped logits", make.logits(6, 16, Routing(top_k=3, softcap=5.0))),
    Case("route", "softcap_masked", "a masked expert has no part in a soft-capped softmax", make.masked_softcap),
    Case("route", "sigmoid", "sigmoid scores, scaled",
         make.logits(6, 32, Routing(top_k=4, score="sigmoid", scale=2.5))),
    Case("route", "sqrtsoftplus", "DeepSeek-V4 scores",
         make.logits(6, 32, Routing(top_k=6, score="sqrtsoftplus", scale=1.5))),
    Case("route", "deepseek_v3", "bias selects, groups by their two best",
         make.logits(7, 32, _DEEPSEEK, bias=True), _F32),
    Case("route", "groups_max", "groups by their best", make.logits(7, 24, Routing(top_k=3, groups=6, top_groups=2))),
    Case("route", "scaled_after", "per-expert scale, then renormalised once more",
         make.logits(7, 24, Routing(top_k=3, renormalize_after_scale=True), scale=True)),
    Case("gate", "plain", "no norm", make.gate(5, 16, 64, Routing(top_k=4))),
    Case("gate", "norm", "RMSNorm and the normed x", make.gate(9, 60, 96, Routing(top_k=4), norm=True)),
    Case("gate", "one_token", "T=1, odd H", make.gate(1, 128, 67, Routing(top_k=8), norm=True)),
    Case("gate", "many", "more tokens than one launch takes on a GPU",
         make.gate(40, 24, 96, Routing(top_k=4), norm=True)),
    Case("gate", "no_token", "T=0", make.gate(0, 8, 16, Routing(top_k=2), norm=True, logit_bias=True, scale=True)),
    Case("gate", "gpt_oss", "bias on the logits", make.gate(4, 32, 64, Routing(top_k=4), logit_bias=True)),
    Case("gate", "gemma4", "norm and per-expert scale", make.gate(4, 32, 64, Routing(top_k=8), norm=True, scale=True)),
    Case("plan", "usual", "every token to distinct experts", make.plan(33, 16, 4), _F32, False),
    Case("plan", "messy", "sentinels on both sides, duplicates",
         make.plan(50, 7, 3, make.messy_ids(50, 3, 7)), _F32, False),
    Case("plan", "no_token", "T=0", make.plan(0, 8, 2), _F32, False),
    Case("plan", "one_expert", "E=1", make.plan(9, 1, 1), _F32, False),
    Case("plan", "e1000", "many experts, most of them empty", make.plan(20, 1000, 8), _F32, False),
    Case("plan", "many", "more assignments than an int16 holds", make.plan(9000, 64, 4), _F32, False),
    Case("grouped_linear", "up", "the up product", make.grouped_linear(17, 8, 48, 64, 3, True, False)),
    Case("grouped_linear", "down", "the down product", make.grouped_linear(17, 8, 64, 48, 3, False, True)),
    Case("grouped_linear", "odd", "no size a multiple of anything",
         make.grouped_linear(13, 5, 37, 51, 2, True, True, bias=True)),
    Case("grouped_linear", "slots", "gather from slot order",
         make.grouped_linear(11, 4, 32, 40, 2, True, False, slots=True)),
    Case("grouped_linear", "expert_major", "rows in and out expert-major",
         make.grouped_linear(11, 4, 32, 40, 2, False, False)),
    Case("grouped_linear", "messy", "sentinel rows are zero, duplicates count",
         make.grouped_linear(19, 6, 33, 32, 3, True, True, messy=True, bias=True)),
    Case("grouped_linear", "one_expert", "every row to the last expert",
         make.grouped_linear(70, 6, 40, 64, 2, True, False, one_expert=True)),
    Case("grouped_linear", "transposed", "weights strided, as the input gradient has them",
         make.grouped_linear(9, 4, 24, 40, 2, False, False, transposed=True)),
    Case("grouped_linear", "one_token", "T=1", make.grouped_linear(1, 16, 96, 128, 8, True, False)),
    Case("grouped_linear", "no_token", "T=0", make.grouped_linear(0, 4, 8, 16, 2, True, True, bias=True)),
    *(_grouped_in_blocks(name, name.lower(), f"{name} blocks") for name in FORMATS),
    *(_grouped_in_blocks(f"{name}:exact", f"{name.lower()}_exact", f"{name}, activations in f32") for name in FORMATS),
    Case("linear", "one_token", "T=1", make.linear(1, 96, (40, None))),
    Case("linear", "few", "T=5, all parts", make.linear(5, 64, (48, None), bias=True, residual=True)),
    Case("linear", "many", "more rows than one launch takes on a GPU", make.linear(40, 64, (48, None), residual=True)),
    Case("linear", "odd", "no size a multiple of anything, T=1",
         make.linear(1, 67, (37, None), bias=True, residual=True)),
    Case("linear", "odd_few", "the same, T=13", make.linear(13, 67, (37, None), bias=True, residual=True)),
    Case("linear", "qkv", "three weights of the same rows, T=1",
         make.linear(1, 96, (64, None), (19, None), (16, None), bias=True)),
    Case("linear", "qkv_few", "the same, T=7", make.linear(7, 64, (64, None), (19, None), (16, None), bias=True)),
    Case("linear", "four_many", "four weights, T=33",
         make.linear(33, 64, (40, None), (24, None), (16, None), (9, None), bias=True)),
    Case("linear", "no_token", "T=0", make.linear(0, 64, (40, None), (24, None), bias=True)),
    *(_linear_in_blocks(name, 5) for name in FORMATS),
    *(_linear_in_blocks(f"{name}:exact", 1) for name in FORMATS),
    *(
        Case("linear", f"mixed_{name}", f"two formats and numbers, T={T}",
             make.linear(T, 512, (48, "Q4_K:exact"), (24, None), (16, "Q6_K:exact"), bias=True),
             specs=("Q4_K:exact", "Q6_K:exact"), gradients=T > 1)
        for name, T in (("one", 1), ("few", 3), ("many", 40))
    ),
    Case("linear", "q4_k_residual_many", "blocks and a residual, T=40",
         make.linear(40, 256, (48, "Q4_K:exact"), residual=True), specs=("Q4_K:exact",)),
    Case("grouped_outer", "up", "gradient of the up product", make.outer(21, 5, 24, 40, 3, True, False), DTYPES, False),
    Case("grouped_outer", "down", "of the down product", make.outer(21, 5, 33, 29, 3, False, True), DTYPES, False),
    Case("grouped_outer", "no_token", "T=0: all zero", make.outer(0, 3, 8, 8, 2, True, False), DTYPES, False),
    *(
        Case("glu", kind, f"{kind}, gated", make.glu((6, 3, 40), kind))
        for kind in ACTIVATION_KINDS
    ),
    *(
        Case("glu", f"{kind}_plain", f"{kind}, ungated", make.glu((7, 23), Activation(kind, gated=False)))
        for kind in ("silu", "gelu_tanh", "gelu", "relu2", "swiglu_oai")
    ),
    Case("glu", "interleaved", "even gate, odd up", make.glu((5, 46), "silu", "interleaved")),
    Case("glu", "apart", "gate and up as two tensors", make.glu((5, 31), "silu", apart=True)),
    Case("glu", "vector", "one dimension", make.glu((34,), "gelu_tanh")),
    Case("glu", "empty", "no row", make.glu((0, 16), "silu")),
    Case("combine", "sum", "the weighted sum alone", make.combine(7, 4, 40)),
    Case("combine", "expert_major", "rows found through inverse", make.combine(7, 4, 33, "inverse")),
    Case("combine", "shared", "shared expert added plainly", make.combine(5, 2, 64, "shared")),
    Case("combine", "shared_gate", "shared expert with a gate", make.combine(5, 2, 64, "shared", "shared_gate")),
    Case("combine", "qwen3_5", "shared expert with a logit, residual",
         make.combine(5, 8, 64, "shared", "shared_logit", "residual")),
    Case("combine", "residual_norm", "residual and the next norm", make.combine(9, 8, 96, "residual", "norm_weight")),
    Case("combine", "everything", "every part at once",
         make.combine(6, 3, 51, "inverse", "shared", "shared_logit", "residual", "norm_weight")),
    Case("combine", "one_token", "T=1", make.combine(1, 8, 128, "residual", "norm_weight")),
    Case("combine", "no_token", "T=0", make.combine(0, 4, 16, "shared", "shared_logit", "residual", "norm_weight")),
    # No gradients: at T=1 that of the shared expert's gate is one sum, which may cancel to nothing.
    Case("experts", "decode", "T=1", make.experts(1, 16, 96, 64, 4, tail=True), gradients=False),
    Case("experts", "few", "few tokens, each expert a row or two", make.experts(6, 16, 64, 48, 4)),
    Case("experts", "prefill", "many rows per expert", make.experts(90, 4, 64, 80, 2, tail=True)),
    Case("experts", "odd", "no size a multiple of anything", make.experts(13, 5, 51, 37, 3, bias=True)),
    Case("experts", "messy", "sentinels and duplicates",
         make.experts(15, 6, 48, 32, 3, messy=True, tail=True, bias=True)),
    Case("experts", "one_expert", "every token to expert 0, twice", make.experts(40, 5, 48, 32, 2, one_expert=True)),
    Case("experts", "all_experts", "top_k=E", make.experts(9, 6, 48, 32, 6)),
    Case("experts", "single", "E=1", make.experts(9, 1, 48, 32, 1)),
    Case("experts", "gpt_oss", "interleaved, biases, clamped",
         make.experts(9, 8, 64, 48, 4, activation="swiglu_oai", layout="interleaved", bias=True)),
    Case("experts", "gemma4", "gelu_tanh", make.experts(9, 8, 44, 36, 4, activation="gelu_tanh")),
    Case("experts", "nemotron", "ungated relu2",
         make.experts(9, 8, 48, 36, 2, activation=Activation("relu2", gated=False), bias=True)),
    Case("experts", "apart", "gate and up as two stacks", make.experts(9, 8, 48, 36, 2, apart=True, bias=True)),
    Case("experts", "strided", "non-contiguous x, weights and stack", make.experts(9, 4, 32, 24, 2, strided=True)),
    Case("experts", "no_token", "T=0", make.experts(0, 4, 16, 8, 2, tail=True, bias=True)),
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
    Case("moe", "qwen3", "the whole block", make.moe(7, 16, 64, 48, Routing(top_k=4))),
    Case("moe", "decode", "the whole block, T=1", make.moe(1, 32, 96, 32, Routing(top_k=8))),
    Case("moe", "no_token", "T=0", make.moe(0, 8, 16, 8, Routing(top_k=2))),
    Case("rope", "whole", "every value turns, angles per sequence",
         make.rope(2, 3, 4, 2, 64, 64, apart=True), gradients=False),
    Case("rope", "partial", "some values stay; no size a multiple of anything",
         make.rope(2, 2, 5, 3, 34, 10, norm=True), gradients=False),
    Case("rope", "decode", "one token to its place, as Qwen3 has it",
         make.rope(1, 1, 8, 2, 128, 128, norm=True, places=9, position=5), gradients=False),
    Case("rope", "rounded", "angles in the type of q, the last places",
         make.rope(2, 3, 4, 1, 80, 32, rounded=True, places=7, position=4), gradients=False),
    Case("rope", "dropped", "tokens behind the last place",
         make.rope(1, 4, 2, 2, 96, 96, places=5, position=3), gradients=False),
    Case("rope", "no_token", "S=0", make.rope(2, 0, 4, 2, 16, 16, norm=True, places=4, position=0), gradients=False),
    Case("attend", "first", "a query that sees itself alone", make.attend(2, 4, 4, 64, 9, 0), gradients=False),
    Case("attend", "second", "two places", make.attend(1, 8, 2, 80, 9, 1), gradients=False),
    Case("attend", "group", "eight heads share their keys", make.attend(2, 16, 2, 96, 70, 69), gradients=False),
    Case("attend", "large", "sixteen heads of 256 values", make.attend(1, 16, 1, 256, 60, 37), gradients=False),
    Case("attend", "long", "many places, in parts", make.attend(1, 8, 2, 128, 700, 650), gradients=False),
    Case("attend", "batch", "many sequences: several tiles in a part",
         make.attend(11, 8, 8, 32, 120, 117), gradients=False),
    Case("attend", "window", "only the last places",
         make.attend(2, 4, 1, 64, 300, 290, window=100), gradients=False),
    Case("attend", "gpt_oss", "a window, a sink for each head, a scale",
         make.attend(1, 16, 2, 64, 200, 150, window=64, sinks=True), gradients=False),
    Case("attend", "mask", "places left out", make.attend(3, 4, 2, 48, 90, 80, mask=True), gradients=False),
    Case("attend", "everything", "every part at once, values of another size",
         make.attend(3, 6, 2, 40, 140, 139, mask=True, sinks=True, window=77, Dv=24), gradients=False),
    Case("attend", "nothing", "a query that sees nothing, beside one that does",
         make.attend(2, 4, 2, 32, 40, 30, mask=True, blind=True, sinks=True), gradients=False),
    Case("attend", "no_token", "B=0", make.attend(0, 4, 2, 16, 8, 3), gradients=False),
)  # fmt: skip


def support_table() -> str:
    """Which backend has a kernel for which op and format, backward ops included, and what the cases cover."""
    names = [row.name for row in backends.BACKENDS]
    rows = [(op, [_runs(row, op) for row in backends.BACKENDS], _covered(op)) for op in _every_op()]
    lines = [f"| op | {' | '.join(names)} | cases |", "|---" * (len(names) + 2) + "|"]
    lines += [f"| {op} | {' | '.join(cells)} | {covered} |" for op, cells, covered in rows]
    lines += ["", f"| weights in blocks | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for op in filter(_takes_blocks, _every_op()):
        cells = [_formats_run(row, op) for row in backends.BACKENDS]
        lines.append(f"| {op} | {' | '.join(cells)} |")
    lines += ["", f"| format | bits | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for name, form in FORMATS.items():
        cells = ["kernel" if name in formats_of(backend) else backends.REFERENCE for backend in names]
        lines.append(f"| {name} | {form.bits:.4g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _every_op() -> list[str]:
    """Those of the case table, then those that only gradients call."""
    return [*dict.fromkeys(case.op for case in CASES), *sorted(set(REFERENCES) - {case.op for case in CASES})]


def _covered(op: str) -> str:
    names = [case.name for case in CASES if case.op == op]
    return ", ".join(names) or "the gradients of the cases above"


def _runs(row: backends.Backend, op: str) -> str:
    has = row.load().OPS if row.exists() else {}
    if not all(part in has for part in _parts_of(op)):
        return backends.REFERENCE
    return (
        "kernel" if "experts" not in _parts_of(op) or row.saves() else f"kernel; under gradients {backends.REFERENCE}"
    )


def _takes_blocks(op: str) -> bool:
    """Whether a weight is among its arguments, alone or in a bundle."""
    kinds = ("Weight", "QuantTensor", "Stacks", "Projections")
    return any(p.annotation in kinds for part in _parts_of(op) for p in signature(REFERENCES[part]).parameters.values())


def _formats_run(row: backends.Backend, op: str) -> str:
    """The formats that a backend's kernel for an op takes."""
    runs, formats = _runs(row, op), formats_of(row.name)
    if runs == backends.REFERENCE or not formats:
        return backends.REFERENCE
    some = f"all {len(FORMATS)}" if len(formats) == len(FORMATS) else ", ".join(f for f in FORMATS if f in formats)
    return runs.replace("kernel", some)
