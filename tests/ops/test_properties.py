"""What holds for any input: Hypothesis draws the sizes, the rules and the values."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import moefuse
from moefuse import Activation, Routing
from moefuse.types import ACTIVATION_KINDS, GROUP_SCORES, SCORES

from . import oracle
from .oracle import ROUNDED, assert_close

F32 = ROUNDED[torch.float32]
#: the fixture is the same for every example, which is what is wanted
COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
seeds = st.integers(0, 2**31 - 1)


@st.composite
def routings(draw):
    """A number of experts and a rule that fits it."""
    groups = draw(st.sampled_from([1, 1, 2, 3, 5]))
    E = groups * draw(st.integers(1, 70 // groups))
    top_k = draw(st.integers(1, min(E, 12)))
    return E, Routing(
        top_k,
        score=draw(st.sampled_from(SCORES)),
        renormalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5, 0.125])),
        groups=groups,
        top_groups=draw(st.integers(1, groups)),
        group_score=draw(st.sampled_from(GROUP_SCORES)),
        softcap=draw(st.sampled_from([None, None, 3.0])),
        renormalize_after_scale=draw(st.booleans()),
    )


def assert_near(got, want, size, bound=1e-6):
    """Each element within ``bound`` of the sum of its absolute terms, which is what float32 rounds relative to."""
    error = (got.double() - want).abs()
    assert bool((error <= bound * size).all()), f"error {(error / size).nan_to_num(0).max():.3g} of its terms"


def clear(values, biased):
    """No two values of a row so near that float32 could rank them otherwise; equal ones are ties, not near.

    Scores alone are good to a relative error; a bias may cancel them, and leaves an absolute one.
    """
    ranked = np.sort(values, axis=-1)
    steps = np.diff(ranked, axis=-1)
    return bool(((steps > 1e-6 * (1.0 if biased else np.abs(ranked[..., 1:]))) | (steps == 0)).all())


def check_route(target, rule, T, seed, biased, scaled, masked):
    backend, device = target
    E, routing = rule
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randint(-24, 25, (T, E), generator=rng) / 8.0  # ties are common
    if masked:
        logits[torch.rand((T, E), generator=rng) < 0.3] = -torch.inf
        assume(routing.softcap is None)
    bias = torch.randint(-8, 9, (E,), generator=rng) / 8.0 if biased else None
    scale = oracle.uniform(rng, E) if scaled else None
    scores = np.array([oracle.scores_of(row, routing) if max(row) > -np.inf else [0.0] * E for row in logits.tolist()])
    keys = scores if bias is None else scores + bias.numpy()
    if bias is not None:
        assume(clear(keys, biased))
    if routing.groups > 1 and routing.group_score == "top2_sum":
        best = np.sort(keys.reshape(T, routing.groups, -1), axis=-1)[..., -2:].sum(-1)
        assume(clear(best, biased))
    here = [None if t is None else t.to(device) for t in (logits, bias, scale)]
    weights, ids = moefuse.route(here[0], routing, bias=here[1], per_expert_scale=here[2], backend=backend)
    want_weights, want_ids = oracle.route(logits, routing, bias, scale)
    assert ids.tolist() == want_ids.tolist()
    for row in ids.tolist():
        live = [e for e in row if e != E]
        assert len(set(live)) == len(live), "distinct"
        assert row[: len(live)] == live, "slots without an expert come last"
    if (want_weights != 0).any():
        assert_close(weights.cpu(), want_weights, F32)
    shuffle = torch.randperm(T, generator=rng)
    moved = moefuse.route(logits[shuffle].to(device), routing, bias=here[1], per_expert_scale=here[2], backend=backend)
    assert torch.equal(moved[1].cpu(), ids.cpu()[shuffle])
    # A row may take another path through a vector loop elsewhere in the batch: same ids, same weights to rounding.
    torch.testing.assert_close(moved[0].cpu(), weights.cpu()[shuffle], rtol=1e-6, atol=0)


ROUTE = {"rule": routings(), "T": st.integers(1, 6), "seed": seeds, "biased": st.booleans(), "scaled": st.booleans(),
         "masked": st.booleans()}  # fmt: skip


@settings(max_examples=60, **COMMON)
@given(**ROUTE)
def test_route(target, rule, T, seed, biased, scaled, masked):
    check_route(target, rule, T, seed, biased, scaled, masked)


@pytest.mark.slow
@settings(max_examples=3000, **COMMON)
@given(**ROUTE)
def test_route_at_length(target, rule, T, seed, biased, scaled, masked):
    check_route(target, rule, T, seed, biased, scaled, masked)


def check_plan(target, T, top_k, E, seed, wide, strided):
    backend, device = target
    rng = torch.Generator().manual_seed(seed)
    dtype = torch.int64 if wide else torch.int32
    ids = torch.randint(-2, E + 3, (T, top_k), generator=rng).to(dtype)
    if strided:
        ids = ids.T.contiguous().T
    plan = moefuse.plan(ids.to(device), E, backend=backend)
    expert = ids.numpy().reshape(-1)
    expert = np.where((expert >= 0) & (expert < E), expert, E)
    order = np.argsort(expert, kind="stable")
    counts = np.bincount(expert, minlength=E + 1)[:E]
    assert np.array_equal(plan.order.cpu().numpy(), order)
    assert np.array_equal(plan.counts.cpu().numpy(), counts)
    assert np.array_equal(plan.offsets.cpu().numpy(), np.concatenate(([0], np.cumsum(counts))))
    assert np.array_equal(plan.inverse.cpu().numpy()[order], np.arange(T * top_k))


PLAN = {"T": st.integers(0, 80), "top_k": st.integers(1, 9), "E": st.integers(1, 300), "seed": seeds,
        "wide": st.booleans(), "strided": st.booleans()}  # fmt: skip


@settings(max_examples=60, **COMMON)
@given(**PLAN)
def test_plan(target, T, top_k, E, seed, wide, strided):
    check_plan(target, T, top_k, E, seed, wide, strided)


@pytest.mark.slow
@settings(max_examples=3000, **COMMON)
@given(**PLAN)
def test_plan_at_length(target, T, top_k, E, seed, wide, strided):
    check_plan(target, T, top_k, E, seed, wide, strided)


@settings(max_examples=40, **COMMON)
@given(
    T=st.integers(1, 12), top_k=st.integers(1, 4), E=st.integers(1, 9), N=st.integers(2, 40), K=st.integers(1, 40),
    seed=seeds, gather=st.booleans(), scatter=st.booleans(),
)  # fmt: skip
def test_grouped_linear_is_linear_in_x(target, T, top_k, E, N, K, seed, gather, scatter):
    backend, device = target
    rng = torch.Generator().manual_seed(seed)
    plan = moefuse.plan(torch.randint(-1, E + 1, (T, top_k), generator=rng).to(device), E, backend=backend)
    weight = oracle.weight(rng, E, N, K).to(device)
    rows = T if gather else T * top_k
    a, b = oracle.normal(rng, rows, K).to(device), oracle.normal(rng, rows, K).to(device)

    def product(x, w=weight):
        return moefuse.grouped_linear(x, w, plan, gather=gather, scatter=scatter, backend=backend).cpu()

    want = 2 * product(a).double() - 3 * product(b).double()
    live = int(plan.offsets[-1])
    assert (want.abs().sum(-1) > 0).sum() == live, "rows of an expert are not zero, those of none are"
    assert_near(product(2 * a - 3 * b), want, product(2 * a.abs() + 3 * b.abs(), weight.abs()).double())
    assert torch.equal(product(2 * a), 2 * product(a)), "a power of two changes no bit"


def check_experts(target, T, top_k, E, H, I, seed, kind, gated, layout, biased):
    backend, device = target
    rng = torch.Generator().manual_seed(seed)
    activation = Activation(kind, gated=gated)
    rows = activation.width(I)
    made = {
        "x": oracle.normal(rng, T, H),
        "ids": torch.randint(-1, E + 1, (T, top_k), generator=rng),
        "weights": oracle.uniform(rng, T, top_k),
        "gate_up": oracle.weight(rng, E, rows, H),
        "down": oracle.weight(rng, E, H, I),
    }
    if biased:
        made |= {"gate_up_bias": oracle.normal(rng, E, rows), "down_bias": oracle.normal(rng, E, H)}
    want = oracle.experts(**made, activation=activation, layout=layout)
    here = {name: t.to(device) for name, t in made.items()}
    got = moefuse.experts(**here, activation=activation, layout=layout, backend=backend).cpu()
    assert_near(got, want, oracle.experts_size(**made, activation=activation, layout=layout))


EXPERTS = {"T": st.integers(1, 9), "top_k": st.integers(1, 4), "E": st.integers(1, 7), "H": st.integers(1, 24),
           "I": st.integers(1, 24), "seed": seeds, "kind": st.sampled_from(ACTIVATION_KINDS), "gated": st.booleans(),
           "layout": st.sampled_from(["halves", "interleaved"]), "biased": st.booleans()}  # fmt: skip


@settings(max_examples=60, **COMMON)
@given(**EXPERTS)
def test_experts(target, T, top_k, E, H, I, seed, kind, gated, layout, biased):
    check_experts(target, T, top_k, E, H, I, seed, kind, gated, layout, biased)


@pytest.mark.slow
@settings(max_examples=1500, **COMMON)
@given(**EXPERTS)
def test_experts_at_length(target, T, top_k, E, H, I, seed, kind, gated, layout, biased):
    check_experts(target, T, top_k, E, H, I, seed, kind, gated, layout, biased)


@settings(max_examples=60, **COMMON)
@given(
    T=st.integers(1, 9), top_k=st.integers(1, 9), H=st.integers(1, 60), seed=seeds, permuted=st.booleans(),
    shared=st.sampled_from([None, "one", "gate", "logit"]), residual=st.booleans(), norm=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_combine(target, T, top_k, H, seed, permuted, shared, residual, norm, dtype):
    """Against einsum in float64; positive terms, so that no row cancels."""
    backend, device = target
    rng = torch.Generator().manual_seed(seed)
    y, weights = oracle.uniform(rng, T * top_k, H).to(dtype), oracle.uniform(rng, T, top_k)
    inverse = torch.randperm(T * top_k, generator=rng) if permuted else torch.arange(T * top_k)
    want = torch.einsum("tk,tkh->th", weights.double(), y[inverse].double().view(T, top_k, H))
    made = {"inverse": inverse.int() if permuted else None}
    if shared:
        made["shared"], factor = oracle.uniform(rng, T, H).to(dtype), oracle.normal(rng, T).abs()
        if shared != "one":
            made[f"shared_{shared}"] = factor
        g = {"one": torch.ones(T), "gate": factor, "logit": torch.sigmoid(factor.double())}[shared]
        want = want + g.double()[:, None] * made["shared"].double()
    if residual:
        made["residual"] = oracle.uniform(rng, T, H).to(dtype)
        want = want + made["residual"].double()
    if norm:
        made |= {"norm_weight": oracle.uniform(rng, H), "eps": 1e-5}
    here = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in made.items()}
    result = moefuse.combine(y.to(device), weights.to(device), **here, backend=backend)
    out, normed = result if norm else (result, None)
    assert_close(out.cpu(), want, ROUNDED[dtype])
    if normed is not None:
        assert_close(normed.cpu(), oracle.rms_norm(want, made["norm_weight"], 1e-5), ROUNDED[dtype])


@settings(max_examples=60, **COMMON)
@given(
    shape=st.lists(st.integers(1, 7), min_size=0, max_size=3), I=st.integers(1, 40), seed=seeds,
    kind=st.sampled_from(ACTIVATION_KINDS), layout=st.sampled_from(["halves", "interleaved"]),
)  # fmt: skip
def test_glu_of_one_tensor_is_that_of_two(target, shape, I, seed, kind, layout):
    backend, device = target
    rng = torch.Generator().manual_seed(seed)
    joint = oracle.normal(rng, *shape, 2 * I, scale=4.0)
    gate, up = oracle.halves(joint, Activation(kind), layout)
    together = moefuse.glu(joint.to(device), kind, layout=layout, backend=backend).cpu()
    apart = moefuse.glu(gate.to(device), up.to(device), kind, backend=backend).cpu()
    assert together.shape == apart.shape == (*shape, I)
    torch.testing.assert_close(together, apart, rtol=2e-6, atol=1e-6)
    assert_near(
        together,
        oracle.act_rows(Activation(kind), gate, up),
        oracle.sizes(Activation(kind), gate.abs(), up.abs()).double(),
    )
