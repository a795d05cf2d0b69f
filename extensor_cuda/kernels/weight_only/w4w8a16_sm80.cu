// out = x w^T for few rows of x, on Ampere and later. Packed weights of 4 or 8 bits are read once
// and decoded to bfloat16 for mma.sync (m16n8k16, weights as operand A).
//
// A block of four warps has 64 rows of w, 16 per warp, and a slice of K. A lane decodes
// WEIGHT_ONLY_LANE_ELEMENTS neighbouring elements of two rows; four lanes make a segment. A lane
// copies its own codes to shared memory, WEIGHT_ONLY_DEPTH segments ahead, so that no barrier is
// needed. x is stored in the order of decoded weights, so that no element moves between lanes.
//
// float32 x is split into three bfloat16 matrices that sum to x exactly: a row is three tokens
// (WEIGHT_ONLY_X_PARTS). Slices of K leave sums in `partial`; the last block of a group of rows
// adds them in order, so that the result depends on shapes only.
//
// CODEC_FLOAT_SCALES 0: E8M0 or E4M3 scales of CODEC_BLOCK elements, and element times scale is
// exact in bfloat16. CODEC_FLOAT_SCALES 1: float scales of WEIGHT_ONLY_GROUP segments (0: all of K)
// and zero points; code less zero point is exact, and float32 group sums are scaled.
//
// Macros: those two, CODEC_BITS, CODEC_IS_FLOAT, CODEC_UE4M3, CODEC_FLOAT16_SCALES,
// WEIGHT_ONLY_LANE_ELEMENTS, WEIGHT_ONLY_X_ELEMENTS (of K in shared memory), WEIGHT_ONLY_DEPTH,
// WEIGHT_ONLY_TILES (of 8 tokens), WEIGHT_ONLY_X_PARTS, WEIGHT_ONLY_IN and WEIGHT_ONLY_OUT (0:
// float32, 1: bfloat16), WEIGHT_ONLY_MIN_CTAS.

#include "weight_only/weights.cuh"

constexpr int kWarps = 4, kThreads = 128, kRows = 64, kTokens = 8 * WEIGHT_ONLY_TILES;
constexpr int kSegment = 4 * WEIGHT_ONLY_LANE_ELEMENTS,
              kCodeWords = WEIGHT_ONLY_LANE_ELEMENTS * CODEC_BITS / 32,
              kUnits = WEIGHT_ONLY_LANE_ELEMENTS / 8;
constexpr int kGroup = WEIGHT_ONLY_GROUP ? WEIGHT_ONLY_GROUP : 1;
constexpr int kPitch = WEIGHT_ONLY_X_ELEMENTS * 2 + 64;  // bytes of a token; avoids bank conflicts
constexpr int kInByte = 8 / CODEC_BITS, kLaneBytes = 4 * kCodeWords,
              kStage = 2 * kThreads * kLaneBytes;
constexpr int kScales = CODEC_FLOAT_SCALES ? 0 : WEIGHT_ONLY_X_ELEMENTS / CODEC_BLOCK,
              kScalePitch = kScales + 4;  // per row of w; avoids bank conflicts

// Reads a lane's codes of one row byte by byte, where rows are not aligned.
DEVICE void gather(u32 (&words)[kCodeWords], const u8* from, i64 left) {
#pragma unroll
    for (int i = 0; i < kCodeWords; ++i) {
        u32 word = 0;
        for (int b = 0; b < 4; ++b)
            if (4 * i + b < left) word |= static_cast<u32>(from[4 * i + b]) << (8 * b);
        words[i] = word;
    }
}

#if !CODEC_FLOAT_SCALES
constexpr u32 kNoScale = CODEC_UE4M3 ? 0u : 0x7F7F7F7Fu;

// Loads the scales of a block's rows for WEIGHT_ONLY_X_ELEMENTS elements from `k0` on, a multiple
// of a segment. Returns whether this thread found one to which `folded` does not apply.
DEVICE bool load_scales(
    u8* to, const Stored* scales, int k0, int feature0, int out_features, i64 blocks) {
    const i64 first = k0 / CODEC_BLOCK;
    const bool words = kSegment / CODEC_BLOCK % 4 == 0 && blocks % 4 == 0;
    const int step = words ? 4 : 1, row_codes = kScales / step;
    bool odd = false;
    for (int u = threadIdx.x; u < kRows * row_codes; u += kThreads) {
        const int row = u / row_codes, i = u % row_codes * step;
        const Stored* from =
            scales + static_cast<i64>(min(feature0 + row, out_features - 1)) * blocks + first + i;
        u8* at = to + row * kScalePitch + i;
        u32 found = kNoScale;
        if (words) {
            if (first + i < blocks) found = *reinterpret_cast<const u32*>(from);
            *reinterpret_cast<u32*>(at) = found;
        } else {
            if (first + i < blocks) found = *from;
            *at = static_cast<u8>(found);
            found = kNoScale & 0xFFFFFF00u | found & 0xFFu;
        }
        if (!CODEC_UE4M3)
            for (int b = 0; b < 32; b += 8) odd = odd || !foldable(found >> b & 0xFFu);
    }
    return odd;
}
#endif

