"""experts of a few tokens in an invariant call on Hopper: what it gives, who takes it, and what multiplies."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import compile_apart

import moefuse
from moefuse import backends
from moefuse.testing import cases
from moefuse.testing import inputs as make
from moefuse.types import Activation, Stacks

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]
SIZES: dict[str, Any] = {
    "gated": {"tail": True},
    "interleaved": {"layout": "interleaved", "bias": True, "activation": "swiglu_oai"},
    "apart": {"apart": True, "bias": True},
    "ungated": {"activation": Activation("relu2", gated=False), "bias": True},
    "messy": {"messy": True, "tail": True},
}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target[1])
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("how", SIZES)
def test_it_gives_what_experts_are(
    how: str, T: int, target: tuple[str, str], drawn_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = pytest.importorskip("moefuse.backends.triton.experts_few")
    ran = []
    monkeypatch.setattr(few, "takes", lambda x, _: ran.append(x.dtype) or True)
    for H, I in ((140, 40), (64, 72)):
        case = cases.Case("experts", how, how, make.experts(T, 6, H, I, 3, **SIZES[how]), gradients=False)
        for dtype in (torch.float32, torch.float16):
            with moefuse.invariant():
                outcome = cases.run(case, dtype, *target, drawn_seed)
            assert outcome.passed, outcome.describe()
    assert len(ran) == 4


def test_it_takes_few_rows_of_numbers_in_an_invariant_call(monkeypatch: pytest.MonkeyPatch) -> None:
    few = pytest.importorskip("moefuse.backends.triton.experts_few")

    def takes(T: int = 1, dtype: torch.dtype = torch.bfloat16, weight: torch.dtype = torch.bfloat16) -> bool:
        stacks = Stacks(torch.empty(2, 64, 32, dtype=weight), None, torch.empty(2, 32, 32, dtype=weight))
        found: bool = backends.invariantly(few.takes)(torch.empty(T, 32, dtype=dtype), stacks)
        return found

    assert not takes()
    monkeypatch.setattr(few, "INTERPRETED", False)
    monkeypatch.setattr(few, "capability", lambda _: (9, 0))
    assert [takes(T) for T in (1, 4, 5)] == [True, True, False]
    assert not takes(dtype=torch.float32, weight=torch.float32)
    assert not few.takes(torch.empty(1, 32, dtype=torch.bfloat16), Stacks(torch.empty(0), None, torch.empty(0)))
    monkeypatch.setattr(few, "capability", lambda _: (8, 0))
    assert not takes(), "tiles of 64 rows are not multiplied by what multiplies 16 columns there"


_COMPILE = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class Card:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=0: 0)

driver.set_active(Card())
from moefuse.backends.triton import experts_few
from moefuse.types import Activation, Stacks, Tail, Outputs

found = []
experts_few.launch = lambda kernel, grid, *args, **options: found.append(
    kernel.warmup(*args, grid=grid, **(options | {"launch_pdl": True}))
)
experts_few.weighted_sum = lambda *given, **named: None
for dtype in (torch.bfloat16, torch.float16):
    for bias in (False, True):
        for H, I in ((2048, 768), (67, 35)):
            stacks = Stacks(torch.empty(4, 2 * I, H, dtype=dtype), None, torch.empty(4, H, I, dtype=dtype))
            if bias:
                biases = {"gate_up_bias": torch.empty(4, 2 * I), "down_bias": torch.empty(4, H)}
                stacks = stacks._replace(**biases)
            x, ids = torch.empty(2, H, dtype=dtype), torch.zeros(2, 3, dtype=torch.int32)
            experts_few.experts_few(x, ids, torch.empty(2, 3), stacks, Activation("silu"), Tail(), Outputs(x))
assert len(found) == 16
for kernel in found:
    # What multiplies tiles of 64 rows; another instruction sums in another order.
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in kernel.asm["ptx"]
    assert "mma.sync.aligned" not in kernel.asm["ptx"].replace("wgmma", "").replace("mma_async", "")
    assert kernel.metadata.shared <= 113 << 10, "two programs share a multiprocessor"
print("all")
"""


def test_it_compiles_to_what_multiplies_tiles(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    compile_apart(_COMPILE, tmp_path)
