"""from_gguf: a file's model and tokenizer, against transformers with the same numbers."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import END, KINDS, LATER, OLD, TEXT, make
from torch import Tensor, nn

import moefuse.hf
from moefuse import quantize
from moefuse.hf.gguf_experts import BlockExperts, block_experts, dequantized_bytes
from moefuse.hf.gguf_models import ARCHITECTURES
from moefuse.hf.load import _fits_twice
from moefuse.hf.support import on_interface
from moefuse.nn import QuantLinear
from moefuse.nn.from_gguf import FAMILIES
from moefuse.nn.quantized import BlockModule, QuantModule
from moefuse.quant.gguf import read, write
from moefuse.testing.compare import difference

# Two float32 computations of the same network: 2 layers of sums a few hundred terms long.
TOLERANCE = 1e-5


def load(path: Path, **options: object) -> tuple[nn.Module, transformers.PreTrainedTokenizerBase]:
    return moefuse.hf.from_gguf(path, **{"dtype": torch.float32, "exact": True, "progress": False} | options)


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


#: what is in numbers though the file has blocks: a router, a product with one row, rows that are laid across blocks
NUMBERS = r"router\.proj|mlp\.shared_expert_gate|self_attn\.kv_b_proj"


def errors_of(name: str, path: Path, in_blocks: bool) -> list[float]:
    """The error of a fresh file's model: as it comes, patched, and with all as numbers."""
    stock = make(KINDS[name], path, in_blocks=in_blocks)
    stock.set_experts_implementation("eager")
    model, _ = load(path)
    assert type(model) is type(stock)
    assert all(not value.is_meta and not value.requires_grad for value in model.parameters())
    assert len(block_experts(model)) == len(list(on_interface(stock))) > 0
    if in_blocks:
        matrices = {path: m for path, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}
        numbers = {path for path, module in matrices.items() if not isinstance(module, QuantModule)}
        assert all(re.fullmatch(rf"model\.layers\.\d+\.({NUMBERS})", path) for path in numbers), numbers
        assert name != "deepseek2 with keys and values in one matrix" or not numbers
        assert len({module.spec for path, module in matrices.items() if path not in numbers}) > 3
    tokens = torch.randint(0, stock.config.vocab_size, (2, 24))
    want = logits(stock, tokens).double()
    assert want.std() > 0.03, "logits next to nothing would hide every fault"
    errors = [difference(logits(model, tokens), want).worst]
    report = moefuse.hf.patch(model)
    assert report.patched or name == "gemma4"
    errors.append(difference(logits(model, tokens), want).worst)
    moefuse.hf.unpatch(model)
    moefuse.hf.dequantize(model)
    assert kinds(model) == kinds(stock)
    words, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (words is output) == stock.config.tie_word_embeddings
    model.set_experts_implementation("eager")
    errors.append(difference(logits(model, tokens), want).worst)
    print(name, errors)
    return errors


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules()]


@pytest.mark.parametrize("in_blocks", [False, True], ids=["some matrices in blocks", "all matrices in blocks"])
@pytest.mark.parametrize("name", KINDS)
def test_same_logits_as_transformers_with_the_same_numbers(tmp_path: Path, name: str, in_blocks: bool) -> None:
    if name in LATER:
        pytest.skip("this release of transformers cannot run it")
    errors = errors_of(name, tmp_path / "model.gguf", in_blocks)
    if max(errors) > TOLERANCE:
        # A router may stand between two experts by less than float32 tells apart; then three other draws must not.
        errors = [error for _ in range(3) for error in errors_of(name, tmp_path / "model.gguf", in_blocks)]
    assert max(errors) < TOLERANCE


def test_every_architecture_is_tested() -> None:
    assert {kind.architecture for kind in KINDS.values()} == set(ARCHITECTURES)
    assert set(ARCHITECTURES) <= set(FAMILIES), "what the router computes is read there"


@pytest.mark.skipif(OLD, reason="the loader of this release of transformers does not take the file")
def test_same_logits_and_tokens_as_the_stock_loader(tmp_path: Path) -> None:
    text = TEXT[:200] + " naïve — 12345 \n\n  don't"

    def error() -> float:
        make(KINDS["qwen3moe"], tmp_path / "model.gguf")
        model, tokenizer = load(tmp_path / "model.gguf")
        stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
        tokens = tokenizer(text, return_tensors="pt").input_ids
        assert torch.equal(tokens, theirs(text, return_tensors="pt").input_ids)
        assert tokenizer.decode(tokens[0]) == text
        return difference(logits(model, tokens[:, :32]), logits(stock, tokens[:, :32]).double()).worst

    assert error() < TOLERANCE or max(error() for _ in range(3)) < TOLERANCE


