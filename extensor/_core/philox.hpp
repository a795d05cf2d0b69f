// Philox4x32-10 on vectors of counters: the words of extensor/random.py.
#pragma once

#include "kernels.hpp"
#include "simd.hpp"

namespace EXTENSOR_ISA {

// Low and high half of a * m, lane by lane.
INLINE void multiply(vu a, uint32_t m, vu& low, vu& high) {
#if defined(__AVX512F__)
    const __m512i v = reinterpret_cast<__m512i>(a), k = _mm512_set1_epi64(m);
    const __m512i even = _mm512_mul_epu32(v, k);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), k);
    low = reinterpret_cast<vu>(_mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32)));
    high = reinterpret_cast<vu>(_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd));
#elif defined(__AVX2__)
    const __m256i v = reinterpret_cast<__m256i>(a), k = _mm256_set1_epi64x(m);
    const __m256i even = _mm256_mul_epu32(v, k);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), k);
    low = reinterpret_cast<vu>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA));
    high = reinterpret_cast<vu>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA));
#else
    for (int i = 0; i < VL; ++i) {
        const uint64_t p = static_cast<uint64_t>(a[i]) * m;
        low[i] = static_cast<uint32_t>(p);
        high[i] = static_cast<uint32_t>(p >> 32);
    }
#endif
}

// The four output words of counters (call, block, stream).
INLINE void philox(vu call, vu block, const QuantStream& stream, vu (&out)[4]) {
    vu c0 = call, c1 = block, c2 = splat(stream.high0), c3 = splat(stream.high1);
    uint32_t k0 = stream.key0, k1 = stream.key1;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        vu low0, high0, low1, high1;
        multiply(c0, 0xD2511F53u, low0, high0);
        multiply(c2, 0xCD9E8D57u, low1, high1);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

#if EXTENSOR_LANES == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif EXTENSOR_LANES == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

// The words of consecutive calls, in order: `calls` per block from `first_call` on, for `blocks`
// blocks. Writes 4 * calls * blocks words and up to 4 * VL more.
static inline void philox_run(uint32_t* out, uint32_t first_call, uint32_t calls, uint32_t first_block,
                       int64_t blocks, const QuantStream& stream) {
    vu call, block = splat(first_block);
    for (int i = 0; i < VL; ++i) {
        call[i] = static_cast<uint32_t>(i) % calls;
        block[i] += static_cast<uint32_t>(i) / calls;
    }
    const uint32_t step = VL % calls, jump = VL / calls;
    for (int64_t done = 0; done < calls * blocks; done += VL, out += 4 * VL) {
        vu w[4];
        philox(call + first_call, block, stream, w);
        const vu a = __builtin_shufflevector(w[0], w[2], ZIP_LOW);
        const vu b = __builtin_shufflevector(w[0], w[2], ZIP_HIGH);
        const vu c = __builtin_shufflevector(w[1], w[3], ZIP_LOW);
        const vu d = __builtin_shufflevector(w[1], w[3], ZIP_HIGH);
        store(out, __builtin_shufflevector(a, c, ZIP_LOW));
        store(out + VL, __builtin_shufflevector(a, c, ZIP_HIGH));
        store(out + 2 * VL, __builtin_shufflevector(b, d, ZIP_LOW));
        store(out + 3 * VL, __builtin_shufflevector(b, d, ZIP_HIGH));
        call += step;
        block += jump;
        const vu over = reinterpret_cast<vu>(call >= calls);
        call -= over & calls;
        block -= over;  // minus all ones is plus one
    }
}

}  // namespace EXTENSOR_ISA
