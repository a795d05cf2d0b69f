// Random words, and encoding of 16 values of a block to packed codes or decoded values. Configured
// by the quantizer's CODEC_ macros.

#include "codec/rounding.cuh"

struct Tally {
    u32 saturated, flushed;
};

// The conversion instructions round to nearest even and saturate, like round_magnitude.
#if CODEC_HARDWARE_CONVERT && __CUDA_ARCH__ >= 890
#define CODEC_CONVERTS 1
DEVICE u32 convert_pair(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite." CODEC_HARDWARE_TYPE "x2.f32 %0, %1, %2;"
        : "=h"(pair)
        : "f"(high), "f"(low));
    return pair;
}
#else
#define CODEC_CONVERTS 0
#endif
#define CODEC_INTEGERS (CODEC_MAKES_CODES && !CODEC_IS_FLOAT && !CODEC_STOCHASTIC)
#define CODEC_HAS_ZERO_POINTS \
    (CODEC_DIVIDES && CODEC_ZERO_POINTS)  // elsewhere CODEC_ZERO_POINTS is the GEMM's

#if CODEC_STOCHASTIC
// The 16 random words of a chunk, or the constant that breaks ties.
DEVICE void random_words(u32 block, u32 part, const Stream& stream, u32 (&word)[kChunk]) {
    u32 draw[4];
#if CODEC_RBITS == 32
#pragma unroll
    for (int k = 0; k < kChunk; k += 4) {
        philox(part * 4 + k / 4, block, stream, draw);
        word[k] = draw[0], word[k + 1] = draw[1], word[k + 2] = draw[2], word[k + 3] = draw[3];
    }
#elif CODEC_RBITS == 8
    philox(part, block, stream, draw);
#pragma unroll
    for (int k = 0; k < kChunk; ++k)  // 128 + (byte + 1/2) / 256
        word[k] = __byte_perm(draw[k / 4], 0x43000080u, 0x7604 | (k % 4) << 4);
#else
#pragma unroll
    for (int k = 0; k < kChunk; ++k) word[k] = CODEC_TIE_WORD;
#endif
}
#endif

// Gathers the top bytes of four words, which hold the signs of floats.
DEVICE u32 high_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x73), __byte_perm(c, d, 0x73), 0x5410);
}
DEVICE u32 high_bytes(float a, float b, float c, float d) {
    return high_bytes(bits_of(a), bits_of(b), bits_of(c), bits_of(d));
}

#define CODEC_NIBBLES (CODEC_MAKES_CODES && CODEC_BITS == 4 && CODEC_IS_FLOAT && !CODEC_STOCHASTIC)
#if CODEC_NIBBLES
static_assert(CODEC_MANTISSA == 1 && CODEC_MIN_EXPONENT == 0, "E2M1");
// Rounds a magnitude below 32 to its code, up to 10, plus kOver in the top byte. The sum's last
// place is the grid's spacing; the product adds last places and twice the exponent.
constexpr u32 kOver = 298 & 0xFF;
DEVICE u32 top_byte(float y) {
    const float anchor = float_of(larger(bits_of(y) & kExponent, kLowest));
    return bits_of(__fmaf_rn(anchor, 4194304.0f, fabsf(y))) * ((1u << 24) + 4);
}
#endif

