"""Gradients through weights in blocks: against float64 of the same numbers, and no more is kept than beside those."""

import pytest
import torch

import moefuse
from moefuse import Activation, Routing
from moefuse.nn import MoE, add_lora
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor
from moefuse.testing.cases import formats_of
from moefuse.testing.poison import poisoned
from moefuse.testing.random_blocks import random_blocks

from . import oracle
from .oracle import assert_close


def width_of(*formats):
    """Columns that fill blocks of all these formats, and not a whole tile of each."""
    return max({256: 256, 128: 128, 32: 96}[FORMATS[name].values] if name else 96 for name in formats)


def weight(rng, format, *shape):
    """Numbers, or a stack in blocks that keeps activations as they are."""
    if format is None:
        return oracle.weight(rng, *shape)
    return random_blocks(f"{format}:exact", shape, rng, shape[-1] ** -0.5)


def numbers(value):
    return value.dequantize(torch.float64) if isinstance(value, QuantTensor) else value.double()


def make(rng, formats, T=7, E=3, top_k=2, *, activation="silu", layout="halves"):
    """Stacks of two formats, gate_up and down, or of three: gate, up and down."""
    *first, down = formats
    H, I = width_of(*first), width_of(down)
    rows = Activation.of(activation).width(I) // len(first)
    stacks = {"gate_up": tuple(weight(rng, format, E, rows, H) for format in first), "down": weight(rng, down, E, H, I)}
    if len(first) == 1:
        (stacks["gate_up"],) = stacks["gate_up"]
    given = {
        "x": oracle.normal(rng, T, H),
        "weights": oracle.uniform(rng, T, top_k),
        "gate_up_bias": oracle.normal(rng, E, rows * len(first), scale=0.3),
        "down_bias": oracle.normal(rng, E, H, scale=0.3),
    }
    rule = {"ids": oracle.distinct_ids(rng, T, top_k, E), "activation": activation, "layout": layout}
    return given, stacks, rule


def gradients(given, stacks, rule, backend, device="cpu", seed=7):
    """Of every leaf, stacks in numbers included, for a fixed random gradient of the result."""

    def leaf(value):
        return value.to(device) if isinstance(value, QuantTensor) else value.to(device).detach().requires_grad_()

    leaves = {name: leaf(value) for name, value in given.items()}
    held = {k: tuple(map(leaf, v)) if isinstance(v, tuple) else leaf(v) for k, v in stacks.items()}
    plain = {f"{k}{i}": t for k, v in held.items() for i, t in enumerate(v if isinstance(v, tuple) else (v,))}
    leaves |= {k: t for k, t in plain.items() if not isinstance(t, QuantTensor)}
    arguments = {k: leaves[k] for k in given}
    with poisoned():
        out = moefuse.experts(**arguments, **held, **rule | {"ids": rule["ids"].to(device)}, backend=backend)
        d = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
        found = torch.autograd.grad(out, list(leaves.values()), d)
    return dict(zip(leaves, found, strict=True))


def exact_gradients(given, stacks, rule):
    """The same with every stack in float64 numbers; those that stood in blocks have gradients, too."""
    wide = {k: t.double() for k, t in given.items()}
    held = {k: tuple(map(numbers, v)) if isinstance(v, tuple) else numbers(v) for k, v in stacks.items()}
    return gradients(wide, held, rule, "reference")


def agree(got, want, tolerance=oracle.GRADIENT):
    assert {"x", "weights", "gate_up_bias", "down_bias"} <= got.keys()
    for name, grad in got.items():
        assert grad.isfinite().all(), name
        assert_close(grad.cpu(), want[name], tolerance, whole=True)


def skip_without(backend, *formats):
    if not {name for name in formats if name}.issubset(formats_of(backend)):
        pytest.skip(f"{backend} leaves these formats to the reference")


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(target, rng, format):
    skip_without(target[0], format)
    made = make(rng, (format, format))
    agree(gradients(*made, *target), exact_gradients(*made))


