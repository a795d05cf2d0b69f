// Loads and stores of float32 and bfloat16, one value or 8 at a time. Arithmetic is float32; stores
// round to nearest even.

constexpr int kVector = 8;
struct FloatVector {
    float v[kVector];
};

// The bits of the nearest bfloat16. NaN becomes the quiet NaN of its sign.
DEVICE u32 round_bf16(float v) {
    const u32 bits = __float_as_uint(v);
    if (v != v) return (bits >> 16 & 0x8000u) | 0x7FC0u;
    return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

#ifdef __CUDA_ARCH__
// The same of two numbers; another quiet NaN than `round_bf16` of NaN.
DEVICE u32 round_numbers(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
#endif

DEVICE u32 round_bf16x2(float low, float high) {
#ifdef __CUDA_ARCH__
    if (low == low && high == high) return round_numbers(low, high);
#endif
    return round_bf16(low) | round_bf16(high) << 16;
}

template <int kind>
struct ElementType;

template <>
struct ElementType<0> {
    typedef float Raw;
    static DEVICE float wide(float v) { return v; }
    static DEVICE float narrow(float v) { return v; }
    static DEVICE FloatVector load(const float* from) {  // 16-byte aligned, as below
        const float4 a = reinterpret_cast<const float4*>(from)[0],
                     b = reinterpret_cast<const float4*>(from)[1];
        return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    }
    static DEVICE void store(float* to, const FloatVector& g) {
        reinterpret_cast<float4*>(to)[0] = float4{g.v[0], g.v[1], g.v[2], g.v[3]};
        reinterpret_cast<float4*>(to)[1] = float4{g.v[4], g.v[5], g.v[6], g.v[7]};
    }
};

template <>
struct ElementType<1> {
    typedef u16 Raw;
    static DEVICE float wide(u16 v) { return __uint_as_float(static_cast<u32>(v) << 16); }
    static DEVICE u16 narrow(float v) { return static_cast<u16>(round_bf16(v)); }
    static DEVICE FloatVector load(const u16* from) {
        const uint4 w = *reinterpret_cast<const uint4*>(from);
        const u32 words[4] = {w.x, w.y, w.z, w.w};
        FloatVector g;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            g.v[2 * i] = __uint_as_float(words[i] << 16);
            g.v[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        }
        return g;
    }
    static DEVICE void store(u16* to, const FloatVector& g) {
        u32 w[4];
#ifdef __CUDA_ARCH__
        bool numbers = true;  // neither comparison holds of a NaN; one branch for all eight
#pragma unroll
        for (int i = 0; i < 4; ++i)
            numbers &= g.v[2 * i] <= g.v[2 * i + 1] || g.v[2 * i] > g.v[2 * i + 1];
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = round_numbers(g.v[2 * i], g.v[2 * i + 1]);
        if (!numbers)
#endif
#pragma unroll
            for (int i = 0; i < 4; ++i)
                w[i] = round_bf16(g.v[2 * i]) | round_bf16(g.v[2 * i + 1]) << 16;
        *reinterpret_cast<uint4*>(to) = uint4{w[0], w[1], w[2], w[3]};
    }
};
