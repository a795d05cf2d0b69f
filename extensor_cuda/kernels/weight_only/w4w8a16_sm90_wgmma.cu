// out = x w^T for up to 64 rows of x, for Hopper: packed weights of 4 or 8 bits, read once and
// decoded to bfloat16 in the registers that wgmma takes them from (64 rows of w, 8 to 64 tokens); x
// lies in shared memory.
//
// A block is four warpgroups that multiply and one that brings x. WEIGHT_ONLY_SPLIT_K of the four
// share 64 rows of w, and take every WEIGHT_ONLY_SPLIT_K-th segment of 128 elements of K. A lane
// has 32 elements of two rows of a segment, 16 bytes that lie together (of 8 bits: twice 16), which
// it has copied to shared memory WEIGHT_ONLY_DEPTH segments ahead: no barrier guards them. Decoding
// leaves elements 4 apart in a register (of 8 bits: neighbours), so x is put in that order on its
// way through shared memory, and no element moves between lanes. float32 x is three bfloat16
// matrices, which together are exactly x: its rows are three tokens (WEIGHT_ONLY_X_PARTS).
//
// CODEC_FLOAT_SCALES 0: E2M1 under E8M0 or E4M3 scales of CODEC_BLOCK elements; element times scale
// is a bfloat16, exactly. CODEC_FLOAT_SCALES 1: integers under float scales of WEIGHT_ONLY_GROUP
// segments (0: all of K), and zero points if CODEC_ZERO_POINTS; code less zero point is a bfloat16,
// exactly. Sums are multiplied by groups' scales in float32 segment by segment, by a row's at the
// end.
//
// Blocks take units in turn: a group of rows, and one of `slices` parts of K. Slices of a group
// meet in `partial`, where the last one that is done adds all. Everything is added in an order that
// depends on nothing but shapes. No headers; the wgmma function comes from its Python.
// Macros: CODEC_BLOCK (of a scale), WEIGHT_ONLY_GROUP, CODEC_ZERO_POINTS, WEIGHT_ONLY_SPLIT_K,
// WEIGHT_ONLY_TILES (of 8 tokens), WEIGHT_ONLY_X_PARTS, WEIGHT_ONLY_STAGES, WEIGHT_ONLY_DEPTH;
// those of weights.cuh.

#include "weight_only/weights.cuh"

struct TensorMap {  // of copies that there are none of here
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

constexpr int kMath = 512, kBringing = 4, kTall = 64,
              kSegment = 128;  // threads, warps, rows, elements
constexpr int kTokens = 8 * WEIGHT_ONLY_TILES, kGroups = 4 / WEIGHT_ONLY_SPLIT_K,
              kRows = kGroups * kTall;
// In shared memory: x as it was read, as wgmma takes it (64 elements of K a tile), and sums.
constexpr int kOfRow = WEIGHT_ONLY_SPLIT_K * kSegment * sizeof(Raw), kRawPitch = kOfRow + 16,
              kRaw = kTokens / WEIGHT_ONLY_X_PARTS * kRawPitch;
constexpr int kTile = kTokens * 128, kStage = WEIGHT_ONLY_SPLIT_K * 2 * kTile, kPitch = kTall + 4;
// A barrier's parity tells phases apart that are one apart. Who waits for a piece's place has seen
// the piece kBringing before it in its place, and that is not more than two rounds of the ring ago.
static_assert(WEIGHT_ONLY_STAGES >= kBringing,
              "a warp that brings x would take a place that is in use for an empty one");
// A warp's part of a segment of w: codes, then each row's scales; those of groups are four bytes of
// each lane: of four lanes that have two rows, two hold the rows' scales among them, two their zero
// points.
constexpr int kUnits = CODEC_BITS / 4, kCodes = 1024 * kUnits;
constexpr int kGrain = 32 / CODEC_BLOCK, kOfLine = CODEC_FLOAT_SCALES ? 8 : kSegment / CODEC_BLOCK,
              kSlot = kCodes + 16 * kOfLine;
static_assert(kGrain > 0 && kTokens * kPitch * 4 <= 4 * WEIGHT_ONLY_DEPTH * kSlot,
              "sums lie where the codes did");
constexpr bool kGrouped = CODEC_FLOAT_SCALES && WEIGHT_ONLY_GROUP;
constexpr int kGroup = kGrouped ? WEIGHT_ONLY_GROUP : 1;

#ifdef __CUDA_ARCH__
__device__ __forceinline__ void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// In registers, and not added up from what it was made of each time.
__device__ __forceinline__ void keep(const u8*& pointer) { asm volatile("" : "+l"(pointer)); }
// Some other number, for all that the compiler knows: what is made of it is made anew, and kept in
// no register.
__device__ __forceinline__ int unknown(int number) {
    asm volatile("" : "+r"(number));
    return number;
}
#endif

struct Problem {
    int rows, lines, columns, slices;
    __device__ __forceinline__ int segments() const { return columns / kSegment; }
    __device__ __forceinline__ int pieces() const {
        return (segments() + WEIGHT_ONLY_SPLIT_K - 1) / WEIGHT_ONLY_SPLIT_K;
    }
    __device__ __forceinline__ int units() const { return (lines + kRows - 1) / kRows * slices; }
};

// What a block does next: pieces of K of a group of rows.
struct Unit {
    int index, group, slice, begin, count;
    __device__ __forceinline__ bool next(const Problem& e) {
        if ((index += gridDim.x) >= e.units()) return false;
        find(e);
        begin = e.pieces() * slice / e.slices, count = e.pieces() * (slice + 1) / e.slices - begin;
        return true;
    }
    __device__ __forceinline__ void find(const Problem& e) {
        const int at = unknown(index);
        group = at / e.slices, slice = at % e.slices;
    }
};

struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == WEIGHT_ONLY_STAGES) stage = 0, parity ^= 1;
    }
};

