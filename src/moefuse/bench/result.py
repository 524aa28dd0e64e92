"""What a run found: one row per contestant, scope, way of running and token count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FLOOR = "floor"
OURS = "moefuse"
#: ours on the same layer with its experts as numbers, beside one in blocks
PLAIN = "moefuse plain"


@dataclass
class Row:
    """One figure, or the reason there is none.

    Attributes:
        tokens: ``T``; None for a case of the case table.
        name: who ran: moefuse, moefuse on plain numbers, a peer, or the floor.
        scope: what ran: the whole block, the experts alone, route + plan, or a case.
        mode: how: wall (CPU), eager or graph (CUDA); empty where nothing was timed.
        seconds: median per call; None when there is no figure, and ``note`` says why.
        faster_than: for each peer in the same mode, its time over this one.
        over_plain: for a layer in blocks, its time over that of the same layer in plain numbers.
        read_bytes: expert weights a call must read, mean over the inputs.
        error_worst, error_rms: against float64, relative to the row.
        launches: what one call puts on the GPU.
        peak_bytes: the most it holds there beyond its inputs, results included.
    """

    tokens: int | None
    name: str
    scope: str
    mode: str
    seconds: float | None = None
    samples: int = 0
    note: str = ""
    wrong: bool = False
    times_floor: float | None = None
    faster_than: dict[str, float] = field(default_factory=dict)
    over_plain: float | None = None
    read_bytes: float | None = None
    bytes_per_second: float | None = None
    bandwidth_share: float | None = None
    error_worst: float | None = None
    error_rms: float | None = None
    launches: int | None = None
    peak_bytes: int | None = None


@dataclass
class Result:
    """A run: its rows and everything that must stand beside them."""

    title: str
    dtype: str
    backend: str
    command: str
    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    shape: dict[str, Any] | None = None
    #: of one of the experts' weights, scales included
    bits: float | None = None
    #: per token count: what was done about caches, and the rates behind the floor
    rotation: dict[int, str] = field(default_factory=dict)
    rates: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ours_failed(self) -> bool:
        """Whether one of our own results was wrong."""
        return any(row.name in (OURS, PLAIN) and row.wrong for row in self.rows)

    @property
    def weights(self) -> str:
        """The formats of gate_up and down, one where they are the same; empty for numbers."""
        return "/".join(dict.fromkeys((self.shape or {}).get("weights") or ()))
