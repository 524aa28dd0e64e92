"""From Metal to C++: address spaces, kernels, threadgroup memory, literals and swizzles, token by token.

The preprocessor has run already, so macros are gone. What is left of Metal beyond C++ is small. ``device`` and
``thread`` vanish, ``constant`` is ``const``: which memory a pointer points into is known when it is used. An array of
``threadgroup`` memory becomes a reference to storage that the group shares. Kernels are listed at the end, with the
role of every parameter. Every line stays where it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from moefuse.testing.msl.shader import ATTRIBUTES, PLAIN_TYPES, SPACES, CompileError, Function, Shader

_STATEMENT_ENDS = (";", "{", "}")


def translate(shader: Shader) -> str:
    """The C++ of a shader whose macros are expanded."""
    casts = any(_is_cast(shader, i) for i in range(len(shader.solid)) if shader.text(i) == "threadgroup")
    for function in shader.functions:
        _threadgroup_memory(shader, function, casts)
        _check_parameters(shader, function)
        _check_locals(shader, function)
    _forbid_bare_pointers(shader)
    for instance in shader.instances:
        for i in range(instance.span[0], instance.span[1] + 1):
            shader.at(i).out = ""
    for i in range(len(shader.solid)):
        token = shader.at(i)
        if token.out == token.text:
            token.out = _word(shader, i)
    body = "".join(token.out for token in shader.tokens)
    return f'#include "metal_stdlib"\n#line 1 "shader.metal"\n{body}\n#line 1 "listing"\n{_listing(shader)}'


def _word(shader: Shader, i: int) -> str:
    token, before = shader.at(i), shader.text(i - 1)
    if token.kind == "number":
        return _literal(token.text)
    if token.text in ("device", "thread", "threadgroup", "kernel"):
        return ""
    if token.text == "constant":
        return "" if "const" in (before, shader.text(i + 1), shader.text(i + 2)) else "const"
    if before == "." and re.fullmatch("[xyzw]{2,4}|[rgba]{2,4}", token.text):
        parts = ", ".join(str(("xyzw" if letter in "xyzw" else "rgba").index(letter)) for letter in token.text)
        return f"template swizzle<{parts}>()"
    return token.text


def _literal(text: str) -> str:
    """Numbers with a point are floats, not doubles; ``h`` and ``bf`` make the small ones."""
    if text[:2] in ("0x", "0X") and "p" not in text.lower():
        return text
    if not re.search(r"[.eEpP]", text) and not text.lower().endswith(("f", "h")):
        return text
    for suffix, kind in (("bf", "bfloat"), ("h", "half")):
        if text.lower().endswith(suffix):
            return f"{kind}({text[: -len(suffix)]}f)"
    return text if text[-1] in "fF" else text + "f"


def _is_cast(shader: Shader, i: int) -> bool:
    """Whether an address space at ``i`` begins the type of a cast; behind a name, "(" opens parameters."""
    if shader.text(i - 1) == "<":
        return True
    return shader.text(i - 1) == "(" and (shader.at(i - 2).kind != "name" or shader.text(i - 2) == "return")


def _threadgroup_memory(shader: Shader, function: Function, casts: bool) -> None:
    """Arrays and variables of the group, in the body of a kernel, become references to shared storage.

    Where the shader casts pointers to such memory, neighbours of any size may share a word: then races are looked for
    byte by byte.
    """
    site = 0
    start, end = function.body
    for i in range(start, end):
        if shader.text(i) != "threadgroup" or shader.text(i - 1) not in _STATEMENT_ENDS:
            continue
        first = shader.declarator(i + 1)
        if shader.text(first) in ("*", "&"):
            continue
        if not function.is_kernel:
            raise shader.error(i, f"{function.name}: threadgroup memory is declared in kernels only")
        stop = next(k for k in range(first, end) if shader.text(k) == ";")
        element = shader.span(i + 1, first)
        made = ""
        for a, b in shader.pieces(first, stop):
            name, sizes = shader.text(a), shader.span(a + 1, b)
            if "=" in sizes:
                raise shader.error(a, "threadgroup memory has no initial value")
            made += (
                f"typedef {element} {name}_storage {sizes}; struct {name}_site {{"
                f' static const char* name() {{ return "{name}"; }}'
                " static const char* function() { return __PRETTY_FUNCTION__; } };"
                f" {name}_storage& {name} = msl::threadgroup_array<{name}_site, {name}_storage>"
                f"({site}, {int(casts)}, {shader.at(a).line}); "
            )
            site += 1
        for k in range(i, stop + 1):
            shader.at(k).out = ""
        shader.at(i).out = made


def _expectation(space: str, name: str, line: int) -> str:
    return f" msl::expect<'{SPACES[space]}'>(msl::where({name}), \"{name}\", {line});"


def _check_parameters(shader: Shader, function: Function) -> None:
    """Pointers and references name their address space; what is passed must point there."""
    for p in function.parameters:
        if p.indirect and p.space is None:
            spaces = ", ".join(SPACES)
            raise CompileError(f"line {p.line}: {function.name}: {p.name} needs an address space ({spaces})")
        if p.indirect and p.space and not function.is_kernel and not function.is_constexpr:
            shader.at(function.body[0]).out += _expectation(p.space, p.name, function.line)


def _check_locals(shader: Shader, function: Function) -> None:
    """The same for ``device const float* row = ...;`` in a body: the check follows its semicolon."""
    start, end = function.body
    for i in range(start, end):
        if shader.text(i) not in SPACES or function.is_constexpr:
            continue
        begin = i - 1 if shader.text(i - 1) == "const" else i
        star = shader.declarator(i + 1)
        name = star + 2 if shader.text(star + 1) == "const" else star + 1
        if (
            shader.text(begin - 1) in _STATEMENT_ENDS
            and shader.text(star) in ("*", "&")
            and shader.text(name + 1) == "="
        ):
            stop = next(k for k in range(name, end) if shader.text(k) == ";")
            shader.at(stop).out += _expectation(shader.text(i), shader.text(name), shader.at(i).line)


def _forbid_bare_pointers(shader: Shader) -> None:
    """A pointer or reference to a type that is known, with no address space before the type."""
    types = PLAIN_TYPES | shader.types
    for i in range(1, len(shader.solid) - 1):
        if shader.text(i) not in ("*", "&") or shader.text(i - 1) not in types | {"const"}:
            continue
        k = i - 1
        while shader.text(k) in types or shader.text(k) in ("const", "volatile"):
            k -= 1
        declares = shader.at(i + 1).kind == "name" or shader.text(i + 1) in (")", ">")
        if declares and shader.text(k) not in (*SPACES, "::", ">", "struct", "auto"):
            raise shader.error(i, f"'{shader.text(i - 1)}{shader.text(i)}' needs an address space")


def _listing(shader: Shader) -> str:
    """The table of kernels that Python reads, by the names that the host knows."""
    by_name = {function.name: function for function in shader.functions if function.is_kernel}
    kernels = {name: (name, function) for name, function in by_name.items() if not function.is_template}
    for instance in shader.instances:
        if instance.function not in by_name:
            raise shader.error(instance.span[0], f"{instance.function} is no kernel of this source")
        kernels[instance.host_name] = (f"{instance.function}{instance.arguments}", by_name[instance.function])
    lines, rows = [], []
    for number, (name, (instance_name, function)) in enumerate(kernels.items()):
        count = len(function.parameters)
        lines += [
            f"static const msl::Role msl_roles_{number}[] = {{{', '.join(_roles(function))}}};",
            f"static msl::Parameter msl_parameters_{number}[{count}];",
            f"static void msl_entry_{number}() {{ msl::call(&{instance_name}, msl_roles_{number}); }}",
            f"static int msl_described_{number} = "
            f"(msl::describe(&{instance_name}, msl_roles_{number}, msl_parameters_{number}), 0);",
        ]
        rows.append(f'{{"{name}", msl_entry_{number}, {count}, {function.max_threads}, msl_parameters_{number}}}')
    return "\n".join(
        [
            *lines,
            f'extern "C" {{ MSL_VISIBLE msl::Kernel msl_kernels[] = {{{", ".join([*rows, "{}"])}}};',
            "MSL_VISIBLE msl::Declaration* msl_declarations() { return msl::declarations; } }\n",
        ]
    )


def _roles(function: Function) -> Iterator[str]:
    """The C++ of every parameter's role; buffers without an index get the next free one, as in Metal."""
    explicit = [p.attribute[1] for p in function.parameters if p.attribute and p.attribute[0] == "buffer"]
    free = (index for index in range(64) if str(index) not in explicit)
    for p in function.parameters:
        kind, argument = p.attribute or (None, None)
        if p.indirect and kind in (None, "buffer"):
            index = int(argument) if argument else next(free)
            if index > 30:
                raise CompileError(f"line {p.line}: {function.name}: {p.name} has buffer index {index}, the last is 30")
            if p.space not in ("device", "constant"):
                raise CompileError(
                    f"line {p.line}: {function.name}: {p.name} is {p.space} memory; torch binds device and constant"
                )
            yield f"{{\"{p.name}\", {index}, 0, 0, '{SPACES[p.space]}'}}"
        elif kind in ATTRIBUTES and not p.indirect:
            yield f"{{\"{p.name}\", -1, __builtin_offsetof(msl::Place, {kind}), {ATTRIBUTES[kind]}, 'p'}}"
        else:
            raise CompileError(f"line {p.line}: {function.name}: {p.name} needs an attribute that says what it is")
