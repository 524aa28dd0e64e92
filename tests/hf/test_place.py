"""Models whose experts are placed: logits and text of the same model on one device, and what must be refused."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from gguf_files import END, KINDS, make, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from slow_device import SlowDevice

from moefuse import hf
from moefuse.cli import app, options
from moefuse.hf.place import place_model
from moefuse.hf.support import on_interface
from moefuse.nn import Placement, RoutingTape, add_lora, placement
from moefuse.nn.place import placed, placement_of
from moefuse.nn.placed_experts import PlacedExperts
from moefuse.nn.rates import Rates

SLOW_BUS, FAST_BUS = Rates(1.0, 1.0, 1e12, 1e15), Rates(1e15, 1e15, 1.0, 1.0)
FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral", "qwen2_moe", "deepseek_v3", "phimoe", "nemotron_h")
PLAIN: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    made = SlowDevice()
    monkeypatch.setattr(placement, "accelerator_of", lambda _: made)
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS)
    monkeypatch.setattr(placement, "GROUP", 1)
    monkeypatch.setattr(placement, "LEAST_ROOM", 0)
    return made


def budget(model: Any, slots: int) -> int:
    """What holds a model with so many slots in each layer, and no more."""
    own = {"gate_up", "up", "down", "gate_up_proj", "down_proj", "up_proj"}
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    stacks = [t for name, t in tensors.items() if ".experts." in name and name.split(".")[-1].split("_bias")[0] in own]
    experts = sum(t.nbytes for t in stacks)
    count = next(module.num_experts for _, module in on_interface(model))
    group = max(layer_bytes(module) // count + 5 * 256 for _, module in on_interface(model))
    shared = sum(t.nbytes for t in tensors.values()) - experts
    return int((shared + placement.STREAMS * group + experts * (slots + 0.5) / count) * 8 / 7)


def layer_bytes(module: Any) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Sums of float32 in another order, through a few layers."""
    return float((got - want).norm() / want.norm()) < 1e-4


