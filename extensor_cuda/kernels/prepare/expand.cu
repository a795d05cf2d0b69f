// Expands packed codes and scales to a GEMM operand with K contiguous: FP8 codes where these hold
// every value, otherwise bfloat16.
//
// E8M0 scales: it writes element 2^(s - anchor + CODEC_LIFT), with `anchor` the tensor's largest
// scale byte; the operand's exponent is anchor - 127 - CODEC_LIFT. E4M3 scales (CODEC_UE4M3): it
// writes element times scale times 2^CODEC_LIFT, and the operand's factor is tensor_scale
// 2^-CODEC_LIFT. Values that CODEC_EXPAND_TO cannot hold raise the flag. NaN blocks are NaN
// throughout.
//
// CODEC_FIXED (bfloat16): the anchor is 127, so that no scale is read first. Values outside
// bfloat16 are NaN and raise the flag. CODEC_FLOAT_SCALES (CODEC_FIXED, rows): it writes codes less
// zero points of INT4, INT8 and FP8.
//
// A thread has 16 elements of a row, or of four neighbouring columns, which it transposes. Stored
// blocks are whole, except that CODEC_FLOAT_SCALES without CODEC_WHOLE reads bytes.
//
// Macros: those, CODEC_BITS, CODEC_MANTISSA, CODEC_MIN_EXPONENT, CODEC_MAX_CODE, CODEC_IS_FLOAT,
// CODEC_BLOCK, CODEC_TILE_ROWS, PREPARE_COLUMNWISE, CODEC_EXPAND_TO (0: bfloat16, 1: e5m2, 2:
// e4m3).

#include "common/types.cuh"

constexpr int kThreads = 256;

#include "codec/expand.cuh"

// codes (rows, bytes), scales (tiles of rows, blocks) -> out (out_rows, pitch). PREPARE_COLUMNWISE:
// codes (bytes, columns), scales (blocks, tiles of columns). Also clears the counts of a kernel
// that expands further rows.
extern "C" __global__ void __launch_bounds__(kThreads) expand(const u8* __restrict__ codes,
    const u8* __restrict__ scales, const u32* __restrict__ largest,
    const float* __restrict__ tensor_scale, u8* __restrict__ out, int* __restrict__ exponent,
    float* __restrict__ factor, u32* __restrict__ flag, const u32* __restrict__ guard,
    const u32* __restrict__ other_guard, const signed char* __restrict__ zeros, i64 out_rows,
    i64 pitch, i64 code_pitch, i64 scale_pitch, u32* __restrict__ counts, i64 counted) {
    if (blockIdx.x == 0)
        for (i64 i = threadIdx.x; i < counted; i += kThreads) counts[i] = 0;
    if (guard && !(*guard | *other_guard)) return;
    const int anchor = CODEC_UE4M3 ? 0 : CODEC_FIXED ? 127 : static_cast<int>(*largest);
    [[maybe_unused]] const Stored stored = {codes, scales, zeros, code_pitch, scale_pitch};
    if (!CODEC_FIXED && blockIdx.x == 0 && threadIdx.x == 0) {
        if (exponent) *exponent = anchor - 127 - CODEC_LIFT;
        const int half =
            (anchor - 127 - CODEC_LIFT) / 2;  // in two steps, because 2^-140 is subnormal
        *factor = CODEC_UE4M3 ? *tensor_scale * power_of_two(-(CODEC_LIFT))
                              : power_of_two(half) * power_of_two(anchor - 127 - CODEC_LIFT - half);
    }
    const u32 chunks = static_cast<u32>(pitch / kChunk);
    u32 beyond = 0;
#if PREPARE_COLUMNWISE
    // A warp has 4 neighbouring chunks of 8 groups of four columns, to access whole sectors.
    const u32 quads = static_cast<u32>((out_rows + 3) / 4), across = (quads + 7) / 8;
    const u32 lane = threadIdx.x % 32, warps = across * ((chunks + 3) / 4);
    const bool whole = out_rows % 4 == 0 && code_pitch % 4 == 0;
    for (u32 warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; warp < warps;
        warp += gridDim.x * (kThreads / 32)) {
        const u32 quad = warp % across * 8 + lane / 4, chunk = warp / across * 4 + lane % 4;
        if (quad >= quads || chunk >= chunks) continue;
        const i64 column = static_cast<i64>(quad) * 4;
        u32 words[4][kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            u32 row[4];
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const u8* from = codes +
                                 (static_cast<i64>(chunk) * (4 * kWords) + 4 * w + b) * code_pitch +
                                 column;
                if (whole) {
                    row[b] = *reinterpret_cast<const u32*>(from);
                } else {
                    row[b] = 0;
                    for (int c = 0; c < 4; ++c)
                        if (column + c < out_rows) row[b] |= static_cast<u32>(from[c]) << (8 * c);
                }
            }
            const u32 a = __byte_perm(row[0], row[1], 0x5140),
                      b = __byte_perm(row[2], row[3], 0x5140);
            const u32 c = __byte_perm(row[0], row[1], 0x7362),
                      d = __byte_perm(row[2], row[3], 0x7362);
            words[0][w] = __byte_perm(a, b, 0x5410), words[1][w] = __byte_perm(a, b, 0x7632);
            words[2][w] = __byte_perm(c, d, 0x5410), words[3][w] = __byte_perm(c, d, 0x7632);
        }
        const u8* of_block = scales + static_cast<i64>(chunk * kChunk / CODEC_BLOCK) * scale_pitch;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            if (column + c >= out_rows) continue;
            uint4 units[kVectors];
            convert(words[c], of_block[(column + c) / CODEC_TILE_ROWS], anchor, units, beyond);
            store(out, (column + c) * chunks + chunk, units);
        }
    }
