"""The C++ module, which reads tensors and the bundles of `moefuse.types` as they are, and what its callers share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from moefuse.backends.codes import Codes
from moefuse.quant import formats as quant
from moefuse.quant.arrange import FILE, PLANES
from moefuse.quant.tensor import QuantTensor
from moefuse.types import ACTIVATION_KINDS, SCORES, Projections, Stacks, Weight

Weights = TypeVar("Weights", Stacks, Projections)

core: Any = None
import_error: str | None = None
try:
    core = importlib.import_module("moefuse.backends.cpu._core")
    if not hasattr(core, "Recording"):
        core, import_error = None, "it was built from older sources; install again"
except ImportError as error:
    import_error = str(error)

# A name that the kernels know and this version does not is an error now; the other way round it is one when it is used.
FORMATS = Codes("cpu", "format", getattr(core, "FORMATS", ()), quant.FORMATS)
Codes("cpu", "activation", getattr(core, "ACTIVATIONS", ()), ACTIVATION_KINDS)
Codes("cpu", "score", getattr(core, "SCORES", ()), SCORES)

threads = torch.get_num_threads
empty = functools.partial(torch.empty, device="cpu")  # whatever the default device is


def like(t: Weight | None, wanted: bool = True) -> Tensor | None:
    """Room for the gradient of ``t``, dense; None where there is none to write, as for blocks."""
    return empty(t.shape, dtype=t.dtype) if isinstance(t, Tensor) and wanted else None


def readable(weight: Weight) -> Weight:
    """A weight as the kernels read it: in numbers, or in blocks that do not lie in planes."""
    return weight.arranged(FILE) if isinstance(weight, QuantTensor) and weight.arrangement == PLANES else weight


def all_readable(weights: Weights) -> Weights:
    """The same for what holds weights."""
    if not any(isinstance(value, QuantTensor) and value.arrangement == PLANES for value in weights):
        return weights
    found: dict[str, Any] = {name: readable(w) for name, w in weights._asdict().items() if isinstance(w, QuantTensor)}
    return weights._replace(**found)


def or_empty(gradients: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Gradients as an op returns them: an empty tensor where there is none."""
    return tuple(empty(0) if t is None else t for t in gradients)
