"""The product for many rows per expert on Hopper: how rows are cut into tiles, who takes it, and what it gives."""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import HOPPER, compile_apart, on_hopper
from torch import Tensor

import moefuse
from moefuse import Routing, backends
from moefuse.backends.gated import Rows
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor
from moefuse.testing import cases
from moefuse.testing.compare import Tolerance, difference
from moefuse.testing.poison import poisoned
from moefuse.testing.random_blocks import random_blocks
from moefuse.types import ACTIVATION_KINDS, Activation, Plan, Stacks

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]

WIDTHS = (64, 128, 256)
#: those of the product that decodes for itself
BLOCK_WIDTHS = (32, 128)
#: rows of an expert at which a tile of one of these widths changes its shape, or another tile begins
EDGES = (
    *(0, 1, 32, 33, 63, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 224, 225, 255, 256, 257, 287, 288, 289),
    *(513, 544, 545, 800, 801, 1000),
)
H, I, TOP_K = 1024, 512, 2
SILU = Activation("silu")
ONE_ROUNDING = {
    torch.bfloat16: Tolerance(4.1e-3, 4.1e-3, "one rounding, off by up to 2**-8; sums are float32"),
    torch.float16: Tolerance(5.4e-4, 5.4e-4, "one rounding, off by up to 2**-11; sums are float32"),
}


def offsets_of(rows: list[int]) -> list[int]:
    return [0, *itertools.accumulate(rows)]


