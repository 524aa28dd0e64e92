"""Hugging Face transformers' experts: their own module, their own functions, our weight tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse import config
from moefuse.bench.inputs import Layer
from moefuse.bench.shapes import Shape

_HIDDEN_ACT = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}


@dataclass(frozen=True)
class TransformersPeer:
    """One of transformers' experts implementations, reached through the module's own ``forward``."""

    name: str
    implementation: str
    graph_refusal: str | None = None
    gathers_weights: bool = False

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("transformers") is None:
            return f"transformers is not installed: {config.install('transformers')}"
        return None

    def unsuitable(self, shape: Shape, device: torch.device) -> str | None:  # noqa: ARG002  # it runs on any
        if shape.weights is not None:
            return f"transformers has no experts in {' and '.join(dict.fromkeys(shape.weights))} without the hub"
        if _is_gpt_oss(shape) or (shape.activation in _HIDDEN_ACT and shape.layout == "halves" and not shape.bias):
            return None
        return f"transformers has no experts like {shape.describe()}"

    def scratch_bytes(self, shape: Shape, tokens: int, dtype: torch.dtype) -> int:
        return tokens * shape.top_k * shape.expert_bytes(dtype) if self.gathers_weights else 0

    def build(self, layer: Layer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        assert isinstance(layer.gate_up, Tensor)
        assert isinstance(layer.down, Tensor)
        with torch.device("meta"):
            module = _gpt_oss(layer.shape) if _is_gpt_oss(layer.shape) else _qwen3(layer.shape)
        # gpt-oss keeps its stacks as [E, in, out]: a transposed view shares our memory.
        turn = module.is_transposed
        stacks = {
            "gate_up_proj": layer.gate_up.transpose(1, 2) if turn else layer.gate_up,
            "down_proj": layer.down.transpose(1, 2) if turn else layer.down,
            "gate_up_proj_bias": layer.gate_up_bias,
            "down_proj_bias": layer.down_bias,
        }
        for name, stack in stacks.items():
            if stack is not None:
                setattr(module, name, torch.nn.Parameter(stack, requires_grad=False))
        module.config._experts_implementation = self.implementation
        run: Callable[[Tensor, Tensor, Tensor], Tensor] = module.eval()
        return run


def _is_gpt_oss(shape: Shape) -> bool:
    return shape.activation == "swiglu_oai" and shape.layout == "interleaved" and shape.bias


def _qwen3(shape: Shape) -> Any:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        hidden_act=_HIDDEN_ACT[shape.activation],
    )
    experts: Any = qwen3.Qwen3MoeExperts  # untyped
    return experts(config)


def _gpt_oss(shape: Shape) -> Any:
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig

    config = GptOssConfig(
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
    )
    experts: Any = gpt_oss.GptOssExperts  # untyped
    return experts(config)
