// A log of the memory that arrays take: numpy's through its allocation handler (NEP 49), the core's
// own through `buffers`. Off, it costs one relaxed load for each block of the core.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>

namespace ledger {

extern std::atomic<bool> on;

void log(const void* block, int64_t bytes);  // bytes taken; -1: given back; below: see mark

inline void taken(const void* block, size_t bytes) {
    if (on.load(std::memory_order_relaxed)) log(block, static_cast<int64_t>(bytes));
}
inline void given_back(const void* block) {
    if (on.load(std::memory_order_relaxed)) log(block, -1);
}

}  // namespace ledger

void bind_ledger(pybind11::module_& m);
