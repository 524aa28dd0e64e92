"""Register ops with torch, once, so that autograd, torch.compile and fake tensors know them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode

from moefuse.ops import select

_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None), int, float, bool, str))
_LIBRARY = torch.library.Library("moefuse", "DEF")  # type: ignore[no-untyped-call]
_BATCHED_GRADIENTS = torch._C._dispatch_key_parse("VmapMode")  # of torch.autograd.grad(is_grads_batched=True)
_AUTOCAST = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastMPS": "mps"}


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
    """Whether no tracing, no transform and no autocast is under way."""
    if not _DIRECT or torch.compiler.is_compiling():
        return False
    return not torch._C._is_any_autocast_enabled() and not _watched()


def untraced(args: tuple[Any, ...]) -> bool:
    """Whether no tracing and no transform watches a call with these arguments."""
    if not unwatched() or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS):
        return False
    return _PLAIN_TYPES.issuperset(map(type, args))


def _is_plain_eager(args: tuple[Any, ...]) -> bool:
    """Whether nothing watches this call: no tracing, no transform, no gradient.

    The dispatcher costs 13 to 30 us a call in Python, as much as a decode step's kernels; such a call skips it.
    """
    if not untraced(args):
        return False
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    # What a transform that is over has wrapped, such as a function of torch.func.vjp keeps, has no memory of its own.
    return not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def _outside_autocast(overload: Any, device: str) -> Callable[..., Any]:
    """What autocast calls: the op as it is, with no product inside it cast."""

    def call(*args: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return overload(*args)

    return call


def _under_autograd(
    name: str, overload: Any, backward: Callable[..., Any] | None, setup_context: Callable[..., Any] | None
) -> Callable[..., Any]:
    """What autograd calls. Unlike torch.library's own it serves torch.func and refuses forward-mode derivatives, which
    torch would take for zero."""

    def below(keys: Any, args: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keys & torch._C._after_autograd_keyset, *args)

    class Differentiated(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:  # the keys come last, so that gradients count from the first
            outer = torch._C._are_functorch_transforms_active()  # a transform around this one may differentiate, too
            with torch.set_grad_enabled(outer), forward_ad._set_fwd_grad_enabled(outer):
                result = below(args[-1], args[:-1])
            if setup_context is not None:
                setup_context(ctx, args[:-1], result)
            return result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            assert backward is not None
            return *backward(ctx, *grads), None

    def call(keys: Any, *args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        op = name.removesuffix("_out")
        if not unwatched() and any(torch._VF._unpack_dual(t, level=0)[1] is not None for t in tensors):
            raise NotImplementedError(
                f"{op}: forward-mode derivatives (jvp, jacfwd) are not supported, got a tangent; reverse mode is"
            )
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return below(keys, args)
        if backward is None:
            raise RuntimeError(f"{op}: this form has no gradients, got an input that requires one")
        with enable_single_level_autograd_function():
            return Differentiated.apply(*args, keys)  # type: ignore[attr-defined]  # torch adds it in C++

    return call


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
    it selects. A form that runs another op's kernels, such as the one that writes into ``out``, has no reference of
    its own.
    """
    name = schema.split("(", 1)[0]
    qualified = f"moefuse::{name}"
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    overload = getattr(torch.ops.moefuse, name).default
    differentiate = _under_autograd(name, overload, backward, setup_context)
    _LIBRARY.impl(name, differentiate, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    for key, device in _AUTOCAST.items():
        _LIBRARY.impl(name, _outside_autocast(overload, device), key)  # type: ignore[no-untyped-call]
    if reference is not None:
        select.REFERENCES[name] = reference

    def call(*args: Any) -> Any:
        if args[-1] is not None and not isinstance(args[-1], str):
            raise TypeError(f"{name.removesuffix('_out')}: backend must be a name, got {type(args[-1]).__name__}")
        return kernel(*args) if _is_plain_eager(args) else overload(*args)

    return call
