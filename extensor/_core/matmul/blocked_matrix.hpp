// Codes and scales of a block-scaled matrix as numbers, for the matrix products.
#pragma once

#include "common/elements.hpp"
#include "matmul/kernels.hpp"

namespace EXTENSOR_ISA {

// Scales by row and tile.
struct ScaleReader {
    const BlockedMatrix& m;
    int64_t tiles;
    float ue4m3[256];

    ScaleReader(const BlockedMatrix& m, int64_t k) : m(m), tiles(ceil_div(k, m.tile_length)) {
        decode_table(kElements[kScaleElement], ue4m3);
    }

    INLINE int64_t at(int64_t row, int64_t tile) const { return row / m.tile_rows * tiles + tile; }

    INLINE float operator()(int64_t row, int64_t tile) const {
        return scale_value(m.scale, m.scales, at(row, tile), ue4m3);
    }
};

// Elements that are small integers times one unit, by code.
struct IntegerTable {
    float unit;
    int lowest;  // integer, of the most negative code
    int8_t values[256];

    explicit IntegerTable(const Element& e)
        : unit(power_of_two(e.is_float ? e.min_exponent - e.mantissa_bits : -e.mantissa_bits)) {
        float decoded[256];
        decode_table(e, decoded);
        lowest = 0;
        for (int code = 0; code < 1 << e.bits; ++code) {
            values[code] = static_cast<int8_t>(static_cast<int>(decoded[code] / unit));
            if (values[code] < lowest) lowest = values[code];
        }
    }
};

// Codes first .. first + count of a row, one per byte; `first` is a multiple of 4.
inline void unpack_run(const uint8_t* row, int64_t first, int64_t count, int bits, uint8_t* to) {
    if (bits == 8) {
        std::memcpy(to, row + first, static_cast<size_t>(count));
        return;
    }
    if (bits == 4) {
        const uint8_t* from = row + first / 2;
        for (int64_t i = 0; i + 1 < count; i += 2) {
            to[i] = from[i / 2] & 15;
            to[i + 1] = from[i / 2] >> 4;
        }
        if (count % 2) to[count - 1] = from[count / 2] & 15;
        return;
    }
    const uint8_t* from = row + first / 4 * 3;
    for (int64_t i = 0; i < count; i += 4, from += 3) {
        const int64_t n = least(4, count - i);
        to[i] = from[0] & 63;
        if (n > 1) to[i + 1] = (from[0] >> 6 | from[1] << 2) & 63;
        if (n > 2) to[i + 2] = (from[1] >> 4 | from[2] << 4) & 63;
        if (n > 3) to[i + 3] = from[2] >> 2;
    }
}

// As unpack_run, then looked up in a table of bytes.
inline void lookup_run(const uint8_t* row, int64_t first, int64_t count, int bits,
                       const int8_t* table, int8_t* to) {
    int64_t i = 0;
#if defined(__AVX2__)
    if (bits == 4) {
        const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        const __m128i low = _mm_set1_epi8(15);
        for (; i + 32 <= count; i += 32) {
            const __m128i packed =
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + (first + i) / 2));
            const __m128i even = _mm_shuffle_epi8(values, _mm_and_si128(packed, low));
            const __m128i odd =
                _mm_shuffle_epi8(values, _mm_and_si128(_mm_srli_epi16(packed, 4), low));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm_unpacklo_epi8(even, odd));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i + 16), _mm_unpackhi_epi8(even, odd));
        }
    }
#endif
    if (i == count) return;
    unpack_run(row, first + i, count - i, bits, reinterpret_cast<uint8_t*>(to + i));
    for (; i < count; ++i) to[i] = table[static_cast<uint8_t>(to[i])];
}

}  // namespace EXTENSOR_ISA
