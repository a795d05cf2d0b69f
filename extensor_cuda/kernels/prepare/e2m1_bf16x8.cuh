// Rounds bfloat16 to E2M1 under power-of-two scales in blocks of 32, eight magnitudes (up to 10) at
// a time: neighbours of a row, or four rows of two columns. Results equal those of encode.cuh.
// Configured by CODEC_ macros.

#if CODEC_BF16X8
static_assert(CODEC_BLOCK == 32, "two chunks");

// Statistics of a thread's pairs: of a row's block, or of two columns' blocks in the halves.
struct BlockStats {
    u32 largest = 0, least = ~0u, smallest = kPairMagnitude;

    DEVICE void add(const u32 (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 magnitude = x[k] & kPairMagnitude;
            largest = pair_max(largest, magnitude);
#if CODEC_STATS
            smallest = pair_min(smallest, magnitude);
#endif
#if CODEC_STOCHASTIC && CODEC_RBITS == 32
            least = __viaddmin_u16x2(magnitude, ~0u, least);  // skips zeros
#endif
        }
    }
    DEVICE bool zeros() const { return CODEC_STATS && holds_zero(smallest); }
};

struct Blocks {  // one block of a row, or two neighbouring columns' blocks
    float apply[2];
    u32 number;  // the first block's; the second's follows
    bool careful;
    Stream stream;
    u32 draw[2][4];  // CODEC_RBITS 8: random words of a chunk
};

#if CODEC_BF16X2
DEVICE bool needs_care(bool far, u32, const Scale&, const Scale&) { return far; }

DEVICE u32 scales_of(Blocks& b) { return bits_of(b.apply[0]) >> 16 | bits_of(b.apply[1]); }

// Encodes values 8 k to 8 k + 7 of a row's block.
DEVICE u32 codes_of_row(const u32 (&x)[4], int, Blocks& b) {
    return codes_rowwise<false>(x, scales_of(b), b.careful);
}

// Encodes values 4 k to 4 k + 3 of two columns' blocks, the first one's in the low halves.
DEVICE u32 codes_of_columns(const u32 (&x)[4], int, Blocks& b) {
    return codes_columnwise<false, 1>(x, scales_of(b), b.careful);
}
#else
// In z = y + max(y, 1) the E2M1 grid is spaced 2**22 in the bits, so the low 22 bits are the
// fraction of a step. Adding the random word carries exactly when the fraction times 2**32 exceeds
// it. z is exact for 0 and for a bfloat16 of at least 2**-16.
constexpr u32 kFirst = 254;
constexpr float kSmall = 1.0f / 65536;

template <bool kCareful>
DEVICE u32 four_codes(const u32 (&x)[4], float apply, const u32 (&word)[4]) {
    u32 codes = 0;
#pragma unroll
    for (int k = 3; k >= 0; --k) {
        float y = __fmul_rn(fabsf(float_of(x[k])), apply);
        if (kCareful) y = fminf(y, float_of(CODEC_CLAMP_BITS));
        const u32 z = bits_of(__fadd_ru(y, fmaxf(y, 1.0f)));
        u32 n = z + (~word[k] >> 10) >> 22;
        if (kCareful && y < kSmall)
            n = kFirst + (__float2uint_ru(y * 8589934592.0f) > word[k]);  // 2**33
        codes = codes * 16 + n;
    }
    return codes - kFirst * 0x1111u;
}

// Encodes values 4 k to 4 k + 3 of block i; k must rise.
DEVICE u32 group(const u32 (&x)[4], int i, int k, Blocks& b) {
    u32 word[4];
#if CODEC_RBITS == 32
    philox(k, b.number + i, b.stream, word);
#elif CODEC_RBITS == 8
    u32(&draw)[4] = b.draw[i];
    if (k % 4 == 0) philox(k / 4, b.number + i, b.stream, draw);
#pragma unroll
    for (int n = 0; n < 4; ++n) word[n] = __byte_perm(draw[0], 0x00800000u, 0x0644 | n << 12);
    draw[0] = draw[1], draw[1] = draw[2], draw[2] = draw[3];
#else
#pragma unroll
    for (int n = 0; n < 4; ++n) word[n] = CODEC_TIE_WORD;
#endif
    return b.careful ? four_codes<true>(x, b.apply[i], word)
                     : four_codes<false>(x, b.apply[i], word);
}

DEVICE u32 codes_of_row(const u32 (&x)[4], int k, Blocks& b) {
    const u32 low[4] = {low_float(x[0]), high_float(x[0]), low_float(x[1]), high_float(x[1])};
    const u32 high[4] = {low_float(x[2]), high_float(x[2]), low_float(x[3]), high_float(x[3])};
    const u32 codes = group(low, 0, 2 * k, b);
    return codes | group(high, 0, 2 * k + 1, b) << 16;
}

DEVICE u32 codes_of_columns(const u32 (&x)[4], int k, Blocks& b) {
    const u32 low[4] = {low_float(x[0]), low_float(x[1]), low_float(x[2]), low_float(x[3])};
    const u32 high[4] = {high_float(x[0]), high_float(x[1]), high_float(x[2]), high_float(x[3])};
    return group(low, 0, k, b) | group(high, 1, k, b) << 16;
}

// Whether a value scales to less than kSmall.
DEVICE bool is_small(u32 less_one, const Scale& s) {
    return less_one + 1 < static_cast<u32>(max(238 - static_cast<int>(bits_of(s.apply) >> 23), 1))
                              << 7;
}

DEVICE bool needs_care(bool far, u32 least, const Scale& a, const Scale& b) {
    return far || is_small(least & 0xFFFFu, a) || is_small(least >> 16, b);
}
#endif
#endif
