// out = x w^T for up to 16 rows of x on Hopper. Packed E2M1 weights with E8M0 or E4M3 scales are
// read once and decoded to bfloat16 for mma.sync (m16n8k16, weights as operand A). x streams
// through a ring of stages, so that K needs no slices because of x, unlike in
// w4a16_sm90_resident.cu.
//
// A block has a group of tiles of 16 rows of w, and all of K or a slice. A consumer warp takes two
// tiles and copies chunks of 256 elements of K, or a share of them, WEIGHT_ONLY_DEPTH chunks ahead.
// It copies 128 bytes of a row at a time, because a 32-byte request costs the L2 cache as much. A
// lane decodes 32 neighbouring elements of every eighth row.
//
// Producer warps load x chunk by chunk, in the order of decoded weights, so that no element moves
// between lanes. float32 x is split into three bfloat16 matrices that sum to x exactly: a row is
// three tokens (WEIGHT_ONLY_X_PARTS). Sums of shares meet in shared memory, those of slices in
// `partial`, in an order that depends on shapes only.
//
// Macros: WEIGHT_ONLY_WARPS (consumers), WEIGHT_ONLY_SPLIT_K (warps that share tiles),
// WEIGHT_ONLY_PRODUCER_WARPS, CODEC_BLOCK (elements of a scale), WEIGHT_ONLY_SCALE_BYTES (bytes of
// scales copied at a time), WEIGHT_ONLY_TILES (of 8 tokens), WEIGHT_ONLY_X_PARTS,
// WEIGHT_ONLY_STAGES, WEIGHT_ONLY_DEPTH; those of weights.cuh.

#include "weight_only/weights.cuh"

#include "common/barriers.cuh"

// ---- after barriers ----

#include "common/ring.cuh"
#include "weight_only/partial_sums.cuh"

constexpr int kWarps = WEIGHT_ONLY_WARPS, kShares = WEIGHT_ONLY_SPLIT_K,
              kConsumerThreads = 32 * kWarps, kProducerWarps = WEIGHT_ONLY_PRODUCER_WARPS,
              kTileRows = 16;
constexpr int kThreads = kConsumerThreads + 32 * kProducerWarps;
constexpr int kTokens = 8 * WEIGHT_ONLY_TILES;
// x: two segments of each token. Pairs of tokens are in different banks.
constexpr int kChunk = 256, kPitch = 2 * kChunk + 64, kStage = kTokens * kPitch;
// w: 128 bytes of codes per row, then words with each row's scales. Every second row's halves are
// swapped, so that pairs of rows are in different banks.
constexpr int kCodes = 2 * kTileRows * 128;
constexpr int kScalesPerLane = 32 / CODEC_BLOCK ? 32 / CODEC_BLOCK : 1,
              kScales = kChunk / CODEC_BLOCK < 4 ? 4 : kChunk / CODEC_BLOCK;
constexpr int kSlot = kCodes + 2 * kTileRows * kScales;
constexpr int kRing = kWarps * WEIGHT_ONLY_DEPTH * kSlot;  // where the stages of x begin
// Sums, in floats: the pitch of a warp, the pitch of a token, the size of a tile.
constexpr int kSums = WEIGHT_ONLY_DEPTH * kSlot / 4, kSumPitch = kTileRows + 4,
              kTileSums = kTokens * kSumPitch;
static_assert(2 * kTileSums <= kSums, "sums overwrite the codes");

#include "weight_only/ring_partition.cuh"

static_assert(kMaxStep <= WEIGHT_ONLY_STAGES,
    "a warp would wait for a stage not yet filled, and mistake parities");

// Where warps leave the sums of an output feature.
struct Parts {
    const float* sums;
    static constexpr int kCount = kShares;
    DEVICE const float* operator()(int feature, int part) const {
        const int tile = feature / kTileRows;
        return sums + WarpShare::warp(tile / 2, part) * kSums + tile % 2 * kTileSums +
               feature % kTileRows;
    }
};

typedef RingPosition<WEIGHT_ONLY_STAGES> Ring;

#include "weight_only/activations_ring.cuh"

// ---- the product ----

