// Column tiles: some rows of four vectors of columns, contiguous and float32, in the level-1 cache.
//
// A column tile is filled from whole cache lines of the array, transformed where the spec says so,
// and read as often as needed, both columnwise (columnwise.cpp) and rowwise
// (rowwise_columnwise.cpp). Beyond the array it holds zeros, so that ragged edges need no loops of
// their own.
#pragma once

#include "common/cache_lines.hpp"
#include "quantize/blocks.hpp"
#include "quantize/hadamard.hpp"
#include "quantize/philox.hpp"
#include "quantize/quantize.hpp"

namespace EXTENSOR_ISA {

constexpr int64_t kTileColumns = 4 * VL;     // columns of a column tile
constexpr int64_t kMaxTileRows = 128;        // rows of one, unless a transform needs more
constexpr int64_t kTask = int64_t{1} << 16;  // values of one task, roughly

// Where the next column tile comes from; its rows are prefetched while this one is encoded.
struct Prefetch {
    const char* at = nullptr;
    int64_t stride = 0, bytes = 0;

    INLINE void row(int64_t i) const {
        if (!at) return;
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + i * stride + b, 0, 2);
    }
};

// The values of a column tile. A bfloat16 array's may stay as they are in `bf16`; `f32` is then
// scratch for the code that needs float32.
struct ColumnTile {
    float* f32;
    const bfloat16* bf16 = nullptr;

    ColumnTile from(int64_t row) const {
        return {f32 + row * kTileColumns, bf16 ? bf16 + row * kTileColumns : nullptr};
    }

    const float* widened(int64_t rows) const {
        if (bf16)
            for (int64_t i = 0; i < rows * kTileColumns; i += VL) store(f32 + i, load(bf16 + i));
        return f32;
    }
};

// ---- filling ----

template <class T>
void fill_rows(const T* x, int64_t stride, int64_t rows, int64_t lanes, float* to) {
    if (lanes == kTileColumns) {
        for (int64_t i = 0; i < rows; ++i, x += stride, to += kTileColumns)
            for (int k = 0; k < kTileColumns; k += VL) store(to + k, load(x + k));
        return;
    }
    for (int64_t i = 0; i < rows; ++i, x += stride, to += kTileColumns)
        for (int64_t k = 0; k < kTileColumns; k += VL)
            store(to + k, k < lanes ? load_upto(x + k, lanes - k) : vf{});
}

// `rows` rows of `lanes` columns, the first of them at x, then zeros up to `depth` rows.
inline void fill_column_tile(Source x, int64_t stride, int64_t rows, int64_t depth, int64_t lanes,
                             float* to) {
    switch (x.type) {
        case FloatType::float32:
            fill_rows(static_cast<const float*>(x.at), stride, rows, lanes, to);
            break;
        case FloatType::bfloat16:
            fill_rows(static_cast<const bfloat16*>(x.at), stride, rows, lanes, to);
            break;
        default: fill_rows(static_cast<const float16*>(x.at), stride, rows, lanes, to);
    }
    if (rows < depth)
        std::memset(to + rows * kTileColumns, 0,
                    static_cast<size_t>((depth - rows) * kTileColumns * 4));
}

// The same, keeping bfloat16.
inline void fill_bf16_tile(const bfloat16* x, int64_t stride, int64_t rows, int64_t depth,
                           int64_t lanes, bfloat16* to) {
    if (lanes < kTileColumns || rows < depth)
        std::memset(to, 0, static_cast<size_t>(depth * kTileColumns * 2));
    if (lanes == kTileColumns) {
        for (int64_t i = 0; i < rows; ++i, x += stride, to += kTileColumns)
            std::memcpy(to, x, static_cast<size_t>(kTileColumns * 2));
        return;
    }
    for (int64_t i = 0; i < rows; ++i, x += stride, to += kTileColumns)
        std::memcpy(to, x, static_cast<size_t>(lanes * 2));
}

