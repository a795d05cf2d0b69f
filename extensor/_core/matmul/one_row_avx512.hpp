// One float32 row times weights of four-bit codes or integers of eight bits, on AVX-512: what
// decoding text repeats. Rows of weights in groups are here for few_rows_vnni.cpp as well.
//
// Values of four bits are bfloat16 numbers. One permutation of 16-bit lanes decodes 32 codes, whose
// halves become float32 by a shift and a mask. Lane l of a vector of words holds elements 8 l ..
// 8 l + 7, as in weight_only.cpp.
#pragma once

#include "common/threads.hpp"
#include "matmul/weight_only.hpp"

namespace EXTENSOR_ISA {
namespace {

// A vector's first bytes, at most all: a shift by 64 bits would be one by none.
constexpr __mmask64 first_bytes(int64_t count) {
    return count < 4 * VL ? (__mmask64{1} << count) - 1 : ~__mmask64{0};
}

// The sums of the lanes of four vectors.
INLINE __m128 sums_of(const vf (&v)[4]) {
    const auto halves = [](vf a, vf b) __attribute__((always_inline)) {
        return _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    };
    const __m512d ab = halves(v[0], v[1]), cd = halves(v[2], v[3]);
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

#if defined(__AVX512VBMI__)
// Which bytes hold four codes of 6 bits, or eight of 5, in each group of as many bytes.
template <int Bits>
struct Spread {
    alignas(64) uint8_t index[64];
    constexpr Spread() : index{} {
        constexpr int kGroup = Bits == 6 ? 4 : 8;
        for (int i = 0; i < 64; ++i)
            index[i] = static_cast<uint8_t>(i / kGroup * (kGroup * Bits / 8) + i % kGroup);
    }
};
template <int Bits>
inline constexpr Spread<Bits> kSpread;

// 64 codes of 5 or 6 bits as bytes, with bits of others above.
template <int Bits>
INLINE __m512i bytes_of(__m512i packed) {
    const __m512i at = _mm512_load_si512(kSpread<Bits>.index);
    const __m512i shifts =
        _mm512_set1_epi64(Bits == 6 ? 0x322C26'20'120C0600 : 0x231E1914'0F0A0500);
    return _mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(at, packed));
}
#endif

constexpr int kGroupRows = 4;          // of weights at a time
constexpr int64_t kPrefetch = 4096;    // bytes ahead of the codes in use, in the order of memory
constexpr int64_t kTaskBytes = 32768;  // of codes, at least, in a task
constexpr int64_t kScaledRows = 32;    // of weights, whose scales are decoded at a time

// Four rows of weights: their codes, and the scales and offsets of their tiles.
struct RowGroup {
    const uint8_t* codes[kGroupRows];
    const float *scale[kGroupRows], *offset[kGroupRows];
};

// body(group, total) adds up the lanes of a group's results, of each of M rows of x; every row of
// weights has its own scales. There may be several weights in one format, all for the same x.
template <int M, class Body>
void for_row_groups(const Weights* all, int count, bool offsets, Body body) {
    const WeightGemm& first = all->g;
    int64_t n = 0, tasks = 0;
    for (int i = 0; i < count; ++i) n += all[i].g.w.rows;
    const int64_t tiles = ceil_div(first.k, first.w.tile_length);
    // Few tasks, whose rows follow each other in memory: a task begins without what it reads.
    const int64_t share = most(ceil_div(n, 4 * threads::get()), kTaskBytes / first.w.row_bytes);
    const int64_t task_rows = round_up(least(share, ceil_div(n, threads::get())), kGroupRows);
    for (int i = 0; i < count; ++i) tasks += ceil_div(all[i].g.w.rows, task_rows);
    threads::run(tasks, n * first.k, [&](int64_t task) {
        const Weights* mine = all;
        for (; task * task_rows >= mine->g.w.rows; ++mine)
            task -= ceil_div(mine->g.w.rows, task_rows);
        const Weights& s = *mine;
        const WeightGemm& g = s.g;
        const int64_t last = least(g.w.rows, (task + 1) * task_rows);
        float* scale =
            threads::scratch_of<float>(threads::Slot::partial, 2 * (kScaledRows * tiles + VL));
        float* offset = scale + kScaledRows * tiles + VL;
        for (int64_t begin = task * task_rows; begin < last; begin += kScaledRows) {
            const int64_t end = least(last, begin + kScaledRows);
            if (begin == task * task_rows) s.prefetch_scales(begin, end);
            s.prefetch_scales(end, least(last, end + kScaledRows));
            // Rows whose tiles follow each other: not across the end of a super-block.
            const bool apart = g.w.tile_rows > 1 || (g.w.super_scales && tiles % g.w.super_tiles);
            const int64_t rows = apart ? 1 : end - begin;
            for (int64_t row = begin; row < end; row += rows) {
                const int64_t at = (row - begin) * tiles;
                s.decode_scales(row, 0, rows * tiles, scale + at);
                if (offsets) s.decode_offsets(row, 0, rows * tiles, offset + at);
            }
            for (int64_t row = begin; row < end; row += kGroupRows) {
                RowGroup group;
                for (int r = 0; r < kGroupRows; ++r) {
                    const int64_t mine = least(row + r, end - 1);  // beyond the end: not stored
                    group.codes[r] = g.w.codes + mine * g.w.row_bytes;
                    group.scale[r] = scale + (mine - begin) * tiles;
                    group.offset[r] = offset + (mine - begin) * tiles;
                }
                vf total[M][kGroupRows] = {};
                body(group, total);
                const auto stored = static_cast<__mmask8>((1u << least(kGroupRows, end - row)) - 1);
                for (int m = 0; m < M; ++m)
                    _mm_mask_storeu_ps(
                        g.out + m * g.w.rows + row, stored,
                        _mm_mul_ps(sums_of(total[m]), _mm_set1_ps(g.w.tensor_scale)));
            }
        }
    });
}

template <Offset Kind>
void one_row_codes4(const Weights& s) {
    constexpr int R = kGroupRows;
    const int64_t k = s.g.k;
    const ScaleLanes scale_lanes(s.g.w.tile_length);
    alignas(64) uint16_t bits16[32];
    for (int i = 0; i < 32; ++i) {
        uint32_t bits;
        std::memcpy(&bits, s.table + i % 16, 4);
        bits16[i] = static_cast<uint16_t>(bits >> 16);
    }
    const __m512i table = _mm512_load_si512(bits16);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    // The last chunk of a row: its bytes, and the lanes that belong to the row.
    const int64_t whole = k / kChunk, rest = k % kChunk;
    const __mmask64 bytes = first_bytes((rest + 1) / 2);
    const auto lanes = static_cast<__mmask16>((1u << ceil_div(rest, 8)) - 1);
    for_row_groups<1>(&s, 1, Kind != Offset::none, [&](const RowGroup& group, vf(&totals)[1][R]) {
        vf(&total)[R] = totals[0];
        const float *x = s.x, *sums = s.sums;
        int64_t at = 0, seen = 0;  // which scale, and the chunks under it so far
        const auto add = [&](const __m512i(&words)[R],
                             __mmask16 some) __attribute__((always_inline)) {
            vf low[R] = {}, high[R] = {};
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const vf first = load(x + j * VL), second = load(x + (j + 4) * VL);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const __m512i two =
                        _mm512_permutexvar_epi16(_mm512_srli_epi16(words[r], 4 * j), table);
                    low[r] = multiply_add(reinterpret_cast<vf>(_mm512_slli_epi32(two, 16)), first,
                                          low[r]);
                    high[r] = multiply_add(reinterpret_cast<vf>(_mm512_and_si512(two, upper)),
                                           second, high[r]);
                }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                vf part = low[r] + high[r];
                if constexpr (Kind != Offset::none) {
                    const vf offset = scale_lanes(group.offset[r] + at), sum = load(sums);
                    if constexpr (Kind == Offset::zero)
                        part -= offset * sum;
                    else
                        total[r] = _mm512_mask3_fmadd_ps(offset, sum, total[r], some);
                }
                total[r] =
                    _mm512_mask3_fmadd_ps(part, scale_lanes(group.scale[r] + at), total[r], some);
            }
            if (!scale_lanes.broadcast || ++seen == scale_lanes.chunks_per_scale)
                at += scale_lanes.step, seen = 0;
            x += kChunk, sums += VL;
        };
        __m512i words[R];
        for (int64_t c = 0; c < whole; ++c) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                __builtin_prefetch(group.codes[0] + (c * R + r) * 4 * VL + kPrefetch);
                words[r] = _mm512_loadu_si512(group.codes[r] + c * 4 * VL);
            }
            add(words, 0xFFFF);
        }
        if (rest) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                words[r] = _mm512_maskz_loadu_epi8(bytes, group.codes[r] + whole * 4 * VL);
            add(words, lanes);
        }
    });
}

