"""Register ops with torch, once, so that autograd, torch.compile and fake tensors know them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from moefuse.ops import select

_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None), int, float, bool, str))
_LIBRARY = torch.library.Library("moefuse", "DEF")  # type: ignore[no-untyped-call]


#: what rests on torch's internals -> None where they were seen to hold, or why it is off
FAST_PATHS: dict[str, str | None] = {}


def prove(path: str, holds: Callable[[], bool]) -> bool:
    """Try once whether torch's internals are what a fast path takes them for; say so where they are not."""
    try:
        reason = None if holds() else "torch's internals behave otherwise"
    except Exception as error:  # whatever this torch objects to, the long way serves
        reason = f"torch's internals are others ({type(error).__name__}: {error})"
    FAST_PATHS[path] = reason
    if reason is not None:
        logging.getLogger("moefuse").warning("moefuse: %s is off: %s", path, reason)
    return reason is None


def _watchers_show() -> bool:
    """Whether each of a mode, a transform and forward-mode gradients shows in what `unwatched` looks at."""
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(_watched())
        return x

    if _watched():
        return True  # imported under a mode or a transform: that shows
    x = torch.ones(1)
    with TorchDispatchMode():  # type: ignore[no-untyped-call]
        look(x)
    torch.func.vmap(look)(x)
    with forward_ad.dual_level():
        look(x)
    return seen == [True] * 3 and not _watched()


def _watched() -> bool:
    if torch._C._len_torch_dispatch_stack() != 0:
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


_DIRECT = prove("calls past the dispatcher", _watchers_show)


def unwatched() -> bool:
    """Whether no tracing and no transform is under way."""
    if not _DIRECT:
        return False
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() != 0:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None and forward_ad._current_level < 0


def untraced(args: tuple[Any, ...]) -> bool:
    """Whether no tracing and no transform watches a call with these arguments."""
    return unwatched() and _PLAIN_TYPES.issuperset(map(type, args))


def _is_plain_eager(args: tuple[Any, ...]) -> bool:
    """Whether nothing watches this call: no tracing, no transform, no gradient.

    The dispatcher costs 13 to 30 us a call in Python, as much as a decode step's kernels; such a call skips it.
    """
    if not untraced(args):
        return False
    return not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)


def refuse_second_order(op: str) -> Callable[..., Any]:
    """The backward of a backward piece: an error that says so, where torch would go on with missing gradients."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{op}: second derivatives are not supported, got a backward pass through its gradient")

    return backward


def define(
    schema: str,
    kernel: Callable[..., Any],
    *,
    reference: Callable[..., Any] | None,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define ``moefuse::<schema>`` and return the function that calls it.

    ``kernel`` takes the schema's arguments in order (none has a default, the last is ``backend``) and runs the backend
    it selects. A form that
    runs another op's kernels, such as the one that writes into ``out``, has no reference of its own.
    """
    name = schema.split("(", 1)[0]
    qualified = f"moefuse::{name}"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)
    if reference is not None:
        select.REFERENCES[name] = reference
    overload = getattr(torch.ops.moefuse, name).default

    def call(*args: Any) -> Any:
        if args[-1] is not None and not isinstance(args[-1], str):
            raise TypeError(f"{name.removesuffix('_out')}: backend must be a name, got {type(args[-1]).__name__}")
        return kernel(*args) if _is_plain_eager(args) else overload(*args)

    return call
