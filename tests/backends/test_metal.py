"""The Metal kernels, on a Mac or on the simulator: the case table, edges of size and value, the number of launches.

The simulator runs the very shaders that ship and faults on what a GPU keeps silent about: races, reads out of bounds or
of memory nobody wrote, and threads that miss a barrier.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from bad_indices import check_bad_indices
from metal_target import TARGET, counted, simulated

import moefuse
from moefuse import Activation, Routing
from moefuse.backends import metal
from moefuse.backends.metal import codes, launch, shaders, tiles
from moefuse.quant.blocks import IQ4_CODES, MXFP4_CODES, unpack
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor
from moefuse.testing import cases, inputs
from moefuse.testing.compare import Tolerance, difference
from moefuse.testing.msl import Fault, compile_shader, shuffled
from moefuse.testing.poison import poisoned
from moefuse.testing.random_blocks import random_blocks
from moefuse.testing.strange import strange_cases

BACKEND, DEVICE = TARGET
F32 = Tolerance(1e-6, 1e-6, "f32 inside")
pytestmark = pytest.mark.usefixtures("_metal")


@pytest.fixture(scope="module", autouse=True)
def _metal() -> Iterator[None]:
    with simulated():
        yield


def named(found: list) -> list:
    return [pytest.param(case, dtype, id=f"{case.id}-{str(dtype)[6:]}") for case, dtype in found]


EACH_CASE = [case for case in cases.CASES if cases.dtypes_of(case, BACKEND)]
EACH = [(case, dtype) for case in cases.CASES for dtype in cases.dtypes_of(case, BACKEND)]
#: in float32 these run every way there is, the chosen one among them, in tests of their own
EVERY_WAY = ("experts", "gate")


def passes(case: cases.Case, dtype: torch.dtype, rng: torch.Generator) -> None:
    outcome = cases.run(case, dtype, BACKEND, DEVICE, rng.initial_seed())
    assert outcome.passed, outcome.describe()


@pytest.mark.parametrize(
    ("case", "dtype"), named([row for row in EACH if row[0].op not in EVERY_WAY or row[1] != torch.float32])
)
def test_case(case, dtype, rng) -> None:
    passes(case, dtype, rng)


def of(op: str) -> list:
    return named([(case, dtype) for case, dtype in EACH if case.op == op and dtype == torch.float32])


@pytest.mark.parametrize(("case", "dtype"), of("experts"))
@pytest.mark.parametrize("decode", [0, 10**6], ids=["tiles", "vectors"])
def test_both_ways_to_run_experts(case, dtype, decode, rng, monkeypatch) -> None:
    """Every case as products in tiles and as matrix-vector products, whatever the number of tokens."""
    monkeypatch.setattr(tiles, "DECODE_TOKENS", decode)
    passes(case, dtype, rng)


@pytest.mark.parametrize(("case", "dtype"), of("gate"))
@pytest.mark.parametrize(("decode", "whole"), [(10**6, 10**9), (10**6, 0), (0, 0)], ids=["whole", "vectors", "tiles"])
def test_every_way_to_run_the_gate(case, dtype, decode, whole, rng, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "GATE_DECODE_TOKENS", decode)
    monkeypatch.setattr(tiles, "WHOLE_ROUTER", whole)
    passes(case, dtype, rng)


def normal(rng: torch.Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=rng) * scale).to(dtype).to(DEVICE)


def moved(made: dict) -> dict:
    """Arguments of an op on the device."""
    return {name: cases.map_tensors(value, lambda t: t.to(DEVICE)) for name, value in made.items()}


def layer(T: int, E: int, H: int, I: int, routing: Routing) -> dict:
    """Arguments of `moe`."""
    made = inputs.Inputs(torch.Generator().manual_seed(1), torch.float32)
    return moved(inputs.moe(T, E, H, I, routing)(made))


def close(got: torch.Tensor, want: torch.Tensor, bound: Tolerance = F32) -> None:
    gap = difference(got, want)
    assert gap.within(bound), f"worst {gap.worst:.3g}, rms {gap.rms:.3g}; {gap.where}"


def routed(logits: torch.Tensor, routing: Routing, **more: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids, which must be those of the float64 reference."""
    with poisoned():
        weights, ids = moefuse.route(logits, routing, backend=BACKEND, **more)
    wide = {name: t.cpu().double() for name, t in more.items()}
    want, want_ids = moefuse.route(logits.cpu().double(), routing, backend="reference", **wide)
    assert torch.equal(ids.cpu(), want_ids)
    close(weights, want)
    return weights.cpu(), ids.cpu()


