"""Where the Metal kernels run in tests: on a Mac's GPU, elsewhere on the processor in the simulator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moefuse.backends.metal import launch
from moefuse.ops._core import select

TARGET = ("metal", "mps" if torch.backends.mps.is_available() else "cpu")


@contextmanager
def simulated() -> Iterator[None]:
    """The Metal backend can run while this lasts."""
    if TARGET[1] == "mps":
        yield
        return
    from moefuse.testing import msl

    before = launch.compile_shader, launch.EMULATED
    msl.install()
    select.forget()
    try:
        yield
    finally:
        launch.compile_shader, launch.EMULATED = before
        select.forget()


def counted(call: Callable[[], Any]) -> list[str]:
    """The kernels that a call launches, in order."""
    names: list[str] = []
    find = launch._kernel

    def seen(compiler: Any, name: str, *rest: Any) -> Any:
        names.append(name)
        return find(compiler, name, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_kernel", seen)
        call()
    return names
