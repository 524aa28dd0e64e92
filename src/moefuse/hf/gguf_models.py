"""GGUF architectures as transformers models: the configuration from the metadata, and which tensor is which parameter.

llama.cpp names tensors in its own way and turns some of them over when it converts a model; this is the way back. Sizes
are read off the tensors where they can be. An architecture is a row in `ARCHITECTURES`, with a test. What its
router and experts compute is its row in `moefuse.nn.from_gguf.FAMILIES`, which knows more and needs no transformers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moefuse.nn.from_gguf import expert_layers, read_rule
from moefuse.quant.gguf import GGUFFile, brief
from moefuse.types import Routing

_NEEDED: Any = object()
# Far above any model's; below what would hurt where modules and small vectors are made from it.
_MAX_LAYERS, _MAX_SIZE, _MAX_CONTEXT = 512, 2**20, 2**31
#: tokens that end an answer, which a file need not name
_ENDS = frozenset(
    (
        "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>",
        "<|return|>", "<|call|>",
    )
)  # fmt: skip


class Keys:
    """A file's metadata under its architecture's name, and the sizes of its tensors."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.expert_layers = expert_layers(file)
        self.rule: Routing = read_rule(file, self.expert_layers[0])
        self.layers = self.size("block_count", most=2**32) - self.size("nextn_predict_layers", 0, least=0)
        stored = {match[1] for match in map(re.compile(r"blk\.(\d+)\.").match, file) if match}
        if not 0 < self.layers <= min(len(stored), _MAX_LAYERS):
            rule = f"that of the tensors, {len(stored)}, and at most {_MAX_LAYERS}"
            raise ValueError(f"from_gguf: block_count must be {rule}, got {self.layers}")

    def __call__(self, name: str, default: Any = _NEEDED) -> Any:
        """The value of a key as it stands; an array, which has one for each layer at most, as a list."""
        key = f"{self.file.architecture}.{name}"
        value = self.file.metadata.get(key, default)
        if value is _NEEDED:
            raise ValueError(f"from_gguf: the file must give {key}, got none")
        if isinstance(value, (np.ndarray, list)) and not 0 < len(value) <= 2 * _MAX_LAYERS:
            raise ValueError(f"from_gguf: {key} must have one value for each layer at most, got {len(value)}")
        return value.tolist() if isinstance(value, np.ndarray) else value

    def size(self, name: str, default: Any = _NEEDED, least: int = 1, most: int = _MAX_SIZE) -> Any:
        """A whole number within limits, or the default."""
        value = self(name, default)
        if value is not default and (type(value) is not int or not least <= value <= most):
            raise ValueError(f"from_gguf: {name} must be a whole number from {least} to {most}, got {brief(value)}")
        return value

    def sizes(self, name: str, default: Any = _NEEDED) -> Any:
        """As `size`, or one for each layer where they differ."""
        value = self(name, default)
        if not isinstance(value, list):
            return self.size(name, default)
        if not all(type(one) is int and 0 < one <= _MAX_SIZE for one in value):
            raise ValueError(f"from_gguf: {name} must be whole numbers from 1 to {_MAX_SIZE}, got {brief(value)}")
        return value[0] if len(set(value)) == 1 else value

    def number(self, name: str, default: Any = _NEEDED, positive: bool = False) -> Any:
        """A finite number, or the default."""
        value = self(name, default)
        if value is not default and (
            type(value) not in (int, float) or not math.isfinite(value) or (positive and value <= 0)
        ):
            rule = "a positive number" if positive else "a finite number"
            raise ValueError(f"from_gguf: {name} must be {rule}, got {brief(value)}")
        return value

    def width(self, ending: str, dim: int = -1) -> int | None:
        """The size of the first layer's tensor of this name, None where no layer has one."""
        for layer in range(self.layers):
            info = self.file.infos.get(f"blk.{layer}.{ending}")
            if info is not None:
                return info.shape[dim]
        return None

    def has(self, ending: str) -> bool:
        return self.width(ending) is not None

    def token(self, name: str) -> int | None:
        """The number of a token; None where the file has none, or one that is not in the vocabulary."""
        number = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        words = self.file.metadata.get("tokenizer.ggml.tokens", ())
        return number if type(number) is int and 0 <= number < len(words) else None


