// The Python module extensor._core._kernels: the choice of instruction set, and all families'
// bindings.

#include "common/bind.hpp"
#include "common/launch_list.hpp"
#include "common/ledger.hpp"
#include "common/replay.hpp"
#include "common/threads.hpp"

namespace {

std::vector<std::string> level_names() {
    return {levels::kNames, levels::kNames + levels::count()};
}

void set_level(const std::string& name) {
    std::string known;
    for (int i = 0; i < levels::count(); ++i) {
        if (name == levels::kNames[i]) {
            levels::current = i;
            return use_best_gemm_level();
        }
        known += std::string(i ? ", " : "") + levels::kNames[i];
    }
    throw py::value_error("set_level: expected one of " + known + ", got " + name);
}

}  // namespace

PYBIND11_MODULE(_kernels, m) {
    m.doc() = "extensor's C++ core";
    m.def("levels", level_names, "Instruction sets this build and this CPU have, best last.");
    m.def("level", [] { return levels::kNames[levels::current]; }, "The instruction set in use.");
    m.def("set_level", set_level, "Use another of `levels`.");
    m.def("threads", threads::get, "Number of threads.");
    m.def("set_threads", threads::set, "Use that many threads.");
    py::class_<Replay>(m, "Replay", "Calls of kernels, made again without Python.")
        .def(py::init())
        .def("record", &Replay::record)
        .def("extend", &Replay::extend)
        .def("__call__", &Replay::run)
        .def("__len__", &Replay::size)
        .def_readonly("reads", &Replay::reads_)
        .def_readonly("writes", &Replay::writes_);
    using Pointer = std::tuple<size_t, size_t, size_t, uint64_t, bool>;
    py::class_<LaunchList>(m, "LaunchList", "Launches of CUDA kernels, made again by one call.")
        .def(py::init<uintptr_t, uintptr_t>())
        .def("add",
             [](LaunchList& list, uintptr_t function, std::array<unsigned, 3> sizes,
                bool cooperative, const std::vector<std::string>& parameters,
                const std::vector<Pointer>& pointers) {
                 std::vector<LaunchList::Pointer> held;
                 for (const auto& [parameter, offset, array, behind, map] : pointers)
                     held.push_back({parameter, offset, array, behind, map});
                 list.add(function, sizes, cooperative, parameters, held);
             })
        .def("__call__", &LaunchList::run)
        .def("__len__", &LaunchList::size);
    m.def(
        "use_openmp",
        [](uintptr_t parallel) {
            threads::use_openmp(reinterpret_cast<threads::OpenMP>(parallel));
        },
        "Use the threads of the OpenMP runtime whose GOMP_parallel is at this address; 0: none.");
    bind_quantize(m);
    bind_matmul(m);
    bind_conv_pool(m);
    bind_nn(m);
    bind_optim(m);
    bind_reduction(m);
    bind_ledger(m);
}