// Sixteen codes of eight bits as float32; of e4m3 divided by 256, without its NaN.
template <Code8 Kind>
INLINE vf values_of(__m128i bytes) {
    if constexpr (Kind == Code8::integer)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
    else if constexpr (Kind == Code8::e5m2)
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8));
    else
        return _mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                                _mm256_set1_epi16(static_cast<int16_t>(0xBF80))));
}

// Codes of 8 bits in tiles of whole vectors, or one for the row.
template <Code8 Kind>
void one_row_codes8(const Weights& s) {
    constexpr int R = kGroupRows;
    const int64_t k = s.g.k, tile = least(k, s.g.w.tile_length);
    for_row_groups<1>(&s, 1, false, [=, &s](const RowGroup& group, vf(&totals)[1][R]) {
        vf(&total)[R] = totals[0];
        __m128i twice[R] = {};  // the largest magnitudes of e4m3: 0xFE is twice its NaN
        for (int64_t begin = 0, t = 0; begin < k; begin += tile, ++t) {
            const int64_t end = least(k, begin + tile);
            vf part[R] = {};
            const auto add = [&](int64_t i, __mmask16 some) __attribute__((always_inline)) {
                const vf values = load(s.x + i);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const __m128i bytes = _mm_maskz_loadu_epi8(some, group.codes[r] + i);
                    if constexpr (Kind == Code8::e4m3)
                        twice[r] = _mm_max_epu8(twice[r], _mm_add_epi8(bytes, bytes));
                    part[r] = multiply_add(values_of<Kind>(bytes), values, part[r]);
                }
            };
            int64_t i = begin;
            for (; i + 2 * VL <= end; i += 2 * VL) {
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    __builtin_prefetch(group.codes[0] + R * i + r * 2 * VL + kPrefetch);
                add(i, 0xFFFF), add(i + VL, 0xFFFF);
            }
            for (; i < end; i += VL) add(i, static_cast<__mmask16>((1u << least(VL, end - i)) - 1));
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                total[r] = multiply_add(part[r], splat(group.scale[r][t]), total[r]);
        }
        for (int r = 0; r < R && Kind == Code8::e4m3; ++r)
            if (_mm_cmpeq_epi8_mask(twice[r], _mm_set1_epi8(-2)))
                total[r] = splat(__builtin_nanf(""));
    });
}

// Whether `one_row` multiplies these operands.
inline bool takes_one_row(const WeightGemm& g) {
    const Element& e = kElements[g.w.element];
    if (g.m != 1 || g.w.tile_rows != 1) return false;
    if (e.bits == 4) return true;
    const bool vectors = g.w.tile_length % VL == 0 || g.w.tile_length >= g.k;
    return e.bits == 8 && offset_of(g.w) == Offset::none && vectors;
}

// `s.x` is packed, and fits the first cache.
inline void one_row(const Weights& s) {
    const Element& e = kElements[s.g.w.element];
    if (e.bits == 8 && !e.is_float) return one_row_codes8<Code8::integer>(s);
    if (e.bits == 8)
        return e.mantissa_bits == 3 ? one_row_codes8<Code8::e4m3>(s)
                                    : one_row_codes8<Code8::e5m2>(s);
    switch (offset_of(s.g.w)) {
        case Offset::none: return one_row_codes4<Offset::none>(s);
        case Offset::zero: return one_row_codes4<Offset::zero>(s);
        default: return one_row_codes4<Offset::minimum>(s);
    }
}

}  // namespace
}  // namespace EXTENSOR_ISA
