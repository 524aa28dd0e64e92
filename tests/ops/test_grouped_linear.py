"""grouped_linear and grouped_outer: rows found and put where they belong, sentinels, strides, gradients."""

import itertools

import pytest
import torch

import moefuse
from moefuse.testing.compare import Tolerance
from moefuse.testing.poison import poisoned

from . import oracle
from .oracle import ROUNDED, assert_close

TYPES = [torch.float32, torch.bfloat16, torch.float16]
#: how rows of x are found: one per token, one per slot, or expert-major
SOURCES = ["tokens", "slots", "expert_major"]


def on(device, plan):
    parts = (t.to(device) for t in (plan.counts, plan.offsets, plan.order, plan.inverse))
    return moefuse.Plan(*parts, plan.top_k)


def messy_ids(rng, T, top_k, E):
    return torch.randint(-2, E + 3, (T, top_k), generator=rng)


def rows_of(source, T, top_k):
    return T if source == "tokens" else T * top_k


def row_index(source, plan, s):
    """The row of x that assignment s reads."""
    return {"tokens": s // plan.top_k, "slots": s, "expert_major": int(plan.inverse[s])}[source]


def expected(x, weight, ids, plan, source, scatter, bias=None):
    """Row by row in float64; sentinel rows are zero."""
    E, N = weight.shape[:2]
    out = torch.zeros(plan.assignments, N, dtype=torch.float64)
    for s, e in enumerate(ids.flatten().tolist()):
        if not 0 <= e < E:
            continue
        y = weight[e].double() @ x[row_index(source, plan, s)].double()
        if bias is not None:
            y = y + bias[e].double()
        out[s if scatter else int(plan.inverse[s])] = y
    return out


def run(target, x, weight, plan, source, scatter, bias=None):
    backend, device = target
    here = [None if t is None else t.to(device) for t in (x, weight, bias)]
    with poisoned():
        y = moefuse.grouped_linear(
            here[0], here[1], on(device, plan), gather=source != "expert_major", scatter=scatter, bias=here[2],
            backend=backend,
        )  # fmt: skip
    assert y.dtype == x.dtype
    assert y.shape == (plan.assignments, weight.shape[1])
    return y.cpu()


def make_plan(ids, E):
    return moefuse.plan(ids, E, backend="reference")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_gather_and_scatter(target, rng, dtype, source, scatter, biased):
    T, E, N, K, top_k = 11, 5, 19, 37, 3
    ids = messy_ids(rng, T, top_k, E)
    plan = make_plan(ids, E)
    x = oracle.normal(rng, rows_of(source, T, top_k), K).to(dtype)
    weight = oracle.weight(rng, E, N, K).to(dtype)
    bias = oracle.normal(rng, E, N).to(dtype) if biased else None
    y = run(target, x, weight, plan, source, scatter, bias)
    assert_close(y, expected(x, weight, ids, plan, source, scatter, bias), ROUNDED[dtype])
    sentinel = ((ids < 0) | (ids >= E)).flatten()
    dead = y[sentinel] if scatter else y[int(plan.offsets[-1]) :]
    assert (dead == 0).all()


@pytest.mark.parametrize(
    ("T", "E", "N", "K", "top_k"),
    [(1, 1, 1, 1, 1), (1, 16, 40, 64, 8), (3, 1000, 5, 7, 20), (70, 2, 33, 65, 2), (8, 60, 16, 16, 4),
     (2, 4, 3, 1500, 2), (200, 3, 17, 31, 1)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", TYPES)
def test_sizes(target, rng, T, E, N, K, top_k, dtype):
    ids = oracle.distinct_ids(rng, T, top_k, E)
    plan = make_plan(ids, E)
    x, weight = oracle.normal(rng, T, K).to(dtype), oracle.weight(rng, E, N, K).to(dtype)
    y = run(target, x, weight, plan, "tokens", True)
    want = expected(x, weight, ids, plan, "tokens", True)
    # N=1 rows are one sum each, which may cancel: taken whole.
    assert_close(y, want, ROUNDED[dtype], whole=True)


def test_no_token(target):
    plan = make_plan(torch.empty(0, 2, dtype=torch.int32), 3)
    for source, scatter in itertools.product(SOURCES, (False, True)):
        assert run(target, torch.empty(0, 5), torch.ones(3, 4, 5), plan, source, scatter).shape == (0, 4)


def test_float32_is_accurate_over_long_rows(target, rng):
    """K=4096 of equal sign: a careless running sum would drift; relative to the row it may not."""
    x, weight = oracle.uniform(rng, 4, 4096), oracle.uniform(rng, 2, 6, 4096) / 4096
    ids = torch.tensor([[0], [1], [1], [0]])
    plan = make_plan(ids, 2)
    y = run(target, x, weight, plan, "tokens", True)
    assert_close(y, expected(x, weight, ids, plan, "tokens", True), ROUNDED[torch.float32])


def test_narrow_types_accumulate_in_float32(target):
    """1 + 2**-9 over and over: bfloat16 would never move."""
    x = torch.ones(1, 513, dtype=torch.bfloat16)
    weight = torch.full((1, 2, 513), 2.0**-9, dtype=torch.bfloat16)
    weight[:, :, 0] = 1.0
    y = run(target, x, weight, make_plan(torch.tensor([[0]]), 1), "tokens", True)
    assert y.tolist() == [[2.0, 2.0]]


def test_a_bad_row_stays_alone(target, rng):
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]])
    plan = make_plan(ids, 3)
    x, weight = oracle.normal(rng, 4, 16), oracle.weight(rng, 3, 8, 16)
    before = run(target, x, weight, plan, "tokens", True)
    broken = x.clone()
    broken[1, 3] = torch.nan
    broken[2, 0] = torch.inf
    after = run(target, broken, weight, plan, "tokens", True)
    assert torch.equal(before[[0, 1, 6, 7]], after[[0, 1, 6, 7]])
    assert not after[2:6].isfinite().any()


