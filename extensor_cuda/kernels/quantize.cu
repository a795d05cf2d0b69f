// Fused block quantizer: values -> packed codes and scales, byte for byte as extensor/quant does it.
//
// A thread owns a chunk, 16 neighbouring positions of one block: one Philox call at 8 random bits,
// whole 32-bit words of codes at 4, 6 and 8 bits. `quantize_rows` blocks along the last axis
// (contiguous), `quantize_columns` along an axis before it. Both read the values once.
//
// No headers. Everything about the format, the scale rule and the rounding comes as macros (see
// quantize.py), so that each cubin holds one straight path. Compiled with --fmad=false: every float
// operation here decides bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 kMagnitude = 0x7FFFFFFFu, kSign = 0x80000000u, kExponent = 0x7F800000u;
constexpr u32 kMantissa = 0x007FFFFFu, kNaN = 0x7FC00000u;
constexpr float kFloatMax = 3.4028234663852886e38f;
constexpr int kThreads = 256, kChunk = 16, kParts = BLOCK / kChunk;  // parts: chunks of a block
constexpr int kWords = BITS * kChunk / 32;
constexpr int kSlots = 256;  // counters are spread over this many pairs, summed by the host

// What depends on the whole tensor; made by `tensor_scales`.
struct Tensor {
    float scale, encode;  // NVFP4: 1 / S_enc, and S_enc / 6
    int lowest;           // scale window: no scale byte of a block of numbers may be smaller
};

struct Stream {
    u32 key0, key1, high0, high1;
};

__device__ __forceinline__ u32 bits_of(float v) { return __float_as_uint(v); }
__device__ __forceinline__ float float_of(u32 v) { return __uint_as_float(v); }
__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }
__device__ __forceinline__ u32 smaller(u32 a, u32 b) { return a < b ? a : b; }

// ---- input ----

#if IN == 0
typedef u32 Raw;
#else
typedef u16 Raw;
#endif
constexpr int kPerVector = 16 / sizeof(Raw);  // elements of a 16-byte load

__device__ __forceinline__ float widen(u32 raw) {
#if IN == 0
    return float_of(raw);
#elif IN == 1
    return float_of(raw << 16);
#else
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(static_cast<u16>(raw)));
    return v;
#endif
}

// Element k of the 32-bit words that a vector load gave.
template <int N>
__device__ __forceinline__ float element(const u32 (&words)[N], int k) {
#if IN == 0
    return float_of(words[k]);
#elif IN == 1
    return float_of(k % 2 ? words[k / 2] & 0xFFFF0000u : words[k / 2] << 16);
#else
    return widen(k % 2 ? words[k / 2] >> 16 : words[k / 2] & 0xFFFFu);
#endif
}

// ---- block maxima ----

__device__ __forceinline__ float max_with_nan(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}

__device__ __forceinline__ u32 chunk_maximum(const float (&x)[kChunk]) {
    float m = fabsf(x[0]);
#pragma unroll
    for (int k = 1; k < kChunk; ++k) m = max_with_nan(m, fabsf(x[k]));
    return bits_of(m) & kMagnitude;
}

__device__ __forceinline__ u32 finite_maximum(const float (&x)[kChunk]) {
    u32 m = 0;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        const u32 magnitude = bits_of(x[k]) & kMagnitude;
        m = larger(m, magnitude < kExponent ? magnitude : 0);
    }
    return m;
}

// The largest over the `kParts` neighbouring lanes of a block.
__device__ __forceinline__ u32 across_lanes(u32 m) {
#pragma unroll
    for (int lane = 1; lane < kParts; lane *= 2) m = larger(m, __shfl_xor_sync(~0u, m, lane));
    return m;
}

// ---- scales ----

// The grid of NVFP4's scales.
constexpr u32 kScaleLowest = static_cast<u32>(127 + SCALE_MIN_EXPONENT) << 23;

struct Scale {
    float apply, decode;  // values are multiplied by the first, grid values by the second
    u32 stored, live;     // the byte; all ones for a block of numbers
};

// Whether a block's largest value is so far beyond the grid that its code would not fit; true for a
// block that holds NaN.
__device__ __forceinline__ bool is_far(u32 amax, const Scale& s) {
    return !(fabsf(__fmul_rn(float_of(amax), s.apply)) < float_of(CLAMP_BITS));
}