@pytest.mark.parametrize("bus", ["slow", "fast"])
@pytest.mark.parametrize("words", ["cpu", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_text_are_those_of_the_model(
    family: str, words: str, bus: str, monkeypatch: pytest.MonkeyPatch, device: SlowDevice
) -> None:
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS if bus == "slow" else FAST_BUS)
    model: Any = tiny_model(family)
    x = torch.randint(1, 97, (2, 9))
    with torch.no_grad():
        want = model(input_ids=x).logits
        text = model.generate(x, max_new_tokens=12, **PLAIN)
        hf.patch(model, experts=words, gpu_memory=budget(model, 3))
        found = placement_of(model)
        assert found is not None
        assert found.slots == (3 if words == "auto" else 0)
        assert close(model(input_ids=x).logits, want)
        assert torch.equal(model.generate(x, max_new_tokens=12, **PLAIN), text)
        if family in ("qwen3_moe", "mixtral"):
            assert "decode step prepared" in hf.capture(model, 2, 40)
            assert torch.equal(model.generate(x, max_new_tokens=12, **PLAIN), text)
            hf.uncapture(model)
        assert found.streamed_bytes == 0 or (bus, words) == ("fast", "auto")
        assert (found.streamed_bytes > 0) == ((bus, words) == ("fast", "auto"))
    hf.unpatch(model)
    assert placement_of(model) is None
    assert "_moefuse_placement" not in vars(model)
    assert not device.pinned
    model.double()


def test_a_placed_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_moe")
    hf.patch(model, experts="auto", gpu_memory=budget(model, 2))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_gguf_file_is_placed(tmp_path: Path) -> None:
    path, x = tmp_path / "model.gguf", torch.randint(1, 97, (1, 9))
    make(KINDS["qwen3moe"], path)
    options: dict[str, Any] = {"dtype": "float32", "exact": True, "progress": False}
    model, _ = hf.from_gguf(path, **options)
    with torch.no_grad():
        want = model(input_ids=x).logits
        for arrange in (False, True):
            got, _ = hf.from_gguf(path, device="cuda", gpu_memory=budget(model, 3), arrange=arrange, **options)
            found = placement_of(got)
            assert found is not None
            assert (found.slots, found.facts()["pinned"]) == (3, arrange)
            hf.patch(got)
            assert close(got(input_ids=x).logits, want)
            with pytest.raises(ValueError, match="the experts of this model are placed already"):
                hf.patch(got, experts="cpu")
            with pytest.raises(ValueError, match="to: the experts are placed between RAM and cpu"):
                got.half()


def test_blocks_are_arranged_for_the_cpu_where_they_stay_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which reads the whole file: not for a budget that is refused, nor for one that holds everything."""
    path, arranged = tmp_path / "model.gguf", list[Any]()
    make(KINDS["qwen3moe"], path)
    monkeypatch.setattr(sys.modules["moefuse.hf.place"], "interleave_", arranged.append)
    asked: dict[str, Any] = {"device": "cuda", "arrange": True, "progress": False}
    with pytest.raises(ValueError, match="gpu_memory must hold what is not experts"):
        hf.from_gguf(path, gpu_memory="10KiB", **asked)
    model, _ = hf.from_gguf(path, gpu_memory="12GiB", **asked)
    assert model._moefuse_placement.whole
    assert not arranged
    hf.from_gguf(path, gpu_memory="12GiB", experts="cpu", **asked)
    assert len(arranged) == 2


@pytest.mark.parametrize("where", ["attention", "experts"])
@pytest.mark.parametrize("captured", [False, True])
def test_out_of_memory_in_the_middle_of_a_text(
    where: str, captured: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = tiny_model("qwen3_moe")
    x = torch.randint(1, 97, (1, 9))
    want = model.generate(x, max_new_tokens=12, **PLAIN)
    hf.patch(model, experts="auto", gpu_memory=budget(model, 4))
    if captured:
        hf.capture(model, 1, 40)
    calls = 0

    def failing(run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 8:  # the second layer of a step
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(*args, **kwargs)

        return call

    if where == "attention":
        monkeypatch.setattr(hf.layers, "attention", failing(hf.layers.attention))
    else:
        monkeypatch.setattr(PlacedExperts, "_together", failing(PlacedExperts._together))
    assert torch.equal(model.generate(x, max_new_tokens=12, **PLAIN), want)
    assert "the GPU's memory ran out: from now on 2 experts of each layer have a slot, no longer 4" in caplog.text
    calls = 0
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(x, max_new_tokens=12, **PLAIN)


@pytest.mark.parametrize("where", ["attention", "experts"])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("bus", ["slow", "fast"])
def test_a_text_after_one_that_was_interrupted(
    where: str, captured: bool, bus: str, monkeypatch: pytest.MonkeyPatch, device: SlowDevice
) -> None:
    """As in a notebook: whatever the interrupt came into, the next text is right."""
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS if bus == "slow" else FAST_BUS)
    model: Any = tiny_model("qwen3_moe")
    x = torch.randint(1, 97, (1, 9))
    want = model.generate(x, max_new_tokens=60, **PLAIN)
    hf.patch(model, experts="auto", gpu_memory=budget(model, 3))
    if captured:
        hf.capture(model, 1, 80)
    left = 0

    def interrupted(run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            return run(*args, **kwargs)

        return call

    if where == "attention":
        monkeypatch.setattr(hf.layers, "attention", interrupted(hf.layers.attention))
    else:
        monkeypatch.setattr(device, "copy", interrupted(device.copy))
        monkeypatch.setattr(device, "wait", interrupted(device.wait))
    for number in (1, 2, 3, 30, 57, 81):
        left = number
        with pytest.raises(KeyboardInterrupt):
            model.generate(x, max_new_tokens=60, **PLAIN)
        assert torch.equal(model.generate(x, max_new_tokens=60, **PLAIN), want)
    hf.unpatch(model)
    assert not vars(model).keys() & {"_moefuse_steps", "_moefuse_placement", "forward", "generate"}
    assert not device.pinned
    assert not device.busy(*device.lines - {device.main})


def test_who_looks_at_the_parts_sees_them() -> None:
    model: Any = tiny_model("qwen3_moe")
    x = torch.randint(1, 97, (1, 9))
    with torch.no_grad():
        want = model(input_ids=x, output_router_logits=True)
        hf.patch(model, experts="auto", gpu_memory=budget(model, 3))
        got = model(input_ids=x, output_router_logits=True)
        assert close(got.logits, want.logits)
        assert all(close(*pair) for pair in zip(got.router_logits, want.router_logits, strict=True))
        tape = RoutingTape()
        with tape.record(model):
            assert close(model(input_ids=x).logits, want.logits)
        with tape.replay(model):
            assert close(model(input_ids=x).logits, want.logits)


def test_a_load_map_is_that_of_a_run(tmp_path: Path) -> None:
    from moefuse.hf.text import expert_load

    model: Any = tiny_model("qwen3_moe")
    torch.save(expert_load(model, [torch.randint(1, 97, (50,))]), tmp_path / "load.pt")
    load = torch.load(tmp_path / "load.pt")
    hf.patch(model, experts=Placement("auto", budget(model, 2), load=load))
    for path, module in on_interface(model):
        layer = placed(module)
        assert layer is not None
        assert sorted(layer.residency.slots) == sorted(load[path].topk(2).indices.tolist())
    other: Any = tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match="load must have every layer of experts, got none for model"):
        hf.patch(other, experts=Placement("auto", budget(other, 2), load={}))


def test_what_cannot_be_placed_is_refused_by_name() -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts to place"):
        hf.patch(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)), experts="cpu")
    model: Any = tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match="experts must be one of cpu, auto, got 'gpu'"):
        hf.patch(model, experts="gpu")
    with pytest.raises(ValueError, match="gpu_memory must be bytes or a size such as 12GiB"):
        hf.patch(model, gpu_memory="lots")
    with pytest.raises(ValueError, match="gpu_memory must hold what is not experts"):
        hf.patch(model, gpu_memory="1KiB")
    assert placement_of(model) is None
    hf.patch(model, experts="cpu")
    x = torch.randint(1, 97, (1, 4))
    with pytest.raises(ValueError, match="placed experts have no gradients"):
        model(inputs_embeds=model.get_input_embeddings()(x))


def test_adapters_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make(KINDS["qwen3moe"], path)
    model, _ = hf.from_gguf(path, progress=False)
    add_lora(model.model.layers[0].mlp.experts, rank=2)
    with pytest.raises(ValueError, match=r"experts of model.layers.0.mlp.experts cannot be placed: they have adapters"):
        place_model(model, Placement("cpu"))


def test_without_a_gpu_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if torch.cuda.is_available():
        pytest.skip("there is one")
    model: PreTrainedModel = tiny_model("qwen3_moe")
    with pytest.raises(ValueError, match="device must be cuda, there is no GPU here"):
        hf.patch(model, experts="auto")


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *map(str, args)], terminal_width=200)
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    make(KINDS["qwen3moe"], path)
    model, _ = hf.from_gguf(path, dtype="float32", progress=False)
    line = (path, "--prompt", "it was the winter of", "--max-tokens", 6, "--dtype", "float32", "--exact")
    code, plain = invoke(*line)
    assert code == 0, plain
    monkeypatch.setattr(sys.modules["moefuse.cli.run"], "_refuse_placement", lambda *_: None)
    code, output = invoke(*line, "--gpu-memory", budget(model, 3), "--stats")
    assert code == 0, output
    assert output.split("moefuse: prefill")[0] == plain.split("moefuse: prefill")[0]
    assert "experts: 2 layers of 8 in RAM" in output
    assert "3 of each in slots" in output
    assert "a layer of a step, on average:" in output
    for size in ("10KiB", "0", "12"):
        code, output = invoke(*line, "--gpu-memory", size)
        assert code == 2
        assert "Invalid value for --gpu-memory: gpu_memory must hold what is not experts" in output
    code, output = invoke(*line, "--gpu-memory", "4000GB", "--stats")
    assert code == 0, output
    assert "experts: all on the GPU" in output
    code, output = invoke(*line, "--experts-on", "cpu", "--gpu-memory", budget(model, 0), "--stats")
    assert code == 0, output
    assert "0 of each in slots" in output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--experts-on", "auto"), "experts are placed between RAM and a GPU, and the device is cpu"),
        (("--gpu-memory", "12GiB"), "experts are placed between RAM and a GPU, and the device is cpu"),
        (("--experts-on", "gpu"), "'gpu' is not one of cpu, auto"),
    ],
)
def test_wrong_words_on_the_command_line(given: tuple[str, ...], said: str) -> None:
    code, output = invoke("model.gguf", "--prompt", "x", "--device", "cpu", *given)
    assert code == 2
    assert said in output


def test_words_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "device", lambda _: torch.device("cuda"))
    code, output = invoke("model.gguf", "--prompt", "x", "--experts-on", "auto", "--compare")
    assert code == 2
    assert "it does not go with --compare" in output
    for size in ("much", "-1", "12 gigs", ""):
        code, output = invoke("model.gguf", "--prompt", "x", f"--gpu-memory={size}")
        assert code == 2
        assert f"gpu_memory must be bytes or a size such as 12GiB or 500MB, got '{size}'" in output


def test_the_example_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its modes, on a device that is none: what stands in the documents can be measured again."""
    path = Path(__file__).parents[2] / "examples" / "placed_speed.py"
    example = runpy.run_path(str(path))
    monkeypatch.setitem(example["main"].__globals__, "accelerator_of", placement.accelerator_of)
    for name in ("is_available", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    for name in ("max_memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(placement, "rates_of", lambda _: FAST_BUS)
    monkeypatch.setattr(placement, "GROUP", 112 << 10)  # one expert
    line = "--layers 2 --hidden 256 --experts 8 --intermediate 256 --top-k 2 --heads 2 --vocab 64 --prefill 64 "
    monkeypatch.setattr(sys, "argv", ["placed_speed.py", *(line + "--settle 20 --steps 4").split()])
    example["main"]()
    printed = capsys.readouterr()
    assert not printed.err
    for said in ("auto against cpu", "auto against uploaded", "gpu against plain", "logits of 64 tokens against exact"):
        assert said in printed.out
    assert "2 of each in slots" in printed.out


LAUNCH = """
import signal, sys
from slow_device import SlowDevice
from moefuse.cli import app
from moefuse.nn import placement, rates

placement.accelerator_of, placement.LEAST_ROOM, placement.GROUP = lambda _: SlowDevice(), 0, 1
rates.measure = lambda _: rates.Rates(1e15, 1e15, 1.0, 1.0)
sys.modules["moefuse.cli.run"]._refuse_placement = lambda *_: None
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
app()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_run_that_is_killed_or_interrupted_leaves_nothing(tmp_path: Path, kind: str) -> None:
    """And the next one says what it would have said."""
    path, cache, script = tmp_path / "model.gguf", tmp_path / "cache", tmp_path / "launch.py"
    sizes = {"max_position_embeddings": 100_000}
    model = make(replace(KINDS["qwen3moe"], sizes=KINDS["qwen3moe"].sizes | sizes), path, mute=[0])
    if kind == "directory":
        path = tmp_path / "model"
        model.save_pretrained(path)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END).save_pretrained(path)
    script.write_text(LAUNCH)
    folders = os.pathsep.join([str(Path(__file__).parents[1] / "nn"), *sys.path])
    env = os.environ | {"PYTHONPATH": folders, "MOEFUSE_CACHE": str(cache), "TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    memory = budget(model, 3) if kind == "directory" else budget(hf.from_gguf(path, progress=False)[0], 3)
    line = [sys.executable, script, "run", path, "--prompt", "it was", "--gpu-memory", f"{memory}", "--stats"]

    def begun(tokens: int) -> subprocess.Popen[str]:
        command = [*map(str, line), "--max-tokens", str(tokens)]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
        )

    def behind() -> list[str]:
        return sorted(str(file) for file in tmp_path.rglob("*") if path not in (file, *file.parents))

    def finished() -> str:
        process = begun(10)  # before anything moves, which changes bits
        said, complaints = process.communicate(timeout=120)
        assert process.returncode == 0, complaints
        assert "of each in slots" in said
        assert "0 of each in slots" not in said
        return said.split("moefuse: prefill")[0]

    text, files = finished(), behind()
    assert str(cache / "rates.json") in files
    for signum in (signal.SIGKILL, signal.SIGINT):
        process = begun(50_000)
        assert process.stdout is not None
        assert process.stdout.read(4)  # the answer has begun
        process.send_signal(signum)
        try:
            _, complaints = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == (-signum if signum == signal.SIGKILL else 130), complaints
        assert "Traceback" not in complaints
        assert not session(process.pid)
        assert behind() == files
    assert finished() == text


def session(number: int) -> list[str]:
    """Processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == number:
                found.append(stat.parent.name)
    return found
