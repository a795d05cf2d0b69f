// Result arrays on memory that is used again.
//
// A fresh array costs more in page faults than its contents cost to compute: 268 MB took 60 ms to
// touch for the first time, and 20 ms to write; a GPT's training step whose arrays have 0.4 MB spent
// a tenth of its time on 2,400 faults. Freed blocks of kLeast bytes and more are therefore kept, the
// newest kKept bytes of them, and handed out again; everything smaller is numpy's own. Single blocks
// larger than that are kept too, the newest kLent bytes of them, but lent to the system, which takes
// their pages when it needs memory. Blocks are 64-byte aligned.
#pragma once

#include <pybind11/numpy.h>

#include <vector>

namespace buffers {

constexpr size_t kLeast = size_t{1} << 16;  // bytes
constexpr size_t kKept = size_t{1} << 28;
constexpr size_t kLent = size_t{1} << 30;

void* take(size_t bytes);
void give_back(void* block);

// A C-contiguous array of `shape`, its contents undefined.
inline pybind11::array array(const pybind11::dtype& dtype,
                             const std::vector<pybind11::ssize_t>& shape) {
    size_t bytes = static_cast<size_t>(dtype.itemsize());
    for (pybind11::ssize_t n : shape) bytes *= static_cast<size_t>(n);
    if (bytes < kLeast) return pybind11::array(dtype, shape);
    void* block = take(bytes);
    pybind11::capsule owner(block, [](void* freed) { give_back(freed); });
    return pybind11::array(dtype, shape, block, owner);
}

template <class T>
pybind11::array_t<T, pybind11::array::c_style> array(const std::vector<pybind11::ssize_t>& shape) {
    return array(pybind11::dtype::of<T>(), shape);
}

}  // namespace buffers
