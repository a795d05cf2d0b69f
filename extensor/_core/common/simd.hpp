// Vectors of float32 and integers for all kernels, on the compiler's vector extension.
//
// Every kernel source is compiled once per level (EXTENSOR_ISA names it) and lives in a namespace
// of that name, so that the linker cannot take one level's inline function for another's. For the
// same reason nothing here may use a standard-library function that might not be inlined.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h>  // SSE2: all intrinsics take most of a second to read
#endif

#ifndef EXTENSOR_ISA
#error "compile with -DEXTENSOR_ISA=<level>"
#endif

#if defined(__AVX512F__)
#define EXTENSOR_LANES 16
#elif defined(__AVX2__)
#define EXTENSOR_LANES 8
#else
#define EXTENSOR_LANES 4
#endif

#define INLINE inline __attribute__((always_inline))

namespace EXTENSOR_ISA {

constexpr int VL = EXTENSOR_LANES;  // float lanes
typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
// Without alignment: codes begin at any byte, and so may arrays.
typedef float vf_any __attribute__((vector_size(4 * VL), aligned(1), may_alias));
typedef int32_t vi_any __attribute__((vector_size(4 * VL), aligned(1), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * VL), aligned(1), may_alias));

INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
INLINE vu load(const uint32_t* p) { return *reinterpret_cast<const vu_any*>(p); }
INLINE void store(float* p, vf v) { *reinterpret_cast<vf_any*>(p) = v; }
INLINE void store(int32_t* p, vi v) { *reinterpret_cast<vi_any*>(p) = v; }
INLINE void store(uint32_t* p, vu v) { *reinterpret_cast<vu_any*>(p) = v; }
INLINE vf splat(float x) { return x - vf{}; }  // x - 0 is x, also for -0
INLINE vu splat(uint32_t x) { return x - vu{}; }

// 0, 1, 2, ...
INLINE vu lane_numbers() {
    vu v;
    for (uint32_t i = 0; i < VL; ++i) v[i] = i;
    return v;
}

// The first n lanes (0 <= n <= VL); loads give zero in the others, stores leave memory alone.
INLINE vf load_part(const float* p, int n) {
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
#elif defined(__AVX2__)
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(lane < n));
#else
    vf v = {};
    for (int i = 0; i < n; ++i) v[i] = p[i];
    return v;
#endif
}

// Lanes begin to end - 1 (0 <= begin < end <= VL). Loads give zero in the others, and do not read
// them.
#if defined(__AVX512F__)
using Lanes = __mmask16;
INLINE Lanes lanes_between(int begin, int end) {
    return static_cast<Lanes>((1u << end) - (1u << begin));
}
INLINE vf load_lanes(const float* p, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
#elif defined(__AVX2__)
using Lanes = vi;
INLINE Lanes lanes_between(int begin, int end) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return (lane >= begin) & (lane < end);
}
INLINE vf load_lanes(const float* p, Lanes lanes) {
    return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(lanes));
}
#else
struct Lanes {
    int begin, end;
};
INLINE Lanes lanes_between(int begin, int end) { return {begin, end}; }
INLINE vf load_lanes(const float* p, Lanes lanes) {
    vf v = {};
    for (int i = lanes.begin; i < lanes.end; ++i) v[i] = p[i];
    return v;
}
#endif

INLINE void store_part(float* p, vf v, int n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), v);
#elif defined(__AVX2__)
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
    _mm256_maskstore_ps(p, reinterpret_cast<__m256i>(lane < n), v);
#else
    for (int i = 0; i < n; ++i) p[i] = v[i];
#endif
}

// a * b + c, rounded once where there is an instruction for it.
INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// VL bytes as words.
INLINE vu widen(const uint8_t* p) {
#if defined(__AVX512F__)
    return reinterpret_cast<vu>(
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return reinterpret_cast<vu>(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    vu v;
    for (int i = 0; i < VL; ++i) v[i] = p[i];
    return v;
#endif
}

// Lanes 0, 2, 4, ... and 1, 3, 5, ... of 2 * VL consecutive floats.
INLINE void deinterleave(const float* p, vf& even, vf& odd) {
    const vf a = load(p), b = load(p + VL);
#if EXTENSOR_LANES == 16
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif EXTENSOR_LANES == 8
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// Sum of the lanes, always in the same order.
INLINE float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(v);
#else
    float total = 0;
    for (int i = 0; i < VL / 2; ++i) total += v[i] + v[i + VL / 2];
    return total;
#endif
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE int64_t round_up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

}  // namespace EXTENSOR_ISA
