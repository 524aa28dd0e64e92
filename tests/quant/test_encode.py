"""Numbers to blocks: as the gguf package where it has an encoder, no worse than llama.cpp's elsewhere."""

import gguf
import numpy as np
import pytest
import torch

import moefuse
from moefuse.quant.encode import ENCODE

#: mean over blocks of 256 of the error's RMS over the block's, of llama.cpp's reference encoders (docs/quantisation.md)
LLAMA_CPP = {
    "normal": {"Q4_K": 0.07127, "Q6_K": 0.01770, "Q5_K": 0.03607, "Q8_0": 0.00534, "Q4_0": 0.08577},
    "student_t3": {"Q4_K": 0.09099, "Q6_K": 0.02437, "Q5_K": 0.04604, "Q8_0": 0.00788, "Q4_0": 0.12374},
}
EACH = pytest.mark.parametrize("name", ENCODE)
#: with scales in float16; test_fp8.py has what is so of FP8
OF_GGUF = pytest.mark.parametrize("name", LLAMA_CPP["normal"])


def weights(kind: str, rng: torch.Generator, rows: int = 512) -> torch.Tensor:
    z = torch.randn(rows, 1024, generator=rng)
    return z if kind == "normal" else z / torch.randn(rows, 1024, 3, generator=rng).square().mean(-1).sqrt()


def error(x: torch.Tensor, name: str) -> float:
    gap = moefuse.quantize(x, name).dequantize(torch.float64) - x
    by_block = (t.double().view(-1, 256).square().mean(-1).sqrt() for t in (gap, x))
    return float(torch.div(*by_block).mean())


@OF_GGUF
@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_the_error_is_that_of_llama_cpp(kind: str, name: str, rng: torch.Generator) -> None:
    """2,048 blocks: the mean of their errors is within 1% of its expectation, many times over."""
    assert error(weights(kind, rng), name) <= LLAMA_CPP[kind][name] * 1.05


@EACH
@pytest.mark.parametrize("scale", [0.02, 30.0])
def test_the_error_follows_the_scale(name: str, scale: float, rng: torch.Generator) -> None:
    x = weights("normal", rng, 64)
    assert error(x * scale, name) == pytest.approx(error(x, name), rel=0.02)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("kind", ["normal", "student_t3", "ties", "small", "bfloat16"])