#else
    const u32 count = static_cast<u32>(out_rows) * chunks, step = gridDim.x * kThreads;
    for (u32 first = blockIdx.x * kThreads; first < count;
        first += step) {  // whole warps iterate together
        const u32 at = first + threadIdx.x;
        uint4 units[kVectors] = {};
        if (at < count) {
            const Chunk from = read_chunk(row_of(stored, at / chunks), at % chunks);
            convert(from.words, from.scale, anchor, units, beyond);
        }
#if CODEC_EXPAND_TO == 0
        store_sectors(out, at, count, units);
#else
        if (at < count) store(out, at, units);
#endif
    }
#endif
    if (beyond && flag) atomicOr(flag, 1u);
}

#if CODEC_FIXED && !PREPARE_COLUMNWISE && CODEC_EXPAND_TO == 0
// Matrices of `rows` rows, one below the other; a table has the addresses of their codes, then of
// their scales. A flag for each.
extern "C" __global__ void __launch_bounds__(kThreads)
    expand_several(const u64* __restrict__ addresses, u8* __restrict__ out, u32* __restrict__ flags,
        int matrices, int rows, int pitch, i64 code_pitch, i64 scale_pitch) {
    const u32 chunks = pitch / kChunk, count = static_cast<u32>(matrices) * rows * chunks,
              step = gridDim.x * kThreads;
    for (u32 first = blockIdx.x * kThreads; first < count; first += step) {
        const u32 at = first + threadIdx.x;
        uint4 units[kVectors] = {};
        if (at < count) {
            const u32 row = at / chunks, matrix = row / rows;
            const Stored stored = {reinterpret_cast<const u8*>(addresses[matrix]),
                reinterpret_cast<const u8*>(addresses[matrices + matrix]), nullptr, code_pitch,
                scale_pitch};
            const Chunk from = read_chunk(row_of(stored, row - matrix * rows), at - row * chunks);
            u32 beyond = 0;
            convert(from.words, from.scale, 127, units, beyond);
            if (beyond && flags) atomicOr(flags + matrix, 1u);
        }
        store_sectors(out, at, count, units);
    }
}
#endif

// Finds the largest scale byte that is not NaN; `most` starts at 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    anchor(const u8* __restrict__ scales, u32* __restrict__ most, i64 count) {
    u32 mine = 0;
    for (i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; at < count;
        at += static_cast<i64>(gridDim.x) * kThreads)
        if (scales[at] != 255u && scales[at] > mine) mine = scales[at];
    if (mine > *static_cast<volatile u32*>(most)) atomicMax(most, mine);
}
