"""Tiny GGUF files as llama.cpp's converter writes them, from transformers models: the way that from_gguf goes back."""

import functools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from families import scale_by_fan_in
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel

from moefuse import QuantTensor, quantize
from moefuse.quant.encode import ENCODE
from moefuse.quant.formats import FORMATS
from moefuse.quant.gguf import write
from moefuse.testing.random_blocks import random_blocks

OLD = Version(transformers.__version__) < Version("5.22")
#: in old releases not on the experts interface, or failing by themselves
LATER = {"granitemoe", "granitemoe with a shared expert", "deepseek2 with softmax"} if OLD else set()

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair: we had everything before us, we had nothing. "
) * 3
VOCABULARY = 320
END = "<|endoftext|>"


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE as GPT-2 has it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT], trainer)
    assert made.get_vocab_size() == VOCABULARY
    return made


def tokenizer_keys() -> dict[str, Any]:
    model = json.loads(tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token == END else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index(END),
        "tokenizer.ggml.eos_token_id": tokens.index(END),
        "tokenizer.ggml.padding_token_id": tokens.index(END),
        "tokenizer.ggml.add_bos_token": False,
    }


Parts = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Kind:
    """An architecture: its model's class and sizes, its keys, and how the tensors of a layer are written.

    ``layer`` takes the configuration, a name within a layer and its tensor, and gives llama.cpp's names and tensors.
    """

    architecture: str
    model: str
    sizes: dict[str, Any]
    keys: Callable[[Any], dict[str, Any]]
    layer: Callable[[Any, str, Tensor], Parts]
    formats: dict[str, str]
    outside: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Tensor] = field(default_factory=dict)

    def tiny(self) -> PreTrainedModel:
        """A model with weights of realistic size."""
        config = getattr(transformers, f"{self.model}{CONFIGS.get(self.model, 'Config')}")
        model = getattr(transformers, f"{self.model}ForCausalLM")(config(**SIZES | self.sizes))
        scale_by_fan_in(model)
        for name, value in model.named_parameters():
            if value.dim() < 2 and ("norm" in name or name.endswith("scale")):
                value.data.mul_(1 + 0.2 * torch.randn(value.shape))
        return model.eval()


CONFIGS = {"Qwen3_5Moe": "TextConfig", "Gemma4": "TextConfig"}
#: nothing is as the configurations have it by themselves, so that what is not read from the file shows
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 0,
    "pad_token_id": None, "rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 2e3},
}  # fmt: skip

_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip


def plain_layer(_: Any, name: str, value: Tensor) -> Parts:
    """Experts apart, everything else by its name."""
    if name.endswith("experts.gate_up_proj"):
        gate, up = value.chunk(2, 1)
        yield "ffn_gate_exps.weight", gate
        yield "ffn_up_exps.weight", up
    elif name.endswith("experts.down_proj"):
        yield "ffn_down_exps.weight", value
    else:
        module, _, kind = name.rpartition(".")
        yield f"{_NAMES[module]}.{kind}", value


def common_keys(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_used_count": config.num_experts_per_tok,
    }


def qwen3moe_keys(config: Any) -> dict[str, Any]:
    return common_keys(config) | {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "feed_forward_length": config.intermediate_size,
        "expert_count": config.num_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }


def expert_keys(count: int, width: int) -> dict[str, Any]:
    return {"expert_count": count, "expert_feed_forward_length": width}


def qwen2moe_layer(config: Any, name: str, value: Tensor) -> Parts:
    shared = re.fullmatch(r"mlp\.shared_expert\.(\w+)_proj\.weight", name)
    if shared:
        yield f"ffn_{shared[1]}_shexp.weight", value
    elif name == "mlp.shared_expert_gate.weight":
        yield "ffn_gate_inp_shexp.weight", value[0]
    else:
        yield from plain_layer(config, name, value)


def rotated_layer(config: Any, name: str, value: Tensor) -> Parts:
    """Queries and keys with the two halves of each head dealt out in turn."""
    match = re.match(r"self_attn\.([qk])_proj\.", name)
    if match:
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        value = value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    yield from plain_layer(config, name, value)


def granitemoe_layer(config: Any, name: str, value: Tensor) -> Parts:
    if name == "block_sparse_moe.router.weight":
        yield "ffn_gate_inp.weight", value
    elif name == "shared_mlp.input_linear.weight":
        gate, up = value.chunk(2)
        yield "ffn_gate_shexp.weight", gate
        yield "ffn_up_shexp.weight", up
    elif name == "shared_mlp.output_linear.weight":
        yield "ffn_down_shexp.weight", value
    else:
        yield from rotated_layer(config, name, value)


