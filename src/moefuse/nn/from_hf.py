"""A Hugging Face MoE layer as the arguments and tensors of `moefuse.nn.MoE`; transformers is not imported."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from moefuse.nn.recognize import NotRecognized, activation_of, layout_of, mlp_of, place_of, rule_of, tensor_at
from moefuse.types import Activation


def _expert_tensors(experts: Any) -> dict[str, Tensor]:
    gated = getattr(experts, "has_gate", True)
    tensors = {"gate_up": experts.gate_up_proj if gated else experts.up_proj, "down": experts.down_proj}
    if getattr(experts, "is_transposed", False):
        tensors = {name: value.detach().transpose(1, 2).contiguous() for name, value in tensors.items()}
    if getattr(experts, "has_bias", False):
        bias = experts.gate_up_proj_bias if gated else experts.up_proj_bias
        tensors |= {"gate_up_bias": bias, "down_bias": experts.down_proj_bias}
    return tensors


def _shared_tensors(shared: Any, activation: Activation) -> dict[str, Tensor]:
    """The shared expert's weights; gate and up stay apart, so that they are the layer's own."""
    if mlp_of(shared) != Activation(activation.kind, activation.gated):
        raise NotRecognized(f"the shared expert must be an MLP like the experts, got {type(shared).__name__}")
    found = {"shared_gate_up": shared.up_proj.weight, "shared_down": shared.down_proj.weight}
    if activation.gated:
        found |= {"shared_gate_up": shared.gate_proj.weight, "shared_up": shared.up_proj.weight}
    return found


def read_layer(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of `moefuse.nn.MoE` and its tensors by parameter name; a ValueError says why a layer is refused."""
    try:
        return _read(layer)
    except NotRecognized as reason:
        raise ValueError(f"from_hf: {type(layer).__name__} is not a layer that MoE can express: {reason}") from None


def _read(layer: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    rule = rule_of(layer)
    experts: Any = layer.get_submodule("experts")
    activation = activation_of(experts)
    if activation is None or getattr(experts, "has_post_expert_norm", False):
        raise NotRecognized("what stands between or after the products of its experts is not one of ours")
    tensors = _expert_tensors(experts)
    named = {"router": rule.router, "logit_bias": rule.logit_bias, "selection_bias": rule.selection_bias}
    tensors |= {name: tensor_at(*place_of(layer, path)) for name, path in named.items() if path is not None}
    if rule.shared is not None:
        tensors |= _shared_tensors(layer.get_submodule(rule.shared), activation)
    if rule.shared_gate is not None:
        tensors["shared_gate"] = tensor_at(layer.get_submodule(rule.shared_gate), "weight").detach()
    E, H, I = tensors["down"].shape
    options = {
        "hidden": H,
        "intermediate": I,
        "num_experts": E,
        "routing": rule.routing,
        "activation": activation,
        "layout": layout_of(experts),
        "bias": "down_bias" in tensors,
        "logit_bias": "logit_bias" in tensors,
        "selection_bias": "selection_bias" in tensors,
        "shared_intermediate": tensors["shared_down"].shape[1] if "shared_down" in tensors else 0,
        "shared_gate": "shared_gate" in tensors,
    }
    return options, tensors
