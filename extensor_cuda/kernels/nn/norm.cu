// LayerNorm (NN_CENTRED) and RMSNorm over rows of NN_LENGTH values: forward, and backward in
// float32. NN_WARPS warps hold a row in registers; sums run over a thread, then its warp, then
// warps.
//
// Macros: those, NN_IN (dtype of x; 0: float32, 1: bfloat16), NN_OUT (dtype of y and its gradient),
// NN_WEIGHT (of the weight, going forward).
// NN_STORED: the gradient reads x as 8-bit codes in flat blocks, with decode.cuh's macros and
// CODEC_BLOCK. Compiled with --fmad=false. Limits: norm.py.

#include "common/types.cuh"

#include "common/vector_types.cuh"

#if NN_STORED
#include "codec/decode_e8m0.cuh"

// What is read of a value, and the value: decoding branches, which loads must not wait for.
struct Given {
    typedef u8 Part;
    typedef u32 Word;
    const u8 *codes, *scales;
    DEVICE u32 operator[](i64 at) const {
        return codes[at] | static_cast<u32>(scales[at / CODEC_BLOCK]) << 8;
    }
    DEVICE static float value(u32 word) { return scaled_value(word & 255u, word >> 8); }
};
#else
struct Given {
    typedef float Part;
    typedef float Word;
    const float* x;
    const u8* none;
    DEVICE float operator[](i64 at) const { return x[at]; }
    DEVICE static float value(float word) { return word; }
};
#endif

typedef ElementType<NN_OUT>::Raw Raw;

constexpr int kThreads = 256, kRows = kThreads / 32 / NN_WARPS;  // rows of a block at a time
constexpr int kLanes = 32 * NN_WARPS,
              kEach = (NN_LENGTH + kLanes - 1) / kLanes;  // values of a thread

// Sums both over the threads of a row.
DEVICE void row_sums(float& a, float& b) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        a = __fadd_rn(a, __shfl_xor_sync(~0u, a, step));
        b = __fadd_rn(b, __shfl_xor_sync(~0u, b, step));
    }
#if NN_WARPS > 1
    __shared__ float2 sums[kThreads / 32];
    const int warp = threadIdx.x / 32, first = warp / NN_WARPS * NN_WARPS;
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[warp] = float2{a, b};
    __syncthreads();
    a = sums[first].x, b = sums[first].y;
#pragma unroll
    for (int w = 1; w < NN_WARPS; ++w)
        a = __fadd_rn(a, sums[first + w].x), b = __fadd_rn(b, sums[first + w].y);
#endif
}

// y = (x - mean) rstd weight + bias, where bias may be null. RMSNorm has neither mean nor bias.
// With an addend x is its sum with it, rounded, which becomes `total`.
extern "C" __global__ void __launch_bounds__(kThreads) normalize(const ElementType<NN_IN>::Raw* x,
    const ElementType<NN_WEIGHT>::Raw* weight, const float* __restrict__ bias, Raw* __restrict__ y,
    float* __restrict__ mean_of, float* __restrict__ rstd_of, const ElementType<NN_IN>::Raw* addend,
    ElementType<NN_IN>::Raw* __restrict__ total, float eps, i64 rows) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    const int lane = threadIdx.x % kLanes;
    const bool real = row < rows;
    typedef ElementType<NN_IN> In;
    In::Raw given[kEach], added[kEach];
    ElementType<NN_WEIGHT>::Raw scales[kEach];
    float v[kEach], sum = 0, squares = 0, none = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {  // all loads are in flight at once
        const int i = k * kLanes + lane;
        const i64 at = row * NN_LENGTH + i;
        const bool there = real && i < NN_LENGTH;
        given[k] = there ? x[at] : In::Raw();
        added[k] = there && addend ? addend[at] : In::Raw();
        scales[k] = i < NN_LENGTH ? weight[i] : ElementType<NN_WEIGHT>::Raw();
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const int i = k * kLanes + lane;
        v[k] = In::wide(given[k]);
        if (!addend || !real || i >= NN_LENGTH) continue;
        const In::Raw whole = In::narrow(__fadd_rn(v[k], In::wide(added[k])));
        total[row * NN_LENGTH + i] = whole, v[k] = In::wide(whole);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) sum = __fadd_rn(sum, v[k]);
#if NN_CENTRED
    row_sums(sum, none);
    const float mean = __fdiv_rn(sum, static_cast<float>(NN_LENGTH));
#else
    const float mean = 0;
