"""The backward's products for many rows per expert on Hopper: who takes them, that they compile, and what they give."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moefuse
from moefuse.testing import cases
from moefuse.testing.poison import poisoned
from moefuse.types import Activation, Plan

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="its instructions are Hopper's, and no interpreter has them")

SILU = Activation("silu")


def plan_of(rows: list[int], top_k: int = 1, device: str = "cpu", without: int = 0) -> Plan:
    """One whose experts have so many rows, in a random order, and ``without`` slots that have no expert."""
    ids = torch.repeat_interleave(torch.arange(len(rows) + 1), torch.tensor([*rows, without]))
    slots = ids[torch.randperm(len(ids))]
    order = slots.argsort(stable=True).int()
    inverse = order.argsort().int()
    counts = torch.tensor(rows, dtype=torch.int32)
    offsets = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    return Plan(*(t.to(device) for t in (counts, offsets, order, inverse)), top_k)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
@pytest.mark.parametrize("rows", [[0, 1, 64, 65, 127, 128, 129, 256, 257, 0], [0, 0], [1000]])
def test_rows_are_cut_into_tiles_of_one_height(rows: list[int], target: tuple[str, str]) -> None:
    from moefuse.backends.triton.plan import RowTiles

    plan = plan_of(rows, device=target[1])
    with poisoned():
        table = RowTiles(plan.offsets, plan.assignments).table.tolist()
    begins = plan.offsets.tolist()
    expected = [
        [expert, first, min(first + 128, stop)]
        for expert, (begin, stop) in enumerate(itertools.pairwise(begins))
        for first in range(begin, stop, 128)
    ]
    assert table[0][0] == len(expected)
    assert sorted(table[1 : 1 + len(expected)]) == expected
    heights = [-(-(stop - first) // 32) for _, first, stop in table[1 : 1 + len(expected)]]
    assert heights == sorted(heights, reverse=True), "the highest first"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
def test_the_parts_of_a_weights_gradient_are_summed(target: tuple[str, str]) -> None:
    module = pytest.importorskip("moefuse.backends.triton.grouped_linear_transposed_hopper")
    from moefuse.backends.triton.runtime.launch import launch

    plan = plan_of([200, 0, 131], device=target[1], without=40)
    S, count = plan.assignments, 6
    parts = torch.randn(count, S, device=target[1])
    parts[:, 331:] = torch.nan
    out = torch.full((S,), torch.nan, device=target[1])
    launch(module._share_sums_kernel, (2,), parts, plan.offsets, plan.order, out, S, 3, PARTS=count, BLOCK=256)
    expected = parts.sum(0)
    expected[331:] = 0
    torch.testing.assert_close(out[plan.order.long()], expected, rtol=1e-6, atol=1e-6)


class Offered:
    """What each ``takes`` is asked about; changed one thing at a time."""

    def __init__(self, rows: int = 200, H: int = 128, I: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        self.plan = plan_of([rows, rows])
        self.d, self.z = torch.zeros(2 * rows, H, dtype=dtype), torch.zeros(2 * rows, 2 * I, dtype=dtype)
        self.down, self.gate_up = torch.zeros(2, H, I, dtype=dtype), torch.zeros(2, 2 * I, H, dtype=dtype)


@pytest.fixture
def outer(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip("moefuse.backends.triton.grouped_outer_hopper")
    monkeypatch.setattr(found, "is_hopper", lambda _: True)
    return found


@pytest.fixture
def transposed(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip("moefuse.backends.triton.grouped_linear_transposed_hopper")
    monkeypatch.setattr(found, "is_hopper", lambda _: True)
    return found


def test_who_takes_weight_gradients(outer: Any) -> None:
    given = Offered()
    assert outer.takes(given.d, given.z, given.plan)
    assert outer.takes(given.d, given.z[:, 64:], given.plan), "the up half"
    assert outer.takes(given.d.half(), given.z.half(), given.plan)
    for other in (Offered(rows=32), Offered(dtype=torch.float32), Offered(H=100)):
        assert not outer.takes(other.d, other.z, other.plan)
    assert not outer.takes(given.d, given.z[:, 4:68], given.plan), "where no word of 16 bytes begins"
    assert not outer.takes(given.d, given.z.half(), given.plan)
    assert not outer.takes(given.d.mT.contiguous().mT, given.z, given.plan)


def test_who_takes_transposed_products(transposed: Any) -> None:
    given = Offered()
    assert transposed.takes(given.d, (given.down,), given.plan, 64)
    assert transposed.takes(given.z, (given.gate_up[:, :, 64:],), given.plan, 64), "some columns"
    assert transposed.takes(given.z, (given.gate_up[:, :64], given.gate_up[:, 64:]), given.plan, 128)
    for other in (Offered(rows=32), Offered(dtype=torch.float32), Offered(H=96)):
        assert not transposed.takes(other.d, (other.down,), other.plan, 64)
    assert not transposed.takes(given.d, (given.down.half(),), given.plan, 64)
    assert not transposed.takes(given.d, (given.down.mT.contiguous().mT,), given.plan, 64)
    assert not transposed.takes(given.z, (given.gate_up[:, :64], given.gate_up[:, 64:].clone()), given.plan, 128)
    assert not transposed.takes(given.z, (given.gate_up[:, :, 4:68],), given.plan, 64)


def test_which_derivatives_follow_in_its_epilogue(transposed: Any) -> None:
    z = torch.zeros(400, 128, dtype=torch.bfloat16)
    assert transposed.takes_derivatives(z, SILU, "halves", None)
    assert not transposed.takes_derivatives(z, SILU, "interleaved", None)
    assert not transposed.takes_derivatives(z, Activation("silu", gated=False), "halves", None)
    assert not transposed.takes_derivatives(z, SILU, "halves", torch.zeros(2, 128))
    assert not transposed.takes_derivatives(z[:, :112], SILU, "halves", None), "half a piece of columns"


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from moefuse.backends.triton import grouped_linear_transposed_hopper as transposed, grouped_outer_hopper as outer
from moefuse.backends.triton.activations import ACTIVATIONS
from moefuse.backends.triton.runtime.tiles import hopper_outer_tile

def desc(dtype, *block):
    layout = NVMMASharedLayout(128, 16, rank=len(block))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>".replace(" ", "")

def compiled(kernel, types, known):
    names = [p.name for p in kernel.params]
    signature = {name: "constexpr" if name in known else types[name] for name in names}
    constants = {(i,): known[name] for i, name in enumerate(names) if name in known}
    whole = [name for name in names if name.endswith("_ptr") and name not in known]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
    source = GluonASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    assert made.metadata.shared <= 227 * 1024, made.metadata.shared
    assert "wgmma.mma_async" in made.asm["ptx"]
    assert "ld.local" not in made.asm["ptx"]

integers = dict(offsets_ptr="*i32", order_ptr="*i32", tiles_ptr="*i32", total="i32", S="i32")
for dtype, turned, columns in (("bf16", True, 512), ("fp16", False, 200)):
    print("outer", dtype, turned, columns, flush=True)
    tile = hopper_outer_tile()
    form = outer.Form(columns, columns, columns, columns, 8, 2, turned, 132, *tile)
    types = dict(left_ptr="*" + dtype, right_ptr="*" + dtype, right_desc=desc(dtype, tile.rows, tile.right))
    types |= integers | dict(out_desc=desc(dtype, 1, 64, 64))
    compiled(outer._outer_kernel, types, dict(FORM=form))
for dtype, kind, gather, second in (
    ("bf16", "silu", True, 0), ("bf16", "swiglu_oai", True, 0), ("fp16", None, True, 0), ("bf16", None, False, 512)
):
    print("transposed", dtype, kind, gather, second, flush=True)
    derived = kind is not None
    form = transposed.Form(320, 512, second, 1024, 512, gather, 2, 132, 4, derived, derived, derived)
    rows, piece, weight = desc(dtype, 128, 64), desc(dtype, 64, 64), desc(dtype, 64, 256)
    types = dict(a_desc=rows, half_desc=piece, w_desc=weight, u_desc=weight, z_desc=piece, d_z_desc=piece)
    types |= integers | dict(hidden_desc=piece, out_desc=piece, weights_ptr="*fp32", parts_ptr="*fp32")
    types |= {name: "*" + dtype for name in ("a_ptr", "out_ptr", "d_z_ptr", "hidden_ptr")}
    types |= dict(numbers=("fp32", "fp32"))
    known = dict(FORM=form, ACT=ACTIVATIONS[kind] if derived else None)
    missing = ["a_desc", "half_desc"] if gather else []
    missing += [] if second else ["u_desc"]
    of_derived = ["z_desc", "d_z_desc", "hidden_desc", "weights_ptr", "d_z_ptr", "hidden_ptr", "parts_ptr"]
    missing += ["out_desc", "out_ptr"] if derived else of_derived
    compiled(transposed._transposed_kernel, types, known | dict.fromkeys(missing))
print("all", flush=True)
"""


