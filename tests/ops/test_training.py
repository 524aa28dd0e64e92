"""experts under gradients: what is saved, what is not computed, the same bits again, and the types of a real run."""

import math

import pytest
import torch

import moefuse
from moefuse import Activation, Routing
from moefuse.ops import experts_backward
from moefuse.ops._core import select
from moefuse.testing.compare import Tolerance
from moefuse.testing.poison import poisoned
from moefuse.types import ACTIVATION_KINDS, Wanted

from . import oracle
from .oracle import assert_close

STACKS = ("gate_up", "down", "gate_up_bias", "down_bias")
#: Eight bits a number. z, d_z and the hidden row are rounded once each, and so is every result; the products are f32.
BF16 = Tolerance(1.6e-2, 8e-3, "z, d_z, hidden row and result rounded to 8 bits")
F16 = Tolerance(2.4e-3, 1e-3, "z, d_z, hidden row and result rounded to 11 bits")


def make(rng, T=9, E=5, H=24, I=16, top_k=2, dtype=torch.float32, *, activation="silu", layout="halves", apart=False):
    rows = Activation.of(activation).width(I)
    given = {
        "x": oracle.normal(rng, T, H).to(dtype),
        "weights": oracle.uniform(rng, T, top_k),
        "gate_up": oracle.weight(rng, E, rows, H).to(dtype),
        "down": oracle.weight(rng, E, H, I).to(dtype),
        "gate_up_bias": oracle.normal(rng, E, rows, scale=0.3).to(dtype),
        "down_bias": oracle.normal(rng, E, H, scale=0.3).to(dtype),
    }
    rule = {"ids": oracle.distinct_ids(rng, T, top_k, E), "activation": activation, "layout": layout}
    if apart:
        given["gate"], given["up"] = (t.contiguous() for t in given.pop("gate_up").chunk(2, 1))
    return given, rule


def smooth(rng, *sizes, **options):
    """As `make`, with no gate within rounding of zero, where relu has no slope of its own."""
    for _ in range(200):
        given, rule = make(rng, *sizes, **options)
        gate = given["gate"] if "gate" in given else given["gate_up"]
        bias = given["gate_up_bias"][:, : gate.shape[1]]
        z = torch.einsum("th,enh->ten", given["x"].double(), gate.double()) + bias.double()
        if (z.abs() > 1e-5).all():
            return given, rule
    raise AssertionError("no draw fits")


def forward(leaves, rule, backend):
    leaves = dict(leaves)
    if "up" in leaves:
        leaves["gate_up"] = leaves.pop("gate"), leaves.pop("up")
    return moefuse.experts(**leaves, **rule, backend=backend)


def gradients(given, rule, backend, device="cpu", *, dtype=None, frozen=(), seed=7, **options):
    """Gradients of every leaf that is not frozen, for a fixed random gradient of the result."""
    leaves = {k: t.detach().to(device, dtype or t.dtype).requires_grad_(k not in frozen) for k, t in given.items()}
    rule = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in rule.items()}
    with poisoned():
        out = forward(leaves, rule, backend)
        d = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
        wanted = {k: t for k, t in leaves.items() if t.requires_grad}
        found = torch.autograd.grad(out, list(wanted.values()), d, **options)
    return dict(zip(wanted, found, strict=True))


def agree(got, want, tolerance):
    assert got.keys() == want.keys()
    for name, grad in got.items():
        assert grad.isfinite().all(), name
        assert_close(grad.cpu(), want[name], tolerance, whole=True)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("form", ["halves", "interleaved", "apart", "ungated"])
def test_every_activation_and_layout(target, rng, kind, form):
    # A limit that no value stands near in both precisions would need luck; a wide one has both sides far away.
    activation = Activation(kind, gated=form != "ungated", limit=30.0)
    layout = "interleaved" if form == "interleaved" else "halves"
    given, rule = smooth(rng, activation=activation, layout=layout, apart=form == "apart")
    want = gradients(given, rule, "reference", dtype=torch.float64)
    agree(gradients(given, rule, *target), want, oracle.GRADIENT)


@pytest.mark.parametrize("kind", ["swiglu_oai", "swiglu_clamp"])
def test_beyond_the_limit_nothing_flows(target, rng, kind):
    """Pre-activations that are all past the clamps: gate and up get no gradient, the weights still do."""
    given, rule = make(rng, activation=Activation(kind, limit=0.5))
    given["gate_up_bias"].fill_(100.0)
    got = gradients(given, rule, *target)
    assert (got["gate_up"] == 0).all()
    assert (got["x"] == 0).all()
    want = gradients(given, rule, "reference", dtype=torch.float64)
    agree({"down": got["down"], "weights": got["weights"]}, {k: want[k] for k in ("down", "weights")}, oracle.GRADIENT)


