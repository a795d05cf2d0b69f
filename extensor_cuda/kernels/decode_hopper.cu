// out = x w^T for up to 64 rows of x, for Hopper: packed E2M1 weights under E8M0 or E4M3 scales, read once and decoded
// to bfloat16 in the registers that wgmma takes them from (64 rows of w, 8 to 64 tokens); x lies in shared memory.
//
// A block is four warpgroups that multiply and one that brings x. SPLIT of the four share 64 rows of w, and take every
// SPLIT-th segment of 128 elements of K. A lane has 32 neighbouring elements of two rows of a segment, which it asked
// for two segments before. Decoding leaves elements 4 apart in a register, so x is put in that order on its way
// through shared memory, and no element moves between lanes. float32 x is three bfloat16 matrices, which together are
// exactly x: its rows are three tokens (PARTS).
//
// Blocks take units in turn: rows of w, and a part of K (a slice). Slices meet in `partial`, where the last one that
// is done adds all. Everything is added in an order that depends on nothing but shapes. No headers; the wgmma function
// comes from decode.py. Macros: BLOCK (of a scale), SPLIT, TILES (of 8 tokens), PARTS, STAGES, AHEAD; those of
// decode.cuh.

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

constexpr int kMath = 512, kBringing = 128, kThreads = kMath + kBringing, kTall = 64, kSegment = 128, kDeep = 2;
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
#endif

struct Problem {
    int rows, lines, columns, slices, stretch;  // stretch: segments of a slice
    __device__ __forceinline__ int groups() const { return (lines + kRows - 1) / kRows; }
};

// A block's units, and the segments of one.
struct Unit {
    int index, slice, line, begin, end, pieces;
    __device__ __forceinline__ bool start(const Problem& e, int number) {
        index = number;
        if (index >= e.groups() * e.slices) return false;
        slice = index % e.slices, line = index / e.slices * kRows;
        begin = slice * e.stretch, end = min(e.columns / kSegment, begin + e.stretch);
        pieces = (end - begin + SPLIT - 1) / SPLIT;
        return true;
    }
    __device__ __forceinline__ bool next(const Problem& e) { return start(e, index + gridDim.x); }
};

