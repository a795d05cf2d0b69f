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

constexpr int64_t kFew = 8;  // rows of A up to which B is read once, where it lies

// R rows of A times VL columns of a transposed B, which are rows of its memory: they are transposed
// in registers, VL elements at a time. A lane is one chain in the order of k, as in other products.
template <int R>
void few_rows(const Product& s, int64_t column) {
    const float* b = s.b + column * s.ldb;
    const int64_t columns = least(VL, s.n - column);
    vf sums[R];
    for (int i = 0; i < R; ++i)
        sums[i] = s.bias ? load_at(s.bias + column, 0, columns) : splat(0.0f);
    const float* rows[VL];
    for (int r = 0; r < VL; ++r) rows[r] = b + least(r, columns - 1) * s.ldb;
    const auto add = [&](int64_t top, int64_t depth) __attribute__((always_inline)) {
        vf v[VL];
#pragma GCC unroll 16
        for (int r = 0; r < VL; ++r) {
            __builtin_prefetch(rows[r] + VL * s.ldb + top, 0, 2);  // of the next columns
            v[r] = depth == VL ? load(rows[r] + top) : load_at(rows[r], top, s.k);
        }
        transpose(v);
        const float* a = s.a + top;
#pragma GCC unroll 16
        for (int64_t k = 0; k < depth; ++k)
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i)
                sums[i] = multiply_add(splat(a[i * s.lda + k]), v[k], sums[i]);
    };
    int64_t top = 0;
    for (; top + VL <= s.k; top += VL) add(top, VL);
    if (top < s.k) add(top, s.k - top);
    for (int i = 0; i < R; ++i) store_at(s.c + i * s.ldc + column, sums[i], 0, columns);
}

template <int... R>
void few_rows(const Product& s, std::integer_sequence<int, R...>) {
    constexpr void (*kernels[])(const Product&, int64_t) = {few_rows<R + 1>...};
    const int64_t groups = ceil_div(s.n, VL), tasks = least(groups, kTasks * threads::get());
    threads::run(tasks, s.n * s.k, [&](int64_t task) {
        for (int64_t g = groups * task / tasks; g < groups * (task + 1) / tasks; ++g)
            kernels[s.m - 1](s, g * VL);
    });
}

void product(const Product& s) {
    if (s.m <= kFew && s.b_transposed && !s.a_transposed && s.m && s.n)
        return few_rows(s, std::make_integer_sequence<int, kFew>{});
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
