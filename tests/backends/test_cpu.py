"""The CPU kernels: every instruction set, the same bits whatever the threads, forks, callers, and life without them."""

import os
from collections.abc import Iterator

import pytest
import torch
from callers import run_callers
from hypothesis import given, settings
from hypothesis import strategies as st

import moefuse
from moefuse import config
from moefuse.backends import cpu
from moefuse.cli.info import facts
from moefuse.ops._core import select
from moefuse.testing import cases
from moefuse.testing.compare import difference

ISAS = cpu.describe()["isas"]


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MOEFUSE_CPU_ISA", request.param)
    select.forget()
    yield request.param
    monkeypatch.undo()
    select.forget()
    assert cpu.unavailable() is None


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def layer(T: int, E: int, H: int, I: int, top_k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = cases.Inputs(torch.Generator().manual_seed(int(torch.randint(2**31, ()))), dtype)
    return {
        "x": made.normal(T, H), "ids": made.ids(T, top_k, E), "weights": made.shares(T, top_k),
        "gate_up": made.weight(E, 2 * I, H), "down": made.weight(E, H, I), "residual": made.normal(T, H),
        "norm_weight": made.uniform(H),
    }  # fmt: skip


def run_layer(made: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat(moefuse.experts(**made, backend="cpu"), -1)


def test_the_best_instruction_set_is_the_default() -> None:
    assert "portable" in ISAS
    assert cpu.describe()["isa"] == ISAS[0]


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.usefixtures("threads")
def test_the_case_table_on_every_instruction_set(isa: str) -> None:
    """On several threads: a worker of a parallel run has one unless it asks."""
    torch.set_num_threads(3)
    seed = int(torch.randint(2**31, ()))
    for call in cases.sweep(cases.CASES, [("cpu", "cpu")], seed):
        outcome = call()
        assert outcome.passed, f"{isa}: {outcome.describe()}"
    assert cpu.describe()["isa"] == isa


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.usefixtures("threads")
def test_the_same_bits_whatever_the_threads(isa: str, dtype: torch.dtype, T: int) -> None:
    made = layer(T, 12, 160, 96, 3, dtype)
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(run_layer(made))
    assert all(torch.equal(results[0], other) for other in results[1:]), isa


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("B", "Hq", "Hk", "L"), [(1, 8, 2, 1500), (3, 4, 4, 300), (1, 70, 1, 700)])
@pytest.mark.usefixtures("threads")
def test_the_same_attention_whatever_the_threads(
    isa: str, dtype: torch.dtype, B: int, Hq: int, Hk: int, L: int, rng: torch.Generator
) -> None:
    """Fewer heads of keys than threads and more, and more queries to one than a product takes at once."""
    made = cases.Inputs(rng, dtype)
    q, keys, values = made.normal(B, Hq, 64), made.normal(B, Hk, L, 64), made.normal(B, Hk, L, 64)
    results = []
    for count in (1, 2, 3, 5, 2):
        torch.set_num_threads(count)
        results.append(moefuse.attend(q, keys, values, torch.tensor(L - 2), backend="cpu"))
    assert all(torch.equal(results[0], other) for other in results[1:]), isa
    wide = (t.double() for t in (q, keys, values))
    want = moefuse.attend(*wide, torch.tensor(L - 2), backend="reference")
    assert difference(results[0], want).within(cases.tolerance_of("attend", "out", want, dtype))


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.usefixtures("threads")
def test_the_same_gradients_whatever_the_threads(isa: str, dtype: torch.dtype, T: int) -> None:
    """More rows per expert than a block of the products, and more columns."""
    made = layer(T, 3, 300, 290, 3, dtype)
    leaves = {name: t.requires_grad_() for name, t in made.items() if t.is_floating_point()}
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        out = torch.cat(moefuse.experts(**made, backend="cpu"), -1)
        results.append(torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out)))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), isa


@pytest.mark.parametrize("isa", ISAS, indirect=True)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("T", [1, 5, 60])
@pytest.mark.usefixtures("threads")
def test_linear_has_the_same_bits_whatever_the_threads(isa: str, dtype: torch.dtype, T: int) -> None:
    made = cases.Inputs(torch.Generator().manual_seed(int(torch.randint(2**31, ()))), dtype)
    x = made.normal(T, 512)
    weights = made.weight(700, 512), made.stack("Q4_K", 300, 512), made.stack("Q8_0:exact", 77, 512)
    results = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        results.append(torch.cat(moefuse.linear(x, weights, backend="cpu"), 1))
    assert all(torch.equal(results[0], other) for other in results[1:]), isa


def test_a_row_does_not_depend_on_its_batch() -> None:
    made = layer(40, 6, 128, 64, 2, torch.bfloat16)
    whole = run_layer(made)
    alone = {name: t[7:8] if t.shape[0] == 40 else t for name, t in made.items()}
    assert torch.equal(whole[7:8], run_layer(alone))


