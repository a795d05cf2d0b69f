// Codes down the columns of a panel to nearest even on AVX-512, 32 columns to a register as in
// tiles_avx512.hpp: rows are joined to 16-bit words, and their bytes to rows of 64.
#pragma once

#include "panels.hpp"

namespace EXTENSOR_ISA {

template <int Index, class T>
struct PanelJoin {
    using Codes = RunCoder<Index, 32, false, T>;
    static constexpr int kBits = kElements[Index].bits;
    static constexpr int kRows = 16 / kBits;  // of a word
    static constexpr bool kCovers = kBits != 6;

    template <bool Bounded>
    static void code(const T* panel, int64_t rows, const vf (&apply)[4], ByteRows out,
                     const Ahead& ahead, TileCounts& counts) {
        int64_t saturated = 0, flushed = 0;
        for (int64_t i = 0; i < rows; i += kRows) {
            __m512i words[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const T* x = panel + i * kWide + half * 2 * VL;
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

    // As above, for blocks that all count from a normal bfloat16 on (see HalfCoder).
    static void code_halves(const bfloat16* panel, int64_t rows, const Scales (&s)[4], ByteRows out,
                            const Ahead& ahead, TileCounts& counts) {
        using Halves = HalfCoder<Index, false>;
        const auto start = [&](const Scales& of) {
            return _mm512_cvtepi32_epi16(
                reinterpret_cast<__m512i>((of.stored + static_cast<uint32_t>(Halves::kFrom)) << 7));
        };
        int64_t saturated = 0, flushed = 0;
        __m512i from[2];
        for (int half = 0; half < 2; ++half)
            from[half] = _mm512_inserti64x4(_mm512_castsi256_si512(start(s[2 * half])), start(s[2 * half + 1]), 1);
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), low = _mm512_set1_epi16(0xFF);
        for (int64_t i = 0; i < rows; i += kRows) {
            __m512i words[2];
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const bfloat16* x = panel + i * kWide + half * 2 * VL;
                __m512i word = _mm512_setzero_si512();
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    if (half == 0) ahead.row(i + r);
                    const __m512i c = Halves::codes(x + r * kWide, from[half], s[2 * half].apply,
                                                    s[2 * half + 1].apply, nullptr, 0, saturated, flushed);
                    word = _mm512_or_si512(word, _mm512_slli_epi16(c, kBits * r));
                }
                words[half] = word;
            }
            out.ordered(_mm512_permutexvar_epi64(order, _mm512_packus_epi16(_mm512_and_si512(words[0], low),
                                                                            _mm512_and_si512(words[1], low))));
            out.ordered(_mm512_permutexvar_epi64(order, _mm512_packus_epi16(_mm512_srli_epi16(words[0], 8),
                                                                            _mm512_srli_epi16(words[1], 8))));
        }
        counts.saturated += saturated;
        counts.flushed += flushed;
    }
};

// The coder of bfloat16 panels for a plan's element, or null where there is none.
struct HalfPanelCoder {
    void (*code)(const bfloat16*, int64_t rows, const Scales (&s)[4], bool bounded, ByteRows,
                 const Ahead&, TileCounts&) = nullptr;

    explicit HalfPanelCoder(const QuantPlan& plan) {
        constexpr auto all = std::make_index_sequence<sizeof(kElements) / sizeof(Element)>();
        pick(plan.element, plan.scale == Scale::e8m0, all);
    }

private:
    template <size_t... Index>
    void pick(int element, bool powers, std::index_sequence<Index...>) {
        ((Index == static_cast<size_t>(element) ? take<Index>(powers) : void()), ...);
    }

    template <size_t Index>
    void take(bool powers) {
        if constexpr (kElements[Index].is_float && PanelJoin<Index, bfloat16>::kCovers)
            code = powers ? coded<Index, true> : coded<Index, false>;
    }

    template <size_t Index, bool Powers>
    static void coded(const bfloat16* panel, int64_t rows, const Scales (&s)[4], bool bounded, ByteRows out,
                      const Ahead& ahead, TileCounts& counts) {
        using Join = PanelJoin<Index, bfloat16>;
        if constexpr (Powers && HalfCoder<Index, false>::kCovered) {
            vu normal = splat(~0u);
            for (const Scales& each : s) normal &= HalfTileCoder<false>::covered(each, HalfCoder<Index, false>::kFrom);
            if (all_lanes(normal)) return Join::code_halves(panel, rows, s, out, ahead, counts);
        }
        const vf apply[4] = {s[0].apply, s[1].apply, s[2].apply, s[3].apply};
        bounded ? Join::template code<true>(panel, rows, apply, out, ahead, counts)
                : Join::template code<false>(panel, rows, apply, out, ahead, counts);
    }
};

}  // namespace EXTENSOR_ISA
