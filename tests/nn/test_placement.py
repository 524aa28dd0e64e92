"""Experts in RAM and in slots: the same result wherever they lie, whatever moves, and on a device that is late."""

import copy
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from slow_device import Line, SlowDevice, SlowEvent
from torch import Tensor, nn

from moefuse import Activation, QuantTensor, Routing, experts, quantize
from moefuse.nn import MoE, Placement, placement, rates
from moefuse.nn.accelerator import Cuda
from moefuse.nn.place import placed
from moefuse.nn.placed_experts import PlacedExperts
from moefuse.nn.rates import Rates
from moefuse.nn.shared import stack_arguments
from moefuse.nn.sizes import bytes_of
from moefuse.nn.slots import Slots
from moefuse.nn.stack_memory import nbytes_of, tensors_of
from moefuse.quant.arrange import _TAKEN, WANTED
from moefuse.types import Stacks

E, H, I = 8, 64, 32
#: the CPU computes whatever T is, or everything that may streams
SLOW_BUS, FAST_BUS = Rates(1.0, 1.0, 1e12, 1e15), Rates(1e15, 1e15, 1.0, 1.0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    made = SlowDevice()
    monkeypatch.setattr(placement, "LEAST_ROOM", 0)
    monkeypatch.setattr(placement, "accelerator_of", lambda _: made)
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS)
    return made