def test_experts_are_views_of_the_file(tmp_path: Path) -> None:
    make(KINDS["qwen3moe"], tmp_path / "model.gguf")
    model, _ = load(tmp_path / "model.gguf", dtype="auto", exact=False)
    assert model.dtype == torch.bfloat16
    file = read(tmp_path / "model.gguf")
    module = model.model.layers[1].mlp.experts
    assert isinstance(module, BlockExperts)
    assert module.specs == {"gate_up": "Q4_K", "up": "Q5_K", "down": "Q6_K"}
    assert torch.equal(module.down_proj, file["blk.1.ffn_down_exps.weight"].blocks)
    stored = module.down_proj.untyped_storage()
    assert stored.nbytes() == file.nbytes, "a view of the whole map"
    assert "down=Q6_K" in repr(module)
    assert moefuse.hf.supports(model)


def test_matrices_are_views_of_the_file(tmp_path: Path) -> None:
    make(KINDS["qwen3moe"], tmp_path / "model.gguf", in_blocks=True)
    model, _ = load(tmp_path / "model.gguf", dtype="auto", exact=False)
    file = read(tmp_path / "model.gguf")
    for path, name in {
        "model.layers.1.self_attn.k_proj": "blk.1.attn_k.weight",
        "model.embed_tokens": "token_embd.weight",
        "lm_head": "output.weight",
    }.items():
        module = model.get_submodule(path)
        assert module.spec == file[name].format
        assert torch.equal(module.blocks, file[name].blocks)
        assert module.blocks.untyped_storage().nbytes() == file.nbytes, "a view of the whole map"
        assert module.weight.dtype == torch.bfloat16
    assert (model.dtype, model.device) == (torch.bfloat16, torch.device("cpu"))


def test_dense_in_numbers(tmp_path: Path) -> None:
    make(KINDS["qwen2moe"], tmp_path / "model.gguf", in_blocks=True)
    blocks, _ = load(tmp_path / "model.gguf")
    numbers, _ = load(tmp_path / "model.gguf", dequantize="dense")
    assert not any(isinstance(module, QuantModule) for module in numbers.modules())
    assert block_experts(numbers)
    tokens = torch.randint(0, 320, (2, 9))
    assert difference(logits(blocks, tokens), logits(numbers, tokens).double()).worst < TOLERANCE
    assert dequantized_bytes(blocks) > dequantized_bytes(numbers) > 0
    with pytest.raises(ValueError, match="dequantize must be None or 'dense', got 'all'"):
        load(tmp_path / "model.gguf", dequantize="all")


def test_one_matrix_of_words_is_kept_once(tmp_path: Path) -> None:
    name = "qwen3moe with a dense layer, biases and one matrix of words"
    make(KINDS[name], tmp_path / "model.gguf", in_blocks=True)
    model, _ = load(tmp_path / "model.gguf")
    assert model.lm_head.blocks is model.model.embed_tokens.blocks
    matrices = [module for module in model.modules() if isinstance(module, QuantModule)]
    assert len({module.blocks.data_ptr() for module in matrices}) == len(matrices) - 1
    twice = dequantized_bytes(model)
    model.lm_head.blocks = model.lm_head.blocks.clone()
    assert dequantized_bytes(model) - twice == 4 * 320 * 256


