// E8M0 scale rules that read a block's values, as in extensor/quant/scale_encoders.py: mse (rceil
// or half of it, by squared error) and quest (by the root mean square). Macros: CODEC_RULE,
// CODEC_SEARCH_E8M0, CODEC_QUEST_FACTOR. Sums are float32 over a block's ascending positions.

#if CODEC_SEARCH_E8M0
// Sums over a block whose chunks are in neighbouring lanes: `add` continues the sum of the chunks
// before a lane's own.
struct AcrossLanes {
    template <class Add>
    DEVICE float operator()(const Add& add) const {
        float sum = 0;
#pragma unroll
        for (int p = 0; p < kParts; ++p)
            sum = __shfl_sync(
                ~0u, add(sum), static_cast<int>(threadIdx.x) % 32 / kParts * kParts + p);
        return sum;
    }
};

// The same for chunks in neighbouring warps.
struct AcrossWarps {
    float (*shared)[32];
    template <class Add>
    DEVICE float operator()(const Add& add) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float sum = 0;
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
            __syncthreads();
            if (warp % kParts == p) shared[warp / kParts][lane] = add(sum);
            __syncthreads();
            sum = shared[warp / kParts][lane];
        }
        return sum;
    }
};

#if CODEC_RULE == 8  // mse
// A value's squared error under a scale, in units of the scale.
DEVICE float unit_square(float x, float inverse) {
    const float y = fabsf(__fmul_rn(x, inverse)), inside = fminf(y, float_of(CODEC_CLAMP_BITS));
    const u32 exponent = CODEC_IS_FLOAT ? larger(bits_of(inside) & kExponent, kLowest) : kLowest;
    const float anchor = float_of(exponent + (static_cast<u32>(23 - CODEC_MANTISSA) << 23));
    const float code = fminf(__fsub_rn(__fadd_rn(inside, anchor), anchor), CODEC_TOP);
    const float off = __fsub_rn(code, y);
    return __fmul_rn(off, off);
}
#endif

template <class Across>
DEVICE Scale searched_scale(const float (&x)[kChunk], u32 amax, const Across& across) {
    const u32 safe = amax < kExponent ? amax : 0;
#if CODEC_RULE == 8
    const u32 whole = safe ? static_cast<u32>(min(max(exponent_byte(safe), 0), 254)) : 0;
    const u32 half = whole ? whole - 1 : 0;
    float error[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const float inverse = inverse_of_byte(n ? half : whole);
        error[n] = across([&](float sum) {
#pragma unroll
            for (int k = 0; k < kChunk; ++k) sum = __fadd_rn(sum, unit_square(x[k], inverse));
            return sum;
        });
    }
    const bool better = whole && __fmul_rn(error[1], 0.25f) < error[0];
    return e8m0_scale(amax, better ? half : whole);
#else  // quest
    const int power = min(max(static_cast<int>(safe >> 23) - 127, -126), 126);
    const float inverse = float_of(static_cast<u32>(127 - power) << 23);
    const float total = across([&](float sum) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
            const float y = __fmul_rn(x[k], inverse);
            sum = __fadd_rn(sum, __fmul_rn(y, y));
        }
        return sum;
    });
    const float mean = __fdiv_rn(total, static_cast<float>(CODEC_BLOCK));
    const u32 root = bits_of(__fmul_rn(__fsqrt_rn(mean), CODEC_QUEST_FACTOR));
    const int byte = min(max(static_cast<int>(root >> 23) + power, 0), 254);
    return e8m0_scale(amax, safe ? static_cast<u32>(byte) : 0);
#endif
}
#endif
