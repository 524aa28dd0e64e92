"""The built-in tile sizes, in one table: a function of shape and rows per expert, with no file behind it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moefuse import backends
from moefuse.backends.triton.runtime.launch import INTERPRETED, block_of, capability, ceil_div


@dataclass(frozen=True)
class Tile:
    """One matrix product's tile. ``warps`` and ``stages`` are the compiler's num_warps and num_stages; of matrix-vector
    products of blocks, stages are the chunks of K that may be loaded at once.

    ``copy_engine``: tiles of weights, and of rows that lie together, come by TMA (Hopper and later).
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    copy_engine: bool = False

    def shared_bytes(self, itemsize: int, gated: bool, format: str = "") -> int:
        weights = (2 if gated else 1) * self.n * self.k
        if format:  # every load of bytes is a tile of its own; no format has more than two that are as wide
            return (self.stages - 1) * (self.m * self.k * itemsize + 2 * weights)
        return self.stages * (self.m * self.k + weights) * itemsize


#: at or under this many tokens each assignment is a matrix-vector product of its own
DECODE_TOKENS = 4
#: up to this many rows `moefuse.linear` is one launch that reads each weight once
LINEAR_ROWS = 16
#: over this many rows per expert tiles are at their largest
MANY_ROWS = 96
#: over this many rows per expert Hopper takes grouped_linear_hopper.py's product where that can
SWAP_AB_ROWS = 24
#: up to this many an invariant call leaves numbers to tiles, whose sums are in the same order and begin sooner
INVARIANT_TILE_ROWS = 1
#: and over this many where it decodes weights on the way, by the 128 rows at a time
SWAP_AB_ROWS_IN_BLOCKS = 4
#: tokens of its tiles -> stages of operands that 227 KiB of shared memory hold
SWAP_AB_STAGES = {64: 7, 128: 5, 256: 4}
#: up to this many rows per expert weights in blocks are decoded by who multiplies (grouped_linear_hopper_blocks.py),
#: but for codes that are looked up: at 32 rows MXFP4 took 1.52 times as long as bfloat16 so, and 1.16 decoded ahead
SELF_DECODED_ROWS = 48
#: tokens of its tiles -> stages of tokens, and boxes of codes
SWAP_AB_RINGS = {32: (8, 8), 128: (5, 6)}
#: likewise stages of grouped_linear_hopper_fp8.py's product
SWAP_AB_STAGES_FP8 = {32: 8, 64: 7, 128: 5, 256: 4}
#: tiles of blocks up to this high are multiplied row by row of x, without tensor cores
FEW_ROWS = 8
#: of gate rows in blocks beside up rows in numbers, or the other way round: strips of both take their room
MIXED = Tile(16, 32, 256, 4, 1)
#: up to this many programs of the down matrix-vector product leave room on a card
_DECODE_PROGRAMS = 600
#: an invariant call's tile of few tokens, experts_few.py: rows of a weight are its ``n``, and ``m`` the fewest columns
#: that Hopper's tensor cores take from Triton
FEW_TILE = Tile(16, 64, 128, 4, 5)
#: programs that fill a card with one each, about
_SMALL_CARD = 128


def decodes(T: int) -> bool:
    """Whether each assignment of so many tokens is a matrix-vector product of its own."""
    return T <= DECODE_TOKENS and not backends.invariant()


def is_one_launch(T: int, K: int) -> bool:
    """Whether `moefuse.linear` of so many rows reads each weight once, in one launch."""
    return T <= LINEAR_ROWS and K > 0 and not backends.invariant()


def shared_limit(device: torch.device) -> int:
    """Shared memory one program may take."""
    if device.type != "cuda":
        return 227 * 1024
    # torch's type stubs do not know the attribute
    limit: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin")  # noqa: B009
    return limit


