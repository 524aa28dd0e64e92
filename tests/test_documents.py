"""Documents do what they say: every block of Python in them runs; every command and every file they name exists."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from api_page import page
from test_architecture import MAY_IMPORT
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
FOLDERS = (".ci", "csrc", "docs", "examples", "src", "tests")
FILES = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]


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
    # Pictures (mermaid) are drawn by the site; signatures (py) stand on the page that is printed.
    drawn = {"docs/architecture.md": {"mermaid"}, "docs/api.md": {"py"}}
    assert {name for name, _ in blocks(document)} <= {"python", "bash"} | drawn.get(document, set())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_lines_are_short(document: str) -> None:
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    wide = document not in ("docs/performance.md", "docs/perf-log.md")  # elsewhere the row of a table may be long
    assert not [line for line in lines if len(line) >= 120 and not (wide and line.startswith("|"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_are_named_exist(document: str) -> None:
    """By the end of their path; `<op>` stands for any name. What commands write need not be there."""
    text = (ROOT / document).read_text(encoding="utf-8")
    for name in re.findall(r"`((?!card/|build/|box/)[\w./<>-]+(?:/|\.(?:py|md|h|cpp|metal)))`", text):
        pattern = re.sub(r"<\w+>", "[^/]+", re.escape(name.rstrip("/")))
        assert any(re.search(rf"(^|/){pattern}($|/)", path) for path in FILES), f"{document} names {name}"


def test_the_api_page_is_what_is_printed() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert text == page(), "print it anew: PYTHONPATH=src python tests/api_page.py > docs/api.md"


def test_the_contents_list_every_page() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for path in ROOT.glob("docs/*.md"):
        assert path.name == "index.md" or f"({path.name})" in text, path.name


def test_the_picture_of_imports_is_the_rule() -> None:
    """Every arrow is allowed, and along the arrows one reaches all that is allowed."""
    picture = next(text for name, text in blocks("docs/architecture.md") if name == "mermaid")
    labels = dict(re.findall(r'(\w+)\["(\w+)', picture))
    arrows: dict[str, set[str]] = {room: set() for room in MAY_IMPORT}
    for start, end in re.findall(r'(\w+)(?:\["[^"]*"\])? --> (\w+)', picture):
        arrows[labels[start]].add(labels[end])

    def reached(room: str) -> set[str]:
        return arrows[room].union(*map(reached, arrows[room]))

    for room, allowed in MAY_IMPORT.items():
        assert arrows[room] <= allowed <= reached(room), room


@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason="mkdocs and mkdocstrings are not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "moefuse.nn.MoE" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")


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
