// Rows of block-scaled weights with their scales, and the packed x, for weight_only.cpp.
#pragma once

#include "common/cache_lines.hpp"
#include "common/elementwise.hpp"
#include "matmul/codes8.hpp"

namespace EXTENSOR_ISA {

constexpr int64_t kChunk = 8 * VL;  // four-bit codes in one vector

// What a tile's values are less, or more: w = scale * (code - zero point), or
// w = scale * (code - least code) + minimum.
enum class Offset { none, zero, minimum };

inline Offset offset_of(const BlockedMatrix& w) {
    return w.minimums ? Offset::minimum : w.zero_points ? Offset::zero : Offset::none;
}

struct Weights {
    const WeightGemm& g;
    ScaleReader scales;
    float table[256];
    float unit, x_unit;           // powers of two folded into the scales and into x
    const float* x = nullptr;     // [m][x_stride], zero-padded; four bits: [chunk][nibble][lane]
    const float* sums = nullptr;  // with zero points, four bits: [m][chunk][lane] sums of x
    int64_t x_stride = 0, sum_stride = 0;

    explicit Weights(const WeightGemm& g) : g(g), scales(g.w, g.k), unit(1), x_unit(1) {
        const Element& e = kElements[g.w.element];
        decode_table(e, table);
        if (g.w.minimums)  // codes count from the least one
            for (int code = 0; code < 1 << e.bits; ++code)
                table[code] += static_cast<float>(1 << (e.bits - 1));
        if (e.bits == 8 && !e.is_float) unit = power_of_two(-e.mantissa_bits);
#if defined(EXTENSOR_HAS_F16C)
        if (e.bits == 8 && e.is_float && e.mantissa_bits == 3) x_unit = 256;  // e4m3 as float16
#endif
    }

    // Scales `tile` .. `tile + count` of one row as floats times `unit`, and VL zeros.
    void decode_scales(int64_t row, int64_t tile, int64_t count, float* to) const {
        const int64_t at = scales.at(row, tile);
        for (int i = 0; i < VL; ++i) to[count + i] = 0;
        if (g.w.super_scales)
            return scale_integers(row, tile, count, g.w.scales, g.w.super_scales, unit, to);
        if (!is_byte(g.w.scale)) return floats(g.w.scales, at, count, unit, to);
        int64_t t = 0;
        const uint8_t* from = static_cast<const uint8_t*>(g.w.scales) + at;
        if (g.w.scale == Scale::e8m0) {
            for (; t + VL <= count; t += VL) {
                const vu byte = widen(from + t);
                vu bits = byte == 0u ? splat(0x400000u) : byte << 23;
                bits = byte == 255u ? splat(kNaN) : bits;
                store(to + t, reinterpret_cast<vf>(bits) * unit);
            }
        }
#if defined(EXTENSOR_HAS_F16C)
        else {
            uint8_t most = 0;
            for (int64_t i = 0; i < count; ++i) most = from[i] > most ? from[i] : most;
            for (; most < 0x7F && t + VL <= count; t += VL) {  // beyond: NaN, or a sign
#if EXTENSOR_LANES == 16
                const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + t));
                const vf values =
                    _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7));
#else
                const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + t));
                const vf values = _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7));
#endif
                store(to + t, values * (256.0f * unit));
            }
        }
#endif
        for (; t < count; ++t) to[t] = scales(row, tile + t) * unit;
    }

    // Zero points or minimums of the same tiles, and VL zeros.
    void decode_offsets(int64_t row, int64_t tile, int64_t count, float* to) const {
        const int64_t at = scales.at(row, tile);
        for (int i = 0; i < VL; ++i) to[count + i] = 0;
        if (g.w.zero_points) {
            for (int64_t t = 0; t < count; ++t) to[t] = g.w.zero_points[at + t];
        } else if (g.w.super_minimums) {
            scale_integers(row, tile, count, g.w.minimums, g.w.super_minimums, -1, to);
        } else {
            floats(g.w.minimums, at, count, 1, to);
        }
    }

    // Asks for the scales and offsets of rows begin .. end.
    void prefetch_scales(int64_t begin, int64_t end) const {
        const int64_t from = scales.at(begin, 0), to = scales.at(end, 0);
        const int64_t size = g.w.scale == Scale::float32 ? 4 : g.w.scale == Scale::float16 ? 2 : 1;
        const auto ask = [=](const void* array, int64_t bytes) {
            if (array)
                prefetch(static_cast<const char*>(array) + from * bytes, (to - from) * bytes);
        };
        ask(g.w.scales, size), ask(g.w.minimums, size), ask(g.w.zero_points, 1);
    }

