"""The module: shapes, tail, gradients, state and torch.compile."""

import itertools
import warnings
from functools import partial

import pytest
import torch

import moefuse
from moefuse import Activation, Routing
from moefuse.nn import MoE, RouterTraining, add_lora
from moefuse.testing.compare import difference


def everything(**changes: object) -> MoE:
    options = {
        "hidden": 48, "intermediate": 24, "num_experts": 6, "routing": Routing(top_k=2), "bias": True,
        "logit_bias": True, "selection_bias": True, "per_expert_scale": True, "shared_intermediate": 32,
        "shared_gate": True, "norm": True, "next_norm": True,
    }  # fmt: skip
    block = MoE(**options | changes)
    with torch.no_grad():
        for value in block.parameters():
            if value.dim() < 2 or (value.shape[0] == 6 and value.dim() == 2):
                value.add_(torch.randn_like(value) * 0.1)
    return block


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


def by_hand(block: MoE, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The block in float64, token by token and expert by expert."""
    p = {name: value.detach().double() for name, value in (*block.named_parameters(), *block.named_buffers())}

    def norm(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return v * torch.rsqrt(v.square().mean() + block.eps) * weight

    def mlp(
        v: torch.Tensor, layout: str, gate_up: torch.Tensor, down: torch.Tensor, b1: object = 0, b2: object = 0
    ) -> torch.Tensor:
        z = gate_up @ v + b1
        return down @ glu(z.unsqueeze(0), block.activation, layout)[0] + b2

    outs = []
    for row, back in zip(x.double(), residual.double(), strict=True):
        v = norm(row, p["norm_weight"])
        scores = torch.softmax(p["router"] @ v + p["logit_bias"], 0)
        ids = (scores + p["selection_bias"]).argsort(descending=True)[: block.routing.top_k]
        weights = scores[ids] / scores[ids].sum() * p["per_expert_scale"][ids]
        out = back
        if "shared_down" in p:
            shared = mlp(v, block.shared_layout, p["shared_gate_up"], p["shared_down"])
            out = out + torch.sigmoid(p["shared_gate"] @ v) * shared
        for w, e in zip(weights, ids, strict=True):
            biases = (p["gate_up_bias"][e], p["down_bias"][e]) if block.gate_up_bias is not None else ()
            out = out + w * mlp(v, block.layout, p["gate_up"][e], p["down"][e], *biases)
        outs.append(out)
    total = torch.stack(outs)
    return total, torch.stack([norm(row, p["next_norm_weight"]) for row in total])


def test_the_whole_block_by_hand(target: tuple[str, str]) -> None:
    backend, device = target
    block = everything()
    x, residual = torch.randn(7, 48), torch.randn(7, 48)
    want = by_hand(block, x, residual)
    with torch.no_grad():
        got = block.to(device)(x.to(device), residual.to(device), backend=backend)
    for have, goal in zip(got, want, strict=True):
        assert difference(have, goal).worst < 2e-6


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "ungated"])
@pytest.mark.parametrize("layouts", [("halves", None), ("interleaved", None), ("interleaved", "halves"),
                                     ("halves", "interleaved")], ids=str)  # fmt: skip
def test_each_stack_has_its_layout(layouts: tuple[str, str | None], activation: str) -> None:
    rule = Activation("relu2", gated=False) if activation == "ungated" else Activation(activation)
    x, residual = torch.randn(7, 48), torch.randn(7, 48)
    for bias, shared in itertools.product((False, True), (0, 32)):
        block = everything(
            layout=layouts[0], shared_layout=layouts[1], activation=rule, bias=bias, shared_intermediate=shared,
            shared_gate=bool(shared),
        )  # fmt: skip
        want = by_hand(block, x, residual)
        with torch.no_grad():
            add_lora(block, rank=2)  # adapters at zero take another path to the same result
            adapted = block(x, residual)
            block.lora = None
            for got in (block(x, residual), adapted):
                assert difference(got[0], want[0]).worst < 2e-6, (bias, shared)


def test_gradients_agree_with_float64(target: tuple[str, str]) -> None:
    backend, device = target
    block = everything().to(device)
    x = torch.randn(5, 48, device=device)
    seeds = torch.randn(5, 48, device=device), torch.randn(5, 48, device=device)

    def grads(module: MoE, rows: torch.Tensor, chosen: str) -> dict[str, torch.Tensor]:
        outs = module(rows, rows, backend=chosen)
        sum((o * s.to(o)).sum() for o, s in zip(outs, seeds, strict=True)).backward()
        return {name: value.grad.clone() for name, value in module.named_parameters()}

    got = grads(block, x, backend)
    block.zero_grad()
    want = grads(block.double().cpu(), x.double().cpu(), "reference")
    for name in want:
        assert difference(got[name], want[name], whole=True).worst < 1e-5, name
        assert want[name].abs().max() > 0, name


def test_leading_dimensions_and_single_result() -> None:
    block = MoE(32, 16, 4, Routing(top_k=2))
    x = torch.randn(2, 3, 5, 32)
    out = block(x)
    assert out.shape == x.shape
    assert torch.equal(out.reshape(-1, 32), block(x.reshape(-1, 32)))


def test_ungated_and_half_types() -> None:
    block = MoE(32, 16, 4, Routing(top_k=2), activation=Activation("relu2", gated=False), dtype=torch.bfloat16)
    assert block.gate_up.shape == (4, 16, 32)
    assert block(torch.randn(3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_state_dict_round_trip() -> None:
    first, second = everything(), everything()
    second.load_state_dict(first.state_dict())
    x = torch.randn(4, 48)
    assert torch.equal(first(x)[1], second(x)[1])


def test_compiles_to_one_graph() -> None:
    block = everything()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 48)
    for have, goal in zip(compiled(x, x), block(x, x), strict=True):
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
    block = MoE(64, 16, 4, Routing(top_k=2))
    with pytest.raises(ValueError, match=r"MoE: x must be \[\.\., hidden=64\], got shape \[3, 65\]"):
        block(torch.randn(3, 65))
    with pytest.raises(ValueError, match=r"MoE: x must be \[\.\., hidden=64\], got shape \[\]"):
        block(torch.tensor(1.0))
    with pytest.raises(TypeError, match="MoE: x must be a Tensor, got list"):
        block([[0.0] * 64])
    with pytest.raises(ValueError, match=r"MoE: residual must be \[3, 64\] like x, got \[64, 3\]"):
        block(torch.randn(3, 64), torch.randn(64, 3))
    for wide, narrow in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        message = f"MoE: x must have the type of the experts, {wide}, got {narrow}: cast .* or run under torch.autocast"
        with pytest.raises(TypeError, match=message):
            block.to(wide)(torch.randn(3, 64, dtype=narrow))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stacks", [torch.float32, torch.bfloat16])
def test_autocast(stacks: torch.dtype, rows: torch.dtype, kind: torch.dtype) -> None:
    """Experts in autocast's type, as torch's linear layers; router and norms unrounded, as ever."""
    block = everything(next_norm=False).to(stacks)
    x = torch.randn(2, 5, 48).to(rows)
    cast = everything(next_norm=False).to(stacks)
    cast.load_state_dict(block.state_dict())
    for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
        setattr(cast, name, torch.nn.Parameter(getattr(cast, name).detach().to(kind)))
    weights, ids, normed = moefuse.gate(
        x.reshape(-1, 48), block.router, block.routing, norm_weight=block.norm_weight, bias=block.selection_bias,
        logit_bias=block.logit_bias, per_expert_scale=block.per_expert_scale, return_normed=True,
    )  # fmt: skip
    cast._route = lambda *_: (weights, ids, normed.to(kind))
    want = cast(x.to(kind))
    with torch.autocast("cpu", kind):
        got = block(x)
        assert got.dtype == kind
        assert torch.equal(got, want)
        assert block(x, x).dtype == rows, "the residual's own"
        got.float().square().sum().backward()
    assert all(value.grad is not None and value.grad.dtype == value.dtype for value in block.parameters())


def test_autocast_with_training_and_adapters_compiled() -> None:
    block = everything(next_norm=False, router_training=RouterTraining(balance_loss=0.1))
    add_lora(block, rank=2)
    x = torch.randn(5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        want = block(x)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    assert want.dtype == compiled.dtype == torch.bfloat16
    assert difference(compiled, want.double()).worst < 1e-2
    plain = block(x)
    assert difference(want, plain.double()).worst < 2e-2
    with torch.autocast("cpu", torch.bfloat16):
        assert everything(next_norm=False).double()(x.double()).dtype == torch.float64


def test_the_result_is_no_view() -> None:
    """FSDP2 warns of views: a change in place would lose its hooks."""
    for out in everything()(torch.randn(2, 3, 48, requires_grad=True)):
        assert out._base is None
        assert out.shape == (2, 3, 48)


def test_exports_with_any_number_of_tokens() -> None:
    block = MoE(32, 16, 4, Routing(top_k=2), shared_intermediate=16, norm=True).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        program = torch.export.export(block, (torch.randn(5, 32),), dynamic_shapes=({0: torch.export.Dim("T")},))
    for tokens in (1, 2, 300):
        x = torch.randn(tokens, 32)
        assert torch.allclose(program.module()(x), block(x), atol=1e-6)


def test_says_what_it_is() -> None:
    assert "num_experts=6" in repr(everything())
    assert isinstance(moefuse.nn.MoE, type)
