"""experts and moe: against a loop over tokens and slots; plans, sentinels, tails, gradients."""

import math

import pytest
import torch

import moefuse
from moefuse import Activation, Routing
from moefuse.testing.compare import Tolerance
from moefuse.testing.poison import poisoned
from moefuse.types import ACTIVATION_KINDS

from . import oracle
from .oracle import ROUNDED, ROUNDED_TWICE, assert_close

TYPES = [torch.float32, torch.bfloat16, torch.float16]
F32 = ROUNDED[torch.float32]


def make(rng, T, E, H, I, top_k, dtype=torch.float32, *, activation="silu", biased=False, layout="halves", ids=None):
    rows = Activation.of(activation).width(I)
    given = {
        "x": oracle.normal(rng, T, H).to(dtype),
        "ids": oracle.distinct_ids(rng, T, top_k, E) if ids is None else ids,
        "weights": oracle.uniform(rng, T, top_k),
        "gate_up": oracle.weight(rng, E, rows, H).to(dtype),
        "down": oracle.weight(rng, E, H, I).to(dtype),
        "activation": activation,
        "layout": layout,
    }
    if biased:
        given |= {
            "gate_up_bias": oracle.normal(rng, E, rows).to(dtype),
            "down_bias": oracle.normal(rng, E, H).to(dtype),
        }
    return given


def here(value, device):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(t.to(device) for t in value)
    if isinstance(value, moefuse.Plan):
        parts = (t.to(device) for t in (value.counts, value.offsets, value.order, value.inverse))
        return moefuse.Plan(*parts, value.top_k)
    return value


def run(target, given, **more):
    backend, device = target
    with poisoned():
        result = moefuse.experts(**{k: here(v, device) for k, v in (given | more).items()}, backend=backend)
    return tuple(t.cpu() for t in result) if isinstance(result, tuple) else result.cpu()


def agree(target, given, tolerance):
    got = run(target, given)
    assert got.dtype == given["x"].dtype
    assert_close(got, oracle.experts(**given), tolerance)
    return got


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("T", "E", "H", "I", "top_k"),
    [(1, 16, 64, 48, 4), (1, 1, 8, 4, 1), (7, 4, 32, 24, 4), (40, 3, 24, 40, 2), (5, 60, 33, 17, 6),
     (3, 100, 20, 12, 10), (1, 1000, 6, 5, 8)],
)  # fmt: skip
def test_sizes(target, rng, dtype, T, E, H, I, top_k):
    agree(target, make(rng, T, E, H, I, top_k, dtype), ROUNDED_TWICE[dtype])


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_activations(target, rng, kind, gated, layout):
    activation = Activation(kind, gated=gated, limit=0.8)
    agree(target, make(rng, 5, 4, 24, 15, 2, activation=activation, biased=True, layout=layout), F32)


