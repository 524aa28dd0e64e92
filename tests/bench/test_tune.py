"""The search for tiles, with clocks and timings made up: what wins, what must not, and what is kept."""

import dataclasses
import importlib
import io
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import moefuse
from moefuse.bench import check, inputs
from moefuse.bench import tune as search
from moefuse.bench.shapes import Shape
from moefuse.ops._core import select
from moefuse.quant.formats import FORMATS
from moefuse.testing.compare import Tolerance, difference

pytest.importorskip("triton")
from moefuse.backends.triton.runtime import tuned
from moefuse.backends.triton.runtime.tiles import DECODE_TOKENS, Tile

CPU = torch.device("cpu")
command = importlib.import_module("moefuse.cli.tune")
SHAPE = Shape("custom", experts=4, hidden=64, intermediate=32, top_k=2)
UP, DOWN = search.products(SHAPE, DECODE_TOKENS + 4, torch.float32)


@pytest.fixture(autouse=True)
def _own_cache_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A built-in table that is the same on every machine."""
    monkeypatch.setenv("MOEFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned.Product, "built_in", lambda *_: Tile(16, 32, 32, 4, 1))
    tuned.forget()
    yield
    tuned.forget()
    select.forget()


class Made:
    """A trial whose time is a function of the tiles of both products, and whose result may depend on them."""

    tolerance = Tolerance(1e-3, 1e-3, "made up")

    def __init__(self, cost: Callable[[Tile], float], result: Callable[[Tile], float] = lambda _: 1.0) -> None:
        self.cost, self.result, self.products = cost, result, (UP, DOWN)

    def tiles(self) -> list[Tile]:
        return [tuned.tile_for(product, CPU) for product in self.products]

    def results(self) -> list[Tensor]:
        return [torch.full((2, 3), sum(map(self.result, self.tiles())))]

    def seconds(self) -> float:
        return sum(map(self.cost, self.tiles()))


def found(trial: Made, seconds: float = 1e9, clock: Callable[[], float] = lambda: 0.0) -> tuple[Tile, search.Finding]:
    return search.search(UP, trial, CPU, seconds, clock, lambda: None)


def test_it_climbs_to_the_best_tile() -> None:
    def cost(tile: Tile) -> float:
        return 1 + abs(tile.n - 128) / 64 + abs(tile.warps - 8) + abs(tile.stages - 3)

    best, finding = found(Made(cost))
    assert (best.n, best.warps, best.stages) == (128, 8, 3)
    assert finding.old == dataclasses.asdict(UP.built_in(CPU))
    assert finding.new == dataclasses.asdict(best)
    assert finding.gain > 1
    assert finding.wrong == finding.failed == 0
    assert tuned.tile_for(UP, CPU) == UP.built_in(CPU), "a search leaves no tile behind"


def test_a_switch_is_tried_too() -> None:
    assert found(Made(lambda tile: 1 if tile.copy_engine else 2))[0].copy_engine


def test_noise_changes_nothing() -> None:
    built_in = UP.built_in(CPU)
    best, finding = found(Made(lambda tile: 1.0 if tile == built_in else 0.99))
    assert best == built_in
    assert finding.gain == 1


def test_a_gain_that_does_not_come_again_changes_nothing() -> None:
    built_in, lucky = UP.built_in(CPU), itertools.chain([0.5], itertools.repeat(2.0))
    assert found(Made(lambda tile: 1.0 if tile == built_in else next(lucky)))[0] == built_in


def wide(tile: Tile) -> bool:
    return tile.n > UP.built_in(CPU).n


def test_a_fast_wrong_tile_never_wins() -> None:
    for wrong in (1.01, float("nan"), float("inf")):
        trial = Made(lambda tile: 0.1 if wide(tile) else 1.0, lambda tile, wrong=wrong: wrong if wide(tile) else 1.0)
        best, finding = found(trial)
        assert not wide(best)
        assert finding.wrong > 0


def test_a_value_rounded_the_other_way_is_no_wrong_tile() -> None:
    """Hidden values in 8 bits: a sum in another order moves one of them by a step, which float32's bound would see."""
    rng = torch.Generator().manual_seed(3)
    hidden, step = torch.randn(768, generator=rng), 3 / 127
    down = torch.randn(2048, 768, generator=rng) * 768**-0.5
    other = hidden.clone()
    other[5] += step
    shape = Shape("custom", 4, 2048, 768, 2)

    def bound(spec: str) -> Tolerance:
        layer = inputs.make_layers(shape.in_blocks(spec, spec), torch.float32, CPU, 1)[0]
        return check.tile_tolerance(layer, torch.float32)

    got, want = [(down @ other)[None]], [(down @ hidden)[None]]
    assert search._agree(got, want, bound("Q4_K"))
    assert not search._agree(got, want, bound("Q4_K:exact"))
    assert not search._agree([want[0] * 1.01], want, bound("Q4_K"))


