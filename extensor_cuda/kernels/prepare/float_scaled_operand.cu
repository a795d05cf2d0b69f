// Quantizes values to 8-bit codes under float scales, as a GEMM operand with K contiguous. s =
// largest magnitude / largest code (1 for zeros), code = x / s rounded. A block that is not finite
// has scale NaN and codes 0.
//
// The kernel `maxima` finds each block's largest magnitude, then `codes` divides. A warp has 32
// rows by 128 columns, whatever the block size is. Macros: PREPARE_COLUMNWISE (K is axis 0), those
// of float_codes.cuh.

#include "codec/float_codes.cuh"

constexpr int kWarps = kThreads / 32, kRows = 32, kColumns = 128;

// Loads four neighbours of a row, zeros outside.
DEVICE void load(const Raw* x, i64 row, i64 column, i64 rows, i64 columns, float (&v)[4]) {
    if (row < rows && column + 3 < columns && columns % 4 == 0) {
        load_four(x + row * columns + column, v);
    } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
            v[c] = row < rows && column + c < columns ? widen(x[row * columns + column + c]) : 0.0f;
    }
}

// x (rows, columns) -> the float bits of each block's largest magnitude, which start at 0.
extern "C" __global__ void __launch_bounds__(kThreads) maxima(const Raw* __restrict__ x,
    u32* __restrict__ most, i64 rows, i64 columns, i64 block_rows, i64 block_columns, i64 across) {
    const i64 warp_tiles = (columns + kColumns - 1) / kColumns;
    const i64 warp_tile = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const i64 row0 = warp_tile / warp_tiles * kRows,
              column = warp_tile % warp_tiles * kColumns + threadIdx.x % 32 * 4;
    if (row0 >= rows) return;
    u32 held[4] = {0, 0, 0, 0};
    i64 until = (row0 / block_rows + 1) * block_rows;  // where the current blocks end
    const i64 end = rows < row0 + kRows ? rows : row0 + kRows;
    for (i64 row = row0; row < end; ++row) {
        float v[4];
        load(x, row, column, rows, columns, v);
#pragma unroll
        for (int c = 0; c < 4; ++c) held[c] = larger(held[c], bits_of(v[c]) & kMagnitude);
        if (row + 1 < end && row + 1 < until) continue;
        u32* of_rows = most + row / block_rows * across;
        if (block_columns % kColumns == 0 ||
            block_columns >= columns) {  // the warp's columns are in one block
            const u32 mine = larger(larger(held[0], held[1]), larger(held[2], held[3]));
            const u32 all = __reduce_max_sync(~0u, mine);
            if (threadIdx.x % 32 == 0) raise(of_rows + column / block_columns, all);
        } else {
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (column + c < columns) raise(of_rows + (column + c) / block_columns, held[c]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) held[c] = 0;
        until += block_rows;
    }
}

// x -> `out` (rows, pitch), or (columns, pitch) if PREPARE_COLUMNWISE, with zeros up to a multiple
// of 16; one scale per block; counters in pairs.
extern "C" __global__ void __launch_bounds__(kThreads, 2) codes(const Raw* __restrict__ x,
    const u32* __restrict__ most, u8* __restrict__ out, Stored* __restrict__ scales,
    u64* __restrict__ counters, const u32* __restrict__ clock, u32 key0, u32 key1, u32 high0,
    u32 high1, i64 rows, i64 columns, i64 block_rows, i64 block_columns, i64 across, i64 pitch) {
#if PREPARE_COLUMNWISE
    __shared__ u32 transposed[kWarps][kColumns][kRows / 4 + 1];
#endif
    const i64 warp_tiles = (columns + kColumns - 1) / kColumns;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 warp_tile = static_cast<i64>(blockIdx.x) * kWarps + warp;
    const i64 row0 = warp_tile / warp_tiles * kRows,
              column = warp_tile % warp_tiles * kColumns + lane * 4;
    Tally tally = {0, 0};
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    if (row0 < rows) {
#pragma unroll 1
        for (int four = 0; four < kRows; four += 4) {
            u32 words[4][4] = {};  // of four rows: the codes of a lane's columns
#if CODEC_STOCHASTIC
            u32 draws[4][4];  // four positions of a row or column share a draw
#endif
#if CODEC_STOCHASTIC && PREPARE_COLUMNWISE
#pragma unroll
            for (int c = 0; c < 4; ++c)
                philox(static_cast<u32>((row0 + four) % block_rows / 4),
                    static_cast<u32>(
                        (row0 + four) / block_rows * across + (column + c) / block_columns),
                    stream, draws[c]);
#endif
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const i64 row = row0 + four + r;
#if CODEC_STOCHASTIC && !PREPARE_COLUMNWISE
                philox(static_cast<u32>(column % block_columns / 4),
                    static_cast<u32>(row / block_rows * across + column / block_columns), stream,
                    draws[r]);
#endif
                float v[4];
                load(x, row, column, rows, columns, v);
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    if (row >= rows || column + c >= columns) continue;
                    const i64 block = row / block_rows * across + (column + c) / block_columns;
                    const Most found = {most[block], 0};
                    const Scale s = block_scale(found);
                    if (row % block_rows == 0 && (column + c) % block_columns == 0)
                        scales[block] = s.stored;
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
                transposed[warp][lane * 4 + c][four / 4] =
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
            const int of_tile = i * 16 + lane / 2, half = lane % 2 * 4;
            const i64 line = warp_tile % warp_tiles * kColumns + of_tile, at = row0 + half * 4;
            const u32* from = transposed[warp][of_tile] + half;
            if (line < columns && at < pitch)
                *reinterpret_cast<uint4*>(out + line * pitch + at) =
                    uint4{from[0], from[1], from[2], from[3]};
        }
    }
#endif
    add_counts(tally, counters);
}
