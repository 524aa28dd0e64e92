"""The case table itself."""

from pathlib import Path

import pytest
import torch

import moefuse
from moefuse import backends
from moefuse.ops._core import select
from moefuse.quant.formats import FORMATS
from moefuse.testing.cases import CASES, support_table


def test_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


def test_every_op_has_cases() -> None:
    functions = {name for name in moefuse.__all__ if name[0].islower()}
    assert {case.op for case in CASES} == functions - {"quantize", "invariant"}


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


def test_the_support_table_is_what_selection_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell of ops, and of ops and formats, against the rule that chooses who runs a call."""
    monkeypatch.setattr(backends.Backend, "missing", lambda _: None)
    ops, in_blocks, _ = (_cells(part) for part in support_table().split("\n\n"))
    assert set(select.REFERENCES) <= set(ops)
    assert {"grouped_linear", "linear", "experts", "experts_backward", "grouped_linear_transposed"} <= set(in_blocks)

    def runs(row: backends.Backend, op: str, spec: str | None = None, saves: bool = False) -> bool:
        parts = ("gate", "experts") if op == "moe" else (op,)
        specs = {part: (spec,) if spec and part != "gate" else () for part in parts}
        asked = [select._Question(p, row.devices[0], torch.float32, specs[p], saves and p != "gate") for p in parts]
        return all(select._rejection(row, question, False) is None for question in asked)

    for op, cells in ops.items():
        for row in backends.BACKENDS:
            assert cells[row.name].startswith("kernel") == runs(row, op), (op, row.name)
            if op in ("experts", "moe"):
                assert (cells[row.name] == "kernel") == runs(row, op, saves=True), (op, row.name)
    for op, cells in in_blocks.items():
        for row in backends.BACKENDS:
            listed = cells[row.name].split(";")[0].replace(f"all {len(FORMATS)}", ", ".join(FORMATS)).split(", ")
            for spec in FORMATS:
                assert (spec in listed) == runs(row, op, spec), (op, row.name, spec)


def _cells(table: str) -> dict[str, dict[str, str]]:
    """First cell of a row -> heading -> cell."""
    heading, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines())
    return {row[0]: dict(zip(heading, row, strict=True)) for row in rows}
