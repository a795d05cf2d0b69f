// a b^T of two block-scaled matrices of small integers: decoded once into packed panels, then
// multiplied from the caches (other elements: block_gemm_float.cpp).
//
// Integers (2 x E2M1 is one) are multiplied and summed exactly in int32 over `step` elements that
// share both scales. Each such sum times the product of its scales is added in float32, in the
// order of k. That order never depends on the level or the threads, and the two roundings of a
// float-scaled term are kept apart (an exact term needs none), so all levels give the same bits.
//
// b's integers are stored with an offset, since the dot-product instructions want one unsigned
// operand; the sums start from minus the offset times the sum of a's integers.

#include "common/lanes.hpp"
#include "matmul/block_gemm.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int MI = VL == 16 ? 6 : 2;  // rows of an integer tile
constexpr int64_t kRun = 1024;        // along k, that a tile adds up at a time; one step at least

INLINE vi splat_int(int32_t x) { return x - vi{}; }

// sum + the dot product of four bytes in each lane, b's unsigned and a's signed. Narrow: no sum of
// two products leaves int16.
template <bool Narrow>
INLINE vi dot(vi sum, vi b, vi a) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<vi>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                    reinterpret_cast<__m512i>(b),
                                                    reinterpret_cast<__m512i>(a)));
#elif defined(__AVXVNNI__)
    return reinterpret_cast<vi>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum),
                                                        reinterpret_cast<__m256i>(b),
                                                        reinterpret_cast<__m256i>(a)));
#elif defined(__AVX512BW__)
    const __m512i x = reinterpret_cast<__m512i>(b), y = reinterpret_cast<__m512i>(a);
    if constexpr (Narrow)
        return sum + reinterpret_cast<vi>(
                         _mm512_madd_epi16(_mm512_maddubs_epi16(x, y), _mm512_set1_epi16(1)));
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(y, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(y, 8));
    return sum + reinterpret_cast<vi>(even) + reinterpret_cast<vi>(odd);
#elif defined(__AVX2__)
    const __m256i x = reinterpret_cast<__m256i>(b), y = reinterpret_cast<__m256i>(a);
    if constexpr (Narrow)
        return sum + reinterpret_cast<vi>(
                         _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), _mm256_set1_epi16(1)));
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    return sum + reinterpret_cast<vi>(even) + reinterpret_cast<vi>(odd);
#else
    for (int shift = 0; shift < 32; shift += 8)
        sum += ((b >> shift) & 255) * static_cast<int32_t>(static_cast<int8_t>(a[0] >> shift));
    return sum;
#endif
}

INLINE vi load_int(const int32_t* p) { return *reinterpret_cast<const vi_any*>(p); }

// ---- integer panels ----

// One packed matrix, in panels of `width` rows: [panel][k / 4][width] words of four bytes, and per
// block [panel][block][width] of everything else.
struct IntegerSide {
    const BlockedMatrix& m;
    ScaleReader scales;
    int width;
    int64_t k, step, blocks;
    IntegerTable table;
    int offset;  // added to every element
    Slot slot;
    int32_t* words;
    float* scale;
    // Without zero points: what a sum starts from. With them: the zero points, and sums of the
    // elements (on the offset side less the zero point).
    int32_t *sum, *zero;
    int other_offset = 0;  // of the other matrix, where there are no zero points

    IntegerSide(const BlockedMatrix& m, int64_t k, int64_t step, int width, bool unsigned_side)
        : m(m),
          scales(m, k),
          width(width),
          k(k),
          step(step),
          blocks(ceil_div(k, step)),
          table(kElements[m.element]),
          offset(unsigned_side ? -table.lowest : 0),
          slot(unsigned_side ? Slot::packed_b : Slot::packed_a) {
        for (int8_t& value : table.values) value = static_cast<int8_t>(value + offset);
    }

    int64_t run() const { return most(1, kRun / step) * step; }

    int64_t panel_words() const { return blocks * step / 4 * width; }
    int64_t panel_blocks() const { return blocks * width; }

    void allocate(int64_t panels) {
        const int64_t w = panels * panel_words(), b = panels * panel_blocks();
        words = scratch_of<int32_t>(slot, w + 3 * b);
        scale = reinterpret_cast<float*>(words + w);
        sum = words + w + b;
        zero = sum + b;
    }

