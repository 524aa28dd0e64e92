"""What tests of kernels ask of a GPU: whether it is Hopper's, and that they compile where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="its instructions are Hopper's, and no interpreter has them")


def compile_apart(code: str, cache: Path) -> None:
    """Run code that compiles kernels and prints "all" at its end; the folder is Triton's cache.

    In a process of its own, because the interpreter is chosen when Triton is loaded.
    """
    own = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=own)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.endswith("all\n")
