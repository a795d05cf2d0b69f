// Which values of a chunk lie within their block's largest one (`clip_mask` of
// extensor/quant/block_codec.py): a bit each, the first in the lowest. Macro: CODEC_MASK.

#if CODEC_MASK
#define CODEC_MASK_PARAMETER u8* __restrict__ mask,
#define CODEC_MASK_ARGUMENT mask,

DEVICE float clip_limit(const Scale& s, const Tensor& tensor) {
    const float limit = __fmul_rn(CODEC_TOP, s.decode);
    return CODEC_UE4M3 ? __fmul_rn(limit, tensor.scale) : limit;
}

DEVICE u32 clip_bits(const float (&x)[1][kChunk], const Scale& s, const Tensor& tensor) {
    const float limit = clip_limit(s, tensor);
    u32 bits = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) bits |= (fabsf(x[0][k]) <= limit ? 1u : 0u) << k;
    return bits & s.live;
}

// Of pairs of bfloat16.
DEVICE u32 clip_bits(const u32 (&x)[kChunk / 2], const Scale& s, const Tensor& tensor) {
    const float limit = clip_limit(s, tensor);
    u32 bits = 0;
#pragma unroll
    for (int k = 0; k < kChunk / 2; ++k) {
        bits |= (fabsf(float_of(x[k] << 16)) <= limit ? 1u : 0u) << 2 * k;
        bits |= (fabsf(float_of(x[k] & 0xFFFF0000u)) <= limit ? 2u : 0u) << 2 * k;
    }
    return bits & s.live;
}

// Writes a chunk's bits: of a row of `coded` values, from `start` on.
DEVICE void store_clip_bits(u8* mask, i64 row, i64 start, i64 coded, u32 inside) {
#if QUANT_WHOLE
    *reinterpret_cast<u16*>(mask + (row * coded + start) / 8) = static_cast<u16>(inside);
#else
    if (coded - start < kChunk) inside &= coded > start ? (1u << (coded - start)) - 1 : 0;
    u8* to = mask + row * ((coded + 7) / 8) + start / 8;
    if (start < coded) to[0] = static_cast<u8>(inside);
    if (start + 8 < coded) to[1] = static_cast<u8>(inside >> 8);
#endif
}
#else
#define CODEC_MASK_PARAMETER
#define CODEC_MASK_ARGUMENT
#endif
