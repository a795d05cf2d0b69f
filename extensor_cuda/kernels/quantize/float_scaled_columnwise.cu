// Quantizes a matrix columnwise under float scales. Blocks are QUANT_BLOCK_ROWS values,
// QUANT_BLOCK_ROWS x 128 tiles (QUANT_TILES_128X128), or whole columns or the matrix
// (QUANT_AMAX_GIVEN 1 and 2: maxima found before). QUANT_TRANSPOSED: a column's codes are
// contiguous, `pitch` bytes from the next column's.
//
// A thread block has 128 rows and columns, a warp 16 rows, and a lane four chunks of 16 values in
// neighbouring columns. The number of columns is a multiple of 4, and x is 16-byte aligned. Macros:
// those, and those of input.cuh, encode.cuh and float_scale.cuh.

#include "codec/input.cuh"
#include "codec/decode.cuh"
#include "codec/float_scale.cuh"
#include "codec/float_quotient.cuh"
#include "codec/encode.cuh"
#include "codec/counters.cuh"

constexpr int kSide = 128, kWarps = kThreads / 32, kLane = 4,
              kShare = QUANT_BLOCK_ROWS / kChunk;  // warps of a block of values

struct Place {
    i64 row, column;  // the warp's first, the lane's first
};

DEVICE Place place_of(i64 columns) {
    const i64 across = (columns + kSide - 1) / kSide;
    return {blockIdx.x / across * kSide + threadIdx.x / 32 * kChunk,
        blockIdx.x % across * kSide + threadIdx.x % 32 * kLane};
}

// Loads four neighbours of the warp's row k.
DEVICE void load_four(
    u32 (&raw)[sizeof(Raw)], const Raw* x, const Place& at, int k, i64 rows, i64 columns) {
    const bool there = at.row + k < rows && at.column < columns;
    const Raw* from = x + (at.row + k) * columns + at.column;
#if CODEC_IN == 0
    const uint4 four = there ? __ldg(reinterpret_cast<const uint4*>(from)) : uint4{0, 0, 0, 0};
    raw[0] = four.x, raw[1] = four.y, raw[2] = four.z, raw[3] = four.w;
#else
    const uint2 two = there ? __ldg(reinterpret_cast<const uint2*>(from)) : uint2{0, 0};
    raw[0] = two.x, raw[1] = two.y;
#endif
}

DEVICE void column_of(const u32 (&raw)[kChunk][sizeof(Raw)], int c, float (&v)[kChunk]) {
#pragma unroll
    for (int k = 0; k < kChunk; ++k) v[k] = element(raw[k], c);
}

DEVICE void column_maxima(const u32 (&raw)[kChunk][sizeof(Raw)], u32 (&most)[kLane]) {
#pragma unroll
    for (int c = 0; c < kLane; ++c) {
        float v[kChunk];
        column_of(raw, c, v);
        most[c] = chunk_maximum(v);
    }
}

#if QUANT_AMAX_GIVEN == 1
// Finds the bits of each column's largest magnitude, which start at 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    largest_of_columns(const Raw* __restrict__ x, u32* __restrict__ most, i64 rows, i64 columns) {
    __shared__ u32 found[kWarps][kSide];
    const Place at = place_of(columns);
    u32 mine[kLane] = {};
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        u32 raw[sizeof(Raw)];
        load_four(raw, x, at, k, rows, columns);
#pragma unroll
        for (int c = 0; c < kLane; ++c)
            mine[c] = larger(mine[c], bits_of(element(raw, c)) & kMagnitude);
    }
#pragma unroll
    for (int c = 0; c < kLane; ++c) found[threadIdx.x / 32][threadIdx.x % 32 * kLane + c] = mine[c];
    __syncthreads();
    const i64 column = at.column - threadIdx.x % 32 * kLane + threadIdx.x;
    if (threadIdx.x >= kSide || column >= columns) return;
    u32 all = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all = larger(all, found[w][threadIdx.x]);
    raise(most + column, all);
}
#endif

