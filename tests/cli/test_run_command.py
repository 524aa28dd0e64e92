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
from moefuse.cli.run import _draw_load

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


def test_the_picture_has_a_title_and_whole_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    for count in (2, 5, 60):
        load = {f"model.layers.{i + 1}.mlp.experts": torch.arange(4) + i for i in range(count)}
        _draw_load(load, tmp_path / "load.png", "a model, 7 tokens")
        axes = drawn[-1].axes[0]
        assert axes.get_title(loc="left") == "Load of the experts: a model, 7 tokens"
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels[0] == "1"
        assert all(label.isdecimal() for label in labels)
        assert len(labels) == len(set(labels)) <= 24
        assert all(float(tick).is_integer() for tick in axes.get_xticks())
    monkeypatch.undo()
    pyplot.close("all")


def test_one_token(model: Path) -> None:
    code, output = invoke(model, "--prompt", "w3", "--max-tokens", 1, "--compare")
    assert code == 0, output
    assert "prefill 1 token at" in output
    assert "decode 0 tokens at 0.0/s" in output
    code, output = invoke(model, "--prompt", "w3", "--max-tokens", 2, "--compare")
    assert code == 0, output
    assert "decode 1 token at" in output


def test_bfloat16(model: Path) -> None:
    code, output = invoke(model, "--prompt", "w3 w4", "--max-tokens", 3, "--dtype", "bfloat16", "--threads", 1)
    assert code == 0, output


@pytest.mark.parametrize("compare", [False, True])
@pytest.mark.parametrize("part", ["mlp.experts.down_proj", "self_attn.o_proj.weight"])
def test_damaged_weights(model: Path, tmp_path: Path, compare: bool, part: str) -> None:
    """A good header and weights that are not numbers: no text, no speed, but the place, and exit code 1."""
    broken = Qwen3MoeForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.get_parameter(f"model.layers.1.{part}").fill_(torch.inf)
    broken.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    more = ("--compare", "--against", "eager") if compare else ()
    code, output = invoke(tmp_path, "--prompt", "w3 w4", "--max-tokens", 4, *more)
    assert code == 1, output
    assert f"moefuse: the logits are not finite: it began in model.layers.1.{part.split('.')[0]}" in output
    assert "tokens at" not in output
    assert "nan" not in output


def test_names_in_short(model: Path) -> None:
    code, output = invoke(model, "--prompt", "w3 w4", "--max-tokens", 2, "--dtype", "BF16")
    assert code == 0, output


def test_a_file_of_a_model(model: Path, tmp_path: Path) -> None:
    code, output = invoke(model / "config.json", "--prompt", "w3")
    assert code == 2
    assert "config.json is one file of a model: give its directory" in output
    (tmp_path / "notes.txt").write_text("hello")
    code, output = invoke(tmp_path / "notes.txt", "--prompt", "w3")
    assert code == 2
    assert "is no model: give the directory of a transformers model or a GGUF file" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one here")
def test_a_device_that_is_not_here(model: Path) -> None:
    for name, message in {
        "cuda": "no cuda device here; there are: cpu",
        "cuda:1": "no cuda device here",
        "tpu": "'tpu' is not one of cpu, cuda, mps",
        "cpu:x": "'cpu:x' is not a device",
    }.items():
        code, output = invoke(model, "--prompt", "w3", "--device", name)
        assert code == 2, output
        assert "Invalid value for --device" in output
        assert message in output


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
        (("--dtype", "int8"), "'int8' is not one of bfloat16, float32, float16"),
        (("--plot", tmp_path / "load.pdf"), "must end in .png"),
        (("--plot", tmp_path / "no" / "load.png"), "there is no folder"),
        (("--chat",), "no chat template; leave --chat out"),
        (("--parallel", "tensor"), "start with torchrun"),
        (("--parallel", "foo"), "Invalid value for --parallel: 'foo' is not one of tensor, experts"),
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
