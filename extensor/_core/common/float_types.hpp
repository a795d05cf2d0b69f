// Arrays of float32, bfloat16 and float16, for kernels that compute in float32: loads widen
// exactly, stores round once, to nearest even.
#pragma once

#include "common/dtypes.hpp"
#include "common/simd.hpp"

namespace EXTENSOR_ISA {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

typedef uint16_t vh __attribute__((vector_size(2 * VL)));  // VL sixteen-bit lanes
typedef uint16_t vh_any __attribute__((vector_size(2 * VL), aligned(2), may_alias));

template <class T>
constexpr FloatType kFloatType = FloatType::float32;
template <>
inline constexpr FloatType kFloatType<bfloat16> = FloatType::bfloat16;
template <>
inline constexpr FloatType kFloatType<float16> = FloatType::float16;

INLINE vf widen(vh bits, bfloat16) {
    return reinterpret_cast<vf>(__builtin_convertvector(bits, vu) << 16);
}

INLINE vf widen(vh bits, float16) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(reinterpret_cast<__m256i>(bits));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(bits));
#else
    const vu wide = __builtin_convertvector(bits, vu), magnitude = (wide & 0x7FFFu) << 13;
    // 2**112 moves the exponent to float32's bias, of subnormal numbers too; exact.
    const vu finite = reinterpret_cast<vu>(reinterpret_cast<vf>(magnitude) * 0x1p112f);
    const vu special = magnitude | 0x7F800000u;  // infinity and NaN
    const vu value = magnitude >= (0x7C00u << 13) ? special : finite;
    return reinterpret_cast<vf>(value | (wide & 0x8000u) << 16);
#endif
}

INLINE vh narrow(vf value, bfloat16) {
    const vu bits = reinterpret_cast<vu>(value), upper = bits >> 16;
    const vu rounded = (bits + 0x7FFFu + (upper & 1u)) >> 16;
    const vu nan = (upper & 0x8000u) | 0x7FC0u;
    return __builtin_convertvector((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded, vh);
}

INLINE vh narrow(vf value, float16) {
#if defined(__AVX512F__)
    return reinterpret_cast<vh>(
        _mm512_cvtps_ph(reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    return reinterpret_cast<vh>(
        _mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
#else
    const vu bits = reinterpret_cast<vu>(value), magnitude = bits & 0x7FFFFFFFu;
    // Below 2**-14 the places are 2**-24 apart: those of a sum with 1/2.
    const vf sum = reinterpret_cast<vf>(magnitude) + 0.5f;
    const vu small = reinterpret_cast<vu>(sum) - 0x3F000000u;
    const vu normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
    vu half = magnitude < (113u << 23) ? small : normal;
    half = magnitude >= 0x477FF000u ? splat(0x7C00u) : half;  // 65520 and more
    half = magnitude > 0x7F800000u ? splat(0x7E00u) : half;
    return __builtin_convertvector(half | (bits >> 16 & 0x8000u), vh);
#endif
}

INLINE vf load_upto(const float* p, int64_t n) {
    return n >= VL ? load(p) : load_part(p, static_cast<int>(n));
}

// VL values; with fewer than VL of them, zero in the other lanes.
template <class Half>
INLINE vf load_upto(const Half* p, int64_t n) {
    if (n >= VL) return widen(*reinterpret_cast<const vh_any*>(p), Half{});
    vh bits = {};
#if defined(__AVX512F__)
    bits = reinterpret_cast<vh>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p));
#else
    std::memcpy(&bits, p, static_cast<size_t>(n) * 2);
#endif
    return widen(bits, Half{});
}

template <class Half>
INLINE vf load(const Half* p) {
    return load_upto(p, VL);
}

INLINE void store_upto(float* p, vf v, int64_t n) {
    n >= VL ? store(p, v) : store_part(p, v, static_cast<int>(n));
}

template <class Half>
INLINE void store_upto(Half* p, vf v, int64_t n) {
    const vh bits = narrow(v, Half{});
    if (n >= VL)
        *reinterpret_cast<vh_any*>(p) = bits;
    else
        std::memcpy(p, &bits, static_cast<size_t>(n) * 2);
}

// An array whose type is known at run time only.
struct Source {
    const void* at;
    FloatType type;

    INLINE Source from(int64_t i) const {
        return {static_cast<const char*>(at) + i * (type == FloatType::float32 ? 4 : 2), type};
    }

    // body(pointer of the values' type)
    template <class Body>
    INLINE auto visit(Body body) const {
        switch (type) {
            case FloatType::float32: return body(static_cast<const float*>(at));
            case FloatType::bfloat16: return body(static_cast<const bfloat16*>(at));
            default: return body(static_cast<const float16*>(at));
        }
    }

    INLINE vf load_upto(int64_t i, int64_t n) const {
        return visit([&](const auto* p) { return EXTENSOR_ISA::load_upto(p + i, n); });
    }
};

}  // namespace EXTENSOR_ISA
