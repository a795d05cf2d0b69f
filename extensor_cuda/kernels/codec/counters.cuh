// Counts saturated and flushed values, finds the tensor's largest magnitude, and makes its scale.
// Configured by the quantizer's CODEC_ macros.

#if CODEC_HADAMARD
#define CODEC_SIGN_PARAMETERS u32 sign0, u32 sign1, u32 sign2, u32 sign3,
#else
#define CODEC_SIGN_PARAMETERS
#endif

// How many elements along the axis are coded.
DEVICE i64 coded_length(i64 length) {
#if CODEC_HADAMARD
    return (length + CODEC_HADAMARD - 1) / CODEC_HADAMARD * CODEC_HADAMARD;
#else
    return length;
#endif
}

DEVICE void add_counts(const Tally& tally, u64* counters) {
#if CODEC_STATS
    const u32 saturated = __reduce_add_sync(~0u, tally.saturated);
    const u32 flushed = __reduce_add_sync(~0u, tally.flushed);
    if (threadIdx.x % 32 == 0) {
        const u32 warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
        u64* slot = counters + warp % kSlots * 2;
        if (saturated) atomicAdd(slot, static_cast<u64>(saturated));
        if (flushed) atomicAdd(slot + 1, static_cast<u64>(flushed));
    }
#endif
}

DEVICE void raise(u32* most, u32 mine) {
    if (mine > *static_cast<volatile u32*>(most)) atomicMax(most, mine);
}

// The largest finite element (NVFP4), or the largest maximum of finite blocks.
DEVICE void add_maximum(u32 mine, u32* maximum) {
    const u32 most = __reduce_max_sync(~0u, mine);
    if (threadIdx.x % 32 == 0) raise(maximum, most);
}

#if CODEC_NEEDS_TENSOR
// One thread, once per tensor: derives every block's parameters from the largest magnitude.
extern "C" __global__ void tensor_scales(const u32* maximum, Tensor* tensor) {
    const float amax = float_of(*maximum);
#if CODEC_UE4M3
    float encode = fminf(__fdiv_rn(CODEC_TENSOR_TARGET, amax), kFloatMax);
    if (amax == 0 || encode == 0) encode = 1;
    tensor->scale = __fdiv_rn(1.0f, encode);
    tensor->encode = CODEC_RULE == 6 ? encode : __fmul_rn(encode, CODEC_RECIPROCAL_SIX);
    tensor->lowest = 0;
    tensor->amax = amax;
#else
    tensor->scale = tensor->encode = tensor->amax = 1;
    tensor->lowest = amax > 0 ? exponent_byte(bits_of(amax)) - CODEC_WINDOW : 0;
#endif
}
#endif
