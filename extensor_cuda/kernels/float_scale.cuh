// A block's float scale from its largest magnitude, and values divided by it.

#include "half.cuh"

#define DIVIDES 1  // for encode.cuh

// Of some values: the bits of the largest magnitude; under ZEROS of the largest above 0 and that below it.
struct Most {
    u32 high, low;
};

__device__ __forceinline__ void join(Most& most, const Most& other) {
    most.high = larger(most.high, other.high);
    if (ZEROS) most.low = larger(most.low, other.low);
}

__device__ __forceinline__ Most most_of(const float (&x)[kChunk]) {
#if ZEROS
    float high = 0, low = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) high = max_with_nan(high, x[k]), low = max_with_nan(low, -x[k]);
    return {bits_of(high) & kMagnitude, bits_of(low) & kMagnitude};
#else
    return {chunk_maximum(x), 0};
#endif
}

struct Scale {
    float apply, decode;  // 1 / scale, and the scale
    u32 stored, live;     // the scale's bits as they are stored; all ones for a block of numbers
    int zero;
};

__device__ __forceinline__ Scale block_scale(const Most& most) {
    const bool finite = most.high < kExponent && (!ZEROS || most.low < kExponent);
    const float top = float_of(finite ? most.high : 0);
    Scale s;
#if ZEROS
    constexpr double kLeast = -(1 << (BITS - 1));
    const double bottom = finite ? -static_cast<double>(float_of(most.low)) : 0.0;
    const double steps = static_cast<double>((1 << BITS) - 1);
    float scale = RULE_ONE ? 1.0f : static_cast<float>(__ddiv_rn(__dsub_rn(static_cast<double>(top), bottom), steps));
#else
    float scale = RULE_ONE ? 1.0f : __fdiv_rn(top, TOP);
#endif
    if (scale == 0) scale = 1;
#if HALF
    const u16 half = half_scale(scale);
    scale = half_value(half);
    s.stored = finite ? half : 0x7E00u;
#else
    s.stored = finite ? bits_of(scale) : kNaN;
#endif
    s.zero = 0;
#if ZEROS
    const double zero = rint(__dsub_rn(kLeast, __ddiv_rn(bottom, static_cast<double>(scale))));
    s.zero = static_cast<int>(fmin(fmax(zero, kLeast), -kLeast - 1));
#endif
    s.decode = scale;
    s.apply = __frcp_rn(scale);
    s.live = finite ? ~0u : 0;
    return s;
}

// Whether a block's largest value is so far beyond the grid that its code would not fit.
__device__ __forceinline__ bool is_far(const Most& most, const Scale& s) {
    return !(__fdiv_rn(float_of(most.high), s.decode) < float_of(CLAMP_BITS));
}

// x / scale, as a division rounds it. With the nearest reciprocal two corrections give that too, unless
// a remainder is so small that a float does not hold it: that is so below 2^-101, whose quotient by a
// scale in these bounds is 0 on any grid, to nearest.
__device__ __forceinline__ void divide(const float (&x)[kChunk], const Scale& s, float (&y)[kChunk]) {
    if (!WORDS && ELEMENT_SCALE == 1.0f && s.decode >= 0x1p-60f && s.decode <= 0x1p60f) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            float q = __fmul_rn(x[k], s.apply);
            q = __fmaf_rn(__fmaf_rn(-q, s.decode, x[k]), s.apply, q);
            q = __fmaf_rn(__fmaf_rn(-q, s.decode, x[k]), s.apply, q);
            y[k] = float_of((bits_of(q) & kMagnitude) | (bits_of(x[k]) & kSign));  // of zeros
        }
    } else {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) y[k] = __fdiv_rn(x[k], s.decode);
    }
}

// What a code means without its sign.
__device__ __forceinline__ float magnitude_of(u32 code) {
#if IS_FLOAT
    const u32 magnitude = code & ((1u << (BITS - 1)) - 1);
    return __fmul_rn(float_of(magnitude << (23 - MANTISSA)), float_of(static_cast<u32>(253 + MIN_EXPONENT) << 23));
#else
    return (code & ((1u << BITS) - 1)) != 0;  // at least
#endif
}