    // Rows first .. of the matrix into panel `panel` of the buffer.
    void pack(int64_t panel, int64_t first) const {
        const int64_t run = this->run();
        int8_t* rows = scratch_of<int8_t>(Slot::codes, width * run);
        int32_t* to = words + panel * panel_words();
        const int64_t n = least(width, m.rows - first);
        for (int64_t start = 0; start < blocks * step; start += run) {
            const int64_t length = least(run, blocks * step - start);
            const int64_t real = most(0, least(length, k - start));
            for (int64_t r = 0; r < width; ++r) {
                int8_t* row = rows + r * run;
                if (r >= n) {
                    std::memset(row, 0, static_cast<size_t>(length));
                } else {
                    lookup_run(m.codes + (first + r) * m.row_bytes, start, real,
                               kElements[m.element].bits, table.values, row);
                    std::memset(row + real, 0, static_cast<size_t>(length - real));
                }
                const int64_t scales_at = r < n ? scales.at(first + r, 0) : -1;
                for (int64_t t = 0, block = start / step; t < length; t += step, ++block)
                    describe(panel, block, r, scales_at, row + t);
            }
            int64_t done = 0;
            for (; width % VL == 0 && done + VL <= length / 4; done += VL)
                for (int64_t r = 0; r < width; r += VL)
                    transpose_words(rows + r * run + 4 * done, run, to + done * width + r);
            for (int64_t i = done; i < length / 4; ++i)
                for (int64_t r = 0; r < width; ++r)
                    std::memcpy(to + i * width + r, rows + r * run + 4 * i, 4);
            to += length / 4 * width;
        }
    }

private:
    // VL words of VL rows, `run` bytes apart, to words of their rows side by side.
    void transpose_words(const int8_t* rows, int64_t run, int32_t* to) const {
        vf words[VL];
#pragma GCC unroll 16
        for (int r = 0; r < VL; ++r)
            words[r] = load(reinterpret_cast<const float*>(rows + r * run));
        transpose(words);
#pragma GCC unroll 16
        for (int i = 0; i < VL; ++i) store(reinterpret_cast<float*>(to + i * width), words[i]);
    }

    // `scales_at`: of the row's first scale, or -1 beyond the last row.
    void describe(int64_t panel, int64_t block, int64_t r, int64_t scales_at,
                  const int8_t* bytes) const {
        const int64_t at = panel * panel_blocks() + block * width + r;
        const int64_t count = least(step, k - block * step);
        int32_t total = 0, any = 0;
        int64_t i = 0;
#if defined(__AVX2__)
        // Sums of 32 bytes are those of bytes without a sign, less 128 each or the offset.
        const __m256i flip = _mm256_set1_epi8(offset ? 0 : -128);
        const __m256i zeros = _mm256_set1_epi8(static_cast<char>(offset));
        for (; i + 32 <= count; i += 32) {
            const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
            const __m256i four = _mm256_sad_epu8(_mm256_xor_si256(v, flip), __m256i{});
            const __m128i two =
                _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
            total +=
                _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 2) - 32 * (offset ? offset : 128);
            any |= !_mm256_testz_si256(_mm256_xor_si256(v, zeros), _mm256_xor_si256(v, zeros));
        }
#endif
        for (; i < count; ++i) {
            const int32_t value = offset ? static_cast<uint8_t>(bytes[i]) - offset : bytes[i];
            total += value, any |= value;
        }
        if (scales_at < 0) {
            scale[at] = 0, sum[at] = 0, zero[at] = 0;
            return;
        }
        const int64_t tile =
            scales_at + (m.tile_length == step ? block : block * step / m.tile_length);
        float s = scale_value(m.scale, m.scales, tile, scales.ue4m3);
        zero[at] = 0;
        if (m.zero_points) {
            zero[at] = m.zero_points[tile];
        } else if (!any && s - s == 0) {
            s = 1;  // zeros: spares multiplying by the subnormal 2**-127
        }
        scale[at] = s * table.unit;
        sum[at] = offset         ? total - static_cast<int32_t>(count) * zero[at]
                  : other_offset ? -other_offset * total
                                 : total;
        zero[at] += offset;
    }
};

// ---- integer tiles ----

struct IntegerTile {
    const int32_t *a, *b;            // words, at this run of k
    const float *a_scale, *b_scale;  // per block
    const int32_t *a_sum, *b_sum, *a_zero, *b_zero;
    int64_t blocks, words;  // of this run; words of k per block
    float* c;
    int64_t stride;
    bool first;
};

