// A block's E8M0 scale from its largest magnitude. Macros: CODEC_RULE, CODEC_EMAX, CODEC_MANTISSA,
// CODEC_RECIPROCAL_TOP.

// Exponent + 127 under the rule, for finite maxima. For a subnormal maximum it is right up to the
// clamp at 0 only.
DEVICE int exponent_byte(u32 amax) {
    u32 bits = amax;
#if CODEC_RULE == 0  // floor
    return static_cast<int>(bits >> 23) - CODEC_EMAX;
#elif CODEC_RULE == 3                                        // even
    return static_cast<int>((bits + (1u << (22 - CODEC_MANTISSA))) >> 23) - CODEC_EMAX;
#elif CODEC_RULE == 1 || CODEC_RULE == 2 || CODEC_RULE == 8  // rceil, ceil, mse: rceil first
#if CODEC_RULE != 2
    bits = bits_of(__fmul_rn(float_of(bits), CODEC_RECIPROCAL_TOP));
#endif
    const u32 field = bits >> 23, mantissa = bits & kMantissa;
    return static_cast<int>(field + (mantissa > (field ? 0u : 0x400000u))) -
           (CODEC_RULE != 2 ? 0 : CODEC_EMAX);
#else  // one
    return 127;
#endif
}
