"""Weights in FP8 on Hopper's tensor cores: who takes them, how activations are rounded, and what the product gives."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import compile_apart, on_hopper
from torch import Tensor

import moefuse
from moefuse import backends
from moefuse.backends.gated import Rows
from moefuse.quant.tensor import QuantTensor
from moefuse.testing import cases
from moefuse.testing.compare import Tolerance, difference
from moefuse.testing.poison import poisoned
from moefuse.testing.random_blocks import random_blocks
from moefuse.types import ACTIVATION_KINDS, Activation, Plan, Stacks

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]

WIDTHS = (32, 64, 128, 256)
#: rows of an expert at which a tile of one of these widths changes its shape, or another tile begins
EDGES = (0, 1, 16, 17, 32, 33, 63, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 224, 225, 256, 257, 288, 289, 545)
SILU = Activation("silu")
#: tensor cores sum 128 products of codes with 14 bits, and a quotient may round to the next code once in a while
AFTER_ROUNDING = {
    torch.bfloat16: Tolerance(6e-3, 4.1e-3, "one rounding of the result, off by up to 2**-8"),
    torch.float16: Tolerance(2e-3, 1e-3, "one rounding of the result, off by up to 2**-11"),
}


def blocks(E: int, N: int, K: int, device: str = "cpu") -> QuantTensor:
    rng = torch.Generator().manual_seed(random.getrandbits(32))
    return random_blocks("FP8", (E, N, K), rng, K**-0.5).to(device)


def in_e4m3(x: Tensor) -> Tensor:
    """What x [.., K] is rounded to: e4m3 with a scale for 128 columns, the largest number 448."""
    runs = x.float().unflatten(-1, (-1, 128))
    most = runs.abs().amax(-1, keepdim=True)
    factor = torch.full_like(most, 448).div(most)  # 448 / most is a reciprocal times 448, and breaks ties otherwise
    codes = torch.where(most > 0, runs * factor, 0).to(torch.float8_e4m3fn)
    return (codes.double() * (most / 448).double()).flatten(-2)


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, on a machine it takes for a Hopper card."""
    found = pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper_fp8")
    monkeypatch.setattr(found, "is_hopper", lambda _: True)
    return found


