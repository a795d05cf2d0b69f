// The mask of dropout: a value is kept if its random 32-bit word is at least `least`. No macros.
//
// Words are those of Philox 4x64-10 (Salmon et al., SC'11) as in numpy.random.Philox: a block of
// eight words has the counter (number + 1, calls, 0, 0) and the key (seed, 0).

#include "common/types.cuh"

constexpr int kThreads = 256, kWords = 8;

DEVICE void philox64(u64 (&c)[4], u64 key) {
    u64 k0 = key, k1 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        constexpr u64 m0 = 0xD2E7470EE14C6C93ull, m1 = 0xCA5A826395121157ull;
        const u64 high0 = __umul64hi(m0, c[0]), low0 = m0 * c[0], high1 = __umul64hi(m1, c[2]),
                  low1 = m1 * c[2];
        c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
        k0 += 0x9E3779B97F4A7C15ull, k1 += 0xBB67AE8584CAA73Bull;
    }
}

// draws: the seed, and the number of earlier calls. Writes 0 or `factor`; a thread has eight
// values.
extern "C" __global__ void __launch_bounds__(kThreads) dropout_mask(
    const u64* __restrict__ draws, float* __restrict__ mask, i64 size, u32 least, float factor) {
    const i64 block = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x, start = block * kWords;
    if (start >= size) return;
    u64 words[4] = {static_cast<u64>(block) + 1, draws[1], 0, 0};
    philox64(words, draws[0]);
    float found[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k)
        found[k] = static_cast<u32>(words[k / 2] >> k % 2 * 32) >= least ? factor : 0.0f;
    if (start + kWords <= size) {  // allocations are 16-byte aligned
        float4* to = reinterpret_cast<float4*>(mask + start);
        to[0] = float4{found[0], found[1], found[2], found[3]};
        to[1] = float4{found[4], found[5], found[6], found[7]};
    } else {
        for (int k = 0; k < size - start; ++k) mask[start + k] = found[k];
    }
}