struct Ring {
    int stage;
    u32 parity;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// ---- x ----

// A piece of x as it lies, zeros behind the slice.
__device__ __forceinline__ void fetch(u8* to, const Raw* x, const Problem& e, const Unit& unit, int piece, int thread) {
    constexpr int kUnits = kOfRow / 16, kOfUnit = 16 / sizeof(Raw);
    const int first = (unit.begin + piece * SPLIT) * kSegment;
    for (int u = thread; u < e.rows * kUnits; u += kBringing) {
        const int row = u / kUnits, at = u % kUnits, k = first + at * kOfUnit;
        copy_ahead<16>(to + row * kRawPitch + at * 16, x + static_cast<i64>(row) * e.columns + min(k, e.columns - kOfUnit),
                       k < unit.end * kSegment);
    }
}

// A piece as decoding leaves the weights: of four lanes, the first elements of eights that go together.
__device__ __forceinline__ void arrange(u8* to, const u8* from, int rows, int thread) {
    for (int u = thread; u < kTokens * 4 * SPLIT; u += kBringing) {
        const int token = u / (32 * SPLIT) * 8 + u % 8, j = u / 8 % 4, segment = u / 32 % SPLIT;
        if (token >= rows * PARTS) continue;
        const int part = PARTS == 1 ? 0 : token / rows;
        const u8* row = from + (token - part * rows) * kRawPitch + (segment * kSegment + j * 8) * sizeof(Raw);
        u32 pairs[4][4];
#pragma unroll
        for (int lane = 0; lane < 4; ++lane) {
            const uint4* const eight = reinterpret_cast<const uint4*>(row + lane * 32 * sizeof(Raw));
#if IN == 1
            const uint4 w = eight[0];
            pairs[0][lane] = __byte_perm(w.x, w.z, 0x5410), pairs[1][lane] = __byte_perm(w.x, w.z, 0x7632);
            pairs[2][lane] = __byte_perm(w.y, w.w, 0x5410), pairs[3][lane] = __byte_perm(w.y, w.w, 0x7632);
#else
            const uint4 a = eight[0], b = eight[1];
            const u32 low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int p = 0; p < 4; ++p)
                pairs[p][lane] = part_of(__uint_as_float(low[p]), part) | part_of(__uint_as_float(high[p]), part) << 16;
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
              void* __restrict__ out, int rows, int lines, int columns, int slices, int stretch) {
    extern __shared__ u8 raw_memory[];
    __shared__ u32 last;
    u8* const ring = raw_memory + (1024 - (shared_address(raw_memory) & 1023)) % 1024;
    u8* const raw = ring + STAGES * kStage;
    float* const sums = reinterpret_cast<float*>(raw + (AHEAD * kRaw + 127) / 128 * 128);
    const u32 full = shared_address(sums + 4 * kSums), empty = full + 8 * STAGES;
    const Problem e = {rows, lines, columns, slices, stretch};
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(full + 8 * s, kBringing), barrier_init(empty + 8 * s, kMath / 32);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_start();
    await_last();  // which may have written what is read from here on
    Unit unit;
    Ring at = {0, 0};

    if (warpgroup == 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int thread = threadIdx.x - kMath;
        Unit ahead;
        int next = 0, slot = 0, to = 0;
        bool more = ahead.start(e, blockIdx.x);
        const auto send = [&] {
            if (more) {
                fetch(raw + to * kRaw, x, e, ahead, next, thread);
                if (++next == ahead.pieces) next = 0, more = ahead.next(e);
            }
            end_copies();
            if (++to == AHEAD) to = 0;
        };
        for (int i = 0; i < AHEAD - 1; ++i) send();
        for (bool here = unit.start(e, blockIdx.x); here; here = unit.next(e))
            for (int piece = 0; piece < unit.pieces; ++piece) {
                arrived<AHEAD - 2>();
                named_barrier(1, kBringing);  // for all, who are done with the slot before
                send();
                wait(empty + 8 * at.stage, at.parity ^ 1);
                arrange(ring + at.stage * kStage, raw + slot * kRaw, rows, thread);
                show_stores();
                arrive(full + 8 * at.stage);
                at.advance();
                if (++slot == AHEAD) slot = 0;
            }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
    const int warp = threadIdx.x / 32, group = warpgroup / SPLIT, part = warpgroup % SPLIT;
    const int row = group * kTall + warp % 4 * 16 + lane / 4, quarter = lane % 4;
    for (bool here = unit.start(e, blockIdx.x); here; here = unit.next(e)) {
        const u8* code[2];
        const u8* scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 line = min(unit.line + row + 8 * h, lines - 1);
            code[h] = codes + line * (columns / 2) + quarter * 16;
            scale[h] = scales + line * (columns / BLOCK) + quarter * 32 / BLOCK;
        }
        uint4 held[kDeep][2];
        u32 grains[kDeep][2];
        const auto ask = [&](uint4 (&words)[2], u32 (&grain)[2], int piece) {
            const int segment = unit.begin + piece * SPLIT + part;
            const bool there = segment < unit.end;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                words[h] = there ? streamed(code[h] + segment * (kSegment / 2)) : uint4{0, 0, 0, 0};
                grain[h] = there ? *reinterpret_cast<const Grain*>(scale[h] + segment * (kSegment / BLOCK)) : 0u;
            }
        };
#pragma unroll
        for (int i = 0; i < kDeep; ++i) ask(held[i], grains[i], i);
        Sum sum[kTokens / 2];
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
        u32 a[2][2][4];
        int before = -1;
        for (int first = 0; first < unit.pieces; first += kDeep)
#pragma unroll
            for (int i = 0; i < kDeep; ++i) {
                if (first + i >= unit.pieces) break;
                bool folded = true;
#if !UE4M3
                u32 large = 0;
#pragma unroll
                for (int h = 0; h < 2; ++h) large |= (grains[i][h] & 0xFFu) > 136u || (grains[i][h] >> 8) > 136u;
                folded = !__any_sync(~0u, large);
#endif
                const u32 tokens = shared_address(ring) + at.stage * kStage + part * 2 * kTile;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 pairs[2][4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 word[4] = {held[i][h].x, held[i][h].y, held[i][h].z, held[i][h].w};
                        const u32 byte = kGrain == 1 ? grains[i][h] : grains[i][h] >> j / 2 * 8 & 0xFFu;
                        if (UE4M3 || folded)
                            decode(word + j, scale_pair(byte, true), true, 0, pairs[h]);
                        else
                            decode(word + j, scale_pair(byte, false), false, 0, pairs[h]);
                    }
                    if (j == 3) ask(held[i], grains[i], first + i + kDeep);
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
                    finish<1>(sum);
                    if (j == 0) {
                        if (before >= 0) release(empty + 8 * before, lane);
                        before = at.stage;
                    }
                }
                at.advance();
            }
        finish<0>(sum);
        release(empty + 8 * before, lane);

        named_barrier(2, kMath);  // all have read the last unit's sums
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i)
            sums[warpgroup * kSums + (i / 4 * 8 + quarter * 2 + i % 2) * kPitch + warp % 4 * 16 + lane / 4 + i / 2 % 2 * 8] = sum[i];
        named_barrier(2, kMath);
        const float factor = (tensor_scale ? *tensor_scale : 1.0f) * 256.0f;  // the scales were times 2^-8
        const int mine = min(kRows, lines - unit.line);
        const i64 pitch = lines;
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
            const i64 to = token * pitch + unit.line + line;
            if (slices == 1)
                finish(out, to, total * factor);
            else
                __stcg(partial + unit.slice * rows * pitch + to, total);
        }
        if (slices == 1) continue;
        named_barrier(2, kMath);
        if (threadIdx.x == 0) {
            u32* const count = done + unit.index / slices;
            __threadfence();
            last = atomicAdd(count, 1u) + 1 == static_cast<u32>(slices);
            if (last) *count = 0;
            __threadfence();
        }
        named_barrier(2, kMath);
        if (!last) continue;
        for (int u = threadIdx.x; u < rows * kRows; u += kMath) {
            const int token = u / kRows, line = u % kRows;
            if (line >= mine) continue;
            const i64 to = token * pitch + unit.line + line;
            float total = 0;
#pragma unroll 8
            for (int s = 0; s < slices; ++s) total += __ldcg(partial + s * rows * pitch + to);
            finish(out, to, total * factor);
        }
    }
}
