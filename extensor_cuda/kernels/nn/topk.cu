// The largest values of rows, the largest first, and where they are: a warp for each row. Of equal
// values the first is taken first; NaN is larger than all others.
//
// Macros: NN_IN, the dtype (0: float32, 1: bfloat16); NN_EACH, values of a lane, up to 32.

#include "common/types.cuh"

#include "common/vector_types.cuh"

constexpr int kThreads = 256;
typedef ElementType<NN_IN> T;

// Rises with the value. Zeros are equal, and NaN.
DEVICE u32 rank_of(float v) {
    if (v != v) return ~0u;
    const u32 bits = __float_as_uint(v + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// x (rows, length) -> values and positions (rows, k).
extern "C" __global__ void __launch_bounds__(kThreads) topk(const T::Raw* __restrict__ x,
    T::Raw* __restrict__ values, i64* __restrict__ positions, i64 rows, int length, int k) {
    const i64 row = static_cast<i64>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    const u32 lane = threadIdx.x % 32;
    if (row >= rows) return;
    const T::Raw* const from = x + row * length;
    u32 ranks[NN_EACH];
#pragma unroll
    for (u32 n = 0; n < NN_EACH; ++n)
        ranks[n] = lane + 32 * n < length ? rank_of(T::wide(from[lane + 32 * n])) : 0u;
    for (int place = 0; place < k; ++place) {
        u32 most = 0, at = 0;
#pragma unroll
        for (u32 n = 0; n < NN_EACH; ++n)
            if (ranks[n] > most) most = ranks[n], at = lane + 32 * n;
        const u32 best = __reduce_max_sync(~0u, most);
        at = ~__reduce_max_sync(~0u, most == best ? ~at : 0u);
#pragma unroll
        for (u32 n = 0; n < NN_EACH; ++n)
            if (lane + 32 * n == at) ranks[n] = 0;
        if (lane == 0) {
            values[row * k + place] = from[at];
            positions[row * k + place] = at;
        }
    }
}
