// Rotary position embedding: components i and i + n of a head turn together, n half of its length.
// A thread has 8 pairs. The order of operations is the generic method's, so the bits are.
//
// Macro: NN_A, the dtype (0: float32, 1: bfloat16). Compiled with --fmad=false.

#include "common/types.cuh"

#include "common/vector_types.cuh"

constexpr int kThreads = 256;
typedef ElementType<NN_A> T;

// Rows of 2 n neighbouring components along three axes: of each its length and how far apart its
// neighbours lie in x, out and the tables. The nearest in memory comes first, so that a warp reads
// what lies together. Distances are multiples of 8, arrays 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads) rotary(const T::Raw* __restrict__ x,
    const float* __restrict__ cosine, const float* __restrict__ sine, T::Raw* __restrict__ out,
    i64 rows, i64 half, i64 length0, i64 x0, i64 out0, i64 table0, i64 length1, i64 x1, i64 out1,
    i64 table1, i64, i64 x2, i64 out2, i64 table2) {
    const u32 item = blockIdx.x * kThreads + threadIdx.x;  // below 2^32: rotary.py
    const u32 groups = static_cast<u32>(half / kVector), row = item / groups;
    if (row >= rows) return;
    const u32 n = static_cast<u32>(length0), m = static_cast<u32>(length1);
    const u32 outer = row / n, third = outer / m;
    const i64 i = row - outer * n, j = outer - third * m, k = third;
    const i64 at = (item - row * groups) * kVector;
    const i64 angle = i * table0 + j * table1 + k * table2 + at;
    const T::Raw* from = x + i * x0 + j * x1 + k * x2 + at;
    FloatVector a = T::load(from), b = T::load(from + half);
    const FloatVector c = ElementType<0>::load(cosine + angle),
                      s = ElementType<0>::load(sine + angle);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
        const float low = a.v[e], high = b.v[e];
        a.v[e] = __fsub_rn(__fmul_rn(low, c.v[e]), __fmul_rn(high, s.v[e]));
        b.v[e] = __fadd_rn(__fmul_rn(high, c.v[e]), __fmul_rn(low, s.v[e]));
    }
    T::Raw* to = out + i * out0 + j * out1 + k * out2 + at;
    T::store(to, a);
    T::store(to + half, b);
}
