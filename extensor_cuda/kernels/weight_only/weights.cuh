// Shared by the weight-only kernels: cp.async copies, decoding of weights, activations as bfloat16,
// results.
//
// Macros: CODEC_BITS, CODEC_IS_FLOAT, CODEC_UE4M3, CODEC_FLOAT_SCALES, CODEC_FLOAT16_SCALES,
// WEIGHT_ONLY_IN and WEIGHT_ONLY_OUT (0: float32, 1: bfloat16), WEIGHT_ONLY_GATED (see below).

#include "common/types.cuh"

#include "common/dependent_launch.cuh"

#ifdef __CUDA_ARCH__
// Copies kBytes to shared memory, or writes zeros unless `there`. cp_async_wait tells when it is
// done. The L2 prefetch helps because a warp reads 64 bytes of each of 16 rows.
template <int kBytes>
DEVICE void cp_async(void* to, const void* from, bool there) {
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(to));
    const int bytes = there ? kBytes : 0;
    if (kBytes == 16)
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(address),
            "l"(from), "r"(bytes)
            : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(address), "l"(from),
            "r"(bytes), "n"(kBytes)
            : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the kNewest latest groups of this thread's copies.
template <int kNewest>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}
#endif

#include "common/mma.cuh"

#include "codec/decode_bf16x2.cuh"

// ---- weights ----

#if CODEC_FLOAT_SCALES
#if CODEC_FLOAT16_SCALES
typedef u16 Stored;
DEVICE float scale_value(u16 bits) {
    const u32 magnitude = static_cast<u32>(bits & 0x7FFF) << 13;
    if (magnitude >= 0x0F800000u)
        return __uint_as_float(magnitude | 0x7F800000u);  // infinity or NaN
    return __uint_as_float(magnitude) * __uint_as_float((112u + 127u) << 23);
}
#else
typedef float Stored;
DEVICE float scale_value(float value) { return value; }
#endif
#else
typedef u8 Stored;
// Marks those of four E8M0 scales that are above 2^9, where `folded` does not apply.
DEVICE u32 large_scales(u32 four) {
    return (four & 0x7F7F7F7Fu) + 0x77777777u & four & 0x80808080u;
}
// Whether `folded` applies to an E8M0 scale: 2^-117 to 2^9.
DEVICE bool foldable(u32 byte) { return byte - 10u <= 126u; }
#endif

// Decodes eight codes to four bf16x2: elements (p, p + 4) of 4-bit codes, (2 p, 2 p + 1) of bytes.
DEVICE void decode(const u32* words, u32 scale, bool folded, int zero, u32 (&pairs)[4]) {
#if CODEC_BITS == 4
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#if CODEC_IS_FLOAT
        // Sign and magnitude shifted into place are a bfloat16, 2^-126 times the element. One
        // multiplication shifts both, since logic runs at half rate; the mask clears the rest.
        const u32 two = p < 2 ? words[0] : words[0] >> 8;
        const u32 bits =
            (p % 2 ? (two & 0x00F000F0u) * 0x104u : (two & 0x000F000Fu) * 0x1040u) & 0x81C081C0u;
        pairs[p] = fma_bf16x2(folded ? bits : fma_bf16x2(bits, 0x7E807E80u, 0u), scale, 0u);
#else
        const u32 offset = repeat_bf16x2(0xC300u | static_cast<u32>(8 + zero));  // -(136 + zero)
        pairs[p] =
            fma_bf16x2(and_xor(words[0] >> (4 * p), 0x000F000Fu, 0x43084308u), 0x3F803F80u, offset);
#endif
    }
#else
    const float offset = static_cast<float>(8388608 + 128 + zero);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const u32 w = words[p / 2] ^ 0x80808080u;
        const float low =
            __uint_as_float(__byte_perm(w, 0x4B000000u, p % 2 ? 0x7442 : 0x7440)) - offset;
        const float high =
            __uint_as_float(__byte_perm(w, 0x4B000000u, p % 2 ? 0x7443 : 0x7441)) - offset;
        pairs[p] = __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
    }
#endif
}

// ---- several matrices ----

// Up to three matrices, one below the other, in tiles of 16 rows: the tiles with which the second
// and the third begin, and how far their codes and scales lie behind where the one before ends.
// WEIGHT_ONLY_GATED: two of whole tiles that take turns, SwiGLU's gate and what it multiplies; the
// second lies so far behind the first, and a result is of a row of each.
#if WEIGHT_ONLY_GATED
constexpr int kSides = 2;
#else
constexpr int kSides = 1;
#endif
struct Matrices {
    int second, third;
    i64 codes[2], scales[2];
    DEVICE static int row_of(int tile, int rows) {
        return kSides == 2 ? tile / 2 * 16 : min(tile * 16, rows - 16);
    }
    DEVICE i64 code_offset(int tile) const { return offset(tile, codes); }
    DEVICE i64 scale_offset(int tile) const { return offset(tile, scales); }

private:
    DEVICE i64 offset(int tile, const i64 (&gaps)[2]) const {
        if (kSides == 2) return tile % 2 * gaps[0];
        return (tile >= second ? gaps[0] : 0) + (tile >= third ? gaps[1] : 0);
    }
};
// The first of tiles that one of several groups has: pairs stay together.
DEVICE int first_tile(u32 tiles, u32 group, u32 groups) {
    return static_cast<int>(tiles / kSides * group / groups) * kSides;
}
// A quad of neighbouring results, of rows from here on; those of the other side are 16 further on.
DEVICE int row_of_quad(int i) { return kSides == 2 ? i / 4 * 32 + i % 4 * 4 : i * 4; }

// ---- x ----

#if WEIGHT_ONLY_IN == 0
typedef float Raw;
#else
typedef u16 Raw;
#endif

// The bfloat16 part of a value that a token row holds: the upper, middle or lower significand bits.
DEVICE u32 bf16_part(Raw raw, int part) {
#if WEIGHT_ONLY_IN == 1
    return raw;
#else
    const u32 bits = __float_as_uint(raw);
    if ((bits & 0x7F800000u) == 0x7F800000u) return part ? 0u : bits << 9 ? 0x7FC0u : bits >> 16;
    float rest = raw;
    for (int i = 0; i < part; ++i) rest -= __uint_as_float(__float_as_uint(rest) & 0xFFFF0000u);
    return __float_as_uint(rest) >> 16;
#endif
}

// ---- results ----

struct Gate {
    float alpha, limit, shift;
};
#if WEIGHT_ONLY_GATED
#include "common/gated.cuh"

DEVICE float as_stored(float v) {
#if WEIGHT_ONLY_OUT == 0
    return v;
#else
    if (v != v) return v;
    const u32 bits = __float_as_uint(v);
    return __uint_as_float(bits + 0x7FFFu + (bits >> 16 & 1u) & 0xFFFF0000u);
#endif
}
// gated_silu.cu's result of two products, as they would be stored.
DEVICE float result_of(const Gate& gate, float a, float b) {
    const Gated v = gated(as_stored(a), as_stored(b), gate.alpha, gate.limit, gate.shift);
    return __fmul_rn(__fmul_rn(v.a, v.s), v.u);
}
#else
DEVICE float result_of(const Gate&, float a, float) { return a; }
#endif

DEVICE void store_result(void* out, i64 at, float total) {
#if WEIGHT_ONLY_OUT == 0
    static_cast<float*>(out)[at] = total;
#else
    const u32 bits = __float_as_uint(total);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    static_cast<u16*>(out)[at] = nan ? 0x7FC0 : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
#endif
}