@pytest.fixture
def streams(device: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    """Experts without a slot stream."""
    monkeypatch.setattr(placement, "rates_of", lambda _: FAST_BUS)
    return device


def numbers(
    dtype: torch.dtype = torch.float32, bias: bool = False, gated: bool = True, layout: str = "halves"
) -> Stacks:
    gate_up, down = torch.randn(E, 2 * I if gated else I, H) / 8, torch.randn(E, H, I) / 5
    biases = (torch.randn(E, gate_up.shape[1]) / 4, torch.randn(E, H) / 4) if bias else (None, None)
    return Stacks(gate_up.to(dtype), None, down.to(dtype), *(b if b is None else b.to(dtype) for b in biases), layout)


def blocks(*formats: str) -> Stacks:
    shapes = ((E, 256, 256), (E, 256, 256), (E, 256, 256))
    gate, up, down = (
        quantize(torch.randn(shape) / 16, name).exactly() for shape, name in zip(shapes, formats, strict=True)
    )
    return Stacks(gate, up, down)


def layer_of(stacks: Stacks, slots: int, activation: str = "silu", **options: Any) -> PlacedExperts:
    made = Placement(**options)
    layer = made.take("experts", stacks, Activation(activation))
    made.budget, made.room = 2**30, 0
    made._set_slots(slots)
    return layer


def drawn(T: int, top_k: int = 3, width: int = H, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(-2, E + 2, (T, top_k), dtype=torch.int32)
    return torch.randn(T, width).to(dtype), ids, torch.rand(T, top_k)


def wide(stacks: Stacks) -> Stacks:
    def one(value: Any) -> Any:
        return value.dequantize().double() if isinstance(value, QuantTensor) else value.double()

    return Stacks(**{k: v if v is None or k == "layout" else one(v) for k, v in stacks._asdict().items()})


def exact(stacks: Stacks, x: Tensor, ids: Tensor, weights: Tensor, activation: str = "silu", **tail: Any) -> Any:
    """The op in float64."""
    tail = {name: t.double() if isinstance(t, Tensor) else t for name, t in tail.items()}
    return experts(
        x.double(), ids, weights.double(), activation=activation, backend="reference", **stack_arguments(wide(stacks)),
        **tail,
    )  # fmt: skip


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Two chained products in float32, and one rounding to the type of the result."""
    allowed = 2e-6 if dtype == torch.float32 else 2 ** (-8 if dtype == torch.bfloat16 else -11) + 2**-9
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    assert float(error.max() if error.numel() else 0.0) < allowed


KINDS: dict[str, Any] = {
    "float32": lambda: (numbers(), "silu"),
    "biases": lambda: (numbers(bias=True), "gelu"),
    "ungated": lambda: (numbers(gated=False, bias=True), "relu2"),
    "interleaved": lambda: (numbers(layout="interleaved"), "silu"),
    "Q4_K": lambda: (blocks("Q4_K", "Q4_K", "Q4_K"), "silu"),
    "mixed": lambda: (blocks("Q4_0", "Q8_0", "Q6_K"), "gelu_tanh"),
}


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("slots", [0, 1, 5, E])
@pytest.mark.parametrize("kind", KINDS)
def test_together_they_give_what_the_op_gives(device: SlowDevice, kind: str, slots: int, T: int) -> None:
    stacks, activation = KINDS[kind]()
    if activation == "relu2":
        activation = Activation("relu2", gated=False)
    layer = layer_of(stacks, slots)
    layer.activation = activation if isinstance(activation, Activation) else Activation(activation)
    x, ids, weights = drawn(T, width=stacks.down.shape[1])
    with torch.no_grad():
        for _ in range(2):
            assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights, layer.activation))
    asked = int(((ids >= 0) & (ids < E)).sum()) * 2
    found = layer.placement.facts()
    assert found["hits"] + found["misses"] == asked
    assert len(device.pinned) == len([v for k, v in stacks._asdict().items() if v is not None and k != "layout"])


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("slots", [0, 1, 5, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_they_give_what_the_op_gives(kind: str, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks, activation = KINDS[kind]()
    rule = Activation("relu2", gated=False) if activation == "relu2" else Activation(activation)
    bytes_each = sum(nbytes_of(w) for w in tensors_of(stacks).values()) // E
    monkeypatch.setattr(placement, "GROUP", 3 * bytes_each)
    layer = layer_of(stacks, slots)
    layer.activation = rule
    assert layer.group == 3
    with torch.no_grad():
        for T in (2, 40):
            x, ids, weights = drawn(T, width=stacks.down.shape[1])
            assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights, rule))
    assert layer.placement.streamed_bytes == 2 * (E - slots) * layer.expert_bytes
    assert layer.placement.calls == 0


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("order", ["", "interleaved"])
@pytest.mark.parametrize("bus", ["slow", "fast"])
@pytest.mark.usefixtures("device")
def test_blocks_that_the_device_wants_in_another_order(bus: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS if bus == "slow" else FAST_BUS)
    monkeypatch.setitem(WANTED, "cpu", "planes")
    monkeypatch.setitem(_TAKEN, "cpu", None)
    stacks = blocks("Q4_K", "Q8_0", "Q6_K")
    stacks = stacks._replace(gate_up=stacks.gate_up.arranged(order), down=stacks.down.arranged(order))
    layer = layer_of(stacks, 3)
    assert layer.slots.stacks is not None
    assert layer.slots.stacks.specs == ("Q4_K:planes:exact", "Q8_0:planes:exact", "Q6_K:planes:exact")
    with torch.no_grad():
        for number, ids in enumerate((*skewed(40), *skewed(40, shift=4))):
            T = 1 + number % 2
            x, weights, many = torch.randn(T, 256), torch.rand(T, 3), ids.expand(T, 3)
            assert_close(layer(x, many, weights), exact(stacks, x, many, weights))
    assert layer.residency.moves > 0
    assert (layer.placement.streamed_bytes > 0) == (bus == "fast")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bus", ["slow", "fast"])
def test_narrow_types_and_the_whole_tail(dtype: torch.dtype, bus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS if bus == "slow" else FAST_BUS)
    stacks = numbers(dtype)
    layer = layer_of(stacks, 4)
    for T in (1, 5):
        x, ids, weights = drawn(T, dtype=dtype)
        tail: dict[str, Any] = {"residual": torch.randn(T, H).to(dtype), "shared": torch.randn(T, H).to(dtype)}
        tail |= {"shared_logit": torch.randn(T), "norm_weight": torch.rand(H).to(dtype), "eps": 1e-5}
        with torch.no_grad():
            out, normed = layer(x, ids, weights, **tail)
        want, want_normed = exact(stacks, x, ids, weights, **tail)
        assert out.dtype == normed.dtype == dtype
        assert_close(out, want, dtype)
        assert_close(normed, want_normed, dtype)


@pytest.mark.usefixtures("device")
def test_no_tokens() -> None:
    layer = layer_of(numbers(), 3)
    with torch.no_grad():
        assert layer(*drawn(0)).shape == (0, H)


def skewed(steps: int, shift: int = 0) -> list[Tensor]:
    """Ids of one token each; five experts have most of the load, others later."""
    weights = torch.tensor([8.0 if (e + shift) % E > 4 else 0.3 for e in range(E)])
    return [torch.multinomial(weights, 3)[None].int() for _ in range(steps)]


@pytest.mark.parametrize("late", [0, 1, 7])
def test_every_step_is_right_while_experts_move(device: SlowDevice, late: int) -> None:
    device.late = late
    stacks = numbers()
    layer = layer_of(stacks, 3)
    with torch.no_grad():
        for ids in (*skewed(120), *skewed(120, shift=4)):
            x, weights = torch.randn(1, H), torch.rand(1, 3)
            assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights))
        with layer.placement.still():
            pass
    assert layer.residency.moves >= 3
    assert layer.placement.facts()["moved_bytes"] == layer.residency.moves * layer.expert_bytes
    assert not layer.residency.moving
    assert "moves of" in str(layer.placement)


@pytest.mark.usefixtures("streams")
def test_prompts_between_steps_see_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = numbers()
    monkeypatch.setattr(placement, "GROUP", 2 * 4 * 3 * H * I)
    layer = layer_of(stacks, 3)
    with torch.no_grad():
        for ids in (*skewed(60), *skewed(60, shift=4)):
            for T in (1, 4):
                x, weights = torch.randn(T, H), torch.rand(T, 3)
                many = ids.expand(T, 3)
                assert_close(layer(x, many, weights), exact(stacks, x, many, weights))
    assert layer.residency.moves > 0


@pytest.mark.parametrize("where", ["_publish", "_take_in"])
def test_an_interrupt_between_a_move_and_its_table(
    streams: SlowDevice, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams.late = 0  # ids are looked at by the next call
    stacks, run = numbers(), getattr(Slots, where)
    layer, calls = layer_of(stacks, 3), 0

    def interrupted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            raise KeyboardInterrupt
        return run(*given)

    monkeypatch.setattr(Slots, where, interrupted)
    monkeypatch.setattr(placement, "GROUP", 2 * 4 * 3 * H * I)
    stopped = 0
    with torch.no_grad():
        for ids in (*skewed(100), *skewed(100, shift=4)):
            x, weights = torch.randn(2, H), torch.rand(2, 3)
            try:
                got = layer(x, ids.expand(2, 3), weights)
            except KeyboardInterrupt:
                stopped += 1
                continue
            assert_close(got, exact(stacks, x, ids.expand(2, 3), weights))
    monkeypatch.undo()
    with layer.placement.still():
        pass
    assert stopped > 0
    assert layer.residency.moves > 0
    assert sorted(layer.residency.slots)[0] >= 0


class Hasty(SlowDevice):
    """A device that does not wait where it is told to: what ``forgets`` says."""

    def __init__(self, forgets: str) -> None:
        super().__init__(late=10**9)
        self.forgets = forgets

    def event(self) -> SlowEvent:
        made = super().event()
        if self.forgets == "host":
            made.synchronize = lambda: None  # type: ignore[method-assign]
        if self.forgets == "query":
            made.query = lambda: True  # type: ignore[method-assign]
        return made

    def wait(self, event: SlowEvent, stream: Line | None = None) -> None:
        if self.forgets != "stream" or stream is not None:
            super().wait(event, stream)


@pytest.mark.parametrize("forgets", ["host", "stream"])
def test_a_forgotten_wait_is_seen(monkeypatch: pytest.MonkeyPatch, forgets: str) -> None:
    """What the device of these tests is worth: without a wait, results are wrong."""
    monkeypatch.setattr(placement, "accelerator_of", lambda _: Hasty(forgets))
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS if forgets == "host" else FAST_BUS)
    stacks = numbers()
    layer = layer_of(stacks, 3)
    x, ids, weights = torch.randn(4, H), torch.randint(0, E, (4, 3)), torch.rand(4, 3)
    with torch.no_grad(), pytest.raises(AssertionError):
        assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights))


def test_a_move_that_is_taken_for_done_waits_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "accelerator_of", lambda _: Hasty("query"))
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS)
    stacks = numbers()
    layer = layer_of(stacks, 3)
    with torch.no_grad():
        for ids in skewed(80, shift=3):
            x, weights = torch.randn(1, H), torch.rand(1, 3)
            assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights))


@pytest.mark.usefixtures("device")
def test_threads_share_a_layer() -> None:
    stacks = numbers()
    layer = layer_of(stacks, 4)
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for ids in skewed(40):
                    x, weights = torch.randn(1, H), torch.rand(1, 3)
                    assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights))
        except BaseException as error:  # handed to the test
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.usefixtures("device")
def test_a_load_map_places_for_good() -> None:
    layer = layer_of(numbers(), 2, load={"experts": [0, 9, 0, 0, 0, 0, 7, 0]})
    with torch.no_grad():
        for ids in skewed(60):
            layer(torch.randn(1, H), ids, torch.rand(1, 3))
    assert layer.residency.slots == [1, 6]
    assert layer.residency.moves == 0
    with pytest.raises(ValueError, match="load must have the 8 experts of experts, got 2 of them"):
        layer_of(numbers(), 2, load={"experts": [1, 2]})
    with pytest.raises(ValueError, match="load must have the 8 experts of experts, got none"):
        layer_of(numbers(), 2, load={})


def test_without_memory_there_are_fewer_slots_once(
    device: SlowDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stacks = numbers()
    layer = layer_of(stacks, 6)
    full, run = True, PlacedExperts._together

    def failing(self: PlacedExperts, *given: Any) -> Any:
        if full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, *given)

    monkeypatch.setattr(PlacedExperts, "_together", failing)
    x, ids, weights = drawn(2)

    def free() -> int:
        nonlocal full
        full = False
        return 2**40

    monkeypatch.setattr(device, "free", free)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "moefuse"):
        assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights))
        assert "from now on 3 experts of each layer have a slot, no longer 6" in caplog.text
        assert len(layer.residency.slots) == 3
        full = True
        with pytest.raises(torch.OutOfMemoryError):
            layer(x, ids, weights)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("at", ["stacks_like", "Slots._bring"])
def test_without_memory_for_half_of_the_slots_there_are_none(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fails, and calls after it are right: no table names a slot that was never filled."""
    stacks = numbers()
    layer = layer_of(stacks, 6)

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as without:
        without.setattr(f"moefuse.nn.slots.{at}", fails)
        with pytest.raises(torch.OutOfMemoryError):
            layer.placement.shrink(torch.OutOfMemoryError())
    with torch.no_grad():
        for ids in skewed(40):
            x, weights = torch.randn(1, H), torch.rand(1, 3)
            assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights))


