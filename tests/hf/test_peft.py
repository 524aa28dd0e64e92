"""PEFT's adapters on experts, put in before and after `patch`, and on linear layers in blocks: what transformers' own
modules compute with them."""

import copy
from pathlib import Path

import pytest
import torch
from families import tiny_model
from gguf_files import KINDS, make
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from released_files import save_fp8, tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moefuse.hf import BlockExperts, dequantize, from_gguf, patch, unpatch
from moefuse.nn import add_lora
from moefuse.testing.compare import difference

_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def adapted(model: nn.Module, *targets: str) -> PeftModel:
    """With adapters that are not zero."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=[], target_parameters=targets, init_lora_weights=False)
    return get_peft_model(model, config)


def step(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of one training step."""
    model.train().zero_grad()
    out = model(input_ids=tokens, labels=tokens)
    out.loss.backward()
    grads = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return out.logits.detach(), grads


@pytest.mark.parametrize("patched", ["before", "after"])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("mixtral", (_UP,)),
        ("gpt_oss", (_DOWN,)),
        *((name, (_UP, _DOWN)) for name in ("qwen3_moe", "mixtral", "gpt_oss")),
    ],
)
def test_adapters_on_experts(family: str, targets: tuple[str, ...], patched: str) -> None:
    base = tiny_model(family)
    stock = copy.deepcopy(base)
    stock.set_experts_implementation("eager")
    if patched == "before":
        assert len(patch(base).patched) == 2
    ours, theirs = adapted(base, *targets), adapted(stock, *targets)
    if patched == "after":
        assert "its experts are wrapped in ParamWrapper" in str(patch(ours))
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 97, (2, 6))
    (logits, grads), (want_logits, want_grads) = step(ours, tokens), step(theirs, tokens)
    assert difference(logits, want_logits.double()).worst < 1e-5
    assert grads.keys() == want_grads.keys()
    assert len(grads) == 2 * 2 * len(targets)
    for name, want in want_grads.items():
        assert difference(grads[name], want.double(), whole=True).worst < 1e-5, name

    def agree(got: nn.Module, want: nn.Module) -> bool:
        logits, want_logits = (model.eval()(input_ids=tokens).logits for model in (got, want))
        return difference(logits, want_logits.double()).worst < 1e-5

    with torch.no_grad():
        with ours.disable_adapter(), theirs.disable_adapter():
            assert agree(ours, theirs)
            assert difference(ours(input_ids=tokens).logits, want_logits.double()).worst > 1e-3, "adapters do something"
        for change in ("merge_adapter", "unmerge_adapter"):
            getattr(ours, change)()
            getattr(theirs, change)()
            assert agree(ours, theirs), change
        merged, want_merged = ours.merge_and_unload(), theirs.merge_and_unload()
        assert agree(merged, want_merged)
        unpatch(merged)
        assert agree(merged, want_merged)


def test_blocks_are_whole_again_without_adapters() -> None:
    model = tiny_model("qwen3_moe")
    patch(model)
    tokens = torch.randint(0, 97, (2, 6))
    with torch.no_grad():
        want = model(input_ids=tokens).logits
        assert torch.equal(adapted(model, _UP, _DOWN).unload()(input_ids=tokens).logits, want)


def test_adapters_on_what_stands_beside_the_experts() -> None:
    base = tiny_model("qwen2_moe")
    stock = copy.deepcopy(base)
    stock.set_experts_implementation("eager")
    patch(base)
    config = LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)
    ours, theirs = get_peft_model(base, config), get_peft_model(stock, config)
    assert any("shared_expert" in name for name, _ in ours.named_parameters() if "lora" in name)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(0, 97, (2, 6))
    (logits, grads), (want_logits, want_grads) = step(ours, tokens), step(theirs, tokens)
    assert difference(logits, want_logits.double()).worst < 1e-5
    assert grads.keys() == want_grads.keys()
    for name, want in want_grads.items():
        assert difference(grads[name], want.double(), whole=True).worst < 1e-5, name


def test_adapters_on_linear_layers_in_blocks(tmp_path: Path) -> None:
    make(KINDS["olmoe"], tmp_path / "model.gguf", in_blocks=True)
    ours, theirs = (from_gguf(tmp_path / "model.gguf", dtype="fp32", exact=True, progress=False)[0] for _ in range(2))
    dequantize(theirs)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ours, theirs = get_peft_model(ours, config), get_peft_model(theirs, config)
    adapters = get_peft_model_state_dict(ours)
    assert len(adapters) == 2 * 2 * 2
    set_peft_model_state_dict(theirs, adapters)
    assert not set_peft_model_state_dict(ours, adapters).unexpected_keys
    tokens = torch.randint(0, 320, (2, 6))
    (logits, grads), (want_logits, want_grads) = step(ours, tokens), step(theirs, tokens)
    assert difference(logits, want_logits.double()).worst < 1e-5
    assert grads.keys() == want_grads.keys() == {f"{name[:-7]}.default.weight" for name in adapters}
    for name, want in want_grads.items():
        assert difference(grads[name], want.double(), whole=True).worst < 1e-4, name


def test_merging_into_blocks_is_refused_and_into_their_numbers_exact(tmp_path: Path) -> None:
    """Of a model released in FP8, with adapters on linear layers and beside experts."""
    save_fp8(tiny("qwen3_moe"), tmp_path / "fp8")
    options = {"dtype": torch.float32, "experts_implementation": "moefuse"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", **options)
    # By name PEFT finds parameters alone, of which experts in blocks have none.
    for modules, told in (([], pytest.raises(ValueError, match="no `target_parameters` found")),
                          (["q_proj"], pytest.warns(RuntimeWarning, match="no parameter was matched"))):  # fmt: skip
        with told:
            get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=modules, target_parameters=[_UP, _DOWN]))
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    for module in [module for module in adapted.modules() if isinstance(module, BlockExperts)]:
        nn.init.normal_(add_lora(module, rank=4).down_b, std=0.1)
    tokens = torch.randint(0, 97, (2, 6))
    with torch.no_grad():
        want = adapted(input_ids=tokens).logits
        for merge in (adapted.merge_adapter, adapted.merge_and_unload, lambda: adapted.merge_adapter(safe_merge=True)):
            with pytest.raises(AttributeError, match=r"cannot be merged into it.*moefuse\.hf\.dequantize"):
                merge()
        assert torch.equal(adapted(input_ids=tokens).logits, want), "nothing was touched"
        dequantize(adapted)
        merged = adapted.merge_and_unload()
        assert difference(merged(input_ids=tokens).logits, want.double()).worst < 1e-5
        merged.save_pretrained(tmp_path / "merged")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert difference(again(input_ids=tokens).logits, want.double()).worst < 1e-5
