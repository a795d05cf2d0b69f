// out = x w^T for up to 16 rows of x, for Hopper: packed E2M1 weights under E8M0 or E4M3 scales,
// read once, decoded to bfloat16 on the way to mma.sync (m16n8k16; weights on the side of 16).
// Other than w4a16_sm90_resident.cu, which has all of a block's x in shared memory before it
// begins, this one lets x pass by in a ring, so that how much of it there is asks for no slices of
// K, which would have to be added across blocks; what few rows of w leave idle may.
//
// A block has a group of tiles of 16 rows of w, and all of K or a slice. A warp that multiplies has
// two tiles, whose pieces of 256 elements of K, or a share of them, it copies to shared memory
// itself, WEIGHT_ONLY_DEPTH ahead, 128 bytes of a row at a time, lines of memory if K is a multiple
// of 256: a request costs the second-level cache as much for 32 bytes. All have as much to do, and
// want about the same x at a time. A lane then has 32 neighbouring elements of every eighth row of
// a segment, half a piece. kBringing more warps bring x, piece by piece, some rows each, in the
// order in which decoding leaves the elements, so that no element moves between lanes. float32 x is
// three bfloat16 matrices, which together are exactly x: its rows are three tokens
// (WEIGHT_ONLY_X_PARTS).
//
// Sums of shares of a tile meet in shared memory, those of slices in `partial`, where the last
// block of a group adds them; everything in an order that depends on nothing but shapes. No
// headers. Macros: WEIGHT_ONLY_WARPS (that multiply), WEIGHT_ONLY_SPLIT_K (warps that have the same
// tiles), WEIGHT_ONLY_PRODUCER_WARPS (warps that bring x), CODEC_BLOCK (of a scale),
// WEIGHT_ONLY_SCALE_BYTES (bytes of scales that are copied at a time), WEIGHT_ONLY_TILES (of 8
// tokens), WEIGHT_ONLY_X_PARTS, WEIGHT_ONLY_STAGES, WEIGHT_ONLY_DEPTH; those of weights.cuh.

#include "weight_only/weights.cuh"

#include "common/barriers.cuh"

// ---- after barriers ----

#include "weight_only/partial_sums.cuh"

constexpr int kWarps = WEIGHT_ONLY_WARPS, kShares = WEIGHT_ONLY_SPLIT_K, kMath = 32 * kWarps,
              kBringing = WEIGHT_ONLY_PRODUCER_WARPS, kTall = 16;
constexpr int kThreads = kMath + 32 * kBringing;
constexpr int kTokens = 8 * WEIGHT_ONLY_TILES;
// x: two segments of each token, two tokens in different banks.
constexpr int kPiece = 256, kPitch = 2 * kPiece + 64, kStage = kTokens * kPitch;
// w: 128 bytes of codes of each row, each second one's halves exchanged, so that two rows' lie in
// different banks; then words that hold each row's scales.
constexpr int kCodes = 2 * kTall * 128;
constexpr int kOfLane = 32 / CODEC_BLOCK ? 32 / CODEC_BLOCK : 1,
              kScales = kPiece / CODEC_BLOCK < 4 ? 4 : kPiece / CODEC_BLOCK;
constexpr int kSlot = kCodes + 2 * kTall * kScales;
constexpr int kRing = kWarps * WEIGHT_ONLY_DEPTH * kSlot;  // where stages begin
// Sums, in floats: from a warp's to the next one's, from a token's to the next one's, of a tile.
constexpr int kSums = WEIGHT_ONLY_DEPTH * kSlot / 4, kSumPitch = kTall + 4,
              kOfTile = kTokens * kSumPitch;
static_assert(2 * kOfTile <= kSums, "sums lie where the codes did");

#ifdef __CUDA_ARCH__
__device__ __forceinline__ void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// In registers, and not made again from what they were made of.
__device__ __forceinline__ void keep(const u8*& pointer) { asm volatile("" : "+l"(pointer)); }
__device__ __forceinline__ void keep(int& number) { asm volatile("" : "+r"(number)); }
__device__ __forceinline__ void keep(i64& number) { asm volatile("" : "+l"(number)); }
#endif

#include "weight_only/ring_partition.cuh"

static_assert(kFurthest <= WEIGHT_ONLY_STAGES,
              "a warp would wait for x that has no place yet, and mistake parities");

// Where warps leave the sums of a line.
struct Parts {
    const float* sums;
    static constexpr int kCount = kShares;
    __device__ __forceinline__ const float* operator()(int line, int part) const {
        const int tile = line / kTall;
        return sums + Share::warp(tile / 2, part) * kSums + tile % 2 * kOfTile + line % kTall;
    }
};

struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance(int by) {
        stage += by;
        if (stage >= WEIGHT_ONLY_STAGES) stage -= WEIGHT_ONLY_STAGES, parity ^= 1;
    }
};

#include "weight_only/activations_ring.cuh"

