"""Each op against its formula in float64, written out with plain loops.

Sizes on both sides of what kernels like: E=8, 60, 100 and 256, more than 8 slots, one token and several.
"""

import math

import pytest
import torch

import moefuse
from moefuse import Routing
from moefuse.testing.poison import poisoned

from . import oracle
from .oracle import ROUNDED, assert_close

F32 = ROUNDED[torch.float32]
BF16 = ROUNDED[torch.bfloat16]


def on(target, *tensors):
    return tuple(t.to(target[1]) for t in tensors)


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def gelu_tanh(g):
    return 0.5 * g * (1 + math.tanh(0.7978845608028654 * (g + 0.044715 * g**3)))


def gelu_tanh_derivative(g):
    t = math.tanh(0.7978845608028654 * (g + 0.044715 * g**3))
    return 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * g * g)


def silu(g):
    return g / (1 + math.exp(-g))


def each(function, *tensors):
    """Element by element in float64."""
    rows = zip(*(t.double().flatten().tolist() for t in tensors), strict=True)
    return torch.tensor([function(*row) for row in rows], dtype=torch.float64).reshape(tensors[0].shape)


def weighted_sum(y, weights):
    """[T, k, H] and [T, k] to [T, H], slot by slot."""
    T, top_k, H = y.shape
    out = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for j in range(top_k):
            out[t] += float(weights[t, j]) * y[t, j].double()
    return out


def uneven(rng, T, top_k):
    return oracle.uniform(rng, T, top_k, low=0.1, high=1.0) * (1 + torch.arange(top_k))


@pytest.mark.parametrize("add_residual", [False, True])
@pytest.mark.parametrize("gate", ["logit", "gate"])
@pytest.mark.parametrize(("T", "top_k", "H"), [(1, 8, 2048), (5, 8, 256), (3, 10, 77)])
def test_sum_with_shared_expert_and_residual(target, rng, T, top_k, H, gate, add_residual):
    """The shared expert times a gate as it is, and times the sigmoid of a logit."""
    y, weights = oracle.normal(rng, T, top_k, H), uneven(rng, T, top_k)
    shared, value = oracle.normal(rng, T, H), oracle.normal(rng, T)
    residual = oracle.normal(rng, T, H)
    want = weighted_sum(y, weights)
    for t in range(T):
        factor = sigmoid(float(value[t])) if gate == "logit" else float(value[t])
        want[t] += factor * shared[t].double()
        if add_residual:
            want[t] += residual[t].double()
    y, weights, shared, value, residual = on(target, y.flatten(0, 1), weights, shared, value, residual)
    with poisoned():
        got = moefuse.combine(
            y,
            weights,
            shared=shared,
            residual=residual if add_residual else None,
            backend=target[0],
            **{f"shared_{gate}": value},
        )
    assert_close(got.cpu(), want, F32)


@pytest.mark.parametrize(
    ("T", "D", "E", "top_k"),
    [(1, 16, 8, 3), (4, 32, 128, 8), (3, 64, 60, 4), (5, 48, 100, 10), (2, 96, 256, 12), (7, 40, 128, 32),
     (1, 2816, 128, 8)],
)  # fmt: skip
def test_gate_with_norm_and_scale_renormalised_again(target, rng, T, D, E, top_k):
    """bf16 hidden state, f32 router; softmax over the selected, times the expert's scale, renormalised once more."""
    router, norm_weight, scale = oracle.weight(rng, E, D), oracle.uniform(rng, D), oracle.uniform(rng, E)
    eps = 1e-6

    def logits_of(hidden):
        rows = hidden.double()
        normed = rows * (rows.square().sum(-1, keepdim=True) / D + eps).rsqrt() * norm_weight.double()
        return normed @ router.double().T

    hidden = oracle.until(lambda: oracle.normal(rng, T, D).bfloat16(), lambda h: oracle.spread(logits_of(h)))
    ids, weights = [], []
    for row in logits_of(hidden).tolist():
        chosen = sorted(range(E), key=lambda e: (-row[e], e))[:top_k]
        powers = [math.exp(row[e] - row[chosen[0]]) for e in chosen]
        scaled = [p / sum(powers) * float(scale[e]) for p, e in zip(powers, chosen, strict=True)]
        ids.append(chosen)
        weights.append([w / sum(scaled) for w in scaled])
    hidden, router, norm_weight, scale = on(target, hidden, router, norm_weight, scale)
    with poisoned():
        got_weights, got_ids = moefuse.gate(
            hidden,
            router,
            Routing(top_k, renormalize_after_scale=True),
            norm_weight=norm_weight,
            eps=eps,
            per_expert_scale=scale,
            backend=target[0],
        )
    assert got_ids.tolist() == ids
    assert_close(got_weights.cpu(), torch.tensor(weights, dtype=torch.float64), oracle.FROM_PRODUCT)


