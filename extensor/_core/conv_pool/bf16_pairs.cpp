// Convolutions' products of values that are bfloat16 times one factor, by VDPBF16PS: two terms of a
// sum in the time of one in float32.
//
// An instruction adds the odd term, then the even one, each product and sum rounded once. It reads
// and writes subnormals as zero, so the extents of both sides must rule those out: every sum is a
// multiple of the product of the smallest units, and below 2^127. As in product_paths.py, |error|
// <= gamma_(K + 4) S, with factors gamma_(K + 22) S.

#include "common/bf16_multiples.hpp"
#include "conv_pool/lowered_images.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;

constexpr int64_t kColumns = TV * VL;

// A tensor's factor must leave room for the exponents of both sides and their factors.
bool is_factor(float f) { return f > 0x1p-60f && f < 0x1p60f; }

// Pairs of bfloat16 while they are packed: what floats they come from, and their extents.
template <bool Plain>
struct Extents {
    __m512 scale, inverse;
    __m512i least = _mm512_set1_epi32(-1), most = {}, rest = {};

    explicit Extents(float factor)
        : scale(_mm512_set1_ps(factor)), inverse(_mm512_set1_ps(1 / factor)) {}

    // Floats' bfloat16 values, in their upper halves. `rest` gets what these do not hold.
    INLINE __m512i cut(__m512i v) {
        if constexpr (Plain) {
            rest = _mm512_ternarylogic_epi32(rest, v, _mm512_set1_epi32(0xFFFF), 0xF8);
            return v;
        }
        const __m512 value = _mm512_castsi512_ps(v);
        const __m512i y = _mm512_castps_si512(_mm512_mul_ps(value, inverse));
        // To nearest; a value half way between two is none of ours.
        const __m512i n = _mm512_andnot_si512(_mm512_set1_epi32(0xFFFF),
                                              _mm512_add_epi32(y, _mm512_set1_epi32(0x8000)));
        const __mmask16 other = no_multiples(value, n, scale);
        rest = _mm512_mask_or_epi32(rest, other, rest, _mm512_set1_epi32(1));
        return n;
    }

    INLINE void add(__m512i words) {
        const __m512i magnitude = _mm512_and_si512(words, _mm512_set1_epi16(0x7FFF));
        most = _mm512_max_epu16(most, magnitude);
        // A zero becomes the largest.
        least = _mm512_min_epu16(least, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));
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

// Whether v is a bfloat16 times the factor: its bits, in the upper half.
bool cut(float v, float factor, uint32_t& bits) {
    const float y = v / factor;
    std::memcpy(&bits, &y, 4);
    if (factor != 1) bits = (bits + 0x8000u) & 0xFFFF0000u;
    if (bits & 0xFFFFu) return false;
    float value;
    std::memcpy(&value, &bits, 4);
    return factor == 1 || is_multiple(v, value, factor);
}

// Products of elements and NVFP4's block scales have significands of 6 bits: one of them times the
// factor is the first value.
float factor_of(int64_t count, const float* x) {
    constexpr int64_t kLooked = 4096, kSample = 32;
    float sample[kSample];
    int64_t size = 0;
    for (int64_t i = 0; i < least(count, kLooked) && size < kSample; ++i)
        if (x[i] != 0) sample[size++] = x[i];
    const auto serves = [&](float factor) {
        uint32_t bits;
        for (int64_t i = 0; i < size; ++i)
            if (!cut(sample[i], factor, bits)) return false;
        return true;
    };
    if (serves(1)) return 1;
    const float first = __builtin_fabsf(sample[0]);
    if (!is_factor(first)) return 0;
    for (int unit = 32; unit < 64; ++unit)
        if (serves(first / static_cast<float>(unit))) return first / static_cast<float>(unit);
    return 0;
}

void join(Bf16Extent& all, const Bf16Extent& one) {
    all.exact &= one.exact;
    all.least = one.least < all.least ? one.least : all.least;
    all.most = one.most > all.most ? one.most : all.most;
}

// The extent of what body(task) packs for each task, in parallel.
template <class Body>
Bf16Extent joined(int64_t tasks, int64_t work, float factor, Body body) {
    Bf16Extent* each = scratch_of<Bf16Extent>(kPairRows, tasks);
    threads::run(tasks, work, [&](int64_t task) { each[task] = body(task); });
    Bf16Extent all;
    all.factor = factor;
    for (int64_t task = 0; task < tasks; ++task) join(all, each[task]);
    return all;
}

template <bool Plain>
Bf16Extent pack_words(int64_t groups, int64_t o, int64_t taps, const float* packed, float factor,
                      uint32_t* words) {
    const Split outs(o, TO);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return joined(groups * outs.parts, groups * o * taps, factor, [=](int64_t task) {
        Extents<Plain> extents(factor);
        const int64_t first = task / outs.parts * o + outs.start(task % outs.parts);
        const int64_t count = outs.size(task % outs.parts);
        const auto lanes = static_cast<__mmask16>((1u << count) - 1);
        uint32_t* to = words + first * ceil_div(taps, 2);
        for (int64_t t = 0; t < taps; t += 2, to += count) {
            const float* at = packed + first * taps + t * count;
            const __m512i a = extents.cut(_mm512_maskz_loadu_epi32(lanes, at));
            const __m512i b =
                extents.cut(_mm512_maskz_loadu_epi32(t + 1 < taps ? lanes : 0, at + count));
            const __m512i pair =
                _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, upper, 0xF8);
            extents.add(pair);
            _mm512_mask_storeu_epi32(to, lanes, pair);
        }
        return extents.found();
    });
}