// ---- the product ----

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    decode_ring(const Raw* __restrict__ x, const u8* __restrict__ codes,
                const u8* __restrict__ scales, const float* __restrict__ tensor_scale,
                float* __restrict__ partial, u32* __restrict__ done, void* __restrict__ out,
                int rows, int lines, int columns, int slices) {
    extern __shared__ __align__(128) u8 raw_memory[];  // copies fill lines
    __shared__ u32 last;
    const u32 full = shared_address(raw_memory + kRing + WEIGHT_ONLY_STAGES * kStage),
              empty = full + 8 * WEIGHT_ONLY_STAGES;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    // The tiles of this group of blocks, and pieces of this slice.
    const u32 groups = gridDim.x / slices, group = blockIdx.x / slices,
              slice = blockIdx.x - group * slices;
    const u32 tiles = (lines + kTall - 1) / kTall, pieces = (columns + kPiece - 1) / kPiece;
    const int low = tiles * group / groups, high = tiles * (group + 1) / groups;
    const int begin = pieces * slice / slices, count = pieces * (slice + 1) / slices - begin;
    if (threadIdx.x == 0) {
        for (int s = 0; s < WEIGHT_ONLY_STAGES; ++s)
            barrier_init(full + 8 * s, 32 * kBringing), barrier_init(empty + 8 * s, kPairs);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    await_last();  // which may have written what is read from here on

    // Warps that bring x ask for some before any asks for weights, behind all of which it would
    // come last. The barrier is one for all, before their ways part.
    const bool brings = warp >= kWarps;
    const int first_row = warp - kWarps;
    // Four quarters of a segment have 32 elements each; the first eights of all lie together, and
    // so on.
    const int own = (lane / 16 * 16 + lane % 4 * 4 + lane / 4 % 4) * 8;
    Part part[kEarly];
    int piece = 0;
    const auto fetch = [&](Part& part) {
        const int k = (begin + piece) * kPiece + own;
        part.fetch(x + k, columns, first_row, rows, k < columns);
        if (++piece == count) piece = 0;
    };
    if (brings) {
#pragma unroll
        for (int e = 0; e < kEarly; ++e) fetch(part[e]);
    }
    __syncthreads();
    if (brings) {
        const int all = (high - low + 2 * kPairs - 1) / (2 * kPairs) * count;
        u8* const place = raw_memory + kRing + lane * 16;
        Ring at = {0, 0};
        for (int i = 0; i < all; i += kEarly)
#pragma unroll
            for (int e = 0; e < kEarly; ++e) {
                if (i + e == all) break;
                wait(empty + 8 * at.stage, at.parity ^ 1);
                part[e].put(place + at.stage * kStage, first_row, rows);
                arrive(full + 8 * at.stage);
                at.advance(1);
                fetch(part[e]);
            }
        return;
    }
    const int row = lane / 4, quarter = lane % 4;
    const float factor =
        (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // the scales were times 2^-8
    int of_x[WEIGHT_ONLY_TILES];                         // of tokens that there are not, another's
#pragma unroll
    for (int t = 0; t < WEIGHT_ONLY_TILES; ++t) {
        of_x[t] = kRing + min(t * 8 + row, rows * WEIGHT_ONLY_X_PARTS - 1) * kPitch + quarter * 16;
        keep(of_x[t]);
    }
    const int mine = warp * WEIGHT_ONLY_DEPTH * kSlot;
    int to_codes = mine + lane / 8 * 128 + (lane % 8 ^ lane / 8 % 2 * 4) * 16;
    int of_codes[2] = {mine + row * 128 + (quarter ^ row % 2 * 4) * 16,
                       mine + row * 128 + (quarter + 4 ^ row % 2 * 4) * 16};
    int of_scales = mine + kCodes + lane * kScales,
        of_factors = mine + kCodes + row * kScales + quarter * 32 / CODEC_BLOCK;
    keep(to_codes), keep(of_codes[0]), keep(of_codes[1]), keep(of_scales), keep(of_factors);
    i64 four_rows = static_cast<i64>(columns) * 2;
    keep(four_rows);
    const Share share(warp);
    const int tile = share.pair * 2;
    int before = 0;  // pieces of the tiles before
#pragma unroll 1
    for (int from = low; from < high; from += 2 * kPairs, before += count) {
        Walk now(share), expected = now;  // the next piece to copy
        const int first = before + now.piece;
        Ring at = {first % WEIGHT_ONLY_STAGES, static_cast<u32>(first / WEIGHT_ONLY_STAGES) & 1};
        float sum[2][WEIGHT_ONLY_TILES][4] = {};
        // A tile that there is not all of has rows of that before.
        const auto line_of = [&](int m) { return min((from + tile + m) * kTall, lines - kTall); };
        const int there = min(high - from - tile, 2);  // tiles
        const u8* code[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            code[m] = codes + (static_cast<i64>(line_of(m)) + lane / 8) * (columns / 2) +
                      (begin + expected.piece) * 128 + lane % 8 * 16;
            keep(code[m]);
        }
        const u8* scale = scales + static_cast<i64>(line_of(lane / kTall) + lane % kTall) *
                                       (columns / CODEC_BLOCK);
        keep(scale);
        const auto send = [&](int slot) {
            const int place = begin + expected.piece;
            const bool more = expected.piece < count,
                       inside = more && place * 128 + lane % 8 * 16 < columns / 2;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const u8* row = code[m];
#pragma unroll
                for (int r = 0; r < kTall / 4; ++r, row += four_rows)
                    copy_ahead<16>(raw_memory + to_codes + slot + m * kTall * 128 + r * 512, row,
                                   inside && m < there);
            }
            // Of long blocks the word that has a piece's scales.
            const int first = place * kPiece / CODEC_BLOCK / 4 * 4;
#pragma unroll
            for (int g = 0; g < kScales; g += WEIGHT_ONLY_SCALE_BYTES)
                copy_ahead<WEIGHT_ONLY_SCALE_BYTES>(
                    raw_memory + of_scales + slot + g, scale + first + g,
                    more && first + g < columns / CODEC_BLOCK && lane / kTall < there);
            end_copies();
            const int further = expected.next(share) * 128;
            code[0] += further, code[1] += further;
        };
#pragma unroll 1
        for (int d = 0; d < WEIGHT_ONLY_DEPTH; ++d) send(d * kSlot);
        int slot = 0;
#pragma unroll 1
        while (now.piece < count) {
            arrived<WEIGHT_ONLY_DEPTH - 1>();
            __syncwarp();
            const auto multiply = [&](bool folded) {
                const int other = CODEC_BLOCK == 128 ? (begin + now.piece) % 2 * 2 : 0;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    uint4 words[4];
                    u32 factors[4][kOfLane];
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        words[r] = *reinterpret_cast<const uint4*>(raw_memory + of_codes[i] + slot +
                                                                   r * 1024);
#pragma unroll
                        for (int g = 0; g < kOfLane; ++g)
                            factors[r][g] =
                                scale_pair(raw_memory[of_factors + slot + 8 * r * kScales +
                                                      i * 128 / CODEC_BLOCK + g + other],
                                           folded);
                    }
                    if (i == 0) wait(full + 8 * at.stage, at.parity);
                    const int tokens = at.stage * kStage + i * 256;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        uint4 b[WEIGHT_ONLY_TILES];
#pragma unroll
                        for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
                            b[t] = *reinterpret_cast<const uint4*>(raw_memory + of_x[t] + tokens +
                                                                   j * 64);
                        u32 bits[4][4];
#pragma unroll
                        for (int r = 0; r < 4; ++r) {
                            const u32 word[4] = {words[r].x, words[r].y, words[r].z, words[r].w};
                            decode(word + j, factors[r][j * kOfLane / 4], folded, 0, bits[r]);
                        }
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd)
#pragma unroll
                            for (int m = 0; m < 2; ++m) {
                                const u32(&upper)[4] = bits[2 * m], (&lower)[4] = bits[2 * m + 1];
                                const u32 a[4] = {upper[2 * odd], lower[2 * odd],
                                                  upper[2 * odd + 1], lower[2 * odd + 1]};
#pragma unroll
                                for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
                                    mma(sum[m][t], a, odd ? b[t].z : b[t].x, odd ? b[t].w : b[t].y);
                            }
                    }
                }
            };
            bool folded = true;