#endif
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        if (NN_CENTRED) v[k] = k * kLanes + lane < NN_LENGTH ? __fsub_rn(v[k], mean) : 0.0f;
        squares = __fadd_rn(squares, __fmul_rn(v[k], v[k]));
    }
    row_sums(squares, none);
    const float var = __fdiv_rn(squares, static_cast<float>(NN_LENGTH));
    const float rstd = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(var, eps)));
    if (!real) return;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const int i = k * kLanes + lane;
        if (i >= NN_LENGTH) continue;
        const float factor = ElementType<NN_WEIGHT>::wide(scales[k]);
        float out = __fmul_rn(__fmul_rn(v[k], rstd), factor);
        if (NN_CENTRED && bias) out = __fadd_rn(out, bias[i]);
        y[row * NN_LENGTH + i] = ElementType<NN_OUT>::narrow(out);
    }
    if (lane == 0) {
        rstd_of[row] = rstd;
        if (NN_CENTRED) mean_of[row] = mean;
    }
}

// The gradient of x (NN_ADDS: added to another), and each block's partial sums for weight and bias,
// (blocks, NN_LENGTH).
extern "C" __global__ void __launch_bounds__(kThreads) normalize_grad(const Raw* __restrict__ g,
    const Given::Part* __restrict__ given, const u8* __restrict__ scales,
    const float* __restrict__ weight, const float* __restrict__ mean_of,
    const float* __restrict__ rstd_of, const float* __restrict__ addend, float* __restrict__ gx,
    float* __restrict__ gw, float* __restrict__ gb, i64 rows) {
    const Given x = {given, scales};
    const int lane = threadIdx.x % kLanes, mine = threadIdx.x / kLanes;
    float of_weight[kEach], of_bias[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) of_weight[k] = of_bias[k] = 0;
    for (i64 first = static_cast<i64>(blockIdx.x) * kRows; first < rows;
        first += static_cast<i64>(gridDim.x) * kRows) {
        const i64 row = first + mine;
        const bool real = row < rows;
        const float mean = NN_CENTRED && real ? mean_of[row] : 0.0f,
                    rstd = real ? rstd_of[row] : 0.0f;
        float h[kEach], e[kEach], along = 0, total = 0;
#if NN_STORED
        Given::Word words[kEach];
        Raw gradients[kEach];
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int i = k * kLanes + lane;
            const bool there = real && i < NN_LENGTH;
            words[k] = there ? x[row * NN_LENGTH + i] : 0;
            gradients[k] = there ? g[row * NN_LENGTH + i] : Raw();
        }
#define NN_READ(array, words, k, at) words[k]
#else
#define NN_READ(array, words, k, at) array[at]
#endif
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int i = k * kLanes + lane;
            const bool there = real && i < NN_LENGTH;
            const i64 at = row * NN_LENGTH + i;
            const float gradient =
                there ? ElementType<NN_OUT>::wide(NN_READ(g, gradients, k, at)) : 0.0f;
            h[k] = there ? __fmul_rn(__fsub_rn(Given::value(NN_READ(x, words, k, at)), mean), rstd)
                         : 0.0f;
            e[k] = there ? __fmul_rn(gradient, weight[i]) : 0.0f;
            along = __fadd_rn(along, __fmul_rn(e[k], h[k]));
            total = __fadd_rn(total, e[k]);
            of_weight[k] = __fadd_rn(of_weight[k], __fmul_rn(gradient, h[k]));
            of_bias[k] = __fadd_rn(of_bias[k], gradient);
        }
        row_sums(along, total);
        along = __fdiv_rn(along, static_cast<float>(NN_LENGTH));
        total = NN_CENTRED ? __fdiv_rn(total, static_cast<float>(NN_LENGTH)) : 0.0f;
#pragma unroll
        for (int k = 0; k < kEach; ++k) {
            const int i = k * kLanes + lane;
            if (!real || i >= NN_LENGTH) continue;
            const float part =
                __fmul_rn(rstd, __fsub_rn(__fsub_rn(e[k], total), __fmul_rn(h[k], along)));
            gx[row * NN_LENGTH + i] = NN_ADDS ? __fadd_rn(addend[row * NN_LENGTH + i], part) : part;
        }
    }
    const i64 to = static_cast<i64>(blockIdx.x) * NN_LENGTH;
    __shared__ float2 sums[kThreads];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
        const int i = k * kLanes + lane;
        float2 sum{of_weight[k], of_bias[k]};
        if (kRows > 1) {  // the block's rows, in order
            __syncthreads();
            sums[threadIdx.x] = sum;
            __syncthreads();
            for (int r = 1; mine == 0 && r < kRows; ++r) {
                const float2 next = sums[r * kLanes + lane];
                sum.x = __fadd_rn(sum.x, next.x), sum.y = __fadd_rn(sum.y, next.y);
            }
        }
        if (mine || i >= NN_LENGTH) continue;
        gw[to + i] = sum.x;
        if (NN_CENTRED) gb[to + i] = sum.y;
    }
}
