"""linear: sizes, several weights at once, what is added and when it is rounded, blocks, gradients."""

import pytest
import torch

import moefuse
from moefuse import backends
from moefuse.quant.formats import FORMATS
from moefuse.testing import cases
from moefuse.testing.poison import poisoned
from moefuse.testing.random_blocks import random_blocks

from . import oracle
from .oracle import ROUNDED, assert_close

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(target, x, weight, bias=None, residual=None):
    backend, device = target

    def here(value):
        return tuple(map(here, value)) if isinstance(value, tuple) else None if value is None else value.to(device)

    with poisoned():
        y = moefuse.linear(here(x), here(weight), bias=here(bias), residual=here(residual), backend=backend)
    assert (y[0] if isinstance(weight, tuple) else y).dtype == x.dtype
    return tuple(part.cpu() for part in y) if isinstance(weight, tuple) else y.cpu()


def expected(x, weight, bias=None, residual=None):
    y = x.double() @ (weight.double() if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float64)).T
    for added in (bias, residual):
        y = y if added is None else y + added.double()
    return y


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("T", [0, 1, 2, 5, 16, 17, 64, 300])
@pytest.mark.parametrize(("N", "K"), [(40, 64), (37, 51), (1, 1), (5, 2100), (200, 9)])
def test_sizes(target, rng, dtype, T, N, K):
    x, weight = oracle.normal(rng, T, K).to(dtype), oracle.weight(rng, N, K).to(dtype)
    assert_close(run(target, x, weight), expected(x, weight), ROUNDED[dtype], whole=True)


