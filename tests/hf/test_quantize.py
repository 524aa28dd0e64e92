"""Experts into blocks: in place, while loading, saved and loaded again; every family."""

import copy
import functools
import math
from pathlib import Path

import pytest
import torch
import transformers
from families import families, same_tensors, tiny_model
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from released_files import change_config, tiny, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import moefuse.hf
from moefuse import quantize
from moefuse.hf import BlockExperts, MoefuseConfig, dequantize, quantize_
from moefuse.hf.quantizer import mark
from moefuse.hf.support import on_interface
from moefuse.nn import ExpertsLoRA, add_lora, merge_lora
from moefuse.testing.compare import difference

TOLERANCE = 1e-5
LATER = {"glm_moe_dsa", "mistral4"} if Version(transformers.__version__) < Version("5.22") else set()
#: transformers cannot load what its text model alone saves
UNSAVED = {"mistral_large4"}
WIDTHS = {"moe_intermediate_size": 32, "intermediate_size": 64, "expert_intermediate_size": 32}


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(input_ids=ids)
    return out.logits if "logits" in out else out.last_hidden_state


def error_of(family: str, folder: Path) -> float:
    """Of a quantised model against its own numbers in eager; along the way it is loaded in every way."""
    model = tiny_model(family, **WIDTHS)
    ids = torch.randint(0, 97, (2, 7))
    if family not in UNSAVED:
        model.save_pretrained(folder / "stock")
    stock = copy.deepcopy(model)
    before = dict(on_interface(stock))
    report = quantize_(model, "Q8_0", exact=True, progress=False)
    held = {path: module for path, module in model.named_modules() if isinstance(module, BlockExperts)}
    assert held.keys() == before.keys()
    for path, module in held.items():
        stack = before[path].down_proj.transpose(1, 2) if before[path].is_transposed else before[path].down_proj
        if stack.shape[-1] % 32 == 0:
            assert torch.equal(module.down, quantize(stack, "Q8_0").blocks)
    assert all(one.error < 0.01 for one in report.stacks)
    assert sum(one.after == "Q8_0" for one in report.stacks) >= len(held)
    got, all_logits = logits_of(model, ids), []
    if family not in UNSAVED:
        model.save_pretrained(folder / "blocks")
        again = type(model).from_pretrained(folder / "blocks", dtype=torch.float32)
        assert all(same_tensors(again.get_submodule(path), module) for path, module in held.items()), "saved and loaded"
        config = MoefuseConfig("q8_0", exact=True)
        streamed = type(model).from_pretrained(folder / "stock", dtype=torch.float32, quantization_config=config)
        assert all(same_tensors(streamed.get_submodule(path), module) for path, module in held.items()), "streamed"
        all_logits = [logits_of(again, ids), logits_of(streamed, ids)]
    dequantize(model)
    for path, module in before.items():
        own = dict(model.get_submodule(path).named_parameters())
        for name, value in module.named_parameters():
            assert (own[name] - value).norm() <= 0.01 * value.norm(), f"{path}.{name} has its own layout again"
    model.set_experts_implementation("eager")
    want = logits_of(model, ids).double()
    return max(difference(each, want).worst for each in (got, *all_logits))


@pytest.mark.parametrize("family", families())
def test_every_family(family: str, tmp_path: Path) -> None:
    if family in LATER:
        pytest.skip("its small configuration is for later releases of transformers")
    # A router may stand between two experts by less than float32 tells apart; then three other draws must not.
    draws = (error_of(family, tmp_path / str(draw)) for draw in range(4))
    assert next(draws) < TOLERANCE or max(draws) < TOLERANCE


