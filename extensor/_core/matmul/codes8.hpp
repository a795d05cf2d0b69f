// Eight-bit codes as float32, for the weight-only products. Where the CPU loads float16 as float32,
// FP8 codes first become float16, a cache line at a time: a load converts with one uop less than a
// register does.
#pragma once

#include "matmul/blocked_matrix.hpp"

#if defined(__AVX512F__) || defined(__F16C__)
#define EXTENSOR_HAS_F16C  // float16 to float32 in one instruction
#endif

namespace EXTENSOR_ISA {

enum class Code8 { integer, e4m3, e5m2 };

#if defined(EXTENSOR_HAS_F16C)
using Wide = uint16_t;  // float16: e5m2 is its upper byte, e4m3 divided by 256 its next bits
#else
using Wide = float;
#endif

INLINE vf load_wide(const Wide* from) {
#if EXTENSOR_LANES == 16
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(EXTENSOR_HAS_F16C)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    return load(from);
#endif
}

INLINE vf load_signed(const uint8_t* from) {
#if EXTENSOR_LANES == 16
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif EXTENSOR_LANES == 8
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    vf v;
    for (int i = 0; i < VL; ++i) v[i] = static_cast<int8_t>(from[i]);
    return v;
#endif
}

// The largest magnitude of e4m3 codes: 0x7F is NaN, which the float16 would not be.
struct MaxCode {
#if EXTENSOR_LANES == 16
    __m512i twice = {};
    INLINE void add(const uint8_t* from) {
        const __m512i bytes = _mm512_loadu_si512(from);
        twice = _mm512_max_epu8(twice, _mm512_add_epi8(bytes, bytes));
    }
#elif defined(EXTENSOR_HAS_F16C)
    __m256i twice = {};
    INLINE void add(const uint8_t* from) {
        for (int half = 0; half < 64; half += 32) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half));
            twice = _mm256_max_epu8(twice, _mm256_add_epi8(bytes, bytes));
        }
    }
#else
    uint8_t twice[1] = {};  // NaN comes out of the table
    INLINE void add(const uint8_t*) {}
#endif
    bool is_nan() const {
        uint8_t bytes[sizeof twice], most = 0;
        std::memcpy(bytes, &twice, sizeof twice);
        for (uint8_t b : bytes) most = b > most ? b : most;
        return most == 0xFE;
    }
};

// Expands 64 codes.
template <Code8 Kind>
INLINE void expand(const uint8_t* from, [[maybe_unused]] const float* table, Wide* to) {
#if EXTENSOR_LANES == 16
    for (int half = 0; half < 64; half += 32) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + half));
        const __m512i wide =
            Kind == Code8::e5m2
                ? _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8)
                : _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7),
                                   _mm512_set1_epi16(static_cast<int16_t>(0xBF80)));
        _mm512_storeu_si512(to + half, wide);
    }
#elif defined(EXTENSOR_HAS_F16C)
    for (int part = 0; part < 64; part += 16) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part));
        const __m256i wide =
            Kind == Code8::e5m2
                ? _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8)
                : _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7),
                                   _mm256_set1_epi16(static_cast<int16_t>(0xBF80)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + part), wide);
    }
#else
    for (int i = 0; i < 64; ++i) to[i] = table[from[i]];
#endif
}

// Lanes from the n-th on become zero.
INLINE vf first_lanes(vf v, int64_t n) {
    vi lane;
    for (int i = 0; i < VL; ++i) lane[i] = i;
    return reinterpret_cast<vf>(reinterpret_cast<vi>(v) & (lane < static_cast<int32_t>(n)));
}

}  // namespace EXTENSOR_ISA
