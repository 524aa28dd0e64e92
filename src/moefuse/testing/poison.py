"""Fill fresh memory with NaN, so that an element nobody wrote is seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

# A property that torch puts on the module at run time.
_FILL = "fill_uninitialized_memory"


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, ``torch.empty`` and its kin return NaN (or the largest integer) in every element."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = getattr(deterministic, _FILL)
    torch.use_deterministic_algorithms(True, warn_only=True)
    setattr(deterministic, _FILL, True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        setattr(deterministic, _FILL, filled)
