"""The formulas of tests/ops/test_formulas.py on the Metal kernels."""

from collections.abc import Iterator

import pytest
from metal_target import TARGET, simulated
from ops.test_formulas import *  # noqa: F403  # its tests, run here with the target below


@pytest.fixture(scope="module", autouse=True)
def _metal() -> Iterator[None]:
    with simulated():
        yield


@pytest.fixture
def target() -> tuple[str, str]:
    return TARGET
