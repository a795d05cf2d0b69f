// The products' part of the Python module.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace gemm {

// Uses the best variant of instruction set `base` ("scalar", "avx2" or "avx512").
void use_best(const std::string& base);
void bind(pybind11::module_& m);

}  // namespace gemm
