"""A user's mistake: the right exception, naming the op, the rule and what was got, before any kernel runs."""

import dataclasses
import math
import re

import pytest
import torch

import moefuse
from moefuse import Activation, Plan, Routing, backends
from moefuse.ops._core import select
from moefuse.testing import cases
from moefuse.types import ACTIVATION_KINDS, GROUP_SCORES, LAYOUTS, SCORES

T, E, H, I, K = 3, 4, 6, 5, 2
F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def rand(*shape, dtype=F32):
    return torch.rand(shape).to(dtype)


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def ids_of(rows=T, top_k=K, dtype=torch.int32):
    return torch.arange(rows * top_k).reshape(rows, top_k).remainder(E).to(dtype)


PLAN = moefuse.plan(ids_of(), E, backend="reference")
ELSEWHERE = Plan(*(t.to("meta") for t in (PLAN.counts, PLAN.offsets, PLAN.order, PLAN.inverse)), PLAN.top_k)
PLAN_OF_MORE_EXPERTS = moefuse.plan(ids_of(), E + 1, backend="reference")
PLAN_OF_MORE_TOKENS = moefuse.plan(ids_of(T + 1), E, backend="reference")


def route(**changes):
    moefuse.route(**({"logits": rand(T, E), "routing": Routing(K)} | changes))


def gate(**changes):
    moefuse.gate(**({"x": rand(T, H), "weight": rand(E, H), "routing": Routing(K)} | changes))


def plan(**changes):
    moefuse.plan(**({"ids": ids_of(), "num_experts": E} | changes))


def grouped(**changes):
    given = {"x": rand(T, H), "weight": rand(E, I, H), "plan": PLAN, "gather": True, "scatter": True}
    moefuse.grouped_linear(**(given | changes))


def linear(**changes):
    moefuse.linear(**({"x": rand(T, H), "weight": rand(I, H)} | changes))


def outer(**changes):
    given = {"grad": rand(T * K, I), "x": rand(T, H), "plan": PLAN, "gather": True, "scatter": True}
    moefuse.grouped_outer(**(given | changes))


def combine(**changes):
    moefuse.combine(**({"y": rand(T * K, H), "weights": rand(T, K)} | changes))


def experts(**changes):
    given = {
        "x": rand(T, H),
        "ids": ids_of(),
        "weights": rand(T, K),
        "gate_up": rand(E, 2 * I, H),
        "down": rand(E, H, I),
    }
    moefuse.experts(**(given | changes))


def moe(**changes):
    given = {"x": rand(T, H), "router": rand(E, H), "gate_up": rand(E, 2 * I, H), "down": rand(E, H, I)}
    moefuse.moe(**(given | {"routing": Routing(K)} | changes))


def rope(**changes):
    given = {"q": rand(2, T, 4, 6), "k": rand(2, T, 2, 6), "cos": rand(1, T, 2), "sin": rand(1, T, 2)}
    moefuse.rope(**(given | changes))


def write(**changes):
    """A rope with a cache."""
    rope(**({"v": rand(2, T, 2, 5), "keys": KEYS, "values": VALUES, "position": torch.tensor([1])} | changes))


def attend(**changes):
    given = {"q": rand(2, 4, 6), "keys": KEYS, "values": VALUES, "position": torch.tensor(3)}
    moefuse.attend(**(given | changes))


glu = moefuse.glu
KEYS, VALUES = rand(2, 2, 7, 6), rand(2, 2, 7, 5)
ALL_BACKENDS = ("cpu", "triton", "metal", "reference")
OUTPUT = torch.full((T, H), 7.0)

