// combine: the weighted sum of a token's experts and what follows it, and the gradient of all that.
// Macros: element types Y_T, WEIGHT_T, SHARED_T, FACTOR_T (gate or logit), RESIDUAL_T, NORM_T, OUT_T, NORMED_T, ID_T.

struct CombineSizes {
    long H;
    long top_k;
    long E;
    long has_inverse;
    long has_ids;
    long has_shared;
    long has_factor;
    long factor_is_logit;
    long has_residual;
    long has_norm;
    long rows;  // of y
};

inline float shared_factor(device const FACTOR_T* factor, constant CombineSizes& sizes, long row) {
    if (sizes.has_factor == 0) return 1.0f;
    float value = float(factor[row]);
    return sizes.factor_is_logit != 0 ? sigmoid(value) : value;
}

// Shared expert and residual on top of a token's weighted sum.
inline float with_tail(
    float total,
    device const SHARED_T* shared,
    device const FACTOR_T* factor,
    device const RESIDUAL_T* residual,
    constant CombineSizes& sizes,
    long row,
    long column) {
    long at = row * sizes.H + column;
    if (sizes.has_shared != 0) total += shared_factor(factor, sizes, row) * float(shared[at]);
    if (sizes.has_residual != 0) total += float(residual[at]);
    return total;
}

inline bool slot_lives(device const ID_T* ids, constant CombineSizes& sizes, long s) {
    if (sizes.has_ids == 0) return true;
    ID_T id = ids[s];
    return id >= 0 && id < ID_T(sizes.E);
}

// Column of a token's sum over its slots, in their order. A slot without an expert is not read.
inline float weighted_sum(
    device const Y_T* y,
    device const WEIGHT_T* weights,
    device const int* inverse,
    device const ID_T* ids,
    constant CombineSizes& sizes,
    long row,
    long column) {
    float total = 0.0f;
    for (long j = 0; j < sizes.top_k; ++j) {
        long s = row * sizes.top_k + j;
        if (!slot_lives(ids, sizes, s)) continue;
        long from = sizes.has_inverse != 0 ? long(inverse[s]) : s;
        if (from < 0 || from >= sizes.rows) continue;
        total += float(weights[s]) * float(y[from * sizes.H + column]);
    }
    return total;
}

// Buffers: y [S, H]; weights, ids [T, top_k]; inverse [S]; shared, residual [T, H]; factor [T]; norm [H];
// total [T, H] float32 scratch, used with a norm; out, normed [T, H]. out may be residual: each thread reads its own
// elements before it writes them.
// Grid: T rows of threadgroups of 256; with a norm one threadgroup has the whole row.
kernel void combine(
    device const Y_T* y [[buffer(0)]],
    device const WEIGHT_T* weights [[buffer(1)]],
    device const int* inverse [[buffer(2)]],
    device const ID_T* ids [[buffer(3)]],
    device const SHARED_T* shared [[buffer(4)]],
    device const FACTOR_T* factor [[buffer(5)]],
    device const RESIDUAL_T* residual [[buffer(6)]],
    device const NORM_T* norm [[buffer(7)]],
    device float* total [[buffer(8)]],
    device OUT_T* out [[buffer(9)]],
    device NORMED_T* normed [[buffer(10)]],
    constant CombineSizes& sizes [[buffer(11)]],
    constant float& eps [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float scratch[8];
    long row = long(group.y);
    long step = 256 * long(groups.x);
    float squares = 0.0f;
    for (long h = 256 * long(group.x) + long(thread_index); h < sizes.H; h += step) {
        float sum = weighted_sum(y, weights, inverse, ids, sizes, row, h);
        sum = with_tail(sum, shared, factor, residual, sizes, row, h);
        out[row * sizes.H + h] = OUT_T(sum);
        if (sizes.has_norm != 0) {
            total[row * sizes.H + h] = sum;
            squares += sum * sum;
        }
    }
    if (sizes.has_norm == 0) return;
    squares = threadgroup_sum(squares, scratch, lane, sg, 8);
    float inverse_rms = 1.0f / sqrt(squares / float(sizes.H) + eps);
    for (long h = long(thread_index); h < sizes.H; h += 256) {
        normed[row * sizes.H + h] = NORMED_T(total[row * sizes.H + h] * inverse_rms * float(norm[h]));
    }
}

// normed [T, H] from total [T, H]. Grid: T threadgroups of 256.
kernel void norm_rows(
    device const float* total [[buffer(0)]],
    device const NORM_T* norm [[buffer(1)]],
    device NORMED_T* normed [[buffer(2)]],
    constant long& H [[buffer(3)]],
    constant float& eps [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float scratch[8];
    device const float* mine = total + long(row) * H;
    float squares = 0.0f;
    for (long h = long(thread_index); h < H; h += 256) squares += mine[h] * mine[h];
    squares = threadgroup_sum(squares, scratch, lane, sg, 8);
    float inverse_rms = 1.0f / sqrt(squares / float(H) + eps);
    for (long h = long(thread_index); h < H; h += 256) {
        normed[long(row) * H + h] = NORMED_T(mine[h] * inverse_rms * float(norm[h]));
    }
}
