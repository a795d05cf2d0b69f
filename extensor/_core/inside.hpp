// Block scales that need more of a block than its largest magnitude; see inside.cpp.
#pragma once

#include "quant.hpp"

namespace EXTENSOR_ISA {

// A Hadamard transform of the whole array, for scales that look inside of its blocks: valid until the
// next such call of this thread.
const float* rotated(const QuantPlan& plan, const QuantJob& job);

}  // namespace EXTENSOR_ISA
