// Rotary position embedding: components i and i + n of a head turn together, n half of its length.
// A thread has 8 pairs. The order of operations is the generic method's, so the bits are.
//
// Macro: NN_A, the dtype (0: float32, 1: bfloat16). Compiled with --fmad=false.

#include "common/types.cuh"

#include "common/vector_types.cuh"

constexpr int kThreads = 256;
typedef ElementType<NN_A> T;

// x (batch, heads, tokens, 2 n) with these strides and neighbouring components, all multiples of
// 8, 16-byte aligned; tables (tokens, n); out likewise, with strides of its own.
extern "C" __global__ void __launch_bounds__(kThreads) rotary(const T::Raw* __restrict__ x,
    const float* __restrict__ cosine, const float* __restrict__ sine, T::Raw* __restrict__ out,
    i64 rows, i64 heads, i64 tokens, i64 half, i64 by_batch, i64 by_head, i64 by_token,
    i64 out_by_batch, i64 out_by_head, i64 out_by_token) {
    const i64 item = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i64 groups = half / kVector, row = item / groups, at = item % groups * kVector;
    if (row >= rows) return;
    const i64 token = row % tokens, head = row / tokens % heads, batch = row / tokens / heads;
    const T::Raw* from = x + batch * by_batch + head * by_head + token * by_token + at;
    FloatVector a = T::load(from), b = T::load(from + half);
    const FloatVector c = ElementType<0>::load(cosine + token * half + at),
                      s = ElementType<0>::load(sine + token * half + at);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        const float low = a.v[k], high = b.v[k];
        a.v[k] = __fsub_rn(__fmul_rn(low, c.v[k]), __fmul_rn(high, s.v[k]));
        b.v[k] = __fadd_rn(__fmul_rn(high, c.v[k]), __fmul_rn(low, s.v[k]));
    }
    T::Raw* to = out + batch * out_by_batch + head * out_by_head + token * out_by_token + at;
    T::store(to, a);
    T::store(to + half, b);
}