#if !CODEC_UE4M3
            u32 large = 0;
#pragma unroll
            for (int g = 0; g < kScales; g += 4)
                large |= large_of(*reinterpret_cast<const u32*>(raw_memory + of_scales + slot + g));
            folded = !__any_sync(0xFFFFFFFFu, large != 0);
#endif
            if (CODEC_UE4M3 || folded)
                multiply(true);
            else
                multiply(false);
            __syncwarp();
            if (lane == 0) arrive(empty + 8 * at.stage);
            at.advance(now.next(share));
            send(slot);  // the codes that lay there are used
            slot = slot == (WEIGHT_ONLY_DEPTH - 1) * kSlot ? 0 : slot + kSlot;
        }
        arrived<0>();
        __syncwarp();
        float* const sums = reinterpret_cast<float*>(raw_memory);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int again =
                (from + tile + m) * kTall - line_of(m);  // rows that the tile before has
#pragma unroll
            for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int of_tile = c / 2 * 8 + row - again;
                    if (of_tile >= 0)
                        sums[warp * kSums + m * kOfTile +
                             (t * 8 + quarter * 2 + c % 2) * kSumPitch + of_tile] = sum[m][t][c];
                }
        }
        named_barrier(1, kMath);
        const Lines here = {from * kTall,
                            min(min(from + 2 * kPairs, high) * kTall, lines) - from * kTall, lines,
                            factor, out};
        add_parts<kMath, kSumPitch>(Parts{sums}, partial, slice, slices, rows, here);
        named_barrier(1, kMath);  // sums are read: codes may come
    }
    if (slices == 1) return;
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(done + group, 1u) + 1 == static_cast<u32>(slices);
        if (last) done[group] = 0;
        __threadfence();
    }
    named_barrier(1, kMath);
    if (!last) return;
    const Lines all = {low * kTall, min(high * kTall, lines) - low * kTall, lines, factor, out};
    add_slices<kMath>(partial, slices, rows, all);
}
