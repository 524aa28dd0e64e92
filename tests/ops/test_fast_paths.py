"""What rests on the internals of torch and Triton is tried first, and said where it is off."""

import logging

import pytest
import torch

import moefuse
from moefuse import backends
from moefuse.ops._core import library
from moefuse.testing import cases


def test_every_fast_path_holds_with_this_torch() -> None:
    assert library.FAST_PATHS == {"calls past the dispatcher": None, "gradients in saved memory": None}


@pytest.mark.parametrize("broken", [lambda: False, lambda: 1 / 0], ids=["behaves otherwise", "raises"])
def test_a_path_that_does_not_hold_is_said(
    broken, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "FAST_PATHS", {})
    with caplog.at_level(logging.WARNING, "moefuse"):
        assert not library.prove("a path", broken)
    assert "a path is off: torch's internals" in caplog.text
    assert library.FAST_PATHS["a path"]


def test_calls_are_right_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 8)
    want = moefuse.glu(x, "silu")
    monkeypatch.setattr(library, "_DIRECT", False)
    assert not library.unwatched()
    assert torch.equal(moefuse.glu(x, "silu"), want)


def test_internals_that_are_gone_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "FAST_PATHS", {})
    monkeypatch.delattr(torch._C, "_len_torch_dispatch_stack")
    assert not library.prove("a path", library._watchers_show)


@pytest.mark.skipif(("triton", "cpu") not in cases.runnable(emulated=True), reason="needs Triton's interpreter")
def test_a_launcher_of_another_layout_turns_replay_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moefuse.backends.triton.runtime import replay as recording

    cpu = torch.device("cpu")
    monkeypatch.setattr(recording, "_PROVED", {})
    assert recording.why_not(cpu) is None
    for replay, reason in (
        (lambda *_: lambda tensors: tensors[0], "other numbers"),
        (lambda *_: 1 / 0, "launcher is another"),
    ):
        monkeypatch.setattr(recording, "_PROVED", {})
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "moefuse"):
            patch.setattr(recording, "_Interpreted", replay)
            assert reason in str(recording.why_not(cpu))
        assert "replay is off" in caplog.text
        assert recording.record(lambda x: x, [torch.ones(3)]) is None


def test_triton_is_off_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    row = next(row for row in backends.BACKENDS if row.name == "triton")
    monkeypatch.setattr(torch.version, "hip", "6.3")
    assert "ROCm" in str(row.missing())


def test_each_path_is_on_or_says_why() -> None:
    for row in backends.BACKENDS:
        if row.missing() is None:
            for name, value in row.load().describe().items():
                if name in ("Hopper's product", "replay", "programmatic dependent launch", "torch's thread team"):
                    assert value == "on" or value.startswith("off: ")
