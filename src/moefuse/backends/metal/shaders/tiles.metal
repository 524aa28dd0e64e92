// Tiles of simdgroup matrices, float32 inside whatever the types. Needs weights.metal before it.
// A threadgroup is 128 threads, four simdgroups in a square, each with 16 by 32 of the result.

#define TILE_M 32
#define TILE_N 64
#define TILE_K 32
#define THREADS 128
#define TOTALS 16 // TILE_M * TILE_N / THREADS
// How much of K is summed in one go: a running sum over thousands of terms would drift past float32's 1e-6.
#define CHUNK_K 128

// a [TILE_M, TILE_K] and b [TILE_K, TILE_N], row by row in threadgroup memory.
struct Accumulators {
    simdgroup_float8x8 at[8];
};

inline void clear_sums(thread Accumulators& sums) {
    for (int i = 0; i < 8; ++i) sums.at[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

inline void multiply_tiles(
    threadgroup const float* a, threadgroup const float* b, thread Accumulators& sums, uint sg) {
    threadgroup const float* rows = a + 16 * (sg / 2) * TILE_K;
    threadgroup const float* columns = b + 32 * (sg % 2);
    for (int k = 0; k < TILE_K; k += 8) {
        simdgroup_float8x8 left[2];
        simdgroup_float8x8 right[4];
        for (int i = 0; i < 2; ++i) simdgroup_load(left[i], rows + 8 * i * TILE_K + k, TILE_K);
        for (int j = 0; j < 4; ++j) simdgroup_load(right[j], columns + k * TILE_N + 8 * j, TILE_N);
        for (int i = 0; i < 2; ++i) {
            for (int j = 0; j < 4; ++j) {
                simdgroup_multiply_accumulate(sums.at[4 * i + j], left[i], right[j], sums.at[4 * i + j]);
            }
        }
    }
}

// Add the sums of a chunk to this thread's totals, elements thread_index + i * THREADS of the tile, and clear them.
// c [TILE_M, TILE_N] is scratch that nobody else uses between the barriers around this.
inline void flush_sums(
    thread Accumulators& sums, thread float* totals, threadgroup float* c, uint thread_index, uint sg) {
    threadgroup float* to = c + 16 * (sg / 2) * TILE_N + 32 * (sg % 2);
    for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) simdgroup_store(sums.at[4 * i + j], to + 8 * i * TILE_N + 8 * j, TILE_N);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = 0; i < TOTALS; ++i) totals[i] += c[thread_index + i * THREADS];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    clear_sums(sums);
}

// Four neighbours of a row from column k on, zeros from K on.
template <typename T>
inline float4 load4_within(int format, device const T* row, long k, long K) {
    if (k + 4 <= K) return weight4(format, row, k);
    float4 found = float4(0.0f);
    for (int i = 0; i < 4; ++i) {
        if (k + i < K) found[i] = float(row[k + i]);
    }
    return found;
}

// Rows of a matrix to a [TILE_M, TILE_K], columns from `first` on; starts[m] is where row m begins, -1 for none.
template <typename T>
inline void load_rows(
    device const T* x, threadgroup const long* starts, threadgroup float* a, long first, long K, uint thread_index) {
    uint m = thread_index / 4;
    long start = starts[m];
    for (uint i = 0; i < 2; ++i) {
        uint k = 8 * (thread_index % 4) + 4 * i;
        float4 found = start < 0 ? float4(0.0f) : load4_within(NUMBERS, x + start, first + long(k), K);
        threadgroup float* to = a + m * TILE_K + k;
        for (int c = 0; c < 4; ++c) to[c] = found[c];
    }
}

// Rows n of a weight [N, K] to b [TILE_K, TILE_N]. Neighbouring threads read neighbouring memory in either layout.
template <typename T>
inline void load_weight(
    int format,
    device const T* w,
    threadgroup float* b,
    long first_n,
    long first_k,
    long N,
    long K,
    long stride_n,
    long stride_k,
    uint thread_index) {
    if (stride_k == 1) {
        long n = first_n + long(thread_index / 2);
        for (uint i = 0; i < 4; ++i) {
            uint k = 16 * (thread_index % 2) + 4 * i;
            float4 found = float4(0.0f);
            if (n < N) found = load4_within(format, w + n * stride_n, first_k + long(k), K);
            for (int c = 0; c < 4; ++c) b[(k + uint(c)) * TILE_N + thread_index / 2] = found[c];
        }
        return;
    }
    for (uint i = 0; i < TILE_K * TILE_N / THREADS; ++i) {
        uint at = thread_index + i * THREADS;
        long n = first_n + long(at % TILE_N);
        long k = first_k + long(at / TILE_N);
        b[at] = n < N && k < K ? float(w[n * stride_n + k * stride_k]) : 0.0f;
    }
}
