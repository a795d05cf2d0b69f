// Encodes a thread's chunk of 16 values: finds its block's scale and makes the codes. Configured by
// the quantizer's CODEC_ macros.

#if CODEC_BF16X2
typedef u32 Chunk[kChunk / 2];
#else
typedef float Chunk[1][kChunk];
#endif

// Unpacks words as read to a chunk; bf16x2 words stay packed.
DEVICE Chunk& chunk_of(u32 (&raw)[sizeof(Raw) * kChunk / 4], Chunk& unpacked) {
#if CODEC_BF16X2
    return raw;
#else
#pragma unroll
    for (int k = 0; k < kChunk; ++k) unpacked[0][k] = element(raw, k);
    return unpacked;
#endif
}

// Makes packed codes (CODEC_OUT 1: decoded values in place). Neighbouring lanes hold the block's
// other chunks. CODEC_MASK: `inside` gets the clip mask's bits, before the values are let go.
DEVICE Scale encode_chunk(Chunk& v, const Tensor& tensor, u32 block, u32 part, const Stream& stream,
    CODEC_CLIP_PARAMETERS u32 (&packed)[kWords], Tally& tally) {
#if CODEC_BF16X2
    const u32 pair = pair_maximum<kChunk / 2, 1>(v);
    const u32 amax = across_lanes(larger(low_float(pair), high_float(pair)));
    const Scale s = block_scale(amax, tensor);
    CODEC_CLIP_BITS
    encode_pairs(v, s, is_far(amax, s), packed, tally);
#else
    const u32 amax = across_lanes(chunk_maximum(v[0]));
#if CODEC_SEARCH
    const Scale s = best_scale<1, 1, 1>(v, 0, amax, tensor);
#elif CODEC_SEARCH_E8M0
    const Scale s = searched_scale(v[0], amax, AcrossLanes{});
#elif CODEC_EDEN
    Scale s = block_scale(amax, tensor);
    correct_scale(s, v[0], amax, block, stream, TransformLanes{});
#else
    const Scale s = block_scale(amax, tensor);
#endif
    CODEC_CLIP_BITS
    encode(v[0], s, is_far(amax, s), tensor, block, part, stream, packed, tally);
#endif
    return s;
}
