"""What the ops compute, written a second time: float64, plain loops, nothing shared with the package."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moefuse import Activation, Routing
from moefuse.testing.compare import Tolerance, difference

#: One rounding of the result: half a unit in the last place of an element, relative to its row's largest.
ROUNDED = {
    torch.float64: Tolerance(1e-12, 1e-12, "the same sums in another order"),
    torch.float32: Tolerance(1e-6, 1e-6, "f32 inside"),
    torch.bfloat16: Tolerance(2**-8 + 1e-5, 2**-8, "f32 inside, rounded once to 8 bits"),
    torch.float16: Tolerance(2**-11 + 1e-5, 2**-11, "f32 inside, rounded once to 11 bits"),
}
#: The hidden row between two products may be rounded as well.
ROUNDED_TWICE = ROUNDED | {
    torch.bfloat16: Tolerance(8e-3, 4e-3, "hidden row and result rounded to 8 bits"),
    torch.float16: Tolerance(1e-3, 5e-4, "hidden row and result rounded to 11 bits"),
}
#: torch's float32 product is off by 1.3e-6 at most in 400 draws of H=96, E=100; a weight moves by what its logit does.
FROM_PRODUCT = Tolerance(3e-6, 3e-6, "weights of logits that are a float32 product")
GRADIENT = Tolerance(1e-5, 1e-5, "f32, chained products")


def assert_close(got: Tensor, want: Tensor, tolerance: Tolerance, *, whole: bool = False) -> None:
    """``got`` is within ``tolerance`` of the float64 ``want``, which must not be all zero."""
    assert want.numel() == 0 or (want != 0).any(), "a test that zeros would pass"
    gap = difference(got, want, whole=whole)
    assert gap.within(tolerance), f"worst {gap.worst:.3g}, rms {gap.rms:.3g} ({tolerance}); {gap.where}"


def weight(rng: torch.Generator, *shape: int) -> Tensor:
    """Scaled by its fan-in, as trained weights are."""
    return torch.randn(shape, generator=rng) * shape[-1] ** -0.5


def normal(rng: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=rng) * scale


def uniform(rng: torch.Generator, *shape: int, low: float = 0.5, high: float = 1.5) -> Tensor:
    return torch.rand(shape, generator=rng) * (high - low) + low


def distinct_ids(rng: torch.Generator, T: int, top_k: int, E: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.rand((T, E), generator=rng).argsort(-1)[:, :top_k].to(dtype)


def until(make: Callable[[], Tensor], holds: Callable[[Tensor], bool]) -> Tensor:
    """Draw again until the draw is fit for the test: the seed stays free, the test never hangs on luck."""
    for _ in range(200):
        drawn = make()
        if holds(drawn):
            return drawn
    raise AssertionError("no draw fits")


def spread(logits: Tensor, gap: float = 1e-5) -> bool:
    """No two logits of a row are within ``gap``, so that float32 and float64 must rank them alike."""
    return bool((logits.double().sort(-1).values.diff(dim=-1) > gap).all())


def _score(value: float, score: str) -> float:
    if score == "sigmoid":
        return _logistic(value)
    return math.exp(value / 2) if value < -600 else math.sqrt(math.log1p(math.exp(value)))


def scores_of(logits: list[float], routing: Routing) -> list[float]:
    """Scores of a row without NaN or +inf; masked experts score 0."""
    if routing.softcap is not None:
        logits = [routing.softcap * math.tanh(z / routing.softcap) if z > -math.inf else z for z in logits]
    if routing.score != "softmax":
        return [_score(z, routing.score) if z > -math.inf else 0.0 for z in logits]
    top = max(logits)
    powers = [math.exp(z - top) if z > -math.inf else 0.0 for z in logits]
    return [p / math.fsum(powers) if p else 0.0 for p in powers]


def route_row(
    logits: list[float], routing: Routing, bias: list[float] | None, per_expert_scale: list[float] | None
) -> tuple[list[float], list[int]]:
    E, top_k = len(logits), routing.top_k
    broken = [v for v in (*logits, *(bias or ())) if math.isnan(v) or v == math.inf]
    alive = [e for e in range(E) if logits[e] > -math.inf and (bias is None or bias[e] > -math.inf)]
    if broken or not alive:
        return [0.0] * top_k, [E] * top_k
    scores = scores_of(logits, routing)
    key = logits if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    if routing.groups > 1:
        size = E // routing.groups
        values = []
        for g in range(routing.groups):
            members = [e for e in alive if e // size == g]
            if routing.group_score == "max":
                values.append(max((key[e] for e in members), default=-math.inf))
            else:
                summands = scores if bias is None else key
                values.append(sum(sorted((summands[e] for e in members), reverse=True)[:2]) if members else -math.inf)
        kept = sorted(range(routing.groups), key=lambda g: (-values[g], g))[: routing.top_groups]
        alive = [e for e in alive if e // size in kept]
    ids = sorted(alive, key=lambda e: (-key[e], e))[:top_k]
    weights = [scores[e] for e in ids]
    if routing.renormalize:
        weights = [w / (max(math.fsum(weights), routing.floor) or 1.0) for w in weights]
    weights = [
        w * routing.scale * (per_expert_scale[e] if per_expert_scale else 1) for w, e in zip(weights, ids, strict=True)
    ]
    if routing.renormalize_after_scale:
        weights = [w / (math.fsum(weights) or 1.0) for w in weights]
    short = top_k - len(ids)
    return weights + [0.0] * short, ids + [E] * short


def route(
    logits: Tensor, routing: Routing, bias: Tensor | None = None, per_expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    lists = [None if t is None else t.double().tolist() for t in (bias, per_expert_scale)]
    rows = [route_row(row, routing, *lists) for row in logits.double().tolist()]
    shape = (len(rows), routing.top_k)
    weights = torch.tensor([row[0] for row in rows], dtype=torch.float64).reshape(shape)
    return weights, torch.tensor([row[1] for row in rows], dtype=torch.int32).reshape(shape)


def rms_norm(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt() * norm_weight.double()


def _cdf(g: float) -> float:
    return 0.5 * math.erfc(-g / math.sqrt(2))


def _logistic(g: float) -> float:
    return 1 / (1 + math.exp(-g)) if g > -700 else 0.0


def act(activation: Activation, g: float, u: float | None) -> float:
    """One element. ``u`` is None when ungated."""
    kind, limit = activation.kind, activation.limit
    factor = 1.0 if u is None else u
    if kind == "silu":
        return g * _logistic(g) * factor
    if kind == "gelu_tanh":
        return 0.5 * g * (1 + math.tanh(0.7978845608028654 * (g + 0.044715 * g**3))) * factor
    if kind == "gelu":
        return g * _cdf(g) * factor
    if kind == "relu":
        return max(g, 0.0) * factor
    if kind == "relu2":
        return max(g, 0.0) ** 2 * factor
    g = min(g, limit)
    clamped = None if u is None else min(max(u, -limit), limit)
    if kind == "swiglu_oai":
        return g * _logistic(activation.alpha * g) * (1.0 if clamped is None else clamped + 1)
    return g * _logistic(g) * (1.0 if clamped is None else clamped)


def act_rows(activation: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    flat = gate.double().flatten().tolist()
    ups = [None] * len(flat) if up is None else up.double().flatten().tolist()
    values = [act(activation, g, u) for g, u in zip(flat, ups, strict=True)]
    return torch.tensor(values, dtype=torch.float64).reshape(gate.shape)


def halves(z: Tensor, activation: Activation, layout: str) -> tuple[Tensor, Tensor | None]:
    if not activation.gated:
        return z, None
    I = z.shape[-1] // 2
    return (z[..., :I], z[..., I:]) if layout == "halves" else (z[..., 0::2], z[..., 1::2])


def sizes(activation: Activation, gate: Tensor, up: Tensor | None) -> Tensor:
    """How large an activation's rounding error can be, over one unit in the last place; of absolute pre-activations."""
    grown = gate * gate if activation.kind == "relu2" else gate
    return grown if up is None else grown * (up + 1 if activation.kind == "swiglu_oai" else up)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: str | Activation = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    layout: str = "halves",
    of: Callable[[Activation, Tensor, Tensor | None], Tensor] = act_rows,
) -> Tensor:
    """Token by token, slot by slot. ``of`` takes the pre-activation to the hidden row."""
    activation = Activation.of(activation)
    E = down.shape[0]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            e = int(ids[t, j])
            if not 0 <= e < E:
                continue
            z = gate_up[e].double() @ x[t].double()
            if gate_up_bias is not None:
                z = z + gate_up_bias[e].double()
            y = down[e].double() @ of(activation, *halves(z, activation, layout))
            if down_bias is not None:
                y = y + down_bias[e].double()
            out[t] += float(weights[t, j]) * y
    return out


def experts_size(**arguments: object) -> Tensor:
    """The sum of the absolute terms: what the rounding of a sum is relative to, however much the sum cancels."""
    return experts(
        **{n: t.abs() if n != "ids" and isinstance(t, Tensor) else t for n, t in arguments.items()}, of=sizes
    )
