// One float32 row times weights of 4, 6 or 8 bits on dot products of bytes (AVX-512 VNNI and VBMI):
// what decoding text repeats.
//
// A vector of words holds eight 4-bit codes a lane, or four others. The x of a lane become integers
// of 24 bits times a power of two, stored as three signed bytes each, so an element of x is off by
// at most 2^-23 of its lane's largest (or 2^-127). Weights are small integers, looked up. A lane's
// sum is exact, and rounds once to float32; scales multiply it there.

#include "matmul/one_row_avx512.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int kDigits = 3;
constexpr float kMost = 8355711;  // 127 (2^16 + 2^8 + 1), the largest integer of three such bytes

// The weights of a format as bytes to look up: value = unit * (byte - zero), or where one byte does
// not hold it unit * (8 upper + lower), with zeros of their own.
struct Lookup {
    alignas(64) uint8_t lower[64], upper[64];
    int zero = 0, upper_zero = 0;
    float unit = 1;
    bool two = false;
};

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
    t.two = largest > 127;
    // Codes with a minimum count from the least one.
    t.zero = !e.is_float ? 1 << (e.bits - 1) : t.two ? 0 : largest;
    t.upper_zero = 64;
    for (int i = 0; i < 64; ++i) {
        t.lower[i] = static_cast<uint8_t>(t.two ? integers[i] & 7 : integers[i] + t.zero);
        t.upper[i] = static_cast<uint8_t>((integers[i] >> 3) + t.upper_zero);
    }
    if (w.minimums) t.zero = 0;
    return t;
}

// x in chunks of one vector of codes. Each chunk: bytes of the digits, most significant first; with
// four bits those of a lane's even elements, then of its odd ones; integers that the sums of
// unsigned weights begin with; each lane's power of two, and its sum of x.
template <int Bits>
struct PackedRow {
    static constexpr int lane = Bits == 4 ? 8 : 4, parts = lane / 4;
    static constexpr int64_t chunk = lane * VL;
    struct Chunk {
        int8_t digits[kDigits][parts][4 * VL];
        int32_t first[3][VL];
        float unit[VL], sum[VL];
    };
    Chunk* chunks;

    PackedRow(const float* x, int64_t k, const Lookup& table, float unit) {
        const int64_t count = ceil_div(k, chunk);
        chunks = static_cast<Chunk*>(
            threads::scratch(threads::Slot::packed_a, count * static_cast<int64_t>(sizeof(Chunk))));
        for (int64_t c = 0; c < count; ++c)
            for (int l = 0; l < VL; ++l) pack(x, k, c, l, table, unit);
    }

private:
    void pack(const float* x, int64_t k, int64_t c, int l, const Lookup& table, float unit) {
        Chunk& to = chunks[c];
        const int64_t begin = c * chunk + l * lane, count = most(0, least(lane, k - begin));
        float values[lane] = {};
        if (count > 0) std::memcpy(values, x + begin, static_cast<size_t>(count) * 4);
        float largest = 0;
        for (float v : values)
            largest = __builtin_fabsf(v) > largest ? __builtin_fabsf(v) : largest;
        uint32_t bits;
        std::memcpy(&bits, &largest, 4);
        int shift = 22 + 127 - static_cast<int>(bits >> 23);
        shift = shift > 126 ? 126 : shift;
        if (largest * power_of_two(shift) > kMost) --shift;
        const float up = power_of_two(shift);
        int32_t sum = 0, sums[kDigits] = {};
        for (int i = 0; i < lane; ++i) {
            int32_t left = _mm_cvtss_si32(_mm_set_ss(values[i] * up));  // to nearest
            sum += left;
            const int part = parts == 1 ? 0 : i % 2, at = 4 * l + i / parts;
            for (int d = kDigits - 1; d >= 0; --d) {
                const auto digit = static_cast<int8_t>(left & 255);
                to.digits[d][part][at] = digit, sums[d] += digit;
                left = (left - digit) >> 8;
            }
        }
        if constexpr (Bits == 8) {
            to.first[0][l] = -table.zero * (256 * sums[0] + sums[1]);
            to.first[1][l] = -table.zero * sums[2];
        } else {
            to.first[0][l] = -table.zero * sum;
            to.first[1][l] = table.two ? -table.upper_zero * sum : 0;
        }
        to.unit[l] = power_of_two(-shift) * unit;
        to.sum[l] = static_cast<float>(sum) * power_of_two(-shift);
    }
};