@dataclass(frozen=True)
class Made:
    """A parameter made from these tensors of its layer, given as ``function(keys, *tensors)``.

    A function that does no more than move whole rows (``by_rows``) may be given rows of blocks; one that moves
    ``columns``, so many at a time, where these fill whole blocks.
    """

    names: tuple[str, ...]
    function: Callable[..., Tensor]
    by_rows: bool = False
    columns: Callable[[Keys], int] | None = None

    def takes_blocks(self, keys: Keys, values: int) -> bool:
        """Whether it may be given blocks of so many values in the place of numbers."""
        return self.by_rows or (self.columns is not None and self.columns(keys) % values == 0)


#: what a parameter is made from; of several the first that the file has
Source = str | Made | tuple[str | Made, ...]


@dataclass(frozen=True)
class Architecture:
    """One kind of file.

    Attributes:
        config: the configuration's fields, ``model_type`` among them.
        tensors: parameter -> source, for those outside the layers by their whole name, for the others within the layer.
        unused: names of tensors that the model has no use for, as an expression.
    """

    config: Callable[[Keys], dict[str, Any]]
    tensors: Mapping[str, Source]
    unused: str = "(?!)"

    def source(self, parameter: str) -> tuple[Made, ...]:
        """Ways to make a parameter, with the names that its tensors have in the file."""
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", parameter)
        prefix, found = (f"blk.{match[1]}.", self.tensors.get(match[2])) if match else ("", self.tensors.get(parameter))
        ways = found if isinstance(found, tuple) else () if found is None else (found,)
        made = (Made((way,), _as_it_is, by_rows=True) if isinstance(way, str) else way for way in ways)
        return tuple(replace(way, names=tuple(prefix + name for name in way.names)) for way in made)


def _as_it_is(_: Keys, tensor: Tensor) -> Tensor:
    return tensor


