// ---- bfloat16 to e2m1 under a power of two, two values at a time ----

#if HALVES
// Scaling by a power of two is exact in bfloat16 where it matters (what underflows is far below a
// quarter), and the additions that round have bfloat16's last place where float32 had its own. So
// the same steps as above hold on pairs.
constexpr u32 kPairMagnitude = 0x7FFF7FFFu, kPairSign = 0x80008000u;

__device__ __forceinline__ u32 pair_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ u32 pair_max(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
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

__device__ __forceinline__ u32 low_float(u32 pair) { return pair << 16; }
__device__ __forceinline__ u32 high_float(u32 pair) { return pair & 0xFFFF0000u; }

// Code magnitudes (up to 10) of x * scale in the two halves.
__device__ __forceinline__ u32 round_pair(u32 x, u32 scale, bool far) {
    u32 y = pair_fma(x, scale, kPairSign);  // plus -0: the product itself
    if (far) y = pair_min(y & kPairMagnitude, CLAMP_BITS >> 16 | CLAMP_BITS);
    const u32 exponent = pair_max(y & 0x7F807F80u, 0x3F803F80u);
    const u32 anchor = exponent + 0x03000300u;
    const u32 sum = pair_fma(pair_abs(y), 0x3F803F80u, anchor);
    return sum - anchor + ((exponent - 0x3F803F80u) >> 6);
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
        u32 a = round_pair(four[0], scale, far) | round_pair(four[1], scale, far) << 8;
        u32 b = round_pair(four[2], scale, far) | round_pair(four[3], scale, far) << 8;
        const u32 n = saturate(__byte_perm(a | a >> 12, b | b >> 12, 0x5410), s.live, tally);
        const u32 even = __byte_perm(__byte_perm(four[0], four[1], 0x51),
                                     __byte_perm(four[2], four[3], 0x51), 0x5410);
        const u32 odd = __byte_perm(__byte_perm(four[0], four[1], 0x73),
                                    __byte_perm(four[2], four[3], 0x73), 0x5410);
        codes[w] = (n | (even >> 4 & 0x08080808u) | (odd & 0x80808080u)) & s.live;
    }
    forget_zeros<8, 1>(x, s.live, tally);
}
#endif
