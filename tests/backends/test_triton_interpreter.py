"""The Triton kernels without a GPU: the case table in Triton's interpreter, in the types it computes rightly."""

import pytest
import torch
from bad_indices import check_bad_indices

import moefuse
from moefuse import QuantTensor
from moefuse.testing import cases
from moefuse.testing.compare import difference
from moefuse.testing.inputs import tensors_in
from moefuse.testing.strange import strange_cases

EMULATED = [t for t in cases.runnable(emulated=True) if t[0] == "triton" and t not in cases.runnable()]
#: thousands of interpreted programs each
LONG = {"plan/many", "route/e1000", "gate/many", "experts/prefill", "attend/batch"}
#: of the experts in blocks, these stand for all in the short run; every format has its own product there
IN_BLOCKS = {"experts/mixed", "experts/mixed_plain", "experts/mxfp4_gpt_oss"}
#: gradients of the rest take minutes; tests/backends/test_triton_training.py has small ones
SHORT_GRADIENTS = {"route", "glu", "combine", "grouped_linear", "linear"}


def long(case: cases.Case, dtype: torch.dtype) -> bool:
    """What the long run takes. `grouped_linear` keeps activations as they are: an exact product is the same again."""
    again = case.op == "grouped_linear" and any(spec.endswith(":exact") for spec in case.specs)
    in_blocks = case.op == "experts" and bool(case.specs) and case.id not in IN_BLOCKS
    return dtype != torch.float32 or case.id in LONG or again or in_blocks


def rows(slow: bool) -> list:
    """The whole table: float32 by default, with the gradients of some, and the rest in the long run."""
    return [
        pytest.param(case, dtype, *target, id=f"{target[0]}-{case.id}-{str(dtype)[6:]}")
        for target in EMULATED
        for case in cases.CASES
        for dtype in cases.dtypes_of(case, target[0])
        if slow == long(case, dtype)
    ]


@pytest.mark.parametrize(("case", "dtype", "backend", "device"), rows(slow=False))
def test_case(case, dtype, backend, device, rng) -> None:
    outcome = cases.run(case, dtype, backend, device, rng.initial_seed(), gradients=case.op in SHORT_GRADIENTS)
    assert outcome.passed, outcome.describe()


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype", "backend", "device"), rows(slow=True))
def test_case_at_length(case, dtype, backend, device, rng) -> None:
    outcome = cases.run(case, dtype, backend, device, rng.initial_seed())
    assert outcome.passed, outcome.describe()


def test_there_is_something_to_emulate() -> None:
    """On a machine without a GPU the interpreter must be at hand; with one, the kernels themselves are."""
    assert ("triton", "cpu") in EMULATED or torch.cuda.is_available()


@pytest.mark.skipif(not EMULATED, reason="a GPU is here, the kernels run on it")
def test_bfloat16_is_refused_where_the_interpreter_gets_it_wrong() -> None:
    with pytest.raises(ValueError, match="it has no bfloat16 kernels"):
        moefuse.glu(torch.ones(2, 4, dtype=torch.bfloat16), "silu", backend="triton")


@pytest.mark.skipif(not EMULATED, reason="the case table runs it on the GPU")
@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize(
    "kinds", [("Q4_K:exact", None), (None, "Q8_0:exact"), ("Q6_K:exact", "Q3_K:exact"), ("FP8", "Q4_K:exact")]
)
def test_gate_and_up_in_blocks_or_in_numbers(T: int, kinds: tuple[str | None, str | None], rng) -> None:
    """Few tokens and more; sentinels; an I that fills no strip of 256."""
    made = cases.Inputs(rng, torch.float32)
    x, weights, ids = made.normal(T, 256), made.shares(T, 3), torch.randint(-1, 5, (T, 3), generator=rng)
    stacks = tuple(made.stack(kind, 4, 96, 256) for kind in kinds)
    down = made.stack("Q5_0:exact", 4, 256, 96)
    got = moefuse.experts(x, ids, weights, stacks, down, residual=x, backend="triton")
    numbers = tuple(t.double() if isinstance(t, torch.Tensor) else t for t in stacks)
    want = moefuse.experts(x.double(), ids, weights.double(), numbers, down, residual=x.double(), backend="reference")
    assert difference(got, want).worst < 2e-6


