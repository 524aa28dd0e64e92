"""moefuse run, as a user runs it: a tiny model and tokenizer on disk, and every mistake that is easy to make."""

import importlib.metadata
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from moefuse import config
from moefuse.cli import app

WORDS = ["<unk>", "<eos>", *(f"w{i}" for i in range(30))]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 128,
    "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def save_tokenizer(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)


def save_model(model: nn.Module, folder: Path) -> Path:
    for value in model.parameters():
        if value.dim() > 1:
            nn.init.normal_(value, std=value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)), tmp_path_factory.mktemp("qwen3"))


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *map(str, args)], terminal_width=200)
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_writes_what_transformers_writes(model: Path) -> None:
    stock = Qwen3MoeForCausalLM.from_pretrained(model, experts_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    prompt = tokenizer("w3 w7 w1", return_tensors="pt")
    want = tokenizer.decode(
        stock.generate(**prompt, max_new_tokens=8, do_sample=False)[0, 3:], skip_special_tokens=True
    )
    code, output = invoke(model, "--prompt", "w3 w7 w1", "--max-tokens", 8)
    assert code == 0, output
    assert output.startswith(want)
    assert "moefuse: prefill 3 tokens at" in output
    assert "2 of 2 blocks patched" in output


def test_compare_reports_logits_and_speed(model: Path) -> None:
    code, output = invoke(model, "--prompt", "w3 w7 w1", "--max-tokens", 5, "--compare", "--against", "eager")
    assert code == 0, output
    assert "eager: prefill 3 tokens at" in output
    assert "decode 4 tokens at" in output
    difference = float(output.split("largest logit difference ")[1].split(",")[0])
    assert difference < 1e-4
    assert "speed against eager: prefill" in output


def test_stats_and_picture(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "load.png"
    code, output = invoke(model, "--prompt", "w3 w7 w1 w9", "--max-tokens", 6, "--stats", "--plot", picture)
    assert code == 0, output
    assert output.count("unused") >= 2
    assert "model.layers.1.mlp" in output
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_one_token(model: Path) -> None:
    code, output = invoke(model, "--prompt", "w3", "--max-tokens", 1, "--compare")
    assert code == 0, output
    assert "decode 0 tokens at 0.0/s" in output


def test_bfloat16(model: Path) -> None:
    code, output = invoke(model, "--prompt", "w3 w4", "--max-tokens", 3, "--dtype", "bfloat16", "--threads", 1)
    assert code == 0, output


def test_wrong_path() -> None:
    code, output = invoke("/no/such/model", "--prompt", "hello")
    assert code == 2
    assert "there is no /no/such/model" in output
    code, output = invoke("Qwen/Qwen3-30B-A3B", "--prompt", "hello")
    assert code == 2
    assert "hf download Qwen/Qwen3-30B-A3B --local-dir DIRECTORY" in output


def test_not_a_model_directory(tmp_path: Path) -> None:
    code, output = invoke(tmp_path, "--prompt", "hello")
    assert code == 2
    assert "holds no config.json: give the directory of a transformers model" in output


def test_no_tokenizer(tmp_path: Path) -> None:
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).save_pretrained(tmp_path)
    code, output = invoke(tmp_path, "--prompt", "hello")
    assert code == 2
    assert "holds no tokenizer: copy tokenizer.json and tokenizer_config.json into it" in output


def test_no_weights(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code, output = invoke(tmp_path, "--prompt", "hello")
    assert code == 2
    assert "transformers cannot load" in output


def test_dense_model(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SIZES.items() if "expert" not in name and "moe" not in name}
    save_model(LlamaForCausalLM(LlamaConfig(**sizes)), tmp_path)
    code, output = invoke(tmp_path, "--prompt", "w3")
    assert code == 2
    assert "LlamaForCausalLM has no experts: it is a dense model" in output
    assert "run it with transformers alone" in output


def test_missing_transformers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    for name in [name for name in sys.modules if name.startswith("moefuse.hf")]:
        monkeypatch.delitem(sys.modules, name)
    code, output = invoke(model, "--prompt", "w3")
    assert code == 2
    assert f"moefuse.hf needs transformers, which is not installed: {config.install('transformers')}" in output


def test_mistaken_options(model: Path, tmp_path: Path) -> None:
    for args, message in (
        (("--dtype", "int8"), "'int8' is not one of auto, bfloat16, float32, float16"),
        (("--plot", tmp_path / "load.pdf"), "must end in .png"),
        (("--plot", tmp_path / "no" / "load.png"), "there is no folder"),
        (("--chat",), "no chat template; leave --chat out"),
        (("--parallel", "tensor"), "start with torchrun"),
        (("--parallel", "pipeline"), "must be tensor or experts"),
        (("--parallel", "experts", "--stats"), "each rank sees its own experts only"),
    ):
        code, output = invoke(model, "--prompt", "w3", *args)
        assert code == 2, output
        assert message in output
    code, output = invoke(model, "--prompt", "")
    assert code == 2
    assert "it has no tokens; give some text" in output
    code, output = invoke(model, "--prompt", "w3", "--compare", "--against", "nonsense", "--max-tokens", 2)
    assert code == 2
    assert "nonsense" in output
    assert not torch.distributed.is_initialized()
