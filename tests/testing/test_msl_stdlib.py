"""The simulator's own Metal library against torch and plain Python: rounding, math, collectives, matrices, the grid."""

import struct

import pytest
import torch

from moefuse.testing import msl

PRELUDE = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"

ROUNDING = """
kernel void to_half(device const float* x, device half* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void from_half(device const half* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void to_bfloat(device const float* x, device bfloat* y, uint i [[thread_position_in_grid]]) {
    y[i] = bfloat(x[i]);
}
kernel void from_bfloat(device const bfloat* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = x[i]; }

template <typename T>
[[kernel]] void arithmetic(device const T* a, device const T* b, device T* y, uint i [[thread_position_in_grid]]) {
    y[5 * i] = a[i] + b[i];
    y[5 * i + 1] = a[i] - b[i];
    y[5 * i + 2] = a[i] * b[i];
    y[5 * i + 3] = a[i] / b[i];
    T sum = a[i];
    sum += b[i];
    sum *= T(2);
    y[5 * i + 4] = -sum;
}
template [[host_name("arithmetic_half")]] [[kernel]] decltype(arithmetic<half>) arithmetic<half>;
template [[host_name("arithmetic_bfloat")]] [[kernel]] decltype(arithmetic<bfloat>) arithmetic<bfloat>;
"""


@pytest.fixture(scope="module")
def rounding() -> msl.Library:
    return msl.compile_shader(PRELUDE + ROUNDING)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0))
    numbers = ~want.isnan()
    assert torch.equal(got.signbit()[numbers], want.signbit()[numbers])


def bit_patterns(rng: torch.Generator) -> torch.Tensor:
    """Floats of every exponent, and those at and beside the middle between two small floats."""
    wild = torch.randint(-(2**31), 2**31, (20000,), generator=rng).to(torch.int32)
    coarse = torch.randint(-(2**15), 2**15, (20000,), generator=rng).to(torch.int32) << 16
    beside = torch.randint(-1, 2, (20000,), generator=rng).to(torch.int32)
    return torch.cat([wild, coarse + 0x8000 + beside, (coarse & ~0x1FFF) + 0x1000 + beside, coarse]).view(torch.float32)


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_small_floats_round_to_nearest_even(rounding, name, rng) -> None:
    dtype = {"half": torch.float16, "bfloat": torch.bfloat16}[name]
    x = bit_patterns(rng)
    y = torch.empty(x.shape, dtype=dtype)
    getattr(rounding, f"to_{name}")(x, y)
    same(y, x.to(dtype))
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    wide = torch.empty(every.shape)
    getattr(rounding, f"from_{name}")(every, wide, threads=len(every))
    same(wide, every.float())


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_small_floats_round_after_every_operation(rounding, name, rng) -> None:
    dtype = {"half": torch.float16, "bfloat": torch.bfloat16}[name]
    a, b = (torch.randn(4000, generator=rng).to(dtype) for _ in range(2))
    y = torch.empty(4000, 5, dtype=dtype)
    getattr(rounding, f"arithmetic_{name}")(a, b, y, threads=4000)
    for column, want in enumerate((a + b, a - b, a * b, a / b, -((a + b) * 2))):
        assert torch.equal(y[:, column], want)


