"""gate: RMSNorm, router product and route; what it never rounds; its gradients."""

import math

import pytest
import torch

import moefuse
from moefuse import Routing
from moefuse.testing.poison import poisoned

from . import oracle
from .oracle import FROM_PRODUCT, ROUNDED, assert_close

F32 = ROUNDED[torch.float32]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(target, x, weight, routing, **options):
    backend, device = target
    here = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    with poisoned():
        results = moefuse.gate(x.to(device), weight.to(device), routing, backend=backend, **here)
    assert results[0].dtype == torch.float32
    assert results[1].dtype == torch.int32
    assert results[0].shape == results[1].shape == (x.shape[0], routing.top_k)
    return tuple(t.cpu() for t in results)


def logits_of(x, weight, norm_weight=None, eps=1e-6, logit_bias=None):
    normed = x.double() if norm_weight is None else oracle.rms_norm(x, norm_weight, eps)
    logits = normed @ weight.double().T
    return logits if logit_bias is None else logits + logit_bias.double()


def drawn(rng, T, H, E, dtype=torch.float32, norm_weight=None, logit_bias=None, gap=1e-5):
    """x and a router whose logits are far enough apart for float32 to rank them as float64 does."""
    weight = oracle.weight(rng, E, H).to(dtype)
    make = lambda: oracle.normal(rng, T, H).to(dtype)  # noqa: E731
    x = oracle.until(make, lambda x: oracle.spread(logits_of(x, weight, norm_weight, 1e-6, logit_bias), gap))
    return x, weight


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("T", "H", "E", "top_k"), [(1, 1, 1, 1), (1, 67, 60, 4), (5, 64, 8, 8), (4, 96, 100, 10), (2, 128, 256, 12)]
)
def test_sizes(target, rng, dtype, T, H, E, top_k):
    norm_weight = oracle.uniform(rng, H).to(dtype)
    x, weight = drawn(rng, T, H, E, dtype, norm_weight)
    weights, ids, normed = run(target, x, weight, Routing(top_k), norm_weight=norm_weight, return_normed=True)
    want_weights, want_ids = oracle.route(logits_of(x, weight, norm_weight), Routing(top_k))
    assert ids.tolist() == want_ids.tolist()
    assert_close(weights, want_weights, FROM_PRODUCT)
    assert normed.dtype == dtype
    assert_close(normed, oracle.rms_norm(x, norm_weight, 1e-6), ROUNDED[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_every_option_at_once(target, rng, dtype, score):
    norm_weight, logit_bias = oracle.uniform(rng, 40).to(dtype), oracle.normal(rng, 24)
    scale = oracle.uniform(rng, 24)
    bias = torch.zeros(24)
    bias[[5, 17]] = torch.tensor([40.0, 20.0])
    # Biased keys are scores, and the scores of large logits lie closer than the logits do.
    x, weight = drawn(rng, 4, 40, 24, dtype, norm_weight, logit_bias, gap=3e-4)
    routing = Routing(4, score=score, scale=2.5, softcap=6.0, renormalize_after_scale=score == "softmax")
    weights, ids = run(
        target, x, weight, routing, norm_weight=norm_weight, bias=bias, logit_bias=logit_bias, per_expert_scale=scale
    )
    logits = logits_of(x, weight, norm_weight, 1e-6, logit_bias)
    want_weights, want_ids = oracle.route(logits, routing, bias, scale)
    assert ids.tolist() == want_ids.tolist()
    assert ids[:, :2].tolist() == [[5, 17]] * 4
    assert_close(weights, want_weights, FROM_PRODUCT)


def test_bfloat16_logits_are_never_rounded(target):
    """Router rows that differ only below the eighth bit of a logit: rounding it would tie them, lowest id first."""
    H, E = 64, 8
    x = torch.ones(3, H, dtype=torch.bfloat16)
    weight = torch.zeros(E, H, dtype=torch.bfloat16)
    weight[:, 0] = 16.0
    weight[:, 1] = torch.arange(E).to(torch.bfloat16) * 2.0**-8  # logits 16, 16 + 2**-8, ...: one bf16 value
    assert len(set((x.float() @ weight.float().T).bfloat16()[0].tolist())) == 1
    weights, ids = run(target, x, weight, Routing(E))
    assert ids.tolist() == [list(reversed(range(E)))] * 3
    assert_close(weights, oracle.route(logits_of(x, weight), Routing(E))[0], F32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("H", [96, 2048])
def test_narrow_inputs_pick_what_float64_picks(target, rng, dtype, H):
    """Wherever the gap is above float32 rounding, and it is far below bfloat16's."""
    norm_weight = oracle.uniform(rng, H).to(dtype)
    weight = oracle.weight(rng, 128, H).to(dtype)
    x = oracle.normal(rng, 64, H).to(dtype)
    logits = logits_of(x, weight, norm_weight)
    _, ids = run(target, x, weight, Routing(8), norm_weight=norm_weight)
    best = logits.sort(-1, descending=True)
    clear = (best.values[:, :9].diff(dim=-1).abs() > 1e-5).all(-1)
    assert clear.sum() > 48
    assert torch.equal(ids[clear].long(), best.indices[clear, :8])


def test_mixed_types(target, rng):
    """A bf16 hidden state, a float32 router, an f16 norm."""
    norm_weight = oracle.uniform(rng, 48).half()
    weight = oracle.weight(rng, 16, 48)
    make = lambda: oracle.normal(rng, 5, 48).bfloat16()  # noqa: E731
    x = oracle.until(make, lambda x: oracle.spread(logits_of(x, weight, norm_weight)))
    weights, ids = run(target, x, weight, Routing(4), norm_weight=norm_weight)
    want_weights, want_ids = oracle.route(logits_of(x, weight, norm_weight), Routing(4))
    assert ids.tolist() == want_ids.tolist()
    assert_close(weights, want_weights, FROM_PRODUCT)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5])
def test_eps(target, rng, eps):
    x, norm_weight = oracle.normal(rng, 4, 32, scale=0.1), oracle.uniform(rng, 32)
    weight = oracle.until(lambda: oracle.weight(rng, 8, 32), lambda w: oracle.spread(logits_of(x, w, norm_weight, eps)))
    weights, ids, normed = run(target, x, weight, Routing(3), norm_weight=norm_weight, eps=eps, return_normed=True)
    want_weights, want_ids = oracle.route(logits_of(x, weight, norm_weight, eps), Routing(3))
    assert ids.tolist() == want_ids.tolist()
    assert_close(weights, want_weights, FROM_PRODUCT)
    assert_close(normed, oracle.rms_norm(x, norm_weight, eps), F32)


def test_without_a_norm_the_normed_x_is_x(target, rng):
    x, weight = drawn(rng, 4, 16, 8)
    results = run(target, x, weight, Routing(2), return_normed=True)
    assert torch.equal(results[2], x)
    plain = run(target, x, weight, Routing(2))
    assert len(plain) == 2
    assert torch.equal(plain[1], results[1])


def test_ties_go_to_the_lowest_id(target):
    x, weight = torch.ones(2, 4), torch.ones(6, 4)
    weight[[2, 5]] = 2.0
    assert run(target, x, weight, Routing(5))[1].tolist() == [[2, 5, 0, 1, 3]] * 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_bad_rows_fail_closed_alone(target, rng, value):
    """A NaN or infinite hidden value makes NaN logits; the row fails closed and no other row changes."""
    norm_weight = oracle.uniform(rng, 16)
    x, weight = drawn(rng, 5, 16, 8, norm_weight=norm_weight)
    before = run(target, x, weight, Routing(3), norm_weight=norm_weight, return_normed=True)
    broken = x.clone()
    broken[2, 7] = value
    after = run(target, broken, weight, Routing(3), norm_weight=norm_weight, return_normed=True)
    assert (after[1][2] == 8).all()
    assert (after[0][2] == 0).all()
    rest = [0, 1, 3, 4]
    for then, now in zip(before, after, strict=True):
        assert torch.equal(then[rest], now[rest])


def test_masking_logit_bias(target, rng):
    logit_bias = torch.tensor([0, -math.inf, 0, 0, -math.inf, 0.0])
    x, weight = drawn(rng, 4, 16, 6)
    _, ids = run(target, x, weight, Routing(5), logit_bias=logit_bias)
    assert not ((ids == 1) | (ids == 4)).any()
    assert (ids[:, 4] == 6).all()
    assert (ids[:, :4] < 6).all()


def test_no_token(target):
    results = run(
        target, torch.empty(0, 8), torch.ones(4, 8), Routing(2), norm_weight=torch.ones(8), return_normed=True
    )
    assert [t.numel() for t in results] == [0, 0, 0]


@pytest.mark.parametrize("view", ["transposed", "stepped", "expanded"])
def test_views(target, rng, view):
    T, H, E = 5, 24, 12
    shapes = {
        "transposed": (lambda: oracle.normal(rng, H, T).T, oracle.weight(rng, H, E).T),
        "stepped": (lambda: oracle.normal(rng, 2 * T, 2 * H)[::2, ::2], oracle.weight(rng, E, 2 * H)[:, ::2]),
        "expanded": (lambda: oracle.normal(rng, 1, H).expand(T, H), oracle.weight(rng, E, H)),
    }
    make, weight = shapes[view]
    norm_weight = oracle.uniform(rng, 2 * H)[::2]
    x = oracle.until(make, lambda x: oracle.spread(logits_of(x, weight, norm_weight)))
    assert not x.is_contiguous()
    weights, ids, normed = run(target, x, weight, Routing(3), norm_weight=norm_weight, return_normed=True)
    want_weights, want_ids = oracle.route(logits_of(x, weight, norm_weight), Routing(3))
    assert ids.tolist() == want_ids.tolist()
    assert_close(weights, want_weights, FROM_PRODUCT)
    assert_close(normed, oracle.rms_norm(x, norm_weight, 1e-6), F32)


# Gradients


def gradcheck_leaves(rng, norm, logit_bias, scale):
    make = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)  # noqa: E731
    parts = {
        "norm_weight": make(4).abs() + 0.5 if norm else None,
        "logit_bias": make(5) if logit_bias else None,
        "per_expert_scale": make(5).abs() + 0.5 if scale else None,
    }
    weight = make(5, 4)
    x = oracle.until(
        lambda: make(3, 4),
        lambda x: oracle.spread(logits_of(x, weight, parts["norm_weight"], 1e-3, parts["logit_bias"]), 1e-2),
    )
    return {"x": x, "weight": weight} | {name: t for name, t in parts.items() if t is not None}


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("logit_bias", [False, True])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("return_normed", [False, True])
def test_gradcheck(rng, score, norm, logit_bias, scale, return_normed):
    leaves = gradcheck_leaves(rng, norm, logit_bias, scale)
    names = list(leaves)
    routing = Routing(2, score=score)

    def results(*tensors):
        given = dict(zip(names, tensors, strict=True))
        weights, _, *normed = moefuse.gate(
            **given, routing=routing, eps=1e-3, return_normed=return_normed, backend="reference"
        )
        return weights, *(t.clone() for t in normed)

    assert torch.autograd.gradcheck(results, [t.requires_grad_() for t in leaves.values()], fast_mode=False)


def test_gradients_match_float64(target, rng):
    backend, device = target
    norm_weight, scale = oracle.uniform(rng, 48), oracle.uniform(rng, 16)
    logit_bias = oracle.normal(rng, 16)
    x, weight = drawn(rng, 6, 48, 16, norm_weight=norm_weight, logit_bias=logit_bias)
    seeds = oracle.normal(rng, 6, 4), oracle.normal(rng, 6, 48)
    names = ("x", "weight", "norm_weight", "logit_bias", "per_expert_scale")
    found = []
    for dtype, name, where in ((torch.float64, "reference", "cpu"), (torch.float32, backend, device)):
        parts = (x, weight, norm_weight, logit_bias, scale)
        given = {k: t.to(where, dtype).requires_grad_() for k, t in zip(names, parts, strict=True)}
        weights, _, normed = moefuse.gate(**given, routing=Routing(4), return_normed=True, backend=name)
        outputs = (weights, normed)
        grads = torch.autograd.grad(
            outputs, list(given.values()), [s.to(o) for s, o in zip(seeds, outputs, strict=True)]
        )
        found.append(grads)
    for got, want in zip(*reversed(found), strict=True):
        assert_close(got, want, oracle.GRADIENT, whole=True)
