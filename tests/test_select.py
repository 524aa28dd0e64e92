"""Selection: who runs, who does not, and what is said about it."""

import logging
from collections.abc import Iterator

import pytest
import torch

import moefuse
from moefuse import backends
from moefuse.ops._core import select

LOGITS = torch.randn(2, 8)
ROUTING = moefuse.Routing(top_k=2)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MOEFUSE_BACKEND", raising=False)
    select.forget()
    yield
    monkeypatch.undo()
    select.forget()


def test_explicit_reference() -> None:
    chosen = select.choose("route", LOGITS, "reference")
    assert chosen.backend == "reference"
    assert [d.backend for d in chosen.decisions if not d.accepted] == [row.name for row in backends.BACKENDS]


def test_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"route: backend= must be one of cpu, triton, metal, reference, got 'cudnn'"):
        moefuse.route(LOGITS, ROUTING, backend="cudnn")


def test_explicit_choice_that_cannot_run_raises_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"route: backend 'metal' \(backend=\) cannot run this call: it runs on mps"):
        moefuse.route(LOGITS, ROUTING, backend="metal")


def test_environment_beats_the_default_and_argument_beats_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFUSE_BACKEND", "reference")
    assert select.choose("route", LOGITS, None).backend == "reference"
    monkeypatch.setenv("MOEFUSE_BACKEND", "metal")
    select.forget()
    with pytest.raises(ValueError, match="MOEFUSE_BACKEND"):
        moefuse.route(LOGITS, ROUTING)
    assert select.choose("route", LOGITS, "reference").backend == "reference"


def test_float64_moves_on_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "moefuse"):
        for _ in range(3):
            assert select.choose("route", LOGITS.double(), None).backend == "reference"
    assert len(caplog.records) == 1


def test_blocks_on_plain_torch_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A format without a kernel, forward or backward, is slow: the log has it by name, once for each op."""
    cpu = next(row for row in backends.BACKENDS if row.name == "cpu").load()
    monkeypatch.setattr(cpu, "FORMATS", cpu.FORMATS - {"Q8_0"})
    weight = moefuse.quantize(torch.randn(2, 8, 32), "Q8_0")
    x, plan = torch.randn(4, 32, requires_grad=True), moefuse.plan(torch.tensor([[0], [1], [1], [0]]), 2)
    with caplog.at_level(logging.WARNING, "moefuse"):
        for _ in range(3):
            moefuse.grouped_linear(x, weight, plan, gather=True, scatter=True).sum().backward()
    said = [record.getMessage() for record in caplog.records]
    forward = "moefuse: grouped_linear runs on plain torch: backend cpu: it has no kernel for Q8_0"
    assert said.count(forward) == 1
    assert len([line for line in said if "grouped_linear_transposed runs on plain torch" in line]) == 1
    assert len(said) == 2


def test_a_part_that_a_named_backend_lacks_is_told_of_once(
    target: tuple[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend, device = target
    row = backends.find(backend)
    if row is None:
        pytest.skip("the reference has every part")
    monkeypatch.delitem(row.load().OPS, "route_backward", raising=False)
    with caplog.at_level(logging.WARNING, "moefuse"):
        for _ in range(2):
            logits = LOGITS.to(device).requires_grad_()
            moefuse.route(logits, ROUTING, backend=backend)[0].square().sum().backward()
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"moefuse: route_backward runs on plain torch: backend {backend}: it has no kernel for route_backward"
    ]


def test_a_backend_that_fails_to_load_is_not_read_as_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: backends.Backend) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(backends.Backend, "missing", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        moefuse.route(LOGITS, ROUTING)


def test_a_missing_build_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(backends.Backend, "missing", lambda _: "the native library is not there")
    with caplog.at_level(logging.WARNING, "moefuse"):
        weights, _ = moefuse.route(LOGITS, ROUTING)
    assert "the native library is not there" in caplog.text
    assert weights.shape == (2, 2)


def test_backward_pieces_fall_back_when_the_forward_was_explicit(target: tuple[str, str]) -> None:
    backend, device = target
    logits = LOGITS.to(device).requires_grad_()
    weights, _ = moefuse.route(logits, ROUTING, backend=backend)
    weights[:, 0].sum().backward()
    assert logits.grad.abs().sum() > 0


@pytest.mark.skipif(next(r for r in backends.BACKENDS if r.name == "cpu").missing() is not None, reason="not built")
def test_backward_pieces_fall_back_when_the_environment_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend without a piece of the backward leaves it to the reference, however the backend was chosen."""
    monkeypatch.setenv("MOEFUSE_BACKEND", "cpu")
    monkeypatch.delitem(next(r for r in backends.BACKENDS if r.name == "cpu").load().OPS, "route_backward")
    select.forget()
    logits = LOGITS.detach().clone().requires_grad_()
    moefuse.route(logits, ROUTING)[0].square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().sum() > 0
