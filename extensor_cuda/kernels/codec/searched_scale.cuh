// NVFP4 scale rules that choose a block's scale by least squared error among several. Blocks of 16
// along the axis. Macros: CODEC_RULE, CODEC_SEARCH.
//
// The error sums ((q * sf) * factor [/ divisor] - x)**2 in float32 over ascending positions, as in
// extensor/quant/nvfp4.py. Of equal errors the first option wins.

#if CODEC_SEARCH
static_assert(
    CODEC_BITS == 4 && CODEC_IS_FLOAT && CODEC_MANTISSA == 1 && CODEC_MIN_EXPONENT == 0, "of E2M1");

// A block's candidate scales, the preferred one first: values and codes.
#if CODEC_RULE == 6  // four_over_six: a block's largest value becomes 6 or 4
constexpr int kOptions = 2;
#else  // least_error: four neighbouring scales with exact FP8 codes, the largest first
constexpr int kOptions = 4;
constexpr u32 kExactTop =
    kScaleLowest + (14u << 23) + 0x400000u;  // 1, 1.25 and 1.5 times 2**-6 .. 2**8
#endif
struct Options {
    float value[kOptions];
#if CODEC_RULE == 6
    u32 code[kOptions];
#endif
};

DEVICE Options options_of(u32 amax, const Tensor& tensor) {
    Options o;
#if CODEC_RULE == 6
    const float base = __fmul_rn(__fdiv_rn(float_of(amax), 6.0f), tensor.encode);
    o.code[0] = scale_code(base, o.value[0]);
    o.code[1] = scale_code(__fmul_rn(base, 1.5f), o.value[1]);
#else
    const float base = fminf(__fmul_rn(float_of(amax), tensor.encode), CODEC_SCALE_TOP);
    // A step is a quarter of a binade, every third one half. Starts at the least that reaches the
    // base.
    u32 at = (larger(bits_of(base), kScaleLowest) + 0x1FFFFFu) & ~0x1FFFFFu;
    at += (at & 0x600000u) == 0x600000u ? 0x200000u : 0;
    at = smaller(at, kExactTop);
    o.value[0] = float_of(smaller(at + (at & 0x400000u ? 0x400000u : 0x200000u), kExactTop));
#pragma unroll
    for (int n = 1; n < kOptions; ++n) {
        at = larger(at, kScaleLowest);
        o.value[n] = float_of(at);
        at -= at & kMantissa ? 0x200000u : 0x400000u;
    }
#endif
    return o;
}

// An option's code, from its number if known.
DEVICE u32 code_of(const Options& o, int number) {
#if CODEC_RULE == 6
    return o.code[number];
#else
    return 8 + ((bits_of(o.value[number]) - kScaleLowest) >> 20);
#endif
}

// ---- as the reference does it ----

// x * inverse rounded to the grid, ties to even.
DEVICE float nearest_value(float x, float inverse) {
    const float y = __fmul_rn(x, inverse);
    const float magnitude = fminf(fabsf(y), float_of(CODEC_CLAMP_BITS));
    const u32 exponent =
        larger(bits_of(magnitude) & kExponent, static_cast<u32>(127 + CODEC_MIN_EXPONENT) << 23);
    const float anchor = float_of(exponent + (static_cast<u32>(23 - CODEC_MANTISSA) << 23));
    const float value = fminf(__fsub_rn(__fadd_rn(magnitude, anchor), anchor), CODEC_TOP);
    return float_of(bits_of(value) | (bits_of(y) & kSign));
}

// One value's squared error under a scale.
DEVICE float square(float x, float inverse, float value, const Tensor& tensor) {
    float decoded = __fmul_rn(nearest_value(x, inverse), value);
#if CODEC_RULE == 6
    decoded = __fdiv_rn(__fmul_rn(decoded, tensor.amax), 1536.0f);
#else
    decoded = __fmul_rn(decoded, tensor.scale);
#endif
    const float difference = __fsub_rn(decoded, x);
    return __fmul_rn(difference, difference);
}

// The option of least error among those in a bit mask. The block has N chunks in this thread and
// (SPAN > N) others: chunk r of SPAN is in lane `base + r / N * STEP`.
template <int N, int SPAN, int STEP>
DEVICE int exact_search(
    const float (&x)[N][kChunk], int base, const Options& o, u32 some, const Tensor& tensor) {
    int best = -1;
    float least = 0;
#pragma unroll 1
    for (int number = 0; number < kOptions; ++number) {
        const bool mine = some >> number & 1;
        if (!__any_sync(~0u, mine)) continue;
        float value = o.value[0];
        u32 code = code_of(o, 0);
#pragma unroll
        for (int n = 1; n < kOptions; ++n)
            if (n == number) value = o.value[n], code = code_of(o, n);
        const float inverse = scale_inverse(code, value, tensor);
        float error = 0;
#pragma unroll 1
        for (int r = 0; r < SPAN; r += N) {
            float sum = error;
#pragma unroll
            for (int c = 0; c < N; ++c)
#pragma unroll
                for (int k = 0; k < kChunk; ++k)
                    sum = __fadd_rn(sum, square(x[c][k], inverse, value, tensor));
            error = SPAN > N ? __shfl_sync(~0u, sum, base + r / N * STEP) : sum;
        }
        if (mine && (best < 0 || error < least)) best = number, least = error;
    }
    return best;
}

