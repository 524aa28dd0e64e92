"""What of the Metal Shading Language the shaders may use, and the lint that holds them to it.

The list is the part of the specification, from version 3.0 up, that the headers in ``cpp/`` implement; a test compares
the two. torch compiles for 3.1 at least, which brought bfloat; whatever is younger than 3.0 says so in ``SINCE``.
Nothing else is missing by accident: no textures, no 64-bit atomics, no double, and no ``erf``, which Metal lacks.
"""

from __future__ import annotations

import re

from moefuse.testing.msl.shader import ATTRIBUTES, PLAIN_TYPES, SPACES, VECTORS, Shader

#: version of the language that first has a name, times ten; 3.0 for all others
SINCE = dict.fromkeys(("bfloat", *(name for name in VECTORS if "bfloat" in name), "simdgroup_bfloat8x8"), 31)

TYPES = {
    *PLAIN_TYPES,
    *("vec", "atomic", "mem_flags", "memory_order", "simd_vote", "simdgroup_matrix"),
    *("simdgroup_float8x8", "simdgroup_half8x8", "simdgroup_bfloat8x8"),
    *("enable_if_t", "conditional_t"),
}
#: in the namespaces metal, metal::precise and metal::fast
FLOAT_FUNCTIONS = {
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "cos", "cosh", "divide", "exp", "exp10"),
    *("exp2", "fabs", "floor", "fmax", "fmin", "fmod", "fract", "log", "log10", "log2", "pow", "powr", "rint"),
    *("round", "rsqrt", "saturate", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
}
FUNCTIONS = {
    *FLOAT_FUNCTIONS,
    *("abs", "all", "any", "clamp", "clz", "copysign", "ctz", "dot", "extract_bits", "fdim", "fma", "isfinite"),
    *("isinf", "isnan", "ldexp", "length", "max", "min", "mix", "mulhi", "popcount", "reverse_bits", "rotate"),
    *("select", "sign", "signbit", "step", "unpack_unorm4x8_to_float"),
    *("threadgroup_barrier", "simdgroup_barrier"),
    *(f"atomic_{name}_explicit" for name in ("load", "store", "exchange", "compare_exchange_weak")),
    *(f"atomic_fetch_{name}_explicit" for name in ("add", "sub", "min", "max", "and", "or", "xor")),
    *(f"simd_{name}" for name in ("sum", "product", "max", "min", "and", "or", "xor", "any", "all", "ballot")),
    *(f"simd_prefix_{kind}_{name}" for kind in ("exclusive", "inclusive") for name in ("sum", "product")),
    *(f"simd_{name}" for name in ("broadcast", "broadcast_first", "is_first", "shuffle", "shuffle_xor")),
    *(f"simd_shuffle_{turn}{way}" for turn in ("", "rotate_") for way in ("down", "up")),
    *(f"quad_{name}" for name in ("sum", "max", "min", "broadcast", "shuffle_xor")),
    *("make_filled_simdgroup_matrix", "simdgroup_load", "simdgroup_store"),
    *("simdgroup_multiply", "simdgroup_multiply_accumulate"),
}
#: more of Metal's, which shaders have not needed; with ``using namespace metal`` a function of theirs would clash
RESERVED = {
    *("absdiff", "addsat", "cospi", "cross", "distance", "distance_squared", "faceforward", "fmax3", "fmedian3"),
    *("fmin3", "frexp", "hadd", "ilogb", "insert_bits", "isnormal", "isordered", "isunordered", "length_squared"),
    *("mad24", "madhi", "madsat", "max3", "median3", "min3", "modf", "mul24", "nextafter", "norm", "normalize"),
    *("reflect", "refract", "rhadd", "rotate", "sincos", "sinpi", "smoothstep", "subsat", "tanpi", "transpose"),
}
#: at global scope
BUILTINS = {"as_type", "static_cast", "reinterpret_cast", "sizeof", "alignof", "decltype", "static_assert"}
#: of parameters, in ``ATTRIBUTES`` and here; of kernels; of instantiations
OTHER_ATTRIBUTES = {"buffer", "kernel", "host_name", "max_total_threads_per_threadgroup"}
METHODS = {"thread_elements", "any", "all"}
_STATEMENTS = {"if", "for", "while", "switch", "return", "case", "do", "else", "operator", "template"}
#: C++ that Metal does not have, or has only in late versions
FORBIDDEN = {
    "double": "Metal has no double",
    "constexpr": "if constexpr is C++17, Metal 3 is C++14",
    "goto": "Metal has no goto",
    "new": "Metal has no heap",
    "delete": "Metal has no heap",
    "virtual": "Metal has no virtual functions",
    "dynamic_cast": "Metal has no type information at run time",
    "typeid": "Metal has no type information at run time",
    "try": "Metal has no exceptions",
    "throw": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "asm": "Metal has no assembler",
    "register": "Metal has no register variables",
    "thread_local": "Metal has no such storage",
    "atomic_ulong": "64-bit atomics are not on every GPU",
    "msl": "the simulator's own names are not Metal's",
    "erf": "Metal has no erf",
    "erfc": "Metal has no erfc",
    "expm1": "Metal has no expm1",
    "log1p": "Metal has no log1p",
}
MAX_BUFFER = 30


