// Rebases packed MXFP8 rows to FP8 codes under one power of two per row. It rounds where FP8 cannot
// hold a value and counts these values. A thread block has a row.
//
// With s the largest scale byte of a row's blocks that are neither zero nor NaN, a value is element
// 2^(t - s) 2^(s - 127). The first product is exact while it is a normal number of the element's
// format; below, it is rounded to nearest even once. NaN blocks become NaN; NaN and infinite
// elements stay.
//
// Macros: those of rebase_fp8.cuh, CODEC_BLOCK (16 to 128), CODEC_TILE_ROWS.

#include "common/types.cuh"

constexpr int kThreads = 128, kChunk = 16, kNaN = 255;

#include "prepare/rebase_fp8.cuh"

DEVICE u32 over_warp(u32 mine) {
    for (int step = 1; step < 32; step *= 2) mine += __shfl_xor_sync(0xFFFFFFFFu, mine, step);
    return mine;
}

// codes (rows, blocks CODEC_BLOCK), scales (tiles of rows, blocks) -> out as codes, exponents
// (rows,), and counts (rows, 2): values changed, and those of them that became 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    rebase_mxfp8(const u8* __restrict__ codes, const u8* __restrict__ scales, u8* __restrict__ out,
        int* __restrict__ exponents, u32* __restrict__ counts, i64 blocks) {
    const i64 row = blockIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(codes + row * blocks * CODEC_BLOCK);
    uint4* to = reinterpret_cast<uint4*>(out + row * blocks * CODEC_BLOCK);
    scales += row / CODEC_TILE_ROWS * blocks;
    const int chunks = static_cast<int>(blocks * (CODEC_BLOCK / kChunk));
    __shared__ int top;
    __shared__ u32 values, flushed;
    if (threadIdx.x == 0) top = -1, values = 0, flushed = 0;
    __syncthreads();
    int mine = -1;
#pragma unroll 4
    for (int c = threadIdx.x; c < chunks; c += kThreads) {
        const uint4 four = from[c];
        const int scale = scales[c * kChunk / CODEC_BLOCK];
        if (((four.x | four.y | four.z | four.w) & kAllNaN) && scale != kNaN)
            mine = max(mine, scale);
    }
    if (mine >= 0) atomicMax(&top, mine);
    __syncthreads();
    const int anchor = top;
    Changed changed = {0, 0};
#pragma unroll 4
    for (int c = threadIdx.x; c < chunks; c += kThreads) {
        uint4 four = from[c];  // again, from the L1 cache
        const int scale = scales[c * kChunk / CODEC_BLOCK];
        // Only zero blocks are above the anchor.
        const int shift = min(max(anchor - scale, 0), kMostBinades);
        if (scale == kNaN) {
            four = uint4{kAllNaN, kAllNaN, kAllNaN, kAllNaN};
        } else if (shift) {
            four.x = rebased(four.x, shift, changed);
            four.y = rebased(four.y, shift, changed);
            four.z = rebased(four.z, shift, changed);
            four.w = rebased(four.w, shift, changed);
        }
        to[c] = four;
    }
    const u32 all = over_warp(changed.values), gone = over_warp(changed.flushed);
    if (threadIdx.x % 32 == 0 && all) {
        atomicAdd(&values, all);
        atomicAdd(&flushed, gone);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        exponents[row] = anchor < 0 ? 0 : anchor - 127;
        counts[2 * row] = values;
        counts[2 * row + 1] = flushed;
    }
}