def moe(**options: Any) -> MoE:
    return MoE(
        H, I, E, Routing(top_k=3), bias=True, shared_intermediate=48, norm=True, next_norm=True, **options
    ).eval()


def test_a_layer_is_placed(device: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "GROUP", 1)
    layer = moe()
    x = torch.randn(2, 5, H)
    each = (
        sum(p.nbytes for n, p in layer.named_parameters() if n in ("gate_up", "down", "gate_up_bias", "down_bias")) / E
    )
    rest = sum(p.nbytes for p in layer.parameters()) - each * E
    with torch.no_grad():
        want = layer(x, residual=x)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    budget = int((rest + 5 * each) / 7 * 8) + 8
    found = layer.place("auto", budget)
    assert device.limits == [budget]
    assert 0 < found.slots < E
    with torch.no_grad():
        for got, wanted in zip(layer(x, residual=x), want, strict=True):
            assert_close(got, wanted.double())
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    layer.to("cpu")  # it is there
    for move in (layer.half, layer.double, lambda: layer.to("meta"), lambda: nn.Sequential(layer).to("meta")):
        with pytest.raises(ValueError, match="to: the experts are placed between RAM and cpu"):
            move()
    with pytest.raises(ValueError, match="load_state_dict: the experts are placed"):
        layer.load_state_dict(state)
    with pytest.raises(ValueError, match="placed experts have no gradients"):
        layer(x)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(layer)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        torch.save(layer, "/dev/null")
    layer.unplace()
    assert placed(layer) is None
    assert device.limits == [budget, None]
    layer.half()
    copy.deepcopy(layer)


