// Values -> codes of 8 bits under float scales: s = largest magnitude / largest code (0: s = 1),
// code = x / s rounded. Codes are written as a product on the tensor cores reads them, contraction
// contiguous; a block that is not finite has scale NaN and codes 0.
//
// Two passes: `maxima` finds each block's largest magnitude, `codes` divides by what it means. A
// warp has 32 rows of 128 columns, a lane four neighbouring columns; a block of `tall` rows and
// `wide` columns may be larger or smaller than that. Macros besides those of float_codes.cuh:
// PREPARE_COLUMNWISE (contraction along axis 0).

#include "codec/float_codes.cuh"

constexpr int kWarps = kThreads / 32, kRows = 32, kColumns = 128;

// Four neighbours of a row; zeros outside.
__device__ __forceinline__ void load(const Raw* x, i64 row, i64 column, i64 rows, i64 columns,
                                     float (&v)[4]) {
    if (row < rows && column + 3 < columns && columns % 4 == 0) {
        load_four(x + row * columns + column, v);
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
            v[c] = row < rows && column + c < columns ? widen(x[row * columns + column + c]) : 0.0f;
    }
}

// x (rows, columns) -> the float bits of each block's largest magnitude, at first 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    maxima(const Raw* __restrict__ x, u32* __restrict__ most, i64 rows, i64 columns, i64 tall,
           i64 wide, i64 across) {
    const i64 patches = (columns + kColumns - 1) / kColumns;
    const i64 patch = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const i64 row0 = patch / patches * kRows,
              column = patch % patches * kColumns + threadIdx.x % 32 * 4;
    if (row0 >= rows) return;
    u32 held[4] = {0, 0, 0, 0};
    i64 until = (row0 / tall + 1) * tall;  // where the blocks of rows at hand end
    const i64 end = rows < row0 + kRows ? rows : row0 + kRows;
    for (i64 row = row0; row < end; ++row) {
        float v[4];
        load(x, row, column, rows, columns, v);
#pragma unroll
        for (int c = 0; c < 4; ++c) held[c] = larger(held[c], bits_of(v[c]) & kMagnitude);
        if (row + 1 < end && row + 1 < until) continue;
        u32* of_rows = most + row / tall * across;
        if (wide % kColumns == 0 || wide >= columns) {  // one block for the warp's columns
            const u32 mine = larger(larger(held[0], held[1]), larger(held[2], held[3]));
            const u32 all = __reduce_max_sync(~0u, mine);
            if (threadIdx.x % 32 == 0) raise(of_rows + column / wide, all);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (column + c < columns) raise(of_rows + (column + c) / wide, held[c]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) held[c] = 0;
        until += tall;
    }
}

// x -> `out` (rows, pitch), or (columns, pitch) if PREPARE_COLUMNWISE, with zeros up to the pitch's
// multiple of 16; scales for each block; counts spread over pairs.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    codes(const Raw* __restrict__ x, const u32* __restrict__ most, u8* __restrict__ out,
          Stored* __restrict__ scales, u64* __restrict__ counters, const u32* __restrict__ clock,
          u32 key0, u32 key1, u32 high0, u32 high1, i64 rows, i64 columns, i64 tall, i64 wide,
          i64 across, i64 pitch) {
#if PREPARE_COLUMNWISE
    __shared__ u32 turned[kWarps][kColumns][kRows / 4 + 1];
#endif
    const i64 patches = (columns + kColumns - 1) / kColumns;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 patch = static_cast<i64>(blockIdx.x) * kWarps + warp;
    const i64 row0 = patch / patches * kRows, column = patch % patches * kColumns + lane * 4;
    Tally tally = {0, 0};
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    if (row0 < rows) {
#pragma unroll 1
        for (int four = 0; four < kRows; four += 4) {
            u32 words[4][4] = {};  // of four rows: codes of a lane's columns
#if CODEC_STOCHASTIC
            u32 draws[4][4];  // of blocks of one row or column: four positions share a draw
#endif
#if CODEC_STOCHASTIC && PREPARE_COLUMNWISE
#pragma unroll
            for (int c = 0; c < 4; ++c)
                philox(static_cast<u32>((row0 + four) % tall / 4),
                       static_cast<u32>((row0 + four) / tall * across + (column + c) / wide),
                       stream, draws[c]);
#endif
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const i64 row = row0 + four + r;
#if CODEC_STOCHASTIC && !PREPARE_COLUMNWISE
                philox(static_cast<u32>(column % wide / 4),
                       static_cast<u32>(row / tall * across + column / wide), stream, draws[r]);
#endif
                float v[4];
                load(x, row, column, rows, columns, v);
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if (row >= rows || column + c >= columns) continue;
                    const i64 block = row / tall * across + (column + c) / wide;
                    const Most found = {most[block], 0};
                    const Scale s = block_scale(found);
                    if (row % tall == 0 && (column + c) % wide == 0) scales[block] = s.stored;
                    if (!s.live) continue;
#if CODEC_STOCHASTIC
                    const u32 word = PREPARE_COLUMNWISE ? draws[c][r] : draws[r][c];
#else
                    const u32 word = 0;
#endif
                    words[r][c] = code_of(v[c], s, word, tally);
                }
            }
#if PREPARE_COLUMNWISE
#pragma unroll
            for (int c = 0; c < 4; ++c)
                turned[warp][lane * 4 + c][four / 4] =
                    words[0][c] | words[1][c] << 8 | words[2][c] << 16 | words[3][c] << 24;
#else
#pragma unroll
            for (int r = 0; r < 4; ++r)
                if (row0 + four + r < rows && column < pitch)
                    *reinterpret_cast<u32*>(out + (row0 + four + r) * pitch + column) =
                        words[r][0] | words[r][1] << 8 | words[r][2] << 16 | words[r][3] << 24;
#endif
        }
    }
#if PREPARE_COLUMNWISE
    __syncthreads();
    if (row0 < rows) {
#pragma unroll
        for (int i = 0; i < kColumns / 16; ++i) {  // a lane has 16 rows of one column
            const int of_patch = i * 16 + lane / 2, half = lane % 2 * 4;
            const i64 line = patch % patches * kColumns + of_patch, at = row0 + half * 4;
            const u32* from = turned[warp][of_patch] + half;
            if (line < columns && at < pitch)
                *reinterpret_cast<uint4*>(out + line * pitch + at) =
                    uint4{from[0], from[1], from[2], from[3]};
        }
    }
#endif
    add_counts(tally, counters);
}
