// out = x w^T for up to 64 rows of x, for Hopper: packed E2M1 weights under E8M0 or E4M3 scales, read once and decoded
// to bfloat16 in the registers that wgmma takes them from (64 rows of w, 8 to 64 tokens); x lies in shared memory.
//
// A block is four warpgroups that multiply and one that brings x. SPLIT of the four share 64 rows of w, and take every
// SPLIT-th segment of 128 elements of K. A lane has 32 neighbouring elements of two rows of a segment, which it asked
// for two segments before. Decoding leaves elements 4 apart in a register, so x is put in that order on its way
// through shared memory, and no element moves between lanes. float32 x is three bfloat16 matrices, which together are
// exactly x: its rows are three tokens (PARTS).
//
// Row groups, one after the other, are cut into `shares` equal ones of pieces of K, which blocks take in turn. Shares of
// one group meet in `partial`, where the last one that is done adds all. Everything is added in an order that depends
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

constexpr int kMath = 512, kBringing = 4, kTall = 64, kSegment = 128, kDeep = 2;  // threads, warps, rows, elements
constexpr int kTokens = 8 * TILES, kGroups = 4 / SPLIT, kRows = kGroups * kTall;
// In shared memory: x as it was read, as wgmma takes it (64 elements of K a tile), and sums.
constexpr int kOfRow = SPLIT * kSegment * sizeof(Raw), kRawPitch = kOfRow + 16, kRaw = kTokens / PARTS * kRawPitch;
constexpr int kTile = kTokens * 128, kStage = SPLIT * 2 * kTile, kPitch = kTall + 4, kSums = kTokens * kPitch;
constexpr int kGrain = BLOCK == 16 ? 2 : 1;  // scales of a lane's 32 elements of a row
#if BLOCK == 16
typedef u16 Grain;
#else
typedef u8 Grain;
#endif

#ifdef __CUDA_ARCH__
// What is read once: 64 bytes of each of 8 rows a warp, so memory is asked for the next ones too.
__device__ __forceinline__ uint4 streamed(const u8* from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from));
    return v;
}
__device__ __forceinline__ void named_barrier(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
// In registers, and not added up from what it was made of each time.
__device__ __forceinline__ void keep(const u8*& pointer) { asm volatile("" : "+l"(pointer)); }
#endif

struct Problem {
    int rows, lines, columns, shares;
    __device__ __forceinline__ int segments() const { return columns / kSegment; }
    __device__ __forceinline__ int pieces() const { return (segments() + SPLIT - 1) / SPLIT; }
    __device__ __forceinline__ i64 total() const { return static_cast<i64>((lines + kRows - 1) / kRows) * pieces(); }
    // The share that a piece of all belongs to, and where a share begins.
    __device__ __forceinline__ int share_of(i64 at) const { return static_cast<int>(((at + 1) * shares - 1) / total()); }
    __device__ __forceinline__ i64 start(int share) const { return total() * share / shares; }
};

// What a block does next: pieces of a group of rows.
struct Unit {
    int share, group, begin, count;
    i64 at, stop;  // behind this unit, and behind the share
    __device__ __forceinline__ bool next(const Problem& e) {
        while (at == stop) {
            if ((share += gridDim.x) >= e.shares) return false;
            at = e.start(share), stop = e.start(share + 1);
        }
        group = static_cast<int>(at / e.pieces()), begin = static_cast<int>(at - static_cast<i64>(group) * e.pieces());
        count = static_cast<int>(min(static_cast<i64>(e.pieces() - begin), stop - at));
        at += count;
        return true;
    }
};
__device__ __forceinline__ Unit units() { return {static_cast<int>(blockIdx.x - gridDim.x), 0, 0, 0, 0, 0}; }

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

// ---- the product ----

extern "C" __global__ void __launch_bounds__(640, 1)
decode_tokens(const Raw* __restrict__ x, const u8* __restrict__ codes, const u8* __restrict__ scales,
              const float* __restrict__ tensor_scale, float* __restrict__ partial, u32* __restrict__ done,
              void* __restrict__ out, int rows, int lines, int columns, int shares) {
    extern __shared__ u8 raw_memory[];
    __shared__ u32 last;
    u8* const ring = raw_memory + (1024 - (shared_address(raw_memory) & 1023)) % 1024;
    u8* const raw = ring + STAGES * kStage;
    float* const sums = reinterpret_cast<float*>(raw + (kBringing * kRaw + 127) / 128 * 128);
    const u32 full = shared_address(sums + 4 * kSums), empty = full + 8 * STAGES;
    const Problem e = {rows, lines, columns, shares};
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, 32), barrier_init(empty + 8 * s, kMath / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    await_last();  // which may have written what is read from here on
    Unit unit = units();
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
    while (unit.next(e)) {
        const u8* code[2];
        const u8* scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 line = min(unit.group * kRows + row + 8 * h, lines - 1);
            code[h] = codes + line * (columns / 2) + quarter * 16;
            scale[h] = scales + line * (columns / BLOCK) + quarter * 32 / BLOCK;
            keep(code[h]);
            keep(scale[h]);
        }
        uint4 held[kDeep][2];
        u32 grains[kDeep][2];
        int wanted = unit.begin * SPLIT + part;
        // Behind the last segment that one again: x is 0 there.
        const auto ask = [&](uint4 (&words)[2], u32 (&grain)[2]) {
            const u32 segment = min(wanted, last_segment);
            wanted += SPLIT;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                words[h] = streamed(code[h] + segment * (kSegment / 2));
                grain[h] = __ldg(reinterpret_cast<const Grain*>(scale[h] + segment * (kSegment / BLOCK)));
            }
        };
#pragma unroll
        for (int i = 0; i < kDeep; ++i) ask(held[i], grains[i]);
        Sum sum[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
        u32 a[2][2][4], leaving = 0;  // the barrier of the stage before, for lane 0
        for (int first = 0; first < unit.count; first += kDeep)
#pragma unroll
            for (int i = 0; i < kDeep; ++i) {
                if (first + i >= unit.count) break;
                const u32 tokens = shared_address(ring) + at.stage * kStage + part * 2 * kTile;
                const auto multiply = [&](bool folded) {
                    u32 factor[2][kGrain];
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int g = 0; g < kGrain; ++g)
                            factor[h][g] = scale_pair(kGrain == 1 ? grains[i][h] : grains[i][h] >> 8 * g & 0xFFu, folded);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        u32 pairs[2][4];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const u32 word[4] = {held[i][h].x, held[i][h].y, held[i][h].z, held[i][h].w};
                            decode(word + j, factor[h][j * kGrain / 4], folded, 0, pairs[h]);
                        }
                        if (j == 3) ask(held[i], grains[i]);
                        u32 (&mine)[2][4] = a[j % 2];
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd)
#pragma unroll
                            for (int p = 0; p < 4; ++p) mine[odd][p] = pairs[p % 2][2 * odd + p / 2];
                        if (j == 0) wait(full + 8 * at.stage, at.parity);
                        hold(sum);
                        begin_products();
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd)
                            wgmma(sum, mine[odd], descriptor<false>(tokens + j / 2 * kTile, 0) + (j % 2 * 2 + odd) * 2, 1);
                        end_products();
                        finish<1>(sum);  // and so all of the stage before
                        if (j == 0) {
                            if (leaving) arrive(leaving);
                            leaving = lane ? 0 : empty + 8 * at.stage;
                        }
                    }
                };
                bool folded = true;
