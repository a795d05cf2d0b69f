// out = x w^T for up to 16 rows of x, for Hopper: packed E2M1 weights under E8M0 or E4M3 scales,
// read once, decoded to bfloat16 on the way to mma.sync (m16n8k16; weights on the side of 16).
//
// Warps are on their own. Each has 16 rows of w (a tile) at a time, and a part of K, of which it
// copies WEIGHT_ONLY_CHUNK elements of each row to shared memory, WEIGHT_ONLY_DEPTH times ahead. x
// of the block's part of K (a slice) lies in shared memory in the order in which decoding leaves
// the elements, so that no element moves between lanes: a lane has 32 neighbouring elements of two
// rows, a segment is four lanes' worth. float32 x is three bfloat16 matrices, which together are
// exactly x: its rows are three tokens (WEIGHT_ONLY_X_PARTS).
//
// If a block has all of K, its warps share it, and their sums meet in shared memory. If there are
// slices, they meet in `partial`, and the last block of a group of tiles adds them. Both add in the
// order of K, so that the result depends on nothing but shapes. No headers. Macros:
// WEIGHT_ONLY_WARPS, WEIGHT_ONLY_CHUNK, CODEC_BLOCK (of a scale), WEIGHT_ONLY_SCALE_BYTES (bytes of
// scales that are copied at a time), WEIGHT_ONLY_TILES (of 8 tokens), WEIGHT_ONLY_X_PARTS; those of
// weights.cuh.

#include "weight_only/weights.cuh"

constexpr int kThreads = 32 * WEIGHT_ONLY_WARPS, kSegment = 128, kTall = 16;
constexpr int kBytes = WEIGHT_ONLY_CHUNK / 2,
              kScales = WEIGHT_ONLY_CHUNK / CODEC_BLOCK;  // of a row of a chunk
constexpr int kCodes = kTall * (kBytes + 32), kStage = kCodes + kTall * kScales;
// Copies of 16 bytes of a row, and rows that a warp copies at a time; the same of scales.
constexpr int kOfRow = kBytes / 16, kAtOnce = 32 / kOfRow,
              kScalesOfRow = kScales / WEIGHT_ONLY_SCALE_BYTES, kScalesAtOnce = 32 / kScalesOfRow;

// Where a row's codes begin: two rows lie in different banks.
__device__ __forceinline__ int place(int row) { return row * kBytes + (row + 1) / 2 * 64; }

// u / n of small numbers, given 1 / n.
__device__ __forceinline__ int quotient(int u, float inverse) {
    return static_cast<int>((static_cast<float>(u) + 0.5f) * inverse);
}

