// Float32 products and attention: their part of the Python module.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace sgemm {

// Uses the kernels of an instruction set ("scalar", "avx2" or "avx512").
void use(const std::string& level);
void bind(pybind11::module_& m);

}  // namespace sgemm
