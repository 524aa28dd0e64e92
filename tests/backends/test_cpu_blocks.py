"""Weights in GGUF blocks on the CPU: what rounding does to activations, and that nothing else depends on it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moefuse
from moefuse.backends import cpu
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor
from moefuse.testing import cases
from moefuse.testing.compare import difference
from moefuse.testing.random_blocks import random_blocks


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.randint(2**31, ())))


def rounded(x: Tensor) -> Tensor:
    """Activations as the integer kernels see them: 8 bits in groups of 32, in float32."""
    groups = x.float().view(-1, 32)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    # Not `127 / largest`: torch takes the reciprocal there, which rounds once more.
    inverse = torch.full_like(largest, 127) / largest
    return ((groups * inverse).round() * (largest / 127)).view(x.shape)


def product(x: Tensor, weight: Tensor | QuantTensor, backend: str) -> Tensor:
    ids = torch.zeros(len(x), 1, dtype=torch.int32)
    return moefuse.grouped_linear(x, weight, moefuse.plan(ids, 1), gather=True, scatter=True, backend=backend)


def identity(size: int) -> QuantTensor:
    """The unit matrix in Q8_0: its product is the activations as the kernel rounded them."""
    blocks = torch.zeros(1, size, size // 32, 34, dtype=torch.uint8)
    blocks[..., 1] = 0x3C  # 1.0
    for k in range(size):
        blocks[0, k, k // 32, 2 + k % 32] = 1
    return QuantTensor(blocks.view(1, size, -1), "Q8_0")


def test_every_format_has_kernels() -> None:
    assert frozenset(FORMATS) == cpu.FORMATS
    assert tuple(FORMATS) == tuple(cpu._native.FORMATS)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_activations_round_to_8_bits_in_groups_of_32(dtype: torch.dtype) -> None:
    x = torch.randn(6, 512, generator=generator()).to(dtype)
    x[1] *= 1e-20 if dtype != torch.float16 else 1e-3
    x[2] *= 1e30 if dtype != torch.float16 else 1e3
    x[3, 32:64] = 0.0
    assert torch.equal(product(x, identity(512), "cpu"), rounded(x).to(dtype))


@pytest.mark.parametrize("tail", [1, 3])
def test_rounding_is_finer_than_one_scale_for_256(tail: int) -> None:
    """llama.cpp rounds 256 activations with one scale for its K formats, on the same 8 bits."""
    x = torch.randn(40, 2048, generator=generator()) ** tail
    blocks = x.view(-1, 256)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    theirs = ((blocks / step).round() * step).view_as(x)
    ours = product(x, identity(2048), "cpu")
    assert float((ours - x).norm()) < float((theirs - x).norm())
    assert float((ours - x).norm()) < 0.01 * float(x.norm()) * tail


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "FP8"])
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_a_product_is_exact_on_the_rounded_activations(name: str, rows: int) -> None:
    rng = generator()
    x = torch.randn(rows, 1024, generator=rng)
    weight = random_blocks(name, (1, 45, 1024), rng, 1024**-0.5)
    want = product(rounded(x).double(), weight, "reference")
    assert difference(product(x, weight, "cpu"), want).worst < 2e-5, "sums of terms up to ten times the result"


@pytest.mark.parametrize("rows", [1, 2, 6, 70])
@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_activations_are_not_rounded_for_fp8(rows: int, size: float) -> None:
    """Its codes are no integers. Numbers of any size keep their digits."""
    rng = generator()
    x = torch.randn(rows, 1152, generator=rng) * size
    weight = random_blocks("FP8", (1, 45, 1152), rng, 1152**-0.5)
    want = product(x.double(), weight, "reference")
    assert difference(product(x, weight, "cpu"), want).worst < 2e-6
    assert torch.equal(product(x, weight.exactly(), "cpu"), product(x, weight, "cpu"))


@pytest.mark.parametrize("rows", [1, 2, 6, 70])
def test_nan_codes_and_strange_scales_of_fp8(rows: int) -> None:
    """A row of weights with a NaN or a scale that is none gives NaN, whatever it is multiplied with, and no other."""
    rng = generator()
    x = torch.randn(rows, 384, generator=rng)
    weight = random_blocks("FP8", (1, 90, 384), rng, 0.05)
    each = weight.blocks.view(90, 3, 132)
    each[3, 1, 4 + 77], each[17, 2, 4 + 127], each[40, 0, 4] = 0x7F, 0xFF, 0xFF
    each[60, 1, :4] = torch.tensor([torch.nan]).view(torch.uint8)
    each[89, 0, :4] = torch.tensor([0.0]).view(torch.uint8)
    x[:, 128 + 77] = 0
    got, whole = product(x, weight, "cpu"), weight.dequantize()[0]
    assert torch.equal(whole.isnan().any(1).nonzero()[:, 0], torch.tensor([3, 17, 40, 60]))
    assert got[:, [3, 17, 40, 60]].isnan().all()
    want = product(x, weight, "reference")
    others = [n for n in range(90) if n not in (3, 17, 40, 60)]
    assert difference(got[:, others], want[:, others]).worst < 2e-5


@pytest.mark.parametrize("exact", [False, True])
def test_a_row_does_not_depend_on_its_batch_or_the_threads(exact: bool) -> None:
    rng = generator()
    x = torch.randn(70, 768, generator=rng)
    before = torch.get_num_threads()
    for name in FORMATS:
        weight = random_blocks(name, (1, 90, 768), rng, 0.05).exactly(exact)
        whole = product(x, weight, "cpu")
        for rows in (1, 2, 3, 5):
            assert torch.equal(product(x[7 : 7 + rows], weight, "cpu"), whole[7 : 7 + rows]), name
        torch.set_num_threads(1)
        assert torch.equal(product(x, weight, "cpu"), whole), name
        torch.set_num_threads(before)


def test_gate_up_and_down_of_any_types_in_one_call() -> None:
    """Plain, rounded and exact stacks beside each other: each product must get activations in its own form."""
    rng = generator()
    T, E, H, I = 9, 3, 256, 512
    made = cases.Inputs(rng, torch.float32)
    x, ids, weights = made.normal(T, H), made.ids(T, 2, E), made.shares(T, 2)

    def stack(kind: str, *shape: int) -> Tensor | QuantTensor:
        if kind == "plain":
            return made.weight(*shape)
        return random_blocks(kind, shape, rng, shape[-1] ** -0.5)

    kinds = ("Q4_K", "Q6_K:exact", "Q8_0", "plain")
    for gate, up, down in itertools.product(kinds, repeat=3):
        stacks = stack(gate, E, I, H), stack(up, E, I, H), stack(down, E, H, I)
        arguments = (x, ids, weights, (stacks[0], stacks[1]), stacks[2])
        got = moefuse.experts(*arguments, backend="cpu")
        want = moefuse.experts(*arguments, backend="reference")
        rounds = any(isinstance(t, QuantTensor) and not t.exact for t in stacks)
        assert difference(got, want).worst < (8e-2 if rounds else 2e-5), (gate, up, down)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(
    T=st.integers(0, 40),
    E=st.integers(1, 6),
    H=st.integers(1, 3),
    I=st.integers(1, 3),
    top_k=st.integers(1, 4),
    specs=st.tuples(*[st.sampled_from([f"{name}:exact" for name in FORMATS])] * 3),
    apart=st.booleans(),
    dtype=st.sampled_from(cases.DTYPES),
    seed=st.integers(0, 2**31 - 1),
)
def test_random_shapes_against_float64(
    T: int, E: int, H: int, I: int, top_k: int, specs: tuple[str, str, str], apart: bool, dtype: torch.dtype, seed: int
) -> None:
    """Sentinels and duplicates; the residual keeps the row at the size of its terms, as in test_cpu.py."""
    made = cases.Inputs(torch.Generator().manual_seed(seed), dtype)
    form = {spec: FORMATS[spec.removesuffix(":exact")].values for spec in specs}
    H *= max(form[specs[0]], form[specs[1]])
    I *= form[specs[2]]

    def stack(spec: str, *shape: int) -> QuantTensor:
        return random_blocks(spec, shape, made.rng, shape[-1] ** -0.5)

    gate_up = (stack(specs[0], E, I, H), stack(specs[1], E, I, H)) if apart else stack(specs[0], E, 2 * I, H)
    arguments = {
        "x": made.normal(T, H), "ids": torch.randint(-1, E + 1, (T, top_k), generator=made.rng),
        "weights": made.shares(T, top_k), "gate_up": gate_up, "down": stack(specs[2], E, H, I),
        "residual": made.uniform(T, H, low=4.0, high=6.0),
    }  # fmt: skip
    got = moefuse.experts(**arguments, backend="cpu")
    wide = {name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in arguments.items()}
    want = moefuse.experts(**wide, backend="reference")
    bound = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    got, want = torch.cat((got, arguments["residual"]), -1), torch.cat((want, wide["residual"]), -1)
    assert difference(got, want).worst <= bound
