"""The ops under torch.func, forward-mode derivatives, batched gradients and autocast: right, or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import moefuse
from moefuse import Routing

T, E, H, I, K = 4, 8, 16, 12, 2
RULE = Routing(top_k=K)
ROUTER, GATE_UP, DOWN = torch.randn(E, H) / 4, torch.randn(E, 2 * I, H) / 4, torch.randn(E, H, I) / 4
IDS, WEIGHTS = torch.tensor([[0, 1], [2, 9], [3, 3], [7, 5]], dtype=torch.int32), torch.rand(T, K)
PLAN = moefuse.plan(IDS, E)

#: of a hidden state [T, H]
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "route": lambda x: moefuse.route(x, RULE)[0],
    "gate": lambda x: moefuse.gate(x, ROUTER, RULE, norm_weight=torch.ones(H), return_normed=True)[0],
    "glu": lambda x: moefuse.glu(x, "silu"),
    "grouped_linear": lambda x: moefuse.grouped_linear(x, GATE_UP, PLAN, gather=True, scatter=True),
    "linear": lambda x: torch.cat(moefuse.linear(x, (ROUTER, GATE_UP[0])), 1),
    "combine": lambda x: moefuse.combine(x, WEIGHTS[:2], residual=x[:2]),
    "experts": lambda x: moefuse.experts(x, IDS, WEIGHTS, GATE_UP, DOWN),
    "moe": lambda x: moefuse.moe(x, ROUTER, GATE_UP, DOWN, RULE, residual=x),
}
each_op = pytest.mark.parametrize("name", OPS)


def gradient(op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(op(x).square().sum(), x)[0]


@each_op
def test_functional_gradients(name: str) -> None:
    op, x = OPS[name], torch.randn(T, H)
    want = gradient(op, x)
    assert want.abs().max() > 1e-3

    def loss(x: Tensor) -> Tensor:
        return op(x).square().sum()

    assert torch.equal(torch.func.grad(loss)(x), want)
    _, pull = torch.func.vjp(op, x)
    assert torch.allclose(pull(2 * op(x))[0], want, atol=1e-6)
    assert torch.allclose(torch.compile(torch.func.grad(loss), backend="aot_eager")(x), want, atol=1e-6)


@each_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batches_of_calls(name: str) -> None:
    op, x = OPS[name], torch.randn(3, T, H)
    assert torch.equal(torch.func.vmap(op)(x), torch.stack([op(row) for row in x]))
    per_sample = torch.func.vmap(torch.func.grad(lambda x: op(x).square().sum()))(x)
    assert torch.equal(per_sample, torch.stack([gradient(op, row) for row in x]))
    assert torch.allclose(torch.func.jacrev(op)(x[0]), torch.autograd.functional.jacobian(op, x[0]), atol=1e-6)
    tracked = x[0].clone().requires_grad_()
    out = op(tracked)
    seeds = torch.randn(3, *out.shape)
    want = torch.stack([torch.autograd.grad(out, tracked, seed, retain_graph=True)[0] for seed in seeds])
    (got,) = torch.autograd.grad(out, tracked, seeds, is_grads_batched=True)
    assert torch.allclose(got, want, atol=1e-6)


def through_a_dual(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with forward_ad.dual_level():
        op(forward_ad.make_dual(x, torch.ones_like(x)))


FORWARD_MODE: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "jvp": lambda op, x: torch.func.jvp(op, (x,), (x,)),
    "jacfwd": lambda op, x: torch.func.jacfwd(op)(x),
    "dual": through_a_dual,
    "dual of a leaf": lambda op, x: through_a_dual(op, x.requires_grad_()),
    "jvp of grad": lambda op, x: torch.func.jvp(torch.func.grad(lambda x: op(x).sum()), (x,), (x,)),
    "grad of jvp": lambda op, x: torch.func.grad(lambda x: torch.func.jvp(op, (x,), (x,))[1].sum())(x),
    "compiled jvp": lambda op, x: torch.compile(lambda x: torch.func.jvp(op, (x,), (x,))[1], backend="eager")(x),
    "jvp of compiled": lambda op, x: torch.func.jvp(torch.compile(op, backend="aot_eager"), (x,), (x,)),
}


@pytest.mark.parametrize("way", FORWARD_MODE)
@each_op
def test_forward_mode_is_refused(name: str, way: str) -> None:
    with pytest.raises(Exception, match=r"forward-mode derivatives .* are not supported, got a tangent"):
        FORWARD_MODE[way](OPS[name], torch.randn(T, H))


def test_a_call_without_tangents_passes_in_a_forward_level() -> None:
    x = torch.randn(T, H)
    want = OPS["moe"](x)
    with forward_ad.dual_level():
        assert torch.equal(OPS["moe"](x), want)


@pytest.mark.parametrize("name", [name for name in OPS if not name.endswith("linear")])
def test_second_derivatives_are_refused(name: str) -> None:
    inner = torch.func.grad(lambda x: OPS[name](x).square().sum())
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        torch.func.grad(lambda x: inner(x).sum())(torch.randn(T, H))


@each_op
@pytest.mark.parametrize("backend", ["reference", None])
def test_autocast_stays_outside(name: str, backend: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither products of a kernel nor those of a backward are rounded, on the first call and on those repeated."""
    if backend is not None:
        monkeypatch.setenv("MOEFUSE_BACKEND", backend)
    op, x = OPS[name], torch.randn(T, H)
    want, want_grad = op(x), gradient(op, x)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            assert torch.equal(op(x), want)
        assert torch.equal(gradient(op, x), want_grad)
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
        assert torch.allclose(compiled(x), want, atol=1e-6)
