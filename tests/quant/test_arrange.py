"""Arrangements of blocks: where each bit goes, the way back, in place, and what `QuantTensor` makes of them."""

import copy
import itertools
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moefuse
from moefuse import QuantTensor
from moefuse.backends.cpu import _native, interleave
from moefuse.ops._core.arrange import arranged
from moefuse.quant import arrange
from moefuse.quant.arrange import FIELDS, INTERLEAVED, PLANES
from moefuse.quant.formats import FORMATS, Format
from moefuse.quant.tensor import format_in, in_file_order, spec_of, unwrap, wrap
from moefuse.testing.random_blocks import random_blocks

by_format = pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)

#: bits of the low and the high plane, and the places of what is stored behind them
LAYOUT = {
    "Q8_0": (8, 0, [(0, 2)]),
    "Q4_0": (4, 0, [(0, 2)]),
    "Q4_1": (4, 0, [(0, 4)]),
    "Q5_0": (4, 1, [(0, 2)]),
    "Q5_1": (4, 1, [(0, 4)]),
    "IQ4_NL": (4, 0, [(0, 2)]),
    "MXFP4": (4, 0, [(0, 1)]),
    "IQ4_XS": (4, 0, [(0, 8)]),
    "Q4_K": (4, 0, [(0, 16)]),
    "Q5_K": (4, 1, [(0, 16)]),
    "Q6_K": (4, 2, [(192, 208), (208, 210)]),
    "Q2_K": (2, 0, [(0, 16), (80, 84)]),
    "Q3_K": (2, 1, [(96, 108), (108, 110)]),
    "FP8": (8, 0, [(0, 4)]),
}


