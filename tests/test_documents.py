"""Documents do what they say: every block of Python in them runs, every command in them exists."""

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.main import get_command

import moefuse
from moefuse.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))),
)
COMMANDS = get_command(app).commands


def blocks(document: str) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", (ROOT / document).read_text(), re.DOTALL | re.MULTILINE)


def of_language(language: str) -> list[str]:
    return [document for document in DOCUMENTS if any(name == language for name, _ in blocks(document))]


def test_blocks_are_found() -> None:
    assert {"README.md", "docs/huggingface.md", "docs/quantisation.md", "docs/training.md"} <= set(
        of_language("python")
    )


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120
    first = next(text for name, text in blocks("README.md") if name == "python")
    assert len(first.strip().splitlines()) <= 10


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_is_of_a_language_that_is_tried(document: str) -> None:
    assert {name for name, _ in blocks(document)} <= {"python", "bash"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / document).read_text()):
        assert target.startswith("https://") or ((ROOT / document).parent / target.partition("#")[0]).exists(), target


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what documents load by name: a small model of its kind stands for a large one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-30B-A3B-Q4_K_M.gguf").symlink_to(Path(moefuse.__file__).parent / "box" / "box.gguf")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "moe_intermediate_size": 32, "vocab_size": 99}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path / "path" / "to" / "model")


@pytest.mark.parametrize("document", of_language("python"))
@pytest.mark.usefixtures("models")
def test_python_runs(document: str) -> None:
    """The blocks of a document in order, in one scope; all of them."""
    scope: dict[str, object] = {}
    for language, text in blocks(document):
        if language == "python":
            exec(compile(text, document, "exec"), scope)


@pytest.mark.parametrize("document", of_language("bash"))
def test_commands_exist(document: str) -> None:
    for language, text in blocks(document):
        if language == "bash":
            for line in text.splitlines():
                words = [word for word in shlex.split(line, comments=True) if not re.match("[A-Z_]+=", word)]
                if words:
                    check_command(words)


def check_command(words: list[str]) -> None:
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    if "moefuse" in words or "moefuse.cli" in words:  # behind torchrun or a sanitizer, too
        first = next(number for number, word in enumerate(words) if word in ("moefuse", "moefuse.cli"))
        command = COMMANDS[words[first + 1]]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        assert {word for word in words[first:] if word.startswith("--")} <= known, words
    elif words[0] == "python":
        nodes = list(ast.walk(ast.parse((ROOT / words[1]).read_text())))
        known = {node.value for node in nodes if isinstance(node, ast.Constant)}
        known |= {
            f"--{node.arg.replace('_', '-')}" for node in nodes if isinstance(node, ast.arg)
        }  # as typer makes them
        assert options <= known, words
    elif words[0] == "pytest":
        assert all((ROOT / word.partition("::")[0]).exists() for word in words[1:] if not word.startswith("-")), words
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[:2] == ["pip", "install"]:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = {extra for word in words for found in re.findall(r"\[(.+)\]", word) for extra in found.split(",")}
        assert extras <= set(project["optional-dependencies"]), words
    else:
        raise AssertionError(f"a command that nothing here tries: {words}")
