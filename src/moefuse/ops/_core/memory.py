"""What a backend may assume of the memory it is given, made true here and nowhere else.

* Every tensor is dense (row-major, no gaps, no overlap of its own elements), but a stack of expert weights
  ``[E, N, K]``: there the rows or the columns of a matrix are dense, and the other two strides are any. So are those of
  heads and caches, in `rope` and `attend`, but for the last dimension, which is dense.
* Every tensor holds the numbers it shows: no negative bit, no zeros without memory. Conjugate bits belong to complex
  numbers, which no op takes.
* A tensor begins at a multiple of its element size; nothing wider may be assumed.
* Inputs may overlap each other. An output may be ``x``, ``shared`` or ``residual`` itself, element for element, and
  overlaps nothing else: a backend reads all of x before it writes, and an element of the others before it writes there.

Blocks of a `QuantTensor` have rules of their own, which it checks when it is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from moefuse.types import Plan

P = ParamSpec("P")
R = TypeVar("R")
#: tensors that are what they seem: no subclass stands in for them
DENSE = frozenset((Tensor, torch.nn.Parameter))

#: ops whose tensors of three dimensions are stacks of expert weights
_WITH_STACKS = frozenset(("grouped_linear", "grouped_linear_transposed", "experts", "experts_backward"))
#: ops whose tensors are dense in their last dimension only
_WITH_HEADS = frozenset(("rope", "attend"))

#: inputs that an output may replace
_REPLACEABLE = ("x", "shared", "residual")


def is_settled(t: Tensor, stack: bool) -> bool:
    """Whether a backend may be given ``t`` as it is; ``stack``: three dimensions are those of expert weights."""
    if t.is_neg() or t._is_zerotensor():
        return False
    return t.is_contiguous() or (stack and t.dim() == 3 and 1 in t.stride()[1:] and 0 not in t.stride()[1:])


def has_dense_rows(t: Tensor) -> bool:
    """Whether the last dimension of ``t`` is dense and holds the numbers it shows."""
    return not t.is_neg() and not t._is_zerotensor() and (t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] <= 1)


def settle(t: Tensor, stack: bool, heads: bool = False) -> Tensor:
    """``t``, or a copy that a backend may be given; ``heads``: dense rows will do."""
    if has_dense_rows(t) if heads else is_settled(t, stack):
        return t
    return (t.clone() if t._is_zerotensor() else t.resolve_neg()).contiguous()


def _all_settled(value: object, stack: bool, heads: bool = False) -> Any:
    """A value whose tensors a backend may be given: itself, or one like it with copies."""
    if isinstance(value, Tensor):
        return settle(value, stack, heads)
    if isinstance(value, tuple):
        if all(is_settled(part, stack) for part in value if isinstance(part, Tensor)):
            return value
        return type(value)(*(_all_settled(part, stack, heads) for part in value))
    if isinstance(value, Plan):
        tensors = {name: settle(t, stack) for name, t in value.tensors.items()}
        return Plan(**tensors, top_k=value.top_k, trusted=True)
    return value


def settled(op: str, run: Callable[P, R]) -> Callable[P, R]:
    """A backend's function, given settled tensors whatever the caller has."""
    stack, heads = op in _WITH_STACKS, op in _WITH_HEADS

    @functools.wraps(run)
    def call(*values: P.args, **named: P.kwargs) -> R:
        return run(*[_all_settled(value, stack, heads) for value in values], **named)

    return call


def has_values(*tensors: Tensor | None) -> bool:
    """Whether memory stands behind these tensors and may be looked at: nothing is traced, none is a stand-in."""
    if torch.compiler.is_compiling():
        return False
    return all(t is None or (type(t) in DENSE and t.device.type != "meta") for t in tensors)


def _end(t: Tensor, begin: int) -> int:
    """The byte behind the last element of a tensor; strides are never negative."""
    if t.is_contiguous() or t.numel() == 0:
        return begin + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return begin + (last + 1) * t.element_size()


def _is(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements; ``one`` is dense."""
    same = (one.data_ptr(), one.dtype, one.shape) == (other.data_ptr(), other.dtype, other.shape)
    return same and is_settled(other, False)


def check_outputs(
    op: str, tensors: Mapping[str, Tensor | None], outputs: tuple[str, ...] = ("out", "normed_out")
) -> None:
    """Refuse an output among these where it is negated or overlaps what it does not replace."""
    given = {name: t for name, t in tensors.items() if t is not None}
    if not has_values(*given.values()):
        return
    for name in [name for name in outputs if name in given]:
        out = given.pop(name)
        if out.is_neg():
            raise ValueError(f"{op}: {name} must hold its numbers as they are, got a negated view")
        start = out.data_ptr()
        stop = _end(out, start)
        for other, t in given.items():
            begin = t.data_ptr()
            if begin >= stop or _end(t, begin) <= start or t.device != out.device:
                continue
            if other not in _REPLACEABLE or not _is(out, t):
                itself = f"be {other} itself or " if other in _REPLACEABLE else ""
                raise ValueError(f"{op}: {name} must {itself}not overlap {other}, got tensors that share memory")