def gpt_oss_layer(config: Any, name: str, value: Tensor) -> Parts:
    if name.startswith("mlp.experts.gate_up_proj"):
        kind = "bias" if name.endswith("_bias") else "weight"
        value = value if kind == "bias" else value.transpose(1, 2)
        yield f"ffn_gate_exps.{kind}", value[:, ::2]
        yield f"ffn_up_exps.{kind}", value[:, 1::2]
    elif name == "mlp.experts.down_proj_bias":
        yield "ffn_down_exps.bias", value
    elif name == "mlp.experts.down_proj":
        yield "ffn_down_exps.weight", value.transpose(1, 2)
    elif name == "self_attn.sinks":
        yield "attn_sinks.weight", value
    elif name.startswith("mlp.router."):
        yield name.replace("mlp.router", "ffn_gate_inp"), value
    elif name == "post_attention_layernorm.weight":
        yield "post_attention_norm.weight", value
    else:
        yield from plain_layer(config, name, value)


_MLA = {"q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b", "kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "q_a_layernorm": "attn_q_a_norm", "kv_a_layernorm": "attn_kv_a_norm"}  # fmt: skip


def deepseek2_layer(config: Any, name: str, value: Tensor) -> Parts:
    part = name.split(".")[1]
    if part in _MLA:
        yield f"{_MLA[part]}.weight", value
    elif part == "kv_b_proj":
        heads = value.view(config.num_attention_heads, -1, value.shape[1])
        yield "attn_k_b.weight", heads[:, : config.qk_nope_head_dim].transpose(1, 2)
        yield "attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    elif name.startswith("mlp.shared_experts."):
        yield f"ffn_{name.split('.')[2].removesuffix('_proj')}_shexp.weight", value
    elif name == "mlp.gate.e_score_correction_bias":
        yield "exp_probs_b.bias", value
    else:
        yield from plain_layer(config, name, value)


def deepseek2_whole_layer(config: Any, name: str, value: Tensor) -> Parts:
    """With keys and values of compressed attention in one matrix, as files were before 2025-04."""
    if name == "self_attn.kv_b_proj.weight":
        yield "attn_kv_b.weight", value
    else:
        yield from deepseek2_layer(config, name, value)


def deepseek2_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    keys = common_keys(config) | expert_keys(config.n_routed_experts, config.moe_intermediate_size) | {
        "attention.head_count_kv": 1,
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": config.first_k_dense_replace,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_scale": config.routed_scaling_factor,
    }  # fmt: skip
    if config.q_lora_rank is not None:
        keys["attention.q_lora_rank"] = config.q_lora_rank
    if config.n_group:
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    if config.model_type == "deepseek_v3":
        keys |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
    return keys


_GEMMA4 = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
_GEMMA4_WHOLE = {
    "router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
}  # fmt: skip


def gemma4_layer(config: Any, name: str, value: Tensor) -> Parts:
    module = name.removesuffix(".weight")
    if name in _GEMMA4_WHOLE:
        yield _GEMMA4_WHOLE[name], value
    elif module in _GEMMA4:
        yield f"{_GEMMA4[module]}.weight", value
    else:
        yield from plain_layer(config, name, value)


def gemma4_keys(config: Any) -> dict[str, Any]:
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [2 if flag else 1 for flag in sliding],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": 0,
        "rope.freq_base": 3e3,
        "rope.freq_base_swa": 2e3,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "final_logit_softcapping": config.final_logit_softcapping,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "expert_used_count": config.top_k_experts,
    } | expert_keys(config.num_experts, config.moe_intermediate_size)


