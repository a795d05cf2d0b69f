// Packed codes and their scales -> the operand of a product on Hopper's tensor cores, contraction
// contiguous: FP8 codes where these hold every value, or bfloat16.
//
// E8M0 scales: a value is element 2^(s - anchor + CODEC_LIFT) times 2^(anchor - 127 - CODEC_LIFT),
// with `anchor` the largest scale byte of the tensor; the first factor is what is written, the
// second the operand's exponent, and its factor too. E4M3 scales (CODEC_UE4M3): element times scale
// times 2^CODEC_LIFT is written, and tensor_scale 2^-CODEC_LIFT is the operand's factor. What
// CODEC_EXPAND_TO cannot hold raises the flag. NaN blocks are NaN throughout.
//
// CODEC_FIXED (bfloat16): the anchor is 127 whatever the scales are, so that nothing has to be read
// before and the values are whole; what bfloat16 does not hold is NaN and raises the flag, if there
// is one.
//
// CODEC_FLOAT_SCALES (CODEC_FIXED, rows): INT4, INT8 and FP8 under float scales. What is written
// are the codes less their zero points, which bfloat16 holds.
//
// A thread has 16 elements of a row, or of four neighbouring columns, which it turns: no block
// size, no tail divides its work, since stored blocks are whole (CODEC_FLOAT_SCALES: or not
// CODEC_WHOLE, read byte by byte). No headers, no inline assembly; macros: CODEC_BITS,
// CODEC_MANTISSA, CODEC_MIN_EXPONENT, CODEC_MAX_CODE, CODEC_IS_FLOAT, CODEC_UE4M3, CODEC_BLOCK,
// CODEC_TILE_ROWS, PREPARE_COLUMNWISE, CODEC_EXPAND_TO (0: bfloat16, 1: e5m2, 2: e4m3), CODEC_LIFT,
// CODEC_FIXED, CODEC_FLOAT_SCALES, CODEC_WHOLE.

#include "common/types.cuh"

constexpr int kThreads = 256;

#include "codec/expand.cuh"

// codes (rows, bytes), scales (tiles of rows, blocks) -> out (rows, pitch); PREPARE_COLUMNWISE:
// codes (bytes, columns), scales (blocks, tiles of columns) -> out (columns, pitch). `lines` are
// out's rows. Sets counts to 0 for a kernel that expands the rows after these.
extern "C" __global__ void __launch_bounds__(kThreads)
    expand(const u8* __restrict__ codes, const u8* __restrict__ scales,
           const u32* __restrict__ largest, const float* __restrict__ tensor_scale,
           u8* __restrict__ out, int* __restrict__ exponent, float* __restrict__ factor,
           u32* __restrict__ flag, const u32* __restrict__ guard,
           const u32* __restrict__ other_guard, const signed char* __restrict__ zeros, i64 lines,
           i64 pitch, i64 octets, i64 scale_pitch, u32* __restrict__ counts, i64 counted) {
    if (blockIdx.x == 0)
        for (i64 i = threadIdx.x; i < counted; i += kThreads) counts[i] = 0;
    if (guard && !(*guard | *other_guard)) return;
    const int anchor = CODEC_UE4M3 ? 0 : CODEC_FIXED ? 127 : static_cast<int>(*largest);
    [[maybe_unused]] const Stored stored = {codes, scales, zeros, octets, scale_pitch};
    if (!CODEC_FIXED && blockIdx.x == 0 && threadIdx.x == 0) {
        if (exponent) *exponent = anchor - 127 - CODEC_LIFT;
        const int half = (anchor - 127 - CODEC_LIFT) / 2;  // in two steps: 2^-140 is a subnormal
        *factor = CODEC_UE4M3 ? *tensor_scale * power_of_two(-(CODEC_LIFT))
                              : power_of_two(half) * power_of_two(anchor - 127 - CODEC_LIFT - half);
    }
    const u32 chunks = static_cast<u32>(pitch / kChunk);
    u32 beyond = 0;
#if PREPARE_COLUMNWISE
    // A warp has 4 neighbouring chunks of 8 groups of four columns: whole sectors, read and
    // written.
    const u32 quads = static_cast<u32>((lines + 3) / 4), across = (quads + 7) / 8;
    const u32 lane = threadIdx.x % 32, warps = across * ((chunks + 3) / 4);
    const bool whole = lines % 4 == 0;
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
                const u8* from =
                    codes + (static_cast<i64>(chunk) * (4 * kWords) + 4 * w + b) * lines + column;
                if (whole) {
                    row[b] = *reinterpret_cast<const u32*>(from);
                } else {
                    row[b] = 0;
                    for (int c = 0; c < 4; ++c)
                        if (column + c < lines) row[b] |= static_cast<u32>(from[c]) << (8 * c);
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
            if (column + c >= lines) continue;
            uint4 units[kOctets];
            convert(words[c], of_block[(column + c) / CODEC_TILE_ROWS], anchor, units, beyond);
            store(out, (column + c) * chunks + chunk, units);
        }
    }
#else
    const u32 count = static_cast<u32>(lines) * chunks, step = gridDim.x * kThreads;
    for (u32 first = blockIdx.x * kThreads; first < count;
         first += step) {  // whole warps go together
        const u32 at = first + threadIdx.x;
        uint4 units[kOctets] = {};
        if (at < count) {
            const Chunk from = read_chunk(row_of(stored, at / chunks), at % chunks);
            convert(from.words, from.scale, anchor, units, beyond);
        }
#if CODEC_EXPAND_TO == 0
        store_together(out, at, count, units);
#else
        if (at < count) store(out, at, units);
#endif
    }
#endif
    if (beyond && flag) atomicOr(flag, 1u);
}

// The largest of the scale bytes that are numbers; `most` starts at 0.
extern "C" __global__ void __launch_bounds__(kThreads)
    anchor(const u8* __restrict__ scales, u32* __restrict__ most, i64 count) {
    u32 mine = 0;
    for (i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; at < count;
         at += static_cast<i64>(gridDim.x) * kThreads)
        if (scales[at] != 255u && scales[at] > mine) mine = scales[at];
    if (mine > *static_cast<volatile u32*>(most)) atomicMax(most, mine);
}
