"""glu: every kind against its formula, both layouts, apart, extremes, gradients."""

import math

import pytest
import torch

import moefuse
from moefuse import Activation
from moefuse.testing.poison import poisoned
from moefuse.types import ACTIVATION_KINDS

from . import oracle
from .oracle import ROUNDED, assert_close

TYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = math.inf


def run(target, *args, **options):
    backend, device = target
    here = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
    with poisoned():
        return moefuse.glu(*here, **options, backend=backend).cpu()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("form", ["halves", "interleaved", "apart", "ungated"])
def test_formula(target, rng, dtype, kind, form):
    """Values wide enough to cross the clamps."""
    activation = Activation(kind, gated=form != "ungated")
    gate, up = oracle.normal(rng, 5, 3, 23, scale=4.0).to(dtype), oracle.normal(rng, 5, 3, 23, scale=4.0).to(dtype)
    want = oracle.act_rows(activation, gate, None if form == "ungated" else up)
    if form == "apart":
        got = run(target, gate, up, activation)
    elif form == "ungated":
        got = run(target, gate, activation)
    else:
        joint = torch.cat((gate, up), -1) if form == "halves" else torch.stack((gate, up), -1).flatten(-2)
        got = run(target, joint, activation, layout=form)
    assert got.dtype == dtype
    assert_close(got, want, ROUNDED[dtype])


@pytest.mark.parametrize(("alpha", "limit"), [(1.0, 1.0), (1.702, 7.0), (0.5, 100.0)])
@pytest.mark.parametrize("kind", ["swiglu_oai", "swiglu_clamp"])
@pytest.mark.parametrize("gated", [False, True])
def test_alpha_and_limit(target, rng, kind, gated, alpha, limit):
    activation = Activation(kind, gated=gated, alpha=alpha, limit=limit)
    z = oracle.normal(rng, 6, 40, scale=3 * limit)
    want = oracle.act_rows(activation, *oracle.halves(z, activation, "halves"))
    assert_close(run(target, z, activation), want, ROUNDED[torch.float32])


@pytest.mark.parametrize("shape", [(2,), (34,), (5, 2), (1, 1, 1, 6), (3, 4, 5, 16), (7, 1000), (1, 4098)])
@pytest.mark.parametrize("dtype", TYPES)
def test_shapes(target, rng, shape, dtype):
    z = oracle.normal(rng, *shape).to(dtype)
    got = run(target, z, "silu")
    assert got.shape == (*shape[:-1], shape[-1] // 2)
    activation = Activation("silu")
    assert_close(got, oracle.act_rows(activation, *oracle.halves(z, activation, "halves")), ROUNDED[dtype])


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0,), (4, 0, 2)])
def test_nothing(target, shape):
    got = run(target, torch.empty(shape), "silu")
    assert got.shape == (*shape[:-1], shape[-1] // 2)


def test_names_and_activations_are_the_same(target, rng):
    z = oracle.normal(rng, 3, 8)
    for kind in ACTIVATION_KINDS:
        assert torch.equal(run(target, z, kind), run(target, z, Activation(kind)))
        assert torch.equal(run(target, z, activation=kind), run(target, z, kind))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_finite_in_never_nan_out(target, dtype, kind, gated):
    """Every pair of extremes, zeros of both signs and the ranges where exp, tanh and squares leave the type."""
    limit = torch.finfo(dtype)
    values = [0.0, limit.tiny, limit.eps, 1.0, 7.0, 8.0, 11.0, 17.0, 40.0, 88.0, 89.0, 104.0, 300.0, 1e4, 6e4]
    values += [2.0**63, 1e19, 1e30, limit.max / 2, limit.max]
    values = torch.tensor([v for v in values if v <= limit.max])
    values = torch.cat((values, -values)).to(dtype)
    gate, up = (t.flatten() for t in torch.meshgrid(values, values, indexing="ij"))
    got = run(target, gate, up, kind) if gated else run(target, values, Activation(kind, gated=False))
    assert not got.isnan().any()
    gate = gate if gated else values
    negative = gate < (-104.0 if kind != "gelu_tanh" else -11.0)
    assert (got[negative] == 0).all(), "a gate this low is closed"
    moderate = (gate.abs() < 50) & ((up.abs() < 50) if gated else True)
    want = oracle.act_rows(Activation(kind, gated=gated), gate[moderate], up[moderate] if gated else None)
    assert_close(got[moderate], want, ROUNDED[dtype])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_a_gate_of_minus_infinity_is_closed(target, dtype, kind):
    gate = torch.full((9,), -INF, dtype=dtype)
    up = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, 1e4], dtype=dtype)
    assert (run(target, gate, up, kind) == 0).all()
    assert (run(target, gate, Activation(kind, gated=False)) == 0).all()


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_nan_is_not_hidden(target, rng, kind):
    gate, up = oracle.normal(rng, 2, 4), oracle.normal(rng, 2, 4)
    gate[0, 1] = torch.nan
    up[1, 2] = torch.nan
    gate[1, 2] = 1.0
    got = run(target, gate, up, kind)
    assert got.isnan().tolist() == [[False, True, False, False], [False, False, True, False]]