def test_a_tile_that_is_not_always_the_same_never_wins() -> None:
    """Within the tolerance each time: a race, not a rounding."""
    turns = itertools.count()
    trial = Made(
        lambda tile: 0.1 if wide(tile) else 1.0, lambda tile: 1.0 + (1e-5 * (next(turns) % 2) if wide(tile) else 0.0)
    )
    best, finding = found(trial)
    assert not wide(best)
    assert finding.wrong > 0


def test_a_tile_that_cannot_be_compiled_is_passed_over() -> None:
    def cost(tile: Tile) -> float:
        if wide(tile):
            raise RuntimeError("out of resource: shared memory")
        return 1.0

    best, finding = found(Made(cost))
    assert best == UP.built_in(CPU)
    assert finding.failed > 0


def test_the_time_is_kept() -> None:
    """Each look at the clock costs a second."""
    ticks = itertools.count()
    _, finding = found(Made(lambda tile: 1000 / tile.n / tile.warps), 3.0, lambda: float(next(ticks)))
    assert 0 < finding.tried <= 3


@pytest.mark.parametrize("T", [1, 300])
@pytest.mark.parametrize("kind", [None, "Q4_K"])
def test_candidates_fit_the_card(T: int, kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "shared_limit", lambda _: 64 * 1024)
    shape = dataclasses.replace(SHAPE, hidden=256, intermediate=256, weights=kind and (kind, kind))
    for product in search.products(shape, T, torch.bfloat16):
        tiles = {product.built_in(CPU)}
        for _ in range(4):
            tiles |= {near for tile in tiles for near in search.neighbours(product, tile, CPU)}
        tiles.discard(product.built_in(CPU))
        assert len(tiles) > 20
        for tile in tiles:
            assert tile.shared_bytes(2, product.gated, product.format) <= 64 * 1024
            assert tile.warps in (1, 2, 4, 8, 16)
            assert kind is None or tile.k == product.built_in(CPU).k
            assert T == 1 or tile.m >= 16


def test_both_products_at_every_load_once() -> None:
    """Token counts of one load share a tile; the down product is searched with the new tile of the up product."""
    seen: list[int] = []

    def cost(tile: Tile) -> float:
        return 1.0 if tile.warps == 8 else 2.0

    def trial(count: int) -> Made:
        seen.append(count)
        made = Made(cost)
        made.products = tuple(search.products(SHAPE, count, torch.float32))
        return made

    findings, tiles = search.tune(
        SHAPE, [1, 33, 60, 200], torch.float32, CPU, 1e9, lambda *_: None, trial=trial, clock=lambda: 0.0
    )
    assert seen == [1, 33, 200]
    assert [(f.tokens, f.product.split(" E=")[0]) for f in findings] == [
        (1, "decode up"), (1, "decode down"), (33, "up"), (33, "down"), (200, "up"), (200, "down"),
    ]  # fmt: skip
    assert [(f.old_seconds, f.new_seconds) for f in findings] == [(4.0, 3.0), (3.0, 2.0)] * 3
    assert all(tile.warps == 8 for tile in tiles.values())
    assert len(tiles) == 6


