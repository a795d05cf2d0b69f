// gate sigmoid(alpha gate) up and its gradients, computed in float32 and rounded once. A thread has
// a vector of 8 values.
//
// Macros: NN_A, the dtype of gate and up; NN_B, that of the gradient; NN_OUT, of the results (0:
// float32, 1: bfloat16). Compiled with --fmad=false. Limits: gated_silu.py.

#include "common/types.cuh"

#include "common/vector_types.cuh"
#include "common/gated.cuh"

constexpr int kThreads = 256;
typedef ElementType<NN_A> A;
typedef ElementType<NN_B> B;
typedef ElementType<NN_OUT> Out;

template <class T>
DEVICE FloatVector read(const typename T::Raw* from, i64 first, i64 count, bool whole) {
    if (whole) return T::load(from + first);
    FloatVector g;
#pragma unroll
    for (int k = 0; k < kVector; ++k) g.v[k] = first + k < count ? T::wide(from[first + k]) : 0.0f;
    return g;
}

DEVICE void write(Out::Raw* to, const FloatVector& g, i64 first, i64 count, bool whole) {
    if (whole) {
        Out::store(to + first, g);
        return;
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k)
        if (first + k < count) to[first + k] = Out::narrow(g.v[k]);
}

// All arrays are 16-byte aligned. Rows of `width` values are so far apart in gate and up; unless
// there is one row, all three are multiples of 8.
extern "C" __global__ void __launch_bounds__(kThreads)
    gated_silu(const A::Raw* gate, const A::Raw* up, Out::Raw* __restrict__ out, float alpha,
        float limit, float shift, i64 count, i64 width, i64 gate_pitch, i64 up_pitch) {
    const i64 first = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
    const bool whole = first + kVector <= count;
    const i64 row = count == width ? 0 : first / width, at = first - row * width;
    FloatVector x = read<A>(gate + row * gate_pitch, at, count, whole),
                y = read<A>(up + row * up_pitch, at, count, whole);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        const Gated v = gated(x.v[k], y.v[k], alpha, limit, shift);
        x.v[k] = __fmul_rn(__fmul_rn(v.a, v.s), v.u);
    }
    write(out, x, first, count, whole);
}

extern "C" __global__ void __launch_bounds__(kThreads) gated_silu_grad(const B::Raw* __restrict__ g,
    const A::Raw* __restrict__ gate, const A::Raw* __restrict__ up, Out::Raw* __restrict__ to_gate,
    Out::Raw* __restrict__ to_up, float alpha, float limit, float shift, i64 count) {
    const i64 first = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) * kVector;
    const bool whole = first + kVector <= count;
    FloatVector d = read<B>(g, first, count, whole), x = read<A>(gate, first, count, whole),
                y = read<A>(up, first, count, whole);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        const Gated v = gated(x.v[k], y.v[k], alpha, limit, shift);
        const float silu = __fmul_rn(v.a, v.s);
        const float slope = __fadd_rn(
            v.s, __fmul_rn(__fmul_rn(alpha, silu), __fsub_rn(1.0f, v.s)));  // of silu in a
        const float of_gate = __fmul_rn(__fmul_rn(d.v[k], v.u), slope);
        const float of_up = __fmul_rn(d.v[k], silu);
        const bool beyond = x.v[k] > limit, outside = fabsf(y.v[k]) > limit;
        x.v[k] = beyond ? 0.0f : of_gate;
        y.v[k] = outside ? 0.0f : of_up;
    }
    write(to_gate, x, first, count, whole);
    write(to_up, y, first, count, whole);
}
