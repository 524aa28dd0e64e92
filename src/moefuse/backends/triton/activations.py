"""The activations that every epilogue calls: a function and a row for each.

An activation takes gate g and up u in float32, the numbers of `activation_numbers`, whether it is GATED, and FINE:
tiny results count, because they are not rounded to 16 bits. It gives ``act(g) * u`` and its derivatives by g and by u,
or of ``act(g)`` alone where it is not GATED; the compiler drops what a kernel does not use. Clamps keep -inf * 0 from
becoming NaN.
"""
# ruff: noqa: ARG001  each takes what any of them needs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moefuse.backends.codes import Table
from moefuse.backends.triton.mathfn import (
    at_least,
    at_most,
    normal_tail_parts,
    product_parts,
    sigmoid,
    sigmoid_parts,
    times_power,
)
from moefuse.types import ACTIVATION_KINDS, Activation


@triton.jit
def _gated(value, derivative, u, GATED: tl.constexpr):
    """From act(g) and its derivative."""
    if GATED:
        return value * u, derivative * u, value
    else:
        return value, derivative, value


@triton.jit
def _clamped(value, derivative, g, u, factor, limit, GATED: tl.constexpr):
    """Likewise, with g at most ``limit`` and ``factor`` a function of u that is flat beyond +-limit."""
    derivative = tl.where(g > limit, 0.0, derivative)
    if GATED:
        return value * factor, derivative * factor, tl.where(tl.abs(u) > limit, 0.0, value)
    else:
        return value, derivative, value


@triton.jit
def _unit(g, y, low, bend, FINE: tl.constexpr):
    """``g * sigmoid(y + low)`` and its derivative by g; ``bend`` is g times the derivative of y."""
    if FINE:
        s, k, other, j = sigmoid_parts(y, low)
        return times_power(g * s, k), times_power(s * (1.0 + times_power(other, j) * bend), k)
    else:
        s = sigmoid(y)
        return g * s, s * (1.0 + (1.0 - s) * bend)


@triton.jit
def _gelu_tanh(g, FINE: tl.constexpr):
    """0.5 (1 + tanh(u)) is sigmoid(2u), which loses nothing in the negative tail; FINE: with 2u in two parts."""
    c = at_most(g, 1000.0)
    square = c * c
    bend = 1.5957691216057308 * c * (1.0 + 0.134145 * square)
    if FINE:
        # 2 sqrt(2 / pi) is the float32 number next to it less 4.5e-8.
        head, rest = product_parts(c, c)
        scaled, lacking = product_parts(head * 0.0 + 0.07135481387376785, head)
        total = 1.5957691669464111 + scaled
        back = total - 1.5957691669464111
        lacking += (1.5957691669464111 - (total - back)) + (scaled - back)
        lacking += 0.07135481387376785 * rest + 2.39883e-09 * square - 4.53406803e-08
        y, low = product_parts(c, total)
        return _unit(g, y, low + c * lacking, bend, FINE)
    else:
        return _unit(g, 1.5957691216057308 * (c + 0.044715 * c * square), 0.0, bend, FINE)


@triton.jit
def _gelu(g):
    q, p, k = normal_tail_parts(tl.abs(g))
    below = g < 0
    near = 1.0 - times_power(q * p, k)
    value = tl.where(below, times_power(at_least(g, -1000.0) * (q * p), k), g * near)
    bent = times_power(p * (q - 0.3989422804014327 * at_most(tl.abs(g), 20.0)), k)
    return value, tl.where(below, bent, 1.0 - bent)


@triton.jit
def silu(g, u, numbers, GATED: tl.constexpr, FINE: tl.constexpr):
    c = at_least(g, -1000.0)
    value, derivative = _unit(c, c, 0.0, c, FINE)
    return _gated(value, derivative, u, GATED)


@triton.jit
def gelu_tanh(g, u, numbers, GATED: tl.constexpr, FINE: tl.constexpr):
    value, derivative = _gelu_tanh(at_least(g, -1000.0), FINE)
    return _gated(value, derivative, u, GATED)


@triton.jit
def gelu(g, u, numbers, GATED: tl.constexpr, FINE: tl.constexpr):
    value, derivative = _gelu(g)
    return _gated(value, derivative, u, GATED)


@triton.jit
def relu(g, u, numbers, GATED: tl.constexpr, FINE: tl.constexpr):
    return _gated(at_least(g, 0.0), tl.where(g > 0, 1.0, 0.0), u, GATED)


@triton.jit
def relu2(g, u, numbers, GATED: tl.constexpr, FINE: tl.constexpr):
    r = at_least(g, 0.0)
    value, derivative, by_up = _gated(r * r, 2.0 * r, u, GATED)
    if GATED:  # a large gate and a zero up give 0, not inf * 0
        value = r * (r * u)
    return value, derivative, by_up


@triton.jit
def swiglu_oai(g, u, numbers, GATED: tl.constexpr, FINE: tl.constexpr):
    alpha, limit = numbers
    c = at_least(at_most(g, limit), -1000.0 / alpha)
    y, low = product_parts(c * 0.0 + alpha, c) if FINE else (alpha * c, 0.0)
    value, derivative = _unit(c, y, low, alpha * c, FINE)
    return _clamped(value, derivative, g, u, at_most(at_least(u, -limit), limit) + 1.0, limit, GATED)


@triton.jit
def swiglu_clamp(g, u, numbers, GATED: tl.constexpr, FINE: tl.constexpr):
    _, limit = numbers
    c = at_least(at_most(g, limit), -1000.0)
    value, derivative = _unit(c, c, 0.0, c, FINE)
    return _clamped(value, derivative, g, u, at_most(at_least(u, -limit), limit), limit, GATED)


_ALL = (silu, gelu_tanh, gelu, relu, relu2, swiglu_oai, swiglu_clamp)
#: kind -> its function, which has its name and which kernels get as ACT
ACTIVATIONS: Table[Any] = Table("triton", "activation", {act.__name__: act for act in _ALL}, ACTIVATION_KINDS)


def activation_numbers(activation: Activation | None) -> tuple[float, float]:
    """The run-time numbers of an activation: alpha and limit."""
    return (1.0, 1.0) if activation is None else (activation.alpha, activation.limit)
