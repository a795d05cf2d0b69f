// Elementwise loops: stretches of elements as tasks, vectors at the ends of arrays.
#pragma once

#include "simd.hpp"
#include "threads.hpp"

namespace EXTENSOR_ISA {

constexpr int64_t kStretch = 1 << 14;  // elements of a task

// The VL elements at i, zeros beyond n.
INLINE vf take(const float* p, int64_t i, int64_t n) {
    return i + VL <= n ? load(p + i) : load_part(p + i, static_cast<int>(n - i));
}

INLINE void put(float* p, vf v, int64_t i, int64_t n) {
    if (i + VL <= n)
        store(p + i, v);
    else
        store_part(p + i, v, static_cast<int>(n - i));
}

// body(i, end) for every stretch of n elements.
template <class F>
void stretches(int64_t n, int64_t work, F&& body) {
    threads::run(ceil_div(n, kStretch), n * work, [&](int64_t task) {
        body(task * kStretch, least(n, (task + 1) * kStretch));
    });
}

}  // namespace EXTENSOR_ISA
