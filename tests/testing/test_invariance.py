"""moefuse.invariant: a row's bits in every batch, on every backend; and a check that sees a kernel that breaks it."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import moefuse
from moefuse import Routing, backends, config
from moefuse.cli import app
from moefuse.ops._core import invariance as mode
from moefuse.ops._core import replay, select
from moefuse.testing import cases, invariance

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))
from metal_target import TARGET as METAL
from metal_target import simulated

INTERPRETED = config.triton_interpreted() and not torch.cuda.is_available()
TRITON = ("triton", "cpu" if INTERPRETED else "cuda")


def differing(targets: list[tuple[str, str]], batches: int, seed: int, **options: Any) -> list[str]:
    """What differs; and something was compared of every kind."""
    found = list(invariance.comparisons(targets, batches, seed, **options))
    assert len(found) >= batches
    assert any(one.draw.gradients for one in found)
    return [one.describe() for one in found if not one.passed]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_the_cpu_gives_a_row_the_same_bits_in_every_batch(dtype: torch.dtype, drawn_seed: int) -> None:
    found = list(invariance.comparisons([("cpu", "cpu")], 190, drawn_seed, dtypes=[dtype]))
    assert {one.case.op for one in found} == set(invariance._OWN)
    assert [one.describe() for one in found if not one.passed] == []
    assert any(one.draw.gradients for one in found)
    assert max(len(one.draw.tokens) for one in found) > 64


_SMALL = {"experts/few", "experts/messy", "moe/qwen3", "gate/norm", "combine/everything", "glu/silu", "attend/mask"}


@pytest.mark.skipif(not INTERPRETED, reason="the card is checked by its command")
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_the_interpreter_does(dtype: torch.dtype, drawn_seed: int) -> None:
    few = [case for case in cases.CASES if case.id in _SMALL | {"linear/few", "linear/q8_0_few"}]
    assert differing([TRITON], len(few) + 2, drawn_seed, cases=few, dtypes=[dtype], most=6) == []


def test_the_simulator_does(drawn_seed: int) -> None:
    few = [case for case in cases.CASES if case.id in _SMALL | {"experts/q4_k_both", "grouped_linear/odd"}]
    few = [case for case in few if case.op != "attend"]
    with simulated():
        assert differing([METAL], 2 * len(few), drawn_seed, cases=few, dtypes=[torch.float32], most=12) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", [("cpu", "cpu"), TRITON, METAL], ids=lambda pair: pair[0])
def test_more_of_all_that_the_table_has(target: tuple[str, str], drawn_seed: int) -> None:
    slow = target[0] != "cpu" and target[1] == "cpu"
    with simulated():
        # A third of the table, drawn anew in each run: all of it is a quarter of an hour in the interpreter.
        found = list(invariance.comparisons([target], 60 if slow else 3000, drawn_seed))
    assert [one.describe() for one in found if not one.passed] == []


_ACCURATE = _SMALL | {"experts/decode", "gate/one_token", "linear/one_token", "linear/qkv", "experts/q4_k_decode_exact"}


@pytest.mark.parametrize("target", [TRITON, METAL], ids=lambda pair: pair[0])
def test_the_one_path_is_as_exact_as_the_others(target: tuple[str, str], drawn_seed: int) -> None:
    if target == TRITON and not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("no card, no interpreter")
    slow = target == TRITON and INTERPRETED
    wanted = {"experts/decode", "gate/one_token", "linear/one_token", "attend/mask"} if slow else _ACCURATE
    with simulated(), moefuse.invariant():
        for case in cases.CASES:
            if case.id not in wanted or torch.float32 not in cases.dtypes_of(case, target[0]):
                continue
            trains = not slow and (target != METAL or case.op in ("glu", "combine"))
            outcome = cases.run(case, torch.float32, *target, drawn_seed, gradients=trains)
            assert outcome.passed, outcome.describe()


# A kernel that splits its sum by the number of rows.


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU's experts, with K of the down product summed in two parts from nine rows on."""
    ops = backends.find("cpu").load().OPS
    real = ops["experts"]

    def split(x: Tensor, ids: Tensor, weights: Tensor, stacks: Any, plan: Any, activation: Any, tail: Any, outputs: Any,
              z: Tensor | None) -> None:  # fmt: skip
        real(x, ids, weights, stacks, plan, activation, tail, outputs, z)
        down = stacks.down
        if x.shape[0] < 9 or not isinstance(down, Tensor) or tail != type(tail)(eps=tail.eps):
            return
        halves, half = [], down.shape[2] // 2
        for keep in (slice(0, half), slice(half, None)):
            part = torch.zeros_like(down)
            part[..., keep] = down[..., keep]
            out = type(outputs)(torch.empty_like(outputs.out))
            bias = stacks.down_bias if keep.start == 0 else None
            real(x, ids, weights, stacks._replace(down=part, down_bias=bias), plan, activation, tail, out, None)
            halves.append(out.out)
        outputs.out.copy_(halves[0] + halves[1])

    monkeypatch.setitem(ops, "experts", split)
    select.forget()
    yield
    monkeypatch.undo()
    select.forget()


