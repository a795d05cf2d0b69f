// Few float32 rows times weights of 4, 6 or 8 bits on dot products of bytes (AVX-512 VNNI and
// VBMI): what decoding text repeats. Several weights beside the same rows are one job for the
// threads, and the rows are rounded once. Weights are decoded once for up to four rows, and a row
// of results has the same bits beside any others.
//
// A vector of words holds eight 4-bit codes a lane, or four others. The x of a lane become integers
// of 24 bits times a power of two, stored as three signed bytes each, so an element of x is off by
// at most 2^-23 of its lane's largest (or 2^-127). Weights are small integers, looked up. A lane's
// sum is exact, and rounds once to float32; scales multiply it there.

#include <vector>

#include "matmul/one_row_avx512.hpp"

#define INLINED __attribute__((always_inline))

namespace EXTENSOR_ISA {
namespace {

constexpr int kDigits = 3;
// Bytes ahead of the codes in use that are asked for, into the second cache: the first waits for
// few lines at a time.
constexpr int64_t kAhead = 16384;
// Of x; with more, decoding once for all is faster (measured). Six bits take longest to decode,
// which shows in long rows.
constexpr int64_t kMostRows = 8, kMostRows6 = 16, kLongRow = 256;
constexpr float kMost = 8355711;  // 127 (2^16 + 2^8 + 1), the largest integer of three such bytes

// The weights of a format as bytes to look up: value = unit * (byte - zero).
struct Lookup {
    alignas(64) uint8_t bytes[64];
    int zero = 0;
    float unit = 1;
};

// Whether every value is a signed byte times one unit: not of E3M2 and FP8.
bool fits_byte(const Element& e) {
    return !e.is_float || e.emax + 1 - e.min_exponent + e.mantissa_bits < 8;
}

Lookup lookup_of(const BlockedMatrix& w) {
    const Element& e = kElements[w.element];
    Lookup t;
    float values[256];
    decode_table(e, values);
    if (e.is_float) t.unit = power_of_two(e.min_exponent - e.mantissa_bits);
    int integers[64], largest = 0;
    for (int i = 0; i < 64; ++i) {
        integers[i] = static_cast<int>(values[i % (1 << e.bits)] / t.unit);
        largest = integers[i] > largest ? integers[i] : largest;
    }
    // Codes with a minimum count from the least one.
    t.zero = e.is_float ? largest : 1 << (e.bits - 1);
    for (int i = 0; i < 64; ++i) t.bytes[i] = static_cast<uint8_t>(integers[i] + t.zero);
    if (w.minimums) t.zero = 0;
    return t;
}

// x in chunks of one vector of codes. Each chunk: bytes of the digits, most significant first; with
// four bits those of a lane's even elements, then of its odd ones; integers that the sums of
// unsigned weights begin with; each lane's power of two, and its sum of x.
template <int Bits>
struct PackedRows {
    static constexpr int lane = Bits == 4 ? 8 : 4, parts = lane / 4;
    static constexpr int64_t chunk = lane * VL;
    struct Chunk {
        int8_t digits[kDigits][parts][4 * VL];
        int32_t first[Bits == 8 ? 2 : 1][VL];
        float unit[VL], sum[VL];
    };
    int64_t count, sums;  // chunks of a row, and sums
    Chunk* chunks;
    float* tile_sums;  // of x, zeros after the last

