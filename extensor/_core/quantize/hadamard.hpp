// The Hadamard transform, its butterflies in the order of extensor/quant/hadamard.py.
#pragma once

#include "common/lanes.hpp"

namespace EXTENSOR_ISA {

// One butterfly within a vector: low + high in the low lane, low - high in the high lane.
template <int S>
INLINE vf lane_butterfly(vf v) {
#if defined(__FMA__)
    vf sign;  // a product with one is exact: the sum alone rounds
    for (int i = 0; i < VL; ++i) sign[i] = i & S ? -1.0f : 1.0f;
#if EXTENSOR_LANES == 16
    return _mm512_fmadd_ps(v, sign, partner<S>(v));
#else
    return _mm256_fmadd_ps(v, sign, partner<S>(v));
#endif
#else
    vu flip;
    for (int i = 0; i < VL; ++i) flip[i] = i & S ? 0x80000000u : 0u;
    return partner<S>(v) + reinterpret_cast<vf>(reinterpret_cast<vu>(v) ^ flip);
#endif
}

// Butterflies among `Count` vectors, at distances of 1, 2, 4 ... of them.
template <int Count>
INLINE void butterflies(vf (&v)[Count]) {
#pragma GCC unroll 5
    for (int s = 1; s < Count; s *= 2) {
#pragma GCC unroll 32
        for (int i = 0; i < Count; ++i) {
            if (i & s) continue;
            const vf low = v[i], high = v[i + s];
            v[i] = low + high;
            v[i + s] = low - high;
        }
    }
}

INLINE vf hadamard_scale(int size) { return splat(static_cast<float>(1.0 / __builtin_sqrt(size))); }

// The transform of `Size` consecutive values; load(i) gives VL of them from the i-th on.
template <int Size, class Load>
INLINE void transform_run(Load load_at, const float* signs, float* out) {
    vf v[Size / VL];
#pragma GCC unroll 32
    for (int i = 0; i < Size / VL; ++i) {
        v[i] = load_at(i * VL) * load(signs + i * VL);
        v[i] = lane_butterfly<1>(v[i]);
        v[i] = lane_butterfly<2>(v[i]);
        if constexpr (VL > 4) v[i] = lane_butterfly<4>(v[i]);
        if constexpr (VL > 8) v[i] = lane_butterfly<8>(v[i]);
    }
    butterflies(v);
    const vf scale = hadamard_scale(Size);
#pragma GCC unroll 32
    for (int i = 0; i < Size / VL; ++i) store(out + i * VL, v[i] * scale);
}

template <class Load>
INLINE void transform_run(int size, Load load_at, const float* signs, float* out) {
    switch (size) {
        case 16: return transform_run<16>(load_at, signs, out);
        case 32: return transform_run<32>(load_at, signs, out);
        case 64: return transform_run<64>(load_at, signs, out);
        default: return transform_run<128>(load_at, signs, out);
    }
}

// The transform of VL columns of `size` rows, which `load_row` gives and `store_row` takes; rows of
// `panel`, `stride` floats apart, hold them in between, and may be those that are loaded or stored.
template <class Load, class Store>
INLINE void transform_rows(int size, float* panel, int64_t stride, Load load_row, Store store_row) {
    constexpr int kFirst = 16;  // rows that registers hold
    const vf scale = hadamard_scale(size);
    float* to = panel;
    for (int i = 0; i < size; i += kFirst, to += kFirst * stride) {
        vf v[kFirst];
#pragma GCC unroll 16
        for (int k = 0; k < kFirst; ++k) v[k] = load_row(i + k);
        butterflies(v);
#pragma GCC unroll 16
        for (int k = 0; k < kFirst; ++k)
            size == kFirst ? store_row(k, v[k] * scale) : store(to + k * stride, v[k]);
    }
    for (int s = kFirst; s < size; s *= 2) {
        const bool last = 2 * s == size;
        float* low = panel;
        for (int i = 0; i < size; i += 2 * s, low += s * stride) {
            for (int j = i; j < i + s; ++j, low += stride) {
                float* high = low + s * stride;
                const vf a = load(low), b = load(high);
                last ? store_row(j, (a + b) * scale) : store(low, a + b);
                last ? store_row(j + s, (a - b) * scale) : store(high, a - b);
            }
        }
    }
}

// The same in place.
INLINE void transform_rows(float* x, int size, int64_t stride, const float* signs) {
    transform_rows(
        size, x, stride, [&](int i) { return load(x + i * stride) * signs[i]; },
        [&](int i, vf v) { store(x + i * stride, v); });
}

}  // namespace EXTENSOR_ISA
