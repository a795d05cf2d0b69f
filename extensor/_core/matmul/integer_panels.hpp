// A matrix of small integers, decoded into the panels that the integer product reads
// (block_gemm_int.cpp).
#pragma once

#include "common/lanes.hpp"
#include "matmul/block_gemm.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kRun = 1024;  // along k, that a tile adds up at a time; one step at least
constexpr float kLeastNormal = 1.17549435e-38f;

INLINE vi splat_int(int32_t x) { return x - vi{}; }

#if defined(__AVX2__)
// Whether a comparison is true in a lane.
INLINE bool any_lane(vi v) {
#if EXTENSOR_LANES == 16
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(v)) != 0;
#else
    return _mm256_movemask_ps(reinterpret_cast<__m256>(v)) != 0;
#endif
}

// Eight codes of four bits in each lane, looked up: two words of four bytes.
INLINE void look_up_nibbles(vf codes, const int8_t* table, vi& first, vi& second) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
#if EXTENSOR_LANES == 16
    const __m512i v = reinterpret_cast<__m512i>(codes), low = _mm512_set1_epi8(15);
    const __m512i by_code = _mm512_broadcast_i32x4(values);
    const __m512i even = _mm512_shuffle_epi8(by_code, _mm512_and_si512(v, low));
    const __m512i odd =
        _mm512_shuffle_epi8(by_code, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
    const vf a = reinterpret_cast<vf>(_mm512_unpacklo_epi8(even, odd));  // rows 0 and 1 of four
    const vf b = reinterpret_cast<vf>(_mm512_unpackhi_epi8(even, odd));  // rows 2 and 3
    first = reinterpret_cast<vi>(_mm512_shuffle_ps(a, b, 0x88));
    second = reinterpret_cast<vi>(_mm512_shuffle_ps(a, b, 0xDD));
#else
    const __m256i v = reinterpret_cast<__m256i>(codes), low = _mm256_set1_epi8(15);
    const __m256i by_code = _mm256_broadcastsi128_si256(values);
    const __m256i even = _mm256_shuffle_epi8(by_code, _mm256_and_si256(v, low));
    const __m256i odd =
        _mm256_shuffle_epi8(by_code, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
    const vf a = reinterpret_cast<vf>(_mm256_unpacklo_epi8(even, odd));
    const vf b = reinterpret_cast<vf>(_mm256_unpackhi_epi8(even, odd));
    first = reinterpret_cast<vi>(_mm256_shuffle_ps(a, b, 0x88));
    second = reinterpret_cast<vi>(_mm256_shuffle_ps(a, b, 0xDD));
#endif
}
#endif

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
    bool sums = true;      // whether the product reads `sum` and `zero`

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
        const Element& e = kElements[m.element];
        const bool is_byte = e.bits == 8 && !e.is_float;
#if defined(__AVX2__)
        if (!sums && width % VL == 0 && (e.bits == 4 || is_byte)) {
            for (int64_t r = 0; r < width; r += VL) pack_words(panel, first, r);
            return;
        }
#endif
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
                    if (is_byte && offset == 0)
                        std::memcpy(row, codes_of(first + r) + start, static_cast<size_t>(real));
                    else
                        lookup_run(codes_of(first + r), start, real, e.bits, table.values, row);
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
#if defined(__AVX2__)
    // VL rows of a panel, from row `lane` on. A word of codes of each row is read, transposed, and
    // then decoded for all rows at once. Beyond the matrix's rows the last one stands again.
    void pack_words(int64_t panel, int64_t first, int64_t lane) const {
        const bool nibbles = kElements[m.element].bits == 4;
        const int64_t bytes = least(m.row_bytes, nibbles ? ceil_div(k, 2) : k);
        const vi flip = splat_int(offset ? static_cast<int32_t>(0x80808080u) : 0);
        int32_t *to = words + panel * panel_words() + lane, *end = to + panel_words();
        const uint8_t* rows[VL];
        for (int r = 0; r < VL; ++r) rows[r] = codes_of(first + lane + r);
        for (int64_t at = 0; to < end; at += 4 * VL) {
            vf v[VL];
#pragma GCC unroll 16
            for (int r = 0; r < VL; ++r) {
                __builtin_prefetch(rows[r] + at + VL * m.row_bytes, 0, 2);  // of the next rows
                v[r] = load_some(rows[r] + at, bytes - at);
            }
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < VL; ++i, to += width) {
                if (to >= end) break;
                vi word = reinterpret_cast<vi>(v[i]) ^ flip, next;
                if (nibbles) look_up_nibbles(v[i], table.values, word, next);
                store(to, word);
                if (nibbles && (to += width) < end) store(to, next);
            }
        }
        pack_scales(first + lane, scale + panel * panel_blocks() + lane);
    }

    // Scales of VL rows, from row `first` on, for every block: to[block * width].
    void pack_scales(int64_t first, float* to) const {
        int64_t at[VL];  // of each row's first scale
        for (int r = 0; r < VL; ++r) at[r] = scales.at(least(first + r, m.rows - 1), 0);
        const auto put = [&](int64_t block, vf s) __attribute__((always_inline)) {
            if (any_lane((s > vf{}) & (s < splat(kLeastNormal)))) spare_zeros(first, block, s);
            store(to + block * width, s * table.unit);
        };
        const int64_t size = m.scale == Scale::float32 ? 4 : 1, last = blocks * size;
        if (m.scale == Scale::float16 || m.tile_length != step) {
            for (int64_t block = 0; block < blocks; ++block) {
                vf s;
                for (int r = 0; r < VL; ++r) s[r] = block_scale(at[r], block);
                put(block, s);
            }
            return;
        }
        for (int64_t byte = 0; byte < last; byte += 4 * VL) {
            vf v[VL];
            const auto* from = static_cast<const uint8_t*>(m.scales) + byte;
#pragma GCC unroll 16
            for (int r = 0; r < VL; ++r) v[r] = load_some(from + at[r] * size, last - byte);
            transpose(v);
            int64_t block = byte / size;
            for (int i = 0; i < VL && block < blocks; ++i) {
                if (size == 4) {
                    put(block++, v[i]);
                    continue;
                }
                for (int shift = 0; shift < 32 && block < blocks; shift += 8)
                    put(block++, byte_scales(reinterpret_cast<vu>(v[i]) >> shift & 255));
            }
        }
    }

    vf byte_scales(vu code) const {
        if (m.scale == Scale::ue4m3) {
            vf s;
            for (int r = 0; r < VL; ++r) s[r] = scales.ue4m3[code[r]];
            return s;
        }
        const vu s = code == 255 ? splat(kNaN) : code == 0 ? splat(0x400000u) : code << 23;
        return reinterpret_cast<vf>(s);
    }

    // Blocks of zeros get the scale 1: spares multiplying by the subnormal 2**-127.
    __attribute__((noinline)) void spare_zeros(int64_t first, int64_t block, vf& s) const {
        for (int r = 0; r < VL; ++r)
            if (s[r] > 0 && s[r] < kLeastNormal && is_zero(least(first + r, m.rows - 1), block))
                s[r] = 1;
    }

    // The first `count` bytes, at most a vector, and zeros.
    static INLINE vf load_some(const uint8_t* from, int64_t count) {
        if (count >= 4 * VL) return load(reinterpret_cast<const float*>(from));
#if EXTENSOR_LANES == 16
        const auto first = count > 0 ? (1ull << count) - 1 : 0;
        return reinterpret_cast<vf>(_mm512_maskz_loadu_epi8(first, from));
#else
        alignas(4 * VL) uint8_t some[4 * VL] = {};
        if (count > 0) std::memcpy(some, from, static_cast<size_t>(count));
        return load(reinterpret_cast<const float*>(some));
#endif
    }

    // Whether a block holds zeros alone; `lookup_run` begins at multiples of four codes.
    bool is_zero(int64_t row, int64_t block) const {
        int8_t some[64];
        const int64_t last = least(k, (block + 1) * step);
        for (int64_t i = block * step; i < last; i += 64) {
            const int64_t count = least(64, last - i);
            lookup_run(codes_of(row), i, count, kElements[m.element].bits, table.values, some);
            for (int64_t j = 0; j < count; ++j)
                if (static_cast<uint8_t>(some[j]) != static_cast<uint8_t>(offset)) return false;
        }
        return true;
    }
#endif

    // Of a row, or of the last one.
    const uint8_t* codes_of(int64_t row) const {
        return m.codes + least(row, m.rows - 1) * m.row_bytes;
    }

    // `scales_at`: of the row's first scale.
    float block_scale(int64_t scales_at, int64_t block) const {
        return scale_value(m.scale, m.scales, tile_at(scales_at, block), scales.ue4m3);
    }

    int64_t tile_at(int64_t scales_at, int64_t block) const {
        return scales_at + (m.tile_length == step ? block : block * step / m.tile_length);
    }

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
        float s = block_scale(scales_at, block);
        zero[at] = 0;
        if (m.zero_points) {
            zero[at] = m.zero_points[tile_at(scales_at, block)];
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

}  // namespace
}  // namespace EXTENSOR_ISA
