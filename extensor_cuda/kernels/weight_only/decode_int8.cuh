// Decodes INT8 codes to bf16x2. Include it after weights.cuh.

// Decodes neighbours, times 2^-6. The bits of u = code + 128 are the bfloat16 u 2^-133, normal or
// not. One fused multiplication by 2^127 also subtracts the offset, and nothing is rounded.
DEVICE void decode_bytes(const u32* words, int zero, u32 (&pairs)[4]) {
    const u32 offset =
        repeat_bf16x2(__float_as_uint(-0.015625f * static_cast<float>(128 + zero)) >> 16);
#pragma unroll
    for (int p = 0; p < 4; ++p)
        pairs[p] = fma_bf16x2(__byte_perm(words[p / 2] ^ 0x80808080u, 0u, p % 2 ? 0x4342 : 0x4140),
            0x7F007F00u, offset);
}
