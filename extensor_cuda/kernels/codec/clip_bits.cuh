// Which values of a chunk lie within their block's largest one (`clip_mask` of
// extensor/quant/block_codec.py): a bit each, the first in the lowest. Macro: CODEC_MASK.

#if CODEC_MASK
#define CODEC_MASK_PARAMETER u8* __restrict__ mask,
#define CODEC_MASK_ARGUMENT mask,
#define CODEC_CLIP_PARAMETERS const u32(&raw)[sizeof(Raw) * kChunk / 4], u32 &inside,
#define CODEC_CLIP_ARGUMENTS(raw, inside) raw, inside,
#define CODEC_CLIP_BITS inside = clip_bits(raw, v, s, tensor);

DEVICE float clip_limit(const Scale& s, const Tensor& tensor) {
    const float limit = __fmul_rn(CODEC_TOP, s.decode);
    return CODEC_UE4M3 ? __fmul_rn(limit, tensor.scale) : limit;
}

#if CODEC_IN == 1 && !CODEC_HADAMARD
// All ones in halves whose magnitude is at most that of `most`.
DEVICE u32 pair_within(u32 x, u32 most) {
#if __CUDA_ARCH__ >= 900
    u32 d;
    asm("{ .reg .b32 size; abs.bf16x2 size, %1; set.le.u32.bf16x2 %0, size, %2; }"
        : "=r"(d)
        : "r"(x), "r"(most));
    return d;
#else  // a half of most + 2^15 less the magnitude keeps its top bit unless the magnitude is larger
    return ((most + 0x80008000u - (x & 0x7FFF7FFFu)) >> 15 & 0x00010001u) * 0xFFFFu;
#endif
}

// Of bfloat16 values as read: they are at most the limit where they are at most its upper half.
template <typename Unpacked>
DEVICE u32 clip_bits(
    const u32 (&raw)[kChunk / 2], const Unpacked&, const Scale& s, const Tensor& tensor) {
    const u32 top = bits_of(clip_limit(s, tensor)) >> 16, most = top << 16 | top;
    u32 found[2] = {};  // which do not wait for each other
#pragma unroll
    for (int k = 0; k < kChunk / 2; ++k)
        found[k % 2] |= pair_within(raw[k], most) & (0x00020001u << 2 * k);
    found[0] |= found[1];
    return (found[0] | found[0] >> 16) & s.live;
}
#else
// A difference is negative where a magnitude is above the limit; a block with a NaN is not live.
template <int N>
DEVICE u32 clip_bits(
    const u32 (&)[N], const float (&x)[1][kChunk], const Scale& s, const Tensor& tensor) {
    const float limit = clip_limit(s, tensor);
    constexpr int kChains = 4, kEach = kChunk / kChains;  // which do not wait for each other
    u32 above[kChains] = {};
#pragma unroll
    for (int k = kEach - 1; k >= 0; --k)
#pragma unroll
        for (int c = 0; c < kChains; ++c)
            above[c] =
                __funnelshift_l(bits_of(__fsub_rn(limit, fabsf(x[0][c * kEach + k]))), above[c], 1);
#pragma unroll
    for (int c = 1; c < kChains; ++c) above[0] |= above[c] << c * kEach;
    return ~above[0] & s.live;
}
#endif

// Writes a chunk's bits: the chunk as they are counted in whole rows, or from `start` on of a row
// of `coded` values.
DEVICE void store_clip_bits(u8* mask, i64 chunk, i64 row, i64 start, i64 coded, u32 inside) {
#if QUANT_WHOLE
    reinterpret_cast<u16*>(mask)[chunk] = static_cast<u16>(inside);
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
#define CODEC_CLIP_PARAMETERS
#define CODEC_CLIP_ARGUMENTS(raw, inside)
#define CODEC_CLIP_BITS
#endif
