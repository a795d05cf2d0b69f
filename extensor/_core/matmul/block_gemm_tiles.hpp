// Packed panels and the inner loops of the products on tiles (block_gemm_bf16.cpp and
// block_gemm_amx_int8.cpp). A tile is 16 rows of 64 bytes: 32 bfloat16 or 64 int8 along k. They are
// those of AMX; VDPBF16PS reads the same panels.
#pragma once

#include "matmul/block_gemm.hpp"

namespace EXTENSOR_ISA {
namespace {

static_assert(VL == 16);
constexpr int64_t kRowBytes = 64, kTileBytes = 16 * kRowBytes;
constexpr int64_t kStepBytes = 2 * kTileBytes;  // of a panel: two tiles
constexpr int kHeight = 32;                     // rows of a, and of b, in a panel
static_assert(kHeight == NR && kHeight <= kMaxTileRows);

// A task's rows of a stay in L2 while b streams through it from L3. At every step through a panel
// of b a few cache lines of the next panel are prefetched.
constexpr int64_t kTaskBytes = 512 << 10, kTaskRows = 256, kTaskPanels = 64;
constexpr int64_t kPrefetchers = kTaskRows / kHeight,
                  kPrefetchLines = kStepBytes / kRowBytes / kPrefetchers;

// Rows of a task, each of which has `bytes` in one run along k.
inline int64_t task_rows(int64_t bytes) {
    return least(kTaskRows, most(kHeight, kTaskBytes / bytes));
}

// Transposes 16 rows of 16 four-byte words.
void transpose(const void* rows_of_tile, void* to) {
    const __m512i row_of =
        _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                           _mm512_set1_epi32(16));
    const auto* from = static_cast<const int32_t*>(rows_of_tile);
    auto* out = static_cast<uint8_t*>(to);
    for (int64_t word = 0; word < 16; ++word)
        _mm512_storeu_si512(out + word * kRowBytes, _mm512_i32gather_epi32(row_of, from + word, 4));
}

// One packed matrix: [panel][step along k][two tiles]. A row of a's tile is a row of the matrix. In
// b's tiles (`transposed`) a row is one four-byte word along k of 16 rows of the matrix.
//
// A Source has the type of its values, the number of `rows`, whether its tiles are `transposed`,
// and tile(row, start, to), which makes a tile: 16 rows from `row`, values along k from `start`,
// zeros outside the matrix.
template <class Source>
struct Side {
    using Value = typename Source::Value;
    static constexpr int64_t kDepth = kRowBytes / static_cast<int64_t>(sizeof(Value));
    static constexpr int64_t kValues = 16 * kDepth;

    const Source& source;
    bool transposed;
    int64_t steps, panels = 0;
    Value* values = nullptr;

    Side(const Source& source, int64_t k, bool transposed)
        : source(source), transposed(transposed), steps(ceil_div(k, kDepth)) {}

    int64_t row_bytes() const { return steps * kRowBytes; }

    void allocate(int64_t count) {
        panels = count;
        values = scratch_of<Value>(transposed ? Slot::packed_b : Slot::packed_a,
                                   panels * steps * 2 * kValues);
    }

    // The tiles of a panel from `step` on.
    const Value* from(int64_t panel, int64_t step) const {
        return values + (panel * steps + step) * 2 * kValues;
    }

