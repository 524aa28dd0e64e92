"""What a layer of a GGUF file computes: its router rule from the metadata, its experts in their blocks.

An architecture is known by its name, for metadata does not say all of its rule. Add a row to `FAMILIES` only with a
test; what a row cannot express is refused by name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moefuse.quant.gguf import GGUFFile, brief
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation, Routing


@dataclass(frozen=True)
class Family:
    """What holds where the metadata is silent."""

    score: str = "softmax"
    renormalize: bool = True
    activation: Activation = Activation("silu")  # noqa: RUF009  # frozen


FAMILIES = {
    "llama": Family(),
    "qwen2moe": Family(renormalize=False),
    "qwen3moe": Family(),
    "qwen3next": Family(),
    "qwen35moe": Family(),
    "olmoe": Family(renormalize=False),
    "granitemoe": Family(),
    "gpt-oss": Family(activation=Activation("swiglu_oai")),
    "gemma4": Family(activation=Activation("gelu_tanh")),
    "deepseek2": Family(renormalize=False),
    "glm4moe": Family(score="sigmoid", renormalize=False),
}
#: ``expert_gating_func``; 3 is a softmax over the selected alone, which is a softmax that is renormalised
_SCORES = {1: "softmax", 2: "sigmoid", 3: "softmax", 4: "sqrtsoftplus"}
_LAYER = r"blk\.(0|[1-9][0-9]*)\."
_EXPERT_TENSOR = re.compile(_LAYER + r"(.*(?:exps|shexp|ffn_gate_inp|exp_probs|latent|tid2eid).*)")


def expert_layers(file: GGUFFile) -> list[int]:
    """The layers that have a router."""
    names = (re.fullmatch(_LAYER + r"ffn_gate_inp\.weight", name) for name in file)
    return sorted(int(match[1]) for match in names if match)


def read_rule(file: GGUFFile, layer: int) -> Routing:
    """The router rule of a layer; a ValueError names what cannot be expressed."""
    family = _family(file)

    def key(name: str, default: Any) -> Any:
        value = file.metadata.get(f"{file.architecture}.{name}", default)
        if isinstance(value, np.ndarray):  # one value per layer
            return value[layer].item() if layer < len(value) else default
        return value

    gating = _count(key("expert_gating_func", 0), "expert_gating_func")
    if gating != 0 and gating not in _SCORES:
        raise ValueError(f"from_gguf: expert_gating_func must be one of {', '.join(map(str, _SCORES))}, got {gating}")
    score = _SCORES.get(gating, family.score)
    groups = _count(key("expert_group_count", 1), "expert_group_count") or 1
    renormalize = key("expert_weights_norm", family.renormalize)
    if not isinstance(renormalize, (bool, int)):
        raise ValueError(f"from_gguf: the file must give expert_weights_norm as yes or no, got {brief(renormalize)}")
    rule = Routing(
        top_k=_count(key("expert_used_count", None), "expert_used_count"),
        score=score,
        renormalize=bool(renormalize) or gating == 3,
        # Zero is how a file says "none".
        scale=_number(key("expert_weights_scale", 1.0), "expert_weights_scale") or 1.0,
        groups=groups,
        top_groups=_count(key("expert_group_used_count", 1), "expert_group_used_count") or 1 if groups > 1 else 1,
        group_score="top2_sum" if score == "sigmoid" else "max",
    )
    router = file.infos.get(f"blk.{layer}.ffn_gate_inp.weight")
    E = router.shape[0] if router is not None and router.shape else 0
    if E % groups or rule.top_k > E // groups * rule.top_groups:
        got = f"top_k={rule.top_k} of {rule.top_groups} of {groups} groups"
        raise ValueError(f"from_gguf: a router must choose among its {E} experts in equal groups, got {got}")
    return rule


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"from_gguf: the file must give {name} as a whole number, got {brief(value)}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"from_gguf: the file must give {name} as a finite number, got {brief(value)}")
    return float(value)


def _family(file: GGUFFile) -> Family:
    found = FAMILIES.get(file.architecture)
    if found is None:
        raise ValueError(
            f"from_gguf: the architecture must be one of {', '.join(sorted(FAMILIES))}, got {file.architecture}"
        )
    return found


class _Layer:
    """The tensors of one layer by the ends of their names; what is left over in the end is not understood."""

    def __init__(self, file: GGUFFile, layer: int) -> None:
        self.file, self.prefix = file, f"blk.{layer}."
        matches = map(_EXPERT_TENSOR.fullmatch, (name for name in file if name.startswith(self.prefix)))
        self.left = {match[2] for match in matches if match}

    def take(self, name: str, *shape: int | None) -> Tensor | QuantTensor | None:
        """A tensor of this shape (None: any size), or None where the file has none."""
        if self.prefix + name not in self.file:
            return None
        self.left.discard(name)
        found = self.file[self.prefix + name]
        wrong = len(found.shape) != len(shape) or any(
            want not in (None, got) for want, got in zip(shape, found.shape, strict=False)
        )
        if wrong:
            want = ", ".join("any" if size is None else str(size) for size in shape)
            raise ValueError(f"from_gguf: {self.prefix}{name} must have shape [{want}], got {list(found.shape)}")
        if isinstance(found, Tensor) and not found.is_floating_point():
            raise ValueError(f"from_gguf: {self.prefix}{name} must be of a floating-point type, got {found.dtype}")
        return found

    def need(self, name: str, *shape: int | None) -> Tensor | QuantTensor:
        found = self.take(name, *shape)
        if found is None:
            raise ValueError(f"from_gguf: the layer must have {self.prefix}{name}, got none")
        return found

    def plain(self, name: str, *shape: int | None) -> Tensor | None:
        """As `take`, in float32: for what is small."""
        found = self.take(name, *shape)
        if found is None:
            return None
        return found.dequantize() if isinstance(found, QuantTensor) else found.float()


def read_experts(file: GGUFFile, layer: int) -> dict[str, Tensor | QuantTensor]:
    """The stacks of a layer and their biases, by their names in `moefuse.nn.MoE`; gate and up may come apart."""
    at = _layer(file, layer)
    return _stacks(at, *at.need("ffn_gate_inp.weight", None, None).shape)


def read_layer(file: GGUFFile, layer: int) -> tuple[dict[str, Any], dict[str, Tensor | QuantTensor]]:
    """Arguments of `moefuse.nn.MoE`, and its tensors by name; gate and up may come apart."""
    family, at = _family(file), _layer(file, layer)
    router = at.plain("ffn_gate_inp.weight", None, None)
    assert router is not None
    E, H = router.shape
    tensors: dict[str, Any] = {"router": router} | _stacks(at, E, H)
    I = tensors["down"].shape[2]
    per_expert = {
        "logit_bias": "ffn_gate_inp.bias",
        "selection_bias": "exp_probs_b.bias",
        "per_expert_scale": "ffn_down_exps.scale",
    }
    for name, stored in per_expert.items():
        value = at.plain(stored, E)
        if value is not None:
            tensors[name] = value
    if file.architecture == "gemma4":
        tensors |= _gemma4(at, router)
    width = _shared(at, H, tensors)
    if at.left:
        names = ", ".join(sorted(at.prefix + name for name in at.left))
        raise ValueError(f"from_gguf: the layer must hold nothing but router and experts, got {names}")
    eps = file.metadata.get(f"{file.architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    options = {
        "hidden": H,
        "intermediate": I,
        "num_experts": E,
        "routing": read_rule(file, layer),
        "activation": family.activation,
        "bias": "down_bias" in tensors,
        "logit_bias": "logit_bias" in tensors,
        "selection_bias": "selection_bias" in tensors,
        "per_expert_scale": "per_expert_scale" in tensors,
        "shared_intermediate": width,
        "shared_gate": "shared_gate" in tensors,
        "norm": "norm_weight" in tensors,
        "eps": _number(eps, "layer_norm_rms_epsilon"),
    }
    return options, tensors


def _layer(file: GGUFFile, layer: int) -> _Layer:
    if f"blk.{layer}.ffn_gate_inp.weight" not in file:
        layers = expert_layers(file)
        if any(re.search(r"ffn_gate\.\d+\.weight", name) for name in file):
            raise ValueError("from_gguf: experts must be stacked, got a file from before 2024-04 with one tensor each")
        known = f"layers {layers[0]} to {layers[-1]} do" if layers else "no layer of this file does"
        raise ValueError(f"from_gguf: layer must have experts ({known}), got {layer}")
    return _Layer(file, layer)


def _stacks(at: _Layer, E: int, H: int) -> dict[str, Tensor | QuantTensor]:
    """The experts' weights and biases."""
    down = at.need("ffn_down_exps.weight", E, H, None)
    I = down.shape[2]
    found: dict[str, Tensor | QuantTensor] = {"down": down}
    joined = at.take("ffn_gate_up_exps.weight", E, 2 * I, H)
    bias: Tensor | None = None
    if joined is not None:
        found["gate_up"] = joined
        bias = at.plain("ffn_gate_up_exps.bias", E, 2 * I)
    else:
        found["gate_up"] = at.need("ffn_gate_exps.weight", E, I, H)
        found["up"] = at.need("ffn_up_exps.weight", E, I, H)
        halves = [at.plain(f"ffn_{part}_exps.bias", E, I) for part in ("gate", "up")]
        if halves[0] is not None and halves[1] is not None:
            bias = torch.cat((halves[0], halves[1]), 1)
    down_bias = at.plain("ffn_down_exps.bias", E, H)
    if (bias is None) != (down_bias is None):
        raise ValueError(f"from_gguf: {at.prefix}: gate, up and down must all have biases or none, got some")
    return found if bias is None or down_bias is None else found | {"gate_up_bias": bias, "down_bias": down_bias}


