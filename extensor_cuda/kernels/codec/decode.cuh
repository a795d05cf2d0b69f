// Decodes codes of an element grid to float32, exactly. Macros: CODEC_BITS, CODEC_MANTISSA,
// CODEC_IS_FLOAT; for float grids CODEC_MIN_EXPONENT, CODEC_MAX_CODE, CODEC_HAS_INFINITY.

DEVICE float nan_value() { return __uint_as_float(0x7FC00000u); }

// A float grid's code is a float with other widths. Shifted into place it is off by a power of two,
// subnormals included.
DEVICE float grid_value(
    u32 code, int bits, int mantissa, int min_exponent, u32 max_code, bool infinite) {
    const u32 magnitude = code & ((1u << (bits - 1)) - 1), sign = code >> (bits - 1) << 31;
    const float shifted = __uint_as_float(magnitude << (23 - mantissa));
    float value = __fmul_rn(shifted, __uint_as_float(static_cast<u32>(253 + min_exponent) << 23));
    if (magnitude > max_code)
        value = infinite && magnitude == max_code + 1 ? __uint_as_float(0x7F800000u) : nan_value();
    return __uint_as_float(__float_as_uint(value) | sign);
}

DEVICE float element_value(u32 code) {
#if CODEC_IS_FLOAT
    return grid_value(
        code, CODEC_BITS, CODEC_MANTISSA, CODEC_MIN_EXPONENT, CODEC_MAX_CODE, CODEC_HAS_INFINITY);
#else
    const int integer = static_cast<int>(code << (32 - CODEC_BITS)) >> (32 - CODEC_BITS);
    return __fmul_rn(
        static_cast<float>(integer), __uint_as_float(static_cast<u32>(127 - CODEC_MANTISSA) << 23));
#endif
}
