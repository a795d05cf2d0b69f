// Values -> the operands of a product on Hopper's tensor cores: MXFP4 along rows, down columns, or
// both in one pass, as E5M2 codes under one power of two for the whole tensor (see rebase.cu for
// why that is exact), contraction contiguous. What the blocks round to is byte for byte what
// quantize.cu stores, which shares these headers.
//
// The power of two comes from the tensor's largest magnitude: `anchor` is the scale byte of a block
// that held it. A block of numbers below the window, or above the anchor, raises the flag: then
// the codes are not used, and the same kernel with WIDE writes the values as bfloat16 instead.
//
// A block of threads has a tile of kRows x 128 in shared memory. No headers but ours; the macros
// are quantize.cu's and ALONG, DOWN_TOO, WIDE, TOP, SPAN, RESIDENT.

#include "input.cuh"
#include "scale.cuh"
#include "encode.cuh"
#include "pairs.cuh"

constexpr int kRows = sizeof(Raw) == 2 && !WIDE ? 128 : 64, kColumns = 128, kTileThreads = 2 * kRows;
constexpr int kRowWords = kColumns * sizeof(Raw) / 4;  // of the tile in shared memory
constexpr int kOut = WIDE ? 2 : 1, kUnits = kOut;      // bytes a value; 16-byte units a chunk
constexpr int kTurnedUnits = kRows * kOut / 16;        // units of a column of the tile
constexpr int kMask = kTurnedUnits < 8 ? kTurnedUnits - 1 : 7;
constexpr int kRead = sizeof(Raw) * kChunk / 4;        // words of a chunk of a row

struct Place {
    int anchor;
    u32 beyond;  // whether a block of numbers lies outside the window
};

__device__ __forceinline__ u32 shared_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ u32 e5m2_pair(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

// Four 4-bit codes -> four bytes, by a table of magnitudes.
__device__ __forceinline__ u32 look_up(u32 codes, u32 low, u32 high) {
    const u32 sign = (codes & 0x8u) << 4 | (codes & 0x80u) << 8 | (codes & 0x800u) << 12 |
                     (codes & 0x8000u) << 16;
    return __byte_perm(low, high, codes & 0x7777u) | sign;
}

// The E5M2 codes of a block's eight magnitudes.
__device__ __forceinline__ uint2 table_of(const Scale& s, const Place& place) {
    if (!s.live) return uint2{0x7F7F7F7Fu, 0x7F7F7F7Fu};
    const int shift = min(max(static_cast<int>(s.stored) - place.anchor + TOP, TOP - SPAN), TOP);
    const float unit = float_of(static_cast<u32>(shift + 127) << 23);
    return uint2{e5m2_pair(0.0f, 0.5f * unit) | e5m2_pair(unit, 1.5f * unit) << 16,
                 e5m2_pair(2.0f * unit, 3.0f * unit) | e5m2_pair(4.0f * unit, 6.0f * unit) << 16};
}

// 16 codes of 4 bits, or 16 decoded values, -> 16-byte units of the operand.
__device__ __forceinline__ void finish(const u32 (&packed)[kWords], const float (&v)[kChunk],
                                       const Scale& s, const uint2& table, Place& place,
                                       uint4 (&units)[kUnits]) {
#if WIDE
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        u32 word[4];
#pragma unroll
        for (int w = 0; w < 4; ++w)
            word[w] = bits_of(v[8 * u + 2 * w]) >> 16 | (bits_of(v[8 * u + 2 * w + 1]) & 0xFFFF0000u);
        units[u] = uint4{word[0], word[1], word[2], word[3]};
    }
#else
    const int shift = static_cast<int>(s.stored) - place.anchor;
    if (s.live && (shift > 0 || shift < -SPAN) && ((packed[0] | packed[1]) & 0x77777777u))
        place.beyond = 1;
    units[0] = uint4{look_up(packed[0], table.x, table.y), look_up(packed[0] >> 16, table.x, table.y),
                     look_up(packed[1], table.x, table.y), look_up(packed[1] >> 16, table.x, table.y)};
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
    finish(packed, v, s, table_of(s, place), place, units);
}

__device__ __forceinline__ void report(const Place& place, u32* flag) {
    if (__any_sync(~0u, place.beyond) && threadIdx.x % 32 == 0) atomicOr(flag, 1u);
}

__device__ __forceinline__ void add_counts(const Tally& tally, u64* counters) {
#if STATS
    const u32 saturated = __reduce_add_sync(~0u, tally.saturated);
    const u32 flushed = __reduce_add_sync(~0u, tally.flushed);
    if (threadIdx.x % 32 == 0) {
        u64* slot = counters + (blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32) % kSlots * 2;
        if (saturated) atomicAdd(slot, static_cast<u64>(saturated));
        if (flushed) atomicAdd(slot + 1, static_cast<u64>(flushed));
    }
#endif
}

