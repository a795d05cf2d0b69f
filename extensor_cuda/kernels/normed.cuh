// RMSNorm (NORM 1) or LayerNorm (NORM 2) before `quantize_both`: rows are shared by a cluster of CLUSTER
// blocks, each with kWide columns, and read once. Sums are of a thread's values, then across a warp's
// lanes, then of the cluster's blocks in their order. What is quantized is bfloat16, rounded once.

#if XIN == 0
typedef u32 Given;
#else
typedef u16 Given;
#endif
constexpr int kGivenWords = sizeof(Given) * kChunk / 4;

__device__ __forceinline__ float given(const u32 (&words)[kGivenWords], int k) {
#if XIN == 0
    return float_of(words[k]);
#else
    return float_of(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
#endif
}

// All blocks of the cluster have come here, and see what the others wrote before.
__device__ __forceinline__ void meet() {
    if (CLUSTER == 1)
        __syncthreads();
    else
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The float that lies in block `rank` where `mine` lies here.
__device__ __forceinline__ float of_block(const float* mine, int rank) {
    if (CLUSTER == 1) return *mine;
    u32 address;
    float found;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<u32>(__cvta_generic_to_shared(mine))), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(found) : "r"(address) : "memory");
    return found;
}

__device__ __forceinline__ float across_warp(float v) {
#pragma unroll
    for (int step = 16; step; step /= 2) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, step));
    return v;
}

// The sums of this warp's rows, one an item, over all columns.
__device__ __forceinline__ void sum_rows(float (&mine)[COLUMNS], float* partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int item = 0; item < COLUMNS; ++item) {
        mine[item] = across_warp(mine[item]);
        if (lane == 0) partial[item * (kThreads / 32) + warp] = mine[item];
    }
    meet();
#pragma unroll
    for (int item = 0; item < COLUMNS; ++item) {
        const float* at = partial + item * (kThreads / 32) + warp;
        mine[item] = 0;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; ++rank) mine[item] = __fadd_rn(mine[item], of_block(at, rank));
    }
}

// The chunks of this thread, normalized, as bfloat16 pairs: a warp has a row of the tile in each item.
__device__ __forceinline__ void load_normed(u32 (&raw)[COLUMNS][8], const Given* x, const float* weight,
                                            const float* bias, float* mean_of, float* rstd_of, float eps, i64 top,
                                            i64 left, i64 columns) {
    static_assert(kPerRow == 32 && sizeof(Raw) == 2, "a warp has a row");
    __shared__ float partial[2][TALL];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 start = left + lane * kChunk;
    u32 words[COLUMNS][kGivenWords];
#pragma unroll
    for (int item = 0; item < COLUMNS; ++item) {
        const uint4* from = reinterpret_cast<const uint4*>(x + (top + item * (kThreads / 32) + warp) * columns + start);
#pragma unroll
        for (int v = 0; v < kGivenWords / 4; ++v) {
            const uint4 four = __ldg(from + v);
            words[item][4 * v] = four.x, words[item][4 * v + 1] = four.y;
            words[item][4 * v + 2] = four.z, words[item][4 * v + 3] = four.w;
        }
    }
    float mean[COLUMNS], rstd[COLUMNS];
#pragma unroll
    for (int item = 0; item < COLUMNS; ++item) {
        mean[item] = rstd[item] = 0;
#if NORM == 2
#pragma unroll
        for (int k = 0; k < kChunk; ++k) mean[item] = __fadd_rn(mean[item], given(words[item], k));
#endif
    }
    const float length = static_cast<float>(columns);
#if NORM == 2
    sum_rows(mean, partial[0]);
#pragma unroll
    for (int item = 0; item < COLUMNS; ++item) mean[item] = __fdiv_rn(mean[item], length);
#endif
#pragma unroll
    for (int item = 0; item < COLUMNS; ++item)
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            const float v = __fsub_rn(given(words[item], k), mean[item]);
            rstd[item] = __fadd_rn(rstd[item], __fmul_rn(v, v));
        }
    sum_rows(rstd, partial[1]);
#pragma unroll
    for (int item = 0; item < COLUMNS; ++item) {
        rstd[item] = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(rstd[item], length), eps)));
        const i64 row = top + item * (kThreads / 32) + warp;
        if (left == 0 && lane == 0) {
            rstd_of[row] = rstd[item];
            if (NORM == 2) mean_of[row] = mean[item];
        }
    }
#pragma unroll
    for (int item = 0; item < COLUMNS; ++item) {
#pragma unroll
        for (int k = 0; k < kChunk; k += 4) {
            const float4 w = *reinterpret_cast<const float4*>(weight + start + k);
            float y[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                y[i] = __fmul_rn(__fmul_rn(__fsub_rn(given(words[item], k + i), mean[item]), rstd[item]), y[i]);
            if (bias) {
                const float4 b = *reinterpret_cast<const float4*>(bias + start + k);
                y[0] = __fadd_rn(y[0], b.x), y[1] = __fadd_rn(y[1], b.y);
                y[2] = __fadd_rn(y[2], b.z), y[3] = __fadd_rn(y[3], b.w);
            }
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw[item][k / 2]) : "f"(y[1]), "f"(y[0]));
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw[item][k / 2 + 1]) : "f"(y[3]), "f"(y[2]));
        }
        asm volatile("" ::: "memory");  // weights of the next row are read again: registers are few
    }
    meet();  // a block whose sums others read may not be gone
}
