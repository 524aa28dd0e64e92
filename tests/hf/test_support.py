"""Whether a model would use us: the answer names what stands in the way."""

import pytest
import torch
import transformers
from families import families, tiny_config, tiny_model
from transformers import FineGrainedFP8Config, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from moefuse.hf import supports

#: MoE models that transformers keeps off its experts interface: they take the name and ignore it
OUTSIDE = {
    "llama4": ("Llama4ForCausalLM", {"moe_layers": [0, 1], "attention_chunk_size": 32}),
    "dbrx": ("DbrxForCausalLM", {"d_model": 64, "n_heads": 4, "n_layers": 2}),
    "jetmoe": ("JetMoeForCausalLM", {"kv_channels": 16, "num_experts_per_tok": 2}),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", {"d_model": 64, "d_ff": 48, "d_kv": 16}),
}


def outside(family: str) -> PreTrainedModel:
    name, changes = OUTSIDE[family]
    model_class = getattr(transformers, name)
    config = model_class.config_class
    if family == "llama4":
        config = transformers.Llama4TextConfig
    built = tiny_config(config, changes)
    if family == "dbrx":
        built.ffn_config.ffn_hidden_size, built.attn_config.kv_n_heads, built.attn_config.rope_theta = 48, 2, 1e4
    with torch.device("meta"):
        return model_class(built)


@pytest.mark.parametrize("family", OUTSIDE)
def test_models_that_would_ignore_the_name(family: str) -> None:
    answer = supports(outside(family))
    assert not answer
    assert "not on transformers' experts interface and ignores the name" in answer.reason
    assert all(module.path and not module.supported for module in answer.modules)


def test_dense_model() -> None:
    config = tiny_config(transformers.LlamaConfig, {})
    answer = supports(transformers.LlamaForCausalLM(config))
    assert not answer
    assert str(answer) == (
        "not supported: LlamaForCausalLM has no experts: it is a dense model, and the name would be ignored"
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "aria", "inkling", "gpt_oss"])
def test_models_on_the_interface(family: str) -> None:
    if family not in families():
        pytest.skip("this release of transformers has not put it on the interface")
    answer = supports(tiny_model(family))
    assert answer, answer
    assert {module.kind for module in answer.modules} <= set(families()[family])
    assert all(module.reason == "fused" for module in answer.modules)


def test_fp8_experts_are_named() -> None:
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(tiny_config(Qwen3MoeConfig, {}))
    replace_with_fp8_linear(model, quantization_config=FineGrainedFP8Config())
    answer = supports(model)
    assert not answer
    assert "2 of 2 experts modules cannot run: FP8Experts: its weights are FP8" in answer.reason
    model.set_experts_implementation("moefuse")
    with pytest.raises(NotImplementedError, match="FP8Experts: its weights are FP8"):
        model.model.layers[0].mlp.experts(None, None, None)


def test_not_a_model() -> None:
    with pytest.raises(TypeError, match="supports: model must be a torch module, got str"):
        supports("Qwen/Qwen3-30B-A3B")
