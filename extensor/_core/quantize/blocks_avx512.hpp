// RunEncoder of blocks.hpp for AVX-512 and rounding to nearest even, 128 values at a time.
//
// The rounding addition leaves the two fields of a code in one float: the exponent field says in
// which binade, the last places how many steps up. One multiply-add of its 16-bit halves joins
// them, the sign on top. From there on 32 values share a register.
#pragma once

#include "quantize/blocks.hpp"

namespace EXTENSOR_ISA {

template <int Index, int Tile, class T>
struct RunEncoder<Index, Tile, false, T> {
    static constexpr Element e = kElements[Index];
    static constexpr int kBatch = 8 * VL;
    static constexpr int kDrop = 7 - e.mantissa_bits;  // a joined half is (code << kDrop) + kZero
    static constexpr int kZero = 128 * (e.min_exponent + 150 - e.mantissa_bits);

    // The sign and the joined fields of VL codes, in the low half of each lane.
    static INLINE __m512i join(vf v, vf apply) {
        const __m512 y = reinterpret_cast<__m512>(v * apply);
        const __m512i bits = _mm512_castps_si512(y);
        const __m512i lowest = _mm512_set1_epi32((e.min_exponent + 127) << 23);
        __m512i anchor = _mm512_max_epu32(
            _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(kExponentMask))), lowest);
        anchor = _mm512_add_epi32(anchor, _mm512_set1_epi32((23 - e.mantissa_bits) << 23));
        anchor = _mm512_ternarylogic_epi32(anchor, bits,  // with the value's sign
                                           _mm512_set1_epi32(static_cast<int>(kSign)), 0xF8);
        const __m512 sum = _mm512_add_ps(y, _mm512_castsi512_ps(anchor));
        return _mm512_madd_epi16(_mm512_castps_si512(sum),
                                 _mm512_set1_epi32(1 << 16 | 128 >> e.mantissa_bits));
    }

    // 32 codes, each in 16 bits: four of x, four of x + VL, and so on.
    template <bool Bounded>
    static INLINE __m512i codes(const T* x, vf first, vf second, int64_t& saturated,
                                int64_t& flushed) {
        const vf a = load(x), b = load(x + VL);
        const __m512i joined = _mm512_sub_epi16(_mm512_packs_epi32(join(a, first), join(b, second)),
                                                _mm512_set1_epi16(kZero));
        __m512i n = _mm512_add_epi16(joined, joined);  // without the sign
        const __m512i top = _mm512_set1_epi16(static_cast<short>(e.max_code << (kDrop + 1)));
        if constexpr (!Bounded) {
            saturated += __builtin_popcount(_mm512_cmpgt_epu16_mask(n, top));
        }
        const __mmask32 none = _mm512_testn_epi16_mask(n, n);
        if (e.bits < 8 || none) {  // few codes of eight bits are zero
            flushed += __builtin_popcount(none) - zeros(x);
        }
        if constexpr (!Bounded) n = _mm512_min_epu16(n, top);
        n = _mm512_srli_epi16(n, kDrop + 1);
        return _mm512_ternarylogic_epi32(n, _mm512_srli_epi16(joined, 16 - e.bits),
                                         _mm512_set1_epi16(1 << (e.bits - 1)), 0xF8);
    }

    // How many of 32 values are zero.
    static INLINE int64_t zeros(const T* x) {
        if constexpr (sizeof(T) == 2)
            return __builtin_popcount(
                _mm512_testn_epi16_mask(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7FFF)));
        const __m512i magnitude = _mm512_set1_epi32(static_cast<int>(kMagnitude));
        return __builtin_popcount(_mm512_testn_epi32_mask(_mm512_loadu_si512(x), magnitude)) +
               __builtin_popcount(_mm512_testn_epi32_mask(_mm512_loadu_si512(x + VL), magnitude));
    }

    static void code(const T* x, const float* apply, const uint32_t*, bool bounded, int64_t tiles,
                     uint8_t* to, EncodeCounts& counts) {
        bounded ? code<true>(x, apply, tiles, to, counts)
                : code<false>(x, apply, tiles, to, counts);
    }

    template <bool Bounded>
    static INLINE void code(const T* x, const float* apply, int64_t tiles, uint8_t* to,
                            EncodeCounts& counts) {
        int64_t saturated = 0, flushed = 0;
        const int64_t count = tiles * Tile;
        for (int64_t i = 0; i < count;
             i += kBatch, x += kBatch, apply += kBatch / Tile, to += kBatch * e.bits / 8) {
            prefetch_stream(x, kBatch);
            __m512i c[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k)
                c[k] = codes<Bounded>(x + 2 * VL * k, splat(apply[2 * VL * k / Tile]),
                                      splat(apply[(2 * k + 1) * VL / Tile]), saturated, flushed);
            store(to, c);
        }
        counts.saturated += saturated;
        counts.flushed += flushed;
    }

    // Each 128-bit lane holds four codes of every vector: pack, then put the lanes in order.
    static INLINE void store(uint8_t* to, const __m512i (&c)[4]) {
        if constexpr (e.bits == 4) {
            const __m512i weights = _mm512_set1_epi32(16 << 16 | 1);
            __m512i pairs[4];
            for (int k = 0; k < 4; ++k) pairs[k] = _mm512_madd_epi16(c[k], weights);
            const __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32(pairs[0], pairs[1]),
                                                      _mm512_packus_epi32(pairs[2], pairs[3]));
            alignas(64) static constexpr uint16_t kOrder[32] = {
                0, 8,  16, 24, 1, 9,  17, 25, 2, 10, 18, 26, 3, 11, 19, 27,
                4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31};
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), bytes));
            return;
        }
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (int k = 0; k < 4; k += 2) {
            __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(c[k], c[k + 1]));
            if constexpr (e.bits == 8) {
                _mm512_storeu_si512(to + 32 * k, bytes);
            } else {
                // Four codes of six bits to three bytes of each lane, then the lanes together.
                bytes = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(64 << 8 | 1));
                bytes = _mm512_madd_epi16(bytes, _mm512_set1_epi32(4096 << 16 | 1));
                const __m128i three =
                    _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
                bytes = _mm512_shuffle_epi8(bytes, _mm512_broadcast_i32x4(three));
                const __m512i dwords =
                    _mm512_setr_epi32(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, 3, 3, 3, 3);
                _mm512_mask_storeu_epi32(to + 24 * k, 0x0FFF,
                                         _mm512_permutexvar_epi32(dwords, bytes));
            }
        }
    }
};

