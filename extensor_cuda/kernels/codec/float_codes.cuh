// Encodes values under float scales one at a time, for kernels of any shape. Macros: those of
// input.cuh, encode.cuh and float_scale.cuh.

#include "codec/input.cuh"
#include "codec/decode.cuh"
#include "codec/float_scale.cuh"
#include "codec/float_quotient.cuh"
#include "codec/encode.cuh"
#include "codec/counters.cuh"

// Loads four contiguous values.
DEVICE void load_four(const Raw* from, float (&v)[4]) {
#if CODEC_IN == 0
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    v[0] = widen(four.x), v[1] = widen(four.y), v[2] = widen(four.z), v[3] = widen(four.w);
#else
    const uint2 two = *reinterpret_cast<const uint2*>(from);
    v[0] = widen(static_cast<Raw>(two.x)), v[1] = widen(static_cast<Raw>(two.x >> 16));
    v[2] = widen(static_cast<Raw>(two.y)), v[3] = widen(static_cast<Raw>(two.y >> 16));
#endif
}

DEVICE float decoded(u32 code, float scale, int zero) {
    const float value = element_value(code);
    return __fmul_rn(CODEC_ZERO_POINTS ? __fsub_rn(value, static_cast<float>(zero)) : value, scale);
}

DEVICE u32 code_of(float x, const Scale& s, u32 word, Tally& tally) {
    const float scaled = __fmul_rn(__fdiv_rn(x, s.decode), CODEC_ELEMENT_SCALE);
    const bool negative = bits_of(scaled) & kSign;
    float grid;
    u32 n = round_magnitude(
            fminf(fabsf(scaled), CODEC_ZERO_POINTS ? 65536.0f : float_of(CODEC_CLAMP_BITS)), word,
            grid),
        code;
#if CODEC_ZERO_POINTS
    constexpr int kTop = (1 << (CODEC_BITS - 1)) - 1;
    const int whole = (negative ? -static_cast<int>(n) : static_cast<int>(n)) + s.zero;
    const int coded = min(max(whole, -kTop - 1), kTop);
    tally.saturated += coded != whole;
    code = static_cast<u32>(coded) & ((1u << CODEC_BITS) - 1);
#else
    tally.saturated += n > CODEC_MAX_CODE;
    n = smaller(n, CODEC_MAX_CODE);
    code = CODEC_IS_FLOAT ? n | static_cast<u32>(negative) << (CODEC_BITS - 1)
                          : (negative ? 0u - n : n) & ((1u << CODEC_BITS) - 1);
#endif
    tally.flushed += x != 0.0f && decoded(code, s.decode, s.zero) == 0.0f;
    return code;
}
