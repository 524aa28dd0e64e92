"""Imports for a process that runs one model: what transformers makes and imports on the way, and need not."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_COMPILER = "torch._dynamo"


@contextmanager
def many_imports() -> Iterator[None]:
    """transformers makes a million objects and no garbage, so the collector waits, and then leaves them alone.

    Of a command that takes 7 s, that is 0.8 s before the first token and 1.4 s at the end.
    """
    if "transformers" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Compiler(types.ModuleType):
    """Stands for torch's compiler, as long as it is only told of functions; asked for more, it makes room for it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _drop(self)
        return getattr(importlib.import_module(_COMPILER), name)


def _drop(stand: _Compiler) -> None:
    if sys.modules.get(_COMPILER) is stand:
        del sys.modules[_COMPILER]
    if vars(torch).get("_dynamo") is stand:
        del torch._dynamo


def _constant(function: Any) -> Any:
    function._dynamo_marked_constant = True
    return function


def _same(function: Any) -> Any:
    return function


def _disable(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:  # noqa: ARG001  # torch's form
    return _same if fn is None else fn


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import transformers, for a process that compiles nothing and has no ranks, without torch's compiler.

    As it is imported transformers tells that which functions not to look into. Hearing it takes torch 0.9 s: the
    compiler, its symbols, Triton and distributed tensors. What is imported here may not be given to ``torch.compile``.
    """
    found = importlib.util.find_spec(_COMPILER) if _COMPILER not in sys.modules else None
    if found is None or "transformers" in sys.modules:
        yield
        return
    stand: Any = _Compiler(_COMPILER)
    stand.__spec__, stand.__file__, stand.__path__ = found, found.origin, found.submodule_search_locations
    marks: dict[str, Callable[..., Any]] = {
        "allow_in_graph": _same, "assume_constant_result": _constant, "disable": _disable,
    }  # fmt: skip
    vars(stand).update(marks)
    with ExitStack() as stack:
        sys.modules[_COMPILER] = torch._dynamo = stand
        stack.callback(_drop, stand)
        for owner, name, value in (
            *((torch.compiler, name, mark) for name, mark in marks.items()),
            (torch.distributed, "is_available", lambda: False),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
