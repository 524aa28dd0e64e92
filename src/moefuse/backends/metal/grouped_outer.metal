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
// Grid: ceil(K / BLOCK_N) by ceil(N / BLOCK_M) by E.
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
    threadgroup float a[BLOCK_M * BLOCK_K];
    threadgroup float b[BLOCK_K * BLOCK_N];
    threadgroup long grad_starts[BLOCK_K];
    threadgroup long x_starts[BLOCK_K];
    long expert = long(group.z);
    long first_n = long(group.y) * BLOCK_M;
    long first_k = long(group.x) * BLOCK_N;
    int end = offsets[expert + 1];
    Accumulators sums;
    clear_sums(sums);
    float totals[TOTALS] = {0.0f};
    int begin = offsets[expert];
    for (int first = begin; first < end; first += BLOCK_K) {
        if (thread_index < BLOCK_K) {
            int p = first + int(thread_index);
            bool live = p < end;
            long s = live ? long(order[p]) : 0;
            grad_starts[thread_index] = live ? (sizes.scatter != 0 ? s : long(p)) * sizes.stride_gm : -1;
            x_starts[thread_index] = live ? (sizes.gather != 0 ? s / sizes.divisor : long(p)) * sizes.stride_xm : -1;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // a [BLOCK_M of N, BLOCK_K rows]: grad turned over.
        for (uint at = thread_index; at < BLOCK_M * BLOCK_K; at += THREADS) {
            uint m = at / BLOCK_K;
            uint r = at % BLOCK_K;
            long n = first_n + long(m);
            a[at] = grad_starts[r] >= 0 && n < sizes.N ? float(grad[grad_starts[r] + n]) : 0.0f;
        }
        for (uint at = thread_index; at < BLOCK_K * BLOCK_N; at += THREADS) {
            uint r = at / BLOCK_N;
            long k = first_k + long(at % BLOCK_N);
            b[at] = x_starts[r] >= 0 && k < sizes.K ? float(x[x_starts[r] + k]) : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tiles(a, b, sums, sg);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        bool last = first + BLOCK_K >= end;
        if ((first - begin + BLOCK_K) % STRETCH == 0 || last) flush_sums(sums, totals, b, thread_index, sg);
    }
    for (uint i = 0; i < TOTALS; ++i) {
        uint at = thread_index + i * THREADS;
        long n = first_n + long(at / BLOCK_N);
        long k = first_k + long(at % BLOCK_N);
        if (n < sizes.N && k < sizes.K) out[(expert * sizes.N + n) * sizes.K + k] = X_T(totals[i]);
    }
}
