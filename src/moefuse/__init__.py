"""moefuse: the mixture-of-experts feed-forward block, fused.

Importing this package loads torch and nothing else that is heavy: no compiler, no triton, no transformers.
"""

from moefuse.ops._core.invariance import invariant
from moefuse.ops.attend import attend
from moefuse.ops.combine import combine
from moefuse.ops.experts import experts
from moefuse.ops.gate import gate
from moefuse.ops.glu import glu
from moefuse.ops.grouped_linear import grouped_linear
from moefuse.ops.grouped_outer import grouped_outer
from moefuse.ops.linear import linear
from moefuse.ops.moe import moe
from moefuse.ops.plan import plan
from moefuse.ops.rope import rope
from moefuse.ops.route import route
from moefuse.quant.encode import quantize
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Activation, Plan, Routing

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "Plan",
    "QuantTensor",
    "Routing",
    "attend",
    "combine",
    "experts",
    "gate",
    "glu",
    "grouped_linear",
    "grouped_outer",
    "invariant",
    "linear",
    "moe",
    "plan",
    "quantize",
    "rope",
    "route",
]
