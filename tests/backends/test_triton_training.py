"""The Triton backward kernels without a GPU: in the interpreter, against float64, the whole and each piece."""

import pytest
import torch
from ops import oracle, test_formulas, test_training_blocks
from ops.test_training import BF16, F16, agree, gradients, make, smooth

import moefuse
import moefuse.nn
from moefuse import Activation
from moefuse.ops.grouped_linear import grouped_linear_transposed_op, grouped_linear_transposed_reference
from moefuse.quant.formats import FORMATS
from moefuse.testing import cases
from moefuse.testing.poison import poisoned
from moefuse.types import ACTIVATION_KINDS, Plan

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]
pytestmark = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])


def compare(given, rule, target, tolerance=oracle.GRADIENT):
    want = gradients(given, rule, "reference", dtype=torch.float64)
    agree(gradients(given, rule, *target), want, tolerance)


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
@pytest.mark.parametrize("form", ["halves", "interleaved", "apart", "ungated"])
def test_every_activation_and_layout(target, rng, kind, form):
    activation = Activation(kind, gated=form != "ungated", limit=30.0)
    layout = "interleaved" if form == "interleaved" else "halves"
    compare(*smooth(rng, 5, 3, activation=activation, layout=layout, apart=form == "apart"), target)


@pytest.mark.parametrize(("T", "E", "H", "I", "top_k"), [(1, 4, 32, 16, 2), (40, 3, 33, 65, 3), (4, 9, 70, 9, 3)])
def test_sizes(target, rng, T, E, H, I, top_k):
    compare(*make(rng, T, E, H, I, top_k), target)


def test_no_token(target, rng):
    given, rule = make(rng, 0, 4)
    found = gradients(given, rule, *target)
    assert found["x"].shape == (0, 24)
    assert all((found[name] == 0).all() for name in ("gate_up", "down", "gate_up_bias", "down_bias"))


def test_float16(target, rng):
    compare(*make(rng, 20, 4, 64, 48, 3, torch.float16), target, F16)


def test_some_columns_at_a_time(target, rng, monkeypatch):
    """What is summed over slots is made in chunks when it would be large, with and without a tail to follow."""
    from moefuse.backends.triton import experts, experts_backward

    given, rule = make(rng, 7, 4, 40, 16, 3)
    whole = gradients(given, rule, *target)
    tail = {"residual": oracle.normal(rng, 7, 40), "norm_weight": oracle.uniform(rng, 40)}
    tailed = run_with_tail(given, rule, tail, target)
    for module in (experts, experts_backward):
        monkeypatch.setattr(module, "slot_columns", lambda *_: 16)
    agree(gradients(given, rule, *target), {k: t.cpu().double() for k, t in whole.items()}, oracle.GRADIENT)
    for got, want in zip(run_with_tail(given, rule, tail, target), tailed, strict=True):
        oracle.assert_close(got, want.double(), oracle.ROUNDED[torch.float32])


def run_with_tail(given, rule, tail, target):
    backend, device = target
    made = {k: t.to(device).requires_grad_() for k, t in (given | tail).items()}
    results = moefuse.experts(**made, **rule | {"ids": rule["ids"].to(device)}, backend=backend)
    return tuple(t.detach().cpu() for t in results)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_transposed_product_by_descriptors(target, rng, apart, gather):
    """The copy engine's path, which the interpreter's small tiles do not take by themselves."""
    from moefuse.backends.triton.grouped_linear_transposed import transposed_product
    from moefuse.backends.triton.runtime.tiles import Tile
    from moefuse.ops.grouped_linear import grouped_linear_reference
    from moefuse.ops.plan import plan_reference

    T, E, K, N, top_k, device = 30, 3, 64, 40, 2, target[1]
    plan = Plan(*plan_reference(torch.randint(0, E + 1, (T, top_k), generator=rng).to(device), E), top_k)
    live = int(plan.offsets[-1])
    stacks = tuple(oracle.normal(rng, E, K, N).to(device) for _ in range(1 + apart))
    a = oracle.normal(rng, T if gather else T * top_k, K * len(stacks)).to(device)
    out = torch.full((T * top_k, N), torch.nan, device=device)
    transposed_product(a, stacks, plan, out, Tile(32, 32, 32, 4, 2, copy_engine=True), gather=gather)
    weight = torch.cat(stacks, 1).transpose(1, 2).double()
    want = grouped_linear_reference(a.double(), weight, None, plan, gather, False)
    oracle.assert_close(out[:live].cpu(), want[:live].cpu(), oracle.GRADIENT, whole=True)


