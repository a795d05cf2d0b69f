// Softmax and cross-entropy of rows of float32 scores, forward and backward. WARPS warps have a row
// and read it twice. No headers; compiled with --fmad=false. Bounds: cross_entropy.py.

typedef unsigned int u32;
typedef long long i64;

#include "over_row.cuh"

// Losses (rows), and each row's maximum and sum of exponentials, (rows, 2).
extern "C" __global__ void __launch_bounds__(kThreads)
losses(const float* __restrict__ x, const i64* __restrict__ labels, float* __restrict__ out,
       float2* __restrict__ kept, float smoothing, i64 rows, i64 classes) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    const int lane = threadIdx.x % kLanes;
    const bool real = row < rows;
    const float* mine = x + row * classes;
    float top = __uint_as_float(0xFF800000u);  // -inf; a NaN shows in the sum
    if (real)
        for (i64 i = lane; i < classes; i += kLanes) top = fmaxf(top, mine[i]);
    top = over_row(top, Larger{});
    float sum = 0, shifts = 0;
    if (real)
        for (i64 i = lane; i < classes; i += kLanes) {
            const float shifted = __fsub_rn(mine[i], top);
            sum = __fadd_rn(sum, expf(shifted));
            shifts = __fadd_rn(shifts, shifted);
        }
    sum = over_row(sum, Sum{});
    shifts = over_row(shifts, Sum{});
    if (!real || lane) return;
    const float log_sum = logf(sum);
    // A label that is no class is refused elsewhere, but not always before this runs.
    const i64 label = labels[row];
    const float score = label >= 0 && label < classes ? mine[label] : __uint_as_float(0x7FC00000u);
    float loss = __fsub_rn(log_sum, __fsub_rn(score, top));
    if (smoothing != 0) {
        const float uniform = __fsub_rn(log_sum, __fdiv_rn(shifts, static_cast<float>(classes)));
        loss = __fadd_rn(__fmul_rn(loss, __fsub_rn(1.0f, smoothing)), __fmul_rn(uniform, smoothing));
    }
    out[row] = loss;
    kept[row] = float2{top, sum};
}

// (softmax - target) times the weight of each row, `step` apart (0: one for all).
extern "C" __global__ void __launch_bounds__(kThreads)
losses_grad(const float* __restrict__ weight, const float* __restrict__ x, const i64* __restrict__ labels,
            const float2* __restrict__ kept, float* __restrict__ out, float smoothing, i64 step, i64 rows,
            i64 classes) {
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + threadIdx.x / kLanes;
    if (row >= rows) return;
    const float2 of_row = kept[row];
    const float factor = weight[row * step], least = __fdiv_rn(smoothing, static_cast<float>(classes));
    const float taken = __fsub_rn(1.0f, smoothing);
    const i64 label = labels[row];
    for (i64 i = threadIdx.x % kLanes; i < classes; i += kLanes) {
        float d = __fdiv_rn(expf(__fsub_rn(x[row * classes + i], of_row.x)), of_row.y);
        if (i == label) d = __fsub_rn(d, taken);
        out[row * classes + i] = __fmul_rn(__fsub_rn(d, least), factor);
    }
}