def test_a_sentinel_row_is_never_read(target, rng):
    ids = torch.tensor([[0, 1], [-1, 2], [7, 0]])
    plan = make_plan(ids, 2)
    x, weight = oracle.normal(rng, 6, 16), oracle.weight(rng, 2, 8, 16)
    x[[2, 3, 4]] = torch.nan
    y = run(target, x, weight, plan, "slots", True)
    assert (y[[2, 3, 4]] == 0).all()
    assert_close(y, expected(x, weight, ids, plan, "slots", True), ROUNDED[torch.float32])


def test_an_expert_without_rows_is_never_read(target, rng):
    ids = torch.tensor([[0], [2], [0]])
    plan = make_plan(ids, 3)
    x, weight = oracle.normal(rng, 3, 16), oracle.weight(rng, 3, 8, 16)
    weight[1] = torch.nan
    y = run(target, x, weight, plan, "tokens", False)
    assert_close(y, expected(x, weight, ids, plan, "tokens", False), ROUNDED[torch.float32])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("view", ["transposed", "stepped", "expanded", "experts_step"])
def test_views(target, rng, dtype, view):
    T, E, N, K, top_k = 6, 4, 10, 12, 2
    ids = oracle.distinct_ids(rng, T, top_k, E)
    plan = make_plan(ids, E)
    x, weight = {
        "transposed": lambda: (oracle.normal(rng, K, T).T, oracle.weight(rng, E, K, N).transpose(1, 2)),
        "stepped": lambda: (
            oracle.normal(rng, 2 * T, 2 * K)[::2, ::2],
            oracle.weight(rng, E, 2 * N, 2 * K)[:, ::2, ::2],
        ),
        "expanded": lambda: (oracle.normal(rng, 1, K).expand(T, K), oracle.weight(rng, 1, N, K).expand(E, N, K)),
        "experts_step": lambda: (oracle.normal(rng, T + 1, K + 1)[1:, 1:], oracle.weight(rng, 2 * E, N, K)[::2]),
    }[view]()
    # Convert the whole storage, then view: .to() alone would make an expanded tensor dense.
    x = x.to(dtype) if view != "expanded" else x[:1].to(dtype).expand(T, K)
    weight = weight.to(dtype) if view != "expanded" else weight[:1].to(dtype).expand(E, N, K)
    bias = oracle.normal(rng, N, E).to(dtype).T
    y = run(target, x, weight, plan, "tokens", False, bias)
    assert_close(y, expected(x, weight, ids, plan, "tokens", False, bias), ROUNDED[dtype])


def test_the_same_bits_again(target, rng):
    plan = make_plan(messy_ids(rng, 30, 3, 5), 5)
    x, weight = oracle.normal(rng, 30, 48), oracle.weight(rng, 5, 33, 48)
    first, second = (run(target, x, weight, plan, "tokens", True) for _ in range(2))
    assert torch.equal(first, second)


