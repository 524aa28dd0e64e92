// The grouped product: rows times their expert's matrix, the activation in its epilogue. Needs activation.metal and
// tiles.metal before it. Macros: X_T, W_T, U_T, BIAS_T, OUT_T element types; W_FORMAT, U_FORMAT: numbers or blocks;
// GATED (0, 1): gate and up products side by side; those of tiles.metal.

struct ProductSizes {
    long S;
    long E;
    long N;
    long K;
    long divisor;
    long gather;
    long scatter;
    long fill;
    long stride_xm;
    long stride_we;
    long stride_wn;
    long stride_wk;
    long stride_ue;
    long stride_un;
    long stride_uk;
    long has_bias;
    long stride_be;
    long stride_bn;
    long kind;  // of activation, -1 for none
};

// Which expert a tile of TILE_M rows belongs to: found[0] the expert, [1] its first row, [2] the end of the expert's
// rows; found[0] is -1 past the last tile. With fill, rows without an expert are those of expert E.
// This is the schedule that sizes the grid on the device: the host launches an upper bound of tiles.
inline void find_tile(
    device const int* offsets,
    constant ProductSizes& sizes,
    int tile,
    threadgroup int* found,
    threadgroup int* scratch,
    uint thread_index,
    uint lane,
    uint sg) {
    int E = int(sizes.E);
    int bins = sizes.fill != 0 ? E + 1 : E;
    int share = (bins + THREADS - 1) / THREADS;
    int begin = min(int(thread_index) * share, bins);
    int end = min(begin + share, bins);
    int tiles = 0;
    for (int e = begin; e < end; ++e) {
        int stop = e < E ? offsets[e + 1] : int(sizes.S);
        tiles += (stop - offsets[e] + TILE_M - 1) / TILE_M;
    }
    int before = simd_prefix_exclusive_sum(tiles);
    if (lane == 31) scratch[sg] = before + tiles;
    if (thread_index == 0) found[0] = -1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < sg; ++i) before += scratch[i];
    if (tile >= before && tile < before + tiles) {
        for (int e = begin; e < end; ++e) {
            int stop = e < E ? offsets[e + 1] : int(sizes.S);
            int mine = (stop - offsets[e] + TILE_M - 1) / TILE_M;
            if (tile >= before && tile < before + mine) {
                found[0] = e;
                found[1] = offsets[e] + (tile - before) * TILE_M;
                found[2] = stop;
            }
            before += mine;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Buffers: x rows of K elements; w (gate or only) and u (up, when GATED) stacks [E, N, K] of any strides;
// w_bias, u_bias [E, N]; offsets [E + 1], order [S]; out [S, N]. Grid: ceil(N / TILE_N) by an upper bound of tiles.
kernel void grouped_product(
    device const X_T* x [[buffer(0)]],
    device const W_T* w [[buffer(1)]],
    device const U_T* u [[buffer(2)]],
    device const BIAS_T* w_bias [[buffer(3)]],
    device const BIAS_T* u_bias [[buffer(4)]],
    device const int* offsets [[buffer(5)]],
    device const int* order [[buffer(6)]],
    device OUT_T* out [[buffer(7)]],
    constant ProductSizes& sizes [[buffer(8)]],
    constant ActivationNumbers& numbers [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float a[TILE_M * TILE_K];
    threadgroup float b[TILE_K * TILE_N];
#if GATED
    threadgroup float b_up[TILE_K * TILE_N];
#endif
    threadgroup long starts[TILE_M];
    threadgroup long places[TILE_M];
    threadgroup int found[3];
    threadgroup int scratch[4];
    find_tile(offsets, sizes, int(group.y), found, scratch, thread_index, lane, sg);
    if (found[0] < 0) return;
    long expert = long(found[0]);
    if (thread_index < TILE_M) {
        int p = found[1] + int(thread_index);
        bool live = p < found[2];
        long s = live ? long(order[p]) : 0;
        long from = sizes.gather != 0 ? s / sizes.divisor : long(p);
        starts[thread_index] = live && expert < sizes.E ? from * sizes.stride_xm : -1;
        places[thread_index] = live ? (sizes.scatter != 0 ? s : long(p)) * sizes.N : -1;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    long first_n = long(group.x) * TILE_N;
    Accumulators sums;
    clear_sums(sums);
    float totals[TOTALS] = {0.0f};
#if GATED
    Accumulators up_sums;
    clear_sums(up_sums);
    float up_totals[TOTALS] = {0.0f};
#endif
    long K = expert < sizes.E ? sizes.K : 0;
    for (long k = 0; k < K; k += TILE_K) {
        load_rows(x, starts, a, k, K, thread_index);
        device const W_T* stack = w + expert * sizes.stride_we;
        load_weight(W_FORMAT, stack, b, first_n, k, sizes.N, K, sizes.stride_wn, sizes.stride_wk, thread_index);
#if GATED
        device const U_T* up_stack = u + expert * sizes.stride_ue;
        load_weight(U_FORMAT, up_stack, b_up, first_n, k, sizes.N, K, sizes.stride_un, sizes.stride_uk, thread_index);
#endif
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply_tiles(a, b, sums, sg);
#if GATED
        multiply_tiles(a, b_up, up_sums, sg);
#endif
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if ((k + TILE_K) % CHUNK_K != 0 && k + TILE_K < K) continue;
        flush_sums(sums, totals, b, thread_index, sg);
#if GATED
        flush_sums(up_sums, up_totals, b_up, thread_index, sg);
#endif
    }
    for (uint i = 0; i < TOTALS; ++i) {
        uint at = thread_index + i * THREADS;
        long place = places[at / TILE_N];
        long n = first_n + long(at % TILE_N);
        if (place < 0 || n >= sizes.N) continue;
        float value = totals[i];
        bool biased = sizes.has_bias != 0 && expert < sizes.E;
        long bias_at = expert * sizes.stride_be + n * sizes.stride_bn;
        if (biased) value += float(w_bias[bias_at]);
#if GATED
        float up_value = up_totals[i];
        if (biased) up_value += float(u_bias[bias_at]);
        value = activate(int(sizes.kind), true, value, up_value, numbers).value;
#else
        if (expert < sizes.E && sizes.kind >= 0) value = activate(int(sizes.kind), false, value, 0.0f, numbers).value;
#endif
        out[place + n] = OUT_T(value);
    }
}