// A thread block's tiles of w, and its slice of K in chunks.
struct BlockRange {
    u32 group, slice;
    int low, high;     // tiles
    int begin, count;  // chunks
};

// Byte offsets in shared memory of what a lane copies and reads. They are kept in registers.
struct LaneOffsets {
    int tokens[WEIGHT_ONLY_TILES];  // missing tokens use another's
    int code_target, code_source, scale_target, scale_source;
    DEVICE LaneOffsets(int warp, int lane, int rows) {
        const int row = lane / 4, quad_lane = lane % 4;
#pragma unroll
        for (int t = 0; t < WEIGHT_ONLY_TILES; ++t) {
            tokens[t] =
                kRing + min(t * 8 + row, rows * WEIGHT_ONLY_X_PARTS - 1) * kPitch + quad_lane * 16;
            keep(tokens[t]);
        }
        const int slots = warp * WEIGHT_ONLY_DEPTH * kSlot;
        code_target = slots + lane / 8 * 128 + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
        code_source = slots + row * 128 + (quad_lane ^ row % 2 * 4) * 16;
        scale_target = slots + kCodes + lane * kScales;
        scale_source = slots + kCodes + row * kScales + quad_lane * 32 / CODEC_BLOCK;
        keep(code_target), keep(code_source), keep(scale_target), keep(scale_source);
    }
};

// A warp's pair of tiles: where a lane's next copies begin.
struct WeightCopies {
    const u8 *code[2], *scale;
    i64 four_rows;  // the distance between rows that a lane copies, in bytes
    int begin, count, columns, tiles;

    // Copies a chunk to a slot, or zeros if there is none left, and goes on to the share's next.
    DEVICE void prefetch(u8* memory, const LaneOffsets& to, int slot, int lane, ChunkIterator& next,
        const WarpShare& share) {
        const int place = begin + next.chunk;
        const bool more = next.chunk < count,
                   inside = more && place * 128 + lane % 8 * 16 < columns / 2;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const u8* row = code[m];
#pragma unroll
            for (int r = 0; r < kTileRows / 4; ++r, row += four_rows)
                cp_async<16>(memory + to.code_target + slot + m * kTileRows * 128 + r * 512, row,
                    inside && m < tiles);
        }
        // Large blocks: the word that holds a chunk's scales.
        const int first = place * kChunk / CODEC_BLOCK / 4 * 4;
#pragma unroll
        for (int g = 0; g < kScales; g += WEIGHT_ONLY_SCALE_BYTES)
            cp_async<WEIGHT_ONLY_SCALE_BYTES>(memory + to.scale_target + slot + g,
                scale + first + g,
                more && first + g < columns / CODEC_BLOCK && lane / kTileRows < tiles);
        cp_async_commit();
        const int further = next.next(share) * 128;
        code[0] += further, code[1] += further;
    }
};

// Whether the slot's scales can be decoded with their factor folded in.
DEVICE bool scales_fold(const u8* memory, const LaneOffsets& at, int slot) {
#if CODEC_UE4M3
    return true;
#else
    u32 large = 0;
#pragma unroll
    for (int g = 0; g < kScales; g += 4)
        large |= large_scales(*reinterpret_cast<const u32*>(memory + at.scale_target + slot + g));
    return !__any_sync(0xFFFFFFFFu, large != 0);
#endif
}

// Multiplies a chunk of two tiles, number `chunk` of K, with the stage of x at `stage`.
DEVICE void multiply_chunk(float (&sum)[2][WEIGHT_ONLY_TILES][4], const u8* memory,
    const LaneOffsets& at, int slot, const Ring& stage, u32 full, int chunk, bool folded) {
    const int other = CODEC_BLOCK == 128 ? chunk % 2 * 2 : 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        uint4 words[4];
        u32 factors[4][kScalesPerLane];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            words[r] = *reinterpret_cast<const uint4*>(
                memory + (at.code_source ^ i * 64) + slot + r * 1024);
#pragma unroll
            for (int g = 0; g < kScalesPerLane; ++g)
                factors[r][g] = scale_bf16x2(memory[at.scale_source + slot + 8 * r * kScales +
                                                    i * 128 / CODEC_BLOCK + g + other],
                    folded);
        }
        if (i == 0) barrier_wait(full + 8 * stage.stage, stage.parity);
        const int tokens = stage.stage * kStage + i * 256;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint4 b[WEIGHT_ONLY_TILES];
