"""The table of models, and the arithmetic behind the floor."""

import doctest

import pytest
import torch

from moefuse.bench import floor as floors
from moefuse.bench import report, shapes, timing
from moefuse.bench.floor import Floor, Probe, Rates

#: experts, hidden, intermediate, top_k as the models' configurations say
PUBLISHED = {
    "qwen3-30b-a3b": (128, 2048, 768, 8),
    "qwen3.5-35b-a3b": (256, 2048, 512, 8),
    "gemma4-26b-a4b": (128, 2816, 704, 8),
    "mixtral-8x7b": (8, 4096, 14336, 2),
    "gpt-oss-20b": (32, 2880, 2880, 4),
    "olmoe": (64, 2048, 1024, 8),
    "deepseek-v2-lite": (64, 2048, 1408, 6),
}


def test_every_model_has_its_published_sizes() -> None:
    assert {s.name: (s.experts, s.hidden, s.intermediate, s.top_k) for s in shapes.SHAPES} == PUBLISHED
    assert shapes.find("gpt-oss-20b").activation == "swiglu_oai"
    assert shapes.find("gemma4-26b-a4b").activation == "gelu_tanh"


@pytest.mark.parametrize("spelling", ["Qwen3-30B-A3B", "qwen3_30b_a3b", "qwen3-30b-a3b"])
def test_spelling_does_not_matter(spelling: str) -> None:
    assert shapes.find(spelling).name == "qwen3-30b-a3b"


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ((0, 8, 8, 1), "experts must be at least 1"),
        ((4, 8, 8, 5), "top_k must be at most 4"),
        ((2000, 8, 8, 1), "1024"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        shapes.Shape("custom", *sizes)


def test_only_experts_with_tokens_are_read() -> None:
    shape = shapes.Shape("custom", 8, 16, 4, 2)
    ids = torch.tensor([[0, 3], [3, 0], [7, 8], [-1, 0]])
    assert shape.active_bytes(ids, torch.float32) == 3 * (3 * 4 * 16) * 4
    assert shape.active_bytes(ids, torch.bfloat16) == 3 * (3 * 4 * 16) * 2


def test_biases_are_read_too() -> None:
    assert shapes.Shape("custom", 8, 16, 4, 2, bias=True).expert_bytes(torch.float32) == (3 * 4 * 16 + 8 + 16) * 4


def test_the_floor_of_measured_md() -> None:
    """NVIDIA H200, 4.30 TB/s and 774 TFLOP/s: 17.6 us at T=1, 281 us when all experts are read, 799 us at T=8192."""
    shape, rates = shapes.find("qwen3-30b-a3b"), Rates(4.30e12, 774e12, "", "")
    one = torch.arange(8).view(1, 8)
    everyone = torch.arange(128).view(16, 8)
    assert rates.seconds(shape.active_bytes(one, torch.bfloat16), shape.flops(1)) == pytest.approx(17.6e-6, rel=0.01)
    every = shape.active_bytes(everyone, torch.bfloat16)
    assert rates.seconds(every, shape.flops(256)) == pytest.approx(281e-6, rel=0.01)
    assert rates.seconds(every, shape.flops(8192)) == pytest.approx(799e-6, rel=0.01)
    assert (rates.bound(every, shape.flops(256)), rates.bound(every, shape.flops(8192))) == ("memory", "compute")


def test_the_fastest_probe_that_took_part_gives_the_rate() -> None:
    cpu = torch.device("cpu")
    slow, fast, product = (Probe(name, 100.0, lambda: None, cpu) for name in ("slow", "fast", "product"))
    limits = Floor((slow, fast), (product,), Rates(10.0, 20.0, "slow", "product"))
    assert limits.rates({"slow": 2.0, "fast": 1.0}) == Rates(100.0, 20.0, "fast", "product")
    assert limits.rates({"product": 2.0}) == Rates(10.0, 50.0, "slow", "product")
    assert limits.taking_part(read=100.0, flops=1.0) == (slow, fast)
    assert limits.taking_part(read=100.0, flops=200.0) == (slow, fast, product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rates_of_this_machine_are_measured(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    square = floors._square
    monkeypatch.setattr(floors, "_square", lambda n, kind, device: square(min(n, 128), kind, device))
    start = Floor.measure(dtype, torch.device("cpu")).start
    assert start.bandwidth > 1e6
    assert start.matrix > 1e6
    assert "float32" in start.bandwidth_how
    assert "product" in start.matrix_how


@pytest.mark.parametrize("module", [shapes, floors, report, timing])
def test_examples(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]