def checked(monkeypatch: pytest.MonkeyPatch, cases_: set[str], *words: str) -> tuple[str, dict[str, bool]]:
    """What the command says, and of which ops it found batches that differ."""
    few = tuple(case for case in cases.CASES if case.id in cases_)
    monkeypatch.setattr(sys.modules["moefuse.cli.check"], "CASES", few)
    words = ("check", "--invariant", "--seed", "1", *words)
    result = CliRunner(env={"COLUMNS": "150", "NO_COLOR": "1"}).invoke(app, words)
    lines = [line.split() for line in result.output.splitlines()]
    found: dict[str, bool] = {}
    for line in lines:
        if len(line) == 6 and line[1] in ("float32", "bfloat16", "float16"):
            found[line[2]] = found.get(line[2], False) or line[-1] != "0"
    assert result.exit_code == found["all"], result.output
    return result.output, found


@pytest.mark.usefixtures("broken")
def test_a_split_that_depends_on_the_number_of_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--backend", "cpu", "--batches", "24"]
    output, found = checked(monkeypatch, {"experts/few", "glu/silu"}, *words)
    assert found == {"experts": True, "glu": False, "all": True}
    assert "experts/few on cpu" in output
    assert "rows that differ from the token alone: out" in output.replace("\n", " ")


@pytest.mark.skipif(not INTERPRETED, reason="the card's tensor cores sum in one order, however deep a tile is")
def test_it_is_caught_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is cut into other parts over one row per expert."""
    from moefuse.backends.triton.runtime import tiles

    real = tiles._one_product_tile

    def split(load: float, *rest: Any) -> Any:
        return dataclasses.replace(real(load, *rest), k=16 if load > 1 else 32)

    monkeypatch.setattr(tiles, "_one_product_tile", split)
    words = ["--backend", "triton", "--batches", "4"]
    assert checked(monkeypatch, {"experts/all_experts", "glu/silu"}, *words)[1] == {
        "experts": True,
        "glu": False,
        "all": True,
    }


def test_it_is_caught_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens are matrix-vector products, as outside the mode."""
    outside = SimpleNamespace(invariant=lambda: False)
    monkeypatch.setattr(importlib.import_module("moefuse.backends.metal.experts"), "backends", outside)
    words = ["--backend", "metal", *(["--simulate"] if METAL[1] == "cpu" else []), "--batches", "12"]
    with simulated():
        found = checked(monkeypatch, {"experts/few", "glu/silu"}, *words)[1]
    assert found == {"experts": True, "glu": False, "all": True}


def test_a_path_that_is_chosen_by_the_number_of_rows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As linear's is outside the mode: were it to ask for nothing, the check would say so."""
    monkeypatch.setattr("moefuse.backends.cpu.linear.backends.invariant", lambda: False)
    long = [case for case in invariance.LARGE if case.id == "linear/long"]
    assert differing([("cpu", "cpu")], 12, 3, cases=long, dtypes=[torch.float32]) != []


