// Philox 4x32-10: four random words for a counter (extensor/random.py).

struct Stream {
    u32 key0, key1, high0, high1;
};

// high0 is the step's number. Where steps are repeated on the device it is read from `clock`.
__device__ __forceinline__ Stream stream_of(const u32* clock, u32 key0, u32 key1, u32 high0, u32 high1) {
    return Stream{key0, key1, clock ? *clock : high0, high1};
}

// Both words of a product. Said in C++, it costs an addition of zero each.
__device__ __forceinline__ void multiply(u32 a, u32 b, u32& high, u32& low) {
#ifdef __CUDA_ARCH__
    asm("{ .reg .u64 both; mul.wide.u32 both, %2, %3; mov.b64 {%0, %1}, both; }"
        : "=r"(low), "=r"(high) : "r"(a), "r"(b));
#else
    const u64 both = static_cast<u64>(a) * b;
    high = static_cast<u32>(both >> 32), low = static_cast<u32>(both);
#endif
}

__device__ __forceinline__ void philox(u32 call, u32 block, const Stream& s, u32 (&out)[4]) {
    u32 c0 = call, c1 = block, c2 = s.high0, c3 = s.high1, k0 = s.key0, k1 = s.key1;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        u32 high0, low0, high1, low1;
        multiply(c0, 0xD2511F53u, high0, low0);
        multiply(c2, 0xCD9E8D57u, high1, low1);
        c0 = high1 ^ c1 ^ k0, c1 = low1;
        c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}
