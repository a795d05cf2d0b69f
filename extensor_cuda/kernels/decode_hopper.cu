// out = x w^T for up to 64 rows of x, for Hopper: packed E2M1 weights under E8M0 or E4M3 scales, read once and decoded
// to bfloat16 in the registers that wgmma takes them from (64 rows of w, 8 to 64 tokens); x lies in shared memory.
//
// A block is four warpgroups that multiply and one that brings x. SPLIT of the four share 64 rows of w, and take every
// SPLIT-th segment of 128 elements of K. A lane has 32 neighbouring elements of two rows of a segment, which it has
// copied to shared memory DEPTH segments ahead: no barrier guards them. Decoding leaves elements 4 apart in a register, so x is put in that order on its way
// through shared memory, and no element moves between lanes. float32 x is three bfloat16 matrices, which together are
// exactly x: its rows are three tokens (PARTS).
//
// Blocks take units in turn: a group of rows, and one of `slices` parts of K. Slices of a group meet in `partial`, where
// the last one that is done adds all. Everything is added in an order that depends
// on nothing but shapes. No headers; the wgmma function comes from decode_hopper.py. Macros: BLOCK (of a scale), SPLIT,
// TILES (of 8 tokens), PARTS, STAGES; those of decode.cuh.

#include "decode.cuh"

struct TensorMap {  // of copies that there are none of here
    u64 words[16];
};
constexpr int kCluster = 1;
typedef float Sum;
#define SUM "f"

//WGMMA//

#include "hopper.cuh"

// ---- tiles ----

#include "swizzle.cuh"

constexpr int kMath = 512, kBringing = 4, kTall = 64, kSegment = 128;  // threads, warps, rows, elements
constexpr int kTokens = 8 * TILES, kGroups = 4 / SPLIT, kRows = kGroups * kTall;
// In shared memory: x as it was read, as wgmma takes it (64 elements of K a tile), and sums.
constexpr int kOfRow = SPLIT * kSegment * sizeof(Raw), kRawPitch = kOfRow + 16, kRaw = kTokens / PARTS * kRawPitch;
constexpr int kTile = kTokens * 128, kStage = SPLIT * 2 * kTile, kPitch = kTall + 4;
// A barrier's parity tells phases apart that are one apart. Who waits for a piece's place has seen the piece kBringing
// before it in its place, and that is not more than two rounds of the ring ago.
static_assert(STAGES >= kBringing, "a warp that brings x would take a place that is in use for an empty one");
// A warp's part of a segment of w: codes, then each row's scales.
constexpr int kGrain = 32 / BLOCK, kOfLine = kSegment / BLOCK, kSlot = 1024 + 16 * kOfLine;
static_assert(kGrain > 0 && kTokens * kPitch * 4 <= 4 * DEPTH * kSlot, "sums lie where the codes did");

#ifdef __CUDA_ARCH__
__device__ __forceinline__ void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// In registers, and not added up from what it was made of each time.
__device__ __forceinline__ void keep(const u8*& pointer) { asm volatile("" : "+l"(pointer)); }
#endif

struct Problem {
    int rows, lines, columns, slices;
    __device__ __forceinline__ int segments() const { return columns / kSegment; }
    __device__ __forceinline__ int pieces() const { return (segments() + SPLIT - 1) / SPLIT; }
    __device__ __forceinline__ int units() const { return (lines + kRows - 1) / kRows * slices; }
};

// What a block does next: pieces of K of a group of rows.
struct Unit {
    int index, group, slice, begin, count;
    __device__ __forceinline__ bool next(const Problem& e) {
        if ((index += gridDim.x) >= e.units()) return false;
        group = index / e.slices, slice = index % e.slices;
        begin = e.pieces() * slice / e.slices, count = e.pieces() * (slice + 1) / e.slices - begin;
        return true;
    }
};

struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// ---- x ----

// A warp's piece of x as it lies, zeros behind K.
__device__ __forceinline__ void fetch(u8* to, const Raw* x, const Problem& e, int piece, int lane) {
    constexpr int kUnits = kOfRow / 16, kOfUnit = 16 / sizeof(Raw), kAtOnce = kUnits < 32 ? 32 / kUnits : 1;
    for (int at = lane % kUnits; at < kUnits; at += 32) {
        const int k = piece * SPLIT * kSegment + at * kOfUnit;
        const bool there = k < e.columns;
        const Raw* from = x + static_cast<i64>(lane / kUnits) * e.columns + (there ? k : 0);
        for (int row = lane / kUnits; row < e.rows; row += kAtOnce, from += static_cast<i64>(kAtOnce) * e.columns)
            copy_ahead<16>(to + row * kRawPitch + at * 16, from, there);
    }
}

