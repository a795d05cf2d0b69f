// Quantizes values to GEMM operands with K contiguous: MXFP4 rowwise, columnwise, or both in one
// pass. Codes are E5M2 under one power of two per tensor, which rebase_mxfp4.cu shows to be exact.
// Blocks round byte for byte as in quantize.cu, which shares these headers.
//
// Delayed scaling: the power of two comes from the amax state of the previous launch. `anchor` is
// the scale byte of a block with that magnitude, plus PREPARE_MARGIN. A finite block outside the
// window below it raises the flag; then the same kernel with PREPARE_BF16 writes bfloat16 values
// instead. Formats that do not fit FP8 are written as bfloat16 at once, and the flag says that a
// value was rounded.
//
// PREPARE_REBASED: MXFP8 as FP8 codes, where all blocks of a 128 x 128 tile take the largest of
// their scales (rebase_fp8.cuh). These go to `rowwise_scales` and `columnwise_scales`, (tiles along
// K, pitch), as the GEMM reads them.
//
// PREPARE_WINDOW: of a part of the operand alone, with the bits of the whole.
//
// PREPARE_PACKED, of bfloat16 to MXFP4: columns are not an operand but packed storage, for
// `columnwise` and, as bytes, `columnwise_scales`.
//
// Macros: quantize.cu's, PREPARE_ROWWISE, PREPARE_COLUMNWISE, PREPARE_BF16, PREPARE_REBASED,
// PREPARE_MULTI_TENSOR, PREPARE_WINDOW, PREPARE_PACKED, CODEC_LIFT, PREPARE_SPAN, PREPARE_MARGIN,
// PREPARE_MIN_CTAS.

#include "codec/input.cuh"
#include "codec/block_scale.cuh"
#include "codec/encode.cuh"
#include "codec/e2m1_bf16x2.cuh"
#include "prepare/e2m1_bf16x8.cuh"
#include "prepare/rebase_e5m2.cuh"
#if PREPARE_REBASED
#include "prepare/rebase_fp8.cuh"
#endif
#include "prepare/amax_state.cuh"

constexpr int kRows = sizeof(Raw) == 2 && !PREPARE_BF16 ? 128 : 64, kColumns = 128,
              kTileThreads = 2 * kRows;
constexpr int kRowWords = kColumns * sizeof(Raw) / 4;  // of the tile in shared memory
constexpr int kOut = PREPARE_BF16 ? 2 : 1,
              kUnits = kOut;                         // bytes per value; 16-byte units per chunk
constexpr int kTransposedUnits = kRows * kOut / 16;  // units of a column of the tile
constexpr int kMask = kTransposedUnits < 8 ? kTransposedUnits - 1 : 7;
constexpr int kRead = sizeof(Raw) * kChunk / 4;  // words of a chunk of a row
constexpr int kSide = 128, kTilesPerSquare = PREPARE_REBASED
                                                 ? kSide / kRows
                                                 // PREPARE_REBASED: the side of a scaled tile, and
                                                 // the shared-memory tiles in it.
                                                 : 1;
constexpr int kRowsPerScale = 4,
              // PREPARE_REBASED: rows that share a float, and floats beyond the last.
    kPadding = 64;

// The E5M2 codes of a block's eight magnitudes.
DEVICE uint2 table_of(const Scale& s, const TileState& state) {
    if (!s.live) return uint2{0x7F7F7F7Fu, 0x7F7F7F7Fu};
    const int shift =
        min(max(static_cast<int>(s.stored) - state.anchor + CODEC_LIFT, CODEC_LIFT - PREPARE_SPAN),
            CODEC_LIFT);
    const float unit = float_of(static_cast<u32>(shift + 127) << 23);
    return e5m2_table(unit);
}

// Records a block's magnitude. Returns whether the block is outside the window, if a code is not 0.
DEVICE bool is_beyond(const Scale& s, u32 amax, TileState& state) {
    state.largest = larger(state.largest, amax < kExponent ? amax : 0);
    const int shift = static_cast<int>(s.stored) - state.anchor;
    return s.live && (shift > 0 || shift < -PREPARE_SPAN);
}

// Four magnitudes in the low nibbles, and signs in the top bits of bytes -> four E5M2 codes.
DEVICE u32 signed_bytes(const uint2& table, u32 magnitudes, u32 signs, u32 live) {
    return __byte_perm(table.x, table.y, magnitudes) | (signs & (live & 0x80808080u));
}

