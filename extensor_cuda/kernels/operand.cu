// Values -> the operands of a product on Hopper's tensor cores: MXFP4 along rows, down columns, or
// both in one pass, as E5M2 codes under one power of two for the whole tensor (see rebase.cu for
// why that is exact), contraction contiguous. What the blocks round to is byte for byte what
// quantize.cu stores, which shares these headers.
//
// The power of two comes from the largest magnitude that the tensor had before, in `history`, where
// the last block of threads leaves the one found now: `anchor` is the scale byte of a block that held
// it, plus MARGIN. It changes no value while all blocks of numbers lie within the window below it. One
// that does not raises the flag: then the codes are not used, and the same kernel with WIDE writes
// the values as bfloat16 instead. Formats that do not fit FP8 are written as bfloat16 at once; there
// the flag says that a value had to be rounded, which takes a scale near the least there is.
//
// NEAR: MXFP8 as FP8 codes, the blocks of each square of 128 x 128 under the largest of their scales
// (near.cuh), which goes to `along_scales` and `down_scales`, (squares along the contraction, pitch):
// a float for every four of the other axis, as the GEMM reads them. The square is looked at before.
//
// A block of threads has a tile of kRows x 128 in shared memory. No headers but ours; the macros
// are quantize.cu's and ALONG, DOWN_TOO, WIDE, NEAR, MANY, LIFT, SPAN, MARGIN, RESIDENT.

#include "input.cuh"
#include "scale.cuh"
#include "encode.cuh"
#include "pairs.cuh"
#include "halves.cuh"
#include "rebased.cuh"
#if NEAR
#include "near.cuh"
#endif
#include "history.cuh"

constexpr int kRows = sizeof(Raw) == 2 && !WIDE ? 128 : 64, kColumns = 128, kTileThreads = 2 * kRows;
constexpr int kRowWords = kColumns * sizeof(Raw) / 4;  // of the tile in shared memory
constexpr int kOut = WIDE ? 2 : 1, kUnits = kOut;      // bytes a value; 16-byte units a chunk
constexpr int kTurnedUnits = kRows * kOut / 16;        // units of a column of the tile
constexpr int kMask = kTurnedUnits < 8 ? kTurnedUnits - 1 : 7;
constexpr int kRead = sizeof(Raw) * kChunk / 4;        // words of a chunk of a row
constexpr int kSide = 128, kTogether = NEAR ? kSide / kRows : 1;  // NEAR: of a square; tiles that make one
constexpr int kShared = 4, kBehind = 64;  // NEAR: lines of a float, and floats behind the last

// The E5M2 codes of a block's eight magnitudes.
__device__ __forceinline__ uint2 table_of(const Scale& s, const Place& place) {
    if (!s.live) return uint2{0x7F7F7F7Fu, 0x7F7F7F7Fu};
    const int shift = min(max(static_cast<int>(s.stored) - place.anchor + LIFT, LIFT - SPAN), LIFT);
    const float unit = float_of(static_cast<u32>(shift + 127) << 23);
    return e5m2_table(unit);
}

// Notes a block's magnitude; whether it lies outside the window, if one of its codes is not zero.
__device__ __forceinline__ bool is_beyond(const Scale& s, u32 amax, Place& place) {
    place.largest = larger(place.largest, amax < kExponent ? amax : 0);
    const int shift = static_cast<int>(s.stored) - place.anchor;
    return s.live && (shift > 0 || shift < -SPAN);
}

// Four magnitudes in the low nibbles, and bytes whose top bits are signs -> four E5M2 codes.
__device__ __forceinline__ u32 signed_bytes(const uint2& table, u32 magnitudes, u32 signs, u32 live) {
    return __byte_perm(table.x, table.y, magnitudes) | (signs & (live & 0x80808080u));
}

// 16 codes of 4 bits, or 16 decoded values, -> 16-byte units of the operand.
__device__ __forceinline__ void finish(const u32 (&packed)[kWords], const float (&v)[kChunk],
                                       const Scale& s, u32 amax, const uint2& table, Place& place,
                                       uint4 (&units)[kUnits]) {
#if NEAR
    const int shift = min(place.anchor - static_cast<int>(s.stored), kMostBinades);
    u32 word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) word[w] = shift ? rebased(packed[w], shift, place.changed) : packed[w];
    const u32 nan = kAllNaN & ~s.live;
    units[0] = uint4{word[0] | nan, word[1] | nan, word[2] | nan, word[3] | nan};
