// ---- bfloat16 to e2m1 under a power of two, two values at a time ----

constexpr u32 kPairMagnitude = 0x7FFF7FFFu, kPairSign = 0x80008000u;

DEVICE u32 pair_max(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 low_float(u32 pair) { return pair << 16; }
DEVICE u32 high_float(u32 pair) { return pair & 0xFFFF0000u; }

#if CODEC_BF16X8
// Scaling by a power of two is exact in bfloat16 where it matters (what underflows is far below a
// quarter), and the additions that round have bfloat16's last place where float32 had its own. So
// the same steps as above hold on pairs.
DEVICE u32 pair_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

DEVICE u32 pair_min(u32 a, u32 b) {
    u32 d;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 pair_abs(u32 a) {
    u32 d;
    asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// The larger and the smaller magnitude, with the product of the signs.
DEVICE u32 pair_larger(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 860
    u32 d;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return pair_max(pair_abs(a), pair_abs(b)) | ((a ^ b) & kPairSign);
#endif
}
DEVICE u32 pair_smaller(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 860
    u32 d;
    asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return pair_min(pair_abs(a), pair_abs(b)) | ((a ^ b) & kPairSign);
#endif
}

// Adds to x * scale, in both halves, 64 times its leading power of two (at least 1), so that the
// last place is the grid's spacing. `far`: a value may be above 16.
DEVICE u32 round_sums(u32 x, u32 scale, bool far) {
    // Adding -0 gives the product itself. The scale of a block with NaN is -inf and must not pass
    // the clamp.
    u32 y = pair_fma(x, scale & kPairMagnitude, kPairSign);
#if CODEC_STATS
    if (far) y = pair_smaller(y, CODEC_CLAMP_BITS >> 16 | CODEC_CLAMP_BITS);
#else
    y = pair_smaller(y, bits_of(CODEC_TOP) >> 16 | bits_of(CODEC_TOP));
#endif
    return pair_fma(pair_larger(y & 0xFF80FF80u, 0x3F803F80u), 0x42804280u, y);
}

// Codes in the top nibbles of the halves: magnitudes (up to 10 where counted, else 7), or signed. A
// magnitude is the last places plus twice the exponent, which multiplication by 65 sums from bit 6
// on; one further bit holds the sign.
template <bool kSigns>
DEVICE u32 top_nibbles(u32 sums) {
    return sums * (kSigns ? 64 * 65 + 1 : 64 * 65) +
           (kSigns ? 0x60006000u - 0x42804280u : 0x60006000u);
}

// Selects bits of a where `mask` is set, else of b, in one instruction.
DEVICE u32 either(u32 mask, u32 a, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
    return d;
}

// Eight codes in nibbles: of neighbours of a row, or of four rows of two columns.
template <bool kSigns>
DEVICE u32 codes_rowwise(const u32* x, u32 scale, bool far) {
    u32 two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        two[i] = __byte_perm(top_nibbles<kSigns>(round_sums(x[2 * i], scale, far)),
            top_nibbles<kSigns>(round_sums(x[2 * i + 1], scale, far)), 0x7351);
    return either(
        0xF0F0F0F0u, __byte_perm(two[0], two[1], 0x7632), __byte_perm(two[0], two[1], 0x5410) >> 4);
}
template <bool kSigns, int STRIDE>
DEVICE u32 codes_columnwise(const u32* x, u32 scale, bool far) {
    u32 two[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
        two[i] = either(0xF000F000u,
            top_nibbles<kSigns>(round_sums(x[(2 * i + 1) * STRIDE], scale, far)),
            top_nibbles<kSigns>(round_sums(x[2 * i * STRIDE], scale, far)) >> 4);
    return __byte_perm(two[0], two[1], 0x7351);
}

// 0xFF for each negative half: a's low, b's low, a's high, b's high.
DEVICE u32 signs_of(u32 a, u32 b) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, 0xFBD9;" : "=r"(bytes) : "r"(a), "r"(b));
    return bytes;
}

DEVICE bool holds_zero(u32 pair_of_minima) {
    return !(pair_of_minima & 0x7FFFu) || !(pair_of_minima & 0x7FFF0000u);
}

DEVICE u32 zeros_of(u32 pair, u32 live) {
    return (!(pair & 0x7FFFu) && (live & 1u)) + (!(pair & 0x7FFF0000u) && (live >> 16 & 1u));
}

// Saturates eight magnitudes in nibbles, and counts those where `live`. Under rceil only infinity
// exceeds 6, where a dialect keeps its block; blocks with NaN do not matter.
DEVICE u32 saturate(u32 n, u32 live, Tally& tally) {
#if CODEC_BF16X2 && !CODEC_STATS
    return n;  // already clamped
#endif
#if CODEC_RULE != 1 || CODEC_INF_BYTE != 255
    const u32 over = n & 0x88888888u;
    n |= over - (over >> 3);
#if CODEC_STATS
    tally.saturated += __popc(over & live);
#endif
#endif
    n &= 0x77777777u;
#if CODEC_STATS
    tally.flushed += __popc(~(n | n >> 1 | n >> 2) & 0x11111111u & live);
#endif
    return n;
}

// Removes zero inputs, among 16 pairs or less, from the values that `saturate` counted as flushed.
template <int N, int STRIDE>
DEVICE void forget_zeros(const u32* x, u32 live, Tally& tally) {
#if CODEC_STATS
    u32 least = x[0] & kPairMagnitude;
#pragma unroll
    for (int k = 1; k < N; ++k) least = pair_min(least, pair_abs(x[k * STRIDE]));
    if (holds_zero(least)) {
#pragma unroll
        for (int k = 0; k < N; ++k) tally.flushed -= zeros_of(x[k * STRIDE], live);
    }
#endif
}

template <int N, int STRIDE>
DEVICE u32 pair_maximum(const u32* x) {
    u32 m = x[0];
#pragma unroll
    for (int k = 1; k < N; ++k) m = pair_larger(m, x[k * STRIDE]);
    return m & kPairMagnitude;
}

// Encodes a chunk of a row: eight pairs to two words of codes.
DEVICE void encode_pairs(
    const u32 (&x)[8], const Scale& s, bool far, u32 (&codes)[kWords], Tally& tally) {
    const u32 scale = bits_of(s.apply) >> 16 | bits_of(s.apply);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const u32* four = x + 4 * w;
#if CODEC_STATS
        const u32 n = codes_rowwise<false>(four, scale, far);
        const u32 c = signs_of(four[0], four[1]), d = signs_of(four[2], four[3]);
        const u32 signs =
            (__byte_perm(c, d, 0x5410) & 0x08080808u) | (__byte_perm(c, d, 0x7632) & 0x80808080u);
        codes[w] = (saturate(n, s.live, tally) | signs) & s.live;
#else
        codes[w] = codes_rowwise<true>(four, scale, far) & s.live;
#endif
    }
    forget_zeros<8, 1>(x, s.live, tally);
}
#endif