// ---- weights of a byte ----

#include "weight_only/decode_int8.cuh"

// ---- x ----

#include "weight_only/activations_wgmma.cuh"

// ---- sums ----

__device__ __forceinline__ void add(float4& to, const float4& v) {
    to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// ---- the product ----

// Decoded eights of two rows as the left sides of two products.
__device__ __forceinline__ void pick_left(u32 (&left)[2][4], const u32 (&pairs)[2][4]) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
#pragma unroll
        for (int p = 0; p < 4; ++p) left[odd][p] = pairs[p % 2][2 * odd + p / 2];
}

// Begins both products with a segment's j-th eights of x; sums that they do not add to are
// overwritten.
__device__ __forceinline__ void begin_eights(Sum (&sum)[kTokens / 2], const u32 (&left)[2][4],
                                             u32 tokens, int j, bool adds) {
    hold(sum);
    begin_products();
#pragma unroll
    for (int odd = 0; odd < 2; ++odd)
        wgmma(sum, left[odd], descriptor<false>(tokens + j / 2 * kTile, 0) + (j % 2 * 2 + odd) * 2,
              odd || adds);
    end_products();
}

extern "C" __global__ void __launch_bounds__(640, 1)
    decode_tokens(const Raw* __restrict__ x, const u8* __restrict__ codes,
                  const Stored* __restrict__ scales, const signed char* __restrict__ zeros,
                  const float* __restrict__ tensor_scale, float* __restrict__ partial,
                  u32* __restrict__ done, void* __restrict__ out, int rows, int lines, int columns,
                  int slices, i64 octets, i64 blocks) {
    extern __shared__ u8 raw_memory[];
    __shared__ u32 last;
    u8* const ring = raw_memory + (1024 - (shared_address(raw_memory) & 1023)) % 1024;
    u8* const raw = ring + WEIGHT_ONLY_STAGES * kStage;
    u8* const slots = raw + (kBringing * kRaw + 127) / 128 * 128;
    constexpr int kSums =
        WEIGHT_ONLY_DEPTH * kSlot;  // floats, from one warpgroup's sums to the next one's
    float* const sums = reinterpret_cast<float*>(slots);
    const u32 full = shared_address(slots + 16 * WEIGHT_ONLY_DEPTH * kSlot),
              empty = full + 8 * WEIGHT_ONLY_STAGES;
    const Problem e = {rows, lines, columns, slices};
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4,
              lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < WEIGHT_ONLY_STAGES; ++s)
            barrier_init(full + 8 * s, 32), barrier_init(empty + 8 * s, kMath / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    await_last();  // which may have written what is read from here on
    Unit unit = {static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), 0, 0, 0, 0};
    Ring at = {0, 0};

    if (warpgroup == 4) {  // each warp brings every fourth piece, and asks for its next when it has
                           // put one in order
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        u8* const mine = raw + warp * kRaw;
        int piece = 0;
        const auto step = [&](int count) {
            for (; count; --count) {
                if (++piece >= unit.begin + unit.count) {
                    if (!unit.next(e)) return false;
                    piece = unit.begin;
                }
            }
            fetch(mine, x, e, piece, lane);
            end_copies();
            return true;
        };
        for (int i = 0; i < warp; ++i) at.advance();
        for (bool more = step(warp + 1); more; more = step(kBringing)) {
            arrived<0>();
            __syncwarp();
            wait(empty + 8 * at.stage, at.parity ^ 1);
            arrange(ring + at.stage * kStage, mine, rows, lane);
            show_stores();
            arrive(full + 8 * at.stage);
            __syncwarp();
            for (int i = 0; i < kBringing; ++i) at.advance();
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    const int part = warpgroup % WEIGHT_ONLY_SPLIT_K, quarter = lane % 4;
    const int last_segment = e.segments() - 1;
    u8* const mine = slots + (warpgroup * 4 + warp) * WEIGHT_ONLY_DEPTH * kSlot;
    while (unit.next(e)) {
        const int thread = unknown(threadIdx.x);
        const int row =
            thread / (128 * WEIGHT_ONLY_SPLIT_K) * kTall + thread / 32 % 4 * 16 + thread % 32 / 4;
        const auto line_of = [&](int row) {
            return static_cast<i64>(min(unit.group * kRows + row, lines - 1));
        };
        const u8* code = codes + line_of(row) * octets + quarter * 16;
        keep(code);
        const u32 below =
            static_cast<u32>((line_of(row + 8) - line_of(row)) * octets);  // the other row's codes
        // Of quarters 0 and 1, the scales of the two rows; of 2 and 3, their zero points.
        const i64 line = line_of(row + 8 * (quarter & 1)) * blocks;
#if CODEC_FLOAT_SCALES
        const u32 item = quarter < 2 ? sizeof(Stored) : 1;
        const u8* aside = reinterpret_cast<const u8*>(zeros + line);
        if (quarter < 2) aside = reinterpret_cast<const u8*>(scales + line);
        int zero[2] = {0, 0};
#if CODEC_ZERO_POINTS && !WEIGHT_ONLY_GROUP
#pragma unroll
        for (int h = 0; h < 2; ++h) zero[h] = zeros[line_of(row + 8 * h) * blocks];
#endif
#else
        const u8* aside = scales + line;
#endif
        keep(aside);
        int segment = unit.begin * WEIGHT_ONLY_SPLIT_K + part, taken = 0;
        // Behind the last segment that one again: x is 0 there.
        const auto ask = [&](u8* to, int expected) {
            const u32 segment = min(expected, last_segment);
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < kUnits; ++n)
                    copy_ahead<16>(
                        to + (h * kUnits + n) * 512 + lane * 16,
                        code + (h * static_cast<u64>(below) + segment * (16 * CODEC_BITS) + n * 64),
                        true);
#if !CODEC_FLOAT_SCALES
            u8* const beside = to + kCodes + (lane / 4 + 8 * quarter) * kOfLine;
            if (quarter < 2) copy_ahead<kOfLine>(beside, aside + segment * kOfLine, true);
#elif WEIGHT_ONLY_GROUP
            const u64 from = reinterpret_cast<u64>(aside) + segment / kGroup * item;
            if (CODEC_ZERO_POINTS || quarter < 2)
                copy_ahead<4>(to + kCodes + lane * 4, reinterpret_cast<const u8*>(from & ~3ull),
                              true);
#endif
            end_copies();
        };
#pragma unroll 1
        for (int i = 0; i < WEIGHT_ONLY_DEPTH; ++i)
            ask(mine + i * kSlot, segment + i * WEIGHT_ONLY_SPLIT_K);
        Sum sum[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
        Sum scaled[kGrouped ? kTokens / 2 : 1] = {};
#if CODEC_FLOAT_SCALES
        const int stop = (unit.begin + unit.count) * WEIGHT_ONLY_SPLIT_K,
                  end = min(stop, last_segment + 1);
#pragma unroll 1
        for (; segment < end; segment += WEIGHT_ONLY_SPLIT_K) {
            arrived<WEIGHT_ONLY_DEPTH - 1>();  // of this lane's copies, which nobody else reads
            u8* const slot = mine + taken * kSlot;
            const u32 of_group = segment / kGroup,
                      tokens = shared_address(ring) + at.stage * kStage + part * 2 * kTile;
#if WEIGHT_ONLY_GROUP
            // What the lane copied for the four that have its rows.
            const u32 own =
                *reinterpret_cast<const u32*>(slot + kCodes + lane * 4) >>
                (static_cast<u32>(reinterpret_cast<u64>(aside)) + of_group * item) % 4 * 8;
            const auto of_quarter = [&](int q) { return __shfl_sync(~0u, own, q, 4); };
            if (CODEC_ZERO_POINTS)
#pragma unroll
                for (int h = 0; h < 2; ++h) zero[h] = static_cast<signed char>(of_quarter(2 + h));
#endif
            constexpr int kAtOnce = kGrouped ? 2 : 4;  // words, for want of registers
            u32 a[2][2][4], words[2][kAtOnce];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 pairs[2][4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (j * kUnits % kAtOnce == 0) {
                        const u8* const from =
                            slot + (h * kUnits + j * kUnits / 4) * 512 + lane * 16;
#if WEIGHT_ONLY_GROUP
                        const uint2 got =
                            *reinterpret_cast<const uint2*>(from + j * kUnits % 4 * 4);
#else
                        const uint4 got = *reinterpret_cast<const uint4*>(from);
                        words[h][2] = got.z, words[h][3] = got.w;
#endif
                        words[h][0] = got.x, words[h][1] = got.y;
                    }
#if CODEC_BITS == 8
                    decode_bytes(words[h] + j * kUnits % kAtOnce, zero[h], pairs[h]);
#else
                    decode(words[h] + j * kUnits % kAtOnce, 0, true, zero[h], pairs[h]);
#endif
                }
                pick_left(a[j % 2], pairs);
                if (j == 0) wait(full + 8 * at.stage, at.parity);
                begin_eights(sum, a[j % 2], tokens, j, j > 0 || !kGrouped);
                if (j < 3) finish<1>(sum);
            }
            ask(slot, segment + WEIGHT_ONLY_DEPTH * WEIGHT_ONLY_SPLIT_K);
            if (++taken == WEIGHT_ONLY_DEPTH) taken = 0;
            finish<0>(sum);
            release(empty + 8 * at.stage, lane);
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
            wait(full + 8 * at.stage, at.parity);
            release(empty + 8 * at.stage, lane);
            at.advance();
        }
#else
#pragma unroll 1
        for (int piece = 0; piece < unit.count; ++piece, segment += WEIGHT_ONLY_SPLIT_K) {
            arrived<WEIGHT_ONLY_DEPTH - 1>();
            __syncwarp();
            u8* const slot = mine + taken * kSlot;
            uint4 words[2];
            u32 bytes[2][kGrain];
            u32 large = 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                words[h] = *reinterpret_cast<const uint4*>(slot + h * 512 + lane * 16);
#pragma unroll
                for (int g = 0; g < kGrain; ++g) {
                    bytes[h][g] = slot[1024 + (lane / 4 + 8 * h) * kOfLine + quarter * kGrain + g];
                    large |= bytes[h][g] > 136u;
                }
            }
            if (++taken == WEIGHT_ONLY_DEPTH) taken = 0;
            const u32 tokens = shared_address(ring) + at.stage * kStage + part * 2 * kTile;
            const auto multiply = [&](bool folded) {
                u32 a[2][2][4], factor[2][kGrain];
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int g = 0; g < kGrain; ++g) factor[h][g] = scale_pair(bytes[h][g], folded);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 pairs[2][4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 word[4] = {words[h].x, words[h].y, words[h].z, words[h].w};
                        decode(word + j, factor[h][j * kGrain / 4], folded, 0, pairs[h]);
                    }
                    pick_left(a[j % 2], pairs);
                    if (j == 0) wait(full + 8 * at.stage, at.parity);
                    begin_eights(sum, a[j % 2], tokens, j, true);
                    if (j == 0) {
                        __syncwarp();  // all lanes have read the slot
                        ask(slot, segment + WEIGHT_ONLY_DEPTH * WEIGHT_ONLY_SPLIT_K);
                    }
                    if (j < 3) finish<1>(sum);
                }
                finish<0>(sum);
            };
            if (CODEC_UE4M3 || !__any_sync(~0u, large))
                multiply(true);
            else
                multiply(false);
            release(empty + 8 * at.stage, lane);
            at.advance();
        }
