// Float functions on vectors for activations, softmax and attention: exp and the largest lane.
//
// `multiply_add` fuses where the instruction set can. What is built on it is therefore compared
// within a bound, not by bytes.
#pragma once

#include "common/lanes.hpp"
#include "common/simd.hpp"

namespace EXTENSOR_ISA {

INLINE vf as_float(vu bits) { return reinterpret_cast<vf>(bits); }
INLINE vu as_bits(vf x) { return reinterpret_cast<vu>(x); }
INLINE vf magnitude(vf x) { return as_float(as_bits(x) & splat(uint32_t{0x7fffffff})); }
INLINE vf larger(vf a, vf b) { return b > a ? b : a; }

// The largest lane, in every lane.
INLINE vf largest_lane(vf v) {
    v = larger(v, partner<1>(v));
    v = larger(v, partner<2>(v));
    if constexpr (VL >= 8) v = larger(v, partner<4>(v));
    if constexpr (VL >= 16) v = larger(v, partner<8>(v));
    return v;
}

// e^x for x <= 0, relative error below 4 * 2^-24 (absolute: half the least subnormal); NaN for NaN.
// x = n ln 2 + r, and e^r is its Taylor polynomial: r^8 / 8! < 2^-27 where |r| <= ln 2 / 2.
// Below `least` it is zero, as all of float32 is below -104; an underflow takes 150 cycles.
INLINE vf exp_negative(vf x, float least = -104.0f) {
    const auto zero = x < splat(least);
    x = zero ? splat(0.0f) : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the integer
    const vf shifted = multiply_add(x, splat(1.44269504f), magic);
    const vf n = shifted - magic;
    // ln 2 in two parts; the first has 10 bits, so its products are exact.
    const vf r = multiply_add(n, splat(2.12194440e-4f), multiply_add(n, splat(-0.693359375f), x));
    vf p = splat(1.0f / 5040);
    p = multiply_add(p, r, splat(1.0f / 720));
    p = multiply_add(p, r, splat(1.0f / 120));
    p = multiply_add(p, r, splat(1.0f / 24));
    p = multiply_add(p, r, splat(1.0f / 6));
    p = multiply_add(p, r, splat(0.5f));
    p = multiply_add(p, r, splat(1.0f));
    p = multiply_add(p, r, splat(1.0f));
    // 2^n in two factors, since 2^-151 is no float32. A NaN's n is anything, and NaN stays NaN.
    const vu whole = as_bits(shifted) - splat(uint32_t{0x4b400000});
    const vu half = reinterpret_cast<vu>(reinterpret_cast<vi>(whole) >> 1);
    const vu bias = splat(uint32_t{127});
    const vf power = p * as_float((half + bias) << 23) * as_float((whole - half + bias) << 23);
    return zero ? splat(0.0f) : power;
}

// e^(score - the largest): zero where it would be below 2^-126, no normal number.
INLINE vf exp_score(vf x) { return exp_negative(x, -87.34f); }

}  // namespace EXTENSOR_ISA
