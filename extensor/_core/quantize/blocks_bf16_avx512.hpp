// Whole blocks of bfloat16 values on AVX-512, 32 to a register and without leaving 16 bits: maxima,
// and codes under scales that are powers of two.
//
// Dividing by 2**e subtracts e from the exponent field. Rounding to nearest even drops the last
// places of what is left, and 8 bits of significand always hold the tie: integer arithmetic is
// exact.
#pragma once

#include "quantize/blocks_avx512.hpp"
#include "quantize/philox.hpp"

namespace EXTENSOR_ISA {

// ---- maxima ----

// The lane of 16 bits whose index differs in bit S.
template <int S>
INLINE __m512i partner16(__m512i v) {
    if constexpr (S == 1) {
        const __m128i swap = _mm_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
        return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(swap));
    }
    if constexpr (S == 2) return _mm512_shuffle_epi32(v, _MM_PERM_CDAB);
    if constexpr (S == 4) return _mm512_shuffle_epi32(v, _MM_PERM_BADC);
    if constexpr (S == 8) return _mm512_shuffle_i64x2(v, v, 0xB1);
    if constexpr (S == 16) return _mm512_shuffle_i64x2(v, v, 0x4E);
}

// As fold in blocks.hpp, on lanes of 16 bits.
template <int S>
INLINE __m512i fold16(__m512i a, __m512i b) {
    constexpr uint32_t upper = S == 1   ? 0xAAAAAAAAu
                               : S == 2 ? 0xCCCCCCCCu
                               : S == 4 ? 0xF0F0F0F0u
                                        : 0xFF00FF00u;
    return _mm512_max_epu16(_mm512_mask_blend_epi16(upper, a, b),
                            partner16<S>(_mm512_mask_blend_epi16(upper, b, a)));
}

template <int S, int N>
INLINE void fold_all(__m512i (&v)[16]) {
    for (int i = 0; i < N / 2; ++i) v[i] = fold16<S>(v[2 * i], v[2 * i + 1]);
}

// The largest magnitudes of the first values of a run, lane by lane; returns how many values.
INLINE int64_t maximum_start(const bfloat16* x, int64_t count, vu& maxima) {
    __m512i m[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        prefetch_stream(x + i, 64);
        for (int k = 0; k < 2; ++k)
            m[k] = _mm512_max_epu16(
                m[k], _mm512_and_si512(_mm512_loadu_si512(x + i + 32 * k), magnitude));
    }
    m[0] = _mm512_max_epu16(m[0], m[1]);
    const __m512i high = _mm512_and_si512(m[0], _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
    maxima = reinterpret_cast<vu>(_mm512_max_epu32(high, _mm512_slli_epi32(m[0], 16)));
    return i;
}

template <int Tile>
INLINE vu tile_maxima(const bfloat16* x) {
    constexpr int kVectors = Tile / 2;
    __m512i v[16];
#pragma GCC unroll 16
    for (int i = 0; i < kVectors; ++i)
        v[i] = _mm512_and_si512(_mm512_loadu_si512(x + 32 * i), _mm512_set1_epi16(0x7FFF));
    fold_all<1, kVectors>(v);
    fold_all<2, kVectors / 2>(v);
    fold_all<4, kVectors / 4>(v);
    if constexpr (Tile == 32) {
        fold_all<8, 2>(v);
        v[0] = _mm512_max_epu16(v[0], partner16<16>(v[0]));
    } else {
        // Lane i holds tile 2 * (i & 7) + (i >> 4), once more in lane i ^ 8.
        v[0] = _mm512_max_epu16(v[0], partner16<8>(v[0]));
        alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2, 18, 3, 19,
                                                            4, 20, 5, 21, 6, 22, 7, 23};
        v[0] = _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), v[0]);
    }
    const __m512i wide = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v[0]));
    return reinterpret_cast<vu>(_mm512_slli_epi32(wide, 16));
}

// ---- random words ----

// The random words of blocks of 32 that follow one another: eight counters each.
struct BlockRandomWords {
    const Philox& philox;
    const Philox::Calls calls;
    uint32_t block;

    BlockRandomWords(const Philox& philox, uint32_t block)
        : philox(philox), calls(philox.calls(vq{0, 1, 2, 3, 4, 5, 6, 7})), block(block) {}

    // The first 16 bits of the 32 words of each of some tiles that follow one another.
    template <int Tiles>
    INLINE void upper16(int64_t tile, __m512i (&out)[Tiles]) const {
        Philox::Blocks at[Tiles];
        vq words[Tiles][4];
        for (int t = 0; t < Tiles; ++t)
            at[t] = philox.block(block + static_cast<uint32_t>(tile) + static_cast<uint32_t>(t));
        philox.draw(calls, at, words);
        for (int t = 0; t < Tiles; ++t) out[t] = joined(words[t]);
    }