// Exponent + 127 by the rule, for finite maxima. For a subnormal maximum it is right only up to the
// clamp at 0.
__device__ __forceinline__ int exponent_byte(u32 amax) {
    u32 bits = amax;
#if RULE == 0  // floor
    return static_cast<int>(bits >> 23) - EMAX;
#elif RULE == 3  // even
    return static_cast<int>((bits + (1u << (22 - MANTISSA))) >> 23) - EMAX;
#elif RULE == 1 || RULE == 2  // rceil, ceil
#if RULE == 1
    bits = bits_of(__fmul_rn(float_of(bits), RECIPROCAL_TOP));
#endif
    const u32 field = bits >> 23, mantissa = bits & kMantissa;
    return static_cast<int>(field + (mantissa > (field ? 0u : 0x400000u))) - (RULE == 1 ? 0 : EMAX);
#else  // one
    return 127;
#endif
}

#if UE4M3
__device__ __forceinline__ Scale block_scale(u32 amax, const Tensor& tensor) {
    const bool finite = amax < kExponent;
    const float base = fminf(__fmul_rn(float_of(finite ? amax : 0), tensor.encode), SCALE_TOP);
    const u32 exponent = larger(bits_of(base) & kExponent, kScaleLowest);
    const u32 anchor = exponent + (static_cast<u32>(23 - SCALE_MANTISSA) << 23);
    const float sum = __fadd_rn(base, float_of(anchor));  // its last place is the grid's spacing
    const float value = __fsub_rn(sum, float_of(anchor));
    const u32 code = ((exponent - kScaleLowest) >> (23 - SCALE_MANTISSA)) + bits_of(sum) - anchor;
    float inverse = fminf(__frcp_rn(__fmul_rn(value, tensor.scale)), kFloatMax);
    if (!TINY_SATURATES && code == 0) inverse = 0;
    Scale s;
    s.apply = inverse;
    s.decode = value;
    s.stored = finite ? (amax ? code : ZERO_BYTE) : 0x7Fu;
    s.live = finite ? ~0u : 0;
    return s;
}
#else
__device__ __forceinline__ Scale block_scale(u32 amax, const Tensor& tensor) {
    const bool finite = amax < kExponent;
    int exponent = exponent_byte(finite ? amax : 0);
#if WINDOW >= 0
    exponent = max(exponent, tensor.lowest);
#endif
    u32 byte = static_cast<u32>(min(max(exponent, 0), 254));
#if RULE != 4
    if (amax == 0) byte = 0;
#endif
    if (!finite) byte = amax == kExponent ? INF_BYTE : 255u;
    Scale s;
    s.stored = byte;
    s.live = byte == 255u ? 0 : ~0u;
    s.apply = float_of(byte == 254u ? 0x400000u : (254u - byte) << 23);
    s.decode = float_of(byte == 0 ? 0x400000u : byte << 23);
    return s;
}
#endif

// ---- random words ----

