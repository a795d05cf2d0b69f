// a b^T of two block-scaled matrices on tiles of bfloat16, where every value is exactly a bfloat16;
// and of float32 matrices whose values are bfloat16 times one factor. Compiled for AMX and for
// VDPBF16PS.
//
// TDPBF16PS adds to each of 16 x 16 float32 sums the dot product of 32 values: the 16 even and the
// 16 odd terms each by fused multiply-add from zero in the order of k, then both to the result
// (Intel SDM vol. 2B). It reads and writes subnormals as zero; the caller makes sure that none
// occur. Neither threads nor the blocking change the order, hence no bit.

#include "common/bf16_multiples.hpp"
#include "matmul/block_gemm_tiles.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kTile = 32;   // along k, of one instruction
constexpr int64_t kRun = 1024;  // along k, of one update of the sums

// A source that decodes codes and scales.
struct Codes {
    using Value = uint16_t;
    static constexpr bool transposed = false;
    const BlockedMatrix& m;
    ScaleReader scales;
    int64_t rows, k;
    int bits;
    bool fp8;  // a sign bit above seven bits
    float table[256];
    alignas(64) uint16_t magnitudes[128];  // of FP8, as bfloat16

    Codes(const BlockedMatrix& m, int64_t k)
        : m(m),
          scales(m, k),
          rows(m.rows),
          k(k),
          bits(kElements[m.element].bits),
          fp8(bits == 8 && kElements[m.element].is_float) {
        decode_table(kElements[m.element], table);
        for (int i = 0; fp8 && i < 128; ++i) {
            uint32_t word;
            std::memcpy(&word, table + i, 4);
            magnitudes[i] = static_cast<uint16_t>(word >> 16);
        }
    }

    void tile(int64_t row, int64_t start, uint16_t* to) const {
        for (int64_t r = 0; r < 16; ++r) row_of(row + r, start, to + r * kTile);
    }

private:
    float scale(int64_t row, int64_t at) const {
        const float s = scales(row, at / m.tile_length);
        return s > 0 && s < 0x1p-126f ? 1 : s;  // only zeros have so small a scale here
    }

    // Values start .. start + 32 of a row; zeros where there are none.
    void row_of(int64_t row, int64_t start, uint16_t* to) const {
        const int64_t count = row < m.rows ? least(kTile, k - start) : 0;
        if (count == 0) {
            std::memset(to, 0, kTile * sizeof *to);
            return;
        }
        const uint8_t* codes = m.codes + row * m.row_bytes;
        const int64_t length = m.tile_length;
        const bool one_scale = length % kTile == 0 || length >= k;
        if (fp8 && one_scale && count == kTile)
            return fp8_row(codes + start, splat(scale(row, start)), to);
        alignas(64) uint8_t bytes[kTile] = {};
        if (bits == 4 && count == kTile) {
            const __m128i packed =
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + start / 2));
            const __m128i low = _mm_set1_epi8(15);
            const __m128i even = _mm_and_si128(packed, low);
            const __m128i odd = _mm_and_si128(_mm_srli_epi16(packed, 4), low);
            __m128i* out = reinterpret_cast<__m128i*>(bytes);
            _mm_store_si128(out, _mm_unpacklo_epi8(even, odd));
            _mm_store_si128(out + 1, _mm_unpackhi_epi8(even, odd));
        } else {
            unpack_run(codes, start, count, bits, bytes);
        }
        vf factor[2];
        if (one_scale) {
            factor[0] = factor[1] = splat(scale(row, start));
        } else if (length == 16) {
            factor[0] = splat(scale(row, start));
            factor[1] = count > 16 ? splat(scale(row, start + 16)) : factor[0];
        } else {
            float each[kTile] = {};
            for (int64_t i = 0; i < count; ++i) each[i] = scale(row, start + i);
            factor[0] = load(each), factor[1] = load(each + VL);
        }
        for (int half = 0; half < 2; ++half) {
            const __m512i index = _mm512_cvtepu8_epi32(
                _mm_load_si128(reinterpret_cast<const __m128i*>(bytes + half * VL)));
            const __m512 value = bits == 4 ? _mm512_permutexvar_ps(index, _mm512_loadu_ps(table))
                                           : _mm512_i32gather_ps(index, table, 4);
            const __m512i scaled = _mm512_castps_si512(value * factor[half]);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + half * VL),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32(scaled, 16)));
        }
        // A code of zero beyond the row's end would still meet a NaN scale.
        if (count < kTile)
            std::memset(to + count, 0, static_cast<size_t>(kTile - count) * sizeof *to);
    }

    // A whole row of FP8 codes, looked up in registers: 64 of the table's entries at a time.
    void fp8_row(const uint8_t* codes, vf factor, uint16_t* to) const {
        const auto entries = [&](int i) { return _mm512_load_si512(magnitudes + 32 * i); };
        const __m512i code =
            _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
        const __m512i low = _mm512_permutex2var_epi16(entries(0), code, entries(1)),
                      high = _mm512_permutex2var_epi16(entries(2), code, entries(3));
        const __mmask32 upper = _mm512_test_epi16_mask(code, _mm512_set1_epi16(0x40));
        const __m512i sign = _mm512_slli_epi16(_mm512_srli_epi16(code, 7), 15);
        const __m512i value = _mm512_or_si512(_mm512_mask_blend_epi16(upper, low, high), sign);
        const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
        const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(value, 16)),
                     odd = _mm512_castsi512_ps(_mm512_and_si512(value, mask));
        const __m512i first = _mm512_castps_si512(even * factor),
                      second = _mm512_castps_si512(odd * factor);
        _mm512_storeu_si512(
            to, _mm512_or_si512(_mm512_srli_epi32(first, 16), _mm512_and_si512(second, mask)));
    }
};

