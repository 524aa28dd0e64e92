"""Calls replayed from a recording give what the first call gave, and a call that differs gets no wrong recording."""

import contextlib
import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from callers import run_callers
from torch import Tensor

import moefuse
from moefuse import QuantTensor, Routing, backends
from moefuse.ops._core import replay, select
from moefuse.quant.arrange import PLANES
from moefuse.testing import cases
from moefuse.testing.compare import difference
from moefuse.testing.poison import poisoned

Target = tuple[str, str]
#: backends that replay, each with a device
TARGETS = [target for target in cases.runnable(emulated=True) if target[0] in ("cpu", "triton")]
INTERPRETED = ("triton", "cpu")
E, H, I, TOP_K = 5, 48, 24, 2
ROUTING = Routing(top_k=TOP_K)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    select.forget()
    yield
    select.forget()


@pytest.fixture(params=TARGETS, ids="-".join)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


class Block:
    """One layer's weights and a call of it."""

    def __init__(self, target: Target, dtype: torch.dtype = torch.float32) -> None:
        (self.backend, self.device), self.dtype = target, dtype
        self.router = self.random(E, H, scale=H**-0.5)
        self.gate_up = self.random(E, 2 * I, H, scale=H**-0.5)
        self.down = self.random(E, H, I, scale=I**-0.5)
        self.norm, self.next_norm = (self.random(H).abs() + 0.5 for _ in range(2))

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape) * scale).to(self.device, self.dtype)

    def __call__(self, x: Tensor, residual: Tensor, backend: str = "", **changes: Any) -> tuple[Tensor, Tensor]:
        def cast(t: Any) -> Any:
            return t.double() if backend == "reference" and isinstance(t, Tensor) else t

        options = {"norm_weight": self.norm, "residual": residual, "next_norm_weight": self.next_norm} | changes
        return moefuse.moe(
            cast(x),
            cast(self.router),
            cast(self.gate_up),
            cast(self.down),
            ROUTING,
            backend=backend or self.backend,
            **{name: cast(value) for name, value in options.items()},
        )

    def check(self, x: Tensor, residual: Tensor, **changes: Any) -> None:
        """The call agrees with float64."""
        want = self(x, residual, "reference", **changes)
        with poisoned():
            got = self(x, residual, **changes)
        bound = 2e-6 if self.dtype == torch.float32 else 4e-3
        for have, goal in zip(got, want, strict=True):
            assert difference(have, goal).worst < bound


def recordings(of_blocks: bool = True) -> int:
    """How many there are of whole blocks, or of parts of one: gate and experts."""
    return sum(record.again is not None and of_blocks == (op == "moe") for (op, *_), record in replay._RECORDS.items())


@pytest.mark.parametrize("T", [1, 2, 6])
def test_a_replay_has_the_bits_of_the_first_call(T: int, target: Target) -> None:
    """Other tokens and another layer of the same shape share the recording; T of 6 goes through plan and products."""
    first = Block(target)
    for _ in range(2):
        first.check(first.random(T, H), first.random(T, H))
    assert recordings() == 1
    other = Block(target)
    x, residual = other.random(T, H), other.random(T, H)
    other.check(x, residual)
    assert recordings() == 1
    with poisoned():
        replayed = other(x, residual)
        select.forget()
        plain = other(x, residual)
    assert recordings() == 0
    assert all(torch.equal(have, want) for have, want in zip(replayed, plain, strict=True))


#: of the calls of the case table, what the short run replays in the interpreter; and what takes that minutes
SHORT = {"gate/one_token", "gate/gemma4", "experts/decode", "experts/single", "experts/apart"}
LONG = {"gate/many", "experts/prefill"}
IN_BLOCKS = {"experts/mixed", "experts/q4_k_m_decode"}
REPLAYED = [
    pytest.param(
        target,
        case,
        id=f"{target[0]}-{case.id}",
        marks=() if target[0] == "cpu" or case.id in SHORT else pytest.mark.slow,
    )
    for target in TARGETS
    for case in cases.CASES
    if case.op in ("gate", "experts", "moe", "route", "plan")
    and (target[0] == "cpu" or (case.id not in LONG and (not case.specs or case.id in IN_BLOCKS)))
]