def _rope(keys: Keys) -> dict[str, Any]:
    """The rotary embedding; a kind that is not carried over is refused."""
    kind = keys("rope.scaling.type", "none")
    rope = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", 10000.0, positive=True)}
    if "rope_freqs.weight" in keys.file and keys.file.architecture != "gemma4":
        raise ValueError(
            "from_gguf: rotary frequencies must follow from the metadata, got the tensor rope_freqs.weight"
        )
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ValueError(f"from_gguf: rope.scaling.type must be none, linear or yarn, got {brief(kind)}")
    rope |= {"rope_type": kind, "factor": keys.number("rope.scaling.factor", positive=True)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length", most=_MAX_CONTEXT)
        for name in ("beta_fast", "beta_slow"):
            found = keys.number(f"rope.scaling.yarn_{name}", None, positive=True)
            if found is not None:
                rope[name] = found
    return rope


def _common(keys: Keys) -> dict[str, Any]:
    ends = [keys.token(name) for name in ("eos", "eot", "eom")]
    ends += [i for i, token in enumerate(keys.file.metadata.get("tokenizer.ggml.tokens", ())) if token in _ENDS]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    heads = keys.sizes("attention.head_count")
    words, hidden = keys.file.infos.get("token_embd.weight"), keys.size("embedding_length")
    if words is None or words.shape[1:] != (hidden,):
        got = "none" if words is None else list(words.shape)
        raise ValueError(f"from_gguf: the file must have token_embd.weight [words, {hidden}], got {got}")
    return {
        "vocab_size": words.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.sizes("attention.head_count_kv", heads),
        "max_position_embeddings": keys.size("context_length", most=_MAX_CONTEXT),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(keys),
        # llama.cpp leaves the output matrix out where it is the embedding's.
        "tie_word_embeddings": "output.weight" not in keys.file,
        "bos_token_id": keys.token("bos"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": keys.token("padding"),
        "num_experts_per_tok": keys.rule.top_k,
    }


def _head_dim(keys: Keys) -> int:
    given = keys.size("attention.key_length", None)
    return int(keys.size("embedding_length") // keys.sizes("attention.head_count") if given is None else given)


def _refuse_other_rules(keys: Keys, **known: Any) -> None:
    """The model's router has no more to set than these; what the file says beside them would be lost."""
    fixed = {"score": "softmax", "scale": 1.0, "groups": 1} | known
    for name, want in fixed.items():
        got = getattr(keys.rule, name)
        if got != want:
            raise ValueError(f"from_gguf: a router of {keys.file.architecture} must have {name} {want}, got {got}")


_OUTSIDE: dict[str, Source] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_NORMS: dict[str, Source] = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_PARTS = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
_ATTENTION: dict[str, Source] = {
    **{
        f"self_attn.{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in _PARTS.items() for kind in ("weight", "bias")
    },
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}


def _mlp(module: str, ending: str = "") -> dict[str, Source]:
    """A gated MLP; ``ending`` tells the shared expert's tensors from a dense layer's."""
    return {f"{module}.{part}_proj.weight": f"ffn_{part}{ending}.weight" for part in ("gate", "up", "down")}


_PLAIN = _OUTSIDE | _NORMS | _ATTENTION | _mlp("mlp")
_GATE: dict[str, Source] = {"mlp.gate.weight": "ffn_gate_inp.weight"}


def _dense_layers(keys: Keys) -> list[int]:
    return [layer for layer in range(keys.layers) if layer not in keys.expert_layers]


def _qwen3moe(keys: Keys) -> dict[str, Any]:
    _refuse_other_rules(keys)
    dense = keys.width("ffn_down.weight")
    return (
        _common(keys)
        | {
            "model_type": "qwen3_moe",
            "head_dim": _head_dim(keys),
            "moe_intermediate_size": keys.width("ffn_down_exps.weight"),
            "num_experts": keys.width("ffn_gate_inp.weight", 0),
            "norm_topk_prob": keys.rule.renormalize,
            "mlp_only_layers": _dense_layers(keys),
            "attention_bias": keys.has("attn_q.bias"),
        }
        | ({} if dense is None else {"intermediate_size": dense})
    )


def _qwen2moe(keys: Keys) -> dict[str, Any]:
    _refuse_other_rules(keys)
    return _common(keys) | {
        "model_type": "qwen2_moe",
        "intermediate_size": keys.width("ffn_down.weight") or keys.width("ffn_down_shexp.weight"),
        "moe_intermediate_size": keys.width("ffn_down_exps.weight"),
        "shared_expert_intermediate_size": keys.width("ffn_down_shexp.weight"),
        "num_experts": keys.width("ffn_gate_inp.weight", 0),
        "norm_topk_prob": keys.rule.renormalize,
        "mlp_only_layers": _dense_layers(keys),
        "qkv_bias": keys.has("attn_q.bias"),
    }


def _mixtral(keys: Keys) -> dict[str, Any]:
    _refuse_other_rules(keys, renormalize=True)
    return _common(keys) | {
        "model_type": "mixtral",
        "head_dim": _head_dim(keys),
        "intermediate_size": keys.width("ffn_down_exps.weight"),
        "num_local_experts": keys.width("ffn_gate_inp.weight", 0),
    }


def _olmoe(keys: Keys) -> dict[str, Any]:
    _refuse_other_rules(keys)
    return _common(keys) | {
        "model_type": "olmoe",
        "intermediate_size": keys.width("ffn_down_exps.weight"),
        "num_experts": keys.width("ffn_gate_inp.weight", 0),
        "norm_topk_prob": keys.rule.renormalize,
        "clip_qkv": keys.number("attention.clamp_kqv", None),
    }


def _granitemoe(keys: Keys) -> dict[str, Any]:
    _refuse_other_rules(keys, renormalize=True)
    shared = keys.width("ffn_down_shexp.weight")
    # Zero is how a file says "none".
    return (
        _common(keys)
        | {
            "model_type": "granitemoe" if shared is None else "granitemoeshared",
            "intermediate_size": keys.width("ffn_down_exps.weight"),
            "num_local_experts": keys.width("ffn_gate_inp.weight", 0),
            "attention_bias": keys.has("attn_q.bias"),
            "attention_multiplier": keys.number("attention.scale", 0) or _head_dim(keys) ** -0.5,
            "embedding_multiplier": keys.number("embedding_scale", 0) or 1.0,
            "residual_multiplier": keys.number("residual_scale", 0) or 1.0,
            "logits_scaling": keys.number("logit_scale", 0) or 1.0,
        }
        | ({} if shared is None else {"shared_intermediate_size": shared})
    )


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    _refuse_other_rules(keys, renormalize=True)
    rope = _rope(keys)
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False  # as the model was trained; the file does not say
    return _common(keys) | {
        "model_type": "gpt_oss",
        "head_dim": _head_dim(keys),
        "intermediate_size": keys.width("ffn_down_exps.weight"),
        "num_local_experts": keys.width("ffn_gate_inp.weight", 0),
        "sliding_window": keys.size("attention.sliding_window", most=_MAX_CONTEXT),
        "rope_parameters": rope,
    }


def _deepseek2(keys: Keys) -> dict[str, Any]:
    """DeepSeek V2 where routers take a softmax, V3 (and Kimi K2) where they take sigmoids."""
    sigmoid = keys.rule.score == "sigmoid"
    if not sigmoid:
        _refuse_other_rules(keys, scale=keys.rule.scale, groups=keys.rule.groups, renormalize=False)
    rotated = keys.size("rope.dimension_count")
    # Files from before the compressed cache give the sizes of a head without the ending.
    head = keys.size("attention.key_length_mla", None) or keys.size("attention.key_length")
    value = keys.size("attention.value_length_mla", None) or keys.size("attention.value_length")
    if head <= rotated:
        raise ValueError(f"from_gguf: key_length must be above rope.dimension_count={rotated}, got {head}")
    rope = _rope(keys)
    scale = keys.number("rope.scaling.yarn_log_multiplier", None)
    if rope["rope_type"] == "yarn" and scale:
        rope |= {"mscale": 10 * scale, "mscale_all_dim": 10 * scale}
    groups = {"n_group": keys.rule.groups, "topk_group": keys.rule.top_groups}
    method = {} if sigmoid else {"topk_method": "group_limited_greedy" if keys.rule.groups > 1 else "greedy"}
    return _common(keys) | method | groups | {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": keys.sizes("attention.head_count"),
        "q_lora_rank": keys.size("attention.q_lora_rank", None),
        "kv_lora_rank": keys.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": head - rotated,
        "v_head_dim": value,
        "rope_parameters": rope,
        "first_k_dense_replace": keys.size("leading_dense_block_count", 0, least=0),
        "intermediate_size": keys.width("ffn_down.weight") or keys.width("ffn_down_exps.weight"),
        "moe_intermediate_size": keys.width("ffn_down_exps.weight"),
        "n_routed_experts": keys.width("ffn_gate_inp.weight", 0),
        "n_shared_experts": keys.size("expert_shared_count", least=0),
        "routed_scaling_factor": keys.rule.scale,
        "norm_topk_prob": keys.rule.renormalize,
    }  # fmt: skip


def _gemma4(keys: Keys) -> dict[str, Any]:
    _refuse_other_rules(keys, renormalize=True)
    pattern = keys("attention.sliding_window_pattern")
    sliding = [bool(flag) for flag in pattern][: keys.layers] if isinstance(pattern, list) else []
    kv_heads = keys.sizes("attention.head_count_kv")
    per_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * keys.layers
    if len(sliding) < keys.layers or all(sliding) or len(per_layer) < keys.layers:
        rule = f"name each of {keys.layers} layers, some of them without a window"
        raise ValueError(f"from_gguf: attention.sliding_window_pattern and head_count_kv must {rule}")
    whole = sliding.index(False)
    frequencies: Any = keys.file.get("rope_freqs.weight")
    # Dimensions that are not rotated have a frequency that is divided by a huge number.
    rotated = 0.25 if frequencies is None else float((frequencies == 1).float().mean())
    widths = {keys.file.infos[f"blk.{layer}.ffn_down.weight"].shape[-1] for layer in range(keys.layers)}
    vocabulary = keys.file.infos.get("per_layer_token_embd.weight")
    common = _common(keys)
    return common | {
        "model_type": "gemma4_text",
        "num_key_value_heads": per_layer[sliding.index(True)] if True in sliding else per_layer[whole],
        "num_global_key_value_heads": per_layer[whole],
        "head_dim": keys.size("attention.key_length_swa"),
        "global_head_dim": keys.size("attention.key_length"),
        "layer_types": ["sliding_attention" if flag else "full_attention" for flag in sliding],
        "sliding_window": keys.size("attention.sliding_window", most=_MAX_CONTEXT),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0, positive=True),
            },
            "full_attention": {
                "rope_type": "proportional", "rope_theta": keys.number("rope.freq_base", positive=True),
                "partial_rotary_factor": rotated,
            },
        },
        "final_logit_softcapping": keys.number("final_logit_softcapping", None, positive=True),
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in keys.file,
        "num_kv_shared_layers": keys.size("attention.shared_kv_layers", 0, least=0),
        "hidden_size_per_layer_input": keys.size("embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": common["vocab_size"] if vocabulary is None else vocabulary.shape[0],
        "intermediate_size": min(widths),
        "use_double_wide_mlp": len(widths) > 1,
        "enable_moe_block": True,
        "num_experts": keys.width("ffn_gate_inp.weight", 0),
        "top_k_experts": keys.rule.top_k,
        "moe_intermediate_size": keys.width("ffn_down_exps.weight"),
    }  # fmt: skip


def _qwen35moe(keys: Keys) -> dict[str, Any]:
    _refuse_other_rules(keys, renormalize=True)
    head, sections = _head_dim(keys), keys("rope.dimension_sections", [11, 11, 10])
    if not isinstance(sections, list) or not all(type(one) is int and 0 <= one <= head for one in sections):
        raise ValueError(f"from_gguf: rope.dimension_sections must be sizes within a head, got {brief(sections)}")
    kinds = ("linear_attention", "full_attention")
    return _common(keys) | {
        "model_type": "qwen3_5_moe_text",
        "head_dim": head,
        "layer_types": [kinds[f"blk.{layer}.attn_q.weight" in keys.file] for layer in range(keys.layers)],
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel"),
        "linear_key_head_dim": keys.size("ssm.state_size"),
        "linear_num_key_heads": keys.size("ssm.group_count"),
        "linear_num_value_heads": keys.size("ssm.time_step_rank"),
        "linear_value_head_dim": _value_size(keys),
        "rope_parameters": _rope(keys) | {
            "mrope_section": [size for size in sections if size],
            "mrope_interleaved": True,
            "partial_rotary_factor": keys.size("rope.dimension_count", most=head) / head,
        },
        "moe_intermediate_size": keys.width("ffn_down_exps.weight"),
        "shared_expert_intermediate_size": keys.width("ffn_down_shexp.weight"),
        "num_experts": keys.width("ffn_gate_inp.weight", 0),
    }  # fmt: skip


def _unpermuted(heads: str) -> Callable[[Keys, Tensor], Tensor]:
    """llama.cpp pairs the dimensions that rotate together as neighbours; transformers has the halves of a head."""

    def function(keys: Keys, rows: Tensor) -> Tensor:
        count = keys.sizes(heads, keys.sizes("attention.head_count"))
        return rows.view(count, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    return function


_ROTATED: dict[str, Source] = {
    f"self_attn.{ours}.{kind}": Made((f"{theirs}.{kind}",), _unpermuted(heads), by_rows=True)
    for ours, theirs, heads in (
        ("q_proj", "attn_q", "attention.head_count"),
        ("k_proj", "attn_k", "attention.head_count_kv"),
    )
    for kind in ("weight", "bias")
}


def _compressed(_: Keys, k: Tensor, v: Tensor) -> Tensor:
    """Keys ``[heads, rank, size]`` and values ``[heads, size, rank]`` as one product."""
    return torch.cat((k.transpose(1, 2), v), 1).flatten(0, 1)


def _as_row(_: Keys, vector: Tensor) -> Tensor:
    return vector.reshape(1, -1)


def _less_one(_: Keys, weight: Tensor) -> Tensor:
    return weight - 1


def _grouped(keys: Keys, rows: Tensor, size: int = 1) -> Tensor:
    """Value heads of linear attention, which llama.cpp deals out to the key heads in turn, by key head again."""
    by_turn = rows.view(-1, keys.size("ssm.group_count"), size, *rows.shape[1:])
    return by_turn.transpose(0, 1).reshape(rows.shape)


def _value_size(keys: Keys) -> int:
    return int(keys.size("ssm.inner_size") // keys.size("ssm.time_step_rank"))


def _grouped_values(keys: Keys, rows: Tensor) -> Tensor:
    return _grouped(keys, rows, _value_size(keys))


def _grouped_columns(keys: Keys, rows: Tensor) -> Tensor:
    """As `_grouped_values`, along the columns."""
    groups, heads = keys.size("ssm.group_count"), keys.size("ssm.time_step_rank")
    by_turn = rows.view(rows.shape[0], -1, groups, rows.shape[1] // heads)
    return by_turn.transpose(1, 2).reshape(rows.shape)


def _grouped_tail(keys: Keys, rows: Tensor) -> Tensor:
    """As `_grouped_values`, behind the rows of queries and keys."""
    head = 2 * keys.size("ssm.state_size") * keys.size("ssm.group_count")
    return torch.cat((rows[:head], _grouped_values(keys, rows[head:])))


_LINEAR_ATTENTION: dict[str, Source] = {
    "linear_attn.in_proj_qkv.weight": Made(("attn_qkv.weight",), _grouped_tail, by_rows=True),
    "linear_attn.in_proj_z.weight": Made(("attn_gate.weight",), _grouped_values, by_rows=True),
    "linear_attn.in_proj_a.weight": Made(("ssm_alpha.weight",), _grouped, by_rows=True),
    "linear_attn.in_proj_b.weight": Made(("ssm_beta.weight",), _grouped, by_rows=True),
    "linear_attn.conv1d.weight": Made(("ssm_conv1d.weight",), lambda keys, t: _grouped_tail(keys, t).unsqueeze(1)),
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": Made(("ssm_out.weight",), _grouped_columns, columns=_value_size),
    "linear_attn.A_log": Made(("ssm_a",), lambda keys, t: _grouped(keys, (-t).log())),
    "linear_attn.dt_bias": Made(("ssm_dt.bias",), _grouped),
}
_OFFSET_NORMS: dict[str, Source] = {
    name: Made((stored,), _less_one)
    for name, stored in {
        "model.norm.weight": "output_norm.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
    }.items()
}
_SHARED_GATE: dict[str, Source] = {
    "mlp.shared_expert_gate.weight": Made(("ffn_gate_inp_shexp.weight",), _as_row),
    **_mlp("mlp.shared_expert", "_shexp"),
}
_GRANITE: dict[str, Source] = {
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "shared_mlp.input_linear.weight": Made(
        ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), lambda _, gate, up: torch.cat((gate, up)), by_rows=True
    ),
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
}
_GPT_OSS: dict[str, Source] = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
}
_COMPRESSED_ATTENTION: dict[str, Source] = {
    "self_attn.q_a_proj.weight": "attn_q_a.weight",
    "self_attn.q_a_layernorm.weight": "attn_q_a_norm.weight",
    "self_attn.q_b_proj.weight": "attn_q_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight",
    "self_attn.kv_a_layernorm.weight": "attn_kv_a_norm.weight",
    "self_attn.kv_b_proj.weight": ("attn_kv_b.weight", Made(("attn_k_b.weight", "attn_v_b.weight"), _compressed)),
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **_mlp("mlp.shared_experts", "_shexp"),
}
_GEMMA4: dict[str, Source] = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
    "pre_feedforward_layernorm_2.weight": "pre_ffw_norm_2.weight",
    "post_feedforward_layernorm_2.weight": "post_ffw_norm_2.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "per_layer_projection.weight": "proj.weight",
    "post_per_layer_input_norm.weight": "post_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}

ARCHITECTURES: dict[str, Architecture] = {
    "qwen3moe": Architecture(_qwen3moe, _PLAIN | _GATE),
    "qwen2moe": Architecture(_qwen2moe, _PLAIN | _GATE | _SHARED_GATE),
    "qwen35moe": Architecture(_qwen35moe, _PLAIN | _GATE | _SHARED_GATE | _OFFSET_NORMS | _LINEAR_ATTENTION),
    "llama": Architecture(_mixtral, _PLAIN | _GATE | _ROTATED),
    "olmoe": Architecture(_olmoe, _PLAIN | _GATE),
    "granitemoe": Architecture(_granitemoe, _PLAIN | _GRANITE | _ROTATED),
    "gpt-oss": Architecture(_gpt_oss, _PLAIN | _GPT_OSS),
    # For a while the converter wrote the product and its halves.
    "deepseek2": Architecture(_deepseek2, _PLAIN | _GATE | _COMPRESSED_ATTENTION, r"blk\.\d+\.attn_[kv]_b\.weight"),
    "gemma4": Architecture(_gemma4, _PLAIN | _GEMMA4, r"rope_freqs\.weight"),
}
