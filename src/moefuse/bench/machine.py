"""What a figure was measured on: processor, memory, caches, versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import moefuse
from moefuse import config

_UNKNOWN_CACHE = 64 << 20


def processor(device: torch.device) -> str:
    """The name of the chip that computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cache_bytes(device: torch.device) -> int:
    """The last-level cache; a guess where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0))
    return max(sizes, default=_UNKNOWN_CACHE)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on this device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps for later counts as taken
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def busy() -> str | None:
    """A warning where others are using the machine: threads that wait for each other then read many times too slow."""
    load, cores = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load <= cores / 2:
        return None
    return f"BUSY MACHINE: load {load:.1f} on {cores} cores before the run; repeat it alone"


def describe(device: torch.device) -> dict[str, Any]:
    """The facts that go with every figure."""
    facts: dict[str, Any] = {
        "device": str(device),
        "processor": processor(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
        "cache_bytes": cache_bytes(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moefuse": moefuse.__version__,
        "commit": _commit(),
    }
    if device.type == "cuda":
        facts["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        facts["cuda"] = torch.version.cuda
    return facts | {package: config.version_of(package) for package in ("triton", "transformers")}


def _commit() -> str | None:
    """The commit of the checkout this package was imported from, marked when it has changes."""
    here = Path(moefuse.__file__)

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=here.parent, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside somebody else's repository: only a tracked file says that this one is ours.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = git("rev-parse", "--short=12", "HEAD")
    return commit if commit is None or not git("status", "--porcelain", "--untracked-files=no") else f"{commit}+changes"