// x from element `first` of K on, zeros beyond `columns`. `then` is done while the first values are
// on their way: those wait for what is asked of memory before them.
template <class Then>
__device__ __forceinline__ void load_x(u8* to, int pitch, const Raw* x, int first, int of_token,
                                       int rows, int columns, Then then) {
    constexpr int kBatch = 8;
    const int count = rows * WEIGHT_ONLY_X_PARTS * of_token;
    const float inverse = 1.0f / of_token;
    int start = threadIdx.x;
    do {  // threads that have nothing of x, too, do what is done then
        uint4 got[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int u = start + n * kThreads, token = quotient(u, inverse),
                      k = first + (u - token * of_token) * 8;
            got[n] = uint4{0, 0, 0, 0};
            if (u < count && k < columns) {
                const int part = WEIGHT_ONLY_X_PARTS == 1 ? 0 : token / rows;
                const Raw* const from = x + static_cast<i64>(token - part * rows) * columns + k;
#if WEIGHT_ONLY_IN == 1
                got[n] = *reinterpret_cast<const uint4*>(from);
#else
                u32 v[8];
                for (int e = 0; e < 8; ++e) v[e] = part_of(from[e], part);
                got[n] = uint4{v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16,
                               v[6] | v[7] << 16};
#endif
            }
        }
        if (start == threadIdx.x) then();
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int u = start + n * kThreads, token = quotient(u, inverse),
                      i = u - token * of_token;
            if (u >= count) continue;
            const uint4 w = got[n];
            const int at = i / 16 * 16 + i % 4 * 4 + i / 4 % 4;  // four lanes' eights together
            *reinterpret_cast<uint4*>(to + token * pitch + at * 16) =
                uint4{__byte_perm(w.x, w.z, 0x5410), __byte_perm(w.x, w.z, 0x7632),
                      __byte_perm(w.y, w.w, 0x5410), __byte_perm(w.y, w.w, 0x7632)};
        }
        start += kBatch * kThreads;
    } while (start < count);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    decode_few(const Raw* __restrict__ x, const u8* __restrict__ codes,
               const u8* __restrict__ scales, const float* __restrict__ tensor_scale,
               float* __restrict__ partial, u32* __restrict__ done, void* __restrict__ out,
               int rows, int lines, int columns, int slices, int stretch, int log_parts) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ u32 last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quarter = lane % 4;
    const int octets = columns / 2, blocks = columns / CODEC_BLOCK,
              count = rows * WEIGHT_ONLY_X_PARTS;
    // The tiles of this group of blocks, and their rows; if rows are missing in the last tile, it
    // begins before.
    const u32 groups = slices == 1 ? gridDim.x : gridDim.x / slices,
              group = slices == 1 ? blockIdx.x : blockIdx.x / slices;
    const u32 tiles = (lines + kTall - 1) / kTall;
    const int low = tiles * group / groups, high = tiles * (group + 1) / groups;
    const int from = low * kTall, mine = min(high * kTall, lines) - from;
    // K of this block, and of this warp.
    const int slice = blockIdx.x - group * slices, first = slice * stretch;
    const int part = warp & ((1 << log_parts) - 1),
              of_part = (stretch / WEIGHT_ONLY_CHUNK + (1 << log_parts) - 1 >> log_parts) *
                        WEIGHT_ONLY_CHUNK;
    const int begin = first + part * of_part,
              end = min(min(columns, first + stretch), begin + of_part);
    const int start = low + (warp >> log_parts), step = WEIGHT_ONLY_WARPS >> log_parts;
    u8* const ring = memory + warp * WEIGHT_ONLY_DEPTH * kStage;
    u8* const tokens = memory + WEIGHT_ONLY_WARPS * WEIGHT_ONLY_DEPTH * kStage;
    const int pitch = stretch * 2 + 64;  // of a token: no bank conflicts
    int ahead_tile = start, ahead = begin;
    const i64 lane_code = static_cast<i64>(lane / kOfRow) * octets + lane % kOfRow * 16;
    const i64 lane_scale = static_cast<i64>(lane / kScalesOfRow) * blocks +
                           lane % kScalesOfRow * WEIGHT_ONLY_SCALE_BYTES;
    u8* const lane_to = ring + place(lane / kOfRow) + lane % kOfRow * 16;
    const auto send = [&](int slot) {
        if (ahead_tile < high && begin < end) {
            const i64 line = min(ahead_tile * kTall, lines - kTall);
            const u8* code = codes + line * octets + ahead / 2 + lane_code;
            const bool there = ahead / 2 + lane % kOfRow * 16 < octets;
#pragma unroll
            for (int r = 0; r < kTall; r += kAtOnce, code += kAtOnce * octets)
                copy_ahead<16>(lane_to + slot * kStage + place(r), code, there);
            const u8* scale = scales + line * blocks + ahead / CODEC_BLOCK + lane_scale;
            const bool scale_there =
                ahead / CODEC_BLOCK + lane % kScalesOfRow * WEIGHT_ONLY_SCALE_BYTES < blocks;
#pragma unroll
            for (int r = 0; r < kTall; r += kScalesAtOnce, scale += kScalesAtOnce * blocks)
                if (r + lane / kScalesOfRow < kTall)
                    copy_ahead<WEIGHT_ONLY_SCALE_BYTES>(ring + slot * kStage + kCodes +
                                                            r * kScales +
                                                            lane * WEIGHT_ONLY_SCALE_BYTES,
                                                        scale, scale_there);
        }
        end_copies();
        ahead += WEIGHT_ONLY_CHUNK;
        if (ahead >= end) ahead = begin, ahead_tile += step;
    };
    let_next_start();
    await_last();  // which may have written what is read from here on
    load_x(tokens, pitch, x, first, stretch / 8, rows, columns, [&] {
#pragma unroll 1
        for (int d = 0; d < WEIGHT_ONLY_DEPTH; ++d) send(d);
    });
    __syncthreads();
    const u8* of_x[WEIGHT_ONLY_TILES];  // of tokens that there are not, another's
#pragma unroll
    for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
        of_x[t] = tokens + min(t * 8 + row, count - 1) * pitch + (begin - first) * 2 + quarter * 16;
    // Sums of slices in global memory, or of parts of K in shared memory.
    const i64 line_pitch = ((slices > 1 ? lines : mine) + 3) / 4 * 4;
    float* const sums =
        slices > 1 ? partial : reinterpret_cast<float*>(tokens + count * pitch) - from;
    int slot = 0;
