"""Every detector of the Metal simulator against a fault planted for it, and against its twin without the fault."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from moefuse.testing import msl

PRELUDE = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"
THREADS = """uint i [[thread_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]],
    uint group [[threadgroup_position_in_grid]]"""


def floats(n: int = 64) -> Callable[[], list[Tensor]]:
    return lambda: [torch.zeros(n)]


@dataclass(frozen=True)
class Planted:
    """``body`` of a kernel that takes ``device float* x``; where ``FAULT`` is 1 it is wrong."""

    name: str
    kind: str
    body: str
    #: what the message must say
    says: tuple[str, ...] = ()
    parameters: str = "device float* x"
    before: str = ""
    args: Callable[[], list] = field(default_factory=floats)
    threads: int = 64
    group_size: int = 64

    @property
    def kernel(self) -> str:
        return self.name.replace(" ", "_").replace(",", "").replace("'", "")

    def source(self) -> str:
        """Both twins: one template, instantiated with the fault and without."""
        lines = [
            self.before,
            f"template <int FAULT> [[kernel]] void {self.kernel}({self.parameters}, {THREADS}) {{",
            f"{self.body}\n}}",
        ]
        lines += [
            f'template [[host_name("{self.kernel}_{twin}")]] [[kernel]] decltype({self.kernel}<{fault}>) '
            f"{self.kernel}<{fault}>;"
            for twin, fault in (("good", 0), ("bad", 1))
        ]
        return "\n".join(lines)

    def run(self, twin: str) -> None:
        getattr(library(), f"{self.kernel}_{twin}")(*self.args(), threads=self.threads, group_size=self.group_size)


@functools.cache
def library() -> msl.Library:
    return msl.compile_shader(PRELUDE + "\n".join(row.source() for row in PLANTED))


def view_inside() -> list[Tensor]:
    """Sixteen elements in the middle of a storage that goes on behind them."""
    return [torch.zeros(64)[16:32]]


def overlapping() -> list[Tensor]:
    base = torch.zeros(96)
    return [base[:64], base[32:96]]


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

PLANTED = [
    Planted(
        "read past the end",
        "out of bounds",
        "x[i] = y[i + FAULT];",
        ("reads 4 bytes at y[64]", "thread 63 at"),
        "device float* x, device const float* y",
        args=lambda: [torch.zeros(64), torch.zeros(64)],
    ),
    Planted(
        "write past the end",
        "out of bounds",
        "if (FAULT || i < 60) x[i] = 1;",
        ("writes 4 bytes at x[60]", "threadgroup (1, 0, 0)"),
        args=floats(60),
        group_size=32,
    ),
    Planted(
        "write before the start", "out of bounds", "x[long(i) - FAULT] = 1;", ("at x[-1]", "thread 0 at (0, 0, 0)")
    ),
    Planted(
        "index far outside",
        "out of bounds",
        "if (i == 0) x[FAULT ? 3000000000u : 0u] = 1;",
        ("has 64 elements of 4 bytes",),
    ),
    Planted("past a view", "out of bounds", "if (FAULT || i < 16) x[i] = 1;", ("x[16]",), args=view_inside),
    Planted("vector past the end", "out of bounds", "((device float4*)x)[i + FAULT] = float4(1.0f);", args=floats(256)),
    Planted(
        "half of a buffer of bytes",
        "out of bounds",
        "x[i] = *(device const half*)(bytes + 2 * i + 2 * FAULT);",
        ("bytes[128]",),
        parameters="device half* x, device const uchar* bytes",
        args=lambda: [torch.zeros(64).half(), torch.zeros(128, dtype=torch.uint8)],
    ),
    Planted(
        "past a threadgroup array",
        "out of bounds",
        f"threadgroup float t[64]; t[tid + FAULT] = 1; {BARRIER} x[i] = t[tid];",
        ("t",),
    ),
    Planted(
        "past a threadgroup array through a pointer",
        "out of bounds",
        "threadgroup float t[64]; threadgroup float u[64]; set(t + FAULT, tid); set(u, tid);",
        ("writes 4 bytes at t[64]",),
        before="inline void set(threadgroup float* t, uint at) { t[at] = 1; }",
    ),
    Planted("past a row of a threadgroup array", "out of bounds", "threadgroup float t[64][4]; t[tid][3 + FAULT] = 1;"),
    Planted(
        "past an array of the thread",
        "out of bounds",
        "float t[4] = {1, 2, 3, 4}; x[i] = t[i % 4 + (FAULT && i == 63)];",
        ("indexes", "thread 63"),
    ),
    Planted(
        "past a constant table",
        "out of bounds",
        "x[i] = table[i % 4 + FAULT];",
        before="constant float table[4] = {1, 2, 3, 4};",
    ),
    Planted(
        "past numbers of the call",
        "out of bounds",
        "x[i] = n[i % 2 + FAULT];",
        ("n[2]",),
        parameters="device float* x, constant long* n",
        args=lambda: [torch.zeros(64), [1, 2]],
    ),
    Planted(
        "two threads write one word of the threadgroup's",
        "data race",
        "threadgroup float t[64]; t[FAULT ? tid / 2 : tid] = 1;",
        ("writes t[0]", "thread 0 wrote", "thread 1 at"),
    ),
    Planted(
        "read without a barrier",
        "data race",
        f"threadgroup float t[64]; t[tid] = 0; {BARRIER} t[tid] = 1; if (!FAULT) {BARRIER} x[i] = t[63 - tid];",
        ("no barrier",),
    ),
    Planted(
        "write over what others may still read",
        "data race",
        f"threadgroup float t[64]; t[tid] = 1; {BARRIER} x[i] = t[63 - tid]; if (!FAULT) {BARRIER} t[tid] = 2;",
        ("t[63]", "no barrier"),
    ),
    Planted(
        "write over what everybody reads",
        "data race",
        f"threadgroup float t; if (tid == 0) t = 1; {BARRIER} x[i] = t; if (!FAULT) {BARRIER} if (tid == 3) t = 2;",
        ("and others read",),
    ),
    Planted(
        "a simdgroup's barrier between two simdgroups",
        "data race",
        f"threadgroup float t[64]; t[tid] = 0; {BARRIER} t[tid] = 1; simdgroup_barrier(mem_flags::mem_threadgroup);"
        "x[i] = t[FAULT ? 63 - tid : 32 * sg + 31 - lane];",
    ),
    Planted(
        "a simdgroup without its barrier",
        "data race",
        f"threadgroup float t[64]; t[tid] = 0; {BARRIER} t[tid] = 1;"
        "if (!FAULT) simdgroup_barrier(mem_flags::mem_threadgroup);"
        "x[i] = t[32 * sg + 31 - lane];",
    ),
    Planted(
        "device memory behind a barrier for the threadgroup's",
        "data race",
        "x[i] = 1; threadgroup_barrier(FAULT ? mem_flags::mem_threadgroup : mem_flags::mem_device);"
        "float v = x[63 - i]; threadgroup_barrier(mem_flags::mem_device); x[i] = v;",
        ("x[",),
    ),
    Planted(
        "two threadgroups write one word",
        "data race",
        "x[FAULT ? tid : i] = 1;",
        ("writes x[0]", "threadgroup (0, 0, 0) wrote in the same dispatch", "of threadgroup (1, 0, 0)"),
        group_size=32,
    ),
    Planted(
        "one threadgroup reads what another wrote",
        "data race",
        "x[i] = 1; if (FAULT && group == 1) x[i] = x[0];",
        ("reads x[0]",),
        group_size=32,
    ),
    Planted(
        "one threadgroup writes what another read",
        "data race",
        "if (group == 0) x[i] = x[96 + tid]; else x[FAULT ? 64 + i : i] = 1;",
        ("read in the same dispatch",),
        args=floats(128),
        group_size=32,
    ),
    Planted(
        "a race through two names",
        "data race",
        "x[i] = 1; if (FAULT) y[i] = 2;",
        parameters="device float* x, device float* y",
        args=overlapping,
        group_size=32,
    ),
    Planted(
        "neighbours in one word are no race, twins are",
        "data race",
        "x[FAULT ? i / 2 : i] = half(1);",
        parameters="device half* x",
        args=lambda: [torch.zeros(64).half()],
    ),
    Planted(
        "atomic and plain",
        "data race",
        "atomic_fetch_add_explicit(&n[0], 1, memory_order_relaxed); if (FAULT && i == 5) ((device int*)n)[0] = 7;",
        ("n[0]",),
        parameters="device atomic_int* n",
        args=lambda: [torch.zeros(1, dtype=torch.int32)],
        group_size=32,
    ),
    Planted(
        "an atomic read plainly by another threadgroup",
        "data race",
        "if (FAULT && group == 1) n[1 + i] = n[0];"
        "if (group == 0) atomic_fetch_add_explicit((device atomic_int*)n, 1, memory_order_relaxed);",
        ("reads n[0]",),
        parameters="device int* n",
        args=lambda: [torch.zeros(100, dtype=torch.int32)],
        group_size=32,
    ),
    Planted(
        "a matrix stored and read without a barrier",
        "data race",
        "threadgroup float t[64]; simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);"
        "simdgroup_store(m, t, 8); if (!FAULT) simdgroup_barrier(mem_flags::mem_threadgroup); x[i] = t[lane];",
        threads=32,
        group_size=32,
    ),
    Planted(
        "uninitialised",
        "uninitialised read",
        f"threadgroup float t[64]; if (tid != 7 || !FAULT) t[tid] = 1; {BARRIER} x[i] = t[63 - tid];",
        ("reads t[7]", "thread 56 at"),
    ),
    Planted(
        "uninitialised in the second threadgroup",
        "uninitialised read",
        f"threadgroup float t[32]; if (group == 0 || !FAULT) t[tid] = 1; {BARRIER} x[i] = t[tid];",
        ("of threadgroup (1, 0, 0)",),
        group_size=32,
    ),
    Planted(
        "a matrix of uninitialised memory",
        "uninitialised read",
        f"threadgroup float t[64]; t[lane] = 1; if (!FAULT) t[32 + lane] = 1; {BARRIER}"
        "simdgroup_float8x8 m; simdgroup_load(m, t, 8); simdgroup_store(m, x, 8);",
        threads=32,
        group_size=32,
    ),
    Planted(
        "an atomic that nobody set",
        "uninitialised read",
        f"threadgroup atomic_uint n; if (tid == 0 && !FAULT) atomic_store_explicit(&n, 0, memory_order_relaxed);"
        f"{BARRIER} atomic_fetch_add_explicit(&n, 1, memory_order_relaxed);",
        ("reads n[0]",),
    ),
    Planted(
        "a barrier in a branch",
        "divergence",
        f"if (!FAULT || tid < 40) {{ {BARRIER} }} x[i] = 1;",
        ("waits at threadgroup_barrier", "which has left the kernel"),
    ),
    Planted(
        "a barrier in either branch",
        "divergence",
        f"if (FAULT && tid < 40) {{\n{BARRIER}\n}} else {{\n{BARRIER}\n}} x[i] = 1;",
        ("threadgroup_barrier in line",),
    ),
    Planted(
        "threads that leave before a barrier",
        "divergence",
        f"if (FAULT && tid == 9) return;\n{BARRIER} x[i] = 1;",
        ("thread 9",),
    ),
    Planted(
        "a sum in a branch",
        "divergence",
        "float v = 1;\nif (!FAULT || lane < 8) v = simd_sum(v);\nx[i] = v;",
        ("simd_sum",),
    ),
    Planted(
        "a lane that leaves before a sum",
        "divergence",
        "if (FAULT && i == 33) return;\nx[i] = simd_sum(1.0f);",
        ("thread 33", "left the kernel"),
    ),
    Planted(
        "two collectives at once",
        "divergence",
        "float v = 1;\nif (FAULT && lane < 8) { v = simd_sum(v); } else { v = simd_max(v); }\nx[i] = v;",
        ("simd_max", "simd_sum"),
    ),
    Planted(
        "a collective and a barrier",
        "divergence",
        f"float v = 1;\nif (FAULT && tid < 8) {BARRIER} else v = simd_sum(v);\nx[i] = v;",
        ("simd_sum", "threadgroup_barrier"),
    ),
    Planted(
        "a matrix loaded by half of the lanes",
        "divergence",
        "simdgroup_float8x8 m(0);\nif (!FAULT || lane < 16) simdgroup_load(m, x, 8);",
        threads=32,
        group_size=32,
    ),
    Planted(
        "a product in a branch",
        "divergence",
        "simdgroup_float8x8 m(1);\nif (!FAULT || lane < 16) simdgroup_multiply(m, m, m);",
        ("simdgroup_multiply",),
        threads=32,
        group_size=32,
    ),
    Planted(
        "a shuffle from a lane that is not there",
        "collective",
        "x[i] = simd_shuffle_xor(1.0f, FAULT ? 16 : 4);",
        threads=40,
        group_size=40,
    ),
    Planted(
        "a misaligned vector",
        "misaligned",
        "x[i + 1] = ((device const float4*)(x + 60 + FAULT))[0].x;",
        ("vec", "no multiple of 16"),
        parameters="device float* x",
        args=floats(256),
        threads=1,
        group_size=1,
    ),
    Planted(
        "a pointer of the wrong address space",
        "address space",
        f"threadgroup float t[64]; t[tid] = 1; {BARRIER} x[i] = get(FAULT ? (device float*)t : x, tid);",
        ("gets p, a pointer to threadgroup memory",),
        before="inline float get(device const float* p, uint at) { return p[at]; }",
    ),
    Planted(
        "a local pointer of the wrong address space",
        "address space",
        "float mine[2] = {1, 2}; device const float* p = FAULT ? (device float*)mine : x; if (i == 0) x[i] = p[0];",
        ("gets p, a pointer to thread memory",),
    ),
    Planted("division by zero", "division", "x[i] = float(100 / (int(i) + 1 - FAULT));", ("thread 0",)),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda row: row.name)
def test_planted_fault_is_caught(planted: Planted) -> None:
    with pytest.raises(msl.Fault) as caught:
        planted.run("bad")
    message = str(caught.value)
    assert caught.value.kind == planted.kind, message
    assert message.startswith(f"kernel {planted.kernel}_bad: {planted.kind}: thread ")
    for part in planted.says:
        assert part in message


@pytest.mark.parametrize("planted", PLANTED, ids=lambda row: row.name)
def test_twin_without_the_fault_passes(planted: Planted) -> None:
    planted.run("good")
    for seed in (1, 2):
        with msl.shuffled(seed):
            planted.run("good")


SMALL = """
kernel void vectors(device const half4* h, device float* x, uint i [[thread_position_in_grid]]) { x[i] = h[i].y; }
kernel void numbers(device float* x, constant int& n, constant float& f, uint i [[thread_position_in_grid]]) {
    x[i] = float(n) + f;
}
kernel void counted(device int* order, device atomic_int* next, uint i [[thread_position_in_grid]]) {
    order[i] = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
}
struct Pair { long a; float b; float c; };
kernel void pairs(device float* x, constant Pair& p, uint i [[thread_position_in_grid]]) { x[i] = float(p.a) + p.b; }
"""


@pytest.fixture(scope="module")
def small() -> msl.Library:
    return msl.compile_shader(PRELUDE + SMALL)


def test_a_view_is_aligned_as_its_storage_offset_says(small) -> None:
    halves, x = torch.arange(64).half(), torch.zeros(4)
    small.vectors(halves[8:], x, threads=4)
    assert x.tolist() == [9, 13, 17, 21]
    with pytest.raises(msl.Fault, match=r"misaligned: .* takes .* at byte 0 of h, which is no multiple of 8"):
        small.vectors(halves[2:], x, threads=4)


def arguments(*args, **options) -> tuple:
    return args, options


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (arguments(torch.zeros(4).half(), 1, 2.0, arg_casts={1: "int32"}), "x has elements of float32"),
        (arguments(torch.zeros(4), 1, 2.0), "n takes 4 bytes, got 8 from 1"),
        (arguments(torch.zeros(4), 1, 2, arg_casts="int32"), "f has elements of float32, got a tensor of int32"),
        (arguments(torch.zeros(4), 1), r"takes buffers \[0, 1, 2\], got 2 arguments"),
        (arguments(1.0, 1, 2.0, threads=4), "x is device memory, got the number 1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arguments_are_held_to_the_signature(small, call, says) -> None:
    args, options = call
    with pytest.raises(msl.Fault, match=says) as caught:
        small.numbers(*args, **options)
    assert caught.value.kind == "arguments"


def test_a_struct_takes_exactly_its_bytes(small) -> None:
    x = torch.zeros(4)
    small.pairs(x, torch.tensor([1, 0]), threads=4)
    with pytest.raises(msl.Fault, match="p takes 16 bytes, got 24"):
        small.pairs(x, [1, 2, 3], threads=4)


def test_an_order_of_threads_that_shows_is_shown(small) -> None:
    """Atomics that number the threads: legal, and different in another order."""

    def numbering() -> list[int]:
        order = torch.zeros(256, dtype=torch.int32)
        small.counted(order, torch.zeros(1, dtype=torch.int32), threads=256, group_size=64)
        assert sorted(order.tolist()) == list(range(256))
        return order.tolist()

    in_order = numbering()
    with msl.shuffled(7):
        other = numbering()
    with msl.shuffled(7):
        assert numbering() == other
    assert in_order == list(range(256)) != other


def test_the_simulator_goes_on_after_a_fault(small) -> None:
    x = torch.zeros(4)
    for _ in range(3):
        with pytest.raises(msl.Fault, match=r"reads \d bytes at h"):
            small.vectors(torch.zeros(16).half(), torch.zeros(64), threads=64)
        small.numbers(x, 1, 2.0, arg_casts={1: "int32"})
        assert x.tolist() == [3.0] * 4


def test_the_line_of_a_fault_is_the_shaders(small) -> None:
    with pytest.raises(msl.Fault) as caught:
        small.vectors(torch.zeros(16).half(), torch.zeros(64), threads=64)
    line = (PRELUDE + SMALL).split("\n").index(SMALL.split("\n")[1]) + 1
    assert caught.value.line == line
    assert f"line {line}: kernel void vectors" in str(caught.value)
