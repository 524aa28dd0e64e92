"""The simulator's cache: what lies there is run, so it must be the user's own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from moefuse.testing.msl import build


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, for libraries that are not compiled."""
    monkeypatch.setenv("MOEFUSE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_toolchain", lambda: "none")
    build._cache.cache_clear()
    yield tmp_path / "cache" / "msl"
    build._cache.cache_clear()


def make(target: Path) -> None:
    target.write_bytes(b"library")


def test_the_folder_is_private(home: Path) -> None:
    made = build._built("shader", "x", make)
    assert made.parent == home
    assert home.stat().st_mode & 0o777 == 0o700
    assert build._built("shader", "x", lambda _: pytest.fail("it is there")) == made


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_write_is_refused(home: Path, mode: int) -> None:
    home.mkdir(parents=True)
    home.chmod(mode)
    with pytest.raises(PermissionError, match=r"msl must be yours and writable by nobody else: .*MOEFUSE_CACHE"):
        build._built("shader", "x", make)
    assert not list(home.iterdir())


def test_a_link_is_refused(home: Path, tmp_path: Path) -> None:
    home.parent.mkdir()
    home.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="must be yours"):
        build._built("shader", "x", make)


def test_what_another_user_made_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build._built("shader", "x", make)
    made.chmod(0o666)
    with pytest.raises(PermissionError, match=made.name):
        build._built("shader", "x", make)
    user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: user)
    with pytest.raises(PermissionError, match=made.name):
        build._built("shader", "x", make)
    build._cache.cache_clear()
    with pytest.raises(PermissionError, match=f"{home} must be yours"):
        build._built("shader", "x", make)