__device__ __forceinline__ void philox(u32 call, u32 block, const Stream& s, u32 (&out)[4]) {
    u32 c0 = call, c1 = block, c2 = s.high0, c3 = s.high1, k0 = s.key0, k1 = s.key1;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = static_cast<u64>(c0) * 0xD2511F53u, p1 = static_cast<u64>(c2) * 0xCD9E8D57u;
        c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<u32>(p1);
        c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<u32>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// ---- elements ----

constexpr u32 kLowest = static_cast<u32>(127 + MIN_EXPONENT) << 23;

struct Tally {
    u32 saturated, flushed;
};

// |y| on the grid continued without a top: its code; `value` is the number that the code means.
// WORDS: up exactly when frac * 2**32 > word; else to nearest even.
__device__ __forceinline__ u32 round_magnitude(float y, u32 word, float& value) {
    const float magnitude = fabsf(y);
    const u32 exponent = IS_FLOAT ? larger(bits_of(y) & kExponent, kLowest) : kLowest;
    // The sum's last place is the grid's spacing, so the addition itself rounds.
    const u32 anchor = exponent + (static_cast<u32>(23 - MANTISSA) << 23);
#if WORDS
    const float sum = __fadd_rz(magnitude, float_of(anchor));
    const float rest = __fsub_rn(magnitude, __fsub_rn(sum, float_of(anchor)));  // exact
    const u32 spacing = exponent - (static_cast<u32>(MANTISSA) << 23);
    const float parts = __fmul_rn(rest, float_of((286u << 23) - spacing));  // times 2**32 / spacing
    const u32 steps = bits_of(sum) - anchor + (__float2uint_ru(parts) > word ? 1 : 0);
    value = __fmul_rn(__uint2float_rn(steps), float_of(spacing));
#else
    const float sum = __fadd_rn(magnitude, float_of(anchor));
    const u32 steps = bits_of(sum) - anchor;
    value = __fsub_rn(sum, float_of(anchor));
#endif
    return ((exponent - kLowest) >> (23 - MANTISSA)) + steps;
}

// The conversion instructions round to nearest even and saturate, just as round_magnitude does.
#if HARDWARE && __CUDA_ARCH__ >= 890
#define CONVERTS 1
__device__ __forceinline__ u32 convert_pair(float low, float high) {
    u16 pair;
    asm("cvt.rn.satfinite." HARDWARE_TYPE "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}
#else
#define CONVERTS 0
#endif

#if WORDS
// The 16 random words of a chunk, or the constant that rounds ties away from or towards zero.
__device__ __forceinline__ void random_words(u32 block, u32 part, const Stream& stream,
                                             u32 (&word)[kChunk]) {
    u32 draw[4];
#if RBITS == 32
#pragma unroll
    for (int k = 0; k < kChunk; k += 4) {
        philox(part * 4 + k / 4, block, stream, draw);
        word[k] = draw[0], word[k + 1] = draw[1], word[k + 2] = draw[2], word[k + 3] = draw[3];
    }
#elif RBITS == 8
    philox(part, block, stream, draw);
#pragma unroll
    for (int k = 0; k < kChunk; ++k)  // byte * 2**24 + 2**23
        word[k] = __byte_perm(draw[k / 4], 0x00800000u, (k % 4) << 12 | 0x0654);
#else
#pragma unroll
    for (int k = 0; k < kChunk; ++k) word[k] = TIE_WORD;
#endif
}
#endif

// The bytes that hold the signs of four floats.
__device__ __forceinline__ u32 high_bytes(float a, float b, float c, float d) {
    return __byte_perm(__byte_perm(bits_of(a), bits_of(b), 0x73),
                       __byte_perm(bits_of(c), bits_of(d), 0x73), 0x5410);
}

// 16 values of one block -> words of packed codes (OUT 0) or decoded values (OUT 1, into x).
__device__ __forceinline__ void encode(float (&x)[kChunk], const Scale& s, bool far,
                                       const Tensor& tensor, u32 block, u32 part, const Stream& stream,
                                       u32 (&codes)[kWords], Tally& tally) {
#if WORDS
    u32 word[kChunk];
    random_words(block, part, stream, word);
#endif
    u32 zeros = 0, saturated = 0;  // zero codes; values beyond the top
#if STATS
    float least = fabsf(x[0]);
#pragma unroll
    for (int k = 1; k < kChunk; ++k) least = fminf(least, fabsf(x[k]));
    u32 zero_inputs = 0;
    if (least == 0) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k) zero_inputs += x[k] == 0;
    }
#if UE4M3
    // A tiny tensor scale can make a nonzero code decode to zero: then the values are counted.
    const bool counts_values = __fmul_rn(__fmul_rn(LEAST, s.decode), tensor.scale) == 0;
    u32 zero_values = 0;
#endif
#endif
    float y[kChunk];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        y[k] = __fmul_rn(x[k], s.apply);
        if (ELEMENT_SCALE != 1.0f) y[k] = __fmul_rn(y[k], ELEMENT_SCALE);
    }
#if !(CONVERTS && OUT == 0)
    if (far) {
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            y[k] = float_of(smaller(bits_of(y[k]) & kMagnitude, CLAMP_BITS) | (bits_of(y[k]) & kSign));
    }
#endif
#if CONVERTS && OUT == 0
#pragma unroll
    for (int k = 0; k < kChunk; k += 4) {
        const u32 low = convert_pair(y[k], y[k + 1]), high = convert_pair(y[k + 2], y[k + 3]);
        const u32 packed = __byte_perm(low, high, 0x5410);
        codes[k / 4] = packed & s.live;
#if STATS
#pragma unroll
        for (int i = 0; i < 4; ++i) saturated += fabsf(y[k + i]) > TIE_AT_TOP;
        zeros += __popc(~((packed & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) & 0x80808080u);
#endif
    }
#else
#pragma unroll
    for (int w = 0; w < kWords; ++w) codes[w] = 0;
    // Of 4 bits: magnitudes first (up to 10: bit 3 says that it saturates), then eight at a time.
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
        float value;
#if WORDS
        u32 n = round_magnitude(y[k], word[k], value);
#else
        u32 n = round_magnitude(y[k], 0, value);
#endif
        const u32 sign = bits_of(y[k]) & kSign;
#if OUT == 1
#if STATS
        saturated += n > MAX_CODE;
        zeros += n == 0;
#endif
        value = fminf(value, TOP);
        const bool keeps = IS_FLOAT || n != 0;  // a fixed-point grid has no negative zero
        value = __fmul_rn(float_of(bits_of(value) | (keeps ? sign : 0)), s.decode);
        if (UE4M3) value = __fmul_rn(value, tensor.scale);
#if STATS && UE4M3
        zero_values += value == 0 && x[k] != 0;
#endif
        x[k] = s.live ? value : float_of(kNaN);
#elif BITS == 4
        codes[k / 8] |= n << (k % 8 * 4);
#else
#if STATS
        saturated += n > MAX_CODE;
        zeros += n == 0;
#endif
        n = smaller(n, MAX_CODE);
        n = IS_FLOAT ? n | sign >> (32 - BITS) : (sign ? 0 - n : n) & ((1u << BITS) - 1);
        const int at = k * BITS;
        codes[at / 32] |= n << (at % 32);
        if (at % 32 + BITS > 32) codes[at / 32 + 1] |= n >> (32 - at % 32);
#endif
    }
#if OUT == 0 && BITS == 4
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
        const u32 over = codes[w] & 0x88888888u;
        const u32 n = (codes[w] | (over - (over >> 3))) & 0x77777777u;
#if STATS
        saturated += __popc(over);
        zeros += 8 - __popc((n | n >> 1 | n >> 2) & 0x11111111u);
#if UE4M3
        if (counts_values) {
            for (int i = 0; i < 8; ++i) {
                const u32 code = n >> (4 * i) & 7u;
                const float grid = __fmul_rn(float_of(code << 22), float_of(0x7E800000u));
                zero_values += __fmul_rn(__fmul_rn(grid, s.decode), tensor.scale) == 0;
            }
        }
#endif
#endif
        const u32 even = high_bytes(y[8 * w], y[8 * w + 2], y[8 * w + 4], y[8 * w + 6]);
        const u32 odd = high_bytes(y[8 * w + 1], y[8 * w + 3], y[8 * w + 5], y[8 * w + 7]);
        codes[w] = (n | (even >> 4 & 0x08080808u) | (odd & 0x80808080u)) & s.live;
    }