@pytest.mark.parametrize(
    ("trained", "kernels"),
    [
        (("x", "weights"), ["_transposed_kernel", "_derivatives_kernel", "_transposed_kernel", "_slot_sum_kernel"]),
        (("weights",), ["_transposed_kernel", "_derivatives_kernel"]),
        (("down",), ["_derivatives_kernel", "_outer_kernel"]),
        (("gate_up",), ["_transposed_kernel", "_derivatives_kernel", "_outer_kernel"]),
    ],
)
def test_frozen_parts_launch_nothing(target, rng, monkeypatch, trained, kernels):
    from moefuse.backends.triton import combine, experts_backward, grouped_linear_transposed, grouped_outer

    given, rule = make(rng)
    leaves = {k: t.to(target[1]).requires_grad_(k in trained) for k, t in given.items()}
    out = moefuse.experts(**leaves, **rule | {"ids": rule["ids"].to(target[1])}, backend=target[0])
    launched = []
    for module in (combine, experts_backward, grouped_linear_transposed, grouped_outer):
        original = module.launch
        spy = lambda kernel, *a, f=original, **k: (launched.append(kernel.__name__), f(kernel, *a, **k))[1]  # noqa: E731
        monkeypatch.setattr(module, "launch", spy)
    out.sum().backward()
    assert launched == kernels


@pytest.mark.parametrize("format", FORMATS)
def test_transposed_product_of_blocks(target, rng, monkeypatch, format):
    """Rows that fill no tile, a last strip that is not whole where blocks allow it, rows without an expert."""
    from moefuse.backends.triton import grouped_linear_transposed

    backend, device = target
    E, N = 2, 41
    K = {256: 512, 128: 384, 32: 352}[FORMATS[format].values]
    stack = test_training_blocks.weight(rng, format, E, N, K).to(device)
    plan = moefuse.plan(torch.randint(-1, E + 1, (5, 2), generator=rng).to(device), E, backend=backend)
    grad = oracle.normal(rng, 10, N).to(device)
    want = grouped_linear_transposed_reference(grad.double(), stack, plan, True, True)
    for ahead in (False, True):
        monkeypatch.setattr(grouped_linear_transposed, "decodes_first", lambda *_, ahead=ahead: ahead)
        with poisoned():
            got = grouped_linear_transposed_op(backend, grad, stack, plan, True, True)
        oracle.assert_close(got.cpu(), want.cpu(), oracle.GRADIENT, whole=True)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("formats", [("Q8_0", "Q5_1"), ("Q4_0", None), (None, "Q8_0")], ids=str)
def test_transposed_product_of_two_stacks(target, rng, monkeypatch, formats, ahead):
    """Some columns of stacks of other formats, or one of them in numbers; decoded by tiles, or two experts ahead."""
    from moefuse.backends.triton import grouped_linear_transposed
    from moefuse.backends.triton.grouped_linear_transposed import transposed_product

    monkeypatch.setattr(grouped_linear_transposed, "decodes_first", lambda *_: ahead)
    monkeypatch.setattr(grouped_linear_transposed, "DECODED_BYTES", 2 * 80 * 128 * 4)
    (backend, device), E, N, K = target, 3, 40, 384
    stacks = tuple(test_training_blocks.weight(rng, format, E, N, K).to(device) for format in formats)
    plan = moefuse.plan(oracle.distinct_ids(rng, 9, 2, E).to(device), E, backend=backend)
    rows = oracle.normal(rng, 18, 2 * N).to(device)
    out = torch.full((18, K - 256), torch.nan, device=device)
    transposed_product(rows, stacks, plan, out, first=256)
    parts = [
        grouped_linear_transposed_reference(part.double(), test_training_blocks.numbers(stack), plan, False, False)
        for part, stack in zip(rows.chunk(2, 1), stacks, strict=True)
    ]
    oracle.assert_close(out.cpu(), sum(parts)[:, 256:].cpu(), oracle.GRADIENT, whole=True)