@pytest.mark.parametrize(("target", "case"), REPLAYED)
def test_the_case_table_replayed(target: Target, case: cases.Case, rng: torch.Generator) -> None:
    """Three calls with other numbers: one that is checked, one that is recorded and one that is only replayed."""
    backend, device = target
    order = {"arrangement": PLANES} if backend == "triton" else {}  # as blocks lie on a card
    for seed in range(3):
        outcome = cases.run(case, torch.float32, backend, device, rng.initial_seed() + seed, gradients=False, **order)
        assert outcome.passed, outcome.describe()
    more = case.id in ("experts/strided", "plan/no_token")  # a copy; Triton fills a plan of nothing
    assert more or any(record.again is not None for record in replay._RECORDS.values())


def test_gate_and_experts_have_recordings_of_their_own(target: Target) -> None:
    block = Block(target)
    for _ in range(3):
        x = block.random(2, H)
        weights, ids, normed = moefuse.gate(
            x, block.router, ROUTING, norm_weight=block.norm, return_normed=True, backend=block.backend
        )
        plain = moefuse.gate(normed, block.router, ROUTING, return_normed=True, backend=block.backend)
        assert plain[2] is normed
        got = moefuse.experts(normed, ids, weights, block.gate_up, block.down, residual=x, backend=block.backend)
        want = block(x, x, "reference", next_norm_weight=None)
        assert torch.equal(plain[1], ids)
        assert difference(got, want).worst < 2e-6
    assert recordings(of_blocks=False) == 3


def test_outputs_may_be_given_and_may_be_the_residual(target: Target) -> None:
    block = Block(target)
    for _ in range(3):
        x, residual = block.random(1, H), block.random(1, H)
        want = block(x, residual, "reference")
        normed = torch.full_like(x, torch.nan)
        got = block(x, residual, out=residual, normed_out=normed)
        assert got[0] is residual
        assert got[1] is normed
        for have, goal in zip(got, want, strict=True):
            assert difference(have, goal).worst < 2e-6
    assert recordings() == 1


def test_whatever_changes_makes_another_call(target: Target) -> None:
    block = Block(target)
    for _ in range(2):
        block.check(block.random(1, H), block.random(1, H))
    wide = block.random(1, 2 * H)
    block.check(wide[:, ::2], block.random(1, H))
    block.check(block.random(1 + H)[1:].view(1, H), block.random(1, H))
    block.check(block.random(1, H), block.random(1, H), eps=0.5)
    block.check(block.random(1, H), block.random(1, H), activation="relu")
    block.check(block.random(1, H), block.random(1, H), shared=block.random(1, H))
    block.check(block.random(2, H), block.random(2, H))
    half = Block(target, torch.float16)
    half.check(half.random(1, H), half.random(1, H))
    block.check(wide[:, ::2], block.random(1, H))
    block.check(wide[:, 1::2], block.random(1, H))
    # the strided x, which came twice too, is copied first: more than launches
    assert recordings() == 1


def test_weights_changed_in_place_are_seen(target: Target) -> None:
    """Other numbers, another memory, and other strides on the same memory."""
    block = Block(target)
    block.gate_up = torch.nn.Parameter(block.gate_up, requires_grad=False)
    x, residual = block.random(1, H), block.random(1, H)
    for _ in range(2):
        block.check(x, residual)
    block.gate_up.copy_(block.random(E, 2 * I, H, scale=H**-0.5))
    block.check(x, residual)
    block.gate_up.data = block.random(E, 2 * I, H, scale=H**-0.5)
    block.check(x, residual)
    assert 2 * I == H
    block.gate_up.data = block.gate_up.data.mT
    block.check(x, residual)
    block.check(x, residual)


def test_a_run_that_copies_is_not_recorded(target: Target) -> None:
    """A residual that lies apart is made contiguous first, which launches alone would leave out."""
    block = Block(target)
    for _ in range(3):
        block.check(block.random(2, H), block.random(H, 2).mT)
    assert recordings() == 0


