// Decodes INT8 codes to pairs of bfloat16; follows weights.cuh.

// Neighbours, times 2^-6. u = code + 128 is, as the bits of a bfloat16, u times 2^-133, whether
// that has an exponent or not: one multiplication by 2^127 with what is to be taken off added, and
// nothing is rounded.
__device__ __forceinline__ void decode_bytes(const u32* words, int zero, u32 (&pairs)[4]) {
    const u32 offset = twice(__float_as_uint(-0.015625f * static_cast<float>(128 + zero)) >> 16);
#pragma unroll
    for (int p = 0; p < 4; ++p)
        pairs[p] = fma_pair(__byte_perm(words[p / 2] ^ 0x80808080u, 0u, p % 2 ? 0x4342 : 0x4140),
                            0x7F007F00u, offset);
}
