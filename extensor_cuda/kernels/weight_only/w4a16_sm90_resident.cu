// out = x w^T for up to 16 rows of x on Hopper. Packed E2M1 weights with E8M0 or E4M3 scales are
// read once and decoded to bfloat16 for mma.sync (m16n8k16, weights as operand A). x stays resident
// in shared memory.
//
// Warps work alone. Each takes 16 rows of w (a tile) and a part of K, and copies WEIGHT_ONLY_CHUNK
// elements of each row to shared memory, WEIGHT_ONLY_DEPTH chunks ahead. A lane decodes 32
// neighbouring elements of two rows; four lanes make a segment. x is stored in the order of decoded
// weights, so that no element moves between lanes.
//
// float32 x is split into three bfloat16 matrices that sum to x exactly: a row is three tokens
// (WEIGHT_ONLY_X_PARTS). Partial sums of warps meet in shared memory, those of slices of K in
// `partial`. Both are added in the order of K, so that the result depends on shapes only.
//
// Macros: WEIGHT_ONLY_WARPS, WEIGHT_ONLY_CHUNK, CODEC_BLOCK (elements of a scale),
// WEIGHT_ONLY_SCALE_BYTES (bytes of scales copied at a time), WEIGHT_ONLY_TILES (of 8 tokens),
// WEIGHT_ONLY_X_PARTS, WEIGHT_ONLY_DEPTH; those of weights.cuh.

#include "weight_only/weights.cuh"

constexpr int kThreads = 32 * WEIGHT_ONLY_WARPS, kSegment = 128, kTileRows = 16;
constexpr int kBytes = WEIGHT_ONLY_CHUNK / 2,
              kScales = WEIGHT_ONLY_CHUNK / CODEC_BLOCK;  // per row of a chunk
constexpr int kCodes = kTileRows * kBytes, kStage = kCodes + kTileRows * kScales;
// 16-byte copies per row and rows that a warp copies at once, for codes and for scales.
constexpr int kCopiesPerRow = kBytes / 16, kRowsAtOnce = 32 / kCopiesPerRow,
              kScaleCopiesPerRow = kScales / WEIGHT_ONLY_SCALE_BYTES,
              kScalesAtOnce = 32 / kScaleCopiesPerRow;

static_assert(kRowsAtOnce % 2 == 0 && kBytes % 128 == 0, "a lane copies rows of one parity");

// Where a piece of 16 bytes of a row lies. Every second row has its pairs of 64 bytes swapped, so
// that pairs of rows are in different banks.
DEVICE int code_offset_of(int row, int piece) { return row * kBytes + (piece ^ row % 2 * 4) * 16; }

// u / n for small numbers, given 1 / n.
DEVICE int quotient(int u, float inverse) {
    return static_cast<int>((static_cast<float>(u) + 0.5f) * inverse);
}

// Loads x from element `first` of K on, zeros beyond `columns`. `then` runs while the first loads
// are in flight, because they would wait for later requests.
template <class Then>
DEVICE void load_x(u8* to, int pitch, const Raw* x, int first, int units_per_token, int rows,
    int columns, Then then) {
    constexpr int kBatch = 8;
    const int count = rows * WEIGHT_ONLY_X_PARTS * units_per_token;
    const float inverse = 1.0f / units_per_token;
    int start = threadIdx.x;
    do {  // threads without a part of x must run `then` too
        uint4 got[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int u = start + n * kThreads, token = quotient(u, inverse),
                      k = first + (u - token * units_per_token) * 8;
            got[n] = uint4{0, 0, 0, 0};
            if (u < count && k < columns) {
                const int part = WEIGHT_ONLY_X_PARTS == 1 ? 0 : token / rows;
                const Raw* const from = x + static_cast<i64>(token - part * rows) * columns + k;
#if WEIGHT_ONLY_IN == 1
                got[n] = *reinterpret_cast<const uint4*>(from);
#else
                u32 v[8];
                for (int e = 0; e < 8; ++e) v[e] = bf16_part(from[e], part);
                got[n] = uint4{
                    v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16};
#endif
            }
        }
        if (start == threadIdx.x) then();
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int u = start + n * kThreads, token = quotient(u, inverse),
                      i = u - token * units_per_token;
            if (u >= count) continue;
            const uint4 w = got[n];
            const int at = i / 16 * 16 + i % 4 * 4 +
                           i / 4 % 4;  // groups of eight of four lanes are neighbours
            *reinterpret_cast<uint4*>(to + token * pitch + at * 16) =
                uint4{__byte_perm(w.x, w.z, 0x5410), __byte_perm(w.x, w.z, 0x7632),
                    __byte_perm(w.y, w.w, 0x5410), __byte_perm(w.y, w.w, 0x7632)};
        }
        start += kBatch * kThreads;
    } while (start < count);
}

