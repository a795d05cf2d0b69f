// Rows of bfloat16 on their way through experts: to their places, through the gate, and back. Each
// sum and product is float32; what is left is rounded once where a comment says so. A thread has a
// vector of 8 values, which 32 bits count.
//
// Macros: EXPERTS_BIAS, whether experts have biases; EXPERTS_WEIGHT, the dtype of choices' weights
// (0: float32, 1: bfloat16). Compiled with --fmad=false.

#include "common/types.cuh"

#include "codec/decode_bf16x2.cuh"
#include "common/vector_types.cuh"
#include "common/gated.cuh"

constexpr int kThreads = 256;
typedef ElementType<1> T;

DEVICE uint4 load_words(const u16* from) { return *reinterpret_cast<const uint4*>(from); }

DEVICE FloatVector values_of(const uint4& w) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    FloatVector out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out.v[2 * i] = __uint_as_float(words[i] << 16);
        out.v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    }
    return out;
}

// a b + c, rounded to bfloat16 once. Of a sum, or of a product, that is what rounding float32
// gives.
DEVICE uint4 fma_words(const uint4& a, u32 b, const uint4& c) {
    return uint4{fma_bf16x2(a.x, b, c.x), fma_bf16x2(a.y, b, c.y), fma_bf16x2(a.z, b, c.z),
        fma_bf16x2(a.w, b, c.w)};
}

// Values and a bias, where there are biases. `biases`: each expert's address.
DEVICE uint4 with_bias(const uint4& x, const u64* biases, i64 expert, u32 column) {
#if EXPERTS_BIAS
    constexpr u32 kOnes = 0x3F803F80u;
    return fma_words(x, kOnes, load_words(reinterpret_cast<const u16*>(biases[expert]) + column));
#else
    return x;
#endif
}

// out (places, width): each choice's token.
extern "C" __global__ void __launch_bounds__(kThreads) to_places(const u16* __restrict__ x,
    const int* __restrict__ source, u16* __restrict__ out, u32 places, u32 vectors, u32 active) {
    const u32 at = blockIdx.x * kThreads + threadIdx.x, row = at / vectors;
    if (row >= places) return;
    const u32 token = static_cast<u32>(source[row]) / active;
    reinterpret_cast<uint4*>(out)[at] =
        reinterpret_cast<const uint4*>(x)[token * vectors + (at - row * vectors)];
}

// x (places, 2 width), a gate and what it multiplies, and biases of (2 experts) -> out (places,
// width), rounded once more than their sums.
extern "C" __global__ void __launch_bounds__(kThreads) gate(const u16* __restrict__ x,
    const int* __restrict__ source, const i64* __restrict__ chosen, const u64* __restrict__ biases,
    u16* __restrict__ out, u32 places, u32 vectors, float alpha, float limit, float shift) {
    const u32 at = blockIdx.x * kThreads + threadIdx.x, row = at / vectors,
              column = (at - row * vectors) * kVector;
    if (row >= places) return;
    const u16* const from = x + static_cast<i64>(at + row * vectors) * kVector;
    const uint4 first = load_words(from), second = load_words(from + vectors * kVector);
    const i64 expert = EXPERTS_BIAS ? chosen[source[row]] : 0;
    FloatVector a = values_of(with_bias(first, biases, 2 * expert, column));
    const FloatVector b = values_of(with_bias(second, biases, 2 * expert + 1, column));
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        const Gated v = gated(a.v[k], b.v[k], alpha, limit, shift);
        a.v[k] = __fmul_rn(__fmul_rn(v.a, v.s), v.u);
    }
    T::store(out + static_cast<i64>(at) * kVector, a);
}

// out (tokens, width), in the weights' dtype: the sum of each token's choices times their weights,
// the first one's first. What is added is rounded, and so is the sum.
extern "C" __global__ void __launch_bounds__(kThreads) from_places(const u16* __restrict__ x,
    const int* __restrict__ places, const i64* __restrict__ chosen,
    const ElementType<EXPERTS_WEIGHT>::Raw* __restrict__ weights, const u64* __restrict__ biases,
    ElementType<EXPERTS_WEIGHT>::Raw* __restrict__ out, u32 tokens, u32 vectors, u32 active) {
    const u32 at = blockIdx.x * kThreads + threadIdx.x, token = at / vectors,
              column = (at - token * vectors) * kVector;
    if (token >= tokens) return;
    FloatVector sum = {};
#pragma unroll 4
    for (u32 a = 0; a < active; ++a) {
        const u32 choice = token * active + a;
        const uint4 made =
            load_words(x + (static_cast<i64>(places[choice]) * vectors * kVector + column));
        const uint4 words = with_bias(made, biases, EXPERTS_BIAS ? chosen[choice] : 0, column);
#if EXPERTS_WEIGHT == 1
        const u32 weight = repeat_bf16x2(weights[choice]);
        const FloatVector y = values_of(fma_words(words, weight, uint4{0, 0, 0, 0}));
#else
        const float weight = weights[choice];
        FloatVector y = values_of(words);
#pragma unroll
        for (int k = 0; k < kVector; ++k) y.v[k] = __fmul_rn(weight, y.v[k]);
#endif
#pragma unroll
        for (int k = 0; k < kVector; ++k) sum.v[k] = __fadd_rn(sum.v[k], y.v[k]);
    }
    ElementType<EXPERTS_WEIGHT>::store(out + static_cast<i64>(at) * kVector, sum);
}
