// Packs codes of 4, 6 or 8 bits into bytes.
#pragma once

#include "quantize/rounding.hpp"

namespace EXTENSOR_ISA {

constexpr int kQuad = 4 * VL;  // values packed together

// `count` unpacked codes -> packed bytes; `from` must be readable, and zero, to a whole group.
inline void pack_row(const uint8_t* from, int64_t count, int bits, uint8_t* to) {
    const int64_t bytes = ceil_div(count * bits, 8);
    if (bits == 8) {
        std::memcpy(to, from, static_cast<size_t>(bytes));
    } else if (bits == 4) {
        for (int64_t i = 0; i < bytes; ++i)
            to[i] = static_cast<uint8_t>(from[2 * i] | from[2 * i + 1] << 4);
    } else {
        for (int64_t i = 0; i < bytes; ++i, from += i % 3 ? 0 : 4) {
            const uint32_t word = static_cast<uint32_t>(from[0] | from[1] << 6 | from[2] << 12) |
                                  static_cast<uint32_t>(from[3]) << 18;
            to[i] = static_cast<uint8_t>(word >> (8 * (i % 3)));
        }
    }
}

INLINE void store_codes(uint8_t* to, vu codes) {
    typedef uint8_t bytes __attribute__((vector_size(VL), aligned(1), may_alias));
    *reinterpret_cast<bytes*>(to) = __builtin_convertvector(codes, bytes);
}

// Four vectors of codes, one after the other, packed.
template <int Bits>
INLINE void store_quad(uint8_t* to, const vu (&c)[4]) {
#if EXTENSOR_LANES > 4
    if constexpr (Bits != 6) {
        // Byte k of a lane is from vector k: transpose the bytes within 128 bits, then the words.
        const vu joined = (c[0] | c[1] << 8) | (c[2] << 16 | c[3] << 24);
        const __m128i turn = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#if EXTENSOR_LANES == 16
        __m512i w = reinterpret_cast<__m512i>(joined);
        if constexpr (Bits == 8) {
            w = _mm512_shuffle_epi8(w, _mm512_broadcast_i32x4(turn));
            const __m512i order =
                _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, w));
        } else {
            w = _mm512_or_si512(w, _mm512_srli_epi64(w, 28));  // the odd lane's codes go high
            const __m256i half =
                _mm256_shuffle_epi8(_mm512_cvtepi64_epi32(w), _mm256_broadcastsi128_si256(turn));
            const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                                _mm256_permutevar8x32_epi32(half, order));
        }
#else
        __m256i w = reinterpret_cast<__m256i>(joined);
        if constexpr (Bits == 8) {
            w = _mm256_shuffle_epi8(w, _mm256_broadcastsi128_si256(turn));
            const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                                _mm256_permutevar8x32_epi32(w, order));
        } else {
            w = _mm256_or_si256(w, _mm256_srli_epi64(w, 28));
            const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
            const __m128i half = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(w, even));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(half, turn));
        }
#endif
        return;
    }
#endif
    uint8_t codes[kQuad];
    for (int k = 0; k < 4; ++k) store_codes(codes + k * VL, c[k]);
    pack_row(codes, kQuad, Bits, to);
}

}  // namespace EXTENSOR_ISA
