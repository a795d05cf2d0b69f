// Packed MXFP4 rows -> E5M2 codes under one power of two per row. A block of threads has a row.
//
// With s the largest scale byte among a row's blocks that are neither zero nor NaN, a value is
// e2m1 2^(t - s + TOP) 2^(s - 127 - TOP): the first two factors are exact in E5M2 while s - t is at
// most SPAN, and the last is the row's exponent. A wider row raises the flag. NaN blocks become NaN.
//
// No headers but ours; BLOCK (16 to 128), TOP and SPAN are macros.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#include "rebased.cuh"

constexpr int kThreads = 128, kNaN = 255;

extern "C" __global__ void __launch_bounds__(kThreads)
rebase(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out,
       int* __restrict__ exponents, u32* __restrict__ flag, i64 blocks) {
    const i64 row = blockIdx.x;
    const uint2* from = reinterpret_cast<const uint2*>(codes + row * blocks * (BLOCK / 2));
    uint4* to = reinterpret_cast<uint4*>(out + row * blocks * BLOCK);
    scales += row * blocks;
    __shared__ int top, bottom;
    if (threadIdx.x == 0) top = -1, bottom = kNaN;
    __syncthreads();
    for (i64 b = threadIdx.x; b < blocks; b += kThreads) {
        u32 any = 0;
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i) {
            const uint2 words = from[b * (BLOCK / 16) + i];
            any |= words.x | words.y;
        }
        const int scale = scales[b];
        if ((any & 0x77777777u) && scale != kNaN) {
            atomicMax(&top, scale);
            atomicMin(&bottom, scale);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        exponents[row] = top < 0 ? 0 : top - 127 - TOP;
        if (top - bottom > SPAN) atomicOr(flag, 1u);
    }
    for (i64 b = threadIdx.x; b < blocks; b += kThreads) {
        const int scale = scales[b];
        // Beyond the window lie only zero blocks, or rows whose codes are not used.
        const int shift = max(min(scale - top + TOP, TOP), TOP - SPAN);
        const float unit = __uint_as_float(static_cast<u32>(shift + 127) << 23);
        uint2 table = e5m2_table(unit);
        if (scale == kNaN) table = uint2{0x7F7F7F7Fu, 0x7F7F7F7Fu};
#pragma unroll
        for (int i = 0; i < BLOCK / 16; ++i) {
            const uint2 words = from[b * (BLOCK / 16) + i];
            to[b * (BLOCK / 16) + i] =
                uint4{look_up(words.x, table), look_up(words.x >> 16, table),
                      look_up(words.y, table), look_up(words.y >> 16, table)};
        }
    }
}
