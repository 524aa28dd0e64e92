"""glu: the activation between the up and the down product."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from moefuse.backends.codes import Table, interleaved
from moefuse.ops._core.arithmetic import fresh_like, widen
from moefuse.ops._core.checks import FLOATS, check_tensor
from moefuse.ops._core.library import Gradients, Rule, define, refuse_second_order
from moefuse.ops._core.select import inherit
from moefuse.types import ACTIVATION_KINDS, LAYOUTS, Activation


@overload
def glu(
    gate_up: Tensor, activation: str | Activation, *, layout: str = "halves", backend: str | None = None
) -> Tensor: ...
@overload
def glu(gate_up: Tensor, up: Tensor, activation: str | Activation, *, backend: str | None = None) -> Tensor: ...
def glu(  # type: ignore[misc]  # up may hold the activation, which the overloads say and the body sorts out
    gate_up: Any, up: Any = None, activation: Any = None, *, layout: str = "halves", backend: str | None = None
) -> Tensor:
    """Apply a gated (or plain) activation.

    ``glu(gate_up, activation)`` takes ``[.., 2I]`` and returns ``[.., I]``; ``glu(gate, up, activation)`` takes the two
    apart. An ungated `Activation` maps ``[.., I]`` to ``[.., I]``.

    Args:
        gate_up: gate and up in one tensor, or the gate alone; any number of leading dimensions.
        up: the up part, when it comes apart.
        activation: a name or an `Activation`.
        layout: "halves": gate first, up second. "interleaved": even gate, odd up.
        backend: who runs it: cpu, triton, metal or reference; None for the one that the device has.

    Returns:
        ``act(gate) * up`` in the type of the input, computed in float32. Finite input never gives NaN.

    >>> glu(torch.tensor([[1.0, -2.0, 3.0, 5.0]]), "relu")
    tensor([[3., 0.]])
    >>> glu(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]), "relu2")
    tensor([ 3., 20.])
    >>> glu(torch.tensor([[1.0, 3.0, -2.0, 5.0]]), "relu", layout="interleaved")
    tensor([[3., 0.]])
    """
    if activation is None:
        up, activation = None, up
    activation = check_activation("glu", activation)
    check(gate_up, up, activation, layout)
    return _glu(backend, gate_up, up, activation, layout)


def check(gate_up: Any, up: Any, activation: Activation, layout: str) -> None:
    name = "gate_up" if up is None else "gate"
    if not isinstance(gate_up, Tensor) or gate_up.dim() < 1:
        got = f"shape {list(gate_up.shape)}" if isinstance(gate_up, Tensor) else type(gate_up).__name__
        raise TypeError(f"glu: {name} must be a tensor of at least one dimension, got {got}")
    dims: dict[str, int | None] = {f"dim {i}": size for i, size in enumerate(gate_up.shape)}
    check_tensor("glu", name, gate_up, dims, dtypes=FLOATS)
    check_layout("glu", layout)
    if up is not None:
        if not activation.gated:
            raise ValueError("glu: up must not be given for an ungated activation, got a tensor")
        if layout != "halves":
            raise ValueError(f"glu: layout must be halves when gate and up come apart, got {layout!r}")
        check_tensor("glu", "up", up, dims, dtypes=(gate_up.dtype,), like=gate_up)
    elif activation.gated and gate_up.shape[-1] % 2 != 0:
        raise ValueError(f"glu: gate_up must have an even last dimension, got {gate_up.shape[-1]}")


def check_activation(op: str, activation: Any) -> Activation:
    if not isinstance(activation, (str, Activation)):
        raise TypeError(f"{op}: activation must be a name or an Activation, got {type(activation).__name__}")
    return Activation.of(activation)


def check_layout(op: str, layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


# Below this every smooth kind is 0 to the last bit of float64; the clamp turns -inf * 0 into 0.
_LOWEST = -1000.0
_GELU_TANH = 2 * math.sqrt(2 / math.pi)


def _erfc(g: Tensor) -> Tensor:
    value: Tensor = torch.special.erfc(g)
    return value


def _silu(g: Tensor) -> Tensor:
    g = g.clamp(min=_LOWEST)
    return g * torch.sigmoid(g)


def _silu_derivative(g: Tensor) -> Tensor:
    g = g.clamp(min=_LOWEST)
    s = torch.sigmoid(g)
    return s * (1 + g * (1 - s))


def _gelu_tanh(g: Tensor) -> Tensor:
    # 0.5 (1 + tanh(u)) is sigmoid(2u), which loses nothing in the negative tail.
    g = g.clamp(min=_LOWEST)
    return g * torch.sigmoid(_GELU_TANH * (g + 0.044715 * g**3))


def _gelu_tanh_derivative(g: Tensor) -> Tensor:
    g = g.clamp(_LOWEST, -_LOWEST)
    y = _GELU_TANH * (g + 0.044715 * g**3)
    return torch.sigmoid(y) * (1 + torch.sigmoid(-y) * _GELU_TANH * g * (1 + 3 * 0.044715 * g * g))


def _gelu(g: Tensor) -> Tensor:
    g = g.clamp(min=_LOWEST)
    return 0.5 * g * _erfc(-g * math.sqrt(0.5))


def _gelu_derivative(g: Tensor) -> Tensor:
    g = g.clamp(_LOWEST, -_LOWEST)
    density = torch.exp(-0.5 * g * g) / math.sqrt(2 * math.pi)
    return 0.5 * _erfc(-g * math.sqrt(0.5)) + g * density


def _relu_derivative(g: Tensor) -> Tensor:
    return (g > 0).to(g.dtype)


Value = Callable[[Tensor, Tensor | None, Activation], Tensor]
#: by gate, and by up where there is one
Partials = Callable[[Tensor, Tensor | None, Activation], tuple[Tensor, Tensor | None]]


class Kind(NamedTuple):
    """What an activation is: the result of gate and up, and its derivatives."""

    value: Value
    partials: Partials


def _of_gate(value: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]) -> Kind:
    """A function of the gate that up is multiplied by."""

    def result(g: Tensor, u: Tensor | None, _: Activation) -> Tensor:
        return value(g) if u is None else value(g) * u

    def partials(g: Tensor, u: Tensor | None, _: Activation) -> tuple[Tensor, Tensor | None]:
        return (derivative(g), None) if u is None else (derivative(g) * u, value(g))

    return Kind(result, partials)


def _relu2(g: Tensor, u: Tensor | None, _: Activation) -> Tensor:
    # r * (r * u), so that a large gate and a zero up give 0, not inf * 0.
    r = torch.relu(g)
    return r * r if u is None else r * (r * u)


def _relu2_partials(g: Tensor, u: Tensor | None, _: Activation) -> tuple[Tensor, Tensor | None]:
    r = torch.relu(g)
    return (2 * r, None) if u is None else (2 * r * u, r * r)


def _clamped(oai: bool) -> Kind:
    """``g * sigmoid(alpha * g)`` times up, both limited; OpenAI's has an alpha, and up counts one more."""

    def unit(g: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
        """The function of the limited gate, and its derivative."""
        alpha = activation.alpha if oai else 1.0
        g = g.clamp(max=activation.limit).clamp(min=_LOWEST / alpha)
        s = torch.sigmoid(alpha * g)
        return g * s, s * (1 + alpha * g * (1 - s))

    def factor(u: Tensor, activation: Activation) -> Tensor:
        limited = u.clamp(-activation.limit, activation.limit)
        return limited + 1 if oai else limited

    def result(g: Tensor, u: Tensor | None, activation: Activation) -> Tensor:
        value, _ = unit(g, activation)
        return value if u is None else value * factor(u, activation)

    def partials(g: Tensor, u: Tensor | None, activation: Activation) -> tuple[Tensor, Tensor | None]:
        value, derivative = unit(g, activation)
        derivative = derivative * (g <= activation.limit).to(g.dtype)
        if u is None:
            return derivative, None
        return derivative * factor(u, activation), value * (u.abs() <= activation.limit)

    return Kind(result, partials)


_KINDS = {
    "silu": _of_gate(_silu, _silu_derivative),
    "gelu_tanh": _of_gate(_gelu_tanh, _gelu_tanh_derivative),
    "gelu": _of_gate(_gelu, _gelu_derivative),
    "relu": _of_gate(torch.relu, _relu_derivative),
    "relu2": Kind(_relu2, _relu2_partials),
    "swiglu_oai": _clamped(oai=True),
    "swiglu_clamp": _clamped(oai=False),
}
#: one row for each of `moefuse.types.ACTIVATION_KINDS`
KINDS = Table("reference", "activation", _KINDS, ACTIVATION_KINDS)


def _split(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> tuple[Tensor, Tensor | None]:
    """Gate and up in the arithmetic type; up is None when ungated."""
    if up is None and activation.gated:
        gate_up, up = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved(layout) else gate_up.chunk(2, -1)
    return widen(gate_up), None if up is None else widen(up)


def glu_reference(gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str) -> Tensor:
    g, u = _split(gate_up, up, activation, layout)
    return KINDS[activation.kind].value(g, u, activation).to(gate_up.dtype).contiguous()


def glu_backward_reference(
    grad: Tensor, gate_up: Tensor, up: Tensor | None, activation: Activation, layout: str
) -> tuple[Tensor, Tensor]:
    """Gradients of gate_up, in the forward's layout, and of up (empty when it was not apart)."""
    g, u = _split(gate_up, up, activation, layout)
    by_gate, by_up = KINDS[activation.kind].partials(g, u, activation)
    d_gate = (widen(grad) * by_gate).to(gate_up.dtype).contiguous()
    if by_up is None:
        return d_gate, grad.new_empty(0)
    d_up = (widen(grad) * by_up).to(gate_up.dtype).contiguous()
    if up is not None:
        return d_gate, d_up
    if interleaved(layout):
        return torch.stack((d_gate, d_up), -1).flatten(-2), grad.new_empty(0)
    return torch.cat((d_gate, d_up), -1), grad.new_empty(0)


def _fake(gate_up: Tensor, up: Tensor | None, activation: Activation, _layout: str) -> Tensor:
    I = gate_up.shape[-1] // 2 if up is None and activation.gated else gate_up.shape[-1]
    return gate_up.new_empty((*gate_up.shape[:-1], I))


def _backward(
    needs: Mapping[str, bool],
    grads: tuple[Tensor],
    backend: str | None,
    gate_up: Tensor,
    up: Tensor | None,
    activation: Activation,
    layout: str,
) -> Gradients:
    (grad,) = grads
    d_gate_up, d_up = _glu_backward(inherit("glu_backward", backend), grad, gate_up, up, activation, layout)
    return {"gate_up": d_gate_up, "up": d_up}


_glu = define(glu_reference, "gate_up", fake=_fake, rule=Rule(_backward))
_glu_backward = define(
    glu_backward_reference,
    "gate_up",
    fake=lambda _grad, gate_up, up, *_: fresh_like(gate_up, gate_up, up),
    rule=refuse_second_order("glu"),
)