@pytest.mark.parametrize("spec", [None, *cpu._native.FORMATS, *(f"{name}:exact" for name in cpu._native.FORMATS)])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.usefixtures("threads")
def test_no_bit_depends_on_threads_or_other_rows(dtype: torch.dtype, spec: str | None, rng: torch.Generator) -> None:
    """Sizes that are worth 16 threads. From the third count on calls are replayed."""
    T, E, H, I, top_k = 6, 4, 512, 512, 3
    made = cases.Inputs(rng, dtype)
    x, ids, weights = made.normal(T, H), made.ids(T, top_k, E), made.shares(T, top_k)
    gate_up, down, router = made.stack(spec, E, 2 * I, H), made.stack(spec, E, H, I), made.weight(E, H)
    rule = moefuse.Routing(top_k)

    def run(rows: slice) -> dict[str, torch.Tensor]:
        some, chosen, shares = x[rows].clone(), ids[rows].clone(), weights[rows].clone()
        plan = moefuse.plan(chosen, E)
        return {
            "experts": moefuse.experts(some, chosen, shares, gate_up, down, backend="cpu"),
            "moe": moefuse.moe(some, router, gate_up, down, rule, backend="cpu"),
            "linear": moefuse.linear(some, down[1], backend="cpu"),
            "grouped_linear": moefuse.grouped_linear(
                some, gate_up, plan, gather=True, scatter=True, backend="cpu"
            ).unflatten(0, (-1, top_k)),
        }

    torch.set_num_threads(1)
    whole = run(slice(T))
    for count in (2, 8, 16):
        torch.set_num_threads(count)
        for rows in (slice(T), slice(2, 3), slice(1, 5)):
            for op, got in run(rows).items():
                assert torch.equal(got, whole[op][rows]), (op, count, rows)


def test_several_callers_at_once() -> None:
    made = [layer(9, 8, 128, 64, 2, torch.float32) for _ in range(4)]
    want = [run_layer(one) for one in made]
    run_callers(lambda i: torch.equal(run_layer(made[i]), want[i]), 30)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_computes_too() -> None:
    made = layer(20, 8, 128, 64, 2, torch.float32)
    want = run_layer(made)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run_layer(made), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(run_layer(made), want)


def test_an_unknown_instruction_set_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked for, so nothing moves on to another backend."""
    monkeypatch.setenv("MOEFUSE_CPU_ISA", "sse9")
    select.forget()
    with pytest.raises(ValueError, match=r"MOEFUSE_CPU_ISA must be one .*portable.*, got 'sse9'"):
        moefuse.route(torch.randn(2, 8), moefuse.Routing(top_k=2))
    monkeypatch.undo()
    select.forget()
    assert cpu.unavailable() is None


def test_without_the_native_library_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu._native, "core", None)
    monkeypatch.setattr(cpu._native, "import_error", "No module named '_core'")
    select.forget()
    weights, _ = moefuse.route(torch.randn(2, 8), moefuse.Routing(top_k=2))
    assert weights.shape == (2, 2)
    assert "were not built with this install" in caplog.text
    assert config.rebuild() in caplog.text
    with pytest.raises(ValueError, match="were not built with this install"):
        moefuse.route(torch.randn(2, 8), moefuse.Routing(top_k=2), backend="cpu")
    shown = next(row for row in facts()["backends"] if row["name"] == "cpu")
    assert not shown["runs"]
    assert config.rebuild() in shown["reason"]
    monkeypatch.undo()
    select.forget()


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(
    T=st.integers(0, 40),
    E=st.integers(1, 12),
    H=st.integers(1, 150),
    I=st.integers(1, 100),
    top_k=st.integers(1, 6),
    dtype=st.sampled_from(cases.DTYPES),
    kind=st.sampled_from(("silu", "gelu_tanh", "relu2", "swiglu_oai")),
    interleaved=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_random_shapes_against_float64(
    T: int, E: int, H: int, I: int, top_k: int, dtype: torch.dtype, kind: str, interleaved: bool, seed: int
) -> None:
    """Experts with sentinels and duplicates, biases and residual.

    The residual stands beside the result when errors are taken relative to the row: where the two cancel, the row has
    the size of its terms.
    """
    made = cases.Inputs(torch.Generator().manual_seed(seed), dtype)
    arguments = {
        "x": made.normal(T, H), "ids": torch.randint(-1, E + 1, (T, top_k), generator=made.rng),
        "weights": made.shares(T, top_k), "gate_up": made.weight(E, 2 * I, H), "down": made.weight(E, H, I),
        "gate_up_bias": made.normal(E, 2 * I), "down_bias": made.normal(E, H),
        "residual": made.uniform(T, H, low=4.0, high=6.0),
    }  # fmt: skip
    options = {"activation": kind, "layout": "interleaved" if interleaved else "halves"}
    got = moefuse.experts(**arguments, **options, backend="cpu")
    wide = {name: t.double() if t.is_floating_point() else t for name, t in arguments.items()}
    want = moefuse.experts(**wide, **options, backend="reference")
    bound = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    got, want = torch.cat((got, arguments["residual"]), -1), torch.cat((want, wide["residual"]), -1)
    assert difference(got, want).worst <= bound
