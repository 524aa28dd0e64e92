"""The names under which transformers finds us."""

from __future__ import annotations

import importlib.metadata

from moefuse import config

NAME = "moefuse"
_OLDEST = (5, 7)


def register() -> None:
    """Add "moefuse" to transformers' experts implementations; an ImportError says what to install."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        remedy = config.install("transformers")
        raise ImportError(f"moefuse.hf needs transformers, which is not installed: {remedy}") from None
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        # Before 5.7 the valid names were a fixed list: a registered one was refused.
        oldest = ".".join(map(str, _OLDEST))
        found = f"{version} is installed: {config.install('transformers')}"
        raise ImportError(f"moefuse.hf needs transformers {oldest} or newer, and {found}")
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    from moefuse.hf.experts import experts_forward, refuse_fp8

    ExpertsInterface.register(NAME, experts_forward)
    FP8ExpertsInterface.register(NAME, refuse_fp8)
