// Block scales and element rounding on vectors: extensor/quant/{scale_rules,rounding,families}.py
// again, with the same single float32 operations in the same order.
#pragma once

#include "elements.hpp"

namespace EXTENSOR_ISA {

INLINE vu bits_of(vf v) { return reinterpret_cast<vu>(v); }
INLINE vf float_of(vu v) { return reinterpret_cast<vf>(v); }
#if EXTENSOR_LANES == 16
INLINE vf smaller(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vu larger(vu a, vu b) {
    return reinterpret_cast<vu>(
        _mm512_max_epu32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
#else
INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }
INLINE vu larger(vu a, vu b) { return a > b ? a : b; }
#endif

// An element grid for rounding |y|. Its spacing at |y| is 2**-m times the power of two at or below
// |y|, or below `lowest` if |y| is smaller; a fixed-point grid ignores the exponent of y.
struct Grid {
    uint32_t exponent_mask, lowest, code_mask, max_code, float_mask;
    int mantissa_bits, bits;
    float top, clamp, smallest;

    explicit Grid(const Element& e)
        : exponent_mask(e.is_float ? kExponentMask : 0),
          lowest(static_cast<uint32_t>(e.min_exponent + 127) << 23),
          code_mask((1u << e.bits) - 1), max_code(static_cast<uint32_t>(e.max_code)),
          float_mask(e.is_float ? ~0u : 0u), mantissa_bits(e.mantissa_bits), bits(e.bits) {
        const int exponent = e.is_float ? e.max_code >> e.mantissa_bits : 1;
        const int significand = e.is_float
                                    ? (e.max_code & ((1 << e.mantissa_bits) - 1)) | 1 << mantissa_bits
                                    : e.max_code;
        top = static_cast<float>(significand) *
              power_of_two(exponent - 1 + e.min_exponent - e.mantissa_bits);
        smallest = power_of_two(e.min_exponent - e.mantissa_bits);
        clamp = power_of_two(e.emax + 2);  // rounds above the top and stays small
    }
};

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
        const vi floor = __builtin_convertvector(scaled, vi);
        const vf fraction = scaled - __builtin_convertvector(floor, vf);  // exact
#if defined(__AVX512F__)
        const vu threshold = reinterpret_cast<vu>(_mm512_cvt_roundps_epu32(
            fraction * 4294967296.0f, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
#else
        // ceil(fraction * 2**32) in two halves, since only signed conversions exist.
        const vf shifted = fraction * 65536.0f;
        const vi high = __builtin_convertvector(shifted, vi);
        const vf rest = (shifted - __builtin_convertvector(high, vf)) * 65536.0f;
        vi low = __builtin_convertvector(rest, vi);
        low -= __builtin_convertvector(low, vf) < rest;  // minus all ones is plus one
        const vu threshold = reinterpret_cast<vu>(high << 16) + reinterpret_cast<vu>(low);
#endif
        const vi rounded = floor - (threshold > word);
        steps = reinterpret_cast<vu>(rounded);
        return __builtin_convertvector(rounded, vf) * float_of(spacing);
    }
}

// What each lane's block needs to be coded and decoded.
struct Scales {
    vf apply;   // values are multiplied by it (or divided, where Divide)
    vf decode;  // grid values are multiplied by it; NaN for a block without numbers
    vu live;    // zero for such a block: its values count as zero
    vu stored;  // the byte, or the float's bits
};

struct Tally {
    vi saturated = {}, flushed = {};  // lanes hold fewer than 2**31 within one piece of work
};

// One vector of values: coded, and decoded again.
template <bool Words, bool Divide, bool Codes>
INLINE vf quantize_vector(vf x, vu word, const Scales& s, vf element_scale, vf tensor_scale,
                          const Grid& g, Tally& tally, vu& code) {
    x = float_of(bits_of(x) & s.live);
    const vf y = (Divide ? x / s.apply : x * s.apply) * element_scale;
    const vf magnitude = smaller(float_of(bits_of(y) & kMagnitude), splat(g.clamp));
    vu exponent, steps;
    vf r = round_magnitude<Words>(magnitude, word, g, exponent, steps);
    const vi over = r > g.top;
    tally.saturated -= over;
    r = over ? splat(g.top) : r;
    const vu sign = bits_of(y) & kSign;
    if constexpr (Codes) {
        vu n = ((exponent - g.lowest) >> (23 - g.mantissa_bits)) + steps;
        n = n < g.max_code ? n : splat(g.max_code);
        const vu negative = reinterpret_cast<vu>(reinterpret_cast<vi>(sign) >> 31);
        const vu flip = negative & ~g.float_mask;  // two's complement, or a sign bit
        code = (((n ^ flip) - flip) & g.code_mask) |
               ((sign >> (32 - g.bits)) & g.float_mask);
    }
    // A fixed-point grid has no negative zero.
    const vu kept = sign & (g.float_mask | reinterpret_cast<vu>(r > 0.0f));
    const vf value = (float_of(bits_of(r) | kept) * s.decode) * tensor_scale;
    tally.flushed -= (x != 0.0f) & (value == 0.0f);
    return value;
}

// Block scales from maxima, once per array: a plan and what it needs to know of the whole array.
struct Scaler {
    const QuantPlan& plan;
    const Element& element;
    Grid grid;
    float reciprocal_max, encode_factor = 1, tensor_scale = 1;
    int lowest_byte = 0;  // scale window: no block's exponent (plus 127) may be smaller

    explicit Scaler(const QuantPlan& p)
        : plan(p), element(kElements[p.element]), grid(element), reciprocal_max(1.0f / grid.top) {}

    bool needs_global() const { return plan.scale == Scale::ue4m3 || plan.window >= 0; }

    // `amax`: the largest finite magnitude (ue4m3), or the largest of the finite blocks' maxima.
    void set_global(float amax) {
        if (plan.scale == Scale::ue4m3) {
            float encode = 2688.0f / amax;
            if (!(encode < kFloatMax)) encode = kFloatMax;
            if (amax == 0 || encode == 0) encode = 1;
            tensor_scale = 1.0f / encode;
            encode_factor = encode * (1.0f / 6.0f);
        } else if (plan.window >= 0 && (amax > 0 || plan.rule == Rule::one)) {
            vf v = splat(amax);
            lowest_byte = reinterpret_cast<vi>(exponent_byte(bits_of(v)))[0] - plan.window;
        }
    }

    // Exponent + 127 by the rule, for finite maxima; may leave 0..254, and is right where it does
    // not matter for a subnormal maximum only up to the clamp at 0.
    INLINE vu exponent_byte(vu amax) const {
        vu up, bits = amax;
        switch (plan.rule) {
            case Rule::floor: return (bits >> 23) - static_cast<uint32_t>(element.emax);
            case Rule::even:
                return ((bits + (1u << (22 - element.mantissa_bits))) >> 23) -
                       static_cast<uint32_t>(element.emax);
            case Rule::one: return splat(127u);
            case Rule::rceil: bits = bits_of(float_of(bits) * reciprocal_max); break;
            default: break;
        }
        const vu mantissa = bits & kMantissaMask, field = bits >> 23;
        up = reinterpret_cast<vu>(mantissa > (field > 0u ? vu{} : splat(0x400000u)));
        return field - up - (plan.rule == Rule::rceil ? 0u : static_cast<uint32_t>(element.emax));
    }

    INLINE Scales of(vu amax) const {
        switch (plan.scale) {
            case Scale::e8m0: return e8m0(amax);
            case Scale::ue4m3: return ue4m3(amax);
            default: return float32(amax);
        }
    }

    INLINE Scales e8m0(vu amax) const {
        const vu finite = reinterpret_cast<vu>(amax < kExponentMask);
        const vu infinite = reinterpret_cast<vu>(amax == kExponentMask);
        const vu zero = reinterpret_cast<vu>(amax == 0u);
        vi exponent = reinterpret_cast<vi>(exponent_byte(amax & finite));
        exponent = exponent < lowest_byte ? vi{} + lowest_byte : exponent;
        exponent = exponent < 0 ? vi{} : exponent;
        exponent = exponent > 254 ? vi{} + 254 : exponent;
        vu byte = reinterpret_cast<vu>(exponent);
        if (plan.rule != Rule::one) byte &= ~zero;
        byte = (byte & finite) | (~finite & (infinite ? splat(plan.mx_inf_byte) : splat(255u)));
        Scales s;
        s.stored = byte;
        s.live = reinterpret_cast<vu>(byte != 255u);
        const vu inverse = 254u - byte;  // byte 254: 2**-127, subnormal
        s.apply = float_of(byte == 254u ? splat(0x400000u) : (inverse << 23) & s.live);
        // Zeros stay zeros under any scale: 1 spares a multiplication by the subnormal 2**-127.
        vu decode = byte == 0u ? splat(0x400000u) : byte << 23;
        decode = zero ? splat(0x3F800000u) : decode;
        s.decode = float_of(s.live ? decode : splat(kNaN));
        return s;
    }

    INLINE Scales ue4m3(vu amax) const {
        const Grid scale_grid(kElements[kScaleElement]);
        const vu finite = reinterpret_cast<vu>(amax < kExponentMask);
        const vu zero = reinterpret_cast<vu>(amax == 0u);
        const vf base = smaller(float_of(amax & finite) * encode_factor, splat(scale_grid.top));
        vu exponent, steps;
        const vf value = round_magnitude<false>(base, vu{}, scale_grid, exponent, steps);
        vu code = ((exponent - scale_grid.lowest) >> (23 - scale_grid.mantissa_bits)) + steps;
        vf inverse = smaller(1.0f / (value * tensor_scale), splat(kFloatMax));
        if (!plan.nv_tiny_saturates) inverse = float_of(bits_of(inverse) & reinterpret_cast<vu>(code != 0u));
        code = zero ? splat(plan.nv_zero_byte) : code;
        Scales s;
        s.stored = finite ? code : splat(0x7Fu);
        s.live = finite;
        s.apply = inverse;
        s.decode = float_of(finite ? bits_of(value) : splat(kNaN));
        return s;
    }

    INLINE Scales float32(vu amax) const {
        const vu finite = reinterpret_cast<vu>(amax < kExponentMask);
        vf ratio = float_of(amax & finite) / grid.top;
        if (plan.rule == Rule::one) ratio = splat(1.0f);
        ratio = ratio == 0.0f ? splat(1.0f) : ratio;
        Scales s;
        s.live = finite;
        s.apply = ratio;
        s.decode = float_of(finite ? bits_of(ratio) : splat(kNaN));
        s.stored = bits_of(s.decode);
        return s;
    }
};

}  // namespace EXTENSOR_ISA
