// RMSNorm (NORM 1) or LayerNorm (NORM 2) and the quantizer of what it gives, rounded once to bfloat16.
//
// A cluster of CLUSTER blocks has TALL rows at a time, each block WIDE columns of them, which are copied
// to a stage of its shared memory. A thread has a chunk of columns in kEach rows. Sums are of a thread's
// values, then of a warp's lanes, then of the warps that share a row, each of which sends its own to all
// blocks before it encodes the rows before: so nobody waits for sums, nor, with STAGES stages, for memory.
// What the first kRowThreads threads have left of a tile, the others encode down its columns meanwhile.

#include "barriers.cuh"
// ---- after barriers ----  (the emulator has its own)

#if XIN == 0
typedef u32 Given;
#else
typedef u16 Given;
#endif
constexpr int kGivenWords = sizeof(Given) * kChunk / 4, kGivenVector = 16 / sizeof(Given);
constexpr int kSide = WIDE / kChunk;                 // threads side by side
constexpr int kSlices = kSide / 32;                  // warps that share a row of the block
constexpr int kRowThreads = ROW_THREADS, kColumnThreads = kThreads - kRowThreads;
constexpr int kRowWarps = kRowThreads / 32, kLastWarps = (ONLY_ROWS ? kRowThreads : kColumnThreads) / 32;
constexpr int kEach = TALL * kSide / kRowThreads;    // rows of a thread: a power of two
constexpr int kShare = 32 / kEach;                   // of a warp that have the sum of one of its rows
// Before which of them the next tile is summed: its copy begins late where columns are encoded too.
constexpr int kSumsAt = ONLY_ROWS ? 0 : kEach / 2;
constexpr bool kHeld = ONLY_ROWS || !BIAS;           // whether weights and bias stay in registers
constexpr int kTerms = (CLUSTER * kSlices + 31) / 32 * 32;  // sums of warps that make a row's

struct Norm {
    const void* x;
    u8 *codes[2], *scales[2];
    u64* counters;
    const float *weight, *bias;
    float *mean, *rstd;
    i64 rows, columns;
    float eps;
};

__device__ __forceinline__ float given(const u32 (&words)[kGivenWords], int k) {
#if XIN == 0
    return float_of(words[k]);
#else
    return float_of(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
#endif
}

// A chunk of the tile; zeros beyond the matrix. `real`: columns from its first one on.
__device__ __forceinline__ void load_chunk(u32 (&words)[kGivenWords], const Given* from, i64 real) {
#pragma unroll
    for (int v = 0; v < kGivenWords / 4; ++v) {
        uint4 four = {0, 0, 0, 0};
        if (WHOLE || v * kGivenVector < real) four = reinterpret_cast<const uint4*>(from)[v];
        words[4 * v] = four.x, words[4 * v + 1] = four.y, words[4 * v + 2] = four.z, words[4 * v + 3] = four.w;
    }
}

// Each lane's sums of kEach rows -> lane l has the warp's sum of row l / kShare. The order is that of the
// lanes, 16 apart first, however many rows there are.
__device__ __forceinline__ float across_warp(float (&sums)[kEach]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = kEach / 2, apart = 16; half; half /= 2, apart /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const bool upper = lane & apart;
            const float keep = upper ? sums[i + half] : sums[i], pass = upper ? sums[i] : sums[i + half];
            sums[i] = __fadd_rn(keep, __shfl_xor_sync(~0u, pass, apart));
        }
#pragma unroll
    for (int apart = kShare / 2; apart; apart /= 2) sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(~0u, sums[0], apart));
    return sums[0];
}
__device__ __forceinline__ float of_row(float of_lanes, int e) { return __shfl_sync(~0u, of_lanes, e * kShare); }

// `*to = v` in block `rank` of the cluster, and 4 bytes more at its barrier.
__device__ __forceinline__ void send(float* to, float v, u32 barrier, int rank) {
    if (CLUSTER == 1) {
        *to = v;  // `sent` says so
        return;
    }
    asm volatile("{\n.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %3;\nmapa.shared::cluster.u32 b, %2, %3;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], %1, [b];\n}" ::"r"(shared_address(to)),
                 "f"(v), "r"(barrier), "r"(rank)
                 : "memory");
}
// A block that has no cluster waits for its threads, others for bytes.
constexpr int kSent = sizeof(float) * NORM * TALL * CLUSTER * kSlices;
__device__ __forceinline__ void sent(u32 barrier) {
    if (CLUSTER == 1) arrive(barrier);
}
__device__ __forceinline__ void expect_sums(u32 barrier) {
    if (CLUSTER > 1) expect_bytes(barrier, kSent);
}

typedef float Terms[NORM][TALL][kTerms];  // of each warp: squares about its mean; with NORM 2 the mean

