"""FP8 and MXFP4 as they are released stay packed and give transformers' own dequantised logits."""

from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch
import transformers
from families import same_tensors
from packaging.version import Version
from released_files import (
    STRATEGIES,
    change_config,
    compressed,
    save_by_strategy,
    save_fp8,
    save_mxfp4,
    save_numbers,
    scheme,
    tiny,
    tokens,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear
from transformers.utils import is_compressed_tensors_available, logging

import moefuse.hf
from moefuse.hf import BlockExperts
from moefuse.hf.packing import from_mxfp4, from_released_fp8
from moefuse.nn import QuantLinear
from moefuse.testing.compare import difference

# Blocks of MXFP4 have activations rounded to 8 bits; those of FP8 are multiplied as they are.
TOLERANCE = {"FP8": 1e-5, "MXFP4": 1.5e-2}
#: in older releases transformers loses the scales of FP8 experts when it dequantises
OLD = Version(transformers.__version__) < Version("5.22")
RELEASED = {"deepseek_v3": ("FP8", save_fp8), "qwen3_moe": ("FP8", save_fp8), "gpt_oss": ("MXFP4", save_mxfp4)}


def load(folder: Path, implementation: str = "moefuse") -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=implementation, local_files_only=True
    )
    return model if implementation == "moefuse" else model.float()


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """All but a row or two: a router may stand between two experts by less than activations are rounded."""
    errors = (got.double() - want.double()).flatten(0, -2).norm(dim=-1) / want.double().flatten(0, -2).norm(dim=-1)
    return float(errors.quantile(0.85)) < tolerance


@pytest.mark.parametrize("family", RELEASED)
def test_gives_transformers_own_logits(family: str, tmp_path: Path) -> None:
    form, save = RELEASED[family]
    save(tiny(family), tmp_path)
    if form == "FP8":
        save_numbers(tmp_path, tmp_path / "numbers")
    known = tmp_path / "numbers" if OLD and form == "FP8" else tmp_path
    theirs, ours, ids = load(known, "eager"), load(tmp_path), tokens()
    want = logits(theirs, ids)
    assert want.std() > 0.03
    assert not any(isinstance(module, (BlockExperts, QuantLinear)) for module in theirs.modules()), "left to it"
    experts = [module for module in ours.modules() if isinstance(module, BlockExperts)]
    assert experts
    assert all(set(module.specs.values()) == {form} for module in experts)
    assert any(isinstance(module, QuantLinear) for module in ours.modules()) == (form == "FP8")
    assert close(logits(ours, ids), want, TOLERANCE[form])
    assert moefuse.hf.supports(ours)
    assert moefuse.hf.patch(ours).patched
    assert close(logits(ours, ids), want, TOLERANCE[form])
    moefuse.hf.unpatch(ours)
    # Saved, it is a model of ours, and loads packed.
    got = logits(ours, ids)
    ours.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert same_tensors(again, ours)
    assert close(logits(again, ids), got, TOLERANCE[form])
    assert again.config.quantization_config.format == form
    # Its numbers are transformers' own.
    moefuse.hf.dequantize(again)
    again.set_experts_implementation("eager")
    assert difference(logits(again, ids), want.double()).worst < 1e-6
    assert getattr(again.config, "quantization_config", None) is None


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_any_type_and_ragged_rows(tmp_path: Path, scale_type: torch.dtype) -> None:
    """136 rows of kv_a_proj have two rows of scales, each half of gate_up as well; 160 columns of down fit no block."""
    save_fp8(tiny("deepseek_v3", qk_rope_head_dim=8, moe_intermediate_size=160), tmp_path / "fp8", scale_type)
    if scale_type == torch.float8_e8m0fnu:
        told = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
        change_config(tmp_path / "fp8", quantization_config=told)
    save_numbers(tmp_path / "fp8", tmp_path / "numbers")
    ours, ids = load(tmp_path / "fp8"), tokens()
    (experts,) = (module for module in ours.modules() if isinstance(module, BlockExperts))
    assert experts.specs == {"gate_up": "FP8"}
    assert experts.down.dtype == torch.float32
    assert close(logits(ours, ids), logits(load(tmp_path / "numbers", "eager"), ids), 1e-5)