@pytest.mark.parametrize("E", [1, 8, 60, 100, 128, 256, 1000])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 10, 22])
def test_any_number_of_experts_and_slots(E, top_k, rng) -> None:
    """Whatever E is to 32 lanes and to powers of two, and top_k to 8."""
    if top_k > E:
        pytest.skip("no more slots than experts")
    routed(normal(rng, 2, E, scale=2.0), Routing(top_k))
    x, router, norm = normal(rng, 2, 20), normal(rng, E, 20, scale=20**-0.5), normal(rng, 20)
    weights, ids = moefuse.gate(x, router, Routing(top_k), norm_weight=norm, backend=BACKEND)
    wide = [t.cpu().double() for t in (x, router, norm)]
    want, want_ids = moefuse.gate(*wide[:2], Routing(top_k), norm_weight=wide[2], backend="reference")
    logits = (wide[0] * (wide[0].square().mean(-1, keepdim=True) + 1e-6).rsqrt() * wide[2]) @ wide[1].T
    if (logits.sort(-1).values.diff(dim=-1) > 1e-5).all():
        assert torch.equal(ids.cpu(), want_ids)
        close(weights, want, Tolerance(3e-6, 3e-6, "weights of logits that are a float32 product"))


@pytest.mark.parametrize("E", [1, 8, 60, 100, 128, 129, 256, 1000, 1024])
@pytest.mark.parametrize("T", [20, 200], ids=["few", "many"])
def test_any_number_of_experts_in_plan_and_product(E, T, rng) -> None:
    """Plans of one chunk and of several, and the tile schedule found from them; whole numbers, so all is exact."""
    ids = torch.randint(-1, E + 1, (T, 3), generator=rng)
    with poisoned():
        plan = moefuse.plan(ids.to(DEVICE), E, backend=BACKEND)
    want = moefuse.plan(ids, E, backend="reference")
    for name in ("counts", "offsets", "order", "inverse"):
        assert torch.equal(getattr(plan, name).cpu(), getattr(want, name)), name
    x, weight = (torch.randint(-9, 10, shape, generator=rng).float() for shape in ((T, 5), (E, 3, 5)))
    with poisoned():
        y = moefuse.grouped_linear(x.to(DEVICE), weight.to(DEVICE), plan, gather=True, scatter=True, backend=BACKEND)
    assert torch.equal(y.cpu(), moefuse.grouped_linear(x, weight, want, gather=True, scatter=True, backend="reference"))


