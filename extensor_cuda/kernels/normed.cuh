// RMSNorm (NORM 1) or LayerNorm (NORM 2) and the quantizer of what it gives, rounded once to bfloat16.
//
// A cluster of CLUSTER blocks has TALL rows at a time, each block WIDE columns of them, which are copied
// to a stage of its shared memory. A thread has a chunk of columns in kEach rows. Sums are of a thread's
// values, then of a warp's lanes, then of the warps that share a row, each of which sends its own to all
// blocks before it encodes the rows before: so nobody waits for sums, nor, with STAGES stages, for memory.

#include "barriers.cuh"
// ---- after barriers ----

#if XIN == 0
typedef u32 Given;
#else
typedef u16 Given;
#endif
constexpr int kGivenWords = sizeof(Given) * kChunk / 4, kGivenVector = 16 / sizeof(Given);
constexpr int kSide = WIDE / kChunk;                 // threads side by side
constexpr int kSlices = kSide / 32, kWarps = kThreads / 32;  // warps that share a row of the block, and all
constexpr int kEach = TALL * kSide / kThreads;       // rows of a thread: a power of two
constexpr int kTerms = (CLUSTER * kSlices + 31) / 32 * 32;  // sums of warps that make a row's

struct Norm {
    const Given* x;
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

// Each lane's sums of kEach rows -> lane l has the warp's sum of row l % kEach.
__device__ __forceinline__ float across_warp(float (&sums)[kEach], int lane) {
#pragma unroll
    for (int half = kEach / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const bool upper = lane & half;
            const float keep = upper ? sums[i + half] : sums[i], pass = upper ? sums[i] : sums[i + half];
            sums[i] = __fadd_rn(keep, __shfl_xor_sync(~0u, pass, half));
        }
#pragma unroll
    for (int step = kEach; step < 32; step *= 2) sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(~0u, sums[0], step));
    return sums[0];
}


// `*to = v` in block `rank` of the cluster, and 4 bytes more at its barrier.
__device__ __forceinline__ void send(float* to, float v, u32 barrier, int rank) {
    asm volatile("{\n.reg .b32 a, b;\nmapa.shared::cluster.u32 a, %0, %3;\nmapa.shared::cluster.u32 b, %2, %3;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [a], %1, [b];\n}" ::"r"(shared_address(to)),
                 "f"(v), "r"(barrier), "r"(rank)
                 : "memory");
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
    mean = across_warp(sums, lane);
    mean = width > 0 ? __fdiv_rn(mean, width) : 0.0f;
#endif
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        load_chunk(words, mine + e * WIDE, real);
        const float middle = NORM == 2 ? __shfl_sync(~0u, mean, e) : 0.0f;
        sums[e] = 0;
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            float v = given(words, k);
            if (NORM == 2) v = WHOLE || k < real ? __fsub_rn(v, middle) : 0.0f;
            sums[e] = __fmaf_rn(v, v, sums[e]);
        }
    }
    const float squares = across_warp(sums, lane);
    for (int to = lane / kEach; to < CLUSTER; to += 32 / kEach) {
        send(&terms[0][row + lane % kEach][term], squares, barrier, to);
        if (NORM == 2) send(&terms[NORM - 1][row + lane % kEach][term], mean, barrier, to);
    }
}

// Columns that a warp's term is of.
__device__ __forceinline__ float width_of(int term, i64 columns) {
    return WHOLE ? 512.0f : static_cast<float>(min(static_cast<i64>(512), max(columns - term * 512, static_cast<i64>(0))));
}

