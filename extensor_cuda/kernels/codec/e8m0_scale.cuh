// A block's E8M0 scale from its largest magnitude. Macros: RULE, EMAX, MANTISSA, RECIPROCAL_TOP.

// Exponent + 127 by the rule, for finite maxima. For a subnormal maximum it is right only up to the
// clamp at 0.
__device__ __forceinline__ int exponent_byte(u32 amax) {
    u32 bits = amax;
#if RULE == 0  // floor
    return static_cast<int>(bits >> 23) - EMAX;
#elif RULE == 3  // even
    return static_cast<int>((bits + (1u << (22 - MANTISSA))) >> 23) - EMAX;
#elif RULE == 1 || RULE == 2  // rceil, ceil
#if RULE == 1
    bits = bits_of(__fmul_rn(float_of(bits), RECIPROCAL_TOP));
#endif
    const u32 field = bits >> 23, mantissa = bits & kMantissa;
    return static_cast<int>(field + (mantissa > (field ? 0u : 0x400000u))) - (RULE == 1 ? 0 : EMAX);
#else  // one
    return 127;
#endif
}