@pytest.mark.parametrize("T", [1, 3, 70])
def test_nothing_to_sum_and_nothing_to_write(target, rng, T):
    bias = oracle.normal(rng, 3)
    assert torch.equal(run(target, torch.empty(T, 0), torch.empty(3, 0), bias), bias.expand(T, 3))
    assert run(target, torch.ones(T, 4), torch.empty(0, 4)).shape == (T, 0)
    y, z = run(target, torch.ones(T, 4), (torch.empty(0, 4), torch.ones(2, 4)))
    assert y.shape == (T, 0)
    assert torch.equal(z, torch.full((T, 2), 4.0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("T", [1, 6, 40])
def test_four_weights_and_their_biases(target, rng, dtype, T):
    """Biases of another type than x, and one that is not there."""
    x, sizes = oracle.normal(rng, T, 48).to(dtype), (33, 5, 64, 8)
    weights = tuple(oracle.weight(rng, N, 48).to(dtype) for N in sizes)
    biases = oracle.normal(rng, 33), None, oracle.normal(rng, 64).to(dtype), oracle.normal(rng, 8).to(torch.bfloat16)
    found = run(target, x, weights, biases)
    assert [y.shape for y in found] == [(T, N) for N in sizes]
    for y, weight, bias in zip(found, weights, biases, strict=True):
        bound = ROUNDED[dtype] if T <= 16 else oracle.ROUNDED_TWICE[dtype]
        assert_close(y, expected(x, weight, bias), bound, whole=True)
    (alone,) = run(target, x, weights[:1], biases[:1])
    assert_close(alone, expected(x, weights[0], biases[0]), oracle.ROUNDED_TWICE[dtype], whole=True)


@pytest.mark.parametrize("T", [1, 5, 40])
@pytest.mark.parametrize("added", ["bias", "residual"])
def test_what_is_added_is_added_before_rounding(target, T, added):
    """257 is 256 in bfloat16."""
    x, weight = torch.ones(T, 257, dtype=torch.bfloat16), torch.ones(3, 257, dtype=torch.bfloat16)
    less = torch.full((T, 3) if added == "residual" else (3,), -256.0, dtype=torch.bfloat16)
    assert torch.equal(run(target, x, weight, **{added: less}), torch.ones(T, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("T", [1, 9, 40])
def test_bias_and_residual_of_other_types(target, rng, T):
    x, weight = oracle.normal(rng, T, 32).to(torch.bfloat16), oracle.weight(rng, 24, 32).to(torch.bfloat16)
    bias, residual = oracle.normal(rng, 24), oracle.normal(rng, T, 24).to(torch.float16)
    y = run(target, x, weight, bias, residual)
    assert_close(y, expected(x, weight, bias, residual), oracle.ROUNDED_TWICE[torch.bfloat16], whole=True)


@pytest.mark.parametrize("T", [1, 70])
def test_float32_is_accurate_over_long_rows(target, rng, T):
    x, weight = oracle.uniform(rng, T, 4096), oracle.uniform(rng, 6, 4096) / 4096
    assert_close(run(target, x, weight), expected(x, weight), ROUNDED[torch.float32])


@pytest.mark.parametrize("T", [1, 3, 70])
def test_narrow_types_accumulate_in_float32(target, T):
    """1 + 2**-9 over and over: bfloat16 would never move."""
    weight = torch.full((2, 513), 2.0**-9, dtype=torch.bfloat16)
    weight[:, 0] = 1.0
    assert torch.equal(run(target, torch.ones(T, 513, dtype=torch.bfloat16), weight).float(), torch.full((T, 2), 2.0))


def test_a_bad_row_stays_alone(target, rng):
    x, weight = oracle.normal(rng, 5, 16), oracle.weight(rng, 8, 16)
    before = run(target, x, weight)
    x[2, 3] = torch.nan
    after = run(target, x, weight)
    assert torch.equal(before[[0, 1, 3, 4]], after[[0, 1, 3, 4]])
    assert after[2].isnan().all()


@pytest.mark.parametrize("T", [1, 5, 80])
def test_blocks_of_every_format_side_by_side(target, rng, T):
    """Four at a time, each with its own packing of x; numbers among them."""
    backend, _ = target
    names = [name for name in FORMATS if name in cases.formats_of(backend)]
    x = oracle.uniform(rng, T, 512, low=-1.7, high=1.7)
    for i in range(0, len(names), 3):
        some = tuple(
            random_blocks(f"{name}:exact", (17 + j, 512), rng, 512**-0.5) for j, name in enumerate(names[i : i + 3])
        )
        weights = (some[0], oracle.weight(rng, 9, 512), *some[1:])
        for y, weight in zip(run(target, x, weights), weights, strict=True):
            assert_close(y, expected(x, weight), cases._BLOCKS[torch.float32], whole=True)


@pytest.mark.parametrize("T", [1, 7])
def test_on_the_cpu_it_is_the_grouped_product_of_one_expert(rng, T):
    """Bit for bit, rounded activations too."""
    if backends.BACKENDS[0].missing():
        pytest.skip("the CPU's kernels are not built here")
    plan = moefuse.plan(torch.zeros(T, 1, dtype=torch.int32), 1)
    for spec in (None, "Q4_K", "Q6_K:exact"):
        x = oracle.normal(rng, T, 256)
        stack = random_blocks(spec, (1, 50, 256), rng, 256**-0.5) if spec else oracle.weight(rng, 1, 50, 256)
        want = moefuse.grouped_linear(x, stack, plan, gather=True, scatter=True, backend="cpu")
        got, again = moefuse.linear(x, (stack[0], stack[0]), backend="cpu")
        assert torch.equal(got, want), spec
        assert torch.equal(again, want), spec


# Gradients


@pytest.mark.parametrize("count", [1, 3])
def test_gradcheck(rng, count):
    make = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)  # noqa: E731
    x, weights, biases = make(4, 3), [make(n, 3) for n in (2, 3, 1)[:count]], [make(n) for n in (2, 3, 1)[:count]]
    residual = make(4, 2)

    def product(x, residual, *rest):
        if count == 1:
            return moefuse.linear(x, rest[0], bias=rest[1], residual=residual, backend="reference")
        return moefuse.linear(x, tuple(rest[:count]), bias=tuple(rest[count:]), backend="reference")

    assert torch.autograd.gradcheck(product, (x, residual, *weights, *biases))
    assert torch.autograd.gradgradcheck(product, (x, residual, *weights, *biases))


@pytest.mark.parametrize("T", [1, 5, 70])
@pytest.mark.parametrize("dtype", TYPES)
def test_gradients_match_float64(target, rng, T, dtype):
    """Numbers and blocks side by side, a gradient that comes in transposed."""
    backend, device = target
    parts = oracle.normal(rng, T, 64).to(dtype), oracle.weight(rng, 12, 64).to(dtype), oracle.normal(rng, 12)
    blocks = random_blocks("Q8_0:exact", (9, 64), rng, 64**-0.5)
    seeds = [oracle.normal(rng, N, T).T.to(dtype) for N in (12, 9)]
    found = []
    for name, where, wide in (("reference", "cpu", True), (backend, device, False)):
        x, weight, bias = leaves = [(t.double() if wide else t.to(where)).requires_grad_() for t in parts]
        results = moefuse.linear(x, (weight, blocks.to(where)), bias=(bias, None), backend=name)
        grads = torch.autograd.grad(results, leaves, [s.to(y) for s, y in zip(seeds, results, strict=True)])
        assert [g.dtype for g in grads] == [t.dtype for t in leaves]
        found.append(grads)
    bound = oracle.GRADIENT if dtype == torch.float32 else oracle.ROUNDED_TWICE[dtype]
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, bound, whole=True)


def test_only_what_asks_for_a_gradient_gets_one(target, rng):
    backend, device = target
    x, weight = oracle.normal(rng, 2, 4).to(device), oracle.weight(rng, 3, 4).to(device).requires_grad_()
    residual = oracle.normal(rng, 2, 3).to(device, torch.bfloat16).requires_grad_()
    moefuse.linear(x, weight, residual=residual, backend=backend).sum().backward()
    assert x.grad is None
    assert_close(weight.grad.cpu(), x.cpu().double().sum(0).expand(3, 4), oracle.GRADIENT, whole=True)
    assert torch.equal(residual.grad.cpu(), torch.ones(2, 3, dtype=torch.bfloat16))


def test_a_result_may_be_written_to(target, rng):
    """Each of several is a view; autograd follows what is done to it in place."""
    backend, device = target
    x = oracle.normal(rng, 3, 4).to(device).requires_grad_()
    query, key = (oracle.weight(rng, 2, 4).to(device) for _ in range(2))
    q, k = moefuse.linear(x, (query, key), backend=backend)
    q.mul_(2.0)
    (q.sum() + k.sum()).backward()
    assert_close(x.grad.cpu(), (2 * query.cpu().double() + key.cpu().double()).sum(0).expand(3, 4), oracle.GRADIENT)
