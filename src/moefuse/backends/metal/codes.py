"""The names that the shaders know, read off their own text, and the macros that hand them the numbers of those names.

An activation is one function ``glu_<kind>`` in activation.metal, a format one ``decode_<format>`` in weights.metal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from moefuse.backends.codes import Codes
from moefuse.backends.gated import Rows
from moefuse.backends.metal.shaders import text_of
from moefuse.quant.formats import FORMATS
from moefuse.types import ACTIVATION_KINDS, SCORES


def _functions(name: str, start: str) -> list[str]:
    """The functions of a shader that begin so, without that beginning."""
    return re.findall(rf"^inline {start}(\w+)\(", text_of(name), re.MULTILINE)


KINDS = Codes("metal", "activation", _functions("activation", "Glu glu_"), ACTIVATION_KINDS)
SCORE = Codes("metal", "score", ("softmax", "sigmoid", "sqrtsoftplus"), SCORES)
#: 0 is numbers
BLOCKS = Codes("metal", "format", _functions("weights", "float4 decode_"), FORMATS, first=1)


def format_code(rows: Rows) -> int:
    """The number of the blocks' format in the shaders, 0 for numbers."""
    return BLOCKS[rows.format] if rows.format else 0


def _each(name: str, rows: Iterable[str]) -> str:
    """A macro that applies its argument, a macro too, to every row."""
    return f"#define {name}(X) {' '.join(f'X({row})' for row in rows)}\n"


def _macros() -> str:
    formats = [(code, FORMATS[name]) for name, code in BLOCKS.items()]
    kinds = _each("ACTIVATIONS", (f"{code}, {kind}" for kind, code in KINDS.items()))
    blocks = _each("FORMATS", (f"{code}, {row.name}, {row.values}, {row.nbytes}" for code, row in formats))
    return kinds + blocks + "".join(f"#define {score.upper()} {code}\n" for score, code in SCORE.items())


#: stands before every shader
MACROS = _macros()
