"""The weight gradient of many rows per expert on Hopper: who takes it, that it compiles, and what a backward gives."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import compile_apart, on_hopper
from torch import Tensor

import moefuse
from moefuse.testing.poison import poisoned
from moefuse.types import Plan


def plan_of(rows: list[int], top_k: int = 1, device: str = "cpu", without: int = 0) -> Plan:
    """One whose experts have so many rows, in a random order, and ``without`` slots that have no expert."""
    ids = torch.repeat_interleave(torch.arange(len(rows) + 1), torch.tensor([*rows, without]))
    slots = ids[torch.randperm(len(ids))]
    order = slots.argsort(stable=True).int()
    inverse = order.argsort().int()
    counts = torch.tensor(rows, dtype=torch.int32)
    offsets = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32)
    return Plan(*(t.to(device) for t in (counts, offsets, order, inverse)), top_k)


class Offered:
    """What ``takes`` is asked about; changed one thing at a time."""

    def __init__(self, rows: int = 200, H: int = 128, I: int = 64, dtype: torch.dtype = torch.bfloat16) -> None:
        self.plan = plan_of([rows, rows])
        self.d, self.z = torch.zeros(2 * rows, H, dtype=dtype), torch.zeros(2 * rows, 2 * I, dtype=dtype)


@pytest.fixture
def outer(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip("moefuse.backends.triton.grouped_outer_hopper")
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


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from moefuse.backends.triton import grouped_outer_hopper as outer
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

integers = dict(offsets_ptr="*i32", order_ptr="*i32", total="i32")
for dtype, turned, columns in (("bf16", True, 512), ("fp16", False, 200)):
    print("outer", dtype, turned, columns, flush=True)
    tile = hopper_outer_tile()
    form = outer.Form(columns, columns, columns, columns, 8, 2, turned, 132, *tile)
    types = dict(left_ptr="*" + dtype, right_ptr="*" + dtype, right_desc=desc(dtype, tile.rows, tile.right))
    types |= integers | dict(out_desc=desc(dtype, 1, 64, 64))
    compiled(outer._outer_kernel, types, dict(FORM=form))
print("all", flush=True)
"""


def test_it_compiles_without_a_card(tmp_path: Path) -> None:
    pytest.importorskip("moefuse.backends.triton.grouped_outer_hopper")
    compile_apart(_COMPILE, tmp_path)


_PASSES = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moefuse import Activation, Routing
from moefuse.backends.triton import combine, experts_backward, gate_backward
from moefuse.backends.triton.activations import ACTIVATIONS
from moefuse.backends.triton.route import Rule, rule_numbers
from moefuse.backends.triton.runtime.tiles import derivatives_tile

def compiled(kernel, types, known, num_warps, num_stages=3):
    names = [p.name for p in kernel.params]
    types |= {n: types.get(n, "i32") for n in names if n not in known}
    one = {(names.index(n), i): 1 for n, t in types.items() if isinstance(t, tuple) for i, u in enumerate(t) if u == 1}
    signature = {n: "constexpr" if n in known else types[n] for n in names}
    signature |= {n: tuple("constexpr" if u == 1 else u for u in t) for n, t in types.items() if type(t) is tuple}
    whole = [(i,) for i, n in enumerate(names) if n not in known and (n.endswith("_ptr") or n in ("H", "E", "N"))]
    whole += [(names.index(n), i) for n, t in types.items() if type(t) is tuple for i, u in enumerate(t) if u == "i32"]
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in known.items()} | one,
                       {at: [["tt.divisibility", 16]] for at in whole})
    options = dict(num_warps=num_warps, num_stages=num_stages)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.shared <= 227 * 1024, made.metadata.shared
    assert "ld.local" not in made.asm["ptx"], kernel
    print(kernel.__name__, made.metadata.shared, flush=True)
    return made.asm["ptx"]

for dtype, parts in (("bf16", 2), ("bf16", 3), ("fp16", 1)):
    d = "*" + (dtype if parts > 1 else "fp32")
    rows = dict(d_ptr=d, x_ptr="*" + dtype, sums_ptr="*fp32", x_strides=("i32", 1))
    blocks, options = gate_backward._router_tile(True, 128, parts)
    ptx = compiled(gate_backward._router_kernel, rows, dict(norm_ptr=None, BLOCKS=blocks, PARTS=parts), **options)
    assert "wgmma.mma_async" in ptx
    rows = dict(d_ptr=d, w_ptr="*" + dtype, out_ptr="*" + dtype, w_strides=("i32", 1), normed_strides=("i32", 1))
    blocks, options = gate_backward._input_tile(True, parts)
    ptx = compiled(gate_backward._input_kernel, rows, dict(d_normed_ptr=None, BLOCKS=blocks, PARTS=parts), **options)
    assert "wgmma.mma_async" in ptx
