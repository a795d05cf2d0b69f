// out = x w^T for up to 64 rows of x on Hopper. Packed weights of 4 or 8 bits are read once and
// decoded to bfloat16 in wgmma's registers (64 rows of w, 8 to 64 tokens); x is in shared memory.
//
// A block has four consumer warpgroups and one producer warpgroup that loads x. WEIGHT_ONLY_SPLIT_K
// consumers share 64 rows of w and alternate on segments of 128 elements of K. A lane decodes 32
// elements of two rows of a segment. It copies their codes itself, WEIGHT_ONLY_DEPTH segments
// ahead, so that no barrier is needed. The producer reorders x to match decoded weights, so that no
// element moves between lanes.
//
// float32 x is split into three bfloat16 matrices that sum to x exactly: a row is three tokens
// (WEIGHT_ONLY_X_PARTS). Blocks take work units in turn: a group of rows and one of `slices` slices
// of K. Slices meet in `partial`, where the last one adds all, in an order that depends on shapes
// only.
//
// CODEC_FLOAT_SCALES 0: E2M1 with E8M0 or E4M3 scales of CODEC_BLOCK elements, and element times
// scale is exact in bfloat16. CODEC_FLOAT_SCALES 1: integers with float scales of WEIGHT_ONLY_GROUP
// segments (0: all of K), and zero points if CODEC_ZERO_POINTS; code less zero point is exact, and
// float32 sums are scaled per segment, or per row at the end.
//
// Macros: those, WEIGHT_ONLY_SPLIT_K, WEIGHT_ONLY_TILES (of 8 tokens), WEIGHT_ONLY_X_PARTS,
// WEIGHT_ONLY_STAGES, WEIGHT_ONLY_DEPTH, and those of weights.cuh. The wgmma function comes from
// the Python module of this name.

#include "weight_only/weights.cuh"

struct TensorMap {  // no tensor maps are used here
    u64 words[16];
};
constexpr int kCluster = 1;
typedef float Sum;
#define SUM "f"

// clang-format off
//WGMMA//
// clang-format on

#include "common/tma_wgmma.cuh"

// ---- tiles ----

#include "common/swizzle.cuh"
#include "common/ring.cuh"

constexpr int kConsumerThreads = 512, kProducerWarps = 4, kTileRows = 64, kSegment = 128;
constexpr int kTokens = 8 * WEIGHT_ONLY_TILES, kGroups = 4 / WEIGHT_ONLY_SPLIT_K,
              kRows = kGroups * kTileRows;
// Shared memory: x as read, x as wgmma reads it (tiles of 64 elements of K), and sums.
constexpr int kXRowBytes = WEIGHT_ONLY_SPLIT_K * kSegment * sizeof(Raw),
              kRawPitch = kXRowBytes + 16, kRaw = kTokens / WEIGHT_ONLY_X_PARTS * kRawPitch;
constexpr int kTile = kTokens * 128, kStage = WEIGHT_ONLY_SPLIT_K * 2 * kTile,
              kPitch = kTileRows + 4;
// A barrier's parity distinguishes two phases only. A producer that waits for a stage has seen the
// chunk kProducerWarps earlier in its stage, at most two rounds of the ring ago.
static_assert(WEIGHT_ONLY_STAGES >= kProducerWarps,
    "a producer warp would take a stage in use for an empty one");
// A warp's slot of a segment of w: codes, then scales. Group scales are four bytes per lane: two of
// a row pair's four lanes hold the rows' scales, two their zero points.
constexpr int kUnits = CODEC_BITS / 4, kCodes = 1024 * kUnits;
constexpr int kScalesPerRow = 32 / CODEC_BLOCK,
              kScaleBytes = CODEC_FLOAT_SCALES ? 8 : kSegment / CODEC_BLOCK,
              kSlot = kCodes + 16 * kScaleBytes;
static_assert(kScalesPerRow > 0 && kTokens * kPitch * 4 <= 4 * WEIGHT_ONLY_DEPTH * kSlot,
    "sums overwrite the codes");
constexpr bool kGrouped = CODEC_FLOAT_SCALES && WEIGHT_ONLY_GROUP;
constexpr int kGroup = kGrouped ? WEIGHT_ONLY_GROUP : 1;

