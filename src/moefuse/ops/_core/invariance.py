"""The mode in which a row's bits depend on that row and the weights alone.

What was asked for travels with each call, in the name of its backend: so gradients, recordings and traced programs have
the mode that their forward call had, whoever runs them and when.
"""

from __future__ import annotations

from contextlib import ContextDecorator
from types import TracebackType

from moefuse import config

_MARK = "+invariant"


def _at_start() -> bool | None:
    """What the environment asks for; None where that is nothing we know, which the first call says."""
    try:
        return config.invariant()
    except ValueError:
        return None


#: a plain variable, which a traced program is guarded by
_on: bool | None = _at_start()


class invariant(ContextDecorator):  # used like a function
    """Inside, a row's bits depend on that row and the weights alone.

    They do not depend on the number of tokens, on the other rows, on a row's place, on padding, on how tokens were cut
    into batches, on the number of threads, or on whether a call is eager, captured or compiled. This holds for every
    result, and for gradients with respect to what belongs to a token; docs/determinism.md has the whole promise.
    Gradients follow the mode of their forward call. For the process, not for a thread, like torch's own switches;
    ``MOEFUSE_INVARIANT=1`` is the same for a whole program.

    Args:
        enabled: False switches it off inside.

    >>> import torch, moefuse
    >>> x, weight = torch.randn(100, 64), torch.randn(32, 64)
    >>> with moefuse.invariant():
    ...     together, alone = moefuse.linear(x, weight), moefuse.linear(x[7:8], weight)
    >>> torch.equal(together[7:8], alone)
    True
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"invariant: enabled must be a bool, got {type(enabled).__name__}")
        self._enabled = enabled
        self._before: list[bool | None] = []

    def __enter__(self) -> None:
        global _on
        self._before.append(_on)
        _on = self._enabled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _on
        _on = self._before.pop()


def is_invariant() -> bool:
    """Whether calls made now are to be so."""
    return config.invariant() if _on is None else _on


def asked(backend: str | None) -> str | None:
    """A choice of backend with the mode that a call made now has."""
    if _on is False:  # most calls
        return backend
    if not is_invariant() or not isinstance(backend, (str, type(None))) or apart(backend)[1]:
        return backend
    return f"{backend or ''}{_MARK}"


def apart(backend: str | None) -> tuple[str | None, bool]:
    """The choice itself, and whether it is to be invariant."""
    if backend is None or not backend.endswith(_MARK):
        return backend, False
    return backend.removesuffix(_MARK) or None, True


def like(backend: str | None, other: str) -> str:
    """Another backend, in the mode of this choice."""
    return f"{other}{_MARK}" if apart(backend)[1] else other
