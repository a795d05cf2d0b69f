// RMSNorm (NORM 1) or LayerNorm (NORM 2) and the quantizer of what it gives, rounded once to bfloat16: what
// the kernels along rows alone and for both directions share.

#include "barriers.cuh"
// ---- after barriers ----  (the emulator has its own)

#if XIN == 0
typedef u32 Given;
#else
typedef u16 Given;
#endif
constexpr int kGivenWords = sizeof(Given) * kChunk / 4, kGivenVector = 16 / sizeof(Given);
constexpr int kSide = WIDE / kChunk;               // threads side by side
constexpr int kRowThreads = ROW_THREADS, kRowWarps = kRowThreads / 32;
constexpr int kEach = TALL * kSide / kRowThreads;  // rows of a thread: a power of two

struct Norm {
    const void* x;
    u8 *codes[2], *scales[2];
    u64 *counters, *posts;  // posts: zeros
    const float *weight, *bias;
    float *mean, *rstd;
    i64 rows, columns;
    float eps;
};

__device__ __forceinline__ float given(const u32* words, int k) {
#if XIN == 0
    return float_of(words[k]);
#else
    return float_of(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
#endif
}

// 16 bytes of the tile; zeros beyond the matrix.
__device__ __forceinline__ void load_vector(u32* words, const Given* from, bool inside) {
    uint4 four = {0, 0, 0, 0};
    if (WHOLE || inside) four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// A chunk of the tile; zeros beyond the matrix. `real`: columns from its first one on.
__device__ __forceinline__ void load_chunk(u32 (&words)[kGivenWords], const Given* from, i64 real) {
#pragma unroll
    for (int v = 0; v < kGivenWords / 4; ++v) load_vector(words + 4 * v, from + v * kGivenVector, v * kGivenVector < real);
}

__device__ __forceinline__ void load_factors(const Norm& p, float (&weight)[kChunk], float (&bias)[kChunk], i64 start, i64 real) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 4) {
        float4 w = {0, 0, 0, 0}, b = {0, 0, 0, 0};
        if (WHOLE || k < real) {
            w = __ldg(reinterpret_cast<const float4*>(p.weight + start + k));
            if (BIAS) b = __ldg(reinterpret_cast<const float4*>(p.bias + start + k));
        }
        weight[k] = w.x, weight[k + 1] = w.y, weight[k + 2] = w.z, weight[k + 3] = w.w;
        bias[k] = b.x, bias[k + 1] = b.y, bias[k + 2] = b.z, bias[k + 3] = b.w;
    }
}

// A chunk of the norm of a row, `real` of its values inside the matrix.
__device__ __forceinline__ void normalize(u32 (&raw)[kChunk / 2], const u32 (&words)[kGivenWords], float middle, float factor,
                                          const float (&weight)[kChunk], const float (&bias)[kChunk], i64 real) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 2) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float v = given(words, k + i);
            if (NORM == 2) v = __fsub_rn(v, middle);
            y[i] = __fmul_rn(__fmul_rn(v, factor), weight[k + i]);
            if (BIAS) y[i] = __fadd_rn(y[i], bias[k + i]);
        }
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw[k / 2]) : "f"(y[1]), "f"(y[0]));
        if (!WHOLE && k >= real) raw[k / 2] = 0;
    }
}
