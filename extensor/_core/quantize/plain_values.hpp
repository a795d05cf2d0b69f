// Rounds values on a grid and decodes them again, for blocks that hold only numbers: the operations
// of `quantize_vector` that such blocks need, in the same order.
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
INLINE void count_saturated(vf r, float top, LaneCounts& counted) {
    add_where(counted.saturated, _mm512_cmp_ps_mask(r, _mm512_set1_ps(top), _CMP_GT_OQ));
}
INLINE void count_flushed(vf x, vf value, LaneCounts& counted) {
    const __mmask16 zero = _mm512_cmp_ps_mask(value, _mm512_setzero_ps(), _CMP_EQ_OQ);
    add_where(counted.flushed, _mm512_mask_cmp_ps_mask(zero, x, _mm512_setzero_ps(), _CMP_NEQ_UQ));
}
#else
INLINE void count_saturated(vf r, float top, LaneCounts& counted) { counted.saturated -= r > top; }
INLINE void count_flushed(vf x, vf value, LaneCounts& counted) {
    counted.flushed -= (x != 0.0f) & (value == 0.0f);
}
#endif

// What the blocks of a call have in common. `Bounded`: no value is beyond the grid's top. `Scaled`:
// the elements' or the tensor's scale is not one, by which no product is rounded.
template <bool Words, bool Divide, bool Bounded, bool Scaled>
struct PlainValues {
    const Grid grid;
    const vf element_scale, tensor_scale;

    explicit PlainValues(const Call& call)
        : grid(call.scaler.grid),
          element_scale(splat(call.plan.element_scale)),
          tensor_scale(splat(call.scaler.tensor_scale)) {}

    INLINE vf operator()(vf x, vu word, vf apply, vf decode, LaneCounts& counted) const {
        vf y = Divide ? x / apply : x * apply;
        if constexpr (Scaled) y = y * element_scale;
        vf magnitude = float_of(bits_of(y) & kMagnitude);
        if constexpr (!Bounded) magnitude = smaller(magnitude, splat(grid.clamp));
        vu exponent, steps;
        vf r = round_magnitude<Words>(magnitude, word, grid, exponent, steps);
        if constexpr (!Bounded) {
            count_saturated(r, grid.top, counted);
            r = smaller(r, splat(grid.top));
        }
        vu sign = bits_of(y) & kSign;
        if constexpr (Divide)  // a fixed-point grid has no negative zero
            sign &= grid.float_mask | reinterpret_cast<vu>(r > 0.0f);
        vf value = float_of(bits_of(r) | sign) * decode;
        if constexpr (Scaled) value = value * tensor_scale;
        count_flushed(x, value, counted);
        return value;
    }
};

// Whether a call's blocks of numbers are rounded this way.
template <bool Divide>
INLINE bool has_plain_values(const Call& call) {
    const Grid& grid = call.scaler.grid;
    return (Divide || grid.float_mask) && grid.zeros == Zeros::kept && !grid.offset;
}

// body<Bounded, Scaled>() as the call needs it; `bounded`: its blocks' largest magnitudes say so.
template <class Body>
INLINE void for_plain_values(const Call& call, bool bounded, Body body) {
    const bool scaled = call.plan.element_scale != 1 || call.scaler.tensor_scale != 1;
    if (bounded && call.scaler.bounded() && call.plan.element_scale <= 1)
        scaled ? body.template operator()<true, true>() : body.template operator()<true, false>();
    else
        scaled ? body.template operator()<false, true>() : body.template operator()<false, false>();
}

}  // namespace EXTENSOR_ISA