// Stores 16 4-bit codes or decoded values as 16-byte units of the operand.
DEVICE void finish(const u32 (&packed)[kWords], const float (&v)[kChunk], const Scale& s, u32 amax,
    const uint2& table, TileState& state, uint4 (&units)[kUnits]) {
#if PREPARE_REBASED
    const int shift = min(state.anchor - static_cast<int>(s.stored), kMostBinades);
    u32 word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
        word[w] = shift ? rebased(packed[w], shift, state.changed) : packed[w];
    const u32 nan = kAllNaN & ~s.live;
    units[0] = uint4{word[0] | nan, word[1] | nan, word[2] | nan, word[3] | nan};
#elif PREPARE_BF16
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        u32 word[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (s.live && ((bits_of(v[8 * u + 2 * w]) | bits_of(v[8 * u + 2 * w + 1])) & 0xFFFFu))
                state.beyond = 1;
            word[w] =
                bits_of(v[8 * u + 2 * w]) >> 16 | (bits_of(v[8 * u + 2 * w + 1]) & 0xFFFF0000u);
        }
        units[u] = uint4{word[0], word[1], word[2], word[3]};
    }
#else
    if (is_beyond(s, amax, state) && (packed[0] | packed[1]) & 0x77777777u) state.beyond = 1;
    units[0] = uint4{select_codes(packed[0], table), select_codes(packed[0] >> 16, table),
        select_codes(packed[1], table), select_codes(packed[1] >> 16, table)};
#endif
}

// Encodes 16 values of a block with a known largest magnitude.
DEVICE void encode_chunk_of_operand(float (&v)[kChunk], u32 amax, u32 block, u32 part,
    const Stream& stream, TileState& state, uint4 (&units)[kUnits], Tally& tally) {
    const Tensor tensor = {1, 1, 0, 1};
    const Scale s = block_scale(amax, tensor);
    u32 packed[kWords];
    encode(v, s, is_far(amax, s), tensor, block, part, stream, packed, tally);
    finish(packed, v, s, amax, PREPARE_BF16 || PREPARE_REBASED ? uint2{0, 0} : table_of(s, state),
        state, units);
}

DEVICE void add_counts(const TileState& state, const Tally& tally, u64* counters) {
#if CODEC_STATS
    const u32 saturated = __reduce_add_sync(~0u, tally.saturated);
    const u32 flushed = __reduce_add_sync(~0u, tally.flushed);
    if (threadIdx.x % 32 == 0) {
        u64* slot = counters + (blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32) % kSlots * 2;
        if (saturated) atomicAdd(slot, static_cast<u64>(saturated));
        if (flushed) atomicAdd(slot + 1, static_cast<u64>(flushed));
    }
#if PREPARE_REBASED
    const u32 values = __reduce_add_sync(~0u, state.changed.values);
    const u32 gone = __reduce_add_sync(~0u, state.changed.flushed);
    if (threadIdx.x % 32 == 0 && values) {
        u64* slot = counters + (blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32) % kSlots * 2 +
                    2 * kSlots;
        atomicAdd(slot, static_cast<u64>(values));
        if (gone) atomicAdd(slot + 1, static_cast<u64>(gone));
    }
#endif
#endif
}

// Where a word of a row is: neighbouring rows use different banks.
DEVICE u32 swizzled(u32 row, u32 word) { return word ^ (row % 8 * 4); }

// Copies the tile at (row0, column0) of x asynchronously, with zeros outside.
DEVICE void fetch(
    u32 (*tile)[kRowWords], const Raw* x, int row0, int column0, i64 rows, i64 columns) {
    constexpr int kAcross = kRowWords / 4,
                  kRowsAtOnce = kTileThreads / kAcross;  // units of a row; rows at a time
    const int first = threadIdx.x / kAcross, word = threadIdx.x % kAcross * 4;
    const int column = column0 + word * 4 / static_cast<int>(sizeof(Raw));
    const Raw* at = x + static_cast<i64>(row0 + first) * columns + column;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i, at += kRowsAtOnce * columns) {
        const int row = first + i * kRowsAtOnce;
        const bool inside = row0 + row < rows && column < columns;
        const Raw* from = inside ? at : x;
        u32* to = &tile[row][swizzled(row, word)];
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         static_cast<u32>(__cvta_generic_to_shared(to))),
            "l"(from), "r"(inside ? 16 : 0)
            : "memory");
    }
}

