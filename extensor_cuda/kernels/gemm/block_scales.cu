// Lays out float block scales as gemm_sm90.cu reads them: one row of float32 per block along K,
// each scale repeated for the rows that share it, zeros elsewhere. No macros.
//
// One launch handles both operands, since latency dominates. A thread block transposes a kTile x
// kTile tile in shared memory. Lanes read along the denser axis and write 16 bytes each.

#include "common/types.cuh"

#include "common/float16.cuh"
#include "common/dependent_launch.cuh"

constexpr u32 kTile = 32, kVector = 4, kThreadRows = kTile / kVector,
              kThreads = kTile * kThreadRows;

struct Scales {
    const void* from;  // (blocks, groups), float16 if `is_float16`
    float* to;         // (out_rows, pitch), from 16 bytes on
    i64 block_stride,
        group_stride;                                                 // in elements
    u32 is_float16, blocks, groups, rows_per_group, out_rows, pitch;  // pitch: a multiple of 4
};

DEVICE float to_float(float v) { return v; }
DEVICE float to_float(u16 v) { return half_to_float(v); }

// Reads the tile of scales at (row, group). Groups from `end` on are zeros.
template <class T>
DEVICE void read(
    const Scales& s, u32 row, u32 group, u32 end, float (&transposed)[kTile][kTile + 1]) {
    const u32 lane = threadIdx.x % kTile, part = threadIdx.x / kTile;
    const bool by_row = (s.block_stride < 0 ? -s.block_stride : s.block_stride) <=
                        (s.group_stride < 0 ? -s.group_stride : s.group_stride);
    T v[kVector];  // all loads are in flight at once
#pragma unroll
    for (u32 i = 0; i < kVector; ++i) {
        const u32 other = part + i * kThreadRows, block = row + (by_row ? lane : other),
                  of = group + (by_row ? other : lane);
        v[i] = block < s.blocks && of < end
                   ? static_cast<const T*>(s.from)[block * s.block_stride + of * s.group_stride]
                   : T(0);
    }
#pragma unroll
    for (u32 i = 0; i < kVector; ++i) {
        const u32 other = part + i * kThreadRows;
        transposed[by_row ? lane : other][by_row ? other : lane] = to_float(v[i]);
    }
}

// The first `tiles` thread blocks serve the first operand.
extern "C" __global__ void __launch_bounds__(kThreads)
    block_scales(const void* from0, float* to0, i64 block_stride0, i64 group_stride0,
        u32 is_float16_0, u32 blocks0, u32 groups0, u32 rows_per_group0, u32 out_rows0, u32 pitch0,
        const void* from1, float* to1, i64 block_stride1, i64 group_stride1, u32 is_float16_1,
        u32 blocks1, u32 groups1, u32 rows_per_group1, u32 out_rows1, u32 pitch1, u32 tiles) {
    __shared__ float transposed[kTile][kTile + 1];
    launch_dependent_grids();   // the GEMM, which waits for this grid
    wait_on_dependent_grids();  // which may have written the scales
    const bool first = blockIdx.x < tiles;
    const Scales s = first ? Scales{from0, to0, block_stride0, group_stride0, is_float16_0, blocks0,
                                 groups0, rows_per_group0, out_rows0, pitch0}
                           : Scales{from1, to1, block_stride1, group_stride1, is_float16_1, blocks1,
                                 groups1, rows_per_group1, out_rows1, pitch1};
    const u32 tile = first ? blockIdx.x : blockIdx.x - tiles,
              tiles_per_row = (s.pitch + kTile - 1) / kTile;
    const u32 row = tile / tiles_per_row * kTile, column = tile % tiles_per_row * kTile;
    const u32 group = column / s.rows_per_group,
              end = min(s.groups, (column + kTile - 1) / s.rows_per_group + 1);
    if (s.is_float16) read<u16>(s, row, group, end, transposed);
    else read<float>(s, row, group, end, transposed);
    __syncthreads();
    const u32 tile_row = threadIdx.x / kThreadRows,
              start = column + threadIdx.x % kThreadRows * kVector;
    if (row + tile_row >= s.out_rows || start >= s.pitch) return;
    float four[kVector];
#pragma unroll
    for (u32 i = 0; i < kVector; ++i)
        four[i] = transposed[tile_row][(start + i) / s.rows_per_group - group];
    float* to = s.to + static_cast<i64>(row + tile_row) * s.pitch + start;
    *reinterpret_cast<float4*>(to) = float4{four[0], four[1], four[2], four[3]};
}
