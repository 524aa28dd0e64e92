"""What shaders may say: the list, the lint, the compiler's errors, and every shader that ships."""

import re
from pathlib import Path

import pytest

from moefuse.backends.metal import codes, shaders
from moefuse.testing import msl
from moefuse.testing.msl import language
from moefuse.testing.msl.build import CPP, preprocess
from moefuse.testing.msl.shader import Shader

PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"
SHADERS = sorted(shaders.HOME.glob("*.metal"))


def test_the_headers_have_what_the_list_allows_and_no_more() -> None:
    """One side is the list; the other is read from the headers: functions of the namespace metal, types everywhere."""
    text = "".join((CPP / name).read_text() for name in ("metal_types.h", "metal_math.h", "metal_threads.h"))
    header = Shader(preprocess(text))
    # Operators and what the headers keep to themselves in the namespace msl are not offered.
    inside = [range(*span) for span in namespaces(header, "metal")]
    offered = {f.name for f in header.functions if any(f.body[0] in span for span in inside)}
    assert offered == language.FUNCTIONS
    types = {
        header.text(i + 1) for i in range(len(header.solid)) if header.text(i) in ("using", "struct", "class", "enum")
    }
    assert language.TYPES - {"void", "bool", "char", "short", "int", "long", "float"} <= types


def namespaces(header: Shader, name: str) -> list[tuple[int, int]]:
    found = []
    for i in range(len(header.solid)):
        if header.text(i) == "namespace" and header.text(i + 1) == name and header.text(i + 2) == "{":
            found.append((i + 2, header.match[i + 2]))
    return found


def bare(path: Path) -> str:
    """The text without comments, as many lines as before."""
    text = re.sub(
        r"/\*.*?\*/", lambda found: "\n" * found.group().count("\n"), path.read_text(encoding="ascii"), flags=re.S
    )
    return re.sub(r"//[^\n]*", "", text)


@pytest.mark.parametrize("path", SHADERS, ids=lambda path: path.name)
def test_shipped_shaders_pass_the_lint(path: Path) -> None:
    """As text, every branch of the preprocessor; with the macros of each run, `compile_shader` lints again."""
    texts = [bare(each) for each in SHADERS]
    functions = {function.name for text in texts for function in Shader(text).functions}
    macros = {name for text in (*texts, codes.MACROS) for name in re.findall(r"^\s*#\s*define\s+(\w+)", text, re.M)}
    # A macro may paste the name of a function from its parameters.
    pasted = {name for text in texts for name in re.findall(r"##(\w+)", text)}
    # Element types are macros that the launcher defines: LOGITS_T and the like.
    types = {name for text in texts for name in re.findall(r"\b[A-Z][A-Z_]*_T\b", text)}
    elsewhere = frozenset(functions | macros | pasted | types)
    assert language.lint(Shader(bare(path)), elsewhere=elsewhere) == []


def test_there_are_shaders() -> None:
    assert SHADERS


