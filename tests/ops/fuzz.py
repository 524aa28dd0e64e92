"""Random calls of every op with strange memory, against a model in float64 that shares no code with the package.

    python tests/ops/fuzz.py --calls 20000 [--op experts] [--seed 1] [--backend cpu] [--device cpu]

Sizes, rules, element types, sentinels, duplicates, masks and the form of every tensor are drawn anew for each call. One
call in four is differentiated. A call whose routing hangs on the last bits of a logit is drawn again.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time

import torch
from torch import Tensor

import moefuse
from moefuse.testing.poison import poisoned

F64 = torch.float64
KINDS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu_oai", "swiglu_clamp")
#: error of a result relative to the sum of its absolute terms: (float32, bfloat16, float16)
BOUND = {torch.float32: 4e-6, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}
GRADIENT_BOUND = 2e-5


# The model.


def logistic(x: Tensor) -> Tensor:
    e = torch.exp(-x.abs())
    return torch.where(x >= 0, 1 / (1 + e), e / (1 + e))


def activation(kind: str, alpha: float, limit: float, g: Tensor, u: Tensor | None) -> Tensor:
    if kind in ("swiglu_oai", "swiglu_clamp"):
        # the slope on the very edge is that of the inside
        g = torch.where(g <= limit, g, limit)
        u = None if u is None else torch.where(u.abs() <= limit, u, limit * u.sign())
    if kind in ("silu", "swiglu_clamp"):
        value = g * logistic(g)
    elif kind == "swiglu_oai":
        value = g * logistic(alpha * g)
        u = None if u is None else u + 1
    elif kind == "gelu_tanh":
        value = g * logistic(1.5957691216057308 * (g + 0.044715 * g * g * g))
    elif kind == "gelu":
        value = 0.5 * g * torch.special.erfc(-g / 2**0.5)
    else:
        value = torch.where(g > 0, g, 0.0)
        value = value * value if kind == "relu2" else value
    return value if u is None else value * u


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight


def scores(logits: Tensor, rule: moefuse.Routing) -> Tensor:
    if rule.softcap is not None:
        logits = torch.where(logits == -torch.inf, logits, rule.softcap * torch.tanh(logits / rule.softcap))
    if rule.score == "softmax":
        e = torch.exp(logits - logits.amax(-1, keepdim=True).clamp(min=-1e300).detach())
        return e / e.sum(-1, keepdim=True).clamp(min=1e-300)
    if rule.score == "sigmoid":
        return logistic(logits)
    return torch.sqrt(torch.where(logits > 0, logits, 0.0) + torch.log1p(torch.exp(-logits.abs())))


def choose(logits: Tensor, rule: moefuse.Routing, bias: Tensor | None) -> tuple[Tensor, bool]:
    """Ids, and whether float32 must choose the same: no two keys, of experts or of groups, are close and not equal."""
    T, E = logits.shape
    ids, clear = [], True
    table = scores(logits, rule).tolist()
    for row, score in zip(logits.tolist(), table, strict=True):
        if any(v != v or v == float("inf") for v in row):
            ids.append([E] * rule.top_k)
            continue
        alive = [e for e in range(E) if row[e] > -float("inf")]
        key = row if bias is None else [s + b for s, b in zip(score, bias.tolist(), strict=True)]
        if rule.groups > 1:
            size = E // rule.groups
            values = []
            for g in range(rule.groups):
                own = [e for e in alive if e // size == g]
                one = key if rule.group_score == "max" or bias is not None else score
                best = sorted((one[e] for e in own), reverse=True)[: 1 if rule.group_score == "max" else 2]
                values.append(sum(best) if best else -float("inf"))
            order = sorted(range(rule.groups), key=lambda g: (-values[g], g))
            clear &= apart([values[g] for g in order])
            alive = [e for e in alive if e // size in order[: rule.top_groups]]
        order = sorted(alive, key=lambda e: (-key[e], e))
        clear &= apart([key[e] for e in order])
        ids.append((order + [E] * rule.top_k)[: rule.top_k])
    return torch.tensor(ids, dtype=torch.int64).view(T, rule.top_k), clear


def apart(ranked: list[float]) -> bool:
    steps = [(a, b) for a, b in itertools.pairwise(ranked) if b > -float("inf")]
    return all(a - b > 2e-5 * max(1.0, abs(a)) for a, b in steps)


def weigh(logits: Tensor, ids: Tensor, rule: moefuse.Routing, scale: Tensor | None) -> Tensor:
    E = logits.shape[1]
    live = ids < E
    at = ids.clamp(max=E - 1)
    finite = torch.where(torch.isfinite(logits), logits, -torch.inf)
    w = torch.where(live, scores(finite, rule).gather(1, at), 0.0)
    if rule.renormalize:
        floor = {"softmax": 2.0**-14}.get(rule.score, 1e-20) if rule.norm_floor is None else rule.norm_floor
        total = w.sum(-1, keepdim=True)
        w = w / torch.where(total > floor, total, floor or 1.0)
    w = w * rule.scale
    if scale is not None:
        w = w * scale[at]
    w = torch.where(live, w, 0.0)
    if rule.renormalize_after_scale:
        total = w.sum(-1, keepdim=True)
        w = w / torch.where(total != 0, total, 1.0)
    return w


def buckets(ids: list[int], E: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(E + 1)]
    for s, e in enumerate(ids):
        found[e if 0 <= e < E else E].append(s)
    return found


def mlp(x, ids, weights, stack, down, gate_up_bias, down_bias, act, layout) -> Tensor:
    (T, K), E = ids.shape, down.shape[0]
    live = ((ids >= 0) & (ids < E)).reshape(-1)
    at = torch.where(live, ids.reshape(-1), 0)
    rows = x.repeat_interleave(K, 0)
    z = torch.einsum("snh,sh->sn", stack[at], rows)
    if gate_up_bias is not None:
        z = z + gate_up_bias[at]
    if act.gated:
        half = z.shape[1] // 2
        g, u = (z[:, :half], z[:, half:]) if layout == "halves" else (z[:, 0::2], z[:, 1::2])
    else:
        g, u = z, None
    y = torch.einsum("shi,si->sh", down[at], activation(act.kind, act.alpha, act.limit, g, u))
    if down_bias is not None:
        y = y + down_bias[at]
    share = torch.where(live, weights.reshape(-1), 0.0)
    return (y * share[:, None]).view(T, K, down.shape[1]).sum(1)


def tail(total, given) -> tuple[Tensor, ...]:
    shared = given.get("shared")
    if shared is not None:
        if given.get("shared_gate") is not None:
            shared = given["shared_gate"][:, None] * shared
        if given.get("shared_logit") is not None:
            shared = logistic(given["shared_logit"])[:, None] * shared
        total = total + shared
    if given.get("residual") is not None:
        total = total + given["residual"]
    if given.get("norm_weight") is None:
        return (total,)
    return total, norm(total, given["norm_weight"], given["eps"])


# The draws. A draw gives the arguments of a call, and the model of that call on the same arguments in float64.


class Draw:
    def __init__(self, seed: int, device: str) -> None:
        self.luck, self.device = random.Random(seed), device
        self.rng = torch.Generator().manual_seed(seed)
        self.dtype = self.luck.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
        self.T, self.E = self.luck.choice((0, 1, 1, 2, 3, 5, 9, 33)), self.luck.choice((1, 2, 3, 5, 8, 12))
        self.H, self.I = self.luck.randint(1, 40), self.luck.randint(1, 24)
        self.K = self.luck.randint(1, min(self.E, 5))

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return (torch.randn(shape, generator=self.rng) * scale).to(dtype or self.dtype)

    def maybe(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
        return self.normal(*shape, dtype=dtype) if self.luck.random() < 0.5 else None

    def scale(self) -> Tensor | None:
        """Factors of experts; of one sign, so that a sum of weights to divide by does not cancel."""
        return self.normal(self.E, dtype=self.side()).abs() + 0.25 if self.luck.random() < 0.5 else None

    def side(self) -> torch.dtype:
        """The type of an argument that need not have that of x."""
        return self.luck.choice((self.dtype, torch.float32))

    def ids(self) -> Tensor:
        ids = torch.randint(-2, self.E + 2, (self.T, self.K), generator=self.rng)
        return ids.to(self.luck.choice((torch.int32, torch.int64)))

    def rule(self, kind: str | None = None) -> moefuse.Routing:
        groups = self.luck.choice([g for g in (1, 1, 2, 3, 4) if self.E % g == 0])
        return moefuse.Routing(
            self.K, score=kind or self.luck.choice(("softmax", "sigmoid", "sqrtsoftplus")),
            renormalize=self.luck.random() < 0.6, scale=self.luck.choice((1.0, 2.5)), groups=groups,
            top_groups=self.luck.randint(1, groups), group_score=self.luck.choice(("max", "top2_sum")),
            softcap=self.luck.choice((None, None, 4.0)), renormalize_after_scale=self.luck.random() < 0.2,
        )  # fmt: skip

    def act(self) -> moefuse.Activation:
        return moefuse.Activation(self.luck.choice(KINDS), gated=self.luck.random() < 0.7, limit=2.0)

    def strange(self, t: Tensor) -> Tensor:
        """The same values, laid out by chance: any strides, any offset, gaps of NaN, sometimes negated."""
        if self.luck.random() < 0.4:
            return t.to(self.device)
        steps = [self.luck.choice((1, 1, 2, 3)) for _ in t.shape]
        begins = [self.luck.randint(0, step) for step in steps]
        order = list(range(t.dim()))
        self.luck.shuffle(order)
        sizes = [t.shape[d] * steps[d] + begins[d] + 1 for d in order]
        junk = torch.nan if t.is_floating_point() else -(2**30)
        base = torch.full((*sizes, 1), junk, dtype=t.dtype, device=self.device)[..., 0]
        back = [order.index(d) for d in range(t.dim())]
        view = base.permute(back)[tuple(slice(b, b + n * s, s) for b, n, s in zip(begins, t.shape, steps, strict=True))]
        negated = self.luck.random() < 0.3
        view.copy_(-t if negated else t)
        return torch._neg_view(view) if negated else view


def draw_tail(d: Draw) -> dict:
    given = {"shared": d.maybe(d.T, d.H, dtype=d.side()), "residual": d.maybe(d.T, d.H, dtype=d.side()),
             "norm_weight": d.maybe(d.H, dtype=d.side()), "eps": d.luck.choice((1e-5, 1e-2))}  # fmt: skip
    if given["shared"] is not None:
        given[d.luck.choice(("shared_gate", "shared_logit", "eps "))] = d.normal(d.T, dtype=d.side())
    given.pop("eps ", None)
    return given


def route(d: Draw):
    rule = d.rule()
    logits = d.normal(d.T, d.E, scale=2.0)
    if d.luck.random() < 0.3 and d.T:
        logits[d.luck.randrange(d.T), d.luck.randrange(d.E)] = d.luck.choice((-torch.inf, torch.nan, torch.inf))
    given = {"logits": logits, "bias": d.maybe(d.E, dtype=d.side()), "per_expert_scale": d.scale()}

    def model(logits, bias, per_expert_scale):
        ids, clear = choose(logits.detach(), rule, None if bias is None else bias.detach())
        return (weigh(logits, ids, rule, per_expert_scale), ids) if clear else None

    return given, {"routing": rule}, model


def gate(d: Draw):
    rule = d.rule()
    given = {"x": d.normal(d.T, d.H), "weight": d.normal(d.E, d.H, scale=d.H**-0.5, dtype=d.side()),
             "norm_weight": d.maybe(d.H, dtype=d.side()), "bias": d.maybe(d.E, dtype=d.side()),
             "logit_bias": d.maybe(d.E, dtype=d.side()), "per_expert_scale": d.scale()}  # fmt: skip

    def model(x, weight, norm_weight, bias, logit_bias, per_expert_scale):
        normed = x if norm_weight is None else norm(x, norm_weight, 1e-3)
        logits = normed @ weight.T
        logits = logits if logit_bias is None else logits + logit_bias
        ids, clear = choose(logits.detach(), rule, None if bias is None else bias.detach())
        return (weigh(logits, ids, rule, per_expert_scale), ids, normed) if clear else None

    return given, {"routing": rule, "eps": 1e-3, "return_normed": True}, model


def plan(d: Draw):
    def model(ids):
        found = buckets(ids.flatten().tolist(), d.E)
        order = [s for bucket in found for s in bucket]
        counts = [len(bucket) for bucket in found[:-1]]
        lists = (counts, [sum(counts[:e]) for e in range(d.E + 1)], order, [order.index(s) for s in range(len(order))])
        return tuple(torch.tensor(values, dtype=torch.int64) for values in lists)

    return {"ids": d.ids()}, {"num_experts": d.E}, model


def grouped_linear(d: Draw):
    ids = d.ids()
    gather, scatter = d.luck.random() < 0.5, d.luck.random() < 0.5
    per_token = gather and d.luck.random() < 0.7
    made = moefuse.plan(ids, d.E, backend="reference")
    given = {"x": d.normal(d.T if per_token else d.T * d.K, d.H), "weight": d.normal(d.E, d.I, d.H, scale=d.H**-0.5),
             "bias": d.maybe(d.E, d.I, dtype=d.side())}  # fmt: skip
    lists = buckets(ids.flatten().tolist(), d.E)

    def model(x, weight, bias):
        rows, p = {}, 0
        for e, bucket in enumerate(lists):
            for s in bucket:
                row = x[(s // d.K if per_token else s) if gather else p]
                y = weight[e] @ row if e < d.E else torch.zeros(d.I, dtype=F64)
                rows[s if scatter else p] = y + bias[e] if bias is not None and e < d.E else y
                p += 1
        return (torch.stack([rows[i] for i in range(len(rows))]) if rows else x.new_zeros(0, d.I),)

    return given, {"gather": gather, "scatter": scatter, "plan": made}, model


def linear(d: Draw):
    given = {"x": d.normal(d.T, d.H), "weight": d.normal(d.I, d.H, scale=d.H**-0.5),
             "bias": d.maybe(d.I, dtype=d.side()), "residual": d.maybe(d.T, d.I, dtype=d.side())}  # fmt: skip

    def model(x, weight, bias, residual):
        y = torch.stack([weight @ row for row in x]) if len(x) else x.new_zeros(0, d.I)
        for added in (bias, residual):
            y = y if added is None else y + added
        return (y,)

    return given, {}, model


def grouped_outer(d: Draw):
    ids = d.ids()
    gather, scatter = d.luck.random() < 0.5, d.luck.random() < 0.5
    given = {"grad": d.normal(d.T * d.K, d.I), "x": d.normal(d.T if gather else d.T * d.K, d.H)}
    lists = buckets(ids.flatten().tolist(), d.E)

    def model(grad, x):
        found, p = torch.zeros(d.E, d.I, d.H, dtype=F64), 0
        for e, bucket in enumerate(lists):
            for s in bucket:
                if e < d.E:
                    row = x[s // d.K if gather else p]
                    found[e] += torch.outer(grad[s if scatter else p], row)
                p += 1
        return (found,)

    options = {"gather": gather, "scatter": scatter, "plan": moefuse.plan(ids, d.E, backend="reference")}
    return given, options, model


def glu(d: Draw):
    act = d.act()
    shape = [d.luck.randint(0, 4) for _ in range(d.luck.randint(0, 2))] + [d.I]
    apart = act.gated and d.luck.random() < 0.4
    layout = "halves" if apart or not act.gated else d.luck.choice(("halves", "interleaved"))
    if apart:
        given = {"gate_up": d.normal(*shape, scale=4.0), "up": d.normal(*shape, scale=4.0)}
    else:
        given = {"gate_up": d.normal(*shape[:-1], act.width(d.I), scale=4.0)}

    def model(gate_up, up=None):
        if act.gated and up is None:
            half = gate_up.shape[-1] // 2
            pair = (gate_up[..., :half], gate_up[..., half:])
            gate_up, up = pair if layout == "halves" else (gate_up[..., 0::2], gate_up[..., 1::2])
        return (activation(act.kind, act.alpha, act.limit, gate_up, up),)

    return given, {"activation": act, "layout": layout}, model


def combine(d: Draw):
    given = {"y": d.normal(d.T * d.K, d.H), "weights": d.normal(d.T, d.K, dtype=d.side())} | draw_tail(d)
    options = {"eps": given.pop("eps")}
    if d.luck.random() < 0.5:
        given["inverse"] = torch.randperm(d.T * d.K, generator=d.rng).to(torch.int32)

    def model(y, weights, inverse=None, **more):
        rows = y if inverse is None else y[inverse.long()]
        total = (rows.view(d.T, d.K, d.H) * weights[..., None]).sum(1) if d.T else rows.new_zeros(0, d.H)
        return tail(total, more | options)

    return given, options, model


def stacks(d: Draw, act: moefuse.Activation) -> dict:
    rows = act.width(d.I)
    return {"gate_up": d.normal(d.E, rows, d.H, scale=d.H**-0.5), "down": d.normal(d.E, d.H, d.I, scale=d.I**-0.5),
            "gate_up_bias": d.maybe(d.E, rows, dtype=d.side()),
            "down_bias": d.maybe(d.E, d.H, dtype=d.side())}  # fmt: skip


def experts(d: Draw):
    act = d.act()
    layout = d.luck.choice(("halves", "interleaved"))
    given = {"x": d.normal(d.T, d.H), "ids": d.ids(), "weights": d.normal(d.T, d.K, dtype=d.side())}
    given |= stacks(d, act) | draw_tail(d)
    options = {"activation": act, "layout": layout, "eps": given.pop("eps")}

    def model(x, ids, weights, gate_up, down, gate_up_bias, down_bias, **more):
        return tail(mlp(x, ids, weights, gate_up, down, gate_up_bias, down_bias, act, layout), more | options)

    return given, options, model


def moe(d: Draw):
    act, rule = d.act(), d.rule()
    given = {"x": d.normal(d.T, d.H), "router": d.normal(d.E, d.H, scale=d.H**-0.5, dtype=d.side()),
             "norm_weight": d.maybe(d.H, dtype=d.side())}  # fmt: skip
    after = draw_tail(d)
    options = {"routing": rule, "eps": 1e-3, "activation": act, "next_eps": after.pop("eps")}
    given |= stacks(d, act) | after | {"next_norm_weight": after["norm_weight"], "norm_weight": given["norm_weight"]}

    def model(x, router, norm_weight, gate_up, down, gate_up_bias, down_bias, next_norm_weight, **more):
        normed = x if norm_weight is None else norm(x, norm_weight, 1e-3)
        logits = normed @ router.T
        ids, clear = choose(logits.detach(), rule, None)
        if not clear:
            return None
        weights = weigh(logits, ids, rule, None)
        total = mlp(normed, ids, weights, gate_up, down, gate_up_bias, down_bias, act, "halves")
        return tail(total, more | {"norm_weight": next_norm_weight, "eps": options["next_eps"]})

    return given, options, model


OPS = {f.__name__: f for f in (route, gate, plan, grouped_linear, grouped_outer, linear, glu, combine, experts, moe)}


def far(got: Tensor, want: Tensor, bound: float) -> str | None:
    """What is wrong, relative to the whole result: rows may cancel, and a wrong element is not near the bound."""
    got = got.detach().cpu().double()
    if got.shape != want.shape:
        return f"shape {list(got.shape)}, not {list(want.shape)}"
    if want.numel() == 0:
        return None
    if not bool(got.isfinite().all()):
        return "not finite"
    gap, size = (got - want).abs().max().item(), want.abs().max().item()
    return None if gap <= bound * max(size, 1.0) else f"off by {gap:.3g} of {size:.3g}"


def one(op: str, seed: int, backend: str, device: str) -> str | None:
    """Run one call; what is wrong with it, or None, or "again" where its routing is undecided."""
    d = Draw(seed, device)
    given, options, model = OPS[op](d)
    if backend == "triton" and d.dtype == torch.bfloat16 and device == "cpu":
        return "again"
    differentiated = op not in ("plan", "grouped_outer") and d.luck.random() < 0.25
    wide = {name: t.double() if t is not None and t.is_floating_point() else t for name, t in given.items()}
    learned = [name for name, t in wide.items() if differentiated and t is not None and t.is_floating_point()]
    for name in learned:
        wide[name].requires_grad_()
    want = model(**wide)
    if want is None:
        return "again"
    here = {name: None if t is None else d.strange(t) for name, t in given.items()}
    for name in learned:
        here[name] = here[name].requires_grad_()
    if "plan" in options:
        parts = (getattr(options["plan"], name) for name in ("counts", "offsets", "order", "inverse"))
        options["plan"] = moefuse.Plan(*map(d.strange, parts), d.K)
    with poisoned():
        got = getattr(moefuse, op)(**here, **options, backend=backend)
    if isinstance(got, moefuse.Plan):
        got = (got.counts, got.offsets, got.order, got.inverse)
    got = got if isinstance(got, tuple) else (got,)
    narrow = d.dtype != torch.float32 and op in ("experts", "moe")
    if op in ("experts", "moe") and len(got) == 2:
        # A sum that cancels is known to a rounding of its terms; its norm, which scales that up, by the sum itself.
        weight, eps = ("next_norm_weight", "next_eps") if op == "moe" else ("norm_weight", "eps")
        want = (want[0], norm(got[0].detach().cpu().double(), wide[weight].detach(), options[eps]))
    bound = BOUND[torch.float32 if op in ("route", "gate") and len(got) == 2 else d.dtype]
    for i, (one, goal) in enumerate(zip(got, want, strict=True)):
        wrong = far(one, goal.detach().double(), bound if goal.is_floating_point() else 0.0)
        if wrong:
            return f"result {i}: {wrong}"
    outputs = [(a, b) for a, b in zip(got, want, strict=True) if a.requires_grad and b.requires_grad]
    # Rounded to 16 bits on the way, a hidden value may stand on the other side of a clamp: another slope.
    if learned and outputs and not narrow:
        seeds = [d.normal(*b.shape, dtype=torch.float32) for _, b in outputs]
        goals = torch.autograd.grad([b for _, b in outputs], [wide[n] for n in learned],
                                    [s.to(a.dtype).double() for s, (a, _) in zip(seeds, outputs, strict=True)],
                                    allow_unused=True)  # fmt: skip
        with poisoned():
            found = torch.autograd.grad([a for a, _ in outputs], [here[n] for n in learned],
                                        [d.strange(s.to(a.dtype)) for s, (a, _) in zip(seeds, outputs, strict=True)],
                                        allow_unused=True)  # fmt: skip
        limit = GRADIENT_BOUND if d.dtype == torch.float32 else 4 * BOUND[d.dtype]
        for name, a, b in zip(learned, found, goals, strict=True):
            if b is None or a is None:
                if (a is not None and bool((a != 0).any())) or (b is not None and bool((b != 0).any())):
                    return f"gradient of {name}: there in one, not in the other"
                continue
            wrong = far(a, b, limit)
            if wrong:
                return f"gradient of {name}: {wrong}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--op", choices=OPS, action="append")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    failures = 0
    for op in options.op or OPS:
        ran, seed, begin = 0, options.seed, time.monotonic()
        while ran < options.calls:
            seed += 1
            try:
                wrong = one(op, seed, options.backend, options.device)
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong == "again":
                continue
            ran += 1
            if wrong:
                failures += 1
                print(f"{op}, seed {seed}, {Draw(seed, 'cpu').dtype}: {wrong}", flush=True)
        print(f"{op}: {ran} calls from seed {options.seed} on, {time.monotonic() - begin:.0f} s", flush=True)
    print(f"{failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