#: (call, exception, fragments of the message); keyed by a name
ROWS = {
    # Routing
    "routing-top_k-0": (lambda: Routing(0), ValueError, ("Routing", "top_k must be from 1 to 64", "got 0")),
    "routing-top_k-65": (lambda: Routing(65), ValueError, ("Routing", "top_k must be from 1 to 64", "got 65")),
    "routing-top_k-float": (lambda: Routing(2.0), TypeError, ("Routing", "top_k must be an int", "float")),
    "routing-top_k-bool": (lambda: Routing(True), TypeError, ("Routing", "top_k must be an int", "bool")),
    "routing-score": (lambda: Routing(2, score="tanh"), ValueError, ("Routing", "score", *SCORES, "'tanh'")),
    "routing-group_score": (
        lambda: Routing(2, group_score="mean"), ValueError, ("Routing", "group_score", *GROUP_SCORES, "'mean'")),
    "routing-scale-nan": (lambda: Routing(2, scale=math.nan), ValueError, ("Routing", "scale must be finite", "nan")),
    "routing-scale-inf": (lambda: Routing(2, scale=math.inf), ValueError, ("Routing", "scale must be finite", "inf")),
    "routing-groups-0": (lambda: Routing(2, groups=0), ValueError, ("Routing", "groups=0")),
    "routing-groups-str": (lambda: Routing(2, groups="4"), TypeError, ("Routing", "groups must be an int", "str")),
    "routing-top_groups": (
        lambda: Routing(2, groups=4, top_groups=5), ValueError,
        ("Routing", "top_groups must be from 1 to", "groups=4", "5")),
    "routing-softcap-0": (lambda: Routing(2, softcap=0.0), ValueError, ("Routing", "softcap must be positive", "0.0")),
    "routing-softcap-nan": (lambda: Routing(2, softcap=math.nan), ValueError, ("Routing", "softcap must be positive")),
    "routing-softcap-inf": (lambda: Routing(2, softcap=math.inf), ValueError, ("Routing", "softcap", "inf")),
    "routing-softcap-str": (lambda: Routing(2, softcap="30"), TypeError, ("Routing", "softcap", "str")),
    "routing-scale-str": (lambda: Routing(2, scale="2"), TypeError, ("Routing", "scale", "str")),
    "routing-norm_floor-inf": (lambda: Routing(2, norm_floor=math.inf), ValueError, ("Routing", "norm_floor", "inf")),
    "routing-norm_floor": (
        lambda: Routing(2, norm_floor=-1.0), ValueError, ("Routing", "norm_floor", "negative", "-1.0")),
    "routing-renormalize-str": (
        lambda: Routing(2, renormalize="no"), TypeError, ("Routing", "renormalize must be a bool", "str")),
    "routing-renormalize_after-int": (
        lambda: Routing(2, renormalize_after_scale=1), TypeError, ("renormalize_after_scale must be a bool", "int")),
    "routing-scale-1e300": (lambda: Routing(2, scale=1e300), ValueError, ("Routing", "scale", "float32", "1e+300")),
    "routing-scale-huge": (lambda: Routing(2, scale=10**400), ValueError, ("Routing", "scale", "float32")),
    "routing-softcap-1e-60": (lambda: Routing(2, softcap=1e-60), ValueError, ("Routing", "softcap", "1e-60")),
    "routing-norm_floor-1e39": (lambda: Routing(2, norm_floor=1e39), ValueError, ("Routing", "norm_floor", "1e+39")),
    # Activation
    "activation-gated-str": (
        lambda: Activation("silu", gated="no"), TypeError, ("Activation", "gated must be a bool", "str")),
    "activation-limit-1e39": (lambda: Activation("silu", limit=1e39), ValueError, ("limit", "float32", "1e+39")),
    "activation-alpha-1e-60": (lambda: Activation("silu", alpha=1e-60), ValueError, ("alpha", "float32", "1e-60")),
    "activation-kind": (lambda: Activation("swish"), ValueError, ("Activation", "kind", *ACTIVATION_KINDS, "'swish'")),
    "activation-limit-0": (lambda: Activation("silu", limit=0.0), ValueError, ("Activation", "limit must be positive")),
    "activation-limit-nan": (lambda: Activation("silu", limit=math.nan), ValueError, ("Activation", "limit")),
    "activation-alpha-0": (
        lambda: Activation("swiglu_oai", alpha=0.0), ValueError, ("Activation", "alpha must be positive")),
    "activation-alpha-negative": (
        lambda: Activation("swiglu_oai", alpha=-1.0), ValueError, ("Activation", "alpha must be positive")),
    "activation-alpha-nan": (
        lambda: Activation("swiglu_oai", alpha=math.nan), ValueError, ("Activation", "alpha must be positive")),
    "activation-limit-str": (lambda: Activation("silu", limit="7"), TypeError, ("Activation", "limit", "str")),
    # route
    "route-rank": (lambda: route(logits=rand(E)), ValueError, ("route", "logits must be [T, E]", "[4]")),
    "route-rank-3": (lambda: route(logits=rand(1, T, E)), ValueError, ("route", "logits must be [T, E]", "[1, 3, 4]")),
    "route-int-logits": (lambda: route(logits=ids_of()), TypeError, ("route", "logits must be", "float32", "int32")),
    "route-complex": (lambda: route(logits=rand(T, E).cfloat()), TypeError, ("route", "logits", "complex64")),
    "route-list": (lambda: route(logits=[[1.0, 2.0]]), TypeError, ("route", "logits must be a tensor", "list")),
    "route-numpy": (
        lambda: route(logits=rand(T, E).numpy()), TypeError, ("route", "logits must be a tensor", "ndarray")),
    "route-sparse": (
        lambda: route(logits=rand(T, E).to_sparse()), TypeError, ("route", "logits", "dense", "sparse_coo")),
    "route-top_k-over-E": (
        lambda: route(routing=Routing(5)), ValueError, ("route", "top_k must not exceed E=4", "got 5")),
    "route-E-over-1024": (
        lambda: route(logits=rand(1, 1025)), ValueError, ("route", "E must be from 1 to 1024", "1025")),
    "route-E-0": (lambda: route(logits=rand(2, 0)), ValueError, ("route", "E must be from 1 to 1024", "got 0")),
    "route-groups": (lambda: route(routing=Routing(2, groups=3)), ValueError, ("route", "E=4", "equal groups", "3")),
    "route-routing-int": (lambda: route(routing=2), TypeError, ("route", "routing must be a Routing", "int")),
    "route-bias-size": (lambda: route(bias=rand(E + 1)), ValueError, ("route", "bias must be [E=4]", "E=5")),
    "route-bias-rank": (lambda: route(bias=rand(1, E)), ValueError, ("route", "bias must be [E]", "[1, 4]")),
    "route-bias-int": (lambda: route(bias=torch.zeros(E, dtype=torch.int64)), TypeError, ("route", "bias", "int64")),
    "route-bias-device": (lambda: route(bias=meta(E)), ValueError, ("route", "bias must be on cpu", "meta")),
    "route-scale-size": (
        lambda: route(per_expert_scale=rand(1)), ValueError, ("route", "per_expert_scale must be [E=4]", "E=1")),
    "route-scale-float": (
        lambda: route(per_expert_scale=1.0), TypeError, ("route", "per_expert_scale", "tensor", "float")),
    "route-float64-mixed": (
        lambda: route(bias=rand(E, dtype=F64)), TypeError, ("route", "float64 must not be mixed", "bias")),
    "route-backend": (lambda: route(backend="cuda"), ValueError, ("route", "backend", *ALL_BACKENDS, "'cuda'")),
    "route-backend-list": (lambda: route(backend=["cpu"]), (TypeError, ValueError), ("route", "backend")),
    "route-backend-device": (
        lambda: route(backend="metal"), ValueError, ("route", "'metal'", "cannot run", "not cpu")),
    # gate
    "gate-rank": (lambda: gate(x=rand(1, T, H)), ValueError, ("gate", "x must be [T, H]", "[1, 3, 6]")),
    "gate-int-x": (lambda: gate(x=torch.ones(T, H, dtype=torch.int32)), TypeError, ("gate", "x must be", "int32")),
    "gate-weight-H": (lambda: gate(weight=rand(E, H + 1)), ValueError, ("gate", "weight must be [E, H=6]", "H=7")),
    "gate-weight-device": (lambda: gate(weight=meta(E, H)), ValueError, ("gate", "weight must be on cpu", "meta")),
    "gate-top_k": (lambda: gate(routing=Routing(8)), ValueError, ("gate", "top_k must not exceed E=4", "8")),
    "gate-E": (lambda: gate(weight=rand(1025, H)), ValueError, ("gate", "E must be from 1 to 1024", "1025")),
    "gate-norm-size": (lambda: gate(norm_weight=rand(H - 1)), ValueError, ("gate", "norm_weight must be [H=6]", "H=5")),
    "gate-return_normed-str": (
        lambda: gate(return_normed="no"), TypeError, ("gate", "return_normed must be a bool", "str")),
    "gate-eps-1e39": (lambda: gate(eps=1e39), ValueError, ("gate", "eps must be finite", "1e+39")),
    "gate-eps-negative": (lambda: gate(eps=-1e-6), ValueError, ("gate", "eps must be finite and not", "-1e-06")),
    "gate-eps-nan": (lambda: gate(eps=math.nan), ValueError, ("gate", "eps", "nan")),
    "gate-eps-str": (lambda: gate(eps="1e-6"), TypeError, ("gate", "eps must be a number", "str")),
    "gate-eps-bool": (lambda: gate(eps=True), TypeError, ("gate", "eps must be a number", "bool")),
    "gate-bias": (lambda: gate(bias=rand(H)), ValueError, ("gate", "bias must be [E=4]", "E=6")),
    "gate-logit_bias": (lambda: gate(logit_bias=rand(E - 1)), ValueError, ("gate", "logit_bias must be [E=4]", "E=3")),
    "gate-scale-device": (
        lambda: gate(per_expert_scale=meta(E)), ValueError, ("gate", "per_expert_scale must be on cpu", "meta")),
    "gate-float64-mixed": (
        lambda: gate(weight=rand(E, H, dtype=F64)), TypeError, ("gate", "float64 must not be mixed", "weight")),
    "gate-routing": (lambda: gate(routing="softmax"), TypeError, ("gate", "routing must be a Routing", "str")),
    # plan
    "plan-float-ids": (lambda: plan(ids=rand(T, K)), TypeError, ("plan", "ids must be int32, int64", "float32")),
    "plan-grad-ids": (
        lambda: plan(ids=rand(T, K).requires_grad_()), TypeError, ("plan", "ids must be int32, int64", "float32")),
    "plan-int16": (lambda: plan(ids=ids_of(dtype=torch.int16)), TypeError, ("plan", "ids", "int16")),
    "plan-bool": (lambda: plan(ids=ids_of().bool()), TypeError, ("plan", "ids", "bool")),
    "plan-rank": (lambda: plan(ids=ids_of().flatten()), ValueError, ("plan", "ids must be [T, top_k]", "[6]")),
    "plan-no-slot": (lambda: plan(ids=ids_of()[:, :0]), ValueError, ("plan", "at least one slot", "[3, 0]")),
    "plan-E-0": (lambda: plan(num_experts=0), ValueError, ("plan", "num_experts must be from 1 to 1024", "got 0")),
    "plan-E-1025": (lambda: plan(num_experts=1025), ValueError, ("plan", "num_experts must be from 1 to 1024", "1025")),
    "plan-E-float": (lambda: plan(num_experts=4.0), TypeError, ("plan", "num_experts must be an int", "float")),
    "plan-list": (lambda: plan(ids=[[0, 1]]), TypeError, ("plan", "ids must be a tensor", "list")),
    "plan-backend": (lambda: plan(backend="gpu"), ValueError, ("plan", "backend", *ALL_BACKENDS, "'gpu'")),
    # grouped_linear
    "grouped-x-rank": (lambda: grouped(x=rand(T, K, H)), ValueError, ("grouped_linear", "x must be", "[3, 2, 6]")),
    "grouped-x-rows": (
        lambda: grouped(x=rand(T + 1, H)), ValueError, ("grouped_linear", "x must have 3 or 6 rows", "got 4")),
    "grouped-expert-major-rows": (
        lambda: grouped(gather=False), ValueError, ("grouped_linear", "x must have 6 rows", "got 3")),
    "grouped-weight-rank": (
        lambda: grouped(weight=rand(I, H)), ValueError, ("grouped_linear", "weight must be [E, N, K]", "[5, 6]")),
    "grouped-weight-E": (
        lambda: grouped(weight=rand(E + 1, I, H)), ValueError,
        ("grouped_linear", "weight must be [E=4, N, K=6]", "E=5")),
    "grouped-weight-K": (
        lambda: grouped(weight=rand(E, H, I)), ValueError, ("grouped_linear", "weight must be [E=4, N, K=6]", "K=5")),
    "grouped-weight-type": (
        lambda: grouped(weight=rand(E, I, H, dtype=BF16)), TypeError,
        ("grouped_linear", "weight must have the type of x", "bfloat16")),
    "grouped-weight-int": (
        lambda: grouped(weight=torch.ones(E, I, H, dtype=torch.int8)), TypeError, ("grouped_linear", "weight", "int8")),
    "grouped-weight-device": (
        lambda: grouped(weight=meta(E, I, H)), ValueError, ("grouped_linear", "weight must be on cpu", "meta")),
    "grouped-x-device": (lambda: grouped(x=meta(T, H)), ValueError, ("grouped_linear", "x must be on cpu", "meta")),
    "grouped-x-int": (lambda: grouped(x=torch.ones(T, H).int()), TypeError, ("grouped_linear", "x must be", "int32")),
    "grouped-plan": (lambda: grouped(plan=ids_of()), TypeError, ("grouped_linear", "plan must be a Plan", "Tensor")),
    "grouped-bias": (
        lambda: grouped(bias=rand(E, H)), ValueError, ("grouped_linear", "bias must be [E=4, N=5]", "N=6")),
    "grouped-bias-rank": (lambda: grouped(bias=rand(I)), ValueError, ("grouped_linear", "bias must be [E, N]", "[5]")),
    "grouped-bias-float64": (
        lambda: grouped(bias=rand(E, I, dtype=F64)), TypeError,
        ("grouped_linear", "float64 must not be mixed", "bias")),
    "grouped-sparse": (
        lambda: grouped(weight=rand(E, I, H).to_sparse()), TypeError, ("grouped_linear", "weight", "dense")),
    # linear
    "linear-x-rank": (lambda: linear(x=rand(H)), ValueError, ("linear", "x must be [T, K]", "[6]")),
    "linear-x-int": (lambda: linear(x=torch.ones(T, H).int()), TypeError, ("linear", "x must be", "int32")),
    "linear-weight-rank": (
        lambda: linear(weight=rand(E, I, H)), ValueError, ("linear", "weight must be [N, K]", "[4, 5, 6]")),
    "linear-weight-K": (lambda: linear(weight=rand(H, I)), ValueError, ("linear", "weight must be [N, K=6]", "K=5")),
    "linear-weight-type": (
        lambda: linear(weight=rand(I, H, dtype=BF16)), TypeError,
        ("linear", "weight must have the type of x", "bfloat16")),
    "linear-weight-device": (
        lambda: linear(weight=meta(I, H)), ValueError, ("linear", "weight must be on cpu", "meta")),
    "linear-weight-list": (
        lambda: linear(weight=[rand(I, H)]), TypeError, ("linear", "weight must be a tensor", "list")),
    "linear-no-weight": (lambda: linear(weight=()), ValueError, ("linear", "a tuple of one to 4", "got 0")),
    "linear-five-weights": (
        lambda: linear(weight=(rand(I, H),) * 5), ValueError, ("linear", "a tuple of one to 4", "got 5")),
    "linear-second-weight": (
        lambda: linear(weight=(rand(I, H), rand(I, I))), ValueError, ("linear", "weight[1] must be [N, K=6]", "K=5")),
    "linear-bias": (lambda: linear(bias=rand(H)), ValueError, ("linear", "bias must be [N=5]", "N=6")),
    "linear-bias-tuple": (lambda: linear(bias=(rand(I),)), TypeError, ("linear", "bias must be a tensor", "tuple")),
    "linear-bias-not-tuple": (
        lambda: linear(weight=(rand(I, H),), bias=rand(I)), TypeError, ("linear", "bias must be a tuple", "Tensor")),
    "linear-biases": (
        lambda: linear(weight=(rand(I, H),) * 2, bias=(None,)), ValueError,
        ("linear", "an entry for each of 2 weights", "got 1")),
    "linear-second-bias": (
        lambda: linear(weight=(rand(I, H),) * 2, bias=(None, rand(H))), ValueError,
        ("linear", "bias[1] must be [N=5]", "N=6")),
    "linear-bias-float64": (
        lambda: linear(bias=rand(I, dtype=F64)), TypeError, ("linear", "float64 must not be mixed", "bias")),
    "linear-residual": (
        lambda: linear(residual=rand(T, H)), ValueError, ("linear", "residual must be [T=3, N=5]", "N=6")),
    "linear-residual-rows": (
        lambda: linear(residual=rand(1, I)), ValueError, ("linear", "residual must be [T=3, N=5]", "T=1")),
    "linear-residual-of-two": (
        lambda: linear(weight=(rand(I, H),) * 2, residual=rand(T, I)), ValueError,
        ("linear", "residual must come with one weight", "got 2")),
    "linear-backend": (lambda: linear(backend="gpu"), ValueError, ("linear", "backend", *ALL_BACKENDS, "'gpu'")),
    # grouped_outer
    "outer-grad-rows": (lambda: outer(grad=rand(T, I)), ValueError, ("grouped_outer", "grad must be [S=6, N]", "S=3")),
    "outer-x-rows": (
        lambda: outer(x=rand(T + 2, H)), ValueError, ("grouped_outer", "x must have 3 or 6 rows", "got 5")),
    "outer-x-type": (
        lambda: outer(x=rand(T, H, dtype=F16)), TypeError, ("grouped_outer", "x must be float32", "float16")),
    "outer-plan": (lambda: outer(plan=None), TypeError, ("grouped_outer", "plan must be a Plan", "NoneType")),
    "outer-grad-device": (lambda: outer(grad=meta(T * K, I)), ValueError, ("grouped_outer", "must be on", "meta")),
    # glu
    "glu-name": (lambda: glu(rand(T, H), "swish"), ValueError, (*ACTIVATION_KINDS, "'swish'")),
    "glu-activation-type": (
        lambda: glu(rand(T, H), torch.nn.SiLU()), TypeError,
        ("glu", "activation must be a name or an Activation", "SiLU")),
    "glu-no-activation": (lambda: glu(rand(T, H)), TypeError, ("glu", "activation must be", "NoneType")),
    "glu-odd": (lambda: glu(rand(T, 7), "silu"), ValueError, ("glu", "gate_up must have an even last dimension", "7")),
    "glu-int": (lambda: glu(ids_of(), "silu"), TypeError, ("glu", "gate_up must be", "int32")),
    "glu-scalar": (lambda: glu(torch.tensor(1.0), "silu"), TypeError, ("glu", "at least one dimension", "[]")),
    "glu-list": (lambda: glu([1.0, 2.0], "silu"), TypeError, ("glu", "gate_up must be a tensor", "list")),
    "glu-layout": (lambda: glu(rand(T, H), "silu", layout="split"), ValueError, ("glu", "layout", *LAYOUTS, "'split'")),
    "glu-up-shape": (lambda: glu(rand(T, H), rand(T, H - 1), "silu"), ValueError, ("glu", "up must be", "=5")),
    "glu-up-rank": (lambda: glu(rand(T, H), rand(H), "silu"), ValueError, ("glu", "up must be", "[6]")),
    "glu-up-type": (
        lambda: glu(rand(T, H), rand(T, H, dtype=F16), "silu"), TypeError, ("glu", "up must be float32", "float16")),
    "glu-up-device": (lambda: glu(rand(T, H), meta(T, H), "silu"), ValueError, ("glu", "up must be on cpu", "meta")),
    "glu-up-ungated": (
        lambda: glu(rand(T, H), rand(T, H), Activation("silu", gated=False)), ValueError,
        ("glu", "up must not be given", "ungated")),
    "glu-apart-interleaved": (
        lambda: glu(rand(T, H), rand(T, H), "silu", layout="interleaved"), ValueError,
        ("glu", "layout must be halves", "apart")),
    "glu-backend": (
        lambda: glu(rand(T, H), "silu", backend="mps"), ValueError, ("glu", "backend", *ALL_BACKENDS, "'mps'")),
    # combine
    "combine-y-rows": (lambda: combine(y=rand(T, H)), ValueError, ("combine", "y must be [S=6, H]", "S=3")),
    "combine-y-rank": (lambda: combine(y=rand(T, K, H)), ValueError, ("combine", "y must be [S, H]", "[3, 2, 6]")),
    "combine-weights-rank": (
        lambda: combine(weights=rand(T * K)), ValueError, ("combine", "weights must be [T, top_k]", "[6]")),
    "combine-weights-int": (lambda: combine(weights=ids_of()), TypeError, ("combine", "weights must be", "int32")),
    "combine-y-device": (lambda: combine(y=meta(T * K, H)), ValueError, ("combine", "y must be on cpu", "meta")),
    "combine-inverse-int64": (
        lambda: combine(inverse=torch.arange(6)), TypeError, ("combine", "inverse must be int32", "int64")),
    "combine-inverse-size": (
        lambda: combine(inverse=torch.arange(5).int()), ValueError, ("combine", "inverse must be [S=6]", "S=5")),
    "combine-float64-mixed": (
        lambda: combine(y=rand(T * K, H, dtype=F64)), TypeError, ("combine", "float64 must not be mixed")),
    "combine-residual-float64": (
        lambda: combine(residual=rand(T, H, dtype=F64)), TypeError,
        ("combine", "float64 must not be mixed", "residual")),
    "combine-shared-size": (
        lambda: combine(shared=rand(T, H + 1)), ValueError, ("combine", "shared must be [T=3, H=6]", "H=7")),
    "combine-gate-alone": (
        lambda: combine(shared_gate=rand(T)), ValueError, ("combine", "shared_gate must come with shared")),
    "combine-logit-alone": (
        lambda: combine(shared_logit=rand(T)), ValueError, ("combine", "shared_logit must come with shared")),
    "combine-gate-and-logit": (
        lambda: combine(shared=rand(T, H), shared_gate=rand(T), shared_logit=rand(T)), ValueError,
        ("combine", "shared_gate and shared_logit exclude each other")),
    "combine-gate-shape": (
        lambda: combine(shared=rand(T, H), shared_gate=rand(T, 1)), ValueError,
        ("combine", "shared_gate must be [T]", "[3, 1]")),
    "combine-inverse-far": (
        lambda: combine(inverse=torch.tensor([0, 1, 2, 3, 4, 10**9], dtype=torch.int32)), ValueError,
        ("combine", "inverse must hold each of 0 to 5 once")),
    "combine-inverse-negative": (
        lambda: combine(inverse=torch.tensor([0, 1, 2, 3, 4, -1], dtype=torch.int32)), ValueError, ("inverse must",)),
    "combine-inverse-twice": (
        lambda: combine(inverse=torch.tensor([0, 1, 2, 3, 4, 4], dtype=torch.int32)), ValueError, ("inverse must",)),
    "combine-residual-size": (
        lambda: combine(residual=rand(1, H)), ValueError, ("combine", "residual must be [T=3, H=6]", "T=1")),
    "combine-residual-int": (
        lambda: combine(residual=torch.ones(T, H).long()), TypeError, ("combine", "residual must be", "int64")),
    "combine-norm-size": (
        lambda: combine(norm_weight=rand(T)), ValueError, ("combine", "norm_weight must be [H=6]", "H=3")),
    "combine-eps": (
        lambda: combine(norm_weight=rand(H), eps=-1.0), ValueError, ("combine", "eps must be finite", "-1.0")),
    "combine-out-shape": (
        lambda: combine(out=rand(T, H + 1)), ValueError, ("combine", "out must be [T=3, H=6]", "H=7")),
    "combine-out-strides": (
        lambda: combine(out=rand(H, T).T), ValueError, ("combine", "out must be contiguous", "[1, 3]")),
    "combine-out-int": (lambda: combine(out=torch.ones(T, H).int()), TypeError, ("combine", "out must be", "int32")),
    "combine-out-float64": (
        lambda: combine(out=rand(T, H, dtype=F64)), TypeError, ("combine", "float64 must not be mixed", "out")),
    "combine-out-device": (lambda: combine(out=meta(T, H)), ValueError, ("combine", "out must be on cpu", "meta")),
    "combine-out-tuple": (lambda: combine(out=(1,)), TypeError, ("combine", "out must be a tensor", "tuple")),
    "combine-out-grad": (
        lambda: combine(y=rand(T * K, H).requires_grad_(), out=OUTPUT), ValueError,
        ("combine", "out= has no gradients")),
    "combine-out-grad-out": (
        lambda: combine(out=rand(T, H).requires_grad_()), ValueError, ("combine", "out= has no gradients")),
    "combine-normed_out-alone": (
        lambda: combine(out=OUTPUT, normed_out=rand(T, H)), ValueError,
        ("combine", "normed_out must come with norm_weight")),
    "combine-normed_out-shape": (
        lambda: combine(norm_weight=rand(H), out=OUTPUT, normed_out=rand(T, 1)), ValueError,
        ("combine", "normed_out must be [T=3, H=6]", "H=1")),
    "combine-no-slot": (
        lambda: combine(y=rand(0, H), weights=rand(T, 0)), ValueError, ("combine", "weights", "slot", "[3, 0]")),
    "combine-H-0": (lambda: combine(y=rand(T * K, 0)), ValueError, ("combine", "H")),
    "combine-backend": (
        lambda: combine(out=OUTPUT, backend="x"), ValueError, ("combine", "backend", *ALL_BACKENDS, "'x'")),
    # experts
    "experts-x-rank": (lambda: experts(x=rand(1, T, H)), ValueError, ("experts", "x must be [T, H]", "[1, 3, 6]")),
    "experts-x-int": (lambda: experts(x=torch.ones(T, H).int()), TypeError, ("experts", "x must be", "int32")),
    "experts-ids-float": (
        lambda: experts(ids=rand(T, K)), TypeError, ("experts", "ids must be int32, int64", "float32")),
    "experts-ids-grad": (
        lambda: experts(ids=rand(T, K).requires_grad_()), TypeError,
        ("experts", "ids must be int32, int64", "float32")),
    "experts-ids-rows": (
        lambda: experts(ids=ids_of(T + 1)), ValueError, ("experts", "ids must be [T=3, top_k]", "T=4")),
    "experts-ids-device": (
        lambda: experts(ids=meta(T, K, dtype=torch.int32)), ValueError, ("experts", "ids must be on cpu", "meta")),
    "experts-weights-shape": (
        lambda: experts(weights=rand(T, K + 1)), ValueError, ("experts", "weights must be [T=3, top_k=2]", "top_k=3")),
    "experts-weights-int": (lambda: experts(weights=ids_of()), TypeError, ("experts", "weights must be", "int32")),
    "experts-down-H": (lambda: experts(down=rand(E, I, H)), ValueError, ("experts", "down must be [E, H=6, I]", "H=5")),
    "experts-down-rank": (
        lambda: experts(down=rand(H, I)), ValueError, ("experts", "down must be [E, H, I]", "[6, 5]")),
    "experts-E": (
        lambda: experts(down=rand(1025, H, 1), gate_up=rand(1025, 2, H)), ValueError,
        ("experts", "E must be from 1 to 1024", "1025")),
    "experts-gate_up-E": (
        lambda: experts(gate_up=rand(E + 1, 2 * I, H)), ValueError,
        ("experts", "gate_up must be [E=4, 2I=10, H=6]", "E=5")),
    "experts-gate_up-ungated": (
        lambda: experts(gate_up=rand(E, I, H)), ValueError, ("experts", "gate_up must be [E=4, 2I=10, H=6]", "2I=5")),
    "experts-gate_up-gated": (
        lambda: experts(activation=Activation("relu2", gated=False)), ValueError,
        ("experts", "gate_up must be [E=4, I=5, H=6]", "I=10")),
    "experts-gate_up-odd": (lambda: experts(gate_up=rand(E, 9, H)), ValueError, ("experts", "gate_up must be", "2I=9")),
    "experts-gate_up-type": (
        lambda: experts(gate_up=rand(E, 2 * I, H, dtype=BF16)), TypeError,
        ("experts", "gate_up must have the type of x", "bfloat16")),
    "experts-down-int": (
        lambda: experts(down=torch.ones(E, H, I).int()), TypeError, ("experts", "down must be", "int32")),
    "experts-down-type": (
        lambda: experts(down=rand(E, H, I, dtype=F16)), TypeError,
        ("experts", "down must have the type of x", "float16")),
    "experts-down-device": (
        lambda: experts(down=meta(E, H, I)), ValueError, ("experts", "down must be on cpu", "meta")),
    "experts-apart-3": (
        lambda: experts(gate_up=(rand(E, I, H),) * 3), ValueError,
        ("experts", "gate_up must be one tensor or (gate, up)", "3")),
    "experts-apart-size": (
        lambda: experts(gate_up=(rand(E, I, H), rand(E, I + 1, H))), ValueError,
        ("experts", "up must be [E=4, I=5, H=6]", "I=6")),
    "experts-apart-type": (
        lambda: experts(gate_up=(rand(E, I, H), rand(E, I, H, dtype=F16))), TypeError,
        ("experts", "up must have the type of x", "float16")),
    "experts-apart-interleaved": (
        lambda: experts(gate_up=(rand(E, I, H),) * 2, layout="interleaved"), ValueError,
        ("experts", "layout must be halves", "apart")),
    "experts-apart-ungated": (
        lambda: experts(gate_up=(rand(E, I, H),) * 2, activation=Activation("silu", gated=False)), ValueError,
        ("experts", "one tensor for an ungated activation")),
    "experts-gate_up_bias": (
        lambda: experts(gate_up_bias=rand(E, I)), ValueError, ("experts", "gate_up_bias must be", "=10", "=5")),
    "experts-down_bias": (
        lambda: experts(down_bias=rand(E, I)), ValueError, ("experts", "down_bias must be [E=4, H=6]", "H=5")),
    "experts-bias-float64": (
        lambda: experts(down_bias=rand(E, H, dtype=F64)), TypeError,
        ("experts", "float64 must not be mixed", "down_bias")),
    "experts-layout": (lambda: experts(layout="pairs"), ValueError, ("experts", "layout", *LAYOUTS, "'pairs'")),
    "experts-activation": (lambda: experts(activation="swish"), ValueError, (*ACTIVATION_KINDS, "'swish'")),
    "experts-activation-type": (
        lambda: experts(activation=torch.relu), TypeError, ("experts", "activation must be a name or an Activation")),
    "experts-plan-type": (lambda: experts(plan=ids_of()), TypeError, ("experts", "plan must be a Plan", "Tensor")),
    "experts-plan-E": (
        lambda: experts(plan=PLAN_OF_MORE_EXPERTS), ValueError,
        ("experts", "plan must fit 6", "of 5 experts")),
    "experts-plan-S": (
        lambda: experts(plan=PLAN_OF_MORE_TOKENS), ValueError,
        ("experts", "plan must fit 6", "8")),
    "experts-plan-top_k": (
        lambda: experts(plan=dataclasses.replace(PLAN, top_k=3)), ValueError, ("experts", "plan must fit 6", "top-3")),
    "experts-shared": (lambda: experts(shared=rand(T, I)), ValueError, ("experts", "shared must be [T=3, H=6]", "H=5")),
    "experts-gate-alone": (
        lambda: experts(shared_gate=rand(T)), ValueError, ("experts", "shared_gate must come with shared")),
    "experts-gate-and-logit": (
        lambda: experts(shared=rand(T, H), shared_gate=rand(T), shared_logit=rand(T)), ValueError,
        ("experts", "exclude each other")),
    "experts-residual": (
        lambda: experts(residual=rand(T, I)), ValueError, ("experts", "residual must be [T=3, H=6]", "H=5")),
    "experts-eps": (lambda: experts(eps=-0.5), ValueError, ("experts", "eps must be finite and not negative", "-0.5")),
    "experts-normed_out-alone": (
        lambda: experts(normed_out=rand(T, H)), ValueError, ("experts", "normed_out must come with norm_weight")),
    "experts-out-shape": (lambda: experts(out=rand(T, I)), ValueError, ("experts", "out must be [T=3, H=6]", "H=5")),
    "experts-out-grad": (
        lambda: experts(weights=rand(T, K).requires_grad_(), out=OUTPUT), ValueError,
        ("experts", "out= has no gradients")),
    "experts-out-strides": (
        lambda: experts(out=rand(T, 2 * H)[:, ::2]), ValueError, ("experts", "out must be contiguous", "[12, 2]")),
    "experts-float64-mixed": (
        lambda: experts(weights=rand(T, K, dtype=F64)), TypeError, ("experts", "float64 must not be mixed", "weights")),
    "experts-backend": (
        lambda: experts(out=OUTPUT, backend="tpu"), ValueError, ("experts", "backend", *ALL_BACKENDS, "'tpu'")),
    "experts-no-slot": (
        lambda: experts(ids=ids_of()[:, :0], weights=rand(T, 0)), ValueError, ("experts", "ids", "slot", "[3, 0]")),
    "experts-plan-device": (lambda: experts(plan=ELSEWHERE), ValueError, ("experts", "plan", "on cpu", "meta")),
    "experts-backend-grad": (
        lambda: experts(x=rand(T, H).requires_grad_(), backend="tpu"), ValueError,
        ("experts", "backend", *ALL_BACKENDS, "'tpu'")),
    # moe: the rules of gate and experts, whichever of the three names the message gives
    "moe-router-H": (lambda: moe(router=rand(E, I)), ValueError, ("must be [E, H=6]", "H=5")),
    "moe-top_k": (lambda: moe(routing=Routing(5)), ValueError, ("top_k must not exceed E=4", "5")),
    "moe-eps": (lambda: moe(eps=-1.0), ValueError, ("eps must be finite and not negative", "-1.0")),
    "moe-down": (lambda: moe(down=rand(E, I, I)), ValueError, ("down must be [E, H=6, I]", "H=5")),
    "moe-gate_up": (lambda: moe(gate_up=rand(E, 9, H)), ValueError, ("gate_up must be", "2I=9")),
    "moe-activation": (lambda: moe(activation="swish"), ValueError, (*ACTIVATION_KINDS, "'swish'")),
    "moe-next_eps": (lambda: moe(next_eps=-1.0), ValueError, ("eps must be finite and not negative", "-1.0")),
    "moe-residual": (lambda: moe(residual=rand(T, I)), ValueError, ("residual must be [T=3, H=6]", "H=5")),
    "moe-out-grad": (lambda: moe(down=rand(E, H, I).requires_grad_(), out=OUTPUT), ValueError, ("no gradients",)),
    "moe-backend": (lambda: moe(backend="tpu"), ValueError, ("backend", *ALL_BACKENDS, "'tpu'")),
    # rope
    "rope-q-rank": (lambda: rope(q=rand(T, 4, 6)), ValueError, ("rope", "q must be [B, S, Hq, D]", "[3, 4, 6]")),
    "rope-q-int": (lambda: rope(q=ids_of()), TypeError, ("rope", "q must be", "int32")),
    "rope-k-D": (lambda: rope(k=rand(2, T, 2, 5)), ValueError, ("rope", "k must be [B=2, S=3, Hk, D=6]", "D=5")),
    "rope-k-S": (lambda: rope(k=rand(2, 1, 2, 6)), ValueError, ("rope", "k must be", "S=1")),
    "rope-k-type": (
        lambda: rope(k=rand(2, T, 2, 6, dtype=BF16)), TypeError, ("rope", "k must have the type of q", "bfloat16")),
    "rope-k-device": (lambda: rope(k=meta(2, T, 2, 6)), ValueError, ("rope", "k must be on cpu", "meta")),
    "rope-cos-B": (lambda: rope(cos=rand(3, T, 2)), ValueError, ("rope", "cos must be [B or 1, S, R/2]", "[3, 3, 2]")),
    "rope-cos-S": (lambda: rope(cos=rand(1, 1, 2)), ValueError, ("rope", "cos must be", "S=1")),
    "rope-cos-wide": (lambda: rope(cos=rand(1, T, 4)), ValueError, ("rope", "R from 2 to D=6", "R/2=4")),
    "rope-cos-none": (lambda: rope(cos=rand(1, T, 0)), ValueError, ("rope", "R from 2 to D=6", "R/2=0")),
    "rope-sin-like-cos": (lambda: rope(sin=rand(2, T, 2)), ValueError, ("rope", "sin must be", "B or 1=2")),
    "rope-sin-list": (lambda: rope(sin=[1.0]), TypeError, ("rope", "sin must be a tensor", "list")),
    "rope-q_norm": (lambda: rope(q_norm=rand(5)), ValueError, ("rope", "q_norm must be [D=6]", "D=5")),
    "rope-k_norm": (lambda: rope(k_norm=rand(4, 6)), ValueError, ("rope", "k_norm must be [D]", "[4, 6]")),
    "rope-eps": (lambda: rope(eps=-1.0), ValueError, ("rope", "eps must be finite", "-1.0")),
    "rope-float64-mixed": (
        lambda: rope(cos=rand(1, T, 2, dtype=F64)), TypeError, ("rope", "float64 must not be mixed", "cos")),
    "rope-backend": (lambda: rope(backend="gpu"), ValueError, ("rope", "backend", *ALL_BACKENDS, "'gpu'")),
    "rope-grad": (lambda: rope(q=rand(2, T, 4, 6).requires_grad_()), RuntimeError, ("rope", "no gradients")),
    "rope-keys-alone": (lambda: rope(keys=KEYS), ValueError, ("rope", "come together", "got no v")),
    "rope-no-v": (lambda: write(v=None), ValueError, ("rope", "come together", "got no v")),
    "rope-no-values": (lambda: write(values=None), ValueError, ("rope", "come together", "got no values")),
    "rope-no-position": (lambda: write(position=None), ValueError, ("rope", "come together", "got no position")),
    "rope-v-Hk": (lambda: write(v=rand(2, T, 4, 5)), ValueError, ("rope", "v must be [B=2, S=3, Hk=2, Dv]", "Hk=4")),
    "rope-v-type": (lambda: write(v=rand(2, T, 2, 5, dtype=F16)), TypeError, ("rope", "v must have the type of q")),
    "rope-keys-D": (lambda: write(keys=rand(2, 2, 7, 5)), ValueError, ("rope", "keys must be", "D=5")),
    "rope-keys-B": (lambda: write(keys=rand(1, 2, 7, 6)), ValueError, ("rope", "keys must be", "B=1")),
    "rope-keys-type": (
        lambda: write(keys=KEYS.bfloat16()), TypeError, ("rope", "keys must have the type of q", "bfloat16")),
    "rope-keys-strides": (
        lambda: write(keys=rand(2, 2, 6, 7).transpose(2, 3)), ValueError, ("rope", "keys must be dense in the last")),
    "rope-keys-negated": (
        lambda: write(keys=torch._neg_view(KEYS.clone())), ValueError, ("rope", "keys must hold its numbers as they")),
    "rope-keys-expanded": (
        lambda: write(keys=rand(1, 2, 7, 6).expand(2, 2, 7, 6)), ValueError, ("rope", "keys must hold each element")),
    "rope-keys-overlap": (
        lambda: write(k=KEYS.transpose(1, 2)[:, :T]), ValueError, ("rope", "keys must not overlap k")),
    "rope-values-Dv": (lambda: write(values=KEYS), ValueError, ("rope", "values must be", "Dv=6")),
    "rope-values-L": (lambda: write(values=rand(2, 2, 8, 5)), ValueError, ("rope", "values must be", "L=8")),
    "rope-values-device": (lambda: write(values=meta(2, 2, 7, 5)), ValueError, ("rope", "values must be on", "meta")),
    "rope-position-int": (lambda: write(position=1), TypeError, ("rope", "position must be a tensor", "int")),
    "rope-position-float": (lambda: write(position=rand(1)), TypeError, ("rope", "position must be int32, int64")),
    "rope-position-two": (
        lambda: write(position=torch.arange(2)), ValueError, ("rope", "position must have one element", "[2]")),
    "rope-position-device": (
        lambda: write(position=meta(1, dtype=torch.int64)), ValueError, ("rope", "position must be on cpu", "meta")),
    # attend
    "attend-q-rank": (lambda: attend(q=rand(2, 1, 4, 6)), ValueError, ("attend", "q must be [B, Hq, D]", "[2, 1,")),
    "attend-q-D-0": (lambda: attend(q=rand(2, 4, 0)), ValueError, ("attend", "D of at least 1", "[2, 4, 0]")),
    "attend-keys-D": (lambda: attend(keys=VALUES), ValueError, ("attend", "keys must be [B=2, Hk, L, D=6]", "D=5")),
    "attend-keys-type": (lambda: attend(keys=KEYS.half()), TypeError, ("attend", "keys must have the type of q")),
    "attend-values-L": (lambda: attend(values=rand(2, 2, 6, 5)), ValueError, ("attend", "values must be", "L=6")),
    "attend-values-type": (lambda: attend(values=VALUES.double()), TypeError, ("attend", "values must have the type")),
    "attend-heads": (lambda: attend(q=rand(2, 5, 6)), ValueError, ("attend", "multiple", "Hq=5", "Hk=2")),
    "attend-no-heads": (
        lambda: attend(keys=KEYS[:, :0], values=VALUES[:, :0]), ValueError, ("attend", "multiple", "Hk=0")),
    "attend-position-int": (lambda: attend(position=1), TypeError, ("attend", "position must be a tensor", "int")),
    "attend-position-two": (
        lambda: attend(position=torch.zeros(2, 1).int()), ValueError, ("attend", "one element", "[2, 1]")),
    "attend-mask-float": (lambda: attend(mask=rand(2, 7)), TypeError, ("attend", "mask must be bool", "float32")),
    "attend-mask-L": (lambda: attend(mask=rand(2, 6) > 0), ValueError, ("attend", "mask must be [B=2, L=7]", "L=6")),
    "attend-scale-nan": (lambda: attend(scale=math.nan), ValueError, ("attend", "scale must be finite", "nan")),
    "attend-scale-str": (lambda: attend(scale="1"), TypeError, ("attend", "scale must be a number", "str")),
    "attend-window-0": (lambda: attend(window=0), ValueError, ("attend", "window must be at least 1", "got 0")),
    "attend-window-float": (lambda: attend(window=4.0), TypeError, ("attend", "window must be an int", "float")),
    "attend-sinks": (lambda: attend(sinks=rand(2)), ValueError, ("attend", "sinks must be [Hq=4]", "Hq=2")),
    "attend-sinks-float64": (
        lambda: attend(sinks=rand(4, dtype=F64)), TypeError, ("attend", "float64 must not be mixed", "sinks")),
    "attend-grad": (lambda: attend(keys=KEYS.clone().requires_grad_()), RuntimeError, ("attend", "no gradients")),
    "attend-backend": (lambda: attend(backend="gpu"), ValueError, ("attend", "backend", *ALL_BACKENDS, "'gpu'")),
}  # fmt: skip


