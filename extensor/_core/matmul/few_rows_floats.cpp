// One, two or four float32 rows times floats of 6 or 8 bits, on AVX-512 VBMI: weights are decoded
// in registers, once for all rows of x.
//
// Every value is a bfloat16 number, whose two bytes are looked up. Lane l of
// vector j of a chunk holds element 16 (l / 4) + 8 (j / 2) + 2 (l % 4) + j % 2, as two bytes side
// by side come out of a register of each: x is packed in that order. Weights meet their scales
// before x, so that sums are of the decoded values.

#include "matmul/one_row_avx512.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int R = kGroupRows, kVectors = 4;
constexpr int64_t kCodes = kVectors * VL;  // of a chunk

constexpr int64_t element_of(int64_t lane, int64_t vector) {
    return 16 * (lane / 4) + 8 * (vector / 2) + 2 * (lane % 4) + vector % 2;
}

// [row][chunk][vector][lane], zeros after the last element.
const float* packed(const float* x, int64_t rows, int64_t k) {
    const int64_t length = round_up(k, kCodes);
    float* all = threads::scratch_of<float>(threads::Slot::packed_a, rows * length);
    float* to = all;
    for (int64_t r = 0; r < rows; ++r, x += k)
        for (int64_t begin = 0; begin < length; begin += kCodes)
            for (int64_t vector = 0; vector < kVectors; ++vector)
                for (int64_t lane = 0; lane < VL; ++lane) {
                    const int64_t at = begin + element_of(lane, vector);
                    *to++ = at < k ? x[at] : 0;
                }
    return all;
}

// What decodes 64 codes. NaN and infinity are in the tables.
template <int Bits>
struct Floats {
    // Bytes by code, of 8 bits without the sign.
    __m512i lower[2], upper[2];

    explicit Floats(const float* table) {
        alignas(64) uint8_t low[128], high[128];
        for (int code = 0; code < 128; ++code) {
            uint32_t bits;
            std::memcpy(&bits, table + code % (1 << Bits), 4);
            low[code] = static_cast<uint8_t>(bits >> 16),
            high[code] = static_cast<uint8_t>(bits >> 24);
        }
        for (int half = 0; half < 2; ++half) {
            lower[half] = _mm512_load_si512(low + 64 * half);
            upper[half] = _mm512_load_si512(high + 64 * half);
        }
    }

    INLINE void operator()(__m512i codes, vf (&w)[kVectors]) const {
        __m512i low, high;
        if constexpr (Bits == 6) {
            codes = bytes_of<Bits>(codes);
            low = _mm512_permutexvar_epi8(codes, lower[0]);
            high = _mm512_permutexvar_epi8(codes, upper[0]);
        } else {
            constexpr int kOrAnd = 0xF8;  // a | (b & c)
            low = _mm512_permutex2var_epi8(lower[0], codes, lower[1]);
            high = _mm512_permutex2var_epi8(upper[0], codes, upper[1]);
            high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), kOrAnd);
        }
        const __m512i pairs[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
        const __m512i second = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            w[2 * half] = reinterpret_cast<vf>(_mm512_slli_epi32(pairs[half], 16));
            w[2 * half + 1] = reinterpret_cast<vf>(_mm512_and_si512(pairs[half], second));
        }
    }
};

template <int Bits, int M>
void multiply_rows(const Weights* all, int count) {
    const Weights& s = *all;
    const int64_t k = s.g.k, whole = k / kCodes, rest = k % kCodes, length = round_up(k, kCodes);
    const float* const x = packed(s.g.x, M, k);
    const Floats<Bits> decode(s.table);
    constexpr int64_t kBytes = kCodes * Bits / 8;
    constexpr __mmask64 kAll = first_bytes(kBytes);
    // One scale for a row, wherever it ends: the elements of a lane do not follow each other.
    const int64_t tile = s.g.w.tile_length;
    const ScaleLanes scale_lanes(tile < k ? tile : most(tile, kCodes), kVectors);
    const auto lane_of = reinterpret_cast<__m512i>(scale_lanes.index);
    // Lanes with an element of the row: the scales of others are those of another row.
    const auto lanes = static_cast<__mmask16>((1u << 4 * ceil_div(rest, VL)) - 1);
    const auto body = [&](const RowGroup& group, vf(&total)[M][R]) {
        int64_t at = 0, seen = 0;  // which scale, and the chunks under it so far
        const auto add = [&](int64_t c, __mmask64 bytes,
                             __mmask16 mine) __attribute__((always_inline)) {
            vf w[R][kVectors];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                __builtin_prefetch(group.codes[0] + (c * R + r) * kBytes + kPrefetch);
                const uint8_t* from = group.codes[r] + c * kBytes;
                decode(bytes == ~__mmask64{0} ? _mm512_loadu_si512(from)
                                              : _mm512_maskz_loadu_epi8(bytes, from),
                       w[r]);
                const vf scale = _mm512_permutexvar_ps(lane_of, load(group.scale[r] + at));
#pragma GCC unroll 4
                for (int j = 0; j < kVectors; ++j)
                    w[r][j] = _mm512_maskz_mul_ps(mine, w[r][j], scale);
            }
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j)
#pragma GCC unroll 4
                for (int m = 0; m < M; ++m) {
                    const vf values = load(x + m * length + c * kCodes + j * VL);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r)
                        total[m][r] = multiply_add(w[r][j], values, total[m][r]);
                }
            if (!scale_lanes.broadcast || ++seen == scale_lanes.chunks_per_scale)
                at += scale_lanes.step, seen = 0;
        };
        for (int64_t c = 0; c < whole; ++c) add(c, kAll, 0xFFFF);
        if (rest) add(whole, first_bytes(ceil_div(rest * Bits, 8)), lanes);
    };
    for_row_groups<M>(all, count, false, body);
}

template <int Bits>
void multiply_rows_of(const Weights* all, int count) {
    switch (all->g.m) {
        case 1: return multiply_rows<Bits, 1>(all, count);
        case 2: return multiply_rows<Bits, 2>(all, count);
        default: return multiply_rows<Bits, 4>(all, count);
    }
}

}  // namespace

void few_rows_of_floats(const Weights* all, int count) {
    const int bits = kElements[all->g.w.element].bits;
    bits == 6 ? multiply_rows_of<6>(all, count) : multiply_rows_of<8>(all, count);
}

}  // namespace EXTENSOR_ISA