def in_turn(rows: Tensor, config: Any, size: int) -> Tensor:
    """Value heads of each key head, dealt out: the first of every key head, then the second."""
    return rows.view(config.linear_num_key_heads, -1, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


_LINEAR = {"in_proj_z": "attn_gate", "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta"}


def qwen35moe_layer(config: Any, name: str, value: Tensor) -> Parts:
    size, head = config.linear_value_head_dim, 2 * config.linear_key_head_dim * config.linear_num_key_heads
    part = name.split(".")[1]
    if name == "linear_attn.norm.weight":
        yield "ssm_norm.weight", value
    elif part in _LINEAR:
        yield f"{_LINEAR[part]}.weight", in_turn(value, config, size if part == "in_proj_z" else 1)
    elif part in ("in_proj_qkv", "conv1d"):
        rows = value.squeeze(1) if part == "conv1d" else value
        stored_as = "ssm_conv1d.weight" if part == "conv1d" else "attn_qkv.weight"
        yield stored_as, torch.cat((rows[:head], in_turn(rows[head:], config, size)))
    elif part == "out_proj":
        yield "ssm_out.weight", in_turn(value.T, config, size).T
    elif part == "A_log":
        yield "ssm_a", in_turn(-value.exp(), config, 1)
    elif part == "dt_bias":
        yield "ssm_dt.bias", in_turn(value, config, 1)
    elif name == "post_attention_layernorm.weight":
        yield "post_attention_norm.weight", value + 1
    else:
        shift = 1 if "norm" in name else 0
        yield from ((to, tensor + shift) for to, tensor in qwen2moe_layer(config, name, value))


def qwen35moe_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return common_keys(config) | expert_keys(config.num_experts, config.moe_intermediate_size) | {
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "full_attention_interval": 2,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "rope.dimension_sections": [*rope["mrope_section"], 0],
        "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        "nextn_predict_layers": 0,
    }  # fmt: skip


_Q8 = {"ffn_gate_exps": "Q8_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "Q8_0", "attn_q": "Q8_0"}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
         "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
_COMPRESSED = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24,
    "intermediate_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 3,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1,
    "rope_parameters": _YARN | {"mscale": 0.5, "mscale_all_dim": 0.5},
}  # fmt: skip

KINDS: dict[str, Kind] = {
    "qwen3moe": Kind(
        "qwen3moe", "Qwen3Moe",
        {
            "head_dim": 32, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "intermediate_size": 512,
        },
        qwen3moe_keys, plain_layer,
        {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q5_K", "ffn_down_exps": "Q6_K", "attn_q": "Q8_0", "output": "Q6_K"},
    ),
    "qwen3moe with a dense layer, biases and one matrix of words": Kind(
        "qwen3moe", "Qwen3Moe",
        {
            "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "intermediate_size": 128, "mlp_only_layers": [0], "attention_bias": True,
            "tie_word_embeddings": True,
        },
        qwen3moe_keys, plain_layer, _Q8 | {"ffn_down": "F16", "token_embd": "Q4_0"},
    ),
    "qwen2moe": Kind(
        "qwen2moe", "Qwen2Moe",
        {
            "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "num_experts": 6,
            "num_experts_per_tok": 3, "intermediate_size": 128,
        },
        lambda config: common_keys(config) | expert_keys(6, 64), qwen2moe_layer,
        _Q8 | {"ffn_gate_shexp": "Q8_0", "ffn_down_shexp": "Q8_0"},
    ),
    "qwen35moe": Kind(
        "qwen35moe", "Qwen3_5Moe",
        {
            "head_dim": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "num_experts": 8,
            "num_experts_per_tok": 3, "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
            "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3, "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2],
            },
        },
        qwen35moe_keys, qwen35moe_layer, _Q8 | {"attn_qkv": "Q8_0", "ssm_out": "Q8_0"},
    ),
    "llama": Kind(
        "llama", "Mixtral",
        {"head_dim": 32, "intermediate_size": 128, "num_local_experts": 6, "num_experts_per_tok": 3},
        lambda config: common_keys(config) | {
            "expert_count": 6, "rope.dimension_count": 32, "feed_forward_length": 128, "vocab_size": VOCABULARY,
            "attention.key_length": 32, "attention.value_length": 32,
        },
        rotated_layer, _Q8,
    ),
    "olmoe": Kind(
        "olmoe", "Olmoe", {"intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 1.5},
        lambda config: common_keys(config) | {
            "expert_count": 8, "feed_forward_length": 64, "attention.clamp_kqv": 1.5,
        },
        plain_layer,
        _Q8 | {"ffn_up_exps": "F16"},
    ),
    "granitemoe": Kind(
        "granitemoe", "GraniteMoe",
        {
            "intermediate_size": 64, "num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 1.5,
            "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0,
        },
        lambda config: granite_keys(config), granitemoe_layer, _Q8,
    ),
    "granitemoe with a shared expert": Kind(
        "granitemoe", "GraniteMoeShared",
        {
            "intermediate_size": 64, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 96,
            "embedding_multiplier": 1.5, "attention_multiplier": 0.2, "residual_multiplier": 0.7,
            "attention_bias": True,
        },
        lambda config: granite_keys(config), granitemoe_layer, _Q8,
    ),
    "gpt-oss": Kind(
        "gpt-oss", "GptOss",
        {
            "head_dim": 32, "intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 3,
            "sliding_window": 8, "rope_parameters": _YARN | {"truncate": False},
        },
        lambda config: common_keys(config) | expert_keys(8, 64) | {
            "attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 8,
            "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
        },
        gpt_oss_layer,
        dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4") | {"attn_q": "Q8_0"},
    ),
    "deepseek2 with softmax": Kind(
        "deepseek2", "DeepseekV2", _COMPRESSED | {
            "q_lora_rank": None, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2,
            "topk_method": "group_limited_greedy",
        },
        deepseek2_keys, deepseek2_layer, _Q8 | {"ffn_down_shexp": "Q8_0"},
    ),
    "deepseek2 with sigmoids": Kind(
        "deepseek2", "DeepseekV3", _COMPRESSED | {
            "q_lora_rank": 64, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": False,
        },
        deepseek2_keys, deepseek2_layer, _Q8 | {"attn_v_b": "Q8_0"},
    ),
    "deepseek2 with keys and values in one matrix": Kind(
        "deepseek2", "DeepseekV3", _COMPRESSED | {
            "q_lora_rank": None, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
        },
        deepseek2_keys, deepseek2_whole_layer, _Q8,
    ),
    "gemma4": Kind(
        "gemma4", "Gemma4",
        {
            "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8, "top_k_experts": 3,
            "enable_moe_block": True, "sliding_window": 8, "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
                "full_attention": {"rope_type": "proportional", "rope_theta": 3e3, "partial_rotary_factor": 0.5},
            },
            "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY,
            "final_logit_softcapping": 30.0,
        },
        gemma4_keys, gemma4_layer,
        {"ffn_gate_up_exps": "Q4_0", "ffn_down_exps": "Q8_0", "token_embd": "Q8_0", "per_layer_token_embd": "Q8_0"},
        outside={
            "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
            "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
            "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
        },
        extra={"rope_freqs.weight": torch.tensor([1.0] * 16 + [1e30] * 16)},
    ),
}  # fmt: skip


