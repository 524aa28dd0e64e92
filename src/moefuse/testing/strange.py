"""Tensors that mean what another one means and lie in memory as a user's may: sliced, strided, expanded, negated.

The gaps of a view hold NaN (in integers a large number), so that a kernel which reads them is seen.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
