"""What the backends that replay calls share: a run is recorded only where it does no more than they can repeat."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten: Any = torch.ops.aten
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)


class Unrecordable(Exception):
    """A run does more than call kernels on its arguments and on buffers."""


class NothingElse(TorchDispatchMode):
    """Refuses whatever a replay would leave out: a copy, a fill, another library's op.

    Args:
        views: whether parts of a tensor may be taken.
    """

    def __init__(self, views: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views = views
        #: what the run has allocated; a tensor that somebody keeps would reach the run as a view
        self.storages: list[torch.UntypedStorage] = []

    def allocated(self, t: Tensor) -> bool:
        """Whether ``t`` is all of a buffer that the run has allocated."""
        storage = t.untyped_storage()
        whole = t.is_contiguous() and t.nbytes == storage.nbytes()
        return whole and any(storage._cdata == made._cdata for made in self.storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        allocates = func in _ALLOCATIONS
        if not allocates and not (self.views and func.is_view) and func is not torch.ops.prim.device.default:
            raise Unrecordable(str(func))
        result = func(*args, **(kwargs or {}))
        if allocates:
            self.storages.append(result.untyped_storage())
        return result
