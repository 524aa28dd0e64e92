"""Names as numbers for the shaders, and the enums that give the shaders the same numbers."""

from __future__ import annotations

from collections.abc import Mapping

from moefuse.backends.codes import Codes
from moefuse.quant.formats import FORMATS
from moefuse.types import ACTIVATION_KINDS, SCORES

KINDS = Codes(
    "metal", "activation", ("silu", "gelu_tanh", "gelu", "relu", "relu2", "swiglu_oai", "swiglu_clamp"),
    ACTIVATION_KINDS,
)  # fmt: skip
NO_ACTIVATION = -1
SCORE = Codes("metal", "score", ("softmax", "sigmoid", "sqrtsoftplus"), SCORES)
#: 0 is numbers
BLOCKS = Codes("metal", "format", ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q5_K"), FORMATS, first=1)


def _enum(name: str, codes: Mapping[str, int]) -> str:
    return f"enum {name} {{ {', '.join(f'{entry.upper()} = {code}' for entry, code in codes.items())} }};\n"


#: stands before every shader
ENUMS = (
    _enum("Kind", {"no_activation": NO_ACTIVATION, **KINDS})
    + _enum("Score", SCORE)
    + _enum("Blocks", {"numbers": 0, **BLOCKS})
)
