// plan: expert ids to expert-major order, stable and without atomics whose order shows.
// Macro: ID_T. Assignments are taken in chunks of 256; an id outside [0, E) goes to bin E, which sorts last.
// Few assignments (one chunk): plan_small alone. Many: plan_count, plan_scan, plan_place.

#define CHUNK 256
#define MAX_BINS 1025

struct PlanSizes {
    long S;
    long E;
    long chunks;
};

inline int bin_of(ID_T id, int E) { return id >= 0 && id < ID_T(E) ? int(id) : E; }

// How many assignments of the chunk go to each bin. Counts do not depend on the order of the additions.
inline void count_bins(threadgroup atomic_uint* counts, int bin, bool live, int bins, uint thread_index) {
    for (int b = int(thread_index); b < bins; b += CHUNK) {
        atomic_store_explicit(&counts[b], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (live) atomic_fetch_add_explicit(&counts[bin], 1u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Assignments of the chunk that stand before this one and share its bin. bins: those of the chunk, behind a barrier.
inline int rank_in_chunk(threadgroup const int* bins, int bin, uint thread_index) {
    int rank = 0;
    for (uint i = 0; i < thread_index; ++i) rank += bins[i] == bin ? 1 : 0;
    return rank;
}

// The number in all bins before each: totals to starts, by a threadgroup of whole simdgroups. scratch: 32 ints.
inline void exclusive_sum(
    threadgroup int* totals, int bins, threadgroup int* scratch, uint thread_index, uint lane, uint sg, uint threads) {
    int carry = 0;
    for (int first = 0; first < bins; first += int(threads)) {
        int b = first + int(thread_index);
        int mine = b < bins ? totals[b] : 0;
        int before = simd_prefix_exclusive_sum(mine);
        if (lane == 31) scratch[sg] = before + mine;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        int sum = 0;
        for (uint i = 0; i < threads / 32; ++i) {
            if (i == sg) before += sum;
            sum += scratch[i];
        }
        if (b < bins) totals[b] = carry + before;
        carry += sum;
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// ids [S], S at most 256; counts [E], offsets [E + 1], order, inverse [S]. One threadgroup of 256.
kernel void plan_small(
    device const ID_T* ids [[buffer(0)]],
    device int* counts [[buffer(1)]],
    device int* offsets [[buffer(2)]],
    device int* order [[buffer(3)]],
    device int* inverse [[buffer(4)]],
    constant PlanSizes& sizes [[buffer(5)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup atomic_uint bin_counts[MAX_BINS];
    threadgroup int starts[MAX_BINS];
    threadgroup int bins[CHUNK];
    threadgroup int scratch[32];
    int E = int(sizes.E);
    bool live = long(thread_index) < sizes.S;
    int bin = live ? bin_of(ids[thread_index], E) : -1;
    bins[thread_index] = bin;
    count_bins(bin_counts, bin, live, E + 1, thread_index);
    for (int b = int(thread_index); b <= E; b += CHUNK) {
        int count = int(atomic_load_explicit(&bin_counts[b], memory_order_relaxed));
        starts[b] = count;
        if (b < E) counts[b] = count;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    exclusive_sum(starts, E + 1, scratch, thread_index, lane, sg, CHUNK);
    for (int b = int(thread_index); b <= E; b += CHUNK) offsets[b] = starts[b];
    if (live) {
        int position = starts[bin] + rank_in_chunk(bins, bin, thread_index);
        order[position] = int(thread_index);
        inverse[thread_index] = position;
    }
}

// table [E + 1, chunks]: how many assignments of a chunk go to each bin. Grid: chunks of 256.
kernel void plan_count(
    device const ID_T* ids [[buffer(0)]],
    device int* table [[buffer(1)]],
    constant PlanSizes& sizes [[buffer(2)]],
    uint chunk [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup atomic_uint bin_counts[MAX_BINS];
    int E = int(sizes.E);
    long s = long(chunk) * CHUNK + long(thread_index);
    bool live = s < sizes.S;
    int bin = live ? bin_of(ids[s], E) : -1;
    count_bins(bin_counts, bin, live, E + 1, thread_index);
    for (int b = int(thread_index); b <= E; b += CHUNK) {
        table[long(b) * sizes.chunks + long(chunk)] = int(atomic_load_explicit(&bin_counts[b], memory_order_relaxed));
    }
}

// table becomes the place of a chunk's first assignment to a bin, counted inside the bin; also counts and offsets.
// One threadgroup of 1024, a simdgroup per bin at a time.
[[max_total_threads_per_threadgroup(1024)]]
kernel void plan_scan(
    device int* table [[buffer(0)]],
    device int* counts [[buffer(1)]],
    device int* offsets [[buffer(2)]],
    constant PlanSizes& sizes [[buffer(3)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup int starts[MAX_BINS];
    threadgroup int scratch[32];
    int E = int(sizes.E);
    for (int b = int(sg); b <= E; b += int(simdgroups)) {
        device int* row = table + long(b) * sizes.chunks;
        int carry = 0;
        for (long first = 0; first < sizes.chunks; first += 32) {
            long i = first + long(lane);
            int mine = i < sizes.chunks ? row[i] : 0;
            int before = simd_prefix_exclusive_sum(mine);
            if (i < sizes.chunks) row[i] = carry + before;
            carry += simd_sum(mine);
        }
        if (lane == 0) {
            starts[b] = carry;
            if (b < E) counts[b] = carry;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    exclusive_sum(starts, E + 1, scratch, thread_index, lane, sg, 32 * simdgroups);
    for (int b = int(thread_index); b <= E; b += int(32 * simdgroups)) offsets[b] = starts[b];
}

// Every assignment to its place. Grid: chunks of 256.
kernel void plan_place(
    device const ID_T* ids [[buffer(0)]],
    device const int* table [[buffer(1)]],
    device const int* offsets [[buffer(2)]],
    device int* order [[buffer(3)]],
    device int* inverse [[buffer(4)]],
    constant PlanSizes& sizes [[buffer(5)]],
    uint chunk [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup int bins[CHUNK];
    long s = long(chunk) * CHUNK + long(thread_index);
    bool live = s < sizes.S;
    int bin = live ? bin_of(ids[s], int(sizes.E)) : -1;
    bins[thread_index] = bin;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (!live) return;
    int before = table[long(bin) * sizes.chunks + long(chunk)] + rank_in_chunk(bins, bin, thread_index);
    int position = offsets[bin] + before;
    order[position] = int(s);
    inverse[s] = position;
}