rule = Routing(8)
numbers = ("fp32",) * len(rule_numbers(rule))
types = dict.fromkeys(("grad_ptr", "raw_ptr", "scale_parts_ptr", "rms_ptr"), "*fp32")
types |= dict.fromkeys(("x_ptr", "d_logits_ptr", "d_scaled_ptr"), "*bf16") | dict(ids_ptr="*i32")
types |= dict(numbers=numbers, eps="fp32", x_strides=("i32", 1), strides=("i32", 1, "i32", 1))
known = dict(logit_bias_ptr=None, scale_ptr=None, RULE=Rule.of(rule, 128), COLUMNS=2048, PARTS=2)
compiled(gate_backward._gate_rows_kernel, types, known, 1)
tile = derivatives_tile(768)
types = dict.fromkeys(("g_ptr", "z_ptr", "d_ptr", "d_z_ptr", "hidden_ptr"), "*bf16")
types |= dict(weights_ptr="*fp32", d_weights_ptr="*fp32", offsets_ptr="*i32", order_ptr="*i32", numbers=("fp32",) * 2)
types |= dict(sizes=("i32",) * 4, strides=(1, "i32", "i32", 1, "i32", "i32"))
known = dict(bias_ptr=None, ACT=ACTIVATIONS["silu"], GATED=True, BLOCK_E=128, ROWS=tile.rows, BLOCK_I=tile.columns)
assert "ld.global.v4" in compiled(experts_backward._derivatives_kernel, types, known, tile.warps)
types = dict(y_ptr="*bf16", weights_ptr="*fp32", inverse_ptr="*i32", offsets_ptr="*i32", out_ptr="*bf16")
ptx = compiled(combine._slot_sum_kernel, types, dict(TOP_K=8, BLOCK=1024), 4)
assert ptx.count("ld.global.v4") == 8, "eight rows' loads are under way at once"
print("all", flush=True)
"""


def test_passes_of_a_backward_compile_without_a_card(tmp_path: Path) -> None:
    compile_apart(_PASSES, tmp_path)


@pytest.mark.parametrize("I", [1, 16, 17, 32, 33, 64, 65, 768, 5000])
def test_derivatives_have_no_more_threads_than_numbers(I: int) -> None:
    """Of two threads with the same number one would read what the other has written there."""
    from moefuse.backends.triton.runtime.tiles import derivatives_tile

    tile = derivatives_tile(I)
    assert 32 * tile.warps <= tile.rows * tile.columns


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


_FIRST = """
import threading
import torch
import moefuse
from moefuse.backends.triton import grouped_outer_hopper as outer

threads = []
multiply = outer.hopper_outer

def noted(*args, **options):
    threads.append(threading.get_ident())
    multiply(*args, **options)

outer.hopper_outer = noted
T, E, H, I, top_k = 1024, 8, 512, 256, 2
x = torch.randn(T, H, device="cuda").bfloat16()
weights = torch.rand(T, top_k, device="cuda").softmax(-1)
gate_up = (torch.randn(E, 2 * I, H, device="cuda") * H**-0.5).bfloat16()
down = (torch.randn(E, H, I, device="cuda") * I**-0.5).bfloat16()
ids = torch.rand(T, E, device="cuda").topk(top_k).indices
leaves = [t.requires_grad_() for t in (x, weights, gate_up, down)]
out = moefuse.experts(x, ids, weights, gate_up, down)
d = torch.randn_like(out)
# Room for all that follows: memory that is new would be asked of the driver, and give the thread its context.
room = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (*[1 << 19] * 8, 1 << 28)]
del room
torch.cuda.synchronize()
out.backward(d)
assert threads, "Hopper's product was not taken"
assert threading.get_ident() not in threads, "no thread of its own"
assert all(leaf.grad.isfinite().all() and leaf.grad.any() for leaf in leaves)
print("all", flush=True)
"""


@on_hopper
def test_a_backward_is_the_first_that_its_thread_does() -> None:
    """Autograd's thread has no context of the card yet; in a process of its own, where no test was there before."""
    own = os.environ | {"TRITON_INTERPRET": "0"}
    found = subprocess.run([sys.executable, "-c", _FIRST], env=own, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith("all\n")
