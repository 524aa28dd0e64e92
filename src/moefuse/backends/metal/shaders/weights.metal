// Weights as numbers, whatever they lie in: four neighbours of a row at a time, from a column divisible by four.
// Macro: WIDE. A row of blocks is bytes, laid out as in moefuse/quant/blocks.py. Each format is one function
// decode_<format>: values at to at + 3 of a block. codes.py finds them by their names and writes FORMATS.

// The format of plain numbers.
constant int NUMBERS = 0;

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

// Four of the nibbles of a Q4_K or Q5_K block, from value `at` on.
inline float4 nibbles4(device const uchar* nibbles, int at) {
    int run = at / 32;
    float4 found = float4(0.0f);
    for (int i = 0; i < 4; ++i) {
        uint both = nibbles[32 * (run / 2) + at % 32 + i];
        found[i] = float((both >> (4 * (run % 2))) & 15u);
    }
    return found;
}

inline float4 scaled_from_least(device const uchar* block, int at, float4 found) {
    float2 factors = scale_and_least(block + 4, at / 32);
    return half_at(block) * factors.x * found - half_at(block + 2) * factors.y;
}

inline float4 decode_Q4_K(device const uchar* block, int at) {
    return scaled_from_least(block, at, nibbles4(block + 16, at));
}

inline float4 decode_Q6_K(device const uchar* block, int at) {
    int run = at / 32;
    int l = at % 32;
    int part = run % 4;
    device const uchar* low = block + 64 * (run / 4) + 32 * (part % 2) + l;
    device const uchar* high = block + 128 + 32 * (run / 4) + l;
    float4 found = float4(0.0f);
    for (int i = 0; i < 4; ++i) {
        uint q = ((uint(low[i]) >> (4 * (part / 2))) & 15u) | (((uint(high[i]) >> (2 * part)) & 3u) << 4);
        found[i] = float(q) - 32.0f;
    }
    float scale = float(signed_byte(block[192 + 2 * run + l / 16]));
    return half_at(block + 208) * scale * found;
}

inline float4 decode_Q8_0(device const uchar* block, int at) {
    float4 found = float4(0.0f);
    for (int i = 0; i < 4; ++i) found[i] = float(signed_byte(block[2 + at + i]));
    return half_at(block) * found;
}

// Four of the 32 nibbles in 16 bytes, from value `at` on: the low ones first, then the high ones.
inline uint4 nibbles4_of_32(device const uchar* nibbles, int at) {
    uint4 found = uint4(0);
    for (int i = 0; i < 4; ++i) found[i] = (uint(nibbles[at % 16 + i]) >> (4 * (at / 16))) & 15u;
    return found;
}

inline float4 decode_Q4_0(device const uchar* block, int at) {
    return half_at(block) * (float4(nibbles4_of_32(block + 2, at)) - 8.0f);
}

inline float4 decode_Q4_1(device const uchar* block, int at) {
    return half_at(block) * float4(nibbles4_of_32(block + 4, at)) + half_at(block + 2);
}

// Likewise of 32 numbers of 5 bits: 4 bytes of high bits, one after the other, then the nibbles.
inline float4 fives4_of_32(device const uchar* bits, int at) {
    uint4 found = nibbles4_of_32(bits + 4, at);
    for (int i = 0; i < 4; ++i) found[i] |= ((uint(bits[at / 8]) >> (at % 8 + i)) & 1u) << 4;
    return float4(found);
}

inline float4 decode_Q5_0(device const uchar* block, int at) {
    return half_at(block) * (fives4_of_32(block + 2, at) - 16.0f);
}

inline float4 decode_Q5_1(device const uchar* block, int at) {
    return half_at(block) * fives4_of_32(block + 4, at) + half_at(block + 2);
}

// What the nibbles of the IQ4 formats and of MXFP4 stand for: IQ4_CODES and MXFP4_CODES of moefuse/quant/blocks.py.
constant float IQ4_CODES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constant float MXFP4_CODES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

