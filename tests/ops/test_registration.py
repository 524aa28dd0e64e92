"""The ops as torch sees them: opcheck, torch.compile with one graph for every T, fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moefuse
from moefuse import Activation, QuantTensor, Routing, backends
from moefuse.ops._core import library
from moefuse.quant.formats import FORMATS
from moefuse.testing.cases import formats_of
from moefuse.testing.random_blocks import random_blocks
from moefuse.types import Cache, Outputs, Projections, Rotary, Router, Stacks, Tail, Wanted

from . import oracle
from .oracle import assert_close

T, E, H, I, K = 3, 4, 6, 5, 2
RULE = Routing(K, scale=1.5, renormalize_after_scale=True)
GROUPS = Routing(K, score="sigmoid", groups=2)
SILU = Activation("silu")
PLAIN = Activation("gelu_tanh", gated=False)
IDS = torch.tensor([[0, 1], [2, 9], [3, 3]], dtype=torch.int32)  # a sentinel, a duplicate
FOUND = torch.tensor([[0, 1], [2, 4], [3, 1]], dtype=torch.int32)  # as route returns them


def rand(*shape):
    return torch.rand(shape) + 0.25


def grad(*shape):
    return rand(*shape).requires_grad_()


def turned(*shape):
    """Of this shape, with the last two dimensions exchanged in memory."""
    return rand(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def tracked_and_turned(*shape):
    return turned(*shape).requires_grad_()


def blocks(spec, *shape):
    return random_blocks(spec, shape, torch.Generator().manual_seed(int(torch.randint(2**31, ()))), 1.0)


def plan():
    return moefuse.plan(IDS, E, backend="reference")


def tail(make=rand, *, norm=True):
    """Of three tokens."""
    return Tail(make(T, H), None, make(T), make(T, H), make(H) if norm else None)


def stacks(make=rand, layout="halves", *, up=False):
    first = (make(E, I, H), make(E, I, H)) if up else (make(E, 2 * I, H), None)
    return Stacks(*first, make(E, H, I), make(E, 2 * I), make(E, H), layout)


def routed(make=rand):
    """x, ids and weights."""
    return make(T, H), IDS, make(T, K)


def kept():
    """The gradient of the sum, x, z and weights."""
    return rand(T, H), rand(T, H), rand(T * K, 2 * I), rand(T, K)


def cache():
    """Seven places of two sequences and two heads."""
    return Cache(rand(2, 7, 2, 6).transpose(1, 2), rand(2, 2, 7, 5), torch.tensor([2]))


ALL = Wanted(*[True] * 7)
MIXED = Stacks(blocks("Q8_0", E, 64, 32), blocks("Q4_0:exact", E, 64, 32), blocks("Q5_1", E, 32, 64), rand(E, 128))
NORMED = Router(rand(E, H), rand(H), None, rand(E), rand(E))
SHUFFLED = torch.randperm(T * K).int()

#: name of the op, then what is special about the call -> the values of its kernel, without the backend
CALLS = {
    "route": lambda: (grad(T, E), None, grad(E), RULE),
    "route bias": lambda: (grad(T, E), rand(E), None, GROUPS),
    "route strided": lambda: (tracked_and_turned(T, E), None, grad(E), RULE),
    "route_backward": lambda: (rand(T, K), rand(T, E), FOUND, rand(E), RULE),
    "route_backward no_scale": lambda: (rand(T, K), rand(T, E), FOUND, None, RULE),
    "route_backward strided": lambda: (turned(T, K), turned(T, E), FOUND, rand(E), RULE),
    "gate": lambda: (grad(T, H), Router(grad(E, H), grad(H), None, grad(E), grad(E)), RULE, True),
    "gate plain": lambda: (grad(T, H), Router(grad(E, H)), RULE, False),
    "gate strided": lambda: (tracked_and_turned(T, H), Router(tracked_and_turned(E, H), grad(H)), RULE, True),
    "gate_backward": lambda: (rand(T, K), rand(T, H), rand(T, H), NORMED, FOUND, RULE, True, True),
    "gate_backward plain": lambda: (rand(T, K), None, rand(T, H), Router(rand(E, H)), FOUND, RULE, True, False),
    "gate_backward router": lambda: (
        rand(T, K), None, rand(T, H), Router(rand(E, H), rand(H)), FOUND, RULE, False, True),
    "gate_backward strided": lambda: (
        rand(T, K), turned(T, H), turned(T, H), NORMED._replace(weight=turned(E, H)), FOUND, RULE, True, True),
    "plan": lambda: (IDS, E),
    "plan int64": lambda: (IDS.long().T.contiguous().T, E),
    "grouped_linear": lambda: (grad(T, H), grad(E, I, H), grad(E, I), plan(), True, True),
    "grouped_linear down": lambda: (grad(T * K, H), grad(E, I, H), None, plan(), False, True),
    "grouped_linear strided": lambda: (
        tracked_and_turned(T, H), tracked_and_turned(E, I, H), grad(E, I), plan(), True, False),
    "grouped_linear blocks": lambda: (grad(T, 64), blocks("Q8_0", E, I, 64), grad(E, I), plan(), True, True),
    "grouped_linear exact": lambda: (
        grad(T * K, 256), blocks("Q4_K:exact", 2 * E, I, 256)[::2], None, plan(), False, True),
    "grouped_linear_transposed": lambda: (rand(T * K, I), blocks("Q8_0", E, I, 64), plan(), True, True),
    "grouped_linear_transposed strided": lambda: (
        turned(T * K, I), blocks("Q4_K:exact", 2 * E, I, 256)[::2], plan(), False, False),
    "linear": lambda: (grad(T, H), Projections(grad(I, H), bias=grad(I)), grad(T, I)),
    "linear three": lambda: (
        grad(T, 64), Projections(grad(I, 64), blocks("Q8_0", E, 64), grad(K, 64), second_bias=grad(E)), None),
    "linear strided": lambda: (
        tracked_and_turned(T, H), Projections(tracked_and_turned(I, H)), tracked_and_turned(T, I)),
    "grouped_outer": lambda: (rand(T * K, I), rand(T, H), plan(), True, True),
    "grouped_outer strided": lambda: (turned(T * K, I), turned(T * K, H), plan(), False, False),
    "glu": lambda: (grad(T, 2 * I), None, SILU, "halves"),
    "glu interleaved": lambda: (grad(T, K, 2 * I), None, SILU, "interleaved"),
    "glu apart": lambda: (grad(T, I), grad(T, I), SILU, "halves"),
    "glu ungated": lambda: (grad(T, I), None, PLAIN, "halves"),
    "glu strided": lambda: (tracked_and_turned(T, 2 * I), None, SILU, "halves"),
    "glu apart_strided": lambda: (tracked_and_turned(T, I), tracked_and_turned(T, I), SILU, "halves"),
    "glu_backward": lambda: (rand(T, I), rand(T, 2 * I), None, SILU, "halves"),
    "glu_backward interleaved": lambda: (rand(T, I), rand(T, 2 * I), None, SILU, "interleaved"),
    "glu_backward apart": lambda: (rand(T, I), rand(T, I), rand(T, I), SILU, "halves"),
    "glu_backward strided": lambda: (turned(T, I), turned(T, 2 * I), None, SILU, "halves"),
    "glu_backward apart_strided": lambda: (turned(T, I), turned(T, I), turned(T, I), SILU, "halves"),
    "glu_backward ungated_strided": lambda: (turned(T, I), turned(T, I), None, PLAIN, "halves"),
    "combine": lambda: (grad(T * K, H), grad(T, K), None, tail(grad)),
    "combine sum": lambda: (grad(T * K, H), grad(T, K), None, Tail()),
    "combine inverse": lambda: (grad(T * K, H), grad(T, K), SHUFFLED, Tail(grad(T, H), grad(T))),
    "combine strided": lambda: (
        tracked_and_turned(T * K, H), tracked_and_turned(T, K), None,
        Tail(residual=tracked_and_turned(T, H), norm_weight=grad(H))),
    "combine_out": lambda: (
        rand(T * K, H), rand(T, K), None, tail(), Outputs(torch.zeros(T, H), torch.zeros(T, H))),
    "combine_out sum": lambda: (rand(T * K, H), rand(T, K), None, tail(norm=False), Outputs(torch.zeros(T, H))),
    "combine_backward": lambda: (rand(T, H), rand(T, H), rand(T * K, H), rand(T, K), None, tail()),
    "combine_backward sum": lambda: (rand(T, H), None, rand(T * K, H), rand(T, K), None, Tail()),
    "combine_backward strided": lambda: (
        turned(T, H), None, turned(T * K, H), turned(T, K), SHUFFLED,
        Tail(turned(T, H), rand(T), residual=turned(T, H))),
    "experts": lambda: (*routed(), stacks(), None, SILU, tail(), False),
    "experts sum": lambda: (*routed(), stacks(up=True), None, SILU, Tail(), False),
    "experts blocks": lambda: (
        rand(T, 32), IDS, rand(T, K), MIXED, None, SILU, Tail(residual=rand(T, 32)), False),
    "experts saving": lambda: (*routed(grad), stacks(grad), plan(), SILU, tail(grad), True),
    "experts saving_sum": lambda: (*routed(), stacks(up=True), plan(), SILU, Tail(), True),
    "experts_out": lambda: (
        *routed(), stacks(layout="interleaved"), None, SILU, tail(), Outputs(torch.zeros(T, H), torch.zeros(T, H)),
        None),
    "experts_out sum": lambda: (*routed(), stacks(), plan(), SILU, tail(norm=False), Outputs(torch.zeros(T, H)), None),
    "experts_backward": lambda: (*kept(), stacks(layout="interleaved"), plan(), SILU, ALL._replace(up=False), False),
    "experts_backward apart": lambda: (*kept(), stacks(up=True), plan(), SILU, ALL, False),
    "experts_backward frozen": lambda: (
        *kept(), stacks(), plan(), SILU, Wanted(True, True, False, False, False, False, False), False),
    "experts_backward_reusing": lambda: (*kept(), stacks(), plan(), SILU, ALL._replace(up=False), True),
    "tail_backward": lambda: (rand(T, H), rand(T, H), rand(T, H), tail()._replace(residual=None)),
    "tail_backward gate": lambda: (rand(T, H), None, None, Tail(rand(T, H), rand(T))),
    "tail_backward strided": lambda: (
        rand(T, H), turned(T, H), turned(T, H), Tail(turned(T, H), norm_weight=rand(H))),
    "rope": lambda: (rand(2, T, 4, 6), rand(2, T, 2, 6), None, Rotary(rand(1, T, 2), rand(1, T, 2), rand(6)), None),
    "rope_out": lambda: (
        rand(2, T, 4, 6), rand(2, T, 2, 6), rand(2, T, 2, 5), Rotary(rand(2, T, 3), rand(2, T, 3)), cache()),
    "rope_out strided": lambda: (
        turned(2, T, 4, 6), rand(2, 2, T, 6).transpose(1, 2), rand(2, T, 9, 5)[:, :, ::5], Rotary(
            turned(2, T, 3), turned(1, T, 3)), cache()),
    "attend": lambda: (rand(2, 4, 6), cache(), None, None, 0.5, None),
    "attend masked": lambda: (turned(2, 4, 6), cache(), rand(2, 7) > 0.5, rand(4), 0.5, 3),
}  # fmt: skip


def names():
    """Every op in the namespace."""
    schemas = torch._C._jit_get_all_schemas()
    return {s.name.removeprefix("moefuse::") for s in schemas if s.name.startswith("moefuse::")}


def test_every_op_is_called():
    assert names() == {name.split()[0] for name in CALLS}


def has(backend, op):
    """Whether this backend has a kernel of its own for the op."""
    return all(op in row.load().OPS for row in backends.BACKENDS if row.name == backend)


def moved(value, device):
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(device).requires_grad_(value.requires_grad)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, target):
    """Schema, autograd registration, fake tensors (strides too), and aot dispatch with dynamic shapes."""
    backend, device = target
    op = name.split()[0]
    if not has(backend, op.removesuffix("_out").removesuffix("_reusing")):
        pytest.skip(f"{backend} leaves {op} to the reference")
    definition = library.OPS[op]
    arguments = [moved(value, device) for value in definition.signature.flatten((backend, *CALLS[name]()))]
    specs = [value for value in arguments if isinstance(value, str) and value.partition(":")[0] in FORMATS]
    if not {spec.partition(":")[0] for spec in specs}.issubset(formats_of(backend)):
        pytest.skip(f"{backend} leaves {', '.join(specs)} to the reference")
    torch.library.opcheck(definition.overload, tuple(arguments))


# torch.compile. Registration is the same whoever runs the op, so these take the backend of a plain call.


def token_ids(rows):
    return torch.arange(rows * K).reshape(rows, K).remainder(E + 1)


def make_plan(ids):
    plan = moefuse.plan(ids, E)
    return plan.counts, plan.offsets, plan.order, plan.inverse


def written(heads, cos, keys, values, position):
    """A rope and the cache that it has written to, another than was given.

    Keys and values come apart: of parts of one tensor of dynamic size, both written to, torch's inductor returns the
    wrong numbers (2.13).
    """
    keys, values = keys.clone(), values.clone()
    q, k, v = heads.split((3, 3, 3), 2)
    return moefuse.rope(q, k, cos, cos, v=v, keys=keys, values=values, position=position), keys, values


NORM, LOGIT_BIAS = rand(H), rand(E)
DOWN = blocks("Q5_0:exact", E, 32, 64)
PUBLIC = {
    "route": (
        lambda logits, scale: moefuse.route(logits, Routing(K, softcap=9.0), per_expert_scale=scale),
        lambda rows: (torch.randn(rows, E), rand(E)),
    ),
    "gate": (
        lambda x, weight: moefuse.gate(
            x, weight, Routing(K, score="sigmoid"), norm_weight=NORM, logit_bias=LOGIT_BIAS, return_normed=True
        ),
        lambda rows: (torch.randn(rows, H), torch.randn(E, H)),
    ),
    "plan": (make_plan, lambda rows: (token_ids(rows),)),
    "grouped_linear": (
        lambda x, weight, bias, ids: moefuse.grouped_linear(
            x, weight, moefuse.plan(ids, E), gather=True, scatter=False, bias=bias
        ),
        lambda rows: (torch.randn(rows, H), torch.randn(E, I, H), torch.randn(E, I), token_ids(rows)),
    ),
    "linear": (
        lambda x, query, key, bias: (
            *moefuse.linear(x, (query, key), bias=(None, bias)), moefuse.linear(x, key, residual=x[:, :I])
        ),
        lambda rows: (torch.randn(rows, H), torch.randn(E, H), torch.randn(I, H), torch.randn(I)),
    ),
    "linear blocks": (
        lambda x, one, other: moefuse.linear(x, (QuantTensor(one, "Q8_0"), QuantTensor(other, "MXFP4"))),
        lambda rows: (torch.randn(rows, 64), blocks("Q8_0", E, 64).blocks, blocks("MXFP4", I, 64).blocks),
    ),
    "grouped_outer": (
        lambda d, x, ids: moefuse.grouped_outer(d, x, moefuse.plan(ids, E), gather=True, scatter=True),
        lambda rows: (torch.randn(rows * K, I), torch.randn(rows, H), token_ids(rows)),
    ),
    "glu": (
        lambda z, gate, up: (moefuse.glu(z, "silu", layout="interleaved"), moefuse.glu(gate, up, "gelu_tanh")),
        lambda rows: (torch.randn(rows, 2 * I), torch.randn(rows, I), torch.randn(rows, I)),
    ),
    "combine": (
        lambda y, weights, shared, logit, residual, norm: moefuse.combine(
            y, weights, shared=shared, shared_logit=logit, residual=residual, norm_weight=norm
        ),
        lambda rows: (
            torch.randn(rows * K, H), rand(rows, K), torch.randn(rows, H), torch.randn(rows), torch.randn(rows, H),
            rand(H),
        ),
    ),
    "experts": (
        lambda x, ids, weights, gate_up, down: moefuse.experts(x, ids, weights, gate_up, down, activation="gelu"),
        lambda rows: (
            torch.randn(rows, H), token_ids(rows), rand(rows, K), torch.randn(E, 2 * I, H), torch.randn(E, H, I),
        ),
    ),
    "experts blocks": (
        lambda x, ids, weights, gate, up: moefuse.experts(
            x, ids, weights, (QuantTensor(gate, "Q8_0"), QuantTensor(up, "MXFP4")), DOWN
        ),
        lambda rows: (
            torch.randn(rows, 32), token_ids(rows), rand(rows, K), blocks("Q8_0", E, 64, 32).blocks,
            blocks("MXFP4", E, 64, 32).blocks,
        ),
    ),
    "moe": (
        lambda x, router, gate_up, down: moefuse.moe(
            x, router, gate_up, down, Routing(K), norm_weight=NORM, residual=x, next_norm_weight=NORM
        ),
        lambda rows: (torch.randn(rows, H), torch.randn(E, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I)),
    ),
    "rope": (
        lambda q, k, cos, sin, norm: moefuse.rope(q, k, cos, sin, q_norm=norm),
        lambda rows: (torch.randn(2, rows, 4, 6), torch.randn(2, rows, 3, 6), *rand(2, 1, rows, 2), rand(6)),
    ),
    "rope_out": (
        written,
        lambda rows: (
            torch.randn(2, rows, 9, 6), rand(1, rows, 3), torch.randn(2, 3, 19, 6), torch.randn(2, 3, 19, 6),
            torch.tensor(3),
        ),
    ),
    "attend": (
        lambda q, keys, values, position, mask: moefuse.attend(q, keys, values, position, mask=mask, window=4),
        lambda rows: (
            torch.randn(2, 6, 8), torch.randn(2, 3, rows, 8), torch.randn(2, 3, rows, 5), torch.tensor(7),
            torch.rand(2, rows) < 0.7,
        ),
    ),
}  # fmt: skip
NO_GRADIENT = {"plan", "grouped_outer", "rope", "rope_out", "attend"}


def listed(result):
    return list(result) if isinstance(result, tuple) else [result]


def same(got, want):
    assert got.dtype == want.dtype
    if got.is_floating_point():
        assert_close(got, want.double(), oracle.GRADIENT, whole=True)
    else:
        assert torch.equal(got, want)


def check_compiled(name, backend, gradients, sizes=(11, 17, 13)):
    """One graph, no recompilation, the eager result for every number of tokens (none of them equal to another size)."""
    eager, make = PUBLIC[name]
    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend=backend)
    for first, rows in enumerate(sizes):
        made = [t.requires_grad_(gradients and t.is_floating_point()) for t in make(rows)]
        want = listed(eager(*made))
        with torch.compiler.set_stance("default" if first == 0 else "fail_on_recompile"):
            got = listed(compiled(*made))
        for one, other in zip(got, want, strict=True):
            same(one, other)
        if gradients:
            leaves = [t for t in made if t.requires_grad]
            seeds = [torch.randn_like(t) for t in want if t.requires_grad]
            for one, other in zip(
                torch.autograd.grad([t for t in got if t.requires_grad], leaves, seeds),
                torch.autograd.grad([t for t in want if t.requires_grad], leaves, seeds),
                strict=True,
            ):
                same(one, other)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", PUBLIC)
def test_compiled(name):
    check_compiled(name, "aot_eager", gradients=False)


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in NO_GRADIENT])
def test_compiled_with_gradients(name):
    check_compiled(name, "aot_eager", gradients=True, sizes=(11, 13))


@pytest.mark.parametrize(("name", "gradients"), [("combine", True), ("moe", False)])
def test_compiled_by_inductor(name, gradients):
    check_compiled(name, "inductor", gradients, sizes=(11, 13))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("gradients", [False, True])
def test_everything_compiled_by_inductor(name, gradients):
    check_compiled(name, "inductor", gradients and name not in NO_GRADIENT)


def test_compiled_on_a_transposed_input():
    """inductor trusts the strides that the fake implementation promises."""

    def call(z):
        return moefuse.glu(z, "silu", backend="reference") + 1

    torch._dynamo.reset()
    z = torch.randn(2 * I, T).T
    same(torch.compile(call, fullgraph=True, backend="inductor")(z), call(z))


def test_compiled_in_place_on_the_residual():
    def layer(y, weights, stream, norm):
        _, normed = moefuse.combine(y, weights, residual=stream, norm_weight=norm, out=stream)
        return normed * 2

    torch._dynamo.reset()
    y, weights, stream, norm = torch.randn(T * K, H), rand(T, K), torch.randn(T, H), rand(H)
    other = stream.clone()
    want = layer(y, weights, stream, norm)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(y, weights, other, norm)
    same(got, want)
    same(other, stream)
    torch._dynamo.reset()


def test_bad_input_under_compile():
    """The message is the same; fullgraph turns it into dynamo's exception."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda logits: moefuse.route(logits, Routing(K)), backend="aot_eager")
    with pytest.raises(Exception, match="top_k must not exceed E=1"):
        compiled(torch.randn(T, 1))
    torch._dynamo.reset()