@pytest.mark.parametrize(
    ("T", "E", "H", "I", "top_k"),
    [
        (1, 4, 32, 16, 2),
        (3, 1, 7, 5, 1),
        (70, 3, 33, 17, 3),
        (150, 2, 40, 300, 2),
        (5, 60, 20, 12, 6),
        (4, 3, 300, 9, 3),
    ],
)
def test_sizes(target, rng, T, E, H, I, top_k):
    """One row, odd sizes, more rows per expert than a block, empty experts, more columns than a block."""
    given, rule = make(rng, T, E, H, I, top_k)
    want = gradients(given, rule, "reference", dtype=torch.float64)
    agree(gradients(given, rule, *target), want, oracle.GRADIENT)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, BF16), (torch.float16, F16)])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_narrow_types(target, rng, dtype, tolerance, layout):
    given, rule = make(rng, 40, 6, 64, 48, 3, dtype, layout=layout)
    want = gradients(given, rule, "reference", dtype=torch.float64)
    got = gradients(given, rule, *target)
    assert {got[name].dtype for name in STACKS} == {dtype}
    assert got["weights"].dtype == torch.float32
    agree(got, want, tolerance)


def test_sentinels_duplicates_and_empty_experts(target, rng):
    given, rule = make(rng, 6, 5)
    rule["ids"] = torch.tensor([[0, -1], [1, 1], [9, 5], [3, 3], [1, 0], [5, 3]])
    given["weights"][0, 1] = math.nan
    given["x"][2] = math.nan  # no expert reads this token
    clean = given | {"weights": given["weights"].nan_to_num(1.0), "x": given["x"].nan_to_num(1.0)}
    want = gradients(clean, rule, "reference", dtype=torch.float64)
    got = gradients(given, rule, *target)
    agree(got, want, oracle.GRADIENT)
    assert (got["weights"].cpu()[[0, 2, 2, 5], [1, 0, 1, 0]] == 0).all()
    assert (got["x"][2] == 0).all()
    for name in STACKS:
        assert (got[name][[2, 4]] == 0).all(), name


def test_no_expert_at_all(target, rng):
    given, rule = make(rng, 3, 4)
    rule["ids"] = torch.full((3, 2), -1)
    for name, grad in gradients(given, rule, *target).items():
        assert (grad == 0).all(), name


def test_no_token(target, rng):
    given, rule = make(rng, 0, 4)
    found = gradients(given, rule, *target)
    assert found["x"].shape == (0, 24)
    assert found["weights"].shape == (0, 2)
    for name in STACKS:
        assert (found[name] == 0).all(), name


def test_views(target, rng):
    """Transposed stacks, stepped tokens and expanded weights; the gradient that comes in is expanded too."""
    backend, device = target
    T, E, H, I, top_k = 6, 4, 16, 12, 2
    made = {
        "x": oracle.normal(rng, 2 * T, 2 * H).to(device),
        "gate_up": oracle.normal(rng, E, H, 2 * I, scale=H**-0.5).to(device),
        "down": oracle.normal(rng, E, I, H, scale=I**-0.5).to(device),
        "weights": oracle.uniform(rng, 1, top_k).to(device),
    }
    ids = oracle.distinct_ids(rng, T, top_k, E).to(device)

    def run(leaves, backend):
        return moefuse.experts(
            leaves["x"][::2, ::2], ids, leaves["weights"].expand(T, top_k), leaves["gate_up"].transpose(1, 2),
            leaves["down"].transpose(1, 2), backend=backend,
        ).sum()  # fmt: skip

    found = []
    for dtype, where in ((torch.float32, backend), (torch.float64, "reference")):
        leaves = {name: t.to(dtype).requires_grad_() for name, t in made.items()}
        found.append(dict(zip(leaves, torch.autograd.grad(run(leaves, where), list(leaves.values())), strict=True)))
    agree(found[0], {k: t.cpu() for k, t in found[1].items()}, oracle.GRADIENT)


def test_the_same_bits_again(target, rng):
    given, rule = make(rng, 70, 4, 40, 24, 3)
    first, second = (gradients(given, rule, *target) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_kept_graph_gives_the_same_gradients_twice(target, rng):
    """The memory of z becomes scratch only in the pass that frees it."""
    backend, device = target
    given, rule = make(rng, 20)
    leaves = {k: t.to(device).requires_grad_() for k, t in given.items()}
    rule["ids"] = rule["ids"].to(device)
    out = forward(leaves, rule, backend)
    d = torch.randn_like(out)
    first = torch.autograd.grad(out, list(leaves.values()), d, retain_graph=True)
    second = torch.autograd.grad(out, list(leaves.values()), d)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, list(leaves.values()), d)


