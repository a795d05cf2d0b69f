// Values -> the operands of a product on Hopper's tensor cores: MXFP4 along rows, down columns, or
// both in one pass, as E5M2 codes under one power of two for the whole tensor (see rebase_mxfp4.cu
// for why that is exact), contraction contiguous. What the blocks round to is byte for byte what
// quantize.cu stores, which shares these headers.
//
// The power of two comes from the largest magnitude that the tensor had before, in `history`, where
// the last block of threads leaves the one found now: `anchor` is the scale byte of a block that
// held it, plus PREPARE_MARGIN. It changes no value while all blocks of numbers lie within the
// window below it. One that does not raises the flag: then the codes are not used, and the same
// kernel with PREPARE_BF16 writes the values as bfloat16 instead. Formats that do not fit FP8 are
// written as bfloat16 at once; there the flag says that a value had to be rounded, which takes a
// scale near the least there is.
//
// PREPARE_REBASED: MXFP8 as FP8 codes, the blocks of each square of 128 x 128 under the largest of
// their scales (rebase_fp8.cuh), which goes to `along_scales` and `down_scales`, (squares along the
// contraction, pitch): a float for every four of the other axis, as the GEMM reads them. The square
// is looked at before.
//
// A block of threads has a tile of kRows x 128 in shared memory. No headers but ours; the macros
// are quantize.cu's and PREPARE_ROWWISE, PREPARE_COLUMNWISE, PREPARE_BF16, PREPARE_REBASED,
// PREPARE_MULTI_TENSOR, CODEC_LIFT, PREPARE_SPAN, PREPARE_MARGIN, PREPARE_MIN_CTAS.

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
constexpr int kRowWords = kColumns * sizeof(Raw) / 4;      // of the tile in shared memory
constexpr int kOut = PREPARE_BF16 ? 2 : 1, kUnits = kOut;  // bytes a value; 16-byte units a chunk
constexpr int kTurnedUnits = kRows * kOut / 16;            // units of a column of the tile
constexpr int kMask = kTurnedUnits < 8 ? kTurnedUnits - 1 : 7;
constexpr int kRead = sizeof(Raw) * kChunk / 4;  // words of a chunk of a row
constexpr int kSide = 128,
              kTogether = PREPARE_REBASED ? kSide / kRows
                                          : 1;  // PREPARE_REBASED: of a square; tiles that make one
constexpr int kShared = 4,
              kBehind = 64;  // PREPARE_REBASED: lines of a float, and floats behind the last

// The E5M2 codes of a block's eight magnitudes.
__device__ __forceinline__ uint2 table_of(const Scale& s, const Place& place) {
    if (!s.live) return uint2{0x7F7F7F7Fu, 0x7F7F7F7Fu};
    const int shift =
        min(max(static_cast<int>(s.stored) - place.anchor + CODEC_LIFT, CODEC_LIFT - PREPARE_SPAN),
            CODEC_LIFT);
    const float unit = float_of(static_cast<u32>(shift + 127) << 23);
    return e5m2_table(unit);
}

// Notes a block's magnitude; whether it lies outside the window, if one of its codes is not zero.
__device__ __forceinline__ bool is_beyond(const Scale& s, u32 amax, Place& place) {
    place.largest = larger(place.largest, amax < kExponent ? amax : 0);
    const int shift = static_cast<int>(s.stored) - place.anchor;
    return s.live && (shift > 0 || shift < -PREPARE_SPAN);
}

// Four magnitudes in the low nibbles, and bytes whose top bits are signs -> four E5M2 codes.
__device__ __forceinline__ u32 signed_bytes(const uint2& table, u32 magnitudes, u32 signs,
                                            u32 live) {
    return __byte_perm(table.x, table.y, magnitudes) | (signs & (live & 0x80808080u));
}

// 16 codes of 4 bits, or 16 decoded values, -> 16-byte units of the operand.
__device__ __forceinline__ void finish(const u32 (&packed)[kWords], const float (&v)[kChunk],
                                       const Scale& s, u32 amax, const uint2& table, Place& place,
                                       uint4 (&units)[kUnits]) {
#if PREPARE_REBASED
    const int shift = min(place.anchor - static_cast<int>(s.stored), kMostBinades);
    u32 word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w)
        word[w] = shift ? rebased(packed[w], shift, place.changed) : packed[w];
    const u32 nan = kAllNaN & ~s.live;
    units[0] = uint4{word[0] | nan, word[1] | nan, word[2] | nan, word[3] | nan};
#elif PREPARE_BF16
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        u32 word[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (s.live && ((bits_of(v[8 * u + 2 * w]) | bits_of(v[8 * u + 2 * w + 1])) & 0xFFFFu))
                place.beyond = 1;
            word[w] =
                bits_of(v[8 * u + 2 * w]) >> 16 | (bits_of(v[8 * u + 2 * w + 1]) & 0xFFFF0000u);
        }
        units[u] = uint4{word[0], word[1], word[2], word[3]};
    }
