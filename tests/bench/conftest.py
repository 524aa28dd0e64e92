"""The floor's buffers and the rotation follow the cache: a small one keeps these tests fast."""

import pytest

from moefuse.bench import floor, machine


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cache_bytes", lambda *_: 1 << 16)
    monkeypatch.setattr(floor, "_SMALLEST_BUFFER", 1 << 22)
