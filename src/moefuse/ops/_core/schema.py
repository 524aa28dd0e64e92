"""An op's schema, read off the types of its kernel's parameters.

torch's dispatcher takes flat arguments: tensors, numbers, strings. Op pages and backends exchange bundles, the values
of `moefuse.types`. A `Signature` names the flat arguments once, takes bundles apart in that order and puts them
together again. A field added to a bundle is an argument of every op that takes the bundle.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from moefuse.quant.tensor import QuantTensor, unwrap, wrap
from moefuse.types import Activation, Plan, Routing

#: what the dispatcher takes
Flat = Tensor | int | float | bool | str | None

_NAMES = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str"}
#: how a bundle is made of its fields; checked values are remembered, the oldest goes first
_MAKERS: dict[type, Callable[..., Any]] = {
    Routing: functools.lru_cache(256)(Routing),
    Activation: functools.lru_cache(256)(Activation),
    Plan: functools.partial(Plan, trusted=True),
}


class Argument(NamedTuple):
    """One flat argument."""

    name: str
    type: str

    @property
    def is_tensor(self) -> bool:
        return self.type.startswith("Tensor")


class Parameter(NamedTuple):
    """One parameter of a kernel: the flat arguments it becomes, and both ways between the two."""

    arguments: tuple[Argument, ...]
    #: None where the value is the one argument
    flatten: Callable[[Any], Iterable[Flat]] | None
    rebuild: Callable[..., Any]


def _itself(value: Any) -> Any:
    return value


def _flattened(parameters: Iterable[Parameter], values: Iterable[Any]) -> list[Flat]:
    flat: list[Flat] = []
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.flatten is None:
            flat.append(value)
        else:
            flat.extend(parameter.flatten(value))
    return flat


def _parameter(name: str, hint: Any, optional: bool = False) -> Parameter:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    optional = optional or types.NoneType in kinds
    mark = "?" if optional else ""
    if QuantTensor in kinds:
        return Parameter((Argument(name, f"Tensor{mark}"), Argument(f"{name}_format", "str?")), unwrap, wrap)
    (kind,) = (kind for kind in kinds if kind is not types.NoneType)
    if kind in _NAMES:
        return Parameter((Argument(name, _NAMES[kind] + mark),), None, _itself)
    return _bundle(kind, optional)


def _bundle(kind: Any, optional: bool) -> Parameter:
    """A NamedTuple or a dataclass; where it may be None, so may each of its fields."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields
    fields = [_parameter(name, hints[name], optional) for name in names]
    arguments = tuple(argument for field in fields for argument in field.arguments)
    make = _MAKERS.get(kind, kind)
    plain = all(field.flatten is None for field in fields)

    def flatten(value: Any) -> Iterable[Flat]:
        if value is None:
            return (None,) * len(arguments)
        # torch 2.11's compiler follows no attrgetter
        parts = value if isinstance(value, tuple) else [getattr(value, name) for name in names]
        return parts if plain else _flattened(fields, parts)

    def rebuild(*flat: Flat) -> Any:
        if optional and all(part is None for part in flat):
            return None
        return make(*_rebuilt(fields, flat))

    return Parameter(arguments, flatten, rebuild)


def _rebuilt(fields: Sequence[Parameter], flat: Iterable[object]) -> list[Any]:
    rest = iter(flat)
    return [field.rebuild(*(next(rest) for _ in field.arguments)) for field in fields]


class Signature:
    """The parameters of a function, flat and in bundles.

    >>> def scaled(x: Tensor, activation: Activation) -> Tensor: ...
    >>> Signature(scaled).schema("scaled")
    'scaled(Tensor x, str kind, bool gated, float alpha, float limit) -> Tensor'
    """

    def __init__(
        self, function: Callable[..., Any], leaving_out: tuple[str, ...] = (), with_backend: bool = False
    ) -> None:
        hints = {"backend": str | None, **typing.get_type_hints(function)}
        self._result = hints["return"]
        named = ["backend"] if with_backend else []
        named += [name for name in inspect.signature(function).parameters if name not in leaving_out]
        self.names = named
        self._parameters = [_parameter(name, hints[name]) for name in named]
        #: two bundles may have fields of one name: the later one's is told by its parameter
        self.arguments: list[Argument] = []
        for name, parameter in zip(named, self._parameters, strict=True):
            taken = {argument.name for argument in self.arguments}
            for argument in parameter.arguments:
                clear = argument.name if argument.name not in taken else f"{name}_{argument.name}"
                self.arguments.append(argument._replace(name=clear))

    def schema(self, op: str, mutated: tuple[str, ...] = ()) -> str:
        """As torch's dispatcher wants it; ``mutated``: arguments that the op writes to."""
        letters = iter("abcdef")
        arguments = [
            f"{kind.replace('Tensor', f'Tensor({next(letters)}!)') if name in mutated else kind} {name}"
            for name, kind in self.arguments
        ]
        results = typing.get_args(self._result) or (() if self._result is types.NoneType else (self._result,))
        returned = ", ".join(_NAMES[kind] for kind in results)
        return f"{op}({', '.join(arguments)}) -> {returned if len(results) == 1 else f'({returned})'}"

    def flatten(self, values: Iterable[Any]) -> list[Flat]:
        return _flattened(self._parameters, values)

    def rebuild(self, flat: Iterable[object]) -> list[Any]:
        return _rebuilt(self._parameters, flat)


@functools.cache
def signature_of(function: Callable[..., Any]) -> Signature:
    return Signature(function)
