"""plan on NVIDIA GPUs: one launch for few assignments, three for many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.backends.triton.runtime.launch import PDL, block_of, ceil_div, launch, launch_dependents, wait

#: assignments a program places; also the grain of the counts
_BLOCK_S = 128


@triton.jit
def _experts_of(ids_ptr, s, S, E):
    """Expert of each assignment, E for none."""
    expert = tl.load(ids_ptr + s, mask=s < S, other=0).to(tl.int64)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit(do_not_specialize=["S"])
def _count_kernel(ids_ptr, table_ptr, S, E, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr):
    """table [chunks, BLOCK_E]: how many assignments of a chunk go to each expert. Grid: chunks."""
    wait()
    launch_dependents()
    s = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    counts = tl.histogram(_experts_of(ids_ptr, s, S, E), BLOCK_E, mask=s < S)
    tl.store(table_ptr + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(table_ptr, total_ptr, chunks, BLOCK_E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Turn counts per chunk into counts before the chunk, and their sum into total [BLOCK_E]. Grid: expert columns."""
    wait()
    launch_dependents()
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, chunks, ROWS):
        chunk = start + tl.arange(0, ROWS)
        # [ROWS, COLUMNS]
        at = table_ptr + chunk[:, None] * BLOCK_E + e[None, :]
        counts = tl.load(at, mask=(chunk < chunks)[:, None], other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, 0) - counts, mask=(chunk < chunks)[:, None])
        before += tl.sum(counts, 0)
    tl.store(total_ptr + e, before)


@triton.jit(do_not_specialize=["S"])
def _place_kernel(
    ids_ptr,
    before_ptr,
    total_ptr,
    counts_ptr,
    offsets_ptr,
    order_ptr,
    inverse_ptr,
    S,
    E,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Give the assignments of a chunk their positions. Grid: chunks; a lone chunk counts for itself."""
    wait()
    launch_dependents()
    mine = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    s = mine * BLOCK_S + tl.arange(0, BLOCK_S)
    expert = _experts_of(ids_ptr, s, S, E)
    # Bin E takes those without an expert and sorts last, because BLOCK_E > E.
    before = tl.zeros([BLOCK_E], tl.int32)
    if total_ptr is not None:
        total = tl.load(total_ptr + e)
        before = tl.load(before_ptr + mine * BLOCK_E + e)
    else:
        total = tl.histogram(expert, BLOCK_E, mask=s < S)
    first = tl.cumsum(total, 0) - total
    if mine == 0:
        tl.store(counts_ptr + e, total, mask=e < E)
        tl.store(offsets_ptr + e, first, mask=e <= E)
    # Earlier assignments of the same expert in this chunk: [BLOCK_S, BLOCK_S]
    lane = tl.arange(0, BLOCK_S)
    same = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    position = tl.gather(first + before, expert, 0) + tl.sum(same.to(tl.int32), 1)
    tl.store(order_ptr + position, s, mask=s < S)
    tl.store(inverse_ptr + s, position, mask=s < S)


def plan(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S = ids.numel()
    counts, offsets, order, inverse = (
        torch.empty(n, dtype=torch.int32, device=ids.device) for n in (num_experts, num_experts + 1, S, S)
    )
    if S == 0:
        return counts.zero_(), offsets.zero_(), order, inverse
    BLOCK_E = block_of(num_experts + 1)
    BLOCK_S = min(_BLOCK_S, block_of(S))
    chunks = ceil_div(S, BLOCK_S)
    options = {"BLOCK_E": BLOCK_E, "BLOCK_S": BLOCK_S, "num_warps": 4, "launch_pdl": PDL}
    table = total = None
    if chunks > 1:
        table = torch.empty((chunks, BLOCK_E), dtype=torch.int32, device=ids.device)
        total = torch.empty(BLOCK_E, dtype=torch.int32, device=ids.device)
        launch(_count_kernel, (chunks,), ids, table, S, num_experts, **options)
        columns = {"BLOCK_E": BLOCK_E, "ROWS": 256, "COLUMNS": 16, "num_warps": 4, "launch_pdl": PDL}
        launch(_scan_kernel, (BLOCK_E // 16,), table, total, chunks, **columns)
    tensors = ids, table, total, counts, offsets, order, inverse
    launch(_place_kernel, (chunks,), *tensors, S, num_experts, **options)
    return counts, offsets, order, inverse


@triton.jit
def _token_tiles_kernel(offsets_ptr, table_ptr, E, WIDTH: tl.constexpr, SPARE: tl.constexpr, BLOCK_E: tl.constexpr):
    """table [1 + tiles, 3]: how many tiles there are, then each one's expert, first and stop. Grid: one program."""
    wait()
    launch_dependents()
    e = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + e, mask=e < E, other=0)
    stop = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    rows = stop - start
    whole = tl.where(rows > 0, tl.maximum((rows - SPARE + WIDTH - 1) // WIDTH, 1) - 1, 0)
    last = start + whole * WIDTH
    # 0: more than WIDTH rows; 1: more than three quarters, all but an expert's last among them; .. 4: a quarter.
    rank = tl.where(stop - last > WIDTH, 0, 1 + (WIDTH - (stop - last)) * 4 // WIDTH)
    row = 1
    for i in tl.static_range(5):
        ends = (rows > 0) & (rank == i)
        mine = ends.to(tl.int32)
        if i == 1:
            mine += whole
        row_ptr = table_ptr + (row + tl.cumsum(mine, 0) - mine) * 3
        if i == 1:
            for j in range(tl.max(whole, 0)):
                tl.store(row_ptr, e, mask=j < whole)
                tl.store(row_ptr + 1, start + j * WIDTH, mask=j < whole)
                tl.store(row_ptr + 2, start + (j + 1) * WIDTH, mask=j < whole)
                row_ptr += tl.where(j < whole, 3, 0)
        tl.store(row_ptr, e, mask=ends)
        tl.store(row_ptr + 1, last, mask=ends)
        tl.store(row_ptr + 2, stop, mask=ends)
        row += tl.sum(mine, 0)
    tl.store(table_ptr, row - 1)
    if row == 1:  # who reads ahead finds row 0 there, and multiplies nothing
        tl.store(table_ptr + 3, 0)
        tl.store(table_ptr + 4, 0)
        tl.store(table_ptr + 5, 1)


class TokenTiles:
    """A plan's rows cut into tiles, an expert's last up to SPARE higher than the rest: that costs less than one more.

    Those with more rows stand first. The products of one call share it; the one that asks first launches its kernel.
    """

    SPARE = 32

    def __init__(self, offsets: Tensor, S: int) -> None:
        self.offsets, self.S, self._made = offsets, S, dict[int, Tensor]()

    @property
    def load(self) -> float:
        """Rows per expert."""
        return self.S / max(1, self.offsets.shape[0] - 1)

    def of(self, width: int) -> Tensor:
        """Tiles of ``width`` rows ``[1 + tiles, 3]``: how many in its first number, then expert, first row and stop."""
        if width not in self._made:
            E = self.offsets.shape[0] - 1
            made = torch.empty((1 + self.S // width + E, 3), dtype=torch.int32, device=self.offsets.device)
            options = {"WIDTH": width, "SPARE": self.SPARE, "BLOCK_E": block_of(E), "num_warps": 4, "launch_pdl": PDL}
            launch(_token_tiles_kernel, (1,), self.offsets, made, E, **options)
            self._made[width] = made
        return self._made[width]
