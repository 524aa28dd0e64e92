"""plan on Apple GPUs: one launch for few assignments, three for many."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.backends.metal.launch import Shader, ceil_div

#: assignments in a chunk, as plan.metal has it
_CHUNK = 256


def plan(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    S, E = ids.numel(), num_experts
    counts, offsets, order, inverse = (torch.empty(n, dtype=torch.int32, device=ids.device) for n in (E, E + 1, S, S))
    if S == 0:
        return counts.zero_(), offsets.zero_(), order, inverse
    chunks = ceil_div(S, _CHUNK)
    sizes = [S, E, chunks]
    shader = Shader(("plan",), {"ID_T": ids.dtype})
    if chunks == 1:
        shader.launch("plan_small", (1,), _CHUNK, ids, counts, offsets, order, inverse, sizes)
        return counts, offsets, order, inverse
    table = torch.empty((E + 1, chunks), dtype=torch.int32, device=ids.device)
    shader.launch("plan_count", (chunks,), _CHUNK, ids, table, sizes)
    shader.launch("plan_scan", (1,), 1024, table, counts, offsets, sizes)
    shader.launch("plan_place", (chunks,), _CHUNK, ids, table, offsets, order, inverse, sizes)
    return counts, offsets, order, inverse
