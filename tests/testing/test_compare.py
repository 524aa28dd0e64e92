"""The ruler itself: what it must not forgive."""

import torch

from moefuse.testing.compare import Tolerance, difference
from moefuse.testing.poison import poisoned


def test_relative_to_the_row() -> None:
    want = torch.tensor([[1000.0, 1.0], [1.0, 0.5]], dtype=torch.float64)
    got = want.clone()
    got[0, 1] += 0.1
    error = difference(got, want)
    assert abs(error.worst - 1e-4) < 1e-12
    got[1, 1] += 0.1
    error = difference(got, want)
    assert abs(error.worst - 0.1) < 1e-12
    assert error.where.startswith("row 1 column 1")


def test_nan_infinity_and_shape_are_infinite_errors() -> None:
    want = torch.ones(2, 3, dtype=torch.float64)
    for bad in (torch.nan, torch.inf, -torch.inf):
        got = want.clone()
        got[1, 1] = bad
        assert difference(got, want).worst == torch.inf
    assert difference(torch.ones(3, 2), want).worst == torch.inf


def test_zeros_are_not_close_to_anything() -> None:
    want = torch.randn(4, 8, dtype=torch.float64) * 1e-9
    assert difference(torch.zeros(4, 8), want).worst >= 1
    assert difference(torch.full((4, 8), 1e-30), torch.zeros(4, 8, dtype=torch.float64)).worst == torch.inf
    assert difference(torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.float64)).worst == 0


def test_expected_nan_and_infinity_must_match() -> None:
    want = torch.tensor([[torch.nan, torch.inf, 1.0]], dtype=torch.float64)
    assert difference(want.clone(), want).within(Tolerance(0, 0, "equal"))
    assert difference(torch.tensor([[torch.nan, -torch.inf, 1.0]]), want).worst == torch.inf


def test_empty_is_equal() -> None:
    assert difference(torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64)).worst == 0


def test_poison_fills_fresh_memory_and_lets_go() -> None:
    with poisoned():
        assert torch.empty(5).isnan().all()
        assert torch.ones(3).new_empty(4).isnan().all()
        assert (torch.empty(5, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert not torch.are_deterministic_algorithms_enabled()