private:
    void floats(const void* stored, int64_t at, int64_t count, float factor, float* to) const {
        int64_t t = 0;
        if (g.w.scale == Scale::float32) {
            const float* from = static_cast<const float*>(stored) + at;
            for (; t < count; ++t) to[t] = from[t] * factor;
            return;
        }
        const auto* halves = static_cast<const uint16_t*>(stored) + at;
#if defined(EXTENSOR_HAS_F16C)
        for (; t + VL <= count; t += VL) store(to + t, load_wide(halves + t) * factor);
#endif
        for (; t < count; ++t) to[t] = half_value(halves[t]) * factor;
    }

    // Integers of one row times the float16 of their super-block, then times 1, -1 or a unit.
    void scale_integers(int64_t row, int64_t tile, int64_t count, const void* stored,
                        const uint16_t* supers, float factor, float* to) const {
        const auto* from = static_cast<const uint8_t*>(stored) + scales.at(row, tile);
        supers += row * ceil_div(scales.tiles, g.w.super_tiles);
        int64_t t = 0;
#if EXTENSOR_LANES == 16
        const int64_t per = g.w.super_tiles;
        for (const bool fits = tile == 0 && VL % per == 0; fits && t + VL <= count; t += VL) {
            const auto some = static_cast<__mmask16>((1u << VL / per) - 1);
            const vf size = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, supers + t / per));
            vi of_lane;
            for (int i = 0; i < VL; ++i) of_lane[i] = static_cast<int>(i / per);
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + t));
            const __m512i values = g.w.scale == Scale::int8 ? _mm512_cvtepi8_epi32(bytes)
                                                            : _mm512_cvtepu8_epi32(bytes);
            store(to + t, _mm512_cvtepi32_ps(values) * factor *
                              _mm512_permutexvar_ps(reinterpret_cast<__m512i>(of_lane), size));
        }
#endif
        while (t < count) {
            const int64_t super = (tile + t) / g.w.super_tiles;
            const float size = half_value(supers[super]) * factor;
            for (const int64_t end = least(count, (super + 1) * g.w.super_tiles - tile); t < end;
                 ++t)
                to[t] = size * static_cast<float>(g.w.scale == Scale::int8
                                                      ? static_cast<int8_t>(from[t])
                                                      : from[t]);
        }
    }
};

// The arguments of a kernel: rows of weights from `row` on, rows of x from `first` on, elements
// start .. end. `start` is a multiple of a chunk.
struct Part {
    int64_t row, first, start, end;
    int64_t tile, scale_stride;  // the scale at `start`; floats between the scales of two rows
    const float *scale, *zero;
    vf* total;  // [row][total_stride], added to
    int64_t total_stride;
};

void weight_panel_product(const WeightGemm&);  // weight_panels.cpp
// Several weights of floats times the same one, two or four rows: few_rows_floats.cpp.
void few_rows_of_floats(const Weights* all, int count);

// Whether tiles begin and end with lanes of so many elements, and vectors with tiles or within one.
inline bool fits_lanes(int64_t tile, int64_t lane, int64_t k) {
    const int64_t vector = lane * VL;
    return tile >= k || tile % vector == 0 || (tile % lane == 0 && vector % tile == 0);
}

// Whether no sum of x times unscaled codes can overflow: every |x| is at most 2^60.
inline bool moderate(const WeightGemm& g) {
    constexpr uint32_t kLargest = (60 + 127) << 23;
    vu largest = {};
    for (int64_t i = 0; i < g.m * g.k; i += VL) {
        const vu magnitude = reinterpret_cast<vu>(load_at(g.x, i, g.m * g.k)) & kMagnitude;
        largest = magnitude > largest ? magnitude : largest;
    }
    for (int i = 0; i < VL; ++i)
        if (largest[i] > kLargest) return false;
    return true;
}

// Values of four-bit codes.
struct Table16 {
#if defined(__AVX512F__)
    __m512 values;
    explicit Table16(const float* t) : values(_mm512_loadu_ps(t)) {}
    INLINE vf operator[](vu code) const {  // only the low four bits of each lane count
        return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(code), values);
    }
#elif defined(__AVX2__)
    __m256 low, high;
    explicit Table16(const float* t) : low(_mm256_loadu_ps(t)), high(_mm256_loadu_ps(t + 8)) {}
    INLINE vf operator[](vu code) const {
        const __m256i i = reinterpret_cast<__m256i>(code);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(i, 28));
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                                upper);
    }
#else
    float values[16];
    explicit Table16(const float* t) { std::memcpy(values, t, sizeof values); }
    INLINE vf operator[](vu code) const {
        vf v;
        for (int i = 0; i < VL; ++i) v[i] = values[code[i] & 15];
        return v;
    }
#endif
};

// Puts the scales of one vector of codes into its lanes, each of so many elements.
struct ScaleLanes {
    vi index;
    bool broadcast;            // a chunk lies under one scale
    int64_t step;              // scales from chunk to chunk
    int64_t chunks_per_scale;  // where broadcast

    explicit ScaleLanes(int64_t tile, int64_t lane = 8)
        : index{},
          broadcast(tile >= lane * VL),
          step(broadcast ? 1 : lane * VL / tile),
          chunks_per_scale(ceil_div(tile, lane * VL)) {
        for (int i = 0; i < VL && !broadcast; ++i) index[i] = static_cast<int>(i * lane / tile);
    }

    // `at` is readable for VL floats.
    INLINE vf operator()(const float* at) const {
        if (broadcast) return splat(*at);
#if defined(__AVX512F__)
        return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(index), load(at));
#elif defined(__AVX2__)
        return _mm256_permutevar8x32_ps(load(at), reinterpret_cast<__m256i>(index));
#else
        vf v;
        for (int i = 0; i < VL; ++i) v[i] = at[index[i]];
        return v;
#endif
    }
};

}  // namespace EXTENSOR_ISA
