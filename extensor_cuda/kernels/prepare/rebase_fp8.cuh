// Rebases FP8 codes to a larger power of two: a subtraction where they stay normal, otherwise
// rounding to nearest even, with counts of changed values.
//
// Macros: CODEC_MANTISSA, CODEC_MIN_EXPONENT (of the smallest normal number), CODEC_MAX_CODE (the
// largest finite magnitude).

constexpr u32 kOnes = 0x01010101u, kAllNaN = 0x7F7F7F7Fu, kTops = 0x80808080u;
constexpr u32 kNormal = 1u << CODEC_MANTISSA,
              kBeyond = CODEC_MAX_CODE +
                        1;        // the smallest normal magnitude, and the first that is not finite
constexpr int kMostBinades = 60;  // every value is below 2^16, so this far down all are 0

struct Changed {
    u32 values, flushed;
};

// Four codes times 2^-shift, shift above 0.
DEVICE u32 rebased(u32 word, int shift, Changed& changed) {
    const u32 magnitudes = word & kAllNaN, least = kNormal * (shift + 1);
    const u32 live = (magnitudes + kAllNaN) & kTops;  // of bytes that are not zero
    // All normal before and after: a bytewise subtraction without borrows.
    if (least < kBeyond && ((magnitudes + kOnes * (0x80u - least)) & kTops) == live &&
        !((magnitudes + kOnes * (0x80u - kBeyond)) & kTops))
        return word - (live >> 7) * (kNormal * shift);
    // As float32 bits a magnitude is the value times 2^(-126 - CODEC_MIN_EXPONENT).
    const float unit = __uint_as_float(static_cast<u32>(253 + CODEC_MIN_EXPONENT - shift) << 23);
    // Its last bit is the smallest number.
    const float magic =
        __uint_as_float(static_cast<u32>(150 + CODEC_MIN_EXPONENT - CODEC_MANTISSA) << 23);
    u32 out = word & kTops;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 code = magnitudes >> (8 * i) & 0x7Fu;
        u32 made = code;
        if (code >= least && code < kBeyond) {
            made = code - kNormal * shift;
        } else if (code < kBeyond) {
            const float value = __uint_as_float(code << (23 - CODEC_MANTISSA)) * unit,
                        sum = value + magic;
            made = __float_as_uint(sum) - __float_as_uint(magic);
            changed.values += sum - magic != value;
            changed.flushed += code && !made;
        }
        out |= made << (8 * i);
    }
    return out;
}
