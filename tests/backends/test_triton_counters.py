"""Counters of kernels whose last program does the rest: no two launches that may run at once share one."""

import gc

import card
import pytest
import torch
from torch import Tensor

import moefuse
from moefuse import Routing
from moefuse.testing import cases
from moefuse.testing.poison import poisoned

pytest.importorskip("triton")
from moefuse.backends.triton.runtime import launch

TARGETS = [target for target in cases.runnable(emulated=True) if target[0] == "triton"]
if not TARGETS:
    pytest.skip("Triton runs neither here nor in its interpreter", allow_module_level=True)
DEVICE = TARGETS[0][1]
on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
HERE = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capturing", lambda _: True)


def place(stream: int, scratch: int, count: int = 1) -> int:
    return launch.counters_at(HERE, stream, scratch, count).data_ptr()


def test_outside_a_graph_a_stream_has_its_own() -> None:
    assert place(0, 1000) == place(0, 2000)
    assert place(0, 1000) != place(7, 1000)


def test_inside_a_graph_the_calls_memory_has_its_own(captured: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    with monkeypatch.context() as patch:
        patch.setattr(launch, "capturing", lambda _: False)
        eager = place(0, 1000)
    assert place(0, 1000) == place(7, 1000)
    assert len({place(0, 1000), place(0, 2000), eager}) == 3


@pytest.mark.parametrize("count", [1, 16, 17, 64, 65, 1000])
def test_there_are_as_many_as_asked_for_and_none_is_shared(count: int) -> None:
    first, second = (launch.counters_at(HERE, stream, 0, count) for stream in (11, 12))
    for found in (first, second):
        assert found.numel() >= count
        assert not found.any()
    ends = sorted((t.data_ptr(), t.data_ptr() + 4 * t.numel()) for t in (first, second))
    assert ends[0][1] <= ends[1][0]


def test_when_all_are_given_away_a_call_brings_zeros_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_COUNTERS", {})
    monkeypatch.setattr(launch, "_KEPT", 32)
    kept = [launch.counters_at(HERE, stream, 0, 16) for stream in range(5)]
    assert len({t.data_ptr() for t in kept}) == 5
    assert len(launch._COUNTERS[HERE].pieces) == 2
    assert all(t.numel() >= 16 and not t.any() for t in kept)


def test_nothing_is_kept_that_a_capture_allocated(captured: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(launch, "_COUNTERS", {})
    assert not launch.counters_at(HERE, 0, 1000, 4).any()
    assert launch._COUNTERS == {}


E, H, I = 8, 64, 32
ROUTING = Routing(top_k=2)


class Block:
    """A block whose router and whose tail both count."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.router, self.gate_up, self.down, self.norm = (
            (torch.randn(shape) * 0.2).to(DEVICE, dtype) for shape in ((E, H), (E, 2 * I, H), (E, H, I), (H,))
        )

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = moefuse.moe(
            x,
            self.router,
            self.gate_up,
            self.down,
            ROUTING,
            norm_weight=self.norm,
            residual=x,
            next_norm_weight=self.norm,
            backend="triton",
        )
        assert isinstance(found, tuple)
        return found


@pytest.mark.parametrize("T", [1, 3])
def test_the_tails_counters_are_set_by_the_call_itself(T: int) -> None:
    """Memory full of rubbish beforehand: the norm is taken once all the same, first launched and replayed."""
    block = Block(torch.float32)
    x = torch.randn(T, H, device=DEVICE)
    found = []
    for _ in range(4):
        with poisoned():
            found.append(block(x))
    for pair in found[1:]:
        assert all(torch.equal(have, want) for have, want in zip(pair, found[0], strict=True))
    assert not torch.isnan(found[0][1]).any()


@pytest.mark.parametrize("T", [1, 3, 32])
def test_the_routers_counters_are_left_at_zero(T: int) -> None:
    block = Block(torch.float32)
    moefuse.gate(torch.randn(T, H, device=DEVICE), block.router, ROUTING, backend="triton")
    assert not launch._COUNTERS[HERE].zeros.any()


@on_a_card
@pytest.mark.parametrize("T", [1, 4])
def test_graphs_captured_on_one_stream_run_at_once_on_two(T: int) -> None:
    assert card.graphs_at_once(T) is None


@on_a_card
def test_a_graph_captured_before_there_are_counters() -> None:
    assert card.captured_first() is None


@on_a_card
def test_a_compiled_block_with_graphs_leaves_nothing_in_their_pool() -> None:
    """First called inside the warm-up of mode "reduce-overhead", whose pool must hold results alone."""
    launch._COUNTERS.clear()
    gc.collect()
    block = Block(torch.bfloat16)
    x = torch.randn(1, H, device=DEVICE, dtype=torch.bfloat16)
    with torch.inference_mode():
        compiled = torch.compile(lambda x: block(x)[0], mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            got = compiled(x).clone()
        assert torch.equal(got, block(x)[0])