// A piece as decoding leaves the weights: of four lanes, the first elements of eights that go together.
__device__ __forceinline__ void arrange(u8* to, const u8* from, int rows, int lane) {
    for (int u = lane; u < kTokens * 4 * SPLIT; u += 32) {
        const int token = u / (32 * SPLIT) * 8 + u % 8, j = u / 8 % 4, segment = u / 32 % SPLIT;
        if (token >= rows * PARTS) continue;
        const int part = PARTS == 1 ? 0 : token / rows;
        const u8* row = from + (token - part * rows) * kRawPitch + (segment * kSegment + j * 8) * sizeof(Raw);
        u32 pairs[4][4];
#pragma unroll
        for (int of = 0; of < 4; ++of) {
            const uint4* const eight = reinterpret_cast<const uint4*>(row + of * 32 * sizeof(Raw));
#if IN == 1
            const uint4 w = eight[0];
            pairs[0][of] = __byte_perm(w.x, w.z, 0x5410), pairs[1][of] = __byte_perm(w.x, w.z, 0x7632);
            pairs[2][of] = __byte_perm(w.y, w.w, 0x5410), pairs[3][of] = __byte_perm(w.y, w.w, 0x7632);
#else
            const uint4 a = eight[0], b = eight[1];
            const u32 low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int p = 0; p < 4; ++p)
                pairs[p][of] = part_of(__uint_as_float(low[p]), part) | part_of(__uint_as_float(high[p]), part) << 16;
#endif
        }
        u8* const tile = to + (segment * 2 + j / 2) * kTile;
#pragma unroll
        for (int p = 0; p < 4; ++p)
            *reinterpret_cast<uint4*>(tile + place(token, j % 2 * 4 + p)) =
                uint4{pairs[p][0], pairs[p][1], pairs[p][2], pairs[p][3]};
    }
}

