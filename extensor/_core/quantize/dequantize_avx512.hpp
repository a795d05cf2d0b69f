// Decodes to bfloat16 and float16 on AVX-512, 32 values to a register, for dequantize.cpp.
//
// A block of four-bit codes has sixteen values: they are computed and rounded as any others, and
// the codes select among them. Under scales that are powers of two only their exponents differ from
// block to block. FP8 codes under a power of two become bfloat16 by moving their fields: exact
// while none overflows or becomes subnormal.
#pragma once

#include "common/cache_lines.hpp"
#include "common/elements.hpp"
#include "common/float_types.hpp"

namespace EXTENSOR_ISA {

// Sixteen values, rounded, in 16-bit lanes.
template <class Float16Bits>
INLINE __m256i rounded16(vf values) {
    return reinterpret_cast<__m256i>(narrow(values, Float16Bits{}));
}

// 32 four-bit codes, each in the low four bits of a lane; the bit above them means nothing.
INLINE __m512i unpack_nibbles(const uint8_t* from) {
    const __m512i w = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm512_or_si512(w, _mm512_slli_epi32(w, 12));
}

// 32 codes of one block, whose values are `low`.
INLINE __m512i pick(const uint8_t* from, __m256i values) {
    return _mm512_permutexvar_epi16(unpack_nibbles(from), _mm512_broadcast_i64x4(values));
}

// 16 codes of a block, then 16 of the next one.
INLINE __m512i pick(const uint8_t* from, __m256i first, __m256i second) {
    // (codes & 15) | 16 in the upper half
    const __m512i upper = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i at =
        _mm512_ternarylogic_epi32(unpack_nibbles(from), _mm512_set1_epi16(15), upper, 0xEA);
    return _mm512_permutexvar_epi16(at,
                                    _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1));
}

// Blocks of 16 four-bit floats under UE4M3 scales, to bfloat16: sixteen blocks at a time until a
// scale is NaN; returns how many. The eight magnitudes of two blocks share a register, and codes
// select the upper halves of its rounded lanes. The tensor scale is finite.
INLINE int64_t decode_two_blocks(const float* grid, const float* ue4m3, const uint8_t* scales,
                                 const uint8_t* codes, int64_t blocks, float tensor_scale,
                                 bfloat16* out, bool streamed) {
    const __m512 magnitudes = _mm512_broadcast_f32x8(_mm256_loadu_ps(grid));
    const __m512 tensor = _mm512_set1_ps(tensor_scale);
    const __m512i bits16 = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(1), 1);
    const __m512i uppers = _mm512_inserti64x4(_mm512_set1_epi16(1), _mm256_set1_epi16(17), 1);
    int64_t t = 0;
    for (; t + 16 <= blocks; t += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scales + t));
        const __m512 values = _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), ue4m3, 4);
        if (_mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q)) return t;
#pragma GCC unroll 8
        for (int two = 0; two < 8; ++two) {
            const __m512 scale =
                _mm512_permutexvar_ps(_mm512_add_epi32(bits16, _mm512_set1_epi32(2 * two)), values);
            const __m512i bits =
                _mm512_castps_si512(_mm512_mul_ps(_mm512_mul_ps(magnitudes, scale), tensor));
            const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << 16));
            __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
            rounded = _mm512_mask_add_epi32(rounded, odd, rounded, _mm512_set1_epi32(1));
            const __m512i w = unpack_nibbles(codes + (t + 2 * two) * 8);
            const __m512i at = _mm512_ternarylogic_epi32(_mm512_add_epi16(w, w),
                                                         _mm512_set1_epi16(14), uppers, 0xEA);
            const __m512i result = _mm512_ternarylogic_epi32(
                _mm512_permutexvar_epi16(at, rounded), _mm512_slli_epi16(w, 12),
                _mm512_set1_epi16(static_cast<short>(0x8000)), 0x78);
            store_cache_line(out + (t + 2 * two) * 16, result, streamed);
        }
    }
    return t;
}

// Four-bit codes under a scale of E8M0.
struct Fp4ToBf16 {
    __m512i bits;            // of the sixteen values under the scale 1, twice
    __mmask32 some;          // which are not zero
    uint32_t lowest, count;  // of the scales under which all of these are normal numbers

