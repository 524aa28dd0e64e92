// gate: RMSNorm, router product and routing. Logits stay float32.
// Macros: X_T, ROUTER_T, NORM_T, LOGIT_BIAS_T element types, WIDE, and those of route.metal.

struct GateSizes {
    long H;
    long stride_xt;
    long stride_we;
    long has_norm;
    long want_normed;
    long has_logit_bias;
};

// This lane's share of sum_h x[h] * norm[h] * w[h]; the row's inverse RMS comes later, once for the whole sum.
inline float router_share(
    device const X_T* x, device const NORM_T* norm, device const ROUTER_T* w, constant GateSizes& sizes, uint lane) {
    if (sizes.has_norm == 0) return dot_share<X_T, ROUTER_T, WIDE>(x, w, sizes.H, lane);
    float4 sum = float4(0.0f);
    long whole = sizes.H / 4 * 4;
    for (long h = 4 * long(lane); h < whole; h += 128) {
        sum += load4<X_T, WIDE>(x + h) * load4<NORM_T, WIDE>(norm + h) * load4<ROUTER_T, WIDE>(w + h);
    }
    float total = sum4(sum);
    long h = whole + long(lane);
    if (h < sizes.H) total += float(x[h]) * float(norm[h]) * float(w[h]);
    return total;
}

inline float square_share(device const X_T* x, long H, uint thread_index, uint threads) {
    float sum = 0.0f;
    for (long h = long(thread_index); h < H; h += long(threads)) sum += float(x[h]) * float(x[h]);
    return sum;
}

inline void write_normed(
    device const X_T* x,
    device const NORM_T* norm,
    device X_T* normed,
    long H,
    float inverse_rms,
    uint thread_index,
    uint threads) {
    for (long h = long(thread_index); h < H; h += long(threads)) {
        normed[h] = X_T(float(x[h]) * inverse_rms * float(norm[h]));
    }
}

// Buffers: x [T, H], router [E, H], norm [H], logit_bias, bias, per_expert_scale [E]; weights, ids [T, top_k];
// normed [T, H]. The whole gate of a token in one threadgroup. Grid: T threadgroups of whole simdgroups, at most 32.
[[max_total_threads_per_threadgroup(1024)]]
kernel void gate_whole(
    device const X_T* x [[buffer(0)]],
    device const ROUTER_T* router [[buffer(1)]],
    device const NORM_T* norm [[buffer(2)]],
    device const LOGIT_BIAS_T* logit_bias [[buffer(3)]],
    device const BIAS_T* bias [[buffer(4)]],
    device const SCALE_T* per_expert_scale [[buffer(5)]],
    device float* weights [[buffer(6)]],
    device int* ids [[buffer(7)]],
    device X_T* normed [[buffer(8)]],
    constant Rule& rule [[buffer(9)]],
    constant RuleNumbers& numbers [[buffer(10)]],
    constant GateSizes& sizes [[buffer(11)]],
    constant float& eps [[buffer(12)]],
    uint token [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float row[MAX_EXPERTS];
    threadgroup float value[MAX_EXPERTS];
    threadgroup float group_value[MAX_EXPERTS];
    threadgroup float scratch[32];
    device const X_T* mine = x + long(token) * sizes.stride_xt;
    float inverse_rms = 1.0f;
    if (sizes.has_norm != 0) {
        float share = square_share(mine, sizes.H, thread_index, 32 * simdgroups);
        float squares = threadgroup_sum(share, scratch, lane, sg, simdgroups);
        inverse_rms = 1.0f / sqrt(squares / float(sizes.H) + eps);
    }
    for (long e = long(sg); e < rule.E; e += long(simdgroups)) {
        float logit = inverse_rms * simd_sum(router_share(mine, norm, router + e * sizes.stride_we, sizes, lane));
        if (sizes.has_logit_bias != 0) logit += float(logit_bias[e]);
        if (lane == 0) row[e] = logit;
    }
    if (sizes.want_normed != 0) {
        device X_T* to = normed + long(token) * sizes.H;
        write_normed(mine, norm, to, sizes.H, inverse_rms, thread_index, 32 * simdgroups);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg == 0) {
        route_row(row, value, group_value, bias, per_expert_scale, weights, ids, rule, numbers, long(token), lane);
    }
}

// Router products without the inverse RMS: logits [T, E]. Grid: ceil(E / 8) by T threadgroups of 256.
kernel void gate_logits(
    device const X_T* x [[buffer(0)]],
    device const ROUTER_T* router [[buffer(1)]],
    device const NORM_T* norm [[buffer(2)]],
    device float* logits [[buffer(3)]],
    constant GateSizes& sizes [[buffer(4)]],
    constant long& E [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    long e = 8 * long(group.x) + long(sg);
    if (e >= E) return;
    long token = long(group.y);
    float logit = simd_sum(router_share(x + token * sizes.stride_xt, norm, router + e * sizes.stride_we, sizes, lane));
    if (lane == 0) logits[token * E + e] = logit;
}

// What follows the router product: inverse RMS, logit bias, routing and the normed row. Grid: T threadgroups of 32.
kernel void gate_route(
    device const X_T* x [[buffer(0)]],
    device const float* logits [[buffer(1)]],
    device const NORM_T* norm [[buffer(2)]],
    device const LOGIT_BIAS_T* logit_bias [[buffer(3)]],
    device const BIAS_T* bias [[buffer(4)]],
    device const SCALE_T* per_expert_scale [[buffer(5)]],
    device float* weights [[buffer(6)]],
    device int* ids [[buffer(7)]],
    device X_T* normed [[buffer(8)]],
    constant Rule& rule [[buffer(9)]],
    constant RuleNumbers& numbers [[buffer(10)]],
    constant GateSizes& sizes [[buffer(11)]],
    constant float& eps [[buffer(12)]],
    uint token [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float row[MAX_EXPERTS];
    threadgroup float value[MAX_EXPERTS];
    threadgroup float group_value[MAX_EXPERTS];
    device const X_T* mine = x + long(token) * sizes.stride_xt;
    float inverse_rms = 1.0f;
    if (sizes.has_norm != 0) {
        float squares = simd_sum(square_share(mine, sizes.H, lane, 32));
        inverse_rms = 1.0f / sqrt(squares / float(sizes.H) + eps);
    }
    for (long e = long(lane); e < rule.E; e += 32) {
        float logit = inverse_rms * logits[long(token) * rule.E + e];
        if (sizes.has_logit_bias != 0) logit += float(logit_bias[e]);
        row[e] = logit;
    }
    if (sizes.want_normed != 0) {
        write_normed(mine, norm, normed + long(token) * sizes.H, sizes.H, inverse_rms, lane, 32);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    route_row(row, value, group_value, bias, per_expert_scale, weights, ids, rule, numbers, long(token), lane);
}
