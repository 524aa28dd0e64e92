"""attend: attention of one query per sequence over a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops._core.arithmetic import widen
from moefuse.ops._core.checks import check_count, check_float64, check_optional, check_tensor
from moefuse.ops._core.library import define
from moefuse.ops.rope import check_cache
from moefuse.types import Cache, check_number


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attend with one query per sequence to the places of a cache.

    Args:
        q: ``[B, Hq, D]``, one query per head, normed and rotated as the keys are.
        keys: ``[B, Hk, L, D]``, the type of q; Hq is a multiple of Hk, and each head of keys serves Hq/Hk queries.
        values: ``[B, Hk, L, Dv]``, likewise.
        position: the query's own place: one integer on the device, which the host never reads. It sees the places up to
            its own, whose key is there already; what lies behind may hold anything.
        mask: ``[B, L]`` bool: only places where it is True are seen.
        scale: factor of the logits; ``D ** -0.5`` by default.
        window: only this many places are seen, the query's own the last.
        sinks: ``[Hq]``: a logit more for each head that takes part in the softmax and has no value (gpt-oss).
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        ``[B, Hq, Dv]`` in the type of q; softmax and sums are float32. A query that sees nothing gives 0.

    There are no gradients.

    >>> keys = torch.tensor([[[[0.0], [0.0], [9.0]]]])
    >>> values = torch.tensor([[[[2.0], [4.0], [7.0]]]])
    >>> attend(torch.ones(1, 1, 1), keys, values, torch.tensor(1))
    tensor([[[3.]]])
    """
    cache = Cache(keys, values, position)
    check(q, cache, mask, scale, window, sinks)
    return _attend(backend, q, cache, mask, sinks, q.shape[2] ** -0.5 if scale is None else float(scale), window)


def check(q: Any, cache: Cache, mask: Any, scale: Any, window: Any, sinks: Any) -> None:
    check_tensor("attend", "q", q, {"B": None, "Hq": None, "D": None})
    B, Hq, D = q.shape
    if D < 1:
        raise ValueError(f"attend: q must have D of at least 1, got shape {list(q.shape)}")
    check_cache("attend", cache, {"B": B, "Hk": None, "L": None, "D": D}, q)
    Hk, L = cache.keys.shape[1:3]
    if Hk < 1 or Hq % Hk:
        raise ValueError(f"attend: q must have a multiple of the heads of keys, got Hq={Hq} and Hk={Hk}")
    if mask is not None:
        check_tensor("attend", "mask", mask, {"B": B, "L": L}, dtypes=(torch.bool,), like=q)
    if scale is not None:
        check_number("attend", "scale", scale)
    if window is not None:
        check_count("attend", "window", window, 1)
    check_optional("attend", "sinks", sinks, {"Hq": Hq}, q)
    check_float64("attend", {"q": q, "sinks": sinks})


def attend_reference(
    q: Tensor, cache: Cache, mask: Tensor | None, sinks: Tensor | None, scale: float, window: int | None
) -> Tensor:
    (B, Hq, D), (_, Hk, L, Dv) = q.shape, cache.values.shape
    G = Hq // Hk
    behind = cache.position.reshape(()).long() - torch.arange(L, device=q.device)  # how far behind the query
    seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    seen = (seen if mask is None else seen & mask).expand(B, L)[:, None, :, None]
    queries = widen(q).view(B, Hk, G, D)
    keys, values = (widen(t).masked_fill(~seen, 0) for t in (cache.keys, cache.values))
    logits = (queries @ keys.transpose(2, 3) * scale).masked_fill(~seen.transpose(2, 3), -torch.inf)
    # One more place, that of the sink: it is never seen, and has no value.
    sink = logits.new_full((Hq,), -torch.inf) if sinks is None else widen(sinks)
    logits = torch.cat((logits, sink.view(Hk, G, 1).expand(B, Hk, G, 1)), -1)
    weights = (logits - logits.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)).exp()
    total = weights.sum(-1, keepdim=True)
    out = weights[..., :L] @ values / total.masked_fill(total == 0, 1)
    return out.reshape(B, Hq, Dv).to(q.dtype)


_attend = define(attend_reference, "q", fake=lambda q, cache, *_: q.new_empty((*q.shape[:2], cache.values.shape[3])))
