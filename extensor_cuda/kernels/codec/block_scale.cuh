// A block's scale from its largest magnitude: E8M0 under every rule, and NVFP4's E4M3. Configured
// by CODEC_RULE and the format's CODEC_ macros.

// ---- scales ----

// The grid of NVFP4's scales.
constexpr u32 kScaleLowest = static_cast<u32>(127 + CODEC_SCALE_MIN_EXPONENT) << 23;

struct Scale {
    float apply, decode;  // `apply` multiplies values, `decode` multiplies grid values
    u32 stored, live;     // the byte; all ones for a finite block
};

// Whether a block's largest value is so far beyond the grid that its code would not fit. True for a
// block with NaN.
DEVICE bool is_far(u32 amax, const Scale& s) {
    return !(fabsf(__fmul_rn(float_of(amax), s.apply)) < float_of(CODEC_CLAMP_BITS));
}

#include "codec/e8m0_scale.cuh"

#if CODEC_UE4M3
// The E4M3 code nearest to a non-negative scale, saturated; `value` is what it means.
DEVICE u32 scale_code(float expected, float& value) {
    const float base = fminf(expected, CODEC_SCALE_TOP);
    const u32 exponent = larger(bits_of(base) & kExponent, kScaleLowest);
    const u32 anchor = exponent + (static_cast<u32>(23 - CODEC_SCALE_MANTISSA) << 23);
    const float sum = __fadd_rn(base, float_of(anchor));  // its last place is the grid's spacing
    value = __fsub_rn(sum, float_of(anchor));
    return ((exponent - kScaleLowest) >> (23 - CODEC_SCALE_MANTISSA)) + bits_of(sum) - anchor;
}

DEVICE float scale_inverse(u32 code, float value, const Tensor& tensor) {
    const float inverse = fminf(__frcp_rn(__fmul_rn(value, tensor.scale)), kFloatMax);
    return !CODEC_TINY_SATURATES && code == 0 ? 0.0f : inverse;
}

DEVICE Scale scale_of(u32 code, float value, u32 amax, const Tensor& tensor) {
    const bool finite = amax < kExponent;
    Scale s;
    s.apply = scale_inverse(code, value, tensor);
    s.decode = value;
    s.stored = finite ? (amax ? code : CODEC_ZERO_BYTE) : 0x7Fu;
    s.live = finite ? ~0u : 0;
    return s;
}

// The scale of rules that need the largest magnitude only.
DEVICE Scale block_scale(u32 amax, const Tensor& tensor) {
    float value;
    const u32 code =
        scale_code(__fmul_rn(float_of(amax < kExponent ? amax : 0), tensor.encode), value);
    return scale_of(code, value, amax, tensor);
}
#else
// What multiplies values under a scale byte below 255.
DEVICE float inverse_of_byte(u32 byte) {
    return float_of(byte == 254u ? 0x400000u : (254u - byte) << 23);
}

// The scale of a byte, which a finite block has.
DEVICE Scale e8m0_scale(u32 amax, u32 byte) {
    if (amax >= kExponent) byte = amax == kExponent ? CODEC_INF_BYTE : 255u;
    Scale s;
    s.stored = byte;
    s.live = byte == 255u ? 0 : ~0u;
    s.apply = inverse_of_byte(byte);
    s.decode = float_of(byte == 0 ? 0x400000u : byte << 23);
    return s;
}

DEVICE Scale block_scale(u32 amax, const Tensor& tensor) {
    const bool finite = amax < kExponent;
    int exponent = exponent_byte(finite ? amax : 0);
#if CODEC_WINDOW >= 0
    exponent = max(exponent, tensor.lowest);
#endif
    u32 byte = static_cast<u32>(min(max(exponent, 0), 254));
#if CODEC_RULE != 4
    if (amax == 0) byte = 0;
#endif
    return e8m0_scale(amax, byte);
}
#endif
