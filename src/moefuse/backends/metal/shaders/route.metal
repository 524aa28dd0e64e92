// route: logits to experts and weights, one simdgroup per token.
// Macros: LOGITS_T, BIAS_T, SCALE_T element types; EXPERTS_PER_LANE, a power of two, 32 times which covers E.

#define MAX_EXPERTS (32 * EXPERTS_PER_LANE)

// The rule of a call; route.py hands it over as a list of integers in this order.
struct Rule {
    long E;
    long top_k;
    long score;
    long renormalize;
    long after;
    long groups;
    long top_groups;
    long top2;
    long has_softcap;
    long has_bias;
    long has_scale;
};

struct RuleNumbers {
    float scale;
    float softcap;
    float floor;
};

// A float's bits as an unsigned number of the same order; both zeros are one. 0 stands for "no candidate".
inline uint ordered(float x) {
    uint bits = as_type<uint>(x == 0.0f ? 0.0f : x);
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// log(1 + t) / t for t from 0 to 1.
inline float log1p_ratio(float t) {
    float s = t / (2.0f + t);
    s = s * s;
    float q = s * (1.0f / 17.0f) + 1.0f / 15.0f;
    q = q * s + 1.0f / 13.0f;
    q = q * s + 1.0f / 11.0f;
    q = q * s + 1.0f / 9.0f;
    q = q * s + 1.0f / 7.0f;
    q = q * s + 1.0f / 5.0f;
    q = q * s + 1.0f / 3.0f;
    return 2.0f / (2.0f + t) * (q * s + 1.0f);
}

// e**(factor * (x - top)), for x <= top, with what the difference lacks.
inline float exp_below(float x, float top, float factor) {
    float away = x - top;
    float back = away - x;
    float low = (x - (away - back)) - (top + back);
    return number(exp_parts(at_least(factor * away, -1000.0f), factor * low));
}

// How the exponential of a sum of logits enters a score.
inline float exponent_of(long score) { return score == SQRTSOFTPLUS ? 0.5f : 1.0f; }

// A sigmoid or sqrtsoftplus score over e**(exponent_of(score) * top), top <= 0. A score that is not here gives NaN.
inline float score_over(long score, float x, float top) {
    float t = number(exp_parts(at_least(-fabs(x), -200.0f), 0.0f));
    float scaled = exp_below(x < 0.0f ? x : 0.0f, top, exponent_of(score));
    if (score == SIGMOID) return scaled / (1.0f + t);
    if (score != SQRTSOFTPLUS) return not_a_number();
    float ratio = log1p_ratio(t);
    return x < 0.0f ? scaled * sqrt(ratio) : sqrt(x + t * ratio);
}

// Keep the best groups: clears the candidacy of experts outside them. value holds the selection score of each
// candidate and -inf elsewhere; E floats, as has group_value.
inline void keep_groups(threadgroup float* value, threadgroup float* group_value, constant Rule& rule, uint lane) {
    int groups = int(rule.groups);
    int size = int(rule.E / rule.groups);
    for (int g = int(lane); g < groups; g += 32) {
        float first = negative_infinity();
        float second = negative_infinity();
        for (int i = 0; i < size; ++i) {
            float v = value[g * size + i];
            if (v > first) {
                second = first;
                first = v;
            } else if (v > second) {
                second = v;
            }
        }
        bool both = rule.top2 != 0 && second > negative_infinity();
        group_value[g] = both ? first + second : first;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int g = int(lane); g < groups; g += 32) {
        float mine = group_value[g];
        // A group is kept when fewer than top_groups stand before it: larger, or equal with a lower id.
        int before = 0;
        for (int other = 0; other < groups; ++other) {
            float theirs = group_value[other];
            if (theirs > mine || (theirs == mine && other < g)) ++before;
        }
        if (before < int(rule.top_groups)) continue;
        for (int i = 0; i < size; ++i) value[g * size + i] = negative_infinity();
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Route one token, by one whole simdgroup. logits: E floats in threadgroup memory, behind a barrier.
// value and group_value: MAX_EXPERTS floats of scratch each, touched when there are groups.
template <typename B, typename P>
inline void route_row(
    threadgroup const float* logits,
    threadgroup float* value,
    threadgroup float* group_value,
    device const B* bias,
    device const P* per_expert_scale,
    device float* weights,
    device int* ids,
    constant Rule& rule,
    constant RuleNumbers& numbers,
    long row,
    uint lane) {
    int E = int(rule.E);
    int top_k = int(rule.top_k);
    float scores[EXPERTS_PER_LANE];
    uint keys[EXPERTS_PER_LANE];
    // A row with NaN or +inf among its logits or biases fails closed: nobody is a candidate.
    uint failed = 0;
    float top = negative_infinity();
    for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
        int e = int(lane) + 32 * i;
        scores[i] = 0.0f;
        keys[i] = 0;
        if (e >= E) continue;
        float z = logits[e];
        if (is_nan(z) || is_positive_infinity(z)) failed = 1;
        if (rule.has_bias != 0) {
            float b = float(bias[e]);
            if (is_nan(b) || is_positive_infinity(b)) failed = 1;
        }
        if (is_negative_infinity(z)) continue;
        if (rule.has_softcap != 0) z = numbers.softcap * stable_tanh(z / numbers.softcap);
        scores[i] = z;
        keys[i] = 1;
        top = max(top, z);
    }
    failed = simd_max(failed);
    top = simd_max(top);
    float sum = 0.0f;
    if (rule.score == SOFTMAX) {
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            if (keys[i] == 0) continue;
            scores[i] = exp(scores[i] - top);
            sum += scores[i];
        }
        sum = simd_sum(sum);
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            if (keys[i] != 0) scores[i] /= sum;
        }
    } else {
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            if (keys[i] == 0) continue;
            scores[i] = score_over(rule.score, scores[i], 0.0f);
        }
    }
    // Every score rises with its logit, so without a bias the logit decides: ids do not hang on how exp rounds.
    for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
        int e = int(lane) + 32 * i;
        if (e >= E) continue;
        float key = logits[e];
        float group_key = rule.top2 != 0 ? scores[i] : key;
        bool candidate = keys[i] != 0 && failed == 0;
        if (rule.has_bias != 0) {
            float b = float(bias[e]);
            candidate = candidate && !is_negative_infinity(b);
            key = scores[i] + b;
            group_key = key;
        }
        keys[i] = candidate ? ordered(key) : 0;
        if (rule.groups > 1) value[e] = candidate ? group_key : negative_infinity();
    }
    if (rule.groups > 1) {
        simdgroup_barrier(mem_flags::mem_threadgroup);
        keep_groups(value, group_value, rule, lane);
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            int e = int(lane) + 32 * i;
            if (e < E && is_negative_infinity(value[e])) keys[i] = 0;
        }
    }

    // Lane j % 32 keeps slot j: the largest key first, the lowest id among equals.
    int chosen_id[2] = {E, E};
    for (int j = 0; j < top_k; ++j) {
        uint best = 0;
        uint at = 0xffffffffu;
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            if (keys[i] > best) {
                best = keys[i];
                at = lane + 32u * uint(i);
            }
        }
        uint winner = simd_max(best);
        if (winner == 0) break;
        uint id = simd_min(best == winner ? at : 0xffffffffu);
        for (int i = 0; i < EXPERTS_PER_LANE; ++i) {
            if (lane + 32u * uint(i) == id) keys[i] = 0;
        }
        if (uint(j) % 32u == lane) chosen_id[j / 32] = int(id);
    }

    // Selected scores are share * base, the largest share near 1: weights can be renormalised where float has no such
    // score.
    float x[2];
    float highest = negative_infinity();
    for (int i = 0; i < 2; ++i) {
        x[i] = chosen_id[i] < E ? logits[chosen_id[i]] : negative_infinity();
        if (rule.has_softcap != 0 && chosen_id[i] < E) x[i] = numbers.softcap * stable_tanh(x[i] / numbers.softcap);
        highest = max(highest, x[i]);
    }
    highest = simd_max(highest);
    if (is_negative_infinity(highest)) highest = 0.0f;
    if (rule.score != SOFTMAX) highest = min(highest, 0.0f);
    float below = rule.score == SOFTMAX ? highest - top : exponent_of(rule.score) * highest;
    Parts base = exp_parts(at_least(below, -1000.0f), 0.0f);
    if (rule.score == SOFTMAX && sum > 0.0f) base.p /= sum;
    float share[2];
    float factor[2];
    for (int i = 0; i < 2; ++i) {
        bool live = chosen_id[i] < E;
        share[i] = 0.0f;
        if (live && rule.score == SOFTMAX) share[i] = exp_below(x[i], highest, 1.0f);
        if (live && rule.score != SOFTMAX) share[i] = score_over(rule.score, x[i], highest);
        factor[i] = live ? numbers.scale : 0.0f;
        if (rule.has_scale != 0 && live) factor[i] *= float(per_expert_scale[chosen_id[i]]);
    }
    float total = simd_sum(share[0] + share[1]);
    // 2**64 lifts both sides out of the numbers that lose digits.
    float lifted = numbers.floor * 1.8446744073709552e19f;
    bool held = numbers.floor > 0.0f && times_power(total * base.p, base.k + 64) <= lifted;
    float chosen[2];
    for (int i = 0; i < 2; ++i) {
        chosen[i] = times_power(share[i] * base.p, base.k);
        if (rule.renormalize != 0) {
            float raised = times_power(share[i] * base.p, base.k + 64);
            chosen[i] = held ? raised / lifted : share[i] / (total > 0.0f ? total : 1.0f);
        }
        chosen[i] *= factor[i];
    }
    if (rule.after != 0) {
        // What was divided before cancels.
        float scaled = simd_sum(share[0] * factor[0] + share[1] * factor[1]);
        for (int i = 0; i < 2; ++i) {
            if (scaled != 0.0f) chosen[i] = share[i] * factor[i] / scaled;
        }
    }
    for (int i = 0; i < 2; ++i) {
        int j = int(lane) + 32 * i;
        if (j >= top_k) continue;
        long place = row * long(top_k) + long(j);
        weights[place] = chosen_id[i] < E ? chosen[i] : 0.0f;
        ids[place] = chosen_id[i];
    }
}

// Buffers: logits [T, E] LOGITS_T with row stride stride_t; bias, per_expert_scale [E]; weights, ids [T, top_k].
// Grid: T threadgroups of 32.
kernel void route(
    device const LOGITS_T* logits [[buffer(0)]],
    device const BIAS_T* bias [[buffer(1)]],
    device const SCALE_T* per_expert_scale [[buffer(2)]],
    device float* weights [[buffer(3)]],
    device int* ids [[buffer(4)]],
    constant Rule& rule [[buffer(5)]],
    constant RuleNumbers& numbers [[buffer(6)]],
    constant long& stride_t [[buffer(7)]],
    uint token [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float row[MAX_EXPERTS];
    threadgroup float value[MAX_EXPERTS];
    threadgroup float group_value[MAX_EXPERTS];
    device const LOGITS_T* mine = logits + long(token) * stride_t;
    for (int e = int(lane); e < int(rule.E); e += 32) row[e] = float(mine[e]);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    route_row(row, value, group_value, bias, per_expert_scale, weights, ids, rule, numbers, long(token), lane);
}
