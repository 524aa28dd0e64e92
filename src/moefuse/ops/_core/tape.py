"""A step on the CPU, taken down once and run again on the same memory: what a CUDA graph is to a GPU.

Between the kernels of a decode step lies a millisecond of Python per layer: modules, checks, views. None of it depends
on the numbers, so a tape keeps what touches them: calls of our kernels, and torch's functions that write.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moefuse.backends.cpu import _native

#: functions whose results are numbers for Python, which a tape cannot know the next time
_LOOKS = {
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__",
    "__repr__", "allclose", "argwhere", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tolist",
    "unique",
}  # fmt: skip
#: functions that give memory and no numbers
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty"}


class NotTaped(Exception):
    """What was to be taken down looks at numbers, or does what a tape does not know."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _memories(tensors: Iterable[Tensor]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


class _Functions(TorchFunctionMode):
    """Takes down torch's functions as they are called from Python."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _LOOKS:
            raise NotTaped(f"it looks at numbers: {name}")
        given = list(_tensors((args, kwargs)))
        versions = [t._version for t in given]
        self.tape.inside = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.tape.inside = False
        made = list(_tensors(result))
        if versions != [t._version for t in given]:
            self.tape.calls.append(functools.partial(function, *args, **kwargs))
        elif name not in _ALLOCATES and made and not _memories(made) <= _memories(given):
            self.tape.calls.append(functools.partial(_again, made, function, args, kwargs))
        self.tape.kept += made
        return result


def _again(made: list[Tensor], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    for old, new in zip(made, _tensors(function(*args, **kwargs)), strict=True):
        old.copy_(new)


class _Kernels:
    """Stands for the C++ module, and takes its calls down."""

    def __init__(self, core: Any, tape: Tape) -> None:
        self.core, self.tape, self.thread = core, tape, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.core, name)
        if not callable(kernel):
            return kernel

        def call(*values: object) -> Any:
            result = kernel(*values)
            if threading.get_ident() == self.thread and not self.tape.inside and values:  # else a question
                if result is not None:
                    raise NotTaped(f"{name} returns a value")
                self.tape.calls.append(functools.partial(kernel, *values))
            return result

        return call


class Tape:
    """What one call of a function did on the CPU.

    ``run`` does it again: it reads and writes the very tensors of that call, and its result is the one that was
    returned then, with other numbers. All that may change from call to call must lie in tensors. Nothing may require
    gradients.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        """Run a function and take it down; raises `NotTaped`, then its work is done in part."""
        self.calls: list[Callable[[], Any]] = []
        self.kept: list[Tensor] = []  # memory that a later call might be given otherwise
        self.inside = False
        self.threads = torch.get_num_threads()
        core = _native.core
        _native.core = _Kernels(core, self)
        try:
            with _Functions(self):
                self.result = function()
        finally:
            _native.core = core

    def run(self) -> Any:
        """The result, made anew."""
        for call in self.calls:
            call()
        return self.result

    @property
    def stale(self) -> bool:
        """Whether torch has another number of threads now; the kernels were told the old one."""
        return self.threads != torch.get_num_threads()