def test_mixtures_and_the_report() -> None:
    model = tiny("qwen3_moe", moe_intermediate_size=160)
    want = logits_of(model, ids := tokens())
    rules = {"gate_up": "Q5_K", r"layers\.1\..*down": "Q8_0", r"layers\.1\..*gate_up": None}
    report = quantize_(model, rules=rules, progress=False)
    first, second = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"
    assert [(one.module, one.stack, one.before, one.after) for one in report.stacks] == [
        (first, "gate_up", "float32", "Q5_K"),
        (first, "down", "float32", "Q4_0"),  # rows of 160
        (second, "gate_up", "float32", "float32"),
        (second, "down", "float32", "Q8_0"),
    ]
    errors = [one.error for one in report.stacks]
    assert errors[2] == 0 < errors[3] < 0.01 < errors[0] < 0.05 < errors[1] < 0.12
    assert [one.bytes_after for one in report.stacks[:2]] == [8 * 320 * 176, 8 * 256 * 160 // 32 * 18]
    assert "Q4_K does not fit rows of 160" in str(report)
    assert "4 stacks: 7.5 MiB became" in str(report)
    assert difference(logits_of(model, ids), want.double(), whole=True).worst < 0.3
    # From blocks to other blocks, expert by expert.
    again = quantize_(model, "Q8_0", progress=False)
    assert [(one.before, one.after) for one in again.stacks] == [
        ("Q5_K", "Q8_0"), ("Q4_0", "Q8_0"), ("float32", "Q8_0"), ("Q8_0", "Q8_0"),
    ]  # fmt: skip
    assert again.stacks[3].error == 0


def test_patched_models_stay_patched() -> None:
    model = tiny("qwen3_moe")
    moefuse.hf.patch(model)
    quantize_(model, "Q4_K", {"down": "Q8_0"}, progress=False)
    assert all(hasattr(layer.mlp, "_moefuse") for layer in model.model.layers)
    got = logits_of(model, ids := tokens())
    moefuse.hf.unpatch(model)
    assert difference(got, logits_of(model, ids).double()).worst < 1e-2
    moefuse.hf.capture(model, 1, 32)
    with pytest.raises(ValueError, match="uncapture it first"):
        quantize_(model, "Q8_0")


def test_what_is_refused() -> None:
    model = tiny("qwen3_moe")
    for wrong in ("Q9_K", "MXFP4", 4):
        with pytest.raises(ValueError, match=r"a format must be one of Q4_K, .* got"):
            quantize_(model, wrong)
        with pytest.raises(ValueError, match=r"a format must be one of Q4_K, .* got"):
            MoefuseConfig(wrong)
    for wrong in ("Q9_K", "", 0):
        with pytest.raises(ValueError, match=r"a format must be one of Q4_K, .* got"):
            quantize_(model, "Q8_0", {"down": wrong})
    with pytest.raises(ValueError, match="must have regular expressions, got '\\('"):
        quantize_(model, "Q4_K", {"(": "Q8_0"})
    with pytest.raises(ValueError, match="must have regular expressions, got 3"):
        quantize_(model, "Q4_K", {3: "Q8_0"})
    for take in (MoefuseConfig, functools.partial(quantize_, model)):
        with pytest.raises(TypeError, match="rules must be a mapping of patterns to formats, got list"):
            take("Q4_K", ["down"])
        with pytest.raises(TypeError, match="unexpected keyword argument 'rule'"):
            take("Q4_K", rule={"down": "Q6_K"})
    with pytest.raises(ValueError, match=r"rules must each fit a stack such as model\..*\.down, got 'dwon'"):
        quantize_(model, "Q8_0", {"down": "Q6_K", "dwon": "Q6_K"})
    for take in (MoefuseConfig, functools.partial(quantize_, model)):
        with pytest.raises(TypeError, match="exact must be a bool, got str"):
            take("Q4_K", exact="no")
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        quantize_("model")
    dense = LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50)
    )
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot have its experts in blocks: .* a dense model"):
        quantize_(dense)
    with torch.device("meta"):
        empty = type(model)(model.config)
    with pytest.raises(ValueError, match=r"experts\.gate_up must be a plain tensor, got one that has no memory"):
        quantize_(empty)
    assert not any(isinstance(module, BlockExperts) for module in model.modules()), "nothing was touched"