def test_the_command_counts_what_it_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(case for case in cases.CASES if case.id in ("route/qwen3", "plan/usual", "combine/sum"))
    monkeypatch.setattr(sys.modules["moefuse.cli.check"], "CASES", few)
    runner = CliRunner(env={"COLUMNS": "100"})
    result = runner.invoke(app, ["check", "--invariant", "--backend", "cpu", "--batches", "4", "--seed", "7"])
    assert result.exit_code == 0, result.output
    assert "12 batches compared, 0 differ (seed 7)" in result.output
    words = ["check", "--invariant", "--backend", "cpu", "--batches", "4", "--seed", "7", "--processes", "2"]
    assert runner.invoke(app, words).output == result.output, "so many processes draw what one does"
    result = runner.invoke(app, ["check", "--invariant", "--backend", "cpu", "--batches", "4", "--json"])
    counted = json.loads(result.stdout)["batches"]
    assert sum(row["batches"] for row in counted) == 12
    assert all(row["rows_compared"] > 0 for row in counted)
    result = runner.invoke(app, ["check", "--invariant", "--backend", "reference"])
    assert result.exit_code == 2
    assert "plain torch gives a row other bits" in " ".join(result.output.replace("│", " ").split())


# The mode itself.


def layer(T: int, H: int = 64, I: int = 48, E: int = 8, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "x": torch.randn(T, H, dtype=dtype),
        "router": torch.randn(E, H, dtype=dtype) * H**-0.5,
        "gate_up": torch.randn(E, 2 * I, H, dtype=dtype) * H**-0.5,
        "down": torch.randn(E, H, I, dtype=dtype) * I**-0.5,
        "routing": Routing(top_k=2),
    }


def test_it_nests_and_ends_with_its_block() -> None:
    assert not mode.is_invariant()
    with moefuse.invariant():
        assert mode.is_invariant()
        with moefuse.invariant(False):
            assert not mode.is_invariant()
        assert mode.is_invariant()
        with pytest.raises(KeyError), moefuse.invariant(False):
            raise KeyError
        assert mode.is_invariant()

    @moefuse.invariant()
    def decorated(depth: int) -> bool:
        return decorated(depth - 1) if depth else mode.is_invariant()

    assert decorated(2)
    assert not mode.is_invariant()
    with pytest.raises(TypeError, match="invariant: enabled must be a bool, got int"):
        moefuse.invariant(1)  # type: ignore[arg-type]


@pytest.mark.parametrize(("value", "wanted"), [("1", "True"), ("0", "False"), ("", "False")])
def test_a_variable_does_the_same_for_a_program(value: str, wanted: str) -> None:
    code = "import moefuse; from moefuse.ops._core.invariance import is_invariant; print(is_invariant())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MOEFUSE_INVARIANT": value},
    )
    assert done.stdout.strip() == wanted