    static INLINE __m512i joined(const vq (&w)[4]) {
        // Bytes 2 and 3 of each word's lane, which is 8 bytes, next to one another; w[1]'s stay.
        const __m128i turn =
            _mm_setr_epi8(2, 3, -1, -1, 2, 3, 2, 3, 10, 11, -1, -1, 10, 11, 10, 11);
        const __m512i at = _mm512_broadcast_i32x4(turn);
        __m512i bits16 = reinterpret_cast<__m512i>(w[1]);
        bits16 = _mm512_mask_shuffle_epi8(bits16, 0x0303030303030303u,
                                          reinterpret_cast<__m512i>(w[0]), at);
        bits16 = _mm512_mask_shuffle_epi8(bits16, 0x3030303030303030u,
                                          reinterpret_cast<__m512i>(w[2]), at);
        return _mm512_mask_shuffle_epi8(bits16, 0xC0C0C0C0C0C0C0C0u,
                                        reinterpret_cast<__m512i>(w[3]), at);
    }

    // The words themselves, and room behind them.
    void all(uint32_t tile, uint32_t (&words)[32 + 2 * VL]) const {
        philox_run(philox, words, 0, 8, block + tile, 1);
    }
};

// ---- codes ----

// 32 values in 16 bits, in order.
INLINE __m512i load_16bit(const bfloat16* x) { return _mm512_loadu_si512(x); }

// Float32 values cut to 16 bits. The last place becomes one where the rest is not zero (sticky), so
// that rounding at an earlier place gives the same. Four of x, four of x + VL, and so on.
INLINE __m512i load_16bit(const float* x) {
    const auto half = [](const float* from) {
        const __m512i bits = _mm512_loadu_si512(from);
        const __mmask16 rest = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xFFFF));
        const __m512i upper = _mm512_srai_epi32(bits, 16);
        return _mm512_mask_or_epi32(upper, rest, upper, _mm512_set1_epi32(1));
    };
    return _mm512_packs_epi32(half(x), half(x + VL));
}

// Codes of tiles of 32 whose scales are powers of two, to nearest even or by random words.
template <int Index, bool Words, class T = bfloat16>
struct Bf16Encoder {
    static constexpr Element e = kElements[Index];
    static constexpr bool kFour = e.bits == 4 && e.mantissa_bits == 1;
    static constexpr bool kCovered =
        kFloatType<T> == FloatType::bfloat16
            ? e.is_float && (kFour || e.bits == 8)
            : kFloatType<T> == FloatType::float32 && e.is_float && kFour && !Words;
    // The exponent that a scaled value's bits count from. Four-bit codes to nearest come from a
    // table by quarters of a binade; by random words they count from the smallest number whose
    // fraction fits 16 bits. Other codes are what rounding leaves, from the binade below the
    // smallest normal number on.
    static constexpr int kFrom = e.bits == 8 ? e.min_exponent - 1 : Words ? -10 : -2;
    static constexpr int kDrop = 7 - e.mantissa_bits;

    // 32 codes, each in 16 bits, in the order of load_16bit. `first` and `second` scale 16 values
    // each. With words: of one block.
    static INLINE __m512i codes(const T* x, __m512i from, vf first, vf second,
                                const BlockRandomWords* words, int64_t tile, int64_t& saturated,
                                int64_t& flushed) {
        __mmask32 other = 0;
        int64_t above = 0, none = 0;
        __m512i word[1] = {};
        if constexpr (Words) words->upper16(tile, word);
        const __m512i c = common_codes(x, from, word[0], other, above, none);
        if (__builtin_expect(other != 0, 0))
            return float_codes(x, first, second, words, tile, saturated, flushed);
        saturated += above, flushed += none;
        return c;
    }

