// Rows of bfloat16 on their way through experts: to their places, through the gate, and back. Each
// sum and product is float32; what is left is rounded once where a comment says so. A thread has a
// vector of 8 values.
//
// Macros: EXPERTS_BIAS, whether experts have biases; EXPERTS_WEIGHT, the dtype of choices' weights
// (0: float32, 1: bfloat16). Compiled with --fmad=false.

#include "common/types.cuh"

#include "common/vector_types.cuh"
#include "common/gated.cuh"

constexpr int kThreads = 256;
typedef ElementType<1> T;

// A bias's values, added and rounded, where there are biases. `biases`: each expert's address.
DEVICE void add_bias(FloatVector& x, const u64* biases, i64 expert, i64 column) {
#if EXPERTS_BIAS
    const FloatVector b = T::load(reinterpret_cast<const u16*>(biases[expert]) + column);
#pragma unroll
    for (int k = 0; k < kVector; ++k) x.v[k] = T::wide(T::narrow(__fadd_rn(x.v[k], b.v[k])));
#endif
}

// out (places, width): each choice's token.
extern "C" __global__ void __launch_bounds__(kThreads) to_places(const u16* __restrict__ x,
    const int* __restrict__ source, u16* __restrict__ out, int places, int vectors, int active) {
    const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i64 row = at / vectors, vector = at - row * vectors;
    if (row >= places) return;
    reinterpret_cast<uint4*>(out)[at] = reinterpret_cast<const uint4*>(
        x)[static_cast<i64>(source[row] / active) * vectors + vector];
}

// x (places, 2 width), a gate and what it multiplies, and biases of (2 experts) -> out (places,
// width), rounded once more than their sums.
extern "C" __global__ void __launch_bounds__(kThreads) gate(const u16* __restrict__ x,
    const int* __restrict__ source, const i64* __restrict__ chosen, const u64* __restrict__ biases,
    u16* __restrict__ out, int places, int vectors, float alpha, float limit, float shift) {
    const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i64 row = at / vectors, column = (at - row * vectors) * kVector;
    if (row >= places) return;
    const u16* const from = x + (row * 2 * vectors) * kVector + column;
    FloatVector a = T::load(from), b = T::load(from + vectors * kVector);
    const i64 expert = EXPERTS_BIAS ? chosen[source[row]] : 0;
    add_bias(a, biases, 2 * expert, column), add_bias(b, biases, 2 * expert + 1, column);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        const Gated v = gated(a.v[k], b.v[k], alpha, limit, shift);
        a.v[k] = __fmul_rn(__fmul_rn(v.a, v.s), v.u);
    }
    T::store(out + at * kVector, a);
}

// out (tokens, width), in the weights' dtype: the sum of each token's choices times their weights,
// the first one's first. What is added is rounded, and so is the sum.
extern "C" __global__ void __launch_bounds__(kThreads) from_places(const u16* __restrict__ x,
    const int* __restrict__ places, const i64* __restrict__ chosen,
    const ElementType<EXPERTS_WEIGHT>::Raw* __restrict__ weights, const u64* __restrict__ biases,
    ElementType<EXPERTS_WEIGHT>::Raw* __restrict__ out, int tokens, int vectors, int active) {
    const i64 at = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i64 token = at / vectors, column = (at - token * vectors) * kVector;
    if (token >= tokens) return;
    FloatVector sum = {};
#pragma unroll 4
    for (int a = 0; a < active; ++a) {
        const i64 choice = token * active + a;
        FloatVector y = T::load(x + static_cast<i64>(places[choice]) * vectors * kVector + column);
        add_bias(y, biases, chosen[choice], column);
        typedef ElementType<EXPERTS_WEIGHT> To;
        const float weight = To::wide(weights[choice]);
#pragma unroll
        for (int k = 0; k < kVector; ++k)
            sum.v[k] = __fadd_rn(sum.v[k], To::wide(To::narrow(__fmul_rn(weight, y.v[k]))));
    }
    ElementType<EXPERTS_WEIGHT>::store(out + at * kVector, sum);
}