// ---- nearly so, in a third of the instructions ----
//
// Errors are taken of magnitudes times a power of two, z, the largest of which lies in [2**-4,
// 2**-3). z / w times 2**-126, w being what a code of 1 means: there float32's subnormal numbers
// are as far apart as E2M1's, so that a code is the top bits, and adding half of the last one
// rounds. What differs from the reference: ties go up, which costs the same; the quotient is off by
// 12 * 2**-24 of it, so that a value at such a distance from a tie may get the other code, which
// changes its own square by 2**-15.5 of it at most; a code's value is off by 5 * 2**-24 of it, and
// the sum by its roundings. Together, of M values: 2**-15 of the sum (M / 2**24 more beyond 16),
// and 2**-24 of M times the largest's square. Options whose errors are further apart than twice
// that are told apart for sure.

constexpr float kLift = 1.2676506002282294e30f, kLiftMore = 67108864.0f;  // 2**100 and 2**26
constexpr u32 kHalfCode = 0x200000u, kCodeBits = 0xFFC00000u, kTopCode = 0x01FFFFFFu;

// The sum of a block's squared errors, with w times 2**126 in `value`: each lane's own, then all.
template <int N, int SPAN, int STEP>
DEVICE float near_error(const float (&z)[N][kChunk], float value) {
    const float inverse = reciprocal(value);
    float sum = 0;
#pragma unroll
    for (int c = 0; c < N; ++c)
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            const u32 code =
                __viaddmin_u32(bits_of(__fmul_rn(z[c][k], inverse)), kHalfCode, kTopCode) &
                kCodeBits;
            const float off = __fmaf_rn(float_of(code), value, -z[c][k]);
            sum = __fmaf_rn(off, off, sum);
        }
#pragma unroll
    for (int step = STEP; step < SPAN / N * STEP; step *= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, step));
    return sum;
}

// A block's scale; template arguments as for `exact_search`.
template <int N, int SPAN, int STEP>
DEVICE Scale best_scale(const float (&x)[N][kChunk], int base, u32 amax, const Tensor& tensor) {
    const bool finite = amax < kExponent;
    const Options o = options_of(finite ? amax : 0, tensor);
    // Squares of values further from 1 may underflow or overflow.
    const u32 exponent = amax >> 23;
    const bool usual = exponent - 77u <= 100u;
    const float shift = float_of((250u - exponent) << 23), top = __fmul_rn(float_of(amax), shift);
#if CODEC_RULE == 6
    const float unit = __fmul_rn(__fmul_rn(tensor.amax, shift), 1.0f / 1536);
#else
    const float unit = __fmul_rn(tensor.scale, shift);
#endif
    // An option's w times 2**126, without overflow unless all codes are zero.
    const float lifted = __fmul_rn(unit, kLift);
    const auto huge = [&](int n) { return __fmul_rn(__fmul_rn(o.value[n], kLiftMore), lifted); };
    float z[N][kChunk];
#pragma unroll
    for (int c = 0; c < N; ++c)
#pragma unroll
        for (int k = 0; k < kChunk; ++k) z[c][k] = __fmul_rn(fabsf(x[c][k]), shift);

    constexpr float kMore =
        1 + (SPAN > 1 ? 4.0f : 2.0f) / (1 << 15);  // relative to the second least error
    const float apart = __fmul_rn(__fmul_rn(top, top), 2.0f * SPAN / (1 << 20)),
                infinite = float_of(kExponent);
    const auto limit = [&](float least) { return __fmul_rn(__fadd_rn(least, apart), kMore); };
    float error[kOptions];
    const auto consider = [&](int n) {
        error[n] = near_error<N, SPAN, STEP>(z, huge(n));
        if (n > 0 && o.value[n] == o.value[n - 1])
            error[n] = infinite;  // at either end of the scales
    };
    constexpr int kAlways = kOptions < 3 ? kOptions : 3;
#pragma unroll
    for (int n = 0; n < kAlways; ++n) consider(n);
    bool settled = !finite || amax == 0;
    float least = error[0];
#pragma unroll
    for (int n = 1; n < kAlways; ++n) least = fminf(least, error[n]);
#if CODEC_RULE == 6
    settled |= o.code[0] == o.code[1];
    const bool plain = usual && o.code[0] != 0;
#else
    const bool plain = usual;
    const float last = __fmul_rn(o.value[3], unit);
    settled |= usual && top < __fmul_rn(last, 0.2499f);  // all codes are zero under any scale
    // The last scale puts the largest value beyond 6, which seldom pays.
    const float beyond = fmaxf(__fsub_rn(top, __fmul_rn(last, CODEC_TOP)), 0.0f);
    error[3] = infinite;
    if (__any_sync(~0u, plain && !settled && o.value[3] != o.value[2] &&
                            !(__fmul_rn(beyond, beyond) > limit(least)))) {
        consider(3);
        least = fminf(least, error[3]);
    }
#endif
    // The options that the reference may choose.
    const float most = limit(least);
    u32 some = 0;
#pragma unroll
    for (int n = 0; n < kOptions; ++n) some |= !plain || !(error[n] > most) ? 1u << n : 0;
    if (settled) some = 1;
    if (const bool open = some & (some - 1); __any_sync(~0u, open)) {
        const int best = exact_search<N, SPAN, STEP>(x, base, o, open ? some : 0, tensor);
        if (open) some = 1u << best;
    }
    float value = o.value[0];
    u32 code = code_of(o, 0);
#pragma unroll
    for (int n = 1; n < kOptions; ++n)
        if (some >> n & 1) {
            value = o.value[n];
            if (CODEC_RULE == 6) code = code_of(o, n);
        }
#if CODEC_RULE != 6
    code = 8 + ((bits_of(value) - kScaleLowest) >> 20);
#endif
    return scale_of(code, value, amax, tensor);
}
#endif
