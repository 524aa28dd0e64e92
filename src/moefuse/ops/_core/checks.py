"""The rules that several op pages share. Each raises with the op, the rule and what was got."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moefuse.quant.tensor import QuantTensor
from moefuse.types import check_int, check_number, name_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(name_of, dtypes))


def check_tensor(
    op: str,
    name: str,
    value: Any,
    dims: Mapping[str, int | None],
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    like: Tensor | None = None,
) -> None:
    """``value`` is a tensor of one of ``dtypes`` with shape ``dims`` (None: any size), on the device of ``like``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{op}: {name} must be {_names(dtypes)}, got {name_of(value.dtype)}")
    _check_place(op, name, value, dims, like)
    if value.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense tensor, got {value.layout}")


def _check_place(
    op: str, name: str, value: Tensor | QuantTensor, dims: Mapping[str, int | None], like: Tensor | None
) -> None:
    shape = value.shape
    if len(shape) != len(dims):
        raise ValueError(f"{op}: {name} must be [{', '.join(dims)}], got shape {list(shape)}")
    for (label, size), got in zip(dims.items(), shape, strict=True):
        if size is not None and got != size:
            wanted = ", ".join(label if size is None else f"{label}={size}" for label, size in dims.items())
            raise ValueError(f"{op}: {name} must be [{wanted}], got {label}={got}")
    if like is not None and value.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device} like the rest, got {value.device}")


def check_weight(op: str, name: str, value: Any, dims: Mapping[str, int | None], x: Tensor) -> None:
    """As `check_tensor`, for a weight: in the type of x, or in blocks."""
    if isinstance(value, QuantTensor):
        _check_place(op, name, value, dims, x)
        return
    check_tensor(op, name, value, dims, like=x)
    if value.dtype != x.dtype:
        raise TypeError(
            f"{op}: {name} must have the type of x, {x.dtype}, got {value.dtype}: cast one of the two, for ops do not "
            "autocast"
        )


def check_optional(op: str, name: str, value: Any, dims: Mapping[str, int | None], like: Tensor) -> None:
    """As `check_tensor`, for a floating-point argument that may be None."""
    if value is not None:
        check_tensor(op, name, value, dims, like=like)


def check_float64(op: str, tensors: dict[str, Tensor | None]) -> None:
    """float64 is for checking: every floating tensor of a call has it, or none."""
    dtypes = {t.dtype for t in tensors.values() if t is not None}
    if len(dtypes) > 1 and torch.float64 in dtypes:
        wide, narrow = (
            next(name for name, t in tensors.items() if t is not None and (t.dtype == torch.float64) == is_wide)
            for is_wide in (True, False)
        )
        raise TypeError(f"{op}: float64 must not be mixed with narrower types, got {wide} float64 and {narrow} not")


def check_eps(op: str, name: str, eps: Any) -> None:
    check_number(op, name, eps, 0.0, "finite and not negative")


def check_count(op: str, name: str, value: Any, least: int) -> None:
    check_int(op, name, value)
    if value < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {value}")


def check_instance(op: str, name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{op}: {name} must be a {kind.__name__}, got {type(value).__name__}")
