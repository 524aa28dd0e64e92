"""Tensors that mean what another one means and lie in memory as a user's may: sliced, strided, expanded, negated.

The gaps of a view hold NaN (in integers a large number), so that a kernel which reads them is seen. `strange_cases`
says which tensor of which case takes which form.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moefuse.testing.inputs import map_tensors, tensors_in

if TYPE_CHECKING:
    from moefuse.testing.cases import Case

Form = Callable[[Tensor], Tensor]


def _junk(t: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan if t.is_floating_point() else 100, dtype=t.dtype, device=t.device)


def _columns(t: Tensor) -> Tensor:
    """The first columns of a wider tensor."""
    wide = _junk(t, *t.shape[:-1], t.shape[-1] + 3)
    view = wide[..., : t.shape[-1]]
    view.copy_(t)
    return view


def _every_second(t: Tensor) -> Tensor:
    wide = _junk(t, *t.shape[:-1], 2 * t.shape[-1])
    view = wide[..., ::2]
    view.copy_(t)
    return view


def _expanded(t: Tensor) -> Tensor:
    """The first row (of a vector, the first number) in place of every other: the one form that changes values."""
    return t[:1].clone().expand(t.shape)


def _transposed(t: Tensor) -> Tensor:
    return t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.dim() > 1 else t


def _offset(t: Tensor) -> Tensor:
    """One element behind where an allocation begins."""
    view = _junk(t, t.numel() + 1)[1:].view(t.shape)
    view.copy_(t)
    return view


def _negated(t: Tensor) -> Tensor:
    view: Tensor = torch._neg_view(-t)
    return view


FORMS: dict[str, Form] = {
    "columns": _columns,
    "every second": _every_second,
    "expanded": _expanded,
    "transposed": _transposed,
    "offset": _offset,
    "negated": _negated,
}


@dataclass(frozen=True)
class Strange:
    """Which tensor of a case lies strangely: the ``index``-th of an argument (a tuple, a plan), or every gradient of a
    result where the argument is `GRADIENT`."""

    argument: str
    index: int
    form: str

    def __str__(self) -> str:
        return f"{self.argument}[{self.index}] {self.form}"

    def change(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with that tensor in its form."""
        if self.argument == GRADIENT:
            return inputs
        counter = itertools.count()
        changed = map_tensors(
            inputs[self.argument], lambda t: FORMS[self.form](t) if next(counter) == self.index else t
        )
        return {**inputs, self.argument: changed}


#: stands for what `Strange` calls an argument: the gradients that a backward pass begins with
GRADIENT = "gradient"
# Where equal values make ties that float32 may decide otherwise than float64, no permutation, or sums that cancel.
_NEVER_EXPANDED = {
    "route": ("bias",),
    "gate": ("weight", "norm_weight", "logit_bias"),
    "moe": ("router", "norm_weight"),
    "combine": ("inverse",),
    "grouped_linear": ("plan",),
    "grouped_outer": ("plan", "x"),
    "linear": ("weight",),
}
#: what an op writes to is dense in its last dimension and holds each element once
_WRITTEN = {"rope": ("keys", "values")}


def strange_forms(case: Case) -> Iterator[Strange]:
    """Every tensor of a case in every form it can have."""
    for argument, value in case.inputs(0, torch.float32).items():
        for index, t in enumerate(tensors_in(value)):
            for form in FORMS:
                # Blocks follow each other without gaps, of whole experts any number; and bytes have no sign.
                blocks = t.dtype == torch.uint8 and form not in ("offset", "expanded" if t.dim() > 2 else "")
                written = argument in _WRITTEN.get(case.op, ()) and form not in ("columns", "offset")
                ties = form == "expanded" and argument in _NEVER_EXPANDED.get(case.op, ())
                unsigned = form == "negated" and t.dtype == torch.bool
                if not (blocks or written or ties or unsigned) and not (form == "transposed" and t.dim() < 2):
                    yield Strange(argument, index, form)
    if case.gradients:
        yield from (Strange(GRADIENT, 0, form) for form in FORMS)


def strange_cases(cases: Iterable[Case], *, one: bool = False) -> Iterator[tuple[Case, Strange]]:
    """Every form of every tensor that the ops of these cases take, each on the first case that has it.

    ``one``: of each tensor one form, by turns, for who has little time.
    """
    seen: set[tuple[Any, ...]] = set()
    for case in cases:
        for strange in strange_forms(case):
            tensor = (case.op, bool(case.specs), strange.argument, strange.index)
            if one and strange.form != tuple(FORMS)[len(seen) % len(FORMS)]:
                continue
            key = tensor if one else (*tensor, strange.form)
            if key not in seen and (not case.specs or strange.argument in ("weight", "gate_up", "down")):
                seen.add(key)
                yield case, strange