MATH = """
kernel void unary(device const float* x, device float* y, constant long& n, uint i [[thread_position_in_grid]]) {
    float v = x[i];
    uint at = 0;
#define PUT(EXPRESSION) y[long(at++) * n + long(i)] = EXPRESSION;
    PUT(exp(v)) PUT(log(fabs(v))) PUT(sqrt(fabs(v))) PUT(rsqrt(fabs(v))) PUT(tanh(v)) PUT(floor(v)) PUT(round(v))
    PUT(precise::exp(v)) PUT(fast::cos(v)) PUT(exp2(v)) PUT(max(v, 0.5f)) PUT(clamp(v, -1.0f, 1.0f)) PUT(sign(v))
    PUT(pow(fabs(v), 1.5f)) PUT(fma(v, v, 1.0)) PUT(float(as_type<uint>(v) >> 31)) PUT(float(half(v) * half(2.0h)))
    PUT(select(1.0f, 2.0f, v > 0.0f)) PUT(trunc(v)) PUT(rint(v)) PUT(1e-3 + v) PUT(step(0.0f, v)) PUT(abs(v))
    PUT(mix(v, 2.0f, 0.25f)) PUT(copysign(1.0f, v)) PUT(fmod(v, 0.75f)) PUT(M_PI_F * v) PUT(fract(v))
}
kernel void integers(device const uint* x, device uint* y, uint i [[thread_position_in_grid]]) {
    uint v = x[i];
    uint r[8] = {popcount(v), clz(v), ctz(v), reverse_bits(v), rotate(v, 5u), mulhi(v, 12345u), extract_bits(v, 3, 7),
                 uint(abs(int(v) >> 1))};
    for (uint k = 0; k < 8; ++k) y[8 * i + k] = r[k];
}
kernel void vectors(device const float4* x, device float* y, device packed_float3* p,
                    uint i [[thread_position_in_grid]]) {
    float4 v = x[i];
    float4 w = float4(v.xy, v.zw) + 2.0f * v.wzyx - 1.0;
    w.y += v[2];
    v.x = dot(v, w);
    half4 h = half4(v);
    float3 three = float3(v.yz, 4);
    p[i] = packed_float3(three);
    bool4 larger = v > w;
    y[8 * i] = w.x; y[8 * i + 1] = w.y; y[8 * i + 2] = w.z; y[8 * i + 3] = w.w;
    y[8 * i + 4] = v.x; y[8 * i + 5] = float(h.z);
    y[8 * i + 6] = float(any(larger)); y[8 * i + 7] = float(sizeof(three));
}
kernel void not_numbers(device const float* x, device float* y, uint i [[thread_position_in_grid]]) {
    y[4 * i] = max(x[i], 1.0f); y[4 * i + 1] = min(1.0f, x[i]);
    y[4 * i + 2] = float(isnan(x[i])); y[4 * i + 3] = float(isinf(x[i]));
}
"""


@pytest.fixture(scope="module")
def math() -> msl.Library:
    return msl.compile_shader(PRELUDE + MATH)


def test_math(math, rng) -> None:
    x = torch.randn(500, generator=rng) * 3
    y = torch.full((28, 500), float("nan"))
    math.unary(x, y, 500, threads=500)
    d = x.double()
    want = [
        *(
            d.exp(),
            d.abs().log(),
            d.abs().sqrt(),
            d.abs().rsqrt(),
            d.tanh(),
            d.floor(),
            (d.abs() + 0.5).floor() * d.sign(),
        ),
        *(d.exp(), d.cos(), d.exp2(), d.clamp(min=0.5), d.clamp(-1, 1), d.sign()),
        *(d.abs().pow(1.5), d * d + 1, x.signbit().double(), (x.half() * 2).double()),
        *(1.0 + (d > 0), d.trunc(), d.round(), d + 1e-3, (d >= 0).double(), d.abs()),
        *(d * 0.75 + 0.5, torch.ones(500).double().copysign(d), d.fmod(0.75), d * torch.pi, d - d.floor()),
    ]
    for row, expected in enumerate(want):
        # Relative to the largest: sums with a constant cancel.
        gap = (y[row].double() - expected).abs().max() / expected.abs().max()
        assert gap < 3e-7, row


def test_integers(math, rng) -> None:
    x = torch.randint(-(2**31), 2**31, (200,), generator=rng).to(torch.int32)
    x[:3] = torch.tensor([0, 1, -1], dtype=torch.int32)
    y = torch.zeros(200, 8, dtype=torch.int32)
    math.integers(x, y, threads=200)
    for v, row in zip(x.tolist(), y.tolist(), strict=True):
        u = v % 2**32
        bits = f"{u:032b}"
        assert [n % 2**32 for n in row] == [
            bits.count("1"),
            32 - u.bit_length(),
            32 if u == 0 else (u & -u).bit_length() - 1,
            int(bits[::-1], 2),
            (u << 5 | u >> 27) % 2**32,
            u * 12345 >> 32,
            u >> 3 & 127,
            abs(v >> 1),
        ]