@pytest.mark.parametrize("biased", [False, True])
def test_gate_and_up_apart(target, rng, biased):
    given = make(rng, 6, 5, 24, 16, 3, biased=biased)
    joint = run(target, given)
    apart = given | {"gate_up": tuple(t.contiguous() for t in given["gate_up"].chunk(2, 1))}
    got = run(target, apart)
    assert_close(got, oracle.experts(**given), F32)
    assert_close(got, joint.double(), F32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("biased", [False, True])
def test_sentinels_contribute_nothing(target, rng, dtype, biased):
    limit = torch.iinfo(dtype)
    ids = torch.tensor([[0, -1], [4, 2], [limit.max, limit.min], [3, 3], [1, 4]], dtype=dtype)
    given = make(rng, 5, 4, 20, 12, 2, biased=biased, ids=ids)
    got = run(target, given)
    assert (got[2] == 0).all()
    assert_close(got, oracle.experts(**given), F32)


@pytest.mark.parametrize("shift", [2**32, -(2**32)])
def test_wide_ids_do_not_wrap(target, rng, shift):
    given = make(rng, 2, 4, 20, 12, 2, ids=torch.tensor([[1, shift + 2], [shift, 3]]))
    assert_close(run(target, given), oracle.experts(**given), F32)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gradients", [False, True])
def test_the_weight_of_a_sentinel_is_never_used(target, rng, value, gradients):
    given = make(rng, 3, 4, 20, 12, 2, biased=True, ids=torch.tensor([[0, -1], [4, 2], [9, 5]]))
    given["weights"][0, 1] = given["weights"][1, 0] = value
    given["weights"][2] = value
    given["x"].requires_grad_(gradients)
    got = run(target, given)
    clean = given | {"weights": given["weights"].nan_to_num(1.0, 1.0, 1.0), "x": given["x"].detach()}
    assert_close(got, oracle.experts(**clean), F32)
    assert (got[2] == 0).all()


def test_a_token_without_experts_is_never_read(target, rng):
    given = make(rng, 3, 4, 20, 12, 2, ids=torch.tensor([[0, 1], [4, -1], [2, 3]]))
    given["x"][1] = math.nan
    got = run(target, given)
    assert (got[1] == 0).all()
    assert got.isfinite().all()


def test_duplicates_count_each(target, rng):
    given = make(rng, 2, 4, 20, 12, 3, ids=torch.tensor([[1, 1, 1], [0, 2, 0]]))
    got = agree(target, given, F32)
    once = given | {"ids": torch.tensor([[1], [1]]), "weights": given["weights"].sum(1, keepdim=True)}
    assert_close(got[0], run(target, once)[0].double(), F32)


def test_a_bad_row_stays_alone(target, rng):
    given = make(rng, 6, 3, 20, 12, 2)
    before = run(target, given)
    given["x"][2, 3] = math.nan
    given["weights"][4, 0] = math.inf
    after = run(target, given)
    rest = [0, 1, 3, 5]
    assert torch.equal(before[rest], after[rest])
    assert after[2].isnan().all()


def test_no_token(target, rng):
    given = make(rng, 0, 4, 20, 12, 2)
    assert run(target, given).shape == (0, 20)
    out, normed = run(target, given, residual=torch.empty(0, 20), norm_weight=torch.ones(20))
    assert out.shape == normed.shape == (0, 20)


@pytest.mark.parametrize("messy", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_plan_changes_nothing(target, rng, messy, gradients):
    ids = torch.randint(-1, 7, (9, 3), generator=rng) if messy else None
    given = make(rng, 9, 6, 20, 12, 3, biased=True, ids=ids)
    given["x"].requires_grad_(gradients)
    backend, device = target
    plan = moefuse.plan(given["ids"].to(device), 6, backend=backend)
    assert torch.equal(run(target, given), run(target, given, plan=plan))


def tail_of(rng, T, H, dtype=torch.float32):
    return {
        "shared": oracle.normal(rng, T, H).to(dtype),
        "shared_logit": oracle.normal(rng, T).to(dtype),
        "residual": oracle.normal(rng, T, H).to(dtype),
        "norm_weight": oracle.uniform(rng, H).to(dtype),
        "eps": 1e-5,
    }


def with_tail(summed, tail):
    out = summed + torch.sigmoid(tail["shared_logit"].double())[:, None] * tail["shared"].double()
    out = out + tail["residual"].double()
    return out, oracle.rms_norm(out, tail["norm_weight"], tail["eps"])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("T", [1, 9])
def test_tail(target, rng, dtype, T):
    given, tail = make(rng, T, 4, 24, 16, 2, dtype), tail_of(rng, T, 24, dtype)
    out, normed = run(target, given, **tail)
    want, want_normed = with_tail(oracle.experts(**given), tail)
    assert out.dtype == normed.dtype == dtype
    assert_close(out, want, ROUNDED_TWICE[dtype])
    assert_close(normed, want_normed, ROUNDED_TWICE[dtype])


def test_in_place_on_the_residual(target, rng):
    given, tail = make(rng, 5, 4, 24, 16, 2), tail_of(rng, 5, 24)
    want, want_normed = with_tail(oracle.experts(**given), tail)
    stream, normed = tail["residual"].to(target[1]), torch.full((5, 24), math.nan, device=target[1])
    run(target, given, **(tail | {"residual": stream, "out": stream, "normed_out": normed}))
    assert_close(stream.cpu(), want, F32)
    assert_close(normed.cpu(), want_normed, F32)


@pytest.mark.parametrize("outer", TYPES)
@pytest.mark.parametrize("inner", TYPES)
def test_out_of_another_type(target, rng, inner, outer):
    given = make(rng, 5, 4, 24, 16, 2, inner)
    out = torch.full((5, 24), math.nan, dtype=outer, device=target[1])
    run(target, given, out=out)
    wider = max(ROUNDED_TWICE[inner], ROUNDED[outer], key=lambda bound: bound.worst)
    assert_close(out.cpu(), oracle.experts(**given), wider)


def test_float32_residual_of_a_bfloat16_layer(target, rng):
    given = make(rng, 5, 4, 24, 16, 2, torch.bfloat16)
    residual = oracle.normal(rng, 5, 24)
    out = run(target, given, residual=residual)
    assert out.dtype == torch.float32
    assert_close(out, oracle.experts(**given) + residual.double(), ROUNDED_TWICE[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views(target, rng, dtype):
    """Transposed stacks, as torch._grouped_mm wants them; stepped tokens; expanded weights."""
    T, E, H, I, top_k = 6, 4, 16, 12, 2
    given = {
        "x": oracle.normal(rng, 2 * T, 2 * H).to(dtype)[::2, ::2],
        "ids": oracle.distinct_ids(rng, T, 2 * top_k, E)[:, ::2],
        "weights": torch.tensor([[0.75, 0.5]]).expand(T, top_k),
        "gate_up": (oracle.normal(rng, E, H, 2 * I) * H**-0.5).to(dtype).transpose(1, 2),
        "down": (oracle.normal(rng, E, I, H) * I**-0.5).to(dtype).transpose(1, 2),
        "gate_up_bias": oracle.normal(rng, 2 * I, E).to(dtype).T,
        "down_bias": oracle.normal(rng, 1, H).to(dtype).expand(E, H),
    }
    assert not any(given[name].is_contiguous() for name in given)
    agree(target, given, ROUNDED_TWICE[dtype])


def test_the_same_bits_again(target, rng):
    given = make(rng, 33, 5, 40, 24, 3)
    assert torch.equal(run(target, given), run(target, given))


def test_tokens_are_independent_of_their_company(target, rng):
    """Any subset of the tokens gives the same rows, whatever path its size takes."""
    given = make(rng, 70, 4, 32, 24, 2)
    together = run(target, given)
    for rows in (slice(0, 1), slice(3, 9), slice(0, 40)):
        part = run(target, given | {name: given[name][rows] for name in ("x", "ids", "weights")})
        assert_close(part, together[rows].double(), F32)


# moe

#: The router's product in float32; the normed x that the experts read is rounded as well.
MOE = {
    torch.float32: oracle.FROM_PRODUCT,
    torch.bfloat16: Tolerance(1.2e-2, 6e-3, "normed x, hidden row and result rounded to 8 bits"),
    torch.float16: Tolerance(1.5e-3, 7.5e-4, "normed x, hidden row and result rounded to 11 bits"),
}


def moe_inputs(rng, T, E, H, I, dtype=torch.float32):
    return {
        "x": oracle.normal(rng, T, H).to(dtype),
        "router": oracle.weight(rng, E, H).to(dtype),
        "gate_up": oracle.weight(rng, E, 2 * I, H).to(dtype),
        "down": oracle.weight(rng, E, H, I).to(dtype),
    }


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_moe(target, rng, dtype, norm):
    """The whole block against a loop; the experts see the normed x when there is a norm."""
    backend, device = target
    norm_weight = oracle.uniform(rng, 32).to(dtype) if norm else None

    def fit(x):
        seen = oracle.rms_norm(x, norm_weight, 1e-5) if norm else x.double()
        return oracle.spread(seen @ given["router"].double().T)

    given = moe_inputs(rng, 5, 8, 32, 24, dtype)
    given["x"] = oracle.until(lambda: oracle.normal(rng, 5, 32).to(dtype), fit)
    tail = tail_of(rng, 5, 32, dtype)
    routing = Routing(3, scale=1.5)
    result = moefuse.moe(
        **{k: v.to(device) for k, v in given.items()},
        routing=routing, norm_weight=None if norm_weight is None else norm_weight.to(device), eps=1e-5,
        shared=tail["shared"].to(device), shared_logit=tail["shared_logit"].to(device),
        residual=tail["residual"].to(device), next_norm_weight=tail["norm_weight"].to(device), next_eps=tail["eps"],
        backend=backend,
    )  # fmt: skip
    seen = oracle.rms_norm(given["x"], norm_weight, 1e-5) if norm else given["x"].double()
    weights, ids = oracle.route(seen @ given["router"].double().T, routing)
    want = with_tail(oracle.experts(seen, ids, weights, given["gate_up"], given["down"]), tail)
    for got, expected in zip(result, want, strict=True):
        assert got.dtype == dtype
        assert_close(got.cpu(), expected, MOE[dtype])


def test_moe_is_gate_then_experts(target, rng):
    backend, device = target
    given = {k: v.to(device) for k, v in moe_inputs(rng, 6, 8, 32, 24).items()}
    logit_bias, scale = oracle.normal(rng, 8).to(device), oracle.uniform(rng, 8).to(device)
    routing = Routing(3, renormalize_after_scale=True)
    whole = moefuse.moe(**given, routing=routing, logit_bias=logit_bias, per_expert_scale=scale, backend=backend)
    weights, ids = moefuse.gate(
        given["x"], given["router"], routing, logit_bias=logit_bias, per_expert_scale=scale, backend=backend
    )
    parts = moefuse.experts(given["x"], ids, weights, given["gate_up"], given["down"], backend=backend)
    assert (whole != 0).any()
    assert torch.equal(whole, parts)


def test_moe_rows_that_fail_closed_leave_the_residual(target, rng):
    backend, device = target
    given = moe_inputs(rng, 4, 8, 32, 24)
    residual = oracle.normal(rng, 4, 32)
    given["x"][1, 5] = math.nan
    out = moefuse.moe(
        **{k: v.to(device) for k, v in given.items()}, routing=Routing(2), residual=residual.to(device), backend=backend
    ).cpu()
    assert torch.equal(out[1], residual[1])
    assert out.isfinite().all()
    assert (out[[0, 2, 3]] != residual[[0, 2, 3]]).all()


# Gradients


def leaves_of(given):
    found = {name: v for name, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    if isinstance(given.get("gate_up"), tuple):
        found |= dict(zip(("gate", "up"), given["gate_up"], strict=True))
    return found


def rejoined(given, leaves):
    """The arguments with the leaves in place; gate and up become one tuple again."""
    merged = given | leaves
    if "gate" in merged:
        merged["gate_up"] = merged.pop("gate"), merged.pop("up")
    return merged


GRADIENT_CASES = {
    "plain": {},
    "biased": {"biased": True},
    "interleaved": {"biased": True, "layout": "interleaved"},
    "gpt_oss": {"biased": True, "layout": "interleaved", "activation": Activation("swiglu_oai", limit=30.0)},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "ungated": {"activation": Activation("silu", gated=False), "biased": True},
    "sentinels": {"ids": torch.tensor([[0, -1], [1, 1], [3, 2]]), "biased": True},
}


@pytest.mark.parametrize("name", [*GRADIENT_CASES, "tail", "apart", "plan"])
def test_gradcheck(rng, name):
    given = make(rng, 3, 3, 4, 2, 2, torch.float64, **GRADIENT_CASES.get(name, {"biased": True}))
    given["weights"] = given["weights"].double()
    if name == "tail":
        given |= tail_of(rng, 3, 4, torch.float64)
    if name == "apart":
        given["gate_up"] = tuple(t.contiguous() for t in given["gate_up"].chunk(2, 1))
    if name == "plan":
        given["plan"] = moefuse.plan(given["ids"], 3)
    leaves = leaves_of(given)

    def result(*tensors):
        return moefuse.experts(**rejoined(given, dict(zip(leaves, tensors, strict=True))), backend="reference")

    assert torch.autograd.gradcheck(result, [t.requires_grad_() for t in leaves.values()], fast_mode=False)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("norm", [False, True])
def test_moe_gradcheck(rng, score, norm):
    draw = lambda *shape: torch.randn(shape, generator=rng, dtype=torch.float64)  # noqa: E731
    router, norm_weight = draw(4, 3), draw(3).abs() + 0.5

    def fit(x):
        return oracle.spread((oracle.rms_norm(x, norm_weight, 1e-3) if norm else x) @ router.T, 1e-2)

    leaves = {
        "x": oracle.until(lambda: draw(2, 3), fit),
        "router": router,
        "gate_up": draw(4, 4, 3),
        "down": draw(4, 3, 2),
    }
    if norm:
        leaves |= {"norm_weight": norm_weight, "residual": draw(2, 3), "next_norm_weight": draw(3).abs() + 0.5}

    def result(*tensors):
        given = dict(zip(leaves, tensors, strict=True))
        return moefuse.moe(**given, routing=Routing(2, score=score), eps=1e-3, next_eps=1e-3, backend="reference")

    assert torch.autograd.gradcheck(result, [t.requires_grad_() for t in leaves.values()], fast_mode=False)


@pytest.mark.parametrize("name", [*GRADIENT_CASES, "tail", "apart"])
def test_gradients_match_float64(target, rng, name):
    backend, device = target
    given = make(rng, 3, 3, 20, 12, 2, **GRADIENT_CASES.get(name, {}))
    if name == "tail":
        given |= tail_of(rng, 3, 20)
    if name == "apart":
        given["gate_up"] = tuple(t.contiguous() for t in given["gate_up"].chunk(2, 1))
    seeds = [oracle.normal(rng, 3, 20) for _ in range(2)]
    found = []
    for dtype, run_on, where in ((torch.float64, "reference", "cpu"), (torch.float32, backend, device)):
        leaves = {k: t.to(where, dtype).requires_grad_() for k, t in leaves_of(given).items()}
        merged = rejoined(given | {"ids": given["ids"].to(where)}, leaves)
        result = moefuse.experts(**merged, backend=run_on)
        outputs = result if isinstance(result, tuple) else (result,)
        grads = [s.to(o) for s, o in zip(seeds, outputs, strict=False)]
        found.append(torch.autograd.grad(outputs, list(leaves.values()), grads))
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, oracle.GRADIENT, whole=True)


def test_the_gradient_of_a_sentinel_is_zero(target, rng):
    backend, device = target
    given = make(rng, 3, 4, 20, 12, 2, ids=torch.tensor([[0, -1], [4, 2], [9, 5]]))
    weights = given["weights"].to(device).requires_grad_()
    x = given["x"].to(device).requires_grad_()
    merged = {k: here(v, device) for k, v in given.items()} | {"weights": weights, "x": x}
    moefuse.experts(**merged, backend=backend).square().sum().backward()
    assert (weights.grad[[0, 1, 2, 2], [1, 0, 0, 1]] == 0).all()
    assert (weights.grad[[0, 1], [0, 1]] != 0).all()
    assert (x.grad[2] == 0).all()
    assert (x.grad[:2] != 0).any()


def test_forward_with_and_without_gradients_agree(target, rng):
    given = make(rng, 9, 4, 32, 24, 2, biased=True)
    plain = run(target, given)
    given["down"].requires_grad_()
    assert_close(run(target, given).detach(), plain.double(), F32)
