// Eight-bit codes of whole tiles of 32 on AVX-512 under scales that are powers of two, to nearest
// even: as in blocks_bf16_avx512.hpp, 32 values to a register.
//
// Float32 values are cut to 16 bits, and the rest of each stays beside them: where it is not zero
// there is no tie.
#pragma once

#include "quantize/blocks_avx512.hpp"
#include "quantize/philox.hpp"

namespace EXTENSOR_ISA {

template <int Index, class T>
struct Fp8Encoder {
    static constexpr Element e = kElements[Index];
    static constexpr bool kCovered =
        e.is_float && e.bits == 8 && kFloatType<T> != FloatType::float16;
    static constexpr int kFrom = e.min_exponent - 1;  // the binade below the smallest normal number
    static constexpr int kDrop = 7 - e.mantissa_bits;
    static constexpr int kHalf = (1 << (kDrop - 1)) - 1;  // of the last place, less one

    struct Cut {
        __m512i upper, rest;
    };
    static INLINE Cut cut(const bfloat16* x) {
        return {_mm512_loadu_si512(x), _mm512_setzero_si512()};
    }
    // Of x[i] in the lower half of lane i, of x[i + VL] in its upper half.
    static INLINE Cut cut(const float* x) {
        const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + VL);
        const __mmask32 odd = 0xAAAAAAAAu;
        return {_mm512_mask_blend_epi16(odd, _mm512_srli_epi32(a, 16), b),
                _mm512_mask_blend_epi16(odd, a, _mm512_slli_epi32(b, 16))};
    }

    // Codes without their signs, as they are stored or above the largest; below the normal numbers
    // whatever is below the smallest of them. `from`: the bits that they count from, less kHalf.
    static INLINE __m512i codes(__m512i magnitude, __m512i rest, __m512i from) {
        const __m512i d = _mm512_subs_epu16(magnitude, from);
        // One more where the last place is odd or the rest is not zero. Only a tie notices.
        const __m512i more =
            _mm512_ternarylogic_epi32(rest, d, _mm512_set1_epi16(1 << kDrop), 0xF8);
        return _mm512_srli_epi16(_mm512_add_epi16(d, _mm512_min_epu16(more, _mm512_set1_epi16(1))),
                                 kDrop);
    }

    static void code(const T* x, const Scales& s, const BlockRandomWords*, uint8_t* to,
                     EncodeCounts& counts) {
        alignas(64) uint32_t starts[VL];
        const vu from = ((s.stored + static_cast<uint32_t>(kFrom)) << 7) - uint32_t{kHalf};
        EXTENSOR_ISA::store(starts, from * 0x10001u);
        const __m512i top = _mm512_set1_epi8(e.max_code), ones = _mm512_set1_epi16(0x7FFF);
        const __m512i normal = _mm512_set1_epi8(1 << e.mantissa_bits);
        int64_t saturated = 0;
        uint32_t again = 0;  // a bit for each four tiles with numbers below the normal ones
#pragma GCC unroll 1
        for (int t = 0; t < VL; t += 4) {
            prefetch_stream(x + 32 * t, 128);
            __m512i small = {};
#pragma GCC unroll 2
            for (int k = t; k < t + 4; k += 2) {
                const Cut v = cut(x + 32 * k), w = cut(x + 32 * k + 32);
                const __m512i v_magnitude = _mm512_and_si512(v.upper, ones);
                const __m512i w_magnitude = _mm512_and_si512(w.upper, ones);
                const __m512i n = _mm512_packus_epi16(
                    codes(v_magnitude, v.rest, _mm512_set1_epi32(static_cast<int>(starts[k]))),
                    codes(w_magnitude, w.rest, _mm512_set1_epi32(static_cast<int>(starts[k + 1]))));
                const __m512i some = _mm512_packs_epi16(_mm512_or_si512(v_magnitude, v.rest),
                                                        _mm512_or_si512(w_magnitude, w.rest));
                small = _mm512_or_si512(small, _mm512_min_epu8(_mm512_subs_epu8(normal, n), some));
                saturated += __builtin_popcountll(_mm512_cmpgt_epu8_mask(n, top));
                store(to + 32 * k, _mm512_ternarylogic_epi32(_mm512_min_epu8(n, top),
                                                             _mm512_packs_epi16(v.upper, w.upper),
                                                             _mm512_set1_epi8(-128), 0xF8));
            }
            again |= static_cast<uint32_t>(_mm512_test_epi32_mask(small, small) != 0) << t;
        }
        counts.saturated += saturated;
        // A call within the loop would cost it the registers that hold its constants.
        if (__builtin_expect(again != 0, 0)) encode_small(x, s, again, to, counts);
    }

    // 64 codes that two vectors of 16-bit words were packed to.
    static INLINE void store(uint8_t* to, __m512i c) {
        if constexpr (sizeof(T) == 2) {
            const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
            return _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, c));
        }
        const __m128i turn = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        c = _mm512_shuffle_epi8(c, _mm512_broadcast_i32x4(turn));
        _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, c));
    }

    // Four tiles for each bit, in float32. What saturates in them has been counted.
    static void encode_small(const T* x, const Scales& s, uint32_t tiles, uint8_t* to,
                             EncodeCounts& counts) {
        alignas(64) float apply[VL];
        EXTENSOR_ISA::store(apply, s.apply);
        EncodeCounts mine;
        for (; tiles; tiles &= tiles - 1) {
            const int t = __builtin_ctz(tiles);
            RunEncoder<Index, 32, false, T>::code(x + 32 * t, apply + t, nullptr, false, 4,
                                                  to + 32 * t, mine);
        }
        counts.flushed += mine.flushed;
    }
};

}  // namespace EXTENSOR_ISA