@pytest.mark.parametrize("target", [t for t in cases.runnable(emulated=True) if t[0] == "triton"], ids=lambda t: t[1])
@pytest.mark.parametrize("format", ["Q4_K", "Q6_K", "Q8_0", "MXFP4"])
def test_few_tokens_are_rounded_to_8_bits_unless_blocks_are_exact(format: str, target: tuple[str, str], rng) -> None:
    """Runs of zeros, or nearly, have no largest number to divide by; not-a-number stays in its token."""
    made = cases.Inputs(rng, torch.float32)
    x, weights, ids = made.normal(4, 256), made.shares(4, 2), torch.randint(0, 3, (4, 2), generator=rng)
    x[0, 64:96], x[0, 96:128], x[1], x[2, 7] = 0.0, 1e-38, 0.0, torch.nan
    x[3] *= 1e4
    gate_up, down = made.stack(format, 3, 512, 256), made.stack(format, 3, 256, 256)
    want = moefuse.experts(x.double(), ids, weights.double(), gate_up, down, backend="reference")
    there = [t.to(target[1]) for t in (x, ids, weights)]
    for exact, least, most in ((True, 0.0, 1e-5), (False, 1e-3, 3e-2)):
        stacks = (stack.exactly(exact).to(target[1]) for stack in (gate_up, down))
        got = moefuse.experts(*there, *stacks, backend="triton").cpu()
        assert got[2].isnan().all()
        assert (got[1] == 0).all()
        error = difference(got[[0, 3]], want[[0, 3]])
        assert least <= error.rms < most, error


@pytest.mark.parametrize("target", [t for t in cases.runnable(emulated=True) if t[0] == "triton"], ids=lambda t: t[1])
@pytest.mark.parametrize("arrangement", ["", "planes"])
@pytest.mark.parametrize("T", [1, 128])
def test_every_code_of_fp8(T: int, arrangement: str, target: tuple[str, str], rng) -> None:
    """To the last bit, one row of x or tiles of them; a NaN or a strange scale is seen in its row, and in no other."""
    blocks = torch.randint(256, (9, 2, 132), generator=rng, dtype=torch.uint8)
    blocks[:2, 0, 4:] = torch.arange(256, dtype=torch.uint8).view(2, 128)
    blocks[:, :, 4:][blocks[:, :, 4:] & 0x7F == 0x7F] = 1
    blocks[..., :4] = (torch.rand((9, 2, 1), generator=rng) + 0.1).view(torch.uint8).view(9, 2, 4)
    weight = QuantTensor(blocks.view(9, 264), "FP8")
    # Denormal numbers, which a GPU may flush, are not among them.
    x = torch.eye(256)[:128] if T > 1 else torch.eye(256)[77:78]
    want = weight.dequantize()[:, :128].T if T > 1 else weight.dequantize()[None, :, 77]

    def product(given: QuantTensor) -> torch.Tensor:
        there = given.to(target[1]) if target[1] == "cuda" else given
        return moefuse.linear(x.to(target[1]), there.arranged(arrangement), backend="triton").cpu()

    assert torch.equal(product(weight), want)
    strange = weight.blocks.view(9, 2, 132)
    strange[3, 1, 4 + 77], strange[5, 0, 4] = 0x7F, 0xFF
    strange[7, 1, :4] = torch.tensor([torch.nan]).view(torch.uint8)
    strange[8, 0, :4] = torch.tensor([torch.inf]).view(torch.uint8)
    got = product(weight)
    assert not got[:, [3, 5, 7, 8]].isfinite().any()
    assert torch.equal(got[:, [0, 1, 2, 4, 6]], want[:, [0, 1, 2, 4, 6]])


def strange() -> list:
    """Small cases first: the interpreter takes a program at a time."""
    small = [case for case in cases.CASES if case.id not in LONG and not case.specs]
    small.sort(key=lambda case: sum(t.numel() for t in tensors_in(tuple(case.inputs(0, torch.float32).values()))))
    return [pytest.param(case, form, id=f"{case.id}-{form}") for case, form in strange_cases(small, one=True)]


@pytest.mark.parametrize(("case", "strange"), strange())
@pytest.mark.parametrize(("backend", "device"), EMULATED)
def test_strange_memory(case, strange, backend, device, rng) -> None:
    given = {"gradients": case.op in SHORT_GRADIENTS, "strange": strange}
    outcome = cases.run(case, torch.float32, backend, device, rng.initial_seed(), **given)
    assert outcome.passed, outcome.describe()


@pytest.mark.parametrize(("backend", "device"), cases.runnable(emulated=True))
def test_bad_indices_are_harmless(backend, device, monkeypatch) -> None:
    if backend not in ("cpu", "triton"):
        pytest.skip("the reference indexes with torch, which refuses")
    check_bad_indices(backend, device, monkeypatch)