__device__ __forceinline__ void add(float4& to, const float4& v) {
    to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// ---- the product ----

extern "C" __global__ void __launch_bounds__(640, 1)
decode_tokens(const Raw* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
              const float* __restrict__ tensor_scale, float* __restrict__ partial, u32* __restrict__ done,
              void* __restrict__ out, int rows, int lines, int columns, int slices) {
    extern __shared__ u8 raw_memory[];
    __shared__ u32 last;
    u8* const ring = raw_memory + (1024 - (shared_address(raw_memory) & 1023)) % 1024;
    u8* const raw = ring + STAGES * kStage;
    u8* const slots = raw + (kBringing * kRaw + 127) / 128 * 128;
    constexpr int kSums = DEPTH * kSlot;  // floats, from one warpgroup's sums to the next one's
    float* const sums = reinterpret_cast<float*>(slots);
    const u32 full = shared_address(slots + 16 * DEPTH * kSlot), empty = full + 8 * STAGES;
    const Problem e = {rows, lines, columns, slices};
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 32), barrier_init(empty + 8 * s, kMath / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    await_last();  // which may have written what is read from here on
    Unit unit = {static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), 0, 0, 0, 0};
    Ring at = {0, 0};

    if (warpgroup == 4) {  // each warp brings every fourth piece, and asks for its next when it has put one in order
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
    const int part = warpgroup % SPLIT, row = warpgroup / SPLIT * kTall + warp * 16 + lane / 4, quarter = lane % 4;
    const int last_segment = e.segments() - 1;
    u8* const mine = slots + (warpgroup * 4 + warp) * DEPTH * kSlot;
    while (unit.next(e)) {
        const auto line_of = [&](int row) { return static_cast<i64>(min(unit.group * kRows + row, lines - 1)); };
        const u8* code[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            code[h] = codes + line_of(row + 8 * h) * (columns / 2) + quarter * 16;
            keep(code[h]);
        }
        // Of quarters 0 and 1, the scales of the two rows.
        const u8* scale = scales + line_of(row + 8 * (quarter & 1)) * (columns / BLOCK);
        keep(scale);
        int wanted = unit.begin * SPLIT + part, put = 0, taken = 0;
        // Behind the last segment that one again: x is 0 there.
        const auto ask = [&] {
            const u32 segment = min(wanted, last_segment);
            u8* const to = mine + put * kSlot;
#pragma unroll
            for (int h = 0; h < 2; ++h) copy_ahead<16>(to + h * 512 + lane * 16, code[h] + segment * (kSegment / 2), true);
            if (quarter < 2) copy_ahead<kOfLine>(to + 1024 + (lane / 4 + 8 * quarter) * kOfLine, scale + segment * kOfLine, true);
            end_copies();
            wanted += SPLIT;
            if (++put == DEPTH) put = 0;
        };
#pragma unroll 1
        for (int i = 0; i < DEPTH; ++i) ask();
        Sum sum[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
#pragma unroll 1
        for (int piece = 0; piece < unit.count; ++piece) {
            arrived<DEPTH - 1>();
            __syncwarp();
            const u8* const slot = mine + taken * kSlot;
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
            if (++taken == DEPTH) taken = 0;
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
                    u32 (&left)[2][4] = a[j % 2];
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd)
#pragma unroll
                        for (int p = 0; p < 4; ++p) left[odd][p] = pairs[p % 2][2 * odd + p / 2];
                    if (j == 0) wait(full + 8 * at.stage, at.parity);
                    hold(sum);
                    begin_products();
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd)
                        wgmma(sum, left[odd], descriptor<false>(tokens + j / 2 * kTile, 0) + (j % 2 * 2 + odd) * 2, 1);
                    end_products();
                    if (j == 0) {
                        __syncwarp();  // all lanes have read the slot
                        ask();
                    }
                    if (j < 3) finish<1>(sum);
                }
                finish<0>(sum);
            };
            if (UE4M3 || !__any_sync(~0u, large))
                multiply(true);
            else
                multiply(false);
            release(empty + 8 * at.stage, lane);
            at.advance();
        }
        arrived<0>();

        named_barrier(2, kMath);  // nobody waits for codes
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            sums[warpgroup * kSums + (i / 4 * 8 + quarter * 2 + i % 2) * kPitch + warp * 16 + lane / 4 + i / 2 % 2 * 8] = sum[i];
        named_barrier(2, kMath);
        const float factor = (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // the scales were times 2^-8
        const int line0 = unit.group * kRows, below = min(kRows, lines - line0);
        const i64 pitch = (lines + 3) / 4 * 4;
        const auto write = [&](int token, int line, const float4& total) {
            const float four[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (line + c < below) finish(out, static_cast<i64>(token) * lines + line0 + line + c, four[c] * factor);
        };
        constexpr int kFours = kRows / 4, kBatch = 4;
        for (int u = threadIdx.x; u < rows * kFours; u += kMath) {
            const int token = u / kFours, line = u % kFours * 4;
            if (line >= below) continue;
            float4 total = {0, 0, 0, 0};
            for (int p = PARTS - 1; p >= 0; --p) {  // the smallest first
                const float* const from = sums + line / kTall * SPLIT * kSums + (p * rows + token) * kPitch + line % kTall;
                float4 of_x = {0, 0, 0, 0};
#pragma unroll
                for (int s = 0; s < SPLIT; ++s) add(of_x, *reinterpret_cast<const float4*>(from + s * kSums));
                add(total, of_x);
            }
            if (slices == 1)
                write(token, line, total);
            else
                __stcg(reinterpret_cast<float4*>(partial + (unit.slice * rows + token) * pitch + line0 + line), total);
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
                const int i = min(u + n * kMath, rows * kFours - 1), line = min(i % kFours * 4, (below - 1) / 4 * 4);
                from[n] = partial + i / kFours * pitch + line0 + line;
            }
#pragma unroll 2
            for (int s = 0; s < slices; ++s)
#pragma unroll
                for (int n = 0; n < kBatch; ++n)
                    add(total[n], __ldcg(reinterpret_cast<const float4*>(from[n] + s * rows * pitch)));
#pragma unroll
            for (int n = 0; n < kBatch; ++n)
                if (u + n * kMath < rows * kFours) write((u + n * kMath) / kFours, (u + n * kMath) % kFours * 4, total[n]);
        }
    }
}