// Lane l: the sum over all terms of row l % kEach, the first row being `row`.
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
    return across_warp(sums, lane);
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

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(kThreads, RESIDENT)
quantize_normed(const __grid_constant__ Norm p) {
    extern __shared__ u8 raw_memory[];
    Given* const tiles = reinterpret_cast<Given*>(raw_memory);
    Terms* const terms = reinterpret_cast<Terms*>(tiles + STAGES * TALL * WIDE);
    u32* const done = reinterpret_cast<u32*>(terms + 2);  // warps that were, of each stage
    const u32 summed = shared_address(done + 4), ready = summed + 16;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % CLUSTER, first = warp / kSlices * kEach, side = threadIdx.x % kSide;
    const int term = rank * kSlices + warp % kSlices;
    const i64 left = static_cast<i64>(rank) * WIDE, start = left + side * kChunk, real = p.columns - start;
    const float length = static_cast<float>(p.columns), width = width_of(term, p.columns);
    const int step = gridDim.x / CLUSTER, from = blockIdx.x / CLUSTER;
    const int count = (static_cast<int>((p.rows + TALL - 1) / TALL) - from + step - 1) / step;  // tiles
    constexpr int kSent = sizeof(float) * NORM * TALL * CLUSTER * kSlices;

    const auto fill = [&](int i) {  // by a warp
        const i64 top = (from + static_cast<i64>(i) * step) * TALL;
        const int wide = WHOLE ? WIDE : static_cast<int>(min(static_cast<i64>(WIDE), p.columns - left));
        const int tall = WHOLE ? TALL : static_cast<int>(min(static_cast<i64>(TALL), p.rows - top));
        if (lane == 0) expect_bytes(ready + 8 * (i % STAGES), tall * wide * sizeof(Given));
        __syncwarp();
        for (int row = lane; row < tall; row += 32)
            load_line(shared_address(tiles + (i % STAGES * TALL + row) * WIDE), p.x + (top + row) * p.columns + left,
                      wide * sizeof(Given), ready + 8 * (i % STAGES));
    };
    const auto sum = [&](int i) {
        wait(ready + 8 * (i % STAGES), i / STAGES % 2);
        send_sums(tiles + (i % STAGES * TALL + first) * WIDE + side * kChunk, real, width, terms[i % 2],
                  summed + 8 * (i % 2), first, term);
    };
    if (warp == 0) {
        if (lane == 0) {
            for (int b = 0; b < 2 + STAGES; ++b) barrier_init(summed + 8 * b, 1);
            for (int s = 0; s < STAGES; ++s) done[s] = 0;
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            for (int b = 0; b < 2; ++b) expect_bytes(summed + 8 * b, kSent);
        }
        __syncwarp();
        for (int i = 0; i < min(STAGES, count); ++i) fill(i);
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();  // the blocks that sums are sent to are there
    sum(0);

    const Tensor tensor = {1, 1, 0, 1};
    const Stream stream = {};
    Tally tally[2] = {};
#if HOIST == 1
    float weight[kChunk], bias[kChunk];
    load_factors(p, weight, bias, start, real);
#endif
    for (int i = 0; i < count; ++i) {
#if HOIST == 2
        float weight[kChunk], bias[kChunk];
        load_factors(p, weight, bias, start, real);
#endif
        wait(summed + 8 * (i % 2), i / 2 % 2);
        const Terms& t = terms[i % 2];
        const i64 top = (from + static_cast<i64>(i) * step) * TALL;
        float mean = 0;
#if NORM == 2
        mean = __fdiv_rn(over_terms([&](int e, int of) {
            return __fmul_rn(t[NORM - 1][first + e][of], width_of(of, p.columns));
        }), length);
        float middles[kEach];
#pragma unroll
        for (int e = 0; e < kEach; ++e) middles[e] = __shfl_sync(~0u, mean, e);
        const float square = over_terms([&](int e, int of) {
            const float apart = __fsub_rn(t[NORM - 1][first + e][of], middles[e]);
            return __fadd_rn(t[0][first + e][of], __fmul_rn(__fmul_rn(apart, apart), width_of(of, p.columns)));
        });
#else
        const float square = over_terms([&](int e, int of) { return t[0][first + e][of]; });
#endif
        const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(square, length), p.eps)));
        if (rank == 0 && warp % kSlices == 0 && lane < kEach && (WHOLE || top + first + lane < p.rows)) {
            p.rstd[top + first + lane] = rstd;
            if (NORM == 2) p.mean[top + first + lane] = mean;
        }
        if (threadIdx.x == 0) expect_bytes(summed + 8 * (i % 2), kSent);  // before it sends what follows
        if (i + 1 < count) sum(i + 1);

        Given* const tile = tiles + i % STAGES * TALL * WIDE;
#if HOIST == 0
        float weight[kChunk], bias[kChunk];
        load_factors(p, weight, bias, start, real);
#endif
#pragma unroll UNROLL
        for (int e = 0; e < kEach; ++e) {
            const i64 inside = WHOLE || top + first + e < p.rows ? real : 0;
            const float middle = NORM == 2 ? __shfl_sync(~0u, mean, e) : 0.0f, factor = __shfl_sync(~0u, rstd, e);
            u32 words[kGivenWords], raw[kChunk / 2];
            load_chunk(words, tile + (first + e) * WIDE + side * kChunk, inside);
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
            uint4* to = reinterpret_cast<uint4*>(reinterpret_cast<u16*>(tile + (first + e) * WIDE) + side * kChunk);
            to[0] = uint4{raw[0], raw[1], raw[2], raw[3]}, to[1] = uint4{raw[4], raw[5], raw[6], raw[7]};
#endif
            encode_along(raw, top + first + e, start, p.rows, p.columns, tensor, stream, p.codes[0], p.scales[0],
                         nullptr, tally[0]);
        }
#if !ONLY_ROWS
        __syncthreads();
        constexpr int kPitch = WIDE * sizeof(Given) / sizeof(Raw);
#pragma unroll 1
        for (int item = threadIdx.x; item < TALL / kChunk * WIDE / COLUMNS; item += kThreads)  // whole warps
            encode_down<kPitch>(reinterpret_cast<const Raw*>(tile), item, top, left, p.rows, p.columns, tensor, stream,
                                p.codes[1], p.scales[1], nullptr, tally[1]);
#endif
        // The last warp that leaves a tile has another one copied in its place.
        if (i + STAGES < count) {
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            __threadfence_block();
            __syncwarp();
            u32 others = lane == 0 ? atomicAdd(done + i % STAGES, 1u) : 0;
            others = __shfl_sync(~0u, others, 0);
            if (others % kWarps == kWarps - 1) {
                __threadfence_block();
                fill(i + STAGES);
            }
        }
    }
    add_counts(tally[0], p.counters);
#if !ONLY_ROWS
    add_counts(tally[1], p.counters + 2 * kSlots);
#endif
}
