// Weights as numbers, whatever they lie in: four neighbours of a row at a time, from a column that is a multiple of four.
// Macros: WIDE. A row of blocks is bytes; layouts are those of moefuse/quant/blocks.py.

// The half at p, which need not be aligned.
inline float half_at(device const uchar* p) { return float(as_type<half>(ushort(uint(p[0]) | (uint(p[1]) << 8)))); }

inline int signed_byte(uchar value) { return value < 128 ? int(value) : int(value) - 256; }

// The 6-bit scale (x) and minimum (y) of sub-block j of a Q4_K or Q5_K block, from its 12 packed bytes.
inline float2 scale_and_least(device const uchar* packed, int j) {
    uint later = packed[j + 4];
    if (j < 4) return float2(float(packed[j] & 63u), float(later & 63u));
    uint scale = (later & 15u) | ((uint(packed[j - 4]) >> 6) << 4);
    uint least = (later >> 4) | ((uint(packed[j]) >> 6) << 4);
    return float2(float(scale), float(least));
}

// Values at to at + 3 of a block; at is a multiple of four.
inline float4 decode4(int format, device const uchar* block, int at) {
    float4 found = float4(0.0f);
    int run = at / 32;
    int l = at % 32;
    if (format == Q8_0) {
        for (int i = 0; i < 4; ++i) found[i] = float(signed_byte(block[2 + l + i]));
        return half_at(block) * found;
    }
    if (format == Q4_0) {
        for (int i = 0; i < 4; ++i) {
            uint both = block[2 + l % 16 + i];
            found[i] = float(l < 16 ? both & 15u : both >> 4) - 8.0f;
        }
        return half_at(block) * found;
    }
    if (format == Q6_K) {
        int part = run % 4;
        device const uchar* low = block + 64 * (run / 4) + 32 * (part % 2) + l;
        device const uchar* high = block + 128 + 32 * (run / 4) + l;
        for (int i = 0; i < 4; ++i) {
            uint q = ((uint(low[i]) >> (4 * (part / 2))) & 15u) | (((uint(high[i]) >> (2 * part)) & 3u) << 4);
            found[i] = float(q) - 32.0f;
        }
        float scale = float(signed_byte(block[192 + 2 * run + l / 16]));
        return half_at(block + 208) * scale * found;
    }
    if (format != Q4_K && format != Q5_K) return float4(not_a_number());
    float2 factors = scale_and_least(block + 4, run);
    device const uchar* nibbles = block + (format == Q4_K ? 16 : 48) + 32 * (run / 2) + l;
    for (int i = 0; i < 4; ++i) {
        uint q = (uint(nibbles[i]) >> (4 * (run % 2))) & 15u;
        if (format == Q5_K) q |= ((uint(block[16 + l + i]) >> run) & 1u) << 4;
        found[i] = float(q);
    }
    return half_at(block) * factors.x * found - half_at(block + 2) * factors.y;
}

inline int block_values(int format) { return format == Q8_0 || format == Q4_0 ? 32 : 256; }

inline int block_bytes(int format) {
    if (format == Q4_K) return 144;
    if (format == Q6_K) return 210;
    if (format == Q8_0) return 34;
    return format == Q4_0 ? 18 : 176;
}

// Columns k to k + 3 of a row of blocks, or of numbers.
inline float4 weight4(int format, device const uchar* row, long k) {
    int values = block_values(format);
    return decode4(format, row + k / values * block_bytes(format), int(k % values));
}

template <typename T>
inline float4 weight4(int format, device const T* row, long k) {
    return load4<T, WIDE>(row + k);
}

// This lane's share of a row's product with h; only numbers may leave a rest of K over.
template <typename T>
inline float row_share(int format, device const float* h, device const T* row, long K, uint lane) {
    float4 sum = float4(0.0f);
    long whole = K / 4 * 4;
    for (long k = 4 * long(lane); k < whole; k += 128) sum += load4<float, WIDE>(h + k) * weight4(format, row, k);
    float total = sum4(sum);
    long k = whole + long(lane);
    if (k < K) total += h[k] * float(row[k]);
    return total;
}
