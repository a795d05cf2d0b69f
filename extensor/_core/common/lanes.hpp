// Exchanges between the lanes of a vector, and the transposition of VL vectors.
#pragma once

#include "common/simd.hpp"

namespace EXTENSOR_ISA {

// The lane whose index differs in bit S.
template <int S>
INLINE vf partner(vf v) {
#if EXTENSOR_LANES == 16
    if constexpr (S == 1)
        return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    else if constexpr (S == 2)
        return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    else if constexpr (S == 4)
        return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    else
        return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
#elif EXTENSOR_LANES == 8
    if constexpr (S == 1)
        return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
    else if constexpr (S == 2)
        return __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    else
        return __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
#else
    if constexpr (S == 1)
        return __builtin_shufflevector(v, v, 1, 0, 3, 2);
    else
        return __builtin_shufflevector(v, v, 2, 3, 0, 1);
#endif
}

// Lane j of v[i] and lane i of v[j] change places.
template <int S = 1>
INLINE void transpose(vf (&v)[VL]) {
    vu upper;
    for (int lane = 0; lane < VL; ++lane) upper[lane] = lane & S ? ~0u : 0u;
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) {
        if (i & S) continue;
        const vf low = v[i], high = v[i | S];
        v[i] = upper ? partner<S>(high) : low;
        v[i | S] = upper ? high : partner<S>(low);
    }
    if constexpr (2 * S < VL) transpose<2 * S>(v);
}

}  // namespace EXTENSOR_ISA
