// bfloat16 to e2m1 under powers of two: the magnitudes of eight codes (up to 10) at a time, of
// neighbours in a row or of four rows of two columns. What they round to is what encode.cuh gives.

#if HALVES
struct Chunks {          // of 16 values: one along a row, or two side by side
    const Scale *first, *second;
    u32 block, part;     // where the first lies; the second's block is the next one
    bool careful;
    const Stream* stream;
};

#if PAIRS
template <int N>
__device__ __forceinline__ u32 least_of(const u32*, u32) { return 0; }

__device__ __forceinline__ bool needs_care(bool far, u32, const Scale&, const Scale&) { return far; }

__device__ __forceinline__ u32 scales_of(const Chunks& c) {
    return bits_of(c.first->apply) >> 16 | bits_of(c.second->apply);
}

// Four words of pairs, of half h of a chunk.
__device__ __forceinline__ u32 across(const u32* x, int h, const Chunks& c) {
    const u32 scale = scales_of(c);
    const u32 a = round_pair(x[0], scale, c.careful) | round_pair(x[1], scale, c.careful) << 8;
    const u32 b = round_pair(x[2], scale, c.careful) | round_pair(x[3], scale, c.careful) << 8;
    return __byte_perm(a | a >> 12, b | b >> 12, 0x5410);
}

// The same of rows 4 i to 4 i + 3: the first column's codes in the low half.
__device__ __forceinline__ u32 down(const u32* x, int i, const Chunks& c) {
    const u32 scale = scales_of(c);
    u32 n = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) n |= round_pair(x[k], scale, c.careful) << (4 * k);
    return n;
}
#else
// In z = y + max(y, 1) e2m1's grid lies every 2**22 of the bits: 1 and 1.5 are the codes 0 and 1, and
// from y = 1 on, where z = 2 y, a code is half a binade. So the 22 bits below are the part of a step,
// and ~word added to them, at the top of 32, carries exactly when that part times 2**32 exceeds word.
// z is exact for a bfloat16 of 2**-16 or more, and for 0.
constexpr u32 kFirst = 254;
constexpr float kSmall = 1.0f / 65536;

template <bool kCareful>
__device__ __forceinline__ u32 four_codes(const u32 (&x)[4], float apply, const u32 (&word)[4]) {
    u32 codes = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        float y = __fmul_rn(fabsf(float_of(x[k])), apply);
        if (kCareful) y = fminf(y, float_of(CLAMP_BITS));
        const u32 z = bits_of(__fadd_ru(y, fmaxf(y, 1.0f)));
        u32 n = static_cast<u32>((z * 1024ull + ~word[k]) >> 32);
        if (kCareful && y < kSmall) n = kFirst + (__float2uint_ru(y * 8589934592.0f) > word[k]);  // 2**33
        codes += n << (4 * k);
    }
    return codes - kFirst * 0x1111u;
}

// The words of values 4 i to 4 i + 3 of a chunk.
__device__ __forceinline__ void four_words(int i, u32 block, u32 part, const Stream& stream, u32 (&word)[4]) {
#if RBITS == 32
    philox(part * 4 + i, block, stream, word);
#elif RBITS == 8
    u32 draw[4];
    philox(part, block, stream, draw);
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = __byte_perm(draw[i], 0x00800000u, 0x0644 | k << 12);
#else
#pragma unroll
    for (int k = 0; k < 4; ++k) word[k] = TIE_WORD;
#endif
}

__device__ __forceinline__ u32 eight_codes(const u32 (&a)[4], const u32 (&b)[4], const float (&apply)[2],
                                           const u32 (&first)[4], const u32 (&second)[4], bool careful) {
    if (careful) return four_codes<true>(a, apply[0], first) | four_codes<true>(b, apply[1], second) << 16;
    return four_codes<false>(a, apply[0], first) | four_codes<false>(b, apply[1], second) << 16;
}

__device__ __forceinline__ u32 across(const u32* x, int h, const Chunks& c) {
    u32 words[2][4];
    four_words(2 * h, c.block, c.part, *c.stream, words[0]);
    four_words(2 * h + 1, c.block, c.part, *c.stream, words[1]);
    const u32 a[4] = {low_float(x[0]), high_float(x[0]), low_float(x[1]), high_float(x[1])};
    const u32 b[4] = {low_float(x[2]), high_float(x[2]), low_float(x[3]), high_float(x[3])};
    return eight_codes(a, b, {c.first->apply, c.second->apply}, words[0], words[1], c.careful);
}

__device__ __forceinline__ u32 down(const u32* x, int i, const Chunks& c) {
    u32 words[2][4];
    four_words(i, c.block, c.part, *c.stream, words[0]);
    four_words(i, c.block + 1, c.part, *c.stream, words[1]);
    const u32 a[4] = {low_float(x[0]), low_float(x[1]), low_float(x[2]), low_float(x[3])};
    const u32 b[4] = {high_float(x[0]), high_float(x[1]), high_float(x[2]), high_float(x[3])};
    return eight_codes(a, b, {c.first->apply, c.second->apply}, words[0], words[1], c.careful);
}

// The least magnitudes of halves that are not zero, less 1.
template <int N>
__device__ __forceinline__ u32 least_of(const u32* x, u32 least) {
#if RBITS == 32
#pragma unroll
    for (int k = 0; k < N; ++k) least = __viaddmin_u16x2(x[k] & kPairMagnitude, ~0u, least);
#endif
    return least;
}

// Whether one of these is scaled to less than kSmall: a bfloat16 of exponent byte 111.
__device__ __forceinline__ bool is_small(u32 less_one, const Scale& s) {
    return less_one + 1 < static_cast<u32>(max(238 - static_cast<int>(bits_of(s.apply) >> 23), 1)) << 7;
}

__device__ __forceinline__ bool needs_care(bool far, u32 least, const Scale& a, const Scale& b) {
    return far || is_small(least & 0xFFFFu, a) || is_small(least >> 16, b);
}
#endif
#endif