#elif OUT == 0
#pragma unroll
    for (int w = 0; w < kWords; ++w) codes[w] &= s.live;
#endif
#endif
#if STATS
    u32 flushed = zeros - zero_inputs;
#if UE4M3
    if (counts_values) flushed = OUT == 1 ? zero_values : zero_values - zero_inputs;
#endif
    tally.saturated += s.live ? saturated : 0;
    tally.flushed += s.live ? flushed : 0;
#endif
}

// ---- bfloat16 to e2m1 under a power of two, two values at a time ----

#if PAIRS
// Scaling by a power of two is exact in bfloat16 where it matters (what underflows is far below a
// quarter), and the additions that round have bfloat16's last place where float32 had its own. So
// the same steps as above hold on pairs.
constexpr u32 kPairMagnitude = 0x7FFF7FFFu, kPairSign = 0x80008000u;

__device__ __forceinline__ u32 pair_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

__device__ __forceinline__ u32 pair_max(u32 a, u32 b) {
    u32 d;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 pair_min(u32 a, u32 b) {
    u32 d;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

__device__ __forceinline__ u32 pair_abs(u32 a) {
    u32 d;
    asm("abs.bf16x2 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

__device__ __forceinline__ u32 low_float(u32 pair) { return pair << 16; }
__device__ __forceinline__ u32 high_float(u32 pair) { return pair & 0xFFFF0000u; }

// Code magnitudes (up to 10) of x * scale in the two halves.
__device__ __forceinline__ u32 round_pair(u32 x, u32 scale, bool far) {
    u32 y = pair_fma(x, scale, kPairSign);  // plus -0: the product itself
    if (far) y = pair_min(y & kPairMagnitude, CLAMP_BITS >> 16 | CLAMP_BITS);
    const u32 exponent = pair_max(y & 0x7F807F80u, 0x3F803F80u);
    const u32 anchor = exponent + 0x03000300u;
    const u32 sum = pair_fma(pair_abs(y), 0x3F803F80u, anchor);
    return sum - anchor + ((exponent - 0x3F803F80u) >> 6);
}

__device__ __forceinline__ bool holds_zero(u32 pair_of_minima) {
    return !(pair_of_minima & 0x7FFFu) || !(pair_of_minima & 0x7FFF0000u);
}

__device__ __forceinline__ u32 zeros_of(u32 pair, u32 live) {
    return (!(pair & 0x7FFFu) && (live & 1u)) + (!(pair & 0x7FFF0000u) && (live >> 16 & 1u));
}

// Eight magnitudes in nibbles -> saturated ones, counted where `live`.
__device__ __forceinline__ u32 saturate(u32 n, u32 live, Tally& tally) {
    const u32 over = n & 0x88888888u;
    n = (n | (over - (over >> 3))) & 0x77777777u;
#if STATS
    tally.saturated += __popc(over & live);
    tally.flushed += __popc(~(n | n >> 1 | n >> 2) & 0x11111111u & live);
#endif
    return n;
}

// Without the zeros among 16 pairs or less that went in, from what `saturate` counted as flushed.
template <int N, int STRIDE>
__device__ __forceinline__ void forget_zeros(const u32* x, u32 live, Tally& tally) {
#if STATS
    u32 least = x[0] & kPairMagnitude;
#pragma unroll
    for (int k = 1; k < N; ++k) least = pair_min(least, pair_abs(x[k * STRIDE]));
    if (holds_zero(least)) {
#pragma unroll
        for (int k = 0; k < N; ++k) tally.flushed -= zeros_of(x[k * STRIDE], live);
    }
#endif
}

template <int N, int STRIDE>
__device__ __forceinline__ u32 pair_maximum(const u32* x) {
    u32 m = pair_abs(x[0]);
#pragma unroll
    for (int k = 1; k < N; ++k) m = pair_max(m, pair_abs(x[k * STRIDE]));
    return m & kPairMagnitude;
}

// A chunk of a row: 16 neighbours in eight pairs -> two words of codes.
__device__ __forceinline__ void encode_pairs(const u32 (&x)[8], const Scale& s, bool far,
                                             u32 (&codes)[kWords], Tally& tally) {
    const u32 scale = bits_of(s.apply) >> 16 | bits_of(s.apply);
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        const u32* four = x + 4 * w;
        u32 a = round_pair(four[0], scale, far) | round_pair(four[1], scale, far) << 8;
        u32 b = round_pair(four[2], scale, far) | round_pair(four[3], scale, far) << 8;
        const u32 n = saturate(__byte_perm(a | a >> 12, b | b >> 12, 0x5410), s.live, tally);
        const u32 even = __byte_perm(__byte_perm(four[0], four[1], 0x51),
                                     __byte_perm(four[2], four[3], 0x51), 0x5410);
        const u32 odd = __byte_perm(__byte_perm(four[0], four[1], 0x73),
                                    __byte_perm(four[2], four[3], 0x73), 0x5410);
        codes[w] = (n | (even >> 4 & 0x08080808u) | (odd & 0x80808080u)) & s.live;
    }
    forget_zeros<8, 1>(x, s.live, tally);
}
#endif

// ---- totals ----

__device__ __forceinline__ void add_counts(const Tally& tally, u64* counters) {
#if STATS
    const u32 saturated = __reduce_add_sync(~0u, tally.saturated);
    const u32 flushed = __reduce_add_sync(~0u, tally.flushed);
    if (threadIdx.x % 32 == 0) {
        const u32 warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
        u64* slot = counters + warp % kSlots * 2;
        if (saturated) atomicAdd(slot, static_cast<u64>(saturated));
        if (flushed) atomicAdd(slot + 1, static_cast<u64>(flushed));
    }
#endif
}

// The largest finite element (NVFP4), or the largest maximum of the blocks without NaN and Inf.
__device__ __forceinline__ void add_maximum(u32 mine, u32* maximum) {
    const u32 most = __reduce_max_sync(~0u, mine);
    if (threadIdx.x % 32 == 0 && most > *reinterpret_cast<volatile u32*>(maximum))
        atomicMax(maximum, most);
}

#if NEEDS_TENSOR
// One thread, once per tensor: what its largest magnitude means for every block.
extern "C" __global__ void tensor_scales(const u32* maximum, Tensor* tensor) {
    const float amax = float_of(*maximum);
#if UE4M3
    float encode = fminf(__fdiv_rn(TENSOR_TARGET, amax), kFloatMax);
    if (amax == 0 || encode == 0) encode = 1;
    tensor->scale = __fdiv_rn(1.0f, encode);
    tensor->encode = __fmul_rn(encode, __fdiv_rn(1.0f, 6.0f));
    tensor->lowest = 0;
#else
    tensor->scale = tensor->encode = 1;
    tensor->lowest = amax > 0 ? exponent_byte(bits_of(amax)) - WINDOW : 0;
#endif
}
#endif

#if !DOWN
// ---- blocks along rows: ITEMS chunks per thread ----

// x (rows, length) -> codes, scales or values. Whole: length is a multiple of the block, and x is
// aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(kThreads)
quantize_rows(const Raw* __restrict__ x, u8* __restrict__ codes, u8* __restrict__ scales,
              float* __restrict__ values, const Tensor* __restrict__ tensor_of,
              u32* __restrict__ maximum, u64* __restrict__ counters, u32 key0, u32 key1, u32 high0,
              u32 high1, i64 rows, i64 length) {
    const Stream stream = {key0, key1, high0, high1};
    const i64 per_row = (length + BLOCK - 1) / BLOCK * kParts, total = rows * per_row;
    const i64 first = static_cast<i64>(blockIdx.x) * (kThreads * ITEMS) + threadIdx.x;
#if NEEDS_TENSOR && OUT != 2
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0};
#endif
    Tally tally = {0, 0};
    u32 raw[ITEMS][sizeof(Raw) * kChunk / 4];
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const i64 chunk = first + item * kThreads;
#if WHOLE
        const uint4* from = reinterpret_cast<const uint4*>(x + chunk * kChunk);
#pragma unroll
        for (int v = 0; v < kChunk / kPerVector; ++v) {
            const uint4 four = chunk < total ? __ldg(from + v) : uint4{0, 0, 0, 0};
            raw[item][4 * v] = four.x, raw[item][4 * v + 1] = four.y;
            raw[item][4 * v + 2] = four.z, raw[item][4 * v + 3] = four.w;
        }
#else
        const i64 row = chunk / per_row, start = chunk % per_row * kChunk;
        const i64 left = chunk < total ? length - start : 0;
        const Raw* from = x + row * length + start;
#pragma unroll
        for (int k = 0; k < kChunk; k += 4 / sizeof(Raw)) {
            u32 word = k < left ? from[k] : 0;
            if (sizeof(Raw) == 2 && k + 1 < left) word |= static_cast<u32>(from[k + 1]) << 16;
            raw[item][k * sizeof(Raw) / 4] = word;
        }
#endif
    }
    u32 most = 0;
#pragma unroll
    for (int item = 0; item < ITEMS; ++item) {
        const i64 chunk = first + item * kThreads;
        const u32 block = static_cast<u32>(chunk / kParts), part = static_cast<u32>(chunk % kParts);
#if PAIRS
        const u32 pair = pair_maximum<8, 1>(raw[item]);
        const u32 amax = across_lanes(larger(low_float(pair), high_float(pair)));
        const Scale s = block_scale(amax, tensor);
        u32 packed[kWords];
        encode_pairs(raw[item], s, is_far(amax, s), packed, tally);
#else
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = element(raw[item], k);
#endif
#if OUT == 2
#if UE4M3
        most = larger(most, finite_maximum(v));
#else
        const u32 amax = across_lanes(chunk_maximum(v));
        most = larger(most, amax < kExponent ? amax : 0);
#endif
#else
#if !PAIRS
        const u32 amax = across_lanes(chunk_maximum(v));
        const Scale s = block_scale(amax, tensor);
        u32 packed[kWords];
        encode(v, s, is_far(amax, s), tensor, block, part, stream, packed, tally);
#endif
        if (chunk < total) {
#if OUT == 0
            u32* to = reinterpret_cast<u32*>(codes) + chunk * kWords;
            if (kWords == 4)
                *reinterpret_cast<uint4*>(to) = uint4{packed[0], packed[1], packed[2 % kWords], packed[3 % kWords]};
            else if (kWords == 2)
                *reinterpret_cast<uint2*>(to) = uint2{packed[0], packed[1]};
            else
#pragma unroll
                for (int w = 0; w < kWords; ++w) to[w] = packed[w];
            if (part == 0) scales[block] = static_cast<u8>(s.stored);
#elif WHOLE
            float4* to = reinterpret_cast<float4*>(values + chunk * kChunk);
#pragma unroll
            for (int k = 0; k < kChunk; k += 4) to[k / 4] = float4{v[k], v[k + 1], v[k + 2], v[k + 3]};
#else
            const i64 row = chunk / per_row, start = chunk % per_row * kChunk;
#pragma unroll
            for (int k = 0; k < kChunk; ++k)
                if (start + k < length) values[row * length + start + k] = v[k];
#endif
        }
#endif
    }
#if OUT == 2
    add_maximum(most, maximum);
#else
    add_counts(tally, counters);
#endif
}

#else
// ---- blocks down columns: COLUMNS chunks per thread ----

constexpr int kPanel = kThreads / 32 * kChunk;  // positions of a thread block: 128
constexpr int kPairs = COLUMNS * sizeof(Raw) / 4;  // 32-bit words of a thread's columns

// x (outer, length, inner) blocked along `length`. A warp holds 16 rows of 32 * COLUMNS columns; the
// warps of a block exchange maxima. Whole: length is a multiple of 128, inner of COLUMNS, and x is
// aligned to a thread's columns.
extern "C" __global__ void __launch_bounds__(kThreads, IN == 0 && WORDS ? 1 : 2)
quantize_columns(const Raw* __restrict__ x, u8* __restrict__ codes, u8* __restrict__ scales,
                 float* __restrict__ values, const Tensor* __restrict__ tensor_of,
                 u32* __restrict__ maximum, u64* __restrict__ counters, u32 key0, u32 key1,
                 u32 high0, u32 high1, i64 outer, i64 length, i64 inner) {
    const Stream stream = {key0, key1, high0, high1};
    const i64 across = (inner + 32 * COLUMNS - 1) / (32 * COLUMNS);
    const i64 tiles = (length + BLOCK - 1) / BLOCK, panels = (tiles * BLOCK + kPanel - 1) / kPanel;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 image = blockIdx.x / (across * panels), rest = blockIdx.x % (across * panels);
    const i64 column = (rest % across * 32 + lane) * COLUMNS;
    const i64 start = rest / across * kPanel + warp * kChunk;  // first position of the chunk
    const i64 tile = start / BLOCK;
#if NEEDS_TENSOR && OUT != 2
    const Tensor tensor = *tensor_of;
#else
    const Tensor tensor = {1, 1, 0};
#endif
    u32 raw[kChunk][kPairs];
    const Raw* from = x + (image * length + start) * inner + column;
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
#if WHOLE
        uint2 two = {0, 0};
        if (column < inner) {
            if (kPairs == 2)
                two = __ldg(reinterpret_cast<const uint2*>(from + k * inner));
            else
                two.x = __ldg(reinterpret_cast<const u32*>(from + k * inner));
        }
        raw[k][0] = two.x, raw[k][kPairs - 1] = kPairs == 2 ? two.y : two.x;
#else
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 4 / sizeof(Raw)) {
            const bool real = start + k < length;
            u32 word = real && column + c < inner ? from[k * inner + c] : 0;
            if (sizeof(Raw) == 2 && real && column + c + 1 < inner)
                word |= static_cast<u32>(from[k * inner + c + 1]) << 16;
            raw[k][c * sizeof(Raw) / 4] = word;
        }
#endif
    }
    Tally tally = {0, 0};
    u32 amax[COLUMNS];
    u32 most = 0;
