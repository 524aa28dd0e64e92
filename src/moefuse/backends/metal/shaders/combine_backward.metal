// The gradient of combine; needs combine.metal before it, and its macros.

// d_out, d_normed [T, H], the other inputs as in combine, without ids. Gradients have the shape of what they are of.
// Scratch: total, d [T, H], inverse_rms [T], float32. Grid: T threadgroups of 256; each thread owns its columns.
kernel void combine_backward(
    device const OUT_T* d_out [[buffer(0)]],
    device const NORMED_T* d_normed [[buffer(1)]],
    device const Y_T* y [[buffer(2)]],
    device const WEIGHT_T* weights [[buffer(3)]],
    device const int* inverse [[buffer(4)]],
    device const SHARED_T* shared [[buffer(5)]],
    device const FACTOR_T* factor [[buffer(6)]],
    device const RESIDUAL_T* residual [[buffer(7)]],
    device const NORM_T* norm [[buffer(8)]],
    device float* total [[buffer(9)]],
    device float* d [[buffer(10)]],
    device float* inverse_rms [[buffer(11)]],
    device Y_T* d_y [[buffer(12)]],
    device WEIGHT_T* d_weights [[buffer(13)]],
    device SHARED_T* d_shared [[buffer(14)]],
    device FACTOR_T* d_factor [[buffer(15)]],
    device RESIDUAL_T* d_residual [[buffer(16)]],
    device const ID_T* ids [[buffer(17)]],
    constant CombineSizes& sizes [[buffer(18)]],
    constant float& eps [[buffer(19)]],
    uint token [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float scratch[8];
    long row = long(token);
    long H = sizes.H;
    float rms = 0.0f;
    float along_norm = 0.0f;
    if (sizes.has_norm != 0) {
        float squares = 0.0f;
        float share = 0.0f;
        for (long h = long(thread_index); h < H; h += 256) {
            float sum = weighted_sum(y, weights, inverse, ids, sizes, row, h);
            sum = with_tail(sum, shared, factor, residual, sizes, row, h);
            total[row * H + h] = sum;
            squares += sum * sum;
            share += float(d_normed[row * H + h]) * float(norm[h]) * sum;
        }
        squares = threadgroup_sum(squares, scratch, lane, sg, 8);
        rms = 1.0f / sqrt(squares / float(H) + eps);
        along_norm = threadgroup_sum(share, scratch, lane, sg, 8) * rms / float(H);
        if (thread_index == 0) inverse_rms[row] = rms;
    }
    float factor_value = shared_factor(factor, sizes, row);
    float along_shared = 0.0f;
    for (long h = long(thread_index); h < H; h += 256) {
        long at = row * H + h;
        float value = float(d_out[at]);
        if (sizes.has_norm != 0) {
            float unit = total[at] * rms;
            value += rms * (float(d_normed[at]) * float(norm[h]) - unit * along_norm);
        }
        d[at] = value;
        if (sizes.has_residual != 0) d_residual[at] = RESIDUAL_T(value);
        if (sizes.has_shared != 0) {
            d_shared[at] = SHARED_T(factor_value * value);
            along_shared += value * float(shared[at]);
        }
    }
    for (long j = 0; j < sizes.top_k; ++j) {
        long s = row * sizes.top_k + j;
        long from = sizes.has_inverse != 0 ? long(inverse[s]) : s;
        bool inside = from >= 0 && from < sizes.rows;
        float weight = float(weights[s]);
        float share = 0.0f;
        for (long h = long(thread_index); inside && h < H; h += 256) {
            float value = d[row * H + h];
            share += value * float(y[from * H + h]);
            d_y[from * H + h] = Y_T(weight * value);
        }
        share = threadgroup_sum(share, scratch, lane, sg, 8);
        if (thread_index == 0) d_weights[s] = WEIGHT_T(share);
    }
    if (sizes.has_factor == 0) return;
    along_shared = threadgroup_sum(along_shared, scratch, lane, sg, 8);
    if (thread_index == 0) {
        float derivative = sizes.factor_is_logit != 0 ? factor_value * (1.0f - factor_value) : 1.0f;
        d_factor[row] = FACTOR_T(along_shared * derivative);
    }
}

// d_norm [H]: sum over tokens, in a fixed order, of d_normed * total * inverse_rms. Grid: ceil(H / 32) of 256.
kernel void norm_weight_backward(
    device const NORMED_T* d_normed [[buffer(0)]],
    device const float* total [[buffer(1)]],
    device const float* inverse_rms [[buffer(2)]],
    device NORM_T* d_norm [[buffer(3)]],
    constant long& T [[buffer(4)]],
    constant long& H [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    threadgroup float parts[8][32];
    long h = 32 * long(group) + long(lane);
    float sum = 0.0f;
    if (h < H) {
        for (long t = long(sg); t < T; t += 8) {
            sum += float(d_normed[t * H + h]) * (total[t * H + h] * inverse_rms[t]);
        }
    }
    parts[sg][lane] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg != 0 || h >= H) return;
    sum = 0.0f;
    for (int i = 0; i < 8; ++i) sum += parts[i][lane];
    d_norm[h] = NORM_T(sum);
}