@pytest.mark.skipif(not tuned.INTERPRETED, reason="a GPU is here: its own tiles are searched by `moefuse tune`")
@pytest.mark.parametrize("T", [1, DECODE_TOKENS + 4])
def test_tiles_reach_the_kernels(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, with made-up times: every tile that is tried gives the result of the built-in one."""
    from moefuse.backends.triton.runtime import launch

    used: set[int] = set()
    assert "experts" in importlib.import_module("moefuse.backends.triton").OPS  # all are loaded, with the real launch
    monkeypatch.setattr(launch, "launch", _spy(launch.launch, used))
    for module in ("experts_decode", "grouped_linear"):
        monkeypatch.setattr(f"moefuse.backends.triton.{module}.launch", launch.launch)
    x, router = torch.randn(T, 64), torch.randn(4, 64) / 8
    gate_up, down = torch.randn(4, 64, 64) / 8, torch.randn(4, 64, 32) / 6
    weights, ids = moefuse.gate(x, router, SHAPE.routing, backend="reference")
    want = moefuse.experts(x.double(), ids, weights.double(), gate_up.double(), down.double(), backend="reference")

    class Real(Made):
        def results(self) -> list[Tensor]:
            return [moefuse.experts(x, ids, weights, gate_up, down, backend="triton")]

    product = search.products(SHAPE, T, torch.float32)[0]
    trial = Real(lambda tile: 1.0 / tile.n)
    trial.products = (product,)
    trial.tolerance = Tolerance(2e-6, 2e-6, "float32 sums of 64 terms")
    ticks = itertools.count()
    best, finding = search.search(product, trial, CPU, 6.0, lambda: float(next(ticks)), lambda: None)
    assert finding.wrong == finding.failed == 0
    assert best.n > product.built_in(CPU).n
    assert best.n in used
    with tuned.trying(product, best):
        assert difference(trial.results()[0], want).worst < 2e-6


@pytest.mark.skipif(not tuned.INTERPRETED, reason="a GPU is here: its own tiles are searched by `moefuse tune`")
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("spec", [None, "Q6_K:exact"])
def test_tiles_reach_linear(T: int, spec: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the experts: what is tried is what runs, gives the same, and is gone afterwards."""
    used: list[int] = []
    module = importlib.import_module("moefuse.backends.triton.linear")
    plainly = module.launch

    def spy(*given: Any, **options: Any) -> None:
        used.append(options["A_FORM"].block_n)
        plainly(*given, **options)

    monkeypatch.undo()  # the built-in table as it is
    monkeypatch.setattr(module, "launch", spy)
    linear = search.Linear(48, 256, spec)
    monkeypatch.setattr(inputs, "GRAPH_LAYERS", 1)
    monkeypatch.setattr(search.machine, "cache_bytes", lambda _: 1)
    real = search.LinearOnCard(linear, T, torch.float32, CPU)
    assert len(real.slots) == 1
    x, weight = real.slots[0]
    want = moefuse.linear(x.double(), weight if spec else weight.double(), backend="reference")
    product = linear.product(T, torch.float32)
    built_in = product.built_in(CPU)
    # A time that is shorter the wider the tile that ran last.
    monkeypatch.setattr(real, "seconds", lambda: (real.results(), 1.0 / used[-1])[1])
    ticks = itertools.count()
    best, finding = search.search(product, real, CPU, 6.0, lambda: float(next(ticks)), lambda: None)
    assert finding.wrong == finding.failed == 0
    assert best.n > built_in.n
    assert best.m == built_in.m
    assert best.n in used
    with tuned.trying(product, best):
        assert difference(real.results()[0], want).worst < 1e-5
    real.results()
    assert used[-1] == built_in.n, "a search leaves no tile behind"


def _spy(real: Callable[..., None], used: set[int]) -> Callable[..., None]:
    def launch(*args: Any, **options: Any) -> None:
        used.add(options["FORM"].block_n)
        real(*args, **options)

    return launch


BETTER = Tile(64, 64, 32, 8, 2)


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are looked up as on a GPU."""
    monkeypatch.setattr(tuned, "INTERPRETED", False)


def test_what_lies_beside_the_file_is_not_written_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    tuned.path().parent.mkdir(parents=True, exist_ok=True)
    for name in (f"tiles.{os.getpid()}", "tiles.json"):
        (tuned.path().parent / name).symlink_to(victim)
    tuned.keep(CPU, {UP.name: BETTER})
    assert victim.read_text() == "precious"
    assert "moefuse tiles" in tuned.path().read_text()


@pytest.mark.usefixtures("on_a_card")
def test_what_was_kept_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep(CPU, {UP.name: BETTER})
    assert tuned.tile_for(UP, CPU) == BETTER
    assert tuned.tile_for(DOWN, CPU) == DOWN.built_in(CPU)
    other = dataclasses.replace(UP, K=128)
    assert tuned.tile_for(other, CPU) == other.built_in(CPU)
    tuned.keep(CPU, {DOWN.name: BETTER, UP.name: None})
    assert tuned.tile_for(UP, CPU) == UP.built_in(CPU)
    assert tuned.tile_for(DOWN, CPU) == BETTER
    monkeypatch.setattr(tuned.triton, "__version__", "9.9")
    assert tuned.tile_for(DOWN, CPU) == DOWN.built_in(CPU)


@pytest.mark.usefixtures("on_a_card")
def test_cards_and_versions_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep(CPU, {UP.name: BETTER})
    with monkeypatch.context() as patch:
        patch.setattr(tuned.triton, "__version__", "9.9")
        tuned.keep(CPU, {UP.name: dataclasses.replace(BETTER, n=128)})
        assert tuned.tile_for(UP, CPU).n == 128
    assert tuned.tile_for(UP, CPU) == BETTER
    assert [path.name for path in tuned.path().parent.iterdir()] == ["tiles.json"]


@pytest.mark.usefixtures("on_a_card")
def test_a_tile_too_large_for_the_card_is_not_used() -> None:
    tuned.keep(CPU, {UP.name: dataclasses.replace(BETTER, m=256, n=256, k=256, stages=8)})
    assert tuned.tile_for(UP, CPU) == UP.built_in(CPU)


def _entry(**changes: Any) -> str:
    return json.dumps({"moefuse tiles": 1, "cards": {"x": {"y": dataclasses.asdict(BETTER) | changes}}})


@pytest.mark.usefixtures("on_a_card")
@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "{}", "7", '{"moefuse tiles": 99, "cards": {}}', '{"moefuse tiles": 1, "cards": []}',
        _entry(n=48), _entry(n=0), _entry(k="64"), _entry(m=64.0), _entry(warps=True), _entry(copy_engine=1),
        _entry(stages=0), _entry(colour="red"), '{"moefuse tiles": 1, "cards": {"x": {"y": {"m": 16}}}}', "\x00",
    ],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_left_alone(text: str, caplog: pytest.LogCaptureFixture) -> None:
    tuned.path().parent.mkdir(parents=True)
    tuned.path().write_text(text)
    with caplog.at_level(logging.WARNING, "moefuse"):
        for product in (UP, DOWN, UP):
            assert tuned.tile_for(product, CPU) == product.built_in(CPU)
    assert len(caplog.records) == 1
    assert "tiles.json is not used" in caplog.text
    assert tuned.path().read_text() == text


app = typer.Typer(add_completion=False)
app.command()(command.tune)
SIZES = ["--experts", "4", "--hidden", "64", "--intermediate", "32", "--top-k", "2", "--tokens", "1,40"]


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).invoke(app, [*SIZES, *words])
    return result.exit_code, result.output


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is the processor, where eight warps are best."""

    def on_card(_: Any, count: int, dtype: torch.dtype, __: Any) -> Made:
        made = Made(lambda tile: 1e-5 if tile.warps == 8 else 2e-5)
        made.products = tuple(search.products(SHAPE, count, dtype))
        return made

    monkeypatch.setattr(command, "_card", lambda _: CPU)
    monkeypatch.setattr(search, "OnCard", on_card)


@pytest.mark.usefixtures("pretended", "on_a_card")
def test_the_command_keeps_and_shows() -> None:
    code, output = invoke("--dtype", "float32")
    assert code == 0, output
    for words in (
        "decode up",
        "decode down",
        "warps=8",
        "40.0 us",
        "30.0 us",
        "1.33x",
        "4 of 4 products",
        "tiles.json",
    ):
        assert words in output
    kept = json.loads(tuned.path().read_text())["cards"][tuned.card(CPU)]
    assert len(kept) == 4
    for count in (1, 40):
        for product in search.products(SHAPE, count, torch.float32):
            assert tuned.tile_for(product, CPU).warps == 8


@pytest.mark.usefixtures("pretended", "on_a_card")
def test_each_format_has_tiles_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one format are not found for another, nor for numbers; a share of the time goes to each."""
    shares: list[float] = []
    tune = search.tune
    monkeypatch.setattr(search, "tune", lambda *given: (shares.append(given[4]), tune(*given))[1])
    shape = dataclasses.replace(SHAPE, hidden=256, intermediate=256)

    def on_card(layers: Any, count: int, dtype: torch.dtype, _: Any) -> Made:
        made = Made(lambda tile: 1e-5 if tile.warps == 8 else 2e-5)
        made.products = tuple(search.products(layers[0].shape, count, dtype))
        return made

    monkeypatch.setattr(search, "OnCard", on_card)
    code, output = invoke(
        "--hidden", "256", "--intermediate", "256", "--weights", "all", "--minutes", str(len(FORMATS))
    )
    assert code == 0, output
    for name in FORMATS:
        for count in (1, 40):
            for product in search.products(shape.in_blocks(name, name), count, torch.bfloat16):
                assert tuned.tile_for(product, CPU).warps == 8, product.name
    for product in search.products(shape, 1, torch.bfloat16):
        assert tuned.tile_for(product, CPU) == product.built_in(CPU)
    assert f"{4 * len(FORMATS)} of {4 * len(FORMATS)} products" in output
    assert len(shares) == len(FORMATS)
    assert shares[0] == pytest.approx(60, abs=1)


@pytest.mark.usefixtures("pretended", "on_a_card")
def test_linear_has_tiles_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_card(linear: search.Linear, count: int, dtype: torch.dtype, _: Any) -> Made:
        made = Made(lambda tile: 1e-5 if tile.warps == 8 else 2e-5)
        made.products = (linear.product(count, dtype),)
        return made

    monkeypatch.setattr(search, "LinearOnCard", on_card)
    words = ["--linear", "48x256", "--weights", "Q4_K,q6-k:exact", "--tokens", "1,16,300"]
    result = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).invoke(app, words)
    assert result.exit_code == 0, result.output
    for part in ("linear: 48 columns of 256", "linear Q4_K", "linear Q6_K", "4 of 4 products", "of one product"):
        assert part in result.output
    for count in (1, 16):
        for name in ("Q4_K", "Q6_K"):
            tile = tuned.linear_tile_for(count, 48, 256, 2, CPU, name)
            assert tile.warps == 8
        other = search.Linear(48, 256).product(count, torch.bfloat16)
        assert tuned.linear_tile_for(count, 48, 256, 2, CPU, "") == other.built_in(CPU)


@pytest.mark.usefixtures("pretended", "on_a_card")
def test_a_narrow_terminal_gets_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=50, file=io.StringIO(), force_terminal=True, no_color=True)
    monkeypatch.setattr(command, "Console", lambda **_: console)
    code, output = invoke("--dtype", "fp32", "--dry-run")
    assert code == 0, output
    words = console.file.getvalue().split()
    for word in ("warps=8", "us,", "1.33x;", "built-in"):
        assert word in words


@pytest.mark.usefixtures("pretended")
def test_a_cache_that_cannot_be_is_refused_before_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOEFUSE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(search, "tune", lambda *_: pytest.fail("it was searched"))
    code, output = invoke()
    assert code == 2
    assert "MOEFUSE_CACHE" in output
    assert "cannot be made a folder: File exists" in output


@pytest.mark.usefixtures("pretended")
def test_a_dry_run_keeps_nothing() -> None:
    code, output = invoke("--dry-run", "--json", "--dtype", "float32")
    assert code == 0, output
    found = json.loads(output)
    assert found["kept"] is None
    assert [row["tokens"] for row in found["found"]] == [1, 1, 40, 40]
    assert all(row["new"]["warps"] == 8 and row["gain"] > 1 for row in found["found"])
    assert not tuned.path().exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so() -> None:
    code, output = invoke()
    assert code == 2
    assert "tiles are searched on an NVIDIA GPU: no NVIDIA GPU is here" in output


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--weights", "Q9"], "format must be one of Q4_K"),
        (["--tokens", "0"], "positive whole numbers"),
        (["--linear", "48x256"], "not both"),
    ],
)
def test_mistakes_are_told(words: list[str], message: str) -> None:
    code, output = invoke(*words)
    assert code == 2
    assert message in output


def test_a_product_without_a_tile_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper")
    monkeypatch.setattr(hopper, "is_hopper", lambda _: True)
    layer = Shape("custom", experts=4, hidden=256, intermediate=128, top_k=2)
    many, few = 400, 40

    def searched(shape: Shape, tokens: int) -> list[str]:
        products = search.products(shape, tokens, torch.bfloat16)
        return [product.role for product in products if search.has_tile(product, shape, CPU)]

    assert searched(layer, many) == []
    assert searched(layer, few) == ["up", "down"]
    assert searched(dataclasses.replace(layer, layout="interleaved"), many) == ["up"]
    assert searched(dataclasses.replace(layer, intermediate=96), many) == ["up", "down"]
    assert searched(dataclasses.replace(layer, bias=True), many) == ["up", "down"]
    in_blocks = dataclasses.replace(layer, intermediate=256, weights=("Q4_K", "Q4_K"))
    assert searched(in_blocks, many) == []
    assert searched(in_blocks, 6) == ["up", "down"], "few rows"
    assert searched(dataclasses.replace(in_blocks, layout="interleaved"), many) == []
    for name in FORMATS:
        one = dataclasses.replace(in_blocks, weights=(name, "Q6_K"))
        assert (searched(one, many), searched(one, 6)) == ([], ["up", "down"]), name
    assert search.tune(
        layer, [many], torch.bfloat16, CPU, 1.0, lambda *_: None, trial=lambda _: Made(lambda _: 1.0)
    ) == ([], {})


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--linear", "48"], "such as 5120x2048, got '48'"),
        (["--linear", "0x256"], "such as 5120x2048"),
        (["--linear", "48x250", "--weights", "Q8_0"], "multiple of 32"),
        (["--linear", "48x256", "--weights", "Q4_K/Q6_K"], "a linear has one format"),
        (["--linear", "48x256", "--tokens", "17,300"], "up to 16 tokens"),
    ],
)
def test_mistakes_about_a_linear_are_told(words: list[str], message: str) -> None:
    result = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).invoke(app, words)
    assert result.exit_code == 2, result.output
    assert message in result.output