#elif WIDE
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        u32 word[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            if (s.live && ((bits_of(v[8 * u + 2 * w]) | bits_of(v[8 * u + 2 * w + 1])) & 0xFFFFu))
                place.beyond = 1;
            word[w] = bits_of(v[8 * u + 2 * w]) >> 16 | (bits_of(v[8 * u + 2 * w + 1]) & 0xFFFF0000u);
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
    finish(packed, v, s, amax, WIDE || NEAR ? uint2{0, 0} : table_of(s, place), place, units);
}

__device__ __forceinline__ void add_counts(const Place& place, const Tally& tally, u64* counters) {
#if STATS
    const u32 saturated = __reduce_add_sync(~0u, tally.saturated);
    const u32 flushed = __reduce_add_sync(~0u, tally.flushed);
    if (threadIdx.x % 32 == 0) {
        u64* slot = counters + (blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32) % kSlots * 2;
        if (saturated) atomicAdd(slot, static_cast<u64>(saturated));
        if (flushed) atomicAdd(slot + 1, static_cast<u64>(flushed));
    }
#if NEAR
    const u32 values = __reduce_add_sync(~0u, place.changed.values);
    const u32 gone = __reduce_add_sync(~0u, place.changed.flushed);
    if (threadIdx.x % 32 == 0 && values) {
        u64* slot = counters + (blockIdx.x * (kTileThreads / 32) + threadIdx.x / 32) % kSlots * 2 + 2 * kSlots;
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
    constexpr int kAcross = kRowWords / 4, kApart = kTileThreads / kAcross;  // units of a row; rows at a time
    const int first = threadIdx.x / kAcross, word = threadIdx.x % kAcross * 4;
    const int column = column0 + word * 4 / static_cast<int>(sizeof(Raw));
    const Raw* at = x + static_cast<i64>(row0 + first) * columns + column;
#pragma unroll
    for (int i = 0; i < kRows / kApart; ++i, at += kApart * columns) {
        const int row = first + i * kApart;
        const bool inside = row0 + row < rows && column < columns;
        const Raw* from = inside ? at : x;
        u32* to = &tile[row][swizzled(row, word)];
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<u32>(__cvta_generic_to_shared(to))),
                     "l"(from), "r"(inside ? 16 : 0)
                     : "memory");
    }
}

#define SWIFT 0
#if NEAR
// The largest float bits that a block of threads has.
__device__ __forceinline__ u32 over_threads(u32 mine, u32* scratch) {
    const u32 most = __reduce_max_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
    __syncthreads();
    u32 all = scratch[0];
#pragma unroll
    for (int w = 1; w < kTileThreads / 32; ++w) all = larger(all, scratch[w]);
    __syncthreads();
    return all;
}

// What values round to under the square's scale alone: a normal code is the same under its block's.
#undef SWIFT
#define SWIFT (IN <= 1 && RULE == 1 && !WORDS)
#if SWIFT
// The least magnitude, zeros left out, less one, as float bits.
template <int N>
__device__ __forceinline__ u32 least_of(const u32 (&words)[N]) {
    u32 least = ~0u;
#pragma unroll
    for (int k = 0; k < N; ++k) {
#if IN == 1
        least = __viaddmin_u16x2(words[k] & kPairMagnitude, ~0u, least);
#else
        least = __viaddmin_u32(words[k] & kMagnitude, ~0u, least);
#endif
    }
    return IN == 1 ? smaller(least & 0xFFFFu, least >> 16) << 16 : least;
}

// Four values on the grid, not beyond its top.
__device__ __forceinline__ u32 four_codes(u32 a, u32 b, u32 c, u32 d, float scale) {
    const float y[4] = {float_of(a) * scale, float_of(b) * scale, float_of(c) * scale, float_of(d) * scale};
#if CONVERTS
    return __byte_perm(convert_pair(y[0], y[1]), convert_pair(y[2], y[3]), 0x5410);
#else
    u32 codes = 0;
    for (int i = 0; i < 4; ++i) {
        float value;
        codes |= (round_magnitude(y[i], 0, value) | bits_of(y[i]) >> 31 << 7) << (8 * i);
    }
    return codes;
#endif
}
#endif