// ---- the transform ----

// Transforms columns of `rows` rows, which are whole transforms.
inline void transform_columns(const QuantPlan& plan, int64_t rows, float* column_tile) {
    for (int64_t i = 0; i < rows; i += plan.hadamard, column_tile += plan.hadamard * kTileColumns)
        for (int64_t k = 0; k < kTileColumns; k += VL)
            transform_rows(column_tile + k, plan.hadamard, kTileColumns, plan.signs);
}

// The same of columns that lie elsewhere, `stride` floats apart: `real` rows, then zeros. Zeros
// within a transform take its signs, which the sign of a zero shows; beyond the last one there is
// none.
inline void fill_transformed(const QuantPlan& plan, const float* x, int64_t stride, int64_t real,
                             int64_t rows, int64_t lanes, float* column_tile) {
    const int size = plan.hadamard;
    static const float kZeros[kTileColumns] = {};
    const float* at[128];  // rows: a branch for each would keep values from registers
    for (; rows > 0 && real > 0; rows -= size, real -= size) {
        for (int r = 0; r < size; ++r, x += stride) at[r] = r < real ? x : kZeros;
        int64_t j = 0;
        for (; j < lanes; j += VL, column_tile += VL) {
            const int count = static_cast<int>(least(VL, lanes - j));
            transform_rows(
                size, column_tile, kTileColumns,
                [&](int r) { return load_part(at[r] + j, count) * plan.signs[r]; },
                [&](int r, vf v) { store(column_tile + r * kTileColumns, v); });
        }
        for (; j < kTileColumns; j += VL, column_tile += VL)
            for (int r = 0; r < size; ++r) store(column_tile + r * kTileColumns, vf{});
        column_tile += (size - 1) * kTileColumns;
    }
    if (rows > 0) std::memset(column_tile, 0, static_cast<size_t>(rows * kTileColumns) * 4);
}

// ---- maxima of columns ----

// The largest magnitude of each column; of those below infinity alone, if `Finite`.
template <bool Finite = false>
INLINE void column_maxima(const float* column_tile, int64_t rows, int64_t vectors, vu (&m)[4]) {
    const auto each = [&]<int Vectors>() {
        vu most[Vectors] = {};  // in registers, unlike m
        for (int64_t i = 0; i < rows; ++i, column_tile += kTileColumns) {
#pragma GCC unroll 4
            for (int k = 0; k < Vectors; ++k) {
                vu v = magnitude_bits(load(column_tile + k * VL));
                if constexpr (Finite) v &= reinterpret_cast<vu>(v < kExponentMask);
                most[k] = larger(most[k], v);
            }
        }
        for (int k = 0; k < Vectors; ++k) m[k] = most[k];
    };
    for (vu& v : m) v = vu{};
    switch (vectors) {
        case 1: return each.template operator()<1>();
        case 2: return each.template operator()<2>();
        case 3: return each.template operator()<3>();
        default: return each.template operator()<4>();
    }
}

// As above, of either kind of values.
INLINE void column_maxima(const ColumnTile& column_tile, int64_t rows, int64_t vectors,
                          vu (&m)[4]) {
#if EXTENSOR_LANES == 16
    if (column_tile.bf16) {
        __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
        for (int64_t i = 0; i < rows * kTileColumns; i += kTileColumns)
            for (int half = 0; half < 2; ++half)
                most[half] = _mm512_max_epu16(
                    most[half],
                    _mm512_and_si512(_mm512_loadu_si512(column_tile.bf16 + i + 2 * VL * half),
                                     _mm512_set1_epi16(0x7FFF)));
        for (int k = 0; k < 4; ++k) {
            const __m256i mine = _mm512_extracti64x4_epi64(
                k % 2 ? _mm512_shuffle_i64x2(most[k / 2], most[k / 2], 0x4E) : most[k / 2], 0);
            m[k] = bits_of(widen(reinterpret_cast<vh>(mine), bfloat16{}));
        }
        return;
    }
#endif
    column_maxima(column_tile.f32, rows, vectors, m);
}