def decode_up_tile(T: int, format: str = "") -> Tile:
    """The tile of the up matrix-vector product; ``m`` is not used."""
    if INTERPRETED:
        return Tile(1, 32, 256 if format else 64, 4, 1)
    if format == "FP8":  # many short programs: one begins to load while another multiplies
        return Tile(1, 4, 2048, 4, 1)
    if format:  # as many stages as chunks that are loaded at once
        return Tile(1, 16, 1024, 8, 2) if T == 1 else Tile(1, 16, 512, 4, 1)
    return Tile(1, 8, 256, 4, 2 if T == 1 else 3)


def decode_down_tile(results: int, K: int, top_k: int, format: str = "") -> Tile:
    """Likewise of the down product, for so many ``results``. A program holds ``top_k`` tiles at once."""
    if INTERPRETED:
        return Tile(1, 16, 256 if format else 64, 4, 1)
    slots = block_of(top_k, 1)
    if format:
        n = min(8, max(1, 64 // slots))
        if format == "FP8":
            return Tile(1, n, 256, 8 if results <= 2 * _SMALL_CARD * n else 4, 1)
        return Tile(1, n, 256, 8, 4)
    n = 4 if slots <= 8 else 2
    # A program has one chunk of each row under way: a short one where programs fill the card, but 256 bytes of a long
    # row, and of a single one all there is room for. Fewer slots leave room for more of each.
    short = results > _DECODE_PROGRAMS * n and (slots in (2, 4) or K <= 1024)
    k, warps = (64, 4) if short else (128, 8)
    return Tile(1, n, k * max(1, 8 // slots), warps, 1)


def linear_tile(T: int, N: int, itemsize: int, device: torch.device, format: str = "") -> Tile:
    """The tile of `moefuse.linear` for few rows and ``N`` columns of all its weights."""
    if INTERPRETED:
        return Tile(2, 8, 256 if format else 32, 4, 1) if T == 1 else Tile(16, 64, 32, 4, 1)
    if T == 1 and format:
        return Tile(1, 8, 1024, 2, 1)
    if T == 1:  # a warp alone, so that sums cross no warps; each thread has 16 loads of 16 bytes under way
        return Tile(1, 2, 2048 // itemsize, 1, 1)
    if format:
        return Tile(8 if T <= 8 else 16, 64 if N >= 128 * _SMALL_CARD else 32, 256, 2, 3)
    if itemsize == 4:
        tile = Tile(16, 32, 64, 4, 3)
    else:
        tile = Tile(16, 32, 256, 2, 4) if N >= 32 * _SMALL_CARD else Tile(16, 16, 512, 2, 3)
    return _fitted(tile, itemsize, False, device)


def product_tile(rows_per_expert: float, itemsize: int, gated: bool, device: torch.device, format: str = "") -> Tile:
    """The tile for a grouped product; fewer stages, then a shorter K, until it fits the card's shared memory.

    In an invariant call tiles have one height, which decides which tensor cores multiply; width and depth do not show.
    """
    if backends.invariant():
        return _one_product_tile(rows_per_expert, itemsize, gated, device, format)
    if INTERPRETED:
        few = format and rows_per_expert <= 2
        return Tile(2, 32, 256, 4, 1) if few else Tile(16, 256 if format else 32, 32, 4, 1)
    if format:
        return _block_tile(rows_per_expert, itemsize, gated, device, format)
    # Measured on an H200 with Qwen3-30B-A3B's shape (docs/performance.md).
    engine = capability(device) >= (9, 0)
    if rows_per_expert <= 4:
        tile = Tile(16, 32, 128, 4, 4) if gated else Tile(16, 64, 128, 4, 4)
    elif rows_per_expert <= 8:
        tile = Tile(16, 64, 128, 4, 3) if gated else Tile(16, 64, 128, 4, 4)
    elif rows_per_expert <= 32:
        tile = Tile(32, 64, 128, 4, 3) if gated else Tile(32, 128, 128, 4, 3)
    elif rows_per_expert <= MANY_ROWS:
        tile = Tile(64, 64, 64, 4, 4, engine) if gated else Tile(64, 128, 64, 4, 4, engine)
    else:
        tile = Tile(128, 128, 64, 8, 4, engine) if gated else Tile(128, 256, 64, 8, 4, engine)
    if itemsize == 4:
        tile = Tile(min(tile.m, 64), 64, 32, 4, 2)
    return _fitted(tile, itemsize, gated, device)


def _one_product_tile(load: float, itemsize: int, gated: bool, device: torch.device, format: str) -> Tile:
    """Of one height for every number of rows; too high to be multiplied row by row of rounded x."""
    if INTERPRETED:
        return Tile(16, 256 if format else 32, 32, 4, 1)
    if format:
        # Products of float32 are written out: the more warps, the shorter, and the sooner compiled.
        tile = Tile(16, 64, 256, 8, 2) if itemsize == 4 else Tile(32, 64, 256, 4, 2)
        return _with_fewer_stages(tile, itemsize, gated, device, format)
    engine = capability(device) >= (9, 0)
    tile = Tile(64, 64, 32, 4, 2) if itemsize == 4 else Tile(64, 64 if gated else 128, 64, 4, 4, engine)
    if itemsize == 2 and load <= INVARIANT_TILE_ROWS:
        tile = Tile(64, 64, 64, 4, 4) if gated else Tile(64, 64, 128, 4, 3)
    return _fitted(tile, itemsize, gated, device)


def swap_ab_width(rows_per_expert: float) -> int:
    """Tokens of a tile of grouped_linear_hopper.py's product: the fewest of which most experts need one tile."""
    return 64 if rows_per_expert <= 80 else 128 if rows_per_expert <= 136 else 256


def swap_ab_blocks_width(rows_per_expert: float) -> int:
    """Likewise of grouped_linear_hopper_blocks.py's product."""
    return 32 if rows_per_expert <= SELF_DECODED_ROWS else 128


def swap_ab_fp8_width(rows_per_expert: float) -> int:
    """Likewise of grouped_linear_hopper_fp8.py's product."""
    return 32 if rows_per_expert <= SELF_DECODED_ROWS else swap_ab_width(rows_per_expert)


def _fitted(tile: Tile, itemsize: int, gated: bool, device: torch.device) -> Tile:
    """Fewer stages, then a shorter K, until the tile fits the card's shared memory."""
    limit = shared_limit(device)
    while tile.shared_bytes(itemsize, gated) > limit:
        if tile.stages > 2:
            tile = dataclasses.replace(tile, stages=tile.stages - 1)
        else:
            tile = dataclasses.replace(tile, k=tile.k // 2)
    return tile


def _block_tile(rows_per_expert: float, itemsize: int, gated: bool, device: torch.device, format: str) -> Tile:
    """The tile for weights in blocks: k is the strip of 256 that all formats share."""
    if itemsize == 4:  # its products are written out, and compile by their size
        tile = Tile(16, 64, 256, 4, 2)
    elif rows_per_expert <= 2:
        tile = Tile(2, 64, 256, 4, 1)
    elif rows_per_expert <= SWAP_AB_ROWS_IN_BLOCKS:
        tile = Tile(4, 64, 256, 4, 1)
    elif rows_per_expert <= FEW_ROWS:  # Hopper has its own product from here on
        tile = Tile(8, 32, 256, 4, 1)
    elif rows_per_expert <= 16:
        tile = Tile(16, 64, 256, 4, 2)
    elif rows_per_expert <= MANY_ROWS:
        tile = Tile(32, 64, 256, 4, 2)
    else:
        tile = Tile(64, 128, 256, 8, 2)
    return _with_fewer_stages(tile, itemsize, gated, device, format)


def _with_fewer_stages(tile: Tile, itemsize: int, gated: bool, device: torch.device, format: str) -> Tile:
    """Until the tile fits the card's shared memory; its strip stays."""
    limit = shared_limit(device)
    while tile.stages > 1 and tile.shared_bytes(itemsize, gated, format) > limit:
        tile = dataclasses.replace(tile, stages=tile.stages - 1)
    return tile


# The backward's tiles are not measured yet: they follow the forward's of the same height.


#: bytes of numbers that weights in blocks are decoded into at a time, where that is done ahead of a product
DECODED_BYTES = 128 << 20


def decodes_first(rows_per_expert: float, itemsize: int) -> bool:
    """Whether a transposed product with weights in blocks decodes them ahead: of many rows each tile would again."""
    return rows_per_expert > MANY_ROWS and itemsize == 2 and not backends.invariant()


def transposed_tile(rows_per_expert: float, itemsize: int, device: torch.device, in_blocks: bool = False) -> Tile:
    """The tile of a product with a transposed weight; ``in_blocks``: which is decoded on the way, half a strip wide."""
    if INTERPRETED:
        return Tile(16, 128 if in_blocks else 32, 32, 4, 1)
    if backends.invariant():
        rows_per_expert = MANY_ROWS  # the load does not count
    engine = capability(device) >= (9, 0)
    if in_blocks and itemsize == 4:
        return Tile(32, 128, 32, 4, 1)
    if in_blocks:  # the higher, the fewer times a weight is decoded; two programs share a processor and take turns
        return Tile(32, 128, 64, 4, 3) if rows_per_expert <= 32 else Tile(128, 128, 64, 4, 3, engine)
    if itemsize == 4:
        tile = Tile(64, 64, 32, 4, 2)
    elif rows_per_expert <= 32:
        tile = Tile(32, 128, 64, 4, 4)
    elif rows_per_expert <= 96:
        tile = Tile(64, 128, 64, 4, 4, engine)
    else:
        tile = Tile(128, 256, 64, 8, 4, engine)
    return _fitted(tile, itemsize, False, device)


def outer_tile(rows_per_expert: float, itemsize: int, gather_x: bool, device: torch.device) -> Tile:
    """The tile of a weight gradient, ``m`` by ``n``, with ``k`` of an expert's rows at a time.

    The compiler spends every other stage on the row numbers, which the loads of the gathered rows wait for.
    """
    if INTERPRETED:
        return Tile(32, 32, 32, 4, 1)
    engine = capability(device) >= (9, 0)
    if itemsize == 4:
        tile = Tile(64, 64, 32, 4, 3)
    elif rows_per_expert <= 32:
        tile = Tile(128, 128, 32, 8, 3)
    else:  # the wider side is the one that the copy engine brings
        tile = Tile(256, 128, 64, 8, 5, engine) if gather_x else Tile(128, 256, 64, 8, 5, engine)
    return _fitted(tile, itemsize, False, device)


class OuterTile(NamedTuple):
    """A tile of grouped_outer_hopper.py: columns of either operand, rows summed at a time, and stages of them."""

    left: int
    right: int
    rows: int
    stages: int


#: over this many rows per expert Hopper takes grouped_outer_hopper.py's product
OUTER_ROWS = 32


def hopper_outer_tile() -> OuterTile:
    """The tile of a weight gradient on Hopper."""
    return OuterTile(128, 256, 64, 4)


class RowsTile(NamedTuple):
    """A tile of a pass over rows."""

    rows: int
    columns: int
    warps: int


def derivatives_tile(I: int) -> RowsTile:
    """Of the derivatives of activations: two rows a program, whose loads are all under way at once.

    They may be written where they were read, so a number is one thread's: no more threads than numbers.
    """
    rows, columns = 2, min(block_of(I), 1024)
    return RowsTile(rows, columns, min(4, rows * columns // 32))


#: bytes of slot rows held at once where a backward or a training forward sums over slots
SLOT_BYTES = 80 << 20


def slot_columns(S: int, H: int, itemsize: int, free: int) -> int:
    """How many of H columns of slot rows are made at a time; ``free``: bytes that the step has for them anyway."""
    fit = max(SLOT_BYTES, free) // max(1, S * itemsize)
    if fit >= H:
        return H
    chunks = ceil_div(H, max(256, fit // 256 * 256))
    return ceil_div(ceil_div(H, chunks), 256) * 256