INLINE __m512i dot(__m512i sum, __m512i unsigned_bytes, const int8_t* bytes) {
    return _mm512_dpbusd_epi32(sum, unsigned_bytes, _mm512_load_si512(bytes));
}

// `first` and the lanes' sums of weights times x, of all digits.
template <int Parts, class Chunk>
INLINE __m512i lane_sums(const __m512i (&w)[Parts], const Chunk& x, const int32_t* first) {
    __m512i sum = {};
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) {
        if (d) sum = _mm512_slli_epi32(sum, 8);
        if (d == kDigits - 1) sum = _mm512_add_epi32(sum, _mm512_load_si512(first));
#pragma GCC unroll 2
        for (int p = 0; p < Parts; ++p) sum = dot(sum, w[p], x.digits[d][p]);
    }
    return sum;
}

INLINE vf to_float(__m512i v) { return _mm512_cvtepi32_ps(v); }

// What decodes 64 bytes of codes, or 48, and multiplies them.
struct Codes4 {
    static constexpr int bits = 4;
    __m512i table;
    explicit Codes4(const Lookup& t)
        : table(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(t.lower)))) {
    }
    template <class Chunk>
    INLINE vf operator()(__m512i words, const Chunk& x) const {
        const __m512i low = _mm512_set1_epi8(15);
        const __m512i w[2] = {
            _mm512_shuffle_epi8(table, _mm512_and_si512(words, low)),
            _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(words, 4), low))};
        return to_float(lane_sums(w, x, x.first[0]));
    }
};

struct Integers8 {
    static constexpr int bits = 8;
    explicit Integers8(const Lookup&) {}
    template <class Chunk>
    INLINE vf operator()(__m512i words, const Chunk& x) const {
        const __m512i w = _mm512_xor_si512(words, _mm512_set1_epi8(-128));
        __m512i upper = _mm512_slli_epi32(dot(__m512i{}, w, x.digits[0][0]), 8);
        upper = dot(_mm512_add_epi32(upper, _mm512_load_si512(x.first[0])), w, x.digits[1][0]);
        const __m512i lower = dot(_mm512_load_si512(x.first[1]), w, x.digits[2][0]);
        return multiply_add(to_float(upper), splat(256.0f), to_float(lower));
    }
};

template <bool Two>
struct Floats6 {
    static constexpr int bits = 6;
    __m512i lower, upper, words_of;
    explicit Floats6(const Lookup& t)
        : lower(_mm512_load_si512(t.lower)), upper(_mm512_load_si512(t.upper)) {
        alignas(64) uint8_t index[64];
        for (int i = 0; i < 64; ++i) index[i] = static_cast<uint8_t>(i / 4 * 3 + i % 4);
        words_of = _mm512_load_si512(index);
    }
    template <class Chunk>
    INLINE vf operator()(__m512i words, const Chunk& x) const {
        // Three bytes a word; its fields 0, 6, 12 and 18 become bytes, with other bits above.
        const __m512i word = _mm512_permutexvar_epi8(words_of, words);
        constexpr int64_t kFields = 0x322C26'20'120C0600;
        const __m512i codes = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(kFields), word);
        const __m512i w[1] = {_mm512_permutexvar_epi8(codes, lower)};
        if constexpr (!Two) return to_float(lane_sums(w, x, x.first[0]));
        const __m512i v[1] = {_mm512_permutexvar_epi8(codes, upper)};
        return multiply_add(to_float(lane_sums(v, x, x.first[1])), splat(8.0f),
                            to_float(lane_sums(w, x, x.first[0])));
    }
};