def test_vectors(math, rng) -> None:
    x = torch.randn(50, 4, generator=rng)
    y, p = torch.zeros(50, 8), torch.zeros(50, 3)
    math.vectors(x, y, p, threads=50)
    w = x + 2 * x.flip(1) - 1
    w[:, 1] += x[:, 2]
    dots = (x * w).sum(1)
    torch.testing.assert_close(y[:, :4], w)
    torch.testing.assert_close(y[:, 4], dots)
    assert torch.equal(y[:, 5], x[:, 2].half().float())
    first = torch.cat([y[:, 4:5], x[:, 1:]], 1)
    assert torch.equal(y[:, 6], (first > y[:, :4]).any(1).float())
    assert torch.equal(y[:, 7], torch.full((50,), 16.0))
    assert torch.equal(p, torch.cat([x[:, 1:3], torch.full((50, 1), 4.0)], 1))


def test_of_a_nan_and_a_number_the_number_is_taken(math) -> None:
    y = torch.zeros(3, 4)
    math.not_numbers(torch.tensor([float("nan"), float("inf"), 2.0]), y, threads=3)
    assert y.tolist() == [[1, 1, 1, 0], [float("inf"), 1, 0, 1], [2, 1, 0, 0]]


TOGETHER = """
kernel void collectives(device const float* x, device float* y, uint i [[thread_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
    float v = x[i];
    device float* to = y + 16 * i;
    to[0] = simd_sum(v);
    to[1] = simd_max(v);
    to[2] = simd_min(v);
    to[3] = float(simd_prefix_exclusive_sum(uint(i)));
    to[4] = simd_prefix_inclusive_sum(v);
    to[5] = simd_shuffle(v, ushort(31 - lane));
    to[6] = simd_shuffle_xor(v, 5);
    to[7] = simd_shuffle_down(v, 4);
    to[8] = simd_shuffle_up(v, 4);
    to[9] = simd_broadcast(v, 7);
    to[10] = float(uint(ulong(simd_ballot(v > 0.0f))) & 0xffffu);
    to[11] = float(simd_any(v > 2.0f));
    to[12] = float(simd_all(v > -2.0f));
    to[13] = quad_sum(v);
    to[14] = float(simd_or(1u << (lane % 20)));
    to[15] = simd_shuffle_rotate_down(v, 3) + 0.0f * simd_broadcast_first(v);
}
kernel void ragged(device float* y, uint i [[thread_position_in_grid]], uint n [[threads_per_threadgroup]]) {
    y[i] = simd_sum(1.0f) + 100.0f * float(n);
}
kernel void totals(device const int* x, device atomic_int* all, device atomic_uint* largest, device atomic_float* sum,
                   uint i [[thread_position_in_grid]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup atomic_int here;
    if (tid == 0) atomic_store_explicit(&here, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&here, x[i], memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    int sum_here = atomic_load_explicit(&here, memory_order_relaxed);
    if (tid == 0) atomic_fetch_add_explicit(all, sum_here, memory_order_relaxed);
    atomic_fetch_max_explicit(largest, uint(x[i]), memory_order_relaxed);
    atomic_fetch_add_explicit(sum, 0.5f, memory_order_relaxed);
}
"""


@pytest.fixture(scope="module")
def together() -> msl.Library:
    return msl.compile_shader(PRELUDE + TOGETHER)


@pytest.mark.parametrize("seed", [0, 1])
def test_collectives(together, rng, seed) -> None:
    x = torch.randn(96, generator=rng)
    y = torch.full((96, 16), float("nan"))
    with msl.shuffled(seed):
        together.collectives(x, y, threads=96, group_size=96)
    for start in range(0, 96, 32):
        v, got = x[start : start + 32], y[start : start + 32]
        lanes = torch.arange(32)
        torch.testing.assert_close(got[:, 0], v.sum().expand(32), rtol=1e-5, atol=1e-4)
        assert torch.equal(got[:, 1], v.max().expand(32))
        assert torch.equal(got[:, 2], v.min().expand(32))
        assert torch.equal(got[:, 3], ((start + lanes).cumsum(0) - start - lanes).float())
        torch.testing.assert_close(got[:, 4], v.cumsum(0), rtol=1e-5, atol=1e-4)
        assert torch.equal(got[:, 5], v.flip(0))
        assert torch.equal(got[:, 6], v[lanes ^ 5])
        assert torch.equal(got[:28, 7], v[4:])
        assert torch.equal(got[4:, 8], v[:28])
        assert torch.equal(got[:, 9], v[7].expand(32))
        assert torch.equal(got[:, 10], ((v[:16] > 0) * 2.0 ** torch.arange(16)).sum().expand(32))
        assert torch.equal(got[:, 11], (v > 2).any().float().expand(32))
        assert torch.equal(got[:, 12], (v > -2).all().float().expand(32))
        torch.testing.assert_close(got[:, 13], v.view(8, 4).sum(1).repeat_interleave(4), rtol=1e-5, atol=1e-4)
        assert torch.equal(got[:, 14], torch.full((32,), float(2**20 - 1)))
        assert torch.equal(got[:, 15], v.roll(-3))


