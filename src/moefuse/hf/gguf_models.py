"""GGUF architectures as transformers models: the configuration from the metadata, and which tensor is which parameter.

llama.cpp names tensors in its own way and turns some of them over when it converts a model; this is the way back. Sizes
are read off the tensors where they can be. An architecture is a row in `ARCHITECTURES`, with a test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from moefuse.nn.from_gguf import expert_layers, read_rule
from moefuse.quant.gguf import GGUFFile
from moefuse.types import Routing

_NEEDED = object()


class Keys:
    """A file's metadata under its architecture's name, and the sizes of its tensors."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.expert_layers = expert_layers(file)
        self.rule: Routing = read_rule(file, self.expert_layers[0])
        self.layers: int = self("block_count") - self("nextn_predict_layers", 0)

    def __call__(self, name: str, default: Any = _NEEDED) -> Any:
        """The value of a key; an array as a list."""
        key = f"{self.file.architecture}.{name}"
        value = self.file.metadata.get(key, default)
        if value is _NEEDED:
            raise ValueError(f"from_gguf: the file must give {key}, got none")
        return value.tolist() if isinstance(value, np.ndarray) else value

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
        return self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")


@dataclass(frozen=True)
class Made:
    """A parameter made from these tensors of its layer, given as ``function(keys, *tensors)``."""

    names: tuple[str, ...]
    function: Callable[..., Tensor]


#: what a parameter is made from; of several the first that the file has
Source = str | Made | tuple[str | Made, ...]


@dataclass(frozen=True)
class Architecture:
    """One kind of file.

    Attributes:
        config: the configuration's fields, ``model_type`` among them.
        tensors: parameter -> source, for those outside the layers by their whole name, for the others within the layer.
        unused: tensors that the model has no use for.
    """

    config: Callable[[Keys], dict[str, Any]]
    tensors: Mapping[str, Source]
    unused: str = r"rope_freqs\.weight"

    def source(self, parameter: str) -> tuple[tuple[tuple[str, ...], Callable[..., Tensor] | None], ...]:
        """Ways to make a parameter: names of tensors in the file, and what to do with them."""
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", parameter)
        prefix, found = (f"blk.{match[1]}.", self.tensors.get(match[2])) if match else ("", self.tensors.get(parameter))
        ways = found if isinstance(found, tuple) else () if found is None else (found,)
        return tuple(
            ((prefix + way,), None)
            if isinstance(way, str)
            else (tuple(prefix + name for name in way.names), way.function)
            for way in ways
        )


def _rope(keys: Keys) -> dict[str, Any]:
    """The rotary embedding; a kind that is not carried over is refused."""
    kind = keys("rope.scaling.type", "none")
    rope = {"rope_type": "default", "rope_theta": keys("rope.freq_base", 10000.0)}
    if kind == "none" and "rope_freqs.weight" in keys.file:
        raise ValueError(
            "from_gguf: rotary frequencies must follow from the metadata, got the tensor rope_freqs.weight"
        )
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ValueError(f"from_gguf: rope.scaling.type must be none, linear or yarn, got {kind}")
    rope |= {"rope_type": kind, "factor": keys("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = keys("rope.scaling.original_context_length")
        for name in ("beta_fast", "beta_slow"):
            found = keys(f"rope.scaling.yarn_{name}", None)
            if found is not None:
                rope[name] = found
    return rope


def _common(keys: Keys) -> dict[str, Any]:
    ends = [keys.token(name) for name in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    heads = keys("attention.head_count")
    vocabulary = keys.file.infos.get("token_embd.weight")
    if vocabulary is None:
        raise ValueError("from_gguf: the file must have token_embd.weight, got none")
    return {
        "vocab_size": vocabulary.shape[0],
        "hidden_size": keys("embedding_length"),
        "num_hidden_layers": keys.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys("attention.head_count_kv", heads),
        "max_position_embeddings": keys("context_length"),
        "rms_norm_eps": keys("attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(keys),
        # llama.cpp leaves the output matrix out where it is the embedding's.
        "tie_word_embeddings": "output.weight" not in keys.file,
        "bos_token_id": keys.token("bos"),
        "eos_token_id": unique[0] if len(unique) == 1 else unique or None,
        "pad_token_id": keys.token("padding"),
        "num_experts_per_tok": keys.rule.top_k,
    }


def _head_dim(keys: Keys) -> int:
    return int(keys("attention.key_length", keys("embedding_length") // keys("attention.head_count")))


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


ARCHITECTURES: dict[str, Architecture] = {
    "qwen3moe": Architecture(_qwen3moe, _PLAIN | _GATE),
}