// The same for stochastic rounding. Rounding up the difference of a value, in steps of the grid,
// and its random word gives the step above the binade's first.
template <int Index, int Tile, class T>
struct RunEncoder<Index, Tile, true, T> {
    using Nearest = RunEncoder<Index, Tile, false, T>;
    static constexpr Element e = kElements[Index];
    static constexpr int kBatch = Nearest::kBatch;
    static constexpr int kShift = 23 - e.mantissa_bits;
    static constexpr int kZero = (e.min_exponent + 127) << e.mantissa_bits;

    // Codes above kZero, without signs; `y`: the scaled values.
    static INLINE __m512i steps(vf v, vf apply, const uint32_t* word, __m512i& y) {
        y = _mm512_castps_si512(reinterpret_cast<__m512>(v * apply));
        const __m512 magnitude =
            _mm512_castsi512_ps(_mm512_and_si512(y, _mm512_set1_epi32(kMagnitude)));
        const __m512i exponent =
            _mm512_max_epu32(_mm512_and_si512(y, _mm512_set1_epi32(kExponentMask)),
                             _mm512_set1_epi32((e.min_exponent + 127) << 23));
        const __m512i inverse =
            _mm512_sub_epi32(_mm512_set1_epi32((254 + e.mantissa_bits) << 23), exponent);
        // As in round_magnitude.
        constexpr int up = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;
        const __m512 scaled = _mm512_mul_ps(magnitude, _mm512_castsi512_ps(inverse));
        const __m512 w = _mm512_cvt_roundepu32_ps(_mm512_loadu_si512(word),
                                                  _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        const __m512 rest = _mm512_fnmadd_round_ps(w, _mm512_set1_ps(0x1p-32f), scaled, up);
        return _mm512_add_epi32(_mm512_srli_epi32(exponent, kShift),
                                _mm512_cvt_roundps_epi32(rest, up));
    }

    static void code(const T* x, const float* apply, const uint32_t* words, bool, int64_t tiles,
                     uint8_t* to, EncodeCounts& counts) {
        int64_t saturated = 0, flushed = 0;
        const int64_t count = tiles * Tile;
        for (int64_t i = 0; i < count; i += kBatch, x += kBatch, words += kBatch,
                     apply += kBatch / Tile, to += kBatch * e.bits / 8) {
            prefetch_stream(x, kBatch);
            __m512i c[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                const T* at = x + 2 * VL * k;
                const uint32_t* word = words + 2 * VL * k;
                __m512i y, z;
                const __m512i a = steps(load(at), splat(apply[2 * VL * k / Tile]), word, y);
                const __m512i b =
                    steps(load(at + VL), splat(apply[(2 * k + 1) * VL / Tile]), word + VL, z);
                const __m512i top = _mm512_set1_epi16(e.max_code);
                const __m512i n =
                    _mm512_sub_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(kZero));
                const __m512i signs =
                    _mm512_packs_epi32(_mm512_srai_epi32(y, 16), _mm512_srai_epi32(z, 16));
                saturated += __builtin_popcount(_mm512_cmpgt_epu16_mask(n, top));
                const __mmask32 none = _mm512_testn_epi16_mask(n, n);
                if (e.bits < 8 || none) flushed += __builtin_popcount(none) - Nearest::zeros(at);
                c[k] = _mm512_ternarylogic_epi32(_mm512_min_epu16(n, top),
                                                 _mm512_srli_epi16(signs, 16 - e.bits),
                                                 _mm512_set1_epi16(1 << (e.bits - 1)), 0xF8);
            }
            Nearest::store(to, c);
        }
        counts.saturated += saturated;
        counts.flushed += flushed;
    }
};

}  // namespace EXTENSOR_ISA