    void pack(int64_t panel, int64_t first) const {
        Value* to = values + panel * steps * 2 * kValues;
        alignas(64) Value rows_of_tile[kValues];
        for (int64_t step = 0; step < steps; ++step) {
            for (int64_t half = 0; half < 2; ++half, to += kValues) {
                const int64_t row = first + half * 16, start = step * kDepth;
                if (row >= source.rows) {
                    std::memset(to, 0, kTileBytes);
                } else if (transposed == source.transposed) {
                    source.tile(row, start, to);
                } else {
                    source.tile(row, start, rows_of_tile);
                    transpose(rows_of_tile, to);
                }
            }
        }
    }
};

// One update of 32 x 32 sums: its operands, and what to prefetch meanwhile.
struct TileUpdate {
    const void *a, *b, *prefetch;
    int64_t steps;
    float* c;
    int64_t stride;
    bool first;
};

template <class Source>
TileUpdate tile_update(const Side<Source>& a, const Side<Source>& b, int64_t pa, int64_t pb,
                       int64_t start, int64_t run) {
    const int64_t at = start / a.kDepth;
    TileUpdate v;
    v.steps = least(run / a.kDepth, a.steps - at), v.first = start == 0;
    v.a = a.from(pa, at), v.b = b.from(pb, at);
    v.prefetch = reinterpret_cast<const uint8_t*>(b.from(least(pb + 1, b.panels - 1), at)) +
                 pa % kPrefetchers * v.steps * kPrefetchLines * kRowBytes;
    return v;
}

#if defined(__AMX_TILE__)

// Configures the calling thread's eight tile registers while it lives.
struct TileRegisters {
    TileRegisters() {
        alignas(64) uint8_t config[64] = {};
        config[0] = 1;  // palette
        for (int i = 0; i < 8; ++i) config[16 + 2 * i] = kRowBytes, config[48 + i] = 16;
        _tile_loadconfig(config);
    }
    ~TileRegisters() { _tile_release(); }
};

// Adds products to the sums in tile registers 0 to 3; a's tiles are 4 and 5, b's 6 and 7.
template <class Value>
INLINE void add_products(const TileUpdate& v) {
    const auto *a = static_cast<const uint8_t*>(v.a), *b = static_cast<const uint8_t*>(v.b);
    const auto* prefetch = static_cast<const char*>(v.prefetch);
    for (int64_t i = 0; i < v.steps; ++i, a += kStepBytes, b += kStepBytes) {
        for (int64_t row_of = 0; row_of < kPrefetchLines; ++row_of, prefetch += kRowBytes)
            _mm_prefetch(prefetch, _MM_HINT_T1);
        _tile_loadd(6, b, kRowBytes);
        _tile_loadd(4, a, kRowBytes);
        _tile_loadd(7, b + kTileBytes, kRowBytes);
        _tile_loadd(5, a + kTileBytes, kRowBytes);
        if constexpr (sizeof(Value) == 2) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
}

INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

INLINE void store_sums(void* to, int64_t stride) {
    auto *c0 = static_cast<uint8_t*>(to), *c1 = c0 + 16 * stride;
    _tile_stored(0, c0, stride);
    _tile_stored(1, c0 + kRowBytes, stride);
    _tile_stored(2, c1, stride);
    _tile_stored(3, c1 + kRowBytes, stride);
}

#else

// Adds products of pairs to `Rows` rows of 32 sums, in registers. `a` is the first such row of its
// panel, `b` the first tile of its own.
template <int Rows>
INLINE void add_pairs(const uint8_t* a, const uint8_t* b, int64_t steps, float* c, int64_t stride,
                      bool first) {
    __m512 sums[Rows][2];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h)
            sums[r][h] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * stride + h * VL);
    for (int r = 0; r < Rows; ++r)  // the sums of the rows below, which come next
        for (int h = 0; h < 2; ++h) _mm_prefetch(c + (Rows + r) * stride + h * VL, _MM_HINT_T0);
    for (int64_t step = 0; step < steps; ++step, a += kStepBytes, b += kStepBytes) {
        for (int r = 0; r < Rows; ++r) _mm_prefetch(a + kStepBytes + r * kRowBytes, _MM_HINT_T0);
        for (int64_t word = 0; word < kRowBytes / 4; ++word) {
            _mm_prefetch(b + kStepBytes + word * kRowBytes, _MM_HINT_T0);
            _mm_prefetch(b + kStepBytes + kTileBytes + word * kRowBytes, _MM_HINT_T0);
            const auto b0 = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + word * kRowBytes));
            const auto b1 =
                reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + kTileBytes + word * kRowBytes));
#pragma GCC unroll 16
            for (int r = 0; r < Rows; ++r) {
                int32_t pair;
                std::memcpy(&pair, a + r * kRowBytes + word * 4, 4);
                const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, b0);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, b1);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) _mm512_storeu_ps(c + r * stride + h * VL, sums[r][h]);
}

#endif

}  // namespace
}  // namespace EXTENSOR_ISA
