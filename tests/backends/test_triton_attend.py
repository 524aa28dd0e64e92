"""attend and rope as a card would run them: they compile without one, and cut places into parts as they should."""

from pathlib import Path

import pytest
import torch
from gpu import compile_apart

import moefuse
from moefuse.testing import cases
from moefuse.testing.compare import difference

pytest.importorskip("triton")
from moefuse.backends.triton import attend as kernels
from moefuse.backends.triton.runtime import launch

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]

_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moefuse.backends.triton.attend import _attend_kernel, tile_of
from moefuse.backends.triton.rope import _rope_kernel

def compiled(kernel, types, known, warps):
    names = [p.name for p in kernel.params]
    signature = {name: "constexpr" if name in known else types[name] for name in names}
    constants = {(i,): known[name] for i, name in enumerate(names) if name in known}
    whole = [name for name in names if signature[name][0] == "*" or name in ("D", "Dv")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
    for i, name in enumerate(names):
        if isinstance(signature[name], tuple):
            aligned |= {(i, j): [["tt.divisibility", 16]] for j in range(len(signature[name]))}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))

sizes = dict.fromkeys(("S", "Hq", "Hk", "D", "Dv", "half", "L"), "i32")
cache, norms = ("v_ptr", "keys_ptr", "values_ptr"), ("q_norm_ptr", "k_norm_ptr")

def types_of(dtype, mask="*u8"):
    p = "*" + dtype
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "out_ptr", "q_out_ptr", "k_out_ptr", *cache, *norms), p)
    pointers |= dict.fromkeys(("cos_ptr", "sin_ptr", "sinks_ptr", "sums_ptr", "stats_ptr"), "*fp32")
    pointers |= dict(position_ptr="*i64", mask_ptr=mask, starts_ptr="*i64", counter_ptr="*i32")
    strides = dict(qkv_strides=("i32",) * 9, angle_strides=("i32",) * 4, cache_strides=("i32",) * 6)
    strides |= dict(q_strides=("i32",) * 2, mask_stride="i32")
    return pointers | sizes | strides | dict(eps="fp32", scale="fp32", window="i64")

def tile(dtype, group, D):
    return tile_of(group, D, D, 4 if dtype == "fp32" else 2, 24)
"""

_VARIANTS = """
for dtype, group, D, given in VARIANTS:
    print(dtype, group, D, given, flush=True)
    types = types_of(dtype)
    none = {} if given else dict(mask_ptr=None, starts_ptr=None, sinks_ptr=None)
    made = compiled(_attend_kernel, types, none | tile(dtype, group, D), 4)
    assert made.metadata.shared <= 99 * 1024, made.metadata.shared
    assert "cp.async" in made.asm["ptx"], "tiles are brought in ahead of their turn"
    assert ("mma.sync" in made.asm["ptx"]) == (dtype != "fp32")
    none = {} if given else dict.fromkeys(("position_ptr", *cache, *norms))
    compiled(_rope_kernel, types, none | dict(HEADS=4, BLOCK_D=256, BLOCK_DV=256), 2)
print("all", flush=True)
"""


#: a mask, or none, must not show in how tensor cores sum over places; the mask is that of an invariant call
_SUMS = """
import re
for dtype in ("bf16", "fp16"):
    def dots(none):
        known = none | tile(dtype, 8, 64) | dict(TILES=8)
        made = compiled(_attend_kernel, types_of(dtype, mask="*i32"), known, 4).asm["ttgir"]
        layout = re.search(r"#mma = .*", made)[0]
        return [layout, *re.findall(r"tt.dot .*: (tensor<.*>) loc", made)]
    masked, plain = dots(dict(sinks_ptr=None)), dots(dict(mask_ptr=None, starts_ptr=None, sinks_ptr=None))
    assert len(plain) == 4 and masked == plain, (masked, plain)
print("all", flush=True)
"""


def test_they_compile_without_a_card(tmp_path: Path) -> None:
    variants = [("bf16", 8, 128, False), ("fp16", 1, 80, True), ("fp32", 16, 256, True)]
    compile_apart(f"VARIANTS = {variants}\n{_COMPILE}{_VARIANTS}", tmp_path)


def test_a_mask_leaves_the_order_of_invariant_sums(tmp_path: Path) -> None:
    compile_apart(_COMPILE + _SUMS, tmp_path)


@pytest.mark.parametrize("target", TARGETS, ids=lambda pair: pair[1])
@pytest.mark.parametrize("seen", [0, 1, 31, 32, 33, 64, 65, 127, 128])
def test_counters_are_left_at_zero_however_many_parts_there_are(
    target: tuple[str, str], seen: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two parts at most, of two tiles each: none, one, some or all have places."""
    given: list[torch.Tensor] = []

    def watched(scratch: torch.Tensor, count: int) -> torch.Tensor:
        given.append(launch.counters(scratch, count))
        return given[-1]

    monkeypatch.setattr(kernels, "counters", watched)
    monkeypatch.setattr(kernels, "_PROGRAMS", 4)
    made = cases.Inputs(rng, torch.float32)
    q, keys, values = made.normal(1, 6, 16), made.normal(1, 2, 128, 16), made.normal(1, 2, 128, 16)
    position = torch.tensor([seen - 1])
    got = moefuse.attend(*(t.to(target[1]) for t in (q, keys, values, position)), backend=target[0]).cpu()
    want = moefuse.attend(*(t.double() for t in (q, keys, values)), position, backend="reference")
    assert difference(got, want).within(cases.tolerance_of("attend", "out", want, torch.float32))
    assert given
    assert not any(t.any() for t in given)