@pytest.mark.parametrize(("slots", "ffn"), [(8, 768), (1, 31), (24, 257)])
def test_silu_times_up(target, rng, slots, ffn):
    gate, up = oracle.normal(rng, slots, ffn, scale=3.0), oracle.normal(rng, slots, ffn)
    want = each(lambda g, u: silu(g) * u, gate, up)
    with poisoned():
        got = moefuse.glu(*on(target, gate, up), "silu", backend=target[0])
    assert_close(got.cpu(), want, F32)


STACKED = pytest.mark.parametrize(("T", "slots", "hidden"), [(1, 8, 2048), (1, 2, 100), (6, 8, 300), (3, 12, 77)])


@STACKED
def test_weighted_sum(target, rng, T, slots, hidden):
    y, weights = oracle.normal(rng, T, slots, hidden), uneven(rng, T, slots)
    with poisoned():
        got = moefuse.combine(*on(target, y.flatten(0, 1), weights), backend=target[0])
    assert_close(got.cpu(), weighted_sum(y, weights), F32)


@STACKED
def test_weighted_sum_into_the_residual(target, rng, T, slots, hidden):
    """The residual is read and written."""
    y, weights, residual = oracle.normal(rng, T, slots, hidden), uneven(rng, T, slots), oracle.normal(rng, T, hidden)
    want = weighted_sum(y, weights) + residual.double()
    y, weights, residual = on(target, y.flatten(0, 1), weights, residual)
    moefuse.combine(y, weights, residual=residual, out=residual, backend=target[0])
    assert_close(residual.cpu(), want, F32)


@STACKED
def test_weighted_sum_into_the_residual_and_its_norm(target, rng, T, slots, hidden):
    """The residual in place, and the next layer's RMSNorm of it."""
    y, weights, residual = oracle.normal(rng, T, slots, hidden), uneven(rng, T, slots), oracle.normal(rng, T, hidden)
    next_weight, eps = oracle.uniform(rng, hidden), 1e-6
    want = weighted_sum(y, weights) + residual.double()
    norm = [1 / math.sqrt(sum(v * v for v in row) / hidden + eps) for row in want.tolist()]
    want_normed = want * torch.tensor(norm, dtype=torch.float64)[:, None] * next_weight.double()
    y, weights, residual, next_weight = on(target, y.flatten(0, 1), weights, residual, next_weight)
    normed = torch.full_like(residual, torch.nan)
    moefuse.combine(
        y,
        weights,
        residual=residual,
        norm_weight=next_weight,
        eps=eps,
        out=residual,
        normed_out=normed,
        backend=target[0],
    )
    assert_close(residual.cpu(), want, F32)
    assert_close(normed.cpu(), want_normed, F32)


@pytest.mark.parametrize(
    ("T", "E", "D", "inter", "top_k"), [(1, 2, 8, 4, 1), (1, 8, 8, 4, 2), (4, 60, 24, 20, 4), (3, 16, 40, 24, 12)]
)
def test_experts_one_after_another(target, rng, T, E, D, inter, top_k):
    """Expert by expert: GELU(gate) * up, down, accumulated with the routing weight."""
    x, ids, weights = oracle.normal(rng, T, D), oracle.distinct_ids(rng, T, top_k, E), oracle.uniform(rng, T, top_k)
    gate, up = oracle.weight(rng, E, inter, D), oracle.weight(rng, E, inter, D)
    down = oracle.weight(rng, E, D, inter)
    want = torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        for j, e in enumerate(ids[t].tolist()):
            gate_out, up_out = gate[e].double() @ x[t].double(), up[e].double() @ x[t].double()
            hidden = each(lambda g, u: gelu_tanh(g) * u, gate_out, up_out)
            want[t] += float(weights[t, j]) * (down[e].double() @ hidden)
    for gate_up in (torch.cat((gate, up), 1).to(target[1]), on(target, gate, up)):
        x, ids, weights, down = on(target, x, ids, weights, down)
        with poisoned():
            got = moefuse.experts(x, ids, weights, gate_up, down, activation="gelu_tanh", backend=target[0])
        assert_close(got.cpu(), want, F32)