def kernel(body: str, before: str = "") -> str:
    return f"{PRELUDE}{before}\nkernel void k(device float* x, uint i [[thread_position_in_grid]]) {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (kernel("x[i] = nothing;"), "line 5: 'nothing' was not declared"),
        (kernel("x[i] = 1"), "line 5: expected ';'"),
        (kernel("x[i] = (1;"), "never closed|closes nothing"),
        (kernel("x[i] = erf(1.0f);"), "line 5: 'erf': Metal has no erf"),
        (kernel("x[i] = lgamma(1.0f);"), "line 5: 'lgamma' is not among the functions"),
        (kernel("x[i] = msl::bits_float(1);"), "the simulator's own names"),
        (kernel("double d = 1; x[i] = d;"), "line 5: 'double': Metal has no double"),
        (kernel("x[i] = 1.0L;"), "no long double"),
        (kernel("auto f = [&](float v) { return v; }; x[i] = f(1);"), "lambdas are Metal 3.2"),
        (kernel("if constexpr (true) x[i] = 1;"), "C..17, Metal 3 is C..14"),
        (kernel("float a[2]; auto [b, c] = a; x[i] = b;"), "line 5: structured bindings"),
        (kernel("float a[i]; x[i] = a[0];"), "line 5: ISO C.. forbids variable length array"),
        (kernel("goto end; end: x[i] = 1;"), "no goto"),
        (kernel("float v; x[i] = v + 1;"), "line 5: 'v' is used uninitialized"),
        (kernel("x[i] = f(3);", "inline float f(int n) { return n == 0 ? 0.0f : f(n - 1); }"), "f calls itself"),
        (
            kernel("x[i] = f(3);", "float g(int n); float f(int n) { return g(n); } float g(int n) { return f(n); }"),
            "f calls itself",
        ),
        (kernel("float* p = 0; x[i] = p[0];"), "line 5: 'float.' needs an address space"),
        (kernel("x[i] = ((half*)x)[0];"), "line 5: 'half.' needs an address space"),
        (kernel("x[i] = f(x);", "inline float f(const float* p) { return *p; }"), "line 3: .* needs an address space"),
        (kernel("float v = x[i]; float& r = v; r = 1;"), "line 5: 'float&' needs an address space"),
        (kernel("f(i);", "void f(uint i) { threadgroup float t[4]; t[i] = 1; }"), "declared in kernels only"),
        (kernel("threadgroup float t[4] = {1, 2, 3, 4}; x[i] = t[0];"), "has no initial value"),
        (kernel("threadgroup float a[8192]; threadgroup int b; a[i] = b = 0;"), "32784 bytes of threadgroup memory"),
        (kernel("x[i] = max(1.0f, 2);"), "line 5: no matching function"),
        (kernel("bfloat b = 1.0f; x[i] = b;"), "line 5: conversion from"),
        (kernel("x[i] = float(exp(bfloat(1)));"), "line 5: use of deleted function"),
        (kernel("float4 v(1); half4 h = v; x[i] = h.x;"), "line 5: conversion from"),
        (kernel("float4 v(1); v.xy = float2(2); x[i] = v.x;"), "line 5: "),
        (kernel("x[i] = float(simd_sum(long(i)));"), "takes numbers of 32 bits"),
        (kernel("x[i] = float(simd_shuffle(i > 3, 0));"), "takes numbers of 32 bits"),
        (kernel("const device float* p = x; p[i] = 1;"), "line 5: assignment of read-only"),
        (PRELUDE + "kernel void k(constant float* x, uint i [[thread_position_in_grid]]) { x[i] = 1; }", "read-only"),
        (PRELUDE + "kernel void k(device float* x, uint i) { x[i] = 1; }", "i needs an attribute"),
        (kernel("x[i] = norm(1.0f);", "inline float norm(float v) { return v; }"), "one of Metal's own functions"),
        (
            PRELUDE + "kernel void k(device float* x, uint i [[thread_position_in_grid]],\n"
            "uint3 g [[threadgroup_position_in_grid]]) { x[i] = g.x; }",
            "one number of components, got uint i, uint3 g",
        ),
        (PRELUDE + "kernel void k(device float* x [[buffer(31)]]) { x[0] = 1; }", "the last index is 30"),
        (PRELUDE + "kernel void k(threadgroup float* x [[threadgroup(0)]]) { x[0] = 1; }", "no attribute that shaders"),
        (PRELUDE + "kernel void k(threadgroup float* x) { x[0] = 1; }", "torch binds device and constant"),
        (PRELUDE + "kernel void k(device atomic_ulong* x) { }", "64-bit atomics"),
        (
            PRELUDE + "kernel void k(device atomic<ulong>* x) { atomic_store_explicit(x, 1, memory_order_relaxed); }",
            "32 bits",
        ),
        (PRELUDE + '#include "other.h"\n', "line 3: "),
        (PRELUDE + "// \u00e9\n", "ASCII"),
    ],
    ids=lambda value: "" if "\n" in value else value[:40],
)
def test_what_metal_refuses_is_refused(source: str, says: str) -> None:
    with pytest.raises(msl.CompileError, match=says):
        msl.compile_shader(source)


def test_bfloat_is_metal_3_1() -> None:
    shader = Shader("inline float f(bfloat x) { return float(x); }")
    assert language.lint(shader, version=30) == ["line 1: 'bfloat' is Metal 3.1"]
    assert language.lint(shader, version=31) == []


def test_lines_survive_macros_and_comments() -> None:
    source = PRELUDE + "#define TWO \\\n  2\n/* a\n   comment */\n" + kernel("x[i] = TWO;\n  x[i] = missing;")
    line = source.split("\n").index("  x[i] = missing;") + 1
    with pytest.raises(msl.CompileError, match=f"line {line}: 'missing' was not declared"):
        msl.compile_shader(source)
