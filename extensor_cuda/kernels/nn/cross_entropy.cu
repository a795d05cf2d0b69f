// Softmax and cross-entropy of rows of scores, forward and backward. NN_WARPS warps share a row and
// read it twice, 8 values at a time where rows are 16-byte aligned.
//
// Macros: NN_WARPS, NN_IN (dtype of scores and their gradient; 0: float32, 1: bfloat16). Compiled
// with --fmad=false. Limits: cross_entropy.py.

#include "common/types.cuh"

#include "common/vector_types.cuh"
#include "nn/row_reduce.cuh"

typedef ElementType<NN_IN>::Raw Raw;

DEVICE bool in_groups(const Raw* x, const Raw* out, i64 classes) {
    return !((reinterpret_cast<u64>(x) | reinterpret_cast<u64>(out)) & 15) &&
           classes % kVector == 0;
}

// Calls f with each of this thread's values of a row.
template <class F>
DEVICE void each(const Raw* row, i64 classes, bool grouped, F f) {
    const int lane = threadIdx.x % kLanes;
    if (grouped) {
        for (i64 i = lane * kVector; i < classes; i += kLanes * kVector) {
            const FloatVector g = ElementType<NN_IN>::load(row + i);
#pragma unroll
            for (int k = 0; k < kVector; ++k) f(g.v[k]);
        }
    } else {
        for (i64 i = lane; i < classes; i += kLanes) f(ElementType<NN_IN>::wide(row[i]));
    }
}

// Losses (rows,), and each row's maximum and sum of exponentials (rows, 2).
extern "C" __global__ void __launch_bounds__(kThreads)
    losses(const Raw* __restrict__ x, const i64* __restrict__ labels, float* __restrict__ out,
        float2* __restrict__ kept, float smoothing, i64 rows, i64 classes) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    const int lane = threadIdx.x % kLanes;
    const bool real = row < rows;
    const Raw* mine = x + row * classes;
    const bool grouped = in_groups(x, x, classes);
    float top = __uint_as_float(0xFF800000u);  // -inf; a NaN shows in the sum
    if (real) each(mine, classes, grouped, [&](float v) { top = fmaxf(top, v); });
    top = over_row(top, Larger{});
    float sum = 0, shifts = 0;
    if (real)
        each(mine, classes, grouped, [&](float v) {
            const float shifted = __fsub_rn(v, top);
            sum = __fadd_rn(sum, expf(shifted));
            shifts = __fadd_rn(shifts, shifted);
        });
    sum = over_row(sum, Sum{});
    shifts = over_row(shifts, Sum{});
    if (!real || lane) return;
    const float log_sum = logf(sum);
    // An invalid label is refused elsewhere, but maybe only after this kernel runs.
    const i64 label = labels[row];
    const float score = label >= 0 && label < classes ? ElementType<NN_IN>::wide(mine[label])
                                                      : __uint_as_float(0x7FC00000u);
    float loss = __fsub_rn(log_sum, __fsub_rn(score, top));
    if (smoothing != 0) {
        const float uniform = __fsub_rn(log_sum, __fdiv_rn(shifts, static_cast<float>(classes)));
        loss =
            __fadd_rn(__fmul_rn(loss, __fsub_rn(1.0f, smoothing)), __fmul_rn(uniform, smoothing));
    }
    out[row] = loss;
    kept[row] = float2{top, sum};
}

// Classes before the label in each row (rows,); all of them for a label that is NaN or no class.
extern "C" __global__ void __launch_bounds__(kThreads) ranks(const Raw* __restrict__ x,
    const i64* __restrict__ labels, int* __restrict__ out, i64 rows, i64 classes) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    const int lane = threadIdx.x % kLanes;
    const bool real = row < rows;
    const Raw* mine = x + row * classes;
    float count = 0;  // exact: fewer than 2^24 classes
    if (real) {
        const i64 label = labels[row];
        const float own = label >= 0 && label < classes ? ElementType<NN_IN>::wide(mine[label])
                                                        : __uint_as_float(0x7FC00000u);
        const auto before = [&](i64 i, float v) { return !(v <= own) || (v == own && i < label); };
        if (in_groups(x, x, classes)) {
            for (i64 i = lane * kVector; i < classes; i += kLanes * kVector) {
                const FloatVector g = ElementType<NN_IN>::load(mine + i);
#pragma unroll
                for (int k = 0; k < kVector; ++k) count += before(i + k, g.v[k]);
            }
        } else {
            for (i64 i = lane; i < classes; i += kLanes)
                count += before(i, ElementType<NN_IN>::wide(mine[i]));
        }
    }
    count = over_row(count, Sum{});
    if (real && !lane) out[row] = static_cast<int>(count);
}

// (softmax - target) times each row's weight, `step` apart (0: one weight for all).
extern "C" __global__ void __launch_bounds__(kThreads) losses_grad(const float* __restrict__ weight,
    const Raw* __restrict__ x, const i64* __restrict__ labels, const float2* __restrict__ kept,
    Raw* __restrict__ out, float smoothing, i64 step, i64 rows, i64 classes) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    if (row >= rows) return;
    const float2 of_row = kept[row];
    const float factor = weight[row * step],
                least = __fdiv_rn(smoothing, static_cast<float>(classes));
    const float taken = __fsub_rn(1.0f, smoothing);
    const float inverse = __fdiv_rn(1.0f, of_row.y);
    const i64 label = labels[row];
    const auto slope = [&](i64 i, float v) {
        float d = __fmul_rn(expf(__fsub_rn(v, of_row.x)), inverse);
        if (i == label) d = __fsub_rn(d, taken);
        return __fmul_rn(__fsub_rn(d, least), factor);
    };
    const Raw* from = x + row * classes;
    Raw* to = out + row * classes;
    const int lane = threadIdx.x % kLanes;
    if (in_groups(x, out, classes)) {
        for (i64 i = lane * kVector; i < classes; i += kLanes * kVector) {
            FloatVector g = ElementType<NN_IN>::load(from + i);
#pragma unroll
            for (int k = 0; k < kVector; ++k) g.v[k] = slope(i + k, g.v[k]);
            ElementType<NN_IN>::store(to + i, g);
        }
    } else {
        for (i64 i = lane; i < classes; i += kLanes)
            to[i] = ElementType<NN_IN>::narrow(slope(i, ElementType<NN_IN>::wide(from[i])));
    }
}
