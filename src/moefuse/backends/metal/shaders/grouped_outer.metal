// The weight gradient of the grouped product; needs tiles.metal before it. Macro: X_T.

struct OuterSizes {
    long N;
    long K;
    long divisor;
    long gather;
    long scatter;
    long stride_gm;
    long stride_xm;
};

// The weight gradient: out [E, N, K] from grad [S, N] and rows of x, summed in the plan's order.
// Grid: ceil(K / TILE_N) by ceil(N / TILE_M) by E.
kernel void grouped_outer(
    device const X_T* grad [[buffer(0)]],
    device const X_T* x [[buffer(1)]],
    device const int* offsets [[buffer(2)]],
    device const int* order [[buffer(3)]],
    device X_T* out [[buffer(4)]],
    constant OuterSizes& sizes [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float a[TILE_M * TILE_K];
    threadgroup float b[TILE_K * TILE_N];
    threadgroup long grad_starts[TILE_K];
    threadgroup long x_starts[TILE_K];
    long expert = long(group.z);
    long first_n = long(group.y) * TILE_M;
    long first_k = long(group.x) * TILE_N;
    int end = offsets[expert + 1];
    Accumulators sums;
    clear_sums(sums);
    float totals[TOTALS] = {0.0f};
    int begin = offsets[expert];
    for (int first = begin; first < end; first += TILE_K) {
        if (thread_index < TILE_K) {
            int p = first + int(thread_index);
            bool live = p < end;
            long s = live ? long(order[p]) : 0;
            grad_starts[thread_index] = live ? (sizes.scatter != 0 ? s : long(p)) * sizes.stride_gm : -1;
            x_starts[thread_index] = live ? (sizes.gather != 0 ? s / sizes.divisor : long(p)) * sizes.stride_xm : -1;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // a [TILE_M of N, TILE_K rows]: grad transposed.
        for (uint at = thread_index; at < TILE_M * TILE_K; at += THREADS) {
            uint m = at / TILE_K;
            uint r = at % TILE_K;
            long n = first_n + long(m);
            a[at] = grad_starts[r] >= 0 && n < sizes.N ? float(grad[grad_starts[r] + n]) : 0.0f;
        }
        for (uint at = thread_index; at < TILE_K * TILE_N; at += THREADS) {
            uint r = at / TILE_N;
            long k = first_k + long(at % TILE_N);
            b[at] = x_starts[r] >= 0 && k < sizes.K ? float(x[x_starts[r] + k]) : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tiles(a, b, sums, sg);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        bool last = first + TILE_K >= end;
        if ((first - begin + TILE_K) % CHUNK_K == 0 || last) flush_sums(sums, totals, b, thread_index, sg);
    }
    for (uint i = 0; i < TOTALS; ++i) {
        uint at = thread_index + i * THREADS;
        long n = first_n + long(at / TILE_N);
        long k = first_k + long(at % TILE_N);
        if (n < sizes.N && k < sizes.K) out[(expert * sizes.N + n) * sizes.K + k] = X_T(totals[i]);
    }
}
