// Quantizes results as they leave gemm_sm90.cu, in blocks along rows, byte for byte as quantize.cu
// quantizes them in bfloat16. Macros: those of codec/encode.cuh.
//
// Idle producer warps do it while the consumer warps go on. One barrier hands an epilogue tile
// over, another hands it back.

#include "codec/input.cuh"
#include "codec/block_scale.cuh"
#include "codec/searched_scale.cuh"
#include "codec/encode.cuh"
#include "codec/e2m1_bf16x2.cuh"
#include "codec/clip_bits.cuh"
#include "codec/encode_chunk.cuh"

static_assert(kTileN % CODEC_BLOCK == 0 && kEpilogueTileN % CODEC_BLOCK == 0,
    "whole blocks in an epilogue tile");
constexpr int kEpilogueTilesPerTile = (kTileN + kEpilogueTileN - 1) / kEpilogueTileN,
              kQuantizeWarps = 3;

// Quantizes the 16 rows of an epilogue tile; four lanes share a row. Columns beyond C are zeros.
DEVICE void quantize_epilogue_tile(
    const u8* epilogue_tile, const Epilogue& e, int row0, int end_of_rows, int column0, int lane) {
    const Tensor tensor =
        CODEC_NEEDS_TENSOR ? *static_cast<const Tensor*>(e.tensor) : Tensor{1, 1, 0, 1};
    const int blocks = (e.columns + CODEC_BLOCK - 1) / CODEC_BLOCK, unit = lane % 4 * 2;
    const int column = column0 + lane % 4 * kChunk, real = e.columns - column;
#pragma unroll
    for (int half = 0; half < 16; half += 8) {
        const int r = half + lane / 4;
        const uint4 low = *reinterpret_cast<const uint4*>(epilogue_tile + swizzled_offset(r, unit));
        const uint4 high =
            *reinterpret_cast<const uint4*>(epilogue_tile + swizzled_offset(r, unit + 1));
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

// One quantizing warp's share of a tile: all epilogue tiles of the same consumer warps, because a
// barrier's parity is ambiguous to a warp that skips phases. `epilogue_phase`: of the first one.
DEVICE void quantize_tile(u8* epilogue_tiles, u32 handoff, const Epilogue& e, int row0,
    int end_of_rows, int column0, u32& epilogue_phase, int quantize_warp, int lane) {
    for (int p = 0; p < kEpilogueTilesPerTile; ++p) {
        const int start = min(p * kEpilogueTileN, kTileN - kEpilogueTileN),
                  slot = epilogue_phase % kEpilogueTiles;
        for (int warp = quantize_warp; warp < kWarps; warp += kQuantizeWarps) {
            const u32 barrier = handoff + 16 * (warp * kEpilogueTiles + slot);
            barrier_wait(barrier, epilogue_phase / kEpilogueTiles);
            quantize_epilogue_tile(
                epilogue_tiles + (warp * kEpilogueTiles + slot) * kEpilogueTileBytes, e,
                row0 + 16 * warp, end_of_rows, column0 + start, lane);
            barrier_arrive(barrier + 8);
        }
        epilogue_phase = epilogue_phase + 1 == kEpiloguePhases ? 0 : epilogue_phase + 1;
    }
}
