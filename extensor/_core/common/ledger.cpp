#include "common/ledger.hpp"

#include <pybind11/numpy.h>

#include <cstdlib>
#include <mutex>
#include <vector>

namespace py = pybind11;

namespace ledger {

std::atomic<bool> on{false};

namespace {

struct Event {
    int64_t block, bytes;
};

// Never destroyed: arrays may be freed after this file's statics are gone.
struct Log {
    std::mutex mutex;
    std::vector<Event> events;
};
Log& events() {
    static Log* one = new Log;
    return *one;
}

// numpy's PyDataMem_Handler, as its C API documents it.
struct Allocator {
    void* context;
    void* (*malloc)(void*, size_t);
    void* (*calloc)(void*, size_t, size_t);
    void* (*realloc)(void*, void*, size_t);
    void (*free)(void*, void*, size_t);
};
struct Handler {
    char name[127];
    uint8_t version;
    Allocator allocator;
};

void* numpy_malloc(void*, size_t bytes) {
    void* block = std::malloc(bytes);
    if (block) taken(block, bytes);
    return block;
}
void* numpy_calloc(void*, size_t count, size_t size) {
    void* block = std::calloc(count, size);
    if (block) taken(block, count * size);
    return block;
}
void* numpy_realloc(void*, void* old, size_t bytes) {
    if (old) given_back(old);
    void* block = std::realloc(old, bytes);
    if (block) taken(block, bytes);
    return block;
}
void numpy_free(void*, void* block, size_t) {
    if (block) given_back(block);
    std::free(block);
}

Handler handler = {
    "extensor_ledger", 1, {nullptr, numpy_malloc, numpy_calloc, numpy_realloc, numpy_free}};

// PyDataMem_SetHandler of numpy's table of functions; returns the handler before.
py::object set_handler(py::object capsule) {
    constexpr int kSetHandler = 304;
    const py::object table = py::module_::import("numpy._core.multiarray").attr("_ARRAY_API");
    void** functions = static_cast<void**>(PyCapsule_GetPointer(table.ptr(), nullptr));
    if (!functions) throw py::error_already_set();
    auto* set = reinterpret_cast<PyObject* (*)(PyObject*)>(functions[kSetHandler]);
    PyObject* before = set(capsule.ptr());
    if (!before) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(before);
}

}  // namespace

void log(const void* block, int64_t bytes) {
    Log& l = events();
    std::lock_guard lock(l.mutex);
    l.events.push_back({static_cast<int64_t>(reinterpret_cast<intptr_t>(block)), bytes});
}

}  // namespace ledger

void bind_ledger(py::module_& m) {
    using namespace ledger;
    m.def(
        "ledger_start",
        [] {
            if (on.load()) throw std::runtime_error("the memory ledger is in use already");
            events().events.clear();
            py::object before =
                set_handler(py::capsule(&handler, "mem_handler", [](void*) noexcept {}));
            on = true;
            return before;
        },
        "Begin a log of blocks of arrays; gives what `ledger_stop` takes.");
    m.def(
        "ledger_stop",
        [](py::object before) {
            set_handler(before);
            on = false;
        },
        "End the log.");
    m.def(
        "ledger_mark",
        [](int64_t block, int64_t label) { log(reinterpret_cast<void*>(block), -2 - label); },
        "Note in the log that the block has a label, a number from 0 up.");
    m.def(
        "ledger_events",
        [] {
            Log& l = events();
            std::vector<Event> found;
            {
                std::lock_guard lock(l.mutex);
                found = l.events;
            }
            py::array_t<int64_t> out({static_cast<py::ssize_t>(found.size()), py::ssize_t{2}});
            std::copy(found.begin(), found.end(), reinterpret_cast<Event*>(out.mutable_data()));
            return out;
        },
        "The log, int64 (events, 2): block, and bytes taken, -1 given back, or -2 - label.");
}