def granite_keys(config: Any) -> dict[str, Any]:
    return common_keys(config) | {
        "expert_count": 6, "feed_forward_length": 64, "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier, "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }  # fmt: skip


_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def numbers_of(kind: Kind, model: Any) -> dict[str, Tensor]:
    """llama.cpp's names and numbers."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is not None:
            found |= {f"blk.{match[1]}.{to}": part for to, part in kind.layer(model.config, match[2], value)}
        elif name != "lm_head.weight" or not model.config.tie_word_embeddings:
            shift = 1 if name == "model.norm.weight" and kind.architecture == "qwen35moe" else 0
            found[(_OUTSIDE | kind.outside)[name]] = value + shift
    return {name: value.detach().contiguous() for name, value in found.items()} | kind.extra


def dense_format(name: str, columns: int) -> str | None:
    """The format of a matrix in a file that has all of them in blocks: any that its rows fit, by its name."""
    fitting = [form.name for form in FORMATS.values() if form.ggml >= 0 and columns % form.values == 0]
    if not fitting or "ffn_gate_inp" in name:
        return None
    return fitting[zlib.crc32(name.replace("ffn_up", "ffn_gate").encode()) % len(fitting)]


def stored(kind: Kind, name: str, value: Tensor, in_blocks: bool = False) -> Tensor | QuantTensor:
    """A tensor in the format that this kind of file has for it; ``in_blocks``: in blocks, if it can be."""
    form = kind.formats.get(name.split(".")[2 if name.startswith("blk.") else 0])
    if in_blocks and value.dim() > 1 and "_exps" not in name:
        form = dense_format(name, value.shape[-1])
    if form is None or value.dim() < 2:
        return value.clone()
    if form == "F16":
        return value.half()
    if form not in ENCODE:
        rng = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        return random_blocks(form, tuple(value.shape), rng, float(value.square().mean().sqrt()))
    return quantize(value, form)


@torch.no_grad()
def make(kind: Kind, path: Path, mute: list[int] | None = None, in_blocks: bool = False) -> PreTrainedModel:
    """Write a file of a fresh model, and return the model with the numbers that the file holds.

    Tokens in ``mute`` get logits of zero, which are never the largest. ``in_blocks``: every matrix is in blocks.
    """
    model = kind.tiny()
    if mute is not None:
        model.lm_head.weight[mute] = 0
    metadata = {"general.architecture": kind.architecture} | tokenizer_keys()
    metadata |= {f"{kind.architecture}.{key}": value for key, value in kind.keys(model.config).items()}
    tensors = {name: stored(kind, name, value, in_blocks) for name, value in numbers_of(kind, model).items()}
    write(path, metadata, tensors)
    # Where each element went is found by sending the elements' numbers the same way.
    for name, value in model.state_dict().items():
        places = torch.arange(value.numel(), dtype=torch.float64).view(value.shape)
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        parts = (
            {f"blk.{match[1]}.{to}": part for to, part in kind.layer(model.config, match[2], places)}
            if match
            else {(_OUTSIDE | kind.outside)[name]: places}
        )
        for to, part in parts.items():
            rounded = tensors.get(to)
            if isinstance(rounded, QuantTensor) or (rounded is not None and rounded.dtype == torch.float16):
                numbers = rounded.dequantize() if isinstance(rounded, QuantTensor) else rounded.float()
                value.view(-1)[part.flatten().long()] = numbers.flatten()
    return model