@pytest.mark.parametrize(
    ("formats", "options"),
    [
        (("Q8_0", "Q4_1"), {"layout": "interleaved", "activation": "swiglu_oai"}),
        (("Q5_0", None, "Q8_0"), {}),
        ((None, "Q4_0"), {"activation": Activation("gelu", gated=False)}),
    ],
    ids=str,
)
def test_experts_in_blocks(target, rng, monkeypatch, formats, options):
    from moefuse.backends.triton import experts

    made = test_training_blocks.make(rng, formats, 5, **options)
    want = test_training_blocks.exact_gradients(*made)
    test_training_blocks.agree(test_training_blocks.gradients(*made, *target), want)
    monkeypatch.setattr(experts, "slot_columns", lambda *_: 48)
    test_training_blocks.agree(test_training_blocks.gradients(*made, *target), want)


def test_sentinels_duplicates_and_the_memory_of_z(target, rng):
    """Bad ids, an empty expert and a NaN that no expert reads; the pass that frees z may write over it."""
    backend, device = target
    given, rule = make(rng, 6, 5)
    rule["ids"] = torch.tensor([[0, -1], [1, 1], [9, 5], [3, 3], [1, 0], [4, 3]])  # an odd number has an expert
    want = gradients(given, rule, "reference", dtype=torch.float64)
    given["x"][2] = torch.nan
    leaves = {k: t.to(device).requires_grad_() for k, t in given.items()}
    with poisoned():
        out = moefuse.experts(**leaves, **rule | {"ids": rule["ids"].to(device)}, backend=backend)
        d = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
        kept = torch.autograd.grad(out, list(leaves.values()), d, retain_graph=True)
        freed = torch.autograd.grad(out, list(leaves.values()), d)
    assert all(torch.equal(one, other) for one, other in zip(kept, freed, strict=True))
    agree(dict(zip(leaves, kept, strict=True)), want, oracle.GRADIENT)


def test_gradients_against_their_formulas(target, rng):
    test_formulas.test_geglu_gradient(target, rng, 3, 2, 16)
    test_formulas.test_weighted_sum_gradient_of_rows(target, rng, 3, 2, 16)
    test_formulas.test_weighted_sum_gradient_of_weights(target, rng, 3, 2, 16)