__device__ __forceinline__ float value_at(const u32 (*tile)[kRowWords], int row, int column) {
    constexpr int kEach = 4 / sizeof(Raw);
    const u32 word = tile[row][swizzled(row, column / kEach)];
    return widen(kEach == 1 ? word : column % 2 ? word >> 16 : word & 0xFFFFu);
}

// Raises `along` and `down` to the largest magnitudes of the tile's blocks of numbers either way; whether
// all are.
__device__ __forceinline__ bool survey(const u32 (*tile)[kRowWords], u32* scratch, u32& along, u32& down) {
    const uint4* units = reinterpret_cast<const uint4*>(tile);
    u32 most = 0, pairs = 0;
#pragma unroll 4
    for (int i = 0; i < kRows * kRowWords / 4 / kTileThreads; ++i) {
        const uint4 four = units[i * kTileThreads + threadIdx.x];
        const u32 words[4] = {four.x, four.y, four.z, four.w};
#if IN == 1
#pragma unroll
        for (int k = 0; k < 4; ++k) pairs = pair_max(pairs, words[k] & kPairMagnitude);
#else
#pragma unroll
        for (int k = 0; k < kPerVector; ++k) most = larger(most, bits_of(element(words, k)) & kMagnitude);
#endif
    }
    most = over_threads(larger(most, larger(low_float(pairs), high_float(pairs))), scratch);
    if (most < kExponent) {
        along = larger(along, most), down = larger(down, most);
        return true;
    }
    // What is no number takes its block with it, along rows another one than down columns.
#pragma unroll 1
    for (int way = 0; way < 2; ++way) {
        most = 0;
#pragma unroll 1
        for (int b = threadIdx.x; b < kRows * kColumns / BLOCK; b += kTileThreads) {
            const int row = way ? b / kColumns * BLOCK : b / (kColumns / BLOCK);
            const int column = way ? b % kColumns : b % (kColumns / BLOCK) * BLOCK;
            u32 amax = 0;
#pragma unroll 1
            for (int k = 0; k < BLOCK; ++k)
                amax = larger(amax, bits_of(value_at(tile, way ? row + k : row, way ? column : column + k)) & kMagnitude);
            if (amax < kExponent) most = larger(most, amax);
        }
        most = over_threads(most, scratch);
        along = way ? along : larger(along, most), down = way ? larger(down, most) : down;
    }
    return false;
}

// All of a square's blocks are under the scale of a magnitude, which is stored for its 128 lines.
__device__ __forceinline__ void place_square(Place& place, u32 most, bool numbers, float* scales, int along,
                                             int across, i64 lines) {
    const Scale s = block_scale(most, Tensor{1, 1, 0, 1});
    place.anchor = static_cast<int>(s.stored);
    place.apply = s.apply;
    const int least = place.anchor + MIN_EXPONENT;  // the exponent field of the least normal value
    place.limit = least > 0 ? static_cast<u32>(least << 23) - (IN == 1 ? 0x10000u : 1u) : IN == 1 ? 0xFFFF0000u : ~0u;
    place.careful = !numbers || ELEMENT_SCALE != 1.0f;
    const i64 pitch = (lines + kSide - 1) / kSide * (kSide / kShared) + kBehind;
    if (scales && threadIdx.x < kSide / kShared)
        scales[along / kSide * pitch + across / kShared + threadIdx.x] = s.decode;
}
#endif

