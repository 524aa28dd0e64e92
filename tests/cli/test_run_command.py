"""moefuse run, as a user runs it: a tiny model and tokenizer on disk, and every mistake that is easy to make."""

import gc
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

from moefuse import config, hf
from moefuse.backends.cpu import _native
from moefuse.bench.light import many_imports
from moefuse.cli import app
from moefuse.cli.run import _draw_load
from moefuse.hf import text
from moefuse.hf.capture import Step

sys.path.append(str(Path(__file__).parents[1] / "hf"))
import released_files

WORDS = ["<unk>", "<eos>", *(f"w{i}" for i in range(30))]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 128,
    "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


TEMPLATE = "{% for m in messages %}{{ 'w0' if m.role == 'user' else 'w2' }} {{ m.content }} {% endfor %}w2"


def save_tokenizer(folder: Path, template: str | None = None) -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", chat_template=template
    ).save_pretrained(folder)


def save_model(model: nn.Module, folder: Path) -> Path:
    for value in model.parameters():
        if value.dim() > 1:
            nn.init.normal_(value, std=value.shape[-1] ** -0.5)
    with torch.no_grad():
        model.lm_head.weight[:2] = 0.0  # it writes words only, and to the end
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def chatty(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, and a tokenizer with a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    save_tokenizer(folder, TEMPLATE)
    return folder


@pytest.fixture
def run_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward was given."""
    seen: list[int] = []
    forward = Qwen3MoeForCausalLM.forward

    def counted(self: Qwen3MoeForCausalLM, input_ids: torch.Tensor, **options: object) -> object:
        seen.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **options)

    monkeypatch.setattr(Qwen3MoeForCausalLM, "forward", counted)
    return seen


def invoke(*args: object, said: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *map(str, args)], input=said, terminal_width=200)
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def stock_text(folder: Path, prompt: str, max_tokens: int) -> str:
    """What transformers writes behind a prompt."""
    stock = Qwen3MoeForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(prompt, return_tensors="pt")
    written = stock.generate(**given, max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(written[0, given.input_ids.shape[1] :], skip_special_tokens=True)


def test_writes_what_transformers_writes(model: Path) -> None:
    code, output = invoke(model, "--prompt", "w3 w7 w1", "--max-tokens", 8)
    assert code == 0, output
    assert output.startswith(stock_text(model, "w3 w7 w1", 8))
    assert "moefuse: prefill 3 tokens at" in output
    assert "2 of 2 blocks patched" in output
    assert "decode step prepared for batch 1, 11 places, in" in output
    assert re.search(r"first token \d+\.\d\d s after its prompt, \d+\.\d s after the start of the command", output)
    assert re.search(r"peak memory [\d,]+ MiB resident", output)


def test_the_step_is_taken_and_left(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = Step.__call__

    def counted(self: Step, tokens: torch.Tensor) -> torch.Tensor:
        steps.append(len(tokens))
        return step(self, tokens)

    def refused(message: str, kind: type[Exception]) -> None:
        def capture(*_: object) -> str:
            raise kind(message)

        monkeypatch.setattr(hf, "capture", capture)

    line = (model, "--prompt", "w3 w7 w4", "--max-tokens", 5)
    want = stock_text(model, "w3 w7 w4", 5)
    monkeypatch.setattr(Step, "__call__", counted)
    assert invoke(*line)[1].startswith(want)
    assert steps == [1, 1, 1, 1]
    del steps[:]
    code, output = invoke(*line, "--no-capture")
    assert code == 0
    assert output.startswith(want)
    assert "2 of 2 blocks patched, 2 with the layer around them decode step not captured: --no-capture" in output
    refused("capture: every layer must be good, got a bad one", ValueError)
    code, output = invoke(*line)
    assert code == 0
    assert output.startswith(want)
    assert "decode step not captured: every layer must be good, got a bad one" in output
    refused("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be", RuntimeError)
    code, output = invoke(*line)
    assert code == 0
    assert output.startswith(want)
    assert output.count("not captured: CUDA error: operation not permitted when stream is capturing") == 1
    assert "CUDA kernel errors" not in output
    assert not steps


def test_several_prompts(model: Path) -> None:
    prompts = ("w3 w7 w4", "w9", "w5 w6 w7 w8 w9 w10")
    given = [part for prompt in prompts for part in ("--prompt", prompt)]
    code, output = invoke(model, *given, "--max-tokens", 6)
    assert code == 0, output
    for prompt in prompts:
        assert f"{prompt} {stock_text(model, prompt, 6)}" in output
    assert "moefuse: prefill 10 tokens at" in output
    assert "decode step prepared for batch 3, 12 places, in" in output
    code, output = invoke(model, *given, "--max-tokens", 6, "--compare", "--against", "eager", "--stats")
    assert code == 0, output
    assert "moefuse: prefill 10 tokens at" in output
    assert "decode 15 tokens at" in output
    assert "eager decodes uncaptured, in transformers' own loop" in output
    assert float(output.split("largest logit difference ")[1].split(",")[0]) < 1e-4
    code, output = invoke(model, "--prompt", "w3", "--prompt", "")
    assert code == 2
    assert "it has no tokens; give some text" in output


def test_one_turn(chatty: Path) -> None:
    code, output = invoke(chatty, "--prompt", "w3 w4", "--chat", "--max-tokens", 5)
    assert code == 0, output
    assert output.startswith(stock_text(chatty, "w0 w3 w4 w2", 5))
    assert "prefill 4 tokens at" in output


def test_a_conversation(chatty: Path, run_tokens: list[int]) -> None:
    code, output = invoke(chatty, "--chat", "--max-tokens", 5, said="w3 w4\n\n  \nw9 w8 w7\nw11\n")
    assert code == 0, output
    assert "decode step prepared for batch 1, 128 places, in" in output
    turns = [tokens for tokens in run_tokens if tokens > 1]
    assert len(turns) == 3
    seen, behind = "", output
    for said in ("w3 w4", "w9 w8 w7", "w11"):
        seen = f"{seen} w0 {said} w2".strip()
        answer = stock_text(chatty, seen, 5)
        start, _, behind = behind.removeprefix("> > > ").removeprefix("> ").partition(answer)
        assert not start.strip("> "), "only what transformers writes stands between two prompts"
        seen = f"{seen} {answer}"
    assert turns == [4, 1 + 5, 1 + 3], "of later turns the last token of the answer, and what is new"
    assert "moefuse: prefill 14 tokens at" in output
    assert "decode 12 tokens at" in output
    assert "first token" in output


def test_a_conversation_ends_where_it_is_full(chatty: Path, run_tokens: list[int]) -> None:
    code, output = invoke(chatty, "--chat", "--max-tokens", 200, said="w3 w4\n")
    assert code == 0, output
    assert "the conversation ends: its 128 places are full moefuse: prefill 4 tokens at" in output
    assert "decode 123 tokens at" in output
    code, output = invoke(chatty, "--chat", "--max-tokens", 7, said="w3 w4\nw5\n" * 70)
    assert code == 0, output
    assert output.count("the conversation ends: its 128 places are full") == 1
    code, output = invoke(chatty, "--chat", "--max-tokens", 2, said=" ".join(["w3"] * 130))
    assert code == 0, output
    assert "the conversation ends: its 128 places are full" in output
    assert "tokens at" not in output
    assert all(tokens < 128 for tokens in run_tokens)


@pytest.mark.parametrize("more", [(), ("--no-capture",)])
def test_a_conversation_may_be_empty_or_uncaptured(chatty: Path, more: tuple[str, ...]) -> None:
    code, output = invoke(chatty, "--chat", *more, said="")
    assert code == 0, output
    assert "2 of 2 blocks patched" in output
    assert "tokens at" not in output
    code, output = invoke(chatty, "--chat", *more, "--max-tokens", 3, said="w3 w4\nw5 w6\n")
    assert code == 0, output
    first = stock_text(chatty, "w0 w3 w4 w2", 3)
    assert stock_text(chatty, f"w0 w3 w4 w2 {first} w0 w5 w6 w2", 3) in output


def test_a_bar_for_a_long_prompt(model: Path, run_tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 8)
    line = (model, "--prompt", " ".join(f"w{i % 30}" for i in range(20)), "--max-tokens", 2)
    code, output = invoke(*line)
    assert code == 0, output
    assert "of 20 tokens" not in output, "not where nobody looks"
    assert run_tokens[0] == 20
    del run_tokens[:]
    monkeypatch.setattr(Console, "is_terminal", property(lambda _: True))
    code, output = invoke(*line)
    assert code == 0, output
    assert run_tokens[:3] == [8, 8, 4]
    assert "prompt: 20 of 20 tokens" in output
    code, output = invoke(*line, "--no-capture")
    assert code == 0, output
    assert "of 20 tokens" not in output


def test_threads_are_those_of_torch_and_of_our_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, ours = torch.get_num_threads(), set[int]()

    def threads() -> int:
        ours.add(torch.get_num_threads())
        return torch.get_num_threads()

    try:
        for count in (1, 3, 2):
            torch.set_num_threads(before)
            ours.clear()
            monkeypatch.setattr(_native, "threads", threads)
            code, output = invoke(model, "--prompt", "w3 w4", "--max-tokens", 3, "--threads", count)
            assert code == 0, output
            assert torch.get_num_threads() == count
            assert count in ours
            assert ours <= {count, 1}  # layers are recognised on one
    finally:
        torch.set_num_threads(before)
    code, output = invoke(model, "--prompt", "w3", "--threads", 0)
    assert code == 2
    assert "--threads" in output


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


def test_the_collector_waits_for_the_first_import_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with many_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.collect()
    monkeypatch.delitem(sys.modules, "transformers")
    try:
        with many_imports():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()


def test_missing_transformers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_mistakes_about_prompts(model: Path, chatty: Path) -> None:
    for args, message in (
        ((model,), "give the text to continue, or --chat for a conversation"),
        ((model, "--chat"), "no chat template; leave --chat out"),
        ((chatty, "--chat", "--compare"), "a conversation has no --compare, --stats, --plot or --parallel"),
        ((chatty, "--chat", "--stats"), "give a --prompt"),
        ((chatty, "--chat", "--parallel", "tensor"), "give a --prompt"),
        (("--chat",), "no chat template; leave --chat out"),
        ((model, "--prompt", "w3", "--max-tokens", 0), "--max-tokens"),
    ):
        code, output = invoke(*args, said="w3\n")
        assert code == 2, output
        assert message in output


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows that fill blocks."""
    sizes = SIZES | {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32, "intermediate_size": 128}
    return save_model(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)), tmp_path_factory.mktemp("wide"))