#ifdef __CUDA_ARCH__
// Hides a value's origin from the compiler, so that what depends on it is recomputed and takes no
// register.
DEVICE int opaque(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
#endif

struct Problem {
    int rows, out_features, columns, slices;
    DEVICE int segments() const { return columns / kSegment; }
    DEVICE int chunks() const {
        return (segments() + WEIGHT_ONLY_SPLIT_K - 1) / WEIGHT_ONLY_SPLIT_K;
    }
    DEVICE int units() const { return (out_features + kRows - 1) / kRows * slices; }
};

// A block's unit of work: chunks of K of a group of rows.
struct Unit {
    int index, group, slice, begin, count;
    DEVICE bool next(const Problem& e) {
        if ((index += gridDim.x) >= e.units()) return false;
        find(e);
        begin = e.chunks() * slice / e.slices, count = e.chunks() * (slice + 1) / e.slices - begin;
        return true;
    }
    DEVICE void find(const Problem& e) {
        const int at = opaque(index);
        group = at / e.slices, slice = at % e.slices;
    }
};

typedef RingPosition<WEIGHT_ONLY_STAGES> Ring;

// ---- weights of a byte ----

#include "weight_only/decode_int8.cuh"

// ---- x ----

#include "weight_only/activations_wgmma.cuh"

// ---- sums ----

DEVICE void add(float4& to, const float4& v) { to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w; }

// ---- the product ----

// Arranges decoded groups of eight of two rows as operand A of two wgmmas.
DEVICE void to_wgmma_operand(u32 (&left)[2][4], const u32 (&pairs)[2][4]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
#pragma unroll
        for (int p = 0; p < 4; ++p) left[odd][p] = pairs[p % 2][2 * odd + p / 2];
}

// Issues both wgmmas of a segment's j-th groups of eight. Unless `adds`, the first overwrites the
// sums.
DEVICE void issue_wgmma(
    Sum (&sum)[kTokens / 2], const u32 (&left)[2][4], u32 tokens, int j, bool adds) {
    fence_accumulators(sum);
    warpgroup_arrive();
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
        wgmma(sum, left[odd],
            smem_descriptor<false>(tokens + j / 2 * kTile, 0) + (j % 2 * 2 + odd) * 2, odd || adds);
    warpgroup_commit();
}

constexpr int kSums = WEIGHT_ONLY_DEPTH * kSlot;  // floats between two warpgroups' sums

// A producer warp: loads every kProducerWarps-th chunk, and requests its next one after reordering
// one.
DEVICE void produce(u8* ring, u8* raw, const Raw* x, const Problem& e, Unit& unit, u32 full,
    u32 empty, int warp, int lane) {
    Ring at = {0, 0};
    int chunk = 0;
    const auto step = [&](int count) {
        for (; count; --count) {
            if (++chunk >= unit.begin + unit.count) {
                if (!unit.next(e)) return false;
                chunk = unit.begin;
            }
        }
        fetch(raw, x, e, chunk, lane);
        cp_async_commit();
        return true;
    };
    for (int i = 0; i < warp; ++i) at.advance();
    for (bool more = step(warp + 1); more; more = step(kProducerWarps)) {
        cp_async_wait<0>();
        __syncwarp();
        barrier_wait(empty + 8 * at.stage, at.parity ^ 1);
        permute_chunk(ring + at.stage * kStage, raw, e.rows, lane);
        fence_shared_async();
        barrier_arrive(full + 8 * at.stage);
        __syncwarp();
        for (int i = 0; i < kProducerWarps; ++i) at.advance();
    }
}

// Where a group of rows of w writes its results, and what multiplies them.
struct Results {
    void* out;
#if CODEC_FLOAT_SCALES
    const Stored* scales;
    i64 blocks;
#else
    float factor;
#endif
    int out_features, feature0;
    DEVICE int height() const { return min(kRows, out_features - feature0); }
    DEVICE i64 pitch() const { return (out_features + 3) / 4 * 4; }  // of a token of `partial`
    DEVICE float factor_of(int feature) const {
#if CODEC_FLOAT_SCALES
        constexpr float kLift = CODEC_BITS == 8 ? 64.0f : 1.0f;  // undoes decode_bytes's factor
        return kGrouped ? kLift : kLift * scale_value(scales[feature * blocks]);
#else
        return factor;
#endif
    }
    DEVICE void write(int token, int feature, const float4& total) const {
        const float four[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (feature + c < height())
                store_result(out, static_cast<i64>(token) * out_features + feature0 + feature + c,
                    four[c] * factor_of(feature0 + feature + c));
    }
};

constexpr int kQuads = kRows / 4;  // vectors of four features

// Adds the sums of the warpgroups that share rows; writes the results, or one slice's sums.
DEVICE void add_warpgroups(
    const float* sums, float* partial, const Results& results, int rows, int slices, int slice) {
    for (int u = threadIdx.x; u < rows * kQuads; u += kConsumerThreads) {
        const int token = u / kQuads, feature = u % kQuads * 4;
        if (feature >= results.height()) continue;
        float4 total = {0, 0, 0, 0};
        for (int p = WEIGHT_ONLY_X_PARTS - 1; p >= 0; --p) {  // the smallest first
            const float* const from = sums + feature / kTileRows * WEIGHT_ONLY_SPLIT_K * kSums +
                                      (p * rows + token) * kPitch + feature % kTileRows;
            float4 of_part = {0, 0, 0, 0};
#pragma unroll
            for (int s = 0; s < WEIGHT_ONLY_SPLIT_K; ++s)
                add(of_part, *reinterpret_cast<const float4*>(from + s * kSums));
            add(total, of_part);
        }
        if (slices == 1) results.write(token, feature, total);
        else
            __stcg(reinterpret_cast<float4*>(partial + (slice * rows + token) * results.pitch() +
                                             results.feature0 + feature),
                total);
    }
}

// Adds the sums of all slices and writes the results.
DEVICE void add_slices(const float* partial, const Results& results, int rows, int slices) {
    constexpr int kBatch = 4;  // vectors in flight
    for (int u = threadIdx.x; u < rows * kQuads; u += kBatch * kConsumerThreads) {
        float4 total[kBatch] = {};
        const float* from[kBatch];
#pragma unroll
        for (int n = 0; n < kBatch; ++n) {
            const int i = min(u + n * kConsumerThreads, rows * kQuads - 1),
                      feature = min(i % kQuads * 4, (results.height() - 1) / 4 * 4);
            from[n] = partial + i / kQuads * results.pitch() + results.feature0 + feature;
        }
#pragma unroll 2
        for (int s = 0; s < slices; ++s)
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
                add(total[n],
                    __ldcg(reinterpret_cast<const float4*>(from[n] + s * rows * results.pitch())));
#pragma unroll
        for (int n = 0; n < kBatch; ++n)
            if (u + n * kConsumerThreads < rows * kQuads)
                results.write((u + n * kConsumerThreads) / kQuads,
                    (u + n * kConsumerThreads) % kQuads * 4, total[n]);
    }
}

// Where a lane's codes and scales of its two rows begin.
struct LaneRows {
    const u8 *codes, *scales;
    u32 row_distance;  // from the codes of the first row to those of the second
    u32 item;          // bytes of a group's scale or zero point
    int last_segment;

    // Copies a segment to a slot. Beyond the last segment this copies it again: x is 0 there.
    DEVICE void prefetch(u8* to, int expected, int lane) const {
        [[maybe_unused]] const int quad_lane = lane % 4;
        const u32 segment = min(expected, last_segment);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int n = 0; n < kUnits; ++n)
                cp_async<16>(to + (h * kUnits + n) * 512 + lane * 16,
                    codes +
                        (h * static_cast<u64>(row_distance) + segment * (16 * CODEC_BITS) + n * 64),
                    true);
#if !CODEC_FLOAT_SCALES
        u8* const scale_slot = to + kCodes + (lane / 4 + 8 * quad_lane) * kScaleBytes;
        if (quad_lane < 2) cp_async<kScaleBytes>(scale_slot, scales + segment * kScaleBytes, true);
#elif WEIGHT_ONLY_GROUP
        const u64 from = reinterpret_cast<u64>(scales) + segment / kGroup * item;
        if (CODEC_ZERO_POINTS || quad_lane < 2)
            cp_async<4>(to + kCodes + lane * 4, reinterpret_cast<const u8*>(from & ~3ull), true);
#endif
        cp_async_commit();
    }
};

// A consumer's slots of codes, its part of the stages of x, and the stages' barriers.
struct Consumer {
    u8* slots;
    u32 tokens, full, empty;
    int lane;
};

#if CODEC_FLOAT_SCALES
// Decodes a segment's integers from a slot and multiplies them with the stage of x at `tokens`.
DEVICE void multiply_integers(Sum (&sum)[kTokens / 2], const u8* slot, const int (&zero)[2],
    u32 tokens, const Ring& at, u32 full, int lane) {
    constexpr int kRowsAtOnce = kGrouped ? 2 : 4;  // words, to save registers
    u32 a[2][2][4], words[2][kRowsAtOnce];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 pairs[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (j * kUnits % kRowsAtOnce == 0) {
                const u8* const from = slot + (h * kUnits + j * kUnits / 4) * 512 + lane * 16;
#if WEIGHT_ONLY_GROUP
                const uint2 got = *reinterpret_cast<const uint2*>(from + j * kUnits % 4 * 4);
#else
                const uint4 got = *reinterpret_cast<const uint4*>(from);
                words[h][2] = got.z, words[h][3] = got.w;
#endif
                words[h][0] = got.x, words[h][1] = got.y;
            }
#if CODEC_BITS == 8
            decode_bytes(words[h] + j * kUnits % kRowsAtOnce, zero[h], pairs[h]);
#else
            decode(words[h] + j * kUnits % kRowsAtOnce, 0, true, zero[h], pairs[h]);
#endif
        }
        to_wgmma_operand(a[j % 2], pairs);
        if (j == 0) barrier_wait(full + 8 * at.stage, at.parity);
        issue_wgmma(sum, a[j % 2], tokens, j, j > 0 || !kGrouped);
        if (j < 3) warpgroup_wait<1>(sum);
    }
}