def _gemma4(at: _Layer, router: Tensor) -> dict[str, Tensor]:
    """Gemma 4 norms the residual stream twice, without a weight for its router and with one for its experts.

    The layer norms once, with the experts' weight; the router's own factors, over that weight, go into the router.
    """
    norm, scale = at.plain("pre_ffw_norm_2.weight", router.shape[1]), at.plain("ffn_gate_inp.scale", router.shape[1])
    if norm is None or scale is None:
        raise ValueError(f"from_gguf: gemma4 must have {at.prefix}pre_ffw_norm_2.weight and ffn_gate_inp.scale")
    if not bool((norm != 0).all()):
        raise ValueError(f"from_gguf: {at.prefix}pre_ffw_norm_2.weight must have no zero, got some")
    factor = scale.double() * router.shape[1] ** -0.5 / norm.double()
    return {"norm_weight": norm, "router": (router.double() * factor).float()}


def _shared(at: _Layer, H: int, tensors: dict[str, Any]) -> int:
    """Adds the shared expert to the tensors and returns its width, 0 where there is none."""
    down = at.take("ffn_down_shexp.weight", H, None)
    if down is None:
        return 0
    width = down.shape[1]
    tensors["shared_down"] = down
    tensors["shared_gate_up"] = at.need("ffn_gate_shexp.weight", width, H)
    tensors["shared_up"] = at.need("ffn_up_shexp.weight", width, H)
    name = "ffn_gate_inp_shexp.weight"
    flat = at.prefix + name in at.file and len(at.file.infos[at.prefix + name].shape) == 1
    shared_gate = at.plain(name, H) if flat else at.plain(name, 1, H)
    if shared_gate is not None:
        tensors["shared_gate"] = shared_gate.view(H)
    return width
