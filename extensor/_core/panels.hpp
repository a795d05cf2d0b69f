// Panels: some rows of four vectors of columns, compact and float32, in the nearest cache.
//
// A panel is filled from whole cache lines of the array, transformed where a spec says so, and read
// as often as its codes need, down its columns (quant_columns.cpp) and along its rows. What lies
// beyond the array is zero, so that ragged edges need no loops of their own.
#pragma once

#include "hadamard.hpp"
#include "lines.hpp"
#include "philox.hpp"
#include "quant.hpp"
#include "tiles.hpp"

namespace EXTENSOR_ISA {

constexpr int64_t kWide = 4 * VL;       // columns of a panel
constexpr int64_t kDeep = 128;          // rows of one that no transform makes longer
constexpr int64_t kTask = int64_t{1} << 16;  // values of one task, about

// Where the next panel will come from; its rows are fetched while this one is coded.
struct Ahead {
    const char* at = nullptr;
    int64_t stride = 0, bytes = 0;

    INLINE void row(int64_t i) const {
        if (!at) return;
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + i * stride + b, 0, 2);
    }
};

// The values of a panel. Those of a bfloat16 array may stay as they are in `halves`; `wide` is room
// for them then, filled by the ways that want float32.
struct PanelValues {
    float* wide;
    const bfloat16* halves = nullptr;

    PanelValues from(int64_t row) const {
        return {wide + row * kWide, halves ? halves + row * kWide : nullptr};
    }

    const float* widened(int64_t rows) const {
        if (halves)
            for (int64_t i = 0; i < rows * kWide; i += VL) store(wide + i, load(halves + i));
        return wide;
    }
};

// ---- filling ----

template <class T>
void fill_rows(const T* x, int64_t stride, int64_t rows, int64_t lanes, float* to) {
    if (lanes == kWide) {
        for (int64_t i = 0; i < rows; ++i, x += stride, to += kWide)
            for (int k = 0; k < kWide; k += VL) store(to + k, load(x + k));
        return;
    }
    for (int64_t i = 0; i < rows; ++i, x += stride, to += kWide)
        for (int64_t k = 0; k < kWide; k += VL)
            store(to + k, k < lanes ? load_upto(x + k, lanes - k) : vf{});
}

// `rows` rows of `lanes` columns, the first of them at x, then zeros up to `deep` rows.
inline void fill_panel(Source x, int64_t stride, int64_t rows, int64_t deep, int64_t lanes,
                       float* to) {
    switch (x.type) {
        case FloatType::float32:
            fill_rows(static_cast<const float*>(x.at), stride, rows, lanes, to);
            break;
        case FloatType::bfloat16:
            fill_rows(static_cast<const bfloat16*>(x.at), stride, rows, lanes, to);
            break;
        default: fill_rows(static_cast<const float16*>(x.at), stride, rows, lanes, to);
    }
    if (rows < deep) std::memset(to + rows * kWide, 0, static_cast<size_t>((deep - rows) * kWide * 4));
}

// The same, of bfloat16 as it is.
inline void fill_halves(const bfloat16* x, int64_t stride, int64_t rows, int64_t deep, int64_t lanes,
                        bfloat16* to) {
    if (lanes < kWide || rows < deep) std::memset(to, 0, static_cast<size_t>(deep * kWide * 2));
    if (lanes == kWide) {
        for (int64_t i = 0; i < rows; ++i, x += stride, to += kWide)
            std::memcpy(to, x, static_cast<size_t>(kWide * 2));
        return;
    }
    for (int64_t i = 0; i < rows; ++i, x += stride, to += kWide)
        std::memcpy(to, x, static_cast<size_t>(lanes * 2));
}

// ---- the transform ----

// Down the columns, over `rows` rows: whole transforms.
inline void transform_columns(const QuantPlan& plan, int64_t rows, float* panel) {
    for (int64_t i = 0; i < rows; i += plan.hadamard, panel += plan.hadamard * kWide)
        for (int64_t k = 0; k < kWide; k += VL)
            transform_rows(panel + k, plan.hadamard, kWide, plan.signs);
}

// ---- maxima down the columns ----

