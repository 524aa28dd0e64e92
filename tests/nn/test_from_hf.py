"""`MoE.from_hf` against the Hugging Face blocks it claims to know, with weights of realistic scale."""

import importlib

import pytest
import torch
from torch import nn

from moefuse.nn import MoE
from moefuse.testing.compare import difference

pytest.importorskip("transformers")

_SIZES = {
    "hidden_size": 32, "moe_intermediate_size": 24, "intermediate_size": 24, "shared_expert_intermediate_size": 40,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip

#: model directory, configuration class, block class
BLOCKS = {
    "DeepseekV3TopkRouter": ("deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE"),
    "Glm4MoeTopkRouter": ("glm4_moe", "Glm4MoeConfig", "Glm4MoeMoE"),
    "GptOssTopKRouter": ("gpt_oss", "GptOssConfig", "GptOssMLP"),
    "MixtralTopKRouter": ("mixtral", "MixtralConfig", "MixtralSparseMoeBlock"),
    "OlmoeTopKRouter": ("olmoe", "OlmoeConfig", "OlmoeSparseMoeBlock"),
    "Qwen2MoeTopKRouter": ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeSparseMoeBlock"),
    "Qwen3MoeTopKRouter": ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock"),
    "Qwen3NextTopKRouter": ("qwen3_next", "Qwen3NextConfig", "Qwen3NextSparseMoeBlock"),
    "Qwen3_5MoeTopKRouter": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeSparseMoeBlock"),
}


def make_block(router: str, **changes: object) -> nn.Module:
    """A Hugging Face block in float32 whose weights are scaled by their fan-in."""
    directory, config_name, block_name = BLOCKS[router]
    package = f"transformers.models.{directory}"
    config = getattr(importlib.import_module(f"{package}.configuration_{directory}"), config_name)(**_SIZES | changes)
    config._experts_implementation = "eager"
    block = getattr(importlib.import_module(f"{package}.modeling_{directory}"), block_name)(config)
    for value in (*block.parameters(), *block.buffers()):
        nn.init.normal_(value, std=value.shape[-1] ** -0.5 if value.dim() > 1 else 0.1)
    return block.eval()


def run_block(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = block(x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("router", BLOCKS)
def test_agrees_with_the_block(router: str, target: tuple[str, str]) -> None:
    block = make_block(router)
    x = torch.randn(2, 9, _SIZES["hidden_size"])
    with torch.no_grad():
        want = run_block(block, x)
        module = MoE.from_hf(block).to(target[1])
        got = module(x.to(target[1]), backend=target[0])
    error = difference(got, want.double())
    assert want.abs().mean() > 0.05, "a block that returns next to nothing would hide every fault"
    assert error.worst < 2e-5, error


@pytest.mark.parametrize("router", ["OlmoeTopKRouter", "Qwen3MoeTopKRouter"])
def test_norm_topk_prob_off(router: str) -> None:
    block = make_block(router, norm_topk_prob=False)
    x = torch.randn(1, 5, _SIZES["hidden_size"])
    with torch.no_grad():
        assert difference(MoE.from_hf(block)(x), run_block(block, x).double()).worst < 2e-5


def test_shares_parameters() -> None:
    block = make_block("Qwen3MoeTopKRouter")
    module = MoE.from_hf(block)
    assert module.gate_up is block.experts.gate_up_proj
    assert module.router is block.gate.weight


@pytest.mark.parametrize("router", ["MixtralTopKRouter", "DeepseekV3TopkRouter"], ids=["plain", "shared expert"])
def test_gradients_reach_the_block(router: str) -> None:
    block = make_block(router)
    x = torch.randn(1, 6, _SIZES["hidden_size"])
    run_block(block, x).square().sum().backward()
    want = {name: value.grad.clone() for name, value in block.named_parameters()}
    block.zero_grad()
    MoE.from_hf(block)(x).square().sum().backward()
    for name, value in block.named_parameters():
        assert difference(value.grad, want[name].double(), whole=True).worst < 2e-5, name


def test_unknown_router_is_refused() -> None:
    class Softplus(type(make_block("Qwen3MoeTopKRouter").gate)):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
            scores = nn.functional.softplus(hidden_states @ self.weight.T)
            return scores, *scores.topk(self.top_k)

    block = make_block("Qwen3MoeTopKRouter")
    block.gate.__class__ = Softplus
    with pytest.raises(ValueError, match=r"from_hf: Qwen3MoeSparseMoeBlock .* router follows none of the known rules"):
        MoE.from_hf(block)


def test_a_router_is_known_by_what_it_does() -> None:
    class Renamed(type(make_block("Qwen3MoeTopKRouter").gate)):
        pass

    block = make_block("Qwen3MoeTopKRouter")
    block.gate.__class__ = Renamed
    x = torch.randn(1, 5, _SIZES["hidden_size"])
    with torch.no_grad():
        assert difference(MoE.from_hf(block)(x), run_block(block, x).double()).worst < 2e-5


def test_unknown_activation_is_refused() -> None:
    block = make_block("Qwen3MoeTopKRouter")
    block.experts.act_fn = nn.Mish()
    with pytest.raises(ValueError, match=r"between or after the products of its experts is not one of ours"):
        MoE.from_hf(block)


def test_foreign_child_is_refused() -> None:
    block = make_block("Qwen3MoeTopKRouter")
    block.post_norm = nn.LayerNorm(32)
    with pytest.raises(ValueError, match=r"more than a router weight and biases per expert, such as post_norm"):
        MoE.from_hf(block)


def test_dense_mlp_is_refused() -> None:
    with pytest.raises(ValueError, match=r"router and stacked experts, got Linear"):
        MoE.from_hf(nn.Linear(4, 4))


def interleaved(block: nn.Module, bias: bool) -> nn.Module:
    """The block with gate and up rows of its experts by turns, which the shared expert does not have."""
    experts = block.experts

    class Interleaved(type(experts)):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return self.act_fn(gate_up[..., ::2]) * gate_up[..., 1::2]

    experts.__class__, experts.is_concatenated, experts.has_bias = Interleaved, False, bias
    if bias:
        E, rows, H = experts.gate_up_proj.shape
        experts.gate_up_proj_bias = nn.Parameter(0.1 * torch.randn(E, rows))
        experts.down_proj_bias = nn.Parameter(0.1 * torch.randn(E, H))
    experts.config._experts_implementation = "batched_mm"  # eager knows neither layout nor biases
    return block


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("layout", "bias"), [("halves", False), ("interleaved", False), ("interleaved", True)])
@pytest.mark.parametrize("router", ["Qwen2MoeTopKRouter", "DeepseekV3TopkRouter", "Qwen3MoeTopKRouter"])
def test_layout_belongs_to_a_stack(router: str, layout: str, activation: str, bias: bool) -> None:
    block = make_block(router, hidden_act=activation)
    if layout == "interleaved":
        block = interleaved(block, bias)
    x = torch.randn(2, 9, _SIZES["hidden_size"])
    module = MoE.from_hf(block)
    assert module.layout == layout
    with torch.no_grad():
        assert difference(module(x), run_block(block, x).double()).worst < 2e-5