#if HALVES
// Rows of the tile -> `out` (rows, pitch): a thread has a block at a time.
__device__ __forceinline__ void along_rows(const u32 (*tile)[kRowWords], u8* out, int row0,
                                           int column0, i64 rows, i64 columns, const Stream& stream,
                                           Place& place, Tally& tally) {
    const i64 pitch = (columns + 15) / 16 * 16;
    const u32 across_all = static_cast<u32>((columns + BLOCK - 1) / BLOCK);
#pragma unroll 1
    for (int part = 0; part < kRows * kColumns / BLOCK / kTileThreads; ++part) {
        const u32 i = part * kTileThreads + threadIdx.x;
        const u32 row = i / 32 * 8 + i % 8, start = i / 8 % 4 * BLOCK;  // lanes beside it: other rows
        const auto pairs = [&](int k, u32(&x)[4]) {
            const uint4 four = *reinterpret_cast<const uint4*>(&tile[row][swizzled(row, start / 2 + 4 * k)]);
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        };
        u32 x[4];
        Survey survey;
#pragma unroll
        for (int k = 0; k < 4; ++k) pairs(k, x), survey.add(x);
        const u32 amax = larger(low_float(survey.largest), high_float(survey.largest));
        const Scale s = block_scale(amax, Tensor{1, 1, 0, 1});
        const uint2 table = table_of(s, place);
        const bool careful = needs_care(is_far(amax, s), survey.least, s, s);
        Blocks block = {{s.apply, s.apply}, (row0 + row) * across_all + (column0 + start) / BLOCK, careful, stream};
        u8* to = out + (row0 + row) * pitch + column0 + start;
        const i64 left = row0 + row < rows ? columns - column0 - start : 0;
        const bool beyond = is_beyond(s, amax, place);
        u32 any = 0;
#pragma unroll 1
        for (int h = 0; h < 2; ++h) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                pairs(2 * h + j, x);
                const u32 n = saturate(across(x, 2 * h + j, block), s.live, tally);
                if (survey.zeros()) forget_zeros<4, 1>(x, s.live, tally);
                any |= n;
                words[2 * j] = signed_bytes(table, n, __byte_perm(x[0], x[1], 0x7531), s.live);
                words[2 * j + 1] = signed_bytes(table, n >> 16, __byte_perm(x[2], x[3], 0x7531), s.live);
            }
            if (16 * h < left)
                reinterpret_cast<uint4*>(to)[h] = uint4{words[0], words[1], words[2], words[3]};
        }
        if (beyond && any) place.beyond = 1;
    }
}
#else
// Rows of the tile -> `out` (rows, pitch): a thread has 16 neighbours at a time.
__device__ __forceinline__ void along_rows(const u32 (*tile)[kRowWords], u8* out, int row0,
                                           int column0, i64 rows, i64 columns, const Stream& stream,
                                           Place& place, Tally& tally) {
    const i64 pitch = (columns + 15) / 16 * 16, blocks = (columns + BLOCK - 1) / BLOCK;
#pragma unroll 1
    for (int i = 0; i < kRows * (kColumns / kChunk) / kTileThreads; ++i) {
        const int chunk = i * kTileThreads + threadIdx.x;
        const int row = chunk / (kColumns / kChunk), start = chunk % (kColumns / kChunk) * kChunk;
        u32 raw[kRead];
#pragma unroll
        for (int w = 0; w < kRead; w += 4) {
            const uint4 four =
                *reinterpret_cast<const uint4*>(&tile[row][swizzled(row, start / kChunk * kRead + w)]);
            raw[w] = four.x, raw[w + 1] = four.y, raw[w + 2] = four.z, raw[w + 3] = four.w;
        }
        uint4 units[kUnits];
        const int column = column0 + start;
#if SWIFT
        const auto of = [&](int k) { return bits_of(element(raw, k)); };
        const auto four = [&](int k) { return four_codes(of(k), of(k + 1), of(k + 2), of(k + 3), place.apply); };
        units[0] = uint4{four(0), four(4), four(8), four(12)};
        if (__any_sync(~0u, place.careful || least_of(raw) < place.limit)) {
#else
        {
#endif
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = element(raw, k);
        const u32 amax = across_lanes(chunk_maximum(v));
        make(v, amax, static_cast<u32>((row0 + row) * blocks + column / BLOCK),
             static_cast<u32>(start % BLOCK / kChunk), stream, place, units, tally);
        }
        if (row0 + row < rows && column < columns) {
            uint4* to = reinterpret_cast<uint4*>(out + ((row0 + row) * pitch + column) * kOut);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) to[u] = units[u];
        }
    }
}
#endif