def lint(shader: Shader, version: int = 31, elsewhere: frozenset[str] = frozenset()) -> list[str]:
    """What in a shader's text Metal would refuse, by line.

    Comments must be gone and macros may be. ``elsewhere``: functions and macros that other files define.
    """
    problems: list[str] = []

    def say(line: int, what: str) -> None:
        problems.append(f"line {line}: {what}")

    own = {function.name for function in shader.functions} | shader.types
    for i in range(len(shader.solid)):
        token = shader.at(i)
        before, after = shader.text(i - 1), shader.text(i + 1)
        if token.kind == "number" and re.fullmatch(r"[\d.]+([eE][-+]?\d+)?[lL]", token.text) and "." in token.text:
            say(token.line, f"{token.text}: Metal has no long double")
        if token.text == "[" and before in ("=", "(", ",", "return") and after in ("]", "=", "&"):
            say(token.line, "lambdas are Metal 3.2")
        if token.kind != "name":
            continue
        if token.text in FORBIDDEN and not (token.text == "constexpr" and before != "if"):
            say(token.line, f"'{token.text}': {FORBIDDEN[token.text]}")
        if SINCE.get(token.text, 30) > version:
            say(token.line, f"'{token.text}' is Metal {SINCE[token.text] / 10}")
        called = after == "(" or (after == "<" and shader.text(shader.angle_end(i + 1) + 1) == "(")
        if not called or before in ("->", "."):
            if called and token.text not in METHODS:
                say(token.line, f"'.{token.text}()' is no method that shaders may use")
            continue
        declared = (shader.at(i - 1).kind == "name" and before not in _STATEMENTS) or before in ("*", "&")
        known = own | elsewhere | TYPES | FUNCTIONS | BUILTINS | _STATEMENTS | set(SPACES)
        if token.text not in known and not declared:
            say(token.line, f"'{token.text}' is not among the functions and types of Metal that shaders may use")
        if before == "::" and shader.text(i - 2) in ("precise", "fast") and token.text not in FLOAT_FUNCTIONS:
            say(token.line, f"'{shader.text(i - 2)}::{token.text}' is not Metal's")
    for function in shader.functions:
        if function.name in FUNCTIONS | RESERVED:
            say(function.line, f"'{function.name}' is the name of one of Metal's own functions")
        positions = [p for p in function.parameters if p.attribute and ATTRIBUTES.get(p.attribute[0]) == 3]
        if function.is_kernel and len({p.type[-1] if p.type[-1] in "23" else "1" for p in positions}) > 1:
            types = ", ".join(f"{p.type} {p.name}" for p in positions)
            say(function.line, f"positions and sizes of one kernel have one number of components, got {types}")
    for found in shader.attributes.values():
        for name, argument in found:
            if name not in ATTRIBUTES and name not in OTHER_ATTRIBUTES:
                problems.append(f"[[{name}]] is no attribute that shaders may use")
            if name == "buffer" and argument is not None and argument.isdigit() and int(argument) > MAX_BUFFER:
                problems.append(f"[[buffer({argument})]]: the last index is {MAX_BUFFER}")
    problems += [f"{name} calls itself, which Metal does not allow" for name in _recursive(shader)]
    return problems


def _recursive(shader: Shader) -> list[str]:
    own = {function.name for function in shader.functions}
    calls: dict[str, set[str]] = {name: set() for name in own}
    for function in shader.functions:
        inside = range(*function.body)
        calls[function.name] |= {shader.text(i) for i in inside if shader.text(i) in own and shader.text(i + 1) in "(<"}
    reach = {name: set(found) for name, found in calls.items()}
    for _ in own:
        for found in reach.values():
            found |= {far for near in list(found) for far in calls[near]}
    return sorted(name for name, found in reach.items() if name in found)