// Multiplies a unit of work from `segment` on. kGrouped: adds to `scaled`, otherwise to `sum`.
DEVICE void multiply_unit(Sum (&sum)[kTokens / 2], Sum (&scaled)[kGrouped ? kTokens / 2 : 1],
    int (&zero)[2], const LaneRows& lane_rows, const Consumer& consumer, const Unit& unit, Ring& at,
    int segment) {
    int taken = 0;  // the slot
    const int stop = (unit.begin + unit.count) * WEIGHT_ONLY_SPLIT_K,
              end = min(stop, lane_rows.last_segment + 1);
#pragma unroll 1
    for (; segment < end; segment += WEIGHT_ONLY_SPLIT_K) {
        cp_async_wait<WEIGHT_ONLY_DEPTH - 1>();  // this lane's own copies
        u8* const slot = consumer.slots + taken * kSlot;
        const u32 scale_group = segment / kGroup, tokens = consumer.tokens + at.stage * kStage;
#if WEIGHT_ONLY_GROUP
        // What each of the row pair's four lanes copied.
        const u32 own = *reinterpret_cast<const u32*>(slot + kCodes + consumer.lane * 4) >>
                        (static_cast<u32>(reinterpret_cast<u64>(lane_rows.scales)) +
                            scale_group * lane_rows.item) %
                            4 * 8;
        const auto of_quarter = [&](int q) { return __shfl_sync(~0u, own, q, 4); };
        if (CODEC_ZERO_POINTS)
#pragma unroll
            for (int h = 0; h < 2; ++h) zero[h] = static_cast<signed char>(of_quarter(2 + h));
#endif
        multiply_integers(sum, slot, zero, tokens, at, consumer.full, consumer.lane);
        lane_rows.prefetch(slot, segment + WEIGHT_ONLY_DEPTH * WEIGHT_ONLY_SPLIT_K, consumer.lane);
        if (++taken == WEIGHT_ONLY_DEPTH) taken = 0;
        warpgroup_wait<0>(sum);
        release_stage(consumer.empty + 8 * at.stage, consumer.lane);
        at.advance();
#if WEIGHT_ONLY_GROUP
#if CODEC_FLOAT16_SCALES
        const float scale[2] = {scale_value(of_quarter(0)), scale_value(of_quarter(1))};
#else
        const float scale[2] = {__uint_as_float(of_quarter(0)), __uint_as_float(of_quarter(1))};
#endif
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            scaled[i] = __fmaf_rn(sum[i], scale[i / 2 % 2], scaled[i]);
#endif
    }
    if (segment < stop) {  // x is 0 there, but a scale may be infinite
        barrier_wait(consumer.full + 8 * at.stage, at.parity);
        release_stage(consumer.empty + 8 * at.stage, consumer.lane);
        at.advance();
    }
}
#else
// Decodes a segment of E2M1 with block scales and multiplies it with the stage of x at `tokens`.
// `then` runs after the first wgmmas are issued.
template <class Then>
DEVICE void multiply_floats(Sum (&sum)[kTokens / 2], const uint4 (&words)[2],
    const u32 (&scales)[2][kScalesPerRow], u32 tokens, const Ring& at, u32 full, bool folded,
    Then then) {
    u32 a[2][2][4], factor[2][kScalesPerRow];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int g = 0; g < kScalesPerRow; ++g) factor[h][g] = scale_bf16x2(scales[h][g], folded);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        u32 pairs[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 word[4] = {words[h].x, words[h].y, words[h].z, words[h].w};
            decode(word + j, factor[h][j * kScalesPerRow / 4], folded, 0, pairs[h]);
        }
        to_wgmma_operand(a[j % 2], pairs);
        if (j == 0) barrier_wait(full + 8 * at.stage, at.parity);
        issue_wgmma(sum, a[j % 2], tokens, j, true);
        if (j == 0) then();
        if (j < 3) warpgroup_wait<1>(sum);
    }
    warpgroup_wait<0>(sum);
}