    PackedRows(const float* x, int64_t rows, int64_t k, int64_t tile, const Lookup& table)
        : count(ceil_div(k, chunk)), sums(round_up(ceil_div(k, tile), VL)) {
        const int64_t bytes = count * static_cast<int64_t>(sizeof(Chunk)) + 4 * sums;
        chunks = static_cast<Chunk*>(threads::scratch(threads::Slot::packed_a, rows * bytes));
        tile_sums = reinterpret_cast<float*>(chunks + rows * count);
        std::memset(tile_sums, 0, static_cast<size_t>(4 * rows * sums));
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t c = 0; c < count; ++c) {
                Chunk& to = chunks[r * count + c];
                for (int v = 0; v < lane; ++v)
                    pack(load_at(x + r * k, c * chunk + v * VL, k), to, v, table);
                for (int l = 0; l < VL && c * chunk + l * lane < k; ++l)
                    tile_sums[r * sums + (c * chunk + l * lane) / tile] += to.sum[l];
            }
    }

private:
    // In each element: f over the elements of its lane.
    template <class F>
    static INLINE __m512i over_lane(__m512i v, F f) {
        v = f(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
        v = f(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
        return lane == 4 ? v : f(v, _mm512_shuffle_i64x2(v, v, 0b10110001));
    }
    static INLINE __m512i lane_sum(__m512i v) {
        return over_lane(v, [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); });
    }
    // A vector with one value for each lane goes to values[vector * lanes of a vector].
    static INLINE void store_lanes(void* values, int vector, __m512i v) {
        constexpr int kLanes = VL / lane;
        constexpr auto kFirst = static_cast<__mmask16>(lane == 8 ? 0x0101 : 0x1111);
        // Compressed in a register: a compressing store takes 150 cycles on Zen 4.
        const __m512i found = _mm512_maskz_compress_epi32(kFirst, v);
        std::memcpy(static_cast<int32_t*>(values) + vector * kLanes, &found, 4 * kLanes);
    }

    // Elements vector * VL .. of the chunk.
    static INLINE void pack(vf values, Chunk& to, int vector, const Lookup& table) {
        const __m512i largest =
            over_lane(_mm512_and_si512(reinterpret_cast<__m512i>(values),
                                       _mm512_set1_epi32(static_cast<int>(kMagnitude))),
                      [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
        const auto power = [](__m512i n) __attribute__((always_inline)) {
            return reinterpret_cast<vf>(
                _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
        };
        __m512i shift = _mm512_min_epi32(
            _mm512_sub_epi32(_mm512_set1_epi32(22 + 127), _mm512_srli_epi32(largest, 23)),
            _mm512_set1_epi32(126));
        const __mmask16 beyond = _mm512_cmp_ps_mask(reinterpret_cast<vf>(largest) * power(shift),
                                                    splat(kMost), _CMP_GT_OQ);
        shift = _mm512_mask_sub_epi32(shift, beyond, shift, _mm512_set1_epi32(1));
        const vf down = power(_mm512_sub_epi32(_mm512_setzero_si512(), shift));
        __m512i left = _mm512_cvtps_epi32(values * power(shift)), sums[kDigits];  // to nearest
        const __m512i sum = lane_sum(left);
#pragma GCC unroll 3
        for (int d = kDigits - 1; d >= 0; --d) {
            const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(left, 24), 24);
            left = _mm512_srai_epi32(_mm512_sub_epi32(left, digit), 8);
            __m128i bytes = _mm512_cvtepi32_epi8(digit);
            int8_t* at = to.digits[d][0] + vector * 4 * (VL / lane);
            if constexpr (parts == 1) {
                sums[d] = lane_sum(digit);
                _mm_storeu_si128(reinterpret_cast<__m128i*>(at), bytes);
            } else {
                bytes = _mm_shuffle_epi8(
                    bytes, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
                _mm_storel_epi64(reinterpret_cast<__m128i*>(at), bytes);
                _mm_storeh_pd(reinterpret_cast<double*>(at + 4 * VL), _mm_castsi128_pd(bytes));
            }
        }
        const auto times = [](int factor, __m512i v) __attribute__((always_inline)) {
            return _mm512_mullo_epi32(_mm512_set1_epi32(-factor), v);
        };
        if constexpr (Bits == 8) {
            const __m512i upper = _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]);
            store_lanes(to.first[0], vector, times(table.zero, upper));
            store_lanes(to.first[1], vector, times(table.zero, sums[2]));
        } else {
            store_lanes(to.first[0], vector, times(table.zero, sum));
        }
        store_lanes(to.unit, vector, reinterpret_cast<__m512i>(down * table.unit));
        store_lanes(to.sum, vector, reinterpret_cast<__m512i>(_mm512_cvtepi32_ps(sum) * down));
    }
};

INLINE __m512i dot(__m512i sum, __m512i unsigned_bytes, const int8_t* bytes) {
    return _mm512_dpbusd_epi32(sum, unsigned_bytes, _mm512_load_si512(bytes));
}

INLINE vf to_float(__m512i v) { return _mm512_cvtepi32_ps(v); }

// The same step for all rows of weights before the next one: a dot product takes four cycles, and
// one row's steps wait for each other.
constexpr int R = kGroupRows;
using Rows = __m512i[R];
template <class F>
INLINE void each_row(F f) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) f(r);
}

// `first` and the lanes' sums of weights times x, of all digits.
template <int Parts, class Chunk>
INLINE void lane_sums(const Rows (&w)[Parts], const Chunk& x, const int32_t* first, Rows& sum) {
    each_row([&](int r) INLINED { sum[r] = __m512i{}; });
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) {
        if (d) each_row([&](int r) INLINED { sum[r] = _mm512_slli_epi32(sum[r], 8); });
        if (d == kDigits - 1 && first) {
            const __m512i more = _mm512_load_si512(first);
            each_row([&](int r) INLINED { sum[r] = _mm512_add_epi32(sum[r], more); });
        }
#pragma GCC unroll 2
        for (int p = 0; p < Parts; ++p)
            each_row([&](int r) INLINED { sum[r] = dot(sum[r], w[p][r], x.digits[d][p]); });
    }
}

