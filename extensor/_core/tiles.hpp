// Whole tiles of 16 or 32 values along rows, the case that must run at memory speed: maxima of many
// tiles at once, and codes of a floating-point grid four vectors at a time, packed in registers.
// Anything else (ragged tails, other tiles, blocks without numbers) takes the loops of quant_rows.cpp.
#pragma once

#include <utility>

#include "coder.hpp"
#include "hadamard.hpp"

namespace EXTENSOR_ISA {

constexpr int kQuad = 4 * VL;  // values coded and packed together

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

// Magnitude bits of the maxima of `tiles` tiles (a multiple of VL) that follow one another.
template <int Tile>
inline void tile_maxima(const float* x, int64_t tiles, uint32_t* maxima) {
    for (int64_t t = 0; t < tiles; t += VL, x += VL * Tile) {
        vu v[VL];
#pragma GCC unroll 16
        for (int i = 0; i < VL; ++i) {
            v[i] = bits_of(load(x + i * Tile)) & kMagnitude;
#pragma GCC unroll 8
            for (int k = VL; k < Tile; k += VL)
                v[i] = larger(v[i], bits_of(load(x + i * Tile + k)) & kMagnitude);
        }
        store(maxima + t, largest_of_each(v));
    }
}

// ---- bytes of codes ----

// `count` unpacked codes -> packed bytes; `from` must be readable, and zero, to a whole group.
inline void pack_row(const uint8_t* from, int64_t count, int bits, uint8_t* to) {
    const int64_t bytes = ceil_div(count * bits, 8);
    if (bits == 8) {
        std::memcpy(to, from, static_cast<size_t>(bytes));
    } else if (bits == 4) {
        for (int64_t i = 0; i < bytes; ++i)
            to[i] = static_cast<uint8_t>(from[2 * i] | from[2 * i + 1] << 4);
    } else {
        for (int64_t i = 0; i < bytes; ++i, from += i % 3 ? 0 : 4) {
            const uint32_t word = static_cast<uint32_t>(from[0] | from[1] << 6 | from[2] << 12) |
                                  static_cast<uint32_t>(from[3]) << 18;
            to[i] = static_cast<uint8_t>(word >> (8 * (i % 3)));
        }
    }
}

INLINE void store_codes(uint8_t* to, vu codes) {
    typedef uint8_t bytes __attribute__((vector_size(VL), aligned(1), may_alias));
    *reinterpret_cast<bytes*>(to) = __builtin_convertvector(codes, bytes);
}

// Four vectors of codes, one after the other, packed.
template <int Bits>
INLINE void store_quad(uint8_t* to, const vu (&c)[4]) {
#if EXTENSOR_LANES > 4
    if constexpr (Bits != 6) {
        // Byte k of a lane is from vector k: transpose the bytes within 128 bits, then the words.
        const vu joined = (c[0] | c[1] << 8) | (c[2] << 16 | c[3] << 24);
        const __m128i turn =
            _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#if EXTENSOR_LANES == 16
        __m512i w = reinterpret_cast<__m512i>(joined);
        if constexpr (Bits == 8) {
            w = _mm512_shuffle_epi8(w, _mm512_broadcast_i32x4(turn));
            const __m512i order =
                _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, w));
        } else {
            w = _mm512_or_si512(w, _mm512_srli_epi64(w, 28));  // the odd lane's codes go high
            const __m256i half =
                _mm256_shuffle_epi8(_mm512_cvtepi64_epi32(w), _mm256_broadcastsi128_si256(turn));
            const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                                _mm256_permutevar8x32_epi32(half, order));
        }
#else
        __m256i w = reinterpret_cast<__m256i>(joined);
        if constexpr (Bits == 8) {
            w = _mm256_shuffle_epi8(w, _mm256_broadcastsi128_si256(turn));
            const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                                _mm256_permutevar8x32_epi32(w, order));
        } else {
            w = _mm256_or_si256(w, _mm256_srli_epi64(w, 28));
            const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
            const __m128i half = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(w, even));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_shuffle_epi8(half, turn));
        }
#endif
        return;
    }
#endif
    uint8_t codes[kQuad];
    for (int k = 0; k < 4; ++k) store_codes(codes + k * VL, c[k]);
    pack_row(codes, kQuad, Bits, to);
}

// ---- codes ----

// Codes of `tiles` tiles (whole quads) of a floating-point grid, whose blocks all hold numbers and
// in which no code but zero decodes to zero. `words`: one per value, or unused.
template <int Index, int Tile, bool Words>
void code_tiles(const float* x, const float* apply, const uint32_t* words, float element_scale,
                int64_t tiles, uint8_t* to, TileCounts& counts) {
    constexpr int bits = kElements[Index].bits;
    const Coder<Index, Words> coder{.element_scale = element_scale};
    TileCounts mine;
    for (int64_t i = 0; i < tiles * Tile; i += kQuad, x += kQuad, to += kQuad * bits / 8) {
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

using TileCoder = void (*)(const float*, const float*, const uint32_t*, float, int64_t, uint8_t*,
                           TileCounts&);

template <int Tile, bool Words, size_t... Index>
inline TileCoder pick_coder(int element, std::index_sequence<Index...>) {
    constexpr TileCoder coders[] = {&code_tiles<Index, Tile, Words>...};
    return coders[element];
}

// The coder for an element of the table and a tile length, or null where there is none.
template <bool Words>
inline TileCoder tile_coder(int element, int64_t tile) {
    constexpr auto all = std::make_index_sequence<sizeof(kElements) / sizeof(Element)>();
    if (!kElements[element].is_float) return nullptr;
    if (tile == 16) return pick_coder<16, Words>(element, all);
    if (tile == 32) return pick_coder<32, Words>(element, all);
    return nullptr;
}

// ---- values ----

// The values of VL codes from the `at`-th of a row on; at is a multiple of VL.
template <int Bits>
INLINE vf decode_vector(const uint8_t* codes, int64_t at, const float* table) {
    const uint8_t* from = codes + at * Bits / 8;
#if EXTENSOR_LANES == 16
    if constexpr (Bits == 4) {
        int64_t eight;
        std::memcpy(&eight, from, 8);
        __m512i w = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(eight));
        w = _mm512_or_si512(w, _mm512_slli_epi64(w, 28));  // the low four bits of a lane count
        return _mm512_permutexvar_ps(w, _mm512_loadu_ps(table));
    } else {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), table, 4);
    }
#else
    vf v;
    for (int i = 0; i < VL; ++i) {
        if constexpr (Bits == 4)
            v[i] = table[from[i / 2] >> (i % 2 * 4) & 15];
        else
            v[i] = table[from[i]];
    }
    return v;
#endif
}

// Past the caches, where asked for and the place is aligned; `finish_stores` before others read.
INLINE void store_past(float* to, vf v, [[maybe_unused]] bool past) {
#if EXTENSOR_LANES == 16
    if (past && reinterpret_cast<uintptr_t>(to) % 64 == 0) return _mm512_stream_ps(to, v);
#endif
    store(to, v);
}

INLINE void finish_stores() {
#if EXTENSOR_LANES == 16
    _mm_sfence();
#endif
}

// The values of one tile of `count` codes (a multiple of VL) from the `at`-th of a row on.
template <int Bits>
INLINE void decode_tile(const uint8_t* codes, int64_t at, int64_t count, const float* table,
                        float scale, float tensor_scale, bool past, float* out) {
    for (int64_t i = 0; i < count; i += VL)
        store_past(out + i, decode_vector<Bits>(codes, at + i, table) * scale * tensor_scale,
                   past);
}

}  // namespace EXTENSOR_ISA