// Multiplies a unit of work from `segment` on.
DEVICE void multiply_unit(Sum (&sum)[kTokens / 2], Sum (&)[kGrouped ? kTokens / 2 : 1], int (&)[2],
    const LaneRows& lane_rows, const Consumer& consumer, const Unit& unit, Ring& at, int segment) {
    int taken = 0;  // the slot
#pragma unroll 1
    for (int chunk = 0; chunk < unit.count; ++chunk, segment += WEIGHT_ONLY_SPLIT_K) {
        cp_async_wait<WEIGHT_ONLY_DEPTH - 1>();
        __syncwarp();
        u8* const slot = consumer.slots + taken * kSlot;
        uint4 words[2];
        u32 bytes[2][kScalesPerRow];
        u32 large = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            words[h] = *reinterpret_cast<const uint4*>(slot + h * 512 + consumer.lane * 16);
#pragma unroll
            for (int g = 0; g < kScalesPerRow; ++g) {
                bytes[h][g] = slot[1024 + (consumer.lane / 4 + 8 * h) * kScaleBytes +
                                   consumer.lane % 4 * kScalesPerRow + g];
                large |= bytes[h][g] > 136u;
            }
        }
        if (++taken == WEIGHT_ONLY_DEPTH) taken = 0;
        const u32 tokens = consumer.tokens + at.stage * kStage;
        const auto prefetch = [&] {
            __syncwarp();  // all lanes have read the slot
            lane_rows.prefetch(
                slot, segment + WEIGHT_ONLY_DEPTH * WEIGHT_ONLY_SPLIT_K, consumer.lane);
        };
        if (CODEC_UE4M3 || !__any_sync(~0u, large))
            multiply_floats(sum, words, bytes, tokens, at, consumer.full, true, prefetch);
        else multiply_floats(sum, words, bytes, tokens, at, consumer.full, false, prefetch);
        release_stage(consumer.empty + 8 * at.stage, consumer.lane);
        at.advance();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(640, 1) w4w8a16_sm90_wgmma(const Raw* x,
    const u8* codes, const Stored* scales, const signed char* zeros, const float* tensor_scale,
    float* __restrict__ partial, u32* __restrict__ done, void* __restrict__ out, int rows,
    int out_features, int columns, int slices, i64 code_pitch, i64 blocks) {
    extern __shared__ u8 raw_memory[];
    __shared__ u32 last;
    u8* const ring = raw_memory + (1024 - (shared_address(raw_memory) & 1023)) % 1024;
    u8* const raw = ring + WEIGHT_ONLY_STAGES * kStage;
    u8* const slots = raw + (kProducerWarps * kRaw + 127) / 128 * 128;
    float* const sums = reinterpret_cast<float*>(slots);
    const u32 full = shared_address(slots + 16 * WEIGHT_ONLY_DEPTH * kSlot),
              empty = full + 8 * WEIGHT_ONLY_STAGES;
    const Problem e = {rows, out_features, columns, slices};
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4,
              lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < WEIGHT_ONLY_STAGES; ++s)
            barrier_init(full + 8 * s, 32), barrier_init(empty + 8 * s, kConsumerThreads / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    launch_dependent_grids();
    wait_on_dependent_grids();  // the previous grid may have written what follows
    Unit unit = {static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), 0, 0, 0, 0};
    Ring at = {0, 0};

    if (warpgroup == 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        produce(ring, raw + warp * kRaw, x, e, unit, full, empty, warp, lane);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    const int part = warpgroup % WEIGHT_ONLY_SPLIT_K, quad_lane = lane % 4;
    const int last_segment = e.segments() - 1;
    const Consumer consumer = {slots + (warpgroup * 4 + warp) * WEIGHT_ONLY_DEPTH * kSlot,
        shared_address(ring) + part * 2 * kTile, full, empty, lane};
    while (unit.next(e)) {
        const int thread = opaque(threadIdx.x);
        const int row = thread / (128 * WEIGHT_ONLY_SPLIT_K) * kTileRows + thread / 32 % 4 * 16 +
                        thread % 32 / 4;
        const auto feature_of = [&](int row) {
            return static_cast<i64>(min(unit.group * kRows + row, out_features - 1));
        };
        const u8* code = codes + feature_of(row) * code_pitch + quad_lane * 16;
        keep(code);
        const u32 row_distance = static_cast<u32>(
            (feature_of(row + 8) - feature_of(row)) * code_pitch);  // to the codes of the other row
        // Lanes 0 and 1 of four copy the scales of the two rows, lanes 2 and 3 their zero points.
        const i64 scale_row = feature_of(row + 8 * (quad_lane & 1)) * blocks;
        int zero[2] = {0, 0};
#if CODEC_FLOAT_SCALES
        const u32 item = quad_lane < 2 ? sizeof(Stored) : 1;
        const u8* scale_source = reinterpret_cast<const u8*>(zeros + scale_row);
        if (quad_lane < 2) scale_source = reinterpret_cast<const u8*>(scales + scale_row);
#if CODEC_ZERO_POINTS && !WEIGHT_ONLY_GROUP
#pragma unroll
        for (int h = 0; h < 2; ++h) zero[h] = zeros[feature_of(row + 8 * h) * blocks];
#endif
#else
        const u8* scale_source = scales + scale_row;
#endif
        keep(scale_source);
        const int segment = unit.begin * WEIGHT_ONLY_SPLIT_K + part;
#if CODEC_FLOAT_SCALES
        const LaneRows lane_rows = {code, scale_source, row_distance, item, last_segment};
#else
        const LaneRows lane_rows = {code, scale_source, row_distance, 0, last_segment};
#endif
#pragma unroll 1
        for (int i = 0; i < WEIGHT_ONLY_DEPTH; ++i)
            lane_rows.prefetch(consumer.slots + i * kSlot, segment + i * WEIGHT_ONLY_SPLIT_K, lane);
        Sum sum[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
        Sum scaled[kGrouped ? kTokens / 2 : 1] = {};
        multiply_unit(sum, scaled, zero, lane_rows, consumer, unit, at, segment);
        cp_async_wait<0>();
        if (kGrouped) unit.find(e);  // saves registers

        named_barrier(2, kConsumerThreads);  // all copies have arrived
        const int who = opaque(threadIdx.x);
        float* const put =
            sums + who / 128 * kSums + who % 4 * 2 * kPitch + who % 128 / 32 * 16 + who % 32 / 4;
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            put[(i / 4 * 8 + i % 2) * kPitch + i / 2 % 2 * 8] = kGrouped ? scaled[i] : sum[i];
        named_barrier(2, kConsumerThreads);
#if CODEC_FLOAT_SCALES
        const Results results = {out, scales, blocks, out_features, unit.group * kRows};
#else
        const float factor =
            (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // scales are decoded times 2^-8
        const Results results = {out, factor, out_features, unit.group * kRows};
#endif
        add_warpgroups(sums, partial, results, rows, slices, unit.slice);
        named_barrier(2, kConsumerThreads);  // sums are read: copies may overwrite them
        if (slices == 1) continue;
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(done + unit.group, 1u) + 1 == static_cast<u32>(slices);
            if (last) done[unit.group] = 0;
            __threadfence();
        }
        named_barrier(2, kConsumerThreads);
        if (!last) continue;
        add_slices(partial, results, rows, slices);
    }
}
