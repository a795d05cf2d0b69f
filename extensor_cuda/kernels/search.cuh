// NVFP4 scale rules that choose, per block, among several scales the one with the least squared error.
//
// The error sums ((q * sf) * factor [/ divisor] - x)**2 in float32 over ascending positions, as
// extensor/quant/nvfp4.py does; of equal errors the first option wins. Blocks of 16 along the axis.

#if SEARCH
#if RULE == 6  // four_over_six: a block's largest value becomes 6 or 4
constexpr int kOptions = 2;
#else  // least_error: four neighbours among the scales that FP8 holds exactly
constexpr int kOptions = 4;
constexpr int kExactScales = 45;  // 1, 1.25 and 1.5 times 2**-6 .. 2**8
#endif

// What an option means, and its code.
__device__ __forceinline__ u32 option(int number, u32 amax, const Tensor& tensor, float& value) {
#if RULE == 6
    const float base = __fmul_rn(__fdiv_rn(float_of(amax), 6.0f), tensor.encode);
    return scale_code(number ? __fmul_rn(base, 1.5f) : base, value);
#else
    const float base = fminf(__fmul_rn(float_of(amax), tensor.encode), SCALE_TOP);
    int at = 0;  // the first of the exact scales that is not below the base
    if (base > float_of(kScaleLowest)) {
        const u32 mantissa = bits_of(base) & kMantissa;
        at = 3 * (static_cast<int>(bits_of(base) >> 23) - static_cast<int>(kScaleLowest >> 23));
        at += mantissa == 0 ? 0 : mantissa <= 0x200000u ? 1 : mantissa <= 0x400000u ? 2 : 3;
    }
    at = min(at, kExactScales - 1);
    at = min(max(at + 1 - number, 0), kExactScales - 1);
    value = float_of(kScaleLowest + (static_cast<u32>(at / 3) << 23) + (at % 3) * 0x200000u);
    return static_cast<u32>(8 * (1 + at / 3) + 2 * (at % 3));
#endif
}

// x * inverse to the nearest grid value, ties to even.
__device__ __forceinline__ float nearest(float x, float inverse) {
    const float y = __fmul_rn(x, inverse);
    const float magnitude = fminf(fabsf(y), float_of(CLAMP_BITS));
    const u32 exponent = larger(bits_of(magnitude) & kExponent, static_cast<u32>(127 + MIN_EXPONENT) << 23);
    const float anchor = float_of(exponent + (static_cast<u32>(23 - MANTISSA) << 23));
    const float value = fminf(__fsub_rn(__fadd_rn(magnitude, anchor), anchor), TOP);
    return float_of(bits_of(value) | (bits_of(y) & kSign));
}

// One value's squared error under a scale.
__device__ __forceinline__ float square(float x, float inverse, float value, const Tensor& tensor) {
    float decoded = __fmul_rn(nearest(x, inverse), value);
#if RULE == 6
    decoded = __fdiv_rn(__fmul_rn(decoded, tensor.amax), 1536.0f);
#else
    decoded = __fmul_rn(decoded, tensor.scale);
#endif
    const float difference = __fsub_rn(decoded, x);
    return __fmul_rn(difference, difference);
}

// The scale of a block whose values lie in N chunks of this thread, and (SPAN > N) of its
// neighbours: chunk r of the SPAN in lane `base + r / N * STEP`.
template <int N, int SPAN, int STEP>
__device__ __forceinline__ Scale best_scale(const float (&x)[N][kChunk], int base, u32 amax,
                                            const Tensor& tensor) {
    const bool finite = amax < kExponent;
    u32 best = 0;
    float best_value = 0, least = 0;
#pragma unroll 1
    for (int number = 0; number < kOptions; ++number) {
        float value;
        const u32 code = option(number, finite ? amax : 0, tensor, value);
        const float inverse = scale_inverse(code, value, tensor);
        float error = 0;
#pragma unroll 1
        for (int r = 0; r < SPAN; r += N) {
            float sum = error;
#pragma unroll
            for (int c = 0; c < N; ++c)
#pragma unroll
                for (int k = 0; k < kChunk; ++k)
                    sum = __fadd_rn(sum, square(finite ? x[c][k] : 0, inverse, value, tensor));
            error = SPAN > N ? __shfl_sync(~0u, sum, base + r / N * STEP) : sum;
        }
        if (number == 0 || error < least) best = code, best_value = value, least = error;
    }
    return scale_of(best, best_value, amax, tensor);
}
#endif