// A warp's copies of its tiles of w to its ring of slots: where the next one begins.
struct WeightCopies {
    const u8 *codes, *scales;
    u8* ring;
    u8* lane_to;
    i64 code_offset, scale_offset;
    int code_pitch, blocks, out_features, begin, end, high, step;
    Matrices matrices;
    int tile, k;

    // Copies the next chunk to a slot. The last tile begins earlier if rows are missing.
    DEVICE void prefetch(int slot, int lane) {
        if (tile < high && begin < end) {
            const i64 feature = Matrices::row_of(tile, out_features);
            const u8* code =
                codes + feature * code_pitch + k / 2 + code_offset + matrices.code_offset(tile);
            const bool there = k / 2 + lane % kCopiesPerRow * 16 < code_pitch;
#pragma unroll
            for (int r = 0; r < kTileRows; r += kRowsAtOnce, code += kRowsAtOnce * code_pitch)
                cp_async<16>(lane_to + slot * kStage + r * kBytes, code, there);
            const u8* scale = scales + feature * blocks + k / CODEC_BLOCK + scale_offset +
                              matrices.scale_offset(tile);
            const bool scale_there =
                k / CODEC_BLOCK + lane % kScaleCopiesPerRow * WEIGHT_ONLY_SCALE_BYTES < blocks;
#pragma unroll
            for (int r = 0; r < kTileRows; r += kScalesAtOnce, scale += kScalesAtOnce * blocks)
                if (r + lane / kScaleCopiesPerRow < kTileRows)
                    cp_async<WEIGHT_ONLY_SCALE_BYTES>(ring + slot * kStage + kCodes + r * kScales +
                                                          lane * WEIGHT_ONLY_SCALE_BYTES,
                        scale, scale_there);
        }
        cp_async_commit();
        k += WEIGHT_ONLY_CHUNK;
        if (k >= end) k = begin, tile += step;
    }
};

// Whether a chunk's scales can be decoded with their factor folded in.
DEVICE bool scales_fold(const u8* stage, int lane) {
#if CODEC_UE4M3
    return true;
#else
    u32 large = 0;
#pragma unroll
    for (int i = lane; i < kTileRows * kScales / 4; i += 32)
        large |= large_scales(reinterpret_cast<const u32*>(stage + kCodes)[i]);
    return !__any_sync(0xFFFFFFFFu, large != 0);
#endif
}

// Multiplies a chunk, from element `k` of the warp's part of K on. Two sums shorten dependency
// chains.
DEVICE void multiply_chunk(float (&sum)[2][WEIGHT_ONLY_TILES][4], const u8* stage,
    const u8* const (&tokens)[WEIGHT_ONLY_TILES], int k, int row, int quad_lane, bool folded) {
    const u8* const row_scales = stage + kCodes + row * kScales;
#pragma unroll
    for (int s = 0; s < WEIGHT_ONLY_CHUNK / kSegment; ++s) {
        uint4 words[2];
#pragma unroll
        for (int h = 0; h < 2; ++h)
            words[h] = *reinterpret_cast<const uint4*>(
                stage + (code_offset_of(row + 8 * h, quad_lane) ^ s * 64));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 pairs[2][4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const u8 byte =
                    row_scales[h * 8 * kScales + (s * 128 + quad_lane * 32 + j * 8) / CODEC_BLOCK];
                const u32 word[4] = {words[h].x, words[h].y, words[h].z, words[h].w};
                decode(word + j, scale_bf16x2(byte, folded), folded, 0, pairs[h]);
            }
            const u32 even[4] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
            const u32 odd[4] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
#pragma unroll
            for (int t = 0; t < WEIGHT_ONLY_TILES; ++t) {
                const uint4 b =
                    *reinterpret_cast<const uint4*>(tokens[t] + k * 2 + s * 256 + j * 64);
                mma(sum[0][t], even, b.x, b.y);
                mma(sum[1][t], odd, b.z, b.w);
            }
        }
    }
}

