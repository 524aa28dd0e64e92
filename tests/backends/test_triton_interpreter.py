"""The Triton kernels without a GPU: the case table in Triton's interpreter, in the types it computes rightly."""

import pytest
import torch

from moefuse.testing import cases

EMULATED = [target for target in cases.runnable(emulated=True) if target not in cases.runnable()]
#: thousands of interpreted programs each
LONG = {"plan/many", "route/e1000", "gate/many", "experts/prefill"}
#: gradients of the rest take minutes; tests/backends/test_triton_training.py has small ones
SHORT_GRADIENTS = {"route", "glu", "combine", "grouped_linear"}


def rows(slow: bool) -> list:
    """The whole table: float32 by default, with the gradients of some, and the rest in the long run."""
    return [
        pytest.param(case, dtype, *target, id=f"{target[0]}-{case.id}-{str(dtype)[6:]}")
        for target in EMULATED
        for case in cases.CASES
        for dtype in cases.dtypes_of(case, target[0])
        if slow == (dtype != torch.float32 or case.id in LONG)
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
    import moefuse

    with pytest.raises(ValueError, match="it has no bfloat16 kernels"):
        moefuse.glu(torch.ones(2, 4, dtype=torch.bfloat16), "silu", backend="triton")
