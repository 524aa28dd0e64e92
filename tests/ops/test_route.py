"""route: ties, masks, rows that fail closed, every option of the rule, and its gradients."""

import itertools
import math

import pytest
import torch

import moefuse
from moefuse import Routing
from moefuse.testing.poison import poisoned

from . import oracle
from .oracle import ROUNDED, assert_close

F32 = ROUNDED[torch.float32]
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
INF, NAN = math.inf, math.nan


def run(target, logits, routing, bias=None, per_expert_scale=None):
    """Poisoned, on the target, back on the CPU; shapes and types checked."""
    backend, device = target
    here = [None if t is None else t.to(device) for t in (logits, bias, per_expert_scale)]
    with poisoned():
        weights, ids = moefuse.route(here[0], routing, bias=here[1], per_expert_scale=here[2], backend=backend)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert weights.shape == ids.shape == (logits.shape[0], routing.top_k)
    assert weights.device.type == ids.device.type == torch.device(device).type
    return weights.cpu(), ids.cpu()


def agree(target, logits, routing, bias=None, per_expert_scale=None):
    weights, ids = run(target, logits, routing, bias, per_expert_scale)
    want_weights, want_ids = oracle.route(logits, routing, bias, per_expert_scale)
    assert ids.tolist() == want_ids.tolist()
    assert_close(weights, want_weights, F32)
    return weights, ids


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("T", "E", "top_k"),
    [(1, 1, 1), (3, 2, 2), (4, 8, 2), (5, 60, 4), (5, 100, 10), (4, 128, 8), (3, 256, 8), (3, 1000, 64), (2, 1024, 1),
     (4, 64, 64), (4, 65, 64), (70, 33, 5)],
)  # fmt: skip
def test_sizes(target, rng, score, T, E, top_k):
    agree(target, oracle.normal(rng, T, E, scale=2.0), Routing(top_k, score=score))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", SCORES)
def test_types(target, rng, score, dtype):
    """Narrow logits are widened, never worked on; they tie often, and ties go to the lowest id."""
    logits = oracle.normal(rng, 40, 128).to(dtype)
    agree(target, logits, Routing(8, score=score, renormalize=False))


@pytest.mark.parametrize("score", SCORES)
def test_no_token(target, score):
    weights, ids = run(target, torch.empty(0, 8), Routing(3, score=score))
    assert weights.numel() == ids.numel() == 0


def test_ties_go_to_the_lowest_id(target):
    logits = torch.tensor([[1.0] * 9, [0, 3, 1, 3, 1, 3, 1, 0, 0], [5, 5, 5, 5, 0, 0, 0, 0, 0]])
    _, ids = agree(target, logits, Routing(5))
    assert ids.tolist() == [[0, 1, 2, 3, 4], [1, 3, 5, 2, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("E", [7, 32, 33, 100, 257, 1000])
def test_ties_in_long_rows(target, rng, score, E):
    """Few different values, so that ties lie across any lane, block or vector boundary."""
    logits = torch.randint(0, 3, (6, E), generator=rng).float()
    agree(target, logits, Routing(min(E, 40), score=score))


def test_zeros_of_either_sign_tie(target):
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, 0.0, -0.0]])
    assert agree(target, logits, Routing(4))[1].tolist() == [[0, 1, 2, 3]] * 2


def test_biased_scores_tie_to_the_lowest_id(target):
    """sigmoid(0) + 0.25 is exactly 0.75 whoever rounds it."""
    logits = torch.zeros(2, 8)
    bias = torch.tensor([0, 0.25, 0, 0.25, 0, 0.25, 0.125, 0.125])
    _, ids = agree(target, logits, Routing(5, score="sigmoid"), bias)
    assert ids.tolist() == [[1, 3, 5, 6, 7]] * 2


@pytest.mark.parametrize("score", SCORES)
def test_biased_scores_tie_wherever_they_stand(target, score):
    """A vector loop may round the last few of all logits otherwise than the rest."""
    E = 53
    for eighths in range(-24, 25, 3):
        _, ids = run(target, torch.full((1, E), eighths / 8), Routing(top_k=E, score=score), torch.full((E,), 0.625))
        assert ids[0].tolist() == list(range(E))


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize("biased", [False, True])
def test_groups_tie_to_the_lowest_id(target, group_score, biased):
    bias = torch.zeros(12) if biased else None
    routing = Routing(4, score="sigmoid", groups=4, top_groups=2, group_score=group_score)
    _, ids = agree(target, torch.zeros(2, 12), routing, bias)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2


