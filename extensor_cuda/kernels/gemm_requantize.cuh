// Results that are quantized as they leave, blocked along rows: byte for byte what quantize.cu makes of
// them in bfloat16.

#include "input.cuh"
#include "scale.cuh"
#include "search.cuh"
#include "encode.cuh"
#include "pairs.cuh"
#include "chunk.cuh"

static_assert(kTileN % BLOCK == 0 && kPatchColumns % BLOCK == 0, "whole blocks in a patch");

// The 16 rows of a patch -> codes and scales; four lanes have a row of it. Columns beyond C are zeros.
__device__ __forceinline__ void quantize_patch(const u8* patch, const Epilogue& e, int row0, int end_of_rows,
                                               int column0, int lane) {
    const Tensor tensor = NEEDS_TENSOR ? *static_cast<const Tensor*>(e.tensor) : Tensor{1, 1, 0, 1};
    const int blocks = (e.columns + BLOCK - 1) / BLOCK, unit = lane % 4 * 2;
    const int column = column0 + lane % 4 * kChunk, real = e.columns - column;
#pragma unroll 1
    for (int half = 0; half < 16; half += 8) {
        const int r = half + lane / 4;
        const uint4 low = *reinterpret_cast<const uint4*>(patch + place(r, unit));
        const uint4 high = *reinterpret_cast<const uint4*>(patch + place(r, unit + 1));
        u32 raw[kChunk / 2] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (real < kChunk) {
#pragma unroll
            for (int k = 0; k < kChunk; k += 2)
                raw[k / 2] = k + 1 < real ? raw[k / 2] : k < real ? raw[k / 2] & 0xFFFFu : 0;
        }
#if PAIRS
        Chunk& v = raw;
#else
        Chunk v;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[0][k] = element(raw, k);
#endif
        const i64 block = static_cast<i64>(row0 + r) * blocks + column / BLOCK;
        const u32 part = column % BLOCK / kChunk;
        u32 packed[kWords];
        Tally tally = {0, 0};
        const Scale s = encode_chunk(v, tensor, static_cast<u32>(block), part, Stream{}, packed, tally);
        if (row0 + r < end_of_rows && column < blocks * BLOCK) {
            store_words(static_cast<u32*>(e.out) + (block * kParts + part) * kWords, packed);
            if (part == 0) e.scales[block] = static_cast<u8>(s.stored);
        }
    }
}
