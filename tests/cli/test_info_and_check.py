"""moefuse info and moefuse check, as a user runs them."""

import importlib
import json

import pytest
import torch
from typer.testing import CliRunner

from moefuse import backends
from moefuse.backends.metal import launch
from moefuse.cli import app
from moefuse.ops._core import library, select
from moefuse.testing import cases
from moefuse.testing.msl import build

FEW = tuple(case for case in cases.CASES if case.id in ("route/qwen3", "plan/usual", "experts/decode"))


def plain(text: str) -> str:
    """Out of its frame and its lines."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("moefuse.cli.check"), "CASES", FEW)


def test_info_shows_every_backend_and_a_reason(runner: CliRunner) -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0
    shown = " ".join(result.stdout.replace("│", " ").split())
    for row in backends.BACKENDS:
        assert row.name in shown
        assert row.missing() is None or row.missing() in shown


def test_info_json_says_who_serves_and_why_not_the_others(runner: CliRunner) -> None:
    known = json.loads(runner.invoke(app, ["info", "--json"]).stdout)
    assert known["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    serving = known["chosen"]["cpu"]["experts"]
    assert serving["decisions"][-1] == {"backend": serving["backend"], "accepted": True,
                                        "reason": serving["decisions"][-1]["reason"]}  # fmt: skip
    assert all(row["reason"] for row in known["backends"] if not row["runs"])


def test_info_tells_why_a_build_is_missing(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.Backend, "missing", lambda _: "no compiler was found")
    select.forget()
    result = runner.invoke(app, ["info"])
    select.forget()
    assert result.exit_code == 0
    assert "no compiler was found" in result.stdout


@pytest.mark.usefixtures("few_cases")
def test_check_passes_and_counts(runner: CliRunner) -> None:
    result = runner.invoke(app, ["check", "--backend", "reference", "--seed", "5"])
    assert result.exit_code == 0, result.output
    assert "7 passed, 0 failed (seed 5)" in result.stdout


@pytest.mark.usefixtures("few_cases")
def test_check_json(runner: CliRunner) -> None:
    result = runner.invoke(app, ["check", "--backend", "reference", "--json"])
    report = json.loads(result.stdout)
    assert {row["case"] for row in report["outcomes"]} == {case.id for case in FEW}
    assert all(row["passed"] for row in report["outcomes"])


@pytest.mark.usefixtures("few_cases")
def test_check_fails_loudly(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    real = select.REFERENCES["plan"]
    wide = []

    def off_by_one(*args: object) -> object:
        wide.append(args)
        counts, *rest = real(*args)
        return counts + (len(wide) % 2 == 0), *rest

    monkeypatch.setitem(select.REFERENCES, "plan", off_by_one)
    select.forget()
    result = runner.invoke(app, ["check", "--backend", "reference"])
    select.forget()
    assert result.exit_code == 1
    assert "plan/usual on reference" in result.stdout
    assert "input ids: int32 [33, 4]" in result.stdout


def test_check_unknown_backend_lists_the_valid_ones(runner: CliRunner) -> None:
    result = runner.invoke(app, ["check", "--backend", "cudnn"])
    assert result.exit_code == 2
    assert "cpu, triton, metal, reference" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", [["check"], ["check", "--invariant"], ["run", "--temperature", "1"]], ids=" ".join)
@pytest.mark.parametrize("seed", ["-1", "99999999999999999999"])
def test_a_seed_that_nothing_draws_from(command: list[str], seed: str, runner: CliRunner) -> None:
    result = runner.invoke(app, [*command, "--seed", seed])
    assert result.exit_code == 2, result.output
    assert "Invalid value for '--seed'" in plain(result.output)


def test_processes_are_for_drawn_batches(runner: CliRunner) -> None:
    result = runner.invoke(app, ["check", "--processes", "2"])
    assert result.exit_code == 2, result.output
    assert "--processes: it is for --invariant alone" in plain(result.output)


def test_check_follows_the_environment(runner: CliRunner, few_cases: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setenv("MOEFUSE_BACKEND", "reference")
    select.forget()
    report = json.loads(runner.invoke(app, ["check", "--json"]).stdout)
    assert {row["backend"] for row in report["outcomes"]} == {"reference"}
    monkeypatch.undo()
    select.forget()


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="a Mac runs the kernels itself")
@pytest.mark.usefixtures("few_cases")
def test_check_on_the_simulator(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compile_shader", "EMULATED"):  # put back at the end
        monkeypatch.setattr(launch, name, getattr(launch, name))
    monkeypatch.setattr(importlib.import_module("moefuse.cli.check"), "CASES", FEW[:1])
    result = runner.invoke(app, ["check", "--backend", "metal", "--simulate", "--json"])
    assert result.exit_code == 0, result.output
    assert {row["backend"] for row in json.loads(result.stdout)["outcomes"]} == {"metal"}
    monkeypatch.undo()
    select.forget()


def test_the_simulator_is_for_metal_and_needs_a_compiler(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    result = runner.invoke(app, ["check", "--backend", "cpu", "--simulate"])
    assert result.exit_code == 2
    assert "a simulator for metal alone" in plain(result.output)
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.runtime.cache_clear()
    build._toolchain.cache_clear()
    result = runner.invoke(app, ["check", "--backend", "metal", "--simulate"])
    assert result.exit_code == 2
    assert "no-such-compiler is not there (set CXX)" in plain(result.output)
    build._toolchain.cache_clear()


@pytest.mark.parametrize("width", ["50", "80"])
@pytest.mark.parametrize("command", [["info"], ["check", "--backend", "reference"]])
@pytest.mark.usefixtures("few_cases")
def test_no_name_is_broken(command: list[str], width: str) -> None:
    result = CliRunner(env={"COLUMNS": width, "NO_COLOR": "1"}).invoke(app, command)
    assert result.exit_code == 0, result.output
    words = result.stdout.replace("│", " ").replace(",", " ").split()
    for name in (
        "reference",
        "backend",
        *(
            ("metal", "triton", "combine_backward", "grouped_linear_transposed")
            if command[0] == "info"
            else ("experts", "bfloat16")
        ),
    ):
        assert name in words
    assert "…" not in result.stdout


def test_check_backend_that_cannot_run_says_why(runner: CliRunner) -> None:
    result = runner.invoke(app, ["check", "--backend", "metal"])
    assert result.exit_code == 2
    assert "cannot run here" in result.output


def test_info_says_which_fast_paths_are_off(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "calls past the dispatcher on" in plain(runner.invoke(app, ["info"]).output)
    monkeypatch.setitem(library.FAST_PATHS, "calls past the dispatcher", "this torch has none")
    assert "calls past the dispatcher off (this torch has none)" in plain(runner.invoke(app, ["info"]).output)