// Where eight values of a token are in shared memory.
DEVICE uint4* unit_of(u8* to, int token, int i) {
    const int within = i % (kSegment / 8), lane = within / kUnits, j = within % kUnits;
    return reinterpret_cast<uint4*>(to + token * kPitch + (i - within + j * 4 + lane) * 16);
}

// Loads x from `k0` on, zeros beyond `columns`, in the order of decoded code_ring.
DEVICE void load_x(u8* to, const Raw* x, int k0, int rows, int columns) {
    constexpr int kUnitsPerToken = WEIGHT_ONLY_X_ELEMENTS / 8, kBatch = 4;
    const int count = rows * WEIGHT_ONLY_X_PARTS * kUnitsPerToken;
#if WEIGHT_ONLY_IN == 1
    if (columns % 8 == 0) {
        for (int first = threadIdx.x; first < count; first += kBatch * kThreads) {
            uint4 got[kBatch];  // several loads in flight
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
                const int u = first + n * kThreads, k = k0 + u % kUnitsPerToken * 8;
                got[n] = uint4{0, 0, 0, 0};
                if (u < count && k < columns)
                    got[n] = *reinterpret_cast<const uint4*>(
                        x + static_cast<i64>(u / kUnitsPerToken) * columns + k);
            }
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
                const int u = first + n * kThreads;
                const uint4 w = got[n];
                if (u >= count) continue;
                *unit_of(to, u / kUnitsPerToken, u % kUnitsPerToken) =
                    CODEC_BITS == 8
                        ? w
                        : uint4{__byte_perm(w.x, w.z, 0x5410), __byte_perm(w.x, w.z, 0x7632),
                              __byte_perm(w.y, w.w, 0x5410), __byte_perm(w.y, w.w, 0x7632)};
            }
        }
        return;
    }
#endif
    for (int u = threadIdx.x; u < count; u += kThreads) {
        const int token = u / kUnitsPerToken, i = u % kUnitsPerToken,
                  part = WEIGHT_ONLY_X_PARTS == 1 ? 0 : token / rows;
        const int k = k0 + i * 8;
        u32 v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        const Raw* from = x + static_cast<i64>(token - part * rows) * columns + k;
        for (int e = 0; e < 8; ++e)
            if (k + e < columns) v[e] = bf16_part(from[e], part);
        *unit_of(to, token, i) =
            CODEC_BITS == 8
                ? uint4{v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16}
                : uint4{v[0] | v[4] << 16, v[1] | v[5] << 16, v[2] | v[6] << 16, v[3] | v[7] << 16};
    }
}

// ---- the product ----

// A lane's slots of codes copied ahead. `codes` are where its two rows of w begin: an array in this
// struct would keep the other members out of registers until loops are unrolled.
struct CodeRing {
    u8* slots;
    int ahead, limit, last;  // byte offsets in a row: the next copy, the end, the last copy
    int slot;
    bool aligned;  // rows begin at multiples of 16 bytes; others are not copied ahead

    DEVICE void prefetch(const u8* const (&codes)[2], int slot) {
        const int offset = min(ahead, last);  // a valid address in any case
#pragma unroll
        for (int h = 0; h < 2; ++h)
            cp_async<kLaneBytes>(
                slots + slot * kStage + h * (kStage / 2), codes[h] + offset, ahead < limit);
        cp_async_commit();
        ahead += kSegment / kInByte;
    }