// Partial sums of the block's features: those of slices in global memory, those of parts of K in
// shared memory.
struct PartialSums {
    float* sums;
    i64 pitch;  // of a token
    int count;  // tokens of a slice or part

    DEVICE void store(const float (&sum)[2][WEIGHT_ONLY_TILES][4], int cut, int feature0, int from,
        int row, int quad_lane) const {
#pragma unroll
        for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int feature = feature0 + row + c / 2 * 8,
                          token = t * 8 + quad_lane * 2 + c % 2;
                if (feature >= from && token < count)
                    sums[(cut * count + token) * pitch + feature] = sum[0][t][c] + sum[1][t][c];
            }
    }

    // Adds the sums of `cuts` slices or parts and writes results, four at a time. `from`: the first
    // of the features.
    DEVICE void add(void* out, int from, int quads, int cuts, int rows, int out_features,
        float factor, bool of_slices, const Gate& gate) const {
        constexpr int kBatch = 4 / kSides;  // vectors in flight
        const float inverse = 1.0f / quads;
        for (int u = threadIdx.x; u < rows * quads; u += kBatch * kThreads) {
            int m[kBatch], quad[kBatch];
            float total[kBatch][kSides][4] = {};
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
                const int i = min(u + n * kThreads, rows * quads - 1);
                m[n] = quotient(i, inverse), quad[n] = i - m[n] * quads;
            }
            for (int p = WEIGHT_ONLY_X_PARTS - 1; p >= 0; --p) {  // the smallest first
                float of_part[kBatch][kSides][4] = {};
#pragma unroll 4
                for (int s = 0; s < cuts; ++s)
#pragma unroll
                    for (int n = 0; n < kBatch; ++n)
#pragma unroll
                        for (int side = 0; side < kSides; ++side) {
                            const float* const at = sums + (s * count + p * rows + m[n]) * pitch +
                                                    from + row_of_quad(quad[n]) + 16 * side;
                            const float4* const four = reinterpret_cast<const float4*>(at);
                            const float4 v = of_slices ? __ldcg(four) : *four;
                            float (&to)[4] = of_part[n][side];
                            to[0] += v.x, to[1] += v.y, to[2] += v.z, to[3] += v.w;
                        }
#pragma unroll
                for (int n = 0; n < kBatch; ++n)
#pragma unroll
                    for (int side = 0; side < kSides; ++side)
#pragma unroll
                        for (int c = 0; c < 4; ++c) total[n][side][c] += of_part[n][side][c];
            }
            const int results = out_features / kSides;
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int column = from / kSides + quad[n] * 4 + c;
                    if (u + n * kThreads < rows * quads && column < results)
                        store_result(out, static_cast<i64>(m[n]) * results + column,
                            result_of(
                                gate, total[n][0][c] * factor, total[n][kSides - 1][c] * factor));
                }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) w4a16_sm90_resident(const Raw* x,
    const u8* codes, const u8* scales, const float* tensor_scale, float* __restrict__ partial,
    u32* __restrict__ done, void* __restrict__ out, int rows, int out_features, int columns,
    int slices, int k_per_slice, int log_split, int second, int third, i64 codes1, i64 codes2,
    i64 scales1, i64 scales2, float alpha, float limit, float shift) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u32 last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4,
              quad_lane = lane % 4;
    const int code_pitch = columns / 2, blocks = columns / CODEC_BLOCK,
              count = rows * WEIGHT_ONLY_X_PARTS;
    // The tiles of this group of blocks.
    const u32 groups = slices == 1 ? gridDim.x : gridDim.x / slices,
              group = slices == 1 ? blockIdx.x : blockIdx.x / slices;
    const u32 tiles = (out_features + kTileRows - 1) / kTileRows;
    const int low = first_tile(tiles, group, groups), high = first_tile(tiles, group + 1, groups);
    const int from = low * kTileRows, mine = min(high * kTileRows, out_features) - from;
    // The K range of this block, and of this warp.
    const int slice = blockIdx.x - group * slices, first = slice * k_per_slice;
    const int part = warp & ((1 << log_split) - 1),
              k_per_split = (k_per_slice / WEIGHT_ONLY_CHUNK + (1 << log_split) - 1 >> log_split) *
                            WEIGHT_ONLY_CHUNK;
    const int begin = first + part * k_per_split,
              end = min(min(columns, first + k_per_slice), begin + k_per_split);
    const int start = low + (warp >> log_split), step = WEIGHT_ONLY_WARPS >> log_split;
    u8* const ring = memory + warp * WEIGHT_ONLY_DEPTH * kStage;
    u8* const tokens = memory + WEIGHT_ONLY_WARPS * WEIGHT_ONLY_DEPTH * kStage;
    const int pitch = k_per_slice * 2 + 64;  // of a token; avoids bank conflicts
    WeightCopies copies = {codes, scales, ring,
        ring + code_offset_of(lane / kCopiesPerRow, lane % kCopiesPerRow),
        static_cast<i64>(lane / kCopiesPerRow) * code_pitch + lane % kCopiesPerRow * 16,
        static_cast<i64>(lane / kScaleCopiesPerRow) * blocks +
            lane % kScaleCopiesPerRow * WEIGHT_ONLY_SCALE_BYTES,
        code_pitch, blocks, out_features, begin, end, high, step,
        {second, third, {codes1, codes2}, {scales1, scales2}}, start, begin};
    load_x(tokens, pitch, x, first, k_per_slice / 8, rows, columns, [&] {
#pragma unroll 1
        for (int d = 0; d < WEIGHT_ONLY_DEPTH; ++d) copies.prefetch(d, lane);
    });
    __syncthreads();
    const u8* token_address[WEIGHT_ONLY_TILES];  // missing tokens use another's