def cut(offsets: list[int], width: int) -> list[list[int]]:
    """Expert, first and stop of tiles of ``width`` rows, the last of up to 32 more; by quarters, most rows first."""
    tiles = []
    for expert, (start, stop) in enumerate(itertools.pairwise(offsets)):
        while stop - start > width + 32:
            tiles.append([expert, start, start + width])
            start += width
        if stop > start:
            tiles.append([expert, start, stop])
    return sorted(tiles, key=lambda tile: -min(-(-(tile[2] - tile[1]) * 4 // width), 5))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
@pytest.mark.parametrize("width", [32, *WIDTHS])
@pytest.mark.parametrize("rows", [EDGES, *((r,) for r in EDGES), (0,) * 5, (0, 0, 3000, 0), (1,) * 1024, None])
def test_rows_are_cut_into_tiles(rows: tuple[int, ...] | None, width: int, target: tuple[str, str]) -> None:
    from moefuse.backends.triton.plan import TokenTiles

    for _ in range(1 if rows else 5):
        some = [
            random.choice((0, random.randrange(40), random.randrange(700))) for _ in range(random.randrange(1, 200))
        ]
        offsets = offsets_of(list(rows or some))
        with poisoned():
            made = TokenTiles(torch.tensor(offsets, dtype=torch.int32, device=target[1]), offsets[-1])
            table = made.of(width).tolist()
        tiles = cut(offsets, width)
        assert table[0][0] == len(tiles)
        assert table[1 : 1 + len(tiles)] == tiles
        assert made.of(width) is made.of(width), "the products of one call share it"
        if not tiles:
            assert table[1] == [0, 0, 1], "who reads ahead must stay inside of the plan"


@pytest.mark.parametrize("width", [32, *WIDTHS])
def test_no_plan_has_more_tiles_than_there_is_room_for(width: int) -> None:
    """The worst remainder: a last tile of 33 rows, for each expert."""
    for rows in (1, 33, width + 33, 2 * width + 33):
        assert len(cut(offsets_of([rows] * 50), width)) <= rows * 50 // width + 50


def test_tiles_are_as_wide_as_experts_have_rows() -> None:
    from moefuse.backends.triton.runtime.tiles import SWAP_AB_STAGES, swap_ab_width

    assert [swap_ab_width(load) for load in (1, 64, 80, 81, 128, 200, 5000)] == [64, 64, 64, 128, 128, 256, 256]
    assert tuple(SWAP_AB_STAGES) == WIDTHS


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, on a machine it takes for a Hopper card."""
    found = pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper")
    monkeypatch.setattr(found, "is_hopper", lambda _: True)
    return found


class Offered:
    """What `takes` is asked about; changed one thing at a time."""

    def __init__(self, E: int = 2, N: int = 128, K: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        self.x, self.out = torch.zeros(200 * E, K, dtype=dtype), torch.zeros(200 * E, N, dtype=dtype)
        self.gate_up, self.down = torch.zeros(E, 2 * N, K, dtype=dtype), torch.zeros(E, N, K, dtype=dtype)

    def gated(self) -> tuple[Tensor, Rows, Rows, Tensor, bool]:
        return self.x, *Rows(self.gate_up).gate_and_up("halves"), self.out, True

    def plain(self) -> tuple[Tensor, Rows, Rows, Tensor, bool]:
        return self.x, Rows(self.down), Rows(self.down), self.out, False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_takes_whole_tiles(hopper: Any, dtype: torch.dtype) -> None:
    assert hopper.takes(*Offered(dtype=dtype).gated())
    assert hopper.takes(*Offered(dtype=dtype).plain())
    assert hopper.takes(*Offered(N=192).gated()), "gate and up rows fill a tile together"


def test_it_leaves_the_rest(hopper: Any) -> None:
    from moefuse.backends.triton.runtime.tiles import SWAP_AB_ROWS

    for other in (Offered(dtype=torch.float32), Offered(K=96), Offered(N=96)):
        assert not hopper.takes(*other.gated())
        assert not hopper.takes(*other.plain())
    assert not hopper.takes(*Offered(N=192).plain())
    few = Offered()
    few.out = few.out[: 2 * SWAP_AB_ROWS]
    assert not hopper.takes(*few.gated())


def test_it_leaves_what_lies_otherwise(hopper: Any) -> None:
    given = Offered()
    x, w, u, out, _ = given.gated()
    stack, down = Rows(given.gate_up), given.down
    assert not hopper.takes(x, u, w, out, True), "up rows first"
    assert not hopper.takes(x, *stack.gate_and_up("interleaved"), out, True), "interleaved"
    assert not hopper.takes(x, Rows(w.data.clone()), Rows(u.data.clone()), out, True), "in stacks of their own"
    assert hopper.takes(x, w, w, out, False), "rows of a larger stack"
    apart = torch.zeros(2, 129 * 64 - 32, dtype=x.dtype)[:, : 128 * 64].unflatten(1, (128, 64))
    assert not hopper.takes(x, Rows(apart), Rows(apart), out, False), "experts half a row apart"
    assert not hopper.takes(x, Rows(down.mT.contiguous().mT), u, out, False), "columns first"
    for odd in (
        torch.zeros(400, 65, dtype=x.dtype)[:, :64],
        torch.zeros(400 * 64 + 1, dtype=x.dtype)[1:].view(400, 64),
    ):
        assert not hopper.takes(odd, w, u, out, True)
    assert not hopper.takes(x, Rows(down.half()), Rows(down.half()), out, False)


def test_rows_of_all_experts_have_numbers_of_32_bits(hopper: Any) -> None:
    assert hopper.fits(1000, 1024, 2**20, 64, 2, False, False)
    assert not hopper.fits(1000, 1024, 2**21, 64, 2, False, False)


def test_it_takes_blocks(hopper: Any) -> None:
    gate_up, down = (Rows(torch.zeros(2, N, 144, dtype=torch.uint8), "Q4_K", planes=True) for N in (256, 128))
    x, out = torch.zeros(400, 256, dtype=torch.bfloat16), torch.zeros(400, 128, dtype=torch.bfloat16)
    own = down._replace(data=down.data.clone())
    for layout in ("halves", "interleaved"):
        assert hopper.takes(x, *gate_up.gate_and_up(layout), out, True)
    assert hopper.takes(x, down, own, out, True), "gate and up rows in stacks of their own"
    assert hopper.takes(x, down, down, out, False)
    assert not hopper.takes(x, gate_up, down, out, True), "one half and a stack of its own"
    assert not hopper.takes(x, down, own._replace(format="Q5_K"), out, True), "two formats"
    assert not hopper.takes(x[:4], down, down, out[:4], False), "decoding needs more rows"
    exact = down._replace(exact=True)
    assert hopper.takes(x[:4], exact, exact, out[:4], False), "unless few rows may not be rounded"


def test_codes_that_are_looked_up_are_decoded_ahead_of_few_rows(hopper: Any) -> None:
    for format in FORMATS:
        few = hopper.decodes_ahead(32, 768, format)
        assert few == (format in ("IQ4_NL", "IQ4_XS", "MXFP4")), format
        assert hopper.decodes_ahead(100, 768, format), format


def test_another_machine_has_no_such_kernel() -> None:
    found = pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper")
    assert not found.is_hopper(torch.device("cpu"))
    assert HOPPER or not found.takes(*Offered().plain())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
@pytest.mark.parametrize("change", ["", "bias", "scatter", "fill", "z", "no gluon"])
def test_what_only_the_other_kernel_does(
    hopper: Any, change: str, target: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moefuse.backends.triton import grouped_linear
    from moefuse.backends.triton.grouped_linear import Weights, product
    from moefuse.backends.triton.runtime.tiles import Tile

    calls = []
    monkeypatch.setattr(hopper, "takes", lambda *_: True)
    monkeypatch.setattr(hopper, "swap_ab_product", lambda *_, **__: calls.append("swapped"))
    if change == "no gluon":
        monkeypatch.setattr(grouped_linear, "hopper", None)
    x, w = torch.randn(8, 32, device=target[1]), torch.randn(2, 16, 32, device=target[1])
    offsets, order = torch.tensor([0, 3, 8], dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    plan = Plan(*(t.to(target[1]) for t in (offsets.diff(), offsets, order, order)), 1)
    out = torch.full((8, 16), torch.nan, device=target[1])
    weights = Weights.of(w, torch.zeros(2, 16, device=target[1]) if change == "bias" else None)
    z = torch.empty_like(out) if change == "z" else None
    tile = Tile(16, 16, 32, 4, 1)
    product(x, weights, plan, None, out, tile, scatter=change == "scatter", fill=change == "fill", z=z)
    assert len(calls) == (change in ("", "fill", "scatter"))
    assert change != "fill" or not out.any(), "who multiplies leaves rows without an expert as they are"


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from moefuse.backends.triton.activations import ACTIVATIONS
from moefuse.backends.triton.formats.blocks import DECODERS
from moefuse.backends.triton.formats.numbers import box_bytes
from moefuse.backends.triton.formats.blocks import base_bits, high_bits
from moefuse.backends.triton.grouped_linear_hopper import _swap_ab_kernel
from moefuse.backends.triton.grouped_linear_hopper_blocks import _swap_ab_blocks_kernel
from moefuse.backends.triton.grouped_linear_hopper_transposed import _turned_kernel
from moefuse.backends.triton.hopper import Form
from moefuse.backends.triton.runtime.tiles import SWAP_AB_RINGS, SWAP_AB_STAGES

def desc(dtype, *block, bits=16):
    width = block[-1] * bits // 8
    layout = NVMMASharedLayout(width if width >= 32 else 0, bits, rank=len(block))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>".replace(" ", "")

def compiled(kernel, signature, constants, aligned, gather):
    source = GluonASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    assert made.metadata.shared <= 227 * 1024, made.metadata.shared
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert ("cp.async.cg" in made.asm["ptx"]) == gather, "gathered rows are copied 16 bytes at a time"

for GATED, BLOCKS, WIDTH, SELF_DECODED in VARIANTS:
    dtype = "bf16" if GATED else "fp16"
    print(f"GATED={GATED} {dtype} BLOCKS={BLOCKS} WIDTH={WIDTH} SELF_DECODED={SELF_DECODED}", flush=True)
    kernel = _swap_ab_blocks_kernel if SELF_DECODED else _swap_ab_kernel
    stages, slots = SWAP_AB_RINGS[WIDTH] if SELF_DECODED else (SWAP_AB_STAGES[WIDTH] - (BLOCKS is not None), 0)
    form = Form(256, 512, 256, GATED, GATED, 2, 132, WIDTH, stages, False, not GATED and WIDTH != 64,
                BLOCKS is not None and not SELF_DECODED)
    decode = None if BLOCKS is None else DECODERS[BLOCKS]
    known = dict(FORM=form, ACT=ACTIVATIONS["silu"] if GATED else None, DECODE=decode, SLOTS=slots)
    if BLOCKS is None:
        known.update(w_ptr=None, u_ptr=None, u_desc=None, blocks_at=(0, 0, (0, 0, 0, 0)))
    if GATED:
        known.update(x_desc=None, half_desc=None, tail_desc=None)
    if not GATED or BLOCKS:
        known.update(z_ptr=None)
    types = dict(x_ptr="*" + dtype, out_ptr="*" + dtype, z_ptr="*" + dtype, tiles_ptr="*i32", order_ptr="*i32")
    types |= dict(numbers=("fp32", "fp32"))
    types |= dict(x_desc=desc(dtype, WIDTH, 64), half_desc=desc(dtype, WIDTH // 2, 64), tail_desc=desc(dtype, 32, 64))
    box = box_bytes(decode)
    types |= dict(w_ptr="*u8", u_ptr="*u8", u_desc=desc("u8", 1, 64, box, bits=8))
    types |= dict(blocks_at=("i32", "i32", ("i32",) * 4))
    plain = desc(dtype, 1, 8, 2, 8, 64) if GATED else desc(dtype, 128, 64)
    types |= dict(w_desc=plain if BLOCKS is None else types["u_desc"])
    if SELF_DECODED:
        high = 64 * high_bits(decode) // base_bits(decode)
        box = desc("u8", 1, 32, 64, bits=8)
        high_box = desc("u8", 1, 32, high, bits=8)
        types |= dict(w_desc=box, u_desc=box, w_high_desc=high_box, u_high_desc=high_box)
        if not high:
            known.update(w_high_desc=None, u_high_desc=None)
    names = [p.name for p in kernel.params]
    known = {name: value for name, value in known.items() if name in names}
    signature = {name: "constexpr" if name in known else types[name] for name in names}
    constants = {(i,): known[name] for i, name in enumerate(names) if name in known}
    whole = [name for name in names if name.endswith("_ptr")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole if name not in known}
    compiled(kernel, signature, constants, aligned, GATED)

for BLOCKS, GATHER, WIDTH in TURNED:
    dtype = "bf16" if GATHER else "fp16"
    print(f"turned {dtype} BLOCKS={BLOCKS} WIDTH={WIDTH} GATHER={GATHER}", flush=True)
    decode = DECODERS[BLOCKS]
    form = Form(512, 256, 0, False, GATHER, 2, 132, WIDTH, SWAP_AB_STAGES[WIDTH] - 1, True, not GATHER, True)
    known = dict(FORM=form, DECODE=decode)
    if GATHER:
        known.update(x_desc=None, half_desc=None, tail_desc=None)
    types = dict(x_ptr="*" + dtype, out_ptr="*" + dtype, tiles_ptr="*i32", order_ptr="*i32", w_ptr="*u8")
    types |= dict(x_desc=desc(dtype, WIDTH, 64), half_desc=desc(dtype, WIDTH // 2, 64), tail_desc=desc(dtype, 32, 64))
    types |= dict(w_desc=desc("u8", 1, 64, 8 * base_bits(decode), bits=8), blocks_at=("i64", "i32", "i32", "i32"))
    names = [p.name for p in _turned_kernel.params]
    signature = {name: "constexpr" if name in known else types[name] for name in names}
    constants = {(i,): known[name] for i, name in enumerate(names) if name in known}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name.endswith("_ptr")}
    compiled(_turned_kernel, signature, constants, aligned, GATHER)
print("all", flush=True)
"""


Variant = tuple[bool, str | None, int, bool]
#: up or down, the format of the weights, width, and whether who multiplies decodes
ALL_VARIANTS: list[Variant] = [
    *itertools.product((True, False), (None, *FORMATS), WIDTHS, (False,)),
    *((i % 2 == 0, format, 32, True) for i, format in enumerate(FORMATS)),
    *((i % 2 == 1, format, 128, True) for i, format in enumerate(("Q4_K", "Q6_K", "Q8_0"))),
]
SOME_VARIANTS: list[Variant] = [
    *((True, None, 256, False), (False, None, 64, False), (True, "Q4_K", 128, False), (False, "Q6_K", 256, False)),
    *((True, "Q4_K", 32, True), (False, "Q6_K", 32, True)),
]


#: of the transposed product: format, whether rows are gathered, width
ALL_TURNED = [(format, i % 2 == 0, WIDTHS[i % 3]) for i, format in enumerate(FORMATS)]
SOME_TURNED = [("Q4_K", False, 256), ("Q8_0", True, 64)]


@pytest.mark.parametrize(
    ("variants", "turned"),
    [(SOME_VARIANTS, SOME_TURNED), pytest.param(ALL_VARIANTS, ALL_TURNED, marks=pytest.mark.slow)],
    ids=["some", "every"],
)
def test_it_compiles_without_a_card(
    variants: list[Variant], turned: list[tuple[str, bool, int]], tmp_path: Path
) -> None:
    """One process for all saves its start."""
    pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper")
    compile_apart(f"VARIANTS = {variants}\nTURNED = {turned}\n{_COMPILE}", tmp_path)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of transposed products, on a machine it takes for a Hopper card."""
    found = pytest.importorskip("moefuse.backends.triton.grouped_linear_hopper_transposed")
    monkeypatch.setattr(found, "is_hopper", lambda _: True)
    return found


def test_a_transposed_product_takes_whole_tiles_of_many_rows(turned: Any) -> None:
    from moefuse.backends.triton.runtime.tiles import SWAP_AB_ROWS

    w = Rows(torch.zeros(2, 128, 144, dtype=torch.uint8), "Q4_K", planes=True)
    a, out = torch.zeros(400, 128, dtype=torch.bfloat16), torch.zeros(400, 256, dtype=torch.bfloat16)
    assert turned.takes(a, w, out, 0)
    assert turned.takes(a.half(), w, out[:, :128], 128), "some columns, from a strip on"
    assert not turned.takes(a, w, out[:, :64], 0)
    assert not turned.takes(a, w, out[:, :128], 64)
    assert not turned.takes(a.float(), w, out, 0)
    assert not turned.takes(torch.zeros(400, 129, dtype=a.dtype)[:, :128], w, out, 0), "rows that are not dense"
    assert not turned.takes(a, w._replace(data=w.data[:, :96]), out, 0), "rows that fill no stage"
    assert not turned.takes(a, w, out[: 2 * SWAP_AB_ROWS], 0), "few rows"
    with moefuse.invariant():
        assert not backends.invariantly(turned.takes)(a, w, out, 0)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
def test_which_transposed_products_are_turned(turned: Any, target: tuple[str, str], monkeypatch: Any) -> None:
    """One stack in blocks, with all that the other kernel does; not two, nor one of numbers."""
    from moefuse.backends.triton.grouped_linear_transposed import transposed_product

    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(turned, "takes", lambda *_: True)
    monkeypatch.setattr(turned, "turned_product", lambda *_, **options: calls.append(options))
    rng = torch.Generator().manual_seed(1)
    blocks = random_blocks("Q8_0", (2, 32, 256), rng, 0.1).to(target[1])
    offsets, order = torch.tensor([0, 3, 8], dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    plan = Plan(*(t.to(target[1]) for t in (offsets.diff(), offsets, order, order)), 1)
    a, out = torch.randn(8, 32, device=target[1]), torch.full((8, 256), torch.nan, device=target[1])
    transposed_product(a, (blocks,), plan, out, scatter=True, fill=True)
    assert not out.any(), "rows without an expert are left as they are"
    assert (calls[0]["gather"], calls[0]["scatter"], calls[0]["first"]) == (False, True, 0)
    transposed_product(a, (blocks,), plan, out[:, :128], gather=True, first=128)
    assert (calls[1]["gather"], calls[1]["scatter"], calls[1]["first"]) == (True, False, 128)
    transposed_product(torch.randn(8, 64, device=target[1]), (blocks, blocks), plan, out)
    transposed_product(a, (blocks.dequantize(),), plan, out)
    assert len(calls) == 2


class Routed:
    """Experts with rows of all sizes, twice and in any order, and slots that have none."""

    def __init__(self, dtype: torch.dtype, rows: list[int] | None = None) -> None:
        rows = random.sample(EDGES * 2, 2 * len(EDGES)) if rows is None else rows
        live = sum(rows)
        self.E, self.S, self.dtype = len(rows), live + live % 2 + 40 * TOP_K, dtype
        self.offsets = torch.tensor(offsets_of(rows), dtype=torch.int32, device="cuda")
        order = torch.randperm(self.S, dtype=torch.int32, device="cuda")
        counts = self.offsets.diff()
        self.plan = Plan(counts, self.offsets, order, order.argsort().int(), TOP_K, trusted=True)
        self.live = live

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale).to(self.dtype)

    def blocks(self, format: str, *shape: int) -> QuantTensor:
        """Blocks on the card, of weights whose products with normal numbers have variance one."""
        rng = torch.Generator().manual_seed(random.getrandbits(32))
        return random_blocks(format, shape, rng, shape[-1] ** -0.5).to("cuda")

    def check(
        self,
        x: Tensor,
        stack: Tensor | QuantTensor,
        activation: Activation | None,
        gather: bool,
        width: int = 256,
        up: QuantTensor | None = None,
        self_decoded: bool = False,
        scatter: bool = False,
    ) -> None:
        """A product against float64; rows without an expert, and what lies behind the result, stay as they were."""
        from moefuse.backends.triton import grouped_linear_hopper as hopper
        from moefuse.backends.triton import grouped_linear_hopper_blocks
        from moefuse.backends.triton.grouped_linear import up_weights
        from moefuse.backends.triton.plan import TokenTiles
        from moefuse.ops.glu import glu_reference
        from moefuse.ops.grouped_linear import grouped_linear_reference

        gated = activation is not None and activation.gated
        weights = up_weights(Stacks(stack, up, stack), gated)
        columns = stack.shape[1] // (1 + (gated and up is None))
        whole = torch.full((self.S + 300, columns), torch.nan, dtype=self.dtype, device="cuda")
        out = whole[: self.S]
        assert hopper.takes(x, weights.w, weights.u, out, gated)
        tiles = TokenTiles(self.offsets, self.S)
        run = grouped_linear_hopper_blocks.swap_ab_blocks if self_decoded else hopper.swap_ab_product
        run(
            *(x, weights.w, weights.u, tiles, self.plan.order),
            gather=gather,
            activation=activation,
            out=out,
            scatter=scatter,
            tile_width=width,
        )
        if scatter:  # back into the plan's order
            out[:] = out[self.plan.order.long()]

        def exact(stack: Tensor | QuantTensor) -> Tensor:
            numbers = stack.dequantize() if isinstance(stack, QuantTensor) else stack
            return grouped_linear_reference(x.double(), numbers.double(), None, self.plan, gather, False)

        want = exact(stack)
        if activation is not None:
            want = glu_reference(want, None if up is None else exact(up), activation, "halves")
        error = difference(whole[: self.live], want[: self.live])
        blocks = isinstance(stack, QuantTensor)
        bound = cases.tolerance_of("experts", "out", x, self.dtype, blocks=True) if blocks else ONE_ROUNDING[self.dtype]
        assert error.within(bound), error
        assert whole[self.live :].isnan().all()


@on_hopper
@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_up(kind: str) -> None:
    routed = Routed(torch.bfloat16)
    routed.check(
        routed.random(routed.S // TOP_K, H), routed.random(routed.E, 2 * I, H, scale=H**-0.5), Activation(kind), True
    )


@on_hopper
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_up_without_a_gate(kind: str) -> None:
    routed = Routed(torch.bfloat16)
    x, stack = routed.random(routed.S // TOP_K, H), routed.random(routed.E, I, H, scale=H**-0.5)
    routed.check(x, stack, Activation(kind, gated=False), True)


@on_hopper
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ONE_ROUNDING)
def test_down(dtype: torch.dtype, width: int) -> None:
    routed = Routed(dtype)
    for scatter in (False, True):
        stack = routed.random(routed.E, H, I, scale=I**-0.5)
        routed.check(routed.random(routed.S, I), stack, None, False, width, scatter=scatter)


@on_hopper
@pytest.mark.parametrize(("dtype", "width"), [(torch.float16, 256), (torch.bfloat16, 128), (torch.bfloat16, 64)])
def test_up_in_other_types_and_widths(dtype: torch.dtype, width: int) -> None:
    routed = Routed(dtype)
    x, stack = routed.random(routed.S // TOP_K, H), routed.random(routed.E, 2 * I, H, scale=H**-0.5)
    routed.check(x, stack, SILU, True, width)


@on_hopper
@pytest.mark.parametrize(("I", "H"), [(128, 128), (192, 64)])
def test_sums_shorter_than_the_ring(I: int, H: int) -> None:
    routed = Routed(torch.bfloat16)
    for width in WIDTHS:
        x, stack = routed.random(routed.S // TOP_K, H), routed.random(routed.E, 2 * I, H, scale=H**-0.5)
        routed.check(x, stack, SILU, True, width)
        routed.check(routed.random(routed.S, 64), routed.random(routed.E, 128, 64, scale=0.1), None, False, width)


@on_hopper
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ONE_ROUNDING)
def test_blocks(dtype: torch.dtype, format: str) -> None:
    """Gate and up rows in one stack and in two."""
    routed = Routed(dtype)
    x, hidden = routed.random(routed.S // TOP_K, H), routed.random(routed.S, I)
    for width in WIDTHS:
        routed.check(hidden, routed.blocks(format, routed.E, 128, I), None, False, width)
        routed.check(hidden, routed.blocks(format, routed.E, 128, I), None, False, width, scatter=True)
        routed.check(x, routed.blocks(format, routed.E, 2 * I, H), SILU, True, width)
    gate, up = (routed.blocks(format, routed.E, I, H) for _ in range(2))
    routed.check(x, gate, SILU, True, up=up)


@on_hopper
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ONE_ROUNDING)
def test_blocks_decoded_by_who_multiplies(dtype: torch.dtype, format: str) -> None:
    """Likewise, and sums that fill no strip of 256, where the format can have such."""
    from moefuse.backends.triton.formats.blocks import KINDS

    routed = Routed(dtype)
    columns = H if FORMATS[format].values == 256 else H - 128 if KINDS[format].high or format == "FP8" else H - 64
    x, hidden = routed.random(routed.S // TOP_K, columns), routed.random(routed.S, I)
    for width in BLOCK_WIDTHS:
        for scatter in (False, True):
            stack = routed.blocks(format, routed.E, 128, I)
            routed.check(hidden, stack, None, False, width, self_decoded=True, scatter=scatter)
        routed.check(x, routed.blocks(format, routed.E, 2 * I, columns), SILU, True, width, self_decoded=True)
    gate, up = (routed.blocks(format, routed.E, I, columns) for _ in range(2))
    routed.check(x, gate, SILU, True, 32, up=up, self_decoded=True)


@on_hopper
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ONE_ROUNDING)
def test_transposed_products(dtype: torch.dtype, format: str) -> None:
    """All columns and some, gathered and scattered, in each width; rows without an expert stay as they were."""
    from moefuse.backends.triton.grouped_linear import rows_of
    from moefuse.backends.triton.grouped_linear_hopper_transposed import takes, turned_product
    from moefuse.backends.triton.plan import TokenTiles
    from moefuse.ops.grouped_linear import grouped_linear_transposed_reference

    columns = 512 if FORMATS[format].values == 256 else 384
    for width, first, gather in itertools.product((0, 40, 100, 300), (0, 256), (False, True)):
        routed = Routed(dtype, [width, 0, 2 * width + 31, width + 1] if width else None)
        stack, a = routed.blocks(format, routed.E, 192, columns), routed.random(routed.S, 192)
        whole = torch.full((routed.S + 300, columns - first), torch.nan, dtype=dtype, device="cuda")
        out, rows = whole[: routed.S], rows_of(stack)
        assert takes(a, rows, out, first)
        tiles, places = TokenTiles(routed.offsets, routed.S), {"gather": gather, "scatter": not gather}
        turned_product(a, rows, columns, tiles, routed.plan.order, out=out, first=first, **places)
        numbers = stack.dequantize(torch.float64)
        want = grouped_linear_transposed_reference(a.double(), numbers, routed.plan, gather, False)[
            : routed.live, first:
        ]
        got = out if gather else out[routed.plan.order.long()]
        error = difference(got[: routed.live], want)
        assert error.within(cases.tolerance_of("experts", "out", a, dtype, blocks=True)), error
        assert got[routed.live :].isnan().all()
        assert whole[routed.S :].isnan().all()


@on_hopper
def test_without_any_row() -> None:
    """More slots than a tile needs and none with an expert: nothing is read that is not there, nothing is written."""
    routed = Routed(torch.bfloat16, [0])
    routed.S = 1000
    order = torch.arange(1000, dtype=torch.int32, device="cuda")
    routed.plan = dataclasses.replace(routed.plan, order=order, inverse=order, trusted=True)
    for width in WIDTHS:
        routed.check(routed.random(500, H), routed.random(1, 2 * I, H), SILU, True, width)
        routed.check(routed.random(1000, I), routed.random(1, H, I), None, False, width)


@on_hopper
def test_more_than_2_to_the_31_numbers() -> None:
    """Tokens and results past that many are found by 64-bit offsets."""
    from moefuse.backends.triton.grouped_linear import product, up_weights
    from moefuse.backends.triton.runtime.tiles import Tile

    T = 2**31 // I + 1000
    x = torch.empty(T, H, dtype=torch.bfloat16, device="cuda").normal_()
    stack = torch.empty(1, 2 * I, H, dtype=torch.bfloat16, device="cuda").normal_(0, H**-0.5)
    order = torch.arange(T - 1, -1, -1, dtype=torch.int32, device="cuda")
    offsets = torch.tensor([0, T], dtype=torch.int32, device="cuda")
    out = torch.full((T, I), torch.nan, dtype=torch.bfloat16, device="cuda")
    weights = up_weights(Stacks(stack, None, stack), True)
    plan = Plan(offsets[1:], offsets, order, order, 1, trusted=True)
    product(x, weights, plan, SILU, out, Tile(128, 128, 64, 8, 4), gather=True)
    at = torch.cat((torch.arange(500), torch.randint(0, T, (500,)), torch.arange(T - 500, T))).cuda()
    z = x[order[at].long()].double() @ stack[0].double().mT
    error = difference(out[at], torch.nn.functional.silu(z[:, :I]) * z[:, I:])
    assert error.within(ONE_ROUNDING[torch.bfloat16]), error
    assert not out.isnan().any()


class Block:
    """One small layer with as many rows per expert as half its tokens."""

    E, T = 4, 512

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        def random(*shape: int) -> Tensor:
            return (torch.randn(shape, device="cuda") * shape[-1] ** -0.5).to(dtype)

        self.dtype, self.routing = dtype, Routing(top_k=TOP_K)
        self.router, self.gate_up, self.down = random(self.E, H), random(self.E, 2 * I, H), random(self.E, H, I)

    def tokens(self, T: int = T) -> Tensor:
        return torch.randn(T, H, device="cuda").to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return moefuse.moe(x, self.router, self.gate_up, self.down, self.routing)

    def exact(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """In float64."""
        wide = (t.double() for t in (weights, self.gate_up, self.down))
        return moefuse.experts(x.double(), ids, *wide, backend="reference")


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows with each product that is taken: whether it gathers."""
    from moefuse.backends.triton import grouped_linear_hopper as hopper

    calls: list[bool] = []
    launched = hopper.swap_ab_product

    def count(*args: Any, **options: Any) -> None:
        calls.append(options["gather"])
        launched(*args, **options)

    monkeypatch.setattr(hopper, "swap_ab_product", count)
    return calls


@on_hopper
@pytest.mark.parametrize("T", [2 * width for width in WIDTHS])
@pytest.mark.parametrize("dtype", ONE_ROUNDING)
def test_experts_and_moe(dtype: torch.dtype, T: int, swapped: list[bool]) -> None:
    block = Block(dtype)
    x = block.tokens(T)
    weights, ids = moefuse.gate(x, block.router, block.routing)
    want = block.exact(x, ids, weights)
    with poisoned():
        results = block(x), moefuse.experts(x, ids, weights, block.gate_up, block.down)
    assert swapped == [True, False] * 2
    tolerance = cases.tolerance_of("experts", "out", x, dtype)
    for result in results:
        error = difference(result, want)
        assert error.within(tolerance), error


@on_hopper
def test_experts_with_slots_that_have_none(swapped: list[bool]) -> None:
    block = Block()
    x, weights = block.tokens(), torch.rand(block.T, TOP_K, device="cuda")
    ids = torch.randint(0, block.E + 1, (block.T, TOP_K), device="cuda", dtype=torch.int32)
    ids[:7] = block.E
    with poisoned():
        result = moefuse.experts(x, ids, weights, block.gate_up, block.down)
        nothing = moefuse.experts(x, torch.full_like(ids, -1), weights, block.gate_up, block.down)
    assert swapped == [True, False] * 2
    assert (result[:7] == 0).all()
    assert (nothing == 0).all()
    error = difference(result, block.exact(x, ids, weights))
    assert error.within(cases.tolerance_of("experts", "out", x, block.dtype)), error


@on_hopper
def test_training_takes_it_for_both_products(swapped: list[bool]) -> None:
    block = Block()
    x = block.tokens()
    weights, ids = moefuse.gate(x, block.router, block.routing)
    result = moefuse.experts(x, ids, weights, block.gate_up.requires_grad_(), block.down)
    assert swapped == [True, False]
    error = difference(result, block.exact(x, ids, weights))
    assert error.within(cases.tolerance_of("experts", "out", x, block.dtype)), error


@on_hopper
def test_in_a_graph() -> None:
    """Captured once and replayed on other tokens, with other rows for every expert."""
    block = Block()
    x = block.tokens()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        block(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = block(x)
    for _ in range(3):
        x.copy_(block.tokens())
        graph.replay()
        assert torch.equal(captured, block(x))


@on_hopper
def test_the_same_bits_and_no_new_kernel_for_other_tokens() -> None:
    from moefuse.backends.triton import grouped_linear_hopper as hopper
    from moefuse.backends.triton.runtime import launch

    def compiled() -> list[Any]:
        return [key for key in launch._COMPILED if key[0] is hopper._swap_ab_kernel]

    block = Block()
    x = block.tokens()
    first = block(x)
    before = compiled()
    assert before
    assert all(torch.equal(first, block(x)) for _ in range(10))
    for T in (400, 601, 1024, 5000):
        block(block.tokens(T))
    assert compiled() == before
