"""A run gives figures for what is right, reasons for what is not, and the ratios between them."""

import dataclasses
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moefuse import backends
from moefuse.bench import case as bench_cases
from moefuse.bench import inputs, peers, timing
from moefuse.bench.floor import Floor, Probe, Rates
from moefuse.bench.result import Result, Row
from moefuse.bench.run import Options, bench_shape, compare
from moefuse.bench.shapes import Shape
from moefuse.ops._core import select
from moefuse.quant import arrange

CPU = torch.device("cpu")
SHAPE = Shape("custom", 8, 48, 32, 2)
OPTIONS = Options(torch.float32, CPU, backend="reference", repeat=2, command="moefuse bench")


@pytest.fixture(autouse=True)
def quick_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    read, product = (Probe(name, 1e6, lambda: None, CPU) for name in ("read", "product"))
    limits = Floor((read,), (product,), Rates(1e10, 1e11, "read", "product"))
    monkeypatch.setattr(Floor, "measure", staticmethod(lambda *_: limits))


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend whose experts forget the last slot of each token."""

    def dropped(x: Any, ids: Any, weights: Any, *rest: Any) -> None:
        select.REFERENCES["experts"](x, ids, weights * torch.tensor([1.0, 0.0]), *rest)

    module: Any = types.ModuleType("moefuse.backends.broken")
    module.__spec__ = types.SimpleNamespace(name=module.__name__)
    module.OPS = {**select.REFERENCES, "experts": dropped}
    module.DTYPES = frozenset({torch.float32})
    module.unavailable = lambda: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "BACKENDS", (*backends.BACKENDS, backends.Backend("broken", ("cpu",))))
    select.forget()
    yield "broken"
    select.forget()


def run(options: Options = OPTIONS, names: tuple[str, ...] = (), tokens: tuple[int, ...] = (1, 5)) -> Result:
    return bench_shape(SHAPE, tokens, [peers.load(name) for name in names], options, lambda *_: None)


def test_a_wrong_gradient_gets_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = select.REFERENCES["experts_backward"]

    def wrong(*args: Any) -> tuple[torch.Tensor, ...]:
        d_x, *others = right(*args)
        # The check itself, in float64, stays right.
        return d_x if d_x.dtype == torch.float64 else d_x * 1.01, *others

    options = dataclasses.replace(OPTIONS, training=True)
    assert not run(options).ours_failed
    monkeypatch.setitem(select.REFERENCES, "experts_backward", wrong)
    select.forget()
    result = run(options)
    select.forget()
    assert result.ours_failed
    assert all(row.seconds is None for row in result.rows if row.name == "moefuse")


def test_every_row_has_its_figures() -> None:
    result = run()
    assert [(row.tokens, row.name, row.scope) for row in result.rows if row.tokens == 5] == [
        (5, "moefuse", "block"), (5, "moefuse", "experts"), (5, "moefuse", "route+plan"), (5, "floor", "experts"),
    ]  # fmt: skip
    for row in result.rows:
        assert row.seconds is not None
        assert row.seconds > 0
        if row.scope in ("block", "experts") and row.name == "moefuse":
            floor = next(r for r in result.rows if r.name == "floor" and r.tokens == row.tokens)
            assert row.times_floor == pytest.approx(row.seconds / (floor.seconds or 1))
            assert row.bytes_per_second == pytest.approx((row.read_bytes or 0) / row.seconds)
            assert row.error_rms is not None
            assert row.error_rms < 1e-5
            assert row.samples == 2
    assert result.backend == "reference"
    assert not result.ours_failed
    assert set(result.rotation) == {1, 5}


def test_experts_in_blocks() -> None:
    shape = Shape("custom", 8, 256, 64, 2).in_blocks("Q4_K", "Q8_0:exact")
    options = dataclasses.replace(OPTIONS, backend=None)
    result = bench_shape(shape, (1,), [peers.load("hf-eager")], options, lambda *_: None)
    assert result.title.endswith("in Q4_K/Q8_0:exact")
    assert not result.ours_failed
    ours = next(row for row in result.rows if row.name == "moefuse" and row.scope == "experts")
    assert ours.error_rms is not None
    assert 1e-4 < ours.error_rms < 5e-2, "activations of the up product are rounded"
    assert ours.read_bytes == 2 * (128 * 144 + 256 * 2 * 34)
    refused = next(row for row in result.rows if row.name == "hf-eager")
    assert "no experts in Q4_K and Q8_0:exact" in refused.note


def test_stacks_are_arranged_for_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, device = Shape("custom", 4, 256, 64, 2).in_blocks("Q6_K", "Q5_0"), torch.device("cpu")
    plain = inputs.make_layers(shape, torch.float32, device, 1)[0]
    monkeypatch.setattr(arrange, "WANTED", {"cpu": "planes"})
    layer = inputs.make_layers(shape, torch.float32, device, 1)[0]
    for got, want in ((layer.gate_up, plain.gate_up), (layer.down, plain.down)):
        assert got.arrangement == "planes"
        assert torch.equal(got.dequantize(), want.dequantize())
    result = bench_shape(shape, (3,), [], dataclasses.replace(OPTIONS, backend="cpu"), lambda *_: None)
    assert not result.ours_failed


def test_peers_are_compared() -> None:
    pytest.importorskip("transformers")
    result = run(names=("hf-grouped", "hf-eager"), tokens=(4,))
    block = next(row for row in result.rows if row.scope == "block")
    assert set(block.faster_than) == {"hf-grouped", "hf-eager"}
    assert sum(row.name.startswith("hf") and row.seconds is not None for row in result.rows) == 2


def test_a_wrong_result_gets_no_figure(broken: str) -> None:
    result = run(dataclasses.replace(OPTIONS, backend=broken), tokens=(3,))
    rows = {row.scope: row for row in result.rows if row.name == "moefuse"}
    for scope in ("block", "experts"):
        assert rows[scope].seconds is None
        assert rows[scope].wrong
        assert "wrong, so not timed" in rows[scope].note
        assert rows[scope].times_floor is None
    assert rows["route+plan"].seconds is not None
    assert result.ours_failed


def test_a_peer_that_raises_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: Any) -> Any:
        raise RuntimeError("no such kernel\nand more")

    peer = peers.load("hf-eager")
    monkeypatch.setattr(type(peer), "build", lambda *_: explode)
    result = run(names=("hf-eager",), tokens=(2,))
    row = next(row for row in result.rows if row.name == "hf-eager")
    assert row.seconds is None
    assert row.note == "failed: RuntimeError: no such kernel ... and more"
    assert not result.ours_failed


def test_a_turn_that_raises_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> float:
        raise MemoryError("48 GiB")

    monkeypatch.setattr(timing, "wall_turn", lambda *_: explode)
    monkeypatch.setattr(Probe, "turn", lambda _: lambda: 1e-3)
    rows = run(tokens=(2,)).rows
    assert [row.note for row in rows if row.name == "moefuse"] == ["failed: MemoryError: 48 GiB"] * 3
    assert [row.name for row in rows if row.seconds is not None] == ["floor"]


def test_whoever_outlasts_the_budget_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "once", lambda call, slot, _: (call(slot), 60.0))
    result = run(dataclasses.replace(OPTIONS, repeat=None, budget=0.01), tokens=(2,))
    block = next(row for row in result.rows if row.scope == "block")
    assert (block.seconds, block.samples) == (60.0, 1)
    assert "one call" in block.note


def test_gains_are_within_one_mode() -> None:
    rows = [
        Row(1, "moefuse", "block", "graph", 2.0),
        Row(1, "moefuse", "route+plan", "graph", 1.0),
        Row(1, "peer", "experts", "graph", 5.0),
        Row(1, "peer", "experts", "eager", 8.0),
        Row(1, "other", "experts", "graph", None, note="no graph"),
    ]
    compare(rows)
    assert rows[0].faster_than == {"peer": 2.5}
    assert rows[1].faster_than == {}


def test_turns_interleave_and_rotate() -> None:
    seen: list[tuple[str, int]] = []
    rotation = timing.drift(3)
    turns = {
        name: timing.wall_turn(lambda slot, name=name: seen.append((name, slot)), [0, 1, 2], rotation, 1, CPU)
        for name in ("a", "b")
    }
    samples = timing.interleave(turns, 3, 0.0, lambda _: None)
    assert seen == [("a", 0), ("b", 1), ("a", 2), ("b", 1), ("a", 2), ("b", 0)]
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3}


@pytest.mark.parametrize("case_id", ["experts/decode", "plan/usual", "moe/qwen3", "route/qwen3", "grouped_outer/up"])
def test_any_case_can_be_timed(case_id: str) -> None:
    result = bench_cases.bench_case(bench_cases.find(case_id), OPTIONS, lambda *_: None)
    assert [row.name for row in result.rows] == ["moefuse"]
    assert result.rows[0].seconds is not None
    assert not result.rows[0].note