#if !UE4M3
                u32 large = 0;
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    large |= (grains[i][h] & 0xFFu) > 136u || (kGrain == 2 && (grains[i][h] >> 8) > 136u);
                folded = !__any_sync(~0u, large);
#endif
                if (UE4M3 || folded)
                    multiply(true);
                else
                    multiply(false);
                at.advance();
            }
        finish<0>(sum);
        if (leaving) arrive(leaving);

        named_barrier(2, kMath);  // all have read the last unit's sums
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            sums[warpgroup * kSums + (i / 4 * 8 + quarter * 2 + i % 2) * kPitch + warp * 16 + lane / 4 + i / 2 % 2 * 8] = sum[i];
        named_barrier(2, kMath);
        const float factor = (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // the scales were times 2^-8
        const i64 first_piece = static_cast<i64>(unit.group) * e.pieces();
        const int first_share = e.share_of(first_piece), count = e.share_of(first_piece + e.pieces() - 1) - first_share + 1;
        const int line0 = unit.group * kRows, mine = min(kRows, lines - line0);
        float* const left = partial + static_cast<i64>(unit.share - first_share) * rows * lines;
        for (int u = threadIdx.x; u < rows * kRows; u += kMath) {
            const int token = u / kRows, line = u % kRows;
            if (line >= mine) continue;
            float total = 0;
            for (int p = PARTS - 1; p >= 0; --p) {  // the smallest first
                const float* const from = sums + line / kTall * SPLIT * kSums + (p * rows + token) * kPitch + line % kTall;
                float of_x = 0;
#pragma unroll
                for (int s = 0; s < SPLIT; ++s) of_x += from[s * kSums];
                total += of_x;
            }
            const i64 to = static_cast<i64>(token) * lines + line0 + line;
            if (count == 1)
                finish(out, to, total * factor);
            else
                __stcg(left + to, total);
        }
        if (count == 1) continue;
        named_barrier(2, kMath);
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(done + unit.group, 1u) + 1 == static_cast<u32>(count);
            if (last) done[unit.group] = 0;
            __threadfence();
        }
        named_barrier(2, kMath);
        if (!last) continue;
        for (int u = threadIdx.x; u < rows * kRows; u += kMath) {
            const int token = u / kRows, line = u % kRows;
            if (line >= mine) continue;
            const i64 to = static_cast<i64>(token) * lines + line0 + line;
            float total = 0;
#pragma unroll 8
            for (int s = 0; s < count; ++s) total += __ldcg(partial + static_cast<i64>(s) * rows * lines + to);
            finish(out, to, total * factor);
        }
    }
}