    // Reads the lane's codes of the segment at `k`.
    DEVICE void read(u32 (&words)[2][kCodeWords], const u8* const (&codes)[2], int k,
        i64 code_pitch, int quad_lane) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u8* from = slots + slot * kStage + h * (kStage / 2);
            if (!aligned) {
                const i64 offset = (k + quad_lane * WEIGHT_ONLY_LANE_ELEMENTS) / kInByte;
                gather(words[h], codes[h] + offset, code_pitch - offset);
            } else if (kCodeWords == 4) {
                const uint4 four = *reinterpret_cast<const uint4*>(from);
                words[h][0] = four.x, words[h][1 % kCodeWords] = four.y;
                words[h][2 % kCodeWords] = four.z, words[h][3 % kCodeWords] = four.w;
            } else {
#pragma unroll
                for (int i = 0; i < kCodeWords; ++i)
                    words[h][i] = reinterpret_cast<const u32*>(from)[i];
            }
        }
    }
};

// Decodes a segment and multiplies it. `row_scales`: the lane's first scale (float scales: unused).
DEVICE void multiply_segment(float (&part)[WEIGHT_ONLY_TILES][4], const u32 (&words)[2][kCodeWords],
    const u8* row_scales, const int (&zero)[2], const u8* x_segment, bool folded) {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
        u32 pairs[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#if CODEC_FLOAT_SCALES
            const u32 scale = 0;
#else
            const u32 scale =
                scale_bf16x2(row_scales[h * 8 * kScalePitch + j * 8 / CODEC_BLOCK], folded);
#endif
            decode(words[h] + j * kCodeWords / kUnits, scale, folded, zero[h], pairs[h]);
        }
        const u32 first[4] = {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]};
        const u32 second[4] = {pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3]};
#pragma unroll
        for (int t = 0; t < WEIGHT_ONLY_TILES; ++t) {
            const uint4 b = *reinterpret_cast<const uint4*>(x_segment + t * 8 * kPitch + j * 64);
            mma(part[t], first, b.x, b.y);
            mma(part[t], second, b.z, b.w);
        }
    }
}

// Adds the slices' sums of a group of rows of w and writes the results.
DEVICE void add_slices(const float* partial, void* out, int feature0, int rows, int out_features,
    int slices, float factor) {
    const int count = rows * WEIGHT_ONLY_X_PARTS;
    for (int i = threadIdx.x; i < rows * kRows; i += kThreads) {
        const int feature = feature0 + i % kRows, m = i / kRows;
        if (feature >= out_features) continue;
        float total = 0.0f;
        for (int p = WEIGHT_ONLY_X_PARTS - 1; p >= 0; --p) {  // the smallest first
            float of_part = 0.0f;
            for (int s = 0; s < slices; ++s)
                of_part +=
                    __ldcg(partial + (static_cast<i64>(s) * count + p * rows + m) * out_features +
                           feature);
            total += of_part;
        }
        if (!CODEC_FLOAT_SCALES) total *= 256.0f;  // scales are decoded times 2^-8
        store_result(out, static_cast<i64>(m) * out_features + feature, total * factor);
    }
}

