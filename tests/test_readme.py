"""The README does what it says."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_short() -> None:
    assert len(README.splitlines()) < 120


def test_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    assert len(blocks[0].strip().splitlines()) <= 10
    scope: dict[str, object] = {}
    for block in blocks:
        exec(block, scope)
    assert scope["out"].shape == (4, 64)
    assert scope["normed"].shape == (4, 64)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (Path(__file__).parents[1] / target).exists(), target
