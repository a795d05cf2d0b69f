// Which values of a chunk lie within their block's largest one (`clip_mask` of
// extensor/quant/block_codec.py): a bit each, the first in the lowest. Macro: CODEC_MASK.

#if CODEC_MASK
#define CODEC_MASK_PARAMETER u8* __restrict__ mask,

DEVICE u32 clip_bits(const float (&x)[kChunk], const Scale& s, const Tensor& tensor) {
    float limit = __fmul_rn(CODEC_TOP, s.decode);
    if (CODEC_UE4M3) limit = __fmul_rn(limit, tensor.scale);
    u32 bits = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) bits |= (fabsf(x[k]) <= limit ? 1u : 0u) << k;
    return bits & s.live;
}
#else
#define CODEC_MASK_PARAMETER
#endif
