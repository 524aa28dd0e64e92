// Experts for few tokens: each assignment is a matrix-vector product, no plan.
// A threadgroup is four simdgroups of two results each. Needs combine.metal, activation.metal, weights.metal before it.
// Macros: X_T, BIAS_T, DOWN_BIAS_T; W_T, U_T, DOWN_T and their W_FORMAT, U_FORMAT, DOWN_FORMAT; those of the three.

struct UpSizes {
    long E;
    long top_k;
    long N;
    long K;
    long stride_xt;
    long stride_we;
    long stride_wn;
    long stride_ue;
    long stride_un;
    long has_bias;
    long stride_be;
    long stride_bn;
    long kind;
    long gated;
};

// hidden [S, N] float32 = act(w x) * (u x). x [T, K]; ids [S]; w, u stacks of rows that lie together; w_bias, u_bias
// [E, N]. Grid: ceil(N / 8) by S threadgroups of 128.
kernel void decode_up(
    device const X_T* x [[buffer(0)]],
    device const ID_T* ids [[buffer(1)]],
    device const W_T* w [[buffer(2)]],
    device const U_T* u [[buffer(3)]],
    device const BIAS_T* w_bias [[buffer(4)]],
    device const BIAS_T* u_bias [[buffer(5)]],
    device float* hidden [[buffer(6)]],
    constant UpSizes& sizes [[buffer(7)]],
    constant ActivationNumbers& numbers [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    long s = long(group.y);
    ID_T id = ids[s];
    if (id < 0 || id >= ID_T(sizes.E)) return;
    long expert = long(id);
    device const X_T* row = x + s / sizes.top_k * sizes.stride_xt;
    bool gated = sizes.gated != 0;
    long n = 8 * long(group.x) + 2 * long(sg);
    if (n >= sizes.N) return;
    // Two results at once share what is read of x; the second of a lone last row repeats the first and is not kept.
    long next = n + 1 < sizes.N ? n + 1 : n;
    device const W_T* w0 = w + expert * sizes.stride_we + n * sizes.stride_wn;
    device const W_T* w1 = w + expert * sizes.stride_we + next * sizes.stride_wn;
    device const U_T* u0 = u + expert * sizes.stride_ue + n * sizes.stride_un;
    device const U_T* u1 = u + expert * sizes.stride_ue + next * sizes.stride_un;
    float4 g0 = float4(0.0f);
    float4 g1 = float4(0.0f);
    float4 v0 = float4(0.0f);
    float4 v1 = float4(0.0f);
    long whole = sizes.K / 4 * 4;
    for (long k = 4 * long(lane); k < whole; k += 128) {
        float4 values = load4<X_T, WIDE>(row + k);
        g0 += values * weight4(W_FORMAT, w0, k);
        g1 += values * weight4(W_FORMAT, w1, k);
        if (!gated) continue;
        v0 += values * weight4(U_FORMAT, u0, k);
        v1 += values * weight4(U_FORMAT, u1, k);
    }
    float4 shares = float4(sum4(g0), sum4(v0), sum4(g1), sum4(v1));
    long k = whole + long(lane);
    if (k < sizes.K) {
        float value = float(row[k]);
        shares += value * float4(float(w0[k]), gated ? float(u0[k]) : 0.0f, float(w1[k]), gated ? float(u1[k]) : 0.0f);
    }
    float g = simd_sum(shares.x);
    float v = simd_sum(shares.y);
    float next_g = simd_sum(shares.z);
    float next_v = simd_sum(shares.w);
    // Lane 0 keeps the first result, lane 1 the second.
    if (lane > 1 || (lane == 1 && next == n)) return;
    long mine = n + long(lane);
    g = lane == 0 ? g : next_g;
    v = lane == 0 ? v : next_v;
    if (sizes.has_bias != 0) {
        long at = expert * sizes.stride_be + mine * sizes.stride_bn;
        g += float(w_bias[at]);
        if (gated) v += float(u_bias[at]);
    }
    hidden[s * sizes.N + mine] = activate(int(sizes.kind), gated, g, v, numbers).value;
}

struct DownSizes {
    long K;
    long stride_we;
    long stride_wn;
    long has_bias;
};

// Down products of all a token's experts, weighted, summed and with their tail. hidden [S, K]; w [E, H, K] of rows that
// lie together; bias [E, H]; the rest as in combine. Grid: ceil(H / 8) by T threadgroups of 128.
kernel void decode_down(
    device const float* hidden [[buffer(0)]],
    device const ID_T* ids [[buffer(1)]],
    device const WEIGHT_T* weights [[buffer(2)]],
    device const DOWN_T* w [[buffer(3)]],
    device const DOWN_BIAS_T* bias [[buffer(4)]],
    device const SHARED_T* shared [[buffer(5)]],
    device const FACTOR_T* factor [[buffer(6)]],
    device const RESIDUAL_T* residual [[buffer(7)]],
    device float* total [[buffer(8)]],
    device OUT_T* out [[buffer(9)]],
    constant DownSizes& down [[buffer(10)]],
    constant CombineSizes& sizes [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    long row = long(group.y);
    long n = 8 * long(group.x) + 2 * long(sg);
    if (n >= sizes.H) return;
    long next = n + 1 < sizes.H ? n + 1 : n;
    float share = 0.0f;
    float next_share = 0.0f;
    for (long j = 0; j < sizes.top_k; ++j) {
        long s = row * sizes.top_k + j;
        if (!slot_lives(ids, sizes, s)) continue;
        float weight = float(weights[s]);
        device const float* h = hidden + s * down.K;
        device const DOWN_T* stack = w + long(ids[s]) * down.stride_we;
        share += weight * row_share(DOWN_FORMAT, h, stack + n * down.stride_wn, down.K, lane);
        next_share += weight * row_share(DOWN_FORMAT, h, stack + next * down.stride_wn, down.K, lane);
    }
    float sum = simd_sum(share);
    float next_sum = simd_sum(next_share);
    if (lane > 1 || (lane == 1 && next == n)) return;
    long mine = n + long(lane);
    sum = lane == 0 ? sum : next_sum;
    for (long j = 0; j < sizes.top_k && down.has_bias != 0; ++j) {
        long s = row * sizes.top_k + j;
        if (slot_lives(ids, sizes, s)) sum += float(weights[s]) * float(bias[long(ids[s]) * sizes.H + mine]);
    }
    sum = with_tail(sum, shared, factor, residual, sizes, row, mine);
    out[row * sizes.H + mine] = OUT_T(sum);
    if (sizes.has_norm != 0) total[row * sizes.H + mine] = sum;
}