def test_moving_arranges_blocks(tmp_path: Path, moves: Any) -> None:
    """Experts, matrices and the words that two modules share, once."""
    to_gpu, to_cpu = moves
    name = "qwen3moe with a dense layer, biases and one matrix of words"
    make(KINDS[name], tmp_path / "model.gguf", in_blocks=True)
    model, _ = load(tmp_path / "model.gguf")
    tokens = torch.randint(0, 320, (2, 9))
    want, state = logits(model, tokens), {name: value.clone() for name, value in model.state_dict().items()}
    to_gpu(model)
    assert model.lm_head.blocks is model.model.embed_tokens.blocks
    assert model.lm_head.spec.endswith(":planes:exact")
    module = next(iter(block_experts(model).values()))
    assert all(spec.endswith(":planes:exact") for spec in module.specs.values())
    assert torch.equal(logits(model, tokens), want)
    moved = model.state_dict()
    assert all(torch.equal(moved[name], value) for name, value in state.items())
    other = to_gpu(load(tmp_path / "model.gguf")[0])
    for value in other.buffers():
        if value.dtype == torch.uint8:
            value.zero_()
    other.load_state_dict(moved)
    assert torch.equal(logits(other, tokens), want)
    to_cpu(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    to_gpu(model)
    moefuse.hf.dequantize(model)
    assert difference(logits(model, tokens), want.double()).worst < TOLERANCE


def test_arranged_for_a_cpu(tmp_path: Path) -> None:
    """The same bits from memory of its own, eager, patched and captured; the words that two modules share once."""
    name = "qwen3moe with a dense layer, biases and one matrix of words"
    make(KINDS[name], tmp_path / "model.gguf", in_blocks=True)
    plain, _ = load(tmp_path / "model.gguf")
    model, _ = load(tmp_path / "model.gguf", arrange=True)
    arranged = [module for module in model.modules() if isinstance(module, BlockModule)]
    specs = [weight.spec for module in arranged for weight in module._held().values()]
    assert sum("interleaved" in spec for spec in specs) > len(specs) / 2
    assert model.lm_head.spec.endswith(":interleaved:exact")
    assert model.lm_head.blocks is model.model.embed_tokens.blocks
    tokens = torch.randint(0, 320, (2, 9))
    want = logits(plain, tokens)
    assert torch.equal(logits(model, tokens), want)
    state, arranged_state = plain.state_dict(), model.state_dict()
    assert all(torch.equal(arranged_state[name], value) for name, value in state.items())
    moefuse.hf.patch(plain), moefuse.hf.patch(model)
    assert torch.equal(logits(model, tokens), logits(plain, tokens))


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is free from /proc")
def test_all_parts_of_a_model_must_fit_twice(tmp_path: Path) -> None:
    first, second = (tmp_path / f"model[a]-0000{part}-of-00002.gguf" for part in (1, 2))
    first.write_bytes(b"GGUF")
    assert _fits_twice(first)
    with second.open("wb") as file:
        file.truncate(2**42)  # a hole, which takes no room
    assert not _fits_twice(first)


def test_a_shared_expert_in_blocks_is_patched_whole(tmp_path: Path) -> None:
    for name in ("qwen2moe", "deepseek2 with sigmoids"):
        make(KINDS[name], tmp_path / "model.gguf", in_blocks=True)
        model, _ = load(tmp_path / "model.gguf")
        moefuse.hf.patch(model)
        fused = model.model.layers[1].mlp._moefuse
        assert fused.shared is not None
        assert {type(part) for _, name, part in fused.parts if name in ("gate_proj", "up_proj")} == {QuantLinear}


def test_halves_in_two_formats_become_numbers(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kind = KINDS["granitemoe with a shared expert"]
    if "granitemoe with a shared expert" in LATER:
        pytest.skip("this release of transformers cannot run it")
    stock = make(replace(kind, formats=kind.formats | {"ffn_gate_shexp": "Q8_0", "ffn_up_shexp": "Q5_K"}), path)
    model, _ = load(path)
    mlp = model.model.layers[0].shared_mlp
    assert type(mlp.input_linear) is nn.Linear
    tokens = torch.randint(0, 320, (2, 9))
    stock.set_experts_implementation("eager")
    assert difference(logits(model, tokens), logits(stock, tokens).double()).worst < TOLERANCE


def test_heads_that_share_a_block_become_numbers(tmp_path: Path) -> None:
    path, kind = tmp_path / "model.gguf", KINDS["qwen35moe"]
    sizes = kind.sizes | {"linear_num_value_heads": 8}
    for form, module in {"Q4_K": nn.Linear, "Q8_0": QuantLinear}.items():
        stock = make(replace(kind, sizes=sizes, formats=kind.formats | {"ssm_out": form}), path)
        model, _ = load(path)
        assert type(model.model.layers[0].linear_attn.out_proj) is module
        tokens = torch.randint(0, 320, (2, 9))
        stock.set_experts_implementation("eager")
        assert difference(logits(model, tokens), logits(stock, tokens).double()).worst < TOLERANCE


def test_a_matrix_of_another_shape_is_named(tmp_path: Path) -> None:
    make(KINDS["llama"], tmp_path / "model.gguf", in_blocks=True)
    file = read(tmp_path / "model.gguf")
    for name, shape, message in (
        (
            "blk.1.attn_v.weight",
            (64, 512),
            r"v_proj.weight must have shape \[64, 256\], got \[64, 512\] from blk.1.attn_v",
        ),
        ("blk.0.attn_q.weight", (127, 256), "blk.0.attn_q.weight must have the sizes that the metadata gives"),
        (
            "output.weight",
            (64, 256),
            r"lm_head.weight must have shape \[320, 256\], got \[64, 256\] from output.weight",
        ),
    ):
        other = quantize(torch.randn(shape), "Q8_0")
        write(tmp_path / "other.gguf", file.metadata, dict(file) | {name: other})
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "other.gguf")


def test_types_by_name(tmp_path: Path) -> None:
    make(KINDS["olmoe"], tmp_path / "model.gguf")
    for name, dtype in {"bf16": torch.bfloat16, "F32": torch.float32, "torch.float16": torch.float16}.items():
        assert load(tmp_path / "model.gguf", dtype=name)[0].dtype == dtype
    with pytest.raises(ValueError, match="dtype must be auto, float32, bfloat16 or float16, got int8"):
        load(tmp_path / "model.gguf", dtype="int8")


@pytest.mark.slow
def test_compiles_whole(tmp_path: Path) -> None:
    make(KINDS["qwen2moe"], tmp_path / "model.gguf", in_blocks=True)
    model, _ = load(tmp_path / "model.gguf")
    tokens = torch.randint(0, 320, (1, 9))
    for patched in (False, True):
        if patched:
            moefuse.hf.patch(model)
        want = logits(model, tokens)
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert difference(logits(compiled, tokens), want.double()).worst < TOLERANCE


def test_saving_and_gradients(tmp_path: Path) -> None:
    make(KINDS["olmoe"], tmp_path / "model.gguf", in_blocks=True)
    model, _ = load(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match="keep the GGUF file, or call moefuse"):
        model.save_pretrained(tmp_path / "saved")
    words = torch.randn(1, 5, 256, requires_grad=True)
    model(inputs_embeds=words).logits.square().mean().backward()
    through_blocks = words.grad.clone()
    moefuse.hf.dequantize(model)
    model.set_experts_implementation("eager")
    words.grad = None
    model(inputs_embeds=words).logits.square().mean().backward()
    assert difference(through_blocks, words.grad.double(), whole=True).worst < 1e-4
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    tokens = torch.randint(0, 320, (1, 9))
    again.set_experts_implementation("eager")
    assert torch.equal(logits(again, tokens), logits(model, tokens))


def test_autocast_and_mixed_stacks(tmp_path: Path) -> None:
    make(KINDS["olmoe"], tmp_path / "model.gguf")
    model, _ = load(tmp_path / "model.gguf", dtype=torch.bfloat16)
    module = model.model.layers[0].mlp.experts
    assert set(module.specs) == {"gate_up", "down"}
    rows, ids, weights = torch.randn(3, 256), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
    assert module(rows, ids, weights).dtype == torch.float32
    assert module(rows.bfloat16(), ids, weights).dtype == torch.bfloat16


def test_ends_of_an_answer(tmp_path: Path) -> None:
    make(KINDS["olmoe"], tmp_path / "model.gguf")
    file = read(tmp_path / "model.gguf")
    tokens = file.metadata["tokenizer.ggml.tokens"]
    named = dict(file.metadata) | {
        "tokenizer.ggml.tokens": [*tokens[:-1], "<|im_end|>"],
        "tokenizer.ggml.eot_token_id": 5,
    }
    write(tmp_path / "chat.gguf", named | {"tokenizer.ggml.merges": file.metadata["tokenizer.ggml.merges"][:10]}, file)
    model, _ = load(tmp_path / "chat.gguf")
    assert model.generation_config.eos_token_id == [tokens.index(END), 5, len(tokens) - 1]


def test_generates_in_the_models_own_type(tmp_path: Path) -> None:
    make(KINDS["gpt-oss"], tmp_path / "model.gguf", in_blocks=True)
    for dtype in (torch.float16, torch.bfloat16):
        model, tokenizer = load(tmp_path / "model.gguf", dtype=dtype, exact=False)
        assert model.dtype == dtype
        moefuse.hf.patch(model)
        prompt = tokenizer("it was the", return_tensors="pt")
        out = model.generate(**prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert out.shape == (1, prompt.input_ids.shape[1] + 4)
        norm = model.model.norm.weight.dtype
        assert norm == (torch.float32 if dtype == torch.float16 else dtype), "as transformers keeps it"
