"""experts on Apple GPUs: two launches for few tokens, four for more; a norm after few tokens is one of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse import backends
from moefuse.backends.gated import Weights
from moefuse.backends.metal import tiles
from moefuse.backends.metal.combine import weighted_sum
from moefuse.backends.metal.experts_decode import experts_decode
from moefuse.backends.metal.grouped_linear import project
from moefuse.backends.metal.plan import plan as make_plan
from moefuse.types import Activation, Outputs, Plan, Stacks, Tail


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    stacks: Stacks,
    plan: Plan | None,
    activation: Activation,
    tail: Tail,
    outputs: Outputs,
    z: Tensor | None,
) -> None:
    assert z is None, "metal saves no pre-activations"
    up, down = Weights.of_gate_up(stacks, activation.gated), Weights.of(stacks.down, stacks.down_bias)
    few = x.shape[0] <= tiles.DECODE_TOKENS and not backends.invariant()
    if few and all(rows.data.stride(2) == 1 for rows in (up.w, up.u, down.w)):
        experts_decode(x, ids, weights, up, down, activation, tail, outputs)
        return
    S, (E, _, I) = ids.numel(), stacks.down.shape
    # A plan that a caller brought with other ids may leave rows out that the ids have.
    make_rows = torch.empty if plan is None else torch.zeros
    if plan is None:
        plan = Plan(*make_plan(ids, E), ids.shape[1], trusted=True)
    # Float32 in between, as for few tokens: prefill and decode then differ by the rounding of the result alone.
    hidden = torch.empty((S, I), dtype=torch.float32, device=x.device)
    project(x, up, plan, activation, hidden, gather=True, scatter=False, fill=False)
    y = make_rows((S, x.shape[1]), dtype=torch.float32, device=x.device)
    project(hidden, down, plan, None, y, gather=False, scatter=False, fill=False)
    weighted_sum(y, weights, plan.inverse, tail, outputs, ids, E)