def test_the_last_group_is_narrower(together) -> None:
    y = torch.zeros(100)
    together.ragged(y, threads=100, group_size=64)
    assert y.tolist() == [32.0 + 6400] * 64 + [32.0 + 3600] * 32 + [4.0 + 3600] * 4


def test_atomics(together, rng) -> None:
    x = torch.randint(0, 1000, (256,), generator=rng).to(torch.int32)
    total, largest, halves = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    together.totals(x, total, largest, halves, threads=256, group_size=64)
    assert (total.item(), largest.item(), halves.item()) == (x.sum().item(), x.max().item(), 128.0)


MATRICES = """
template <typename T>
[[kernel]] void product(device const T* a, device const T* b, device float* c, device T* kept,
                        uint lane [[thread_index_in_simdgroup]]) {
    threadgroup T tile[2][16 * 24];
    for (uint i = lane; i < 384; i += 32) {
        tile[0][i] = a[i];
        tile[1][i] = b[i];
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (uint row = 0; row < 16; row += 8)
        for (uint column = 0; column < 16; column += 8) {
            simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
            for (uint k = 0; k < 24; k += 8) {
                simdgroup_matrix<T, 8, 8> left, right;
                simdgroup_load(left, tile[0] + row * 24 + k, 24);
                simdgroup_load(right, tile[1], 24, ulong2(k, column), true);
                simdgroup_multiply_accumulate(sum, left, right, sum);
            }
            sum.thread_elements()[0] *= 2.0f;
            sum.thread_elements()[1] *= 2.0f;
            simdgroup_store(sum, c + row * 16 + column, 16);
        }
    simdgroup_matrix<T, 8, 8> corner;
    simdgroup_load(corner, a, 24);
    simdgroup_store(corner, kept, 8, ulong2(0, 0), true);
}
template [[host_name("product_float")]] [[kernel]] decltype(product<float>) product<float>;
template [[host_name("product_half")]] [[kernel]] decltype(product<half>) product<half>;
template [[host_name("product_bfloat")]] [[kernel]] decltype(product<bfloat>) product<bfloat>;
"""


@pytest.mark.parametrize(
    ("name", "dtype"), [("float", torch.float32), ("half", torch.float16), ("bfloat", torch.bfloat16)]
)
def test_matrices(name, dtype, rng) -> None:
    a, b = (torch.randn(16, 24, generator=rng).to(dtype) for _ in range(2))
    c, kept = torch.full((16, 16), float("nan")), torch.zeros(8, 8, dtype=dtype)
    getattr(msl.compile_shader(PRELUDE + MATRICES), f"product_{name}")(a, b, c, kept, threads=32, group_size=32)
    want = 2 * a.double() @ b.double().T
    scale = 2 * a.double().abs() @ b.double().abs().T
    assert ((c.double() - want).abs() / scale).max() < 1e-6
    assert torch.equal(kept, a[:8, :8].T)


GRID = """
kernel void where(device int* y, uint3 p [[thread_position_in_grid]], uint3 g [[threadgroup_position_in_grid]],
                  uint3 t [[thread_position_in_threadgroup]], uint3 size [[threads_per_threadgroup]],
                  uint3 asked [[dispatch_threads_per_threadgroup]], uint3 groups [[threadgroups_per_grid]],
                  uint3 all [[threads_per_grid]], uint index [[thread_index_in_threadgroup]],
                  uint lane [[thread_index_in_simdgroup]], uint sg [[simdgroup_index_in_threadgroup]],
                  uint width [[threads_per_simdgroup]], uint sgs [[simdgroups_per_threadgroup]],
                  ushort3 flat [[thread_position_in_grid]]) {
    uint at = (p.z * all.y + p.y) * all.x + p.x;
    uint v[16] = {g.x, g.y, g.z, t.x, t.y, t.z, size.x, size.y, asked.x, groups.x, groups.y,
                  index, lane, sg, width + sgs, uint(flat.x) + 100 * uint(flat.y)};
    for (uint k = 0; k < 16; ++k) y[16 * at + k] = int(v[k]);
}
"""


