"""How many of our own function bodies stand between a public call and the kernel it runs."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import moefuse
from moefuse import Routing
from moefuse.backends.cpu import _native
from moefuse.ops._core import replay, select
from moefuse.testing.cases import runnable

ROOT = str(Path(moefuse.__file__).parent)
TRITON = [target for target in runnable(emulated=True) if target[0] == "triton"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    select.forget()
    yield
    select.forget()


def bodies_to(kernel: Callable[[CodeType], bool], run: Callable[[], Any]) -> list[list[str]]:
    """Our own functions under way whenever a kernel is entered, the public one first; a comprehension is no body."""
    stack: list[tuple[str, bool]] = []
    seen: list[list[str]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and stack:
            stack.pop()
        if event != "call":
            return
        own = code.co_filename.startswith(ROOT) and not code.co_name.startswith("<")
        if kernel(code):
            seen.append([name for name, ours in stack if ours])
        stack.append((f"{Path(code.co_filename).stem}.{code.co_name}", own))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


def layer(device: str) -> Callable[..., Any]:
    T, E, H, I = 1, 4, 32, 16
    x, router = torch.randn(T, H, device=device), torch.randn(E, H, device=device)
    gate_up, down = torch.randn(E, 2 * I, H, device=device), torch.randn(E, H, I, device=device)
    norm = torch.ones(H, device=device)

    def run(backend: str) -> Any:
        with torch.no_grad():
            return moefuse.moe(
                x, router, gate_up, down, Routing(top_k=2), norm_weight=norm, residual=x, backend=backend
            )

    return run


def seen_from_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of C++, whose entry Python can see."""

    def native(*values: Any) -> Any:
        return function(*values)

    return native


@pytest.mark.skipif(_native.core is None, reason="the native library was not built")
def test_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    core = _native.core

    class Core:
        def __getattr__(self, name: str) -> Any:
            found = getattr(core, name)
            return seen_from_python(found) if name in ("gate", "experts") else found

    run = layer("cpu")

    def paths() -> list[list[str]]:
        return bodies_to(lambda code: code.co_name == "native", lambda: run("cpu"))

    with monkeypatch.context() as patch:
        patch.setattr(_native, "core", Core())
        entered = paths()
    assert len(entered) == 2, "the router and the experts"
    assert all(path[0] == "moe.moe" and len(path) <= 9 for path in entered), entered
    for _ in range(2):
        run("cpu")
    (record,) = replay._RECORDS.values()
    assert record.again is not None
    record.again = seen_from_python(record.again)
    assert paths() == [["moe.moe"]], "one step into C++, from the public function itself"


@pytest.mark.skipif(not TRITON, reason="no Triton")
def test_triton() -> None:
    backend, device = TRITON[0]
    run = layer(device)
    for most in (9, None, 5, 5):  # the second call is recorded
        paths = bodies_to(
            lambda code: code.co_name == "launch" and code.co_filename.startswith(ROOT), lambda: run(backend)
        )
        if torch.cuda.is_available() and most == 5:
            paths = bodies_to(lambda code: code.co_name == "run" and "triton" in code.co_filename, lambda: run(backend))
        for path in paths if most is not None else []:
            assert path[0] == "moe.moe"
            assert len(path) + 1 <= most, path  # and the launch itself