// The bits of the bfloat16 nearest to each of v / factor, times 2^16.
INLINE __m512i nearest_bf16(__m512i v, __m512 inverse) {
    const __m512i y = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(v), inverse));
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(y, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(y, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
    return _mm512_andnot_si512(_mm512_set1_epi32(0xFFFF), sum);
}

// A source of float32 values that are bfloat16 times a factor. `by_rows`: k is contiguous, else the
// rows are.
struct Values {
    using Value = uint16_t;
    const float* x;
    int64_t rows, k;
    bool transposed, plain;
    __m512 inverse;

    Values(const float* x, int64_t rows, int64_t k, bool by_rows, float factor)
        : x(x),
          rows(rows),
          k(k),
          transposed(!by_rows),
          plain(factor == 1),
          inverse(_mm512_set1_ps(1 / factor)) {}

    void tile(int64_t row, int64_t start, uint16_t* to) const {
        for (int64_t row_of = 0; row_of < 16; ++row_of, to += kTile) {
            __m512i even, odd;
            if (transposed) {
                const int64_t count = least(VL, rows - row), at = start + 2 * row_of;
                even = at < k ? bits(x + at * rows + row, count) : __m512i{};
                odd = at + 1 < k ? bits(x + (at + 1) * rows + row, count) : __m512i{};
                _mm512_storeu_si512(to, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
            } else {
                const float* from = x + (row + row_of) * k + start;
                const int64_t count = row + row_of < rows ? least(kTile, k - start) : 0;
                for (int64_t half = 0; half < 2; ++half) {
                    const __m512i v = bits(from + half * VL, most(0, least(VL, count - half * VL)));
                    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + half * VL),
                                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
                }
            }
        }
    }

private:
    __m512i bits(const float* p, int64_t count) const {
        const __m512i v = _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), p);
        return plain ? v : nearest_bf16(v, inverse);
    }
};

#if defined(__AMX_TILE__)
using Scope = TileRegisters;

void add(const TileUpdate& v) {
    const int64_t stride = v.stride * 4;
    if (v.first) {
        zero_sums();
    } else {
        const float *c0 = v.c, *c1 = v.c + 16 * v.stride;
        _tile_loadd(0, c0, stride);
        _tile_loadd(1, c0 + 16, stride);
        _tile_loadd(2, c1, stride);
        _tile_loadd(3, c1 + 16, stride);
    }
    add_products<uint16_t>(v);
    store_sums(v.c, stride);
}
#else
using Scope = NoScope;

void add(const TileUpdate& v) {
    constexpr int kRows = 8;
    const auto *a = static_cast<const uint8_t*>(v.a), *b = static_cast<const uint8_t*>(v.b);
    for (int64_t row = 0; row < kHeight; row += kRows)
        add_pairs<kRows>(a + row / 16 * kTileBytes + row % 16 * kRowBytes, b, v.steps,
                         v.c + row * v.stride, v.stride, v.first);
}
#endif

template <class Source>
void multiply(const BlockGemm& g, const Source& left, const Source& right) {
    Side<Source> a(left, g.k, false), b(right, g.k, true);
    product<Scope>(g, {kHeight, a.row_bytes(), kRun, task_rows(2 * kRun), kTaskPanels}, a, b,
                   [&](const Side<Source>& b, int64_t pa, int64_t pb, int64_t start, int64_t rows,
                       int64_t columns, float* out) {
                       TileUpdate v = tile_update(a, b, pa, pb, start, kRun);
                       on_output(v, out, g.b.rows, rows, columns, kHeight, add);
                   });
}

void bf16(const BlockGemm& g) { multiply(g, Codes(g.a, g.k), Codes(g.b, g.k)); }

void bf16_values(const ValueGemm& v) {
    BlockGemm g{};
    g.a.rows = v.m, g.b.rows = v.n, g.k = v.k, g.out = v.out;
    g.a.tensor_scale = v.a_factor, g.b.tensor_scale = v.b_factor;
    multiply(g, Values(v.a, v.m, v.k, v.a_by_rows, v.a_factor),
             Values(v.b, v.n, v.k, v.b_by_rows, v.b_factor));
}

