"""Tiny models in the layouts in which they are released, written by transformers itself."""

import json
import re
import shutil
from pathlib import Path

import torch
from families import scale_by_fan_in
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

_SIZES = {"vocab_size": 97, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip


def tiny(name: str, **sizes: object) -> PreTrainedModel:
    """Rows and columns of DeepSeek-V3's layers are multiples of 128, where transformers finds the blocks of scales."""
    if name == "deepseek_v3":
        model: PreTrainedModel = DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **_SIZES | {"intermediate_size": 256, "moe_intermediate_size": 128, "num_key_value_heads": 4,
                "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1,
                "first_k_dense_replace": 1, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 128,
                "qk_nope_head_dim": 32, "v_head_dim": 32, "n_shared_experts": 1} | sizes
            )
        )  # fmt: skip
    elif name == "qwen3_moe":
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **_SIZES | {"intermediate_size": 256, "moe_intermediate_size": 128, "num_key_value_heads": 2,
                "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 3} | sizes
            )
        )  # fmt: skip
    elif name == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(
                **_SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 64,
                "num_local_experts": 4, "num_experts_per_tok": 2} | sizes
            )
        )  # fmt: skip
    else:
        model = GptOssForCausalLM(
            GptOssConfig(
                **_SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 64,
                "num_local_experts": 8, "num_experts_per_tok": 3} | sizes
            )
        )  # fmt: skip
    scale_by_fan_in(model)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(0, 97, (2, 9))


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def save_fp8(model: PreTrainedModel, folder: Path, scale_type: torch.dtype = torch.float32) -> None:
    """Linear layers and experts in e4m3 with a scale for 128 x 128 numbers, as DeepSeek-V3 and Qwen3 come."""
    model.save_pretrained(folder)
    config = FineGrainedFP8Config(weight_block_size=(128, 128))
    quantize = Fp8Quantize(FineGrainedFP8HfQuantizer(config))
    tensors: dict[str, Tensor] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        kept = value.dim() < 2 or any(part in name for part in ("embed", "lm_head", "norm", "mlp.gate.weight"))
        if kept:
            tensors[name] = value
            continue
        rows, columns = value.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
        padded[:rows, :columns] = value
        made = quantize.convert({name: [padded]})
        scale = made[f"{name}_scale_inv"]
        if scale_type == torch.float8_e8m0fnu:  # powers of two, and the numbers to go with them
            scale = scale.log2().ceil().exp2()
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            made[name] = (padded / spread).to(torch.float8_e4m3fn)
        tensors[name] = made[name][:rows, :columns].contiguous()
        tensors[f"{name}_scale_inv"] = scale.to(scale_type)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    told = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    change_config(folder, quantization_config=told)


#: what compressed-tensors calls the numbers that share a scale -> rows and columns; 0: all of them
STRATEGIES = {"tensor": (0, 0), "channel": (1, 0), "block": (128, 128), "group": (1, 128)}


def save_by_strategy(
    model: PreTrainedModel, folder: Path, strategy: str, kept: str = "", scale: str = "_scale"
) -> None:
    """Linear layers and experts in e4m3 as compressed-tensors and AutoFP8 write them; the numbers in ``numbers``.

    What has a name that the expression ``kept`` is found in stays as it is. Scales are named ``weight`` with ``scale``.
    """
    model.save_pretrained(folder)
    tensors, numbers = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        numbers[name] = tensors[name] = value
        if value.dim() < 2 or re.search("embed|lm_head|norm|gate.weight" + (kept and f"|{kept}"), name):
            continue
        rows, columns = (size or whole for size, whole in zip(STRATEGIES[strategy], value.shape, strict=True))
        grid = (-(-value.shape[0] // rows), -(-value.shape[1] // columns))
        padded = torch.zeros(grid[0] * rows, grid[1] * columns)
        padded[: value.shape[0], : value.shape[1]] = value
        blocks = padded.view(grid[0], rows, grid[1], columns)
        scales = (blocks.abs().amax((1, 3)) / 448).bfloat16().float()
        codes = (blocks / scales[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        made = (codes.float() * scales[:, None, :, None]).view(padded.shape)
        numbers[name] = made[: value.shape[0], : value.shape[1]].contiguous()
        tensors[name] = codes.view(padded.shape)[: value.shape[0], : value.shape[1]].contiguous()
        tensors[name + scale] = scales.bfloat16() if strategy != "tensor" else scales.reshape(1)
    (folder / "numbers").mkdir()
    shutil.copy(folder / "config.json", folder / "numbers")
    save_file(numbers, folder / "numbers" / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def scheme(strategy: str, type: str = "float", bits: int = 8, **other: object) -> dict[str, object]:
    """Of a group of layers, as compressed-tensors writes it."""
    rows, columns = STRATEGIES.get(strategy, (0, 0))
    weights = {"num_bits": bits, "type": type, "symmetric": True, "strategy": strategy, "dynamic": False,
               "group_size": columns if strategy == "group" else None,
               "block_structure": [rows, columns] if strategy == "block" else None} | other  # fmt: skip
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    return {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}


def compressed(*schemes: dict[str, object], format: str = "float-quantized", **other: object) -> dict[str, object]:
    """A configuration of compressed-tensors."""
    groups = {f"group_{i}": scheme for i, scheme in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups,
            "format": format, "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None} | other  # fmt: skip


def save_numbers(folder: Path, into: Path) -> None:
    """The numbers of what `save_fp8` wrote, by the formula: each times the scale of its 128 x 128."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        scale, weight = tensors.pop(name).float(), tensors[name.removesuffix("_scale_inv")].float()
        spread = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        tensors[name.removesuffix("_scale_inv")] = weight * spread
    into.mkdir()
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))


def save_mxfp4(model: PreTrainedModel, folder: Path) -> None:
    """Random nibbles, with scales that make their numbers as large as the model's."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        E, K, N = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(119, 123, (E, N, K // 32), dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    change_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})
