"""moefuse run on a GGUF file: the text that transformers writes, and every mistake that is easy to make."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import KINDS, LATER, make, numbers_of, stored, tokenizer, tokenizer_keys
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import moefuse.hf
from moefuse.cli import app
from moefuse.quant.gguf import read, write

PROMPT, LENGTH = "it was the winter of", 8


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *map(str, args)], terminal_width=200)
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def make_writer(name: str, path: Path) -> str:
    """A file whose model writes words, each by a clear margin, and what transformers writes with its numbers."""
    words = tokenizer()
    silent = [number for token, number in words.get_vocab().items() if not re.fullmatch("[A-Za-zĠ,.:]+", token)]
    prompt = torch.tensor([words.encode(PROMPT).ids])
    for _ in range(50):
        stock = make(KINDS[name], path, mute=silent)
        stock.set_experts_implementation("eager")
        with torch.no_grad():
            out = stock.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=LENGTH, do_sample=False, pad_token_id=0,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        best = torch.stack(out.logits).topk(2).values
        if float((best[..., 0] - best[..., 1]).min()) > 1e-3:
            return words.decode(out.sequences[0, prompt.shape[1] :].tolist())
    raise AssertionError("no model writes by a clear margin")


@pytest.mark.parametrize("name", ["qwen3moe", "qwen2moe", "gpt-oss"])
def test_writes_what_transformers_writes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"

    def same() -> bool:
        want = " ".join(make_writer(name, path).split())
        code, output = invoke(path, "--prompt", PROMPT, "--max-tokens", LENGTH, "--dtype", "float32", "--exact")
        assert code == 0, output
        assert "moefuse: prefill" in output
        assert "2 of 2 blocks patched" in output
        return output.startswith(want)

    # A router may stand between two experts by less than float32 tells apart; then two other files must not.
    assert same() or all(same() for _ in range(2))


@pytest.mark.parametrize("name", KINDS)
def test_every_architecture_decodes_in_a_step_that_is_prepared(tmp_path: Path, name: str) -> None:
    """Two prompts of different lengths, as transformers' own loop continues them."""
    if name in LATER:
        pytest.skip("this release of transformers cannot run it")
    line = (tmp_path / "model.gguf", "--prompt", PROMPT, "--prompt", "it was", "--max-tokens", 5)

    def same() -> bool:
        make(KINDS[name], tmp_path / "model.gguf")
        (code, got), (stock_code, want) = (
            invoke(*line, "--dtype", "fp32", "--exact", *more) for more in ((), ("--no-capture",))
        )
        assert code == stock_code == 0, got + want
        assert "decode step not captured: --no-capture" in want
        if name == "qwen35moe":
            assert "decode step not captured: every layer of the model must keep keys and values, got linear_" in got
        else:
            assert "decode step prepared for batch 2, " in got
        return got.partition("moefuse: prefill")[0] == want.partition("moefuse: prefill")[0]

    # A router may stand between two experts by less than float32 tells apart; then two other files must not.
    assert same() or all(same() for _ in range(2))


def test_compare_stats_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "model.gguf", tmp_path / "load.png"
    make(KINDS["gpt-oss"], path)
    options = ("--dtype", "float32", "--exact", "--compare", "--against", "eager", "--stats", "--plot", picture)

    def gap() -> float:
        code, output = invoke(path, "--prompt", PROMPT, "--max-tokens", 4, *options)
        assert code == 0, output
        assert "eager: prefill" in output
        assert "speed against eager" in output
        assert output.count("unused") >= 2
        return float(output.split("largest logit difference ")[1].split(",")[0])

    if gap() > 1e-4:  # where a router stands between two experts
        make(KINDS["gpt-oss"], path)
        assert gap() < 1e-4
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_compare_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(KINDS["olmoe"], tmp_path / "model.gguf")
    monkeypatch.setattr(sys.modules["moefuse.cli.run"], "_free_memory", lambda _: 2**20)
    code, output = invoke(tmp_path / "model.gguf", "--prompt", PROMPT, "--compare")
    assert code == 2
    assert "the experts as numbers take" in output
    assert "leave --compare out" in output


def refusal(path: Path) -> str:
    code, output = invoke(path, "--prompt", PROMPT)
    assert code == 2, output
    with pytest.raises(ValueError, match=r"\w") as refused:
        moefuse.hf.from_gguf(path, progress=False)
    assert " ".join(str(refused.value).split())[:60] in output
    return output


