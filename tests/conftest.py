"""Set up once: what torch and Triton read when they load, and the backends that can run here as a fixture."""

import os

# Machines exist that advertise AMX and trap on it; torch's own bf16 products would kill the test run there.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# A graph compiled and kept by an older version of these ops would call them with arguments they no longer take.
os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
# torch's threads must not spin for cores that another process has.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

# Without a GPU the Triton kernels run in its interpreter, which must be chosen before triton is loaded.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from moefuse.testing.cases import runnable


@pytest.fixture(params=runnable(), ids=lambda pair: pair[0])
def target(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A backend and the device it runs on."""
    return request.param


@pytest.fixture
def rng() -> torch.Generator:
    """Fresh random numbers; the seed is in the test's output when it fails."""
    seed = torch.seed() % 2**31
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