def geglu(gate_up):
    """[.., 2I], gate half first."""
    gate, up = gate_up[..., : gate_up.shape[-1] // 2], gate_up[..., gate_up.shape[-1] // 2 :]
    return each(lambda g, u: gelu_tanh(g) * u, gate, up)


def check_geglu(target, gate_up, tolerance):
    with poisoned():
        got = moefuse.glu(gate_up.to(target[1]), "gelu_tanh", backend=target[0])
    assert got.dtype == gate_up.dtype
    assert_close(got.cpu(), geglu(gate_up), tolerance)


@pytest.mark.parametrize("N", [256, 33])
def test_gelu_times_up_bf16(target, rng, N):
    gate, up = oracle.normal(rng, N, scale=2.0).bfloat16(), oracle.normal(rng, N).bfloat16()
    with poisoned():
        got = moefuse.glu(*on(target, gate, up), "gelu_tanh", backend=target[0])
    assert got.dtype == torch.bfloat16
    assert_close(got.cpu(), each(lambda g, u: gelu_tanh(g) * u, gate, up), BF16)


@pytest.mark.parametrize("N", [16, 704, 33])
def test_geglu_of_a_vector(target, rng, N):
    """[2N] to [N]."""
    check_geglu(target, oracle.normal(rng, 2 * N, scale=2.0), F32)


@pytest.mark.parametrize("slot", [0, 3])
def test_geglu_of_a_slot(target, rng, slot):
    """A view that begins in the middle of a stack."""
    stacked = oracle.normal(rng, 4, 40, scale=2.0)
    check_geglu(target, stacked[slot], F32)
    check_geglu(target, stacked.flatten()[40 * slot : 40 * slot + 38], F32)


@pytest.mark.parametrize(("top_k", "I"), [(4, 16), (8, 704), (12, 33)])
def test_geglu_of_slots(target, rng, top_k, I):
    check_geglu(target, oracle.normal(rng, top_k, 2 * I, scale=2.0), F32)


@pytest.mark.parametrize(("T", "top_k", "I"), [(3, 2, 16), (5, 8, 33)])
def test_geglu_of_tokens(target, rng, T, top_k, I):
    check_geglu(target, oracle.normal(rng, T, top_k, 2 * I, scale=2.0), F32)


@pytest.mark.parametrize(("T", "top_k", "I"), [(3, 2, 16), (5, 8, 33)])
def test_geglu_of_tokens_bf16(target, rng, T, top_k, I):
    check_geglu(target, oracle.normal(rng, T, top_k, 2 * I, scale=2.0).bfloat16(), BF16)


@pytest.mark.parametrize("H", [32, 2816])
def test_accumulate_expert_by_expert(target, rng, H):
    """acc += w * y, one expert after another."""
    accumulator, outputs, weights = oracle.normal(rng, 1, H), oracle.normal(rng, 4, 1, H), [0.5, 1.5, -0.25, 2.0]
    want = accumulator.double()
    here = accumulator.to(target[1])
    for y, w in zip(outputs, weights, strict=True):
        want = want + w * y.double()
        moefuse.combine(
            y.to(target[1]), torch.tensor([[w]], device=target[1]), residual=here, out=here, backend=target[0]
        )
    assert_close(here.cpu(), want, F32)


def test_accumulate_from_the_middle_of_a_stack(target, rng):
    """The expert's output read from the middle of a stack, as a view."""
    accumulator, stacked = oracle.normal(rng, 1, 48), oracle.normal(rng, 8, 48)
    want = accumulator.double() + 0.75 * stacked[5:6].double()
    here, stacked = on(target, accumulator, stacked)
    moefuse.combine(stacked[5:6], torch.tensor([[0.75]], device=target[1]), residual=here, out=here, backend=target[0])
    assert_close(here.cpu(), want, F32)


def test_accumulating_from_zero_is_the_weighted_sum(target, rng):
    """torch zeroes; zero and accumulate is the weighted sum, to the bit."""
    y, weights = oracle.normal(rng, 3, 48), oracle.uniform(rng, 1, 3)
    y, weights = on(target, y, weights)
    buffer = torch.full((1, 48), torch.nan, device=target[1]).zero_()
    for j in range(3):
        moefuse.combine(y[j : j + 1], weights[:, j : j + 1], residual=buffer, out=buffer, backend=target[0])
    whole = moefuse.combine(y, weights, backend=target[0])
    assert (whole != 0).all()
    assert_close(buffer.cpu(), whole.cpu().double(), F32)


@pytest.mark.parametrize(("E", "top_k"), [(8, 2), (60, 4), (100, 12), (128, 8), (256, 8)])
@pytest.mark.parametrize("presorted", [False, True])
def test_route_with_scale(target, rng, E, top_k, presorted):
    """The k largest probabilities over their sum, times the expert's scale; no renormalising after."""
    probabilities = torch.softmax(oracle.normal(rng, E, scale=2.0).double(), -1)
    if presorted:
        probabilities = probabilities.sort(descending=True).values
    logits, scale = probabilities.log().float()[None], oracle.uniform(rng, E)
    probabilities = logits[0].double().exp()
    order = sorted(range(E), key=lambda e: -float(probabilities[e]))[:top_k]
    total = sum(float(probabilities[e]) for e in order)
    want = torch.tensor([[float(probabilities[e]) / total * float(scale[e]) for e in order]], dtype=torch.float64)
    with poisoned():
        logits, scale = on(target, logits, scale)
        weights, ids = moefuse.route(logits, Routing(top_k), per_expert_scale=scale, backend=target[0])
    assert ids.tolist() == [order]
    assert_close(weights.cpu(), want, F32)


@pytest.mark.parametrize(("top_k", "H"), [(4, 32), (8, 2816), (20, 33)])
def test_weighted_sum_of_one_token(target, rng, top_k, H):
    y, weights = oracle.normal(rng, 1, top_k, H), uneven(rng, 1, top_k)
    with poisoned():
        got = moefuse.combine(*on(target, y[0], weights), backend=target[0])
    assert_close(got.cpu(), weighted_sum(y, weights), F32)


@pytest.mark.parametrize(("T", "top_k", "H"), [(3, 2, 16), (33, 8, 70), (4, 12, 9)])
def test_weighted_sum_of_tokens(target, rng, T, top_k, H):
    y, weights = oracle.normal(rng, T, top_k, H), uneven(rng, T, top_k)
    with poisoned():
        got = moefuse.combine(*on(target, y.flatten(0, 1), weights), backend=target[0])
    assert_close(got.cpu(), weighted_sum(y, weights), F32)


@pytest.mark.parametrize(("T", "top_k", "H"), [(3, 2, 16), (33, 8, 70), (4, 12, 9)])
def test_weighted_sum_of_bf16_in_f32(target, rng, T, top_k, H):
    """bf16 in, f32 out."""
    y, weights = oracle.normal(rng, T, top_k, H).bfloat16(), uneven(rng, T, top_k)
    out = torch.full((T, H), torch.nan, device=target[1])
    moefuse.combine(*on(target, y.flatten(0, 1), weights), out=out, backend=target[0])
    assert_close(out.cpu(), weighted_sum(y, weights), F32)


@pytest.mark.parametrize(("T", "top_k", "I"), [(3, 2, 16), (5, 10, 7)])
def test_geglu_gradient(target, rng, T, top_k, I):
    """One tensor of the forward's layout; gelu'(0) is a half."""
    gate_up, d_out = oracle.normal(rng, T, top_k, 2 * I, scale=2.0), oracle.normal(rng, T, top_k, I)
    gate_up[0, 0, 0] = 0.0
    gate, up = gate_up[..., :I], gate_up[..., I:]
    d_gate = each(lambda d, g, u: d * u * gelu_tanh_derivative(g), d_out, gate, up)
    d_up = each(lambda d, g: d * gelu_tanh(g), d_out, gate)
    assert float(d_gate[0, 0, 0]) == pytest.approx(0.5 * float(d_out[0, 0, 0]) * float(up[0, 0, 0]))
    leaf = gate_up.to(target[1]).requires_grad_()
    with poisoned():
        got = torch.autograd.grad(moefuse.glu(leaf, "gelu_tanh", backend=target[0]), leaf, d_out.to(target[1]))[0]
    # 1 - tanh(s)**2 cancels in the tail of the derivative: an f32 tanh leaves 1e-6 of it there.
    assert_close(got.cpu(), torch.cat((d_gate, d_up), -1), oracle.GRADIENT, whole=True)


def weighted_sum_gradients(target, y, weights, d_out):
    leaves = [t.requires_grad_() for t in on(target, y.flatten(0, 1), weights)]
    with poisoned():
        return torch.autograd.grad(moefuse.combine(*leaves, backend=target[0]), leaves, d_out.to(target[1]))


@pytest.mark.parametrize(("T", "top_k", "H"), [(3, 2, 16), (5, 10, 33)])
def test_weighted_sum_gradient_of_rows(target, rng, T, top_k, H):
    """d_y[t, j] = w[t, j] * d_out[t]."""
    y, weights, d_out = oracle.normal(rng, T, top_k, H), uneven(rng, T, top_k), oracle.normal(rng, T, H)
    want = torch.stack([float(weights[t, j]) * d_out[t].double() for t in range(T) for j in range(top_k)])
    assert_close(weighted_sum_gradients(target, y, weights, d_out)[0].cpu(), want, F32)


@pytest.mark.parametrize(("T", "top_k", "H"), [(3, 2, 16), (5, 10, 33), (2, 8, 2048)])
def test_weighted_sum_gradient_of_weights(target, rng, T, top_k, H):
    """d_w[t, j] = <y[t, j], d_out[t]>."""
    y, weights, d_out = oracle.normal(rng, T, top_k, H), uneven(rng, T, top_k), oracle.normal(rng, T, H)
    want = torch.tensor(
        [[math.fsum((y[t, j].double() * d_out[t].double()).tolist()) for j in range(top_k)] for t in range(T)],
        dtype=torch.float64,
    )
    assert_close(weighted_sum_gradients(target, y, weights, d_out)[1].cpu(), want, oracle.GRADIENT)


@pytest.mark.parametrize(
    ("B", "E", "top_k"), [(3, 16, 4), (1, 8, 2), (5, 60, 4), (4, 100, 10), (2, 128, 8), (3, 256, 33)]
)
@pytest.mark.parametrize("renormalize", [False, True])
def test_route_by_softmax(target, rng, B, E, top_k, renormalize):
    """Softmax over all, largest first, ties to the lowest id, optionally over max(sum, 2**-14); E=60 and k=33 too."""
    logits = oracle.normal(rng, B, E, scale=2.0)
    logits[0, : E // 2] = logits[0, 0]
    ids, weights = [], []
    for row in logits.double().tolist():
        powers = [math.exp(z - max(row)) for z in row]
        probabilities = [p / sum(powers) for p in powers]
        chosen = sorted(range(E), key=lambda e: (-row[e], e))[:top_k]
        total = max(sum(probabilities[e] for e in chosen), 2.0**-14) if renormalize else 1.0
        ids.append(chosen)
        weights.append([probabilities[e] / total for e in chosen])
    with poisoned():
        got = moefuse.route(logits.to(target[1]), Routing(top_k, renormalize=renormalize), backend=target[0])
    assert got[1].tolist() == ids
    assert_close(got[0].cpu(), torch.tensor(weights, dtype=torch.float64), F32)


@pytest.mark.parametrize(("B", "E", "top_k"), [(5, 8, 3), (40, 60, 4), (576, 128, 8), (3, 100, 10), (100, 256, 1)])
@pytest.mark.parametrize("messy", [False, True])
def test_plan_lists_the_pairs_of_each_expert(target, rng, B, E, top_k, messy):
    """Assignments per expert, which they are, and how many tiles of 32 rows the fullest expert takes."""
    selected = oracle.distinct_ids(rng, B, top_k, E)
    if messy:
        selected = torch.randint(-1, E + 1, (B, top_k), generator=rng)
    counts, pairs = [0] * E, [[] for _ in range(E)]
    for pair, e in enumerate(selected.flatten().tolist()):
        if 0 <= e < E:
            counts[e] += 1
            pairs[e].append(pair)
    with poisoned():
        plan = moefuse.plan(selected.to(target[1]), E, backend=target[0])
    offsets, order = plan.offsets.tolist(), plan.order.tolist()
    assert plan.counts.tolist() == counts
    assert [order[offsets[e] : offsets[e + 1]] for e in range(E)] == pairs
    grid_x = max(1, math.ceil(max(counts) / 32))
    assert max(1, math.ceil(int(plan.counts.max()) / 32)) == grid_x
    assert order[offsets[E] :] == [s for s, e in enumerate(selected.flatten().tolist()) if not 0 <= e < E]
