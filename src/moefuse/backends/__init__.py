"""How ops run. One row per backend; its module is loaded when a tensor first needs it.

A backend is a package beside this file that offers

* ``OPS``: op name -> function with the signature of that op's ``<op>_reference``: checked values of `moefuse.types` in,
  tensors out;
* ``DTYPES``: the element types its kernels take;
* ``FORMATS``: the block formats its products take in a `QuantTensor`, which then stands in a weight's place;
* ``unavailable()``: None, or one sentence that says why it cannot run on this machine;
* ``describe()``: facts for ``moefuse info``;
* optionally ``SAVES``: False where its ``experts`` cannot keep the pre-activations for a backward pass;
* optionally ``emulates()``: device types beyond its row's that it runs on when asked by name;
* optionally ``arrange(target, source)``: writes blocks in the target's arrangement; False where no kernel does;
* optionally ``record(run, tensors)``: a function that does with other tensors, laid out like these, what ``run`` does
  with these, for less; or None where it cannot. See `moefuse.ops._core.replay`.

Where a path, a tile or a rounding hangs on the size of the batch, a function asks `invariant` first: inside
``moefuse.invariant()`` one serves every size.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

#: every op that a backend may have a function for
_OPS = (
    *("route", "gate", "plan", "grouped_linear", "grouped_outer", "glu", "combine", "experts"),
    "grouped_linear_transposed",
    *("route_backward", "gate_backward", "glu_backward", "combine_backward", "tail_backward", "experts_backward"),
    *("linear", "rope", "attend"),
)


@dataclass(frozen=True)
class Backend:
    name: str
    devices: tuple[str, ...]

    @property
    def module_name(self) -> str:
        return f"{__name__}.{self.name}"

    def load(self) -> Any:
        return importlib.import_module(self.module_name)

    def exists(self) -> bool:
        """Whether this version of the package has it."""
        return importlib.util.find_spec(self.module_name) is not None

    def missing(self) -> str | None:
        """Why this backend cannot run here, or None."""
        if not self.exists():
            return "this version of moefuse has no kernels for it yet"
        reason: str | None = self.load().unavailable()
        return reason

    def saves(self) -> bool:
        """Whether its ``experts`` can keep what a backward pass needs."""
        return bool(getattr(self.load(), "SAVES", True))

    def arrange(self) -> Callable[[Any, Any], bool] | None:
        """Its kernel that arranges blocks, if it has one."""
        return getattr(self.load(), "arrange", None)

    def emulated(self) -> tuple[str, ...]:
        """Devices it runs on only when asked by name."""
        if self.missing() is not None:
            return ()
        found: tuple[str, ...] = getattr(self.load(), "emulates", tuple)()
        return found


BACKENDS: tuple[Backend, ...] = (Backend("cpu", ("cpu",)), Backend("triton", ("cuda",)), Backend("metal", ("mps",)))
REFERENCE = "reference"


def functions_in(package: str) -> dict[str, Callable[..., Any]]:
    """The ops of a backend, each from the module of its own name, or of the op whose gradient it is a part of."""
    found: dict[str, Callable[..., Any]] = {}
    for op in _OPS:
        stems = op, op.removesuffix("_backward"), op.removesuffix("_transposed"), op.replace("tail_", "combine_")
        homes = (f"{package}.{stem}" for stem in dict.fromkeys(stems))
        modules = (importlib.import_module(home) for home in homes if importlib.util.find_spec(home))
        run = next((getattr(module, op) for module in modules if hasattr(module, op)), None)
        if run is not None:
            found[op] = run
    return found


def find(name: str | None) -> Backend | None:
    """The row of a name; None for the reference, which has none."""
    return next((row for row in BACKENDS if row.name == name), None)


def names() -> tuple[str, ...]:
    """Every name that ``backend=`` takes."""
    return (*(row.name for row in BACKENDS), REFERENCE)


class _Running(threading.local):
    """Of the op that this thread runs."""

    invariant = False


_RUNNING = _Running()


def invariant() -> bool:
    """Whether the op that runs must give a row bits that depend on that row and the weights alone."""
    return _RUNNING.invariant


def invariantly(run: Callable[P, R]) -> Callable[P, R]:
    """A backend's function, run so that `invariant` is true."""

    @functools.wraps(run)
    def call(*values: P.args, **named: P.kwargs) -> R:
        before, _RUNNING.invariant = _RUNNING.invariant, True
        try:
            return run(*values, **named)
        finally:
            _RUNNING.invariant = before

    return call