def test_mistakes_are_refused_every_time(target: Target) -> None:
    block = Block(target)
    x = block.random(1, H)
    for _ in range(3):
        block.check(x, x)
        with pytest.raises(ValueError, match=r"moe: residual must be \[T=1, H=48\], got T=2"):
            block(x, block.random(2, H))
        with pytest.raises(TypeError, match="moe: eps must be a number, got bool"):
            block(x, x, eps=True)
        with pytest.raises(TypeError, match="moe: activation must be a name or an Activation, got list"):
            block(x, x, activation=["silu"])
        with pytest.raises(TypeError, match="moe: x must be a tensor, got NoneType"):
            block(None, x)


def test_gradients_and_fake_tensors_are_seen(target: Target) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    block = Block(target)
    for _ in range(2):
        block.check(block.random(1, H), block.random(1, H))
    x = block.random(1, H).requires_grad_()
    block(x, block.random(1, H))[0].sum().backward()
    assert x.grad.abs().sum() > 0
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out, _ = block(mode.from_tensor(block.random(1, H)), block.random(1, H))
    assert type(out).__name__ == "FakeTensor"


def test_records_are_bounded_and_keep_no_weights(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST", 6)
    block = Block(target)
    for T in (1, 2, 3, 4):
        for _ in range(2):
            block.check(block.random(T, H), block.random(T, H))
    assert 0 < recordings() <= len(replay._RECORDS) <= 6
    kept = [weakref.ref(t) for t in (block.router, block.gate_up, block.down, block.norm)]
    del block
    gc.collect()
    assert all(ref() is None for ref in kept)


class Compiled:
    """A kernel as Triton compiles it, run in the interpreter: it takes addresses where tensors were."""

    function, packed_metadata = object(), (4, 1, 0)

    def __init__(self, kernel: Any, types: list[torch.dtype | None], names: list[str], seen: list[Any]) -> None:
        self.kernel, self.types, self.names, self.seen = kernel, types, names, seen

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*args: Any, stream: int) -> None:
            self.run(*grid, stream, self.function, self.packed_metadata, None, None, None, *args)

        return run

    def run(self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
        assert function is self.function
        assert metadata is self.packed_metadata
        hooks, args, constants = rest[:3], rest[3 : 3 + len(self.types)], rest[3 + len(self.types) :]
        assert hooks == (None, None, None)
        at = [a if kind is None else _tensor_at(a, kind) for a, kind in zip(args, self.types, strict=True)]
        self.seen.append((stream, [a for a, kind in zip(args, self.types, strict=True) if kind is not None]))
        self.kernel[x, y, z](*at, **dict(zip(self.names, constants, strict=True)))


def _tensor_at(address: int, dtype: torch.dtype) -> Tensor:
    """One element; kernels go on from its address."""
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Recordings as on a GPU, by addresses. Lists the stream and the pointers of each launch."""
    if INTERPRETED not in TARGETS:
        pytest.skip("a GPU is here: every test above replays by addresses")
    from moefuse.backends.triton.runtime import launch
    from moefuse.backends.triton.runtime import replay as launches

    seen: list[Any] = []

    def compiled_for(kernel: Any, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        names = [name for name in options if name not in launch._COMPILER_OPTIONS]
        types = [arg.dtype if isinstance(arg, Tensor) else None for arg in args]
        return Compiled(kernel, types, names, seen), tuple(options[name] for name in names)

    monkeypatch.setitem(launches._PROVED, torch.device("cpu"), None)
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "compiled_for", compiled_for)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of a processor
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    return seen


@pytest.mark.parametrize("T", [1, 2, 6])
def test_a_replay_by_addresses(T: int, launched: list[Any]) -> None:
    block = Block(INTERPRETED)
    for _ in range(4):
        block.check(block.random(T, H), block.random(T, H))
    assert len(launched) == 3 * (3 if T < 6 else 5)
    assert all(stream == 0 for stream, _ in launched)


@pytest.mark.usefixtures("launched")
def test_a_view_of_a_stack_begins_inside_it() -> None:
    """Gate and up rows of one stack, in both layouts, and experts whose stack is a slice of a larger one."""
    block = Block(INTERPRETED)
    for layout in ("halves", "interleaved"):
        for _ in range(3):
            block.check(block.random(1, H), block.random(1, H), layout=layout)
    block.gate_up = block.random(E + 3, 2 * I, H, scale=H**-0.5)[2 : 2 + E]
    for _ in range(3):
        block.check(block.random(1, H), block.random(1, H))
    assert recordings() == 2


def test_a_tensor_at_an_odd_address_takes_the_long_way(launched: list[Any]) -> None:
    """Kernels are compiled for addresses that are multiples of 16, or for any."""
    block = Block(INTERPRETED)
    for _ in range(2):
        block.check(block.random(1, H), block.random(1, H))
    odd = block.random(1 + H)[1:].view(1, H)
    block.check(odd, block.random(1, H))
    assert launched
    assert all(odd.data_ptr() not in addresses for _, addresses in launched)


def test_a_replay_counts_where_no_other_counts(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside graphs the router's counters go with the stream; inside one, with the replay's scratch memory."""
    from moefuse.backends.triton.runtime import replay as launches
    from moefuse.backends.triton.runtime.launch import counters_at

    block, asked = Block(INTERPRETED), []
    x = block.random(1, H)

    def watched(device: torch.device, stream: int, scratch: int, count: int) -> Tensor:
        found = counters_at(device, stream, scratch, count)
        asked.append((stream, scratch, count, found.data_ptr()))
        return found

    monkeypatch.setattr(launches, "counters_at", watched)
    for stream in (0, 0, 7, 0):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _, stream=stream: stream)
        block.check(x, x)
    assert [stream for stream, *_ in asked] == [0, 7, 0]
    assert asked[0][-1] == asked[2][-1] != asked[1][-1]
    for step, (stream, scratch, count, counters) in enumerate(asked):
        seen, addresses = launched[3 * step]  # the router
        assert (seen, count) == (stream, 1)
        assert counters in addresses
        assert scratch in addresses


