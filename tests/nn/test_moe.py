"""The module: shapes, tail, gradients, state and torch.compile."""

import itertools
import warnings
from functools import partial

import pytest
import torch

import moefuse
from moefuse import Activation, Routing
from moefuse.nn import MoE, RouterTraining, RoutingStats, add_lora
from moefuse.testing.compare import difference


def everything(**changes: object) -> MoE:
    options = {
        "hidden": 48, "intermediate": 24, "num_experts": 6, "routing": Routing(top_k=2), "bias": True,
        "logit_bias": True, "selection_bias": True, "per_expert_scale": True, "shared_intermediate": 32,
        "shared_gate": True, "norm": True, "next_norm": True,
    }  # fmt: skip
    layer = MoE(**options | changes)
    with torch.no_grad():
        for value in layer.parameters():
            if value.dim() < 2 or (value.shape[0] == 6 and value.dim() == 2):
                value.add_(torch.randn_like(value) * 0.1)
    return layer


def glu(z: torch.Tensor, activation: Activation, layout: str) -> torch.Tensor:
    """``[.., I]`` in float64, from the definitions."""
    functions = {"silu": torch.nn.functional.silu, "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
                 "relu2": lambda v: v.relu().square()}  # fmt: skip
    if not activation.gated:
        return functions[activation.kind](z)
    g, u = z.chunk(2, -1) if layout == "halves" else (z[..., ::2], z[..., 1::2])
    if activation.kind in functions:
        return functions[activation.kind](g) * u
    g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
    return g * torch.sigmoid(activation.alpha * g) * (u + 1)


