"""A tape runs again what touched numbers, on the same memory."""

import pytest
import torch
from torch import Tensor

from moefuse import linear
from moefuse.ops._core.tape import NotTaped, Tape


def taped(function: object, x: Tensor) -> Tape:
    tape = Tape(function)  # type: ignore[arg-type]
    x.normal_()
    return tape


def test_kernels_views_and_functions() -> None:
    x, w = torch.randn(3, 64), torch.randn(32, 64)
    state = torch.zeros(3)

    def step() -> Tensor:
        y = linear(x, w)
        halves = y.view(3, 2, 16)[:, 1]
        state.add_(1)
        out = torch.empty(3, 16)
        out.copy_(halves * 2)
        return torch.cat((out, out.exp()), -1) + state[:, None]

    tape = taped(step, x)
    before = state.clone()
    got = tape.run().clone()
    assert torch.equal(state, before + 1)
    state.copy_(before)
    assert torch.equal(got, step())


def test_memory_is_its_own() -> None:
    """What a step frees is not given to what follows it."""
    x = torch.randn(1000)

    def step() -> Tensor:
        first = (x + 1).sum()
        second = (x * 2).sum()
        return first + second

    tape = taped(step, x)
    torch.empty(1000).fill_(7.0)
    assert torch.equal(tape.run(), step())


@pytest.mark.parametrize("look", [Tensor.item, Tensor.tolist, bool, float, int, lambda t: t.nonzero()])
def test_a_look_at_numbers_is_refused(look: object) -> None:
    x = torch.ones(1)
    with pytest.raises(NotTaped, match="it looks at numbers"):
        Tape(lambda: look(x + 1))  # type: ignore[operator]
    assert torch.equal(linear(torch.ones(1, 4), torch.ones(1, 4)), torch.tensor([[4.0]])), "all is as before"


def test_other_threads() -> None:
    threads = torch.get_num_threads()
    tape = Tape(lambda: torch.ones(1) + 1)
    assert not tape.stale
    try:
        torch.set_num_threads(threads + 1)
        assert tape.stale
    finally:
        torch.set_num_threads(threads)
