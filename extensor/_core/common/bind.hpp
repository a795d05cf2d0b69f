// For every family's bind.cpp: array types, argument checks, and work without Python's lock (GIL).
//
// A kernel writes through raw pointers. Shapes are therefore checked here once more, although
// extensor.backends has done so.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/buffers.hpp"
#include "common/levels.hpp"

namespace py = pybind11;

template <class T>
using CArray = py::array_t<T, py::array::c_style>;
using Floats = CArray<float>;
using Bytes = CArray<uint8_t>;
using Shape = std::vector<py::ssize_t>;

inline void require(bool holds, const char* what) {
    if (!holds) throw py::value_error(what);
}

inline Shape shape_of(const py::array& x) { return {x.shape(), x.shape() + x.ndim()}; }

inline bool same_shape(const py::array& a, const py::array& b) {
    return shape_of(a) == shape_of(b);
}

inline int64_t product(const Shape& shape) {
    int64_t n = 1;
    for (py::ssize_t d : shape) n *= d;
    return n;
}

inline Floats like(const Floats& x) { return buffers::array<float>(shape_of(x)); }

// While it lives, other Python threads may run.
//
// Where the interpreter has ended meanwhile, Python before 3.14 ends a daemon thread that asks for
// the lock by unwinding its stack, and a destructor turns that into an abort. The thread waits
// instead until the process is gone, as Python 3.14's do.
class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }

private:
    PyThreadState* state_;
};

// kernel(), while other Python threads may run.
template <class Kernel>
auto without_gil(Kernel&& kernel) {
    WithoutGil released;
    return kernel();
}

void bind_matmul(py::module_& m);
void bind_quantize(py::module_& m);
void bind_conv_pool(py::module_& m);
void bind_nn(py::module_& m);
void bind_optim(py::module_& m);
void bind_reduction(py::module_& m);

void use_best_gemm_level();  // of the level in use
