"""Variables and names that are wrong, and the ways to call the command."""

import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import moefuse
from moefuse.cli import app
from moefuse.ops._core import select

COMMANDS = (["info"], ["check"], ["run"], ["bench"], ["gguf", "none.gguf"], ["tune"])


@pytest.fixture(autouse=True)
def forgotten() -> object:
    select.forget()
    yield
    select.forget()


def invoke(variables: dict[str, str], *words: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"} | variables).invoke(app, list(words))
    assert not isinstance(result.exception, (ValueError, RuntimeError)), result.exception
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("MOEFUSE_BACKEND", "Invalid value for MOEFUSE_BACKEND: 'foo' is not one of cpu, triton, metal, reference"),
        ("MOEFUSE_INVARIANT", "Invalid value for MOEFUSE_INVARIANT: MOEFUSE_INVARIANT must be 0 or 1, got 'foo'"),
        ("MOEFUSE_CPU_ISA", "Invalid value for MOEFUSE_CPU_ISA: MOEFUSE_CPU_ISA must be one that this machine has"),
    ],
)
def test_a_wrong_variable_is_a_message(command: list[str], variable: str, message: str) -> None:
    code, output = invoke({variable: "foo"}, *command)
    assert code == 2
    assert message in output


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="metal runs here")
def test_a_backend_that_is_not_here() -> None:
    code, output = invoke({"MOEFUSE_BACKEND": "metal"}, "info")
    assert code == 0, "info is there to say why"
    assert "backend 'metal' (MOEFUSE_BACKEND) cannot run this call: it runs on mps tensors, not cpu" in output
    for command in (["check"], ["run"]):
        select.forget()
        code, output = invoke({"MOEFUSE_BACKEND": "metal"}, *command)
        assert code == 2
        assert "Invalid value for MOEFUSE_BACKEND" in output


def test_version() -> None:
    assert invoke({}, "--version") == (0, f"moefuse {moefuse.__version__}")
    done = subprocess.run([sys.executable, "-m", "moefuse", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"moefuse {moefuse.__version__}\n"


def test_a_wrong_variable_from_the_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moefuse", "info"],
        capture_output=True,
        text=True,
        env=os.environ | {"MOEFUSE_BACKEND": "foo"},
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "MOEFUSE_BACKEND" in done.stderr
