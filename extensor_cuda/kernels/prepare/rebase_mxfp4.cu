// Rebases packed MXFP4 rows to E5M2 codes under one power of two per row. A thread block has a row.
//
// With s the largest scale byte of a row's blocks that are neither zero nor NaN, a value is e2m1
// 2^(t - s + PREPARE_TOP) 2^(s - 127 - PREPARE_TOP). The first two factors are exact in E5M2 while
// s - t is at most PREPARE_SPAN; the last is the row's exponent. A wider row raises the flag. NaN
// blocks become NaN.
//
// PREPARE_INTEGERS: 8-bit integers, where 6 2^PREPARE_TOP is 96 and the span is three binades. NaN
// blocks raise the flag too. Macros: those and CODEC_BLOCK (16 to 128).

#include "common/types.cuh"

#if PREPARE_INTEGERS
// The magnitudes 0 to 6 times `unit`, as integers in two words.
DEVICE uint2 int8_table(u32 unit) {
    const u32 half = unit / 2;
    return uint2{half << 8 | unit << 16 | (unit + half) << 24,
        2 * unit | 3 * unit << 8 | 4 * unit << 16 | 6 * unit << 24};
}

// Four 4-bit codes -> four bytes. Only negating a zero byte of `table` would carry.
DEVICE u32 signed_integers(u32 codes, const uint2& table) {
    const u32 signs = (codes & 0x8u) << 4 | (codes & 0x80u) << 8 | (codes & 0x800u) << 12 |
                      (codes & 0x8000u) << 16;
    const u32 m = __byte_perm(table.x, table.y, codes & 0x7777u);
    const u32 some = (m + 0x7F7F7F7Fu) & signs;  // top bits of bytes that are negative and not 0
    return (m ^ (some >> 7) * 255u) + (some >> 7);
}
#else
#include "prepare/rebase_e5m2.cuh"
#endif

constexpr int kThreads = 128, kNaN = 255;

extern "C" __global__ void __launch_bounds__(kThreads)
    rebase(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out,
        int* __restrict__ exponents, u32* __restrict__ flag, i64 blocks) {
    const i64 row = blockIdx.x;
    const uint2* from = reinterpret_cast<const uint2*>(codes + row * blocks * (CODEC_BLOCK / 2));
    uint4* to = reinterpret_cast<uint4*>(out + row * blocks * CODEC_BLOCK);
    scales += row * blocks;
    __shared__ int top, bottom;
    if (threadIdx.x == 0) top = -1, bottom = kNaN;
    __syncthreads();
    for (i64 b = threadIdx.x; b < blocks; b += kThreads) {
        u32 any = 0;
#pragma unroll
        for (int i = 0; i < CODEC_BLOCK / 16; ++i) {
            const uint2 words = from[b * (CODEC_BLOCK / 16) + i];
            any |= words.x | words.y;
        }
        const int scale = scales[b];
        if (PREPARE_INTEGERS && scale == kNaN) atomicOr(flag, 1u);
        if ((any & 0x77777777u) && scale != kNaN) {
            atomicMax(&top, scale);
            atomicMin(&bottom, scale);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        exponents[row] = top < 0 ? 0 : top - 127 - PREPARE_TOP;
        if (top - bottom > PREPARE_SPAN) atomicOr(flag, 1u);
    }
    for (i64 b = threadIdx.x; b < blocks; b += kThreads) {
        const int scale = scales[b];
        // Outside the window are only zero blocks, or rows whose codes are not used.
        const int shift =
            max(min(scale - top + PREPARE_TOP, PREPARE_TOP), PREPARE_TOP - PREPARE_SPAN);
#if PREPARE_INTEGERS
        const uint2 table = int8_table(1u << shift);
        const auto convert = [&](u32 four) { return signed_integers(four, table); };
#else
        const float unit = __uint_as_float(static_cast<u32>(shift + 127) << 23);
        uint2 table = e5m2_table(unit);
        if (scale == kNaN) table = uint2{0x7F7F7F7Fu, 0x7F7F7F7Fu};
        const auto convert = [&](u32 four) { return select_codes(four, table); };
#endif
#pragma unroll
        for (int i = 0; i < CODEC_BLOCK / 16; ++i) {
            const uint2 words = from[b * (CODEC_BLOCK / 16) + i];
            to[b * (CODEC_BLOCK / 16) + i] = uint4{
                convert(words.x), convert(words.x >> 16), convert(words.y), convert(words.y >> 16)};
        }
    }
}
