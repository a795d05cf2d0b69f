// Rounds a magnitude to its code. Macros: CODEC_IS_FLOAT, CODEC_MANTISSA, CODEC_MIN_EXPONENT, and
// for rounding CODEC_STOCHASTIC and CODEC_RBITS.

constexpr u32 kLowest = static_cast<u32>(127 + CODEC_MIN_EXPONENT) << 23;

// The code of
//
// y
//
// on the grid without a top, and its `value`. CODEC_STOCHASTIC: up exactly when frac * 2**32 >
// word, otherwise to nearest even.
//
// CODEC_RBITS 8: `word` is the float 128 + w with w = (byte + 1/2) / 256, and the code is ceil(
//
// y
//
// / spacing - w). Two additions round up, the first in steps of at most 2**-16 spacing, of which w
// and every code are multiples.
DEVICE u32 round_magnitude(float y, u32 word, float& value) {
    const float magnitude = fabsf(y);
    const u32 exponent = CODEC_IS_FLOAT ? larger(bits_of(y) & kExponent, kLowest) : kLowest;
    // The addition rounds, because the sum's last place is the grid's spacing.
    const u32 anchor = exponent + (static_cast<u32>(23 - CODEC_MANTISSA) << 23);
#if CODEC_STOCHASTIC && CODEC_RBITS == 8
    const u32 spacing = exponent - (static_cast<u32>(CODEC_MANTISSA) << 23);
    const float below = __fadd_ru(magnitude, -float_of(word + spacing - (127u << 23)));
    const float sum = __fadd_ru(below, float_of(anchor + 129));  // one more: in the anchor's binade
    const u32 steps = bits_of(sum) - (anchor + 1);
    value = __fsub_rn(sum, float_of(anchor + 1));
#elif CODEC_STOCHASTIC
    const float sum = __fadd_rz(magnitude, float_of(anchor));
    const float rest = __fsub_rn(magnitude, __fsub_rn(sum, float_of(anchor)));  // exact
    const u32 spacing = exponent - (static_cast<u32>(CODEC_MANTISSA) << 23);
    const float parts = __fmul_rn(rest, float_of((286u << 23) - spacing));  // times 2**32 / spacing
    const u32 steps = bits_of(sum) - anchor + (__float2uint_ru(parts) > word ? 1 : 0);
    value = __fmul_rn(__uint2float_rn(steps), float_of(spacing));
#else
    const float sum = __fadd_rn(magnitude, float_of(anchor));
    const u32 steps = bits_of(sum) - anchor;
    value = __fsub_rn(sum, float_of(anchor));
#endif
    return ((exponent - kLowest) >> (23 - CODEC_MANTISSA)) + steps;
}
