"""The model in the box: what it is, that everyone computes the same from it, and what docs/box.md says of it."""

import importlib
import math
import re
from pathlib import Path
from types import ModuleType

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import moefuse.hf
from moefuse.cli import app
from moefuse.quant.gguf import read

ROOT = Path(__file__).parents[1]
BOX = ROOT / "src" / "moefuse" / "box" / "box.gguf"
HELD_OUT = ROOT / "examples" / "held_out.txt"
PROMPT = "And the king said unto his servants, Go ye into the city"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        return importlib.import_module("boxed_model")


def test_the_file_is_small_and_its_experts_are_in_k_blocks() -> None:
    assert BOX.stat().st_size <= 12_000_000
    kinds = {tensor.name.split(".", 2)[-1]: tensor.tensor_type.name for tensor in gguf.GGUFReader(BOX).tensors}
    assert kinds["ffn_gate_exps.weight"] == kinds["ffn_up_exps.weight"] == "Q4_K"
    assert kinds["ffn_down_exps.weight"] == "Q6_K"


def test_transformers_own_loader_gives_the_same_logits() -> None:
    """Its map of GGUF metadata lacks the width of an expert, which is therefore given."""
    width = read(BOX).metadata["qwen3moe.expert_feed_forward_length"]
    stock = AutoModelForCausalLM.from_pretrained(
        BOX.parent, gguf_file=BOX.name, dtype=torch.float32, moe_intermediate_size=width, experts_implementation="eager"
    )
    theirs = AutoTokenizer.from_pretrained(BOX.parent, gguf_file=BOX.name)
    model, tokenizer = moefuse.hf.from_gguf(BOX, dtype=torch.float32, exact=True, progress=False)
    text = HELD_OUT.read_text()[:1500]
    assert tokenizer(text).input_ids == theirs(text).input_ids
    tokens = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(tokens[0]) == text
    with torch.no_grad():
        want, got = stock(tokens).logits, model(tokens).logits
    assert want.std() > 1
    assert (got - want).abs().max() < 1e-3


def test_a_cell_of_the_perplexity_table(example: ModuleType) -> None:
    row = re.search(r"\| `box.gguf` \|(.*)\|", (ROOT / "docs" / "box.md").read_text())
    assert row is not None
    cpu = float(row[1].split("|")[1])
    model, tokenizer = moefuse.hf.from_gguf(BOX, dtype=torch.float32, exact=True, progress=False)
    moefuse.hf.patch(model)
    cut = example.windows(example.encode(tokenizer, HELD_OUT.read_text()), 512)
    assert math.exp(example.mean_loss(model, cut)) == pytest.approx(cpu, abs=6e-4)


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *args], terminal_width=200)
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_run_without_a_model_writes_english() -> None:
    line = ("--prompt", PROMPT, "--max-tokens", "60", "--temperature", "0.8", "--dtype", "float32")
    code, output = run(*line, "--seed", "3")
    assert code == 0, output
    assert output.startswith(PROMPT)
    text = output.removeprefix(PROMPT).split("moefuse: prefill")[0]
    known = set(re.findall(r"[a-z]+", HELD_OUT.read_text().lower()))
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 20
    assert sum(word in known for word in words) > 0.7 * len(words)
    assert run(*line, "--seed", "3")[1].startswith(PROMPT + text)
    assert not run(*line, "--seed", "4")[1].startswith(PROMPT + text)


def test_an_install_without_the_box_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.import_module("moefuse.cli.run"), "_BOX", tmp_path / "box.gguf")
    code, output = run()
    assert code == 2
    assert "came without the model in the box: name a directory or a GGUF file" in output


def test_a_named_model_needs_a_prompt() -> None:
    code, output = run(str(BOX))
    assert code == 2
    assert "give the text to continue" in output


def test_the_box_can_be_made_again(example: ModuleType, tmp_path: Path) -> None:
    """Train, export, measure and draw, in a small version of themselves."""
    text, out, file = tmp_path / "text.txt", tmp_path / "out", tmp_path / "small.gguf"
    text.write_text("Ge1:1 Verses lose their number.\n\nCHAPTER 1\n\n" + HELD_OUT.read_text().replace("\n", "\n\n") * 3)

    def call(*args: object) -> str:
        result = CliRunner().invoke(example.app, [*map(str, args)])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    small = [part for name, size in (("vocab_size", 512), ("num_hidden_layers", 1), ("num_experts", 4))
             for part in ("--override", f"{name}={size}")]  # fmt: skip
    said = call("train", text, "--out", out, "--steps", 3, "--batch-size", 2, "--length", 32, "--checks", 1, *small)
    assert "validation 6." in said
    assert (out / "tokenizer.json").is_file()
    assert not (out / "held_out.txt").read_text().startswith("Ge1:1")
    call("export", out, file, "--gate-up", "Q8_0", "--down", "Q6_K")
    short = tmp_path / "short.txt"
    short.write_text(HELD_OUT.read_text()[:2000])
    found = float(call("perplexity", file, "--text", short, "--length", 64).split(": ")[1].split()[0])
    assert found < 600
    call("draw", out, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_a_short_text_is_refused(example: ModuleType, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning.\n")
    result = CliRunner().invoke(example.app, ["train", str(text), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "at least 400,000 characters" in " ".join(result.output.replace("│", " ").split())