def test_linear_layers_with_biases_are_saved_and_loaded(tmp_path: Path) -> None:
    save_fp8(tiny("qwen3_moe", attention_bias=True), tmp_path / "fp8")
    save_numbers(tmp_path / "fp8", tmp_path / "numbers")
    ours, ids = load(tmp_path / "fp8"), tokens()
    assert ours.model.layers[0].self_attn.q_proj.bias.norm() > 0
    assert close(logits(ours, ids), logits(load(tmp_path / "numbers", "eager"), ids), 1e-5)
    ours.save_pretrained(tmp_path / "saved")
    assert same_tensors(again := load(tmp_path / "saved"), ours)
    assert close(logits(again, ids), logits(ours, ids), 1e-5)


@pytest.mark.skipif(OLD, reason="transformers' own loses scales")
def test_bfloat16(tmp_path: Path) -> None:
    """As models run: the type of activations, routers and norms is the checkpoint's."""
    save_fp8(tiny("qwen3_moe").bfloat16(), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moefuse")
    assert model.dtype == torch.bfloat16
    stock, ids = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager"), tokens()
    assert close(logits(model, ids), logits(stock, ids), 3e-2)
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (2, 13)


@pytest.mark.skipif(OLD, reason="transformers' own loses scales")
def test_other_implementations_are_left_to_transformers(tmp_path: Path) -> None:
    save_fp8(tiny("qwen3_moe"), tmp_path)
    stock = load(tmp_path, "grouped_mm")
    assert not any(isinstance(module, (BlockExperts, QuantLinear, FP8Linear)) for module in stock.modules())
    named = {"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}
    change_config(tmp_path, quantization_config=named)
    numbers = load(tmp_path)
    assert not any(isinstance(module, BlockExperts) for module in numbers.modules()), "numbers were asked for"
    assert difference(logits(numbers, ids := tokens()), logits(stock, ids).double()).worst < 1e-5


def test_a_dense_model_ignores_the_name(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    save_fp8(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=97)), tmp_path)
    model = load(tmp_path)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    assert logits(model, tokens()).isfinite().all()


def _kinds(model: nn.Module) -> dict[str, set[str]]:
    """What is in blocks, experts and others -> the formats."""
    found: dict[str, set[str]] = {"experts": set(), "others": set()}
    for module in model.modules():
        if isinstance(module, BlockExperts):
            found["experts"] |= {*module.specs.values()}
        elif isinstance(module, QuantLinear):
            found["others"].add(module.weight.format)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_compressed_tensors(family: str, strategy: str, tmp_path: Path) -> None:
    """Mixtral's down products have rows of 96, which fit no block; gate and up of 96 rows have a scale each."""
    save_by_strategy(tiny(family), tmp_path, strategy, scale="_scale_inv" if family == "deepseek_v3" else "_scale")
    change_config(tmp_path, quantization_config=compressed(scheme(strategy)))
    ours, ids = load(tmp_path), tokens()
    assert _kinds(ours) == {"experts": {"FP8"}, "others": {"FP8"}}
    assert close(logits(ours, ids), logits(load(tmp_path / "numbers", "eager"), ids), 1e-5)
    ours.save_pretrained(tmp_path / "saved")
    assert families.same_tensors(again := load(tmp_path / "saved"), ours)
    assert close(logits(again, ids), logits(ours, ids), 1e-5)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_autofp8(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A scale for a matrix, another for its activations, and a configuration that does not tell of blocks."""
    if OLD and shape == ():
        pytest.skip("transformers cannot put such scales together")
    save_by_strategy(tiny("mixtral", intermediate_size=128), tmp_path, "tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = tensors[name].reshape(shape)
        tensors[name.replace("weight_scale", "input_scale")] = torch.rand(shape)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    told = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["re:.*lm_head"]}
    change_config(tmp_path, quantization_config=told)
    ours, ids = load(tmp_path), tokens()
    assert _kinds(ours) == {"experts": {"FP8"}, "others": {"FP8"}}
    assert close(logits(ours, ids), logits(load(tmp_path / "numbers", "eager"), ids), 1e-5)


@pytest.mark.parametrize("method", ["fp8", "compressed-tensors"])
@pytest.mark.parametrize("kept", [r"layers.0.*experts", r"o_proj", r"down_proj", r"self_attn", r"layers.1"])
def test_the_files_say_what_is_fp8(method: str, kept: str, tmp_path: Path) -> None:
    """Whether lists in the configuration name it or not."""
    named = ["model.layers.0.mlp.experts", "o_proj"]
    save_by_strategy(tiny("qwen3_moe"), tmp_path, "block", kept)
    told = compressed(scheme("block"), ignore=[*named, "re:.*attn"])
    if method == "fp8":
        told = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": named}
    change_config(tmp_path, quantization_config=told)
    ours, ids = load(tmp_path), tokens()
    tensors = load_file(tmp_path / "model.safetensors")
    for path, module in ours.named_modules():
        if isinstance(module, (nn.Linear, QuantLinear)):
            assert isinstance(module, QuantLinear) == (tensors[f"{path}.weight"].dtype == torch.float8_e4m3fn), path
    assert close(logits(ours, ids), logits(load(tmp_path / "numbers", "eager"), ids), 1e-5)
    ours.save_pretrained(tmp_path / "saved")
    assert families.same_tensors(again := load(tmp_path / "saved"), ours)
    assert close(logits(again, ids), logits(ours, ids), 1e-5)


OTHERS = {
    "int4 by group in pack-quantized": compressed(scheme("group", "int", 4), format="pack-quantized"),
    "int8 by channel in int-quantized": compressed(scheme("channel", "int"), format="int-quantized"),
    "float4 by tensor_group in nvfp4-pack-quantized": compressed(
        scheme("tensor_group", bits=4), format="nvfp4-pack-quantized"
    ),
    "float8 by group in mxfp8-quantized": compressed(scheme("group", group_size=32), format="mxfp8-quantized"),
    "for 32 columns, ours for 128": compressed(scheme("group", group_size=32)),
    "several kinds of scales: float8 by block, float8 by channel": compressed(scheme("channel"), scheme("block")),
    "sparse weights in sparse-24-bitmask": compressed(
        scheme("channel"), sparsity_config={"format": "sparse-24-bitmask"}
    ),
}


@pytest.mark.skipif(is_compressed_tensors_available(), reason="transformers takes them")
@pytest.mark.parametrize("reason", OTHERS)
def test_other_schemes_are_named(reason: str, tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=OTHERS[reason])
    with pytest.raises(ValueError, match=f"Qwen3MoeForCausalLM is not kept packed: .*{reason}.*compressed-tensors"):
        load(tmp_path)
    with pytest.raises(ImportError, match=r"compressed.tensors"):
        load(tmp_path, "eager")


@pytest.mark.parametrize("method", ["fp8", "mxfp8"])
def test_mxfp8_becomes_numbers(method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """32 numbers share a scale, which our blocks do not have: transformers' numbers, and a word about it."""
    if OLD and method == "mxfp8":
        pytest.skip("transformers does not know the name")
    save_fp8(tiny("qwen3_moe"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        spread = tensors[name].repeat_interleave(128, 0).repeat_interleave(4, 1)
        tensors[name] = spread.log2().ceil().add(127).to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    change_config(tmp_path, quantization_config={"quant_method": method, "weight_block_size": [1, 32]})
    logging.get_logger("transformers").addHandler(caplog.handler)
    reason = "Qwen3MoeForCausalLM is not kept packed: its scales are for 32 columns, ours for 128"
    if OLD:
        with pytest.raises(ValueError, match=f"{reason}; this release of transformers loses scales"):
            load(tmp_path)
        return
    ours, ids = load(tmp_path), tokens()
    assert f"{reason}; transformers makes numbers of it" in caplog.text
    assert _kinds(ours) == {"experts": set(), "others": set()}
    assert difference(logits(ours, ids), logits(load(tmp_path, "eager"), ids).double()).worst < 1e-5


Damage = Callable[[dict[str, Tensor]], None]


def _remove(name: str) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return damage


def _cut(name: str) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][..., :-1].contiguous()

    return damage


def _spoil(name: str) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[0] = torch.nan

    return damage


def _as(name: str, dtype: torch.dtype) -> Damage:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)

    return damage


_GATE, _Q = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.self_attn.q_proj.weight"
DAMAGES = {
    "mxfp4 without scales": ("gpt_oss", _remove(f"{_GATE}_scales"), f"must have {_GATE}_scales"),
    "mxfp4 with fewer scales": ("gpt_oss", _cut(f"{_GATE}_scales"), f"{_GATE}: MXFP4: blocks must be"),
    "mxfp4 with fewer bytes": ("gpt_oss", _cut(f"{_GATE}_blocks"), f"{_GATE}: MXFP4: blocks must be"),
    "mxfp4 with scales that are no exponents": (
        "gpt_oss",
        _as(f"{_GATE}_scales", torch.float32),
        f"{_GATE}_scales must be U8",
    ),
    "mxfp4 with signed bytes": ("gpt_oss", _as(f"{_GATE}_blocks", torch.int8), f"{_GATE}_blocks must be U8, got I8"),
    "fp8 with whole scales": (
        "qwen3_moe",
        _as(f"{_Q}_scale_inv", torch.int32),
        f"{_Q}_scale_inv must be of a floating",
    ),
    "fp8 without scales": ("qwen3_moe", _remove(f"{_Q}_scale_inv"), f"must have {_Q}_scale_inv"),
    "fp8 with fewer scales": ("qwen3_moe", _cut(f"{_Q}_scale_inv"), f"{_Q}: from_fp8: scale"),
    "fp8 with fewer columns": ("qwen3_moe", _cut(_Q), f"{_Q}: the model has"),
    "fp8 with scales that are no numbers": ("qwen3_moe", _spoil(f"{_Q}_scale_inv"), f"{_Q}: .* must be finite"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_scales_are_named(damage: str, tmp_path: Path) -> None:
    family, change, message = DAMAGES[damage]
    RELEASED[family][1](tiny(family), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message.replace(".", r"\.").replace(r"\.*", ".*")):
        load(tmp_path)


def test_types_that_do_not_belong(tmp_path: Path) -> None:
    save_fp8(tiny("qwen3_moe"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expert, gate = "model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.gate.weight"
    for change, message in (
        ({expert: tensors[expert].bfloat16()}, r"experts\.gate_up_proj must be of one type in the files, got"),
        ({_Q: tensors[_Q].to(torch.float8_e5m2)}, rf"{_Q} must be F8_E4M3 to be kept, got F8_E5M2"),
        (
            {gate: tensors[gate].to(torch.float8_e4m3fn), f"{gate}_scale_inv": torch.ones(1, 2)},
            rf"{gate} is in FP8, and a Qwen3MoeTopKRouter has no place for that",
        ),
    ):
        save_file(tensors | change, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_an_experts_scales_cut_short(tmp_path: Path) -> None:
    save_fp8(tiny("qwen3_moe"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for e in range(8):
        _cut(f"model.layers.1.mlp.experts.{e}.down_proj.weight_scale_inv")(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj: from_fp8: scale"):
        load(tmp_path)


def test_mxfp4_is_a_permutation(rng: torch.Generator) -> None:
    """Against the formula, every nibble and exponents to both ends; and as DeepSeek-V4 has it."""
    blocks = torch.randint(0, 256, (3, 4, 2, 16), dtype=torch.uint8, generator=rng)
    scales = torch.randint(2, 250, (3, 4, 2), dtype=torch.uint8, generator=rng)
    scales.view(-1)[:3] = torch.tensor([0, 1, 254])
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    table = torch.cat((table, -table))
    numbers = torch.stack((table[(blocks & 15).long()], table[(blocks >> 4).long()]), -1).flatten(-2)
    want = (numbers * 2.0 ** (scales.double()[..., None] - 127)).flatten(2)
    assert torch.equal(from_mxfp4(blocks, scales).dequantize().double(), want.float().double())
    packed, powers = blocks.flatten(2).view(torch.int8), (scales.float() - 127).exp2()
    for kind in (scales.view(torch.float8_e8m0fnu), powers):
        made = from_mxfp4(packed, kind)
        assert torch.equal(made.blocks, from_mxfp4(blocks, scales).blocks)
    with pytest.raises(ValueError, match="scales must be powers of two"):
        from_mxfp4(packed, powers * 1.5)
    with pytest.raises(ValueError, match="a row must be a multiple of 32 values, got 62"):
        from_mxfp4(packed[..., :-1], powers)
    scales[2, 1, 0] = 255
    for damaged in (scales, scales.view(torch.float8_e8m0fnu)):
        with pytest.raises(ValueError, match="scales must be finite, got the exponent 255"):
            from_mxfp4(blocks, damaged)


def test_scales_per_matrix(rng: torch.Generator) -> None:
    weight = torch.randn(3, 8, 256, generator=rng).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, 1, generator=rng)  # of gate and up, put together
    want = weight.float() * scale.repeat_interleave(4, 1)
    assert torch.equal(from_released_fp8(weight, scale, None, torch.float32, halves=True).dequantize(), want)
    one = torch.tensor(0.5)
    assert torch.equal(from_released_fp8(weight[0], one, None, torch.float32).dequantize(), weight[0].float() / 2)
    narrow = from_released_fp8(weight[0, :, :96], one, None, torch.float32)
    assert torch.equal(narrow, weight[0, :, :96].float() / 2)


@pytest.mark.skipif(OLD, reason="the family came later")
def test_deepseek_v4_as_it_is_released(tmp_path: Path) -> None:
    """Experts in FP4, two numbers in a byte and a scale for 32, linear layers in FP8, tensors by its own names."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 128, "head_dim": 32, "o_groups": 4}
    families.tiny_model("deepseek_v4", **sizes).save_pretrained(tmp_path)
    tensors = {name.removeprefix("model."): x for name, x in load_file(tmp_path / "model.safetensors").items()}
    tensors["embed.weight"] = tensors.pop("embed_tokens.weight")
    for name in [name for name in tensors if name.endswith(".weight") and tensors[name].dim() == 2]:
        rows, columns = tensors[name].shape
        scale = name.replace(".weight", ".scale")
        if ".experts." in name:
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
            tensors[scale] = torch.randint(119, 123, (rows, columns // 32), dtype=torch.uint8)
        elif rows % 128 == columns % 128 == 0:
            tensors[name] = (tensors[name] * 256).to(torch.float8_e4m3fn)
            tensors[scale] = torch.randint(118, 121, (rows // 128, columns // 128), dtype=torch.uint8)
        if scale in tensors:
            tensors[scale] = tensors[scale].view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    told = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    change_config(tmp_path, quantization_config=told)
    theirs, ours, ids = load(tmp_path, "eager"), load(tmp_path), tokens()
    assert _kinds(ours) == {"experts": {"MXFP4"}, "others": {"FP8"}}
    assert close(logits(ours, ids), logits(theirs, ids), TOLERANCE["MXFP4"])
    moefuse.hf.dequantize(ours)
    ours.set_experts_implementation("eager")
    assert difference(logits(ours, ids), logits(theirs, ids).double()).worst < 1e-5