#else
    if (is_beyond(s, amax, place) && (packed[0] | packed[1]) & 0x77777777u) place.beyond = 1;
    units[0] = uint4{look_up(packed[0], table), look_up(packed[0] >> 16, table),
                     look_up(packed[1], table), look_up(packed[1] >> 16, table)};
#endif
}

// A chunk of 16 values of one block, whose largest magnitude is known.
__device__ __forceinline__ void make(float (&v)[kChunk], u32 amax, u32 block, u32 part,
                                     const Stream& stream, Place& place, uint4 (&units)[kUnits],
                                     Tally& tally) {
    const Tensor tensor = {1, 1, 0, 1};
    const Scale s = block_scale(amax, tensor);
    u32 packed[kWords];
    encode(v, s, is_far(amax, s), tensor, block, part, stream, packed, tally);
    finish(packed, v, s, amax, PREPARE_BF16 || PREPARE_REBASED ? uint2{0, 0} : table_of(s, place),
           place, units);
}

__device__ __forceinline__ void add_counts(const Place& place, const Tally& tally, u64* counters) {
#if CODEC_STATS
    const u32 saturated = __reduce_add_sync(~0u, tally.saturated);
    const u32 flushed = __reduce_add_sync(~0u, tally.flushed);
    if (threadIdx.x % 32 == 0) {
        u64* slot = counters + (blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32) % kSlots * 2;
        if (saturated) atomicAdd(slot, static_cast<u64>(saturated));
        if (flushed) atomicAdd(slot + 1, static_cast<u64>(flushed));
    }
#if PREPARE_REBASED
    const u32 values = __reduce_add_sync(~0u, place.changed.values);
    const u32 gone = __reduce_add_sync(~0u, place.changed.flushed);
    if (threadIdx.x % 32 == 0 && values) {
        u64* slot = counters + (blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32) % kSlots * 2 +
                    2 * kSlots;
        atomicAdd(slot, static_cast<u64>(values));
        if (gone) atomicAdd(slot + 1, static_cast<u64>(gone));
    }
#endif
#endif
}

// Where a word of a row lies: rows that follow each other have theirs in different banks.
__device__ __forceinline__ u32 swizzled(u32 row, u32 word) { return word ^ (row % 8 * 4); }

