"""Every op of the two seed systems, under its seed name, on the Metal kernels: the tests of tests/ops/test_seeds.py."""

from collections.abc import Iterator

import pytest
from metal_target import TARGET, simulated
from ops.test_seeds import *  # noqa: F403  # its tests, run here with the target below


@pytest.fixture(scope="module", autouse=True)
def _metal() -> Iterator[None]:
    with simulated():
        yield


@pytest.fixture
def target() -> tuple[str, str]:
    return TARGET