#if CODEC_CONVERTS && CODEC_MAKES_CODES
// Encodes scaled values with the conversion instructions.
DEVICE void encode_converted(const float (&y)[kChunk], u32 live, u32 (&codes)[kWords],
    [[maybe_unused]] u32& zeros, [[maybe_unused]] u32& saturated) {
#pragma unroll
    for (int k = 0; k < kChunk; k += 4) {
        const u32 low = convert_pair(y[k], y[k + 1]), high = convert_pair(y[k + 2], y[k + 3]);
        const u32 packed = __byte_perm(low, high, 0x5410);
        codes[k / 4] = packed & live;
#if CODEC_STATS
#pragma unroll
        for (int i = 0; i < 4; ++i) saturated += fabsf(y[k + i]) > CODEC_TIE_AT_TOP;
        zeros += __popc(~((packed & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) & 0x80808080u);
#endif
    }
}
#elif CODEC_INTEGERS
// Encodes scaled values to integers.
DEVICE void encode_integers(const float (&y)[kChunk], const Scale& s, u32 (&codes)[kWords],
    [[maybe_unused]] u32& zeros, [[maybe_unused]] u32& saturated) {
    // The sum's last place is the grid's spacing, so its low bits are the integer in two's
    // complement.
    constexpr u32 kAnchor = kLowest + (static_cast<u32>(23 - CODEC_MANTISSA) << 23) + 0x400000u;
    u32 n[kChunk];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
#if CODEC_HAS_ZERO_POINTS
        constexpr int kTop = (1 << (CODEC_BITS - 1)) - 1;
        const float far = fminf(fmaxf(y[k], -65536.0f), 65536.0f);
        const int whole =
            static_cast<int>(bits_of(__fadd_rn(far, float_of(kAnchor))) - kAnchor) + s.zero;
        n[k] = static_cast<u32>(min(max(whole, -kTop - 1), kTop));
        saturated += static_cast<int>(n[k]) != whole;
        zeros += static_cast<int>(n[k]) == s.zero;
#else
        n[k] = bits_of(__fadd_rn(fminf(fmaxf(y[k], -CODEC_TOP), CODEC_TOP), float_of(kAnchor)));
#if CODEC_STATS
        saturated += fabsf(y[k]) > CODEC_TIE_AT_TOP;
#endif
#endif
    }
#if CODEC_BITS == 4
#pragma unroll
    for (int k = 0; k < kChunk; k += 2) n[k / 2] = (n[k] & 15u) | (n[k + 1] << 4 & ~15u);
#endif
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        const u32 low = __byte_perm(n[4 * w], n[4 * w + 1], 0x0040),
                  high = __byte_perm(n[4 * w + 2], n[4 * w + 3], 0x0040);
        const u32 packed = __byte_perm(low, high, 0x5410);
        codes[w] = packed & s.live;
#if CODEC_STATS && !CODEC_HAS_ZERO_POINTS
        constexpr u32 kTops = CODEC_BITS == 4 ? 0x88888888u : 0x80808080u;
        zeros += __popc(~(((packed & ~kTops) + ~kTops) | packed) & kTops);
#endif
    }
}
#elif CODEC_NIBBLES
// Rounds scaled values to magnitudes of E2M1, eight in a word.
DEVICE void round_nibbles(const float (&y)[kChunk], u32 (&codes)[kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        u32 n[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) n[k] = top_byte(y[8 * w + k]);
        codes[w] = high_bytes(n[1], n[3], n[5], n[7]) * 16 + high_bytes(n[0], n[2], n[4], n[6]) -
                   kOver * 0x11111111u;
    }
}
#endif

#if CODEC_MAKES_CODES && CODEC_BITS == 4 && CODEC_IS_FLOAT
// Saturates magnitudes of E2M1 and adds their signs, eight at a time.
#if CODEC_STATS && CODEC_UE4M3
DEVICE void finish_nibbles(const float (&y)[kChunk], const Scale& s, const Tensor& tensor,
    bool counts_values, u32 (&codes)[kWords], u32& zeros, u32& saturated, u32& zero_values) {
#else
DEVICE void finish_nibbles(const float (&y)[kChunk], const Scale& s, u32 (&codes)[kWords],
    [[maybe_unused]] u32& zeros, [[maybe_unused]] u32& saturated) {
#endif
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        const u32 over = codes[w] & 0x88888888u;
        const u32 n = (codes[w] | (over - (over >> 3))) & 0x77777777u;
#if CODEC_STATS
        saturated += __popc(over);
        zeros += 8 - __popc((n | n >> 1 | n >> 2) & 0x11111111u);
#if CODEC_UE4M3
        if (counts_values) {
            for (int i = 0; i < 8; ++i) {
                const u32 code = n >> (4 * i) & 7u;
                const float grid = __fmul_rn(float_of(code << 22), float_of(0x7E800000u));
                zero_values += __fmul_rn(__fmul_rn(grid, s.decode), tensor.scale) == 0;
            }
        }
#endif
#endif
        const u32 even = high_bytes(y[8 * w], y[8 * w + 2], y[8 * w + 4], y[8 * w + 6]);
        const u32 odd = high_bytes(y[8 * w + 1], y[8 * w + 3], y[8 * w + 5], y[8 * w + 7]);
        codes[w] = (n | (even >> 4 & 0x08080808u) | (odd & 0x80808080u)) & s.live;
    }
}
#endif

// Encodes 16 values of a block to packed codes (CODEC_MAKES_CODES) or decoded values in x
// (CODEC_OUT 1).
DEVICE void encode(float (&x)[kChunk], const Scale& s, bool far, const Tensor& tensor, u32 block,
    u32 part, const Stream& stream, u32 (&codes)[kWords], Tally& tally) {
#if CODEC_STOCHASTIC
    u32 word[kChunk];
    random_words(block, part, stream, word);
#endif
    u32 zeros = 0, saturated = 0;  // counts of zero codes and of values beyond the top
#if CODEC_STATS
    float least = fabsf(x[0]);
#pragma unroll
    for (int k = 1; k < kChunk; ++k) least = fminf(least, fabsf(x[k]));
    u32 zero_inputs = 0;
    if (least == 0) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) zero_inputs += x[k] == 0;
    }
