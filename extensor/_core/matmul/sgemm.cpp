// Float32 matrix products of either layout, alone or in batches: blocking, threads and packing
// around the tiles of common/sgemm.hpp.

#include "common/sgemm.hpp"

#include "common/threads.hpp"
#include "matmul/kernels.hpp"

namespace EXTENSOR_ISA {
namespace {

constexpr int64_t kDepth = 384;    // of k at a time: a panel of B fits the level-1 cache
constexpr int64_t kWidth = 4096;   // columns of B packed at a time
constexpr int64_t kTaskTiles = 4;  // of rows
constexpr int64_t kTasks = 16;     // at least, where there are columns enough

// Rows of A whose distance is a multiple of this share cache sets, so such an A is packed.
constexpr int64_t kAlias = 1024;

void product(const Product& s) {
    const int64_t work = s.m * s.n * s.k / 8;
    if (!s.k) {
        for (int64_t i = 0; i < s.m; ++i)
            for (int64_t j = 0; j < s.n; ++j) s.c[i * s.ldc + j] = s.bias ? s.bias[j] : 0.0f;
    }
    for (int64_t left = 0; left < s.n; left += kWidth) {
        const int64_t width = least(kWidth, s.n - left), panels = panel_count(width);
        for (int64_t top = 0; top < s.k; top += kDepth) {
            const int64_t depth = least(kDepth, s.k - top);
            float* packed =
                threads::scratch_of<float>(threads::Slot::packed_b, packed_right(width, depth));
            const float* b = s.b + (s.b_transposed ? left * s.ldb + top : top * s.ldb + left);
            threads::run(panels, s.k * s.n, [=](int64_t p) {
                pack_panel(b, s.ldb, s.b_transposed, width, depth, p, packed + p * depth * kPanel);
            });
            const int64_t tiles = tile_count(s.m);
            const int64_t row_tasks = ceil_div(tiles, kTaskTiles);
            const int64_t column_tasks = most(1, least(panels / 2, ceil_div(kTasks, row_tasks)));
            threads::run(row_tasks * column_tasks, work, [=](int64_t task) {
                const int64_t i = s.m * (task / column_tasks) / row_tasks;
                const int64_t rows = s.m * (task / column_tasks + 1) / row_tasks - i;
                const int64_t j = panels * (task % column_tasks) / column_tasks * kPanel;
                const int64_t end = panels * (task % column_tasks + 1) / column_tasks * kPanel;
                Left a = {s.a + (s.a_transposed ? top * s.lda + i : i * s.lda + top), s.lda, 0,
                          !s.a_transposed};
                if (s.a_transposed || s.lda % kAlias == 0)
                    a = pack_left(a, rows, depth,
                                  threads::scratch_of<float>(threads::Slot::packed_a,
                                                             packed_left(rows, depth)));
                multiply(rows, least(end, width) - j, depth, a,
                         {packed + j * depth, kPanel, depth * kPanel},
                         Output{s.c, s.ldc, s.bias, top > 0}.at(i, left + j));
            });
        }
    }
}

// One product a task; B is read in place where its rows allow it.
void batch(const Product& s, int64_t count, const int64_t* at_a, const int64_t* at_b) {
    threads::run(count, count * s.m * s.n * s.k / 8, [=](int64_t index) {
        const float *a = s.a + at_a[index], *b = s.b + at_b[index];
        float* packed = threads::scratch_of<float>(threads::Slot::packed_b, packed_right(s.n, s.k));
        const Right right = !s.b_transposed && s.n % VL == 0
                                ? Right{b, s.ldb, kPanel}
                                : pack_right(b, s.ldb, s.b_transposed, s.n, s.k, packed);
        multiply(s.m, s.n, s.k, {a, s.lda, 0, !s.a_transposed}, right,
                 {s.c + index * s.m * s.n, s.ldc, s.bias});
    });
}

}  // namespace

extern const ProductKernels product_kernels = {product, batch};

}  // namespace EXTENSOR_ISA
