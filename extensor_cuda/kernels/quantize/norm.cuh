// RMSNorm (QUANT_NORM 1) or LayerNorm (QUANT_NORM 2) fused with quantization of its result, rounded
// to bfloat16 first. Shared by norm_rowwise.cuh and norm_rowwise_columnwise.cuh. Macros: QUANT_
// (norm_quantize.py).

#include "common/barriers.cuh"
// ---- after barriers ----  (the emulator has its own)

#if QUANT_NORM_IN == 0
typedef u32 NormInput;
#else
typedef u16 NormInput;
#endif
constexpr int kInputWords = sizeof(NormInput) * kChunk / 4, kInputVector = 16 / sizeof(NormInput);
constexpr int kSide = QUANT_CTA_COLUMNS / kChunk;  // threads across a tile's columns
constexpr int kRowThreads = QUANT_ROW_THREADS, kRowWarps = kRowThreads / 32;
constexpr int kEach = QUANT_CTA_ROWS * kSide / kRowThreads;  // rows of a thread: a power of two

struct Norm {
    const void* x;
    u8 *codes[2], *scales[2];
    u64 *counters, *posts;  // posts: zeros at first
    const float *weight, *bias;
    float *mean, *rstd;
    i64 rows, columns;
    float eps;
};

DEVICE float given(const u32* words, int k) {
#if QUANT_NORM_IN == 0
    return float_of(words[k]);
#else
    return float_of(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
#endif
}

// Loads 16 bytes of the tile, zeros beyond the matrix.
DEVICE void load_vector(u32* words, const NormInput* from, bool inside) {
    uint4 four = {0, 0, 0, 0};
    if (QUANT_WHOLE || inside) four = *reinterpret_cast<const uint4*>(from);
    words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
}

// Loads a chunk of the tile, zeros beyond the matrix. `real`: columns from its first one on.
DEVICE void load_chunk(u32 (&words)[kInputWords], const NormInput* from, i64 real) {
#pragma unroll
    for (int v = 0; v < kInputWords / 4; ++v)
        load_vector(words + 4 * v, from + v * kInputVector, v * kInputVector < real);
}

DEVICE void load_factors(
    const Norm& p, float (&weight)[kChunk], float (&bias)[kChunk], i64 start, i64 real) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 4) {
        float4 w = {0, 0, 0, 0}, b = {0, 0, 0, 0};
        if (QUANT_WHOLE || k < real) {
            w = __ldg(reinterpret_cast<const float4*>(p.weight + start + k));
            if (QUANT_NORM_BIAS) b = __ldg(reinterpret_cast<const float4*>(p.bias + start + k));
        }
        weight[k] = w.x, weight[k + 1] = w.y, weight[k + 2] = w.z, weight[k + 3] = w.w;
        bias[k] = b.x, bias[k + 1] = b.y, bias[k + 2] = b.z, bias[k + 3] = b.w;
    }
}

// Normalizes a chunk of a row, of which `real` values are inside the matrix.
DEVICE void normalize(u32 (&raw)[kChunk / 2], const u32 (&words)[kInputWords], float middle,
    float factor, const float (&weight)[kChunk], const float (&bias)[kChunk], i64 real) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 2) {
        float y[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float v = given(words, k + i);
            if (QUANT_NORM == 2) v = __fsub_rn(v, middle);
            y[i] = __fmul_rn(__fmul_rn(v, factor), weight[k + i]);
            if (QUANT_NORM_BIAS) y[i] = __fadd_rn(y[i], bias[k + i]);
        }
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(raw[k / 2]) : "f"(y[1]), "f"(y[0]));
        if (!QUANT_WHOLE && k >= real) raw[k / 2] = 0;
    }
}

// A block's tiles, which use the stages of its shared memory in turn.
struct Tiles {
    const Norm& p;
    NormInput* stages;
    u32 *left_by, ready;  // warps that have released each stage; its barrier
    i64 left;             // the block's first column
    int from, step, count;

    DEVICE i64 top(int i) const { return (from + static_cast<i64>(i) * step) * QUANT_CTA_ROWS; }
    DEVICE NormInput* tile(int i) const {
        return stages + i % QUANT_STAGES * QUANT_CTA_ROWS * QUANT_CTA_COLUMNS;
    }

    // Called by one warp.
    DEVICE void fill(int i) const {
        const int wide =
            QUANT_WHOLE
                ? QUANT_CTA_COLUMNS
                : static_cast<int>(min(static_cast<i64>(QUANT_CTA_COLUMNS), p.columns - left));
        const int tile_rows =
            QUANT_WHOLE ? QUANT_CTA_ROWS
                        : static_cast<int>(min(static_cast<i64>(QUANT_CTA_ROWS), p.rows - top(i)));
        const int lane = threadIdx.x % 32;
        const u32 barrier = ready + 8 * (i % QUANT_STAGES);
        if (lane == 0) barrier_expect_bytes(barrier, tile_rows * wide * sizeof(NormInput));
        __syncwarp();
        for (int row = lane; row < tile_rows; row += 32)
            bulk_load(shared_address(tile(i) + row * QUANT_CTA_COLUMNS),
                static_cast<const NormInput*>(p.x) + (top(i) + row) * p.columns + left,
                wide * sizeof(NormInput), barrier);
    }

    // Called by each of kWarps warps; the last one refills the stage.
    template <int kWarps>
    DEVICE void leave(int i) const {
        if (i + QUANT_STAGES >= count) return;
        __threadfence_block();
        __syncwarp();
        u32 others = threadIdx.x % 32 == 0 ? atomicAdd(left_by + i % QUANT_STAGES, 1u) : 0;
        others = __shfl_sync(~0u, others, 0);
        if (others % kWarps != kWarps - 1) return;
        __threadfence_block();
        fill(i + QUANT_STAGES);
    }
};

// Reduces each lane's sums of kSums rows, so that lane l has the warp's sum of row l / (32 /
// kSums). The order, lanes 16 apart first, does not depend on kSums.
template <int kSums>
DEVICE float over_warp(float (&sums)[kSums]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = kSums / 2, apart = 16; half; half /= 2, apart /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const bool upper = lane & apart;
            const float keep = upper ? sums[i + half] : sums[i],
                        pass = upper ? sums[i] : sums[i + half];
            sums[i] = __fadd_rn(keep, __shfl_xor_sync(~0u, pass, apart));
        }
#pragma unroll
    for (int apart = 16 / kSums; apart; apart /= 2)
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(~0u, sums[0], apart));
    return sums[0];
}