@pytest.mark.usefixtures("device")
def test_experts_in_blocks_are_placed() -> None:
    layer = MoE(256, 256, E, Routing(top_k=3), shared_intermediate=256).requires_grad_(False)
    for name in ("gate_up", "down", "shared_gate_up", "shared_down"):
        weight = quantize(getattr(layer, name), "Q8_0").exactly()
        delattr(layer, name)
        layer._hold(name, weight)
    x = torch.randn(5, 256)
    with torch.no_grad():
        want = layer(x)
        layer.place("cpu")
        assert layer.to("cpu").specs.keys() == {"gate_up", "down", "shared_gate_up", "shared_down"}
        assert_close(layer(x), want.double())


@pytest.mark.usefixtures("device")
def test_where_all_fit_nothing_is_placed() -> None:
    layer = moe()
    found = layer.place()
    assert found.whole
    assert placed(layer) is None
    assert "all on the GPU" in str(found)
    assert not layer.place("cpu").whole


def test_a_budget_that_is_too_small_is_refused(device: SlowDevice) -> None:
    layer = moe()
    with pytest.raises(ValueError, match=r"gpu_memory must hold what is not experts, \d+ bytes, .* got 1000 bytes"):
        layer.place("auto", 1000)
    assert placed(layer) is None
    assert not device.limits