#if PREPARE_REBASED
#include "prepare/tile_scale.cuh"
#else
#define PREPARE_FAST_PATH 0
#endif
#include "prepare/encode_operand.cuh"

// Stores `transposed` to `out` (columns, pitch of rows).
DEVICE void store_transposed(const uint4 (*transposed)[kTransposedUnits], u8* out, int row0,
    int column0, i64 rows, i64 columns) {
    constexpr int kStep = kTileThreads / kTransposedUnits;  // columns at a time
    static_assert(kStep / 2 % (kMask + 1) == 0, "a thread's columns have one swizzle");
    const i64 pitch = (rows + 15) / 16 * 16;
    const int first = threadIdx.x / kTransposedUnits, unit = threadIdx.x % kTransposedUnits;
    const int from = unit ^ (first / 2 & kMask), row = row0 + unit * 16 / kOut;
#pragma unroll
    for (int column = first; column < kColumns; column += kStep) {
        if (column0 + column < columns && row < rows)
            *reinterpret_cast<uint4*>(out + ((column0 + column) * pitch + row) * kOut) =
                transposed[column][from];
    }
}

// The part of a matrix that outputs are made of, of whole tiles.
struct Window {
    i64 row0, column0, row_end, column_end;
};

DEVICE Window all_of(const Matrix& m) { return {0, 0, m.rows, m.columns}; }

// Fits 32 bits: as many tiles are of a matrix of 2^45 values.
DEVICE u32 tiles_of(const Window& part) {
    return static_cast<u32>((part.row_end - part.row0 + kTilesPerSquare * kRows - 1) /
                            (kTilesPerSquare * kRows) *
                            ((part.column_end - part.column0 + kColumns - 1) / kColumns));
}

// Processes a thread block's tiles: from `first` on, `blocks` apart.
DEVICE void work(const Matrix& m, const Window& window, u32 first, u32 blocks,
    const Stream& rowwise_stream, const Stream& columnwise_stream) {
#if PREPARE_BF16 || PREPARE_REBASED
    const int anchor = 0;
#else
    const int anchor =
        static_cast<int>(block_scale(m.amax_state->before, Tensor{1, 1, 0, 1}).stored) +
        PREPARE_MARGIN;
    if (first == 0 && threadIdx.x == 0) *m.exponent = anchor - 127 - CODEC_LIFT;
#endif
    TileState along_place = {anchor, 0, 0}, down_place = {anchor, 0, 0};
    Tally along_tally = {0, 0}, down_tally = {0, 0};
    __shared__ __align__(16) u32 tile[kRows][kRowWords];
#if PREPARE_PACKED
    uint4(*transposed)[kTransposedUnits] = nullptr;
#elif PREPARE_COLUMNWISE
    __shared__ uint4 transposed[kColumns][kTransposedUnits];
#elif PREPARE_REBASED
    __shared__ u32 transposed[kTileThreads / 32];
#endif
    const u32 across =
        static_cast<u32>((window.column_end - window.column0 + kColumns - 1) / kColumns);
    const u32 tiles = tiles_of(window);
    for (u32 index = first; index < tiles; index += blocks) {
        const int square = static_cast<int>(window.row0) +
                           static_cast<int>(index / across) * kTilesPerSquare * kRows;
        const int column0 =
            static_cast<int>(window.column0) + static_cast<int>(index % across) * kColumns;
        const auto bring = [&](int row0) {
            fetch(tile, m.x, row0, column0, m.rows, m.columns);
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
        };
#if PREPARE_REBASED
        u32 along_most = 0, down_most = 0;
        bool numbers = true;
#pragma unroll 1
        for (int part = 0; part < kTilesPerSquare; ++part) {
            bring(square + part * kRows);
            numbers &= tile_amax(tile, reinterpret_cast<u32*>(transposed), along_most, down_most);
        }
        set_tile_scale(along_place, along_most, numbers, m.rowwise_scales, column0, square, m.rows);
        set_tile_scale(
            down_place, down_most, numbers, m.columnwise_scales, square, column0, m.columns);
#endif
#pragma unroll 1
        for (int part = kTilesPerSquare - 1; part >= 0; --part) {
            const int row0 = square + part * kRows;
            if (!PREPARE_REBASED || part < kTilesPerSquare - 1) bring(row0);
#if PREPARE_ROWWISE
            encode_rowwise(tile, m.rowwise, row0, column0, m.rows, m.columns, rowwise_stream,
                along_place, along_tally);
#endif
#if PREPARE_COLUMNWISE
            encode_columnwise(tile, transposed, row0, column0, m.columns, columnwise_stream,
                down_place, down_tally, m.columnwise, reinterpret_cast<u8*>(m.columnwise_scales),
                m.rows);
#if !PREPARE_PACKED
            __syncthreads();
            store_transposed(transposed, m.columnwise, row0, column0, m.rows, m.columns);
#endif
#endif
            __syncthreads();
        }
    }
    // PREPARE_BF16: the flags are zero before.
#if PREPARE_ROWWISE
    if (!PREPARE_REBASED)
        report(along_place, PREPARE_BF16 ? m.rowwise_flag : &m.amax_state->beyond[0]);
    add_counts(along_place, along_tally, m.rowwise_counts);
#endif
#if PREPARE_COLUMNWISE
    if (!PREPARE_REBASED)
        report(down_place, PREPARE_BF16 ? m.columnwise_flag : &m.amax_state->beyond[1]);
    add_counts(down_place, down_tally, m.columnwise_counts);
#endif
    if (!PREPARE_BF16 && !PREPARE_REBASED)
        store_amax_state(m, blocks, PREPARE_ROWWISE ? along_place.largest : down_place.largest);
}

