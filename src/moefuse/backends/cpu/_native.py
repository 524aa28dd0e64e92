"""The C++ module, and tensors in the form it takes them.

A backend function must hold every tensor it passes until the call returns: the C++ side sees addresses only.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from moefuse.backends.codes import Codes, sums_two
from moefuse.quant import formats as quant
from moefuse.quant.tensor import QuantTensor
from moefuse.types import ACTIVATION_KINDS, SCORES, Activation, Routing

core: Any = None
import_error: str | None = None
try:
    core = importlib.import_module("moefuse.backends.cpu._core")
    if not hasattr(core, "names"):
        core, import_error = None, "it was built from older sources; install again"
except ImportError as error:
    import_error = str(error)

# In the order of the enums in csrc/cpu/kernels.h, which the module tells.
_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ABSENT = (0, 0)
# Where a tensor without elements "is": torch gives it address 0, which to the C++ side means there is no tensor.
_NOWHERE = 64
_NO_WEIGHT = (0, 0, 0, 0, False)
_NAMES = {} if core is None else core.names()
_KINDS = Codes("cpu", "activation", _NAMES.get("activations", ()), ACTIVATION_KINDS)
_SCORES = Codes("cpu", "score", _NAMES.get("scores", ()), SCORES)
# WeightType: the dtypes, then these.
FORMATS = Codes("cpu", "format", _NAMES.get("formats", ()), quant.FORMATS, first=len(_DTYPE))


def rows_dense(weight: Tensor | QuantTensor | None) -> Any:
    """A weight whose last dimension is contiguous: a copy only where it is not so already. Blocks always are."""
    if weight is None or isinstance(weight, QuantTensor) or weight.stride(-1) == 1:
        return weight
    return weight.contiguous()


def tensor_arg(t: Tensor | None) -> tuple[int, int]:
    return _ABSENT if t is None else (address(t), _DTYPE[t.dtype])


def weight_arg(w: Tensor | QuantTensor | None) -> tuple[int, int, int, int, bool]:
    if w is None:
        return _NO_WEIGHT
    if isinstance(w, QuantTensor):
        blocks = w.blocks
        return address(blocks), FORMATS[w.format], blocks.stride(0), blocks.stride(-2), w.exact
    size = w.element_size()
    return address(w), _DTYPE[w.dtype], w.stride(0) * size, w.stride(-2) * size, False


def address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr() or _NOWHERE


def wanted_like(inputs: tuple[Tensor | None, ...]) -> tuple[tuple[Tensor, ...], list[tuple[int, int]]]:
    """A dense result like each input, empty for None, and the results as the C++ side takes them."""
    found = tuple(torch.empty(0) if t is None else torch.empty(t.shape, dtype=t.dtype) for t in inputs)
    return found, [_ABSENT if t is None else tensor_arg(out) for t, out in zip(inputs, found, strict=True)]


@functools.lru_cache(256)
def routing_arg(routing: Routing) -> tuple[Any, ...]:
    return (
        routing.top_k, _SCORES[routing.score], routing.renormalize, routing.scale, routing.groups,
        routing.top_groups, sums_two(routing.group_score), routing.softcap or 0.0, routing.floor,
        routing.renormalize_after_scale,
    )  # fmt: skip


@functools.lru_cache(256)
def activation_arg(activation: Activation) -> tuple[int, float, float]:
    return _KINDS[activation.kind], activation.alpha, activation.limit


threads = torch.get_num_threads