#pragma unroll
            for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
                b[t] = *reinterpret_cast<const uint4*>(memory + at.tokens[t] + tokens + j * 64);
            u32 bits[4][4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const u32 word[4] = {words[r].x, words[r].y, words[r].z, words[r].w};
                decode(word + j, factors[r][j * kScalesPerLane / 4], folded, 0, bits[r]);
            }
#pragma unroll
            for (int odd = 0; odd < 2; ++odd)
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const u32(&upper)[4] = bits[2 * m], (&lower)[4] = bits[2 * m + 1];
                    const u32 a[4] = {
                        upper[2 * odd], lower[2 * odd], upper[2 * odd + 1], lower[2 * odd + 1]};
#pragma unroll
                    for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
                        mma(sum[m][t], a, odd ? b[t].z : b[t].x, odd ? b[t].w : b[t].y);
                }
        }
    }
}

// Leaves a tile's sums for add_parts. `again`: its first rows that the tile before has too.
DEVICE void store_sums(
    float* to, const float (&sum)[WEIGHT_ONLY_TILES][4], int row, int quad_lane, int again) {
#pragma unroll
    for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int of_tile = c / 2 * 8 + row - again;
            if (of_tile >= 0) to[(t * 8 + quad_lane * 2 + c % 2) * kSumPitch + of_tile] = sum[t][c];
        }
}

// The weights and where results go: sums of slices to `partial`, the whole times `factor` to `out`.
struct Problem {
    const u8 *codes, *scales;
    float factor;
    float* partial;
    void* out;
    int rows, out_features, columns, slices;
    Matrices matrices;
    Gate gate;
};