// The tile at (row0, column0) of x (rows, columns), zeros outside, without waiting.
__device__ __forceinline__ void fetch(u32 (*tile)[kRowWords], const Raw* x, i64 row0, i64 column0,
                                      i64 rows, i64 columns) {
    constexpr int kAcross = kRowWords / 4;
#pragma unroll
    for (int i = 0; i < kRows * kAcross / kTileThreads; ++i) {
        const int unit = i * kTileThreads + threadIdx.x, row = unit / kAcross, word = unit % kAcross * 4;
        const i64 column = column0 + word * 4 / static_cast<int>(sizeof(Raw));
        const bool inside = row0 + row < rows && column < columns;
        const Raw* from = inside ? x + (row0 + row) * columns + column : x;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(&tile[row][word])),
                     "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    }
}

// Rows of the tile -> `out` (rows, pitch): a thread has 16 neighbours at a time.
__device__ __forceinline__ void along_rows(const u32 (*tile)[kRowWords], u8* out, i64 row0,
                                           i64 column0, i64 rows, i64 columns, const Stream& stream,
                                           Place& place, Tally& tally) {
    const i64 pitch = (columns + 15) / 16 * 16, blocks = (columns + BLOCK - 1) / BLOCK;
#pragma unroll 1
    for (int i = 0; i < kRows * (kColumns / kChunk) / kTileThreads; ++i) {
        const int chunk = i * kTileThreads + threadIdx.x;
        const int row = chunk / (kColumns / kChunk), start = chunk % (kColumns / kChunk) * kChunk;
        u32 raw[kRead];
#pragma unroll
        for (int w = 0; w < kRead; w += 4) {
            const uint4 four = *reinterpret_cast<const uint4*>(&tile[row][start / kChunk * kRead + w]);
            raw[w] = four.x, raw[w + 1] = four.y, raw[w + 2] = four.z, raw[w + 3] = four.w;
        }
        uint4 units[kUnits];
        const i64 column = column0 + start;
#if PAIRS
        const u32 pair = pair_maximum<8, 1>(raw);
        const u32 amax = across_lanes(larger(low_float(pair), high_float(pair)));
        const Scale s = block_scale(amax, Tensor{1, 1, 0, 1});
        u32 packed[kWords];
        encode_pairs(raw, s, is_far(amax, s), packed, tally);
        const float none[kChunk] = {};
        finish(packed, none, s, table_of(s, place), place, units);
#else
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = element(raw, k);
        const u32 amax = across_lanes(chunk_maximum(v));
        make(v, amax, static_cast<u32>((row0 + row) * blocks + column / BLOCK),
             static_cast<u32>(start % BLOCK / kChunk), stream, place, units, tally);
#endif
        if (row0 + row < rows && column < columns) {
            uint4* to = reinterpret_cast<uint4*>(out + ((row0 + row) * pitch + column) * kOut);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) to[u] = units[u];
        }
    }
}

// Columns of the tile -> `turned`, a row of units for each: a thread has two blocks side by side.
__device__ __forceinline__ void down_columns(const u32 (*tile)[kRowWords],
                                             uint4 (*turned)[kTurnedUnits], i64 row0, i64 column0,
                                             i64 columns, const Stream& stream, Place& place,
                                             Tally& tally) {
    static_assert(BLOCK == 32, "a thread holds blocks of 32");
    const int pair = threadIdx.x % 64, block = threadIdx.x / 64, top = 32 * block;
    const auto put = [&](int c, int h, const uint4(&units)[kUnits]) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
            turned[2 * pair + c][((2 * block + h) * kUnits + u) ^ (pair & kMask)] = units[u];
    };
    uint4 units[kUnits];
#if PAIRS
    u32 raw[kChunk], largest = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) raw[k] = tile[top + kChunk * h + k][pair];
        largest = pair_max(largest, pair_maximum<kChunk, 1>(raw));
    }
    largest &= kPairMagnitude;
    const u32 amax[2] = {low_float(largest), high_float(largest)};
    const Scale a = block_scale(amax[0], Tensor{1, 1, 0, 1});
    const Scale b = block_scale(amax[1], Tensor{1, 1, 0, 1});
    const bool far = is_far(amax[0], a) || is_far(amax[1], b);
    const u32 scale = bits_of(a.apply) >> 16 | bits_of(b.apply);
    const u32 live = (a.live & 0xFFFFu) | (b.live & 0xFFFF0000u);
    const uint2 first = table_of(a, place), second = table_of(b, place);
    const float none[kChunk] = {};
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) raw[k] = tile[top + kChunk * h + k][pair];
        u32 q[4];  // codes of four rows each: the first column in the low half
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32 n = 0, signs = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 x = raw[4 * i + k];
                n |= round_pair(x, scale, far) << (4 * k);
                signs |= x >> (12 - 4 * k) & (0x00080008u << (4 * k));
            }
            q[i] = (saturate(n, live, tally) | signs) & live;
        }
        forget_zeros<kChunk, 1>(raw, live, tally);
        const u32 low[2] = {__byte_perm(q[0], q[1], 0x5410), __byte_perm(q[2], q[3], 0x5410)};
        const u32 high[2] = {__byte_perm(q[0], q[1], 0x7632), __byte_perm(q[2], q[3], 0x7632)};
        finish(low, none, a, first, place, units);
        put(0, h, units);
        finish(high, none, b, second, place, units);
        put(1, h, units);
    }
