// Whole tiles of 16 or 32 values along rows, the case that must run at memory speed: maxima of VL
// tiles at once, and codes of a floating-point grid several vectors at a time, packed in registers.
// Anything else (ragged tails, other tiles, blocks without numbers) takes the loops of
// quant_rows.cpp.
#pragma once

#include <utility>

#include "coder.hpp"
#include "floats.hpp"
#include "hadamard.hpp"
#include "packing.hpp"

namespace EXTENSOR_ISA {

// How far ahead of the values being coded memory is asked for. The processor's own prefetching
// stops at pages and leaves a fifth of the bandwidth unused.
constexpr int64_t kAhead = 3072;  // bytes

// Asks for the bytes of `count` values that follow kAhead after x; may lie past the array's end.
template <class T>
INLINE void prefetch_ahead([[maybe_unused]] const T* x, [[maybe_unused]] int64_t count) {
#if defined(__x86_64__)
    const auto* at = reinterpret_cast<const char*>(x) + kAhead;
    for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(T)); i += 64)
        _mm_prefetch(at + i, _MM_HINT_T0);
#endif
}

// ---- maxima ----

// Lane i of the result: if bit S of i is clear, the larger of a's lanes i and i ^ S, else of b's.
template <int S>
INLINE vu fold(vu a, vu b) {
    vu upper;
    for (int i = 0; i < VL; ++i) upper[i] = i & S ? ~0u : 0u;
    const vu kept = upper ? b : a, moved = upper ? a : b;
    return larger(kept, bits_of(partner<S>(float_of(moved))));
}

// Lane i: the largest lane of v[i]. A tree that needs VL - 1 maxima for VL vectors.
INLINE vu largest_of_each(vu (&v)[VL]) {
    for (int i = 0; i < VL / 2; ++i) v[i] = fold<1>(v[2 * i], v[2 * i + 1]);
    for (int i = 0; i < VL / 4; ++i) v[i] = fold<2>(v[2 * i], v[2 * i + 1]);
    if constexpr (VL >= 8)
        for (int i = 0; i < VL / 8; ++i) v[i] = fold<4>(v[2 * i], v[2 * i + 1]);
    if constexpr (VL >= 16) v[0] = fold<8>(v[0], v[1]);
    return v[0];
}

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

// A block that tile coders take: no code but zero decodes to zero, and no value
// is scaled beyond the grid's clamp (nor is Inf or NaN). All ones or zero in each lane.
INLINE vu is_plain(const Scales& s, vu amax, float tensor_scale, const Grid& grid) {
    const vu seen = reinterpret_cast<vu>((grid.smallest * s.decode) * tensor_scale != 0.0f);
    const vu small = reinterpret_cast<vu>(float_of(amax) * s.apply <= grid.clamp);
    return small & (seen | reinterpret_cast<vu>(amax == 0u));
}

// Codes of `tiles` tiles (whole batches) of a floating-point grid, all of them plain. `words`: one
// per value, or unused. `bounded`: rounding to nearest, no value saturates.
template <int Index, int Tile, bool Words, class T>
struct RunCoder {
    static constexpr int kBatch = kQuad;

    static void code(const T* x, const float* apply, const uint32_t* words, bool, int64_t tiles,
                     uint8_t* to, TileCounts& counts) {
        constexpr int bits = kElements[Index].bits;
        const Coder<Index, Words> coder{.element_scale = 1};
        TileCounts mine;
        for (int64_t i = 0; i < tiles * Tile; i += kQuad, x += kQuad, to += kQuad * bits / 8) {
            prefetch_ahead(x, kQuad);
            vu code[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k)
                code[k] = coder(load(x + k * VL), splat(apply[(i + k * VL) / Tile]),
                                Words ? load(words + i + k * VL) : vu{}, mine);
            store_quad<bits>(to, code);
        }
        counts.saturated += mine.saturated;
        counts.flushed += mine.flushed;
    }
};

// The coder for an element of the table and a tile length, or null where there is none.
template <bool Words, class T>
struct TileCoder {
    void (*code)(const T* x, const float* apply, const uint32_t* words, bool bounded,
                 int64_t tiles, uint8_t* to, TileCounts& counts) = nullptr;
    int64_t batch = 0;  // values; the tiles of a call must be whole batches

    TileCoder(int element, int64_t tile) {
        constexpr auto all = std::make_index_sequence<sizeof(kElements) / sizeof(Element)>();
        if (!kElements[element].is_float) return;
        if (tile == 16) *this = pick<16>(element, all);
        if (tile == 32) *this = pick<32>(element, all);
    }

private:
    template <class Of>
    explicit TileCoder(Of*) : code(&Of::code), batch(Of::kBatch) {}

    template <int Tile, size_t... Index>
    static TileCoder pick(int element, std::index_sequence<Index...>) {
        const TileCoder coders[] = {
            TileCoder(static_cast<RunCoder<Index, Tile, Words, T>*>(nullptr))...};
        return coders[element];
    }
};

}  // namespace EXTENSOR_ISA

#if EXTENSOR_LANES == 16
#include "tiles_bfloat16.hpp"
#endif