def rows_of(E: int, N: int, K: int, format: str = "FP8") -> Rows:
    return Rows(torch.zeros(E, N, K // 128 * 132, dtype=torch.uint8), format, planes=True)


def test_it_takes_fp8(fp8: Any) -> None:
    """Any number of rows and of columns; gated columns by eights."""
    gate_up, down, odd = rows_of(2, 256, 384), rows_of(2, 128, 384), rows_of(2, 77, 384)
    x, out = torch.zeros(3, 384, dtype=torch.bfloat16), torch.zeros(6, 128, dtype=torch.bfloat16)
    for layout in ("halves", "interleaved"):
        assert fp8.takes(x, *gate_up.gate_and_up(layout), out, True)
    assert fp8.takes(x, down, down._replace(data=down.data.clone()), out, True), "gate and up in stacks of their own"
    assert fp8.takes(x, odd, odd, out[:, :77], False)
    assert not fp8.takes(x, odd, odd, out[:, :77], True)
    assert fp8.takes(x[:, ::2].repeat(1, 2).half(), down, down, out, False), "rounding reads any strides"


def test_it_leaves_the_rest(fp8: Any) -> None:
    down = rows_of(2, 128, 384)
    x, out = torch.zeros(3, 384, dtype=torch.bfloat16), torch.zeros(6, 128, dtype=torch.bfloat16)
    exact = down._replace(exact=True)
    assert not fp8.takes(x, exact, exact, out, False)
    assert not fp8.takes(x, down, exact, out, True)
    assert not fp8.takes(x.float(), down, down, out.float(), False)
    assert not fp8.takes(x, down, down, out[:0], False)
    assert not fp8.takes(x, down._replace(format="Q8_0"), down._replace(format="Q8_0"), out, False)
    assert not fp8.takes(x, down, rows_of(2, 256, 384), out, True), "one half and a stack of its own"
    assert not backends.invariantly(fp8.takes)(x, down, down, out, False), "what rounds serves no invariant call"


def test_tiles_are_as_wide_as_experts_have_rows() -> None:
    from moefuse.backends.triton.runtime.tiles import SWAP_AB_STAGES_FP8, swap_ab_fp8_width

    assert tuple(SWAP_AB_STAGES_FP8) == WIDTHS
    assert {swap_ab_fp8_width(load) for load in (0.1, 1, 30, 70, 100, 200, 5000)} == set(WIDTHS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
@pytest.mark.parametrize("gather", [True, False])
def test_scales_of_rounded_rows(gather: bool, target: tuple[str, str]) -> None:
    """In the plan's order; the interpreter does not round to codes as cards do, so those are looked at on a card."""
    fp8 = pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper_fp8")
    T, K, top_k = random.randrange(1, 40), 128 * random.randrange(1, 8), random.randrange(1, 4)
    x = torch.randn(T, 2 * K, device=target[1], dtype=torch.bfloat16)[:, ::2]
    x[0], x[T // 2, 1], x[T - 1, K - 1] = 0, torch.inf, torch.nan
    order = torch.randperm(T * top_k, dtype=torch.int32).to(target[1])
    S = T * top_k if gather else T
    with poisoned():
        codes, scales = fp8.rounded(x, order if gather else None, S)
    rows = x[(order // top_k).long()] if gather else x
    want = rows.float().unflatten(1, (-1, 128)).abs().amax(-1) / 448
    assert codes.shape == (S, K)
    torch.testing.assert_close(scales[:, :S].T, want, equal_nan=True, rtol=1e-6, atol=0)
    numbers = codes.float().unflatten(1, (-1, 128))
    assert (numbers[want == 0] == 0).all()


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from moefuse.backends.triton.activations import ACTIVATIONS
from moefuse.backends.triton.grouped_linear_hopper_fp8 import Form, _swap_ab_fp8_kernel
from moefuse.backends.triton.runtime.tiles import SWAP_AB_STAGES_FP8

def desc(dtype, *block):
    layout = NVMMASharedLayout(128, 8, rank=len(block))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>".replace(" ", "")

for GATED, WIDTH, K in VARIANTS:
    print(f"GATED={GATED} WIDTH={WIDTH} K={K}", flush=True)
    form = Form(256, K, GATED, False, 132, WIDTH, SWAP_AB_STAGES_FP8[WIDTH])
    known = dict(FORM=form, ACT=ACTIVATIONS["silu"] if GATED else None)
    if not GATED:
        known.update(z_ptr=None)
    codes = "fp8e4nv"
    types = dict(out_ptr="*bf16", z_ptr="*bf16", tiles_ptr="*i32", w_ptr="*u8", u_ptr="*u8", scales_ptr="*fp32")
    types |= dict(pitch="i32", numbers=("fp32", "fp32"), blocks_at=("i32", "i32", ("i32",) * 4))
    types |= dict(x_desc=desc(codes, WIDTH, 128), half_desc=desc(codes, WIDTH // 2, 128))
    box = (1, 8, 2, 8, 128) if GATED else (1, 128, 128)
    types |= dict(tail_desc=desc(codes, 32, 128), w_desc=desc(codes, *box))
    names = [p.name for p in _swap_ab_fp8_kernel.params]
    signature = {name: "constexpr" if name in known else types[name] for name in names}
    constants = {(i,): known[name] for i, name in enumerate(names) if name in known}
    whole = [name for name in names if name.endswith("_ptr")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole if name not in known}
    source = GluonASTSource(_swap_ab_fp8_kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    assert made.metadata.shared <= 227 * 1024, made.metadata.shared
    assert ".e4m3.e4m3" in made.asm["ptx"]
print("all", flush=True)
"""

ALL_VARIANTS = [(gated, width, 512 if width > 32 else 128) for gated in (True, False) for width in WIDTHS]


@pytest.mark.parametrize(
    "variants",
    [[(True, 256, 512), (False, 32, 128)], pytest.param(ALL_VARIANTS, marks=pytest.mark.slow)],
    ids=["some", "every"],
)
def test_it_compiles_without_a_card(variants: list[tuple[bool, int, int]], tmp_path: Path) -> None:
    pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper_fp8")
    compile_apart(f"VARIANTS = {variants}\n{_COMPILE}", tmp_path)


class Routed:
    """Experts with rows of all sizes, in any order, and slots that have none."""

    def __init__(self, top_k: int = 2) -> None:
        rows = random.sample(EDGES, len(EDGES))
        self.live, self.top_k, self.E = sum(rows), top_k, len(rows)
        self.S = self.live + -self.live % top_k + 40 * top_k
        counts = torch.tensor(rows, dtype=torch.int32, device="cuda")
        offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
        order = torch.randperm(self.S, dtype=torch.int32, device="cuda")
        self.plan = Plan(counts, offsets, order, order.argsort().int(), top_k, trusted=True)

    def check(
        self,
        stack: QuantTensor,
        activation: Activation | None = None,
        *,
        gather: bool = False,
        width: int = 256,
        up: QuantTensor | None = None,
        layout: str = "halves",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """A product against float64 with what x is rounded to, and with x; other rows stay as they were."""
        from moefuse.backends.triton import grouped_linear_hopper_fp8 as fp8
        from moefuse.backends.triton.grouped_linear import up_weights
        from moefuse.backends.triton.plan import TokenTiles
        from moefuse.ops.glu import glu_reference
        from moefuse.ops.grouped_linear import grouped_linear_reference

        gated = activation is not None and activation.gated
        weights = up_weights(Stacks(stack, up, stack, layout=layout), gated)
        columns = stack.shape[1] // (1 + (gated and up is None))
        x = (torch.randn(self.S // self.top_k if gather else self.S, stack.shape[2], device="cuda") * 3).to(dtype)
        whole = torch.full((self.S + 300, columns), torch.nan, dtype=dtype, device="cuda")
        before = torch.full((self.S, 2 * columns), torch.nan, dtype=dtype, device="cuda") if gated else None
        out, tiles = whole[: self.S], TokenTiles(self.plan.offsets, self.S)
        assert fp8.takes(x, weights.w, weights.u, out, gated)
        options = {"gather": gather, "activation": activation, "width": width}
        fp8.swap_ab_fp8(x, weights.w, weights.u, tiles, self.plan.order, out=out, z=before, **options)

        def product(stack: QuantTensor, x: Tensor) -> Tensor:
            numbers = stack.dequantize(torch.float64)
            return grouped_linear_reference(x, numbers, None, self.plan, gather, False)

        for rounded, bound in ((in_e4m3(x), AFTER_ROUNDING[dtype]), (x.double(), None)):
            z = product(stack, rounded)
            second = None if up is None else product(up, rounded)
            want = z if activation is None else glu_reference(z, second, activation, layout)
            limit = bound or cases.tolerance_of("experts" if gated else "linear", "out", x, dtype, e4m3=True)
            error = difference(whole[: self.live], want[: self.live])
            assert error.within(limit), error
        if before is not None:
            z = product(stack, in_e4m3(x))
            halves = (z, product(up, in_e4m3(x))) if up is not None else z.chunk(2, 1)
            if layout == "interleaved":
                halves = z[:, ::2], z[:, 1::2]
            error = difference(before[: self.live], torch.cat(halves, 1)[: self.live])
            assert error.within(AFTER_ROUNDING[dtype]), error
            assert before[self.live :].isnan().all()
        assert whole[self.live :].isnan().all()


@on_hopper
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", AFTER_ROUNDING)
def test_products(dtype: torch.dtype, width: int) -> None:
    routed = Routed()
    routed.check(blocks(routed.E, 256, 512, "cuda"), width=width, dtype=dtype)
    routed.check(blocks(routed.E, 256, 512, "cuda"), SILU, gather=True, width=width, dtype=dtype)
    for columns, K in ((2, 128), (77, 256), (130, 384), (200, 640)):
        routed.check(blocks(routed.E, columns, K, "cuda"), width=width, dtype=dtype)
    for columns, K in ((8, 128), (72, 256), (200, 384)):
        routed.check(blocks(routed.E, 2 * columns, K, "cuda"), SILU, gather=True, width=width, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_activations(kind: str) -> None:
    routed = Routed()
    routed.check(blocks(routed.E, 256, 256, "cuda"), Activation(kind), gather=True, width=64)


@on_hopper
def test_gate_and_up_wherever_they_lie() -> None:
    """By turns, in two stacks, and in two of which the second comes first in memory."""
    routed = Routed(top_k=1)
    routed.check(blocks(routed.E, 256, 384, "cuda"), SILU, gather=True, layout="interleaved", width=64)
    both = torch.empty(2, routed.E, 128, 384 // 128 * 132, dtype=torch.uint8, device="cuda")
    for half in both:
        half.copy_(blocks(routed.E, 128, 384, "cuda").blocks)
    first, second = (QuantTensor(half, "FP8", arrangement="planes") for half in both)
    routed.check(first, SILU, gather=True, up=second, width=128)
    routed.check(second, SILU, gather=True, up=first, width=128)


@on_hopper
@pytest.mark.parametrize("dtype", AFTER_ROUNDING)
def test_every_number_is_rounded_to_the_nearest_code(dtype: torch.dtype) -> None:
    from moefuse.backends.triton import grouped_linear_hopper_fp8 as fp8

    x = (torch.randn(300, 512, device="cuda") * torch.logspace(-30, 4, 300, device="cuda")[:, None]).to(dtype)
    codes, scales = fp8.rounded(x, None, 300)
    got = codes.double().unflatten(1, (-1, 128)) * scales[:, :300].T.double()[:, :, None]
    runs = x.double().unflatten(1, (-1, 128))
    most = runs.abs().amax(-1, keepdim=True)
    bound = (runs.abs() / 16).maximum(most / 448 / 2**10) * (1 + 1e-6)
    assert ((got - runs).abs() <= bound).all()


@on_hopper
@pytest.mark.parametrize("T", [5, 16, 100, 700])
def test_experts(T: int) -> None:
    """Rounded by default; exactly when asked, in an invariant call, and for the few tokens of a decode step."""
    E, H, I, top_k = 8, 512, 256, 2
    gate_up, down = blocks(E, 2 * I, H, "cuda"), blocks(E, H, I, "cuda")
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(T, E, device="cuda").topk(top_k).indices.int()
    weights = torch.rand(T, top_k, device="cuda")
    numbers = (stack.dequantize(torch.float64) for stack in (gate_up, down))
    want = moefuse.experts(x.double(), ids, weights.double(), *numbers, backend="reference")
    exact = cases.tolerance_of("experts", "out", x, x.dtype, blocks=True)
    with poisoned():
        rounded = moefuse.experts(x, ids, weights, gate_up, down)
        few = moefuse.experts(x[:3], ids[:3], weights[:3], gate_up, down)
        asked = moefuse.experts(x, ids, weights, gate_up.exactly(), down.exactly())
        with moefuse.invariant():
            invariant = moefuse.experts(x, ids, weights, gate_up, down)
    error = difference(rounded, want)
    assert error.within(cases.tolerance_of("experts", "out", x, x.dtype, e4m3=True)), error
    assert error.rms > 2 * exact.rms, "these were to be rounded"
    for got in (asked, invariant, few):
        error = difference(got, want[: len(got)])
        assert error.within(exact), error


@on_hopper
def test_what_is_no_number_stays_so() -> None:
    """In a token, in a weight, in a scale; other tokens do not see it."""
    E, H, I, T = 4, 256, 128, 64
    gate_up, down = blocks(E, 2 * I, H, "cuda"), blocks(E, H, I, "cuda")
    x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
    ids = (torch.arange(T, device="cuda", dtype=torch.int32) % E)[:, None]
    weights = torch.ones(T, 1, device="cuda")
    x[3, 5], x[7, 9], x[9] = torch.nan, torch.inf, 0
    got = moefuse.experts(x, ids, weights, gate_up, down)
    assert got[3].isnan().all()
    assert not got[7].isfinite().any()
    assert (got[9] == 0).all()
    assert got[[i for i in range(T) if i not in (3, 7)]].isfinite().all()
    x = torch.randn_like(x)
    flat = down.blocks.view(E, -1)
    flat[1, 5 * I + 2] = 0x7F  # a code of row 5
    scales = flat[:, H * I :].view(torch.float32)
    scales[2, 6] = math.nan
    got = moefuse.experts(x, ids, weights, gate_up, down)
    for expert, row in ((1, 5), (2, 6)):
        assert got[expert::E, row].isnan().all()
    assert int(got.isnan().sum()) == 2 * T // E


@on_hopper
def test_in_a_graph_and_with_the_same_bits() -> None:
    E, H, I, top_k, T = 8, 512, 256, 2, 64
    gate_up, down = blocks(E, 2 * I, H, "cuda"), blocks(E, H, I, "cuda")
    x, weights = torch.randn(T, H, device="cuda", dtype=torch.bfloat16), torch.rand(T, top_k, device="cuda")
    ids = torch.rand(T, E, device="cuda").topk(top_k).indices.int()

    def run() -> Tensor:
        return moefuse.experts(x, ids, weights, gate_up, down)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        x.normal_()
        ids.copy_(torch.rand(T, E, device="cuda").topk(top_k).indices)
        graph.replay()
        assert torch.equal(captured, run())


@on_hopper
def test_gradients_pass_through_fp8() -> None:
    """The forward rounds, the backward does not; both are near the reference's."""
    E, H, I, top_k, T = 8, 512, 256, 2, 200
    gate_up, down = blocks(E, 2 * I, H, "cuda"), blocks(E, H, I, "cuda")
    ids = torch.rand(T, E, device="cuda").topk(top_k).indices.int()
    x, weights = torch.randn(T, H, device="cuda", dtype=torch.bfloat16), torch.rand(T, top_k, device="cuda")
    numbers = [stack.dequantize(torch.float64) for stack in (gate_up, down)]
    results = []
    for values, stacks, backend in ((x, (gate_up, down), None), (x.double(), numbers, "reference")):
        leaf, share = values.clone().requires_grad_(), weights.to(values.dtype).clone().requires_grad_()
        if backend is None:
            share = weights.clone().requires_grad_()
        out = moefuse.experts(leaf, ids, share, *stacks, backend=backend)
        out.backward(torch.ones_like(out))
        results.append((leaf.grad, share.grad))
    for got, want in zip(*results, strict=True):
        assert got is not None
        assert want is not None
        error = difference(got, want, whole=True)
        assert error.rms < 8e-2, error
