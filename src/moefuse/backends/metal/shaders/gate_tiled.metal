// The router product for many tokens, in tiles; needs tiles.metal before it, with W_T the router's type.
// Macros: X_T, NORM_T and those of tiles.metal.

struct RouterSizes {
    long T;
    long E;
    long H;
    long stride_xt;
    long stride_we;
    long has_norm;
};

// logits [T, E] float32 = (x * norm) router^T, without the inverse RMS. x [T, H], router [E, H], norm [H].
// Grid: ceil(E / TILE_N) by ceil(T / TILE_M).
kernel void gate_logits_tiled(
    device const X_T* x [[buffer(0)]],
    device const W_T* router [[buffer(1)]],
    device const NORM_T* norm [[buffer(2)]],
    device float* logits [[buffer(3)]],
    constant RouterSizes& sizes [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float a[TILE_M * TILE_K];
    threadgroup float b[TILE_K * TILE_N];
    threadgroup long starts[TILE_M];
    long first_t = long(group.y) * TILE_M;
    long first_e = long(group.x) * TILE_N;
    if (thread_index < TILE_M) {
        long t = first_t + long(thread_index);
        starts[thread_index] = t < sizes.T ? t * sizes.stride_xt : -1;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Accumulators sums;
    clear_sums(sums);
    float totals[TOTALS] = {0.0f};
    for (long h = 0; h < sizes.H; h += TILE_K) {
        load_rows(x, starts, a, h, sizes.H, thread_index);
        if (sizes.has_norm != 0) {
            // The eight elements that this thread has just put there.
            for (uint i = 0; i < 8; ++i) {
                uint k = 8 * (thread_index % 4) + i;
                if (h + long(k) < sizes.H) a[thread_index / 4 * TILE_K + k] *= float(norm[h + long(k)]);
            }
        }
        load_weight(NUMBERS, router, b, first_e, h, sizes.E, sizes.H, sizes.stride_we, 1, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tiles(a, b, sums, sg);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if ((h + TILE_K) % CHUNK_K == 0 || h + TILE_K >= sizes.H) flush_sums(sums, totals, b, thread_index, sg);
    }
    for (uint i = 0; i < TOTALS; ++i) {
        uint at = thread_index + i * THREADS;
        long t = first_t + long(at / TILE_N);
        long e = first_e + long(at % TILE_N);
        if (t < sizes.T && e < sizes.E) logits[t * sizes.E + e] = totals[i];
    }
}
