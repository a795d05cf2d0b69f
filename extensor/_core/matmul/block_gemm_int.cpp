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

#include "matmul/integer_panels.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int kRows =
    VL == 16 ? 6 : 2;  // of an integer tile; a product of one row has tiles of one

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
template <int MI, bool Narrow, bool Zero, bool Exact, int Words>
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

template <int MI, bool Narrow>
IntegerTileFunction integer_function(bool zero, bool exact, int64_t step) {
    if (zero) return integer_tile<MI, Narrow, true, false, 0>;
    if (!exact) return integer_tile<MI, Narrow, false, false, 0>;
    return step == 32   ? integer_tile<MI, Narrow, false, true, 8>
           : step == 16 ? integer_tile<MI, Narrow, false, true, 4>
                        : integer_tile<MI, Narrow, false, true, 0>;
}

template <int MI>
void product_of_rows(const BlockGemm& g) {
    IntegerSide a(g.a, g.k, g.step, MI, false), b(g.b, g.k, g.step, NR, true);
    const bool zero = g.a.zero_points || g.b.zero_points;
    a.other_offset = zero ? 0 : b.offset, b.sums = zero;
    const auto largest = static_cast<float>(a.table.lowest * b.table.lowest);
    const auto digits = [](const BlockedMatrix& m) {
        return m.scale == Scale::ue4m3 ? 15.0f : 1.0f;
    };
    const bool exact = is_byte(g.a.scale) && is_byte(g.b.scale) &&
                       largest * static_cast<float>(g.step) * digits(g.a) * digits(g.b) <= 16777216;
    const auto function = 4 * largest <= 32767 ? integer_function<MI, true>(zero, exact, g.step)
                                               : integer_function<MI, false>(zero, exact, g.step);
    const int64_t run = a.run();
    product(g, {MI, a.blocks * g.step, run}, a, b,
            [&](const IntegerSide& b, int64_t pa, int64_t pb, int64_t start, int64_t rows,
                int64_t columns, float* out) {
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

void integer(const BlockGemm& g) {
    g.a.rows == 1 ? product_of_rows<1>(g) : product_of_rows<kRows>(g);
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
