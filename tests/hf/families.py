"""Every family on transformers' experts interface, found in transformers itself, and a tiny model of each.

`python tests/hf/families.py` prints the table of docs/huggingface.md.
"""

import ast
import copy
import functools
import importlib
import inspect
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import moefuse.hf
from moefuse.hf.experts import known_activation
from moefuse.hf.support import on_interface

MODELS = Path(transformers.__file__).parent / "models"

#: sizes by attribute name; a configuration takes those it has
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 128,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "expert_intermediate_size": 24,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 3, "moe_topk": 3, "moe_k": 3, "top_k_experts": 3,
    "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "num_shared_experts": 1,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "qk_head_dim": 24, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "first_k_dense_replace": 1,
}  # fmt: skip

#: what a family needs beside the sizes
_MLA = {"head_dim": 8, "num_key_value_heads": 4}  # the rotary size; every head has its own keys
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
CHANGES: dict[str, dict[str, object]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "mistral4"), _MLA
    ),
    "bailing_hybrid": _MLA | _LINEAR,
    "beam": _SPARSE,
    "deepseek_ocr2": _SPARSE,
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [24, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
    },
    "flint": {"num_hidden_layers": 3},
    "gemma4": {"enable_moe_block": True, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 16},
    "glm4v_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
    "glm5_next": _SPARSE | _LINEAR | {"num_key_value_heads": 4, "qk_rope_head_dim": 0, "head_dim": 0},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
    },
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": _MLA | _LINEAR,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "mistral_large4": _MLA | {"index_head_dim": 16, "index_n_heads": 2},
    "muse_spark": {"moe_hidden_size": 32},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "moe_shared_expert_intermediate_size": 40,
    },
    "qwen3_5_moe": _LINEAR,
    "qwen3_next": _LINEAR,
    "qwen4_exp": _LINEAR | {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


@functools.cache
def families() -> dict[str, tuple[str, ...]]:
    """Model directory -> its experts classes, for every directory that uses the decorator."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        source = path.read_text()
        if "use_experts_implementation" not in source:
            continue
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        experts = [
            node.name
            for node in classes
            if any("use_experts_implementation" in ast.unparse(mark) for mark in node.decorator_list)
        ]
        found[path.parent.name] = tuple(experts)
    return found


def _model_classes(family: str) -> Iterator[type[PreTrainedModel]]:
    """The family's language models, the plainest first."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, PreTrainedModel) and value.__module__ == module.__name__
        and "PreTrained" not in value.__name__ and value.config_class is not None
    ]  # fmt: skip
    order = ("ForCausalLM", "TextModel", "ForConditionalGeneration", "Model")
    for ending in order:
        yield from (
            value for value in classes if value.__name__.endswith(ending) and "PreTrained" not in value.__name__
        )


def _config_class(model_class: type[PreTrainedModel]) -> type[PreTrainedConfig]:
    """What the constructor says it takes, which for a text model may differ from what its base class says."""
    named = inspect.get_annotations(model_class.__init__, eval_str=True).get("config")
    return named if inspect.isclass(named) else model_class.config_class


def tiny_config(config_class: type[PreTrainedConfig], changes: dict[str, object]) -> PreTrainedConfig:
    known = vars(config_class())
    accepted = inspect.signature(config_class.__init__).parameters
    names = set(known) | set(accepted) | set(getattr(config_class, "__annotations__", ()))
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", ()))
    return config_class(**{name: value for name, value in (SIZES | changes).items() if name in names})


def scale_by_fan_in(model: nn.Module) -> None:
    """Weights of realistic size: the stock initialisation is so small that experts returning zeros would pass."""
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            with torch.no_grad():
                if value.dim() < 2:
                    if "scale" in name or ("norm" in type(module).__name__.lower() and name == "weight"):
                        continue
                    value.copy_(0.1 * torch.randn(value.shape))
                elif isinstance(module, nn.Embedding):
                    value.normal_()
                else:
                    stacked = value.dim() == 3 and hasattr(module, "is_transposed")
                    fan_in = value.shape[1 if module.is_transposed else 2] if stacked else value[0].numel()
                    value.normal_(std=1 / math.sqrt(fan_in))
        for name, value in module.named_buffers(recurse=False):
            if "bias" in name and value.is_floating_point():
                value.copy_(0.1 * torch.randn(value.shape))


def tiny_model(family: str, **sizes: object) -> PreTrainedModel:
    """``sizes`` are put before those of all."""
    experts = families()[family]
    reasons = []
    for model_class in _model_classes(family):
        try:
            config = tiny_config(_config_class(model_class), sizes | CHANGES.get(family, {}))
            with torch.device("meta"):
                size = sum(value.numel() for value in model_class(copy.deepcopy(config)).parameters())
            if size > 3_000_000:
                reasons.append(f"{model_class.__name__}: {size:,} parameters")
                continue
            model = model_class(config)
        except Exception as error:
            reasons.append(f"{model_class.__name__}: {type(error).__name__}: {error}"[:300])
            continue
        if any(type(module).__name__ in experts for module in model.modules()):
            scale_by_fan_in(model)
            return model.eval()
        reasons.append(f"{model_class.__name__}: no experts")
    raise RuntimeError("; ".join(reasons))


def same_tensors(got: nn.Module, want: nn.Module) -> bool:
    """Bit for bit. Logits need not be: bits of torch's products depend on where a tensor lies, as in a mapped file."""
    first, second = got.state_dict(), want.state_dict()
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


HEADER = "| family | experts | weights | activation | patch |\n|---|---|---|---|---|"


def table_row(family: str, model: PreTrainedModel, report: moefuse.hf.PatchReport) -> str:
    """What the table of docs/huggingface.md says of a family."""
    module = next(module for _, module in on_interface(model))
    traits = {
        "transposed": module.is_transposed,
        "interleaved": not module.is_concatenated,
        "biases": module.has_bias,
        "ungated": not module.has_gate,
        "normed": getattr(module, "has_post_expert_norm", False),
    }
    activation = known_activation(module)
    block = (
        "whole" if report.patched else next(iter(report.left_alone.values())).split(": ", 1)[1].split(", such as")[0]
    )
    weights = ", ".join(name for name, has in traits.items() if has) or "plain"
    kind = "its own" if activation is None else activation.kind
    return f"| {family} | {', '.join(families()[family])} | {weights} | {kind} | {block} |"


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    print(HEADER)
    for family in families():
        model = tiny_model(family)
        print(table_row(family, model, moefuse.hf.patch(model)))


if __name__ == "__main__":
    main()
