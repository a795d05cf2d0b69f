// Chunks of values under a float scale: extremes and quotients. Include it after float_scale.cuh.

#define CODEC_DIVIDES 1  // for encode.cuh

DEVICE Most most_of(const float (&x)[kChunk]) {
#if CODEC_ZERO_POINTS
    float high = 0, low = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
        high = max_with_nan(high, x[k]), low = max_with_nan(low, -x[k]);
    return {bits_of(high) & kMagnitude, bits_of(low) & kMagnitude};
#else
    return {chunk_maximum(x), 0};
#endif
}

// Whether a block's largest value is so far beyond the grid that its code would not fit.
DEVICE bool is_far(const Most& most, const Scale& s) {
    return !(__fdiv_rn(float_of(most.high), s.decode) < float_of(CODEC_CLAMP_BITS));
}

// x / scale, rounded like a division: two corrections of the reciprocal's product suffice, unless
// the remainder underflows. That needs x below 2^-101, where the quotient is 0 on any grid to
// nearest.
DEVICE void divide(const float (&x)[kChunk], const Scale& s, float (&y)[kChunk]) {
    if (!CODEC_STOCHASTIC && CODEC_ELEMENT_SCALE == 1.0f && s.decode >= 0x1p-60f &&
        s.decode <= 0x1p60f) {
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
