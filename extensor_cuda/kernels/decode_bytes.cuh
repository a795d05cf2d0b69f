// Codes of 8 bits as bfloat16 pairs, beside decode.cuh.

#ifdef __CUDA_ARCH__
// a b + c of bfloat16 pairs, rounded once, 0 where it is below.
__device__ __forceinline__ u32 fma_pair_relu(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.relu.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif

// As `decode` has them, with fewer instructions of the ALU. u = code + 128 below the upper byte of 128.0 is 128 + u, or
// 2 u from u = 128 on, where its upper bit doubles. Half of that, less 64 - u / 2 in the first case, is u again; each
// step is exact.
__device__ __forceinline__ void decode_bytes(const u32* words, int zero, u32 (&pairs)[4]) {
    const u32 offset = twice(__float_as_uint(-static_cast<float>(128 + zero)) >> 16);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const u32 t = __byte_perm(words[p / 2] ^ 0x80808080u, 0x43434343u, p % 2 ? 0x4342 : 0x4140);
        const u32 above = fma_pair_relu(t, 0xBF00BF00u, 0x43004300u);  // 128 - t / 2, or 0
        pairs[p] = fma_pair(fma_pair(t, 0xBF00BF00u, above), 0xBF80BF80u, offset);  // u, negative, first
    }
}