def test_as_gguf_encodes(name: str, kind: str, rng: torch.Generator) -> None:
    x = weights("student_t3" if kind == "student_t3" else "normal", rng, 64)
    if kind == "ties":  # halves to round, and extremes of both signs
        x = torch.randint(-8, 9, x.shape, generator=rng) / 2.0
        x[::2, 0], x[::2, 5] = 63.5, -63.5
    elif kind == "small":
        x = x * 1e-7  # scales that are denormal in float16
        x[3] = 0
    elif kind == "bfloat16":
        x = x.bfloat16()
    want = gguf.quantize(x.float().numpy(), gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(moefuse.quantize(x, name).blocks.numpy(), want)


@EACH
def test_edges(name: str) -> None:
    """Blocks of zeros, of one number, of one sign, with one outlier, near the smallest and the largest number."""
    base = torch.linspace(0.1, 1.0, 256)
    rows = [
        torch.zeros(256),
        torch.full((256,), 0.3),
        base,
        -base,
        base.clone(),
        base * 1e-38,
        base * 1e-45,
        base * 1e5,
    ]
    rows[4][77] = -500.0
    x = torch.stack(rows)
    got = moefuse.quantize(x, name).dequantize()
    assert got.isfinite().all()
    assert (got[0] == 0).all()
    assert ((got - x).abs().amax(1) <= x.abs().amax(1) / 7 + 1e-6).all()


@OF_GGUF
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_magnitude_is_right_or_refused(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """From 1e-38 to 1e38, and beyond in float64: never a silent zero, nor anything else."""
    base = torch.randn(8, 256, generator=rng, dtype=torch.float64)
    levels = {"Q4_K": 15, "Q5_K": 31, "Q6_K": 32, "Q8_0": 127, "Q4_0": 8}[name]
    step = (2.4 if name in ("Q4_K", "Q5_K") else 1.2) / levels  # where zero need not be in the middle
    refused = []
    for exponent in range(-45, 46):
        x = (base * 10.0**exponent).to(dtype)
        largest = x.double().abs().amax(-1, keepdim=True)
        if exponent > 4:
            try:
                moefuse.quantize(x, name)
            except ValueError:
                refused.append(exponent)
                with pytest.raises(ValueError, match=r"finite in float32|scales below 65504"):
                    moefuse.quantize(x, name)
                continue
        got = moefuse.quantize(x, name).dequantize(torch.float64)
        # A scale is a multiple of 2**-24, and half of one is lost where it is small.
        assert ((got - x.double()).abs() <= step * largest + levels * 2.0**-24).all(), exponent
    assert refused == list(range(refused[0], 46))
    # Blocks of 256 multiply their factor by 6 or 8 bits more.
    limit = {"Q4_K": 7, "Q5_K": 7, "Q6_K": 8, "Q8_0": 7, "Q4_0": 6}[name]
    assert refused[0] in ((5,) if dtype == torch.float16 else (limit, limit + 1))


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_small_numbers_use_the_sub_scales(name: str, rng: torch.Generator) -> None:
    """1e-5 has a factor below the smallest of float16; integers of a coarser one still tell it."""
    assert error(weights("normal", rng, 64) * 1e-5, name) < 0.25


@pytest.mark.parametrize("name", [*ENCODE, "q4_k", "Q4-K", "q8_0"])
@pytest.mark.parametrize("shape", [(0,), (0, 256), (3, 0), (2, 0, 256), (0, 2, 256), (2, 3, 0)])
def test_empty_shapes(name: str, shape: tuple[int, ...]) -> None:
    stack = moefuse.quantize(torch.zeros(shape), name)
    assert stack.shape == shape
    assert stack.format in ENCODE
    assert stack.dequantize(torch.bfloat16).shape == shape


@EACH
def test_shapes_chunks_and_strides(name: str, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 512, 5, generator=rng).transpose(1, 2)
    whole = moefuse.quantize(x, name)
    assert whole.shape == (3, 5, 512)
    monkeypatch.setattr("moefuse.quant.encode._CHUNK", 700)
    assert torch.equal(moefuse.quantize(x.contiguous(), name).blocks, whole.blocks)
    assert torch.equal(moefuse.quantize(x[1, 2], name).blocks, whole.blocks[1, 2])
    assert moefuse.quantize(x[:0], name).shape == (0, 5, 512)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: (torch.ones(256), "Q3_K"), ValueError, r"quantize: format must be one of Q4_K.*got 'Q3_K'"),
        (lambda: (torch.ones(300), "Q4_K"), ValueError, r"multiple of 256 for Q4_K, got shape \[300\]"),
        (lambda: (torch.ones(256, dtype=torch.int32), "Q4_K"), TypeError, r"floating-point tensor, got torch.int32"),
        (lambda: ([1.0], "Q4_K"), TypeError, r"floating-point tensor, got list"),
        (lambda: (torch.ones(256), 7), ValueError, r"quantize: format must be one of Q4_K.*got 7"),
        (lambda: (torch.full((256,), 1e9), "Q8_0"), ValueError, r"scales below 65504, got 7\.874"),
    ],
)
def test_mistakes(make, kind, message) -> None:
    with pytest.raises(kind, match=message):
        moefuse.quantize(*make())


@OF_GGUF
@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (float("nan"), torch.float32, "must be finite in float32, got NaN, infinity or beyond 3.4e38"),
        (float("inf"), torch.bfloat16, "must be finite in float32"),
        (float("-inf"), torch.float16, "must be finite in float32"),
        (1e300, torch.float64, "must be finite in float32"),
        (-3.4e38, torch.float32, "must leave scales below 65504, got"),
        (1e30, torch.bfloat16, "must leave scales below 65504, got"),
        (1e12, torch.float64, "must leave scales below 65504, got"),
    ],
)
def test_what_cannot_be_encoded(name: str, value: float, dtype: torch.dtype, message: str) -> None:
    for row in (torch.full((256,), value, dtype=dtype), torch.eye(256, dtype=torch.float64)[7].mul(value).to(dtype)):
        with pytest.raises(ValueError, match=f"quantize: weight {message}"):
            moefuse.quantize(row, name)
