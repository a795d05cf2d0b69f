// Rounds values on a grid and decodes them again, for blocks that hold only numbers: the operations
// of `quantize_vector` that such blocks need, in the same order; or fewer, with the same bits,
// where scales are powers of two.
#pragma once

#include "quantize/quantize.hpp"

namespace EXTENSOR_ISA {

// Adds one to the lanes of `saturated` where r is above `top`, or of `flushed` where a value that
// was not zero became zero.
#if EXTENSOR_LANES == 16
INLINE void add_where(vi& lanes, __mmask16 mask) {
    const __m512i count = reinterpret_cast<__m512i>(lanes);
    lanes = reinterpret_cast<vi>(_mm512_mask_sub_epi32(count, mask, count, _mm512_set1_epi32(-1)));
}
INLINE void count_saturated(vf r, vf top, LaneCounts& counted) {
    add_where(counted.saturated, _mm512_cmp_ps_mask(r, top, _CMP_GT_OQ));
}
INLINE void count_flushed(vf x, vf value, LaneCounts& counted) {
    const __mmask16 zero = _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_EQ_OQ);
    add_where(counted.flushed, _mm512_mask_cmp_ps_mask(zero, x, _mm512_setzero_ps(), _CMP_NEQ_UQ));
}
// The magnitude of r with the sign of x.
INLINE vf with_sign(vf r, vf x) {
    return reinterpret_cast<vf>(
        _mm512_ternarylogic_epi32(reinterpret_cast<__m512i>(r), reinterpret_cast<__m512i>(x),
                                  _mm512_set1_epi32(static_cast<int>(kMagnitude)), 0xE4));
}
#else
INLINE void count_saturated(vf r, vf top, LaneCounts& counted) { counted.saturated -= r > top; }
INLINE void count_flushed(vf x, vf value, LaneCounts& counted) {
    counted.flushed -= (x != 0.0f) & (value == 0.0f);
}
INLINE vf with_sign(vf r, vf x) {
    return float_of((bits_of(r) & kMagnitude) | (bits_of(x) & kSign));
}
#endif

// Scales that are not one: by one no product is rounded.
enum class Factors { none, element, all };

// What the blocks of a call have in common. `Bounded`: no value is beyond the grid's top.
template <bool Words, bool Divide, bool Bounded, Factors Which>
struct PlainValues {
    struct Block {
        vf apply, decode;
    };

    const Grid grid;
    const vf element_scale, tensor_scale;

    explicit PlainValues(const Call& call)
        : grid(call.scaler.grid),
          element_scale(splat(call.plan.element_scale)),
          tensor_scale(splat(call.scaler.tensor_scale)) {}

    INLINE Block block(vf apply, vf decode) const { return {apply, decode}; }

    INLINE vf operator()(vf x, vu word, const Block& b, LaneCounts& counted) const {
        vf y = Divide ? x / b.apply : x * b.apply;
        if constexpr (Which != Factors::none) y = y * element_scale;
        vf magnitude = float_of(bits_of(y) & kMagnitude);
        if constexpr (!Bounded) magnitude = smaller(magnitude, splat(grid.clamp));
        vf r = rounded_magnitude<Words>(magnitude, word, grid);
        if constexpr (!Bounded) {
            count_saturated(r, splat(grid.top), counted);
            r = smaller(r, splat(grid.top));
        }
        vf value = with_sign(r, y);
        if constexpr (Divide)  // a fixed-point grid has no negative zero
            value = float_of(bits_of(value) & (grid.float_mask | reinterpret_cast<vu>(r > 0.0f)));
        value = value * b.decode;
        if constexpr (Which == Factors::all) value = value * tensor_scale;
        count_flushed(x, value, counted);
        return value;
    }
};

// Nearest values under scales that are powers of two, within `is_moderate`: a grid times a power of
// two is a grid, on which x itself is rounded.
template <bool Bounded>
struct PowerValues {
    struct Block {
        vu lowest;  // the exponent field of the least normal value
        vf top;
    };

    const uint32_t lowest, up;
    const float top;