# Fake tensors


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [7, 1, 0])
def test_fake(name, dtype, rows):
    """Nothing is computed; shapes, types, strides and devices are those of the real call."""
    call, make = PUBLIC[name]
    if dtype == torch.float64 and name in ("gate", "moe"):
        pytest.skip("the call closes over float32 tensors")
    made = [t.to(dtype) if t.is_floating_point() else t for t in make(rows)]
    want = listed(call(*made))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = listed(call(*(mode.from_tensor(t) for t in made)))
    for fake, real in zip(got, want, strict=True):
        assert type(fake) is not torch.Tensor
        assert fake.shape == real.shape
        assert fake.dtype == real.dtype
        assert fake.stride() == real.stride()
        assert fake.device == real.device


def test_fake_result_types():
    """A float32 residual makes a float32 result; weights are float32 and ids int32 whatever the model is."""
    with FakeTensorMode():
        y, weights = torch.empty(6, H, dtype=torch.bfloat16), torch.empty(T, K)
        residual, norm = torch.empty(T, H), torch.empty(H)
        out, normed = moefuse.combine(y, weights, residual=residual, norm_weight=norm)
        routed, ids = moefuse.route(torch.empty(T, E, dtype=torch.float16), Routing(K))
        wide, _ = moefuse.route(torch.empty(T, E, dtype=torch.float64), Routing(K))
    assert (out.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    assert (routed.dtype, ids.dtype, wide.dtype) == (torch.float32, torch.int32, torch.float64)


def test_a_plain_call_and_a_watched_call_agree():
    """Calls that nothing watches skip the dispatcher; the result is the same, to the bit."""
    logits = torch.randn(T, E)
    plain = moefuse.route(logits, Routing(K))
    watched = moefuse.route(logits.clone().requires_grad_(), Routing(K))
    assert torch.equal(plain[0], watched[0].detach())
    assert torch.equal(plain[1], watched[1])
    assert plain[0].sum() > 0
    assert not plain[0].requires_grad
    with torch.no_grad():
        assert not moefuse.route(logits.requires_grad_(), Routing(K))[0].requires_grad
    with torch.inference_mode():
        assert torch.equal(moefuse.route(logits, Routing(K))[0], plain[0])
