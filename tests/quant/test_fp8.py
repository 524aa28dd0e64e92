"""FP8 blocks: what their bytes mean, and checkpoints' weights and scales as blocks."""

import pytest
import torch

import moefuse
from moefuse import QuantTensor
from moefuse.quant import gguf
from moefuse.quant.blocks import e4m3, unpack
from moefuse.quant.fp8 import from_fp8
from moefuse.testing.random_blocks import random_blocks

E, N, K = 3, 200, 384


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit; a NaN is a NaN."""
    zeros = a.nan_to_num(nan=0.0).view(torch.int32), b.nan_to_num(nan=0.0).view(torch.int32)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(*zeros)


def random_codes(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=rng, dtype=torch.uint8).view(torch.float8_e4m3fn)


def test_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert same(e4m3(codes), codes.view(torch.float8_e4m3fn).float())
    assert int(e4m3(codes).isnan().sum()) == 2


def test_random_blocks_and_odd_scales(rng: torch.Generator) -> None:
    blocks = torch.randint(256, (64, 3 * 132), generator=rng, dtype=torch.uint8)
    odd = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-45, 3e38, torch.inf, -torch.inf, torch.nan])
    blocks[: len(odd), :4] = odd.view(torch.uint8).view(-1, 4)
    each = blocks.view(64, 3, 132)
    scales = each[..., :4].contiguous().view(torch.float32)
    want = scales * each[..., 4:].contiguous().view(torch.float8_e4m3fn).float()
    assert same(unpack(blocks, "FP8"), want.flatten(1))


def spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    wide = scale.float().repeat_interleave(rows, -2)[..., :N, :]
    return wide.repeat_interleave(columns, -1)[..., :K]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [((E, 2, 3), 128, 128), ((E, N, 1), 1, K), ((E, 1, 1), N, K), ((E, 4, 1), 50, K), ((E, N, 3), 1, 128)],
)
def test_scales_by_block_row_and_matrix(
    shape: tuple[int, ...], rows: int, columns: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    weight = random_codes(rng, E, N, K)
    e8m0 = torch.randint(0x70, 0x80, shape, generator=rng, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    scale = e8m0 if dtype == e8m0.dtype else (torch.rand(shape, generator=rng) + 0.1).to(dtype)
    for block in (None, (rows, columns)):
        stack = from_fp8(weight, scale, block)
        assert (stack.spec, stack.shape) == ("FP8", weight.shape)
        assert same(stack.dequantize(), spread(scale, rows, columns) * weight.float())
        one = from_fp8(weight[1], scale[1], block)
        assert torch.equal(one.blocks, stack.blocks[1])


def test_few_scales(rng: torch.Generator) -> None:
    weight = random_codes(rng, E, N, K)
    scale = torch.rand(E, generator=rng) + 0.1
    want = scale[:, None, None] * weight.float()
    for own in (scale, scale[:, None], scale[:, None, None]):
        assert same(from_fp8(weight, own).dequantize(), want)
    for one in (scale[0], scale[:1]):
        assert same(from_fp8(weight, one).dequantize(), scale[0] * weight.float())
        assert same(from_fp8(weight[2], one).dequantize(), scale[0] * weight[2].float())


def test_larger_blocks_and_strange_memory(rng: torch.Generator) -> None:
    scale = torch.rand((2, E, 1, 2), generator=rng) + 0.1
    weight = random_codes(rng, K, 2 * N, E, 2).permute(3, 2, 1, 0)[:, :, ::2]
    assert weight.shape == (2, E, N, K)
    got = from_fp8(weight, scale, (N, 256)).dequantize()
    assert same(got, spread(scale.expand(2, E, N, 2), 1, 256) * weight.float())
    assert from_fp8(weight[:, :, :0], torch.ones(2, E, 0, 3)).shape == (2, E, 0, K)
    meta = from_fp8(weight.to("meta"), scale.to("meta"), (N, 256))
    assert meta.shape == weight.shape


@pytest.mark.parametrize(
    ("weight", "scale", "block", "error", "message"),
    [
        (
            torch.ones(4, 256),
            torch.ones(1),
            None,
            TypeError,
            "weight must be a float8_e4m3fn tensor, got torch.float32",
        ),
        (torch.ones(4, 256).to(torch.float8_e5m2), torch.ones(1), None, TypeError, "got torch.float8_e5m2"),
        ((4, 256), torch.ones(1).double(), None, TypeError, "scale must be a tensor of float32, .* got torch.float64"),
        ((4, 192), torch.ones(1), None, ValueError, r"K a multiple of 128, got shape \[4, 192\]"),
        ((256,), torch.ones(1), None, ValueError, r"a shape \[.., N, K\]"),
        ((300, 512), torch.ones(4, 4), None, None, ""),
        ((300, 512), torch.ones(7, 4), None, ValueError, r"one of the shapes .* a weight \[300, 512\], got \[7, 4\]"),
        ((300, 512), torch.ones(300), None, ValueError, r"got \[300\]"),
        ((3, 300, 512), torch.ones(2, 3, 4), None, ValueError, r"got \[2, 3, 4\]"),
        ((300, 512), torch.ones(3, 4), (100, 256), ValueError, r"got \[3, 4\] in blocks of 100 x 256"),
        ((300, 512), torch.ones(3, 8), None, ValueError, "for a multiple of 128 columns each, got one for 64"),
        ((300, 512), torch.ones(3, 4), (0, 128), ValueError, "in blocks of 0 x 128"),
        ((300, 512), torch.ones(3, 4), 128, TypeError, "block must be rows and columns, two ints, got 128"),
        ((300, 512), torch.ones(3, 4), (128.0, 128), TypeError, r"two ints, got \(128.0, 128\)"),
        ((300, 512), torch.full((3, 4), torch.nan), None, ValueError, "scale must be finite"),
        ((300, 512), torch.full((3, 4), torch.inf), None, ValueError, "scale must be finite"),
        ((300, 512), torch.ones(3, 4, device="meta"), None, ValueError, "must be on the weight's device cpu, got meta"),
    ],
)
def test_bad_input(weight, scale, block, error, message) -> None:
    weight = weight if isinstance(weight, torch.Tensor) else torch.ones(weight).to(torch.float8_e4m3fn)
    if error is None:
        assert from_fp8(weight, scale, block).shape == weight.shape
    else:
        with pytest.raises(error, match=message):
            from_fp8(weight, scale, block)


def test_quantize(rng: torch.Generator) -> None:
    x = torch.randn((E, 7, K), generator=rng) * torch.logspace(-30, 30, E)[:, None, None]
    x[0, 0] = 0
    stack = moefuse.quantize(x, "fp8")
    blocks = x.view(E, 7, -1, 128)
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    got = stack.dequantize().view_as(blocks)
    assert torch.equal(got[0, 0], torch.zeros(3, 128))
    # Half a unit of the last of three bits, or of the smallest number.
    assert ((got - blocks).abs() <= (blocks.abs() / 16).clamp(min=2.0**-10 * scale) * (1 + 1e-6)).all()
    # The largest of a block is kept.
    assert torch.allclose(got.abs().amax(-1), blocks.abs().amax(-1), rtol=1e-6, atol=0)
    # Blocks whose scale is denormal, and those far below it.
    for size in (1e-40, 1e-44, 1e-45):
        small = moefuse.quantize(torch.full((1, 128), size), "FP8").dequantize()
        assert small.isfinite().all()
        assert (small - size).abs().max() <= max(size / 16, 1e-43)
    assert moefuse.quantize(torch.full((1, 128), -3.4e38), "FP8").dequantize().isfinite().all()
    with pytest.raises(ValueError, match="must be finite in float32"):
        moefuse.quantize(torch.full((1, 128), torch.inf), "FP8")
    with pytest.raises(ValueError, match="multiple of 128 for FP8"):
        moefuse.quantize(torch.ones(4, 64), "FP8")


def test_what_is_saved_loads_again(rng: torch.Generator) -> None:
    """Through `from_fp8` what `quantize` made, its scales taken out of the blocks."""
    stack = random_blocks("FP8", (E, 5, K), rng, 0.1)
    each = stack.blocks.view(E, 5, K // 128, 132)
    scale, codes = each[..., :4].contiguous().view(torch.float32)[..., 0], each[..., 4:].flatten(-2)
    assert torch.equal(from_fp8(codes.view(torch.float8_e4m3fn), scale).blocks, stack.blocks)


def test_gguf_has_no_such_type(rng: torch.Generator, tmp_path) -> None:
    stack = random_blocks("FP8", (E, 5, K), rng, 0.1)
    assert repr(stack) == "QuantTensor(FP8, shape=[3, 5, 384], device=cpu, 5,940 bytes)"
    with pytest.raises(ValueError, match=r"blk\.0 must be of a type that GGUF has, got FP8"):
        gguf.write(tmp_path / "x.gguf", {"general.architecture": "llama"}, {"blk.0": stack})
    assert not list(tmp_path.iterdir())


def test_bytes_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="whole FP8 blocks, a multiple of 132 bytes"):
        QuantTensor(torch.zeros((2, 128), dtype=torch.uint8), "FP8")
