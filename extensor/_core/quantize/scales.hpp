// Block scales from statistics, on vectors, with the same single float32 operations in the same
// order as extensor/quant/{scale_rules,scale_encoders,nvfp4}.py.
//
// A block's scale follows from one word, its statistic: the bits of its largest magnitude, or,
// where a rule needs more of the block than that, what searched_scales.cpp found:
//     rules that choose a scale     0 for a block of zeros, else the chosen scale byte plus one
//     integers with a zero point    the bits of the scale
//     eden                          as a chosen scale for the codes, and eight bits above it the
//                                   byte that is stored
// In all of them kExponentMask and above stand for a block that holds an infinity or a NaN.
#pragma once

#include "quantize/rounding.hpp"

namespace EXTENSOR_ISA {

// The code of v >= 0, at most the top, on a floating-point grid; and its value.
INLINE vu grid_code(vf v, const Grid& g, vf& value) {
    vu exponent, steps;
    value = round_magnitude<false>(v, vu{}, g, exponent, steps);
    return ((exponent - g.lowest) >> (23 - g.mantissa_bits)) + steps;
}

// The value of codes without sign, of numbers, on a floating-point grid.
INLINE vf grid_value(vu code, const Grid& g) {
    const vf subnormal = __builtin_convertvector(reinterpret_cast<vi>(code), vf) * g.smallest;
    const vu normal = (code << (23 - g.mantissa_bits)) + g.lowest - (1u << 23);
    return code < (1u << g.mantissa_bits) ? subnormal : float_of(normal);
}

// Under eden the largest value becomes a little more than the largest code
// (extensor/quant/nvfp4.py).
constexpr double kEdenTop = 6 / (17.0 / 16 * 0.93);

// Rules that choose the block scale by the block's values.
constexpr bool chooses(const QuantPlan& plan) {
    return plan.rule >= Rule::four_over_six || plan.eden;
}

// Longer blocks are searched after a pass over the whole array.
constexpr int64_t kSearchedLength = 128;

// Rules that choose a scale by the values of a block that a chunk of the array holds.
constexpr bool chooses_in_chunks(const QuantPlan& plan, const QuantJob& job) {
    return chooses(plan) && !plan.eden && plan.statistic == Statistic::amax && job.tile_rows == 1 &&
           job.tile_length <= kSearchedLength;
}

// Rules and statistics that need more of a block than its largest magnitude, of the whole array
// before the first of its chunks is encoded.
constexpr bool needs_more_than_amax(const QuantPlan& plan, const QuantJob& job) {
    return (chooses(plan) && !chooses_in_chunks(plan, job)) || !plan.symmetric ||
           plan.statistic == Statistic::percentile ||
           (plan.statistic == Statistic::running && job.previous);
}

// Whether values are divided by `Scales::apply`, not multiplied.
constexpr bool divides(const QuantPlan& plan) {
    return plan.scale == Scale::ue4m3
               ? plan.rule == Rule::amax && plan.order == Order::model_optimizer
               : !is_byte(plan.scale);
}

// Block scales from statistics, once per array: a plan and what it needs to know of the whole
// array.
struct Scaler {
    const QuantPlan& plan;
    const Element& element;
    Grid grid, scale_grid;
    float reciprocal_max, top_inverse, encode = 1, tensor_amax = 0, tensor_scale = 1;
    int lowest_byte = 0;  // scale window: no block's exponent (plus 127) may be smaller

    explicit Scaler(const QuantPlan& p)
        : plan(p),
          element(kElements[p.element]),
          grid(element),
          scale_grid(p.scale == Scale::float16 ? Grid::half() : Grid(kElements[kScaleElement])),
          reciprocal_max(1.0f / grid.top),
          top_inverse(p.eden ? static_cast<float>(1 / kEdenTop) : 1.0f / 6.0f) {
        if (element.is_float) grid.zeros = p.zeros;
        grid.offset = !p.symmetric;
    }