#if PREPARE_MULTI_TENSOR
// Multi-tensor: `count` matrices, a thread block per tile, rounded to nearest.
extern "C" __global__ void __launch_bounds__(kTileThreads, PREPARE_MIN_CTAS)
    operands(const Matrix* __restrict__ all, int count) {
    int mine = 0;
    for (int above = count; above - mine > 1;) {
        const int middle = (mine + above) / 2;
        (all[middle].start <= blockIdx.x ? mine : above) = middle;
    }
    const Matrix m = all[mine];
    const Window whole = all_of(m);
    work(m, whole, blockIdx.x - m.start, tiles_of(whole), Stream{}, Stream{});
}
#else
extern "C" __global__ void __launch_bounds__(kTileThreads, PREPARE_MIN_CTAS)
    operands(const Raw* __restrict__ x, AmaxState* amax_state, u8* __restrict__ rowwise,
        u8* __restrict__ columnwise, int* __restrict__ exponent, u32* __restrict__ rowwise_flag,
        u32* __restrict__ columnwise_flag, float* __restrict__ rowwise_scales,
        float* __restrict__ columnwise_scales, u64* __restrict__ rowwise_counts,
        u64* __restrict__ columnwise_counts, const u32* __restrict__ guard,
        const u32* __restrict__ other_guard, const u32* __restrict__ clock, u32 a0, u32 a1, u32 a2,
        u32 a3, u32 d0, u32 d1, u32 d2, u32 d3, i64 rows, i64 columns
#if PREPARE_WINDOW
        ,
        i64 row0, i64 column0, i64 row_end, i64 column_end
#endif
    ) {
    if (guard && !(*guard | *other_guard)) return;
#if PREPARE_WINDOW
    rowwise -= row0 * ((columns + 15) / 16 * 16) * kOut;
    columnwise -= column0 * ((rows + 15) / 16 * 16) * kOut;
#endif
    const Matrix m = {x, amax_state, rowwise, columnwise, exponent, rowwise_flag, columnwise_flag,
        rowwise_counts, columnwise_counts, rows, columns, 0, rowwise_scales, columnwise_scales};
#if PREPARE_WINDOW
    const Window window = {row0, column0, row_end, column_end};
#else
    const Window window = all_of(m);
#endif
    work(m, window, blockIdx.x, gridDim.x, stream_of(clock, a0, a1, a2, a3),
        stream_of(clock, d0, d1, d2, d3));
}
#endif

// Finds the largest finite magnitude of `vectors` 16-byte vectors, as float bits; `maximum` starts
// at 0.
extern "C" __global__ void __launch_bounds__(256)
    largest(const uint4* __restrict__ x, u32* __restrict__ maximum, i64 vectors) {
    u32 most = 0;
    const i64 step = static_cast<i64>(gridDim.x) * 256;
#pragma unroll 4
    for (i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x; i < vectors; i += step) {
        const uint4 four = __ldg(x + i);
        const u32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) {
            const u32 magnitude = bits_of(element(words, k)) & kMagnitude;
            most = larger(most, magnitude < kExponent ? magnitude : 0);
        }
    }
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0 && most > *reinterpret_cast<volatile u32*>(maximum))
        atomicMax(maximum, most);
}