@pytest.fixture
def no_kernel(monkeypatch):
    """No backend is asked to run anything."""
    ran = []

    def refuse(*args, **options):
        ran.append((args, options))
        raise AssertionError("a kernel ran on bad input")

    select.forget()
    for name in list(select.REFERENCES):
        monkeypatch.setitem(select.REFERENCES, name, refuse)
    runnable = {name for name, _ in cases.runnable()}
    for module in (row.load() for row in backends.BACKENDS if row.name in runnable):
        for name in list(module.OPS):
            monkeypatch.setitem(module.OPS, name, refuse)
    yield ran
    select.forget()


@pytest.mark.parametrize("name", ROWS)
def test_rejected(name, no_kernel):
    call, exception, fragments = ROWS[name]
    with pytest.raises(exception) as caught:
        call()
    assert not no_kernel, "a kernel ran"
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, f"{fragment!r} is not in {message!r}"
    assert (OUTPUT == 7.0).all(), "out was written"


def test_the_valid_calls_are_valid():
    """Each row changes one thing in a call that works."""
    for call in (route, gate, plan, linear, outer, combine, experts, moe, rope, write, attend):
        call()


def test_kernels_are_watched(no_kernel):
    """The fixture would notice: a good call reaches it."""
    for call in (route, gate, plan, linear, outer, combine, experts, moe, rope, write, attend):
        with pytest.raises(AssertionError, match="a kernel ran"):
            call()
    assert len(no_kernel) == 11
    no_kernel.clear()


