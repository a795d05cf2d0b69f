// A persistent thread pool for all kernels: run(tasks, body) calls body(task) once for every task.
//
// Any thread may run any task. A kernel must therefore give each task its own output; then results
// do not depend on the number of threads. The pool runs one job at a time: a second caller, or a
// caller with little work, runs its tasks itself.
#pragma once

#include <cstdint>

namespace threads {

using Body = void (*)(void* context, int64_t task);

// GOMP_parallel(body, context, threads, flags), the entry of GNU's OpenMP runtime.
using OpenMP = void (*)(void (*)(void*), void*, unsigned, unsigned);

void set(int count);
int get();
// Run jobs on the threads of an OpenMP runtime that another library uses too: idle threads of two
// pools wait by spinning, and take the cores from each other. A null pointer ends that.
void use_openmp(OpenMP parallel);
void run_raw(int64_t tasks, int64_t work, Body body, void* context);

// `work` is a rough number of elementary operations; small jobs stay on the calling thread.
template <class F>
void run(int64_t tasks, int64_t work, F&& body) {
    run_raw(tasks, work, [](void* f, int64_t task) { (*static_cast<F*>(f))(task); }, &body);
}

// 64-byte aligned memory of the calling thread, at least `bytes` long; each slot keeps its largest
// block for the next call. Contents are left over from earlier use.
// clang-format off
enum class Slot {
    values, scales, random, codes, partial, maxima, packed_a, packed_b, points, copied, bf16,
    prepared,
    // of the quantized convolutions, which call a quantizer that uses the ones above
    conv_padded, conv_lowered, conv_weights, conv_offsets, conv_patches, conv_values, conv_counts,
    conv_maxima, conv_gradients, conv_rows, conv_first,
    count,
    // of kernels that call no quantizer
    padded = values, lowered = scales, weights = random, offsets = codes,
    scales_a = codes, scales_b = random
};
// clang-format on
void* scratch(Slot slot, int64_t bytes);

template <class T>
T* scratch_of(Slot slot, int64_t count) {
    return static_cast<T*>(scratch(slot, count * static_cast<int64_t>(sizeof(T))));
}

}  // namespace threads
