// One float32 row times weights of four-bit codes, on AVX-512: what decoding text repeats.
//
// Values of four bits are bfloat16 numbers. One permutation of 16-bit lanes decodes 32 codes, whose
// halves become float32 by a shift and a mask. Lane l of a vector of words holds elements 8 l ..
// 8 l + 7, as in weight_only.cpp.
#pragma once

#include "common/threads.hpp"
#include "matmul/weight_only.hpp"

namespace EXTENSOR_ISA {
namespace {

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

// `s.x` is packed; every row of weights has its own scales.
template <bool Zero>
void one_row(const Weights& s) {
    constexpr int R = 4;  // rows of weights at a time
    const WeightGemm& g = s.g;
    const int64_t n = g.w.rows, k = g.k, tile = g.w.tile_length, tiles = ceil_div(k, tile);
    const ScaleLanes scale_lanes(tile);
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
    const __mmask64 bytes = (__mmask64{1} << ((rest + 1) / 2)) - 1;
    const auto lanes = static_cast<__mmask16>((1u << ceil_div(rest, 8)) - 1);
    const int64_t share = round_up(ceil_div(n, 8 * threads::get()), R);
    const int64_t task_rows = most(16, least(64, share));
    threads::run(ceil_div(n, task_rows), n * k, [&](int64_t task) {
        const int64_t begin = task * task_rows, end = least(n, begin + task_rows);
        const int64_t count = (end - begin) * tiles;
        float* scales = threads::scratch_of<float>(threads::Slot::partial, 2 * (count + VL));
        float* zeros = scales + count + VL;
        s.decode_scales(begin, 0, count, scales);
        if (Zero) s.decode_zeros(begin, 0, count, zeros);
        for (int64_t row = begin; row < end; row += R) {
            const uint8_t* codes[R];
            const float *scale[R], *zero[R];
            for (int r = 0; r < R; ++r) {
                const int64_t mine = least(row + r, end - 1);  // beyond the end: not stored
                codes[r] = g.w.codes + mine * g.w.row_bytes;
                scale[r] = scales + (mine - begin) * tiles;
                zero[r] = zeros + (mine - begin) * tiles;
            }
            const float *x = s.x, *sums = s.sums;
            vf total[R] = {};
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
                        low[r] = multiply_add(reinterpret_cast<vf>(_mm512_slli_epi32(two, 16)),
                                              first, low[r]);
                        high[r] = multiply_add(reinterpret_cast<vf>(_mm512_and_si512(two, upper)),
                                               second, high[r]);
                    }
                }
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    vf part = low[r] + high[r];
                    if constexpr (Zero) part -= scale_lanes(zero[r] + at) * load(sums);
                    total[r] =
                        _mm512_mask3_fmadd_ps(part, scale_lanes(scale[r] + at), total[r], some);
                }
                if (!scale_lanes.broadcast || ++seen == scale_lanes.chunks_per_scale)
                    at += scale_lanes.step, seen = 0;
                x += kChunk, sums += VL;
            };
            __m512i words[R];
            for (int64_t c = 0; c < whole; ++c) {
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    __builtin_prefetch(codes[r] + c * 4 * VL + 2 * R * g.w.row_bytes);
                    words[r] = _mm512_loadu_si512(codes[r] + c * 4 * VL);
                }
                add(words, 0xFFFF);
            }
            if (rest) {
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    words[r] = _mm512_maskz_loadu_epi8(bytes, codes[r] + whole * 4 * VL);
                add(words, lanes);
            }
            const __m128 results = _mm_mul_ps(sums_of(total), _mm_set1_ps(g.w.tensor_scale));
            const auto stored = static_cast<__mmask8>((1u << least(R, end - row)) - 1);
            _mm_mask_storeu_ps(g.out + row, stored, results);
        }
    });
}

}  // namespace
}  // namespace EXTENSOR_ISA
