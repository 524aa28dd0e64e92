"""Sizes of memory, as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def bytes_of(text: str | int) -> int:
    """A size as people write it.

    >>> bytes_of("12GiB"), bytes_of("1.5 GB"), bytes_of(2**20)
    (12884901888, 1500000000, 1048576)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if isinstance(text, bool) or not isinstance(text, (str, int)) or not found or found[2].upper() not in _UNITS:
        raise ValueError(f"gpu_memory must be bytes or a size such as 12GiB or 500MB, got {text!r}")
    return int(Fraction(found[1]) * _UNITS[found[2].upper()])


def gib(nbytes: float) -> str:
    """Bytes as messages have them.

    >>> gib(1.5 * 2**30), gib(12)
    ('1.50 GiB', '12 bytes')
    """
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**20 or not nbytes else f"{nbytes:.0f} bytes"
