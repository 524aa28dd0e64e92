"""The block formats, one row each: those of GGUF, and FP8."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """A block: ``values`` consecutive weights of a row in ``nbytes`` bytes.

    ``ggml`` is GGUF's number for it, -1 where GGUF has none. ``scales`` are the places of its float16 factors, in bytes
    from the start of the block.

    >>> FORMATS["Q4_K"].row_bytes(2048)
    1152
    """

    name: str
    ggml: int
    values: int
    nbytes: int
    scales: tuple[int, ...]

    @property
    def bits(self) -> float:
        """Bits per weight, scales included."""
        return 8 * self.nbytes / self.values

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of ``columns`` weights, which must fill whole blocks."""
        if columns % self.values:
            raise ValueError(f"{self.name}: a row must be a multiple of {self.values} values, got {columns}")
        return columns // self.values * self.nbytes


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("Q4_K", 12, 256, 144, (0, 2)),
        Format("Q6_K", 14, 256, 210, (208,)),
        Format("Q8_0", 8, 32, 34, (0,)),
        Format("Q4_0", 2, 32, 18, (0,)),
        Format("Q5_K", 13, 256, 176, (0, 2)),
        Format("Q5_0", 6, 32, 22, (0,)),
        Format("Q5_1", 7, 32, 24, (0, 2)),
        Format("Q4_1", 3, 32, 20, (0, 2)),
        Format("IQ4_NL", 20, 32, 18, (0,)),
        Format("IQ4_XS", 23, 256, 136, (0,)),
        Format("MXFP4", 39, 32, 17, ()),
        Format("Q2_K", 10, 256, 84, (80, 82)),
        Format("Q3_K", 11, 256, 110, (108,)),
        # A float32 scale, then 128 numbers in e4m3fn. Not a format of GGUF: FP8 checkpoints, see moefuse.quant.fp8.
        Format("FP8", -1, 128, 132, ()),
    )
}


def plain_name(name: str) -> str:
    """A name without what people spell in several ways: case, dashes, dots and underscores."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_BY_PLAIN_NAME = {plain_name(name): form for name, form in FORMATS.items()}


def format_of(name: str) -> Format:
    """The row of a format, however its name is spelled.

    >>> format_of("q4_k").name, format_of("iq4-nl").name
    ('Q4_K', 'IQ4_NL')
    """
    found = FORMATS.get(name) or (_BY_PLAIN_NAME.get(plain_name(name)) if isinstance(name, str) else None)
    if found is None:
        raise ValueError(f"QuantTensor: format must be one of {', '.join(FORMATS)}, got {name!r}")
    return found