#pragma unroll
    for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
        token_address[t] =
            tokens + min(t * 8 + row, count - 1) * pitch + (begin - first) * 2 + quad_lane * 16;
    const PartialSums partials = {
        slices > 1 ? partial : reinterpret_cast<float*>(tokens + count * pitch) - from,
        ((slices > 1 ? out_features : mine) + 3) / 4 * 4, count};
    int slot = 0;
#pragma unroll 1
    for (int tile = start; tile < high; tile += step) {
        float sum[2][WEIGHT_ONLY_TILES][4] = {};
#pragma unroll 1
        for (int k = 0; k < end - begin; k += WEIGHT_ONLY_CHUNK) {
            cp_async_wait<WEIGHT_ONLY_DEPTH - 1>();
            __syncwarp();
            const u8* const stage = ring + slot * kStage;
            if (scales_fold(stage, lane))
                multiply_chunk(sum, stage, token_address, k, row, quad_lane, true);
            else multiply_chunk(sum, stage, token_address, k, row, quad_lane, false);
            __syncwarp();
            copies.prefetch(slot, lane);  // the slot's codes are used up
            slot = slot + 1 == WEIGHT_ONLY_DEPTH ? 0 : slot + 1;
        }
        partials.store(sum, slice + part, min(tile * kTileRows, out_features - kTileRows), from,
            row, quad_lane);
    }
    __syncthreads();
    if (slices > 1) {
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(done + group, 1u) + 1 == static_cast<u32>(slices);
            if (last) done[group] = 0;
            __threadfence();
        }
        __syncthreads();
        if (!last) return;
    }
    const float factor =
        (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // scales are decoded times 2^-8
    const Gate gate = {alpha, limit, shift};
    const int quads = (mine / kSides + 3) / 4, cuts = slices << log_split;
    if (slices > 1) partials.add(out, from, quads, cuts, rows, out_features, factor, true, gate);
    else partials.add(out, from, quads, cuts, rows, out_features, factor, false, gate);
}
