// Converts float16 values and scales with integer instructions.

DEVICE float half_to_float(u16 raw) {
    const u32 magnitude = static_cast<u32>(raw & 0x7FFF) << 13, sign = static_cast<u32>(raw >> 15)
                                                                       << 31;
    if (magnitude >= 0x0F800000u) return __uint_as_float(magnitude | 0x7F800000u | sign);
    return __uint_as_float(
        __float_as_uint(__uint_as_float(magnitude) * __uint_as_float(239u << 23)) | sign);
}

// The nearest float16 of a positive float, ties to even, kept above 0 and finite.
DEVICE u16 float_to_half_scale(float scale) {
    const u32 bits = __float_as_uint(scale);
    u32 half;
    if (bits < 0x38800000u) {  // a multiple of 2^-24, or half of one
        const u32 field = bits >> 23, shift = 126 - (field ? field : 1);
        const u32 significand = (bits & 0x7FFFFFu) | (field ? 0x800000u : 0u);
        const u32 rest = shift < 25 ? significand & ((1u << shift) - 1) : 0,
                  middle = 1u << (shift < 25 ? shift - 1 : 0);
        half = shift < 25 ? significand >> shift : 0;
        half += shift < 25 && (rest > middle || (rest == middle && half & 1u));
    } else {
        half = (bits + 0xFFFu + (bits >> 13 & 1u) - 0x38000000u) >> 13;
    }
    return half == 0 ? 1 : half > 0x7BFFu ? 0x7BFF : half;
}