// The tile at (row0, column0) of x (rows, columns), zeros outside, without waiting.
__device__ __forceinline__ void fetch(u32 (*tile)[kRowWords], const Raw* x, int row0, int column0,
                                      i64 rows, i64 columns) {
    constexpr int kAcross = kRowWords / 4,
                  kApart = kTileThreads / kAcross;  // units of a row; rows at a time
    const int first = threadIdx.x / kAcross, word = threadIdx.x % kAcross * 4;
    const int column = column0 + word * 4 / static_cast<int>(sizeof(Raw));
    const Raw* at = x + static_cast<i64>(row0 + first) * columns + column;
#pragma unroll
    for (int i = 0; i < kRows / kApart; ++i, at += kApart * columns) {
        const int row = first + i * kApart;
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

// `turned` -> `out` (columns, pitch of rows).
__device__ __forceinline__ void store_turned(const uint4 (*turned)[kTurnedUnits], u8* out, int row0,
                                             int column0, i64 rows, i64 columns) {
    const i64 pitch = (rows + 15) / 16 * 16;
#pragma unroll
    for (int i = 0; i < kColumns * kTurnedUnits / kTileThreads; ++i) {
        const int at = i * kTileThreads + threadIdx.x, column = at / kTurnedUnits,
                  unit = at % kTurnedUnits;
        const int row = row0 + unit * 16 / kOut;
        if (column0 + column < columns && row < rows)
            *reinterpret_cast<uint4*>(out + ((column0 + column) * pitch + row) * kOut) =
                turned[column][unit ^ (column / 2 & kMask)];
    }
}

__device__ __forceinline__ i64 tiles_of(const Matrix& m) {
    return (m.rows + kTogether * kRows - 1) / (kTogether * kRows) *
           ((m.columns + kColumns - 1) / kColumns);
}

// A block of threads' share of the tiles: from `first` on, as many apart as `blocks` there are.
__device__ __forceinline__ void work(const Matrix& m, i64 first, u32 blocks,
                                     const Stream& along_stream, const Stream& down_stream) {
#if PREPARE_BF16 || PREPARE_REBASED
    const int anchor = 0;
#else
    const int anchor = static_cast<int>(block_scale(m.history->before, Tensor{1, 1, 0, 1}).stored) +
                       PREPARE_MARGIN;
    if (first == 0 && threadIdx.x == 0) *m.exponent = anchor - 127 - CODEC_LIFT;
#endif
    Place along_place = {anchor, 0, 0}, down_place = {anchor, 0, 0};
    Tally along_tally = {0, 0}, down_tally = {0, 0};
    __shared__ __align__(16) u32 tile[kRows][kRowWords];
#if PREPARE_COLUMNWISE
    __shared__ uint4 turned[kColumns][kTurnedUnits];
#elif PREPARE_REBASED
    __shared__ u32 turned[kTileThreads / 32];
#endif
    const i64 across = (m.columns + kColumns - 1) / kColumns, tiles = tiles_of(m);
    for (i64 index = first; index < tiles; index += blocks) {
        const int square = static_cast<int>(index / across) * kTogether * kRows;
        const int column0 = static_cast<int>(index % across) * kColumns;
        const auto bring = [&](int row0) {
            fetch(tile, m.x, row0, column0, m.rows, m.columns);
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
        };
#if PREPARE_REBASED
        u32 along_most = 0, down_most = 0;
        bool numbers = true;
#pragma unroll 1
        for (int part = 0; part < kTogether; ++part) {
            bring(square + part * kRows);
            numbers &= survey(tile, reinterpret_cast<u32*>(turned), along_most, down_most);
        }
        place_square(along_place, along_most, numbers, m.along_scales, column0, square, m.rows);
        place_square(down_place, down_most, numbers, m.down_scales, square, column0, m.columns);
#endif
#pragma unroll 1
        for (int part = kTogether - 1; part >= 0; --part) {
            const int row0 = square + part * kRows;
            if (!PREPARE_REBASED || part < kTogether - 1) bring(row0);
#if PREPARE_ROWWISE
            along_rows(tile, m.along, row0, column0, m.rows, m.columns, along_stream, along_place,
                       along_tally);
#endif
#if PREPARE_COLUMNWISE
            down_columns(tile, turned, row0, column0, m.columns, down_stream, down_place,
                         down_tally);
            __syncthreads();
            store_turned(turned, m.down, row0, column0, m.rows, m.columns);
#endif
            __syncthreads();
        }
    }
    // PREPARE_BF16: in flags that are zero before.
#if PREPARE_ROWWISE
    if (!PREPARE_REBASED) report(along_place, PREPARE_BF16 ? m.along_flag : &m.history->beyond[0]);
    add_counts(along_place, along_tally, m.along_counts);
#endif
#if PREPARE_COLUMNWISE
    if (!PREPARE_REBASED) report(down_place, PREPARE_BF16 ? m.down_flag : &m.history->beyond[1]);
    add_counts(down_place, down_tally, m.down_counts);
#endif
    if (!PREPARE_BF16 && !PREPARE_REBASED)
        remember(m, blocks, PREPARE_ROWWISE ? along_place.largest : down_place.largest);
}

#if PREPARE_MULTI_TENSOR
// Of `count` matrices, a block of threads for each tile; to nearest, as nobody draws for them.
extern "C" __global__ void __launch_bounds__(kTileThreads, PREPARE_MIN_CTAS)
    operands(const Matrix* __restrict__ all, int count) {
    int mine = 0;
    for (int above = count; above - mine > 1;) {
        const int middle = (mine + above) / 2;
        (all[middle].start <= blockIdx.x ? mine : above) = middle;
    }
    const Matrix m = all[mine];
    work(m, blockIdx.x - m.start, static_cast<u32>(tiles_of(m)), Stream{}, Stream{});
}
#else
extern "C" __global__ void __launch_bounds__(kTileThreads, PREPARE_MIN_CTAS)
    operands(const Raw* __restrict__ x, History* history, u8* __restrict__ along,
             u8* __restrict__ down, int* __restrict__ exponent, u32* __restrict__ along_flag,
             u32* __restrict__ down_flag, float* __restrict__ along_scales,
             float* __restrict__ down_scales, u64* __restrict__ along_counts,
             u64* __restrict__ down_counts, const u32* __restrict__ guard,
             const u32* __restrict__ other_guard, const u32* __restrict__ clock, u32 a0, u32 a1,
             u32 a2, u32 a3, u32 d0, u32 d1, u32 d2, u32 d3, i64 rows, i64 columns) {
    if (guard && !(*guard | *other_guard)) return;
    const Matrix m = {x,          history,   along,        down,        exponent,
                      along_flag, down_flag, along_counts, down_counts, rows,
                      columns,    0,         along_scales, down_scales};
    work(m, blockIdx.x, gridDim.x, stream_of(clock, a0, a1, a2, a3),
         stream_of(clock, d0, d1, d2, d3));
}
#endif

// The largest finite magnitude of `vectors` times 16 bytes, as float bits; `maximum` starts at
// zero.
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