def test_steps_of_one_cuda_graph_are_those_of_eager_training(target):
    """Forward, backward and optimizer step in one graph: no host sync, and replays train as calls do."""
    if target[1] != "cuda":
        pytest.skip("CUDA graphs need an NVIDIA GPU")
    torch.manual_seed(0)
    x, wanted = torch.randn(2, 64, 32, device="cuda")

    def start():
        torch.manual_seed(1)
        block = moefuse.nn.MoE(32, 48, 4, moefuse.Routing(top_k=2), norm=True).cuda()
        optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3, capturable=True)

        def step():
            optimizer.zero_grad()
            loss = (block(x) - wanted).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return block, step

    warm = 3
    captured, step = start()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        first = [float(step()) for _ in range(warm)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(40):
        graph.replay()
    assert float(loss) < 0.9 * first[0]
    eager, step = start()
    for _ in range(warm + 40):
        step()
    for name, value in eager.named_parameters():
        assert torch.equal(value, captured.get_parameter(name)), name


@pytest.mark.parametrize(("T", "E", "H"), [(70, 5, 70), (33, 70, 130), (65, 130, 40)])
@pytest.mark.parametrize("norm", [True, False])
def test_a_routers_gradients_of_many_tokens(target, rng, monkeypatch, norm, T, E, H):
    """In the large tiles that many tokens have."""
    from moefuse.backends.triton import gate_backward

    monkeypatch.setattr(gate_backward, "_MANY_TOKENS", 1)
    given = {"x": oracle.normal(rng, T, H), "router": oracle.normal(rng, E, H, scale=H**-0.5)}
    if norm:
        given["norm_weight"] = oracle.uniform(rng, H) + 0.5
    d, d_normed = oracle.normal(rng, T, 3), oracle.normal(rng, T, H)

    def found(backend, device, dtype):
        leaves = {name: t.to(device, dtype).requires_grad_() for name, t in given.items()}
        x, router, *rest = leaves.values()
        options = {"norm_weight": rest[0]} if norm else {}
        weights, _, normed = moefuse.gate(x, router, moefuse.Routing(3), **options, return_normed=True, backend=backend)
        torch.autograd.backward((weights, normed), (d.to(device, weights.dtype), d_normed.to(device, dtype)))
        return {name: leaf.grad for name, leaf in leaves.items()}

    want = found("reference", "cpu", torch.float64)
    with poisoned():
        agree(found(*target, torch.float32), want, oracle.GRADIENT)


@pytest.mark.parametrize("apart", ["router", "norm", "neither"])
@pytest.mark.parametrize("many", [True, False])
def test_a_routers_gradients_in_parts(target, rng, monkeypatch, apart, many):
    """The gradient of the logits as a sum of 16-bit numbers. ``apart`` is in float32: its gradient shows every bit.

    The interpreter has no bfloat16, so there the parts are float16.
    """
    from moefuse.backends.triton import gate_backward
    from moefuse.backends.triton.gate_backward import Parts

    dtype = torch.bfloat16 if target[1] == "cuda" else torch.float16
    if dtype == torch.float16:
        bits = lambda _, results: 2 if all(t is None or t.element_size() == 2 for t in results) else 3  # noqa: E731
        monkeypatch.setattr(Parts, "of", lambda *given: Parts(bits(*given), dtype))
    monkeypatch.setattr(gate_backward, "_MANY_TOKENS", 1 if many else 1000)
    T, E, H = 70, 37, 130
    made = {"x": oracle.normal(rng, T, H), "router": oracle.normal(rng, E, H, scale=H**-0.5)}
    made |= {"norm": oracle.uniform(rng, H) + 0.5, "logit_bias": oracle.normal(rng, E)}
    given = {name: t.to(torch.float32 if name == apart else dtype) for name, t in made.items()}
    d = oracle.normal(rng, T, 3)

    def found(backend, device, wide=None):
        leaves = {name: t.to(device, wide or t.dtype).requires_grad_() for name, t in given.items()}
        x, router, norm, bias = leaves.values()
        rule = moefuse.Routing(3, renormalize=False)
        weights, _ = moefuse.gate(x, router, rule, norm_weight=norm, logit_bias=bias, backend=backend)
        weights.backward(d.to(device, weights.dtype))
        return {name: leaf.grad for name, leaf in leaves.items()}

    want = found("reference", "cpu", torch.float64)
    with poisoned():
        got = found(*target)
    rounded = BF16 if dtype == torch.bfloat16 else F16
    for name, grad in got.items():
        tolerance = oracle.GRADIENT if grad.dtype == torch.float32 else rounded
        oracle.assert_close(grad.cpu(), want[name], tolerance, whole=True)


def test_where_x_begins_does_not_show_in_an_invariant_call(target, rng, monkeypatch):
    """Narrower loads would add a row's squares up in another order: kernels get rows that begin at 16 bytes."""
    from moefuse.backends.triton import gate_backward
    from moefuse.backends.triton.runtime.launch import begins_aligned

    seen = []

    def launch(kernel, grid, *given, **options):
        seen.append([t for t in given if torch.is_tensor(t) and t.shape == (5, 32)])
        return own(kernel, grid, *given, **options)

    own = gate_backward.launch
    monkeypatch.setattr(gate_backward, "launch", launch)
    x = oracle.normal(rng, 5 * 32 + 1)[1:].view(5, 32).to(target[1])
    assert not begins_aligned(x)
    router, norm = (oracle.normal(rng, *shape).to(target[1]) for shape in ((8, 32), (32,)))
    with moefuse.invariant():
        rows = x.requires_grad_()
        weights, _ = moefuse.gate(rows, router, moefuse.Routing(top_k=2), norm_weight=norm, backend="triton")
        weights[:, 0].sum().backward()
    assert any(seen)
    assert all(begins_aligned(t) for tensors in seen for t in tensors)