def by_hand(layer: MoE, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer in float64, token by token and expert by expert."""
    p = {name: value.detach().double() for name, value in (*layer.named_parameters(), *layer.named_buffers())}

    def norm(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return v * torch.rsqrt(v.square().mean() + layer.eps) * weight

    def mlp(
        v: torch.Tensor, layout: str, gate_up: torch.Tensor, down: torch.Tensor, b1: object = 0, b2: object = 0
    ) -> torch.Tensor:
        z = gate_up @ v + b1
        return down @ glu(z.unsqueeze(0), layer.activation, layout)[0] + b2

    outs = []
    for row, back in zip(x.double(), residual.double(), strict=True):
        v = norm(row, p["norm_weight"])
        scores = torch.softmax(p["router"] @ v + p["logit_bias"], 0)
        ids = (scores + p["selection_bias"]).argsort(descending=True)[: layer.routing.top_k]
        weights = scores[ids] / scores[ids].sum() * p["per_expert_scale"][ids]
        out = back
        if "shared_down" in p:
            shared = mlp(v, layer.shared_layout, p["shared_gate_up"], p["shared_down"])
            out = out + torch.sigmoid(p["shared_gate"] @ v) * shared
        for w, e in zip(weights, ids, strict=True):
            biases = (p["gate_up_bias"][e], p["down_bias"][e]) if layer.gate_up_bias is not None else ()
            out = out + w * mlp(v, layer.layout, p["gate_up"][e], p["down"][e], *biases)
        outs.append(out)
    total = torch.stack(outs)
    return total, torch.stack([norm(row, p["next_norm_weight"]) for row in total])


def test_the_whole_layer_by_hand(target: tuple[str, str]) -> None:
    backend, device = target
    layer = everything()
    x, residual = torch.randn(7, 48), torch.randn(7, 48)
    want = by_hand(layer, x, residual)
    with torch.no_grad():
        got = layer.to(device)(x.to(device), residual.to(device), backend=backend)
    for have, goal in zip(got, want, strict=True):
        assert difference(have, goal).worst < 2e-6


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "ungated"])
@pytest.mark.parametrize("layouts", [("halves", None), ("interleaved", None), ("interleaved", "halves"),
                                     ("halves", "interleaved")], ids=str)  # fmt: skip
def test_each_stack_has_its_layout(layouts: tuple[str, str | None], activation: str) -> None:
    rule = Activation("relu2", gated=False) if activation == "ungated" else Activation(activation)
    x, residual = torch.randn(7, 48), torch.randn(7, 48)
    for bias, shared in itertools.product((False, True), (0, 32)):
        layer = everything(
            layout=layouts[0], shared_layout=layouts[1], activation=rule, bias=bias, shared_intermediate=shared,
            shared_gate=bool(shared),
        )  # fmt: skip
        want = by_hand(layer, x, residual)
        with torch.no_grad():
            add_lora(layer, rank=2)  # adapters at zero take another path to the same result
            adapted = layer(x, residual)
            layer.lora = None
            for got in (layer(x, residual), adapted):
                assert difference(got[0], want[0]).worst < 2e-6, (bias, shared)


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each layer that runs in one call."""
    calls: list[str] = []

    def counted(*args: object, **kwargs: object) -> object:
        calls.append("moe")
        return moefuse.moe(*args, **kwargs)

    monkeypatch.setattr("moefuse.nn.moe.moe", counted)
    return calls


def test_one_call_where_nothing_comes_in_between(fused_calls: list[str]) -> None:
    x = torch.randn(3, 48)
    for whole in (everything(norm=False), everything(shared_intermediate=0, shared_gate=False)):
        whole.router_training = RouterTraining(balance_loss=0.1)
        whole.eval()(x, x)
        assert fused_calls.pop() == "moe"
        whole.train()(x, x)
        assert not fused_calls, "the router's losses need its logits"
        whole.eval().stats = RoutingStats(6)
        whole(x, x)
        assert not fused_calls, "statistics need the ids"
        whole.stats = None
        with torch.autocast("cpu", torch.bfloat16):
            whole(x, x)
            assert not fused_calls, "the experts' input is cast"
            whole(x.bfloat16(), x)
            assert fused_calls.pop() == "moe"
        add_lora(whole, rank=2)
        whole(x, x)
        assert not fused_calls, "adapters stand beside the products"
    everything()(x, x)
    assert not fused_calls, "the shared expert needs the normed rows"


def test_gradients_agree_with_float64(target: tuple[str, str]) -> None:
    backend, device = target
    layer = everything().to(device)
    x = torch.randn(5, 48, device=device)
    seeds = torch.randn(5, 48, device=device), torch.randn(5, 48, device=device)

    def grads(module: MoE, rows: torch.Tensor, chosen: str) -> dict[str, torch.Tensor]:
        outs = module(rows, rows, backend=chosen)
        sum((o * s.to(o)).sum() for o, s in zip(outs, seeds, strict=True)).backward()
        return {name: value.grad.clone() for name, value in module.named_parameters()}

    got = grads(layer, x, backend)
    layer.zero_grad()
    want = grads(layer.double().cpu(), x.double().cpu(), "reference")
    for name in want:
        assert difference(got[name], want[name], whole=True).worst < 1e-5, name
        assert want[name].abs().max() > 0, name


def test_leading_dimensions_and_single_result() -> None:
    layer = MoE(32, 16, 4, Routing(top_k=2))
    x = torch.randn(2, 3, 5, 32)
    out = layer(x)
    assert out.shape == x.shape
    assert torch.equal(out.reshape(-1, 32), layer(x.reshape(-1, 32)))


def test_ungated_and_half_types() -> None:
    layer = MoE(32, 16, 4, Routing(top_k=2), activation=Activation("relu2", gated=False), dtype=torch.bfloat16)
    assert layer.gate_up.shape == (4, 16, 32)
    assert layer(torch.randn(3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_state_dict_round_trip() -> None:
    first, second = everything(), everything()
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 48)
    assert torch.equal(first(x)[1], second(x)[1])


def test_compiles_to_one_graph() -> None:
    layer = everything()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 48)
    for have, goal in zip(compiled(x, x), layer(x, x), strict=True):
        torch.testing.assert_close(have, goal, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": Routing(top_k=7)}, "MoE: top_k must not exceed E=6, got 7"),
        ({"layout": "zigzag"}, "MoE: layout must be one of halves, interleaved, got 'zigzag'"),
        ({"shared_intermediate": 0}, "MoE: shared_gate must come with shared_intermediate"),
        ({"shared_layout": "zigzag"}, "MoE: layout must be one of halves, interleaved, got 'zigzag'"),
        ({"activation": "swish"}, "Activation: kind must be one of silu.*got 'swish'"),
        ({"activation": None}, "MoE: activation must be a name or an Activation, got NoneType"),
        ({"hidden": -1}, "MoE: hidden must be at least 1, got -1"),
        ({"hidden": 48.0}, "MoE: hidden must be an int, got float"),
        ({"intermediate": 0}, "MoE: intermediate must be at least 1, got 0"),
        ({"num_experts": 0}, "MoE: num_experts must be at least 1, got 0"),
        ({"num_experts": True}, "MoE: num_experts must be an int, got bool"),
        ({"num_experts": 1025}, "MoE: E must be from 1 to 1024, got 1025"),
        ({"shared_intermediate": -4}, "MoE: shared_intermediate must be at least 0, got -4"),
        ({"routing": 2}, "MoE: routing must be a Routing, got int"),
        ({"bias": "no"}, "MoE: bias must be a bool, got str"),
        ({"eps": -1e-6}, "MoE: eps must be finite and not negative in float32, got -1e-06"),
        ({"eps": "1e-6"}, "MoE: eps must be a number, got str"),
        ({"router_training": 0.01}, "MoE: router_training must be a RouterTraining, got float"),
        ({"dtype": torch.int8}, "MoE: dtype must be a floating-point type, got torch.int8"),
        ({"dtype": "float32"}, "MoE: dtype must be a floating-point type, got float32"),
    ],
)
def test_wrong_arguments(changes: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        everything(**changes)


def test_wrong_input_is_the_inputs_fault() -> None:
    layer = MoE(64, 16, 4, Routing(top_k=2))
    with pytest.raises(ValueError, match=r"MoE: x must be \[\.\., hidden=64\], got shape \[3, 65\]"):
        layer(torch.randn(3, 65))
    with pytest.raises(ValueError, match=r"MoE: x must be \[\.\., hidden=64\], got shape \[\]"):
        layer(torch.tensor(1.0))
    with pytest.raises(TypeError, match="MoE: x must be a Tensor, got list"):
        layer([[0.0] * 64])
    with pytest.raises(ValueError, match=r"MoE: residual must be \[3, 64\] like x, got \[64, 3\]"):
        layer(torch.randn(3, 64), torch.randn(64, 3))
    for wide, narrow in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        message = f"MoE: x must have the type of the experts, {wide}, got {narrow}: cast .* or run under torch.autocast"
        with pytest.raises(TypeError, match=message):
            layer.to(wide)(torch.randn(3, 64, dtype=narrow))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stacks", [torch.float32, torch.bfloat16])
def test_autocast(stacks: torch.dtype, rows: torch.dtype, kind: torch.dtype) -> None:
    """Experts in autocast's type, as torch's linear layers; router and norms unrounded, as ever."""
    layer = everything(next_norm=False).to(stacks)
    x = torch.randn(2, 5, 48).to(rows)
    cast = everything(next_norm=False).to(stacks)
    cast.load_state_dict(layer.state_dict())
    for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
        setattr(cast, name, torch.nn.Parameter(getattr(cast, name).detach().to(kind)))
    weights, ids, normed = moefuse.gate(
        x.reshape(-1, 48), layer.router, layer.routing, norm_weight=layer.norm_weight, bias=layer.selection_bias,
        logit_bias=layer.logit_bias, per_expert_scale=layer.per_expert_scale, return_normed=True,
    )  # fmt: skip
    cast._route = lambda *_: (weights, ids, normed.to(kind))
    want = cast(x.to(kind))
    with torch.autocast("cpu", kind):
        got = layer(x)
        assert got.dtype == kind
        assert torch.equal(got, want)
        assert layer(x, x).dtype == rows, "the residual's own"
        got.float().square().sum().backward()
    assert all(value.grad is not None and value.grad.dtype == value.dtype for value in layer.parameters())


def test_autocast_with_training_and_adapters_compiled() -> None:
    layer = everything(next_norm=False, router_training=RouterTraining(balance_loss=0.1))
    add_lora(layer, rank=2)
    x = torch.randn(5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        want = layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert want.dtype == compiled.dtype == torch.bfloat16
    assert difference(compiled, want.double()).worst < 1e-2
    plain = layer(x)
    assert difference(want, plain.double()).worst < 2e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert everything(next_norm=False).double()(x.double()).dtype == torch.float64


def test_the_result_is_no_view() -> None:
    """FSDP2 warns of views: a change in place would lose its hooks."""
    for out in everything()(torch.randn(2, 3, 48, requires_grad=True)):
        assert out._base is None
        assert out.shape == (2, 3, 48)


def test_exports_with_any_number_of_tokens() -> None:
    layer = MoE(32, 16, 4, Routing(top_k=2), shared_intermediate=16, norm=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        program = torch.export.export(layer, (torch.randn(5, 32),), dynamic_shapes=({0: torch.export.Dim("T")},))
    for tokens in (1, 2, 300):
        x = torch.randn(tokens, 32)
        assert torch.allclose(program.module()(x), layer(x), atol=1e-6)


def test_says_what_it_is() -> None:
    assert "num_experts=6" in repr(everything())
    assert isinstance(moefuse.nn.MoE, type)