template <class Codes, Offset Kind>
void multiply_row(const Weights& s, const Lookup& table) {
    constexpr int R = kGroupRows;
    using Row = PackedRow<Codes::bits>;
    const Row row(s.g.x, s.g.k, table, table.unit);
    const Codes codes(table);
    const ScaleLanes scale_lanes(s.g.w.tile_length, Row::lane);
    constexpr int64_t kBytes = Row::chunk * Codes::bits / 8;
    const int64_t k = s.g.k, whole = k / Row::chunk, rest = k % Row::chunk;
    constexpr __mmask64 kAll = kBytes == 64 ? ~__mmask64{0} : (__mmask64{1} << kBytes % 64) - 1;
    const __mmask64 some = (__mmask64{1} << ceil_div(rest * Codes::bits, 8)) - 1;
    const auto lanes = static_cast<__mmask16>((1u << ceil_div(rest, Row::lane)) - 1);
    for_row_groups(s, Kind != Offset::none, [&](const RowGroup& group, vf(&total)[R]) {
        int64_t at = 0, seen = 0;  // which scale, and the chunks under it so far
        const auto add = [&](int64_t c, const __m512i(&words)[R],
                             __mmask16 mine) __attribute__((always_inline)) {
            const auto& x = row.chunks[c];
            const vf unit = load(x.unit);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                vf part = codes(words[r], x) * unit;
                if constexpr (Kind != Offset::none) {
                    const vf offset = scale_lanes(group.offset[r] + at), sum = load(x.sum);
                    if constexpr (Kind == Offset::zero)
                        part -= offset * sum;
                    else
                        total[r] = _mm512_mask3_fmadd_ps(offset, sum, total[r], mine);
                }
                total[r] =
                    _mm512_mask3_fmadd_ps(part, scale_lanes(group.scale[r] + at), total[r], mine);
            }
            if (!scale_lanes.broadcast || ++seen == scale_lanes.chunks_per_scale)
                at += scale_lanes.step, seen = 0;
        };
        __m512i words[R];
        const auto read = [&](int64_t c, __mmask64 bytes) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const uint8_t* from = group.codes[r] + c * kBytes;
                __builtin_prefetch(group.codes[0] + (c * R + r) * kBytes + kPrefetch);
                words[r] = bytes == ~__mmask64{0} ? _mm512_loadu_si512(from)
                                                  : _mm512_maskz_loadu_epi8(bytes, from);
            }
        };
        for (int64_t c = 0; c < whole; ++c) read(c, kAll), add(c, words, 0xFFFF);
        if (rest) read(whole, some), add(whole, words, lanes);
    });
}

template <class Codes>
void multiply_row_of(const Weights& s, const Lookup& table) {
    switch (offset_of(s.g.w)) {
        case Offset::none: return multiply_row<Codes, Offset::none>(s, table);
        case Offset::zero: return multiply_row<Codes, Offset::zero>(s, table);
        default: return multiply_row<Codes, Offset::minimum>(s, table);
    }
}

}  // namespace

bool one_row_on_bytes(const WeightGemm& g) {
    const Element& e = kElements[g.w.element];
    if (g.m != 1 || g.w.tile_rows != 1 || (e.bits == 8 && e.is_float)) return false;
    if (!fits_lanes(g.w.tile_length, e.bits == 4 ? 8 : 4, g.k) || !moderate(g)) return false;
    const Weights s(g);
    const Lookup table = lookup_of(g.w);
    if (e.bits == 4)
        multiply_row_of<Codes4>(s, table);
    else if (e.bits == 8)
        multiply_row_of<Integers8>(s, table);
    else if (table.two)
        multiply_row<Floats6<true>, Offset::none>(s, table);
    else
        multiply_row<Floats6<false>, Offset::none>(s, table);
    return true;
}

}  // namespace EXTENSOR_ISA