#endif
        arrived<0>();
        if (kGrouped) unit.find(e);  // for want of registers

        named_barrier(2, kMath);  // nobody waits for codes
        const int who = unknown(threadIdx.x);
        float* const put =
            sums + who / 128 * kSums + who % 4 * 2 * kPitch + who % 128 / 32 * 16 + who % 32 / 4;
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            put[(i / 4 * 8 + i % 2) * kPitch + i / 2 % 2 * 8] = kGrouped ? scaled[i] : sum[i];
        named_barrier(2, kMath);
#if CODEC_FLOAT_SCALES
        constexpr float kLift = CODEC_BITS == 8 ? 64.0f : 1.0f;  // decode_bytes
        const auto factor_of = [&](int line) {
            return kGrouped ? kLift : kLift * scale_value(scales[line * blocks]);
        };
#else
        const float factor =
            (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // the scales were times 2^-8
        const auto factor_of = [&](int) { return factor; };
#endif
        const int line0 = unit.group * kRows, height = min(kRows, lines - line0);
        const i64 pitch = (lines + 3) / 4 * 4;
        const auto write = [&](int token, int line, const float4& total) {
            const float four[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (line + c < height)
                    finish(out, static_cast<i64>(token) * lines + line0 + line + c,
                           four[c] * factor_of(line0 + line + c));
        };
        constexpr int kFours = kRows / 4, kBatch = 4;
        for (int u = threadIdx.x; u < rows * kFours; u += kMath) {
            const int token = u / kFours, line = u % kFours * 4;
            if (line >= height) continue;
            float4 total = {0, 0, 0, 0};
            for (int p = WEIGHT_ONLY_X_PARTS - 1; p >= 0; --p) {  // the smallest first
                const float* const from = sums + line / kTall * WEIGHT_ONLY_SPLIT_K * kSums +
                                          (p * rows + token) * kPitch + line % kTall;
                float4 of_x = {0, 0, 0, 0};
#pragma unroll
                for (int s = 0; s < WEIGHT_ONLY_SPLIT_K; ++s)
                    add(of_x, *reinterpret_cast<const float4*>(from + s * kSums));
                add(total, of_x);
            }
            if (slices == 1)
                write(token, line, total);
            else
                __stcg(reinterpret_cast<float4*>(partial + (unit.slice * rows + token) * pitch +
                                                 line0 + line),
                       total);
        }
        named_barrier(2, kMath);  // sums are read: codes may come
        if (slices == 1) continue;
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(done + unit.group, 1u) + 1 == static_cast<u32>(slices);
            if (last) done[unit.group] = 0;
            __threadfence();
        }
        named_barrier(2, kMath);
        if (!last) continue;
        for (int u = threadIdx.x; u < rows * kFours; u += kBatch * kMath) {
            float4 total[kBatch] = {};
            const float* from[kBatch];
#pragma unroll
            for (int n = 0; n < kBatch; ++n) {
                const int i = min(u + n * kMath, rows * kFours - 1),
                          line = min(i % kFours * 4, (height - 1) / 4 * 4);
                from[n] = partial + i / kFours * pitch + line0 + line;
            }
#pragma unroll 2
            for (int s = 0; s < slices; ++s)
#pragma unroll
                for (int n = 0; n < kBatch; ++n)
                    add(total[n],
                        __ldcg(reinterpret_cast<const float4*>(from[n] + s * rows * pitch)));
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
                if (u + n * kMath < rows * kFours)
                    write((u + n * kMath) / kFours, (u + n * kMath) % kFours * 4, total[n]);
        }
    }
}
