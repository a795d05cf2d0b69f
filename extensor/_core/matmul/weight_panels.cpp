// float32 rows times a block-scaled matrix (weight-only GEMM), any number of rows and any elements:
// weights are decoded into panels that stay in the cache, then multiplied as float32.
//
// The result has the bits of the float32 product (sgemm.cpp) with the decoded weights: every sum is
// one chain in the order of k.

#include "matmul/weight_panels.hpp"

#include "common/threads.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

constexpr int64_t kDepth = 384;    // of k at a time, a multiple of Packed::length
constexpr int64_t kGroup = 4;      // panels of a task: with a slice of x they fit the second cache
constexpr int64_t kRowChunk = 96;  // rows of x that pass over a task's panels at a time
constexpr int64_t kTasks = 4;      // a thread, at least, where there is work for so many
constexpr int64_t kAlias = 1024;   // rows of x so many floats apart share cache sets: packed
constexpr int64_t kPacked = 1 << 22;  // floats of x, packed at a time

using Decode = void (*)(const Weights&, const uint8_t* const*, int64_t, int64_t, const PanelScales&,
                        float*);

template <int Bits, Offset Kind>
void decode(const Weights& s, const uint8_t* const* rows, int64_t start, int64_t end,
            const PanelScales& by, float* to) {
    const Element& e = kElements[s.g.w.element];
    if constexpr (Bits == 4) {
        decode_panel<4, Kind>(Table16(s.table), rows, start, end, by, to);
    } else if (!e.is_float) {
        const IntegerCodes<Bits> values(e, Kind == Offset::minimum);
        decode_panel<Bits, Kind>(values, rows, start, end, by, to);
    } else if constexpr (Bits == 8) {
        decode_panel<8, Offset::none>(FloatCodes(e), rows, start, end, by, to);
    } else if constexpr (Bits == 6) {
#if defined(__AVX512F__)
        decode_panel<6, Offset::none>(FloatCodes6(s.table), rows, start, end, by, to);
#else
        decode_panel<6, Offset::none>(FloatCodes(e), rows, start, end, by, to);
#endif
    }
}

template <int Bits>
Decode choose_decode(Offset offset) {
    return offset == Offset::none   ? decode<Bits, Offset::none>
           : offset == Offset::zero ? decode<Bits, Offset::zero>
                                    : decode<Bits, Offset::minimum>;
}

// Weights of kPanel rows from `first` on, elements top .. top + depth, as a panel.
void make_panel(const Weights& s, Decode decode, int64_t first, int64_t top, int64_t depth,
                float* to) {
    const BlockedMatrix& w = s.g.w;
    const int64_t tile = top / w.tile_length;
    const int64_t tiles = ceil_div(top + depth, w.tile_length) - tile, stride = tiles + VL;
    float* by_row = scratch_of<float>(Slot::scales, VL * (stride + 2 * tiles));
    float *scale = by_row + VL * stride, *offset = scale + VL * tiles;
    for (int half = 0; half < kPanel; half += VL) {
        const uint8_t* rows[VL];
        for (int r = 0; r < VL; ++r) {
            const int64_t row = least(first + half + r, w.rows - 1);  // beyond: not stored
            rows[r] = w.codes + row * w.row_bytes;
            s.decode_scales(row, tile, tiles, by_row + r * stride);
        }
        pack_transposed(by_row, stride, VL, tiles, scale, VL);
        if (offset_of(w) != Offset::none) {
            for (int r = 0; r < VL; ++r)
                s.decode_offsets(least(first + half + r, w.rows - 1), tile, tiles,
                                 by_row + r * stride);
            pack_transposed(by_row, stride, VL, tiles, offset, VL);
        }
        decode(s, rows, top, top + depth, {scale, offset, w.tensor_scale, w.tile_length},
               to + half);
    }
}

// All rows of x, or as many as are packed at a time.
void multiply_rows(const Weights& s, Decode decode, const float* x, int64_t m, float* out) {
    const int64_t n = s.g.w.rows, k = s.g.k, slices = ceil_div(k, kDepth);
    const int64_t chunks = ceil_div(m, kRowChunk), packed_chunk = packed_left(kRowChunk, kDepth);
    const auto chunk_row = [=](int64_t c) { return m * c / chunks; };
    float* packed = nullptr;
    if (k % kAlias == 0 && m > 1) {
        packed = scratch_of<float>(Slot::packed_a, slices * chunks * packed_chunk);
        threads::run(slices * chunks, m * k, [=](int64_t i) {
            const int64_t row = chunk_row(i % chunks), top = i / chunks * kDepth;
            pack_left({x + row * k + top, k, 0, true}, chunk_row(i % chunks + 1) - row,
                      least(kDepth, k - top), packed + i * packed_chunk);
        });
    }
    const int64_t panels = panel_count(n), goal = kTasks * threads::get();
    const int64_t group = most(1, least(kGroup, panels / goal)), groups = ceil_div(panels, group);
    const int64_t row_tasks = most(1, least(chunks, goal / groups));
    threads::run(groups * row_tasks, n * k * (m + 8) / 8, [=, &s](int64_t task) {
        const int64_t p0 = task / row_tasks * group, p1 = least(panels, p0 + group);
        const int64_t c0 = chunks * (task % row_tasks) / row_tasks;
        const int64_t c1 = chunks * (task % row_tasks + 1) / row_tasks;
        const int64_t step = kPanel * kDepth, columns = least(n, p1 * kPanel) - p0 * kPanel;
        float* made = scratch_of<float>(Slot::packed_b, (p1 - p0) * step);
        for (int64_t slice = 0; slice < slices; ++slice) {
            const int64_t top = slice * kDepth, depth = least(kDepth, k - top);
            for (int64_t p = p0; p < p1; ++p)
                make_panel(s, decode, p * kPanel, top, depth, made + (p - p0) * step);
            for (int64_t c = c0; c < c1; ++c) {
                const int64_t row = chunk_row(c);
                const Left a = packed ? Left{packed + (slice * chunks + c) * packed_chunk,
                                             kTileRows, kTileRows * depth, false}
                                      : Left{x + row * k + top, k, 0, true};
                multiply(chunk_row(c + 1) - row, columns, depth, a, {made, kPanel, step},
                         Output{out, n, nullptr, slice > 0}.at(row, p0 * kPanel));
            }
        }
    });
}

}  // namespace

void weight_panel_product(const WeightGemm& g) {
    Weights s(g);
    s.unit = 1;
    const int bits = kElements[g.w.element].bits;
    const Offset offset = offset_of(g.w);
    const Decode decode = bits == 4   ? choose_decode<4>(offset)
                          : bits == 5 ? choose_decode<5>(offset)
                          : bits == 6 ? choose_decode<6>(offset)
                                      : choose_decode<8>(offset);
    const int64_t most_rows = most(kRowChunk, kPacked / g.k);
    for (int64_t row = 0; row < g.m; row += most_rows)
        multiply_rows(s, decode, g.x + row * g.k, least(most_rows, g.m - row),
                      g.out + row * g.w.rows);
}

}  // namespace EXTENSOR_ISA
