"""What a Hugging Face mixture-of-experts block computes, read off the block itself; transformers is not imported.

A router is known by its class: what its forward does cannot be read from its attributes. Add a row to `ROUTERS` only
with a test against that class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.types import Activation, Routing


def _softmax(router: Any) -> Routing:
    return Routing(top_k=router.top_k, renormalize=router.norm_topk_prob)


def _softmax_renormalized(router: Any) -> Routing:
    return Routing(top_k=router.top_k)


def _deepseek_v3(router: Any) -> Routing:
    return Routing(
        top_k=router.top_k,
        score="sigmoid",
        renormalize=router.norm_topk_prob,
        scale=router.routed_scaling_factor,
        groups=router.num_group,
        top_groups=router.topk_group,
        group_score="top2_sum",
    )


ROUTERS: dict[str, Callable[[Any], Routing]] = {
    "DeepseekV3TopkRouter": _deepseek_v3,
    "Glm4MoeTopkRouter": _deepseek_v3,
    "GptOssTopKRouter": _softmax_renormalized,
    "MixtralTopKRouter": _softmax_renormalized,
    "OlmoeTopKRouter": _softmax,
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "Qwen3NextTopKRouter": _softmax,
    "Qwen3_5MoeTopKRouter": _softmax_renormalized,
}

#: class or function name of ``act_fn`` -> activation
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}


def _refuse(what: str, got: object, known: Any) -> ValueError:
    return ValueError(f"from_hf: {what} must be one of {', '.join(sorted(known))}, got {got}")


def _activation(experts: Any) -> Activation:
    if type(experts).__name__ == "GptOssExperts":
        return Activation("swiglu_oai", alpha=experts.alpha, limit=experts.limit)
    act_fn = getattr(experts, "act_fn", None)
    name = getattr(act_fn, "__name__", type(act_fn).__name__)
    if name not in _ACTIVATIONS:
        raise _refuse("the activation of the experts", name, _ACTIVATIONS)
    return Activation(_ACTIVATIONS[name], gated=getattr(experts, "has_gate", True))


def _expert_tensors(experts: Any) -> dict[str, Tensor]:
    tensors = {"gate_up": experts.gate_up_proj, "down": experts.down_proj}
    if getattr(experts, "is_transposed", False):
        tensors = {name: value.detach().transpose(1, 2).contiguous() for name, value in tensors.items()}
    if getattr(experts, "has_bias", False):
        tensors |= {"gate_up_bias": experts.gate_up_proj_bias, "down_bias": experts.down_proj_bias}
    return tensors


def _shared_tensors(block: nn.Module) -> dict[str, Tensor]:
    """The shared expert's stacks; ``gate_proj`` and ``up_proj`` are joined, once."""
    found: Any = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    if found is None:
        return {}
    joined = torch.cat((found.gate_proj.weight.detach(), found.up_proj.weight.detach()))
    tensors: dict[str, Tensor] = {"shared_gate_up": joined, "shared_down": found.down_proj.weight}
    weigher: Any = getattr(block, "shared_expert_gate", None)
    if weigher is not None:
        tensors["shared_gate"] = weigher.weight.detach()[0]
    return tensors


def read_block(block: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of `moefuse.nn.MoE` and its tensors by parameter name."""
    router: Any = getattr(block, "gate", None) or getattr(block, "router", None)
    experts: Any = getattr(block, "experts", None)
    if router is None or experts is None or not hasattr(experts, "down_proj"):
        raise ValueError(f"from_hf: the block must hold a router and stacked experts, got {type(block).__name__}")
    rule = ROUTERS.get(type(router).__name__)
    if rule is None:
        raise _refuse("the router", type(router).__name__, ROUTERS)
    known = {"gate", "router", "experts", "shared_expert", "shared_experts", "shared_expert_gate"}
    foreign = [name for name, _ in block.named_children() if name not in known]
    if foreign:
        raise ValueError(f"from_hf: the block must hold nothing but router and experts, got {', '.join(foreign)}")
    tensors = {"router": router.weight, **_expert_tensors(experts), **_shared_tensors(block)}
    if getattr(router, "bias", None) is not None:
        tensors["logit_bias"] = router.bias
    if getattr(router, "e_score_correction_bias", None) is not None:
        tensors["selection_bias"] = router.e_score_correction_bias
    E, H, I = tensors["down"].shape
    options = {
        "hidden": H,
        "intermediate": I,
        "num_experts": E,
        "routing": rule(router),
        "activation": _activation(experts),
        "layout": "halves" if getattr(experts, "is_concatenated", True) else "interleaved",
        "bias": "down_bias" in tensors,
        "logit_bias": "logit_bias" in tensors,
        "selection_bias": "selection_bias" in tensors,
        "shared_intermediate": tensors["shared_down"].shape[1] if "shared_down" in tensors else 0,
        "shared_gate": "shared_gate" in tensors,
    }
    return options, tensors