// What decodes 64 bytes of codes of each row, or 48, to vectors of bytes, and multiplies these.
// `HasFirst`: whether the chunk's first integers are not all zero.
struct Codes4 {
    static constexpr int bits = 4, vectors = 2;
    __m512i table;  // the sixteen values four times: of an index the low four bits count
    explicit Codes4(const Lookup& t) : table(_mm512_load_si512(t.bytes)) {}
    INLINE void decode(const Rows& words, Rows (&w)[vectors]) const {
        each_row([&](int r) INLINED {
            w[0][r] = _mm512_permutexvar_epi8(words[r], table);
            w[1][r] = _mm512_permutexvar_epi8(_mm512_srli_epi16(words[r], 4), table);
        });
    }
    template <bool HasFirst, class Chunk>
    INLINE void multiply(const Rows (&w)[vectors], const Chunk& x, vf (&part)[R]) const {
        Rows sum;
        lane_sums(w, x, HasFirst ? x.first[0] : nullptr, sum);
        each_row([&](int r) INLINED { part[r] = to_float(sum[r]); });
    }
};

struct Integers8 {
    static constexpr int bits = 8, vectors = 1;
    explicit Integers8(const Lookup&) {}
    INLINE void decode(const Rows& words, Rows (&w)[vectors]) const {
        each_row([&](int r)
                     INLINED { w[0][r] = _mm512_xor_si512(words[r], _mm512_set1_epi8(-128)); });
    }
    template <bool, class Chunk>
    INLINE void multiply(const Rows (&w)[vectors], const Chunk& x, vf (&part)[R]) const {
        Rows upper, lower;
        const __m512i first[2] = {_mm512_load_si512(x.first[0]), _mm512_load_si512(x.first[1])};
        each_row([&](int r) INLINED { upper[r] = dot(__m512i{}, w[0][r], x.digits[0][0]); });
        each_row([&](int r) INLINED { lower[r] = dot(first[1], w[0][r], x.digits[2][0]); });
        each_row([&](int r) INLINED {
            upper[r] = _mm512_add_epi32(_mm512_slli_epi32(upper[r], 8), first[0]);
        });
        each_row([&](int r) INLINED { upper[r] = dot(upper[r], w[0][r], x.digits[1][0]); });
        each_row([&](int r) INLINED {
            part[r] = multiply_add(to_float(upper[r]), splat(256.0f), to_float(lower[r]));
        });
    }
};

// Floats and integers of 5 and 6 bits.
template <int Bits>
struct Lookups {
    static constexpr int bits = Bits, vectors = 1;
    __m512i table;  // of an index the low six bits count
    explicit Lookups(const Lookup& t) : table(_mm512_load_si512(t.bytes)) {}
    INLINE void decode(const Rows& words, Rows (&w)[vectors]) const {
        each_row([&](int r) INLINED {
            w[0][r] = _mm512_permutexvar_epi8(bytes_of<Bits>(words[r]), table);
        });
    }
    template <bool, class Chunk>
    INLINE void multiply(const Rows (&w)[vectors], const Chunk& x, vf (&part)[R]) const {
        Rows sum;
        lane_sums(w, x, x.first[0], sum);
        each_row([&](int r) INLINED { part[r] = to_float(sum[r]); });
    }
};

