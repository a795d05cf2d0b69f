// Convolutions' products of values that are exactly bfloat16, by VDPBF16PS: two terms of a sum in
// the time of one in float32.
//
// An instruction adds the odd term, then the even one, each product and sum rounded once. It reads
// and writes subnormals as zero, so the extents of both sides must rule those out: every sum is a
// multiple of the product of the smallest units, and below 2^127.

#include "conv_pool/lowered_images.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;

constexpr int64_t kColumns = TV * VL;

// Of pairs of bfloat16, while they are packed.
struct Extents {
    __m512i least = _mm512_set1_epi32(-1), most = {}, rest = {};

    // `floats`: all bits of the floats that the words were cut from.
    INLINE void add(__m512i words, __m512i floats) {
        const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
        most = _mm512_max_epu16(most, magnitude);
        // A zero becomes the largest.
        least = _mm512_min_epu16(least, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));
        rest = _mm512_ternarylogic_epi32(rest, floats, _mm512_set1_epi32(0xFFFF), 0xF8);
    }

    Bf16Extent found() const {
        alignas(64) uint16_t low[32], high[32];
        _mm512_store_si512(low, least);
        _mm512_store_si512(high, most);
        Bf16Extent e;
        for (int i = 0; i < 32; ++i) {
            e.least = low[i] + 1u < e.least ? low[i] + 1u : e.least;
            e.most = high[i] > e.most ? high[i] : e.most;
        }
        e.exact = !_mm512_test_epi32_mask(rest, rest);
        return e;
    }
};

// Whether no sum of `terms` products can become subnormal or infinite, and no value is.
bool fits(const Bf16Extent& a, const Bf16Extent& b, int64_t terms) {
    if (!a.exact || !b.exact) return false;
    if (!a.most || !b.most) return a.most < 0x7F80 && b.most < 0x7F80;
    if (a.least < 0x80 || b.least < 0x80) return false;
    const auto exponent = [](uint32_t bits) { return static_cast<int>(bits >> 7) - 127; };
    int length = 0;
    while (terms >> length) ++length;
    return exponent(a.least) - 7 + exponent(b.least) - 7 >= -126 &&
           exponent(a.most) + 1 + exponent(b.most) + 1 + length <= 127;
}

Bf16Extent pack_words(int64_t groups, int64_t o, int64_t taps, const float* packed,
                      uint32_t* words) {
    const Split outs(o, TO);
    Bf16Extent e;
    for (int64_t g = 0; g < groups; ++g) {
        for (int64_t op = 0; op < outs.parts; ++op) {
            const int64_t count = outs.size(op);
            for (int64_t t = 0; t < taps; t += 2) {
                for (int64_t i = 0; i < count; ++i) {
                    uint32_t pair[2] = {};
                    std::memcpy(pair, packed + t * count + i, 4);
                    if (t + 1 < taps) std::memcpy(pair + 1, packed + (t + 1) * count + i, 4);
                    if ((pair[0] | pair[1]) & 0xFFFFu) return {0, 0, false};
                    for (const uint32_t bits : pair) {
                        const uint32_t magnitude = bits >> 16 & 0x7FFFu;
                        if (magnitude && magnitude < e.least) e.least = magnitude;
                        if (magnitude > e.most) e.most = magnitude;
                    }
                    *words++ = pair[0] >> 16 | pair[1];
                }
            }
            packed += count * taps;
        }
    }
    return e;
}

// Pairs of rows, kColumns words each; zeros below the last row and in the last vector.
Bf16Extent pack_rows(const TapRows& m, uint32_t* to) {
    Extents extents;
    const int64_t vectors = ceil_div(m.pixels, VL);
    const auto last = static_cast<__mmask16>((1u << (m.pixels - (vectors - 1) * VL)) - 1);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    for (int64_t t = 0; t < m.taps; t += 2, to += kColumns) {
        const float* first = m.x + m.offset[t];
        const bool two = t + 1 < m.taps;
        const float* second = two ? m.x + m.offset[t + 1] : first;
        for (int64_t v = 0; v < vectors; ++v) {
            const __mmask16 lanes = v + 1 < vectors ? static_cast<__mmask16>(0xFFFF) : last;
            const __m512i a = _mm512_maskz_loadu_epi32(lanes, first + v * VL);
            const __m512i b = _mm512_maskz_loadu_epi32(two ? lanes : 0, second + v * VL);
            const __m512i words =
                _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, upper, 0xF8);
            extents.add(words, _mm512_or_si512(a, b));
            _mm512_storeu_si512(to + v * VL, words);
        }
    }
    return extents.found();
}

INLINE __m512bh pairs(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

// As conv_tile in lowered_images.hpp, of rows of pairs.
template <int O, int V, bool Add>
void pair_tile(const uint32_t* x, int64_t count, const uint32_t* w, const float* bias, float* out,
               int64_t out_stride, int tail) {
    vf acc[O][V];
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const float* at = out + i * out_stride + v * VL;
            if (Add)
                acc[i][v] = v == V - 1 ? load_part(at, tail) : load(at);
            else
                acc[i][v] = splat(bias[i]);
        }
    }
    for (int64_t p = 0; p < count; ++p, w += O, x += kColumns) {
        __m512bh xs[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) xs[v] = pairs(x + v * VL);
#pragma GCC unroll 8
        for (int i = 0; i < O; ++i) {
            const auto wi = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(w[i])));
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], wi, xs[v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i, out += out_stride) {
#pragma GCC unroll 8
        for (int v = 0; v < V - 1; ++v) store(out + v * VL, acc[i][v]);
        store_part(out + (V - 1) * VL, acc[i][V - 1], tail);
    }
}

