// ---- bfloat16 to e2m1 under a power of two, two values at a time ----

constexpr u32 kPairMagnitude = 0x7FFF7FFFu, kPairSign = 0x80008000u;

__device__ __forceinline__ u32 pair_max(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 low_float(u32 pair) { return pair << 16; }
__device__ __forceinline__ u32 high_float(u32 pair) { return pair & 0xFFFF0000u; }

#if HALVES
// Scaling by a power of two is exact in bfloat16 where it matters (what underflows is far below a
// quarter), and the additions that round have bfloat16's last place where float32 had its own. So
// the same steps as above hold on pairs.
__device__ __forceinline__ u32 pair_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ u32 pair_min(u32 a, u32 b) {
    u32 d;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 pair_abs(u32 a) {
    u32 d;
    asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// 64 times the code magnitudes (up to 10 where they are counted, else 7) of x * scale in the two halves.
// `far` says whether one may be beyond 16. A half of `exponent` is a power of two, 64 times which has a
// last place of the grid's spacing there; times 2**-126 the grid's numbers are those whose bits are
// multiples of 64: 0.5 is subnormal. Integers take twice the time of floats, which is why all but two
// steps are of floats.
__device__ __forceinline__ u32 codes64(u32 x, u32 scale, bool far) {
    // Plus -0: the product itself. The scale of a block with NaN is -inf, and must not pass the clamp.
    u32 y = pair_fma(pair_abs(x), scale & kPairMagnitude, kPairSign);
#if STATS
    if (far) y = pair_min(y, CLAMP_BITS >> 16 | CLAMP_BITS);
#else
    y = pair_min(y, bits_of(TOP) >> 16 | bits_of(TOP));
#endif
    const u32 exponent = pair_max(y & 0x7F807F80u, 0x3F803F80u);
    const u32 rounded = pair_fma(exponent, 0xC280C280u, pair_fma(exponent, 0x42804280u, y));
    return pair_fma(rounded, 0x00800080u, 0);
}

// Eight code magnitudes in nibbles: of neighbours, and of four rows of two columns.
__device__ __forceinline__ u32 magnitudes_across(const u32* x, u32 scale, bool far) {
    const u32 a = codes64(x[1], scale, far) * 4 + (codes64(x[0], scale, far) >> 6);
    const u32 b = codes64(x[3], scale, far) * 4 + (codes64(x[2], scale, far) >> 6);
    return __byte_perm(a, b, 0x7632) * 16 + __byte_perm(a, b, 0x5410);
}
template <int STRIDE>
__device__ __forceinline__ u32 magnitudes_down(const u32* x, u32 scale, bool far) {
    const u32 a = codes64(x[STRIDE], scale, far) * 16 + codes64(x[0], scale, far);
    const u32 b = codes64(x[3 * STRIDE], scale, far) * 16 + codes64(x[2 * STRIDE], scale, far);
    return b * 4 + (a >> 6);
}

// 0xFF for each negative half, 0 for the others: of a's low and b's, then of the high ones.
__device__ __forceinline__ u32 signs_of(u32 a, u32 b) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, 0xFBD9;" : "=r"(bytes) : "r"(a), "r"(b));
    return bytes;
}

__device__ __forceinline__ bool holds_zero(u32 pair_of_minima) {
    return !(pair_of_minima & 0x7FFFu) || !(pair_of_minima & 0x7FFF0000u);
}

__device__ __forceinline__ u32 zeros_of(u32 pair, u32 live) {
    return (!(pair & 0x7FFFu) && (live & 1u)) + (!(pair & 0x7FFF0000u) && (live >> 16 & 1u));
}

// Eight magnitudes in nibbles -> saturated ones, counted where `live`. By rceil's scale, at least a
// sixth of the largest, no bfloat16 is beyond 6; what a block with NaN gives does not matter.
__device__ __forceinline__ u32 saturate(u32 n, u32 live, Tally& tally) {
#if PAIRS && !STATS
    return n;  // as codes64 gives it
#endif
#if RULE != 1
    const u32 over = n & 0x88888888u;
    n |= over - (over >> 3);
#if STATS
    tally.saturated += __popc(over & live);
#endif
#endif
    n &= 0x77777777u;
#if STATS
    tally.flushed += __popc(~(n | n >> 1 | n >> 2) & 0x11111111u & live);
#endif
    return n;
}

// Without the zeros among 16 pairs or less that went in, from what `saturate` counted as flushed.
template <int N, int STRIDE>
__device__ __forceinline__ void forget_zeros(const u32* x, u32 live, Tally& tally) {
#if STATS
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
__device__ __forceinline__ u32 pair_maximum(const u32* x) {
    u32 m = pair_abs(x[0]);
#pragma unroll
    for (int k = 1; k < N; ++k) m = pair_max(m, pair_abs(x[k * STRIDE]));
    return m & kPairMagnitude;
}

// A chunk of a row: 16 neighbours in eight pairs -> two words of codes.
__device__ __forceinline__ void encode_pairs(const u32 (&x)[8], const Scale& s, bool far,
                                             u32 (&codes)[kWords], Tally& tally) {
    const u32 scale = bits_of(s.apply) >> 16 | bits_of(s.apply);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const u32* four = x + 4 * w;
        const u32 n = magnitudes_across(four, scale, far);
        const u32 c = signs_of(four[0], four[1]), d = signs_of(four[2], four[3]);
        const u32 signs = (__byte_perm(c, d, 0x5410) & 0x08080808u) | (__byte_perm(c, d, 0x7632) & 0x80808080u);
        codes[w] = (saturate(n, s.live, tally) | signs) & s.live;
    }
    forget_zeros<8, 1>(x, s.live, tally);
}
#endif
