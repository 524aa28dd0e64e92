"""Tensors as users have them: strided, expanded, negated, overlapping. Values count, not where they lie."""

import pytest
import torch

import moefuse
from moefuse.ops._core import memory, replay, select
from moefuse.ops._core.memory import settle
from moefuse.quant.arrange import PLANES
from moefuse.testing import cases
from moefuse.testing.strange import FORMS, strange_cases, strange_forms, tensors_in

from . import fuzz

STRANGE = [pytest.param(case, strange, id=f"{case.id}-{strange}") for case, strange in strange_cases(cases.CASES)]


@pytest.mark.parametrize(("case", "strange"), STRANGE)
def test_strange_memory(case, strange, target, rng):
    if not cases.dtypes_of(case, target[0]):
        pytest.skip(f"{target[0]} has no kernel for {', '.join((case.op, *case.formats))}")
    for arrangement in (None, PLANES) if case.specs else (None,):
        given = {"gradients": not case.specs, "strange": strange, "arrangement": arrangement}
        outcome = cases.run(case, torch.float32, *target, rng.initial_seed(), **given)
        assert outcome.passed, outcome.describe()


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in cases.CASES if not case.specs], ids=lambda case: case.id)
def test_strange_memory_at_length(case, target, rng):
    for strange in strange_forms(case):
        for dtype in cases.dtypes_of(case, target[0]):
            outcome = cases.run(case, dtype, *target, rng.initial_seed(), strange=strange)
            assert outcome.passed, outcome.describe()


@pytest.mark.parametrize("op", fuzz.OPS)
def test_random_calls(op, target, rng):
    """A few of what `fuzz.py` draws by the thousand."""
    outcomes = [fuzz.one(op, rng.initial_seed() + i, *target) for i in range(60)]
    wrong = [(rng.initial_seed() + i, outcome) for i, outcome in enumerate(outcomes) if outcome not in (None, "again")]
    assert not wrong
    assert outcomes.count(None) > 10


def test_forms_keep_values_and_are_what_they_say(rng):
    t = torch.randn(4, 6, generator=rng)
    made = {name: form(t) for name, form in FORMS.items()}
    for name, view in made.items():
        assert torch.equal(view, t[:1].expand(t.shape) if name == "expanded" else t), name
        assert name == "offset" or not memory.is_settled(view, False), name
    assert made["offset"].data_ptr() % 16 == 4
    assert made["negated"].is_neg()
    assert made["expanded"].stride() == (0, 1)


def test_a_backend_sees_settled_tensors_alone(monkeypatch):
    """Whatever the caller has, in place or through autograd."""
    seen = []

    def spy(op, run):
        def call(*values):
            seen.extend((op, t) for value in values for t in tensors_in(value))
            return run(*values)

        return call

    if select.backends.BACKENDS[0].missing():
        pytest.skip("the CPU's kernels are not built here")
    cpu = select.backends.BACKENDS[0].load()
    monkeypatch.setattr(cpu, "OPS", {op: spy(op, run) for op, run in cpu.OPS.items()})
    select.forget()
    try:
        x, ids = FORMS["negated"](torch.randn(3, 8)).requires_grad_(), torch.tensor([[1, 9], [0, 9], [1, 9]])[:, :1]
        gate_up, down = torch.randn(2, 8, 8), torch.randn(2, 4, 8).transpose(1, 2)
        moefuse.experts(x, ids, FORMS["every second"](torch.rand(3, 1)), gate_up, down).sum().backward()
    finally:
        select.forget()
    assert {op for op, _ in seen} >= {"plan", "experts", "experts_backward"}
    for op, t in seen:
        assert memory.is_settled(t, t.dim() == 3), (op, t.stride(), t.is_neg())


def test_a_transposed_stack_is_not_copied():
    weight = torch.randn(4, 6, 5).transpose(1, 2)
    assert settle(weight, True) is weight
    assert settle(weight, False) is not weight
    assert settle(weight[:, ::2, ::2], True).is_contiguous()


def test_the_sign_of_a_view_is_no_part_of_what_is_remembered():
    """A call like one before, with the same strides and another sign, does not repeat it."""
    x, router = torch.randn(2, 8), torch.randn(4, 8)
    rule = moefuse.Routing(2)
    for _ in range(3):
        weights, ids = moefuse.gate(x, router, rule)
        flipped = moefuse.gate(torch._neg_view(-x), router, rule)
        assert torch.equal(flipped[0], weights)
        assert torch.equal(flipped[1], ids)
    assert replay.lookup("gate", None, (torch._neg_view(x),)) is None


def test_zeros_without_memory_are_zeros():
    """What torch hands around in place of gradients that are zero; the third call would be replayed."""
    x, router, rule = torch.randn(2, 8), torch.randn(4, 8), moefuse.Routing(2)
    for zeros in (torch.zeros(2, 8), *(torch._efficientzerotensor((2, 8)) for _ in range(3))):
        assert torch.equal(moefuse.glu(zeros, "silu"), torch.zeros(2, 4))
        assert moefuse.gate(zeros, router, rule)[1].tolist() == [[0, 1], [0, 1]]
        assert torch.equal(moefuse.linear(zeros, router), torch.zeros(2, 4))
        moefuse.gate(x, router, rule)


