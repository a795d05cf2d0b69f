// A small persistent thread pool: run(tasks, body) calls body(task) once for every task.
//
// Which thread runs a task is left open, so a kernel must give each task its own output; then
// results do not depend on the number of threads. One job at a time: a second caller, or a caller
// with little work, runs its tasks itself.
#pragma once

#include <cstdint>

namespace threads {

using Body = void (*)(void* context, int64_t task);

void set(int count);
int get();
void run_raw(int64_t tasks, int64_t work, Body body, void* context);

// `work` is a rough number of elementary operations; small jobs stay on the calling thread.
template <class F>
void run(int64_t tasks, int64_t work, F&& body) {
    run_raw(tasks, work, [](void* f, int64_t task) { (*static_cast<F*>(f))(task); }, &body);
}

}  // namespace threads
