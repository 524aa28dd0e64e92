"""The case table, crossed with every backend that can run here."""

import pytest
import torch

from moefuse.quant.arrange import INTERLEAVED, PLANES
from moefuse.testing import cases

EACH = [pytest.param(case, dtype, id=f"{case.id}-{str(dtype)[6:]}") for case in cases.CASES for dtype in case.dtypes]


@pytest.mark.parametrize(("case", "dtype"), EACH)
def test_case(case, dtype, target, rng):
    if dtype not in cases.dtypes_of(case, target[0]):
        pytest.skip(f"{target[0]} has no kernel for {', '.join((case.op, *case.formats))}")
    outcome = cases.run(case, dtype, *target, seed=rng.initial_seed())
    assert outcome.passed, outcome.describe()


@pytest.mark.parametrize("arrangement", [PLANES, INTERLEAVED])
@pytest.mark.parametrize("case", [case for case in cases.CASES if case.specs], ids=lambda case: case.id)
def test_blocks_arranged(case, arrangement, target, rng):
    if torch.float32 not in cases.dtypes_of(case, target[0]):
        pytest.skip(f"{target[0]} has no kernel for {', '.join((case.op, *case.formats))}")
    outcome = cases.run(case, torch.float32, *target, seed=rng.initial_seed(), arrangement=arrangement)
    assert outcome.passed, outcome.describe()


def test_the_table_reaches_every_op():
    ops = {"route", "gate", "plan", "grouped_linear", "grouped_outer", "linear", "glu", "combine", "experts", "moe"}
    ops |= {"rope", "attend"}
    assert {case.op for case in cases.CASES} == ops


def test_cases_are_told_apart_by_their_id():
    assert len({case.id for case in cases.CASES}) == len(cases.CASES)


def test_zeros_do_not_pass():
    """A kernel that writes zeros fails every case that has tokens."""
    for case in cases.CASES:
        if case.name.endswith(("no_token", "empty")):
            continue
        for name, value in cases.call_op(case.op, case.inputs(0, torch.float32), "reference").items():
            assert not value.is_floating_point() or (value != 0).any(), f"{case.id}: {name}"
