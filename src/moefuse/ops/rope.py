"""rope: norm and rotate the heads of queries and keys, and write keys and values to their places in a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import inverse_rms, widen
from moefuse.ops._core.checks import INTEGERS, check_eps, check_float64, check_optional, check_tensor
from moefuse.ops._core.library import define, define_kernel
from moefuse.ops._core.memory import check_outputs
from moefuse.ops._core.select import select
from moefuse.types import Cache, Rotary


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    v: Tensor | None = None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    position: Tensor | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys; with a cache, write keys and values to their places.

    ::

        (a, b) -> (a * cos - b * sin, b * cos + a * sin)

    with a the first half of a head's first R values and b the second. The values behind them stay.

    Args:
        q: ``[B, S, Hq, D]``, usually a view of one product's result, as are k and v.
        k: ``[B, S, Hk, D]``, the type of q.
        cos: ``[B, S, R/2]`` or ``[1, S, R/2]``, with R from 2 to D.
        sin: likewise.
        q_norm: ``[D]``; RMSNorm of each head of q before it is rotated.
        k_norm: ``[D]``; likewise of k.
        eps: added to the mean square.
        v: ``[B, S, Hk, Dv]``, which go to the cache as they are.
        keys: a cache ``[B, Hk, L, D]``, written to: token s goes to place ``position + s``. Any strides but the last.
        values: ``[B, Hk, L, Dv]``, likewise.
        position: the place of the first token: one integer on the device, which the host never reads. Tokens whose
            place is not one of the L are dropped.
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        q and k, normed and rotated, or q alone with a cache. All is float32 up to one rounding at the end.

    There are no gradients.

    >>> q, turned = torch.tensor([[[[3.0, 4.0]]]]), torch.zeros(1, 1, 1)
    >>> rope(q, q, turned, turned + 1)
    (tensor([[[[-4.,  3.]]]]), tensor([[[[-4.,  3.]]]]))
    >>> keys, values = torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    >>> rope(q, q, turned, turned + 1, v=q, keys=keys, values=values, position=torch.tensor(1))
    tensor([[[[-4.,  3.]]]])
    >>> keys[0, 0].tolist(), values[0, 0].tolist()
    ([[0.0, 0.0], [-4.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    """
    rotary = Rotary(cos, sin, q_norm, k_norm, eps)
    check(q, k, rotary)
    if v is None and keys is None and values is None and position is None:
        return _rope(backend, q, k, None, rotary, None)
    if v is None or keys is None or values is None or position is None:
        given = {"v": v, "keys": keys, "values": values, "position": position}
        missing = next(name for name, value in given.items() if value is None)
        raise ValueError(f"rope: v, keys, values and position come together, got no {missing}")
    cache = Cache(keys, values, position)
    check_written(q, k, v, cache)
    return _rope_out(backend, q, k, v, rotary, cache)


def check(q: Any, k: Any, rotary: Rotary) -> None:
    check_tensor("rope", "q", q, {"B": None, "S": None, "Hq": None, "D": None})
    B, S, _, D = q.shape
    check_tensor("rope", "k", k, {"B": B, "S": S, "Hk": None, "D": D}, like=q)
    check_type("rope", "k", k, q)
    check_tensor("rope", "cos", rotary.cos, {"B or 1": None, "S": S, "R/2": None}, like=q)
    rows, _, half = rotary.cos.shape
    if rows not in (B, 1):
        raise ValueError(f"rope: cos must be [B or 1, S, R/2] with B={B}, got shape {list(rotary.cos.shape)}")
    if not 1 <= half <= D // 2:
        raise ValueError(f"rope: cos must be [B or 1, S, R/2] with R from 2 to D={D}, got R/2={half}")
    check_tensor("rope", "sin", rotary.sin, {"B or 1": rows, "S": S, "R/2": half}, like=q)
    check_optional("rope", "q_norm", rotary.q_norm, {"D": D}, q)
    check_optional("rope", "k_norm", rotary.k_norm, {"D": D}, q)
    check_eps("rope", "eps", rotary.eps)
    norms = {"q_norm": rotary.q_norm, "k_norm": rotary.k_norm}
    check_float64("rope", {"q": q, "cos": rotary.cos, "sin": rotary.sin, **norms})