using PairTile = void (*)(const uint32_t*, int64_t, const uint32_t*, const float*, float*, int64_t,
                          int);

template <bool Add, int... I>
PairTile pair_tile_for(int64_t o, int64_t v, std::integer_sequence<int, I...>) {
    static constexpr PairTile tiles[] = {pair_tile<I / TV + 1, I % TV + 1, Add>...};
    return tiles[(o - 1) * TV + v - 1];
}

bool multiply_pairs(int64_t o, const TapRows& m, const uint32_t* words, const Bf16Extent& weights,
                    const float* bias, float* out, int64_t out_stride) {
    constexpr int64_t kPairs = 8192 / kColumns;  // 32 KiB
    constexpr std::make_integer_sequence<int, TO * TV> all{};
    const int64_t count = ceil_div(m.taps, 2);
    uint32_t* rows = scratch_of<uint32_t>(kPairRows, count * kColumns);
    if (!fits(weights, pack_rows(m, rows), m.taps)) return false;
    const Split outs(o, TO), blocks(count, kPairs);
    const int64_t vectors = ceil_div(m.pixels, VL);
    const int tail = static_cast<int>(m.pixels - (vectors - 1) * VL);
    for (int64_t b = 0; b < blocks.parts; ++b) {
        const int64_t p = blocks.start(b);
        for (int64_t op = 0; op < outs.parts; ++op) {
            const int64_t i = outs.start(op), size = outs.size(op);
            const PairTile tile = b ? pair_tile_for<true>(size, vectors, all)
                                    : pair_tile_for<false>(size, vectors, all);
            tile(rows + p * kColumns, blocks.size(b), words + i * count + p * size, bias + i,
                 out + i * out_stride, out_stride, tail);
        }
    }
    return true;
}

Bf16Extent to_bf16(int64_t count, const float* from, uint16_t* to) {
    Extents extents;
    for (int64_t i = 0; i < count; i += VL) {
        const auto lanes = static_cast<__mmask16>((1u << least(VL, count - i)) - 1);
        const __m512i v = _mm512_maskz_loadu_epi32(lanes, from + i);
        const __m512i upper = _mm512_srli_epi32(v, 16);
        extents.add(upper, v);
        _mm256_mask_storeu_epi16(to + i, lanes, _mm512_cvtepi32_epi16(upper));
    }
    return extents.found();
}

// As weight_tile in lowered_images.hpp: `count` values of each row, in whole vectors of 32.
template <int O, int T>
void pair_weight_tile(const uint16_t* g, int64_t g_stride, const uint16_t* x, int64_t x_stride,
                      int64_t count, float* out, int64_t out_stride) {
    vf acc[O][T] = {};
    for (int64_t k = 0; k < count; k += 2 * VL) {
        __m512bh gi[O];
#pragma GCC unroll 8
        for (int i = 0; i < O; ++i) gi[i] = pairs(g + i * g_stride + k);
#pragma GCC unroll 8
        for (int j = 0; j < T; ++j) {
            const __m512bh xj = pairs(x + j * x_stride + k);
#pragma GCC unroll 8
            for (int i = 0; i < O; ++i) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], gi[i], xj);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i) add_sums<T>(acc[i], out + i * out_stride);
}

using PairWeightTile = void (*)(const uint16_t*, int64_t, const uint16_t*, int64_t, int64_t, float*,
                                int64_t);

template <int... I>
PairWeightTile pair_weight_tile_for(int64_t o, int64_t t, std::integer_sequence<int, I...>) {
    static constexpr PairWeightTile tiles[] = {pair_weight_tile<I / WT + 1, I % WT + 1>...};
    return tiles[(o - 1) * WT + t - 1];
}

bool correlate_pairs(int64_t o, const TapRows& m, const uint16_t* g, int64_t g_stride,
                     const Bf16Extent& gradients, float* out, int64_t out_stride) {
    constexpr int64_t kRun = 2048;  // pixels whose gradients stay in the first-level cache
    constexpr std::make_integer_sequence<int, WO * WT> all{};
    const int64_t length = round_up(m.pixels, 2 * VL);
    uint16_t* rows = scratch_of<uint16_t>(kPairRows, m.taps * length);
    Bf16Extent e;
    for (int64_t t = 0; t < m.taps; ++t) {
        uint16_t* row = rows + t * length;
        std::memset(row + length - 2 * VL, 0, 4 * VL);
        const Bf16Extent one = to_bf16(m.pixels, m.x + m.offset[t], row);
        e.exact &= one.exact;
        e.least = one.least < e.least ? one.least : e.least;
        e.most = one.most > e.most ? one.most : e.most;
    }
    if (!fits(gradients, e, m.pixels)) return false;
    const Split outs(o, WO), taps(m.taps, WT);
    for (int64_t first = 0; first < length; first += kRun) {
        for (int64_t op = 0; op < outs.parts; ++op) {
            const int64_t i = outs.start(op);
            for (int64_t tp = 0; tp < taps.parts; ++tp) {
                const int64_t t = taps.start(tp);
                pair_weight_tile_for(outs.size(op), taps.size(tp), all)(
                    g + i * g_stride + first, g_stride, rows + t * length + first, length,
                    least(kRun, length - first), out + i * out_stride + t, out_stride);
            }
        }
    }
    return true;
}

}  // namespace

extern const PairKernels bf16_pair_kernels;
const PairKernels bf16_pair_kernels = {pack_words, multiply_pairs, to_bf16, correlate_pairs};

}  // namespace EXTENSOR_ISA
