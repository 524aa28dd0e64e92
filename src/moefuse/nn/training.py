"""What trainers add to a router: balance losses, noise, and the bias that balances without a loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moefuse.ops._core.arithmetic import widen
from moefuse.types import Routing


@dataclass(frozen=True)
class RouterTraining:
    """How a router is trained; every part is off at zero, and all are off in evaluation.

    Attributes:
        balance_loss: factor of `load_balancing_loss` in the layer's auxiliary loss.
        z_loss: factor of `router_z_loss` in it.
        jitter: the router sees its input times a factor drawn from ``[1 - jitter, 1 + jitter]`` (Switch Transformers).
        expert_dropout: probability that a token may not choose an expert this time.

    >>> RouterTraining(balance_loss=0.01, z_loss=1e-3).jitter
    0.0
    """

    balance_loss: float = 0.0
    z_loss: float = 0.0
    jitter: float = 0.0
    expert_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("balance_loss", "z_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"RouterTraining: {name} must not be negative, got {getattr(self, name)}")
        for name in ("jitter", "expert_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"RouterTraining: {name} must be in [0, 1), got {getattr(self, name)}")

    def perturbed_input(self, x: Tensor) -> Tensor:
        if not self.jitter:
            return x
        return x * torch.empty_like(x).uniform_(1 - self.jitter, 1 + self.jitter)

    def perturbed_logits(self, logits: Tensor) -> Tensor:
        if not self.expert_dropout:
            return logits
        return logits.masked_fill(torch.rand_like(logits) < self.expert_dropout, -torch.inf)

    def loss(self, logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
        """The layer's auxiliary loss, of logits without dropout."""
        total = logits.new_zeros(())
        if self.balance_loss:
            total = total + self.balance_loss * load_balancing_loss(logits, ids, score=routing.score)
        if self.z_loss:
            total = total + self.z_loss * router_z_loss(logits)
        return total


def _check_logits(op: str, logits: Tensor, mask: Tensor | None) -> None:
    if logits.dim() != 2:
        raise ValueError(f"{op}: logits must have 2 dimensions [T, E], got {logits.dim()}")
    if mask is not None and mask.shape != logits.shape[:1]:
        raise ValueError(f"{op}: mask must have T={logits.shape[0]} entries, got {list(mask.shape)}")


def _token_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the tokens that count; zero where none does."""
    if mask is None:
        return values.sum(0) / max(values.shape[0], 1)
    counts = mask.to(values.dtype)
    return (values * counts.view(-1, *(1,) * (values.dim() - 1))).sum(0) / counts.sum().clamp(min=1)


def load_balancing_loss(logits: Tensor, ids: Tensor, *, score: str = "softmax", mask: Tensor | None = None) -> Tensor:
    """``E * sum_e f_e * P_e``: the share of tokens that go to an expert times the probability it is given.

    Args:
        logits: ``[T, E]`` before any bias for selection.
        ids: ``[T, top_k]`` from `moefuse.route`; ids outside ``[0, E)`` count for no expert.
        score: the router's score; scores other than softmax are divided by their sum.
        mask: ``[T]``, tokens that count (padding does not).

    Returns:
        A scalar: ``top_k`` when every expert gets its share, more when some get more. The gradient goes through ``P``.

    >>> load_balancing_loss(torch.zeros(4, 2), torch.tensor([[0], [1], [0], [1]]))
    tensor(1.)
    """
    _check_logits("load_balancing_loss", logits, mask)
    if ids.dim() != 2 or ids.shape[0] != logits.shape[0]:
        raise ValueError(f"load_balancing_loss: ids must be [T={logits.shape[0]}, top_k], got {list(ids.shape)}")
    E = logits.shape[1]
    chosen = torch.zeros((logits.shape[0], E + 1), device=logits.device)
    known = torch.where((ids >= 0) & (ids < E), ids, E).long()
    chosen.scatter_add_(1, known, torch.ones_like(known, dtype=chosen.dtype))
    shares = _token_mean(chosen[:, :E], mask)
    return E * (shares * _token_mean(_probabilities(widen(logits), score), mask)).sum()


def _probabilities(logits: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits, -1)
    scores = torch.sigmoid(logits) if score == "sigmoid" else nn.functional.softplus(logits).sqrt()
    return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)


def router_z_loss(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Mean square of each token's ``logsumexp``: keeps logits small enough for 16-bit arithmetic (ST-MoE).

    >>> round(router_z_loss(torch.zeros(3, 4)).item(), 4)  # log(4) ** 2
    1.9218
    """
    _check_logits("router_z_loss", logits, mask)
    return _token_mean(widen(logits).logsumexp(-1).square(), mask)


@torch.no_grad()
def update_selection_bias(bias: Tensor, load: Tensor, rate: float = 1e-3) -> None:
    """Balance without a loss (DeepSeek-V3): experts over the mean load become less likely to be chosen, in place.

    Args:
        bias: ``[E]`` float, the `moefuse.gate` bias that only selects: ``MoE.selection_bias``.
        load: ``[E]``, assignments per expert since the last update, summed over ranks: ``RoutingStats.load``.
        rate: step per update.

    >>> bias = torch.zeros(3)
    >>> update_selection_bias(bias, torch.tensor([9, 3, 0]), rate=0.5)
    >>> bias
    tensor([-0.5000,  0.5000,  0.5000])
    """
    if bias.shape != load.shape or bias.dim() != 1:
        raise ValueError(
            f"update_selection_bias: bias and load must both be [E], got {list(bias.shape)} and {list(load.shape)}"
        )
    counts = load.to(bias.dtype)
    bias += rate * torch.sign(counts.mean() - counts)


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The sum of what the last forward of every layer with a `RouterTraining` left; add it to the task's loss.

    >>> from moefuse import Routing
    >>> from moefuse.nn import MoE
    >>> layer = MoE(8, 4, 4, Routing(top_k=2), router_training=RouterTraining(balance_loss=0.01))
    >>> loss = layer(torch.randn(5, 8)).square().mean() + auxiliary_loss(layer)
    """
    losses = (getattr(module, "auxiliary_loss", None) for module in model.modules())
    left = [loss for loss in losses if isinstance(loss, Tensor)]
    if not left:
        raise ValueError(
            "auxiliary_loss: no layer of this model has one; give MoE router_training=RouterTraining(...) and run "
            "a forward in training mode first"
        )
    return torch.stack([loss.to(left[0].device) for loss in left]).sum()
