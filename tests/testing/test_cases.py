"""The case table itself."""

from pathlib import Path

import moefuse
from moefuse import backends
from moefuse.testing.cases import CASES, support_table


def test_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


def test_every_op_has_cases() -> None:
    assert {case.op for case in CASES} == {name for name in moefuse.__all__ if name[0].islower()} - {"quantize"}


def test_inputs_depend_on_the_seed_alone() -> None:
    for case in CASES:
        first, again, other = (case.inputs(seed, case.dtypes[0]) for seed in (1, 1, 2))
        assert str(first) == str(again)
        if not case.name.endswith(("no_token", "empty", "one_expert")):
            assert str(first) != str(other)


def test_support_page_is_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "support.md").read_text()
    cpu = next(row for row in backends.BACKENDS if row.name == "cpu")
    assert cpu.missing() is None, cpu.missing()
    assert support_table() in page