inline float4 coded4(constant const float* codes, uint4 q) {
    return float4(codes[q.x], codes[q.y], codes[q.z], codes[q.w]);
}

inline float4 decode_IQ4_NL(device const uchar* block, int at) {
    return half_at(block) * coded4(IQ4_CODES, nibbles4_of_32(block + 2, at));
}

inline float4 decode_IQ4_XS(device const uchar* block, int at) {
    int run = at / 32;
    uint low = (uint(block[4 + run / 2]) >> (4 * (run % 2))) & 15u;
    uint high = (uint(block[2 + run / 4]) >> (2 * (run % 4))) & 3u;
    float scale = float(low | (high << 4)) - 32.0f;
    return half_at(block) * scale * coded4(IQ4_CODES, nibbles4_of_32(block + 8 + 16 * run, at % 32));
}

inline float4 decode_MXFP4(device const uchar* block, int at) {
    uint e = block[0];
    // 2**(e - 128), written as bits: the two smallest are denormal.
    float scale = as_type<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    return scale * coded4(MXFP4_CODES, nibbles4_of_32(block + 1, at));
}

inline float4 decode_Q5_K(device const uchar* block, int at) {
    float4 found = nibbles4(block + 48, at);
    for (int i = 0; i < 4; ++i) found[i] += float(((uint(block[16 + at % 32 + i]) >> (at / 32)) & 1u) << 4);
    return scaled_from_least(block, at, found);
}

// Four of the 2-bit numbers of a Q2_K or Q3_K block, from value `at` on.
inline uint4 twos4(device const uchar* twos, int at) {
    uint4 found = uint4(0);
    for (int i = 0; i < 4; ++i) found[i] = (uint(twos[32 * (at / 128) + at % 32 + i]) >> (2 * (at / 32 % 4))) & 3u;
    return found;
}

inline float4 decode_Q2_K(device const uchar* block, int at) {
    uint both = block[at / 16];
    float least = half_at(block + 82) * float(both >> 4);
    return half_at(block + 80) * float(both & 15u) * float4(twos4(block + 16, at)) - least;
}

inline float4 decode_Q3_K(device const uchar* block, int at) {
    int j = at / 16;
    uint low = (uint(block[96 + j % 8]) >> (4 * (j / 8))) & 15u;
    uint high = (uint(block[104 + j % 4]) >> (2 * (j / 4))) & 3u;
    float scale = float(low | (high << 4)) - 32.0f;
    uint4 found = twos4(block + 32, at);
    for (int i = 0; i < 4; ++i) found[i] |= ((uint(block[at % 32 + i]) >> (at / 32)) & 1u) << 2;
    return half_at(block + 108) * scale * (float4(found) - 4.0f);
}

// A number in e4m3: exponent and mantissa go where a float has them. Denormal ones are whole numbers over 512.
inline float e4m3(uint code) {
    uint size = code & 127u;
    float found = size < 8 ? float(size) / 512.0f : as_type<float>((size << 20) + (120u << 23));
    if (size == 127u) return not_a_number();
    return code < 128u ? found : -found;
}

inline float4 decode_FP8(device const uchar* block, int at) {
    uint bits = uint(block[0]) | (uint(block[1]) << 8) | (uint(block[2]) << 16) | (uint(block[3]) << 24);
    float4 found = float4(0.0f);
    for (int i = 0; i < 4; ++i) found[i] = e4m3(block[4 + at + i]);
    return as_type<float>(bits) * found;
}

// Columns k to k + 3 of a row of blocks, or of numbers. A format that is not here gives NaN.
inline float4 weight4(int format, device const uchar* row, long k) {
#define CHOOSE(code, name, values, bytes) \
    case code: return decode_##name(row + k / values * bytes, int(k % values));
    switch (format) { FORMATS(CHOOSE) }
#undef CHOOSE
    return float4(not_a_number());
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