    // The same where `other` stays zero: there is no rare case.
    static INLINE __m512i common_codes(const T* x, __m512i from, __m512i word, __mmask32& other,
                                       int64_t& saturated, int64_t& flushed) {
        const __m512i v = load_16bit(x), ones = _mm512_set1_epi16(0x7FFF);
        const __m512i magnitude = _mm512_and_si512(v, ones);
        const __m512i d = _mm512_subs_epu16(magnitude, from);
        const __mmask32 some = _mm512_test_epi16_mask(v, ones);
        __m512i n;
        // Rare cases for the float encoder: numbers below the normal ones, which round at another
        // place, and fractions of more than 16 bits next to their random word.
        if constexpr (e.bits == 8) {
            other |= _mm512_mask_cmplt_epu16_mask(some, d, _mm512_set1_epi16(128));
        } else if constexpr (Words) {
            other |= _mm512_mask_cmple_epu16_mask(
                _mm512_mask_cmplt_epu16_mask(some, magnitude, from), word, _mm512_set1_epi16(255));
        }
        const __m512i top = _mm512_set1_epi16(e.max_code);
        if constexpr (!Words)
            n = nearest(d);
        else
            n = e.bits == 4 ? random_quarters(v, d, word, some) : random_steps(d, word);
        saturated += __builtin_popcount(_mm512_cmpgt_epu16_mask(n, top));
        n = _mm512_min_epu16(n, top);
        if (e.bits == 4) flushed += __builtin_popcount(_mm512_mask_testn_epi16_mask(some, n, n));
        return _mm512_ternarylogic_epi32(n, _mm512_srli_epi16(v, 16 - e.bits),
                                         _mm512_set1_epi16(1 << (e.bits - 1)), 0xF8);
    }

    // At kDrop places: half of the last one, less one, and one more if odd.
    static INLINE __m512i nearest(__m512i d) {
        const __mmask32 odd = _mm512_test_epi16_mask(d, _mm512_set1_epi16(1 << kDrop));
        __m512i w = _mm512_add_epi16(d, _mm512_set1_epi16((1 << (kDrop - 1)) - 1));
        w = _mm512_mask_add_epi16(w, odd, w, _mm512_set1_epi16(1));
        if constexpr (e.bits == 8) return _mm512_srli_epi16(w, kDrop);
        // By quarters of a binade: zero alone, then (0, 1/4], (1/4, 1/2), [1/2, 3/4), [3/4, 1].
        alignas(64) static constexpr uint16_t kCodes[32] = {0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3,
                                                            3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8,
                                                            8, 8, 8, 8, 8, 8, 8, 8, 8, 8};
        return _mm512_permutexvar_epi16(_mm512_srli_epi16(w, 5), _mm512_load_si512(kCodes));
    }

    // Rounds up where the dropped places exceed as many of the word's first bits.
    static INLINE __m512i random_steps(__m512i d, __m512i word) {
        const __m512i all = _mm512_set1_epi16(-1);
        const __m512i room = _mm512_srli_epi16(_mm512_xor_si512(word, all), 16 - kDrop);
        return _mm512_srli_epi16(_mm512_add_epi16(d, room), kDrop);
    }

    // Codes 0, 1, 2 ... are 0, 1/2, 1, 3/2, 2, 3, 4, 6. A value's half binade gives the code at or
    // below it; the rest of its significand, in steps, is a fraction of 16 bits (more than the
    // truth where it is below 2**-8).
    static INLINE __m512i random_quarters(__m512i v, __m512i d, __m512i word, __mmask32 some) {
        alignas(64) static constexpr uint16_t kBelow[32] = {0, 0, 0, 0, 0, 0, 0,  0,  0,  0, 0,
                                                            0, 0, 0, 0, 0, 0, 0,  1,  1,  2, 3,
                                                            4, 5, 6, 7, 8, 9, 10, 11, 12, 13};
        alignas(64) static constexpr uint16_t kPlaces[32] = {
            0, 0, 1, 1, 2,  2,  3,  3,  4,  4,  5,  5,  6,  6,  7,  7,
            8, 8, 9, 9, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10};
        const __m512i half_binade = _mm512_srli_epi16(d, 6);
        const __m512i below = _mm512_permutexvar_epi16(half_binade, _mm512_load_si512(kBelow));
        const __m512i significand =
            _mm512_ternarylogic_epi32(v, _mm512_set1_epi16(0x7F), _mm512_set1_epi16(0x80), 0xEA);
        const __m512i places = _mm512_permutexvar_epi16(half_binade, _mm512_load_si512(kPlaces));
        const __m512i fraction = _mm512_sllv_epi16(significand, places);
        const __mmask32 up = _mm512_mask_cmpgt_epu16_mask(some, fraction, word);
        return _mm512_mask_add_epi16(below, up, below, _mm512_set1_epi16(1));
    }

