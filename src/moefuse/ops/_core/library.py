"""Register ops with torch, once, so that autograd, torch.compile and fake tensors know them."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode

from moefuse.ops._core import select
from moefuse.ops._core.invariance import asked
from moefuse.ops._core.memory import DENSE
from moefuse.ops._core.schema import Flat, Signature
from moefuse.quant.tensor import QuantTensor
from moefuse.types import Projections, Stacks

P = ParamSpec("P")
R = TypeVar("R")
Kernel = Callable[Concatenate[str | None, P], R]
Gradients = Mapping[str, Tensor | None]

PLAIN = DENSE | {type(None), int, float, bool, str}
_LIBRARY = torch.library.Library("moefuse", "DEF")  # type: ignore[no-untyped-call]
_BATCHED_GRADIENTS = torch._C._dispatch_key_parse("VmapMode")  # of torch.autograd.grad(is_grads_batched=True)
_AUTOCAST = {"AutocastCPU": "cpu", "AutocastCUDA": "cuda", "AutocastMPS": "mps"}


#: op -> what was defined
OPS: dict[str, Op[..., Any]] = {}
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


def untraced(values: Iterable[Flat]) -> bool:
    """Whether no tracing and no transform watches a call with these arguments."""
    if not unwatched() or torch._C._dispatch_tls_is_dispatch_key_included(_BATCHED_GRADIENTS):
        return False
    return PLAIN.issuperset(map(type, values))


def _is_plain_eager(values: list[Flat]) -> bool:
    """Whether nothing watches this call: no tracing, no transform, no gradient.

    The dispatcher costs 13 to 30 us a call in Python, as much as a decode step's kernels; such a call skips it.
    """
    if not untraced(values):
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return False
    # What a transform that is over has wrapped, such as a function of torch.func.vjp keeps, has no memory of its own.
    return not any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))


def _outside_autocast(overload: Any, device: str) -> Callable[..., Any]:
    """What autocast calls: the op as it is, with no product inside it cast."""

    def call(*flat: Flat) -> Any:
        with torch.autocast(device, enabled=False):
            return overload(*flat)

    # A code object of its own for each op: torch.compile counts its attempts by that, and gives up after eight.
    call.__code__ = call.__code__.replace(co_name=f"{overload}_outside_autocast")
    return call


class Op(Generic[P, R]):
    """An op that torch knows, called with its backend's name and its kernel's values."""

    def __init__(self, name: str, kernel: Kernel[P, R], signature: Signature, mutated: tuple[str, ...]) -> None:
        self.name, self.kernel, self.signature = name, kernel, signature
        _LIBRARY.define(self.signature.schema(name, mutated), tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        self.overload = getattr(torch.ops.moefuse, name).default

    def __call__(self, backend: str | None, *values: P.args, **named: P.kwargs) -> R:
        if backend is not None and not isinstance(backend, str):
            raise TypeError(f"{self.name}: backend must be a name, got {type(backend).__name__}")
        backend = asked(backend)
        flat = self.signature.flatten((backend, *values))
        if _is_plain_eager(flat):
            return self.kernel(backend, *values, **named)
        result: R = self.overload(*flat)
        return result


class Rule:
    """How an op is differentiated.

    Args:
        backward: ``backward(needs, grads, *kept)``: gradients by the name of a flat argument. ``needs`` says of each
            whether it is asked for; ``grads`` has a gradient for each result, or None. The other parameters are what
            is kept of a call: values of the op and results, by their names.
        results: the names of the op's results, where one is kept.
        keep: ``keep(known)``: what is kept in another form, by name.
        constant: the last results of the op, as many, that have no gradient.
        sparse: gradients of results that nobody used are None and not zeros.
    """

    def __init__(
        self,
        backward: Callable[..., Gradients],
        *,
        results: tuple[str, ...] = (),
        keep: Callable[[dict[str, Any]], dict[str, Any]] = lambda _: {},
        constant: int = 0,
        sparse: bool = False,
    ) -> None:
        self.backward, self.results, self.keep = backward, results, keep
        self.constant, self.sparse = constant, sparse
        self.kept = Signature(backward, leaving_out=("needs", "grads"))

    def save(self, ctx: Any, results: Any, values: dict[str, Any]) -> None:
        made = results if isinstance(results, tuple) else (results,)
        known = values | dict(zip(self.results, made, strict=False))
        known |= self.keep(known)
        flat = self.kept.flatten(known[name] for name in self.kept.names)
        tensors = [argument.is_tensor for argument in self.kept.arguments]
        ctx.save_for_backward(*(value for value, is_tensor in zip(flat, tensors, strict=True) if is_tensor))
        ctx.others = [None if is_tensor else value for value, is_tensor in zip(flat, tensors, strict=True)]
        ctx.set_materialize_grads(not self.sparse)
        whole = [t for t in made if not t.is_floating_point()]
        ctx.mark_non_differentiable(*whole, *made[len(made) - self.constant :])

    def restore(self, ctx: Any) -> list[Any]:
        tensors = iter(ctx.saved_tensors)
        pairs = zip(ctx.others, self.kept.arguments, strict=True)
        return self.kept.rebuild([next(tensors) if argument.is_tensor else other for other, argument in pairs])


def _under_autograd(op: Op[P, R], rule: Rule | None) -> Callable[..., Any]:
    """What autograd calls. Unlike torch.library's own it serves torch.func and refuses forward-mode derivatives, which
    torch would take for zero."""
    name = op.name.removesuffix("_out")

    def below(keys: Any, flat: Iterable[object]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.overload.redispatch(keys & torch._C._after_autograd_keyset, *flat)

    class Differentiated(_SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *flat: object) -> Any:  # the keys come last, so that gradients count from the first
            assert rule is not None
            *given, keys = flat
            outer = torch._C._are_functorch_transforms_active()  # a transform around this one may differentiate, too
            with torch.set_grad_enabled(outer), forward_ad._set_fwd_grad_enabled(outer):
                results = below(keys, given)
            rule.save(ctx, results, dict(zip(op.signature.names, op.signature.rebuild(given), strict=True)))
            return results

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            assert rule is not None
            names = [argument.name for argument in op.signature.arguments]
            needs = dict(zip(names, ctx.needs_input_grad, strict=False))
            found = rule.backward(needs, grads, *rule.restore(ctx))
            return *(found.get(name) if needs[name] else None for name in names), None

    def call(keys: Any, *flat: Flat) -> Any:
        tensors = [value for value in flat if isinstance(value, Tensor)]
        # Asked only inside a level of forward mode: a compiler would take the question for a part of the program.
        if forward_ad._current_level >= 0 and any(torch._VF._unpack_dual(t, level=0)[1] is not None for t in tensors):
            raise NotImplementedError(
                f"{name}: forward-mode derivatives (jvp, jacfwd) are not supported, got a tangent; reverse mode is"
            )
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
            return below(keys, flat)
        if rule is None:
            raise RuntimeError(f"{name}: this form has no gradients, got an input that requires one")
        with enable_single_level_autograd_function():
            return Differentiated.apply(*flat, keys)  # type: ignore[attr-defined]  # torch adds it in C++

    return call


def refuse_second_order(op: str) -> Rule:
    """The rule of a backward piece: an error that says so, where torch would go on with missing gradients."""

    def backward(needs: Mapping[str, bool], grads: tuple[Tensor | None, ...]) -> Gradients:
        raise RuntimeError(f"{op}: second derivatives are not supported, got a backward pass through its gradient")

    return Rule(backward)


def define(
    reference: Callable[P, R],
    decides: str,
    *,
    fake: Callable[..., Any],
    rule: Rule | None = None,
    form: str = "",
    mutated: tuple[str, ...] = (),
) -> Op[P, R]:
    """Define the op of a reference, whose types are the schema, after the name of the backend.

    Args:
        reference: what runs where no backend has kernels.
        decides: which of its parameters is the tensor whose device and type choose the backend.
        fake: takes what the reference takes, and returns tensors without memory.
        rule: how it is differentiated.
        form: what follows the op's name in that of another op that runs the same kernels.
        mutated: what it writes to.
    """
    deciding = operator.itemgetter(list(inspect.signature(reference).parameters).index(decides))

    def kernel(backend: str | None, /, *values: P.args, **named: P.kwargs) -> R:
        specs: tuple[str | None, ...] = ()
        for value in values:
            if isinstance(value, (QuantTensor, Stacks, Projections)):
                specs = (value.spec,) if isinstance(value, QuantTensor) else value.specs
        return select.select(reference, deciding(values), backend, specs)(*values, **named)

    return _defined(reference, kernel, Signature(reference, with_backend=True), fake, rule, form, mutated)


def define_kernel(
    reference: Callable[..., Any],
    kernel: Kernel[P, R],
    *,
    fake: Callable[..., Any],
    rule: Rule | None = None,
    form: str = "",
    mutated: tuple[str, ...] = (),
) -> Op[P, R]:
    """Define the op of a reference by a kernel that does more than to run what takes the reference's place: it
    allocates what that writes to, or checks what can be seen only then. The kernel's types are the schema."""
    return _defined(reference, kernel, Signature(kernel), fake, rule, form, mutated)


def _defined(
    reference: Callable[..., Any],
    kernel: Kernel[P, R],
    signature: Signature,
    fake: Callable[..., Any],
    rule: Rule | None,
    form: str = "",
    mutated: tuple[str, ...] = (),
) -> Op[P, R]:
    stem = reference.__name__.removesuffix("_reference")
    select.REFERENCES[stem] = reference
    name = stem + form
    OPS[name] = op = Op(name, kernel, signature, mutated)

    def under_the_dispatcher(*flat: Flat) -> Any:
        return kernel(*signature.rebuild(flat))  # type: ignore[call-arg]  # its own parameters, as mypy cannot see

    def faked(*flat: Flat) -> Any:
        _, *values = signature.rebuild(flat)
        return fake(*values)

    _LIBRARY.impl(name, under_the_dispatcher, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"moefuse::{name}", faked, lib=_LIBRARY)
    _LIBRARY.impl(name, _under_autograd(op, rule), "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    for key, device in _AUTOCAST.items():
        _LIBRARY.impl(name, _outside_autocast(op.overload, device), key)  # type: ignore[no-untyped-call]
    return op