def test_every_thread_knows_its_place() -> None:
    y = torch.full((3, 5, 20, 16), -1, dtype=torch.int32)
    msl.compile_shader(PRELUDE + GRID).where(y, threads=(20, 5, 3), group_size=(8, 4, 2))
    for z in range(3):
        for j in range(5):
            for i in range(20):
                group, inside = (i // 8, j // 4, z // 2), (i % 8, j % 4, z % 2)
                size = (min(8, 20 - 8 * group[0]), min(4, 5 - 4 * group[1]), min(2, 3 - 2 * group[2]))
                index = (inside[2] * size[1] + inside[1]) * size[0] + inside[0]
                count = size[0] * size[1] * size[2]
                expected = [*group, *inside, size[0], size[1], 8, 3, 2, index, index % 32, index // 32]
                assert y[z, j, i].tolist() == [*expected, 32 + -(-count // 32), i + 100 * j]


CALLS = """
struct Mixed { float a; int b; };
kernel void bytes(device int* y, constant long& n, constant int* list, constant float& f, constant half& h,
                  constant uchar& small, device const float* view, device const Mixed* mixed,
                  uint i [[thread_position_in_grid]]) {
    if (i > 0) return;
    y[0] = int(n >> 32); y[1] = list[2]; y[2] = as_type<int>(f); y[3] = int(as_type<ushort>(h)); y[4] = int(small);
    y[5] = int(view[0]); y[6] = int(mixed[1].a) + mixed[1].b;
}
kernel void limited(device float* y, uint i [[thread_position_in_grid]]);
[[max_total_threads_per_threadgroup(64)]] kernel void limited(device float* y, uint i [[thread_position_in_grid]]) {
    y[i] = 1;
}
"""


def test_arguments_arrive_as_torch_sends_them() -> None:
    library = msl.compile_shader(PRELUDE + CALLS)
    y = torch.zeros(7, dtype=torch.int32)
    view = torch.arange(10.0)[3:]
    mixed = torch.tensor(list(struct.pack("fifi", 1.0, 2, 30.0, 4)), dtype=torch.uint8)
    with msl.dispatches() as counted:
        library.bytes(y, 5 << 32, [7, 8, 9], 0.1, 0.5, 200, view, mixed, arg_casts={2: "int32", 4: "fp16", 5: "uint8"})
    assert counted.names == ["bytes"]
    assert y.tolist() == [5, 9, struct.unpack("i", struct.pack("f", 0.1))[0], 0x3800, 200, 3, 34]


def test_group_sizes_are_limited() -> None:
    library = msl.compile_shader(PRELUDE + CALLS)
    y = torch.zeros(100)
    library.limited(y)
    assert y.tolist() == [1.0] * 100
    with pytest.raises(ValueError, match="a threadgroup has 1 to 64 threads"):
        library.limited(y, threads=100, group_size=65)
    with pytest.raises(ValueError, match="different dimensions"):
        library.limited(y, threads=(100, 1), group_size=50)
    with pytest.raises(AttributeError, match="no kernel other"):
        _ = library.other


def test_casts_are_torchs_and_lose_nothing() -> None:
    kernel = msl.compile_shader(PRELUDE + CALLS).bytes
    y, view = torch.zeros(7, dtype=torch.int32), torch.zeros(1)
    with pytest.raises(ValueError, match="torch has no cast 'uint32'"):
        kernel(y, 1, [7, 8, 9], 0.1, 0.5, 1, view, view, arg_casts={2: "uint32"})
    with pytest.raises(msl.Fault, match="small is cast to uint8, which does not hold 300"):
        kernel(y, 1, [7, 8, 9], 0.1, 0.5, 300, view, view, arg_casts={2: "int32", 4: "fp16", 5: "uint8"})
