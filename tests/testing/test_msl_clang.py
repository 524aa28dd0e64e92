"""What clang says of the shaders: Metal's compiler is a clang, and clang can tell address spaces apart by type.

The simulator finds a pointer of the wrong address space when it is passed; here nothing has to run.
"""

import re

import pytest
import torch

from moefuse.backends.metal import launch
from moefuse.ops._core import select
from moefuse.testing import cases
from moefuse.testing.msl import language
from moefuse.testing.msl.build import preprocess
from moefuse.testing.msl.shader import SCALARS, Shader

cindex = pytest.importorskip("clang.cindex", reason="libclang is not installed")

#: with results of their own, or pointers among their arguments
WRITTEN_OUT = re.compile(
    "atomic_|simdgroup_|_barrier|make_filled|simd_(any|all|ballot|is_first)|any|all|is|signbit|dot|length"
)
SPACES = {"device": 1, "constant": 2, "threadgroup": 3}


def header() -> str:
    """Enough of Metal for its types to be checked: vectors as clang has them, functions by what they give back."""
    lines = [f"#define {name} __attribute__((address_space({number})))" for name, number in SPACES.items()]
    lines[1] = lines[1].replace("constant ", "constant const ")
    lines += ["#define thread", "#define kernel"]
    lines += [f"typedef unsigned {name} u{name};" for name in ("char", "short", "int", "long")]
    lines += ["typedef _Float16 half; typedef __bf16 bfloat; typedef unsigned long size_t;", "namespace metal {"]
    lines += ["template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));"]
    lines += ["template <class V, class... A> V made(A...);"]
    lines += [
        f"typedef {scalar} {scalar}{n} __attribute__((ext_vector_type({n})));" for scalar in SCALARS for n in (2, 3, 4)
    ]
    plain = sorted(name for name in language.FUNCTIONS if not WRITTEN_OUT.match(name))
    lines += [f"template <class T, class... R> T {name}(T, R...);" for name in plain]
    lines += [f"template <class T> bool {name}(T);" for name in ("isnan", "isinf", "isfinite", "signbit", "any", "all")]
    lines += ["template <class T, int N> T dot(vec<T, N>, vec<T, N>); bool simd_any(bool); bool simd_all(bool);"]
    lines += [
        "enum class mem_flags { mem_none, mem_device, mem_threadgroup }; enum memory_order { memory_order_relaxed };"
    ]
    lines += ["mem_flags operator|(mem_flags, mem_flags);"]
    lines += ["void threadgroup_barrier(mem_flags); void simdgroup_barrier(mem_flags);"]
    lines += ["template <class T, int R, int C> struct simdgroup_matrix {"]
    lines += ["  simdgroup_matrix(); explicit simdgroup_matrix(T); vec<T, 2>& thread_elements(); };"]
    lines += ["template <class T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T);"]
    lines += [f"typedef simdgroup_matrix<{name}, 8, 8> simdgroup_{name}8x8;" for name in ("float", "half", "bfloat")]
    lines += ["template <class D, class A, class B, class C> void simdgroup_multiply_accumulate(D&, A, B, C);"]
    for space in ("device", "threadgroup"):
        lines += [
            f"template <class M, class T> void simdgroup_load(M&, const {space} T*, long = 8, ulong2 = 0, bool = 0);"
        ]
        lines += [f"template <class M, class T> void simdgroup_store(M, {space} T*, long = 8, ulong2 = 0, bool = 0);"]
        for kind in ("int", "uint", "float"):
            # A class has no constructor for these address spaces; an enumeration needs none.
            lines += [f"enum class atomic_{kind} : uint;"] if space == "device" else []
            for name in sorted(name for name in language.FUNCTIONS if name.startswith("atomic_")):
                operand = "" if "load" in name else f"{kind}, "
                lines += [f"{kind} {name}(volatile {space} atomic_{kind}*, {operand}memory_order);"]
    lines += ["}", "template <class To, class From> To as_type(From);"]
    vectors = [f"{scalar}{n}" for scalar in SCALARS for n in (2, 3, 4)]
    lines += [f"#define {name}(...) made<{name}>(__VA_ARGS__)" for name in vectors]
    return "\n".join(lines) + '\n#line 1 "shader.metal"\n'


def complaints(source: str) -> list[str]:
    shader = Shader(preprocess(source))
    for function in shader.functions:
        for i in range(*function.body):
            # clang wants storage that lives on for what is not the thread's.
            if shader.text(i) == "threadgroup" and shader.text(shader.declarator(i + 1)) not in ("*", "&"):
                shader.at(i).out = "static threadgroup" if shader.text(i - 1) in (";", "{", "}") else "threadgroup"
    text = header() + "".join(token.out for token in shader.tokens)
    options = ["-x", "c++", "-std=c++17", "-Wno-everything", "-ferror-limit=0"]
    unit = cindex.Index.create().parse("shader.metal", args=options, unsaved_files=[("shader.metal", text)])
    lines = source.split("\n")
    return [
        f"line {found.location.line}: {found.spelling}: {lines[min(found.location.line, len(lines)) - 1].strip()}"
        for found in unit.diagnostics
        if found.severity >= cindex.Diagnostic.Error
    ]


class Zeros:
    """A library whose kernels write zeros and nothing else: launches happen, and leave the sources behind."""

    def __getattr__(self, name: str):
        return self.kernel

    def kernel(self, *args, **_) -> None:
        for value in args:
            if isinstance(value, torch.Tensor) and value.is_contiguous():
                value.data.zero_()  # unseen by autograd


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """Every source that the case table launches, in every element type."""
    found: list[str] = []

    def collect(source: str) -> Zeros:
        found.append(source)
        return Zeros()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "compile_shader", collect)
        patch.setattr(launch, "EMULATED", True)
        patch.setattr("moefuse.ops.combine.check_inverse", lambda _: None)  # zeros are no permutation
        select.forget()
        for case in cases.CASES:
            for dtype in cases.dtypes_of(case, "metal"):
                cases.run(case, dtype, "metal", "cpu", 0)
    select.forget()
    return list(dict.fromkeys(found))


def test_shipped_shaders_keep_address_spaces_apart(sources) -> None:
    assert len(sources) > 20
    assert {source: found for source in sources if (found := complaints(source))} == {}


PRELUDE = "#include <metal_stdlib>\nusing namespace metal;\n"


@pytest.mark.parametrize(
    "body",
    [
        "threadgroup float t[4]; device float* p = t; x[i] = p[0];",
        "threadgroup float t[4]; x[i] = get(t);",
        "float t[4] = {0}; x[i] = get(t);",
        "threadgroup float* p = (threadgroup float*)0; device float& r = p[0]; x[i] = r;",
        "x[i] = other(x);",
    ],
)
def test_a_wrong_address_space_is_found_without_a_run(body: str) -> None:
    helpers = (
        "inline float get(device const float* p) { return *p; }\ninline float other(constant float* p) { return *p; }\n"
    )
    source = f"{PRELUDE}{helpers}kernel void k(device float* x, uint i [[thread_position_in_grid]]) {{\n{body}\n}}\n"
    assert complaints(source)
    assert not complaints(source.replace(body, "device float* p = x + 1; x[i] = get(p) + get(x);"))