// Words: along k per block, or 0 where only known at run time.
template <bool Narrow, bool Zero, bool Exact, int Words>
void integer_tile(const IntegerTile& t) {
    vf total[MI][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MI; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v)
            total[r][v] = t.first ? vf{} : load(t.c + r * t.stride + v * VL);
    const int32_t *a = t.a, *b = t.b;
    for (int64_t block = 0; block < t.blocks; ++block) {
        vi sum[MI][NV];
        const int64_t ia = block * MI, ib = block * NR;
#pragma GCC unroll 8
        for (int r = 0; r < MI; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < NV; ++v) {
                // (a - za)(b' - zb), b' and zb with the offset: what the words' product leaves out.
                if constexpr (Zero)
                    sum[r][v] = -(load_int(t.b_zero + ib + v * VL) * t.a_sum[ia + r] +
                                  load_int(t.b_sum + ib + v * VL) * t.a_zero[ia + r]);
                else
                    sum[r][v] = splat_int(t.a_sum[ia + r]);
            }
        }
        const int64_t words = Words ? Words : t.words;
#pragma GCC unroll 8
        for (int64_t i = 0; i < words; ++i, a += MI, b += NR) {
            const vi b0 = load_int(b), b1 = load_int(b + VL);
#pragma GCC unroll 8
            for (int r = 0; r < MI; ++r) {
                const vi word = splat_int(a[r]);
                sum[r][0] = dot<Narrow>(sum[r][0], b0, word);
                sum[r][1] = dot<Narrow>(sum[r][1], b1, word);
            }
        }
        const vf s0 = load(t.b_scale + ib), s1 = load(t.b_scale + ib + VL);
#pragma GCC unroll 8
        for (int r = 0; r < MI; ++r) {
            const vf s = splat(t.a_scale[ia + r]);
            const vf x0 = __builtin_convertvector(sum[r][0], vf);
            const vf x1 = __builtin_convertvector(sum[r][1], vf);
            if constexpr (Exact) {
                total[r][0] = multiply_add(x0, s0 * s, total[r][0]);
                total[r][1] = multiply_add(x1, s1 * s, total[r][1]);
            } else {
                total[r][0] += x0 * (s0 * s);
                total[r][1] += x1 * (s1 * s);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < MI; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < NV; ++v) store(t.c + r * t.stride + v * VL, total[r][v]);
}

using IntegerTileFunction = void (*)(const IntegerTile&);

template <bool Narrow>
IntegerTileFunction integer_function(bool zero, bool exact, int64_t step) {
    if (zero) return integer_tile<Narrow, true, false, 0>;
    if (!exact) return integer_tile<Narrow, false, false, 0>;
    return step == 32   ? integer_tile<Narrow, false, true, 8>
           : step == 16 ? integer_tile<Narrow, false, true, 4>
                        : integer_tile<Narrow, false, true, 0>;
}

void integer(const BlockGemm& g) {
    IntegerSide a(g.a, g.k, g.step, MI, false), b(g.b, g.k, g.step, NR, true);
    const bool zero = g.a.zero_points || g.b.zero_points;
    a.other_offset = zero ? 0 : b.offset;
    const auto largest = static_cast<float>(a.table.lowest * b.table.lowest);
    const auto digits = [](const BlockedMatrix& m) {
        return m.scale == Scale::ue4m3 ? 15.0f : 1.0f;
    };
    const bool exact = is_byte(g.a.scale) && is_byte(g.b.scale) &&
                       largest * static_cast<float>(g.step) * digits(g.a) * digits(g.b) <= 16777216;
    const auto function = 4 * largest <= 32767 ? integer_function<true>(zero, exact, g.step)
                                               : integer_function<false>(zero, exact, g.step);
    const int64_t run = a.run();
    product(g, {MI, a.blocks * g.step, run}, a, b,
            [&](int64_t pa, int64_t pb, int64_t start, int64_t rows, int64_t columns, float* out) {
                IntegerTile t;
                const int64_t block = start / g.step;
                t.a = a.words + pa * a.panel_words() + start / 4 * MI;
                t.b = b.words + pb * b.panel_words() + start / 4 * NR;
                const int64_t ia = pa * a.panel_blocks() + block * MI;
                const int64_t ib = pb * b.panel_blocks() + block * NR;
                t.a_scale = a.scale + ia, t.a_sum = a.sum + ia, t.a_zero = a.zero + ia;
                t.b_scale = b.scale + ib, t.b_sum = b.sum + ib, t.b_zero = b.zero + ib;
                t.blocks = least(run / g.step, a.blocks - block), t.words = g.step / 4;
                t.first = start == 0;
                on_output(t, out, g.b.rows, rows, columns, MI, function);
            });
}

}  // namespace

}  // namespace EXTENSOR_ISA

// No dot-product instruction helps these: a level with such instructions takes its base's.
namespace EXTENSOR_BASE {
void float_product(const BlockGemm&);         // block_gemm_float.cpp
void weight_only_product(const WeightGemm&);  // weight_only.cpp
}  // namespace EXTENSOR_BASE

namespace EXTENSOR_ISA {

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {integer, EXTENSOR_BASE::float_product,
                                  EXTENSOR_BASE::weight_only_product};

}  // namespace EXTENSOR_ISA
