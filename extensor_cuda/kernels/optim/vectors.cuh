// Four values of a thread in float32 or bfloat16: read, written, decoded, rounded. `four`: whole
// and aligned; else `left` of them are there. No macros.

#include "common/types.cuh"

constexpr u32 kMagnitude = 0x7FFFFFFFu, kExponent = 0x7F800000u, kMantissa = 0x007FFFFFu;
constexpr int kHalves = 8192;  // bfloat16 values whose random words are one Philox block

DEVICE u32 bits_of(float v) { return __float_as_uint(v); }
DEVICE float float_of(u32 v) { return __uint_as_float(v); }

typedef float4 Floatx4;
typedef uint2 Bf16x4;

DEVICE Floatx4 load(const float* from, bool four, int left) {
    if (four) return *reinterpret_cast<const float4*>(from);
    float4 v = {};
    if (left > 0) v.x = from[0];
    if (left > 1) v.y = from[1];
    if (left > 2) v.z = from[2];
    if (left > 3) v.w = from[3];
    return v;
}

DEVICE void store(float* to, Floatx4 v, bool four, int left) {
    if (four) {
        __stcg(reinterpret_cast<float4*>(to), v);  // an assignment would be split into four
        return;
    }
    if (left > 0) to[0] = v.x;
    if (left > 1) to[1] = v.y;
    if (left > 2) to[2] = v.z;
    if (left > 3) to[3] = v.w;
}

DEVICE void decode(Floatx4 v, float (&out)[4]) {
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
}

DEVICE void encode(const float (&v)[4], u32, u32, Floatx4& out) {
    out.x = v[0], out.y = v[1], out.z = v[2], out.w = v[3];
}

DEVICE Bf16x4 load(const u16* from, bool four, int left) {
    if (four) return *reinterpret_cast<const uint2*>(from);
    u32 half[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) half[k] = k < left ? from[k] : 0;
    return uint2{half[0] | half[1] << 16, half[2] | half[3] << 16};
}

DEVICE void store(u16* to, Bf16x4 pairs, bool four, int left) {
    if (four) {
        *reinterpret_cast<uint2*>(to) = pairs;
        return;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
        if (k < left) to[k] = static_cast<u16>((k < 2 ? pairs.x : pairs.y) >> (k % 2 * 16));
}

DEVICE void decode(Bf16x4 pairs, float (&out)[4]) {
    out[0] = float_of(pairs.x << 16), out[1] = float_of(pairs.x & 0xFFFF0000u);
    out[2] = float_of(pairs.y << 16), out[3] = float_of(pairs.y & 0xFFFF0000u);
}

// The 16 cut bits carry when they exceed the random ones; two values share a word's halves.
DEVICE u32 round_pair(float low, float high, u32 word) {
    u32 a = bits_of(low), b = bits_of(high);
    if ((a & kExponent) != kExponent) a += word & 0xFFFFu;
    if ((b & kExponent) != kExponent) b += word >> 16;
    return __byte_perm(a, b, 0x7632);
}

DEVICE void encode(const float (&v)[4], u32 low, u32 high, Bf16x4& out) {
    out = uint2{round_pair(v[0], v[1], low), round_pair(v[2], v[3], high)};
}
