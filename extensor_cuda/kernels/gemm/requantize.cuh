// Results that are quantized as they leave, blocked along rows: byte for byte what quantize.cu
// makes of them in bfloat16. The warps beside the one that loads do it, from the patches of those
// that multiply, while these go on: a patch is handed over by one barrier and back by another.

#include "codec/input.cuh"
#include "codec/block_scale.cuh"
#include "codec/searched_scale.cuh"
#include "codec/encode.cuh"
#include "codec/e2m1_bf16x2.cuh"
#include "codec/encode_chunk.cuh"

static_assert(kTileN % CODEC_BLOCK == 0 && kPatchColumns % CODEC_BLOCK == 0,
              "whole blocks in a patch");
constexpr int kPatchesOfTile = (kTileN + kPatchColumns - 1) / kPatchColumns, kCoders = 3;

// The 16 rows of a patch -> codes and scales; four lanes have a row of it. Columns beyond C are
// zeros.
__device__ __forceinline__ void quantize_patch(const u8* patch, const Epilogue& e, int row0,
                                               int end_of_rows, int column0, int lane) {
    const Tensor tensor =
        CODEC_NEEDS_TENSOR ? *static_cast<const Tensor*>(e.tensor) : Tensor{1, 1, 0, 1};
    const int blocks = (e.columns + CODEC_BLOCK - 1) / CODEC_BLOCK, unit = lane % 4 * 2;
    const int column = column0 + lane % 4 * kChunk, real = e.columns - column;
#pragma unroll
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
        Chunk unpacked;
        Chunk& v = chunk_of(raw, unpacked);
        const i64 block = static_cast<i64>(row0 + r) * blocks + column / CODEC_BLOCK;
        const u32 part = column % CODEC_BLOCK / kChunk;
        u32 packed[kWords];
        Tally tally = {0, 0};
        const Scale s =
            encode_chunk(v, tensor, static_cast<u32>(block), part, Stream{}, packed, tally);
        if (row0 + r < end_of_rows && column < blocks * CODEC_BLOCK) {
            store_words(static_cast<u32*>(e.out) + (block * kParts + part) * kWords, packed);
            if (part == 0) e.scales[block] = static_cast<u8>(s.stored);
        }
    }
}

// One of kCoders warps' share of a tile: all patches of the same multiplying warps, since the
// parity of a barrier tells its phases apart only to who waits for each. `turn`: of their first
// patch.
__device__ __forceinline__ void quantize_tile(u8* patches, u32 handed, const Epilogue& e, int row0,
                                              int end_of_rows, int column0, u32& turn, int coder,
                                              int lane) {
    for (int p = 0; p < kPatchesOfTile; ++p) {
        const int start = min(p * kPatchColumns, kTileN - kPatchColumns), slot = turn % kPatches;
        for (int warp = coder; warp < kWarps; warp += kCoders) {
            const u32 barrier = handed + 16 * (warp * kPatches + slot);
            wait(barrier, turn / kPatches);
            quantize_patch(patches + (warp * kPatches + slot) * kPatch, e, row0 + 16 * warp,
                           end_of_rows, column0 + start, lane);
            arrive(barrier + 8);
        }
        turn = turn + 1 == kTurns ? 0 : turn + 1;
    }
}