// The largest magnitude of each column; of those below infinity alone, if `Finite`.
template <bool Finite = false>
INLINE void column_maxima(const float* panel, int64_t rows, int64_t vectors, vu (&m)[4]) {
    const auto each = [&]<int Vectors>() {
        for (int64_t i = 0; i < rows; ++i, panel += kWide) {
#pragma GCC unroll 4
            for (int k = 0; k < Vectors; ++k) {
                vu v = magnitude_bits(load(panel + k * VL));
                if constexpr (Finite) v &= reinterpret_cast<vu>(v < kExponentMask);
                m[k] = larger(m[k], v);
            }
        }
    };
    for (vu& v : m) v = vu{};
    switch (vectors) {
        case 1: return each.template operator()<1>();
        case 2: return each.template operator()<2>();
        case 3: return each.template operator()<3>();
        default: return each.template operator()<4>();
    }
}

// As above, of either kind of values.
INLINE void column_maxima(const PanelValues& panel, int64_t rows, int64_t vectors, vu (&m)[4]) {
#if EXTENSOR_LANES == 16
    if (panel.halves) {
        __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int64_t i = 0; i < rows * kWide; i += kWide)
            for (int half = 0; half < 2; ++half)
                most[half] = _mm512_max_epu16(
                    most[half], _mm512_and_si512(_mm512_loadu_si512(panel.halves + i + 2 * VL * half),
                                                 _mm512_set1_epi16(0x7FFF)));
        for (int k = 0; k < 4; ++k) {
            const __m256i mine = _mm512_extracti64x4_epi64(k % 2 ? _mm512_shuffle_i64x2(most[k / 2], most[k / 2], 0x4E) : most[k / 2], 0);
            m[k] = bits_of(widen(reinterpret_cast<vh>(mine), bfloat16{}));
        }
        return;
    }
#endif
    column_maxima(panel.wide, rows, vectors, m);
}

INLINE uint32_t larger_of(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The largest magnitude below infinity in all columns.
inline uint32_t finite_panel_maximum(const PanelValues& panel, int64_t rows) {
    vu m[4];
    column_maxima(panel, rows, 4, m);
    const auto all = [&] { return largest_lane(larger(larger(m[0], m[1]), larger(m[2], m[3]))); };
    if (all() >= kExponentMask) column_maxima<true>(panel.widened(rows), rows, 4, m);
    return all();
}

// Each column's maximum becomes that of its group of `columns`, which divide a panel.
inline void spread_over_groups(vu (&m)[4], int64_t columns) {
    if (columns == 1) return;
    uint32_t each[kWide];
    std::memcpy(each, m, sizeof each);
    for (int64_t j = 0; j < kWide; j += columns) {
        uint32_t most = 0;
        for (int64_t i = j; i < j + columns; ++i) most = each[i] > most ? each[i] : most;
        for (int64_t i = j; i < j + columns; ++i) each[i] = most;
    }
    std::memcpy(m, each, sizeof each);
}

// ---- codes down the columns ----

// Codes of a byte boundary's worth of rows share one word per column: rows of a group, and bytes.
constexpr int group_rows(int bits) { return bits == 4 ? 8 : 4; }
constexpr int group_bytes(int bits) { return group_rows(bits) * bits / 8; }

// Codes of large arrays go past the caches where they come in whole lines: no line is read first.
INLINE bool goes_past(const QuantJob& job) {
    return job.outer * job.rows * job.length * job.inner >= kPastCaches;
}

// Byte b of every lane of four vectors, side by side, to row b of the codes.
struct ByteRows {
    uint8_t* to;
    int64_t stride, lanes;
    bool past;

    INLINE void row(const uint8_t* bytes) {
        std::memcpy(to, bytes, static_cast<size_t>(lanes));
        to += stride;
    }

#if EXTENSOR_LANES == 16
    // Sixteen times four bytes, of which four each in a 128-bit lane follow one another.
    INLINE void line(__m512i bytes) {
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        ordered(_mm512_permutexvar_epi32(order, bytes));
    }

    INLINE void ordered(__m512i bytes) {
        if (lanes >= 64)
            store_line(to, bytes, past);
        else
            _mm512_mask_storeu_epi8(to, (__mmask64{1} << lanes) - 1, bytes);
        to += stride;
    }
#endif

    INLINE void store(const vu (&w)[4], int count) {
#if EXTENSOR_LANES == 16
        const __m512i turn = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        __m512i v[4];
        for (int k = 0; k < 4; ++k)
            v[k] = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(w[k]), turn);
        const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
        const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        const __m512i rows[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                                 _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
        for (int r = 0; r < count; ++r) line(rows[r]);
#elif EXTENSOR_LANES == 8
        const __m256i turn = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        __m256i v[4];
        for (int k = 0; k < 4; ++k)
            v[k] = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(w[k]), turn);
        const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
        const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
        const __m256i rows[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                                 _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
        for (int r = 0; r < count; ++r) {
            alignas(32) uint8_t bytes[kWide];
            const __m256i ordered = _mm256_permutevar8x32_epi32(rows[r], order);
            if (lanes == kWide) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), ordered);
                to += stride;
            } else {
                _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), ordered);
                row(bytes);
            }
        }