#if PAIRS
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        const u32 pair = pair_maximum<kChunk, kPairs>(&raw[0][p]);
        amax[2 * p] = low_float(pair), amax[2 * p + 1] = high_float(pair);
    }
#else
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = element(raw[k], c);
        amax[c] = chunk_maximum(v);
        if (OUT == 2 && UE4M3) most = larger(most, finite_maximum(v));
    }
#endif
#if BLOCK > 16
    __shared__ u32 shared[kThreads / 32][COLUMNS][32];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) shared[warp][c][lane] = amax[c];
    __syncthreads();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int p = 0; p < kParts; ++p)
            amax[c] = larger(amax[c], shared[warp / kParts * kParts + p][c][lane]);
#endif
#if OUT == 2
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        if (!UE4M3) most = larger(most, amax[c] < kExponent ? amax[c] : 0);
    add_maximum(most, maximum);
#else
    const u32 part = static_cast<u32>(start % BLOCK) / kChunk;
    const i64 blocks = (image * tiles + tile) * inner + column;
    const bool inside = tile < tiles;  // else: warps beyond the last block
#if OUT == 0
    u32 stored[COLUMNS];
#endif
#if PAIRS
    u32 nibbles[kPairs][4];  // four rows each: the first column in the low half
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
        const Scale a = block_scale(amax[2 * p], tensor), b = block_scale(amax[2 * p + 1], tensor);
        stored[2 * p] = a.stored, stored[2 * p + 1] = b.stored;
        const bool far = is_far(amax[2 * p], a) || is_far(amax[2 * p + 1], b);
        const u32 scale = bits_of(a.apply) >> 16 | bits_of(b.apply);
        const u32 live = (a.live & 0xFFFFu) | (b.live & 0xFFFF0000u);
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            u32 n = 0, signs = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const u32 x = raw[4 * q + k][p];
                n |= round_pair(x, scale, far) << (4 * k);
                signs |= x >> (12 - 4 * k) & (0x00080008u << (4 * k));
            }
            nibbles[p][q] = (saturate(n, live, tally) | signs) & live;
        }
        forget_zeros<kChunk, kPairs>(&raw[0][p], live, tally);
    }