def test_damaged_files(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.gguf", tmp_path / "cut.gguf"
    make(KINDS["olmoe"], whole)
    data = whole.read_bytes()
    for size in (0, 10, 100, 5000, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:size])
        assert "damaged, cut short or no GGUF: fetch it again" in refusal(cut)
    cut.write_bytes(b"<!DOCTYPE html>" + data)
    assert "fetch it again" in refusal(cut)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("blk.1.ffn_down_exps.weight", "mlp.experts (blk.1.ffn_gate_exps.weight, blk.1.ffn_up_exps.weight, blk.1"),
        ("blk.1.attn_output.weight", "self_attn.o_proj (blk.1.attn_output.weight)"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--compare", "--against", "eager")])
def test_damaged_weights_in_a_good_file(tmp_path: Path, more: tuple[str, ...], name: str, where: str) -> None:
    path = tmp_path / "model.gguf"
    make(replace(KINDS["olmoe"], formats=KINDS["olmoe"].formats | {"attn_output": "Q8_0"}), path)
    file = read(path)
    file[name].blocks.view(-1, 34)[:, :2] = 255  # a scale that is no number
    write(path, file.metadata, dict(file))
    code, output = invoke(path, "--prompt", PROMPT, "--max-tokens", 4, "--dtype", "fp32", *more)
    assert code == 1, output
    assert f"moefuse: the logits are not finite: it began in model.layers.1.{where}" in output
    assert "at 0.0/s" not in output
    assert "nan" not in output


def test_files_in_several_parts_and_strange_places(tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    make(replace(KINDS["olmoe"], formats=KINDS["olmoe"].formats | {"attn_v": "F16"}), whole, in_blocks=True)
    file = read(whole)
    tensors = list(file.items())
    first, second = (tmp_path / f"m-0000{part}-of-00003.gguf" for part in (1, 2))
    for dataset in ("text", "texts"):  # with one of them the header's length is odd, and so are the addresses
        for part, alignment in enumerate((1, 8, 4096)):
            keys = (file.metadata if part == 0 else {"general.architecture": "olmoe"}) | {
                "split.count": 3, "split.no": part, "general.alignment": alignment,
                "quantize.imatrix.dataset": dataset, "quantize.imatrix.entries_count": 192,
            }  # fmt: skip
            write(tmp_path / f"m-{part + 1:05}-of-00003.gguf", keys, dict(tensors[part::3]))
        if any(info.offset % 2 for info in read(first).infos.values()):
            break
    assert any(info.offset % 2 for info in read(first).infos.values())
    tokens = torch.arange(9)[None]
    models = [moefuse.hf.from_gguf(path, dtype="fp32", exact=True, progress=False)[0] for path in (whole, first)]
    with torch.no_grad():
        want, got = (model(input_ids=tokens).logits for model in models)
    assert torch.equal(got, want)
    assert "must be the first of its 3 files" in refusal(second)
    second.unlink()
    assert "fetch it, too" in refusal(first)


def test_big_endian(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "olmoe", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("w", np.ones((2, 3), np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    output = refusal(path)
    assert "must be little-endian, got a big-endian file: gguf-convert-endian" in output
    assert "damaged" not in output


def test_paths(tmp_path: Path) -> None:
    code, output = invoke(tmp_path / "no.gguf", "--prompt", PROMPT)
    assert code == 2
    assert "there is no file" in output
    make(KINDS["olmoe"], tmp_path / "model.gguf")
    code, output = invoke(tmp_path, "--prompt", PROMPT)
    assert code == 2
    assert "holds GGUF files: give one of them, such as" in output
    code, output = invoke(tmp_path / "model.gguf", "--prompt", PROMPT, "--parallel", "tensor")
    assert code == 2
    assert "not split over ranks" in output


def test_dense_model(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=320))
    tensors = numbers_of(KINDS["llama"], model)
    write(tmp_path / "model.gguf", {"general.architecture": "llama"} | tokenizer_keys(), tensors)
    assert "is a dense llama model, without experts: run it with transformers or llama.cpp" in refusal(
        tmp_path / "model.gguf"
    )


def rewritten(path: Path, metadata: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """A good file with some keys and tensors exchanged; None takes one away."""
    make(KINDS["olmoe"], path)
    file = read(path)

    def changed(old: Any, new: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in (dict(old) | new).items() if value is not None}

    write(path, changed(file.metadata, metadata), changed(file, tensors or {}))
    return path


def test_what_a_file_may_lack_or_have_too_much(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for metadata, tensors, message in (
        ({"olmoe.block_count": None}, {}, "the file must give olmoe.block_count, got none"),
        ({"olmoe.expert_used_count": None}, {}, "must give expert_used_count"),
        ({"olmoe.expert_weights_scale": 2.0}, {}, "a router of olmoe must have scale 1.0, got 2.0"),
        ({"olmoe.rope.scaling.type": "longrope"}, {}, "rope.scaling.type must be none, linear or yarn, got 'longrope'"),
        ({"tokenizer.ggml.tokens": None}, {}, "must hold a tokenizer (tokenizer.ggml.tokens), got none"),
        ({"tokenizer.ggml.model": "bert"}, {}, "tokenizer.ggml.model must be gpt2, llama or gemma4, got 'bert'"),
        ({"tokenizer.ggml.pre": "strange"}, {}, "tokenizer.ggml.pre must be one of"),
        ({"tokenizer.ggml.merges": ["zzz yyy"]}, {}, "the merges of the tokenizer must fit its tokens"),
        ({}, {"token_embd.weight": None}, "must have token_embd.weight"),
        ({}, {"blk.1.attn_q.weight": None}, "must have blk.1.attn_q.weight for model.layers.1.self_attn.q_proj.weight"),
        ({}, {"blk.1.ffn_up_exps.weight": None}, "must have blk.1.ffn_up_exps.weight"),
        ({}, {"blk.1.attn_k.weight": torch.zeros(3, 5)}, "must have shape [128, 256], got [3, 5] from blk.1.attn_k"),
        ({}, {"blk.0.ffn_down_exps.weight": torch.zeros(8, 256, 96)}, "blk.0.ffn_gate_exps.weight must have shape [8,"),
        ({}, {"blk.1.ffn_wonder.weight": torch.zeros(3)}, "a place for every tensor, got blk.1.ffn_wonder.weight"),
        ({}, {"rope_freqs.weight": torch.ones(3)}, "rotary frequencies must follow from the metadata"),
        ({"olmoe.embedding_length": 200}, {}, "must have token_embd.weight [words, 200], got [320, 256]"),
        ({"olmoe.block_count": 2**31}, {}, "block_count must be that of the tensors, 2, and at most 512, got 21474"),
        ({"olmoe.attention.head_count": "four"}, {}, "head_count must be a whole number from 1 to 1048576, got 'four'"),
        ({"olmoe.attention.head_count": 2**31}, {}, "head_count must be a whole number from 1 to 1048576, got 2147483"),
        ({"olmoe.attention.head_count": 0}, {}, "head_count must be a whole number from 1 to 1048576, got 0"),
        ({"olmoe.attention.head_count": [4, 2]}, {}, "transformers takes no model with the metadata of"),
    ):  # fmt: skip
        assert message in refusal(rewritten(path, metadata, tensors)), message


def test_unknown_architecture(tmp_path: Path) -> None:
    kind, path = KINDS["olmoe"], tmp_path / "model.gguf"
    tensors = {name: stored(kind, name, value) for name, value in numbers_of(kind, kind.tiny()).items()}
    write(path, {"general.architecture": "dbrx"} | tokenizer_keys(), tensors)
    output = refusal(path)
    assert "has the architecture dbrx, and from_gguf knows deepseek2, gemma4, gpt-oss" in output
    assert "from its transformers directory" in output


ALL_OF_THEM = """
import sys, torch
from moefuse.bench.light import without_compiler

given = sys.argv[1:]
with without_compiler():
    import moefuse.hf
    models = [moefuse.hf.from_gguf(path, dtype="float32", exact=True, progress=False)[0] for path in given]
for model, path in zip(models, given):
    moefuse.hf.patch(model)
    with torch.no_grad():
        torch.save(model(torch.arange(1, 13)[None]).logits, path + ".logits")
"""


def test_every_architecture_without_the_compiler(tmp_path: Path) -> None:
    """In a process of its own, as here transformers is imported already."""
    paths = [tmp_path / f"{name}.gguf" for name in KINDS if name not in LATER]
    for path in paths:
        make(KINDS[path.stem], path, in_blocks=True)
    done = subprocess.run(
        [sys.executable, "-c", ALL_OF_THEM, *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for path in paths:
        model, _ = moefuse.hf.from_gguf(path, dtype="float32", exact=True, progress=False)
        moefuse.hf.patch(model)
        with torch.no_grad():
            want = model(torch.arange(1, 13)[None]).logits
        assert torch.allclose(torch.load(f"{path}.logits"), want, rtol=1e-5, atol=1e-5), path.stem