@pytest.mark.parametrize("view", ["transposed", "stepped", "expanded", "offset"])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_views(target, rng, view, layout):
    z = {
        "transposed": lambda: oracle.normal(rng, 12, 5).T,
        "stepped": lambda: oracle.normal(rng, 10, 24)[::2, ::2],
        "expanded": lambda: oracle.normal(rng, 1, 12).expand(5, 12),
        "offset": lambda: oracle.normal(rng, 6, 13)[1:, 1:],
    }[view]()
    assert not z.is_contiguous()
    activation = Activation("silu")
    want = oracle.act_rows(activation, *oracle.halves(z, activation, layout))
    assert_close(run(target, z, "silu", layout=layout), want, ROUNDED[torch.float32])


def test_apart_with_different_strides(target, rng):
    gate, up = oracle.normal(rng, 8, 5).T, oracle.normal(rng, 5, 16)[:, ::2]
    want = oracle.act_rows(Activation("gelu_tanh"), gate, up)
    assert_close(run(target, gate, up, "gelu_tanh"), want, ROUNDED[torch.float32])


# Gradients


def away_from_kinks(rng, *shape, limit=None):
    """No value within a step of 0 or of a clamp."""

    def clear(t):
        kinks = [0.0] if limit is None else [0.0, limit, -limit]
        return all(bool(((t - k).abs() > 1e-3).all()) for k in kinks)

    return oracle.until(lambda: torch.randn(shape, generator=rng, dtype=torch.float64) * 2, clear)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("form", ["halves", "interleaved", "apart", "ungated"])
def test_gradcheck(rng, kind, form):
    activation = Activation(kind, gated=form != "ungated", limit=1.5)
    shape = (2, 3) if form in ("apart", "ungated") else (2, 6)
    leaves = [away_from_kinks(rng, *shape, limit=1.5).requires_grad_() for _ in range(2 if form == "apart" else 1)]
    layout = form if form == "interleaved" else "halves"

    def result(*parts):
        return moefuse.glu(*parts, activation, layout=layout, backend="reference")

    assert torch.autograd.gradcheck(result, leaves, fast_mode=False)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("form", ["halves", "interleaved", "apart", "ungated"])
def test_gradients_match_float64(target, rng, kind, form):
    """With a gradient that comes in transposed."""
    backend, device = target
    activation = Activation(kind, gated=form != "ungated")
    width = 11 if form in ("apart", "ungated") else 22
    parts = [oracle.normal(rng, 7, width, scale=3.0) for _ in range(2 if form == "apart" else 1)]
    seed = oracle.normal(rng, 11, 7).T
    layout = form if form == "interleaved" else "halves"
    found = []
    for dtype, name, where in ((torch.float64, "reference", "cpu"), (torch.float32, backend, device)):
        leaves = [t.to(where, dtype).requires_grad_() for t in parts]
        out = moefuse.glu(*leaves, activation, layout=layout, backend=name)
        found.append(torch.autograd.grad(out, leaves, seed.to(where, dtype)))
    for got, want in zip(found[1], found[0], strict=True):
        assert_close(got, want, oracle.GRADIENT, whole=True)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_gradients_of_large_values_are_not_nan(target, kind):
    backend, device = target
    gate = torch.tensor([-1e30, -1e6, -300.0, -90.0, 90.0, 300.0, 1e6, 1e15], device=device, requires_grad=True)
    up = torch.full_like(gate, 0.5, requires_grad=True)
    moefuse.glu(gate, up, kind, backend=backend).sum().backward()
    assert not gate.grad.isnan().any()
    assert not up.grad.isnan().any()
    assert (up.grad[:4].abs() < 1e-36).all()
    assert (up.grad[4:] > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_gradients_round_once(target, rng, dtype):
    backend, device = target
    z, seed = oracle.normal(rng, 6, 30).to(dtype), oracle.normal(rng, 6, 15).to(dtype)
    wide = z.double().requires_grad_()
    want = torch.autograd.grad(moefuse.glu(wide, "silu", backend="reference"), wide, seed.double())[0]
    leaf = z.to(device).requires_grad_()
    got = torch.autograd.grad(moefuse.glu(leaf, "silu", backend=backend), leaf, seed.to(device))[0]
    assert got.dtype == dtype
    assert_close(got, want, ROUNDED[dtype])
