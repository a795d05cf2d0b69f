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

    // The upper halves of 32 values in order, and the lower ones.
    struct Cut {
        __m512i upper, rest;
    };
    static INLINE Cut cut(const bfloat16* x) {
        return {_mm512_loadu_si512(x), _mm512_setzero_si512()};
    }
    static INLINE Cut cut(const float* x) {
        alignas(64) static constexpr uint16_t kOdd[32] = {
            1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
            33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
        const __m512i odd = _mm512_load_si512(kOdd);
        const __m512i even = _mm512_xor_si512(odd, _mm512_set1_epi16(1));
        const __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512(x + VL);
        return {_mm512_permutex2var_epi16(a, odd, b), _mm512_permutex2var_epi16(a, even, b)};
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

    static void code(const T* x, vu stored, const BlockRandomWords*, uint8_t* to,
                     EncodeCounts& counts) {
        alignas(64) uint32_t starts[VL];
        const vu from = ((stored + static_cast<uint32_t>(kFrom)) << 7) - uint32_t{kHalf};
        EXTENSOR_ISA::store(starts, from * 0x10001u);
        const __m512i top = _mm512_set1_epi8(e.max_code), ones = _mm512_set1_epi16(0x7FFF);
        const __m512i normal = _mm512_set1_epi8(1 << e.mantissa_bits);
        int64_t saturated = 0;
        uint32_t again = 0;  // a bit for each four tiles with numbers below the normal ones
#pragma GCC unroll 1
        for (int t = 0; t < VL; t += 4) {
            prefetch_stream(x + 32 * t, 128);
            __m512i least_code = _mm512_set1_epi8(-1);
#pragma GCC unroll 2
            for (int k = t; k < t + 4; k += 2) {
                const Cut v = cut(x + 32 * k), w = cut(x + 32 * k + 32);
                const __m512i n =
                    _mm512_packus_epi16(codes(_mm512_and_si512(v.upper, ones), v.rest,
                                              _mm512_set1_epi32(static_cast<int>(starts[k]))),
                                        codes(_mm512_and_si512(w.upper, ones), w.rest,
                                              _mm512_set1_epi32(static_cast<int>(starts[k + 1]))));
                least_code = _mm512_min_epu8(least_code, n);
                saturated += __builtin_popcountll(_mm512_cmpgt_epu8_mask(n, top));
                const __m512i c = _mm512_ternarylogic_epi32(_mm512_min_epu8(n, top),
                                                            _mm512_packs_epi16(v.upper, w.upper),
                                                            _mm512_set1_epi8(-128), 0xF8);
                const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
                _mm512_storeu_si512(to + 32 * k, _mm512_permutexvar_epi64(order, c));
            }
            // Most often these are zeros, if there are any.
            if (__builtin_expect(_mm512_cmplt_epu8_mask(least_code, normal) != 0, 0))
                again |= static_cast<uint32_t>(has_small(x + 32 * t, to + 32 * t)) << t;
        }
        counts.saturated += saturated;
        // A call within the loop would cost it the registers that hold its constants.
        if (__builtin_expect(again != 0, 0)) encode_small(x, stored, again, to, counts);
    }

    // Whether the codes of four tiles are below the normal ones where their values are not zero.
    static INLINE bool has_small(const T* x, const uint8_t* codes) {
        const __m512i normal = _mm512_set1_epi8(1 << e.mantissa_bits);
        __mmask64 small = 0;
        for (int k = 0; k < 128; k += 64) {
            const __m512i n =
                _mm512_and_si512(_mm512_loadu_si512(codes + k), _mm512_set1_epi8(0x7F));
            small |= _mm512_mask_cmplt_epu8_mask(not_zero(x + k), n, normal);
        }
        return small != 0;
    }
    static INLINE __mmask64 not_zero(const bfloat16* x) {
        const auto half = [&](int at) __attribute__((always_inline)) {
            return _mm512_test_epi16_mask(_mm512_loadu_si512(x + at), _mm512_set1_epi16(0x7FFF));
        };
        return _mm512_kunpackd(half(32), half(0));
    }
    static INLINE __mmask64 not_zero(const float* x) {
        const auto part = [&](int at) __attribute__((always_inline)) {
            return _mm512_test_epi32_mask(_mm512_loadu_si512(x + at),
                                          _mm512_set1_epi32(static_cast<int>(kMagnitude)));
        };
        return _mm512_kunpackd(_mm512_kunpackw(part(48), part(32)),
                               _mm512_kunpackw(part(16), part(0)));
    }

    // Four tiles for each bit, in float32. What saturates in them has been counted.
    static void encode_small(const T* x, vu stored, uint32_t tiles, uint8_t* to,
                             EncodeCounts& counts) {
        alignas(64) float apply[VL];
        EXTENSOR_ISA::store(apply, inverse_power(stored));
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