INLINE uint32_t larger_of(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The largest magnitude below infinity in all columns.
inline uint32_t finite_tile_maximum(const ColumnTile& column_tile, int64_t rows) {
    vu m[4];
    column_maxima(column_tile, rows, 4, m);
    const auto all = [&] { return largest_lane(larger(larger(m[0], m[1]), larger(m[2], m[3]))); };
    if (all() >= kExponentMask) column_maxima<true>(column_tile.widened(rows), rows, 4, m);
    return all();
}

// Each column's maximum becomes that of its group of `columns`, which divide a column tile.
inline void spread_over_groups(vu (&m)[4], int64_t columns) {
    if (columns == 1) return;
    uint32_t each[kTileColumns];
    std::memcpy(each, m, sizeof each);
    for (int64_t j = 0; j < kTileColumns; j += columns) {
        uint32_t most = 0;
        for (int64_t i = j; i < j + columns; ++i) most = each[i] > most ? each[i] : most;
        for (int64_t i = j; i < j + columns; ++i) each[i] = most;
    }
    std::memcpy(m, each, sizeof each);
}

// ---- codes of columns ----

// Rows whose codes fill whole bytes share one word per column: how many rows, and bytes.
constexpr int group_rows(int bits) { return bits == 4 ? 8 : 4; }
constexpr int group_bytes(int bits) { return group_rows(bits) * bits / 8; }

// Codes of large arrays bypass the caches where they fill whole cache lines.
INLINE bool is_streamed(const QuantJob& job) {
    return job.outer * job.rows * job.length * job.inner >= kStreamedValues;
}

// Writes byte b of every lane of four vectors, side by side, to row b of the codes.
struct ByteRows {
    uint8_t* to;
    int64_t stride, lanes;
    bool streamed;

    INLINE void row(const uint8_t* bytes) {
        std::memcpy(to, bytes, static_cast<size_t>(lanes));
        to += stride;
    }

#if EXTENSOR_LANES == 16
    // Sixteen times four bytes, of which the four of each 128-bit lane follow one another.
    INLINE void line(__m512i bytes) {
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        ordered(_mm512_permutexvar_epi32(order, bytes));
    }

    INLINE void ordered(__m512i bytes) {
        if (lanes >= 64)
            store_cache_line(to, bytes, streamed);
        else
            _mm512_mask_storeu_epi8(to, (__mmask64{1} << lanes) - 1, bytes);
        to += stride;
    }
#endif

    INLINE void store(const vu (&w)[4], int count) {
#if EXTENSOR_LANES == 16
        const __m512i gather_bytes = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        __m512i v[4];
        for (int k = 0; k < 4; ++k)
            v[k] = _mm512_shuffle_epi8(reinterpret_cast<__m512i>(w[k]), gather_bytes);
        const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
        const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
        const __m512i rows[4] = {_mm512_unpacklo_epi64(a, c), _mm512_unpackhi_epi64(a, c),
                                 _mm512_unpacklo_epi64(b, d), _mm512_unpackhi_epi64(b, d)};
        for (int r = 0; r < count; ++r) line(rows[r]);
#elif EXTENSOR_LANES == 8
        const __m256i gather_bytes = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        __m256i v[4];
        for (int k = 0; k < 4; ++k)
            v[k] = _mm256_shuffle_epi8(reinterpret_cast<__m256i>(w[k]), gather_bytes);
        const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
        const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
        const __m256i rows[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                                 _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
        for (int r = 0; r < count; ++r) {
            alignas(32) uint8_t bytes[kTileColumns];
            const __m256i ordered = _mm256_permutevar8x32_epi32(rows[r], order);
            if (lanes == kTileColumns) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), ordered);
                to += stride;
            } else {
                _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), ordered);
                row(bytes);
            }
        }
