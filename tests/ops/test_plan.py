"""plan: the buckets, the sentinel, and that order is stable."""

import pytest
import torch

import moefuse
from moefuse.testing.poison import poisoned

from . import oracle


def run(target, ids, E):
    backend, device = target
    with poisoned():
        plan = moefuse.plan(ids.to(device), E, backend=backend)
    for part in (plan.counts, plan.offsets, plan.order, plan.inverse):
        assert part.dtype == torch.int32
        assert part.device.type == torch.device(device).type
    return plan


def expected(ids, E):
    buckets = [[] for _ in range(E + 1)]
    for s, e in enumerate(ids.flatten().tolist()):
        buckets[e if 0 <= e < E else E].append(s)
    counts = [len(bucket) for bucket in buckets[:E]]
    offsets = [sum(counts[:e]) for e in range(E + 1)]
    order = [s for bucket in buckets for s in bucket]
    inverse = [order.index(s) for s in range(len(order))] if len(order) < 2000 else None
    return counts, offsets, order, inverse


def agree(target, ids, E):
    plan = run(target, ids, E)
    counts, offsets, order, inverse = expected(ids, E)
    assert plan.counts.tolist() == counts
    assert plan.offsets.tolist() == offsets
    assert plan.order.tolist() == order
    if inverse is None:
        assert plan.order[plan.inverse.long()].tolist() == list(range(len(order)))
    else:
        assert plan.inverse.tolist() == inverse
    assert plan.num_experts == E
    assert plan.assignments == ids.numel()
    assert plan.top_k == ids.shape[1]
    return plan


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("T", "E", "top_k"), [(1, 1, 1), (1, 128, 8), (5, 8, 8), (40, 60, 4), (64, 100, 10), (30, 1000, 8), (3, 1024, 64)]
)
def test_sizes(target, rng, T, E, top_k, dtype):
    agree(target, oracle.distinct_ids(rng, T, top_k, E, dtype), E)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_token(target, dtype):
    plan = agree(target, torch.empty(0, 4, dtype=dtype), 6)
    assert plan.counts.tolist() == [0] * 6


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sentinels_sort_last(target, dtype):
    limit = torch.iinfo(dtype)
    ids = torch.tensor([[-1, 0, 3], [2, limit.max, limit.min], [3, 2, -7], [4, 0, 5]], dtype=dtype)
    plan = agree(target, ids, 4)
    assert plan.offsets[-1] == 6
    assert plan.order.tolist() == [1, 10, 3, 7, 2, 6, 0, 4, 5, 8, 9, 11]


@pytest.mark.parametrize("shift", [2**32, -(2**32), 2**31, 2**40 + 1])
def test_ids_that_wrap_to_a_valid_one(target, shift):
    """An int64 id that a 32-bit cast would read as an expert is still no expert."""
    ids = torch.tensor([[shift, 1], [0, shift + 1]])
    plan = agree(target, ids, 2)
    assert plan.counts.tolist() == [1, 1]


def test_nothing_but_sentinels(target):
    plan = agree(target, torch.full((5, 2), 9), 9)
    assert plan.offsets.tolist() == [0] * 10
    assert plan.order.tolist() == list(range(10))


def test_duplicates_count_each(target):
    plan = agree(target, torch.tensor([[1, 1, 1], [1, 0, 1]]), 3)
    assert plan.counts.tolist() == [1, 5, 0]


def test_every_assignment_to_one_expert(target):
    agree(target, torch.full((300, 2), 6, dtype=torch.int32), 8)


@pytest.mark.parametrize("E", [1, 3, 60, 257, 1024])
def test_messy(target, rng, E):
    agree(target, torch.randint(-3, E + 4, (120, 5), generator=rng), E)


def test_more_assignments_than_an_int16_holds(target, rng):
    plan = agree(target, torch.randint(-1, 65, (10_000, 7), generator=rng), 64)
    assert plan.assignments == 70_000


@pytest.mark.parametrize("view", ["transposed", "stepped", "expanded"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_views(target, rng, view, dtype):
    ids = {
        "transposed": lambda: torch.randint(-1, 8, (3, 12), generator=rng, dtype=dtype).T,
        "stepped": lambda: torch.randint(-1, 8, (24, 6), generator=rng, dtype=dtype)[::2, ::2],
        "expanded": lambda: torch.randint(-1, 8, (1, 3), generator=rng, dtype=dtype).expand(12, 3),
    }[view]()
    agree(target, ids, 7)


def test_the_worked_example(target):
    """The one in the docstring of Plan."""
    plan = agree(target, torch.tensor([[2, 0], [0, 3], [2, 2]]), 3)
    assert plan.counts.tolist() == [2, 0, 3]
    assert plan.offsets.tolist() == [0, 2, 2, 5]
    assert plan.order.tolist() == [1, 2, 0, 4, 5, 3]
    assert plan.inverse.tolist() == [2, 0, 1, 5, 3, 4]
