// Whole blocks of 16 or 32 values along rows, which must run at memory speed: maxima of VL blocks
// at once, and codes of a floating-point grid, packed in registers. Everything else (ragged tails,
// other tiles, blocks without numbers) takes the loops of rowwise.cpp.
#pragma once

#include <utility>

#include "common/float_types.hpp"
#include "quantize/encoder.hpp"
#include "quantize/hadamard.hpp"
#include "quantize/packing.hpp"

namespace EXTENSOR_ISA {

// How far ahead of the values being encoded memory is prefetched. The processor's own prefetching
// stops at pages and leaves a fifth of the bandwidth unused.
constexpr int64_t kPrefetchBytes = 4096;

// Prefetches the bytes of `count` values that follow kPrefetchBytes after x; they may lie beyond
// the array's end.
template <class T>
INLINE void prefetch_stream([[maybe_unused]] const T* x, [[maybe_unused]] int64_t count) {
#if defined(__x86_64__)
    const auto* at = reinterpret_cast<const char*>(x) + kPrefetchBytes;
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); i += 64)
        _mm_prefetch(at + i, _MM_HINT_T0);
#endif
}

// ---- maxima ----

// Lane i: the largest lane of v[i]. A tree that needs VL - 1 maxima for VL vectors.
#if EXTENSOR_LANES == 16
INLINE vu largest_of_each(vu (&v)[VL]) {
    // Each level takes both halves of what two vectors hold of a tile: 32, 64, then 128 bits.
    const auto larger_of = [](vu& to, auto low, auto high) __attribute__((always_inline)) {
        to = reinterpret_cast<vu>(_mm512_max_epu32(low, high));
    };
    const auto at = [&](int i)
                        __attribute__((always_inline)) { return reinterpret_cast<__m512i>(v[i]); };
    for (int i = 0; i < 8; ++i)
        larger_of(v[i], _mm512_unpacklo_epi32(at(i), at(i + 8)),
                  _mm512_unpackhi_epi32(at(i), at(i + 8)));
    for (int i = 0; i < 4; ++i)
        larger_of(v[i], _mm512_unpacklo_epi64(at(i), at(i + 4)),
                  _mm512_unpackhi_epi64(at(i), at(i + 4)));
    for (int half = 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i)
            larger_of(v[i], _mm512_shuffle_i64x2(at(i), at(i + half), 0x88),
                      _mm512_shuffle_i64x2(at(i), at(i + half), 0xDD));
    const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15);
    return reinterpret_cast<vu>(_mm512_permutexvar_epi32(order, at(0)));
}
#else
// Lane i of the result: if bit S of i is clear, the larger of a's lanes i and i ^ S, else of b's.
template <int S>
INLINE vu fold(vu a, vu b) {
    vu upper;
    for (int i = 0; i < VL; ++i) upper[i] = i & S ? ~0u : 0u;
    const vu kept = upper ? b : a, moved = upper ? a : b;
    return larger(kept, bits_of(partner<S>(float_of(moved))));
}

INLINE vu largest_of_each(vu (&v)[VL]) {
    for (int i = 0; i < VL / 2; ++i) v[i] = fold<1>(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < VL / 4; ++i) v[i] = fold<2>(v[2 * i], v[2 * i + 1]);
    if constexpr (VL >= 8) v[0] = fold<4>(v[0], v[1]);
    return v[0];
}
#endif

// Magnitude bits of the maxima of VL tiles that follow one another.
template <int Tile, class T>
INLINE vu tile_maxima(const T* x) {
    vu v[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) {
        v[i] = bits_of(load(x + i * Tile)) & kMagnitude;
#pragma GCC unroll 8
        for (int k = VL; k < Tile; k += VL)
            v[i] = larger(v[i], bits_of(load(x + i * Tile + k)) & kMagnitude);
    }
    return largest_of_each(v);
}

// ---- codes ----

// Codes of `tiles` tiles (whole batches) of a floating-point grid, all of them plain. `words`: one
// per value, or unused. `bounded`: rounding to nearest, no value saturates.
template <int Index, int Tile, bool Words, class T>
struct RunEncoder {
    static constexpr int kBatch = kQuad;

    static void code(const T* x, const float* apply, const uint32_t* words, bool, int64_t tiles,
                     uint8_t* to, EncodeCounts& counts) {
        constexpr int bits = kElements[Index].bits;
        const Encoder<Index, Words> encoder{.element_scale = 1};
        EncodeCounts mine;
        for (int64_t i = 0; i < tiles * Tile; i += kQuad, x += kQuad, to += kQuad * bits / 8) {
            prefetch_stream(x, kQuad);
            vu code[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k)
                code[k] = encoder(load(x + k * VL), splat(apply[(i + k * VL) / Tile]),
                                  Words ? load(words + i + k * VL) : vu{}, mine);
            store_quad<bits>(to, code);
        }
        counts.saturated += mine.saturated;
        counts.flushed += mine.flushed;
    }
};

// The encoder for an element of the table and a tile length, or null where there is none.
template <bool Words, class T>
struct BlockEncoder {
    void (*code)(const T* x, const float* apply, const uint32_t* words, bool bounded, int64_t tiles,
                 uint8_t* to, EncodeCounts& counts) = nullptr;
    int64_t batch = 0;  // values; the tiles of a call must be whole batches

    BlockEncoder(int element, int64_t tile);  // blocks.cpp
};

}  // namespace EXTENSOR_ISA

#if EXTENSOR_LANES == 16
#include "quantize/blocks_bf16_avx512.hpp"
#include "quantize/blocks_fp8_avx512.hpp"
#endif
