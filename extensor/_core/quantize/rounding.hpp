// Rounds vectors of values to an element grid, with the same single float32 operations in the same
// order as extensor/quant/{rounding,codec_types}.py. Block scales: scales.hpp.
#pragma once

#include "common/elements.hpp"
#include "quantize/kernels.hpp"

namespace EXTENSOR_ISA {

INLINE vu bits_of(vf v) { return reinterpret_cast<vu>(v); }
INLINE vf float_of(vu v) { return reinterpret_cast<vf>(v); }
#if EXTENSOR_LANES == 16
INLINE vf smaller(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vu larger(vu a, vu b) {
    return reinterpret_cast<vu>(
        _mm512_max_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
#else
INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }
INLINE vu larger(vu a, vu b) { return a > b ? a : b; }
#endif

// An element grid for rounding |y|. Its spacing at |y| is 2**-m times the power of two at or below
// |y|, or below `lowest` if |y| is smaller; a fixed-point grid ignores the exponent of y.
struct Grid {
    uint32_t exponent_mask, lowest, code_mask, max_code, float_mask;
    int mantissa_bits, bits;
    float top, limit, clamp, smallest;  // below `limit` nothing saturates
    Zeros zeros = Zeros::kept;
    bool offset = false;  // integers with a zero point

    static Grid half() { return Grid({-1, 16, 10, -14, 15, 0x7BFF, 0x7E00, true}); }

    explicit Grid(const Element& e)
        : exponent_mask(e.is_float ? kExponentMask : 0),
          lowest(static_cast<uint32_t>(e.min_exponent + 127) << 23),
          code_mask((1u << e.bits) - 1),
          max_code(static_cast<uint32_t>(e.max_code)),
          float_mask(e.is_float ? ~0u : 0u),
          mantissa_bits(e.mantissa_bits),
          bits(e.bits) {
        const int exponent = e.is_float ? e.max_code >> e.mantissa_bits : 1;
        const int significand =
            e.is_float ? (e.max_code & ((1 << e.mantissa_bits) - 1)) | 1 << mantissa_bits
                       : e.max_code;
        top = static_cast<float>(significand) *
              power_of_two(exponent - 1 + e.min_exponent - e.mantissa_bits);
        limit = (static_cast<float>(significand) + 0.5f) *
                power_of_two(exponent - 1 + e.min_exponent - e.mantissa_bits);
        smallest = power_of_two(e.min_exponent - e.mantissa_bits);
        clamp = power_of_two(e.emax + 2);  // rounds above the top and stays small
    }
};

#if defined(__AVX512F__)
constexpr int kUp = _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC;

// s - w, w = word / 2**32 in [0, 1), whose ceiling is floor(s) + (frac(s) > w). Rounding w down to
// a float keeps the comparison, as frac(s) is a float; rounding s - w up keeps the ceiling.
INLINE vf rounded_down(vu word) {
    return _mm512_cvt_roundepu32_ps(reinterpret_cast<__m512i>(word),
                                    _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
}
INLINE vf less_word(vf s, vu word) {
    return _mm512_fnmadd_round_ps(rounded_down(word), _mm512_set1_ps(0x1p-32f), s, kUp);
}
#endif

// |y| on the grid continued without a top: the value, and the steps above the binade's spacing
// base. With Words, rounds up exactly when frac * 2**32 > word; else to nearest even.
template <bool Words>
INLINE vf round_magnitude(vf magnitude, vu word, const Grid& g, vu& exponent, vu& steps) {
    exponent = larger(bits_of(magnitude) & g.exponent_mask, splat(g.lowest));
    if constexpr (!Words) {
        // The sum's last place is the grid's spacing, so the addition itself rounds.
        const vu anchor = exponent + (static_cast<uint32_t>(23 - g.mantissa_bits) << 23);
        const vf sum = magnitude + float_of(anchor);
        steps = bits_of(sum) - anchor;
        return sum - float_of(anchor);
    } else {
        const vu spacing = exponent - (static_cast<uint32_t>(g.mantissa_bits) << 23);
        const vf scaled = magnitude * float_of((254u << 23) - spacing);  // exact
#if defined(__AVX512F__)
        const vi rounded =
            reinterpret_cast<vi>(_mm512_cvt_roundps_epi32(less_word(scaled, word), kUp));
#else
        const vi floor = __builtin_convertvector(scaled, vi);
        const vf fraction = scaled - __builtin_convertvector(floor, vf);  // exact
        // ceil(fraction * 2**32) in two halves, since only signed conversions exist.
        const vf shifted = fraction * 65536.0f;
        const vi high = __builtin_convertvector(shifted, vi);
        const vf rest = (shifted - __builtin_convertvector(high, vf)) * 65536.0f;
        vi low = __builtin_convertvector(rest, vi);
        low -= __builtin_convertvector(low, vf) < rest;  // minus all ones is plus one
        const vu threshold = reinterpret_cast<vu>(high << 16) + reinterpret_cast<vu>(low);
        const vi rounded = floor - (threshold > word);
#endif
        steps = reinterpret_cast<vu>(rounded);
        return __builtin_convertvector(rounded, vf) * float_of(spacing);
    }
}

// The same without steps; a zero may have either sign.
template <bool Words>
INLINE vf rounded_magnitude(vf magnitude, vu word, const Grid& g) {
#if defined(__AVX512F__)
    if constexpr (Words) {
        const vu exponent = larger(bits_of(magnitude) & g.exponent_mask, splat(g.lowest));
        const vu spacing = exponent - (static_cast<uint32_t>(g.mantissa_bits) << 23);
        const vf rest = less_word(magnitude * float_of((254u << 23) - spacing), word);
        return _mm512_roundscale_ps(rest, kUp) * float_of(spacing);
    }
#endif
    vu exponent, steps;
    return round_magnitude<Words>(magnitude, word, g, exponent, steps);
}

// What it takes to encode and decode each lane's block.
struct Scales {
    vf apply;       // values are multiplied by it (or divided, where Divide)
    vf decode;      // grid values are multiplied by it; NaN for a block without numbers
    vu live;        // zero for such a block: its values count as zero
    vu stored;      // the byte, or the float's bits
    vf point = {};  // the code of zero, where the grid is offset
};

// What values are multiplied by under an E8M0 byte, but 255.
INLINE vf inverse_power(vu byte) {
    return float_of(byte == 254u ? splat(0x400000u) : (254u - byte) << 23);  // 2**-127: subnormal
}

struct LaneCounts {
    vi saturated = {}, flushed = {};  // fewer than 2**31 per lane within one task
};

// The signs of codes whose values are y and whose magnitudes are r, where zeros have their own
// rule.
INLINE vu sign_of_zeros(vu sign, vf y, vf r, vu live, Zeros zeros) {
    switch (zeros) {
        case Zeros::zeros_positive: return sign & reinterpret_cast<vu>(y != 0.0f);
        case Zeros::zeros_negative: return sign | (reinterpret_cast<vu>(y == 0.0f) & live & kSign);
        case Zeros::codes_positive: return sign & reinterpret_cast<vu>(r > 0.0f);
        default: return sign;
    }
}

// Integers with a zero point: x's code is its rounded magnitude r, signed, plus the point.
template <bool Codes>
INLINE vf offset_vector(vf x, vf r, vu sign, const Scales& s, vf tensor_scale, const Grid& g,
                        LaneCounts& counted, vu& code) {
    const float high = g.top, low = -g.top - 1.0f;
    vf v = float_of(bits_of(r) | sign) + s.point;
    counted.saturated -= (v < low) | (v > high);
    v = v < low ? splat(low) : v;
    v = v > high ? splat(high) : v;
    if constexpr (Codes)
        code = reinterpret_cast<vu>(__builtin_convertvector(v, vi)) & g.code_mask & s.live;
    const vf value = ((v - s.point) * s.decode) * tensor_scale;
    counted.flushed -= (x != 0.0f) & (value == 0.0f);
    return value;
}

// Encodes one vector of values, and decodes it again.
template <bool Words, bool Divide, bool Codes>
INLINE vf quantize_vector(vf x, vu word, const Scales& s, vf element_scale, vf tensor_scale,
                          const Grid& g, LaneCounts& counted, vu& code) {
    x = float_of(bits_of(x) & s.live);
    const vf y = (Divide ? x / s.apply : x * s.apply) * element_scale;
    const vf magnitude = smaller(float_of(bits_of(y) & kMagnitude), splat(g.clamp));
    vu exponent, steps;
    vf r = round_magnitude<Words>(magnitude, word, g, exponent, steps);
    vu sign = bits_of(y) & kSign;
    if (Divide && g.offset)
        return offset_vector<Codes>(x, r, sign, s, tensor_scale, g, counted, code);
    if (g.zeros != Zeros::kept) sign = sign_of_zeros(sign, y, r, s.live, g.zeros);
    const vi over = r > g.top;
    counted.saturated -= over;
    r = over ? splat(g.top) : r;
    if constexpr (Codes) {
        vu n = ((exponent - g.lowest) >> (23 - g.mantissa_bits)) + steps;
        n = n < g.max_code ? n : splat(g.max_code);
        const vu negative = reinterpret_cast<vu>(reinterpret_cast<vi>(sign) >> 31);
        const vu flip = negative & ~g.float_mask;  // two's complement, or a sign bit
        code = (((n ^ flip) - flip) & g.code_mask) | ((sign >> (32 - g.bits)) & g.float_mask);
    }
    // A fixed-point grid has no negative zero.
    const vu kept = sign & (g.float_mask | reinterpret_cast<vu>(r > 0.0f));
    const vf value = (float_of(bits_of(r) | kept) * s.decode) * tensor_scale;
    counted.flushed -= (x != 0.0f) & (value == 0.0f);
    return value;
}

}  // namespace EXTENSOR_ISA