    // The same codes computed in float32.
    static __m512i float_codes(const T* x, vf first, vf second, const BlockRandomWords* words,
                               int64_t tile, int64_t& saturated, int64_t& flushed) {
        const Encoder<Index, Words> encoder{.element_scale = 1};
        EncodeCounts counts;
        uint32_t drawn[32 + 2 * VL] = {};
        if constexpr (Words) words->all(static_cast<uint32_t>(tile), drawn);
        const vu a = encoder(load(x), first, load(drawn), counts);
        const vu b = encoder(load(x + VL), second, load(drawn + VL), counts);
        saturated += counts.saturated;
        flushed += counts.flushed;
        return _mm512_inserti64x4(
            _mm512_castsi256_si512(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(a))),
            _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(b)), 1);
    }

    static void code(const T* x, vu stored, const BlockRandomWords* words, uint8_t* to,
                     EncodeCounts& counts) {
        alignas(64) uint32_t starts[VL];
        EXTENSOR_ISA::store(starts, ((stored + static_cast<uint32_t>(kFrom)) << 7) * 0x10001u);
        int64_t saturated = 0, flushed = 0;
        const auto start = [&](int64_t tile) {
            return _mm512_set1_epi32(static_cast<int>(starts[tile]));
        };
        uint32_t again = 0;  // a bit for each four tiles with a rare case
        for (int64_t t = 0; t < VL; t += 4) {
            prefetch_stream(x + 32 * t, 128);
            __m512i c[4], word[4] = {};
            if constexpr (Words) words->upper16(t, word);
            __mmask32 other = 0;
            int64_t above = 0, none = 0;
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k)
                c[k] = common_codes(x + 32 * (t + k), start(t + k), word[k], other, above, none);
            store(to + 4 * e.bits * t, c);
            again |= static_cast<uint32_t>(other != 0) << t;
            saturated += other ? 0 : above, flushed += other ? 0 : none;
        }
        // A call within the loop would cost it the registers that hold its constants.
        alignas(64) float apply[VL];
        if (__builtin_expect(again != 0, 0)) EXTENSOR_ISA::store(apply, inverse_power(stored));
        for (; __builtin_expect(again != 0, 0); again &= again - 1) {
            const int t = __builtin_ctz(again);
            __m512i c[4];
            for (int k = 0; k < 4; ++k)
                c[k] = float_codes(x + 32 * (t + k), splat(apply[t + k]), splat(apply[t + k]),
                                   words, t + k, saturated, flushed);
            store(to + 4 * e.bits * t, c);
        }
        counts.saturated += saturated;
        counts.flushed += flushed;
    }

    static INLINE void store(uint8_t* to, const __m512i (&c)[4]) {
        if constexpr (sizeof(T) == 4) return RunEncoder<Index, 32, false, T>::store(to, c);
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        if constexpr (e.bits == 4) {
            const __m512i weights = _mm512_set1_epi32(16 << 16 | 1);
            __m512i p[4];
            for (int k = 0; k < 4; ++k) p[k] = _mm512_madd_epi16(c[k], weights);
            const __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32(p[0], p[1]),
                                                      _mm512_packus_epi32(p[2], p[3]));
            const __m512i lanes =
                _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_storeu_si512(to, _mm512_permutexvar_epi32(lanes, bytes));
        } else {
            for (int k = 0; k < 4; k += 2)
                _mm512_storeu_si512(to + 32 * k, _mm512_permutexvar_epi64(
                                                     order, _mm512_packus_epi16(c[k], c[k + 1])));
        }
    }
};

// The encoder of VL tiles of 32 for an element of the table, or null where there is none.
template <bool Words, class T = bfloat16>
struct Bf16BlockEncoder {
    void (*code)(const T* x, vu stored, const BlockRandomWords* words, uint8_t* to,
                 EncodeCounts& counts) = nullptr;
    int from = 0;
    uint32_t above = 0;  // so many binades above its scale a block's largest value may be

    explicit Bf16BlockEncoder(int element);  // blocks.cpp

    // Whether a tile's bits count from a normal bfloat16 on, and no value is far above the largest
    // code or no number. All ones or zero in each lane.
    INLINE vu covers(vu stored, vu amax) const {
        const vu top = stored + above;
        const vu in_range =
            reinterpret_cast<vu>(top < 254u) & reinterpret_cast<vu>((amax >> 23) <= top);
        return (covered(stored, from) & in_range) | reinterpret_cast<vu>(amax == 0u);
    }

    // The same of bytes that the rule gave, where nothing clamps them and no tile is zero.
    INLINE vu covers_unclamped(vu byte, vu amax, int lowest) const {
        const int64_t least = most(lowest, 1 - from), end = 254 - static_cast<int64_t>(above);
        const auto count = static_cast<uint32_t>(most(0, end - least));
        return reinterpret_cast<vu>(byte - static_cast<uint32_t>(least) < count) &
               reinterpret_cast<vu>((amax >> 23) <= byte + above);
    }

    static INLINE vu covered(vu stored, int from) {
        return reinterpret_cast<vu>(stored > static_cast<uint32_t>(-from));
    }
};

}  // namespace EXTENSOR_ISA
