"""The kernels, as Metal source that `moefuse.backends.metal.launch` puts together and compiles."""

from __future__ import annotations

from pathlib import Path

HOME = Path(__file__).parent


def text_of(name: str) -> str:
    return (HOME / f"{name}.metal").read_text(encoding="ascii")
