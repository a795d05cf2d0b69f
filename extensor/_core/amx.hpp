// What the products on AMX tiles share: panels of tiles, made of a source of values, and the loop over
// their steps. A tile is 16 lines of 64 bytes, 32 bfloat16 or 64 int8 along k.
#pragma once

#include "gemm_loops.hpp"

namespace EXTENSOR_ISA {
namespace {

static_assert(VL == 16);
constexpr int64_t kLineBytes = 64, kTileBytes = 16 * kLineBytes;
constexpr int64_t kStepBytes = 2 * kTileBytes;  // of a panel: two tiles
constexpr int kHeight = 32;                     // rows of a, and of b, in a panel
static_assert(kHeight == NR && kHeight <= kTallest);

// A task's rows of a, a run of them, stay in L2 while b streams through it from L3: of b's next
// panel a few lines are asked for at every step of this one.
constexpr int64_t kTaskBytes = 512 << 10, kTaskRows = 256, kTaskPanels = 64;
constexpr int64_t kParts = kTaskRows / kHeight, kAhead = kStepBytes / kLineBytes / kParts;

// Rows of a task whose runs have `bytes` a row.
inline int64_t task_rows(int64_t bytes) {
    return least(kTaskRows, most(kHeight, kTaskBytes / bytes));
}

// Sixteen lines of sixteen words of four bytes, either way round.
void transpose(const void* lines, void* to) {
    const __m512i line = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_set1_epi32(16));
    const auto* from = static_cast<const int32_t*>(lines);
    auto* out = static_cast<uint8_t*>(to);
    for (int64_t word = 0; word < 16; ++word)
        _mm512_storeu_si512(out + word * kLineBytes, _mm512_i32gather_epi32(line, from + word, 4));
}

// One side: [panel][step along k][two tiles]. A line of a tile is a row of the matrix in a's, and in
// b's (`turned`) one word along k of sixteen rows one after another. A Source has a type of Value,
// `rows`, says whether its tiles are turned, and makes one: 16 rows from `row`, a line along k from
// `start`, zeros outside the matrix.
template <class Source>
struct Side {
    using Value = typename Source::Value;
    static constexpr int64_t kAlong = kLineBytes / static_cast<int64_t>(sizeof(Value));
    static constexpr int64_t kValues = 16 * kAlong;

    const Source& source;
    bool turned;
    int64_t steps, panels = 0;
    Value* values = nullptr;

    Side(const Source& source, int64_t k, bool turned)
        : source(source), turned(turned), steps(ceil_div(k, kAlong)) {}

    int64_t row_bytes() const { return steps * kLineBytes; }

    void allocate(Slot slot, int64_t count) {
        panels = count;
        values = scratch_of<Value>(slot, panels * steps * 2 * kValues);
    }

    // A panel from `step` on.
    const Value* from(int64_t panel, int64_t step) const {
        return values + (panel * steps + step) * 2 * kValues;
    }

    void pack(int64_t panel, int64_t first) const {
        Value* to = values + panel * steps * 2 * kValues;
        alignas(64) Value lines[kValues];
        for (int64_t step = 0; step < steps; ++step) {
            for (int64_t half = 0; half < 2; ++half, to += kValues) {
                const int64_t row = first + half * 16, start = step * kAlong;
                if (row >= source.rows) {
                    std::memset(to, 0, kTileBytes);
                } else if (turned == source.turned) {
                    source.tile(row, start, to);
                } else {
                    source.tile(row, start, lines);
                    transpose(lines, to);
                }
            }
        }
    }
};

// The calling thread's tile registers: eight.
struct Tiles {
    Tiles() {
        alignas(64) uint8_t config[64] = {};
        config[0] = 1;  // palette
        for (int i = 0; i < 8; ++i) config[16 + 2 * i] = kLineBytes, config[48 + i] = 16;
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
};

// Of one visit to 32 x 32 sums: what is multiplied, and what is asked for meanwhile.
struct Visit {
    const void *a, *b, *ahead;
    int64_t steps;
    float* c;
    int64_t stride;
    bool first;
};

template <class Source>
Visit visit(const Side<Source>& a, const Side<Source>& b, int64_t pa, int64_t pb, int64_t start,
            int64_t run) {
    const int64_t at = start / a.kAlong;
    Visit v;
    v.steps = least(run / a.kAlong, a.steps - at), v.first = start == 0;
    v.a = a.from(pa, at), v.b = b.from(pb, at);
    v.ahead = reinterpret_cast<const uint8_t*>(b.from(least(pb + 1, b.panels - 1), at)) +
              pa % kParts * v.steps * kAhead * kLineBytes;
    return v;
}

// Products added to the sums in tiles 0 to 3; a's tiles are 4 and 5, b's 6 and 7.
template <class Value>
INLINE void add_products(const Visit& v) {
    const auto *a = static_cast<const uint8_t*>(v.a), *b = static_cast<const uint8_t*>(v.b);
    const auto* ahead = static_cast<const char*>(v.ahead);
    for (int64_t i = 0; i < v.steps; ++i, a += kStepBytes, b += kStepBytes) {
        for (int64_t line = 0; line < kAhead; ++line, ahead += kLineBytes)
            _mm_prefetch(ahead, _MM_HINT_T1);
        _tile_loadd(6, b, kLineBytes);
        _tile_loadd(4, a, kLineBytes);
        _tile_loadd(7, b + kTileBytes, kLineBytes);
        _tile_loadd(5, a + kTileBytes, kLineBytes);
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
    _tile_stored(1, c0 + kLineBytes, stride);
    _tile_stored(2, c1, stride);
    _tile_stored(3, c1 + kLineBytes, stride);
}

}  // namespace
}  // namespace EXTENSOR_ISA
