// A block's float scale and zero point from its extremes. Include it after input.cuh. Macros:
// CODEC_BITS, CODEC_TOP, CODEC_RULE_ONE (scales are 1), CODEC_ZERO_POINTS, CODEC_FLOAT16_SCALES.

#include "common/float16.cuh"

#if CODEC_FLOAT16_SCALES
typedef u16 Stored;
#else
typedef u32 Stored;  // a float's bits
#endif

// Extremes of values: the bits of the largest magnitude; CODEC_ZERO_POINTS: of the largest values
// above and below 0.
struct Most {
    u32 high, low;
};

DEVICE void join(Most& most, const Most& other) {
    most.high = larger(most.high, other.high);
    if (CODEC_ZERO_POINTS) most.low = larger(most.low, other.low);
}

struct Scale {
    float apply, decode;  // 1 / scale, and the scale
    u32 stored, live;     // the stored bits; all ones for a finite block
    int zero;
};

DEVICE Scale block_scale(const Most& most) {
    const bool finite = most.high < kExponent && (!CODEC_ZERO_POINTS || most.low < kExponent);
    const float top = float_of(finite ? most.high : 0);
    Scale s;
#if CODEC_ZERO_POINTS
    constexpr double kLeast = -(1 << (CODEC_BITS - 1));
    const double bottom = finite ? -static_cast<double>(float_of(most.low)) : 0.0;
    const double steps = static_cast<double>((1 << CODEC_BITS) - 1);
    float scale =
        CODEC_RULE_ONE
            ? 1.0f
            : static_cast<float>(__ddiv_rn(__dsub_rn(static_cast<double>(top), bottom), steps));
#else
    float scale = CODEC_RULE_ONE ? 1.0f : __fdiv_rn(top, CODEC_TOP);
#endif
    if (scale == 0) scale = 1;
#if CODEC_FLOAT16_SCALES
    const u16 half = float_to_half_scale(scale);
    scale = half_to_float(half);
    s.stored = finite ? half : 0x7E00u;
#else
    s.stored = finite ? bits_of(scale) : kNaN;
#endif
    s.zero = 0;
#if CODEC_ZERO_POINTS
    const double zero = rint(__dsub_rn(kLeast, __ddiv_rn(bottom, static_cast<double>(scale))));
    s.zero = static_cast<int>(fmin(fmax(zero, kLeast), -kLeast - 1));
#endif
    s.decode = scale;
    s.apply = __frcp_rn(scale);
    s.live = finite ? ~0u : 0;
    return s;
}
