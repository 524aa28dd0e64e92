"""The names that kernels know, checked against the lists that users choose from.

`moefuse.types` and `moefuse.quant.formats` hold those lists. A backend says which of their names its kernels know; what
it does not know it refuses by name, whatever a neighbour's number may be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from moefuse.types import GROUP_SCORES, LAYOUTS

V = TypeVar("V")


class Table(dict[str, V]):
    """Name -> what a backend's kernels have for it; every name is one of ``listed``.

    >>> Table("metal", "layout", {"halves": 0}, LAYOUTS)["interleaved"]
    Traceback (most recent call last):
    NotImplementedError: metal: no kernels for the layout 'interleaved', only for halves
    """

    def __init__(self, backend: str, what: str, rows: Mapping[str, V], listed: Iterable[str]) -> None:
        super().__init__(rows)
        self._backend, self._what = backend, what
        unknown = [name for name in rows if name not in tuple(listed)]
        if unknown:
            raise ImportError(f"{backend}: its kernels name {', '.join(unknown)}, which is no {what} of this version")

    def __missing__(self, name: str) -> V:
        raise NotImplementedError(
            f"{self._backend}: no kernels for the {self._what} {name!r}, only for {', '.join(self)}"
        )


class Codes(Table[int]):
    """Name -> the number that a backend's kernels have for it, from ``first`` on."""

    def __init__(self, backend: str, what: str, names: Iterable[str], listed: Iterable[str], first: int = 0) -> None:
        super().__init__(backend, what, {name: code for code, name in enumerate(names, first)}, listed)


_LAYOUTS = Codes("layout", "kind", ("halves", "interleaved"), LAYOUTS)
_GROUP_SCORES = Codes("group_score", "kind", ("max", "top2_sum"), GROUP_SCORES)


def interleaved(layout: str) -> bool:
    """Whether gate and up rows stand by turns, and not in halves."""
    return bool(_LAYOUTS[layout])


def sums_two(group_score: str) -> bool:
    """Whether a group counts by its two largest scores, and not by its largest."""
    return bool(_GROUP_SCORES[group_score])