def test_nothing_as_large_as_the_gathered_tokens_is_saved(target, rng):
    backend, device = target
    T, H, I, top_k = 32, 256, 16, 4
    given, rule = make(rng, T, 5, H, I, top_k)
    leaves = {k: t.to(device).requires_grad_() for k, t in given.items()}
    rule["ids"] = rule["ids"].to(device)
    saved = []

    def pack(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward(leaves, rule, backend)
    weights = {leaves[name].data_ptr() for name in (*STACKS, "x")}
    own = [t for t in saved if t.data_ptr() not in weights]
    assert own
    assert all(t.numel() < T * top_k * H for t in own)
    routing = 4 * (5 + 6 + 2 * T * top_k) + 4 * T * top_k  # the plan and the weights
    assert sum(t.nbytes for t in own) <= 4 * T * top_k * 2 * I + routing
    out.sum().backward()


def test_compiled_in_one_graph(target, rng):
    backend, device = target
    given, rule = make(rng)
    rule["ids"] = rule["ids"].to(device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda leaves: forward(leaves, rule, backend), fullgraph=True, backend="aot_eager")
    found = []
    for call in (lambda leaves: forward(leaves, rule, backend), compiled):
        leaves = {k: t.detach().to(device).requires_grad_() for k, t in given.items()}
        found.append(torch.autograd.grad(call(leaves).square().sum(), list(leaves.values())))
    torch._dynamo.reset()
    assert all(torch.equal(eager, traced) for eager, traced in zip(*found, strict=True))


def test_second_derivatives_are_refused(target, rng):
    backend, device = target
    given, rule = make(rng)
    leaves = {k: t.to(device).requires_grad_() for k, t in given.items()}
    out = forward(leaves, rule | {"ids": rule["ids"].to(device)}, backend)
    (d_x,) = torch.autograd.grad(out.square().sum(), [leaves["x"]], create_graph=True)
    with pytest.raises(RuntimeError, match="experts: second derivatives are not supported"):
        d_x.sum().backward()


@pytest.mark.parametrize("only", ["x", "weights", *STACKS])
def test_one_gradient_alone_is_the_same_as_among_all(target, rng, only):
    given, rule = make(rng, 20)
    every = gradients(given, rule, *target)
    alone = gradients(given, rule, *target, frozen=set(given) - {only})
    assert list(alone) == [only]
    assert torch.equal(alone[only], every[only])


@pytest.mark.parametrize("trained", [("x",), ("x", "weights"), ("down",), ("x", "weights", *STACKS)])
def test_frozen_parts_do_no_work(rng, monkeypatch, trained):
    """The reference calls a product per gradient: count them. What a backend is asked for is the same list."""
    calls = []
    for name in ("grouped_linear_transposed_reference", "grouped_outer_reference"):
        original = getattr(experts_backward, name)
        monkeypatch.setattr(
            experts_backward, name, lambda *a, f=original, n=name, **k: (calls.append(n), f(*a, **k))[1]
        )
    given, rule = make(rng)
    leaves = {k: t.requires_grad_(k in trained) for k, t in given.items()}
    out = forward(leaves, rule, "reference")
    calls.clear()
    out.sum().backward()
    expected = {("x",): (2, 0), ("x", "weights"): (2, 0), ("down",): (0, 1)}.get(trained, (2, 4))
    products = calls.count("grouped_linear_transposed_reference"), calls.count("grouped_outer_reference")
    assert products == expected


def test_what_is_not_wanted_is_not_asked_of_a_backend(target, rng, monkeypatch):
    backend, device = target
    asked = []
    chosen = select.select

    def spy(reference, *question, **more):
        run = chosen(reference, *question, **more)
        if reference is not experts_backward.experts_backward_reference:
            return run

        def asking(*values):
            (wanted,) = (value for value in values if isinstance(value, Wanted))
            asked.append({name for name, want in wanted._asdict().items() if want})
            result = run(*values)
            assert [t.numel() > 0 for t in result] == list(wanted)
            return result

        return asking

    monkeypatch.setattr(select, "select", spy)
    given, rule = make(rng)
    gradients(given, rule, backend, device, frozen=STACKS)
    gradients(given, rule, backend, device, frozen=("x", "weights", "gate_up_bias", "down_bias"))
    assert asked == [{"x", "weights"}, {"gate_up", "down"}]


def test_a_frozen_router_does_no_work_of_its_own(target, rng, monkeypatch):
    from moefuse.ops import gate

    backend, device = target
    asked = []
    original = gate._gate_backward

    def asking(*values):
        asked.append(tuple(value for value in values if isinstance(value, bool)))
        return original(*values)

    monkeypatch.setattr(gate, "_gate_backward", asking)
    x, router = oracle.normal(rng, 5, 24).to(device), oracle.weight(rng, 6, 24).to(device)
    moefuse.gate(x.requires_grad_(), router, Routing(2), backend=backend)[0].sum().backward()
    moefuse.gate(x.detach(), router.requires_grad_(), Routing(2), backend=backend)[0].sum().backward()
    assert asked == [(True, False), (False, True)]
    assert router.grad.shape == router.shape


def test_a_residual_of_another_type(target, rng):
    backend, device = target
    given, rule = make(rng, dtype=torch.float16)
    leaves = {k: t.to(device).requires_grad_() for k, t in given.items()}
    residual = oracle.normal(rng, 9, 24).to(device).requires_grad_()
    out = moefuse.experts(**leaves, **rule | {"ids": rule["ids"].to(device)}, residual=residual, backend=backend)
    out.sum().backward()
    assert residual.grad.dtype == torch.float32
    assert (residual.grad == 1).all()
    assert leaves["x"].grad.dtype == torch.float16
