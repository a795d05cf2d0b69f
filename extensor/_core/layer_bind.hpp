// The layer kernels' part of the Python module.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace layers {

// Uses the kernels of instruction set `level` ("scalar", "avx2" or "avx512").
void use(const std::string& level);
void bind(pybind11::module_& m);

}  // namespace layers