Bf16Extent pack_pairs(int64_t groups, int64_t o, int64_t taps, const float* packed,
                      uint32_t* words) {
    const float factor = factor_of(groups * o * taps, packed);
    if (factor == 0) return {0, 0, false};
    return factor == 1 ? pack_words<true>(groups, o, taps, packed, factor, words)
                       : pack_words<false>(groups, o, taps, packed, factor, words);
}

// Pairs of rows, kColumns words each; zeros below the last row and in the last vector.
template <bool Plain>
Bf16Extent pack_rows(const TapRows& m, float factor, uint32_t* to) {
    Extents<Plain> extents(factor);
    const int64_t vectors = ceil_div(m.pixels, VL);
    const auto last = static_cast<__mmask16>((1u << (m.pixels - (vectors - 1) * VL)) - 1);
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    for (int64_t t = 0; t < m.taps; t += 2, to += kColumns) {
        const float* first = m.x + m.offset[t];
        const bool two = t + 1 < m.taps;
        const float* second = two ? m.x + m.offset[t + 1] : first;
        for (int64_t v = 0; v < vectors; ++v) {
            const __mmask16 lanes = v + 1 < vectors ? static_cast<__mmask16>(0xFFFF) : last;
            const __m512i a = extents.cut(_mm512_maskz_loadu_epi32(lanes, first + v * VL));
            const __m512i b =
                extents.cut(_mm512_maskz_loadu_epi32(two ? lanes : 0, second + v * VL));
            const __m512i words =
                _mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, upper, 0xF8);
            extents.add(words);
            _mm512_storeu_si512(to + v * VL, words);
        }
    }
    return extents.found();
}