def check_written(q: Tensor, k: Tensor, v: Any, cache: Cache) -> None:
    """What is written to a cache, and the cache."""
    B, S, Hk, D = k.shape
    check_tensor("rope", "v", v, {"B": B, "S": S, "Hk": Hk, "Dv": None}, like=q)
    check_type("rope", "v", v, q)
    check_cache("rope", cache, {"B": B, "Hk": Hk, "L": None, "D": D}, q, v.shape[3])
    for name, t in (("keys", cache.keys), ("values", cache.values)):
        if t.shape[3] > 1 and t.stride(3) != 1:
            raise ValueError(f"rope: {name} must be dense in the last dimension, got strides {list(t.stride())}")
        if any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True)):
            raise ValueError(f"rope: {name} must hold each element once, got strides {list(t.stride())}")
        # Keys and values may alternate in one allocation, so they are not held to each other.
        check_outputs("rope", {"q": q, "k": k, "v": v, name: t}, (name,))


def check_cache(op: str, cache: Cache, keys: dict[str, int | None], q: Tensor, Dv: int | None = None) -> None:
    """Keys of these dimensions, values to them and a position, in the type of q and on its device."""
    check_tensor(op, "keys", cache.keys, keys, like=q)
    B, Hk, L, _ = cache.keys.shape
    check_tensor(op, "values", cache.values, {"B": B, "Hk": Hk, "L": L, "Dv": Dv}, like=q)
    check_type(op, "keys", cache.keys, q)
    check_type(op, "values", cache.values, q)
    any_shape = {str(d): None for d in range(getattr(cache.position, "ndim", 0))}
    check_tensor(op, "position", cache.position, any_shape, dtypes=INTEGERS, like=q)
    if cache.position.numel() != 1:
        raise ValueError(f"{op}: position must have one element, got shape {list(cache.position.shape)}")


def check_type(op: str, name: str, value: Tensor, q: Tensor) -> None:
    if value.dtype != q.dtype:
        raise TypeError(f"{op}: {name} must have the type of q, {q.dtype}, got {value.dtype}")


def rope_reference(
    q: Tensor, k: Tensor, v: Tensor | None, rotary: Rotary, cache: Cache | None
) -> tuple[Tensor, Tensor]:
    """k is empty where it went to the cache."""
    turned = _turned(k, rotary.k_norm, rotary)
    if cache is not None:
        assert v is not None
        _write(cache.keys, turned, cache.position)
        _write(cache.values, v, cache.position)
        turned = k.new_empty(0)
    return _turned(q, rotary.q_norm, rotary), turned


def _turned(x: Tensor, norm: Tensor | None, rotary: Rotary) -> Tensor:
    """Normed and rotated, dense."""
    wide = widen(x)
    if norm is not None:
        wide = wide * inverse_rms(wide, rotary.eps) * widen(norm)
    cos, sin = widen(rotary.cos)[:, :, None], widen(rotary.sin)[:, :, None]
    half = cos.shape[-1]
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).to(x.dtype)


def _write(places: Tensor, rows: Tensor, position: Tensor) -> None:
    """Rows ``[B, S, Hk, D]`` to their places. One that has none goes around to another and leaves it as it was."""
    L = places.shape[2]
    rows = rows.transpose(1, 2)[:, :, :L]
    if rows.numel() == 0:
        return
    at = position.reshape(()).long() + torch.arange(rows.shape[2], device=rows.device)
    inside, at = (at >= 0) & (at < L), at.remainder(L)
    places.index_copy_(2, at, torch.where(inside[:, None], rows, places.index_select(2, at)))


def _writing(backend: str | None, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary, cache: Cache) -> Tensor:
    """q alone: torch.compile cannot leave out an unused result of an op that writes."""
    return select(rope_reference, q, backend)(q, k, v, rotary, cache)[0]


_rope = define(rope_reference, "q", fake=lambda q, k, _v, _rotary, _cache: (q.new_empty(q.shape), k.new_empty(k.shape)))
_rope_out = define_kernel(
    rope_reference,
    _writing,
    fake=lambda q, _k, _v, _rotary, _cache: q.new_empty(q.shape),
    form="_out",
    mutated=("keys", "values"),
)
