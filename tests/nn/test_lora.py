"""Adapters on experts: the base is frozen, nothing per expert is formed, merging changes nothing."""

import pytest
import torch

from moefuse import Routing, quantize
from moefuse.nn import MoE, add_lora, merge_lora
from moefuse.testing.cases import formats_of
from moefuse.testing.compare import difference


def adapted(**options: object) -> MoE:
    made = MoE(32, 16, 8, Routing(top_k=3), bias=True, norm=True, shared_intermediate=16, **options)
    add_lora(made, rank=4, alpha=8.0)
    assert made.lora is not None
    with torch.no_grad():
        made.lora.gate_up_b.normal_(std=0.5)
        made.lora.down_b.normal_(std=0.5)
    return made


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_adapters_are_what_merging_makes_of_them(target: tuple[str, str], activation: str, layout: str) -> None:
    backend, device = target
    made = adapted(activation=activation, layout=layout).to(device)
    x, residual = torch.randn(30, 32, device=device), torch.randn(30, 32, device=device)
    with torch.no_grad():
        beside = made(x, residual, backend=backend)
        base, made.lora = made.lora, None
        without = made(x, residual, backend=backend)
        made.lora = base
        merge_lora(made)
        merged = made(x, residual, backend=backend)
    assert difference(beside, merged.double().cpu()).worst < 1e-5
    assert difference(beside, without.double().cpu()).worst > 1e-2


def test_gate_and_up_apart_are_merged_into_each() -> None:
    made = MoE(32, 16, 8, Routing(top_k=3), bias=True)
    made.gate_up, made.up = (torch.nn.Parameter(part.detach().clone()) for part in made.gate_up.chunk(2, 1))
    lora = add_lora(made, rank=4)
    x = torch.randn(30, 32)
    with torch.no_grad():
        lora.gate_up_b.normal_(std=0.5)
        lora.down_b.normal_(std=0.5)
        beside = made(x)
        merge_lora(made)
        assert difference(beside, made(x).double()).worst < 1e-5


def test_adapters_take_the_type_of_the_input() -> None:
    made = adapted()
    x = torch.randn(30, 32)
    with torch.no_grad():
        want = made(x)
        for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
            getattr(made, name).data = getattr(made, name).data.bfloat16()
        got = made(x.bfloat16())
    assert made.lora.gate_up_a.dtype == torch.float32
    assert difference(got, want.double()).worst < 0.1


def test_a_new_adapter_changes_no_result() -> None:
    made = MoE(32, 16, 8, Routing(top_k=3))
    x = torch.randn(30, 32)
    with torch.no_grad():
        before = made(x)
        add_lora(made, rank=2)
        assert difference(made(x), before.double()).worst < 2e-6


def test_only_adapters_learn_and_their_gradients_are_right(target: tuple[str, str]) -> None:
    """Against autograd through weights with the delta formed, in float64."""
    backend, device = target
    made = adapted()
    x, direction = torch.randn(30, 32), torch.randn(30, 32)
    wide = adapted().double()
    wide.load_state_dict(made.state_dict())
    lora = wide.lora
    assert lora is not None
    formed = MoE(32, 16, 8, Routing(top_k=3), bias=True, norm=True, shared_intermediate=16).double()
    formed.load_state_dict({k: v for k, v in wide.state_dict().items() if not k.startswith("lora")})
    for name, a, b in (("gate_up", lora.gate_up_a, lora.gate_up_b), ("down", lora.down_a, lora.down_b)):
        value = getattr(formed, name).detach() + lora.scale * b @ a
        delattr(formed, name)
        setattr(formed, name, value)
    (formed(x.double(), backend="reference") * direction.double()).sum().backward()
    want = {name: p.grad for name, p in lora.named_parameters()}
    made.to(device)
    (made(x.to(device), backend=backend) * direction.to(device)).sum().backward()
    assert {name for name, p in made.named_parameters() if p.grad is not None} == {f"lora.{name}" for name in want}
    for name, p in made.lora.named_parameters():
        assert difference(p.grad, want[name], whole=True).worst < 1e-5


def test_mistakes_are_named() -> None:
    made = MoE(32, 16, 8, Routing(top_k=3))
    with pytest.raises(ValueError, match="rank must not exceed min"):
        add_lora(made, rank=17)
    for wrong, kind in (("16", TypeError), (torch.inf, ValueError)):
        with pytest.raises(kind, match="add_lora: alpha must be"):
            add_lora(made, rank=2, alpha=wrong)
    assert all(p.requires_grad for p in made.parameters()), "nothing was touched"
    with pytest.raises(TypeError, match=r"add_lora: block must be a moefuse\.nn\.MoE, or .*, got Linear"):
        add_lora(torch.nn.Linear(4, 4), rank=2)
    with pytest.raises(TypeError, match=r"merge_lora: block must be .*, got Linear"):
        merge_lora(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no adapters"):
        merge_lora(made)
    add_lora(made, rank=2)
    with pytest.raises(ValueError, match="rank 2 already"):
        add_lora(made, rank=2)


def test_adapters_alone_are_saved_and_loaded() -> None:
    made, other = adapted(), adapted()
    assert made.lora is not None
    assert other.lora is not None
    other.lora.load_state_dict(made.lora.state_dict())
    assert torch.equal(other.lora.down_b, made.lora.down_b)


def in_blocks(made: MoE, formats: dict[str, str]) -> None:
    """The module's experts in blocks, as `MoE.from_gguf` would leave them."""
    for name, format in formats.items():
        stack = quantize(getattr(made, name).detach(), format).exactly()
        delattr(made, name)
        made.register_buffer(name, stack.blocks)
        made.specs[name] = stack.spec


def test_adapters_beside_experts_in_blocks(target: tuple[str, str]) -> None:
    """Adapters learn through frozen blocks: results and gradients of a twin with the same numbers, in float64."""
    backend, device = target
    if not {"Q8_0", "Q4_0"}.issubset(formats_of(backend)):
        pytest.skip(f"{backend} leaves these formats to the reference")
    made, twin = (MoE(64, 32, 4, Routing(top_k=2)) for _ in range(2))
    in_blocks(made, {"gate_up": "Q8_0", "down": "Q4_0"})
    with torch.no_grad():
        twin.router.copy_(made.router)
        twin.gate_up.copy_(made.stack("gate_up").dequantize())
        twin.down.copy_(made.stack("down").dequantize())
    for block in (made, twin):
        add_lora(block, rank=3)
    with torch.no_grad():
        made.lora.gate_up_b.normal_(std=0.5)
        made.lora.down_b.normal_(std=0.5)
    twin.lora.load_state_dict(made.lora.state_dict())
    twin.double()
    x, direction = torch.randn(20, 64), torch.randn(20, 64)
    want = twin(x.double(), backend="reference")
    (want * direction.double()).sum().backward()
    got = made.to(device)(x.to(device), backend=backend)
    (got * direction.to(device)).sum().backward()
    assert difference(got, want.detach()).worst < 1e-5
    for name, p in made.lora.named_parameters():
        assert difference(p.grad, twin.lora.get_parameter(name).grad, whole=True).worst < 1e-5
    with pytest.raises(ValueError, match="experts in blocks cannot take a delta"):
        merge_lora(made)
