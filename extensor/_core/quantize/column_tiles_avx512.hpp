// Columnwise codes of a column tile to nearest even on AVX-512, 32 columns to a register as in
// blocks_avx512.hpp: rows are joined to 16-bit words, and their bytes to rows of 64.
#pragma once

#include "quantize/column_tiles.hpp"

namespace EXTENSOR_ISA {

template <int Index, class T>
struct ColumnTileCodes {
    using Codes = RunEncoder<Index, 32, false, T>;
    static constexpr int kBits = kElements[Index].bits;
    static constexpr int kRows = 16 / kBits;  // of a word
    static constexpr bool kCovers = kBits != 6;

    template <bool Bounded>
    static void code(const T* column_tile, int64_t rows, const vf (&apply)[4], ByteRows out,
                     const Prefetch& prefetch, EncodeCounts& counts) {
        int64_t saturated = 0, flushed = 0;
        for (int64_t i = 0; i < rows; i += kRows) {
            __m512i words[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const T* x = column_tile + i * kTileColumns + half * 2 * VL;
                __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    if (half == 0) prefetch.row(i + r);
                    const __m512i c =
                        Codes::template codes<Bounded>(x + r * kTileColumns, apply[2 * half],
                                                       apply[2 * half + 1], saturated, flushed);
                    word = _mm512_or_si512(word, _mm512_slli_epi16(c, kBits * r));
                }
                words[half] = word;
            }
            const __m512i low = _mm512_set1_epi16(0xFF);
            out.line(_mm512_packus_epi16(_mm512_and_si512(words[0], low),
                                         _mm512_and_si512(words[1], low)));
            out.line(_mm512_packus_epi16(_mm512_srli_epi16(words[0], 8),
                                         _mm512_srli_epi16(words[1], 8)));
        }
        counts.saturated += saturated;
        counts.flushed += flushed;
    }

    // As above, for blocks that all count from a normal bfloat16 on (see Bf16Encoder).
    static void encode_bf16(const bfloat16* column_tile, int64_t rows, const Scales (&s)[4],
                            ByteRows out, const Prefetch& prefetch, EncodeCounts& counts) {
        using Encode = Bf16Encoder<Index, false>;
        const auto start = [&](const Scales& of) {
            return _mm512_cvtepi32_epi16(
                reinterpret_cast<__m512i>((of.stored + static_cast<uint32_t>(Encode::kFrom)) << 7));
        };
        int64_t saturated = 0, flushed = 0;
        __m512i from[2];
        for (int half = 0; half < 2; ++half)
            from[half] = _mm512_inserti64x4(_mm512_castsi256_si512(start(s[2 * half])),
                                            start(s[2 * half + 1]), 1);
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                      low = _mm512_set1_epi16(0xFF);
        for (int64_t i = 0; i < rows; i += kRows) {
            __m512i words[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const bfloat16* x = column_tile + i * kTileColumns + half * 2 * VL;
                __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    if (half == 0) prefetch.row(i + r);
                    const __m512i c =
                        Encode::codes(x + r * kTileColumns, from[half], s[2 * half].apply,
                                      s[2 * half + 1].apply, nullptr, 0, saturated, flushed);
                    word = _mm512_or_si512(word, _mm512_slli_epi16(c, kBits * r));
                }
                words[half] = word;
            }
            out.ordered(_mm512_permutexvar_epi64(
                order, _mm512_packus_epi16(_mm512_and_si512(words[0], low),
                                           _mm512_and_si512(words[1], low))));
            out.ordered(_mm512_permutexvar_epi64(
                order, _mm512_packus_epi16(_mm512_srli_epi16(words[0], 8),
                                           _mm512_srli_epi16(words[1], 8))));
        }
        counts.saturated += saturated;
        counts.flushed += flushed;
    }
};

// The encoder of bfloat16 column tiles for a plan's element, or null where there is none.
struct Bf16ColumnTileEncoder {
    void (*code)(const bfloat16*, int64_t rows, const Scales (&s)[4], bool bounded, ByteRows,
                 const Prefetch&, EncodeCounts&) = nullptr;

    explicit Bf16ColumnTileEncoder(const QuantPlan& plan) {
        with_element(plan.element, [&]<size_t Index>() {
            if constexpr (kElements[Index].is_float && ColumnTileCodes<Index, bfloat16>::kCovers)
                code = plan.scale == Scale::e8m0 ? encode<Index, true> : encode<Index, false>;
        });
    }

private:
    template <size_t Index, bool Powers>
    static void encode(const bfloat16* column_tile, int64_t rows, const Scales (&s)[4],
                       bool bounded, ByteRows out, const Prefetch& prefetch, EncodeCounts& counts) {
        using Join = ColumnTileCodes<Index, bfloat16>;
        if constexpr (Powers && Bf16Encoder<Index, false>::kCovered) {
            vu normal = splat(~0u);
            for (const Scales& each : s)
                normal &=
                    Bf16BlockEncoder<false>::covered(each.stored, Bf16Encoder<Index, false>::kFrom);
            if (all_lanes(normal))
                return Join::encode_bf16(column_tile, rows, s, out, prefetch, counts);
        }
        const vf apply[4] = {s[0].apply, s[1].apply, s[2].apply, s[3].apply};
        bounded ? Join::template code<true>(column_tile, rows, apply, out, prefetch, counts)
                : Join::template code<false>(column_tile, rows, apply, out, prefetch, counts);
    }
};

}  // namespace EXTENSOR_ISA
