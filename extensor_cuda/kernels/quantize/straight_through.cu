// The gradient that a transformed and clipped operand lets through: zero where a mask's bit is
// clear, then the inverse of the Hadamard transform (extensor/quant/hadamard.py) along rows, whose
// order of operations decides the bits. A thread has a chunk of 16 values, neighbouring lanes have
// the chunks of one transform.
//
// Macros: ST_SIZE (of the transform: 16, 32, 64 or 128), ST_FACTOR (1 / sqrt of it), ST_MASKED.
// Compiled with --fmad=false.

#include "common/types.cuh"

constexpr int kThreads = 256, kChunk = 16, kChunks = ST_SIZE / kChunk;

// g (rows, coded), coded a multiple of ST_SIZE; mask (rows, coded / 8), a bit a value, the first in
// the lowest; signs of ST_SIZE values, set where negative. Writes (rows, length), length <= coded.
extern "C" __global__ void __launch_bounds__(kThreads) straight_through(const float* __restrict__ g,
    const u8* __restrict__ mask, float* __restrict__ out, i64 rows, i64 coded, i64 length,
    u32 sign0, u32 sign1, u32 sign2, u32 sign3) {
    const i64 item = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i64 chunks = coded / kChunk, row = item / chunks, at = item % chunks * kChunk;
    const bool real = row < rows;  // a transform's lanes are real together
    const u32 place = static_cast<u32>(item % chunks) % kChunks;
    float v[kChunk];
    if (real) {
        const float4* from = reinterpret_cast<const float4*>(g + row * coded + at);
#pragma unroll
        for (int k = 0; k < kChunk / 4; ++k) {
            const float4 four = from[k];
            v[4 * k] = four.x, v[4 * k + 1] = four.y, v[4 * k + 2] = four.z, v[4 * k + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = 0;
    }
#if ST_MASKED
    const u32 bits =
        real ? reinterpret_cast<const u16*>(mask)[row * chunks + item % chunks] : 0xFFFFu;
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
        if (!(bits >> k & 1)) v[k] = 0;
#endif
#pragma unroll
    for (int stride = 1; stride < kChunk; stride *= 2) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            if (k & stride) continue;
            const float low = v[k], high = v[k + stride];
            v[k] = __fadd_rn(low, high);
            v[k + stride] = __fsub_rn(low, high);
        }
    }
#pragma unroll
    for (int lane = 1; lane < kChunks; lane *= 2) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            const float other = __shfl_xor_sync(~0u, v[k], lane);
            v[k] = place & lane ? __fsub_rn(other, v[k]) : __fadd_rn(v[k], other);
        }
    }
    const u32 word = place < 2 ? sign0 : place < 4 ? sign1 : place < 6 ? sign2 : sign3;
    const u32 negative = word >> (place % 2 * kChunk);
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        v[k] = __fmul_rn(v[k], ST_FACTOR);
        v[k] = __uint_as_float(__float_as_uint(v[k]) ^ (negative >> k << 31));
    }
    if (!real) return;
    float* to = out + row * length + at;
    if (at + kChunk <= length && length % 4 == 0) {
#pragma unroll
        for (int k = 0; k < kChunk / 4; ++k)
            reinterpret_cast<float4*>(to)[k] =
                float4{v[4 * k], v[4 * k + 1], v[4 * k + 2], v[4 * k + 3]};
    } else {
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            if (at + k < length) to[k] = v[k];
    }
}