def test_a_rule_that_fits_nothing_while_loading(tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    config = MoefuseConfig("Q8_0", rules={"dwon": "Q4_0"})
    with pytest.raises(ValueError, match=r"rules must each fit a stack such as .*, got 'dwon'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)


def test_weights_that_no_block_holds(tmp_path: Path) -> None:
    """Not-a-number is found before anything is touched; what is found later leaves a model that computes and saves."""
    model, ids = tiny("qwen3_moe"), tokens()
    moefuse.hf.patch(model)
    weight, path = model.model.layers[1].mlp.experts.down_proj, "model.layers.1.mlp.experts.down"
    before = weight[3, 5, 7].item()
    weight.data[3, 5, 7] = torch.nan
    with pytest.raises(ValueError, match=f"quantize_: {path} must be finite, got NaN".replace(".", r"\.")):
        quantize_(model, "Q8_0", progress=False)
    assert not any(isinstance(module, BlockExperts) for module in model.modules())
    weight.data[3, 5, 7] = 1e9  # more than a float16 scale can do
    with pytest.raises(ValueError, match=rf"{path}\[3\]: quantize: weight must leave scales".replace("l.", r"l\.")):
        quantize_(model, "Q8_0", exact=True, progress=False)
    first, second = (layer.mlp for layer in model.model.layers)
    assert isinstance(first.experts, BlockExperts)
    assert not isinstance(second.experts, BlockExperts)
    assert hasattr(first, "_moefuse"), "patched as it was"
    assert hasattr(second, "_moefuse")
    weight.data[3, 5, 7] = before
    got = logits_of(model, ids)
    moefuse.hf.unpatch(model)
    numbers = copy.deepcopy(model)
    dequantize(numbers)
    assert difference(got, logits_of(numbers, ids).double()).worst < TOLERANCE
    model.save_pretrained(tmp_path / "some")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "some", experts_implementation="moefuse")
    assert difference(logits_of(again, ids), got.double()).worst < TOLERANCE
    weight.data[3, 5, 7] = torch.nan
    dequantize(model)
    model.save_pretrained(tmp_path / "nan")
    with pytest.raises(ValueError, match=rf"{path}_proj\[3\]: quantize: weight must be finite".replace("l.", r"l\.")):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nan", quantization_config=MoefuseConfig("Q8_0"))


def test_a_foreign_activation_is_refused_by_name() -> None:
    model = tiny("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.Tanh()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts cannot be in blocks: the activation of Qwen3"):
        quantize_(model)


def test_saved_blocks_that_do_not_fit(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    quantize_(model, "Q8_0", progress=False)
    model.save_pretrained(tmp_path)
    config = model.config.quantization_config.to_dict()
    name = "model.layers.0.mlp.experts"
    wrong = config | {"modules": config["modules"] | {name: {"gate_up": "Q4_0", "down": "Q8_0"}}}
    change_config(tmp_path, quantization_config=wrong)
    with pytest.raises(ValueError, match=r"experts\.gate_up must be \[8, 256, 144\] in Q4_0, got \[8, 256, 272\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=config | {"modules": {"model.layers.7.mlp.experts": {}}})
    with pytest.raises(ValueError, match=r"names model\.layers\.7\.mlp\.experts, and Qwen3MoeForCausalLM has no such"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=config)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{name}.down"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"must have model\.layers\.0\.mlp\.experts\.down, and it has not"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_formats_of_equal_width_are_told_apart(tmp_path: Path) -> None:
    """Q4_K and Q4_0 have rows of as many bytes: taking one for the other would be noise, or NaN."""
    model, other = (tiny("qwen3_moe", moe_intermediate_size=256) for _ in range(2))
    quantize_(model, "Q4_K", progress=False)
    quantize_(other, "Q4_0", progress=False)
    assert {name: part.shape for name, part in model.named_buffers()} == {
        name: part.shape for name, part in other.named_buffers()
    }
    with pytest.raises(ValueError, match=r"BlockExperts: the state must have model\.layers\.0\.mlp\.experts\.specs"):
        other.load_state_dict(model.state_dict())
    quantize_(other, "Q4_K", progress=False)
    other.load_state_dict(model.state_dict())
    assert same_tensors(other, model)
    model.save_pretrained(tmp_path)
    told = model.config.quantization_config.to_dict()
    wrong = {"model.layers.1.mlp.experts": {"gate_up": "Q4_0", "down": "Q4_0"}}
    change_config(tmp_path, quantization_config=told | {"modules": told["modules"] | wrong})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts must be in the formats .*Q4_0.*, got .*Q4_K"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_with_a_head_and_without(tmp_path: Path) -> None:
    """As transformers does with numbers: a model is loaded from one with another head, or with none."""
    model, ids = tiny("qwen3_moe"), tokens()
    quantize_(model, "Q8_0", progress=False)
    want = logits_of(model.model, ids)
    model.save_pretrained(tmp_path / "with")
    model.model.save_pretrained(tmp_path / "without")
    mark(model.model).save_pretrained(tmp_path / "own")
    for folder in ("with", "without", "own"):
        bare = AutoModel.from_pretrained(tmp_path / folder)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        for found in (bare, whole.model):
            assert same_tensors(found, model.model)
            assert difference(logits_of(found, ids), want.double()).worst < TOLERANCE


def test_blocks_cannot_be_on_the_disk(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    quantize_(model, "Q8_0", progress=False)
    model.save_pretrained(tmp_path / "saved")
    on_cpu = ("lm_head", "model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb")
    places = dict.fromkeys(on_cpu, "cpu") | {"model.layers.1": "disk"}
    with pytest.raises(
        ValueError, match=r"must have model\.layers\.1\.mlp\.experts\.gate_up.* leaves them on the disk"
    ):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "saved", device_map=places, offload_folder=str(tmp_path / "offloaded")
        )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", device_map="cpu")
    assert same_tensors(again, model)


def test_a_trainer_takes_adapters(tmp_path: Path) -> None:
    """Of transformers: it trains what has gradients, and goes on from its own checkpoint."""
    model, ids = tiny("qwen3_moe"), tokens()
    quantize_(model, "Q4_K", progress=False)
    model.requires_grad_(False)
    adapters = [add_lora(module, 4) for module in model.modules() if isinstance(module, BlockExperts)]
    start, held = copy.deepcopy(model), {name: value.clone() for name, value in model.named_buffers()}
    options = {"report_to": [], "use_cpu": True, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}
    data = [{"input_ids": row, "labels": row} for row in ids]

    def trainer(model: nn.Module, steps: int) -> Trainer:
        told = TrainingArguments(str(tmp_path), max_steps=steps, lr_scheduler_type="constant", **options)
        return Trainer(model, told, train_dataset=data)

    once = trainer(model, 4)
    once.train()
    losses = [step["loss"] for step in once.state.log_history if "loss" in step]
    assert losses[-1] < losses[0] - 0.1
    assert all(bool(b.any()) for one in adapters for b in (one.gate_up_b, one.down_b))
    assert all(torch.equal(value, held[name]) for name, value in model.named_buffers())
    trainer(start, 4).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, value in start.named_parameters():
        assert (value - model.get_parameter(name)).norm() <= 1e-4 * value.norm(), name


def test_dequantize_through_transformers(tmp_path: Path) -> None:
    model = tiny("qwen3_moe")
    quantize_(model, "Q8_0", exact=True, progress=False)
    got = logits_of(model, ids := tokens())
    assert model.is_quantized
    numbers = copy.deepcopy(model).dequantize()
    numbers.set_experts_implementation("eager")
    assert difference(got, logits_of(numbers, ids).double()).worst < TOLERANCE
    numbers.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    assert same_tensors(again, numbers)
    assert difference(logits_of(again, ids), logits_of(numbers, ids).double()).worst < TOLERANCE


def test_gradients_pass_through() -> None:
    model = tiny("qwen3_moe")
    quantize_(model, "Q8_0", exact=True, progress=False)
    numbers = copy.deepcopy(model)
    dequantize(numbers)
    numbers.set_experts_implementation("eager")
    ids, grads = tokens(), []
    for one in (model, numbers):
        one.model.embed_tokens.weight.grad = None
        one(input_ids=ids, labels=ids).loss.backward()
        grads.append(one.model.embed_tokens.weight.grad)
    assert difference(grads[0], grads[1].double(), whole=True).worst < 1e-4


def _adapted(model: nn.Module) -> list[ExpertsLoRA]:
    """With adapters that are not zero."""
    adapters = [add_lora(module, rank=4) for module in model.modules() if isinstance(module, BlockExperts)]
    with torch.no_grad():
        for one in adapters:
            one.gate_up_b.normal_(std=0.3)
            one.down_b.normal_(std=0.3)
    return adapters


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_beside_blocks_are_what_merging_makes_of_them(family: str) -> None:
    """Of a transposed, interleaved layout with biases, too; before and after patch."""
    model = tiny(family)
    quantize_(model, "Q8_0", exact=True, progress=False)
    moefuse.hf.patch(model)
    without = logits_of(model, ids := tokens())
    model.requires_grad_(False)
    adapters = _adapted(model)
    learned = {name for name, value in model.named_parameters() if value.requires_grad}
    assert learned == {
        f"model.layers.{i}.mlp.experts.lora.{part}_{ab}"
        for i in range(2)
        for part in ("gate_up", "down")
        for ab in "ab"
    }
    beside = logits_of(model, ids)
    assert difference(beside, without.double(), whole=True).worst > 1e-2
    moefuse.hf.unpatch(model)
    assert difference(logits_of(model, ids), beside.double(), whole=True).worst < TOLERANCE
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.norm() > 0 for parameter in adapters[0].parameters())
    experts = next(module for module in model.modules() if isinstance(module, BlockExperts))
    with pytest.raises(ValueError, match=r"experts in blocks cannot take a delta; .* moefuse\.hf\.dequantize"):
        merge_lora(experts)
    with pytest.raises(ValueError, match=r"has adapters: moefuse\.hf\.dequantize folds them in"):
        quantize_(model, "Q4_0")
    dequantize(model)
    model.set_experts_implementation("eager")
    assert difference(logits_of(model, ids), beside.double(), whole=True).worst < 1e-5


def test_gradients_of_adapters() -> None:
    """Those of the same adapters beside the numbers, by autograd."""
    model = tiny("qwen3_moe")
    quantize_(model, "Q8_0", exact=True, progress=False)
    module = model.model.layers[1].mlp.experts
    x, ids, weights = torch.randn(7, 256), torch.randint(0, 8, (7, 2)), torch.rand(7, 2)
    lora = _adapted(module)[0]
    module(x, ids, weights).square().sum().backward()
    gate_up, down = module.stack("gate_up").dequantize().double(), module.stack("down").dequantize().double()
    leaves = {name: value.detach().double().requires_grad_() for name, value in lora.named_parameters()}
    gate_up = gate_up + lora.scale * leaves["gate_up_b"] @ leaves["gate_up_a"]
    down = down + lora.scale * leaves["down_b"] @ leaves["down_a"]
    gate, up = torch.einsum("th,tkih->tki", x.double(), gate_up[ids]).chunk(2, -1)
    out = torch.einsum("tki,tkhi->tkh", nn.functional.silu(gate) * up, down[ids])
    (out * weights.double()[..., None]).sum(1).square().sum().backward()
    for name, value in lora.named_parameters():
        assert difference(value.grad, leaves[name].grad, whole=True).worst < TOLERANCE, name


def test_peft_reaches_what_stands_beside_blocks_and_says_what_it_does_not() -> None:
    model = tiny("qwen3_moe")
    quantize_(model, "Q8_0", progress=False)
    with pytest.raises(ValueError, match="no `target_parameters` found"):
        get_peft_model(
            copy.deepcopy(model), LoraConfig(r=4, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
        )
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    ids = tokens()
    adapted(input_ids=ids, labels=ids).loss.backward()
    grads = [value.grad for value in adapted.parameters() if value.requires_grad]
    assert len(grads) == 4
    assert all(grad.norm() > 0 for grad in grads)


def test_the_model_in_the_box_after_quantize_() -> None:
    """Its GGUF has Q4_K and Q6_K; Q4_K throughout, made of its numbers, costs next to nothing."""
    root = Path(__file__).parents[2]
    model, tokenizer = moefuse.hf.from_gguf(root / "src/moefuse/box/box.gguf", dtype="fp32", progress=False)
    ids = tokenizer((root / "examples/held_out.txt").read_text()[:12_000], return_tensors="pt").input_ids[0]
    pieces = ids[: len(ids) // 128 * 128].view(-1, 128)

    def perplexity() -> float:
        with torch.no_grad():
            return math.exp(
                sum(float(model(input_ids=one[None], labels=one[None]).loss) for one in pieces) / len(pieces)
            )

    want = perplexity()
    dequantize(model)
    numbers = copy.deepcopy(model)
    for rules in ({}, {"down": "Q6_K"}):
        model = copy.deepcopy(numbers)
        quantize_(model, "Q4_K", rules, progress=False)
        got = perplexity()
        print(f"perplexity {want:.3f} from the GGUF, {got:.3f} after quantize_ to Q4_K {rules}: {got / want - 1:+.2%}")
        assert abs(got / want - 1) < 0.005