def test_another_device_is_made_current(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    block, entered = Block(INTERPRETED), []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(which)
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, "_cuda_getDevice", lambda: which.index)
            yield

    for _ in range(2):
        block.check(block.random(1, H), block.random(1, H))
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    block.check(block.random(1, H), block.random(1, H))
    assert entered == [torch.device("cpu")]
    assert len(launched) == 6


def test_profilers_see_replayed_launches(launched: list[Any]) -> None:
    import triton

    block = Block(INTERPRETED)
    hook = lambda _: None  # noqa: E731
    for _ in range(2):
        block.check(block.random(1, H), block.random(1, H))
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        block.check(block.random(1, H), block.random(1, H))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert len(launched) == 6


def test_a_kernel_that_was_never_compiled_is_not_replayed(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.backends.triton.runtime import replay as launches

    monkeypatch.setattr(launches, "compiled_for", lambda *_: None)
    block = Block(INTERPRETED)
    for _ in range(3):
        block.check(block.random(1, H), block.random(1, H))
    assert recordings() == 0
    assert not launched


CPU = ("cpu", "cpu")
needs_cpu = pytest.mark.skipif(CPU not in TARGETS, reason="the native library was not built")


@pytest.mark.parametrize("op", ["route", "plan"])
def test_parts_of_routing_are_replayed_into_memory_of_their_own(op: str, target: Target) -> None:
    backend, device = target

    def run(logits: Tensor, by: str = backend) -> tuple[Tensor, ...]:
        if op == "route":
            return moefuse.route(logits, ROUTING, backend=by)
        return tuple(moefuse.plan(logits.argsort(-1)[:, :2].int() - 1, E, backend=by).tensors.values())

    kept = []
    for _ in range(4):
        logits = torch.randn(3, E, device=device)
        with poisoned():
            got = run(logits)
        want = run(logits.double() if op == "route" else logits, "reference")
        assert all(difference(have, goal).worst < 1e-6 for have, goal in zip(got, want, strict=True))
        kept += [(t, t.clone()) for t in got]
    assert all(torch.equal(t, before) for t, before in kept)
    assert len({t.data_ptr() for t, _ in kept}) == len(kept)


@needs_cpu
def test_both_ways_to_look_at_a_call_see_the_same() -> None:
    """Which calls have a key, and which of them share one: in C++ as in Python."""
    x = torch.randn(4, 8)
    wrapped: list[Tensor] = []
    torch.func.vmap(lambda t: wrapped.append(t) or t)(x)
    blocks = torch.zeros(2, 2, 34, dtype=torch.uint8)
    values = [
        (x,), (torch.randn(4, 8),), (torch.nn.Parameter(x, requires_grad=False),), (x.requires_grad_(False), None),
        (x.bfloat16(),), (x.half(),), (x.double(),), (x.int(),), (x.long(),), (x.t(),), (x[:, :4],), (x[:2],),
        (x[None],), (torch.randn(8, 4).t(),),
        (x[:, 1:],), (torch._neg_view(x),), (torch._efficientzerotensor((4, 8)),), (torch.empty(0, 8),),
        (x, 1), (x, True), (x, 1.0), (x, "1"), (x, 2), (x, None), (x, "silu"), (x, moefuse.Activation("silu")),
        (x, ROUTING), (x, Routing(TOP_K)), (x, Routing(TOP_K, scale=2.0)), (x, [1]), (x, object()), (None,), ("x", 1),
        (QuantTensor(blocks, "Q8_0"),), (QuantTensor(blocks, "Q8_0", True),), (QuantTensor(blocks[:1], "Q8_0"),),
        (QuantTensor(torch.zeros(2, 2, 36, dtype=torch.uint8), "Q4_0"),), (blocks,), (x, x), (x, None, x), (None, x, x),
        (torch.randn(4, 8, requires_grad=True),), (x.to_sparse(),), (x.to("meta"),), (wrapped[0],),
        (torch.empty(4, 8).as_subclass(type("Mine", (Tensor,), {})),),
    ]  # fmt: skip
    for gradients in (False, True):
        native, plain = (
            [way("op", None, given, gradients) for given in values] for way in (replay._CORE.look, replay._look)
        )
        for given, have, want in zip(values, native, plain, strict=True):
            assert (have is None) == (want is None), given
            assert have is None or list(map(id, have[1])) == list(map(id, want[1]))
        keys = [[looked and looked[0] for looked in way] for way in (native, plain)]
        pairs = [[a == b for a in way for b in way] for way in keys]
        assert pairs[0] == pairs[1]


@needs_cpu
def test_the_instruction_set_is_that_of_the_call() -> None:
    """It changes bits, and a recording does not know it."""
    block = Block(CPU, torch.bfloat16)
    x, residual = block.random(3, H), block.random(3, H)
    core = replay._CORE
    before = core.isa()
    bits = {}
    try:
        for isa in core.isas() * 2:
            core.set_isa(isa)
            select.forget()
            for _ in range(2):
                block(x, residual)
            for other in core.isas():
                core.set_isa(other)
                got = block(x, residual)
                assert all(map(torch.equal, got, bits.setdefault(other, got)))
            assert recordings() == 1
    finally:
        core.set_isa(before)


@needs_cpu
def test_threads_are_those_of_the_call() -> None:
    program = """
import os, sys, torch, moefuse
torch.set_num_threads(1)
made = torch.randn(4, 512), torch.randn(8, 512), torch.randn(8, 512, 512) / 20, torch.randn(8, 512, 256) / 16
run = lambda: moefuse.moe(*made, moefuse.Routing(top_k=4))
one = [run() for _ in range(3)]
started = len(os.listdir("/proc/self/task"))
torch.set_num_threads(4)
many = run()
assert len(os.listdir("/proc/self/task")) >= started + 3
assert all(torch.equal(many, other) for other in one)
assert "torch._dynamo" not in sys.modules, "seconds of imports"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@needs_cpu
def test_several_callers_of_one_recording() -> None:
    """What lies between router and experts is each call's own."""
    block = Block(CPU)
    given = [(block.random(5, H), block.random(5, H)) for _ in range(4)]
    want = [block(*one) for one in given]
    run_callers(lambda i: all(map(torch.equal, block(*given[i]), want[i])), 200)
    assert recordings() == 1


@needs_cpu
def test_a_run_is_recorded_only_where_all_of_it_is_kernels() -> None:
    record = backends.find("cpu").load().record
    glu = backends.find("cpu").load().OPS["glu"]
    silu = moefuse.Activation("silu")
    x, table = torch.randn(2, 8), torch.randn(2, 8)

    def whole(t: Tensor) -> Tensor:
        return glu(t, None, silu, "halves")

    assert record(whole, [x]) is not None
    for refused in (
        lambda t: whole(t + 0),
        lambda t: whole(t[:1]),
        lambda _: whole(table),
        lambda t: whole(t)[:1],
        lambda t: whole(t).add_(1),
        lambda t: (whole(t), table),
        lambda t: (out := whole(t), out),
    ):
        assert record(refused, [x]) is None
    assert torch.equal(record(lambda t: (whole(t), t, None), [x])((table,))[0], whole(table))


class Launched:
    """A compiled kernel that takes down what it is launched with."""

    function, packed_metadata = 7, ()

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.run = self

    def __call__(self, *args: Any) -> None:
        self.seen.append(args)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self


@pytest.mark.parametrize("kind", ["triton.tools.tensor_descriptor", "triton.experimental.gluon.nvidia.hopper"])
def test_a_descriptor_is_made_anew_with_each_calls_addresses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a card: what a launch is given the second time differs from the first by addresses alone."""
    pytest.importorskip("triton")
    descriptor = pytest.importorskip(kind).TensorDescriptor
    from moefuse.backends.triton.runtime import launch as launches
    from moefuse.backends.triton.runtime import replay as replays

    layout = ("a layout",) if "gluon" in kind else ()
    compiled = Launched()
    monkeypatch.setattr(replays, "INTERPRETED", False)
    monkeypatch.setattr(replays, "compiled_for", lambda *_: (compiled, ("constant",)))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 3, raising=False)

    def run(x: Tensor) -> Tensor:
        out, rest = torch.empty_like(x), x[8:]
        assert launches.bytes_between(x, rest) == 8 * 16 * 2
        boxes = launches.describe(descriptor, rest, [8, 16], [16, 1], [4, 16], *layout)
        launches.launch(None, (2,), x, boxes, launches.describe(descriptor, out, [16, 16], [16, 1], [4, 16], *layout))
        return out

    again = replays._record(run, [torch.zeros(16, 16, dtype=torch.float16)])
    assert again is not None
    for _ in range(2):
        x = torch.zeros(16, 16, dtype=torch.float16)
        out = again([x])
        *_, first, boxes, to, constant = compiled.seen[-1]
        assert (first, boxes.base.data_ptr(), to.base.data_ptr()) == (x.data_ptr(), x[8:].data_ptr(), out.data_ptr())
        assert (type(boxes), boxes.shape, boxes.strides, boxes.block_shape) == (descriptor, [8, 16], [16, 1], [4, 16])
        assert (boxes.padding, boxes.base.dtype, constant) == ("zero", torch.float16, "constant")
        assert not layout or boxes.layout == "a layout"
    assert len(compiled.seen) == 2


def test_tensors_that_may_lie_anywhere_are_not_measured_when_recorded() -> None:
    pytest.importorskip("triton")
    from moefuse.backends.triton.runtime import launch as launches
    from moefuse.backends.triton.runtime import replay as replays

    def run(x: Tensor, y: Tensor) -> Tensor:
        launches.bytes_between(x, y)
        return torch.empty_like(x)

    assert replays._record(run, [torch.zeros(2), torch.zeros(2)]) is None
