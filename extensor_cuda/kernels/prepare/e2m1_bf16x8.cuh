// bfloat16 to e2m1 under powers of two, blocks of 32: the magnitudes of eight codes (up to 10) at a
// time, of neighbours in a row or of four rows of two columns. What values round to is what
// encode.cuh gives.

#if CODEC_BF16X8
static_assert(CODEC_BLOCK == 32, "two chunks");

// What a thread's pairs of values hold: of a row's block, or of two columns' in their halves.
struct Survey {
    u32 largest = 0, least = ~0u, smallest = kPairMagnitude;

    __device__ __forceinline__ void add(const u32 (&x)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 magnitude = x[k] & kPairMagnitude;
            largest = pair_max(largest, magnitude);
#if CODEC_STATS
            smallest = pair_min(smallest, magnitude);
#endif
#if CODEC_STOCHASTIC && CODEC_RBITS == 32
            least = __viaddmin_u16x2(magnitude, ~0u, least);  // zeros are left out
#endif
        }
    }
    __device__ __forceinline__ bool zeros() const { return CODEC_STATS && holds_zero(smallest); }
};

struct Blocks {  // one along a row, or two side by side
    float apply[2];
    u32 number;  // the first's; the second's is the next
    bool careful;
    Stream stream;
    u32 draw[2][4];  // CODEC_RBITS 8: words of a chunk of each
};

#if CODEC_BF16X2
__device__ __forceinline__ bool needs_care(bool far, u32, const Scale&, const Scale&) {
    return far;
}

__device__ __forceinline__ u32 scales_of(Blocks& b) {
    return bits_of(b.apply[0]) >> 16 | bits_of(b.apply[1]);
}

// Values 8 k to 8 k + 7 of a block, in pairs.
__device__ __forceinline__ u32 across(const u32 (&x)[4], int, Blocks& b) {
    return codes_across<false>(x, scales_of(b), b.careful);
}

// Values 4 k to 4 k + 3 of two blocks, the first's in the low halves, and so its codes.
__device__ __forceinline__ u32 down(const u32 (&x)[4], int, Blocks& b) {
    return codes_down<false, 1>(x, scales_of(b), b.careful);
}
#else
// In z = y + max(y, 1) e2m1's grid lies every 2**22 of the bits: 1 and 1.5 are the codes 0 and 1,
// and from y = 1 on, where z = 2 y, a code is half a binade. So the 22 bits below are the part of a
// step, a multiple of 2**-22, and what is added to them carries exactly when that part times 2**32
// exceeds the word. z is exact for a bfloat16 of 2**-16 or more, and for 0.
constexpr u32 kFirst = 254;
constexpr float kSmall = 1.0f / 65536;

template <bool kCareful>
__device__ __forceinline__ u32 four_codes(const u32 (&x)[4], float apply, const u32 (&word)[4]) {
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

// Of values 4 k to 4 k + 3 of block i, k rising.
__device__ __forceinline__ u32 group(const u32 (&x)[4], int i, int k, Blocks& b) {
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

__device__ __forceinline__ u32 across(const u32 (&x)[4], int k, Blocks& b) {
    const u32 low[4] = {low_float(x[0]), high_float(x[0]), low_float(x[1]), high_float(x[1])};
    const u32 high[4] = {low_float(x[2]), high_float(x[2]), low_float(x[3]), high_float(x[3])};
    const u32 codes = group(low, 0, 2 * k, b);
    return codes | group(high, 0, 2 * k + 1, b) << 16;
}

__device__ __forceinline__ u32 down(const u32 (&x)[4], int k, Blocks& b) {
    const u32 low[4] = {low_float(x[0]), low_float(x[1]), low_float(x[2]), low_float(x[3])};
    const u32 high[4] = {high_float(x[0]), high_float(x[1]), high_float(x[2]), high_float(x[3])};
    return group(low, 0, k, b) | group(high, 1, k, b) << 16;
}

// Whether a value is scaled to less than kSmall: one below a bfloat16 of some exponent byte.
__device__ __forceinline__ bool is_small(u32 less_one, const Scale& s) {
    return less_one + 1 < static_cast<u32>(max(238 - static_cast<int>(bits_of(s.apply) >> 23), 1))
                              << 7;
}

__device__ __forceinline__ bool needs_care(bool far, u32 least, const Scale& a, const Scale& b) {
    return far || is_small(least & 0xFFFFu, a) || is_small(least >> 16, b);
}
#endif
#endif