#pragma unroll 1
    for (int tile = start; tile < high; tile += step) {
        float sum[2][WEIGHT_ONLY_TILES][4] = {};  // two, so that fewer wait for the last
#pragma unroll 1
        for (int k = 0; k < end - begin; k += WEIGHT_ONLY_CHUNK) {
            arrived<WEIGHT_ONLY_DEPTH - 1>();
            __syncwarp();
            const u8* const stage = ring + slot * kStage;
            const u8* const of_scales = stage + kCodes + row * kScales;
            const auto multiply = [&](bool folded) {
#pragma unroll
                for (int s = 0; s < WEIGHT_ONLY_CHUNK / kSegment; ++s) {
                    uint4 words[2];
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        words[h] = *reinterpret_cast<const uint4*>(stage + place(row + 8 * h) +
                                                                   s * 64 + quarter * 16);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        u32 pairs[2][4];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const u8 byte =
                                of_scales[h * 8 * kScales +
                                          (s * 128 + quarter * 32 + j * 8) / CODEC_BLOCK];
                            const u32 word[4] = {words[h].x, words[h].y, words[h].z, words[h].w};
                            decode(word + j, scale_pair(byte, folded), folded, 0, pairs[h]);
                        }
                        const u32 even[4] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
                        const u32 odd[4] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
#pragma unroll
                        for (int t = 0; t < WEIGHT_ONLY_TILES; ++t) {
                            const uint4 b =
                                *reinterpret_cast<const uint4*>(of_x[t] + k * 2 + s * 256 + j * 64);
                            mma(sum[0][t], even, b.x, b.y);
                            mma(sum[1][t], odd, b.z, b.w);
                        }
                    }
                }
            };
            bool folded = true;
#if !CODEC_UE4M3
            u32 large = 0;
#pragma unroll
            for (int i = lane; i < kTall * kScales / 4; i += 32)
                large |= large_of(reinterpret_cast<const u32*>(stage + kCodes)[i]);
            folded = !__any_sync(0xFFFFFFFFu, large != 0);
#endif
            if (CODEC_UE4M3 || folded)
                multiply(true);
            else
                multiply(false);
            __syncwarp();
            send(slot);  // the codes that lay there are used
            slot = slot + 1 == WEIGHT_ONLY_DEPTH ? 0 : slot + 1;
        }
#pragma unroll
        for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int line = min(tile * kTall, lines - kTall) + row + c / 2 * 8,
                          token = t * 8 + quarter * 2 + c % 2;
                if (line >= from && token < count)
                    sums[((slice + part) * count + token) * line_pitch + line] =
                        sum[0][t][c] + sum[1][t][c];
            }
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
        (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // the scales were times 2^-8
    const int fours = (mine + 3) / 4, cuts = slices << log_parts;
    const float inverse = 1.0f / fours;
    const auto add = [&](bool of_slices) {
        constexpr int kBatch = 4;  // sums of four lines, on their way at a time
        for (int u = threadIdx.x; u < rows * fours; u += kBatch * kThreads) {
            int m[kBatch], line[kBatch];
            float total[kBatch][4] = {};
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
                const int i = min(u + n * kThreads, rows * fours - 1);
                m[n] = quotient(i, inverse), line[n] = from + (i - m[n] * fours) * 4;
            }
            for (int p = WEIGHT_ONLY_X_PARTS - 1; p >= 0; --p) {  // the smallest first
                float of_x[kBatch][4] = {};
#pragma unroll 4
                for (int s = 0; s < cuts; ++s)
#pragma unroll
                    for (int n = 0; n < kBatch; ++n) {
                        const float* const at =
                            sums + (s * count + p * rows + m[n]) * line_pitch + line[n];
                        const float4* const four = reinterpret_cast<const float4*>(at);
                        const float4 v = of_slices ? __ldcg(four) : *four;
                        of_x[n][0] += v.x, of_x[n][1] += v.y, of_x[n][2] += v.z, of_x[n][3] += v.w;
                    }
#pragma unroll
                for (int n = 0; n < kBatch; ++n)
#pragma unroll
                    for (int c = 0; c < 4; ++c) total[n][c] += of_x[n][c];
            }
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (u + n * kThreads < rows * fours && line[n] + c < lines)
                        finish(out, static_cast<i64>(m[n]) * lines + line[n] + c,
                               total[n][c] * factor);
        }
    };
    if (slices > 1)
        add(true);
    else
        add(false);
}
