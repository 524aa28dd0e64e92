"""How far a result is from the float64 one, relative to the row it stands in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Bounds on the error relative to the row: of the worst element, and of the row in the mean square."""

    worst: float
    rms: float
    reason: str


@dataclass(frozen=True)
class Difference:
    """The largest error of any row, and where it is."""

    worst: float
    rms: float
    where: str

    def within(self, tolerance: Tolerance) -> bool:
        return self.worst <= tolerance.worst and self.rms <= tolerance.rms


EXACT = Tolerance(0.0, 0.0, "data movement and selection are exact")
_NONE = Difference(0.0, 0.0, "")


def difference(got: Tensor, want: Tensor, *, whole: bool = False) -> Difference:
    """Compare with the float64 ``want``. NaN, infinity or a wrong shape where ``want`` has none is an infinite error.

    ``whole`` takes the tensor as one row: for gradients, where the terms of a row may cancel to nothing.
    """
    if got.shape != want.shape:
        return Difference(float("inf"), float("inf"), f"shape {list(got.shape)}, expected {list(want.shape)}")
    if want.numel() == 0:
        return _NONE
    width = want.numel() if whole else want.shape[-1] if want.dim() else 1
    have, goal = (t.detach().double().cpu().reshape(-1, width) for t in (got, want))
    expected = goal
    same = (have == goal) | (have.isnan() & goal.isnan())
    gap = (have - goal).abs().masked_fill(same, 0).nan_to_num(nan=torch.inf, posinf=torch.inf)
    goal = goal.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    worst = _ratio(gap.amax(-1), goal.abs().amax(-1))
    rms = _ratio(gap.square().mean(-1).sqrt(), goal.square().mean(-1).sqrt())
    row = int(worst.argmax())
    column = int(gap[row].argmax())
    where = f"row {row} column {column}: got {have[row, column]:.6g}, expected {expected[row, column]:.6g}"
    return Difference(float(worst.max()), float(rms.max()), where)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """Error over size; no error is 0 whatever the size, and an error on a row of zeros is infinite."""
    return torch.where(error == 0, 0.0, error / size)
