// Memory for result arrays, kept and used again: an allocator with a free list.
//
// A fresh array costs more in page faults than its contents cost to compute. Freed blocks of
// kMinBytes and more are therefore kept, the newest kKept bytes of them. Single blocks larger than
// kKept are kept too, the newest kReclaimable bytes of them, but marked so that the system may take
// their pages (MADV_FREE). Smaller arrays are numpy's own. Blocks are 64-byte aligned.
#pragma once

#include <pybind11/numpy.h>

#include <vector>

#include "common/ledger.hpp"

namespace buffers {

constexpr size_t kMinBytes = size_t{1} << 16;  // bytes
constexpr size_t kKept = size_t{1} << 28;
constexpr size_t kReclaimable = size_t{1} << 30;

void* allocate(size_t bytes);
void release(void* block);

// A C-contiguous array of `shape`, its contents undefined.
inline pybind11::array array(const pybind11::dtype& dtype,
                             const std::vector<pybind11::ssize_t>& shape) {
    size_t bytes = static_cast<size_t>(dtype.itemsize());
    for (pybind11::ssize_t n : shape) bytes *= static_cast<size_t>(n);
    if (bytes < kMinBytes) return pybind11::array(dtype, shape);
    void* block = allocate(bytes);
    ledger::taken(block, bytes);
    pybind11::capsule owner(block, [](void* freed) {
        ledger::given_back(freed);
        release(freed);
    });
    return pybind11::array(dtype, shape, block, owner);
}

template <class T>
pybind11::array_t<T, pybind11::array::c_style> array(const std::vector<pybind11::ssize_t>& shape) {
    return array(pybind11::dtype::of<T>(), shape);
}

}  // namespace buffers
