"""Decode steps with weights in FP8, whose codes are asked for at once: who takes them, and what they give."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moefuse
from moefuse.backends.gated import Rows
from moefuse.testing import cases
from moefuse.testing.compare import difference
from moefuse.testing.poison import poisoned
from moefuse.testing.random_blocks import random_blocks

#: the conversion that these kernels have is of Ada and later
on_card = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="it needs a card"
)


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, on a machine it takes for such a card."""
    found = pytest.importorskip("moefuse.backends.triton.experts_decode_fp8")
    monkeypatch.setattr(found, "INTERPRETED", False)
    monkeypatch.setattr(found, "capability", lambda _: (8, 9))
    return found


def rows_of(N: int, K: int, format: str = "FP8") -> Rows:
    return Rows(torch.zeros(2, N, K // 128 * 132, dtype=torch.uint8), format, planes=True)


def test_who_takes_the_up_product(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w, u = rows_of(256, 1024).gate_and_up("halves")
    x = torch.zeros(3, 1024, dtype=torch.bfloat16)
    assert fp8.takes(x, w, u, None, True)
    assert fp8.takes(x.half(), *rows_of(258, 1024).gate_and_up("interleaved"), None, True)
    assert fp8.takes(x, rows_of(128, 1024), rows_of(128, 1024), None, True), "gate and up in stacks of their own"
    assert not fp8.takes(x, w, u, torch.zeros(2, 128), True)
    assert not fp8.takes(x, w, w, None, False)
    assert not fp8.takes(x.float(), w, u, None, True)
    assert not fp8.takes(x[:, :384], *rows_of(256, 384).gate_and_up("halves"), None, True), "rows of 512 codes"
    assert not fp8.takes(torch.zeros(3, 2048, dtype=x.dtype)[:, ::2], w, u, None, True)
    assert not fp8.takes(torch.zeros(3073, dtype=x.dtype)[1:].view(3, 1024), w, u, None, True)
    assert not fp8.takes(x, rows_of(128, 1024), rows_of(256, 1024), None, True)
    assert not fp8.takes(x, w, u._replace(format="Q8_0"), None, True)
    monkeypatch.setattr(fp8, "capability", lambda _: (8, 6))
    assert not fp8.takes(x, w, u, None, True)


def test_who_takes_the_down_product(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, w = torch.zeros(16, 768), rows_of(512, 768)
    assert fp8.takes_down(hidden, w, None, 8)
    assert not fp8.takes_down(hidden, w, torch.zeros(2, 512), 8)
    assert not fp8.takes_down(hidden, rows_of(512, 768, "Q8_0"), None, 8)
    assert not fp8.takes_down(torch.zeros(64, 4096), rows_of(512, 4096), None, 8), "its codes have no room"
    monkeypatch.setattr(fp8, "capability", lambda _: (8, 6))
    assert not fp8.takes_down(hidden, w, None, 8)


_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from moefuse.backends.triton.activations import ACTIVATIONS
from moefuse.backends.triton.formats import blocks

@triton.constexpr_function
def always(*_):
    return True

blocks.cuda_capability_geq = always
from moefuse.backends.triton import experts_decode_fp8 as fp8

def compiled(kernel, warps, known, **types):
    names = [p.name for p in kernel.params]
    signature = {name: "constexpr" if name in known else types[name] for name in names}
    constants = {(i,): known[name] for i, name in enumerate(names) if name in known}
    whole = [name for name in names if name.endswith("_ptr") or name in ("pitch", "matrix_rows", "stride_xt")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole if name not in known}
    source = GluonASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 89, 32), options=dict(num_warps=warps))
    assert made.metadata.shared <= 99 * 1024, made.metadata.shared
    assert "cvt.rn.f16x2.e4m3x2" in made.asm["ptx"]
    assert "cp.async.cg" in made.asm["ptx"]

sizes = dict(E="i32", pitch="i32", matrix_rows="i32")
for dtype, K in (("bf16", 2048), ("fp16", 7168)):
    print("up", dtype, K, flush=True)
    known = dict(FORM=fp8.Form(K, 4), ACT=ACTIVATIONS["silu"], counter_ptr=None)
    pointers = dict(x_ptr="*" + dtype, ids_ptr="*i32", w_ptr="*u8", u_ptr="*u8", hidden_ptr="*fp32")
    numbers = dict(N="i32", top_k="i32", stride_xt="i32", places=("i32",) * 4, numbers=("fp32", "fp32"))
    compiled(fp8._up_fp8_kernel, 4, known, **sizes, **pointers, **numbers)
for K, slots, normed in ((768, 8, True), (512, 1, False), (128, 16, False)):
    print("down", K, slots, normed, flush=True)
    known = dict(FORM=fp8.DownForm(K, 8, slots, slots, 1024), shared_ptr=None, shared_gate_ptr=None)
    if not normed:
        known |= dict(norm_ptr=None, counter_ptr=None, normed_ptr=None)
    pointers = dict(hidden_ptr="*fp32", ids_ptr="*i64", weights_ptr="*fp32", w_ptr="*u8", shared_logit_ptr="*fp32")
    pointers |= dict(residual_ptr="*bf16", norm_ptr="*bf16", total_ptr="*fp32", counter_ptr="*i32", out_ptr="*bf16")
    numbers = dict(normed_ptr="*bf16", eps="fp32", H="i32")
    compiled(fp8._down_fp8_kernel, min(8, 2 * slots), known, **sizes, **pointers, **numbers)
print("all", flush=True)
"""


def test_they_compile_without_a_card(tmp_path: Path) -> None:
    """In a process of its own, because the interpreter is chosen when Triton is loaded."""
    pytest.importorskip("moefuse.backends.triton.experts_decode_fp8")
    own = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    file = tmp_path / "compile.py"
    file.write_text(_COMPILE)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False, env=own)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("all\n")


@on_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("H", "I", "top_k", "form"),
    [
        (512, 128, 2, ""), (2048, 768, 8, ""), (7168, 256, 8, ""), (512, 1536, 16, ""), (1024, 128, 1, ""),
        (1024, 256, 3, "interleaved"), (512, 128, 2, "apart"), (1024, 384, 6, "tail"), (1024, 256, 4, "norm"),
        (520, 130, 2, "odd"),
    ],
)  # fmt: skip
def test_decode_steps(H: int, I: int, top_k: int, form: str, dtype: torch.dtype) -> None:
    """Nothing is rounded; some ids lead to no expert. An odd size has its other product in numbers."""
    E, device = 6, "cuda"
    rng = torch.Generator().manual_seed(random.getrandbits(32))

    def blocks(N: int, K: int) -> Any:
        if K % 128:
            return (torch.randn(E, N, K, device=device) * K**-0.5).to(dtype)
        return random_blocks("FP8", (E, N, K), rng, K**-0.5).to(device)

    def wide(stack: Any) -> Any:
        return stack.double() if isinstance(stack, torch.Tensor) else stack.dequantize(torch.float64)

    gate_up = (blocks(I, H), blocks(I, H)) if form == "apart" else blocks(2 * I, H)
    down = blocks(H, I)
    for T in (1, 3, 4):
        x = torch.randn(T, H, device=device).to(dtype)
        ids = torch.randint(0, E + 1, (T, top_k), device=device, dtype=torch.int32)
        weights = torch.rand(T, top_k, device=device)
        tail = {name: torch.randn(T, H, device=device).to(dtype) for name in ("residual", "shared") if form == "tail"}
        if form == "norm":
            tail = {"residual": torch.randn_like(x), "norm_weight": torch.rand(H, device=device).to(dtype)}
        layout = {"layout": form} if form == "interleaved" else {}
        numbers = tuple(map(wide, gate_up)) if isinstance(gate_up, tuple) else wide(gate_up)
        wide_tail = {name: value.double() for name, value in tail.items()}
        arguments = (x.double(), ids, weights.double(), numbers, wide(down))
        want = moefuse.experts(*arguments, backend="reference", **layout, **wide_tail)
        for _ in range(3):  # the third call replays launches
            with poisoned():
                got = moefuse.experts(x, ids, weights, gate_up, down, **layout, **tail)
            for mine, theirs in zip(*((r if isinstance(r, tuple) else (r,)) for r in (got, want)), strict=True):
                error = difference(mine, theirs)
                assert error.within(cases.tolerance_of("experts", "out", x, dtype, blocks=True)), error
