"""Set up once: what torch and Triton read when they load, seeds, and the backends that can run here as a fixture.

Seeds are fixed, each test's by its name, so that a run can be repeated; ``--fresh-seeds`` draws new ones.
"""

import os
import random
import zlib
from collections.abc import Callable

# Machines exist that advertise AMX and trap on it; torch's own bf16 products would kill the test run there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# A graph compiled and kept by an older version of these ops would call them with arguments they no longer take.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
# torch's threads must not spin for cores that another process has.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Workers of one run share the cores. Tests about threads set their number themselves.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy
import pytest
import torch
from torch import nn

# Without a GPU the Triton kernels run in its interpreter, which must be chosen before triton is loaded.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from moefuse.testing.cases import runnable


def _mend_the_interpreter() -> None:
    """Triton 3.9's spreads a comparison of scalars as int32, and then refuses that as a mask; a GPU does neither."""
    try:
        from triton.runtime.interpreter import InterpreterBuilder
    except ImportError:
        return
    spread = InterpreterBuilder.create_splat

    def create_splat(self, ret_ty, arg):
        made = spread(self, ret_ty, arg)
        if arg.data.dtype == bool:
            made.data = made.data.astype(bool)
        return made

    InterpreterBuilder.create_splat = create_splat


if os.environ.get("TRITON_INTERPRET") == "1":
    _mend_the_interpreter()


@pytest.fixture(params=runnable(), ids=lambda pair: pair[0])
def target(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend and the device it runs on."""
    return request.param


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[nn.Module], nn.Module], Callable[[nn.Module], nn.Module]]:
    """Ways to move a module as ``to`` does: to shared memory, which stands for a device that reads planes; and back."""
    from moefuse.quant.arrange import wanted

    def read_there(blocks: torch.Tensor, now: str) -> str:
        return "planes" if blocks.is_shared() else wanted(blocks, now)

    monkeypatch.setattr("moefuse.nn.quantized.wanted", read_there)
    return (
        lambda module: module._apply(lambda t: t if t.is_shared() else t.clone().share_memory_()),
        lambda module: module._apply(lambda t: t.clone() if t.is_shared() else t),
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fresh-seeds", action="store_true", help="new random numbers instead of each test's own")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.register_profile("fixed", derandomize=True)
    hypothesis.settings.load_profile("default" if config.getoption("--fresh-seeds") else "fixed")


def _seed(config: pytest.Config, name: str) -> int:
    """Seed every generator, for a test or a fixture that several share."""
    drawn = int.from_bytes(os.urandom(4)) if config.getoption("--fresh-seeds") else zlib.crc32(name.encode())
    seed = drawn % 2**31
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    return seed


def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> None:
    if fixturedef.scope != "function":
        _seed(request.config, f"{fixturedef.baseid}::{fixturedef.argname}")


@pytest.fixture(autouse=True)
def drawn_seed(request: pytest.FixtureRequest) -> int:
    """Of this test; in its output when it fails."""
    seed = _seed(request.config, request.node.nodeid)
    print(f"seed {seed}")
    return seed


@pytest.fixture
def rng(drawn_seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(drawn_seed)
