// Softmax of rows, forward and backward, alone and between the products of attention. NN_WARPS
// warps hold a row in registers, NN_THREAD_VALUES values per thread.
//
// Macros: those, NN_IN (dtype of `softmax` and its gradient; 0: float32, 1: bfloat16). Compiled
// with --fmad=false. Limits: softmax.py.

#include "common/types.cuh"

#include "common/vector_types.cuh"
#include "nn/row_reduce.cuh"

typedef ElementType<NN_IN>::Raw Raw;
DEVICE float wide(float v) { return v; }
DEVICE float wide(u16 v) { return ElementType<1>::wide(v); }

// Softmax of a row's first `seen` values times `scale`; the others become 0. A NaN shows in the
// sum.
struct Row {
    float v[NN_THREAD_VALUES], top, sum;

    template <class T>
    DEVICE void take(const T* from, i64 seen, float scale) {
        const int lane = threadIdx.x % kLanes;
        top = __uint_as_float(0xFF800000u);  // -inf
#pragma unroll
        for (int k = 0; k < NN_THREAD_VALUES; ++k) {
            const i64 i = k * kLanes + lane;
            v[k] = i < seen ? __fmul_rn(wide(from[i]), scale) : __uint_as_float(0xFF800000u);
            top = fmaxf(top, v[k]);
        }
        top = over_row(top, Larger{});
        sum = 0;
#pragma unroll
        for (int k = 0; k < NN_THREAD_VALUES; ++k) {
            v[k] = k * kLanes + lane < seen ? expf(__fsub_rn(v[k], top)) : 0.0f;
            sum = __fadd_rn(sum, v[k]);
        }
        sum = over_row(sum, Sum{});
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    softmax(const Raw* __restrict__ x, Raw* __restrict__ out, i64 rows, i64 length) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    const bool real = row < rows;
    Row mine;
    mine.take(x + (real ? row : 0) * length, length, 1.0f);
    if (!real) return;
#pragma unroll
    for (int k = 0; k < NN_THREAD_VALUES; ++k) {
        const i64 i = k * kLanes + threadIdx.x % kLanes;
        if (i < length)
            out[row * length + i] = ElementType<NN_IN>::narrow(__fdiv_rn(mine.v[k], mine.sum));
    }
}

// out (g - sum(g out)).
extern "C" __global__ void __launch_bounds__(kThreads, 1) softmax_grad(const Raw* __restrict__ g,
    const Raw* __restrict__ out, Raw* __restrict__ gx, i64 rows, i64 length) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    const bool real = row < rows;
    float p[NN_THREAD_VALUES], d[NN_THREAD_VALUES], along = 0;
#pragma unroll
    for (int k = 0; k < NN_THREAD_VALUES; ++k) {
        const i64 i = k * kLanes + threadIdx.x % kLanes;
        const bool there = real && i < length;
        p[k] = there ? wide(out[row * length + i]) : 0.0f;
        d[k] = there ? wide(g[row * length + i]) : 0.0f;
        along = __fadd_rn(along, __fmul_rn(p[k], d[k]));
    }
    along = over_row(along, Sum{});
#pragma unroll
    for (int k = 0; k < NN_THREAD_VALUES; ++k) {
        const i64 i = k * kLanes + threadIdx.x % kLanes;
        if (real && i < length)
            gx[row * length + i] =
                ElementType<NN_IN>::narrow(__fmul_rn(p[k], __fsub_rn(d[k], along)));
    }
}

// How many keys a row's query sees. The last of `queries` rows sees all; 0: every row does.
DEVICE i64 seen_by(i64 row, i64 queries, i64 keys) {
    return queries ? row % queries + 1 + keys - queries : keys;
}

// Scores q k^T become probabilities in place; each row's largest score and inverse sum are stored.
extern "C" __global__ void __launch_bounds__(kThreads, 1) attend(
    float* scores, float2* __restrict__ stats, float scale, i64 queries, i64 rows, i64 keys) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    const bool real = row < rows;
    float* from = scores + (real ? row : 0) * keys;
    Row mine;
    mine.take(from, seen_by(row, queries, keys), scale);
    const float inverse = __fdiv_rn(1.0f, mine.sum);
    if (!real) return;
#pragma unroll
    for (int k = 0; k < NN_THREAD_VALUES; ++k) {
        const i64 i = k * kLanes + threadIdx.x % kLanes;
        if (i < keys) from[i] = __fmul_rn(mine.v[k], inverse);
    }
    if (threadIdx.x % kLanes == 0) stats[row] = float2{mine.top, inverse};
}

// Scores become probabilities p, and d = g v^T becomes the scores' gradient scale p (d - delta),
// both in place. `along` holds delta, a row's sum of g times the output.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_grad(float* __restrict__ scores, float* __restrict__ d, const float2* __restrict__ stats,
        const float* __restrict__ along, float scale, i64 queries, i64 rows, i64 keys) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    if (row >= rows) return;
    const float2 of_row = stats[row];
    const float t = along[row];
    const i64 seen = seen_by(row, queries, keys);
    for (i64 i = threadIdx.x % kLanes; i < keys; i += kLanes) {
        const float shifted = __fsub_rn(__fmul_rn(scores[row * keys + i], scale), of_row.x);
        const float p = i < seen ? __fmul_rn(expf(shifted), of_row.y) : 0.0f;
        const float slope = __fmul_rn(__fmul_rn(__fsub_rn(d[row * keys + i], t), p), scale);
        scores[row * keys + i] = p;
        d[row * keys + i] = i < seen ? slope : 0.0f;
    }
}