INLINE __m512bh pairs(const void* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

// As conv_tile in lowered_images.hpp, of rows of pairs; in the end in float32 times the factor,
// + bias, which `fits` does not see.
template <int O, int V, bool Add>
void pair_tile(const uint32_t* x, int64_t count, const uint32_t* w, float factor, const float* bias,
               float* out, int64_t out_stride, int tail) {
    vf acc[O][V];
#pragma GCC unroll 8
    for (int i = 0; i < O; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const float* at = out + i * out_stride + v * VL;
            if (Add)
                acc[i][v] = v == V - 1 ? load_part(at, tail) : load(at);
            else
                acc[i][v] = vf{};
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
        for (int v = 0; v < V; ++v) acc[i][v] = acc[i][v] * factor + bias[i];
#pragma GCC unroll 8
        for (int v = 0; v < V - 1; ++v) store(out + v * VL, acc[i][v]);
        store_part(out + (V - 1) * VL, acc[i][V - 1], tail);
    }
}

using PairTile = void (*)(const uint32_t*, int64_t, const uint32_t*, float, const float*, float*,
                          int64_t, int);

template <bool Add, int... I>
PairTile pair_tile_for(int64_t o, int64_t v, std::integer_sequence<int, I...>) {
    static constexpr PairTile tiles[] = {pair_tile<I / TV + 1, I % TV + 1, Add>...};
    return tiles[(o - 1) * TV + v - 1];
}

bool multiply_pairs(int64_t o, const TapRows& m, float factor, const uint32_t* words,
                    const Bf16Extent& weights, const float* bias, float* out, int64_t out_stride) {
    constexpr int64_t kPairs = 8192 / kColumns;  // 32 KiB
    constexpr std::make_integer_sequence<int, TO * TV> all{};
    const int64_t count = ceil_div(m.taps, 2);
    uint32_t* rows = scratch_of<uint32_t>(kPairRows, count * kColumns);
    if (!is_factor(factor)) return false;
    const Bf16Extent e =
        factor == 1 ? pack_rows<true>(m, factor, rows) : pack_rows<false>(m, factor, rows);
    if (!fits(weights, e, m.taps)) return false;
    constexpr float kZeros[TO] = {};
    const float both = factor * weights.factor;
    const Split outs(o, TO), blocks(count, kPairs);
    const int64_t vectors = ceil_div(m.pixels, VL);
    const int tail = static_cast<int>(m.pixels - (vectors - 1) * VL);
    for (int64_t b = 0; b < blocks.parts; ++b) {
        const int64_t p = blocks.start(b);
        const bool last = b + 1 == blocks.parts;
        for (int64_t op = 0; op < outs.parts; ++op) {
            const int64_t i = outs.start(op), size = outs.size(op);
            const PairTile tile = b ? pair_tile_for<true>(size, vectors, all)
                                    : pair_tile_for<false>(size, vectors, all);
            tile(rows + p * kColumns, blocks.size(b), words + i * count + p * size, last ? both : 1,
                 last ? bias + i : kZeros, out + i * out_stride, out_stride, tail);
        }
    }
    return true;
}

template <bool Plain>
Bf16Extent cut_all(int64_t count, const float* from, float factor, uint16_t* to) {
    Extents<Plain> extents(factor);
    for (int64_t i = 0; i < count; i += VL) {
        const auto lanes = static_cast<__mmask16>((1u << least(VL, count - i)) - 1);
        const __m512i upper =
            _mm512_srli_epi32(extents.cut(_mm512_maskz_loadu_epi32(lanes, from + i)), 16);
        extents.add(upper);
        _mm256_mask_storeu_epi16(to + i, lanes, _mm512_cvtepi32_epi16(upper));
    }
    return extents.found();
}

Bf16Extent cut_all(int64_t count, const float* from, float factor, uint16_t* to) {
    return factor == 1 ? cut_all<true>(count, from, factor, to)
                       : cut_all<false>(count, from, factor, to);
}

Bf16Extent to_bf16(int64_t count, const float* from, uint16_t* to) {
    const float factor = factor_of(count, from);
    if (factor == 0) return {0, 0, false};
    constexpr int64_t kSegment = 1 << 14;
    return joined(ceil_div(count, kSegment), count, factor, [=](int64_t task) {
        const int64_t at = task * kSegment;
        return cut_all(least(kSegment, count - at), from + at, factor, to + at);
    });
}

// As weight_tile in lowered_images.hpp: `count` values of each row, in whole vectors of 32.
template <int O, int T>
void pair_weight_tile(const uint16_t* g, int64_t g_stride, const uint16_t* x, int64_t x_stride,
                      int64_t count, float factor, float* out, int64_t out_stride) {
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
    for (int i = 0; i < O; ++i) {
#pragma GCC unroll 8
        for (int j = 0; j < T; ++j) acc[i][j] *= factor;
        add_sums<T>(acc[i], out + i * out_stride);
    }
}

using PairWeightTile = void (*)(const uint16_t*, int64_t, const uint16_t*, int64_t, int64_t, float,
                                float*, int64_t);

template <int... I>
PairWeightTile pair_weight_tile_for(int64_t o, int64_t t, std::integer_sequence<int, I...>) {
    static constexpr PairWeightTile tiles[] = {pair_weight_tile<I / WT + 1, I % WT + 1>...};
    return tiles[(o - 1) * WT + t - 1];
}

bool correlate_pairs(int64_t o, const TapRows& m, float factor, const uint16_t* g, int64_t g_stride,
                     const Bf16Extent& gradients, float* out, int64_t out_stride) {
    constexpr int64_t kRun = 2048;  // pixels whose gradients stay in the first-level cache
    constexpr std::make_integer_sequence<int, WO * WT> all{};
    if (!is_factor(factor)) return false;
    const int64_t length = round_up(m.pixels, 2 * VL);
    uint16_t* rows = scratch_of<uint16_t>(kPairRows, m.taps * length);
    Bf16Extent e;
    for (int64_t t = 0; t < m.taps; ++t) {
        uint16_t* row = rows + t * length;
        std::memset(row + length - 2 * VL, 0, 4 * VL);
        join(e, cut_all(m.pixels, m.x + m.offset[t], factor, row));
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
                    least(kRun, length - first), factor * gradients.factor,
                    out + i * out_stride + t, out_stride);
            }
        }
    }
    return true;
}

}  // namespace

extern const PairKernels bf16_pair_kernels;
const PairKernels bf16_pair_kernels = {pack_pairs, multiply_pairs, to_bf16, correlate_pairs,
                                       factor_of};

}  // namespace EXTENSOR_ISA
