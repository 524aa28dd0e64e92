"""plan on Apple GPUs: one launch for few assignments, three for many."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.metal.launch import ceil_div, launch

#: assignments in a block, as plan.metal has it
_BLOCK_S = 256


def plan(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S, E = ids.numel(), num_experts
    counts, offsets, order, inverse = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in (E, E + 1, S, S))
    if S == 0:
        return counts.zero_(), offsets.zero_(), order, inverse
    blocks = ceil_div(S, _BLOCK_S)
    sizes = [S, E, blocks]
    files, macros = ("plan",), {"ID_T": ids.dtype}
    if blocks == 1:
        launch("plan_few", files, macros, (1,), _BLOCK_S, ids, counts, offsets, order, inverse, sizes)
        return counts, offsets, order, inverse
    table = torch.empty((E + 1, blocks), dtype=torch.int32, device=ids.device)
    launch("plan_count", files, macros, (blocks,), _BLOCK_S, ids, table, sizes)
    launch("plan_scan", files, macros, (1,), 1024, table, counts, offsets, sizes)
    launch("plan_place", files, macros, (blocks,), _BLOCK_S, ids, table, offsets, order, inverse, sizes)
    return counts, offsets, order, inverse
