"""``moefuse bench`` as a user meets it."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from moefuse.bench import floor, inputs, machine, report, shapes
from moefuse.bench.result import Result, Row
from moefuse.cli import options
from moefuse.cli.bench import bench
from moefuse.quant.formats import FORMATS

SIZES = ["--experts", "8", "--hidden", "48", "--intermediate", "32", "--top-k", "2"]
#: rows of whole blocks in every format
WHOLE = ["--experts", "4", "--hidden", "256", "--intermediate", "256", "--top-k", "2"]
QUICK = ["--tokens", "1,6", "--dtype", "float32", "--repeat", "2", "--backend", "reference", "--device", "cpu"]
app = typer.Typer(add_completion=False)
app.command()(bench)


def invoke(*words: str) -> tuple[int, str]:
    # Wide enough that no message is broken across lines.
    result = CliRunner(env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).invoke(app, list(words))
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    square = floor._square
    monkeypatch.setattr(machine, "cache_bytes", lambda *_: 1 << 16)
    monkeypatch.setattr(floor, "_SMALLEST_BUFFER", 1 << 22)
    monkeypatch.setattr(floor, "_square", lambda _, dtype, device: square(128, dtype, device))


def test_table_json_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    figures, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    code, output = invoke(*SIZES, *QUICK, "--against", "hf-grouped", "--save", str(figures), "--plot", str(picture))
    assert code == 0, output
    for word in ("moefuse block", "moefuse experts", "moefuse route+plan", "hf-grouped", "floor", "GB/s"):
        assert word in output
    found = json.loads(figures.read_text())
    assert {row["name"] for row in found["rows"]} == {"moefuse", "hf-grouped", "floor"}
    assert {row["tokens"] for row in found["rows"]} == {1, 6}
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["processor"]
    assert found["command"]
    assert found["shape"]["experts"] == 8
    assert found["rates"]["1"]["bandwidth"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    pixels = pytest.importorskip("matplotlib.image").imread(str(picture))
    assert pixels.shape[0] > 400
    assert pixels.std() > 0.01, "an empty picture"


def test_training(tmp_path: Path) -> None:
    """Forward and backward side by side; what is refused says why."""
    pytest.importorskip("transformers")
    figures = tmp_path / "bench.json"
    code, output = invoke(*SIZES, *QUICK, "--training", "--against", "hf-grouped,hf-eager", "--save", str(figures))
    assert code == 0, output
    assert "moefuse training" in output
    rows = json.loads(figures.read_text())["rows"]
    assert {(row["name"], row["scope"]) for row in rows} == {
        (name, "training") for name in ("moefuse", "hf-grouped", "hf-eager", "floor")
    }
    assert all(row["seconds"] > 0 for row in rows)
    mine = next(row for row in rows if row["name"] == "moefuse")
    assert set(mine["faster_than"]) == {"hf-grouped", "hf-eager"}
    assert mine["error_worst"] < 1e-5
    for more in (["--plot", str(tmp_path / "bench.png")], ["--case", "experts/few"]):
        code, output = invoke(*QUICK, "--training", *more)
        assert code == 2, output


def test_adapters_on_blocks(tmp_path: Path) -> None:
    """Experts in blocks are frozen: the step is that of adapters, beside the same step on numbers."""
    figures = tmp_path / "bench.json"
    sizes = ["--experts", "4", "--hidden", "64", "--intermediate", "32", "--top-k", "2"]
    words = [*sizes, *QUICK, "--training", "--weights", "Q8_0:exact", "--dtype", "float32", "--against", "hf-eager"]
    code, output = invoke(*words, "--save", str(figures))
    assert code == 0, output
    assert "moefuse lora" in output
    rows = {row["name"]: row for row in json.loads(figures.read_text())["rows"]}
    assert rows.keys() == {"moefuse", "moefuse plain", "hf-eager", "floor"}
    assert {row["scope"] for row in rows.values()} == {"lora"}
    assert rows["moefuse"]["over_plain"] > 0
    assert all(rows[name]["error_worst"] < 1e-5 for name in ("moefuse", "moefuse plain"))
    assert "no experts in Q8_0:exact" in rows["hf-eager"]["note"]


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    """As in every other command: a flag, and plain data instead of the table. Names may be short and in any case."""
    words = [*SIZES, *QUICK, "--dtype", "BF16", "--against", "none", "--json", "--save", str(tmp_path / "figures.json")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((tmp_path / "figures.json").read_text())
    assert json.loads(result.stdout)["dtype"] == "bfloat16"


@pytest.mark.parametrize("width", [50, 80, 200])
def test_a_narrow_terminal_gets_fewer_columns_and_no_cut_unit(width: int) -> None:
    rows = [
        Row(1, "moefuse", "block", "graph", 7.6e-3, times_floor=1.2, bytes_per_second=1e12, bandwidth_share=0.8,
            error_rms=1e-3, launches=4, peak_bytes=10**8, faster_than={"hf-grouped": 2.5}),
        Row(1, "hf-grouped", "experts", "graph", 1.9e-2, error_rms=1e-3),
    ]  # fmt: skip
    facts = {"device": "cuda", "processor": "a card", "threads": 1, "cores": 1}
    console = Console(width=width, file=io.StringIO())
    report.print_result(Result("a layer", "bfloat16", "triton", "", facts, rows), console)
    shown = console.file.getvalue()
    assert "…" not in shown
    for whole in ("7.60 ms", "19.0 ms", "moefuse block", "hf-grouped"):
        assert whole in shown
    assert ("no room for: launches" in shown) == (width < 200)
    assert max(map(len, shown.split("cuda: a card")[0].splitlines())) <= width


def test_blocks_by_any_spelling() -> None:
    code, output = invoke(*WHOLE, *QUICK, "--against", "none", "--weights", "q4_k:exact/q6-k")
    assert code == 0, output
    for words in ("in Q4_K:exact/Q6_K", "5.188 bits each", "moefuse experts, float32", "over"):
        assert words in output


def test_interleaved_blocks_beside_those_of_a_file() -> None:
    """Where the device reads them so; the reference opens them, and both are held to float64."""
    for backend in ("cpu", "reference"):
        formats = "Q4_K:interleaved,Q4_K,q8_0:interleaved:exact"
        code, output = invoke(*WHOLE, *QUICK, "--against", "none", "--weights", formats, "--backend", backend)
        assert code == 0, output
        assert "Q4_K:interleaved" in output
        assert "Q8_0:interleaved:exact" in output


def test_formats_beside_each_other(tmp_path: Path) -> None:
    """Each with its bits, its floor and its time over that of numbers in the same run."""
    figures = tmp_path / "bench.json"
    code, output = invoke(
        *WHOLE, *QUICK, "--against", "none", "--weights", "all,Q4_K/Q6_K:exact", "--save", str(figures)
    )
    assert code == 0, output
    for name, form in FORMATS.items():
        assert re.search(rf" {name} +{form.bits:.4g} ", output), name
    assert "Q4_K/Q6_K:exact" in output
    results = json.loads(figures.read_text())
    assert len(results) == len(FORMATS) + 1
    for result in results:
        rows = {(row["tokens"], row["name"], row["scope"]): row for row in result["rows"]}
        for T in {row["tokens"] for row in result["rows"]}:
            for scope in ("block", "experts"):
                mine, plain = rows[T, "moefuse", scope], rows[T, "moefuse plain", scope]
                assert mine["over_plain"] == mine["seconds"] / plain["seconds"]
                assert mine["read_bytes"] / plain["read_bytes"] == pytest.approx(result["bits"] / 32)
                assert not mine["faster_than"]
            floor = rows[T, "floor", "experts"]
            assert rows[T, "moefuse", "experts"]["times_floor"] * floor["seconds"] == pytest.approx(
                rows[T, "moefuse", "experts"]["seconds"]
            )


def test_training_on_formats(tmp_path: Path) -> None:
    """Adapters on frozen blocks, each format beside its own numbers."""
    figures = tmp_path / "bench.json"
    formats = "Q4_K,Q8_0:exact,fp8"
    words = [*WHOLE, *QUICK, "--training", "--against", "none", "--weights", formats, "--save", str(figures)]
    code, output = invoke(*words)
    assert code == 0, output
    for result in json.loads(figures.read_text()):
        rows = {(row["tokens"], row["name"]): row for row in result["rows"]}
        for T in (1, 6):
            mine, plain = rows[T, "moefuse"], rows[T, "moefuse plain"]
            assert mine["scope"] == plain["scope"] == "lora"
            assert mine["over_plain"] == mine["seconds"] / plain["seconds"]
            assert mine["read_bytes"] / plain["read_bytes"] == pytest.approx(result["bits"] / 32)


def test_formats_as_a_page(tmp_path: Path) -> None:
    """For a document: the experts and the block, formats under each other, tokens side by side."""
    saved = tmp_path / "formats.md"
    code, output = invoke(*WHOLE, *QUICK, "--against", "none", "--weights", "Q8_0,Q6_K/Q8_0", "--save", str(saved))
    assert code == 0, output
    experts, block = ([line.split(" | ") for line in part.splitlines()] for part in saved.read_text().split("\n\n"))
    for scope, rows in (("experts", experts), ("block", block)):
        assert rows[0] == [f"| {scope}: time, over float32, over its floor", "bits", "T=1", "T=6 |"]
        assert [row[0] for row in rows[2:]] == ["| float32", "| Q8_0", "| Q6_K/Q8_0"]
        assert [row[1] for row in rows[2:]] == ["32", "8.5", "7.208"]
        times = r"[\d.]+ [um]?s"
        assert all(re.fullmatch(rf"{times}, [\d.]+( \|)?", cell) for cell in rows[2][2:])
        assert all(re.fullmatch(rf"{times}, [\d.]+, [\d.]+( \|)?", cell) for row in rows[3:] for cell in row[2:])


def test_all_formats_are_those_that_fill_the_rows() -> None:
    shape = shapes.Shape("custom", 4, 64, 32, 2)
    found = options.in_blocks(shape, "all:exact")
    short = sorted((form for form in FORMATS.values() if form.values == 32), key=lambda form: form.bits)
    assert [each.weights for each in found] == [(f"{form.name}:exact",) * 2 for form in short]
    assert options.in_blocks(shape, "Q8_0,q8-0") == [shape.in_blocks("Q8_0", "Q8_0")]


def test_numbers_without_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "fits", lambda shape, *_: None if shape.weights else "too large")
    code, output = invoke(*WHOLE, *QUICK, "--against", "none", "--weights", "Q8_0")
    assert code == 0, output
    assert "no room for the layer in float32 beside the one in Q8_0" in output


def test_a_case() -> None:
    code, output = invoke("--case", "experts/few", *QUICK)
    assert code == 0, output
    assert "moefuse experts/few" in output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nonesuch"], shapes.names()),
        (["--against", "nonesuch"], ("hf-grouped", "hf-batched", "hf-eager")),
        (["--case", "nonesuch"], ("experts/decode", "route/qwen3")),
        (["--dtype", "int8"], ("bfloat16", "float32", "float16")),
        (["--backend", "nonesuch"], ("cpu", "triton", "reference")),
        (["--device", "tpu"], ("cpu", "cuda", "mps")),
    ],
)
def test_unknown_names_list_the_valid_ones(words: list[str], named: tuple[str, ...]) -> None:
    code, output = invoke(*words)
    assert code == 2
    for name in named:
        assert name in output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tokens", "1,x"], "whole numbers"),
        (["--tokens", "0"], "whole numbers"),
        (["--experts", "8"], "--top-k"),
        (["olmoe", *SIZES], "not both"),
        (["olmoe", "--case", "experts/few"], "not both"),
        ([*SIZES[:-1], "9"], "top_k must be at most 8"),
        ([*SIZES, "--weights", "Q4_K"], "multiple of 256"),
        ([*SIZES, "--weights", "Q9_9"], "Q4_K"),
        ([*SIZES, "--weights", "Q8_0/Q8_0/Q8_0"], "gate_up"),
        ([*WHOLE, "--weights", "all:bf16"], "bf16"),
        ([*WHOLE, "--weights", "FP8:interleaved"], "not in FP8"),
        ([*SIZES, "--weights", "all"], "rows of 48 and 32"),
        ([*WHOLE, "--weights", "Q8_0,Q4_0", "--plot", "x.png"], "one format"),
        (["--case", "experts/few", "--weights", "Q8_0"], "not both"),
        (["--plot", "picture.pdf"], ".png"),
        (["--save", "/nonesuch/figures.json"], "no folder"),
        (["--save", "figures.md"], "of --weights"),
        (["--device", "cpu:3"], "there is 1 of cpu"),
        (["--case", "experts/few", "--plot", "x.png"], "one size"),
        (["--case", "plan/usual", "--dtype", "float16"], "not for float16"),
        ([*SIZES, "--backend", "metal", "--device", "cpu"], "metal"),
    ],
)
def test_bad_input_is_refused_with_the_reason(words: list[str], why: str) -> None:
    code, output = invoke(*words)
    assert code == 2, output
    assert why in output


def test_a_layer_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda *_: 1 << 30)
    code, output = invoke("mixtral-8x7b", "--device", "cpu")
    assert code == 2
    assert "2.6 GiB" in output
    assert "1.0 GiB are free" in output


def test_without_matplotlib_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    code, output = invoke("--plot", "x.png")
    assert code == 2
    assert "pip install 'matplotlib" in output


def test_without_transformers_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefuse.bench.peers._transformers.importlib.util.find_spec", lambda *_: None)
    code, output = invoke(*SIZES, *QUICK, "--against", "hf-eager")
    assert code == 0, output
    assert "pip install 'transformers" in output
