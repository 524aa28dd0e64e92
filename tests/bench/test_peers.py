"""The peers' experts, on our tensors, agree with ours."""

from pathlib import Path

import pytest
import torch

from moefuse.bench import check, inputs, peers
from moefuse.bench.contestants import ours, refusal, theirs
from moefuse.bench.shapes import Shape
from moefuse.testing.compare import Tolerance

CPU = torch.device("cpu")
SHAPES = (
    Shape("qwen3", 8, 48, 40, 3),
    Shape("gemma4", 8, 44, 36, 4, "gelu_tanh", per_expert_scale=True),
    Shape("gpt-oss", 6, 48, 40, 2, "swiglu_oai", "interleaved", bias=True),
)


@pytest.fixture(params=SHAPES, ids=lambda shape: shape.name)
def slot(request: pytest.FixtureRequest) -> inputs.Slot:
    layers = inputs.make_layers(request.param, torch.float32, CPU, 2)
    return inputs.make_slots(layers, 9, torch.float32, CPU)[1]


TRANSFORMERS = ("hf-batched", "hf-eager", "hf-grouped")
GGML = ("ik-llama", "llama-cpp")


def test_there_are_five() -> None:
    assert peers.names() == (*TRANSFORMERS, *GGML)
    assert all(peers.load(name).name == name for name in peers.names())
    with pytest.raises(KeyError):
        peers.load("_transformers")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_it_agrees_with_float64(name: str, slot: inputs.Slot) -> None:
    pytest.importorskip("transformers")
    contestant = theirs(peers.load(name), [slot.layer], torch.float32)
    with torch.no_grad():
        error = contestant.error(contestant.call(slot), slot)
    assert error.within(Tolerance(3e-6, 3e-6, "short sums")), error
    assert error.rms > 0, "two float32 results of different code are never the same as float64"


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_it_shares_our_memory(name: str, slot: inputs.Slot) -> None:
    pytest.importorskip("transformers")
    module = peers.load(name).build(slot.layer)
    assert module.gate_up_proj.data_ptr() == slot.layer.gate_up.data_ptr()  # type: ignore[attr-defined]
    assert module.down_proj.data_ptr() == slot.layer.down.data_ptr()  # type: ignore[attr-defined]


def test_too_much_memory_is_refused_before_the_call() -> None:
    layer = inputs.make_layers(SHAPES[0], torch.float32, CPU, 1)[0]
    assert refusal(peers.load("hf-batched"), layer, 1, torch.float32, CPU) is None
    assert "GiB" in (refusal(peers.load("hf-batched"), layer, 10**9, torch.float32, CPU) or "")
    assert refusal(peers.load("hf-grouped"), layer, 10**9, torch.float32, CPU) is None


def test_without_transformers_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert "pip install 'transformers" in (peers.load("hf-eager").unavailable() or "")


def test_without_llama_cpp_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert "pip install llama-cpp-python" in (peers.load("llama-cpp").unavailable() or "")


def test_ik_llama_is_one_that_the_user_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MOEFUSE_IK_LLAMA", raising=False)
    assert "set MOEFUSE_IK_LLAMA to its libggml.so" in (peers.load("ik-llama").unavailable() or "")
    monkeypatch.setenv("MOEFUSE_IK_LLAMA", str(tmp_path))
    assert f"got {str(tmp_path)!r}" in (peers.load("ik-llama").unavailable() or "")
    other = tmp_path / "libggml.so"
    other.write_bytes(b"no library")
    monkeypatch.setenv("MOEFUSE_IK_LLAMA", str(other))
    assert "must name ik_llama.cpp's libggml.so, got" in (peers.load("ik-llama").unavailable() or "")


@pytest.mark.parametrize("name", GGML)
def test_a_graph_of_ggml_runs_silu_on_the_cpu(name: str) -> None:
    peer = peers.load(name)
    assert peer.unsuitable(SHAPES[0], CPU) is None
    assert peer.unsuitable(SHAPES[1], CPU) is not None
    assert "CPU only" in (peer.unsuitable(SHAPES[0], torch.device("cuda")) or "")


@pytest.mark.parametrize("name", GGML)
@pytest.mark.parametrize("weights", [None, ("Q4_K", "Q6_K"), ("Q8_0", "Q4_0"), ("IQ4_XS", "Q3_K"), ("Q2_K", "Q5_K")])
def test_ggml_agrees_and_we_are_no_further_from_float64(name: str, weights: tuple[str, str] | None) -> None:
    peer = peers.load(name)
    if peer.unavailable() is not None:
        pytest.skip(f"{name} is not installed")
    shape = Shape("custom", 8, 512, 256, 2)
    layer = inputs.make_layers(shape.in_blocks(*weights) if weights else shape, torch.float32, CPU, 1)[0]
    slot = inputs.make_slots([layer], 9, torch.float32, CPU)[0]
    contestant, mine = theirs(peer, [layer], torch.float32), ours(layer, torch.float32, "cpu")[1]
    with torch.no_grad():
        error, own = (who.error(who.call(slot), slot) for who in (contestant, mine))
    assert error.within(contestant.tolerance), error
    assert weights is None or own.rms <= error.rms * 1.05


def test_a_shape_it_has_no_class_for() -> None:
    assert peers.load("hf-eager").unsuitable(Shape("odd", 4, 8, 8, 2, "silu", "interleaved"), CPU) is not None


def test_experts_are_all_different_and_calls_rotate() -> None:
    layers = inputs.make_layers(Shape("custom", 16, 64, 32, 2), torch.float32, CPU, 2)
    stacks = [layer.gate_up[e] for layer in layers for e in range(16)]
    assert all(not torch.equal(a, b) for i, a in enumerate(stacks) for b in stacks[:i])
    assert layers[0].gate_up.std() == pytest.approx(64**-0.5, rel=0.1)
    slots = inputs.make_slots(layers, 1, torch.float32, CPU)
    assert len(slots) >= 4
    assert all(not torch.isin(a.ids, b.ids).any() for a, b in zip(slots, slots[2:], strict=False))


def test_the_check_sees_each_token_from_first_to_last() -> None:
    assert check.sample(1).tolist() == [0]
    assert check.sample(3).tolist() == [0, 1, 2]
    assert check.sample(100).tolist()[0] == 0
    assert check.sample(100).tolist()[-1] == 99
    assert len(check.sample(100)) == 8