extern "C" __global__ void __launch_bounds__(
    kThreads, CODEC_IN && !CODEC_STOCHASTIC && !QUANT_TILES_128X128 &&
                      (QUANT_TRANSPOSED || QUANT_AMAX_GIVEN != 2)
                  ? 3
                  : 1) quantize_column_tiles(const Raw* __restrict__ x, u8* __restrict__ codes,
    Stored* __restrict__ scales, const u32* __restrict__ most, u64* __restrict__ counters,
    const u32* __restrict__ clock, u32 key0, u32 key1, u32 high0, u32 high1, i64 rows, i64 columns,
    i64 pitch) {
    [[maybe_unused]] const Stream stream = stream_of(clock, key0, key1, high0, high1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place at = place_of(columns);
    u32 raw[kChunk][sizeof(Raw)], amax[kLane];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) load_four(raw[k], x, at, k, rows, columns);
#if QUANT_AMAX_GIVEN
#pragma unroll
    for (int c = 0; c < kLane; ++c)
        amax[c] = at.column < columns ? most[QUANT_AMAX_GIVEN == 1 ? at.column + c : 0] : 0;
#else
    __shared__ u32 found[kWarps][kSide];
    column_maxima(raw, amax);
#if QUANT_TILES_128X128
    const u32 all =
        __reduce_max_sync(~0u, larger(larger(amax[0], amax[1]), larger(amax[2], amax[3])));
#pragma unroll
    for (int c = 0; c < kLane; ++c) amax[c] = all;
#endif
    *reinterpret_cast<uint4*>(&found[warp][lane * kLane]) =
        uint4{amax[0], amax[1], amax[2], amax[3]};
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kShare; ++w) {
        const uint4 four =
            *reinterpret_cast<const uint4*>(&found[warp / kShare * kShare + w][lane * kLane]);
        amax[0] = larger(amax[0], four.x), amax[1] = larger(amax[1], four.y);
        amax[2] = larger(amax[2], four.z), amax[3] = larger(amax[3], four.w);
    }
#endif
    Tally tally = {0, 0};
#if QUANT_TRANSPOSED
    __shared__ uint4
        transposed[kSide][kSide / kChunk];  // per column, in an order without bank conflicts
#else
    u32 of_columns[kLane][kWords];
#endif
    const bool there = at.row < rows && at.column < columns;
    // Positions of the lane's chunks: blocks are numbered along the matrix's rows, values down its
    // columns.
    const u32 row = static_cast<u32>(at.row), left = static_cast<u32>(at.column),
              high = static_cast<u32>(rows);
    const u32 first = QUANT_AMAX_GIVEN ? row : row % QUANT_BLOCK_ROWS,
              across =
                  static_cast<u32>(QUANT_TILES_128X128 ? (columns + kSide - 1) / kSide : columns);
#pragma unroll
    for (int c = 0; c < kLane; ++c) {
        const Most most_of_block = {amax[c], 0};
        const Scale s = block_scale(most_of_block);
        float v[kChunk];
        u32 packed[kWords];
        column_of(raw, c, v);
        const u32 block = QUANT_AMAX_GIVEN == 2
                              ? 0
                              : (QUANT_AMAX_GIVEN ? 0 : row / QUANT_BLOCK_ROWS) * across +
                                    (QUANT_TILES_128X128 ? left / kSide : left + c);
        const u32 inside = first + (QUANT_TILES_128X128 ? (left + c) % kSide * QUANT_BLOCK_ROWS
                                       : QUANT_AMAX_GIVEN == 2 ? (left + c) * high
                                                               : 0);
        const Tensor tensor = {1, 1, 0, 1};
        encode(
            v, s, is_far(most_of_block, s), tensor, block, inside / kChunk, stream, packed, tally);
        if (there && inside == 0) scales[block] = static_cast<Stored>(s.stored);
#if QUANT_TRANSPOSED
        transposed[lane * kLane + c][warp ^ lane % 8] =
            uint4{packed[0], packed[1], packed[2 % kWords], packed[3 % kWords]};
#else
#pragma unroll
        for (int w = 0; w < kWords; ++w) of_columns[c][w] = packed[w];
#endif
    }
    add_counts(tally, counters);
#if QUANT_TRANSPOSED
    __syncthreads();
    const i64 from = at.column - lane * kLane, top = at.row - warp * kChunk;
#pragma unroll
    for (int i = 0; i < kSide * kWarps / kThreads; ++i) {
        const int column = (i * kThreads + threadIdx.x) / kWarps, chunk = threadIdx.x % kWarps;
        if (from + column < columns && top + chunk * kChunk < pitch)
            *reinterpret_cast<uint4*>(codes + (from + column) * pitch + top + chunk * kChunk) =
                transposed[column][chunk ^ column / kLane % 8];
    }
#else
    // Code bytes hold one row, or two; those of the lane's columns are neighbours.
    constexpr int kOf = 8 / CODEC_BITS;
#pragma unroll
    for (int b = 0; b < kChunk / kOf; ++b) {
        const u32 pick = 0x0040u + b % 4 * 0x11;
        const u32 low = __byte_perm(of_columns[0][b / 4], of_columns[1][b / 4], pick);
        const u32 high = __byte_perm(of_columns[2][b / 4], of_columns[3][b / 4], pick);
        if (at.row + b * kOf < rows && at.column < columns)
            *reinterpret_cast<u32*>(codes + (at.row / kOf + b) * columns + at.column) =
                __byte_perm(low, high, 0x5410);
    }
#endif
}
