// Encodes one vector of values on a floating-point grid at memory speed, for blocks that hold only
// numbers and in which no code but zero decodes to zero.
#pragma once

#include "quantize/rounding.hpp"

namespace EXTENSOR_ISA {

struct EncodeCounts {
    int64_t saturated = 0, flushed = 0;
};

// How many lanes of n are above `most`; how many are zero where x is not.
#if EXTENSOR_LANES == 16
INLINE int64_t count_above(vu n, uint32_t most) {
    return __builtin_popcount(_mm512_cmpgt_epu32_mask(reinterpret_cast<__m512i>(n),
                                                      _mm512_set1_epi32(static_cast<int>(most))));
}
INLINE int64_t count_flushed(vf x, vu n) {
    const __m512i codes = reinterpret_cast<__m512i>(n);
    const __mmask16 some = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    return __builtin_popcount(_mm512_mask_testn_epi32_mask(some, codes, codes));
}
INLINE vu at_most(vu n, uint32_t most) {
    return reinterpret_cast<vu>(
        _mm512_min_epu32(reinterpret_cast<__m512i>(n), _mm512_set1_epi32(static_cast<int>(most))));
}
#else
INLINE int64_t count_true(vi mask) {
#if EXTENSOR_LANES == 8
    return __builtin_popcount(
        static_cast<unsigned>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask))));
#else
    int64_t n = 0;
    for (int i = 0; i < VL; ++i) n -= mask[i];
    return n;
#endif
}
INLINE int64_t count_above(vu n, uint32_t most) { return count_true(n > most); }
INLINE int64_t count_flushed(vf x, vu n) { return count_true((x != 0.0f) & (n == 0u)); }
INLINE vu at_most(vu n, uint32_t most) { return n < most ? n : splat(most); }
#endif

template <int Index, bool Words>
struct Encoder {
    static constexpr Element e = kElements[Index];
    const Grid grid{e};
    const float element_scale;

    // The codes of v * apply; `word` holds random bits, or is unused.
    INLINE vu operator()(vf v, vf apply, vu word, EncodeCounts& counts) const {
        constexpr uint32_t sign_bit = 1u << (e.bits - 1), top = static_cast<uint32_t>(e.max_code);
        vf y = v * apply;
        if (element_scale != 1.0f) y = y * element_scale;
        const vf magnitude = smaller(float_of(bits_of(y) & kMagnitude), splat(grid.clamp));
        vu exponent, steps;
        round_magnitude<Words>(magnitude, word, grid, exponent, steps);
        const vu n = ((exponent - grid.lowest) >> (23 - e.mantissa_bits)) + steps;
        counts.saturated += count_above(n, top);
        counts.flushed += count_flushed(v, n);
        return at_most(n, top) | ((bits_of(y) >> (32 - e.bits)) & sign_bit);
    }
};

}  // namespace EXTENSOR_ISA