// Columns of the tile -> `turned`, a row of units for each: a thread has two blocks side by side.
__device__ __forceinline__ void down_columns(const u32 (*tile)[kRowWords],
                                             uint4 (*turned)[kTurnedUnits], int row0, int column0,
                                             i64 columns, const Stream& stream, Place& place,
                                             Tally& tally) {
    static_assert(BLOCK == 32, "a thread holds blocks of 32");
    const int pair = threadIdx.x % 64, block = threadIdx.x / 64, top = 32 * block;
    const u32 number = (row0 + top) / BLOCK * static_cast<u32>(columns) + column0 + 2 * pair;
#if HALVES
    const auto put_word = [&](int c, int k, u32 word) {  // of rows 4 k to 4 k + 3
        reinterpret_cast<u32*>(&turned[2 * pair + c][(2 * block + k / 4) ^ (pair & kMask)])[k % 4] = word;
    };
    const auto pairs = [&](int k, u32(&x)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = tile[top + 4 * k + i][swizzled(4 * k + i, pair)];
    };
    u32 x[4];
    Survey survey;
#pragma unroll
    for (int k = 0; k < BLOCK / 4; ++k) pairs(k, x), survey.add(x);
    const u32 amax[2] = {low_float(survey.largest), high_float(survey.largest)};
    const Scale a = block_scale(amax[0], Tensor{1, 1, 0, 1});
    const Scale b = block_scale(amax[1], Tensor{1, 1, 0, 1});
    const bool careful = needs_care(is_far(amax[0], a) || is_far(amax[1], b), survey.least, a, b);
    Blocks both = {{a.apply, b.apply}, number, careful, stream};
    const u32 live = (a.live & 0xFFFFu) | (b.live & 0xFFFF0000u);
    const uint2 first = table_of(a, place), second = table_of(b, place);
    const bool beyond[2] = {is_beyond(a, amax[0], place), is_beyond(b, amax[1], place)};
    u32 any = 0;
#pragma unroll 1
    for (int k = 0; k < BLOCK / 4; ++k) {
        pairs(k, x);
        const u32 n = saturate(down(x, k, both), live, tally);
        if (survey.zeros()) forget_zeros<4, 1>(x, live, tally);
        any |= n;
        const u32 upper = __byte_perm(x[0], x[1], 0x7351), lower = __byte_perm(x[2], x[3], 0x7351);
        put_word(0, k, signed_bytes(first, n, __byte_perm(upper, lower, 0x5410), a.live));
        put_word(1, k, signed_bytes(second, n >> 16, __byte_perm(upper, lower, 0x7632), b.live));
    }
    if ((beyond[0] && any & 0xFFFFu) || (beyond[1] && any >> 16)) place.beyond = 1;
#else
    const auto put = [&](int c, int h, const uint4(&units)[kUnits]) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u)
            turned[2 * pair + c][((2 * block + h) * kUnits + u) ^ (pair & kMask)] = units[u];
    };
    uint4 units[kUnits];
    const auto value = [&](int k, int c) {
        if (sizeof(Raw) == 4) return widen(tile[top + k][swizzled(k, 2 * pair + c)]);
        const u32 word = tile[top + k][swizzled(k, pair)];
        return widen(c ? word >> 16 : word & 0xFFFFu);
    };
    const auto amax_of = [&](int c) {
        float most = 0;
#pragma unroll(SWIFT ? 1 : NEAR ? 4 : BLOCK)
        for (int k = 0; k < BLOCK; ++k) most = max_with_nan(most, fabsf(value(k, c)));
        return bits_of(most) & kMagnitude;
    };
    const auto make_one = [&](int c, int h, u32 amax) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = value(kChunk * h + k, c);
        make(v, amax, number + c, h, stream, place, units, tally);
        put(c, h, units);
    };
#if SWIFT
#pragma unroll 1
    for (int h = 0; h < 2; ++h) {
        constexpr int kWide = sizeof(Raw) / 2;  // words of the two columns in a row
        u32 both[kChunk * kWide];
#pragma unroll
        for (int k = 0; k < kChunk * kWide; ++k) {
            const int row = top + kChunk * h + k / kWide;
            both[k] = tile[row][swizzled(row, kWide * pair + k % kWide)];
        }
        if (__any_sync(~0u, place.careful || least_of(both) < place.limit)) {
#pragma unroll 1
            for (int c = 0; c < 2; ++c) make_one(c, h, amax_of(c));
            continue;
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const auto of = [&](int k) { return bits_of(element(both, 2 * k + c)); };
            const auto four = [&](int k) { return four_codes(of(k), of(k + 1), of(k + 2), of(k + 3), place.apply); };
            units[0] = uint4{four(0), four(4), four(8), four(12)};
            put(c, h, units);
        }
    }
#else
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
        const u32 amax = amax_of(c);
#pragma unroll 1
        for (int h = 0; h < 2; ++h) make_one(c, h, amax);
    }
