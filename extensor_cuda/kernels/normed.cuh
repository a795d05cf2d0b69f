// RMSNorm (NORM 1) or LayerNorm (NORM 2) and the quantizer of what it gives, rounded once to bfloat16.
//
// A cluster of CLUSTER blocks has TALL rows, each block WIDE columns of them, which it copies whole to
// shared memory: few registers are held, so that three blocks share a multiprocessor and one loads
// while others encode. A thread has a chunk of columns in kEach rows. Sums are of a thread's values,
// then of a warp's lanes, then of the warps that share a row, whose sums every block is sent.

#include "barriers.cuh"
// ---- after barriers ----

#if XIN == 0
typedef u32 Given;
#else
typedef u16 Given;
#endif
constexpr int kGivenWords = sizeof(Given) * kChunk / 4, kGivenVector = 16 / sizeof(Given);
constexpr int kSide = WIDE / kChunk;                 // threads side by side
constexpr int kSlices = kSide / 32;                  // warps that share a row of the block
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

// All blocks of the cluster have come here, and see what the others wrote before.
__device__ __forceinline__ void meet() {
    if (CLUSTER == 1)
        __syncthreads();
    else
        cluster_sync();
}

// `*to = v` in block `rank` of the cluster.
__device__ __forceinline__ void send(float* to, float v, int rank) {
    if (CLUSTER == 1) {
        *to = v;
        return;
    }
    asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nst.shared::cluster.f32 [r], %2;\n}" ::"r"(
                     shared_address(to)),
                 "r"(rank), "f"(v)
                 : "memory");
}

// Each lane's sums of kEach rows, the first being `row` -> lane l has the sum of row + l % kEach over all columns.
__device__ __forceinline__ float sum_rows(float (&sums)[kEach], float (*terms)[kTerms], int row, int rank) {
    const int lane = threadIdx.x % 32, slice = threadIdx.x / 32 % kSlices;
    const float mine = across_warp(sums, lane);
    for (int to = lane / kEach; to < CLUSTER; to += 32 / kEach)
        send(&terms[row + lane % kEach][rank * kSlices + slice], mine, to);
    meet();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        sums[e] = 0;
#pragma unroll
        for (int t = 0; t < kTerms; t += 32)
            if (t + lane < CLUSTER * kSlices) sums[e] = __fadd_rn(sums[e], terms[row + e][t + lane]);
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
    Given* const tile = reinterpret_cast<Given*>(raw_memory);
    float (*const terms)[TALL][kTerms] = reinterpret_cast<float (*)[TALL][kTerms]>(tile + TALL * WIDE);
    const u32 ready = shared_address(terms[NORM]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rank = blockIdx.x % CLUSTER, first = warp / kSlices * kEach, side = threadIdx.x % kSide;
    const i64 top = static_cast<i64>(blockIdx.x / CLUSTER) * TALL, left = static_cast<i64>(rank) * WIDE;
    const i64 start = left + side * kChunk, real = p.columns - start;

    if (warp == 0) {
        const int wide = WHOLE ? WIDE : static_cast<int>(min(static_cast<i64>(WIDE), p.columns - left));
        const int tall = WHOLE ? TALL : static_cast<int>(min(static_cast<i64>(TALL), p.rows - top));
        if (lane == 0) {
            barrier_init(ready, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            expect_bytes(ready, tall * wide * sizeof(Given));
        }
        __syncwarp();
        for (int row = lane; row < tall; row += 32)
            load_line(shared_address(tile + row * WIDE), p.x + (top + row) * p.columns + left, wide * sizeof(Given), ready);
    }
#if !LAZY
    float weight[kChunk], bias[kChunk];
    load_factors(p, weight, bias, start, real);
#endif
    meet();  // the barrier is there, and so are the blocks that sums are sent to
    wait(ready, 0);

    const float length = static_cast<float>(p.columns);
    const Given* const mine = tile + first * WIDE + side * kChunk;
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
    mean = __fdiv_rn(sum_rows(sums, terms[1], first, rank), length);
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
    const float square = __fdiv_rn(sum_rows(sums, terms[0], first, rank), length);
    const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(square, p.eps)));
    if (rank == 0 && warp % kSlices == 0 && lane < kEach && (WHOLE || top + first + lane < p.rows)) {
        p.rstd[top + first + lane] = rstd;
        if (NORM == 2) p.mean[top + first + lane] = mean;
    }

    const Tensor tensor = {1, 1, 0, 1};
    const Stream stream = {};
    Tally tally = {0, 0};
#pragma unroll UNROLL
    for (int e = 0; e < kEach; ++e) {
        load_chunk(words, mine + e * WIDE, WHOLE || top + first + e < p.rows ? real : 0);
        const float middle = NORM == 2 ? __shfl_sync(~0u, mean, e) : 0.0f, factor = __shfl_sync(~0u, rstd, e);
        const i64 inside = WHOLE || top + first + e < p.rows ? real : 0;
#if LAZY
        float weight[kChunk], bias[kChunk];
        load_factors(p, weight, bias, start, real);
#endif
        u32 raw[kChunk / 2];
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
        encode_along(raw, top + first + e, start, p.rows, p.columns, tensor, stream, p.codes[0], p.scales[0], nullptr, tally);
    }
    add_counts(tally, p.counters);
#if !ONLY_ROWS
    __syncthreads();
    tally = Tally{0, 0};
    constexpr int kPitch = WIDE * sizeof(Given) / sizeof(Raw);
#pragma unroll 1
    for (int item = 0; item < TALL / kChunk * WIDE / COLUMNS; item += kThreads) {
        const u32 block = blockIdx.x;
        const i64 top2 = static_cast<i64>(block / CLUSTER) * TALL, left2 = static_cast<i64>(block % CLUSTER) * WIDE;
        encode_down<kPitch>(reinterpret_cast<const Raw*>(tile), item + threadIdx.x, top2, left2, p.rows, p.columns, tensor, stream,
                            p.codes[1], p.scales[1], nullptr, tally);
    }
    add_counts(tally, p.counters + 2 * kSlots);
#endif
}
