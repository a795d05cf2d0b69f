// The loops around the tiles of a product of two block-scaled matrices (GotoBLAS: panels are
// packed, then multiplied from the caches), for all block_gemm_*.cpp.
#pragma once

#include "common/threads.hpp"
#include "matmul/blocked_matrix.hpp"

namespace EXTENSOR_ISA {
namespace {

using threads::scratch_of;
using threads::Slot;

constexpr int NV = 2, NR = NV * VL;        // columns of a tile: b's rows in one panel
constexpr int kMaxTileRows = 32;           // rows of any tile, at most
constexpr int64_t kPanelBytes = 24 << 20;  // packed at a time, of either side
constexpr int64_t kTasks = 8;              // a thread, where there is work for so many
constexpr int64_t kTaskWork = 1 << 18;     // multiply-adds of a task, eight more rows for packing

// Sizes of the loops.
struct Blocking {
    int64_t height;                  // rows of a tile
    int64_t row_bytes;               // of a packed row
    int64_t run;                     // along k, that a tile adds up at a time
    int64_t rows = 192, panels = 4;  // of one task: rows of a, panels of b at most
};

// Runs a tile of `rows` x NR results: in place where it lies wholly in the output, else through a
// buffer.
template <class Tile, class Run>
INLINE void on_output(Tile& t, float* out, int64_t stride, int64_t rows, int64_t columns,
                      int64_t height, Run run) {
    if (rows == height && columns == NR) {
        t.c = out, t.stride = stride;
        run(t);
        return;
    }
    float buffer[kMaxTileRows * NR];
    t.c = buffer, t.stride = NR;
    if (!t.first)
        for (int64_t r = 0; r < rows; ++r)
            std::memcpy(buffer + r * NR, out + r * stride, static_cast<size_t>(columns) * 4);
    run(t);
    for (int64_t r = 0; r < rows; ++r)
        std::memcpy(out + r * stride, buffer + r * NR, static_cast<size_t>(columns) * 4);
}

// Panels of b of one task, of `nn`: few enough for all threads to end together.
inline int64_t panels_of_task(int64_t rows, int64_t nn, int64_t row_tasks, int64_t k,
                              int64_t at_most) {
    const int64_t goal = ceil_div(kTasks * threads::get(), row_tasks);
    return least(at_most, most(ceil_div(kTaskWork, (rows + 8) * NR * k), nn / goal));
}

// The loops around the tiles of a b^T. A side has room for panels after allocate(panels), and packs
// the matrix's rows from `row` on by pack(panel, row). tile(b, panel of a, panel of b, start
// rows, columns, out) computes one tile. Panels are counted within what is packed at a time. Where
// only one task reads a panel of b, it packs the panel, which then stays in its cache.
//
// A Scope lives on the working thread around each task's tiles.
struct NoScope {};

template <class Scope = NoScope, class SideA, class SideB, class TileBody>
void product(const BlockGemm& g, const Blocking& by, SideA& a, SideB& b, TileBody tile) {
    const int64_t M = g.a.rows, N = g.b.rows, work = M * N * g.k;
    const int64_t height = by.height, fits = most(1, kPanelBytes / by.row_bytes);
    const int64_t a_panels = most(1, least(fits, M) / height),
                  b_panels = most(1, least(fits, N) / NR);
    const int64_t all_a = ceil_div(M, height), all_b = ceil_div(N, NR);
    a.allocate(least(a_panels + 1, all_a));
    const int64_t group_a = most(1, by.rows / height);
    const bool pack_in_task = all_a <= group_a;
    if (!pack_in_task) b.allocate(least(b_panels + 1, all_b));
    for (int64_t nb = 0; nb < all_b; nb += b_panels + 1) {
        const int64_t nn = least(b_panels + 1, all_b - nb);
        if (!pack_in_task) threads::run(nn, work, [&](int64_t p) { b.pack(p, (nb + p) * NR); });
        for (int64_t ma = 0; ma < all_a; ma += a_panels + 1) {
            const int64_t mm = least(a_panels + 1, all_a - ma);
            if (nb == 0 || all_a > a_panels + 1)
                threads::run(mm, work, [&](int64_t p) { a.pack(p, (ma + p) * height); });
            const int64_t row_tasks = ceil_div(mm, group_a);
            const int64_t group_b =
                panels_of_task(least(M, by.rows), nn, row_tasks, g.k, by.panels);
            const int64_t column_tasks = ceil_div(nn, group_b);
            threads::run(row_tasks * column_tasks, work, [&](int64_t task) {
                [[maybe_unused]] const Scope scope;
                const int64_t a0 = task / column_tasks * group_a,
                              b0 = task % column_tasks * group_b;
                const int64_t a1 = least(a0 + group_a, mm), b1 = least(b0 + group_b, nn);
                SideB mine = b;
                int64_t skipped = 0;  // panels of b before those of this task
                if (pack_in_task) {
                    skipped = b0;
                    mine.allocate(b1 - b0);
                    for (int64_t pb = b0; pb < b1; ++pb) mine.pack(pb - b0, (nb + pb) * NR);
                }
                for (int64_t start = 0; start < g.k; start += by.run) {
                    for (int64_t pb = b0; pb < b1; ++pb) {
                        for (int64_t pa = a0; pa < a1; ++pa) {
                            const int64_t row = (ma + pa) * height, column = (nb + pb) * NR;
                            tile(mine, pa, pb - skipped, start, least(height, M - row),
                                 least(NR, N - column), g.out + row * N + column);
                        }
                    }
                }
            });
        }
    }
    // In float64: neither factor alone may leave float32's range, and one rounding is enough.
    const double factor = static_cast<double>(g.a.tensor_scale) * g.b.tensor_scale;
    if (factor != 1)
        threads::run(M, M * N, [&](int64_t r) {
            for (int64_t i = 0; i < N; ++i)
                g.out[r * N + i] = static_cast<float>(g.out[r * N + i] * factor);
        });
}

}  // namespace
}  // namespace EXTENSOR_ISA
