// Codes down the columns of a panel to nearest even on AVX-512, 32 columns to a register as in
// tiles_avx512.hpp: rows are joined to 16-bit words, and their bytes to rows of 64.
#pragma once

#include "panels.hpp"

namespace EXTENSOR_ISA {

template <int Index>
struct PanelJoin {
    using Codes = RunCoder<Index, 32, false, float>;
    static constexpr int kBits = kElements[Index].bits;
    static constexpr int kRows = 16 / kBits;  // of a word
    static constexpr bool kCovers = kBits != 6;

    template <bool Bounded>
    static void code(const float* panel, int64_t rows, const vf (&apply)[4], ByteRows out,
                     const Ahead& ahead, TileCounts& counts) {
        int64_t saturated = 0, flushed = 0;
        for (int64_t i = 0; i < rows; i += kRows) {
            __m512i words[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const float* x = panel + i * kWide + half * 2 * VL;
                __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    if (half == 0) ahead.row(i + r);
                    const __m512i c = Codes::template codes<Bounded>(
                        x + r * kWide, apply[2 * half], apply[2 * half + 1], saturated, flushed);
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
};

}  // namespace EXTENSOR_ISA