template <class Codes, Offset Kind, int M>
void multiply_rows(const Weights* all, int count, const Lookup& table) {
    const Weights& s = *all;
    using Row = PackedRows<Codes::bits>;
    const Row row(s.g.x, M, s.g.k, s.g.w.tile_length, table);
    const Codes codes(table);
    const ScaleLanes scale_lanes(s.g.w.tile_length, Row::lane);
    const auto lane_of = reinterpret_cast<__m512i>(scale_lanes.index);  // the first if one for all
    constexpr int64_t kBytes = Row::chunk * Codes::bits / 8;
    const int64_t k = s.g.k, whole = k / Row::chunk, rest = k % Row::chunk;
    const int64_t tiles = ceil_div(k, s.g.w.tile_length);
    constexpr __mmask64 kAll = first_bytes(kBytes);
    const __mmask64 some = first_bytes(ceil_div(rest * Codes::bits, 8));
    const auto lanes = static_cast<__mmask16>((1u << ceil_div(rest, Row::lane)) - 1);
    const auto* const chunks = row.chunks;
    const auto body = [&, chunks](const RowGroup& group, vf(&total)[M][R]) {
        int64_t at = 0, seen = 0;  // which scale, and the chunks under it so far
        const auto add = [&](int64_t c, const Rows& words, __mmask16 mine) INLINED {
            Rows w[Codes::vectors];
            codes.decode(words, w);
            const auto lanes_of = [&](const float* const(&values)[R], int r) INLINED {
                return _mm512_permutexvar_ps(lane_of, load(values[r] + at));
            };
            const auto times = [&](int m) INLINED {
                const auto& x = chunks[m * row.count + c];
                const vf unit = load(x.unit);
                vf part[R];
                codes.template multiply<Kind != Offset::minimum>(w, x, part);
                each_row([&](int r) INLINED { part[r] *= unit; });
                if constexpr (Kind == Offset::zero)
                    each_row([&](int r)
                                 INLINED { part[r] -= lanes_of(group.offset, r) * load(x.sum); });
                each_row([&](int r) INLINED {
                    total[m][r] =
                        _mm512_mask3_fmadd_ps(part[r], lanes_of(group.scale, r), total[m][r], mine);
                });
            };
            times(0);
            if constexpr (M > 1) times(1);
            if constexpr (M > 2) times(2), times(3);
            if (!scale_lanes.broadcast || ++seen == scale_lanes.chunks_per_scale)
                at += scale_lanes.step, seen = 0;
        };
        Rows words;
        const auto read = [&](int64_t c, __mmask64 bytes) INLINED {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const uint8_t* from = group.codes[r] + c * kBytes;
                __builtin_prefetch(group.codes[0] + (c * R + r) * kBytes + kAhead, 0, 2);
                words[r] = bytes == ~__mmask64{0} ? _mm512_loadu_si512(from)
                                                  : _mm512_maskz_loadu_epi8(bytes, from);
            }
        };
        for (int64_t c = 0; c < whole; ++c) read(c, kAll), add(c, words, 0xFFFF);
        if (rest) read(whole, some), add(whole, words, lanes);
        if constexpr (Kind == Offset::minimum)
            for (int m = 0; m < M; ++m)
                for (int64_t t = 0; t < tiles; t += VL)
                    for (int r = 0; r < R; ++r)
                        total[m][r] =
                            multiply_add(load_at(group.offset[r], t, tiles),
                                         load(row.tile_sums + m * row.sums + t), total[m][r]);
    };
    for_row_groups<M>(all, count, Kind != Offset::none, body);
}

template <class Codes, Offset Kind>
void multiply_rows_of(const Weights* all, int count, const Lookup& table) {
    switch (all->g.m) {
        case 1: return multiply_rows<Codes, Kind, 1>(all, count, table);
        case 2: return multiply_rows<Codes, Kind, 2>(all, count, table);
        default: return multiply_rows<Codes, Kind, 4>(all, count, table);
    }
}

template <class Codes>
void multiply_codes(const Weights* all, int count, const Lookup& table) {
    switch (offset_of(all->g.w)) {
        case Offset::none: return multiply_rows_of<Codes, Offset::none>(all, count, table);
        case Offset::zero: return multiply_rows_of<Codes, Offset::zero>(all, count, table);
        default: return multiply_rows_of<Codes, Offset::minimum>(all, count, table);
    }
}

// One, two or four rows.
void multiply(const std::vector<WeightGemm>& products) {
    const std::vector<Weights> all(products.begin(), products.end());
    const int count = static_cast<int>(all.size());
    const Element& e = kElements[products[0].w.element];
    if (!fits_byte(e)) return few_rows_of_floats(all.data(), count);
    const Lookup table = lookup_of(products[0].w);
    if (e.bits == 4)
        multiply_codes<Codes4>(all.data(), count, table);
    else if (e.bits == 8)
        multiply_codes<Integers8>(all.data(), count, table);
    else if (e.bits == 5)
        multiply_codes<Lookups<5>>(all.data(), count, table);
    else
        multiply_codes<Lookups<6>>(all.data(), count, table);
}

}  // namespace

bool few_rows_on_bytes(const WeightGemm* products, int count) {
    const WeightGemm& g = *products;
    const Element& e = kElements[g.w.element];
    const int64_t rows = g.m;
    if (rows > (e.bits == 6 && g.k >= kLongRow ? kMostRows6 : kMostRows)) return false;
    const int64_t lane = e.bits == 4 ? 8 : fits_byte(e) ? 4 : 16;
    if (!fits_lanes(g.w.tile_length, lane, g.k) || !moderate(g)) return false;
    for (int64_t first = 0, next; first < rows; first = next) {
        next = first + (rows - first >= 4 ? 4 : rows - first >= 2 ? 2 : 1);
        std::vector<WeightGemm> some(products, products + count);
        for (WeightGemm& one : some)
            one.x += first * one.k, one.out += first * one.w.rows, one.m = next - first;
        multiply(some);
    }
    return true;
}

}  // namespace EXTENSOR_ISA
