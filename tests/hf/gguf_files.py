"""Tiny GGUF files as llama.cpp's converter writes them, from transformers models: the way that from_gguf goes back."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from families import scale_by_fan_in
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel

from moefuse import QuantTensor, quantize
from moefuse.quant.gguf import write
from moefuse.testing.random_blocks import random_blocks

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
    import json

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

    ``layer`` takes the model, a name within a layer and its tensor, and gives llama.cpp's names and tensors.
    """

    architecture: str
    model: str
    sizes: dict[str, Any]
    keys: Callable[[Any], dict[str, Any]]
    layer: Callable[[Any, str, Tensor], Parts]
    formats: dict[str, str] = field(default_factory=dict)
    extra: Callable[[Any], dict[str, Tensor]] = lambda _: {}
    outside: dict[str, str] = field(default_factory=dict)

    def tiny(self) -> PreTrainedModel:
        model_class = getattr(transformers, self.model)
        model = model_class(model_class.config_class(**SIZES, **self.sizes) if "Gemma4" not in self.model else None)
        scale_by_fan_in(model)
        return model.eval()


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 0,
    "pad_token_id": None,
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


KINDS: dict[str, Kind] = {
    "qwen3moe": Kind(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "intermediate_size": 512,
        },
        qwen3moe_keys,
        plain_layer,
        {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q5_K", "ffn_down_exps": "Q6_K", "attn_q": "Q8_0", "output": "Q6_K"},
    ),
}  # fmt: skip


def stored(kind: Kind, name: str, value: Tensor) -> Tensor | QuantTensor:
    """A tensor in the format that this kind of file has for it."""
    form = kind.formats.get(name.split(".")[2 if name.startswith("blk.") else 0])
    if form is None or value.dim() < 2:
        return value.detach().clone().contiguous()
    if form == "F16":
        return value.detach().half()
    if form == "MXFP4":  # which has no encoder
        return random_blocks(form, tuple(value.shape), torch.Generator().manual_seed(torch.seed() % 2**31),
                             float(value.square().mean().sqrt()))  # fmt: skip
    return quantize(value.detach(), form)


_OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight"}  # fmt: skip


def tensors_of(kind: Kind, model: Any) -> dict[str, Tensor]:
    """llama.cpp's names and numbers."""
    found: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if match is None:
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            found[(_OUTSIDE | kind.outside)[name]] = value
        else:
            found |= {f"blk.{match[1]}.{to}": part for to, part in kind.layer(model, match[2], value)}
    return found | kind.extra(model)


def make(kind: Kind, path: Path, **keys: Any) -> None:
    """A file of a fresh model."""
    model = kind.tiny()
    metadata = {"general.architecture": kind.architecture} | tokenizer_keys()
    metadata |= {f"{kind.architecture}.{key}": value for key, value in (kind.keys(model.config) | keys).items()}
    write(path, metadata, {name: stored(kind, name, value) for name, value in tensors_of(kind, model).items()})


def scale(model: Any) -> float:
    return 1 / math.sqrt(model.config.hidden_size)
