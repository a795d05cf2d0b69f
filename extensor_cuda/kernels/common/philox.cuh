// Philox 4x32-10: four random words for a counter (extensor/random.py).

struct Stream {
    u32 key0, key1, high0, high1;
};

// high0 is the step number. A captured step reads it from `clock` instead, and behind it the use of
// the layer in the step, which high1 leaves at 0 then: extensor/quant/recipe_state.py counts both.
DEVICE Stream stream_of(const u32* clock, u32 key0, u32 key1, u32 high0, u32 high1) {
    if (!clock) return Stream{key0, key1, high0, high1};
    const u32 use = clock[1];
    const u64 key = (static_cast<u64>(key1) << 32 | key0) + (use >> 12) * 0x9E3779B97F4A7C15u;
    const u32 low = static_cast<u32>(key), high = static_cast<u32>(key >> 32);
    return Stream{low, high, clock[0], high1 + (use << 20)};
}

// COMMON_MUL_WIDE: uses assembly, because the compiler otherwise adds zero to each high word. In
// other kernels the assembly takes more registers.
DEVICE u64 product(u32 a, u32 b) {
#if COMMON_MUL_WIDE && defined(__CUDA_ARCH__)
    u64 both;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(both) : "r"(a), "r"(b));
    return both;
#else
    return static_cast<u64>(a) * b;
#endif
}

DEVICE void philox(u32 call, u32 block, const Stream& s, u32 (&out)[4]) {
    u32 c0 = call, c1 = block, c2 = s.high0, c3 = s.high1, k0 = s.key0, k1 = s.key1;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = product(c0, 0xD2511F53u), p1 = product(c2, 0xCD9E8D57u);
        c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<u32>(p1);
        c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<u32>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}
