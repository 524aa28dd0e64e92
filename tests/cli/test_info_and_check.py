"""moefuse info and moefuse check, as a user runs them."""

import importlib
import json

import pytest
import torch
from typer.testing import CliRunner

from moefuse import backends
from moefuse.cli import app
from moefuse.ops import select
from moefuse.testing import cases

FEW = tuple(case for case in cases.CASES if case.id in ("route/qwen3", "plan/usual", "experts/decode"))


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


def test_check_backend_that_cannot_run_says_why(runner: CliRunner) -> None:
    result = runner.invoke(app, ["check", "--backend", "metal"])
    assert result.exit_code == 2
    assert "cannot run here" in result.output
