"""The layout is a rule, and this is the machine that keeps it."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import moefuse
from moefuse import backends
from moefuse.ops._core import select

ROOT = Path(moefuse.__file__).parent

#: room -> rooms it may import; nothing points back
MAY_IMPORT = {
    "config": set(),
    "quant": {"config"},
    "types": {"quant"},
    "backends": {"quant", "types", "config"},
    "ops": {"backends", "quant", "types", "config"},
    "nn": {"ops", "quant", "types", "config"},
    "hf": {"nn", "ops", "quant", "types", "config"},
    "testing": {"nn", "ops", "backends", "quant", "types", "config"},
    "bench": {"hf", "nn", "ops", "backends", "quant", "types", "config", "testing"},
    "__main__": {"cli"},
    "cli": {"bench", "hf", "nn", "ops", "backends", "quant", "types", "config", "testing"},
}
#: rooms above the public surface may use it
ABOVE_THE_SURFACE = {"hf", "testing", "bench", "cli"}


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """The rooms of this package that a file imports; "" is the package itself."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "moefuse" else [node.module]
            )
        else:
            continue
        for name in names:
            parts = (name or "").split(".")
            if parts[0] == "moefuse":
                yield parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


def test_every_room_is_known() -> None:
    assert {room_of(path) for path in sources()} - {"__init__"} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    allowed = MAY_IMPORT[room] | {room} | ({""} if room in ABOVE_THE_SURFACE else set())
    assert set(imported(path)) <= allowed


def backend_sources() -> list[Path]:
    return [path for path in sources() if room_of(path) == "backends"]


def test_backends_neither_check_nor_differentiate() -> None:
    for path in backend_sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                assert ast.unparse(raised) not in ("ValueError", "TypeError"), (
                    f"{path}: user errors belong to the op page"
                )
            if isinstance(node, (ast.Attribute, ast.Name)):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in ("autograd", "requires_grad_", "register_autograd"), (
                    f"{path}: autograd is the op page's"
                )


def test_environment_is_read_in_one_place() -> None:
    for path in sources():
        if path.name == "config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in ("environ", "getenv", "putenv", "environb"), f"{path}: ask moefuse.config"


def test_op_pages_stay_pages() -> None:
    for path in (ROOT / "ops").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 360, f"{path.name} is no longer a page"


def test_import_is_light() -> None:
    heavy = "{'triton', 'transformers', 'matplotlib', 'typer', 'rich', 'gguf', 'nanobind'}"
    code = f"import sys, torch; before = set(sys.modules); import moefuse; print({heavy} & (set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_version_is_the_installed_one() -> None:
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    assert f"## {moefuse.__version__}" in changelog


def _kept(tree: ast.Module) -> Iterator[str]:
    """Names of a module's containers that begin empty, and of what remembers its results."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            if any("cache" in ast.unparse(d).split("(")[0].split(".")[-1] for d in node.decorator_list):
                yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            value = ast.unparse(node.value)
            if value in ("{}", "[]", "set()") or "_cache(" in value or "WeakKey" in value:
                yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def test_the_docs_list_all_state_between_calls() -> None:
    listed = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module.split(".")[0] in ("testing", "bench", "cli"):
            continue
        for name in _kept(ast.parse(path.read_text(encoding="utf-8"))):
            assert f"`{module}.{name}`" in listed, f"{module}.{name} is not in docs/architecture.md"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.Lambda]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield node


def between_op_and_kernel() -> list[Path]:
    return [path for path in sources() if room_of(path) in ("ops", "nn", "hf", "backends")]


@pytest.mark.parametrize("path", between_op_and_kernel(), ids=lambda path: str(path.relative_to(ROOT)))
def test_arguments_are_known_by_name(path: Path) -> None:
    """No argument is picked out of a tuple by its number, and none is of any type in any number."""
    for function in functions(path):
        rest = function.args.vararg
        kind = "" if rest is None or rest.annotation is None else ast.unparse(rest.annotation)
        if rest is None or kind == "int":  # a shape
            continue
        assert kind != "Any" or room_of(path) in ("nn", "hf"), f"line {function.lineno}"
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == rest.arg:
                raise AssertionError(f"line {node.lineno}: {ast.unparse(node)}")
    positions = re.compile(r"\b(args|rest|facts|values|inputs|arguments|leaves)\[-?\d*:?-?\d*\]")
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assert not positions.search(line), f"line {number}: {line.strip()}"


@pytest.mark.parametrize("path", backend_sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_function_of_a_backend_takes_more_than_nine_values(path: Path) -> None:
    """But a kernel, whose parameters are registers, and tiles, which tuning chooses."""
    for function in functions(path):
        if isinstance(function, ast.FunctionDef) and not any("jit" in ast.unparse(d) for d in function.decorator_list):
            given = [arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)]
            values = [name for name in given if name not in ("self", "cls") and "tile" not in name]
            assert len(values) <= 9, f"{function.name} takes {len(values)}: {values}"


def test_a_backend_takes_what_the_reference_takes() -> None:
    for row in backends.BACKENDS:
        if row.missing() is None or row.name == "metal":
            for op, function in row.load().OPS.items():
                wanted = list(inspect.signature(select.REFERENCES[op]).parameters)
                assert list(inspect.signature(function).parameters) == wanted, f"{row.name}: {op}"


@pytest.mark.parametrize("op", sorted(select.REFERENCES))
def test_an_op_is_found_by_its_name(op: str) -> None:
    """In every room by the same stem: its own, or that of the op whose gradient it is."""
    stems = {op, op.removesuffix("_backward"), op.removesuffix("_transposed"), op.replace("tail_", "combine_")}
    homes = {module_of(select.REFERENCES[op])}
    for row in backends.BACKENDS:
        if row.missing() is None or row.name == "metal":
            homes |= {module_of(row.load().OPS[op])} if op in row.load().OPS else set()
    assert homes <= stems, homes - stems


def module_of(function: Callable[..., object]) -> str:
    return inspect.unwrap(function).__module__.rsplit(".", 1)[-1]
