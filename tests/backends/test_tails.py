"""Tiny results are right too: activations far out, and weights of scores that float32 cannot hold.

The oracle shares no code with the library: float64, and logarithms of scores where float64 has none either.
"""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from metal_target import TARGET as METAL
from metal_target import simulated
from torch import Tensor

import moefuse
from moefuse import Activation, Routing
from moefuse.testing import cases
from moefuse.types import ACTIVATION_KINDS, SCORES

TRITON = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]
SMALLEST = torch.finfo(torch.float32).tiny
BOUND = 1e-6


@pytest.fixture(scope="module", params=[*TRITON, METAL], ids=lambda target: target[0])
def target(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    if request.param[0] == "metal":
        with simulated():
            yield request.param
    else:
        yield request.param


def _log_normal(x: Tensor) -> Tensor:
    """The logarithm of the normal distribution function."""
    return torch.special.log_ndtr(x)


def oracle(kind: str, x: Tensor, alpha: float, limit: float) -> Tensor:
    """The activation of float64 numbers; sigmoids and their like through their logarithms."""
    if kind in ("relu", "relu2"):
        return F.relu(x) ** (2 if kind == "relu2" else 1)
    g = x.clamp(max=limit) if kind.startswith("swiglu") else x
    if kind == "gelu":
        return g * torch.exp(_log_normal(g))
    inner = {"gelu_tanh": 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3), "swiglu_oai": alpha * g}.get(kind, g)
    return g * torch.exp(F.logsigmoid(inner))


def sweep() -> Tensor:
    far = torch.logspace(-8, 4, 6001)
    return torch.cat((torch.linspace(-16, 16, 8001), torch.linspace(-110, -16, 6001), far, -far, torch.zeros(1)))


@pytest.mark.parametrize("kind", ACTIVATION_KINDS)
def test_activations_and_slopes_in_the_tails(kind: str, target: tuple[str, str]) -> None:
    """Values relative to themselves, slopes relative to their terms, which cancel at one point of a smooth kind."""
    backend, device = target
    activation = Activation(kind, gated=False, alpha=1.703125, limit=7.0)
    x = sweep().to(device).requires_grad_()
    got = moefuse.glu(x, activation, backend=backend)
    got.backward(torch.ones_like(got))
    wide = sweep().double().requires_grad_()
    want = oracle(kind, wide, 1.703125, 7.0)
    want.backward(torch.ones_like(want))
    assert x.grad is not None
    assert wide.grad is not None
    terms = wide.grad.abs() + (want / wide.where(wide != 0, 1)).abs().detach()
    slope_known = wide.grad.where(want.detach() != 0, x.grad.cpu().double())
    for name, have, goal, size in (("value", got, want, want.abs()), ("slope", x.grad, slope_known, terms)):
        error = (have.detach().cpu().double() - goal.detach()).abs()
        normal = size.detach() >= SMALLEST
        relative = error[normal] / size.detach()[normal]
        at = sweep()[normal][relative.argmax()]
        assert relative.max() < BOUND, f"{name} of {kind} off by {relative.max():.1e} at {at}"
        assert error[~normal].amax() < 4e-45 if (~normal).any() else True


def log_scores(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.log_softmax(logits, -1)
    if score == "sigmoid":
        return F.logsigmoid(logits)
    # log(softplus(x)) is x - exp(x) / 2 to float64's digits below -30.
    return 0.5 * torch.where(logits < -30, logits - logits.exp() / 2, F.softplus(logits.clamp(min=-30)).log())


def weighed(logits: Tensor, ids: Tensor, routing: Routing, factors: Tensor | None) -> Tensor:
    """The weights of selected experts, from logarithms of scores."""
    chosen = log_scores(logits, routing.score).gather(1, ids)
    if routing.renormalize:
        floor = math.log(routing.floor) if routing.floor else -math.inf
        chosen = chosen - chosen.logsumexp(-1, keepdim=True).clamp(min=floor)
    factor = routing.scale * (torch.ones_like(chosen) if factors is None else factors[ids])
    if not routing.renormalize_after_scale:
        return chosen.exp() * factor
    shares = torch.softmax(chosen, -1) * factor
    return shares / shares.sum(-1, keepdim=True)


RULES = [
    pytest.param(Routing(top_k=2, score=score, renormalize=renormalize, renormalize_after_scale=after, **more), id=name)
    for score in SCORES
    for renormalize in (True, False)
    for after in (True, False)
    for more in ({}, {"norm_floor": 0.0}, {"scale": 2.5})
    for name in [f"{score}{'-renorm' * renormalize}{'-after' * after}{''.join(f'-{n}' for n in more)}"]
]


@pytest.mark.parametrize("factored", [False, True], ids=["plain", "factors"])
@pytest.mark.parametrize("routing", RULES)
def test_weights_of_scores_too_small_for_float32(routing: Routing, factored: bool, target: tuple[str, str]) -> None:
    """Rows from ordinary logits down to -400, whose sigmoid no float32 holds; gradients too."""
    backend, device = target
    generator = torch.Generator().manual_seed(3)
    levels = torch.tensor([0, -5, -20, -80, -87, -88.5, -95, -99, -103, -110, -150, -177, -200, -300, -400.0])
    logits = (levels[:, None] + 3 * torch.randn(len(levels), 6, generator=generator)).to(device).requires_grad_()
    bias = None
    if routing.score == "softmax":
        # One expert far above the others, and a bias that selects from those.
        with torch.no_grad():
            logits[:, 0] = 2.0
        bias = torch.tensor([-9.0, 0, 0, 0, 3, 4]).to(device)
    factors = torch.tensor([1.5, 0.5, 2, 1, 0.75, 3]).to(device).requires_grad_() if factored else None
    weights, ids = moefuse.route(logits, routing, bias=bias, per_expert_scale=factors, backend=backend)
    grad = torch.linspace(-1, 1.5, weights.numel()).view(weights.shape)
    weights.backward(grad.to(device))
    inputs = [logits.detach().cpu().double().requires_grad_()]
    inputs += [] if factors is None else [factors.detach().cpu().double().requires_grad_()]
    want = weighed(inputs[0], ids.cpu().long(), routing, inputs[1] if factored else None)
    want.backward(grad.double())
    assert ((weights.detach().cpu() - want.detach()).abs() < BOUND * routing.scale).all()
    relative = ((weights.detach().cpu() - want.detach()).abs() / want.detach().abs())[want.detach().abs() > SMALLEST]
    # Not renormalised, a score's relative error is its logit's rounding, which is nothing here.
    assert relative.max() < 4 * BOUND
    if backend == "metal":
        return  # its route has no backward of its own
    # Each gradient is a difference of terms like these.
    terms = (grad.abs() * want.detach().abs()).sum(-1, keepdim=True).clamp(min=SMALLEST)
    assert logits.grad is not None
    assert inputs[0].grad is not None
    assert ((logits.grad.cpu() - inputs[0].grad).abs() < BOUND * terms + 1e-44).all()
    if factors is not None:
        assert factors.grad is not None
        assert inputs[1].grad is not None
        assert ((factors.grad.cpu() - inputs[1].grad).abs() < 2 * BOUND * terms.sum()).all()