#if CODEC_UE4M3 || CODEC_DIVIDES
    // A tiny scale can decode a nonzero code to zero; then values are counted instead.
    const bool counts_values =
        __fmul_rn(__fmul_rn(CODEC_MIN_POSITIVE, s.decode), tensor.scale) == 0;
    u32 zero_values = 0;
#endif
#endif
    float y[kChunk];
#if CODEC_DIVIDES
    divide(x, s, y);
#else
#pragma unroll
    for (int k = 0; k < kChunk; ++k) y[k] = __fmul_rn(x[k], s.apply);
#endif
#pragma unroll
    for (int k = 0; k < kChunk; ++k)
        if (CODEC_ELEMENT_SCALE != 1.0f) y[k] = __fmul_rn(y[k], CODEC_ELEMENT_SCALE);
#if !(CODEC_CONVERTS && CODEC_MAKES_CODES) && !CODEC_INTEGERS
    if (far) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            y[k] = float_of(
                smaller(bits_of(y[k]) & kMagnitude, CODEC_CLAMP_BITS) | (bits_of(y[k]) & kSign));
    }
#endif
#if CODEC_CONVERTS && CODEC_MAKES_CODES
    encode_converted(y, s.live, codes, zeros, saturated);
#elif CODEC_INTEGERS
    encode_integers(y, s, codes, zeros, saturated);
#else
#if CODEC_NIBBLES
    round_nibbles(y, codes);
#else
#pragma unroll
    for (int w = 0; w < kWords; ++w) codes[w] = 0;
    // E2M1: magnitudes first (up to 10, bit 3 means saturated), then eight at a time.
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        float value;
#if CODEC_STOCHASTIC
        u32 n = round_magnitude(y[k], word[k], value);
#else
        u32 n = round_magnitude(y[k], 0, value);
#endif
        const u32 sign = bits_of(y[k]) & kSign;
#if CODEC_OUT == 1
#if CODEC_STATS
        saturated += n > CODEC_MAX_CODE;
        zeros += n == 0;
#endif
        value = fminf(value, CODEC_TOP);
        const bool keeps = CODEC_IS_FLOAT || n != 0;  // fixed-point grids have no negative zero
        value = __fmul_rn(float_of(bits_of(value) | (keeps ? sign : 0)), s.decode);
        if (CODEC_UE4M3) value = __fmul_rn(value, tensor.scale);
#if CODEC_STATS && CODEC_UE4M3
        zero_values += value == 0 && x[k] != 0;
#endif
        x[k] = s.live ? value : float_of(kNaN);
#elif CODEC_BITS == 4 && CODEC_IS_FLOAT
        codes[k / 8] |= n << (k % 8 * 4);
#else
#if CODEC_STATS
        saturated += n > CODEC_MAX_CODE;
        zeros += n == 0;
#endif
        n = smaller(n, CODEC_MAX_CODE);
        n = CODEC_IS_FLOAT ? n | sign >> (32 - CODEC_BITS)
                           : (sign ? 0 - n : n) & ((1u << CODEC_BITS) - 1);
        const int at = k * CODEC_BITS;
        codes[at / 32] |= n << (at % 32);
        if (at % 32 + CODEC_BITS > 32) codes[at / 32 + 1] |= n >> (32 - at % 32);
#endif
    }
#endif
#if CODEC_MAKES_CODES && CODEC_BITS == 4 && CODEC_IS_FLOAT
#if CODEC_STATS && CODEC_UE4M3
    finish_nibbles(y, s, tensor, counts_values, codes, zeros, saturated, zero_values);
#else
    finish_nibbles(y, s, codes, zeros, saturated);
#endif
#elif CODEC_MAKES_CODES
#pragma unroll
    for (int w = 0; w < kWords; ++w) codes[w] &= s.live;
#endif
#endif
#if CODEC_STATS
    u32 flushed = zeros - zero_inputs;
#if CODEC_DIVIDES
    if (counts_values) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            zero_values +=
                __fmul_rn(element_value(codes[k * CODEC_BITS / 32] >> (k * CODEC_BITS % 32)),
                    s.decode) == 0;
        flushed = zero_values - zero_inputs;
    }
#elif CODEC_UE4M3
    if (counts_values) flushed = CODEC_OUT == 1 ? zero_values : zero_values - zero_inputs;
#endif
    tally.saturated += s.live ? saturated : 0;
    tally.flushed += s.live ? flushed : 0;
#endif
}

// Stores packed codes.
DEVICE void store_words(u32* to, const u32 (&packed)[kWords]) {
    if (kWords == 4)
        *reinterpret_cast<uint4*>(to) =
            uint4{packed[0], packed[1], packed[2 % kWords], packed[3 % kWords]};
    else if (kWords == 2) *reinterpret_cast<uint2*>(to) = uint2{packed[0], packed[1]};
    else
#pragma unroll
        for (int w = 0; w < kWords; ++w) to[w] = packed[w];
}
