// Reads values as float32 or bfloat16 and finds a block's largest magnitude. Macros: CODEC_IN (0:
// float32, 1: bfloat16, 2: float16), CODEC_OUT, CODEC_BLOCK and the format's.

#include "common/types.cuh"

#define CODEC_MAKES_CODES (CODEC_OUT == 0)  // whether packed codes are made

#ifndef CODEC_THREADS
#define CODEC_THREADS 256
#endif
constexpr u32 kMagnitude = 0x7FFFFFFFu, kSign = 0x80000000u, kExponent = 0x7F800000u;
constexpr u32 kMantissa = 0x007FFFFFu, kNaN = 0x7FC00000u;
constexpr float kFloatMax = 3.4028234663852886e38f;
constexpr int kThreads = CODEC_THREADS, kChunk = 16,
              kParts = CODEC_BLOCK / kChunk;  // kParts: chunks of a block
constexpr int kWords = CODEC_BITS * kChunk / 32;
constexpr int kSlots = 256;  // pairs of counters, which the host sums

// What the whole tensor decides; made by `tensor_scales`.
struct Tensor {
    float scale, encode;  // NVFP4: 1 / S_enc, and S_enc / 6 (four-over-six: S_enc)
    int lowest;           // scale window: the lowest scale byte of a finite block
    float amax;           // NVFP4: the largest finite magnitude
};

#include "common/philox.cuh"

DEVICE u32 bits_of(float v) { return __float_as_uint(v); }
DEVICE float float_of(u32 v) { return __uint_as_float(v); }
DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// ---- input ----

#if CODEC_IN == 0
typedef u32 Raw;
#else
typedef u16 Raw;
#endif
constexpr int kPerVector = 16 / sizeof(Raw);  // elements of a 16-byte load

DEVICE float widen(u32 raw) {
#if CODEC_IN == 0
    return float_of(raw);
#elif CODEC_IN == 1
    return float_of(raw << 16);
#else
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(static_cast<u16>(raw)));
    return v;
#endif
}

// Element k of the words of a vector load.
template <int N>
DEVICE float element(const u32 (&words)[N], int k) {
#if CODEC_IN == 0
    return float_of(words[k]);
#elif CODEC_IN == 1
    return float_of(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
#else
    return widen(k % 2 ? words[k / 2] >> 16 : words[k / 2] & 0xFFFFu);
#endif
}

// ---- an activation of bfloat16 values, rounded once: as elementwise.cu has it ----

#if CODEC_ACTIVATE
#define COMMON_FULL_PRECISION 0
#include "common/vector_types.cuh"
#include "common/activation.cuh"
#if CODEC_ACTIVATE == 1
typedef Relu Active;
#else
typedef Gelu Active;
#endif
template <int N>
DEVICE void activate(u32 (&pairs)[N]) {
    const Active op;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float low = op(element(pairs, 2 * i), 0), high = op(element(pairs, 2 * i + 1), 0);
#ifdef __CUDA_ARCH__
        // unlike round_bf16x2 without a branch: NaN blocks need no exact NaN
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(high), "f"(low));
#else
        pairs[i] = round_bf16x2(low, high);
#endif
    }
}
template <int N>
DEVICE void activate(float (&values)[N]) {
    const Active op;
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = float_of(round_bf16(op(values[i], 0)) << 16);
}
#else
template <class T>
DEVICE void activate(T&) {}
#endif

// ---- block maxima ----

DEVICE float max_with_nan(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}

DEVICE u32 chunk_maximum(const float (&x)[kChunk]) {
    float m = fabsf(x[0]);
#pragma unroll
    for (int k = 1; k < kChunk; ++k) m = max_with_nan(m, fabsf(x[k]));
    return bits_of(m) & kMagnitude;
}

DEVICE u32 finite_maximum(const float (&x)[kChunk]) {
    u32 m = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        const u32 magnitude = bits_of(x[k]) & kMagnitude;
        m = larger(m, magnitude < kExponent ? magnitude : 0);
    }
    return m;
}

// The maximum over a block's `kParts` lanes, kApart from each other.
template <int kApart = 1>
DEVICE u32 across_lanes(u32 m) {
#pragma unroll
    for (int lane = 1; lane < kParts; lane *= 2)
        m = larger(m, __shfl_xor_sync(~0u, m, lane * kApart));
    return m;
}
