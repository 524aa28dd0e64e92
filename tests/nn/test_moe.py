"""The module: shapes, tail, gradients, state and torch.compile."""

import pytest
import torch

import moefuse
from moefuse import Activation, Routing
from moefuse.nn import MoE
from moefuse.testing.compare import difference


def everything(**changes: object) -> MoE:
    options = {
        "hidden": 48, "intermediate": 24, "num_experts": 6, "routing": Routing(top_k=2), "bias": True,
        "logit_bias": True, "selection_bias": True, "per_expert_scale": True, "shared_intermediate": 32,
        "shared_gate": True, "norm": True, "next_norm": True,
    }  # fmt: skip
    block = MoE(**options | changes)
    with torch.no_grad():
        for value in block.parameters():
            if value.dim() < 2 or (value.shape[0] == 6 and value.dim() == 2):
                value.add_(torch.randn_like(value) * 0.1)
    return block


def by_hand(block: MoE, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The block in float64, token by token and expert by expert."""
    p = {name: value.detach().double() for name, value in (*block.named_parameters(), *block.named_buffers())}

    def norm(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return v * torch.rsqrt(v.square().mean() + block.eps) * weight

    def mlp(v: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, b1: object = 0, b2: object = 0) -> torch.Tensor:
        g, u = (gate_up @ v + b1).chunk(2)
        return down @ (g * torch.sigmoid(g) * u) + b2

    outs = []
    for row, back in zip(x.double(), residual.double(), strict=True):
        v = norm(row, p["norm_weight"])
        scores = torch.softmax(p["router"] @ v + p["logit_bias"], 0)
        ids = (scores + p["selection_bias"]).argsort(descending=True)[: block.routing.top_k]
        weights = scores[ids] / scores[ids].sum() * p["per_expert_scale"][ids]
        out = back + torch.sigmoid(p["shared_gate"] @ v) * mlp(v, p["shared_gate_up"], p["shared_down"])
        for w, e in zip(weights, ids, strict=True):
            out = out + w * mlp(v, p["gate_up"][e], p["down"][e], p["gate_up_bias"][e], p["down_bias"][e])
        outs.append(out)
    total = torch.stack(outs)
    return total, torch.stack([norm(row, p["next_norm_weight"]) for row in total])


def test_the_whole_block_by_hand(target: tuple[str, str]) -> None:
    backend, device = target
    block = everything()
    x, residual = torch.randn(7, 48), torch.randn(7, 48)
    want = by_hand(block, x, residual)
    with torch.no_grad():
        got = block.to(device)(x.to(device), residual.to(device), backend=backend)
    for have, goal in zip(got, want, strict=True):
        assert difference(have, goal).worst < 2e-6


def test_gradients_agree_with_float64(target: tuple[str, str]) -> None:
    backend, device = target
    block = everything().to(device)
    x = torch.randn(5, 48, device=device)
    seeds = torch.randn(5, 48, device=device), torch.randn(5, 48, device=device)

    def grads(module: MoE, rows: torch.Tensor, chosen: str) -> dict[str, torch.Tensor]:
        outs = module(rows, rows, backend=chosen)
        sum((o * s.to(o)).sum() for o, s in zip(outs, seeds, strict=True)).backward()
        return {name: value.grad.clone() for name, value in module.named_parameters()}

    got = grads(block, x, backend)
    block.zero_grad()
    want = grads(block.double().cpu(), x.double().cpu(), "reference")
    for name in want:
        assert difference(got[name], want[name], whole=True).worst < 1e-5, name
        assert want[name].abs().max() > 0, name


def test_leading_dimensions_and_single_result() -> None:
    block = MoE(32, 16, 4, Routing(top_k=2))
    x = torch.randn(2, 3, 5, 32)
    out = block(x)
    assert out.shape == x.shape
    assert torch.equal(out.reshape(-1, 32), block(x.reshape(-1, 32)))


def test_ungated_and_half_types() -> None:
    block = MoE(32, 16, 4, Routing(top_k=2), activation=Activation("relu2", gated=False), dtype=torch.bfloat16)
    assert block.gate_up.shape == (4, 16, 32)
    assert block(torch.randn(3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_state_dict_round_trip() -> None:
    first, second = everything(), everything()
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 48)
    assert torch.equal(first(x)[1], second(x)[1])


def test_compiles_to_one_graph() -> None:
    block = everything()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 48)
    for have, goal in zip(compiled(x, x), block(x, x), strict=True):
        torch.testing.assert_close(have, goal, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": Routing(top_k=7)}, "MoE: top_k must not exceed E=6, got 7"),
        ({"layout": "zigzag"}, "MoE: layout must be one of halves, interleaved, got 'zigzag'"),
        ({"shared_intermediate": 0}, "MoE: shared_gate must come with shared_intermediate"),
        ({"activation": "swish"}, "Activation: kind must be one of silu.*got 'swish'"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        everything(**changes)


def test_says_what_it_is() -> None:
    assert "num_experts=6" in repr(everything())
    assert isinstance(moefuse.nn.MoE, type)
