// Decodes block-scaled weights into the panels that a float32 product reads (common/sgemm.hpp).
//
// A panel holds kPanel rows of weights, k by k. VL rows are read together: their packed words are
// transposed while they are packed, so that lane r of a vector holds the codes of row r. One
// transposition serves four or eight codes a word, which makes a panel cheaper to decode than to
// pack from float32. Every value is (code - zero point) * scale * tensor scale, or code * scale +
// minimum, as `dequantize` gives it, bit for bit.
#pragma once

#include "common/sgemm.hpp"
#include "matmul/weight_only.hpp"

namespace EXTENSOR_ISA {

// Floats of 6 and 8 bits. Fields move to their places; the exponent's bias is added, and for
// subnormal codes one more, whose value is then subtracted.
struct FloatCodes {
    uint32_t magnitude, largest, bias;
    int shift, sign;
    float smallest;  // normal number

    explicit FloatCodes(const Element& e)
        : magnitude((1u << (e.bits - 1)) - 1),
          largest(static_cast<uint32_t>(e.max_code) << (23 - e.mantissa_bits)),
          bias(static_cast<uint32_t>(126 + e.min_exponent) << 23),
          shift(23 - e.mantissa_bits),
          sign(32 - e.bits),
          smallest(power_of_two(e.min_exponent)) {}

    INLINE vf operator[](vu code) const {
        const vu bits = (code & magnitude) << shift;
        const vf small = reinterpret_cast<vf>(bits + (bias + (1u << 23))) - smallest;
        vu value = bits < (1u << 23) ? reinterpret_cast<vu>(small) : bits + bias;
        value = bits > largest ? bits | kExponentMask : value;  // infinity and NaN
        return reinterpret_cast<vf>(value | (code << sign & kSign));
    }
};

#if defined(__AVX512F__)
// Floats of 6 bits, looked up: a sign and one of 32 magnitudes.
struct FloatCodes6 {
    __m512 low, high;
    explicit FloatCodes6(const float* t) : low(_mm512_loadu_ps(t)), high(_mm512_loadu_ps(t + 16)) {}
    INLINE vf operator[](vu code) const {  // of an index the low five bits count
        const __m512 found = _mm512_permutex2var_ps(low, reinterpret_cast<__m512i>(code), high);
        return reinterpret_cast<vf>(reinterpret_cast<vu>(found) | (code << 26 & kSign));
    }
};
#endif

// Integers times a unit, counted from `first`.
template <int Bits>
struct IntegerCodes {
    static constexpr int kAbove = 32 - Bits;
    float unit, first;

    explicit IntegerCodes(const Element& e, bool from_least = false)
        : unit(power_of_two(-e.mantissa_bits)), first(from_least ? -(1 << (Bits - 1)) : 0) {}

    INLINE vf operator[](vu code) const {
        const vf value =
            __builtin_convertvector(reinterpret_cast<vi>(code << kAbove) >> kAbove, vf);
        return (value - first) * unit;
    }
};

// Codes that fill whole words, and the words of a row that are transposed at a time.
template <int Bits>
struct Packed {
    static constexpr int words = Bits == 5 ? 5 : Bits == 6 ? 3 : 1, codes = 32 * words / Bits;
    static constexpr int groups = Bits == 6 ? VL / 4 : VL > words ? VL / words : 1;
    static constexpr int vectors = (groups * words + VL - 1) / VL;  // that hold the words
    static constexpr int64_t length = groups * codes, bytes = 4 * groups * words;

    // Code i of the group; bits above the code's mean nothing.
    static INLINE vu code(const vu* group, int i) {
        const int bit = i * Bits, word = bit / 32, at = bit % 32;
        vu code = group[word] >> at;
        if (at + Bits > 32) code |= group[word + 1] << (32 - at);
        return code;
    }
};

// What a panel's VL rows are decoded with: [tile][VL] from the tile at `start` on.
struct PanelScales {
    const float *scale, *offset;  // zero points, minimums, or unused
    float tensor_scale;
    int64_t tile_length;
};

// Elements start .. end of VL rows; element k goes to to[(k - start) * kPanel].
template <int Bits, Offset Kind, class Values>
void decode_panel(const Values& values, const uint8_t* const* rows, int64_t start, int64_t end,
                  const PanelScales& by, float* to) {
    using P = Packed<Bits>;
    const float *next = by.scale, *next_offset = by.offset;
    vf scale = {}, offset = {};
    int64_t boundary = start;  // where the next tile begins
    const auto enter = [&](int64_t k) __attribute__((always_inline)) {
        scale = load(next), next += VL;
        if constexpr (Kind != Offset::none) offset = load(next_offset), next_offset += VL;
        boundary = (k / by.tile_length + 1) * by.tile_length;
    };
    const int64_t ahead = VL * (rows[1] - rows[0]);  // the rows that are read next
    for (int64_t k = start; k < end;) {
        const int64_t bytes = least(P::bytes, ceil_div((end - k) * Bits, 8));
        vf words[P::vectors][VL];
#pragma GCC unroll 16
        for (int r = 0; r < VL; ++r) {
            const uint8_t* from = rows[r] + k * Bits / 8;
            __builtin_prefetch(from + ahead, 0, 2);
            if (P::vectors == 1 && bytes == P::bytes) {
                words[0][r] = load_part(reinterpret_cast<const float*>(from), P::bytes / 4);
            } else {
                alignas(4 * VL) uint8_t some[P::vectors * 4 * VL] = {};
                std::memcpy(some, from, static_cast<size_t>(bytes));
                for (int v = 0; v < P::vectors; ++v)
                    words[v][r] = load(reinterpret_cast<const float*>(some) + v * VL);
            }
        }
        vu by_lane[P::vectors * VL];
        for (int v = 0; v < P::vectors; ++v) {
            transpose(words[v]);
#pragma GCC unroll 16
            for (int r = 0; r < VL; ++r) by_lane[v * VL + r] = reinterpret_cast<vu>(words[v][r]);
        }
        const vu* group = by_lane;
        for (const int64_t last = least(end, k + P::length); k < last; group += P::words) {
#pragma GCC unroll 16
            for (int i = 0; i < P::codes; ++i, ++k, to += kPanel) {
                if (k == boundary) enter(k);
                if (k == last) break;
                vf value = values[P::code(group, i)];
                if constexpr (Kind == Offset::zero) value -= offset;
                value *= scale;
                if constexpr (Kind == Offset::minimum) value += offset;
                store(to, value * by.tensor_scale);
            }
        }
    }
}

}  // namespace EXTENSOR_ISA
