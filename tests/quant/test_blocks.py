"""Blocks to numbers: bit for bit what the gguf package says."""

import gguf
import numpy as np
import pytest
import torch

from moefuse.quant.blocks import UNPACK, unpack
from moefuse.quant.formats import FORMATS, format_of

EACH = pytest.mark.parametrize("name", [form.name for form in FORMATS.values() if form.ggml >= 0])
#: float16 factors that a careless conversion gets wrong
HALVES = {
    "one": 0x3C00,
    "zero": 0x0000,
    "minus_zero": 0x8000,
    "smallest_denormal": 0x0001,
    "largest_denormal": 0x83FF,
    "largest": 0x7BFF,
    "infinite": 0x7C00,
    "minus_infinite": 0xFC00,
    "nan": 0x7E01,
    "signalling_nan": 0xFD55,
}


def assert_as_gguf(blocks: torch.Tensor, name: str) -> None:
    with np.errstate(all="ignore"):
        want = torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name]))
    got = unpack(blocks, name)
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    # A NaN is a NaN, whatever its payload; every other number to the last bit, the sign of zero too.
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(nan=0.0).view(torch.int32), want.nan_to_num(nan=0.0).view(torch.int32))


@EACH
def test_the_row_is_what_gguf_says(name: str) -> None:
    form = format_of(name)
    kind = gguf.GGMLQuantizationType[name]
    assert (form.ggml, (form.values, form.nbytes)) == (kind.value, gguf.GGML_QUANT_SIZES[kind])


@EACH
def test_random_blocks(name: str, rng: torch.Generator) -> None:
    blocks = torch.randint(256, (7, 5, 3 * FORMATS[name].nbytes), generator=rng, dtype=torch.uint8)
    assert_as_gguf(blocks, name)


@EACH
@pytest.mark.parametrize("half", HALVES)
def test_odd_factors(name: str, half: str, rng: torch.Generator) -> None:
    form = FORMATS[name]
    blocks = torch.randint(256, (64, form.nbytes), generator=rng, dtype=torch.uint8)
    low, high = HALVES[half] & 255, HALVES[half] >> 8
    for i, place in enumerate(form.scales):
        # In some blocks the first factor alone, in some the second, in some both.
        chosen = slice(i * 16, i * 16 + 32)
        blocks[chosen, place], blocks[chosen, place + 1] = low, high
    assert_as_gguf(blocks, name)


@EACH
@pytest.mark.parametrize("byte", [0, 255, 0x0F, 0xF0, 0x80, 0x7F])
def test_one_byte_everywhere(name: str, byte: int) -> None:
    assert_as_gguf(torch.full((2, 2 * FORMATS[name].nbytes), byte, dtype=torch.uint8), name)


def test_every_exponent_of_mxfp4() -> None:
    blocks = torch.randint(256, (256, 17), dtype=torch.uint8)
    blocks[:, 0] = torch.arange(256)
    assert_as_gguf(blocks, "MXFP4")


@EACH
def test_any_address_and_no_row(name: str, rng: torch.Generator) -> None:
    """One block at an odd address, and nothing at all."""
    size = FORMATS[name].nbytes
    blocks = torch.randint(256, (size + 1,), generator=rng, dtype=torch.uint8)[1:]
    assert_as_gguf(blocks, name)
    assert unpack(torch.empty((4, 0, size), dtype=torch.uint8), name).shape == (4, 0, FORMATS[name].values)


def test_every_format_is_unpacked() -> None:
    assert list(UNPACK) == list(FORMATS)


def test_a_row_of_part_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Q4_K: a row must be a multiple of 256 values, got 300"):
        FORMATS["Q4_K"].row_bytes(300)
    with pytest.raises(ValueError, match=r"format must be one of Q4_K, .*got 'IQ1_S'"):
        format_of("IQ1_S")