// The sums of a warp's rows, the first being `row`, to all blocks.
__device__ __forceinline__ void send_sums(const Given* mine, i64 real, float width, Terms& terms, u32 barrier, int row,
                                          int term) {
    const int lane = threadIdx.x % 32;
    float sums[kEach], mean = 0;
    u32 words[kGivenWords];
#if NORM == 2
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        load_chunk(words, mine + e * WIDE, real);
        sums[e] = 0;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) sums[e] = __fadd_rn(sums[e], given(words, k));
    }
    mean = across_warp(sums);
    mean = width > 0 ? __fdiv_rn(mean, width) : 0.0f;
#endif
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        load_chunk(words, mine + e * WIDE, real);
        const float middle = NORM == 2 ? of_row(mean, e) : 0.0f;
        sums[e] = 0;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            float v = given(words, k);
            if (NORM == 2) v = WHOLE || k < real ? __fsub_rn(v, middle) : 0.0f;
            sums[e] = __fmaf_rn(v, v, sums[e]);
        }
    }
    const float squares = across_warp(sums);
    for (int to = lane % kShare; to < CLUSTER; to += kShare) {
        send(&terms[0][row + lane / kShare][term], squares, barrier, to);
        if (NORM == 2) send(&terms[NORM - 1][row + lane / kShare][term], mean, barrier, to);
    }
    sent(barrier);
}

// Columns that a warp's term is of.
__device__ __forceinline__ float width_of(int term, i64 columns) {
    return WHOLE ? 512.0f : static_cast<float>(min(static_cast<i64>(512), max(columns - term * 512, static_cast<i64>(0))));
}

// Lane l: the sum over all terms of row l / kShare.
template <class Of>
__device__ __forceinline__ float over_terms(Of of) {
    const int lane = threadIdx.x % 32;
    float sums[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        sums[e] = 0;
#pragma unroll
        for (int t = 0; t < kTerms; t += 32)
            if (t + lane < CLUSTER * kSlices) sums[e] = __fadd_rn(sums[e], of(e, t + lane));
    }
    return across_warp(sums);
}

