// MS-EDEN's block scales (extensor/quant/nvfp4.py, arXiv 2601.22813): codes rounded to nearest
// under a first scale, whose scale is then corrected over each Hadamard transform and rounded
// stochastically. Blocks of 16, a chunk each. Macro: CODEC_EDEN.

#if CODEC_EDEN
static_assert(CODEC_BLOCK == kChunk && CODEC_HADAMARD, "a transform of blocks of 16");
constexpr int kEdenBlocks = CODEC_HADAMARD / kChunk;  // blocks of one transform

// The sum over a transform's blocks, which lie in neighbouring lanes.
struct TransformLanes {
    DEVICE float operator()(float mine) const {
        const int first = static_cast<int>(threadIdx.x) % 32 / kEdenBlocks * kEdenBlocks;
        float sum = 0;
#pragma unroll
        for (int b = 0; b < kEdenBlocks; ++b)
            sum = __fadd_rn(sum, __shfl_sync(~0u, mine, first + b));
        return sum;
    }
};

// The same for neighbouring warps.
struct TransformWarps {
    float (*shared)[32];
    DEVICE float operator()(float mine) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        __syncthreads();
        shared[warp][lane] = mine;
        __syncthreads();
        float sum = 0;
#pragma unroll
        for (int b = 0; b < kEdenBlocks; ++b)
            sum = __fadd_rn(sum, shared[warp / kEdenBlocks * kEdenBlocks + b][lane]);
        return sum;
    }
};

// E2M1's value nearest to a scaled one; ties go to the even code.
DEVICE float nearest_e2m1(float y) {
    const float magnitude = fminf(fabsf(y), float_of(CODEC_CLAMP_BITS));
    const u32 exponent = larger(bits_of(magnitude) & kExponent, 127u << 23);
    const float anchor = float_of(exponent + (22u << 23));
    const float value = fminf(__fsub_rn(__fadd_rn(magnitude, anchor), anchor), CODEC_TOP);
    return float_of(bits_of(value) | (bits_of(y) & kSign));
}

// The code and the value that a scale becomes with a random word.
DEVICE u32 stochastic_scale_code(float scale, u32 word, float& value) {
    const float base = fminf(scale, 65536.0f);
    const u32 exponent = larger(bits_of(base) & kExponent, kScaleLowest);
    const u32 anchor = exponent + (static_cast<u32>(23 - CODEC_SCALE_MANTISSA) << 23);
    const u32 spacing = exponent - (static_cast<u32>(CODEC_SCALE_MANTISSA) << 23);
    const float sum = __fadd_rz(base, float_of(anchor));
    const float rest = __fsub_rn(base, __fsub_rn(sum, float_of(anchor)));   // exact
    const float parts = __fmul_rn(rest, float_of((286u << 23) - spacing));  // times 2**32 / spacing
    const u32 steps = bits_of(sum) - anchor + (__float2uint_ru(parts) > word ? 1 : 0);
    const u32 code = ((exponent - kScaleLowest) >> (23 - CODEC_SCALE_MANTISSA)) + steps;
    value = fminf(__fmul_rn(__uint2float_rn(steps), float_of(spacing)), CODEC_SCALE_TOP);
    return smaller(code, CODEC_SCALE_MAX_CODE);
}

// Gives a block the corrected scale; `apply` stays the first scale's, which the codes are made by.
template <class Across>
DEVICE void correct_scale(Scale& s, const float (&x)[kChunk], u32 amax, u32 block,
    const Stream& stream, const Across& across) {
    const float inverse = s.live && s.decode != 0 ? s.apply : 0.0f;
    float squares = 0, products = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        const float y = s.live ? __fmul_rn(x[k], inverse) : 0.0f;
        squares = __fadd_rn(squares, __fmul_rn(y, y));
        products = __fadd_rn(products, __fmul_rn(y, nearest_e2m1(y)));
    }
    squares = across(squares), products = across(products);
    const float correction = products == 0 ? 1.0f : __fdiv_rn(squares, products);
    u32 draw[4];
    philox(0, block, stream, draw);
    float value;
    const u32 code = stochastic_scale_code(__fmul_rn(s.decode, correction), draw[0], value);
    s.decode = value;
    if (s.live && amax) s.stored = code;
}
#endif