@pytest.mark.parametrize("taken", [0, 1, 2**20, 3 * 2**29 + 7, 50 * 2**30])
def test_the_size_that_is_said_to_do_does(device: SlowDevice, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # as much room as outside of these tests
    monkeypatch.setattr(placement, "accelerator_of", lambda _: device)
    with pytest.raises(ValueError, match="gpu_memory must hold") as refused:
        Placement("auto", 0).admit(taken, {})
    size = re.search(r"give (\S+) or more", str(refused.value))
    assert size is not None
    Placement("auto", size[1]).admit(taken, {})
    with pytest.raises(ValueError, match="gpu_memory must hold"):
        Placement("auto", bytes_of(size[1]) - 2**21).admit(taken, {})


def test_words() -> None:
    with pytest.raises(ValueError, match="experts must be one of cpu, auto, got 'gpu'"):
        Placement("gpu")
    with pytest.raises(ValueError, match="device must be cuda, got cpu"):
        Placement(device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device must be cuda, there is no GPU here"):
            Placement()
    for text in ("much", "12 gigs", "-1GB", "", True, 1.5, None):
        with pytest.raises(ValueError, match="gpu_memory must be bytes or a size such as 12GiB"):
            bytes_of(text)  # type: ignore[arg-type]
    assert bytes_of("1.5kib") == 1536
    assert bytes_of("9" * 400) == 10**400 - 1
    with pytest.raises(ValueError, match="experts must be one of cpu, auto, got None"):
        moe().place(None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("device")
def test_a_layer_is_placed_from_ram_wherever_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its experts are those of the CPU; and a budget that is refused leaves no half of it on the GPU."""
    layer, moves, to = moe(), list[Any](), MoE.to

    def moved(self: MoE, device: Any) -> Any:
        moves.append(str(device))
        return to(self, device)

    monkeypatch.setattr(MoE, "to", moved)
    layer.place("cpu", "1GiB", device="cuda:0")
    assert moves[0] == "cpu"
    moves.clear()
    with pytest.raises(ValueError, match="gpu_memory must hold what is not experts"):
        layer.place("cpu", 1)
    assert moves == ["cpu"]


@pytest.mark.usefixtures("device")
def test_one_placement_for_one_model() -> None:
    made = Placement("cpu")
    layer = moe()
    layer.place(made)
    with pytest.raises(ValueError, match="a Placement must be new"):
        moe().place(made)
    layer.unplace()
    with pytest.raises(ValueError, match="a Placement must be new"):
        moe().place(made)
    with pytest.raises(ValueError, match="gpu_memory belongs to the Placement"):
        moe().place(Placement("cpu"), "1GiB")


def test_nothing_is_left_behind(device: SlowDevice) -> None:
    layer = layer_of(numbers(), 3)
    with torch.no_grad():
        for ids in skewed(60):
            layer(torch.randn(1, H), ids, torch.rand(1, 3))
    gone = weakref.ref(layer), weakref.ref(layer.placement)
    del layer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert not device.pinned
    assert not device.early


def moving(device: SlowDevice) -> PlacedExperts:
    """A layer with experts on their way, whose copies have been given to a stream and come when they must."""
    device.late = 10**9
    layer = layer_of(numbers(), 3)
    with torch.no_grad():
        for ids in (*skewed(60), *skewed(60, shift=4)):
            layer(torch.randn(1, H), ids, torch.rand(1, 3))
    layer.placement.facts()
    for move in layer.slots._moves:
        move.future.result()
    assert layer.residency.moving
    assert device.busy(layer.placement.side)
    return layer


def test_what_is_on_its_way_comes_before_its_memory_goes(device: SlowDevice) -> None:
    layer = moving(device)
    layer.placement.close()
    assert not device.busy(layer.placement.side)
    layer = moving(device)
    del layer
    gc.collect()
    assert not device.pinned
    assert not device.early


def test_what_failed_on_its_way_does_not_come_later(device: SlowDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move for which memory ran out leaves copies behind: none may come into what has the slots' memory next."""
    layer, run = layer_of(numbers(bias=True), 3), device.copy
    moves = 0

    def failing(target: Tensor, source: Tensor, stream: Line | None = None) -> None:
        nonlocal moves
        if stream is not None:
            moves += 1
            if moves % 4 == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
        run(target, source, stream)

    monkeypatch.setattr(device, "copy", failing)
    with torch.no_grad():
        for ids in (*skewed(60), *skewed(60, shift=4)):
            x, weights = torch.randn(1, H), torch.rand(1, 3)
            assert_close(layer(x, ids, weights), exact(layer.stacks, x, ids, weights))
    assert moves > 3
    layer.placement.shrink(torch.OutOfMemoryError())
    assert not device.busy(layer.placement.side)


@pytest.mark.parametrize("ends", [False, True])
def test_an_error_of_a_move_is_told_once(
    ends: bool, device: SlowDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the call that finds it, whose successors are right, or to the log where the placement ends."""
    layer, run = layer_of(numbers(), 3), device.copy
    failed: list[int] = []

    def failing(target: Tensor, source: Tensor, stream: Line | None = None) -> None:
        if stream is not None and not failed:
            failed.append(1)
            raise RuntimeError("the bus is gone")
        run(target, source, stream)

    monkeypatch.setattr(device, "copy", failing)
    told = 0
    with torch.no_grad():
        for ids in (*skewed(60), *skewed(60, shift=4)):
            x, weights = torch.randn(1, H), torch.rand(1, 3)
            try:
                assert_close(layer(x, ids, weights), exact(layer.stacks, x, ids, weights))
            except RuntimeError as error:
                told += str(error) == "the bus is gone"
            if ends and layer.residency.moving:
                break
    if ends:
        layer.placement.close()
        assert "an expert did not come into its slot: the bus is gone" in caplog.text
    else:
        assert told == 1
        assert layer.residency.moves > 0
    assert failed


@pytest.mark.usefixtures("device")
def test_while_all_is_still_other_threads_wait() -> None:
    stacks = numbers()
    layer, done = layer_of(stacks, 3), threading.Event()
    x, ids, weights = drawn(1)

    def call() -> None:
        with torch.no_grad():
            assert_close(layer(x, ids, weights), exact(stacks, x, ids, weights))
        done.set()

    thread = threading.Thread(target=call)
    with layer.placement.still():
        thread.start()
        assert not done.wait(0.3)
    thread.join(timeout=20)
    assert done.is_set()


def test_who_asks_for_facts_moves_nothing(device: SlowDevice) -> None:
    """Another thread may, and its work would be on another stream than the calls."""
    layer = layer_of(numbers(), 3)
    with torch.no_grad():
        for ids in skewed(40, shift=4):
            layer(torch.randn(1, H), ids, torch.rand(1, 3))
            moves, given = dict(layer.residency.moving), len(device.main.given)
            found = layer.placement.facts()
            assert (layer.residency.moving, len(device.main.given)) == (moves, given)
    assert found["hits"] + found["misses"] == 40 * 3
    assert layer.residency.moves > 0


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("bus", ["slow", "fast"])
def test_a_default_device_changes_nothing(bus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "rates_of", lambda _: SLOW_BUS if bus == "slow" else FAST_BUS)
    stacks, drawings = numbers(), [drawn(1 + n % 2) for n in range(40)]
    wanted = [exact(stacks, *each) for each in drawings]
    with torch.device("meta"), torch.no_grad():
        layer = layer_of(stacks, 3)
        got = [layer(*each) for each in drawings]
        rates.measure(layer.accelerator)
    for have, want in zip(got, wanted, strict=True):
        assert_close(have, want)


@pytest.mark.parametrize("where", ["take", "fill"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_model_is_placed_as_a_whole_or_not_at_all(
    device: SlowDevice, where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = moe(), torch.randn(2, H)
    with torch.no_grad():
        want = layer(x)

    def failing(*_: Any) -> None:
        raise error("in the middle")

    monkeypatch.setattr(Placement, where, failing)
    with pytest.raises(error, match="in the middle"):
        layer.place("cpu")
    gc.collect()
    assert placed(layer) is None
    assert not device.pinned
    assert device.limits[-1] is None
    monkeypatch.undo()
    with torch.no_grad():
        for got, wanted in zip(layer(x), want, strict=True):
            assert torch.equal(got, wanted)
    layer.half()


@pytest.mark.parametrize("words", ["cpu", "auto"])
def test_a_limit_goes_with_its_model(device: SlowDevice, words: str) -> None:
    layer = moe()
    layer.place(words)
    assert len(device.limits) == 1
    del layer
    gc.collect()
    assert device.limits[-1] is None


def test_a_limit_is_taken_back_by_who_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: said.append(part))
    monkeypatch.setattr(Cuda, "_limits", {})
    one, other = (Cuda(torch.device("cuda", 0)) for _ in range(2))
    one.limit(50)
    other.limit(200)
    one.unlimit()
    assert said == [0.5, 1.0]
    other.limit(20)
    other.unlimit()
    other.unlimit()
    assert said == [0.5, 1.0, 0.2, 1.0]


def test_rates_are_measured_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFUSE_CACHE", str(tmp_path))
    measured: list[int] = []

    def measure(_: Any) -> Rates:
        measured.append(1)
        return FAST_BUS

    monkeypatch.setattr(rates, "measure", measure)
    device = SlowDevice()
    assert rates.rates_of(device) == rates.rates_of(device) == FAST_BUS
    assert len(measured) == 1
    (tmp_path / "rates.json").write_text("[1]")
    assert rates.rates_of(device) == FAST_BUS


def test_rates_are_those_of_the_machine() -> None:
    found = rates.measure(SlowDevice())
    assert min(found.pinned, found.paged, found.read, found.compute) > 1e7


LOOP = """
import signal
import torch
from slow_device import SlowDevice
from moefuse.nn import Placement, placement
from moefuse.nn.rates import Rates
from moefuse.types import Activation, Stacks

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
placement.accelerator_of, placement.rates_of = lambda _: SlowDevice(), lambda _: Rates(1.0, 1.0, 1.0, 1.0)
made = Placement()
layer = made.take("experts", Stacks(torch.randn(64, 64, 32), None, torch.randn(64, 32, 32)), Activation("silu"))
made.budget, made.room = 2**40, 0
made._set_slots(8)
print("ready", flush=True)
with torch.no_grad():
    while True:
        layer(torch.randn(1, 32), torch.randint(0, 64, (1, 8)), torch.rand(1, 8))
"""


def test_an_interrupt_ends_it(tmp_path: Any) -> None:
    """No thread keeps the process alive, and none complains."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=20)
    finally:
        process.kill()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert said.count("Traceback") == 1
