// Float scales of blocks along K -> lines as gemm_sm90.cu reads them: a line of float32 for each
// block, each scale repeated for the rows that share it, zeros beyond the rows and beyond the
// blocks. Both sides of a product in one launch: latencies decide what it takes, not bytes.
//
// A thread block has kTile lines by kTile columns of one side. It reads the scales of these, lanes
// along the axis on which they lie closer together, turns them in shared memory, and writes 16
// bytes a thread. No headers, no macros.

#include "common/types.cuh"

#include "common/float16.cuh"
#include "common/dependent_launch.cuh"

constexpr u32 kTile = 32, kEach = 4, kParts = kTile / kEach, kThreads = kTile * kParts;

struct Side {
    const void* from;   // (blocks, groups), float16 if `half`
    float* to;          // (lines, pitch), from 16 bytes on
    i64 along, across;  // elements from one block to the next, and from one group to the next
    u32 half, blocks, groups, each, lines, pitch;  // pitch: a multiple of 4
};

__device__ __forceinline__ float widened(float v) { return v; }
__device__ __forceinline__ float widened(u16 v) { return half_value(v); }

// A tile of the scales from (line, group) on, of which groups before `end` are there, else zeros.
template <class T>
__device__ __forceinline__ void read(const Side& s, u32 line, u32 group, u32 end,
                                     float (&turned)[kTile][kTile + 1]) {
    const u32 lane = threadIdx.x % kTile, part = threadIdx.x / kTile;
    const bool by_line =
        (s.along < 0 ? -s.along : s.along) <= (s.across < 0 ? -s.across : s.across);
    T v[kEach];  // all of them under way at a time
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
        const u32 other = part + i * kParts, block = line + (by_line ? lane : other),
                  of = group + (by_line ? other : lane);
        v[i] = block < s.blocks && of < end
                   ? static_cast<const T*>(s.from)[block * s.along + of * s.across]
                   : T(0);
    }
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) {
        const u32 other = part + i * kParts;
        turned[by_line ? lane : other][by_line ? other : lane] = widened(v[i]);
    }
}

// The first `tiles` thread blocks are of the first side.
extern "C" __global__ void __launch_bounds__(kThreads)
    block_scales(const void* from0, float* to0, i64 along0, i64 across0, u32 half0, u32 blocks0,
                 u32 groups0, u32 each0, u32 lines0, u32 pitch0, const void* from1, float* to1,
                 i64 along1, i64 across1, u32 half1, u32 blocks1, u32 groups1, u32 each1,
                 u32 lines1, u32 pitch1, u32 tiles) {
    __shared__ float turned[kTile][kTile + 1];
    let_next_start();  // the product, which awaits the end of this
    await_last();      // which may have made the scales
    const bool first = blockIdx.x < tiles;
    const Side s =
        first ? Side{from0, to0, along0, across0, half0, blocks0, groups0, each0, lines0, pitch0}
              : Side{from1, to1, along1, across1, half1, blocks1, groups1, each1, lines1, pitch1};
    const u32 tile = first ? blockIdx.x : blockIdx.x - tiles, wide = (s.pitch + kTile - 1) / kTile;
    const u32 line = tile / wide * kTile, column = tile % wide * kTile;
    const u32 group = column / s.each, end = min(s.groups, (column + kTile - 1) / s.each + 1);
    if (s.half)
        read<u16>(s, line, group, end, turned);
    else
        read<float>(s, line, group, end, turned);
    __syncthreads();
    const u32 mine = threadIdx.x / kParts, start = column + threadIdx.x % kParts * kEach;
    if (line + mine >= s.lines || start >= s.pitch) return;
    float four[kEach];
#pragma unroll
    for (u32 i = 0; i < kEach; ++i) four[i] = turned[mine][(start + i) / s.each - group];
    float* to = s.to + static_cast<i64>(line + mine) * s.pitch + start;
    *reinterpret_cast<float4*>(to) = float4{four[0], four[1], four[2], four[3]};
}