extern "C" __global__ void __launch_bounds__(128, WEIGHT_ONLY_MIN_CTAS) w4w8a16_sm80(
    const Raw* __restrict__ x, const u8* __restrict__ codes, const Stored* __restrict__ scales,
    const signed char* __restrict__ zeros, const float* __restrict__ tensor_scale,
    float* __restrict__ partial, u32* __restrict__ done, void* __restrict__ out, int rows,
    int out_features, int columns, i64 code_pitch, i64 blocks, int slices, int k_per_slice) {
    __shared__ __align__(16) u8 tokens[kTokens * kPitch];
    __shared__ __align__(16) u8 ring[WEIGHT_ONLY_DEPTH * kStage];
#if !CODEC_FLOAT_SCALES
    __shared__ __align__(16) u8 block_scales[kRows * kScalePitch];
#endif
    __shared__ u32 last;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4,
              quad_lane = lane % 4;
    const int slice = blockIdx.x % slices, feature0 = blockIdx.x / slices * kRows;
    const int begin = slice * k_per_slice, end = min(columns, begin + k_per_slice);
    float sum[WEIGHT_ONLY_TILES][4], part[WEIGHT_ONLY_TILES][4];
#pragma unroll
    for (int t = 0; t < WEIGHT_ONLY_TILES; ++t)
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[t][c] = part[t][c] = 0.0f;
    int zero[2] = {0, 0};
    const i64 upper = min(feature0 + warp * 16 + row, out_features - 1),
              lower = min(feature0 + warp * 16 + row + 8, out_features - 1);
    const u8* const row_codes[2] = {codes + upper * code_pitch, codes + lower * code_pitch};
    CodeRing code_ring;
    code_ring.slots = ring + threadIdx.x * kLaneBytes;
    code_ring.aligned = code_pitch % 16 == 0;
    code_ring.ahead = (begin + quad_lane * WEIGHT_ONLY_LANE_ELEMENTS) / kInByte;
    code_ring.limit = code_ring.aligned
                          ? min(static_cast<int>(code_pitch),
                                (end + kSegment - 1) / kSegment * (kSegment / kInByte))
                          : 0;
    code_ring.last = max(code_ring.limit - kLaneBytes, 0);
#pragma unroll
    for (int d = 0; d < WEIGHT_ONLY_DEPTH; ++d) code_ring.prefetch(row_codes, d);
    code_ring.slot = 0;
    // Missing tokens stay zero.
    for (int u = rows * WEIGHT_ONLY_X_PARTS * (kPitch / 16) + threadIdx.x;
        u < kTokens * (kPitch / 16); u += kThreads)
        reinterpret_cast<uint4*>(tokens)[u] = uint4{0, 0, 0, 0};
    // Multiplies the segment at `k`, of the part of x from `k0` on.
    const auto multiply = [&](int k, int k0, bool folded) {
        u32 words[2][kCodeWords];
        cp_async_wait<WEIGHT_ONLY_DEPTH - 1>();
        code_ring.read(words, row_codes, k, code_pitch, quad_lane);
        const int after = k + kSegment;
#if CODEC_FLOAT_SCALES
        const u8* row_scales = nullptr;
        const int scale_group = WEIGHT_ONLY_GROUP ? k / kSegment / kGroup : 0;
        if (zeros)
            zero[0] = zeros[upper * blocks + scale_group],
            zero[1] = zeros[lower * blocks + scale_group];
#else
        const u8* row_scales =
            block_scales + (warp * 16 + row) * kScalePitch +
            static_cast<u32>(k - k0 + quad_lane * WEIGHT_ONLY_LANE_ELEMENTS) / CODEC_BLOCK;
#endif
        const u8* x_segment = tokens + (k - k0) * 2 + row * kPitch + quad_lane * 16;
        multiply_segment(part, words, row_scales, zero, x_segment, folded);
        code_ring.prefetch(row_codes, code_ring.slot);  // the slot's codes are used up
        code_ring.slot = (code_ring.slot + 1) % WEIGHT_ONLY_DEPTH;
#if CODEC_FLOAT_SCALES
        if ((WEIGHT_ONLY_GROUP && after / kSegment % kGroup == 0) || after >= end) {
            const float a = scale_value(scales[upper * blocks + scale_group]);
            const float b = scale_value(scales[lower * blocks + scale_group]);
#pragma unroll
            for (int t = 0; t < WEIGHT_ONLY_TILES; ++t) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    sum[t][c] = __fmaf_rn(part[t][c], c < 2 ? a : b, sum[t][c]);
                    part[t][c] = 0.0f;
                }
            }
        }
#endif
    };
    for (int k0 = begin; k0 < end; k0 += WEIGHT_ONLY_X_ELEMENTS) {
        __syncthreads();
        load_x(tokens, x, k0, rows, columns);
#if CODEC_FLOAT_SCALES
        __syncthreads();
        const bool folded = true;
#else
        const bool folded = !__syncthreads_or(
            load_scales(block_scales, scales, k0, feature0, out_features, blocks));
#endif
        const int stop = min(end, k0 + WEIGHT_ONLY_X_ELEMENTS);
        for (int k = k0; folded && k < stop; k += kSegment) multiply(k, k0, true);
        for (int k = k0; !folded && k < stop; k += kSegment) multiply(k, k0, false);
    }
    const int count = rows * WEIGHT_ONLY_X_PARTS;
#pragma unroll
    for (int t = 0; t < WEIGHT_ONLY_TILES; ++t) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int feature = feature0 + warp * 16 + row + c / 2 * 8,
                      token = t * 8 + quad_lane * 2 + c % 2;
            if (feature < out_features && token < count)
                partial[(static_cast<i64>(slice) * count + token) * out_features + feature] =
                    CODEC_FLOAT_SCALES ? sum[t][c] : part[t][c];
        }
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicAdd(done + blockIdx.x / slices, 1u) + 1 == static_cast<u32>(slices);
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) done[blockIdx.x / slices] = 0;
    const float factor = tensor_scale ? *tensor_scale : 1.0f;
    add_slices(partial, out, feature0, rows, out_features, slices, factor);
}
