"""What is missing is asked for in words that work, wherever the package came from."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from moefuse import config

CHECKOUT = Path(__file__).parents[1]


def test_optional_packages_are_those_of_the_extras() -> None:
    extras = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = {requirement for extra in ("triton", "hf", "gguf", "bench") for requirement in extras[extra]}
    assert {f"{name}{versions}" for name, versions in config.OPTIONAL.items()} == listed


def test_a_missing_package_is_asked_for_by_its_own_name() -> None:
    """An extra would need the place that this package came from."""
    assert config.install("gguf") == f"pip install 'gguf{config.OPTIONAL['gguf']}'"


class Installed:
    """A distribution with what pip noted about its origin."""

    def __init__(self, noted: str | None) -> None:
        self.noted = noted

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.noted


@pytest.mark.parametrize(
    ("noted", "origin"),
    [
        ('{"url": "file:///home/me/my%20checkout", "dir_info": {}}', "'/home/me/my checkout'"),
        ('{"url": "file:///tmp/moefuse.whl", "archive_info": {}}', "'/tmp/moefuse.whl'"),
        (None, "moefuse"),
    ],
    ids=["directory", "file", "index"],
)
def test_a_rebuild_starts_where_the_package_came_from(
    noted: str | None, origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "__file__", str(tmp_path / "lib" / "moefuse" / "config.py"))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Installed(noted))
    assert config.rebuild().endswith(f"--no-cache-dir {origin}")


def test_a_rebuild_in_a_checkout_leaves_it_editable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(config, "__file__", str(tmp_path / "src" / "moefuse" / "config.py"))
    assert config.rebuild().endswith(f" -e '{tmp_path}'")
