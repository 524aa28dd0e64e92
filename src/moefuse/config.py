"""Every environment variable the package reads, and the only module that reads one; and how what is missing is got.

=====================  =======================================================================
MOEFUSE_BACKEND        backend for every op that is not given ``backend=``: cpu, triton, metal,
                       or reference; read once
MOEFUSE_INVARIANT      1: as if the whole program ran inside ``moefuse.invariant()``
MOEFUSE_CPU_ISA        instruction set of the CPU kernels: avx512bf16, avx512vnni, avx512, avxvnni, avx2 or portable
MOEFUSE_IK_LLAMA       libggml.so of ik_llama.cpp, for ``moefuse bench --against ik-llama``
CXX                    compiler of the Metal simulator; default g++
MOEFUSE_CACHE          folder for what can be made again: tiles found by ``moefuse tune``, rates of
                       bus and CPU, and what the Metal simulator compiles
XDG_CACHE_HOME         without MOEFUSE_CACHE, that folder is moefuse below this one; default ~/.cache
TRITON_INTERPRET       Triton's own: 1 runs its kernels in an interpreter on the processor
ONEDNN_MAX_CPU_ISA     not ours: oneDNN's cap, which `cap_onednn` sets where AMX traps
=====================  =======================================================================
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: optional package -> the versions that serve, as the extras in pyproject.toml have them
OPTIONAL = {"triton": ">=3.6,<3.10", "transformers": ">=5.7,<6", "gguf": ">=0.18,<1", "matplotlib": ">=3.8"}


@functools.cache
def backend() -> str | None:
    """The backend forced by the environment, if any; asked once, for every op's sake (2 us a time)."""
    return os.environ.get("MOEFUSE_BACKEND") or None


def invariant() -> bool:
    """Whether the environment asks for the same bits of a row in every batch."""
    given = os.environ.get("MOEFUSE_INVARIANT") or "0"
    if given not in ("0", "1"):
        raise ValueError(f"MOEFUSE_INVARIANT must be 0 or 1, got {given!r}")
    return given == "1"


def cpu_isa(here: Sequence[str]) -> str:
    """The instruction set to use of those that this machine has, the best of them first."""
    forced = os.environ.get("MOEFUSE_CPU_ISA") or here[0]
    if forced not in here:
        raise ValueError(f"MOEFUSE_CPU_ISA must be one that this machine has ({', '.join(here)}), got {forced!r}")
    return forced


def ik_llama() -> Path | None:
    """The library of ik_llama.cpp, which only the user can have built."""
    path = os.environ.get("MOEFUSE_IK_LLAMA")
    return Path(path) if path else None


def cxx() -> str:
    """The compiler that builds what the Metal simulator runs."""
    return os.environ.get("CXX") or "g++"


def cache() -> Path:
    """Where things that can be made again are kept."""
    own = os.environ.get("MOEFUSE_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moefuse"


def triton_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on processor tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def install(package: str) -> str:
    """The command that adds an optional package, whether this one came from an index, a wheel or a checkout."""
    return f"pip install '{package}{OPTIONAL[package]}'"


def version_of(package: str) -> str | None:
    """The version that is installed, None where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _origin() -> str:
    """What pip takes to install this package again: the checkout or file it came from, else its name."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"-e '{checkout}'"
    try:
        noted = importlib.metadata.distribution("moefuse").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        noted = None
    url = urlsplit(json.loads(noted)["url"] if noted else "")
    return f"'{unquote(url.path)}'" if url.scheme == "file" else "moefuse"


def rebuild() -> str:
    """What to do where the C++ kernels were not built, which pip keeps silent about."""
    again = f"pip install --force-reinstall --no-deps --no-cache-dir {_origin()}"
    return f"install a C++20 compiler, such as g++, then {again}"


_AMX_PROBE = "import torch; torch.nn.functional.linear(torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16())"


def cap_onednn() -> str | None:
    """Keep torch's own bf16 products alive where the processor advertises AMX and then traps on it.

    Must run before the first torch matrix product. Returns what was done, or None where nothing was needed.
    """
    if os.environ.get("ONEDNN_MAX_CPU_ISA"):
        return f"ONEDNN_MAX_CPU_ISA={os.environ['ONEDNN_MAX_CPU_ISA']} (from the environment)"
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as cpuinfo:
            advertised = "amx_tile" in cpuinfo.read()
    except OSError:
        return None
    if not advertised:
        return None
    if subprocess.run([sys.executable, "-c", _AMX_PROBE], capture_output=True, check=False).returncode == 0:
        return None
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"
    return "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 (AMX is advertised here but traps)"
