// Rounds rows of values to bfloat16 for the GEMM, splits float32 into three bfloat16 matrices, and
// adds the results of split-K in order.
//
// Macros: PREPARE_IN (0: float32, 1: bfloat16, 2: float16), PREPARE_WHOLE (contiguous rows, a
// multiple of 8 values in all, 16-byte aligned), PREPARE_OUT_BF16.

#include "common/types.cuh"

#if PREPARE_IN == 0
typedef u32 Raw;
#else
typedef u16 Raw;
#endif

DEVICE u32 nearest(u32 bits) {
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return nan ? (bits >> 16 & 0x8000u) | 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

DEVICE u32 rounded(u32 raw) {
#if PREPARE_IN == 0
    return nearest(raw);
#elif PREPARE_IN == 1
    return raw;
#else
    // Moves float16's fields to float32's. Subnormals take an exact subtraction.
    const u32 sign = (raw & 0x8000u) << 16, magnitude = raw & 0x7FFFu;
    u32 bits = magnitude << 13;
    if (magnitude >= 0x7C00u) bits += 0x70000000u;
    else if (magnitude >= 0x0400u) bits += 0x38000000u;
    else bits = __float_as_uint(__fsub_rn(__uint_as_float(bits + 0x38800000u), 6.103515625e-05f));
    return nearest(sign | bits);
#endif
}

constexpr int kThreads = 256;

// x (rows, columns) -> out (rows, pitch), with an even pitch and zeros beyond the columns.
extern "C" __global__ void __launch_bounds__(256)
    cast(const Raw* __restrict__ x, u32* __restrict__ out, i64 rows, i64 columns, i64 pitch) {
    const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
#if PREPARE_WHOLE
    constexpr int kLoads = sizeof(Raw) / 2;
    if (thread * 8 >= rows * columns) return;
    u32 words[4 * kLoads], packed[4];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const uint4 four = reinterpret_cast<const uint4*>(x)[thread * kLoads + i];
        words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z,
                  words[4 * i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#if PREPARE_IN == 0
        packed[i] = rounded(words[2 * i]) | rounded(words[2 * i + 1]) << 16;
#else
        packed[i] = rounded(words[i] & 0xFFFFu) | rounded(words[i] >> 16) << 16;
#endif
    reinterpret_cast<uint4*>(out)[thread] = uint4{packed[0], packed[1], packed[2], packed[3]};
#else
    const i64 row = thread * 2 / pitch, column = thread * 2 % pitch;
    if (row >= rows) return;
    const Raw* from = x + row * columns;
    const u32 low = column < columns ? rounded(from[column]) : 0;
    const u32 high = column + 1 < columns ? rounded(from[column + 1]) : 0;
    out[thread] = low | high << 16;
#endif
}

#if PREPARE_IN == 0
// x (rows, columns) -> three matrices (3 rows, pitch), smallest values first, that sum to x
// exactly: each holds 8 more bits. NaN and infinity are in the last one only.
extern "C" __global__ void __launch_bounds__(256) split_bf16x3(
    const u32* __restrict__ x, u32* __restrict__ out, i64 rows, i64 columns, i64 pitch) {
    const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i64 row = thread * 2 / pitch, column = thread * 2 % pitch;
    if (row >= rows) return;
    u32 made[3] = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        if (column + i >= columns) continue;
        const u32 bits = x[row * columns + column + i];
        if ((bits & 0x7F800000u) == 0x7F800000u) {
            made[2] |= (bits & 0x7FFFFFu ? 0x7FC0u : bits >> 16) << (16 * i);
            continue;
        }
        float rest = __uint_as_float(bits);
#pragma unroll
        for (int part = 2; part >= 0; --part) {
            const u32 upper = __float_as_uint(rest) & 0xFFFF0000u;
            made[part] |= upper >> 16 << (16 * i);
            rest = __fsub_rn(rest, __uint_as_float(upper));
        }
    }
#pragma unroll
    for (int part = 0; part < 3; ++part) out[part * rows * pitch / 2 + thread] = made[part];
}
#endif

// Adds the first `rows` rows of `parts` (splits, below, 4 quads) in order, and the bias last.
extern "C" __global__ void __launch_bounds__(256)
    add_splits(const float4* __restrict__ parts, const float* __restrict__ bias,
        void* __restrict__ out, i64 count, i64 below, i64 rows, i64 columns, i64 quads, i64 pitch) {
    const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (thread >= rows * quads) return;
    float4 sum = parts[thread];
#pragma unroll 4
    for (i64 part = 1; part < count; ++part) {
        const float4 next = parts[part * below * quads + thread];
        sum.x = __fadd_rn(sum.x, next.x), sum.y = __fadd_rn(sum.y, next.y);
        sum.z = __fadd_rn(sum.z, next.z), sum.w = __fadd_rn(sum.w, next.w);
    }
    const i64 row = thread / quads, column = thread % quads * 4;
    if (bias) {
        const i64 last = columns - 1;
        sum.x = __fadd_rn(sum.x, bias[column]);
        sum.y = __fadd_rn(sum.y, bias[column + 1 < last ? column + 1 : last]);
        sum.z = __fadd_rn(sum.z, bias[column + 2 < last ? column + 2 : last]);
        sum.w = __fadd_rn(sum.w, bias[column + 3 < last ? column + 3 : last]);
    }
    const i64 at = (row * pitch + column) / 4;  // the pitch is a multiple of 4
#if PREPARE_OUT_BF16
    static_cast<uint2*>(out)[at] =
        uint2{nearest(__float_as_uint(sum.x)) | nearest(__float_as_uint(sum.y)) << 16,
            nearest(__float_as_uint(sum.z)) | nearest(__float_as_uint(sum.w)) << 16};
#else
    static_cast<float4*>(out)[at] = sum;
#endif
}
