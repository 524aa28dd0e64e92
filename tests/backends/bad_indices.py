"""Indices that the CPU refuses and a GPU, which would have to wait to see them, must survive."""

import pytest
import torch

import moefuse
from moefuse.testing.poison import poisoned


def check_bad_indices(backend: str, device: str, patch: pytest.MonkeyPatch) -> None:
    """They add nothing, forward and backward, and read no other memory."""
    patch.setattr("moefuse.ops.combine.check_inverse", lambda _: None)
    patch.setattr("moefuse.ops.experts.has_values", lambda *_: False)
    T, top_k, H, E = 3, 2, 8, 4
    y, weights = torch.randn(T * top_k, H).to(device).requires_grad_(), torch.rand(T, top_k).to(device).requires_grad_()
    far = torch.tensor([0, 10**9, 2, -1, 4, 4], dtype=torch.int32, device=device)
    with poisoned():
        out = moefuse.combine(y, weights, inverse=far, backend=backend)
        out.sum().backward()
    w, rows = weights.detach(), y.detach()
    want = torch.stack([w[0, 0] * rows[0], w[1, 0] * rows[2], (w[2, 0] + w[2, 1]) * rows[4]])
    torch.testing.assert_close(out.detach(), want)
    assert weights.grad[0, 1] == 0 == weights.grad[1, 1]
    assert y.grad.isfinite().all()
    assert (y.grad[[1, 3, 5]] == 0).all()
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]], device=device)
    x, gate_up, down = (torch.randn(shape).to(device) for shape in ((T, H), (E, 2 * H, H), (E, H, H)))
    nobody = moefuse.plan(torch.full_like(ids, E), E, backend=backend)
    with poisoned():
        assert (moefuse.experts(x, ids, w, gate_up, down, plan=nobody, backend=backend) == 0).all()