def test_experts_into_blocks_while_loading(wide: Path) -> None:
    code, output = invoke(wide, "--prompt", "w3 w4", "--max-tokens", 3, "--weights", "q8_0", "--exact", "--compare")
    assert code == 0, output
    assert "2 of 2 blocks patched" in output
    assert float(output.split("largest logit difference ")[1].split(",")[0]) < 1e-3, "the stock path has its numbers"
    code, output = invoke(wide, "--prompt", "w3", "--weights", "Q9")
    assert code == 2
    assert "a format must be one of Q4_K" in output


@pytest.mark.parametrize("kind", ["fp8", "compressed", "mxfp4", "blocks"])
def test_released_and_saved_in_blocks(kind: str, wide: Path, tmp_path: Path) -> None:
    """Every kind of directory runs packed, and as transformers' own path computes with its numbers."""
    whole = Qwen3MoeForCausalLM.from_pretrained(wide)
    if kind == "fp8":
        released_files.save_fp8(whole, tmp_path)
    elif kind == "compressed":
        released_files.save_by_strategy(whole, tmp_path, "channel")
        told = released_files.compressed(released_files.scheme("channel"))
        released_files.change_config(tmp_path, quantization_config=told)
    elif kind == "mxfp4":
        released_files.save_mxfp4(released_files.tiny("gpt_oss", vocab_size=len(WORDS)), tmp_path)
    else:
        hf.quantize_(whole, "Q8_0", progress=False)
        whole.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    code, output = invoke(tmp_path, "--prompt", "w3 w4", "--max-tokens", 3, "--dtype", "fp32", "--exact", "--compare")
    assert code == 0, output
    assert "2 of 2 blocks patched" in output
    assert float(output.split("largest logit difference ")[1].split(",")[0]) < 1e-4
    if kind != "blocks":
        code, output = invoke(tmp_path, "--prompt", "w3 w4", "--max-tokens", 3, "--weights", "Q4_0")
        assert code == 0, output


def test_directories_that_are_not_taken(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    int4 = released_files.compressed(released_files.scheme("group", "int", 4), format="pack-quantized")
    for told, message in (
        ({"quant_method": "nonsense"}, "is quantised by 'nonsense', which transformers cannot load"),
        (int4, "compressed-tensors with int4 by group in pack-quantized is not FP8"),
    ):
        released_files.change_config(tmp_path, quantization_config=told)
        code, output = invoke(tmp_path, "--prompt", "w3")
        assert code == 2, output
        assert message in output


def test_a_gguf_file_has_its_formats(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    code, output = invoke(tmp_path / "model.gguf", "--prompt", "w3", "--weights", "Q4_K")
    assert code == 2
    assert "a GGUF file has its formats already" in output