def code(name: str, b: list[int], v: int) -> int:
    """Value v of a block as ggml reads it: its code, without scales."""
    nibble = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8, "IQ4_NL": 2, "MXFP4": 1}
    if name in nibble:
        low = b[nibble[name] + v % 16] >> 4 * (v // 16) & 15
        high = {"Q5_0": 2, "Q5_1": 4}.get(name)
        return low if high is None else low | (b[high + v // 8] >> v % 8 & 1) << 4
    half, within = divmod(v, 128)
    two = 2 * (within // 32)
    match name:
        case "Q8_0":
            return b[2 + v]
        case "FP8":
            return b[4 + v]
        case "IQ4_XS":
            return b[8 + 16 * (v // 32) + v % 16] >> 4 * (v % 32 // 16) & 15
        case "Q4_K":
            return b[16 + 32 * (v // 64) + v % 32] >> 4 * (v % 64 // 32) & 15
        case "Q5_K":
            return b[48 + 32 * (v // 64) + v % 32] >> 4 * (v % 64 // 32) & 15 | (b[16 + v % 32] >> v // 32 & 1) << 4
        case "Q6_K":
            low = b[64 * half + within % 64] >> 4 * (within // 64) & 15
            return low | (b[128 + 32 * half + v % 32] >> two & 3) << 4
        case "Q2_K":
            return b[16 + 32 * half + v % 32] >> two & 3
        case _:
            return b[32 + 32 * half + v % 32] >> two & 3 | (b[v % 32] >> v // 32 & 1) << 2


def random_bytes(form: Format, *lead: int, blocks: int, rng: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (*lead, blocks * form.nbytes), dtype=torch.uint8, generator=rng)


@by_format
def test_every_bit_has_its_place(form: Format, rng: torch.Generator) -> None:
    """From the rule in words: eight slots of four values in a run, slot w in word w*b//8 at bit w*b%8."""
    low, high, stored = LAYOUT[form.name]
    N, blocks = 3, 2 if form.values == 256 else 3
    rows = random_bytes(form, N, blocks=blocks, rng=rng)
    got = arrange.rearranged(rows, form.name, "", PLANES).flatten().tolist()
    runs = blocks * form.values // 32
    at = 0
    found = {}
    for bits in filter(None, (low, high)):
        for n, v in ((n, v) for n in range(N) for v in range(32 * runs)):
            run, (slot, i) = v // 32, divmod(v % 32, 4)
            byte = got[at + 4 * ((n * runs + run) * bits + slot * bits // 8) + i]
            part = byte >> slot * bits % 8 & 2**bits - 1
            found[n, v] = part if bits == low else found[n, v] | part << low
        at += N * runs * 4 * bits
    for (n, v), value in found.items():
        row = rows[n].view(blocks, -1)[v // form.values].tolist()
        assert value == code(form.name, row, v % form.values), (n, v)
    for start, stop in stored:
        want = rows.view(N, blocks, -1)[..., start:stop].flatten().tolist()
        assert got[at : at + len(want)] == want
        at += len(want)
    assert at == len(got)


@pytest.mark.parametrize("stacks", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_stacks_there_and_back(stacks: int, rng: torch.Generator) -> None:
    """Any bytes, odd sizes, no row or no block, stacks cut out of others; what lies beside them stays."""
    names = list(FORMATS)

    def draw(most: int, least: int = 0) -> int:
        return int(torch.randint(least, most + 1, (), generator=rng))

    for i in range(stacks):
        form = FORMATS[names[i % len(names)]]
        E, N, blocks, step, offset = draw(4), draw(7), draw(3), draw(2, 1), draw(3)
        whole = random_bytes(form, offset + E * step, N, blocks=blocks, rng=rng)
        before, part = whole.clone(), whole[offset::step]
        made = arrange.rearranged(part, form.name, "", PLANES)
        assert made.is_contiguous()
        assert torch.equal(arrange.rearranged(made, form.name, PLANES, ""), part)
        arrange.rearrange_(part, form.name, "", PLANES)
        assert torch.equal(part, made)
        arrange.rearrange_(part, form.name, PLANES, "")
        assert torch.equal(whole, before)


@by_format
def test_experts_are_arranged_each_by_itself(form: Format, rng: torch.Generator) -> None:
    stack = QuantTensor(random_bytes(form, 5, 7, blocks=3, rng=rng), form.name)
    made = stack.arranged(PLANES)
    for e in range(5):
        assert torch.equal(made[e].blocks, stack[e].arranged(PLANES).blocks)
    assert torch.equal(made[1::2].arranged("").blocks, stack[1::2].blocks)
    four = QuantTensor(stack.blocks[None].expand(2, -1, -1, -1), form.name)
    assert torch.equal(four.arranged(PLANES).blocks[1], made.blocks)
    row = stack[2][3]
    assert row.dim() == 1
    assert torch.equal(row.arranged(PLANES).arranged("").blocks, row.blocks)


@by_format
def test_chunks_of_any_size(form: Format, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_bytes(form, 5, 7, blocks=3, rng=rng)
    want = arrange.rearranged(rows, form.name, "", PLANES)
    for chunk in (1, 2 * 3 * form.nbytes, 2 * rows[0].numel(), 3 * rows[0].numel() - 1):
        monkeypatch.setattr(arrange, "_CHUNK", chunk)
        assert torch.equal(arrange.rearranged(rows, form.name, "", PLANES), want)
        part = rows.clone()
        arrange.rearrange_(part, form.name, "", PLANES)
        assert torch.equal(part, want)
        arrange.rearrange_(part, form.name, PLANES, "")
        assert torch.equal(part, rows)


class Live(TorchDispatchMode):
    """The most bytes that tensors made meanwhile have held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for t in made if isinstance(made, (list, tuple)) else [made]:
            storage = t.untyped_storage()
            if storage.data_ptr() not in given and storage.data_ptr() not in self.known:
                self.known.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage.data_ptr(), storage.nbytes())
        return made

    def gone(self, pointer: int, size: int) -> None:
        self.known.discard(pointer)
        self.now -= size


@by_format
def test_memory(form: Format, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """No second copy of a stack, in place or not: a chunk of it a dozen times at most."""
    rows = random_bytes(form, 64, 8, blocks=2, rng=rng)
    chunk = 2 * rows[0].numel()
    monkeypatch.setattr(arrange, "_CHUNK", chunk)
    for before, after in (("", PLANES), (PLANES, "")):
        with Live() as live:
            arrange.rearrange_(rows, form.name, before, after)
        assert chunk <= live.most <= 12 * chunk
        assert live.most < rows.numel() / 2
        with Live() as live:
            made = arrange.rearranged(rows, form.name, after, before)
        assert made.numel() <= live.most <= made.numel() + 12 * chunk


@by_format
def test_rows_and_numbers(form: Format, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = QuantTensor(random_bytes(form, 3, 11, blocks=3, rng=rng), form.name)
    made = stack.arranged(PLANES)
    numbers = stack.dequantize()

    def same(a: torch.Tensor, b: torch.Tensor) -> bool:
        return a.shape == b.shape and torch.equal(a.nan_to_num(nan=7.0), b.nan_to_num(nan=7.0))

    assert same(made.dequantize(), numbers)
    for rows in (slice(2, 9), slice(None), slice(10, 0, 3), slice(1, None, 4), slice(5, 5)):
        cut = made[1][rows]
        assert cut.arrangement == PLANES
        assert same(cut.dequantize(), numbers[1][rows])
    assert same(made[2][-1].dequantize(), numbers[2, -1])
    with pytest.raises(IndexError):
        made[2][11]
    ids = torch.tensor([[3, 0, 10], [3, 3, 1]])
    for matrix in (stack[1], made[1]):
        assert matrix.rows(ids).arrangement == matrix.arrangement
        assert torch.equal(matrix.rows(ids).arranged("").blocks, stack.blocks[1][ids])
        assert torch.equal(matrix.rows(ids[0, 0]).arranged("").blocks, stack.blocks[1, 3])
        assert same(matrix.rows(ids).dequantize(), numbers[1][ids])
        assert matrix.rows(ids[:0]).shape == (0, 3, numbers.shape[-1])
        with pytest.raises(IndexError):
            matrix.rows(torch.tensor([11]))
    with pytest.raises(ValueError, match=r"rows are taken of a matrix \[N, K\], got shape \[3, 11"):
        made.rows(ids)
    monkeypatch.setattr(moefuse.quant.tensor, "_CHUNK", 4 * numbers.shape[-1])  # four rows, which do not divide eleven
    assert same(made.dequantize(torch.float64), numbers.double())


def test_specs(rng: torch.Generator) -> None:
    stack = random_blocks("Q6_K", (2, 3, 256), rng, 1.0)
    for exact in (False, True):
        for order, spec in (("", "Q6_K"), (PLANES, "Q6_K:planes")):
            made = stack.exactly(exact).arranged(order)
            assert made.spec == spec + (":exact" if exact else "")
            again = wrap(*unwrap(made))
            assert isinstance(again, QuantTensor)
            assert (again.format, again.exact, again.arrangement) == ("Q6_K", exact, order)
            assert format_in(made.spec) == "Q6_K"
            assert in_file_order(made.spec) == stack.exactly(exact).spec
    assert spec_of("q6_k:Interleaved:exact") == "Q6_K:interleaved:exact"
    with pytest.raises(ValueError, match="may end in :interleaved, :exact or :interleaved:exact, got 'q6_k:planes'"):
        spec_of("q6_k:planes")


def test_printing_and_copies(rng: torch.Generator) -> None:
    made = random_blocks("Q6_K:exact", (2, 3, 256), rng, 1.0).arranged(PLANES)
    assert repr(made) == "QuantTensor(Q6_K, shape=[2, 3, 256], device=cpu, 1,260 bytes, planes, exact)"
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert other.spec == made.spec
        assert torch.equal(other.blocks, made.blocks)
    assert made.arranged(PLANES) is made


@pytest.mark.parametrize("name", ["rows", "PLANES", None, 1])
def test_arrangements_that_are_none(name: object, rng: torch.Generator) -> None:
    stack = random_blocks("Q8_0", (2, 3, 32), rng, 1.0)
    with pytest.raises(ValueError, match="arrangement must be one of '', 'planes', 'interleaved', got"):
        stack.arranged(name)
    with pytest.raises(ValueError, match="arrangement must be one of '', 'planes', 'interleaved', got"):
        QuantTensor(stack.blocks, "Q8_0", False, name)


INTERLEAVED_FORMATS = [form for form in FORMATS.values() if form.name != "FP8"]


@pytest.mark.parametrize("form", INTERLEAVED_FORMATS, ids=lambda form: form.name)
def test_interleaved_rows(form: Format, rng: torch.Generator) -> None:
    """Byte by byte from the rule in words, by torch and by the kernel, and back from it, in place too."""
    E, N, blocks = 2, 64, 3
    rows = random_bytes(form, E, N, blocks=blocks, rng=rng)
    stack = QuantTensor(rows, form.name)
    made = stack.arranged(INTERLEAVED)
    got = made.blocks.flatten().tolist()
    for e, n, b, at in itertools.product(range(E), (0, 5, 16, 63), range(blocks), range(form.nbytes)):
        field = next(field for field in FIELDS[form.name] if field.start <= at < field.stop)
        size = min(4, field.stop - field.start)
        word, byte = divmod(at - field.start, size)
        strip = ((e * N + n // 16 * 16) * blocks + 16 * b) * form.nbytes
        place = strip + 16 * field.start + (16 * word + n % 16) * size + byte
        assert got[place] == rows[e, n, b * form.nbytes + at], (e, n, b, at)
    assert torch.equal(made.arranged("").blocks, rows)
    assert torch.equal(made.arranged(PLANES).blocks, stack.arranged(PLANES).blocks)
    assert torch.equal(stack.arranged(PLANES).arranged(INTERLEAVED).blocks, made.blocks)
    wide = QuantTensor(torch.cat([rows, rows], 0)[::2], form.name)
    twice = replace(wide, blocks=torch.zeros_like(wide.blocks), arrangement=INTERLEAVED)
    if _native.core is not None:
        assert interleave.arrange(twice, wide)
        assert torch.equal(twice.blocks, torch.stack([made.blocks[0]] * 2))
    assert torch.equal(arranged(wide, INTERLEAVED).blocks, torch.stack([made.blocks[0]] * 2))
    in_place = rows.clone()
    arrange.rearrange_(in_place, form.name, "", INTERLEAVED)
    assert torch.equal(in_place, made.blocks)
    arrange.rearrange_(in_place, form.name, INTERLEAVED, "")
    assert torch.equal(in_place, rows)
    ids = torch.tensor([[5, 63], [0, 5]])
    for part, want in ((made[1].rows(ids), rows[1][ids]), (made[1][7:20], rows[1][7:20]), (made[1][-1], rows[1][-1])):
        assert part.arrangement == ""
        assert torch.equal(part.blocks, want)
    assert torch.equal(made[1].blocks, stack[1].arranged(INTERLEAVED).blocks)
    with pytest.raises(IndexError):
        made[0].rows(torch.tensor([-1]))


@pytest.mark.parametrize(("name", "shape"), [("Q8_0", (2, 48, 32)), ("FP8", (2, 64, 128)), ("Q8_0", (64,))])
def test_rows_that_cannot_be_interleaved(name: str, shape: tuple[int, ...], rng: torch.Generator) -> None:
    stack = random_blocks(name, shape, rng, 1.0)
    with pytest.raises(ValueError, match="interleaved rows must be a multiple of 32 and not in FP8, got"):
        stack.arranged(INTERLEAVED)
    with pytest.raises(ValueError, match="interleaved rows must be a multiple of 32 and not in FP8, got"):
        QuantTensor(stack.blocks, name, False, INTERLEAVED)


def test_a_device_gets_what_its_backend_reads(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = random_blocks("Q5_0", (2, 3, 96), rng, 1.0)
    before = stack.blocks.clone()
    assert stack.to("cpu").blocks is stack.blocks
    monkeypatch.setattr(arrange, "WANTED", {"cpu": PLANES, "meta": PLANES})
    moved = stack.to("cpu")
    assert moved.arrangement == PLANES
    assert torch.equal(stack.blocks, before)  # it may be somebody else's, or a file's
    assert torch.equal(moved.blocks, stack.arranged(PLANES).blocks)
    assert moved.to("cpu").blocks is moved.blocks
    assert stack.to("meta").spec == "Q5_0:planes"
    monkeypatch.setattr(arrange, "WANTED", {})
    assert torch.equal(moved.to("cpu").blocks, before)
    assert moved.to("meta").spec == "Q5_0"


@by_format
def test_ops_take_either(form: Format, rng: torch.Generator) -> None:
    """Bit for bit, gradients too, whatever the arrangement of each weight."""
    E, K, N = 4, 512, 6
    stack = random_blocks(form.name, (E, N, K), rng, K**-0.5)
    down, apart = (random_blocks("Q8_0", (E, K, I), rng, 0.2) for I in (32, 64))
    up = random_blocks(form.name, (E, 64, K), rng, K**-0.5)
    x, ids, weights = torch.randn(5, K), torch.randint(-1, E + 1, (5, 2), generator=rng), torch.rand(5, 2)
    plan = moefuse.plan(ids, E)
    for backend in ("cpu", "reference"):
        found = []
        for order in ("", PLANES):
            w, u, d = (one.arranged(order) for one in (stack, up, down))
            rows = x.clone().requires_grad_()
            parts = moefuse.linear(rows, (w[0], stack[1]), backend=backend)
            (grad,) = torch.autograd.grad(sum(part.sum() for part in parts), rows)
            found.append(
                (
                    *parts,
                    grad,
                    moefuse.grouped_linear(x, w, plan, gather=True, scatter=True, backend=backend),
                    moefuse.experts(x, ids, weights, u, d, backend=backend),
                    moefuse.experts(x, ids, weights, (u, up), apart, backend=backend),
                )
            )
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.slow
def test_torch_compile(rng: torch.Generator) -> None:
    stack = random_blocks("Q6_K:exact", (8, 512), rng, 512**-0.5)
    x, ids = torch.randn(3, 512), torch.tensor([1, 7, 1])

    def both(x: torch.Tensor, weight: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return moefuse.linear(x, weight), weight.rows(ids).dequantize()

    got = torch.compile(both, fullgraph=True, backend="aot_eager")(x, stack.arranged(PLANES))
    for one, other in zip(got, both(x, stack), strict=True):
        assert torch.equal(one, other)


def test_every_byte_has_one_field() -> None:
    assert FIELDS.keys() == FORMATS.keys()
    for name, fields in FIELDS.items():
        found = sorted(byte for field in fields for byte in range(field.start, field.stop))
        assert found == list(range(FORMATS[name].nbytes))