// Candidates for the factor: what the largest magnitude of a tensor with one float32 scale is a
// multiple of, but for powers of two. 448 * 6 and 256 * 6 in NVFP4; 448, 57344 and 7 in FP8 and
// INT4; 127 in INT8; 1, 1.25 or 1.5 times 1 or 1.5 in NVFP4 that FP8 holds.
constexpr float kTops[] = {1.3125f, 1.5f, 1.75f, 1.984375f, 1.125f, 1.875f, 1.25f, 1};

// Exponents of values, least and largest, and the largest magnitude: all as bits.
struct Extent {
    __m512i low = _mm512_set1_epi32(0x7F800000), high = {}, top = {};

    INLINE void add(__m512i v) {
        const __m512i mask = _mm512_set1_epi32(0x7F800000), rest = _mm512_set1_epi32(0x7FFFFFFF);
        const __m512i exponent = _mm512_and_si512(v, mask);
        low = _mm512_mask_min_epu32(low, _mm512_test_epi32_mask(v, rest), low, exponent);
        high =
            _mm512_mask_max_epu32(high, _mm512_cmpneq_epi32_mask(exponent, mask), high, exponent);
        top = _mm512_max_epu32(top, _mm512_and_si512(v, rest));
    }
};

struct Found {
    uint32_t wrong, low, high, top;
};

// Reads x in segments, each vector through `as_bf16(bits, lanes that are wrong)`. `stop`: a segment
// ends at its first wrong value.
template <class AsBf16>
Found search(const float* x, int64_t count, bool stop, AsBf16 as_bf16) {
    constexpr int64_t kSegment = 1 << 16;
    const int64_t segments = ceil_div(count, kSegment);
    Found* found = scratch_of<Found>(Slot::maxima, segments);
    threads::run(segments, count, [&](int64_t segment) {
        Extent extent;
        __m512i wrong = {};
        const int64_t end = least(count, (segment + 1) * kSegment);
        for (int64_t i = segment * kSegment; i < end; i += VL) {
            const auto lanes = static_cast<__mmask16>((1u << least(VL, end - i)) - 1);
            extent.add(as_bf16(_mm512_maskz_loadu_epi32(lanes, x + i), wrong));
            if (stop && _mm512_test_epi32_mask(wrong, wrong)) break;
        }
        found[segment] = {static_cast<uint32_t>(_mm512_reduce_or_epi32(wrong)),
                          _mm512_reduce_min_epu32(extent.low), _mm512_reduce_max_epu32(extent.high),
                          _mm512_reduce_max_epu32(extent.top)};
    });
    Found all = {0, 0x7F800000, 0, 0};
    for (int64_t i = 0; i < segments; ++i) {
        all.wrong |= found[i].wrong;
        all.low = found[i].low < all.low ? found[i].low : all.low;
        all.high = found[i].high > all.high ? found[i].high : all.high;
        all.top = found[i].top > all.top ? found[i].top : all.top;
    }
    return all;
}

ValueRange bf16_range(const float* x, int64_t count) {
    const auto result = [](float factor, const Found& f) {
        return ValueRange{factor, static_cast<int>(f.low >> 23) - 127,
                          static_cast<int>(f.high >> 23) - 127};
    };
    const Found plain = search(x, count, false, [](__m512i v, __m512i& wrong) {
        wrong = _mm512_or_si512(wrong, _mm512_and_si512(v, _mm512_set1_epi32(0xFFFF)));
        return v;
    });
    if (!plain.wrong) return result(1, plain);
    // A factor and its inverse that are normal, and bits that multiply without losing any.
    if (plain.top < 0x20000000u || plain.top > 0x5F000000u) return result(0, plain);
    for (const float unit : kTops) {
        const float factor = as_float(plain.top) / unit;
        const __m512 scale = _mm512_set1_ps(factor), inverse = _mm512_set1_ps(1 / factor);
        const Found scaled = search(x, count, true, [&](__m512i v, __m512i& wrong) {
            const __m512i nearest = nearest_bf16(v, inverse);
            const __mmask16 bad = no_multiples(_mm512_castsi512_ps(v), nearest, scale);
            wrong = _mm512_or_si512(wrong, _mm512_maskz_set1_epi32(bad, 1));
            return nearest;
        });
        if (!scaled.wrong) return result(factor, scaled);
    }
    return result(0, plain);
}

}  // namespace

#if defined(__AMX_TILE__)
void amx_int8_product(const BlockGemm&);  // block_gemm_amx_int8.cpp
#else
constexpr auto amx_int8_product = nullptr;
#endif

extern const TileKernels tile_kernels;
const TileKernels tile_kernels = {bf16, bf16_values, bf16_range, amx_int8_product};

}  // namespace EXTENSOR_ISA
