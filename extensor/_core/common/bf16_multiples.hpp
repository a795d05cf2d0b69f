// Whether float32 values are bfloat16 times one factor: within a relative 2^-21, as NVFP4's are.
#pragma once

#include "common/simd.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr float kMultipleBound = 0x1p-21f;
// The least magnitude of one: the bound of a smaller value would be subnormal, and itself rounded.
constexpr float kLeastMultiple = 0x1p-105f;

// The lanes of `value` that are not n times the factor.
INLINE __mmask16 no_multiples(__m512 value, __m512i n, __m512 factor) {
    const __m512 size = _mm512_abs_ps(value);
    const __m512 error =
        _mm512_abs_ps(_mm512_sub_ps(_mm512_mul_ps(_mm512_castsi512_ps(n), factor), value));
    const __m512 bound = _mm512_mul_ps(size, _mm512_set1_ps(kMultipleBound));
    const __mmask16 small = _mm512_mask_cmp_ps_mask(
        _mm512_test_epi32_mask(_mm512_castps_si512(size), _mm512_castps_si512(size)), size,
        _mm512_set1_ps(kLeastMultiple), _CMP_LT_OQ);
    return small | _mm512_cmp_ps_mask(error, bound, _CMP_NLE_UQ);
}

inline bool is_multiple(float value, float n, float factor) {
    const float size = __builtin_fabsf(value);
    if (size > 0 && size < kLeastMultiple) return false;
    return __builtin_fabsf(n * factor - value) <= kMultipleBound * size;
}

}  // namespace
}  // namespace EXTENSOR_ISA
