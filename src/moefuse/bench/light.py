"""Imports for a process that runs one model: what transformers makes and imports on the way, and need not."""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
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


class _Stand(types.ModuleType):
    """Stands for a package whose modules are wanted and not itself; asked for more than it was given, it makes room."""

    def __init__(self, spec: importlib.machinery.ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__, self.__file__, self.__path__ = spec, spec.origin, list(spec.submodule_search_locations or ())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(self.__name__), name)

    def leave(self) -> None:
        """Whoever imports the package next gets it."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        parent, _, leaf = self.__name__.rpartition(".")
        if vars(sys.modules[parent]).get(leaf) is self:
            delattr(sys.modules[parent], leaf)


def _stand(stack: ExitStack, name: str, **given: Any) -> None:
    """Put a stand in the place of a package until the stack is closed."""
    spec = importlib.util.find_spec(name)
    if spec is not None and name not in sys.modules:
        sys.modules[name] = stand = _Stand(spec)
        vars(stand).update(given)
        parent, _, leaf = name.rpartition(".")
        setattr(sys.modules[parent], leaf, stand)
        stack.callback(stand.leave)


def _constant(function: Any) -> Any:
    function._dynamo_marked_constant = True
    return function


def _same(function: Any = None, *_: object, **__: object) -> Any:
    """A function as it is; or, given options alone, what leaves one as it is."""
    return _same if function is None else function


@contextmanager
def without_compiler() -> Iterator[None]:
    """Import transformers, for a process that compiles nothing and has no ranks, without torch's compiler.

    As it is imported transformers tells that which functions not to look into. Hearing it takes torch 0.9 s: the
    compiler, its symbols, Triton and distributed tensors. Nor is the package of all models wanted, which reads the
    sources of all of them (0.3 s), as transformers itself just did. What is imported here may not be given to
    ``torch.compile``.
    """
    if "transformers" in sys.modules or _COMPILER in sys.modules:
        yield
        return
    marks: dict[str, Callable[..., Any]] = {
        "allow_in_graph": _same, "assume_constant_result": _constant, "disable": _same,
    }  # fmt: skip
    with ExitStack() as stack:
        _stand(stack, _COMPILER, **marks)
        for owner, name, value in (
            *((torch.compiler, name, mark) for name, mark in marks.items()),
            (torch.distributed, "is_available", lambda: False),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        if importlib.util.find_spec("transformers") is not None:
            _stand(stack, "transformers.models")
        yield