    // Whether no value is larger than its block's statistic says, and zeros keep their signs, as
    // the encoders of whole tiles assume. A scale that was chosen may be too small for it.
    bool bounded() const {
        return grid.zeros == Zeros::kept && plan.statistic != Statistic::percentile &&
               !chooses(plan);
    }

    bool needs_global() const { return plan.scale == Scale::ue4m3 || plan.window >= 0; }

    // `amax`: the largest finite magnitude (ue4m3), or the largest of the finite blocks' maxima.
    void set_global(float amax) {
        if (plan.scale == Scale::ue4m3) {
            tensor_amax = amax;
            if (divides(plan) || order() == Order::torchao) {
                tensor_scale = amax / 2688.0f;
                if (tensor_scale == 0) tensor_scale = 1;
                return;
            }
            const float target = plan.eden ? static_cast<float>(256 * kEdenTop) : 2688.0f;
            encode = (plan.rule == Rule::four_over_six ? 1536.0f : target) / amax;
            if (!(encode < kFloatMax)) encode = kFloatMax;
            if (amax == 0 || encode == 0) encode = 1;
            tensor_scale = 1.0f / encode;
        } else if (plan.window >= 0 && (amax > 0 || plan.rule == Rule::one)) {
            vf v = splat(amax);
            lowest_byte = reinterpret_cast<vi>(exponent_byte(bits_of(v)))[0] - plan.window;
        }
    }

    // Rules that choose among scales are defined in one order only.
    INLINE Order order() const {
        return plan.rule == Rule::amax ? plan.order : Order::transformer_engine;
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
            case Rule::mse:  // searched_scales.cpp begins with the scale that nothing exceeds
            case Rule::rceil: bits = bits_of(float_of(bits) * reciprocal_max); break;
            default: break;
        }
        const vu mantissa = bits & kMantissaMask, field = bits >> 23;
        up = reinterpret_cast<vu>(mantissa > (field > 0u ? vu{} : splat(0x400000u)));
        return field - up - (plan.rule == Rule::ceil ? static_cast<uint32_t>(element.emax) : 0u);
    }

    INLINE Scales of(vu statistic) const {
        switch (plan.scale) {
            case Scale::e8m0: return e8m0(statistic);
            case Scale::ue4m3: return ue4m3(statistic);
            default: return floating(statistic);
        }
    }

    // The byte of a finite largest magnitude.
    INLINE vu e8m0_byte(vu amax) const {
        vi exponent = reinterpret_cast<vi>(exponent_byte(amax));
        exponent = exponent < lowest_byte ? vi{} + lowest_byte : exponent;
        exponent = exponent < 0 ? vi{} : exponent;
        exponent = exponent > 254 ? vi{} + 254 : exponent;
        return reinterpret_cast<vu>(exponent);
    }

    // The byte as the rule gives it: nothing is clamped, nor are zeros and infinities set apart.
    INLINE vu e8m0_unclamped(vu statistic) const {
        return chooses(plan) ? statistic - 1u : exponent_byte(statistic);
    }

    // The byte that is stored.
    INLINE vu e8m0_stored(vu statistic) const {
        const vu finite = reinterpret_cast<vu>(statistic < kExponentMask);
        const vu infinite = reinterpret_cast<vu>(statistic == kExponentMask);
        vu byte = chooses(plan) ? statistic - 1u : e8m0_byte(statistic & finite);
        if (plan.rule != Rule::one) byte &= reinterpret_cast<vu>(statistic != 0u);
        return (byte & finite) | (~finite & (infinite ? splat(plan.mx_inf_byte) : splat(255u)));
    }

    INLINE Scales e8m0(vu statistic) const {
        const vu byte = e8m0_stored(statistic), zero = reinterpret_cast<vu>(statistic == 0u);
        Scales s;
        s.stored = byte;
        s.live = reinterpret_cast<vu>(byte != 255u);
        const vu divisor = larger(byte, splat(plan.mx_least_byte));
        s.apply = float_of(bits_of(inverse_power(divisor)) & s.live);
        // Zeros stay zeros under any scale: 1 spares a multiplication by the subnormal 2**-127.
        vu decode = byte == 0u ? splat(0x400000u) : byte << 23;
        decode = zero ? splat(0x3F800000u) : decode;
        s.decode = float_of(s.live ? decode : splat(kNaN));
        return s;
    }

