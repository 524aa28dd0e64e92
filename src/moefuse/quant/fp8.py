"""Weights of FP8 checkpoints in blocks: `from_fp8`.

A block of "FP8" is a float32 scale and 128 numbers of a row in float8_e4m3fn, so that every kind of scale that
checkpoints have becomes blocks without loss, the scale repeated row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.quant.arrange import wanted
from moefuse.quant.formats import FORMATS
from moefuse.quant.tensor import QuantTensor, arrange_

_FORM = FORMATS["FP8"]
_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def from_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int] | None = None) -> QuantTensor:
    """The weights of an FP8 checkpoint, number for number, as blocks.

    Args:
        weight: float8_e4m3fn ``[.., N, K]``, usually ``[E, N, K]``; ``K`` a multiple of 128.
        scale: what numbers are multiplied with (checkpoints say ``weight_scale_inv`` or ``weight_scale``), in float32,
            bfloat16, float16 or float8_e8m0fnu, finite. By blocks ``[.., ceil(N / rows), ceil(K / columns)]``, by row
            ``[.., N, 1]``, by matrix ``[.., 1, 1]``, ``[.., 1]`` or ``[..]``, or one for all ``[]`` or ``[1]``.
        block: rows and columns that share a scale. None: 128 wherever that gives the scales' shape, otherwise what
            divides the weight evenly.

    Returns:
        A `QuantTensor` on the weight's device, arranged for it, filled one matrix at a time.

    >>> weight = torch.full((2, 4, 256), 1.5).to(torch.float8_e4m3fn)
    >>> stack = from_fp8(weight, torch.tensor([[[2.0, 4.0]], [[8.0, 16.0]]]))
    >>> stack
    QuantTensor(FP8, shape=[2, 4, 256], device=cpu, 2,112 bytes)
    >>> stack.dequantize()[:, 0, ::128]
    tensor([[ 3.,  6.],
            [12., 24.]])
    """
    if not isinstance(weight, Tensor) or weight.dtype != torch.float8_e4m3fn:
        got = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"from_fp8: weight must be a float8_e4m3fn tensor, got {got}")
    if not isinstance(scale, Tensor) or scale.dtype not in _SCALES:
        got = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SCALES)
        raise TypeError(f"from_fp8: scale must be a tensor of {known}, got {got}")
    if weight.dim() < 2 or weight.shape[-1] % _FORM.values:
        rule = f"a shape [.., N, K] with K a multiple of {_FORM.values}"
        raise ValueError(f"from_fp8: weight must have {rule}, got shape {list(weight.shape)}")
    if scale.device != weight.device:
        raise ValueError(f"from_fp8: scale must be on the weight's device {weight.device}, got {scale.device}")
    pair = isinstance(block, (tuple, list)) and [type(size) for size in block] == [int, int]
    if block is not None and not pair:
        raise TypeError(f"from_fp8: block must be rows and columns, two ints, got {block!r}")
    numbers = scale.detach().float()
    if not numbers.is_meta and not numbers.isfinite().all():
        raise ValueError("from_fp8: scale must be finite, got NaN or infinity")
    *lead, N, K = weight.shape
    blocks = torch.empty((*lead, N, _FORM.row_bytes(K)), dtype=torch.uint8, device=weight.device)
    if blocks.numel() == 0:
        return QuantTensor(blocks, _FORM.name)
    numbers, (rows, columns) = _by_block(numbers, tuple(weight.shape), block)
    codes, scales = weight.detach().view(torch.uint8).reshape(-1, N, K), numbers.reshape(-1, *numbers.shape[-2:])
    for into, code, own in zip(blocks.view(-1, N, blocks.shape[-1]), codes, scales, strict=True):
        places = into.view(N, K // _FORM.values, _FORM.nbytes)
        places[..., 4:] = code.unflatten(-1, (-1, _FORM.values))
        spread = own.repeat_interleave(rows, 0)[:N].repeat_interleave(columns // _FORM.values, 1)
        places[..., :4] = spread[:, : K // _FORM.values].contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return arrange_(QuantTensor(blocks, _FORM.name), wanted(blocks))


def _by_block(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[Tensor, tuple[int, int]]:
    """Scales ``[.., n, k]`` with the weight's leading dimensions, and the rows and columns that each is for."""
    *lead, N, K = shape
    kinds = "[.., ceil(N / rows), ceil(K / columns)], [.., N, 1], [.., 1], [..] or []"
    wrong = f"from_fp8: scale must have one of the shapes {kinds} for a weight {list(shape)}, got {list(scale.shape)}"
    if scale.numel() == 1 and scale.dim() <= 1:
        scale = scale.reshape(1, 1).expand(*lead, 1, 1)
    elif tuple(scale.shape) in ((*lead,), (*lead, 1)):
        scale = scale.reshape(*lead, 1, 1)
    elif tuple(scale.shape[:-2]) != tuple(lead) or scale.dim() != len(shape):
        raise ValueError(wrong)
    n, k = scale.shape[-2:]
    rows, columns = (_size(N, n), _size(K, k)) if block is None else block
    if rows < 1 or columns < 1 or (n, k) != (-(-N // rows), -(-K // columns)):
        raise ValueError(wrong if block is None else f"{wrong} in blocks of {rows} x {columns}")
    if k > 1 and columns % _FORM.values:
        rule = f"for a multiple of {_FORM.values} columns each"
        raise ValueError(f"from_fp8: scales must be {rule}, got one for {columns} of a weight {list(shape)}")
    return scale, (rows, -(-columns // _FORM.values) * _FORM.values)


def _size(total: int, count: int) -> int:
    """How many of so many rows or columns share one of so many scales; 0 where that has no answer."""
    if count == -(-total // 128):
        return 128
    return total // count if count > 0 and total % count == 0 else 0