def test_masked_experts_are_never_selected(target, rng):
    logits = oracle.normal(rng, 6, 20)
    logits[:, ::3] = -INF
    weights, ids = agree(target, logits, Routing(13))
    assert not (ids % 3 == 0).any()
    assert (ids[:] < 20).all()
    assert_close(weights.sum(-1), torch.ones(6, dtype=torch.float64), F32)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_too_few_candidates(target, rng, score, renormalize):
    logits = torch.full((3, 10), -INF)
    logits[0, [2, 7]] = oracle.normal(rng, 2)
    logits[1, 9] = -50.0
    logits[2] = oracle.normal(rng, 10)
    weights, ids = agree(target, logits, Routing(4, score=score, renormalize=renormalize))
    assert (ids[0] == 10).sum() == 2
    assert ids[1].tolist() == [9, 10, 10, 10]
    assert weights[1, 1:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "options", [{}, {"renormalize": False}, {"renormalize_after_scale": True}, {"softcap": 4.0}, {"norm_floor": 0.0},
                {"groups": 3, "top_groups": 2}, {"groups": 3, "top_groups": 2, "group_score": "top2_sum"}],
    ids=lambda options: "-".join(options) or "plain",
)  # fmt: skip
def test_bad_rows_fail_closed_alone(target, rng, score, options):
    """All -inf, NaN, +inf and both infinities: ids E, weights 0, and the rows around them as if nothing was."""
    logits = oracle.normal(rng, 9, 12)
    routing = Routing(4, score=score, **options)
    before = run(target, logits, routing)
    broken = logits.clone()
    broken[1] = -INF
    broken[3, 5] = NAN
    broken[4] = NAN
    broken[6, 11] = INF
    broken[7, [0, 1]] = torch.tensor([INF, -INF])
    weights, ids = run(target, broken, routing)
    assert (ids[[1, 3, 4, 6, 7]] == 12).all()
    assert (weights[[1, 3, 4, 6, 7]] == 0).all()
    good = [0, 2, 5, 8]
    assert torch.equal(ids[good], before[1][good])
    assert torch.equal(weights[good], before[0][good])
    assert (weights[good] > 0).all()


@pytest.mark.parametrize("value", [NAN, INF])
def test_broken_bias_fails_closed(target, rng, value):
    bias = torch.zeros(8)
    bias[3] = value
    weights, ids = run(target, oracle.normal(rng, 4, 8), Routing(2, score="sigmoid"), bias)
    assert (ids == 8).all()
    assert (weights == 0).all()


def test_infinitely_negative_bias_masks(target, rng):
    logits = oracle.until(lambda: oracle.normal(rng, 5, 8), oracle.spread)
    bias = torch.tensor([0, -INF, 0, 0, -INF, 0, 0, 0])
    _, ids = agree(target, logits, Routing(8, score="sigmoid"), bias)
    assert not ((ids == 1) | (ids == 4)).any()
    assert (ids[:, 6:] == 8).all()