// A consumer warp: multiplies its tiles and adds the shares' sums.
DEVICE void consume(u8* memory, const BlockRange& range, const Problem& e, u32 full, u32 empty,
    int warp, int lane) {
    LaneOffsets offsets(warp, lane, e.rows);
    i64 four_rows = static_cast<i64>(e.columns) * 2;
    keep(four_rows);
    const WarpShare share(warp);
    const int tile = share.pair * 2;
    int before = 0;  // chunks of the previous tiles
#pragma unroll 1
    for (int from = range.low; from < range.high; from += 2 * kPairs, before += range.count) {
        ChunkIterator now(share), expected = now;  // `expected`: the next chunk to copy
        const int first = before + now.chunk;
        Ring at = {first % WEIGHT_ONLY_STAGES, static_cast<u32>(first / WEIGHT_ONLY_STAGES) & 1};
        float sum[2][WEIGHT_ONLY_TILES][4] = {};
        // A last tile with missing rows begins earlier.
        const auto feature_of = [&](int m) {
            return min((from + tile + m) * kTileRows, e.out_features - kTileRows);
        };
        const auto row_of = [&](int m) {
            return Matrices::row_of(from + tile + m, e.out_features);
        };
        WeightCopies copies;
        copies.four_rows = four_rows, copies.begin = range.begin, copies.count = range.count;
        copies.columns = e.columns, copies.tiles = min(range.high - from - tile, 2);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            copies.code[m] = e.codes + e.matrices.code_offset(feature_of(m) / kTileRows) +
                             (static_cast<i64>(row_of(m)) + lane / 8) * (e.columns / 2) +
                             (range.begin + expected.chunk) * 128 + lane % 8 * 16;
            keep(copies.code[m]);
        }
        copies.scale = e.scales +
                       e.matrices.scale_offset(feature_of(lane / kTileRows) / kTileRows) +
                       static_cast<i64>(row_of(lane / kTileRows) + lane % kTileRows) *
                           (e.columns / CODEC_BLOCK);
        keep(copies.scale);
#pragma unroll 1
        for (int d = 0; d < WEIGHT_ONLY_DEPTH; ++d)
            copies.prefetch(memory, offsets, d * kSlot, lane, expected, share);
        int slot = 0;
#pragma unroll 1
        while (now.chunk < range.count) {
            cp_async_wait<WEIGHT_ONLY_DEPTH - 1>();
            __syncwarp();
            const int chunk = range.begin + now.chunk;
            if (scales_fold(memory, offsets, slot))
                multiply_chunk(sum, memory, offsets, slot, at, full, chunk, true);
            else multiply_chunk(sum, memory, offsets, slot, at, full, chunk, false);
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * at.stage);
            at.advance(now.next(share));
            copies.prefetch(memory, offsets, slot, lane, expected, share);  // the slot is used up
            slot = slot == (WEIGHT_ONLY_DEPTH - 1) * kSlot ? 0 : slot + kSlot;
        }
        cp_async_wait<0>();
        __syncwarp();
        float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
        for (int m = 0; m < 2; ++m)
            store_sums(sums + warp * kSums + m * kTileSums, sum[m], lane / 4, lane % 4,
                (from + tile + m) * kTileRows - feature_of(m));
        named_barrier(1, kConsumerThreads);
        const OutputRange here = {from * kTileRows,
            min(min(from + 2 * kPairs, range.high) * kTileRows, e.out_features) - from * kTileRows,
            e.out_features, e.factor, e.out, e.gate};
        add_parts<kConsumerThreads, kSumPitch>(
            Parts{sums}, e.partial, range.slice, e.slices, e.rows, here);
        named_barrier(1, kConsumerThreads);  // sums are read: copies may overwrite them
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    w4a16_sm90_ring(const Raw* x, const u8* codes, const u8* scales, const float* tensor_scale,
        float* __restrict__ partial, u32* __restrict__ done, void* __restrict__ out, int rows,
        int out_features, int columns, int slices, int second, int third, i64 codes1, i64 codes2,
        i64 scales1, i64 scales2, float alpha, float limit, float shift) {
    extern __shared__ __align__(128) u8 raw_memory[];  // copies fill cache lines
    __shared__ u32 last;
    const u32 full = shared_address(raw_memory + kRing + WEIGHT_ONLY_STAGES * kStage),
              empty = full + 8 * WEIGHT_ONLY_STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const u32 groups = gridDim.x / slices, group = blockIdx.x / slices,
              slice = blockIdx.x - group * slices;
    const u32 tiles = (out_features + kTileRows - 1) / kTileRows,
              chunks = (columns + kChunk - 1) / kChunk;
    const int low = first_tile(tiles, group, groups), high = first_tile(tiles, group + 1, groups);
    const int begin = chunks * slice / slices, count = chunks * (slice + 1) / slices - begin;
    if (threadIdx.x == 0) {
        for (int s = 0; s < WEIGHT_ONLY_STAGES; ++s)
            barrier_init(full + 8 * s, 32 * kProducerWarps), barrier_init(empty + 8 * s, kPairs);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_dependent_grids();
    wait_on_dependent_grids();  // the previous grid may have written what follows

    // Producer warps request x before any warp requests weights, which would delay x. All warps
    // reach one barrier before the roles separate.
    const bool is_producer = warp >= kWarps;
    Producer producer(x, raw_memory + kRing, begin, count, rows, columns, warp - kWarps, lane);
    const int fills = (high - low + 2 * kPairs - 1) / (2 * kPairs) * count;
    if (is_producer) producer.request_first(fills);
    __syncthreads();
    if (is_producer) {
        producer.run(fills, full, empty);
        return;
    }
    const float factor =
        (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // scales are decoded times 2^-8
    const Problem problem = {codes, scales, factor, partial, out, rows, out_features, columns,
        slices, {second, third, {codes1, codes2}, {scales1, scales2}}, {alpha, limit, shift}};
    consume(raw_memory, {group, slice, low, high, begin, count}, problem, full, empty, warp, lane);
    if (slices == 1) return;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(done + group, 1u) + 1 == static_cast<u32>(slices);
        if (last) done[group] = 0;
        __threadfence();
    }
    named_barrier(1, kConsumerThreads);
    if (!last) return;
    const OutputRange all = {low * kTileRows, min(high * kTileRows, out_features) - low * kTileRows,
        out_features, factor, out, problem.gate};
    add_slices<kConsumerThreads>(partial, slices, rows, all);
}