#else
    const i64 blocks = (row0 + top) / BLOCK * columns;
    const auto value = [&](int k, int c) {
        if (sizeof(Raw) == 4) return widen(tile[top + k][2 * pair + c]);
        const u32 word = tile[top + k][pair];
        return widen(c ? word >> 16 : word & 0xFFFFu);
    };
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
        u32 amax = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float v[kChunk];
#pragma unroll
            for (int k = 0; k < kChunk; ++k) v[k] = value(kChunk * h + k, c);
            amax = larger(amax, chunk_maximum(v));
        }
#pragma unroll 1
        for (int h = 0; h < 2; ++h) {
            float v[kChunk];
#pragma unroll
            for (int k = 0; k < kChunk; ++k) v[k] = value(kChunk * h + k, c);
            make(v, amax, static_cast<u32>(blocks + column0 + 2 * pair + c), h, stream, place, units,
                 tally);
            put(c, h, units);
        }
    }
#endif
}

// `turned` -> `out` (columns, pitch of rows).
__device__ __forceinline__ void store_turned(const uint4 (*turned)[kTurnedUnits], u8* out, i64 row0,
                                             i64 column0, i64 rows, i64 columns) {
    const i64 pitch = (rows + 15) / 16 * 16;
#pragma unroll
    for (int i = 0; i < kColumns * kTurnedUnits / kTileThreads; ++i) {
        const int at = i * kTileThreads + threadIdx.x, column = at / kTurnedUnits, unit = at % kTurnedUnits;
        const i64 row = row0 + unit * 16 / kOut;
        if (column0 + column < columns && row < rows)
            *reinterpret_cast<uint4*>(out + ((column0 + column) * pitch + row) * kOut) =
                turned[column][unit ^ (column / 2 & kMask)];
    }
}

extern "C" __global__ void __launch_bounds__(kTileThreads, RESIDENT)
operands(const Raw* __restrict__ x, const u32* __restrict__ amax, u8* __restrict__ along,
         u8* __restrict__ down, int* __restrict__ exponent, u32* __restrict__ along_flag,
         u32* __restrict__ down_flag, u64* __restrict__ along_counts, u64* __restrict__ down_counts,
         const u32* __restrict__ guard, const u32* __restrict__ other_guard, u32 a0, u32 a1, u32 a2,
         u32 a3, u32 d0, u32 d1, u32 d2, u32 d3, i64 rows, i64 columns) {
    if (guard && !(*guard | *other_guard)) return;
    const Stream along_stream = {a0, a1, a2, a3}, down_stream = {d0, d1, d2, d3};
    const int anchor = WIDE ? 0 : static_cast<int>(block_scale(*amax, Tensor{1, 1, 0, 1}).stored);
    if (!WIDE && blockIdx.x == 0 && threadIdx.x == 0) *exponent = anchor - 127 - TOP;
    Place along_place = {anchor, 0}, down_place = {anchor, 0};
    Tally along_tally = {0, 0}, down_tally = {0, 0};
    __shared__ __align__(16) u32 tile[kRows][kRowWords];
#if DOWN_TOO
    __shared__ uint4 turned[kColumns][kTurnedUnits];
#endif
    const i64 across = (columns + kColumns - 1) / kColumns, tiles = (rows + kRows - 1) / kRows * across;
    for (i64 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const i64 row0 = index / across * kRows, column0 = index % across * kColumns;
        fetch(tile, x, row0, column0, rows, columns);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
#if ALONG
        along_rows(tile, along, row0, column0, rows, columns, along_stream, along_place, along_tally);
#endif
#if DOWN_TOO
        down_columns(tile, turned, row0, column0, columns, down_stream, down_place, down_tally);
        __syncthreads();
        store_turned(turned, down, row0, column0, rows, columns);
#endif
        __syncthreads();
    }
#if ALONG
    if (!WIDE) report(along_place, along_flag);
    add_counts(along_tally, along_counts);
#endif
#if DOWN_TOO
    if (!WIDE) report(down_place, down_flag);
    add_counts(down_tally, down_counts);
#endif
}

// The largest finite magnitude of `vectors` times 16 bytes, as float bits; `maximum` starts at zero.
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