    // The e4m3 value that a block of that largest magnitude needs, before rounding.
    INLINE vf ideal(vf amax) const {
        vf base;
        switch (order()) {
            case Order::torchao: base = amax / 6.0f / tensor_scale; break;
            case Order::model_optimizer:
                base = amax / (6.0f * tensor_scale);
                base = base == 0.0f ? splat(1.0f) : base;
                break;
            default: base = amax * (encode * top_inverse);
        }
        return smaller(base, splat(scale_grid.top));
    }

    // What values are multiplied (or divided) by under a block scale.
    INLINE vf applied(vu code, vf value) const {
        if (divides(plan)) return larger(value * tensor_scale, splat(as_float(1)));
        vf inverse = order() == Order::torchao ? (1.0f / tensor_scale) / value
                                               : 1.0f / (value * tensor_scale);
        inverse = smaller(inverse, splat(kFloatMax));
        if (plan.nv_tiny_saturates) return inverse;
        return float_of(bits_of(inverse) & reinterpret_cast<vu>(code != 0u));
    }

    INLINE Scales ue4m3(vu statistic) const {
        const vu finite = reinterpret_cast<vu>(statistic < kExponentMask);
        const vu zero = reinterpret_cast<vu>(statistic == 0u);
        vu code, kept = {};  // of codes; and as it is stored, where that differs
        vf value;
        if (chooses(plan)) {
            code = ((statistic & 0xFFu) - 1u) & finite & ~zero;
            kept = (statistic >> 8) & finite & ~zero;
            value = grid_value(code, scale_grid);
        } else {
            code = grid_code(ideal(float_of(statistic & finite)), scale_grid, value);
            if (plan.nv_least_byte) {
                code = larger(code, splat(plan.nv_least_byte));
                value = larger(value, grid_value(splat(plan.nv_least_byte), scale_grid));
            }
            code &= finite & ~zero;
            value = float_of(bits_of(value) & finite & ~zero);
        }
        Scales s;
        s.apply = applied(code, value);
        if (plan.eden) code = kept, value = grid_value(kept, scale_grid);
        s.stored = finite ? (zero ? splat(plan.nv_zero_byte) : code) : splat(0x7Fu);
        s.live = finite;
        s.decode = float_of(finite ? bits_of(value) : splat(kNaN));
        return s;
    }

    // A ratio rounded to the scale's storage, and what is stored; a scale that is zero is 1 before.
    INLINE vf rounded(vf ratio, vu& stored) const {
        ratio = ratio == 0.0f ? splat(1.0f) : ratio;
        stored = bits_of(ratio);
        if (plan.scale != Scale::float16) return ratio;
        stored = grid_code(smaller(ratio, splat(scale_grid.top)), scale_grid, ratio);
        ratio = stored == 0u ? splat(scale_grid.smallest) : ratio;
        stored = stored == 0u ? splat(1u) : stored;
        return ratio;
    }

    INLINE Scales floating(vu statistic) const {
        Scales s;
        s.live = reinterpret_cast<vu>(statistic < kExponentMask);
        vf ratio = float_of(statistic & s.live);
        if (plan.symmetric) ratio = ratio / grid.top;
        if (plan.symmetric && plan.rule == Rule::one) ratio = splat(1.0f);
        s.apply = rounded(ratio, s.stored);
        s.decode = float_of(s.live ? bits_of(s.apply) : splat(kNaN));
        s.stored = s.live ? s.stored : splat(plan.scale == Scale::float16 ? 0x7E00u : kNaN);
        return s;
    }
};

}  // namespace EXTENSOR_ISA
