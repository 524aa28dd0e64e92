"""Losses, noise, the balancing bias and the recorder."""

import math

import pytest
import torch

from moefuse import Routing
from moefuse.nn import (
    MoE,
    RouterTraining,
    RoutingStats,
    auxiliary_loss,
    load_balancing_loss,
    router_z_loss,
    update_selection_bias,
)

transformers = pytest.importorskip("transformers")


def block(**options: object) -> MoE:
    return MoE(32, 16, 8, Routing(top_k=2), norm=True, **options)


def test_balance_loss_is_the_one_transformers_adds(rng: torch.Generator) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(50, 8, generator=rng, dtype=torch.float64)
    ids = logits.topk(3).indices
    ours, theirs = load_balancing_loss(logits, ids), load_balancing_loss_func((logits,), 8, 3)
    torch.testing.assert_close(ours, theirs.double(), rtol=1e-6, atol=0)
    mask = torch.rand(50, generator=rng) < 0.6
    mask[0] = True
    torch.testing.assert_close(
        load_balancing_loss(logits, ids, mask=mask), load_balancing_loss(logits[mask], ids[mask])
    )


def test_balance_loss_counts_no_sentinel_and_any_score(rng: torch.Generator) -> None:
    logits = torch.randn(20, 6, generator=rng)
    ids = torch.full((20, 2), 6)
    assert load_balancing_loss(logits, ids) == 0
    even = torch.arange(40).reshape(20, 2) % 5
    for score in ("softmax", "sigmoid", "sqrtsoftplus"):
        assert math.isclose(load_balancing_loss(torch.zeros(20, 5), even, score=score), 2.0, rel_tol=1e-6)


def test_z_loss(rng: torch.Generator) -> None:
    logits = torch.randn(30, 5, generator=rng, dtype=torch.float64)
    torch.testing.assert_close(router_z_loss(logits), logits.exp().sum(-1).log().square().mean())
    assert router_z_loss(logits, mask=torch.zeros(30, dtype=torch.bool)) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RouterTraining(jitter=1.0), "jitter must be in"),
        (lambda: RouterTraining(balance_loss=-1.0), "balance_loss must not be negative"),
        (lambda: router_z_loss(torch.zeros(3)), "logits must have 2 dimensions"),
        (lambda: router_z_loss(torch.zeros(3, 2), mask=torch.ones(2)), "mask must have T=3"),
        (lambda: load_balancing_loss(torch.zeros(3, 2), torch.zeros(2, 1)), "ids must be"),
        (lambda: update_selection_bias(torch.zeros(3), torch.zeros(2)), "must both be"),
        (lambda: auxiliary_loss(block()), "no layer of this model has one"),
        (lambda: RoutingStats(0), "num_experts must be at least 1"),
        (lambda: RoutingStats.attach(torch.nn.Linear(2, 2)), "has no moefuse.nn.MoE"),
    ],
)
def test_mistakes_are_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_without_noise_training_routes_as_evaluation_does(target: tuple[str, str]) -> None:
    backend, device = target
    made = block(logit_bias=True, per_expert_scale=True, router_training=RouterTraining(balance_loss=0.1)).to(device)
    x = torch.randn(40, 32, device=device)
    with torch.no_grad():
        trained = made(x, backend=backend)
        evaluated = made.eval()(x, backend=backend)
    torch.testing.assert_close(trained, evaluated, rtol=1e-5, atol=1e-5)


def test_the_loss_reaches_the_router_and_only_it() -> None:
    made = block(router_training=RouterTraining(balance_loss=0.01, z_loss=0.001))
    made(torch.randn(40, 32))
    auxiliary_loss(made).backward()
    assert made.router.grad is not None
    assert made.router.grad.abs().sum() > 0
    assert made.gate_up.grad is None


def test_compiled_steps_are_those_of_eager_training() -> None:
    """Forward, losses and backward in one graph, for any number of tokens."""

    def trained(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        made = block(router_training=RouterTraining(balance_loss=0.01, z_loss=0.001))
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return made(x, residual=x).square().mean() + auxiliary_loss(made)

        step = torch.compile(loss_of, fullgraph=True, backend="aot_eager") if compiled else loss_of
        losses = []
        for T in (20, 33, 20, 33):
            optimizer.zero_grad()
            loss = step(torch.randn(T, 32, generator=torch.Generator().manual_seed(T)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert losses[-1] < losses[1]
        return [*losses, *made.parameters()]

    torch.compiler.reset()
    for found, want in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7)
    torch.compiler.reset()


def test_expert_dropout_drops_and_jitter_moves() -> None:
    made = block(router_training=RouterTraining(expert_dropout=0.9))
    stats = RoutingStats.attach(made)[""]
    made(torch.randn(200, 32))
    assert stats.dropped > 0
    made.eval()
    stats.reset()
    made(torch.randn(200, 32))
    assert stats.dropped == 0
    shaken = block(router_training=RouterTraining(jitter=0.5))
    x = torch.randn(20, 32)
    assert not torch.equal(shaken(x), shaken(x))


def test_balancing_bias_evens_the_load() -> None:
    """A router that prefers two experts for every token, until their bias has fallen."""
    made = MoE(32, 16, 8, Routing(top_k=2, score="sigmoid"), selection_bias=True)
    assert made.selection_bias is not None
    with torch.no_grad():
        made.router[:2] += 0.1
    stats = RoutingStats.attach(made)[""]
    x = torch.randn(512, 32) + 0.7
    made(x)
    before = stats.imbalance
    for _ in range(300):
        stats.reset()
        made(x)
        update_selection_bias(made.selection_bias, stats.load, rate=0.01)
    assert before > 2
    assert stats.imbalance < 1.5


def test_stats_count_what_was_routed() -> None:
    stats = RoutingStats(4)
    ids = torch.tensor([[0, 1], [1, 2], [4, -1]])
    stats.record(ids, torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]))
    stats.record(ids[:1].int(), torch.tensor([[0.25, 0.75]]))
    assert stats.load.tolist() == [2, 3, 1, 0]
    assert (stats.tokens, stats.dropped) == (4, 2)
    entropy = math.log(2) - (0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert math.isclose(stats.entropy, entropy / 4)
    assert math.isclose(stats.imbalance, 3 / 1.5)
    assert "4 tokens" in repr(stats)
    stats.reset()
    assert (stats.tokens, stats.entropy, stats.imbalance) == (0, 0.0, 0.0)