    explicit Fp4ToBf16(const float* values) {
        alignas(64) uint16_t mine[32];
        int least_field = 255, largest_field = 0;
        for (int i = 0; i < 32; ++i) {
            uint32_t wide;
            std::memcpy(&wide, values + i % 16, 4);
            mine[i] = static_cast<uint16_t>(wide >> 16);
            const int field = static_cast<int>(wide >> 23 & 255);
            if (!field) continue;
            least_field = field < least_field ? field : least_field;
            largest_field = field > largest_field ? field : largest_field;
        }
        bits = _mm512_load_si512(mine);
        some = _mm512_test_epi16_mask(bits, _mm512_set1_epi16(0x7FFF));
        lowest = static_cast<uint32_t>(least_field < 128 ? 128 - least_field : 1);
        count = static_cast<uint32_t>(381 - largest_field) - lowest + 1;
    }

    INLINE bool covers(uint32_t scale) const { return scale - lowest < count; }

    INLINE __m512i under(uint32_t scale) const {
        const int offset = (static_cast<int>(scale) - 127) * 128;
        return _mm512_mask_add_epi16(bits, some, bits,
                                     _mm512_set1_epi16(static_cast<short>(offset)));
    }
};

// FP8 codes under a scale of E8M0.
struct Fp8ToBf16 {
    __m512i subnormal;  // their bits, by code, less what is added to all
    __m512i largest;    // finite magnitude
    __m512i normal;     // the smallest of the normal numbers
    __m128i shift;
    uint32_t lowest, count;  // of the scales that are covered
    int min_exponent;

    explicit Fp8ToBf16(const Element& e)
        : largest(_mm512_set1_epi16(static_cast<short>(e.max_code))),
          normal(_mm512_set1_epi16(static_cast<short>(1 << e.mantissa_bits))),
          shift(_mm_cvtsi32_si128(7 - e.mantissa_bits)),
          min_exponent(e.min_exponent) {
        float values[256];
        decode_table(e, values);
        alignas(64) uint16_t bits[32] = {};
        for (int i = 1; i < 1 << e.mantissa_bits && i < 32; ++i) {
            uint32_t wide;
            std::memcpy(&wide, values + i, 4);
            bits[i] = static_cast<uint16_t>((wide >> 16) -
                                            static_cast<uint32_t>((e.min_exponent + 126) << 7));
        }
        subnormal = _mm512_load_si512(bits);
        lowest = static_cast<uint32_t>(1 - (e.min_exponent - e.mantissa_bits));
        count = e.is_float && e.bits == 8 ? static_cast<uint32_t>(254 - e.emax) - lowest + 1 : 0;
    }

    INLINE bool covers(uint32_t scale) const { return scale - lowest < count; }

    // 32 codes; false, and nothing done, where one has no finite value.
    INLINE bool run(const uint8_t* from, uint32_t scale, __m512i& bits16) const {
        const __m512i w =
            _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        const __m512i magnitude = _mm512_and_si512(w, _mm512_set1_epi16(0x7F));
        if (_mm512_cmpgt_epu16_mask(magnitude, largest)) return false;
        const __mmask32 some = _mm512_test_epi16_mask(magnitude, magnitude);
        const __mmask32 small = _mm512_cmplt_epu16_mask(magnitude, normal);
        __m512i bits = _mm512_sll_epi16(magnitude, shift);
        bits = _mm512_mask_permutexvar_epi16(bits, small, magnitude, subnormal);
        // The field of the smallest normal number is 1: its exponent's is min_exponent + scale.
        const int offset = (min_exponent + static_cast<int>(scale) - 1) * 128;
        bits =
            _mm512_mask_add_epi16(bits, some, bits, _mm512_set1_epi16(static_cast<short>(offset)));
        bits16 = _mm512_ternarylogic_epi32(bits, _mm512_slli_epi16(w, 8),
                                           _mm512_set1_epi16(static_cast<short>(0x8000)), 0xF8);
        return true;
    }
};

}  // namespace EXTENSOR_ISA
