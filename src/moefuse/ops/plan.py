"""plan: expert ids to expert-major order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops._core import replay
from moefuse.ops._core.checks import INTEGERS, check_tensor
from moefuse.ops._core.invariance import asked
from moefuse.ops._core.library import define_kernel
from moefuse.ops._core.select import select
from moefuse.types import MAX_EXPERTS, Plan, check_int


def plan(ids: Tensor, num_experts: int, *, backend: str | None = None) -> Plan:
    """Bucket assignments by expert.

    Args:
        ids: expert of each assignment ``[T, top_k]``, int32 or int64. An id outside ``[0, E)`` means "no expert":
            it sorts last, outside every expert. Duplicates in a row are legal, each slot counts.
        num_experts: ``E``.
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        A `Plan`, ``O(S + E)`` in size. Inside an expert assignments keep their order, so the plan is reproducible.

    >>> p = plan(torch.tensor([[2, 0], [0, 3], [2, 2]]), 3)
    >>> p.counts.tolist(), p.offsets.tolist()
    ([2, 0, 3], [0, 2, 2, 5])
    >>> p.order.tolist(), p.inverse.tolist()
    ([1, 2, 0, 4, 5, 3], [2, 0, 1, 5, 3, 4])
    """
    backend = asked(backend)
    call = replay.lookup("plan", backend, (ids, num_experts))
    if call is None or call.record is None:
        check(ids, num_experts)
    if call is not None:
        counts, offsets, order, inverse = replay.run(call, _kernel, backend, ids, num_experts)
    else:
        counts, offsets, order, inverse = _plan(backend, ids, num_experts)
    return Plan(counts, offsets, order, inverse, ids.shape[1], trusted=True)


def check(ids: Any, num_experts: Any) -> None:
    check_tensor("plan", "ids", ids, {"T": None, "top_k": None}, dtypes=INTEGERS)
    check_int("plan", "num_experts", num_experts)
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"plan: num_experts must be from 1 to {MAX_EXPERTS}, got {num_experts}")
    if ids.shape[1] < 1:
        raise ValueError(f"plan: ids must have at least one slot per token, got shape {list(ids.shape)}")


def plan_reference(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    expert = ids.reshape(-1).long()
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    order = torch.argsort(expert, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
    counts = counts[:num_experts].clone()
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = counts.cumsum(0)
    inverse = torch.empty_like(order, dtype=torch.int32)
    inverse[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    return counts, offsets, order.to(torch.int32), inverse


def _kernel(backend: str | None, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if ids.numel() >= 2**31:  # asked here, where a traced program with any number of tokens comes, too
        raise ValueError(f"plan: at most 2**31 - 1 assignments fit, got {ids.numel()}")
    return select(plan_reference, ids, backend)(ids, num_experts)


def _fake(ids: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    S = ids.shape[0] * ids.shape[1]
    return tuple(ids.new_empty(n, dtype=torch.int32) for n in (num_experts, num_experts + 1, S, S))


_plan = define_kernel(plan_reference, _kernel, fake=_fake)
