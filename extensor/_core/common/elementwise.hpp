// Loops over the elements and the rows of arrays: segments of them as tasks, vectors at their ends.
#pragma once

#include "common/simd.hpp"
#include "common/threads.hpp"

namespace EXTENSOR_ISA {

constexpr int64_t kSegment = 1 << 14;  // elements of a task

// The VL elements at i, zeros beyond n.
INLINE vf load_at(const float* p, int64_t i, int64_t n) {
    return i + VL <= n ? load(p + i) : load_part(p + i, static_cast<int>(n - i));
}

INLINE void store_at(float* p, vf v, int64_t i, int64_t n) {
    if (i + VL <= n)
        store(p + i, v);
    else
        store_part(p + i, v, static_cast<int>(n - i));
}

// body(i, end) for every segment of n elements.
template <class F>
void for_segments(int64_t n, int64_t work, F&& body) {
    threads::run(ceil_div(n, kSegment), n * work,
                 [&](int64_t task) { body(task * kSegment, least(n, (task + 1) * kSegment)); });
}

// body(row) for every row of length n, several rows a task, and several tasks a thread.
template <class F>
void for_rows(int64_t rows, int64_t n, int64_t work, F&& body) {
    const int64_t per_task = most(1, kSegment / 4 / n);
    threads::run(ceil_div(rows, per_task), rows * n * work, [&](int64_t task) {
        const int64_t end = least(rows, (task + 1) * per_task);
        for (int64_t row = task * per_task; row < end; ++row) body(row);
    });
}

}  // namespace EXTENSOR_ISA