@pytest.mark.parametrize(
    ("changes", "exception", "message"),
    [
        ({"top_k": 0}, ValueError, "top_k must be at least 1"),
        ({"top_k": 4}, ValueError, "divide the 6 assignments"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int"),
        ({"order": PLAN.order.long()}, TypeError, "order must be an int32 tensor"),
        ({"counts": PLAN.counts.tolist()}, TypeError, "counts must be an int32 tensor"),
        ({"inverse": PLAN.inverse[:5]}, ValueError, "S = 6"),
        ({"offsets": PLAN.offsets[1:]}, ValueError, "E + 1 = 5"),
        ({"counts": PLAN.counts.view(2, 2)}, ValueError, "one dimension"),
        ({"offsets": meta(E + 1, dtype=torch.int32)}, ValueError, "on cpu like order"),
        ({"offsets": PLAN.offsets + 1}, ValueError, "running sum"),
        ({"offsets": PLAN.offsets * 100, "counts": PLAN.counts * 100}, ValueError, "at most S=6"),
        ({"counts": -PLAN.counts, "offsets": -PLAN.offsets}, ValueError, "running sum"),
        ({"order": PLAN.order + 10**6}, ValueError, "order must hold 0 to 5"),
        ({"order": PLAN.order - 1}, ValueError, "order must hold 0 to 5"),
        ({"order": torch.zeros_like(PLAN.order)}, ValueError, "order must hold 0 to 5"),
        ({"inverse": PLAN.inverse.flip(0)}, ValueError, "inverse undo it"),
    ],
)
def test_a_plan_made_by_hand_is_checked(changes, exception, message):
    with pytest.raises(exception, match=re.escape(message)):
        dataclasses.replace(PLAN, **changes)
    assert dataclasses.replace(PLAN, order=PLAN.order.clone()).num_experts == E


@pytest.mark.parametrize("backend", cases.runnable(), ids=lambda pair: pair[0])
def test_a_plan_of_other_ids_is_refused(backend):
    """The same sizes, another expert or none: what the plan leaves out would be memory nobody wrote."""
    if backend[1] != "cpu":
        pytest.skip("a GPU would have to wait")
    for other in (ids_of() + 1, torch.full_like(ids_of(), E), ids_of().flip(1)):
        with pytest.raises(ValueError, match="experts: plan must be that of ids"):
            experts(plan=moefuse.plan(other, E), backend=backend[0])
    experts(ids=ids_of() - 1, plan=moefuse.plan(ids_of() - 1, E), backend=backend[0])


def test_a_plan_changed_after_it_was_checked_leads_nowhere():
    """The CPU's kernels look again, for a few nanoseconds a row: a bad index must not become an address."""
    plan = moefuse.plan(ids_of(), E)
    plan.order[2] = 10**9
    for call in (grouped, outer):
        with pytest.raises(ValueError, match="plan: offsets must rise from 0"):
            call(plan=plan, backend="cpu")
    plan = moefuse.plan(ids_of(), E)
    plan.offsets[-1] = 10**6
    with pytest.raises(ValueError, match="plan: offsets must rise from 0"):
        grouped(plan=plan, backend="cpu")


def test_routing_and_activation_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Routing(2).top_k = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Activation("silu").kind = "gelu"