def test_results_lie_with_the_tensors_whatever_the_default_device_is():
    def run():
        x = torch.ones(2, 8, device="cpu").requires_grad_()
        stacks = (torch.ones(shape, device="cpu").requires_grad_() for shape in ((4, 8, 8), (4, 8, 4)))
        router = torch.eye(4, 8, device="cpu")
        out = moefuse.moe(x, router, *stacks, moefuse.Routing(2))
        (grad,) = torch.autograd.grad(out.sum(), x)
        rows = moefuse.linear(moefuse.glu(x.detach(), "silu"), router[:, :4])
        return (
            out.detach(),
            grad,
            rows,
            *moefuse.route(x.detach(), moefuse.Routing(2)),
            moefuse.plan(x.detach().int(), 4).order,
        )

    want = run()
    for _ in range(3):
        with torch.device("meta"):
            got = run()
        assert all(map(torch.equal, got, want))


T, H, E, I, K = 3, 8, 4, 4, 2


def combine_args(**more):
    return {"y": torch.randn(T * K, H), "weights": torch.rand(T, K), **more}


def experts_args(**more):
    return {
        "x": torch.randn(T, H), "ids": torch.randint(0, E, (T, K)), "weights": torch.rand(T, K),
        "gate_up": torch.randn(E, 2 * I, H), "down": torch.randn(E, H, I), **more,
    }  # fmt: skip


def moe_args(**more):
    return {
        "x": torch.randn(T, H), "router": torch.randn(E, H), "gate_up": torch.randn(E, 2 * I, H),
        "down": torch.randn(E, H, I), "routing": moefuse.Routing(K), **more,
    }  # fmt: skip


OPS = {"combine": combine_args, "experts": experts_args, "moe": moe_args}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["x", "shared", "residual"])
def test_an_output_may_be_an_input_itself(op, name, target):
    backend, device = target
    if (op, name) == ("combine", "x"):
        pytest.skip("combine has no x")
    given = OPS[op](residual=torch.randn(T, H), shared=torch.randn(T, H))
    given = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    norm = {"moe": "next_norm_weight"}.get(op, "norm_weight")
    given[norm] = torch.rand(H, device=device)
    call = getattr(moefuse, op)
    want = call(**given, backend=backend)
    for which in ("out", "normed_out"):
        for _ in range(2):  # checked, then repeated
            again = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
            got = call(**again, **{which: again[name]}, backend=backend)
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other)


def overlapping(op):
    """Keyword arguments that cannot work, with the input that an output lies in."""
    flat = torch.randn(E * H * I + T * H)
    rows, later = flat[: T * H].view(T, H), flat[H : H + T * H].view(T, H)
    norm = "next_norm_weight" if op == "moe" else "norm_weight"
    yield "residual", {"residual": later, "out": rows}
    yield "residual", {"residual": rows, "out": flat.view(torch.bfloat16)[: T * H].view(T, H)}
    yield "shared", {"shared": flat[: 2 * T * H].view(T, 2 * H)[:, :H], "out": rows}
    yield norm, {norm: flat[H : 2 * H], "out": rows}
    yield norm, {norm: flat[:H], "normed_out": rows}
    yield "normed_out", {norm: torch.rand(H), "out": rows, "normed_out": rows}
    if op != "combine":
        yield "x", {"x": later, "out": rows}
        yield "down", {"down": flat[: E * H * I].view(E, H, I), "out": rows}


@pytest.mark.parametrize("op", OPS)
def test_outputs_that_overlap_are_refused_before_anything_is_written(op):
    for name, more in overlapping(op):
        given = OPS[op](**more)
        before = {n: t.clone() for n, t in given.items() if isinstance(t, torch.Tensor)}
        with pytest.raises(ValueError, match=rf"{op}: (out|normed_out) must .*not overlap {name},"):
            getattr(moefuse, op)(**given)
        for n, t in before.items():
            assert torch.equal(given[n], t), n


@pytest.mark.parametrize("op", OPS)
def test_a_repeated_call_is_checked_for_overlap_too(op):
    call, flat = getattr(moefuse, op), torch.randn(4 * T * H)
    given = OPS[op](residual=flat[T * H : 2 * T * H].view(T, H))
    for _ in range(3):
        call(**given, out=flat[: T * H].view(T, H))
    with pytest.raises(ValueError, match="not overlap residual"):
        call(**given, out=flat[2 * H : 2 * H + T * H].view(T, H))


@pytest.mark.parametrize("op", OPS)
def test_a_negated_output_is_refused(op):
    with pytest.raises(ValueError, match=f"{op}: out must hold its numbers as they are"):
        getattr(moefuse, op)(**OPS[op](), out=torch._neg_view(torch.empty(T, H)))