#else
    u32 packed[COLUMNS][kWords];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        float v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = element(raw[k], c);
        const Scale s = block_scale(amax[c], tensor);
#if OUT == 0
        stored[c] = s.stored;
#endif
        encode(v, s, is_far(amax[c], s), tensor, static_cast<u32>(blocks + c), part, stream, packed[c],
               tally);
#if OUT == 1
#pragma unroll
        for (int k = 0; k < kChunk; ++k)
            if (start + k < length && column + c < inner)
                values[(image * length + start + k) * inner + column + c] = v[k];
#endif
    }
#endif
#if OUT == 0
    // Byte b of the chunk's words goes to byte row b: a small transpose in registers.
    const i64 row = (image * tiles + tile) * (BLOCK * BITS / 8) + part * (kWords * 4);
#pragma unroll
    for (int b = 0; b < kWords * 4; ++b) {
        u8* to = codes + (row + b) * inner + column;
#if PAIRS
        const u32 octets = __byte_perm(nibbles[0][b / 2], nibbles[kPairs - 1][b / 2],
                                       0x6420 + b % 2 * 0x1111);
#if WHOLE
        if (column < inner) *reinterpret_cast<u32*>(to) = octets;
#else
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (inside && column + c < inner) to[c] = static_cast<u8>(octets >> (8 * c));
#endif
#elif WHOLE
        u32 octets = __byte_perm(packed[0][b / 4], packed[1][b / 4], b % 4 | (b % 4 + 4) << 4);
#if COLUMNS == 4
        const u32 high = __byte_perm(packed[2][b / 4], packed[3][b / 4], b % 4 | (b % 4 + 4) << 4);
        if (column < inner) *reinterpret_cast<u32*>(to) = __byte_perm(octets, high, 0x5410);
#else
        if (column < inner) *reinterpret_cast<u16*>(to) = static_cast<u16>(octets);
#endif
#else
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (inside && column + c < inner)
                to[c] = static_cast<u8>(packed[c][b / 4] >> (b % 4 * 8));
#endif
    }
    if (part == 0 && inside) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            if (column + c < inner) scales[blocks + c] = static_cast<u8>(stored[c]);
    }
#endif
    add_counts(tally, counters);
#endif
}
#endif