@pytest.mark.parametrize(
    "formats",
    [("Q8_0", None), (None, "Q4_0"), ("Q5_K", "Q8_0", "Q4_0"), ("Q6_K", None, "Q3_K"), (None, "IQ4_NL", None)],
    ids=lambda formats: "-".join(name or "numbers" for name in formats),
)
def test_mixtures(target, rng, formats):
    """Stacks of other formats, and of numbers, which have gradients beside frozen blocks."""
    skip_without(target[0], *formats)
    made = make(rng, formats, 20)
    got = gradients(*made, *target)
    assert len(got) == 4 + formats.count(None)
    agree(got, exact_gradients(*made))


@pytest.mark.parametrize("form", ["interleaved", "apart", "ungated"])
@pytest.mark.parametrize("kind", ["silu", "swiglu_oai", "gelu"])
def test_layouts(target, rng, form, kind):
    activation = Activation(kind, gated=form != "ungated", limit=30.0)
    formats = ("Q8_0",) * (3 if form == "apart" else 2)
    layout = "interleaved" if form == "interleaved" else "halves"
    made = make(rng, formats, activation=activation, layout=layout)
    agree(gradients(*made, *target), exact_gradients(*made))


@pytest.mark.parametrize(("T", "E", "top_k"), [(1, 4, 2), (130, 1, 1), (150, 2, 2), (5, 60, 6)])
def test_rows(target, rng, T, E, top_k):
    """One row, more rows per expert than a panel holds, empty experts."""
    made = make(rng, ("Q5_1", "Q8_0"), T, E, top_k)
    got = gradients(*made, *target)
    agree(got, exact_gradients(*made))


def test_no_token(target, rng):
    found = gradients(*make(rng, ("Q5_1", "Q8_0"), 0), *target)
    assert found["x"].shape == (0, 96)
    assert all((found[name] == 0).all() for name in ("gate_up_bias", "down_bias"))


def test_sentinels_and_duplicates(target, rng):
    given, stacks, rule = make(rng, ("Q4_K", "Q6_K"), 6, 5)
    rule["ids"] = torch.tensor([[0, -1], [1, 1], [9, 5], [3, 3], [1, 0], [5, 3]])
    want = exact_gradients(given, stacks, rule)
    given["x"][2] = torch.nan  # no expert reads this token
    given["weights"][0, 1] = torch.nan
    got = gradients(given, stacks, rule, *target)
    agree(got, want)
    assert (got["x"][2] == 0).all()


def test_slices_of_a_stack(target, rng):
    """Experts some of a larger stack's, which begin elsewhere and lie at a stride of their own."""
    given, stacks, rule = make(rng, ("Q6_K", "Q4_0"), E=4)
    sliced = {}
    for name, stack in stacks.items():
        room = torch.full((2 * len(stack) + 1, *stack.blocks.shape[1:]), 255, dtype=torch.uint8)
        room[1::2] = stack.blocks
        sliced[name] = QuantTensor(room[1::2], stack.format, exact=True)
    got, want = (gradients(given, held, rule, *target) for held in (sliced, stacks))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_planes_have_the_same_gradients(target, rng):
    given, stacks, rule = make(rng, ("Q4_K", "Q5_0"))
    arranged = {name: stack.arranged("planes") for name, stack in stacks.items()}
    got, want = (gradients(given, held, rule, *target) for held in (arranged, stacks))
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_numerically(rng):
    given, stacks, rule = make(rng, ("Q8_0", "Q4_1"), T=2)
    given = {name: t.double().requires_grad_() for name, t in given.items()}

    def run(*leaves):
        return moefuse.experts(**dict(zip(given, leaves, strict=True)), **stacks, **rule, backend="reference")

    assert torch.autograd.gradcheck(run, tuple(given.values()), fast_mode=True)