def test_a_wrong_variable_is_said_by_the_first_call() -> None:
    code = "import torch, moefuse; moefuse.linear(torch.ones(1, 2), torch.ones(3, 2))"
    variables = os.environ | {"MOEFUSE_INVARIANT": "yes"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
    assert "ValueError: MOEFUSE_INVARIANT must be 0 or 1, got 'yes'" in done.stderr


def test_plain_torch_is_refused_with_the_reason() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    ids = torch.tensor([[0, 1]])
    with moefuse.invariant():
        with pytest.raises(ValueError, match=r"linear: plain torch gives a row other bits .* inside invariant"):
            moefuse.linear(x, weight, backend="reference")
        with pytest.raises(ValueError, match="no backend can run this call: cpu: it has no float64 kernels"):
            moefuse.linear(x.double(), weight.double())
        assert moefuse.plan(ids, 2, backend="reference").counts.tolist() == [1, 1], "whole numbers are the same"
        with pytest.raises(ValueError, match="backend= must be one of cpu, triton, metal, reference, got 'cuda'"):
            moefuse.linear(x, weight, backend="cuda")
        with pytest.raises(TypeError, match="linear: backend must be a name, got int"):
            moefuse.linear(x, weight, backend=3)  # type: ignore[arg-type]


def seen_by_the_backend(monkeypatch: pytest.MonkeyPatch, *ops: str) -> list[tuple[str, bool]]:
    """Which of the CPU's functions ran, and whether each was asked to be invariant."""
    seen: list[tuple[str, bool]] = []
    table = backends.find("cpu").load().OPS

    def watched(op: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            seen.append((op, backends.invariant()))
            return real(*values)

        return run

    for op in ops:
        monkeypatch.setitem(table, op, watched(op, table[op]))
    select.forget()
    return seen


def test_gradients_have_the_mode_of_their_forward_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_by_the_backend(monkeypatch, "gate", "experts", "gate_backward", "experts_backward")
    arguments = layer(5)
    arguments["x"].requires_grad_()
    arguments["router"].requires_grad_()
    with moefuse.invariant():
        inside = moefuse.moe(**arguments)
    outside = moefuse.moe(**arguments)
    inside.sum().backward()
    assert dict(seen[-2:]) == {"experts_backward": True, "gate_backward": True}
    outside.sum().backward()
    assert dict(seen[-2:]) == {"experts_backward": False, "gate_backward": False}
    assert Counter(seen) == Counter((op, flag) for op in dict(seen) for flag in (True, False))
    monkeypatch.undo()
    select.forget()


def test_calls_that_are_known_are_known_by_their_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replay keeps of a call outside does not serve one inside, on any backend that records."""
    seen = seen_by_the_backend(monkeypatch, "gate", "experts")
    arguments = layer(3)
    for inside in (False, True, False):
        seen.clear()
        with moefuse.invariant(inside):
            for _ in range(3):
                moefuse.moe(**arguments)
        # The third is replayed, and so are all of a mode that was there before.
        assert {flag for op, flag in seen if op == "experts"} <= {inside}
        assert seen or not inside
    keys = [key for key in replay._RECORDS if key[0] == "moe"]
    assert len({backend for _, backend, *_ in keys}) == 2
    monkeypatch.undo()
    select.forget()


def test_a_compiled_program_is_made_anew_inside() -> None:
    """The graph names the mode, and what was compiled outside is not used inside."""
    from torch._dynamo.testing import EagerAndRecordGraphs

    arguments = layer(70)
    weight = torch.randn(40, 64)
    watch = EagerAndRecordGraphs()

    def block(x: Tensor) -> Tensor:
        return moefuse.linear(moefuse.moe(**{**arguments, "x": x}), weight)

    compiled = torch.compile(block, backend=watch, fullgraph=True)
    x = arguments["x"]
    with torch.no_grad():
        compiled(x)
        with moefuse.invariant():
            inside = compiled(x)
            assert torch.equal(inside, block(x))
            rows = torch.cat([block(x[i : i + 1]) for i in range(len(x))])
            assert torch.equal(inside, rows)
        compiled(x)
    assert ["+invariant" in graph.code for graph in watch.graphs] == [False, True]

    @torch.compile(backend=watch, fullgraph=True)
    def with_its_own(x: Tensor) -> Tensor:
        with moefuse.invariant():
            return block(x)

    with torch.no_grad():
        assert torch.equal(with_its_own(x), rows)
    assert not mode.is_invariant()


def test_compiled_with_gradients() -> None:
    arguments = layer(9)
    compiled = torch.compile(lambda x: moefuse.moe(**{**arguments, "x": x}), backend="aot_eager", fullgraph=True)
    grad = torch.randn(9, 64)

    def gradient(run: Callable[[Tensor], Tensor], x: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        out = run(x)
        return out.detach(), torch.autograd.grad(out, x, d)[0]

    x = arguments["x"]
    with moefuse.invariant():
        whole = gradient(compiled, x, grad)
        for rows in (slice(0, 2), slice(2, 3), slice(3, 9)):
            piece = gradient(lambda x: moefuse.moe(**{**arguments, "x": x}), x[rows], grad[rows])
            assert all(torch.equal(all_[rows], some) for all_, some in zip(whole, piece, strict=True))


# What holds for the gradients of weights.


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_weights_gradient_depends_on_its_own_rows_in_order(dtype: torch.dtype) -> None:
    """Tokens of other experts, and threads, change no bit of it; a cut into micro-batches may."""
    E, T = 6, 90
    arguments = layer(T, E=E, dtype=dtype)
    ids = torch.randint(E - 1, (T, 2))
    weights, d = torch.rand(T, 2), torch.randn(T, 64).to(dtype)

    def gradients(rows: Tensor, threads: int) -> tuple[Tensor, Tensor]:
        stacks = [arguments[name].detach().requires_grad_() for name in ("gate_up", "down")]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        out = moefuse.experts(arguments["x"][rows], ids[rows], weights[rows], *stacks)
        found = torch.autograd.grad(out, stacks, d[rows])
        torch.set_num_threads(before)
        return found

    whole = gradients(torch.arange(T), 1)
    for expert in range(E - 1):
        own = (ids == expert).any(-1).nonzero()[:, 0]
        assert len(own) > 9
        for threads in (1, 3):
            assert all(torch.equal(a[expert], b[expert]) for a, b in zip(whole, gradients(own, threads), strict=True))
    assert all(not t[E - 1].any() for t in whole), "an expert without rows"
    cut = [gradients(rows, 1) for rows in torch.arange(T).split(T // 2)]
    summed = [a + b for a, b in zip(*cut, strict=True)]
    assert any(not torch.equal(a, b) for a, b in zip(whole, summed, strict=True)), "as docs/determinism.md says"


# What Triton would run on a card.


def test_no_choice_of_triton_goes_by_the_number_of_rows() -> None:
    from moefuse.backends.triton.runtime import tiles

    device, loads = torch.device("cpu"), (0.01, 1, 3, 7, 20, 60, 200, 5000)
    choices: list[Callable[[float], Any]] = [
        lambda load: tiles.decodes(int(load)),
        lambda load: tiles.is_one_launch(int(load), 64),
        lambda load: tiles.decodes_first(load, 2),
    ]
    for size in (2, 4):
        for gated in (False, True):
            for form in ("", "Q4_K"):
                choices.append(lambda load, s=size, g=gated, f=form: tiles.product_tile(load, s, g, device, f))
        choices += [lambda load, s=size, b=b: tiles.transposed_tile(load, s, device, b) for b in (False, True)]
    interpreted = tiles.INTERPRETED
    for tiles.INTERPRETED in (True, False):
        chosen = [{choose(load) for load in loads} for choose in choices]
        assert interpreted != tiles.INTERPRETED or any(len(found) > 1 for found in chosen)
        pinned = [{backends.invariantly(choose)(load) for load in loads} for choose in choices]
        # The height of a tile chooses what multiplies; its width and depth do not show in what it sums.
        heights = [{tile.m if isinstance(tile, tiles.Tile) else tile for tile in found} for found in pinned]
        assert [len(found) for found in heights] == [1] * len(choices)
        assert all(tile.m > tiles.FEW_ROWS for found in pinned for tile in found if isinstance(tile, tiles.Tile))
    tiles.INTERPRETED = interpreted
    assert not any(backends.invariantly(tiles.decodes)(T) for T in (1, 4))


def test_hoppers_product_takes_all_but_a_few_rows_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper")
    from moefuse.backends.gated import Rows

    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    for N, whole in ((128, True), (130, False)):
        w = Rows(torch.empty(4, N, 64, dtype=torch.bfloat16))

        def takes(T: int, w: Rows = w, N: int = N) -> bool:
            x = torch.empty(T, 64, dtype=torch.bfloat16)
            return hopper.takes(x, w, w, torch.empty(T, N, dtype=torch.bfloat16), False)

        assert {takes(T) for T in (1, 60, 4000)} == ({False, True} if whole else {False})
        assert {backends.invariantly(takes)(T) for T in (5, 60, 4000)} == {whole}
        # Tiles, which sum as it does, serve a row for an expert.
        assert not any(backends.invariantly(takes)(T) for T in (0, 1, 4))
    assert not backends.invariantly(hopper.decodes_ahead)(1e6, 256, "Q4_K")