def test_scale_and_renormalising_are_told_apart(rng) -> None:
    """A uniform scale cancels where the weights are renormalised after it, and only there."""
    logits, scale = normal(rng, 3, 24), torch.full((24,), 3.0, device=DEVICE)
    once, _ = routed(logits, Routing(4), per_expert_scale=scale)
    twice, _ = routed(logits, Routing(4, renormalize_after_scale=True), per_expert_scale=scale)
    close(once.sum(-1), torch.full((3,), 3.0, dtype=torch.float64))
    close(twice.sum(-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.skipif(DEVICE == "mps", reason="a GPU keeps silent about races")
@pytest.mark.parametrize(
    ("barrier", "case"),
    [
        ("threadgroup_barrier(mem_flags::mem_threadgroup);\n    if (sg == 0) {", "gate/plain"),
        ("simdgroup_barrier(mem_flags::mem_threadgroup);\n        keep_groups", "route/groups_max"),
    ],
    ids=["gate", "groups"],
)
def test_a_missing_barrier_is_a_fault(barrier, case, monkeypatch) -> None:
    """Routing must not run before its logits are there; without the barrier the simulator sees the race."""
    break_shaders(monkeypatch, barrier, barrier[barrier.index(";") + 1 :])
    with pytest.raises(Fault):
        cases.run(next(one for one in cases.CASES if one.id == case), torch.float32, BACKEND, DEVICE, seed=3)


@pytest.mark.parametrize("E", [33, 60, 100])
def test_every_expert_has_a_part_in_the_reductions(E) -> None:
    """Each expert in turn towers over the others: a maximum that missed it would overflow."""
    logits = torch.full((E, E), -200.0, device=DEVICE).fill_diagonal_(200.0)
    weights, ids = routed(logits, Routing(1, renormalize=False))
    assert ids.flatten().tolist() == list(range(E))
    assert (weights == 1).all()


@pytest.mark.parametrize("E", [8, 60, 1000])
def test_rows_without_an_answer_have_no_expert(E, rng) -> None:
    logits = normal(rng, 6, E)
    logits[1] = -torch.inf
    logits[2, E - 1] = torch.nan
    logits[3, 0] = torch.inf
    logits[4, 1:] = -torch.inf
    weights, ids = routed(logits, Routing(4))
    assert (ids[1:4] == E).all()
    assert (weights[1:4] == 0).all()
    assert ids[4].tolist() == [0, E, E, E]
    assert weights[4].tolist() == [1.0, 0.0, 0.0, 0.0]
    spoiled = torch.zeros(E, device=DEVICE)
    spoiled[3] = torch.nan
    assert (routed(logits, Routing(2, score="sigmoid"), bias=spoiled)[1] == E).all()


def run_experts(rng: torch.Generator, T: int, E: int, H: int, I: int, ids: torch.Tensor, **more) -> tuple:
    """`experts` on random weights, and the same in float64."""
    dtype = more.pop("dtype", torch.float32)
    x = normal(rng, T, H, scale=more.pop("size", 1.0), dtype=dtype)
    gate_up, down = (
        normal(rng, E, 2 * I, H, scale=H**-0.5, dtype=dtype),
        normal(rng, E, H, I, scale=I**-0.5, dtype=dtype),
    )
    weights = torch.softmax(torch.randn(ids.shape, generator=rng), -1).to(DEVICE)
    with poisoned():
        got = moefuse.experts(x, ids.to(DEVICE), weights, gate_up, down, backend=BACKEND, **more)
    wide = [t.cpu().double() for t in (x, weights, gate_up, down)]
    want = moefuse.experts(wide[0], ids, *wide[1:], backend="reference", **more)
    return got.cpu(), want


@pytest.mark.parametrize("T", [4, 24], ids=["vectors", "tiles"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_duplicates_and_bad_ids(T, kind, rng) -> None:
    """Eight equal ids, ids far outside: each row has its own result and nobody's memory is touched."""
    ids = torch.randint(0, 6, (T, 8), generator=rng).to(kind)
    ids[0] = 3
    ids[1] = -1
    ids[2] = torch.tensor([0, 6, -7, 2**31 - 1, 5, -(2**31), 1, 0])
    got, want = run_experts(rng, T, 6, 24, 16, ids)
    assert (got[1] == 0).all()
    close(got, want, Tolerance(2e-6, 2e-6, "two products and a sum"))


def test_more_rows_than_an_int16_counts(rng) -> None:
    """The last rows of 33,000 come from and go to the right place."""
    S = 33000
    ids = torch.randint(0, 3, (S, 1), generator=rng).to(torch.int32).to(DEVICE)
    plan = moefuse.plan(ids, 3, backend=BACKEND)
    want = moefuse.plan(ids.cpu(), 3, backend="reference")
    for name in ("counts", "offsets", "order", "inverse"):
        assert torch.equal(getattr(plan, name).cpu(), getattr(want, name)), name
    # Whole numbers, so that every sum is exact.
    x, weight = (torch.randint(-9, 10, shape, generator=rng).float().to(DEVICE) for shape in ((S, 4), (3, 2, 4)))
    y = moefuse.grouped_linear(x, weight, plan, gather=True, scatter=True, backend=BACKEND)
    assert torch.equal(y.cpu(), (weight.cpu()[ids.cpu().flatten()] @ x.cpu()[..., None])[..., 0])


def apart(rng: torch.Generator, stride: int, *shape: int) -> torch.Tensor:
    """Random numbers whose first dimension has this stride."""
    padded = normal(rng, shape[0], stride, scale=shape[-1] ** -0.5)
    return padded[:, : math.prod(shape[1:])].unflatten(1, shape[1:])


@pytest.mark.skipif(DEVICE == "mps", reason="reads far outside of its buffers")
@pytest.mark.parametrize("T", [4, 24], ids=["vectors", "tiles"])
@pytest.mark.parametrize("stride", [820, 428], ids=["up", "down"])
def test_offsets_are_64_bit(T, stride, rng, monkeypatch) -> None:
    """A stride with 2**32 added leads astray; in 32 bits it would be the old one, and the result right."""
    x, gate_up, down = normal(rng, T, 24), apart(rng, 820, 5, 32, 24), apart(rng, 428, 5, 24, 16)
    ids, weights = torch.randint(1, 5, (T, 2), generator=rng), torch.rand((T, 2), generator=rng)
    want = moefuse.experts(x.double(), ids, weights.double(), gate_up.double(), down.double(), backend="reference")

    def run() -> float:
        try:
            return difference(moefuse.experts(x, ids, weights, gate_up, down, backend=BACKEND), want).worst
        except Fault:
            return math.inf

    assert run() < 3e-6
    find = launch._kernel

    def lengthened(*key) -> Callable:
        def call(*args, **grid) -> None:
            lists = [[v + 2**32 * (v == stride) for v in a] if isinstance(a, list) else a for a in args]
            find(*key)(*lists, **grid)

        return call

    monkeypatch.setattr(launch, "_kernel", lengthened)
    assert run() > 1e-3


@pytest.mark.skipif(DEVICE != "mps", reason="the simulator would copy four gigabytes")
def test_stacks_over_four_gigabytes(rng) -> None:
    """Experts 2**30 elements apart; what lies between them is never touched."""
    far = 2**30 + 64
    storage = torch.zeros(2 * far + 64, dtype=torch.float16, device=DEVICE)
    weight = storage.as_strided((3, 4, 16), (far, 16, 1))
    weight.copy_(normal(rng, 3, 4, 16, dtype=torch.float16))
    ids = torch.tensor([[2], [0], [1], [2]], dtype=torch.int32, device=DEVICE)
    x = normal(rng, 4, 16, dtype=torch.float16)
    plan = moefuse.plan(ids, 3, backend=BACKEND)
    y = moefuse.grouped_linear(x, weight, plan, gather=True, scatter=True, backend=BACKEND)
    want = (weight.cpu().double()[ids.cpu().flatten()] @ x.cpu().double()[..., None])[..., 0]
    close(y, want, Tolerance(1e-3, 1e-3, "rounded to float16 once"))


def test_a_plan_takes_memory_for_assignments_and_experts_alone(rng) -> None:
    """Not one row of all assignments for each expert."""
    E, T, top_k = 1000, 50, 8
    plan = moefuse.plan(torch.randint(0, E, (T, top_k), generator=rng).to(DEVICE), E, backend=BACKEND)
    held = (plan.counts, plan.offsets, plan.order, plan.inverse)
    assert sum(t.untyped_storage().nbytes() // 4 for t in held) <= 2 * T * top_k + 2 * E + 1


@pytest.mark.parametrize("E", [40, 100, 1000])
def test_ties_go_to_the_lowest_id(E) -> None:
    logits = torch.zeros(2, E, device=DEVICE)
    logits[1, [E - 1, 33, 7]] = 1.0
    logits[0, 5] = -0.0
    _, ids = routed(logits, Routing(10))
    assert ids[0].tolist() == list(range(10))
    assert ids[1].tolist() == [7, 33, E - 1, 0, 1, 2, 3, 4, 5, 6]


def test_sizes_are_checked_before_a_kernel_runs(rng) -> None:
    """A short residual and a stack of too few experts are refused; no kernel reads past their last row."""
    made = cases.Inputs(rng, torch.float32)
    x, ids, weights = made.normal(3, 40).to(DEVICE), made.ids(3, 2, 5).to(DEVICE), made.shares(3, 2).to(DEVICE)
    stacks = made.weight(5, 2 * 37, 40).to(DEVICE), made.weight(5, 40, 37).to(DEVICE)

    def mistakes() -> None:
        with pytest.raises(ValueError, match="residual"):
            moefuse.experts(x, ids, weights, *stacks, residual=x[:2], backend=BACKEND)
        with pytest.raises(ValueError, match="gate_up"):
            moefuse.experts(x, ids, weights, stacks[0][:4], stacks[1], backend=BACKEND)

    assert not counted(mistakes)


@pytest.mark.parametrize("T", [4, 24], ids=["vectors", "tiles"])
def test_large_bfloat16_values_stay_finite(T, rng) -> None:
    """Nothing passes through float16 on the way, and nothing is rounded but the result, in decode or in prefill."""
    ids = torch.randint(0, 4, (T, 2), generator=rng)
    got, want = run_experts(rng, T, 4, 32, 16, ids, dtype=torch.bfloat16, size=3e5, activation="relu")
    assert want.abs().max() > 65504
    close(got, want, Tolerance(2**-8 + 1e-5, 2**-8, "the result is rounded to bfloat16 once"))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "swiglu_oai", "swiglu_clamp"])
def test_far_negative_gates_give_zero(kind) -> None:
    far = torch.tensor([-torch.inf, -1e30, -300.0, -90.0], device=DEVICE)
    for activation in (Activation(kind), Activation(kind, gated=False)):
        up = (torch.ones_like(far),) if activation.gated else ()
        got = moefuse.glu(far, *up, activation, backend=BACKEND)
        assert (got.abs() < 1e-30).all(), got
    large = torch.tensor([3e38, 100.0, 20.0, 1.0], device=DEVICE)
    assert moefuse.glu(large, torch.zeros_like(large), kind, backend=BACKEND).isfinite().all()


def test_gate_proj_is_the_first_half() -> None:
    gate_up = torch.tensor([[1.0, 2.0, 10.0, 20.0]], device=DEVICE)
    assert moefuse.glu(gate_up, "relu", backend=BACKEND).tolist() == [[10.0, 40.0]]
    assert moefuse.glu(gate_up, "relu", layout="interleaved", backend=BACKEND).tolist() == [[2.0, 200.0]]


@pytest.mark.parametrize("case", ["moe/qwen3", "moe/decode", "plan/many", "grouped_outer/up"])
def test_the_same_bits_run_after_run(case) -> None:
    """Whatever the order in which threadgroups, simdgroups and lanes happen to run."""
    found = next(one for one in cases.CASES if one.id == case)
    here = moved(found.inputs(5, torch.float32))
    with shuffled(1):
        first = cases.call_op(found.op, here, BACKEND)
    with shuffled(2):
        second = cases.call_op(found.op, here, BACKEND)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gelu_in_its_tails() -> None:
    """MSL has no erf: ours, against the exact one, relative to the value itself until it is tiny."""
    g = torch.linspace(-12, 12, 4001)
    got = moefuse.glu(g.to(DEVICE), Activation("gelu", gated=False), backend=BACKEND).cpu().double()
    want = torch.tensor([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in g.tolist()], dtype=torch.float64)
    error = (got - want).abs() / want.abs().clamp(min=1e-6)
    assert error.max() < 4e-6, float(g[error.argmax()])


DECODE = next(case for case in cases.CASES if case.id == "moe/decode")


@pytest.mark.parametrize("T", [1, 8])
def test_a_decode_layer_takes_four_launches(T) -> None:
    """Gate with norm and routing, up with activation, down with combine and residual, and the next layer's norm."""
    here = layer(T, 32, 96, 32, Routing(top_k=8))
    found = counted(lambda: moefuse.moe(**here, backend=BACKEND))
    assert found == ["gate_whole", "decode_up", "decode_down", "norm_rows"]
    here["next_norm_weight"] = None
    assert len(counted(lambda: moefuse.moe(**here, backend=BACKEND))) == 3


def test_a_large_router_takes_one_launch_more(monkeypatch) -> None:
    monkeypatch.setattr(tiles, "WHOLE_ROUTER", 0)
    here = moved(DECODE.inputs(1, torch.float32))
    found = counted(lambda: moefuse.moe(**here, backend=BACKEND))
    assert found == ["gate_logits", "gate_route", "decode_up", "decode_down", "norm_rows"]


def test_prefill_launches_do_not_grow_with_tokens() -> None:
    for T in (40, 80):
        here = layer(T, 8, 32, 16, Routing(top_k=2))
        found = counted(lambda here=here: moefuse.moe(**here, backend=BACKEND))
        assert found == [
            "gate_logits_tiled",
            "gate_route",
            "plan_small",
            "grouped_product",
            "grouped_product",
            "combine",
        ]


def test_every_format_has_kernels() -> None:
    assert frozenset(FORMATS) == metal.FORMATS
    text = shaders.text_of("weights")
    for name, numbers in (("IQ4_CODES", IQ4_CODES), ("MXFP4_CODES", MXFP4_CODES)):
        assert f"{name}[16] = {{{', '.join(map(str, numbers))}}}" in text


#: what `decoded` is compiled with besides weights.metal: each thread decodes four values
DECODED = """
kernel void decoded(
    device const uchar* row [[buffer(0)]],
    device float* out [[buffer(1)]],
    constant long& format [[buffer(2)]],
    uint thread_index [[thread_position_in_grid]]) {
    long k = 4 * long(thread_index);
    float4 found = weight4(int(format), row, k);
    for (int i = 0; i < 4; ++i) out[k + i] = found[i];
}
"""
#: float16 infinities and NaN of both signs, zeros, the least
EDGES = (0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0x0000, 0x8000, 0x0001)


def with_edges(rng: torch.Generator, name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Some blocks ``[.., bytes of one]`` with a strange scale, in place; MXFP4's are its exponent's ends.

    FP8's scales are float32. Some of its blocks have a NaN among their codes besides.
    """
    form, flat = FORMATS[name], blocks.view(-1, FORMATS[name].nbytes)
    for place in form.scales:
        chosen = torch.randperm(len(flat), generator=rng)[: len(EDGES)]
        values = torch.tensor(EDGES, dtype=torch.int32).to(torch.int16)[: len(chosen)]
        flat[chosen, place : place + 2] = values.view(torch.uint8).view(-1, 2)
    if name == "MXFP4":
        flat[torch.randperm(len(flat), generator=rng)[:4], 0] = torch.tensor([0, 1, 2, 255], dtype=torch.uint8)
    if name == "FP8":
        odd = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0]).view(torch.uint8).view(-1, 4)
        chosen = torch.randperm(len(flat), generator=rng)
        flat[chosen[:5], :4] = odd
        flat[chosen[5:7], 4 + 77] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
    return blocks


@pytest.mark.skipif(DEVICE == "mps", reason="a GPU may fuse a product with its sum, and flush subnormal numbers")
@pytest.mark.parametrize("name", FORMATS)
def test_random_bytes_decode_bit_for_bit(name, rng) -> None:
    """Every byte is random, so every field is seen with every value; infinite and NaN scales among them."""
    form = FORMATS[name]
    row = with_edges(rng, name, torch.randint(256, (100, form.nbytes), generator=rng, dtype=torch.uint8)).flatten()
    out = torch.full((100 * form.values,), 7.0)
    kernel = compile_shader(launch.source(("weights",), (("WIDE", "false"),)) + DECODED).decoded
    kernel(row, out, codes.BLOCKS[name], threads=(out.numel() // 4,), group_size=(64,))
    want = unpack(row, name)
    assert not want.isfinite().all()
    same = (out.view(torch.int32) == want.view(torch.int32)) | (out.isnan() & want.isnan())
    assert same.all(), (~same).nonzero()[:4]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("T", [3, 12], ids=["vectors", "tiles"])
def test_strange_scales_give_what_the_reference_gives(T, name, rng) -> None:
    """An infinite or NaN scale spoils the results of its own row and expert, and no other."""
    E, H, I = 3, 256, 256

    def stack(strange: int, *shape: int) -> QuantTensor:
        made = random_blocks(name, shape, rng, shape[-1] ** -0.5)
        with_edges(rng, name, made.blocks[strange])
        return made

    def host_and_device(t: torch.Tensor | QuantTensor) -> tuple:
        return t, t.to(DEVICE)

    gate_up, up_here = host_and_device(stack(0, E, 2 * I, H))
    down, down_here = host_and_device(stack(1, E, H, I))
    x, x_here = host_and_device(torch.randn(T, H, generator=rng))
    ids, ids_here = host_and_device(torch.arange(2 * T).view(T, 2) // 2 % E)
    weights, weights_here = host_and_device(torch.rand(T, 2, generator=rng))
    with poisoned():
        got = moefuse.experts(x_here, ids_here, weights_here, up_here, down_here, backend=BACKEND)
        plan = moefuse.plan(ids_here, E, backend=BACKEND)
        rows = moefuse.grouped_linear(x_here, up_here, plan, gather=True, scatter=True, backend=BACKEND)
    host = moefuse.plan(ids, E, backend="reference")
    want = moefuse.experts(x, ids, weights, gate_up, down, backend="reference")
    want_rows = moefuse.grouped_linear(x, gate_up, host, gather=True, scatter=True, backend="reference")
    for have, goal in ((got.cpu(), want), (rows.cpu(), want_rows)):
        finite = goal.isfinite()
        assert torch.equal(have.isfinite(), finite)
        assert torch.equal(have.isposinf(), goal.isposinf())
        assert torch.equal(have.isneginf(), goal.isneginf())
        close(have[finite], goal[finite], Tolerance(2e-5, 2e-5, "sums of terms up to ten times the result"))
        assert finite.any()
        assert not finite.all()


@pytest.mark.parametrize("T", [3, 20], ids=["vectors", "tiles"])
def test_blocks_in_planes_are_put_in_order(T, rng) -> None:
    """The kernels read the file's own order; other arrangements give the same bits."""
    x, ids = torch.randn(T, 256, generator=rng).to(DEVICE), torch.zeros(T, 1, dtype=torch.int32, device=DEVICE)
    up, down = (random_blocks("Q6_K", shape, rng, 0.05).to(DEVICE) for shape in ((1, 512, 256), (1, 256, 256)))
    weights = torch.ones(T, 1, device=DEVICE)
    want = moefuse.experts(x, ids, weights, up, down, backend=BACKEND)
    got = moefuse.experts(x, ids, weights, up.arranged("planes"), down.arranged("planes"), backend=BACKEND)
    assert torch.equal(got, want)


#: kernel -> a change that breaks it, and a case that must see it
BREAKS: dict[str, tuple[str, str, str]] = {
    "route": ("simd_min(best == winner ? at : 0xffffffffu)", "simd_max(best == winner ? at : 0u)", "route/edges"),
    "keep_groups": ("before < int(rule.top_groups)", "before <= int(rule.top_groups)", "route/groups_max"),
    "gate_whole": ("inverse_rms * simd_sum(router", "simd_sum(router", "gate/norm"),
    "gate_logits_tiled": ("a[thread_index / 4 * TILE_K + k] *=", "a[thread_index / 4 * TILE_K + k] +=", "gate/many"),
    "plan_small": ("for (uint i = 0; i < thread_index; ++i)", "for (uint i = 1; i < thread_index; ++i)", "plan/messy"),
    "plan_scan": ("row[i] = carry + before", "row[i] = before", "plan/many"),
    "grouped_product": ("found[1] + int(thread_index)", "found[1] + 1 + int(thread_index)", "grouped_linear/up"),
    "grouped_outer": ("sizes.gather != 0 ? s / sizes.divisor", "sizes.gather != 0 ? s / 1", "grouped_outer/up"),
    "glu": ("clamped_up(in) + 1.0f", "clamped_up(in)", "glu/swiglu_oai"),
    "glu_backward": ("d * found.by_gate_proj", "d + found.by_gate_proj", "glu/silu"),
    "combine": ("sizes.has_inverse != 0 ? long(inverse[s]) : s", "s", "combine/expert_major"),
    "combine_backward": ("unit * along_norm", "along_norm", "combine/everything"),
    "decode_up": ("v = lane == 0 ? v : next_v", "v = next_v", "experts/few"),
    "decode_down": ("sum = lane == 0 ? sum : next_sum", "sum = next_sum", "experts/decode"),
    "norm_rows": ("mine[h] * inverse_rms * float(norm[h])", "mine[h] * inverse_rms", "experts/decode"),
}


def break_shaders(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Compile every shader with a change in it from now on."""
    assert any(old in path.read_text() for path in shaders.HOME.glob("*.metal")), f"no shader has {old!r} any more"
    whole: Callable = launch.compile_shader
    monkeypatch.setattr(launch, "compile_shader", lambda text: whole(text.replace(old, new)))


def survives(name: str) -> bool:
    """Whether a case passes, without a fault."""
    case = next(case for case in cases.CASES if case.id == name)
    try:
        return cases.run(case, torch.float32, BACKEND, DEVICE, seed=3).passed
    except Fault:
        return False


def test_a_broken_kernel_is_seen(monkeypatch) -> None:
    old, new, case = BREAKS["combine"]
    break_shaders(monkeypatch, old, new)
    assert not survives(case)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BREAKS)
def test_every_broken_kernel_is_seen(kernel, monkeypatch) -> None:
    old, new, case = BREAKS[kernel]
    break_shaders(monkeypatch, old, new)
    assert not survives(case)


def test_shaders_are_ascii_and_complete() -> None:
    """torch hands the text over as ASCII; a file that is not installed would be missed on a Mac only."""
    for path in shaders.HOME.glob("*.metal"):
        path.read_bytes().decode("ascii")
    names = {path.stem for path in shaders.HOME.glob("*.metal")}
    assert {"common", "route", "gate", "plan", "combine", "experts_decode", "tiles", "grouped_linear"} <= names


def test_structures_hold_numbers_of_one_kind() -> None:
    """A list of Python ints arrives as 64-bit integers, one of floats as float32; the simulator compares lengths."""
    text = "".join(path.read_text() for path in shaders.HOME.glob("*.metal"))
    structures = [part.split("}")[0] for part in text.split("struct ")[1:]]
    given = [part for part in structures if f"constant {part.split()[0]}&" in text]
    assert given
    for structure in given:
        kinds = {line.split()[0] for line in structure.splitlines()[1:] if line.strip()}
        assert kinds <= {"long"} or kinds <= {"float"} or "simdgroup_float8x8" in kinds, structure


def test_rows_longer_than_a_chunk(rng) -> None:
    """K past the 128 of a chunk: the tile's scratch is then used again and again."""
    made = cases.Inputs(rng, torch.float32)
    plan = moefuse.plan(made.ids(40, 2, 3).to(DEVICE), 3, backend=BACKEND)
    x, weight = made.normal(40, 1100), made.weight(3, 70, 1100)
    options = {"gather": True, "scatter": True}
    got = moefuse.grouped_linear(x.to(DEVICE), weight.to(DEVICE), plan, **options, backend=BACKEND)
    host = cases.map_tensors(plan, lambda t: t.cpu())
    want = moefuse.grouped_linear(x.double(), weight.double(), host, **options, backend="reference")
    assert difference(got, want).within(F32)


def test_bad_indices_are_harmless(monkeypatch) -> None:
    monkeypatch.setattr(tiles, "DECODE_TOKENS", 0)
    check_bad_indices(BACKEND, DEVICE, monkeypatch)


STRANGE = [pytest.param(case, form, id=f"{case.id}-{form}") for case, form in strange_cases(EACH_CASE, one=True)]


@pytest.mark.parametrize(("case", "strange"), STRANGE)
def test_strange_memory(case, strange, rng) -> None:
    outcome = cases.run(case, torch.float32, BACKEND, DEVICE, rng.initial_seed(), strange=strange)
    assert outcome.passed, outcome.describe()


def test_a_layout_means_nothing_where_nothing_is_gated() -> None:
    gate_up, relu = torch.randn(3, 5, device=DEVICE), Activation("relu", gated=False)
    for layout in ("halves", "interleaved"):
        assert torch.equal(moefuse.glu(gate_up, relu, layout=layout, backend=BACKEND), gate_up.relu())