def saved_by(run):
    """Bytes that autograd keeps of a call; ``run`` returns its result."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        result = run()
    return {t.data_ptr(): t.nbytes for t in saved}, result


def test_nothing_more_is_saved_than_beside_numbers(target, rng):
    backend, device = target
    given, stacks, rule = make(rng, ("Q8_0", "Q8_0"), 32)
    rule["ids"] = rule["ids"].to(device)
    kept = []
    for held in (stacks, {name: stack.dequantize() for name, stack in stacks.items()}):
        mine = {name: value.to(device) for name, value in held.items()}
        leaves = {name: t.to(device).requires_grad_() for name, t in given.items()}
        found, out = saved_by(lambda m=mine, s=leaves: moefuse.experts(**s, **m, **rule, backend=backend))
        own = {
            value.blocks.data_ptr() if isinstance(value, QuantTensor) else value.data_ptr() for value in mine.values()
        }
        assert own <= found.keys()
        kept.append(sorted(size for at, size in found.items() if at not in own))
        out.sum().backward()
    assert kept[0] == kept[1]
    S, I = 32 * 2, stacks["down"].shape[2]
    assert max(kept[0]) == 4 * S * 2 * I, "nothing is larger than the pre-activations"


def test_adapters_keep_nothing_more_beside_blocks(target, rng):
    backend, device = target
    kept = []
    for in_blocks in (True, False):
        block = MoE(96, 64, 4, Routing(top_k=2))
        own = set()
        for name in ("gate_up", "down"):
            stack = weight(rng, "Q8_0", *getattr(block, name).shape)
            delattr(block, name)
            block.register_buffer(name, stack.blocks if in_blocks else stack.dequantize())
            if in_blocks:
                block.specs[name] = stack.spec
        add_lora(block, rank=4)
        block.to(device)
        own = {getattr(block, name).data_ptr() for name in ("gate_up", "down")}
        x = oracle.normal(rng, 20, 96).to(device).requires_grad_()
        found, out = saved_by(lambda b=block, x=x: b(x, backend=backend))
        kept.append(sum(size for at, size in found.items() if at not in own))
        out.sum().backward()
        assert all(p.grad is not None for p in block.lora.parameters())
    assert kept[0] == kept[1]


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_leaves_its_blocks_as_it_is(target, rng, format):
    """Random bytes, infinite and NaN scales among them: each expert is one row, and its gradient that row times one."""
    backend, device = target
    skip_without(backend, format)
    E, K = 150, 512
    form = FORMATS[format]
    blocks = torch.randint(256, (E, 1, form.row_bytes(K)), generator=rng, dtype=torch.uint8)
    stack = QuantTensor(blocks, format).to(device)
    x = torch.zeros(E, K, device=device, requires_grad=True)
    plan = moefuse.plan(torch.arange(E, device=device)[:, None], E, backend=backend)
    with poisoned():
        y = moefuse.grouped_linear(x, stack, plan, gather=True, scatter=True, backend=backend)
        (got,) = torch.autograd.grad(y, x, torch.ones_like(y))
    want = stack.to("cpu").dequantize()[:, 0]
    assert want.isnan().any() or format == "MXFP4"
    torch.testing.assert_close(got.cpu(), want, rtol=0 if device == "cpu" else 1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("scatter", [False, True])
def test_grouped_linear(target, rng, gather, scatter):
    """Rows from slots or tokens, to slots or in order; the gradient that comes in is a view."""
    backend, device = target
    T, E, N, K, top_k = 9, 4, 70, 160, 2
    stack = weight(rng, "Q5_0", E, N, K).to(device)
    ids = torch.randint(-1, E + 1, (T, top_k), generator=rng).to(device)
    plan = moefuse.plan(ids, E, backend=backend)
    x, d = oracle.normal(rng, T if gather else T * top_k, K).to(device), oracle.normal(rng, N, 2 * T * top_k).to(device)
    found = []
    for at, held, by in ((x, stack, backend), (x.double(), numbers(stack), "reference")):
        at = at.requires_grad_()
        with poisoned():
            y = moefuse.grouped_linear(at, held, plan, gather=gather, scatter=scatter, backend=by)
            found.append(torch.autograd.grad(y, at, d.T[::2].to(y.dtype))[0])
    assert_close(found[0].cpu(), found[1].cpu(), oracle.GRADIENT, whole=True)


def test_second_derivatives_of_a_grouped_product(target, rng):
    backend, device = target
    stack = weight(rng, "Q8_0", 3, 40, 64).to(device)
    plan = moefuse.plan(oracle.distinct_ids(rng, 6, 2, 3).to(device), 3, backend=backend)
    x = oracle.normal(rng, 6, 64).to(device)
    found = []
    for at, held, by in ((x, stack, backend), (x.double(), numbers(stack), "reference")):
        at = at.requires_grad_()
        y = moefuse.grouped_linear(at, held, plan, gather=True, scatter=False, backend=by)
        (d_x,) = torch.autograd.grad(y.square().sum(), at, create_graph=True)
        found.append(torch.autograd.grad(d_x.square().sum(), at)[0])
    assert_close(found[0].cpu(), found[1].cpu(), oracle.GRADIENT, whole=True)


@pytest.mark.parametrize("T", [1, 5, 100])
def test_linear(target, rng, T):
    """Three weights of the same rows, two of them in blocks."""
    backend, device = target
    formats = ("Q4_K", None, "Q3_K")
    skip_without(backend, *formats)
    weights = tuple(weight(rng, format, 40 + i, 512).to(device) for i, format in enumerate(formats))
    x, d = oracle.normal(rng, T, 512).to(device), oracle.normal(rng, T, 123).to(device)
    found = []
    for at, held, by in ((x, weights, backend), (x.double(), tuple(map(numbers, weights)), "reference")):
        at = at.requires_grad_()
        with poisoned():
            y = torch.cat(moefuse.linear(at, held, backend=by), 1)
            found.append(torch.autograd.grad(y, at, d.to(y.dtype))[0])
    assert_close(found[0].cpu(), found[1].cpu(), oracle.GRADIENT, whole=True)


@pytest.mark.parametrize("format", ["Q4_K", "Q6_K", "MXFP4"])
def test_the_same_bits_for_any_number_of_threads(rng, format):
    if "cpu" not in {row.name for row in moefuse.backends.BACKENDS if row.missing() is None}:
        pytest.skip("its C++ kernels are not built")
    made = make(rng, (format, format), 150, 2)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(gradients(*made, "cpu"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in other)


def test_compiled_in_one_graph(target, rng):
    backend, device = target
    given, stacks, rule = make(rng, ("Q8_0", "Q4_0"))
    rule["ids"] = rule["ids"].to(device)
    held = {name: stack.to(device) for name, stack in stacks.items()}
    torch._dynamo.reset()
    run = lambda leaves: moefuse.experts(**leaves, **held, **rule, backend=backend)  # noqa: E731
    found = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        leaves = {k: t.detach().to(device).requires_grad_() for k, t in given.items()}
        found.append(torch.autograd.grad(call(leaves).square().sum(), list(leaves.values())))
    torch._dynamo.reset()
    assert all(torch.equal(eager, traced) for eager, traced in zip(*found, strict=True))


def test_no_product_of_a_step_waits_for_the_gpu(target, rng):
    backend, device = target
    if device != "cuda":
        pytest.skip("nothing runs behind the host's back here")
    given, stacks, rule = make(rng, ("Q4_K", "Q6_K"), 64)
    leaves = {k: t.to(device).requires_grad_() for k, t in given.items()}
    held, rule["ids"] = {name: stack.to(device) for name, stack in stacks.items()}, rule["ids"].to(device)
    step = lambda: moefuse.experts(**leaves, **held, **rule, backend=backend).sum().backward()  # noqa: E731
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