    explicit PowerValues(const Call& call)
        : lowest(call.scaler.grid.lowest - (127u << 23)),
          up(static_cast<uint32_t>(23 - call.scaler.grid.mantissa_bits) << 23),
          top(call.scaler.grid.top) {}

    INLINE Block block(vf, vf decode) const { return {bits_of(decode) + lowest, decode * top}; }

    INLINE vf operator()(vf x, vu, const Block& b, LaneCounts& counted) const {
        // As round_magnitude, on both sides of zero.
        const vf anchor = with_sign(float_of(larger(bits_of(x) & kExponentMask, b.lowest) + up), x);
        vf r = (x + anchor) - anchor;
        if constexpr (!Bounded) {
            r = float_of(bits_of(r) & kMagnitude);
            count_saturated(r, b.top, counted);
            r = smaller(r, b.top);
        }
        const vf value = with_sign(r, x);
        count_flushed(x, value, counted);
        return value;
    }
};

#if EXTENSOR_LANES == 16
// The same at random, and times an element scale, where nothing saturates.
template <bool Scaled>
struct RandomPowerValues {
    struct Block {
        vu lowest;  // the exponent field of the least normal value
    };

    const uint32_t lowest, mantissa_bits;
    const vf element_scale;

    explicit RandomPowerValues(const Call& call)
        : lowest(call.scaler.grid.lowest - (127u << 23)),
          mantissa_bits(static_cast<uint32_t>(call.scaler.grid.mantissa_bits)),
          element_scale(splat(call.plan.element_scale)) {}

    INLINE Block block(vf, vf decode) const { return {bits_of(decode) + lowest}; }

    // As rounded_magnitude: the word's part of the spacing is taken away, the rest rounded up by an
    // addition whose last place is the spacing, also where the rest is below zero.
    INLINE vf operator()(vf x, vu word, const Block& b, LaneCounts& counted) const {
        const vf y = Scaled ? x * element_scale : x;
        const vu exponent = larger(bits_of(y) & kExponentMask, b.lowest);
        const vf anchor = float_of(exponent + (((23u - mantissa_bits) << 23) | 0x400000u));
        const vf part = float_of(exponent - ((32u + mantissa_bits) << 23));
        const __m512 rest = _mm512_fnmadd_round_ps(rounded_down(word), part,
                                                   float_of(bits_of(y) & kMagnitude), kUp);
        const vf value = with_sign(_mm512_add_round_ps(rest, anchor, kUp) - anchor, y);
        count_flushed(x, value, counted);
        return value;
    }
};
#endif

// Whether a call's blocks of numbers are rounded this way.
template <bool Divide>
INLINE bool has_plain_values(const Call& call) {
    const Grid& grid = call.scaler.grid;
    return (Divide || grid.float_mask) && grid.zeros == Zeros::kept && !grid.offset;
}

// body<Round>() with the type above that the call needs. `bounded`: its blocks' largest magnitudes
// say so; `moderate`: they all are.
template <bool Words, bool Divide, class Body>
INLINE void for_plain_values(const Call& call, bool bounded, bool moderate, Body body) {
    const bool within = bounded && call.scaler.bounded();
    const bool scaled = call.plan.element_scale != 1;
    if constexpr (!Words && !Divide)
        if (call.plan.scale == Scale::e8m0 && call.plan.statistic != Statistic::percentile &&
            moderate && !scaled)
            return within ? body.template operator()<PowerValues<true>>()
                          : body.template operator()<PowerValues<false>>();
#if EXTENSOR_LANES == 16
    if constexpr (Words && !Divide)
        if (call.plan.stochastic && call.plan.scale == Scale::e8m0 && moderate && within)
            return scaled ? body.template operator()<RandomPowerValues<true>>()
                          : body.template operator()<RandomPowerValues<false>>();
#endif
    const auto with = [&]<Factors Which>() {
        within ? body.template operator()<PlainValues<Words, Divide, true, Which>>()
               : body.template operator()<PlainValues<Words, Divide, false, Which>>();
    };
    if (call.scaler.tensor_scale != 1) return with.template operator()<Factors::all>();
    scaled ? with.template operator()<Factors::element>()
           : with.template operator()<Factors::none>();
}

}  // namespace EXTENSOR_ISA