def test_bias_selects_and_does_not_weigh(target, rng):
    logits = oracle.until(lambda: oracle.normal(rng, 6, 16), oracle.spread)
    bias = torch.zeros(16)
    bias[[3, 11]] = torch.tensor([20.0, 10.0])
    routing = Routing(2, score="sigmoid", renormalize=False)
    weights, ids = agree(target, logits, routing, bias)
    assert ids.tolist() == [[3, 11]] * 6
    assert_close(weights, torch.sigmoid(logits.double())[:, [3, 11]], F32)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("E", "groups", "top_groups", "top_k"), [(32, 8, 4, 6), (60, 6, 1, 10), (9, 9, 3, 2), (16, 2, 2, 5)]
)
def test_groups(target, rng, score, group_score, biased, E, groups, top_groups, top_k):
    """Keys a sixteenth apart, so that float32 and float64 rank them alike; one expert per group is masked."""
    steps = torch.stack([torch.randperm(E, generator=rng) for _ in range(6)])
    logits = steps / 16.0 - 2
    bias = torch.randint(0, 3, (E,), generator=rng) / 2.0 if biased else None
    logits[0, :: E // groups] = -INF
    routing = Routing(top_k, score=score, groups=groups, top_groups=top_groups, group_score=group_score)
    _, ids = agree(target, logits, routing, bias)
    kept = [{int(e) // (E // groups) for e in row if e < E} for row in ids]
    assert all(len(groups_of_row) <= top_groups for groups_of_row in kept)


def test_top_groups_decide_before_experts(target):
    """The best expert's group loses to two good ones when groups count by their two best."""
    logits = torch.logit(torch.tensor([[0.9, 0.1, 0.6, 0.7, 0.2, 0.3]], dtype=torch.float64)).float()
    by_sum = Routing(2, score="sigmoid", groups=3, top_groups=1, group_score="top2_sum")
    by_best = Routing(2, score="sigmoid", groups=3, top_groups=1, group_score="max")
    assert agree(target, logits, by_sum)[1].tolist() == [[3, 2]]
    assert agree(target, logits, by_best)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5, 30.0])
def test_options(target, rng, score, renormalize, after, scaled, softcap):
    scale = oracle.uniform(rng, 24) if scaled else None
    routing = Routing(
        5, score=score, renormalize=renormalize, scale=2.5, softcap=softcap, renormalize_after_scale=after
    )
    agree(target, oracle.normal(rng, 6, 24, scale=3.0), routing, None, scale)


def test_norm_floor_divides_small_sums(target):
    """DeepSeek's 1e-20 leaves the shares alone; a floor of one shows the scores themselves."""
    logits = torch.tensor([[-30.0, -31.0, -32.0, -33.0]])
    shares, _ = agree(target, logits, Routing(2, score="sigmoid"))
    assert_close(shares.sum(-1), torch.ones(1, dtype=torch.float64), F32)
    floored, _ = agree(target, logits, Routing(2, score="sigmoid", norm_floor=1.0))
    assert_close(floored, torch.sigmoid(logits.double())[:, :2], F32)


def test_softmax_of_selected_equals_softmax_then_renormalise(target, rng):
    """Top-k then softmax (Mixtral, gpt-oss) is the same rule as softmax, top-k, renormalise (Qwen3)."""
    logits = oracle.normal(rng, 8, 64, scale=3.0)
    weights, ids = run(target, logits, Routing(6))
    best = logits.double().topk(6)
    assert torch.equal(ids.long(), best.indices)
    assert_close(weights, torch.softmax(best.values, -1), F32)


def test_uniform_scale_cancels_only_when_renormalised_after(target, rng):
    logits, scale = oracle.normal(rng, 4, 12), torch.full((12,), 0.5)
    plain, _ = run(target, logits, Routing(3))
    halved, _ = agree(target, logits, Routing(3), None, scale)
    cancelled, _ = agree(target, logits, Routing(3, renormalize_after_scale=True), None, scale)
    assert_close(halved, plain.double() / 2, F32)
    assert_close(cancelled, plain.double(), F32)


@pytest.mark.parametrize("score", SCORES)
def test_extreme_logits_stay_finite(target, score):
    limit = torch.finfo(torch.float32).max
    logits = torch.tensor([[limit, -limit, 0.0, 1.0], [-limit, -limit, -limit, -limit], [300.0, 90.0, -300.0, -90.0]])
    weights, ids = run(target, logits, Routing(4, score=score))
    assert weights.isfinite().all()
    assert ids.tolist() == [[0, 3, 2, 1], [0, 1, 2, 3], [0, 1, 3, 2]]


def test_subnormal_logits_are_told_apart(target):
    tiny = torch.tensor([[0.0, 1e-40, -1e-40, 2e-40]])
    assert run(target, tiny, Routing(4))[1].tolist() == [[3, 1, 0, 2]]


@pytest.mark.parametrize("view", ["transposed", "column_step", "row_step", "expanded", "offset"])
def test_views(target, rng, view):
    make = {
        "transposed": lambda: oracle.normal(rng, 24, 6).T,
        "column_step": lambda: oracle.normal(rng, 6, 48)[:, ::2],
        "row_step": lambda: oracle.normal(rng, 12, 24)[::2],
        "expanded": lambda: oracle.normal(rng, 1, 24).expand(6, 24),
        "offset": lambda: oracle.normal(rng, 7, 25)[1:, 1:],
    }[view]
    logits = oracle.until(make, lambda t: oracle.spread(t, 1e-4))
    assert not logits.is_contiguous()
    scale, bias = oracle.uniform(rng, 48)[::2], torch.full((1,), 0.25).expand(24)
    agree(target, logits, Routing(4, score="sigmoid"), bias, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_bias_and_scale(target, rng, dtype):
    logits = torch.stack([torch.randperm(16, generator=rng) for _ in range(5)]) / 4.0
    bias, scale = torch.randint(0, 2, (16,), generator=rng).to(dtype), oracle.uniform(rng, 16).to(dtype)
    agree(target, logits, Routing(4, score="sigmoid"), bias, scale)


def test_the_same_bits_again(target, rng):
    logits = oracle.normal(rng, 33, 100)
    first, second = (run(target, logits, Routing(8)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_inputs_are_left_alone(target, rng):
    logits, bias, scale = oracle.normal(rng, 4, 8), oracle.normal(rng, 8), oracle.uniform(rng, 8)
    logits[0, 3] = NAN
    kept = [t.clone() for t in (logits, bias, scale)]
    run(target, logits, Routing(2, score="sigmoid", groups=2), bias, scale)
    for now, then in zip((logits, bias, scale), kept, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))


# Gradients


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(rng, score, renormalize, after, scaled, softcap):
    logits = oracle.until(
        lambda: torch.randn(3, 6, generator=rng, dtype=torch.float64), lambda t: oracle.spread(t, 1e-2)
    )
    scale = torch.rand(6, generator=rng, dtype=torch.float64) + 0.5
    routing = Routing(
        3, score=score, renormalize=renormalize, scale=1.7, softcap=softcap, renormalize_after_scale=after
    )
    leaves = [t.requires_grad_() for t in ((logits, scale) if scaled else (logits,))]

    def weights(logits, scale=None):
        return moefuse.route(logits, routing, per_expert_scale=scale, backend="reference")[0]

    assert torch.autograd.gradcheck(weights, leaves, fast_mode=False)


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
def test_gradcheck_biased_and_grouped(rng, group_score):
    logits = oracle.until(
        lambda: torch.randn(3, 8, generator=rng, dtype=torch.float64), lambda t: oracle.spread(t, 1e-2)
    )
    bias = torch.arange(8, dtype=torch.float64) * 2  # far apart: a step of 1e-6 changes no choice
    routing = Routing(2, score="sigmoid", groups=4, top_groups=2, group_score=group_score)

    def weights(logits):
        return moefuse.route(logits, routing, bias=bias, backend="reference")[0]

    assert torch.autograd.gradcheck(weights, [logits.requires_grad_()], fast_mode=False)


def test_gradcheck_below_the_floor(rng):
    """Under the floor the divisor is a constant."""
    logits = oracle.until(
        lambda: torch.randn(3, 6, generator=rng, dtype=torch.float64), lambda t: oracle.spread(t, 1e-2)
    )
    routing = Routing(2, score="sigmoid", norm_floor=5.0)
    leaf = logits.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda t: moefuse.route(t, routing, backend="reference")[0], [leaf], fast_mode=False
    )


@pytest.mark.parametrize(
    ("score", "renormalize", "after"), list(itertools.product(SCORES, (False, True), (False, True)))
)
def test_gradients_match_float64(target, rng, score, renormalize, after):
    backend, device = target
    logits, scale = oracle.normal(rng, 5, 24), oracle.uniform(rng, 24)
    seed = oracle.normal(rng, 5, 4)
    routing = Routing(4, score=score, renormalize=renormalize, renormalize_after_scale=after, scale=1.5)
    found = []
    for dtype, name, where in ((torch.float64, "reference", "cpu"), (torch.float32, backend, device)):
        leaves = [t.to(where, dtype).requires_grad_() for t in (logits, scale)]
        weights, _ = moefuse.route(leaves[0], routing, per_expert_scale=leaves[1], backend=name)
        found.append(torch.autograd.grad(weights, leaves, seed.to(weights)))
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, oracle.GRADIENT, whole=True)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_bad_rows_have_no_gradient(target, rng, score, softcap):
    """Masked logits and rows that failed closed get exactly zero; the others what they get alone."""
    backend, device = target
    logits = oracle.normal(rng, 6, 8)
    seed = oracle.normal(rng, 6, 3)
    routing = Routing(3, score=score, softcap=softcap)

    def gradient(values):
        leaf = values.clone().to(device).requires_grad_()
        weights, _ = moefuse.route(leaf, routing, backend=backend)
        return torch.autograd.grad(weights, leaf, seed.to(device))[0].cpu()

    alone = gradient(logits)
    broken = logits.clone()
    broken[0, 2], broken[2], broken[3, 1] = NAN, -INF, INF
    broken[5, 4:] = -INF
    got = gradient(broken)
    assert (got[[0, 2, 3]] == 0).all()
    assert (got[5, 4:] == 0).all()
    assert (got[5, :4] != 0).any()
    assert torch.equal(got[[1, 4]], alone[[1, 4]])
    assert (alone != 0).any()


def test_ids_and_bias_carry_no_gradient(target, rng):
    backend, device = target
    logits = oracle.normal(rng, 3, 8).to(device).requires_grad_()
    bias = oracle.normal(rng, 8).to(device).requires_grad_()
    weights, ids = moefuse.route(logits, Routing(2, score="sigmoid"), bias=bias, backend=backend)
    assert not ids.requires_grad
    d_logits, d_bias = torch.autograd.grad(weights.square().sum(), (logits, bias), allow_unused=True)
    assert d_bias is None
    assert (d_logits != 0).any()


@pytest.mark.parametrize("value", [NAN, INF])
def test_overflow_in_a_gradient_is_seen(target, rng, value):
    """A gradient scaler looks for NaN and infinity; route must not turn them into numbers."""
    backend, device = target
    logits = oracle.normal(rng, 2, 8).to(device).requires_grad_()
    weights, _ = moefuse.route(logits, Routing(3, renormalize=False), backend=backend)
    seed = torch.ones_like(weights)
    seed[0, 0] = value
    d_logits = torch.autograd.grad(weights, logits, seed)[0]
    assert not d_logits[0].isfinite().all()
    assert d_logits[1].isfinite().all()


FAR = {
    "sigmoid": [-99.0, -100.0, -101.5, -300.0],
    "sqrtsoftplus": [-95.0, -96.0, -170.0, -400.0],
    "softmax": [0.0, -95.0, -96.0, -97.5],
}


@pytest.mark.parametrize("score", FAR)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_scores_below_float32_keep_their_shares(target, score, after):
    """Scores that float32 has no number for, or few digits, still have their exact share of a sum."""
    backend, device = target
    logits = torch.tensor([FAR[score], FAR[score][::-1]])
    scale = torch.tensor([1.0, 2.0, 0.5, 1.0])
    if score == "softmax":  # the foremost out of the way
        scale = torch.where(logits[0] == 0, 0.0, scale)
    rule = Routing(
        4, score=score, norm_floor=0.0, renormalize=not after, renormalize_after_scale=after or score == "softmax"
    )
    given = (logits.to(device), rule)
    weights, ids = moefuse.route(*given, per_expert_scale=scale.to(device), backend=backend)
    want, want_ids = oracle.route(logits, rule, None, scale)
    assert ids.tolist() == want_ids.tolist()
    assert_close(weights.cpu(), want, F32)
    leaf = logits.clone().to(device).requires_grad_()
    moefuse.route(leaf, rule, per_expert_scale=scale.to(device), backend=backend)[0][:, 1].sum().backward()
    wide = logits.double().requires_grad_()
    moefuse.route(wide, rule, per_expert_scale=scale.double(), backend="reference")[0][:, 1].sum().backward()
    assert_close(leaf.grad.cpu(), wide.grad, oracle.GRADIENT)


def test_a_sum_of_zero_gives_weights_of_zero(target):
    """Nothing to divide by is no NaN, whatever the floor."""
    backend, device = target
    logits = torch.full((1, 4), -3e4, device=device)
    for rule in (
        Routing(2, score="sigmoid", norm_floor=0.0),
        Routing(2, score="sigmoid", renormalize_after_scale=True),
    ):
        weights, ids = moefuse.route(logits, rule, backend=backend)
        assert weights.tolist() == [[0.0, 0.0]]
        assert ids.tolist() == [[0, 1]]