#endif
#endif
}

// `turned` -> `out` (columns, pitch of rows).
__device__ __forceinline__ void store_turned(const uint4 (*turned)[kTurnedUnits], u8* out, int row0,
                                             int column0, i64 rows, i64 columns) {
    const i64 pitch = (rows + 15) / 16 * 16;
#pragma unroll
    for (int i = 0; i < kColumns * kTurnedUnits / kTileThreads; ++i) {
        const int at = i * kTileThreads + threadIdx.x, column = at / kTurnedUnits, unit = at % kTurnedUnits;
        const int row = row0 + unit * 16 / kOut;
        if (column0 + column < columns && row < rows)
            *reinterpret_cast<uint4*>(out + ((column0 + column) * pitch + row) * kOut) =
                turned[column][unit ^ (column / 2 & kMask)];
    }
}

__device__ __forceinline__ i64 tiles_of(const Matrix& m) {
    return (m.rows + kTogether * kRows - 1) / (kTogether * kRows) * ((m.columns + kColumns - 1) / kColumns);
}

// A block of threads' share of the tiles: from `first` on, as many apart as `blocks` there are.
__device__ __forceinline__ void work(const Matrix& m, i64 first, u32 blocks, const Stream& along_stream,
                                     const Stream& down_stream) {
#if WIDE || NEAR
    const int anchor = 0;
#else
    const int anchor = static_cast<int>(block_scale(m.history->before, Tensor{1, 1, 0, 1}).stored) + MARGIN;
    if (first == 0 && threadIdx.x == 0) *m.exponent = anchor - 127 - LIFT;
#endif
    Place along_place = {anchor, 0, 0}, down_place = {anchor, 0, 0};
    Tally along_tally = {0, 0}, down_tally = {0, 0};
    __shared__ __align__(16) u32 tile[kRows][kRowWords];
#if DOWN_TOO
    __shared__ uint4 turned[kColumns][kTurnedUnits];
#elif NEAR
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
#if NEAR
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
            if (!NEAR || part < kTogether - 1) bring(row0);
#if ALONG
            along_rows(tile, m.along, row0, column0, m.rows, m.columns, along_stream, along_place, along_tally);
#endif
#if DOWN_TOO
            down_columns(tile, turned, row0, column0, m.columns, down_stream, down_place, down_tally);
            __syncthreads();
            store_turned(turned, m.down, row0, column0, m.rows, m.columns);
#endif
            __syncthreads();
        }
    }
    // WIDE: in flags that are zero before.
#if ALONG
    if (!NEAR) report(along_place, WIDE ? m.along_flag : &m.history->beyond[0]);
    add_counts(along_place, along_tally, m.along_counts);
#endif
#if DOWN_TOO
    if (!NEAR) report(down_place, WIDE ? m.down_flag : &m.history->beyond[1]);
    add_counts(down_place, down_tally, m.down_counts);
#endif
    if (!WIDE && !NEAR) remember(m, blocks, ALONG ? along_place.largest : down_place.largest);
}

#if MANY
// Of `count` matrices, a block of threads for each tile; to nearest, as nobody draws for them.
extern "C" __global__ void __launch_bounds__(kTileThreads, RESIDENT)
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
extern "C" __global__ void __launch_bounds__(kTileThreads, RESIDENT)
operands(const Raw* __restrict__ x, History* history, u8* __restrict__ along,
         u8* __restrict__ down, int* __restrict__ exponent, u32* __restrict__ along_flag,
         u32* __restrict__ down_flag, float* __restrict__ along_scales, float* __restrict__ down_scales, u64* __restrict__ along_counts, u64* __restrict__ down_counts,
         const u32* __restrict__ guard, const u32* __restrict__ other_guard,
         const u32* __restrict__ clock, u32 a0, u32 a1, u32 a2,
         u32 a3, u32 d0, u32 d1, u32 d2, u32 d3, i64 rows, i64 columns) {
    if (guard && !(*guard | *other_guard)) return;
    const Matrix m = {x, history, along, down, exponent, along_flag, down_flag, along_counts, down_counts,
                      rows, columns, 0, along_scales, down_scales};
    work(m, blockIdx.x, gridDim.x, stream_of(clock, a0, a1, a2, a3), stream_of(clock, d0, d1, d2, d3));
}
#endif

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