#else
        for (int r = 0; r < count; ++r) {
            uint8_t bytes[kWide];
            for (int k = 0; k < 4; ++k) store_codes(bytes + k * VL, w[k] >> (8 * r) & 255u);
            row(bytes);
        }
#endif
    }
};

// Random words of a panel's values, or one row of the constant that rounds as a tie rule says.
struct PanelWords {
    const uint32_t* at = nullptr;
    int64_t stride = 0;

    INLINE vu operator()(int64_t row, int k) const { return load(at + row * stride + k * VL); }
};

// See panels_avx512.hpp.
template <int Index, class T>
struct PanelJoin;

// Codes of whole groups of rows of a floating-point grid, all of whose blocks are plain (see
// tiles.hpp). `bounded`: rounding to nearest, no value saturates.
template <int Index, bool Words>
void code_panel(const float* panel, int64_t rows, int64_t vectors, const vf (&apply)[4],
                float element_scale, [[maybe_unused]] bool bounded, PanelWords words, ByteRows out,
                const Ahead& ahead, TileCounts& counts) {
    constexpr Element e = kElements[Index];
#if EXTENSOR_LANES == 16
    if constexpr (!Words && PanelJoin<Index, float>::kCovers) {
        if (element_scale == 1)
            return bounded ? PanelJoin<Index, float>::template code<true>(panel, rows, apply, out, ahead, counts)
                           : PanelJoin<Index, float>::template code<false>(panel, rows, apply, out, ahead, counts);
    }
#endif
    constexpr int group = group_rows(e.bits), bytes = group_bytes(e.bits);
    const Coder<Index, Words> coder{.element_scale = element_scale};
    TileCounts mine;
    vu joined[4] = {};
    for (int64_t i = 0; i < rows; i += group, panel += group * kWide) {
        for (int64_t k = 0; k < vectors; ++k) {
            vu word = {};
#pragma GCC unroll 8
            for (int r = 0; r < group; ++r) {
                if (k == 0) ahead.row(i + r);
                const vu random = Words ? words(i + r, static_cast<int>(k)) : vu{};
                word |= coder(load(panel + r * kWide + k * VL), apply[k], random, mine)
                        << static_cast<uint32_t>(e.bits * r);
            }
            joined[k] = word;
        }
        out.store(joined, bytes);
    }
    counts.saturated += mine.saturated;
    counts.flushed += mine.flushed;
}

using PanelCoder = void (*)(const float*, int64_t, int64_t, const vf (&)[4], float, bool, PanelWords,
                            ByteRows, const Ahead&, TileCounts&);

template <bool Words, size_t... Index>
inline PanelCoder pick_panel_coder(int element, std::index_sequence<Index...>) {
    constexpr PanelCoder coders[] = {&code_panel<Index, Words>...};
    return coders[element];
}

// The coder for an element of the table, or null where there is none.
template <bool Words>
inline PanelCoder panel_coder(int element) {
    constexpr auto all = std::make_index_sequence<sizeof(kElements) / sizeof(Element)>();
    return kElements[element].is_float ? pick_panel_coder<Words>(element, all) : nullptr;
}

}  // namespace EXTENSOR_ISA

#if EXTENSOR_LANES == 16
#include "panels_avx512.hpp"
#endif

namespace EXTENSOR_ISA {

// Whether a call codes panels of bfloat16 without widening them, blocks without numbers apart.
inline bool takes_halves([[maybe_unused]] const Call& call) {
#if EXTENSOR_LANES == 16
    return call.job.type == FloatType::bfloat16 && call.job.codes && !call.words() && !divides(call.plan) &&
           !call.plan.hadamard && call.plan.element_scale == 1 && HalfPanelCoder(call.plan).code;
#else
    return false;
#endif
}

}  // namespace EXTENSOR_ISA