# grouped_outer


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("scatter", [False, True])
def test_outer(target, rng, dtype, source, scatter):
    """Per expert the sum of outer products; experts without rows get zero, sentinel rows are never read."""
    backend, device = target
    T, E, N, K, top_k = 9, 6, 11, 14, 3
    ids = messy_ids(rng, T, top_k, E)
    ids[ids == 4] = -1
    plan = make_plan(ids, E)
    grad = oracle.normal(rng, T * top_k, N).to(dtype)
    x = oracle.normal(rng, rows_of(source, T, top_k), K).to(dtype)
    want = torch.zeros(E, N, K, dtype=torch.float64)
    for s, e in enumerate(ids.flatten().tolist()):
        g = s if scatter else int(plan.inverse[s])
        if 0 <= e < E:
            want[e] += torch.outer(grad[g].double(), x[row_index(source, plan, s)].double())
        else:
            grad[g] = torch.nan
    with poisoned():
        got = moefuse.grouped_outer(
            grad.to(device), x.to(device), on(device, plan), gather=source != "expert_major", scatter=scatter,
            backend=backend,
        )  # fmt: skip
    assert got.dtype == dtype
    assert (got[4] == 0).all()
    assert_close(got.cpu(), want, ROUNDED[dtype], whole=True)


def test_outer_accumulates_in_float32(target):
    backend, device = target
    plan = make_plan(torch.zeros(513, 1, dtype=torch.int32), 1)
    grad = torch.full((513, 1), 2.0**-9, dtype=torch.bfloat16)
    grad[0] = 1.0
    x = torch.ones(513, 2, dtype=torch.bfloat16)
    got = moefuse.grouped_outer(
        grad.to(device), x.to(device), on(device, plan), gather=True, scatter=True, backend=backend
    )
    assert got.tolist() == [[[2.0, 2.0]]]


# Gradients


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_gradcheck(rng, source, scatter, biased):
    plan = make_plan(torch.tensor([[2, 0], [0, 3], [2, 2], [-1, 0]]), 4)  # sentinel, duplicates; expert 1 empty
    make = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)  # noqa: E731
    leaves = [make(rows_of(source, 4, 2), 3), make(4, 2, 3), *([make(4, 2)] if biased else [])]

    def product(x, weight, bias=None):
        return moefuse.grouped_linear(
            x, weight, plan, gather=source != "expert_major", scatter=scatter, bias=bias, backend="reference"
        )

    assert torch.autograd.gradcheck(product, leaves, fast_mode=False)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("scatter", [False, True])
def test_gradients_match_float64(target, rng, source, scatter):
    """With a gradient that comes in transposed, as a following product may hand it."""
    backend, device = target
    T, E, N, K, top_k = 8, 5, 12, 20, 3
    plan = make_plan(messy_ids(rng, T, top_k, E), E)
    parts = oracle.normal(rng, rows_of(source, T, top_k), K), oracle.weight(rng, E, N, K), oracle.normal(rng, E, N)
    seed = oracle.normal(rng, N, T * top_k).T
    found = []
    for dtype, name, where in ((torch.float64, "reference", "cpu"), (torch.float32, backend, device)):
        leaves = [t.to(where, dtype).requires_grad_() for t in parts]
        y = moefuse.grouped_linear(
            leaves[0], leaves[1], on(where, plan), gather=source != "expert_major", scatter=scatter, bias=leaves[2],
            backend=name,
        )  # fmt: skip
        found.append(torch.autograd.grad(y, leaves, seed.to(where, dtype)))
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, oracle.GRADIENT, whole=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_round_once(target, rng, dtype):
    """The sum over a token's slots, too, is float32 inside; only the rows before it may have been rounded."""
    backend, device = target
    T, E, top_k = 6, 4, 3
    plan = make_plan(oracle.distinct_ids(rng, T, top_k, E), E)
    x, weight = oracle.normal(rng, T, 16).to(dtype), oracle.weight(rng, E, 8, 16).to(dtype)
    seed = oracle.normal(rng, T * top_k, 8).to(dtype)
    found = []
    for name, where, wide in (("reference", "cpu", True), (backend, device, False)):
        leaves = [(t.double() if wide else t.to(where)).requires_grad_() for t in (x, weight)]
        y = moefuse.grouped_linear(leaves[0], leaves[1], on(where, plan), gather=True, scatter=False, backend=name)
        found.append(torch.autograd.grad(y, leaves, seed.to(y)))
    bound = ROUNDED[dtype].worst
    assert_close(found[1][0], found[0][0], Tolerance(2 * bound, 2 * bound, "rows, then their sum"), whole=True)
    assert_close(found[1][1], found[0][1], ROUNDED[dtype], whole=True)


def test_only_what_asks_for_a_gradient_gets_one(target, rng):
    backend, device = target
    plan = on(device, make_plan(torch.tensor([[0], [1]]), 2))
    x, weight = oracle.normal(rng, 2, 4).to(device), oracle.weight(rng, 2, 3, 4).to(device).requires_grad_()
    y = moefuse.grouped_linear(x, weight, plan, gather=True, scatter=True, backend=backend)
    y.sum().backward()
    assert x.grad is None
    assert_close(weight.grad.cpu(), x.cpu().double()[:, None, :].expand(2, 3, 4), oracle.GRADIENT)
