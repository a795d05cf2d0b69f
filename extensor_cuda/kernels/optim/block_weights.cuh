// A weight in MX blocks: four values of a thread, decoded and rounded by the quantizer's functions,
// compiled here for the weight's format. Macros: OPTIMIZER_WEIGHT_, the format. CODEC_ macros are
// the states' before this file and the weight's after it.

#undef CODEC_BITS
#undef CODEC_MANTISSA
#undef CODEC_MIN_EXPONENT
#undef CODEC_EMAX
#undef CODEC_MAX_CODE
#undef CODEC_IS_FLOAT
#undef CODEC_HAS_INFINITY
#undef CODEC_RECIPROCAL_TOP
#undef CODEC_CLAMP_BITS
#define CODEC_BITS OPTIMIZER_WEIGHT_BITS
#define CODEC_MANTISSA OPTIMIZER_WEIGHT_MANTISSA
#define CODEC_MIN_EXPONENT OPTIMIZER_WEIGHT_MIN_EXPONENT
#define CODEC_EMAX OPTIMIZER_WEIGHT_EMAX
#define CODEC_MAX_CODE OPTIMIZER_WEIGHT_MAX_CODE
#define CODEC_IS_FLOAT OPTIMIZER_WEIGHT_IS_FLOAT
#define CODEC_HAS_INFINITY OPTIMIZER_WEIGHT_HAS_INFINITY
#define CODEC_RECIPROCAL_TOP OPTIMIZER_WEIGHT_RECIPROCAL_TOP
#define CODEC_CLAMP_BITS OPTIMIZER_WEIGHT_CLAMP_BITS

namespace weights {
#include "codec/decode.cuh"
#include "codec/rounding.cuh"
#include "codec/block_scale.cuh"
}  // namespace weights

static_assert(CODEC_RULE == 1 && CODEC_STOCHASTIC && CODEC_RBITS == 32 && CODEC_INF_BYTE == 255,
    "rceil scales and stochastic rounding by whole words, for states and weights");
constexpr u32 kCode = CODEC_BITS == 8 ? 0xFFu : (1u << CODEC_BITS) - 1;

// Codes of the four values from i on.
DEVICE u32 load_codes(const u8* codes, u32 i) {
    const u8* from = codes + i / 4 * (CODEC_BITS / 2);
#if CODEC_BITS == 8
    return *reinterpret_cast<const u32*>(from);
#elif CODEC_BITS == 4
    return *reinterpret_cast<const u16*>(from);
#else
    return from[0] | from[1] << 8 | from[2] << 16;
#endif
}

DEVICE void store_codes(u8* codes, u32 i, u32 four) {
    u8* to = codes + i / 4 * (CODEC_BITS / 2);
#if CODEC_BITS == 8
    *reinterpret_cast<u32*>(to) = four;
#elif CODEC_BITS == 4
    *reinterpret_cast<u16*>(to) = static_cast<u16>(four);
#else
    to[0] = static_cast<u8>(four), to[1] = static_cast<u8>(four >> 8);
    to[2] = static_cast<u8>(four >> 16);
#endif
}

DEVICE void decode_codes(u32 four, u32 scale, float (&out)[4]) {
    const float factor =
        scale == 255u ? weights::nan_value() : float_of(scale ? scale << 23 : 0x400000u);
#pragma unroll
    for (int k = 0; k < 4; ++k)
        out[k] = __fmul_rn(weights::element_value(four >> (CODEC_BITS * k) & kCode), factor);
}

// Rounds stochastically and returns the block's scale byte; neighbouring lanes have the rest of it.
DEVICE u32 encode_codes(const float (&v)[4], const u32 (&word)[4], const Tensor& t, u32& scale) {
    u32 most = 0, four = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) most = larger(most, bits_of(v[k]) & kMagnitude);
#pragma unroll
    for (int lane = 1; lane < CODEC_BLOCK / 4; lane *= 2)
        most = larger(most, __shfl_xor_sync(~0u, most, lane));
    const weights::Scale s = weights::block_scale(most, t);
    scale = s.stored;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const float y = s.live ? __fmul_rn(v[k], s.apply) : 0.0f;
        const u32 sign = bits_of(y) >> 31;
        float value;
        u32 n = smaller(weights::round_magnitude(y, word[k], value), CODEC_MAX_CODE);
        n = CODEC_IS_FLOAT ? n | sign << (CODEC_BITS - 1) : (sign ? 0 - n : n) & kCode;
        four |= n << (CODEC_BITS * k);
    }
    return four;
}
