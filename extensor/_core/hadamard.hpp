// Butterflies of the Hadamard transform, in the order of extensor/quant/hadamard.py.
#pragma once

#include "simd.hpp"

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

// One butterfly inside a vector: low + high in the low lane, low - high in the high lane.
template <int S>
INLINE vf lane_butterfly(vf v) {
    vu flip;
    for (int i = 0; i < VL; ++i) flip[i] = i & S ? 0x80000000u : 0u;
    return partner<S>(v) + reinterpret_cast<vf>(reinterpret_cast<vu>(v) ^ flip);
}

// `count` rows of `stride` floats each, a transform down the rows; VL columns at a time.
INLINE void butterfly_rows(float* x, int count, int stride) {
    for (int s = 1; s < count; s *= 2) {
        for (int i = 0; i < count; i += 2 * s) {
            for (int j = i; j < i + s; ++j) {
                const vf low = load(x + j * stride), high = load(x + (j + s) * stride);
                store(x + j * stride, low + high);
                store(x + (j + s) * stride, low - high);
            }
        }
    }
}

// A transform along `size` consecutive floats, a multiple of VL.
INLINE void butterfly_run(float* x, int size) {
    for (int i = 0; i < size; i += VL) {
        vf v = load(x + i);
        v = lane_butterfly<1>(v);
        v = lane_butterfly<2>(v);
        if constexpr (VL > 4) v = lane_butterfly<4>(v);
        if constexpr (VL > 8) v = lane_butterfly<8>(v);
        store(x + i, v);
    }
    butterfly_rows(x, size / VL, VL);
}

}  // namespace EXTENSOR_ISA
