// bf16x2 arithmetic, and scales as bf16x2. Macros: CODEC_FLOAT_SCALES (float scales are not
// converted), CODEC_UE4M3.

#ifdef __CUDA_ARCH__
// a b + c of bf16x2, rounded once.
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// a & b ^ c in one instruction; the compiler would use two if b and c are constants.
DEVICE u32 and_xor(u32 a, u32 b, u32 c) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif

DEVICE u32 repeat_bf16x2(u32 half) { return half | half << 16; }

#if !CODEC_FLOAT_SCALES
// A scale times 2^-8 as bf16x2. `folded`: times 2^118, which includes the elements' 2^-126.
DEVICE u32 scale_bf16x2(u32 byte, bool folded) {
#if CODEC_UE4M3
    // The shifted bits are the bfloat16 2^-120 times the scale, which is below 2^9.
    const u32 scale = fma_bf16x2(fma_bf16x2(byte * 0x00100010u, 0x7B807B80u, 0u), 0x7A807A80u, 0u);
    return byte < 0x7Fu ? scale : repeat_bf16x2(0x7FC0u);
#else
    if (folded) return byte * 0x00800080u + 118u * 0x00800080u;
    return repeat_bf16x2(byte == 255u ? 0x7FC0u
                         : byte > 8u  ? (byte - 8u) << 7
                         : byte > 1u  ? 1u << (byte - 2u)
                                      : 0u);
#endif
}
#endif
