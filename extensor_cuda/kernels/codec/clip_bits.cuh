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
    for (int k = 0; k < kChunk; ++k)
        if (fabsf(x[0][k]) <= limit) bits |= 1u << k;
    return bits & s.live;
}

// Of pairs of bfloat16, under a power of two: bfloat16 holds the limit. A half of limit + 2^15 less
// the magnitude keeps its top bit unless the magnitude is larger.
DEVICE u32 clip_bits(const u32 (&x)[kChunk / 2], const Scale& s, const Tensor& tensor) {
    const float limit = clip_limit(s, tensor);
    const u32 top = bits_of(limit) >> 16, most = (top << 16 | top) + 0x80008000u;
    u32 found = 0;
#pragma unroll
    for (int k = 0; k < kChunk / 2; ++k)
        found |= ((most - (x[k] & 0x7FFF7FFFu)) >> 15 & 0x00010001u) << 2 * k;
    const u32 bits = (found & 0x5555u) | (found >> 15 & 0xAAAAu);
    return limit == limit ? bits & s.live : 0;
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