def test_they_compile_without_a_card(tmp_path: Path) -> None:
    """In a process of its own, because the interpreter is chosen when Triton is loaded."""
    pytest.importorskip("moefuse.backends.triton.grouped_linear_transposed_hopper")
    own = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", _COMPILE], env=own, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith("all\n")


# On a card


def gathered(x: Tensor, plan: Plan, expert: int) -> Tensor:
    begin, stop = plan.offsets[expert : expert + 2].tolist()
    return x[plan.order[begin:stop].long() // plan.top_k].double()


def rows_of(x: Tensor, plan: Plan, expert: int) -> Tensor:
    begin, stop = plan.offsets[expert : expert + 2].tolist()
    return x[begin:stop].double()


def relative(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item()


ONE_ROUNDING = {torch.bfloat16: 2.5e-3, torch.float16: 3.5e-4}


@on_hopper
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [(256, 512), (200, 328)])
def test_weight_gradients(columns: tuple[int, int], dtype: torch.dtype, turned: bool) -> None:
    """No expert reads a neighbour's rows, nor those without an expert: NaN there does not show."""
    from moefuse.backends.triton import grouped_outer_hopper as outer

    plan = plan_of([70, 3, 200, 64, 0, 129, 1], device="cuda", without=50)
    left, right = (torch.randn(plan.assignments, n, device="cuda").to(dtype) for n in columns)
    right[467:] = torch.nan
    right[73:273] = torch.nan
    shape = (7, columns[1], columns[0]) if turned else (7, *columns)
    out, again = (torch.full(shape, torch.nan, device="cuda", dtype=dtype) for _ in range(2))
    for result in (out, again):
        outer.hopper_outer(left, right, plan, result, turned=turned)
    for expert in (0, 1, 3, 4, 5, 6):
        exact = gathered(left, plan, expert).mT @ rows_of(right, plan, expert)
        assert relative(out[expert], exact.mT if turned else exact) < ONE_ROUNDING[dtype], expert
        assert torch.equal(out[expert], again[expert])
    assert out[2].isnan().all()
    assert (out[4] == 0).all()


@on_hopper
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("N", [512, 328])
def test_transposed_products(N: int, dtype: torch.dtype, gather: bool) -> None:
    from moefuse.backends.triton import grouped_linear_transposed_hopper as transposed
    from moefuse.backends.triton.plan import RowTiles

    plan = plan_of([70, 3, 200, 64, 0, 129, 1], device="cuda", without=50)
    a = torch.randn(plan.assignments, 192, device="cuda").to(dtype)
    w = torch.randn(7, 192, 2 * N, device="cuda").to(dtype)[:, :, :N]
    stacks = (w[:, :128], w[:, 128:])
    for given in ((w,), stacks):
        out = torch.full((plan.assignments, N), torch.nan, device="cuda", dtype=dtype)
        tiles = RowTiles(plan.offsets, plan.assignments)
        transposed.hopper_transposed(a, given, plan, out, tiles, gather=gather)
        for expert in (0, 1, 2, 3, 5, 6):
            rows = gathered(a, plan, expert) if gather else rows_of(a, plan, expert)
            exact = rows @ w[expert].double()
            assert relative(rows_of(out, plan, expert), exact) < ONE_ROUNDING[dtype], expert
        assert out[467:].isnan().all(), "rows without an expert are left as they are"


GRADIENTS = {
    "bf16": {},
    "f16": {"dtype": torch.float16},
    "odd": {"H": 712, "I": 200},
    "halves of tiles": {"H": 576, "I": 320},
    "interleaved": {"layout": "interleaved"},
    "gelu": {"activation": "gelu"},
    "few experts": {"chosen": 3},
    "frozen stacks": {"frozen": ("gate_up", "down")},
    "frozen tokens": {"frozen": ("x", "weights")},
    "only weights": {"frozen": ("x", "gate_up", "down")},
    "only down": {"frozen": ("x", "weights", "gate_up")},
}


@on_hopper
@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case: str) -> None:
    """Those of experts, next to float64; the same bits in two runs; frozen parts have none."""
    options = {"dtype": torch.bfloat16, "H": 512, "I": 256, "chosen": 10, "layout": "halves", "activation": "silu"}
    options |= {"frozen": ()} | GRADIENTS[case]
    dtype, H, I, E, T, top_k = options["dtype"], options["H"], options["I"], 10, 1337, 3
    random = {"device": "cuda"}
    given = {
        "x": torch.randn(T, H, **random).to(dtype),
        "weights": torch.rand(T, top_k, **random).softmax(-1),
        "gate_up": (torch.randn(E, 2 * I, H, **random) * H**-0.5).to(dtype),
        "down": (torch.randn(E, H, I, **random) * I**-0.5).to(dtype),
    }
    ids = torch.rand(T, options["chosen"], **random).topk(top_k).indices
    ids[::7, 0] = -1
    d = torch.randn(T, H, **random).to(dtype)

    def gradients(wide: bool) -> dict[str, Tensor | None]:
        leaves = {name: (t.double() if wide else t.clone()) for name, t in given.items()}
        for name, leaf in leaves.items():
            leaf.requires_grad_(name not in options["frozen"])
        x, weights, gate_up, down = leaves.values()
        how = {"layout": options["layout"], "activation": options["activation"]}
        out = moefuse.experts(x, ids, weights, gate_up, down, **how, backend="reference" if wide else None)
        out.backward(d.to(out.dtype))
        return {name: leaf.grad for name, leaf in leaves.items()}

    exact = gradients(True)
    with poisoned():
        found, again = gradients(False), gradients(False)
    for name, gradient in found.items():
        if name in options["frozen"]:
            assert gradient is None
            continue
        assert gradient is not None
        assert torch.equal(gradient, again[name])
        bound = 1e-2 if dtype == torch.bfloat16 else 1.3e-3
        assert relative(gradient, exact[name]) < bound, name