__device__ __forceinline__ void load_factors(const Norm& p, float (&weight)[kChunk], float (&bias)[kChunk], i64 start, i64 real) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 4) {
        float4 w = {0, 0, 0, 0}, b = {0, 0, 0, 0};
        if (WHOLE || k < real) {
            w = __ldg(reinterpret_cast<const float4*>(p.weight + start + k));
            if (BIAS) b = __ldg(reinterpret_cast<const float4*>(p.bias + start + k));
        }
        weight[k] = w.x, weight[k + 1] = w.y, weight[k + 2] = w.z, weight[k + 3] = w.w;
        bias[k] = b.x, bias[k + 1] = b.y, bias[k + 2] = b.z, bias[k + 3] = b.w;
    }
}

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(kThreads, 1)
quantize_normed(const __grid_constant__ Norm p) {
    extern __shared__ u8 raw_memory[];
    Given* const tiles = reinterpret_cast<Given*>(raw_memory);
    Terms* const terms = reinterpret_cast<Terms*>(tiles + STAGES * TALL * WIDE);
    u32* const left_by = reinterpret_cast<u32*>(terms + 2);  // warps that have left each stage
    const u32 summed = shared_address(left_by + 4), ready = summed + 16, coded = ready + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
    const i64 left = static_cast<i64>(rank) * WIDE;
    const int step = gridDim.x / CLUSTER, from = blockIdx.x / CLUSTER;
    const int count = (static_cast<int>((p.rows + TALL - 1) / TALL) - from + step - 1) / step;  // tiles
    const auto top_of = [&](int i) { return (from + static_cast<i64>(i) * step) * TALL; };
    const auto tile_of = [&](int i) { return tiles + i % STAGES * TALL * WIDE; };

    const auto fill = [&](int i) {  // by a warp
        const int wide = WHOLE ? WIDE : static_cast<int>(min(static_cast<i64>(WIDE), p.columns - left));
        const int tall = WHOLE ? TALL : static_cast<int>(min(static_cast<i64>(TALL), p.rows - top_of(i)));
        const u32 barrier = ready + 8 * (i % STAGES);
        if (lane == 0) expect_bytes(barrier, tall * wide * sizeof(Given));
        __syncwarp();
        for (int row = lane; row < tall; row += 32)
            load_line(shared_address(tile_of(i) + row * WIDE),
                      static_cast<const Given*>(p.x) + (top_of(i) + row) * p.columns + left, wide * sizeof(Given), barrier);
    };
    // The last warp that leaves a tile has another one copied in its place.
    const auto leave = [&](int i) {
        if (i + STAGES >= count) return;
        __threadfence_block();
        __syncwarp();
        u32 others = lane == 0 ? atomicAdd(left_by + i % STAGES, 1u) : 0;
        others = __shfl_sync(~0u, others, 0);
        if (others % kLastWarps != kLastWarps - 1) return;
        __threadfence_block();
        fill(i + STAGES);
    };
    if (warp == 0) {
        if (lane == 0) {
            for (int b = 0; b < 2; ++b) barrier_init(summed + 8 * b, CLUSTER > 1 ? 1 : kRowThreads);
            for (int s = 0; s < STAGES; ++s) {
                barrier_init(ready + 8 * s, 1), barrier_init(coded + 8 * s, kRowThreads);
                left_by[s] = 0;
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            for (int b = 0; b < 2; ++b) expect_sums(summed + 8 * b);
        }
        __syncwarp();
        for (int i = 0; i < min(STAGES, count); ++i) fill(i);
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();  // the blocks that sums are sent to are there

    const Tensor tensor = {1, 1, 0, 1};
    const Stream stream = {};
    Tally tally = {0, 0};
#if !ONLY_ROWS
    if (warp >= kRowWarps) {
        constexpr int kPitch = WIDE * sizeof(Given) / sizeof(Raw), kItems = TALL / kChunk * WIDE / COLUMNS;
        for (int i = 0; i < count; ++i) {
            wait(coded + 8 * (i % STAGES), i / STAGES % 2);
#pragma unroll 1
            for (int item = threadIdx.x - kRowThreads; item < kItems; item += kColumnThreads)
                encode_down<kPitch>(reinterpret_cast<const Raw*>(tile_of(i)), item, top_of(i), left, p.rows, p.columns,
                                    tensor, stream, p.codes[1], p.scales[1], nullptr, tally);
            leave(i);
        }
        add_counts(tally, p.counters + 2 * kSlots);
        return;
    }
#endif
    const int first = warp / kSlices * kEach, side = threadIdx.x % kSide, term = rank * kSlices + warp % kSlices;
    const i64 start = left + side * kChunk, real = p.columns - start;
    const float length = static_cast<float>(p.columns), width = width_of(term, p.columns);
    const auto sum = [&](int i) {
        wait(ready + 8 * (i % STAGES), i / STAGES % 2);
        send_sums(tile_of(i) + first * WIDE + side * kChunk, real, width, terms[i % 2], summed + 8 * (i % 2), first,
                  term);
    };
    float weight[kChunk], bias[kChunk];
    if (kHeld) load_factors(p, weight, bias, start, real);
    sum(0);
    for (int i = 0; i < count; ++i) {
        wait(summed + 8 * (i % 2), i / 2 % 2);
        const Terms& t = terms[i % 2];
        const i64 top = top_of(i);
        float mean = 0;
#if NORM == 2
        mean = __fdiv_rn(over_terms([&](int e, int of) {
            return __fmul_rn(t[NORM - 1][first + e][of], width_of(of, p.columns));
        }), length);
        float middles[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) middles[e] = of_row(mean, e);
        const float square = over_terms([&](int e, int of) {
            const float apart = __fsub_rn(t[NORM - 1][first + e][of], middles[e]);
            return __fadd_rn(t[0][first + e][of], __fmul_rn(__fmul_rn(apart, apart), width_of(of, p.columns)));
        });
#else
        const float square = over_terms([&](int e, int of) { return t[0][first + e][of]; });
#endif
        const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(square, length), p.eps)));
        const i64 mine = top + first + lane / kShare;
        if (rank == 0 && warp % kSlices == 0 && lane % kShare == 0 && (WHOLE || mine < p.rows)) {
            p.rstd[mine] = rstd;
            if (NORM == 2) p.mean[mine] = mean;
        }
        if (threadIdx.x == 0) expect_sums(summed + 8 * (i % 2));  // before it sends what follows
        if (!kHeld) load_factors(p, weight, bias, start, real);
#pragma unroll 4
        for (int e = 0; e < kEach; ++e) {
            if (e == kSumsAt && i + 1 < count) sum(i + 1);
            const i64 inside = WHOLE || top + first + e < p.rows ? real : 0;
            const float middle = NORM == 2 ? of_row(mean, e) : 0.0f, factor = of_row(rstd, e);
            Given* const row = tile_of(i) + (first + e) * WIDE;
            u32 words[kGivenWords], raw[kChunk / 2];
            load_chunk(words, row + side * kChunk, inside);
#pragma unroll
            for (int k = 0; k < kChunk; k += 2) {
                float y[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float v = given(words, k + i);
                    if (NORM == 2) v = __fsub_rn(v, middle);
                    y[i] = __fmul_rn(__fmul_rn(v, factor), weight[k + i]);
                    if (BIAS) y[i] = __fadd_rn(y[i], bias[k + i]);
                }
                asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw[k / 2]) : "f"(y[1]), "f"(y[0]));
                if (!WHOLE && k >= inside) raw[k / 2] = 0;
            }
#if !ONLY_ROWS
            __syncwarp();  // all lanes have read the row, where what they write may lie
            uint4* to = reinterpret_cast<uint4*>(reinterpret_cast<u16*>(row) + side * kChunk);
            to[0] = uint4{raw[0], raw[1], raw[2], raw[3]}, to[1] = uint4{raw[4], raw[5], raw[6], raw[7]};
#endif
            encode_along(raw, top + first + e, start, p.rows, p.columns, tensor, stream, p.codes[0], p.scales[0],
                         nullptr, tally);
        }
#if ONLY_ROWS
        leave(i);
#else
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // a copy will overwrite what was stored
        arrive(coded + 8 * (i % STAGES));
#endif
    }
    add_counts(tally, p.counters);
}
