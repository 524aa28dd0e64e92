"""Functions that keep float32's accuracy where results are tiny or arguments large.

The card's own exponential multiplies its argument by log2(e) first, and is off by the rounding of that product: 5e-6 at
-80. Here ``e**x`` comes as ``p * 2**k``, so that nothing is lost before the last multiplication.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moefuse.backends.triton.runtime.launch import INTERPRETED

#: whether a card's own instructions can stand in a kernel: no interpreter knows them
WRITTEN_OUT = tl.constexpr(not INTERPRETED)


@triton.jit
def at_least(x, low):
    """The larger one; a NaN comes through."""
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def at_most(x, high):
    """The smaller one; a NaN comes through."""
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp_parts(x, low):
    """``e**(x + low) = p * 2**k`` with p near 1; x is from -2000 to 2000, low a correction far smaller than 1."""
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    n = tl.where(x == x, n, 0.0)
    r = (x - n * 0.693359375) + n * 2.12194440e-4 + low
    return tl.exp2(r * 1.4426950408889634), n.to(tl.int32)


@triton.jit
def times_power(x, k):
    """``x * 2**k`` with one rounding; x is far from the ends of float32."""
    k = tl.minimum(tl.maximum(k, -250), 250)
    half = k >> 1
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)
    return x * first * ((k - half + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _head(x):
    """The first 12 bits of a number: products of two such are exact."""
    return (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)


@triton.jit
def product_parts(a, b):
    """``a * b`` as the product of the two heads, which is exact, and the rest, which is 2**-11 of it or less.

    What a rounded product lacks cannot be computed here: a compiler that fuses multiplications into additions would
    fuse that product too, and find that it lacks nothing.
    """
    a_head, b_head = _head(a), _head(b)
    a_rest, b_rest = a - a_head, b - b_head
    return a_head * b_head, a_head * b_rest + a_rest * b


@triton.jit
def difference_parts(a, b):
    """``a - b``, and what the rounded difference lacks."""
    d = a - b
    back = d - a
    return d, (a - (d - back)) - (b + back)


@triton.jit
def sigmoid_parts(x, low):
    """sigmoid(x + low) as ``s * 2**k``, and one minus it as ``other * 2**j``."""
    below = x < 0
    p, k = exp_parts(at_least(-tl.abs(x), -200.0), tl.where(below, low, -low))
    large = 1.0 / (1.0 + times_power(p, k))
    small = p * large
    s, other = tl.where(below, small, large), tl.where(below, large, small)
    return s, tl.where(below, k, 0), other, tl.where(below, 0, k)


@triton.jit
def normal_tail_parts(a):
    """The chance of a normal number beyond ``a`` >= 0 as ``q * p * 2**k``; ``p * 2**k`` is exp(-a*a/2).

    q is a fit in 1 / (1 + a/4) that is within 3e-7 of the ratio.
    """
    a = at_most(a, 20.0)
    head = _head(a)
    p, k = exp_parts(-0.5 * head * head, -0.5 * (a - head) * (a + head))
    t = 1.0 / (1.0 + 0.25 * a)
    q = 0.0160714734 * t - 0.0602258529
    q = q * t + 0.0461199372
    q = q * t + 0.0350751543
    q = q * t + 0.00786620334
    q = q * t + 0.0888593596
    q = q * t + 0.0713885712
    q = q * t + 0.0956115754
    q = q * t + 0.0994855684
    q = q * t + 0.0997480127
    return q * t, p, k


@triton.jit
def log1p_ratio(t):
    """``log(1 + t) / t`` for t from 0 to 1."""
    s = t / (2.0 + t)
    s = s * s
    q = s * (1.0 / 17.0) + 1.0 / 15.0
    q = q * s + 1.0 / 13.0
    q = q * s + 1.0 / 11.0
    q = q * s + 1.0 / 9.0
    q = q * s + 1.0 / 7.0
    q = q * s + 1.0 / 5.0
    q = q * s + 1.0 / 3.0
    return 2.0 / (2.0 + t) * (q * s + 1.0)


@triton.jit
def tanh_and_derivative(x):
    """tanh(x), and its derivative."""
    a = tl.abs(x)
    p, k = exp_parts(at_least(-2.0 * a, -400.0), 0.0)
    small = times_power(p, k)
    s = a * a
    near = a * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0)))))
    size = tl.where(a < 0.25, near, (1.0 - small) / (1.0 + small))
    return tl.where(x < 0, -size, size), 4.0 * small / ((1.0 + small) * (1.0 + small))


@triton.jit
def sigmoid(y):
    """Within a few units of float32's last place, zero where it is less than float32's least normal number.

    Written out: 4 instructions where the compiler's division and exponential, which keep subnormal numbers, have 13.
    """
    if WRITTEN_OUT:
        s = tl.inline_asm_elementwise(
            "{.reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, t;}",
            "=f,f",
            [y],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        s = 1.0 / (1.0 + tl.exp(-y))
    return s
