"""linear on Triton: how many launches, and what the compiler makes of its kernel, which the interpreter cannot show."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gpu import compile_apart

import moefuse
from moefuse.testing import cases
from moefuse.testing.inputs import Inputs

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from moefuse.backends.triton import linear as module

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]


@pytest.mark.skipif(not TARGETS, reason="Triton runs neither here nor in its interpreter")
@pytest.mark.parametrize("T", [1, 2, 16, 17])
def test_few_rows_are_one_launch_whatever_the_weights(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (_, device), launches = TARGETS[0], []
    plainly = module.launch

    def watched(kernel: Any, *given: Any, **options: Any) -> None:
        launches.append(kernel)
        plainly(kernel, *given, **options)

    monkeypatch.setattr(module, "launch", watched)
    made = Inputs(torch.Generator().manual_seed(T), torch.float32)
    weights = tuple(made.stack(spec, 9, 256).to(device) for spec in ("Q4_K", None, "Q6_K", "Q8_0"))
    moefuse.linear(made.normal(T, 256).to(device), weights, backend="triton")
    assert len(launches) == (T <= 16)


_COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from moefuse.backends.triton import grouped_linear, linear
from moefuse.backends.triton.runtime import launch, tiles
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Projections

target = GPUTarget("cuda", 90, 32)
backend = make_backend(target)
linear.HAS_PDL = launch.HAS_PDL = triton.language.constexpr(True)
tiles.capability = lambda _: (9, 0)

def compiled(kernel, grid, *given, **options):
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, _ = bind(*given, **options)
    known = {name: options[name] for name in ("num_warps", "num_stages", "launch_pdl")}
    options, signature, constants, attributes = kernel._pack_args(backend, known, bound, kinds, known)
    found.append(triton.compile(ASTSource(kernel, signature, constants, attributes), target, options.__dict__))

linear.launch = compiled
for T, dtype, specs, wanted in VARIANTS:
    print(T, dtype, specs, flush=True)
    found, K = [], 2048
    weights = []
    for spec in specs:
        form = FORMATS.get(spec)
        columns = K if form is None else K // form.values * form.nbytes
        data = torch.empty(512, columns, dtype=getattr(torch, dtype) if form is None else torch.uint8)
        weights.append(data if form is None else QuantTensor(data, spec, arrangement="planes"))
    x = torch.empty(T, K, dtype=getattr(torch, dtype))
    linear.linear(x, Projections.of(tuple(weights), (torch.empty(512),) * len(weights)), None)
    (made,) = found
    assert made.metadata.shared <= 99 * 1024, made.metadata.shared
    assert wanted in made.asm["ptx"], wanted
    assert "griddepcontrol.wait" in made.asm["ptx"]
print("all", flush=True)
"""

#: rows, type of x, formats of the weights, and an instruction that the kernel owes its speed to
VARIANTS = [
    (1, "bfloat16", [None, None, None], "ld.global.v4.b32"),
    (1, "float32", [None], "ld.global.v4.b32"),
    (5, "bfloat16", [None, None], "mma.sync"),
    (5, "float32", [None], "cp.async.cg"),
    (1, "bfloat16", ["Q4_K", "Q6_K", None], "dp4a"),
    (4, "float16", ["Q4_K", "Q8_0"], "mma.sync"),
    (9, "bfloat16", ["Q6_K", "MXFP4", "Q2_K"], "mma.sync"),
]


@pytest.mark.skipif(not hasattr(JITFunction, "_pack_args"), reason="this Triton binds arguments in another way")
def test_it_compiles_without_a_card(tmp_path: Path) -> None:
    compile_apart(f"VARIANTS = {VARIANTS}\n{_COMPILE}", tmp_path)