#else
        for (int r = 0; r < count; ++r) {
            uint8_t bytes[kTileColumns];
            for (int k = 0; k < 4; ++k) store_codes(bytes + k * VL, w[k] >> (8 * r) & 255u);
            row(bytes);
        }
#endif
    }
};

// Random words of a column tile's values, or one row of the constant of a tie rule.
struct RandomWords {
    const uint32_t* at = nullptr;
    int64_t stride = 0;

    INLINE vu operator()(int64_t row, int k) const { return load(at + row * stride + k * VL); }
};

// What rows of a column tile are encoded with. `bounded`: to nearest, and no value saturates.
struct ChunkOptions {
    int64_t rows, vectors;
    float element_scale;
    bool bounded;
    RandomWords words;
};

// See column_tiles_avx512.hpp.
template <int Index, class T>
struct ColumnTileCodes;

// Codes of whole groups of rows of a floating-point grid, all of whose blocks are plain (see
// blocks.hpp).
template <int Index, bool Words>
void encode_column_tile(const float* column_tile, const ChunkOptions& chunk, const vf (&apply)[4],
                        ByteRows out, const Prefetch& prefetch, EncodeCounts& counts) {
    constexpr Element e = kElements[Index];
    const int64_t rows = chunk.rows, vectors = chunk.vectors;
    const RandomWords words = chunk.words;
#if EXTENSOR_LANES == 16
    if constexpr (!Words && ColumnTileCodes<Index, float>::kCovers) {
        using Avx512 = ColumnTileCodes<Index, float>;
        if (chunk.element_scale == 1)
            return chunk.bounded ? Avx512::template code<true>(column_tile, rows, apply, out,
                                                               prefetch, counts)
                                 : Avx512::template code<false>(column_tile, rows, apply, out,
                                                                prefetch, counts);
    }
#endif
    constexpr int group = group_rows(e.bits), bytes = group_bytes(e.bits);
    const Encoder<Index, Words> encoder{.element_scale = chunk.element_scale};
    EncodeCounts mine;
    vu joined[4] = {};
    for (int64_t i = 0; i < rows; i += group, column_tile += group * kTileColumns) {
        for (int64_t k = 0; k < vectors; ++k) {
            vu word = {};
#pragma GCC unroll 8
            for (int r = 0; r < group; ++r) {
                if (k == 0) prefetch.row(i + r);
                const vu random = Words ? words(i + r, static_cast<int>(k)) : vu{};
                word |=
                    encoder(load(column_tile + r * kTileColumns + k * VL), apply[k], random, mine)
                    << static_cast<uint32_t>(e.bits * r);
            }
            joined[k] = word;
        }
        out.store(joined, bytes);
    }
    counts.saturated += mine.saturated;
    counts.flushed += mine.flushed;
}

using ColumnTileEncoder = void (*)(const float*, const ChunkOptions&, const vf (&)[4], ByteRows,
                                   const Prefetch&, EncodeCounts&);

template <bool Words, size_t... Index>
inline ColumnTileEncoder pick_column_tile_encoder(int element, std::index_sequence<Index...>) {
    constexpr ColumnTileEncoder encoders[] = {&encode_column_tile<Index, Words>...};
    return encoders[element];
}

// The encoder for an element of the table, or null where there is none.
template <bool Words>
inline ColumnTileEncoder column_tile_encoder(int element) {
    constexpr auto all = std::make_index_sequence<kQuantized>();
    return kElements[element].is_float ? pick_column_tile_encoder<Words>(element, all) : nullptr;
}

}  // namespace EXTENSOR_ISA

#if EXTENSOR_LANES == 16
#include "quantize/column_tiles_avx512.hpp"
#endif

namespace EXTENSOR_ISA {

// Whether a call encodes column tiles of bfloat16 without widening them, except blocks without
// numbers.
bool keeps_bf16(const Call& call);  // column_chunks.cpp

}  // namespace EXTENSOR_ISA
